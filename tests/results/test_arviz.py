"""ArviZ of either major version: groups and their contents."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gaussian_posteriors import (
    NOISE,
    constrained,
    constrained_posterior,
    exact_regression,
    flat,
    posterior_of,
    regression_data,
)
from numpyro.infer import log_likelihood
from numpyro.infer.util import potential_energy
from scipy import stats

from numpyro_rvga import RVGA

az = pytest.importorskip("arviz")
OUTCOME = np.array([0.1, 0.4, -0.3])


def group_names(converted):
    return (
        {str(name).strip("/") for name in getattr(converted, "groups", ()) if name != "/"}
        if not callable(converted.groups)
        else set(converted.groups())
    )


@pytest.fixture(scope="module")
def posterior():
    return constrained_posterior()


@pytest.fixture(scope="module")
def converted(posterior):
    return posterior.to_arviz({"y": OUTCOME}, num_samples=50)


# ---------------------------------------------------------------------- groups
def test_groups_without_data(posterior):
    converted = posterior.to_arviz(num_samples=10)
    assert group_names(converted) == {"posterior", "sample_stats"}
    assert set(converted["sample_stats"].data_vars) == {"log_q"}
    assert {name: v.shape for name, v in converted["posterior"].data_vars.items()} == {
        "shift": (1, 10, 2),
        "share": (1, 10),
        "deviation": (1, 10),
        "twice": (1, 10),
    }


def test_groups_with_data():
    data = regression_data(num_rows=6)
    converted = exact_regression(data).to_arviz(data, num_samples=10)
    contents = {
        "posterior": {"slopes", "intercept", "slope_sum"},
        "sample_stats": {"log_q", "log_p"},
        "log_likelihood": {"y"},
        "posterior_predictive": {"y", "line"},
        "observed_data": {"y"},
        "constant_data": {"X"},
    }
    assert group_names(converted) == set(contents)
    for group, names in contents.items():
        assert set(converted[group].data_vars) == names
    for group in ("log_likelihood", "posterior_predictive"):
        assert converted[group]["y"].dims == ("chain", "draw", "rows")
        assert converted[group]["y"].shape == (1, 10, 6)
    assert converted["constant_data"]["X"].dims[0] == "rows"
    np.testing.assert_allclose(converted["constant_data"]["X"], data["X"], rtol=1e-6)
    np.testing.assert_allclose(converted["observed_data"]["y"], data["y"], rtol=1e-6)
    assert converted["posterior"].attrs["inference_library"] == "numpyro_rvga"


def test_log_p_is_numpyros_log_joint_and_log_q_the_density_of_q(posterior, converted):
    draws = {name: np.asarray(v)[0] for name, v in converted["posterior"].data_vars.items()}
    theta = flat(draws)
    sites = {"shift": theta[:, :2], "share": theta[:, 2], "deviation": theta[:, 3]}
    potential = jax.jit(jax.vmap(lambda values: potential_energy(constrained, (jnp.asarray(OUTCOME),), {}, values)))
    log_joint = -potential(sites)
    np.testing.assert_allclose(converted["sample_stats"]["log_p"][0], log_joint, rtol=1e-4, atol=1e-3)
    log_q = stats.multivariate_normal(posterior.mean, posterior.covariance).logpdf(theta)
    np.testing.assert_allclose(converted["sample_stats"]["log_q"][0], log_q, atol=2e-3)


def test_log_likelihood_is_numpyros(posterior, converted):
    draws = {name: jnp.asarray(converted["posterior"][name])[0] for name in posterior.site_names}
    expected = log_likelihood(constrained, draws, jnp.asarray(OUTCOME))["y"]
    np.testing.assert_allclose(converted["log_likelihood"]["y"][0], expected, rtol=1e-4, atol=1e-4)


def outputs(x, y=None):
    """Rows are the last plate, so that they do not come first; and factors that are no observations."""
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.factor("of_the_prior", -0.1 * slope.sum() ** 2)
    with numpyro.plate("rows", x.shape[0], dim=-1):
        numpyro.factor("of_each_row", -0.01 * slope[0] ** 2 * x)
        with numpyro.plate("outputs", 2, dim=-2), numpyro.handlers.scale(scale=3.0):
            numpyro.sample("y", dist.Normal(slope[:, None] * x, 1.0), obs=None if y is None else y.T)


def test_plates_name_dimensions_and_factors_are_no_observations():
    x, y = np.arange(1.0, 5.0), np.random.default_rng(0).normal(size=(4, 2))
    posterior = posterior_of(outputs, {"x": x, "y": y}, np.array([0.2, -0.4]), 0.1 * np.eye(2))
    with pytest.warns(UserWarning, match=r"What numpyro.factor adds for each row \('of_each_row'\) is left out"):
        converted = posterior.to_arviz({"x": x, "y": y}, num_samples=5)
    slopes = np.asarray(converted["posterior"]["slope"])[0]
    terms = 3 * stats.norm.logpdf(y.T, slopes[:, :, None] * x)
    assert set(converted["log_likelihood"].data_vars) == {"y"}
    assert converted["log_likelihood"]["y"].dims == ("chain", "draw", "outputs", "rows")
    np.testing.assert_allclose(converted["log_likelihood"]["y"][0], terms, rtol=1e-4)
    assert converted["posterior_predictive"]["y"].dims == ("chain", "draw", "outputs", "rows")
    assert converted["observed_data"]["y"].dims == ("outputs", "rows")
    np.testing.assert_allclose(converted["observed_data"]["y"], y.T, rtol=1e-6)
    factors = -0.1 * slopes.sum(1) ** 2 - 0.01 * slopes[:, 0] ** 2 * x.sum()
    log_p = stats.norm.logpdf(slopes).sum(1) + factors + terms.sum((1, 2))
    np.testing.assert_allclose(converted["sample_stats"]["log_p"][0], log_p, rtol=1e-4)


def latent_of_each_row(noise, y=None):
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(noise)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        level = numpyro.deterministic("level", mu + 2.0 * z)
        numpyro.sample("y", dist.Normal(level, noise), obs=y)


def test_latent_sites_of_rows_and_what_follows_from_them_are_in_the_posterior():
    data = {"noise": np.array([0.5, 1.0, 2.0, 1.0]), "y": np.array([6.0, -3.0, 1.0, 2.0])}
    posterior = RVGA(latent_of_each_row, local="marginal").run(data, progress_bar=False)
    converted = posterior.to_arviz(data, num_samples=4000)
    design = np.concatenate([np.ones((4, 1)), 2.0 * np.eye(4)], axis=1)  # of the rows, in mu and z
    precision = np.diag([0.25, 1, 1, 1, 1]) + design.T @ np.diag(data["noise"] ** -2) @ design
    levels = design @ np.linalg.solve(precision, design.T @ (data["y"] / data["noise"] ** 2))
    np.testing.assert_allclose(converted["posterior"]["level"].mean(("chain", "draw")), levels, atol=0.1)
    np.testing.assert_allclose(converted["posterior_predictive"]["y"].mean(("chain", "draw")), levels, atol=0.2)
    assert set(converted["posterior"].data_vars) == {"mu", "z", "level"}
    assert set(converted["posterior_predictive"].data_vars) == {"y"}
    assert set(posterior.sample_posterior(jax.random.key(0), (3,), data)) == {"mu", "z", "level"}


def test_the_users_dimensions_and_coordinates_win(posterior):
    converted = posterior.to_arviz(
        {"y": OUTCOME},
        num_samples=5,
        coords={"axis": ["north", "east"], "day": [7, 8, 9]},
        dims={"shift": ["axis"], "y": ["day"]},
    )
    assert converted["posterior"]["shift"].dims == ("chain", "draw", "axis")
    assert list(converted["posterior"]["axis"].values) == ["north", "east"]
    assert converted["log_likelihood"]["y"].dims == ("chain", "draw", "day")


@pytest.mark.parametrize(
    "labels, message",
    [
        ({"coords": {"shift_dim_o": ["a", "b"]}}, "coords has a key 'shift_dim_o'.*dimensions are.*rows.*shift_dim_0"),
        ({"coords": {"shift_dim_1": ["a", "b"]}}, "coords has a key 'shift_dim_1'"),
        (
            {"dims": {"shfit": ["axis"]}},
            "dims has a key 'shfit'.*variables are deviation, log_p, log_q, share, shift, ",
        ),
    ],
)
def test_names_that_do_not_exist_are_refused(posterior, labels, message):
    with pytest.raises(ValueError, match=message):
        posterior.to_arviz({"y": OUTCOME}, num_samples=5, **labels)


def test_names_of_what_needs_data_are_known_without():
    posterior = exact_regression(regression_data())
    converted = posterior.to_arviz(num_samples=5, coords={"rows": [1, 2]}, dims={"X": ["rows", "columns"]})
    assert group_names(converted) == {"posterior", "sample_stats"}


def test_an_array_with_the_plates_name_stays_an_array():
    def model(rows, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", rows.shape[0]):
            numpyro.sample("y", dist.Normal(slope * rows, 1.0), obs=y)

    data = {"rows": np.array([3.0, 1.0]), "y": np.ones(2)}
    converted = posterior_of(model, data, np.zeros(1), np.eye(1)).to_arviz(data, num_samples=5)
    np.testing.assert_allclose(converted["constant_data"]["rows"], data["rows"])
    assert "rows" in converted["constant_data"].data_vars


def counts(x, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + 0.1 * x)), obs=y)


def with_gaps(x, y):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(level + x, 1.0).mask(~np.isnan(y)), obs=y)


def of_columns(x, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    with numpyro.plate("columns", 3, dim=-2), numpyro.plate("rows", len(x), dim=-1):
        numpyro.sample("y", dist.Normal(level[:, None] + x, 1.0), obs=None if y is None else y.T)


Y = np.random.default_rng(0).poisson(2.0, size=20)


@pytest.mark.parametrize(
    "model, x, y",
    [
        (counts, Y + 0.4, Y),
        (with_gaps, np.arange(20.0), np.where(Y == 1, np.nan, Y)),
        (of_columns, np.arange(20.0), Y[:, None] + np.arange(3.0)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_constant_data_are_the_arrays_that_are_no_outcomes(model, x, y):
    converted = RVGA(model).run({"x": x, "y": y}, progress_bar=False).to_arviz({"x": x, "y": y}, num_samples=5)
    assert set(converted["constant_data"].data_vars) == {"x"}
    np.testing.assert_allclose(converted["constant_data"]["x"], x)
    np.testing.assert_allclose(converted["observed_data"]["y"], y.T)


def test_an_array_of_a_sites_name_has_its_own_shape():
    def model(x, y=None):
        of_columns(x, None if y is None else jnp.log(y))

    data = {"x": np.arange(20.0), "y": np.exp(Y[:, None] + np.arange(3.0))}
    converted = RVGA(model).run(data, progress_bar=False).to_arviz(data, num_samples=5)
    np.testing.assert_allclose(converted["constant_data"]["y"], data["y"])
    np.testing.assert_allclose(converted["observed_data"]["y"], np.log(data["y"]).T)
    assert converted["constant_data"]["x"].dims == ("rows",)


def test_loo_is_the_exact_one_of_the_conjugate_model():
    data = regression_data(num_rows=30)
    converted = exact_regression(data).to_arviz(data, num_samples=4000)
    result = az.loo(converted)
    design = np.column_stack([data["X"], np.ones(30)])
    prior_covariance = design @ np.diag([4.0, 4.0, 9.0]) @ design.T + NOISE**2 * np.eye(30)
    precision = np.linalg.inv(prior_covariance)
    residual = precision @ (data["y"] - design @ [0.0, 0.0, 1.0])
    variance = 1 / np.diagonal(precision)
    exact = stats.norm.logpdf(residual * variance, scale=np.sqrt(variance)).sum()
    found = result.elpd_loo if hasattr(result, "elpd_loo") else result.elpd
    assert found == pytest.approx(exact, abs=0.3)
    if hasattr(az, "loo_approximate_posterior"):
        statistics = converted["sample_stats"]
        corrected = az.loo_approximate_posterior(converted, statistics["log_p"], statistics["log_q"])
        assert corrected.elpd == pytest.approx(exact, abs=0.3)


def test_draws_follow_the_key(posterior):
    first, same, other = (posterior.to_arviz(rng_key=jax.random.key(k), num_samples=4) for k in (1, 1, 2))
    np.testing.assert_array_equal(first["posterior"]["share"], same["posterior"]["share"])
    assert not np.any(np.asarray(first["posterior"]["share"]) == np.asarray(other["posterior"]["share"]))


# ---------------------------------------------------------------------- errors
@pytest.mark.parametrize("method", ["to_arviz", "khat"])
def test_missing_outcomes_are_not_made_up(method):
    data = regression_data()
    with pytest.raises(ValueError, match="lack the outcome of site 'y'"):
        getattr(exact_regression(data), method)({"X": data["X"]})


def test_missing_arviz_is_named(monkeypatch):
    data = regression_data()
    posterior = exact_regression(data)
    monkeypatch.setitem(sys.modules, "arviz", None)
    with pytest.raises(ImportError, match="pip install arviz"):
        posterior.to_arviz(data)
