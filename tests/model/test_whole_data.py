"""Models that take all their data at once are accepted as their authors write them, and solved for jointly."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan

from numpyro_rvga import RVGA, FixedPointVI

RNG = np.random.default_rng(3)
X = RNG.normal(size=24) + 2.0
Y = 1.0 + 0.5 * X + 0.6 * RNG.normal(size=24)
SCALE = 0.6


def coefficients(size=2):
    return numpyro.sample("b", dist.Normal(0.0, 3.0).expand([size]).to_event(1))


def least_squares(design, y, precision=1 / 9):
    """The exact posterior of coefficients with independent normal priors."""
    matrix = design.T @ design / SCALE**2 + precision * np.eye(design.shape[1])
    return np.linalg.solve(matrix, design.T @ y / SCALE**2), np.linalg.inv(matrix)


def centered(x, y):
    b = coefficients()
    numpyro.sample("y", dist.Normal(b[0] + b[1] * (x - jnp.mean(x)), SCALE), obs=y)


def of_positive_outcomes(x, y):
    """Boolean masks and the number of rows that they leave."""
    b = coefficients()
    kept = y > 1.5
    with numpyro.plate("kept", int(kept.sum())):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x[kept], SCALE), obs=y[kept])


def computed_in_jax(x, y):
    """A number that JAX computes of the data, and Python takes."""
    b = coefficients()
    size = int(jnp.sum(jnp.asarray(x) > -jnp.inf))
    numpyro.sample("y", dist.Normal(b[0] + b[1] * jnp.asarray(x)[:size], SCALE), obs=y)


def missing_at_random(x, y):
    b = coefficients()
    with handlers.mask(mask=~np.isnan(y)):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x, SCALE), obs=y)


def jointly_normal(x, y):
    b = coefficients()
    covariance = SCALE**2 * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(b[0] + b[1] * x, covariance), obs=y)


def in_steps(x, y):
    """Rows one after the other, by NumPyro's scan."""
    b = coefficients()

    def step(carry, row):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * row[0], SCALE), obs=row[1])
        return carry, None

    scan(step, None, (jnp.asarray(x), jnp.asarray(y)))


def by_place(y):
    """Rows that a traced number picks out, as only JAX's arrays can be indexed."""
    b = coefficients()

    def step(carry, t):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * y[t - 1], SCALE), obs=y[t])
        return carry, None

    scan(step, None, jnp.arange(1, len(y)))


def two_tables(x, y, others):
    b = coefficients()
    numpyro.sample("y", dist.Normal(b[0] + b[1] * x, SCALE), obs=y)
    numpyro.sample("others", dist.Normal(b[0], SCALE), obs=others)


def of_size(x, y, num_rows):
    b = coefficients()
    with numpyro.plate("rows", num_rows):
        numpyro.sample("y", dist.Normal((b[0] + b[1] * x) * jnp.ones(num_rows), SCALE), obs=y)


def cut_in_two(x, y):
    """Rows whose place says what they are, which a few rows do not show."""
    b = coefficients()
    mean = b[0] + b[1] * x
    numpyro.sample("y", dist.Normal(jnp.concatenate([mean[:10], 2 * mean[10:]]), SCALE), obs=y)


def by_year(x, y):
    """A year is twelve rows."""
    b = coefficients(3)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(b[jnp.arange(len(x)) // 12] + b[2] * x, SCALE), obs=y)


LINE = np.stack([np.ones(24), X], axis=1)
CENTERED = np.stack([np.ones(24), X - X.mean()], axis=1)
HOLES = np.where(np.arange(24) % 5 == 2, np.nan, Y)
MORE = RNG.normal(size=7) + 1.0
CASES = {
    "centered": (centered, {"x": X, "y": Y}, {}, CENTERED, Y),
    "boolean masks": (of_positive_outcomes, {"x": X, "y": Y}, {}, LINE[Y > 1.5], Y[Y > 1.5]),
    "a number computed in JAX": (computed_in_jax, {"x": X, "y": Y}, {}, LINE, Y),
    "NaN": (missing_at_random, {"x": X, "y": HOLES}, {}, LINE[~np.isnan(HOLES)], Y[~np.isnan(HOLES)]),
    "jointly normal": (jointly_normal, {"x": X, "y": Y}, {}, LINE, Y),
    "scan": (in_steps, {"x": X, "y": Y}, {}, LINE, Y),
    "lengths": (
        two_tables,
        {"x": X, "y": Y, "others": MORE},
        {},
        np.concatenate([LINE, np.eye(2)[np.zeros(7, int)]]),
        np.concatenate([Y, MORE]),
    ),
    "cut in two": (cut_in_two, {"x": X, "y": Y}, {}, LINE * np.where(np.arange(24) < 10, 1, 2)[:, None], Y),
    "numbered rows": (by_year, {"x": X, "y": Y}, {}, np.column_stack([np.kron(np.eye(2), np.ones((12, 1))), X]), Y),
    "size as a keyword": (of_size, {"x": X, "y": Y}, {"num_rows": 24}, LINE, Y),
    "size among the data": (of_size, {"x": X, "y": Y, "num_rows": 24}, {}, LINE, Y),
}


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize("case", CASES)
def test_the_joint_posterior_is_that_of_least_squares(case, method):
    model, data, keywords, design, y = CASES[case]
    mean, covariance = least_squares(design, y)
    posterior = method(model).run(data, progress_bar=False, **keywords)
    assert posterior.info["converged"]
    if case not in ("jointly normal", "scan"):  # their rows turn out to be independent
        assert posterior.info["rows"] == "joint" and posterior.info["reason"]
    np.testing.assert_allclose(posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-7)


def test_the_joint_solve_has_all_that_a_posterior_has():
    posterior = RVGA(missing_at_random).run({"x": X, "y": HOLES}, progress_bar=False)
    assert posterior.num_rows == 24
    assert posterior.khat({"x": X, "y": HOLES}).verdict.startswith("good")
    data = posterior.to_arviz({"x": X, "y": HOLES}, num_samples=20)
    assert data.log_likelihood["y"].shape == data.posterior_predictive["y"].shape == (1, 20, 24)
    assert posterior.predictive(jax.random.key(0), {"x": X, "y": HOLES}, num_samples=5)["y"].shape == (5, 24)


def test_a_model_without_arguments_observes_constants():
    def model():
        b = coefficients()
        numpyro.sample("y", dist.Normal(b[0] + b[1] * X, SCALE), obs=Y)

    posterior = RVGA(model).run({}, progress_bar=False)
    mean, covariance = least_squares(LINE, Y)
    np.testing.assert_allclose(posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-7)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_a_model_of_priors_alone_gives_the_prior(method):
    def model():
        a = numpyro.sample("a", dist.Normal(1.0, 2.0))
        numpyro.sample("b", dist.Normal(a, 1.0))

    posterior = method(model).run({}, progress_bar=False)
    np.testing.assert_allclose(posterior.mean, [1.0, 1.0], atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, [[4.0, 4.0], [4.0, 5.0]], atol=1e-6)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_a_model_of_priors_alone_gives_the_best_gaussian_of_them(method):
    """E[g] = exp(m + v / 2) = shape / rate and 1 / v = rate E[g] where the bound is highest, for g = exp(theta)."""

    def model():
        numpyro.sample("g", dist.Gamma(3.0, 2.0))

    posterior = method(model).run({}, progress_bar=False)
    np.testing.assert_allclose(posterior.mean, [np.log(1.5) - 1 / 6], atol=1e-4)
    np.testing.assert_allclose(posterior.covariance, [[1 / 3]], rtol=1e-4)


def plain(x, y):
    b = coefficients()
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x, SCALE), obs=y)


@pytest.mark.parametrize(
    "wrapped",
    [
        handlers.seed(plain, 0),
        handlers.substitute(plain, data={"b": jnp.array([5.0, 5.0])}),
        handlers.mask(plain, mask=True),
    ],
    ids=["seed", "substitute", "mask"],
)
def test_handlers_around_the_model_change_nothing_that_nuts_would_not_see(wrapped):
    """NUTS gives latent sites its own values, whatever a model substitutes."""
    posterior = RVGA(wrapped).run({"x": X, "y": Y}, progress_bar=False)
    np.testing.assert_allclose(posterior.mean, least_squares(LINE, Y)[0], atol=1e-6)


def test_a_prior_that_is_masked_and_comes_by_another_site_is_taken():
    """Imputation as NumPyro's tutorial has it: the latent entries' density is that of the completed outcome."""

    def model(y):
        missing = np.isnan(y)
        mean = numpyro.sample("mean", dist.Normal(0.0, 3.0))
        imputed = numpyro.sample("imputed", dist.Normal(0.0, 1.0).expand([int(missing.sum())]).mask(False))
        complete = jnp.asarray(y).at[np.flatnonzero(missing)].set(imputed)
        numpyro.sample("y", dist.Normal(mean, SCALE), obs=complete)

    posterior = RVGA(model).run({"y": HOLES}, progress_bar=False)
    seen = HOLES[~np.isnan(HOLES)]
    mean, covariance = least_squares(np.ones((len(seen), 1)), seen)
    np.testing.assert_allclose(posterior.mean, np.full(posterior.mean.size, mean), atol=1e-5)
    np.testing.assert_allclose(np.diag(posterior.covariance)[1:], covariance[0, 0] + SCALE**2, atol=1e-5)
    np.testing.assert_allclose(posterior.covariance[0, 0], covariance[0, 0], atol=1e-5)


def test_data_that_other_data_replace_are_solved_for_anew():
    method = RVGA(centered)
    first, second = (method.run({"x": X, "y": y}, progress_bar=False) for y in (Y, Y + 1.0))
    np.testing.assert_allclose(first.mean, least_squares(CENTERED, Y)[0], atol=1e-6)
    np.testing.assert_allclose(second.mean, least_squares(CENTERED, Y + 1.0)[0], atol=1e-6)


def test_arrays_of_double_precision_are_known_again_in_single_precision():
    mean, covariance = least_squares(np.stack([np.ones(23), Y[:-1]], axis=1), Y[1:])
    with jax.enable_x64(False):
        posterior = RVGA(by_place).run({"y": Y}, progress_bar=False)
        np.testing.assert_allclose(posterior.mean, mean, atol=1e-3)
        np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-3)
        assert posterior.khat({"y": Y}).verdict.startswith("good")
        with pytest.raises(ValueError, match="all of them"):
            posterior.khat({"y": Y + 0.01})


def test_nan_that_the_model_does_not_handle_is_named():
    for method in (RVGA, FixedPointVI):
        with pytest.raises(ValueError, match="'y' holds NaN in row 2"):
            method(plain).run({"x": X, "y": HOLES}, progress_bar=False)


def test_lengths_that_the_model_cannot_join_are_named():
    with pytest.raises(ValueError, match="lengths are x: 24, y: 20"):
        RVGA(plain).run({"x": X, "y": Y[:20]}, progress_bar=False)


def missing_covariates(x, y):
    """As the error tells."""
    finite = jnp.isfinite(x).all(axis=1)
    x = jnp.where(jnp.isfinite(x), x, 0.0)
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]), numpyro.handlers.mask(mask=finite):
        numpyro.sample("y", dist.Normal(x @ slopes, SCALE), obs=y)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize("others", [{}, {"unused": np.zeros(3)}], ids=["rows", "arrays of two lengths"])
def test_the_remedies_for_nan_work(method, others):
    def linear(x, y, unused=None):
        slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(x @ slopes, SCALE), obs=y)

    x = np.stack([X, X**2], axis=1)
    x[3, 1] = np.nan
    message = (
        r"'x' holds NaN in row 3.*keep = np\.isfinite\(x\)\.all\(axis=1\).*jnp\.where.*handlers\.mask\(mask=finite\)"
    )
    with pytest.raises(ValueError, match=message):
        method(linear).run({"x": x, "y": Y, **others}, progress_bar=False)
    with pytest.raises(ValueError, match=r"'y' holds NaN in row 2.*keep = np\.isfinite\(y\);.*mask=finite"):
        method(linear).run({"x": np.nan_to_num(x), "y": HOLES, **others}, progress_bar=False)
    keep = np.isfinite(x).all(axis=1)
    dropped = method(linear).run({"x": x[keep], "y": Y[keep]}, progress_bar=False)
    masked = method(missing_covariates).run({"x": x, "y": Y}, progress_bar=False)
    np.testing.assert_allclose(masked.mean, dropped.mean, atol=1e-5)


def regression(x, y):
    b = coefficients()
    numpyro.sample("y", dist.Normal(b[0] + b[1] * x, SCALE), obs=y)


def fails_on_few_rows(x, y):
    if len(y) < len(Y):
        raise KeyError("few")
    regression(x, y)


def test_a_fault_of_the_package_while_rows_are_read_is_reported(monkeypatch):
    # a function without a frame of its own, whose lines would be an author's
    monkeypatch.setattr("numpyro_rvga.engines.registry.checked_rows", operator.getitem)
    with pytest.warns(UserWarning, match="TypeError: .* This is a fault of numpyro_rvga"):
        posterior = FixedPointVI(regression).run({"x": X, "y": Y}, progress_bar=False)
    np.testing.assert_allclose(posterior.mean, least_squares(np.stack([np.ones_like(X), X], 1), Y)[0], atol=1e-4)


def test_a_model_that_fails_on_few_rows_is_no_fault_of_the_package():
    posterior = RVGA(fails_on_few_rows).run({"x": X, "y": Y}, progress_bar=False)
    assert "KeyError: 'few'" in posterior.info["reason"] and "in line" in posterior.info["reason"]


def partial_likelihood(x, event):
    """Cox's: rows are sorted by time, the longest first, and the risk set of each are those before it."""
    b = numpyro.sample("b", dist.Normal(0.0, 3.0))
    numpyro.factor("risk", jnp.sum(event * (b * x - jax.lax.cumlogsumexp(b * x))))


def test_rows_are_coupled_though_the_first_ones_say_nothing():
    rng = np.random.default_rng(0)
    x, event = rng.normal(size=60), (np.arange(60) >= 20).astype(float)  # the longest times are censored
    posterior = RVGA(partial_likelihood).run({"x": x, "event": event}, progress_bar=False)
    assert posterior.info["rows"] == "joint"
    axis = np.linspace(-3, 3, 3001)
    at_risk = np.logaddexp.accumulate(axis[:, None] * x, axis=1)
    log_joint = np.sum(event * (axis[:, None] * x - at_risk), axis=1) - 0.5 * (axis / 3) ** 2
    mass = np.exp(log_joint - log_joint.max())
    mean = mass @ axis / mass.sum()
    assert abs(float(posterior.mean[0]) - mean) < 0.02 * np.sqrt(mass @ (axis - mean) ** 2 / mass.sum())
