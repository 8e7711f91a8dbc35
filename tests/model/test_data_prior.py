"""Priors and deterministic sites that read the data see all rows, afresh at every run."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from references import potential_of
from scipy import stats
from shared_methods import shared

from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior, RandomWalk

NUM_ROWS = 300
METHODS = {"RVGA": RVGA, "FixedPointVI": FixedPointVI, "BONG": lambda model: BONG(model, shuffle=False)}


def data(seed=0, n=NUM_ROWS, shift=0.0):
    """Sorted by outcome: the first rows are unlike the others."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n)
    y = 5.0 + shift + 0.7 * x + rng.normal(size=n)
    order = np.argsort(y)
    return {"x": x[order], "y": y[order]}


def rows_of(x, y, location, scale=1.0):
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(location, scale), obs=y)


def centered_at_the_mean(x, y):
    a = numpyro.sample("a", dist.Normal(y.mean(), 0.001))
    rows_of(x, y, a)


def scaled_by_the_deviation(x, y):
    a = numpyro.sample("a", dist.Normal(jnp.median(y), 2.5 * y.std()))
    b = numpyro.sample("b", dist.Normal(0.0, 2.5 * y.std() / x.std()))
    scale = numpyro.sample("scale", dist.Exponential(1 / y.std()))
    rows_of(x, y, a + b * x, scale)


def by_the_first_entry(x, y):
    a = numpyro.sample("a", dist.Normal(0.0, jnp.exp(x[0])))
    rows_of(x, y, a)


def shrunk_by_the_number_of_rows(x, y):
    tau = numpyro.sample("tau", dist.HalfCauchy(1 / jnp.sqrt(len(y))))
    b = numpyro.sample("b", dist.Normal(0.0, tau))
    rows_of(x, y, 5.0 + b * x)


def penalized_by_the_number_of_rows(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    numpyro.factor("penalty", -0.5 * len(y) * b**2)
    rows_of(x, y, 5.0 + b * x)


def with_pseudo_outcomes(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 10.0))
    numpyro.sample("zero", dist.Normal(b, 1 / jnp.sqrt(len(y))), obs=0.0)
    rows_of(x, y, 5.0 + b * x)


def hierarchy(x, y):
    m = numpyro.sample("m", dist.StudentT(3, y.mean(), y.std()))
    tau = numpyro.sample("tau", dist.HalfNormal(y.std()))
    with numpyro.plate("groups", 3):
        a = numpyro.sample("a", dist.Normal(m, tau))
    rows_of(x, y, a[0] + a[1] * x + a[2] * x**2)


def inducing_points(x, y):
    """A sparse Gaussian process at points that are taken from the data."""
    z = x[jnp.linspace(0, len(x) - 1, 5).astype(int)]
    kernel = lambda a, b: jnp.exp(-0.5 * (a[:, None] - b) ** 2)  # noqa: E731
    u = numpyro.sample("u", dist.MultivariateNormal(0.0, kernel(z, z) + 1e-3 * jnp.eye(5)))
    rows_of(x, y, u.sum())


def support_that_reads_the_data(x, y):
    """Of a site that no row sees."""
    scale = numpyro.sample("scale", dist.Uniform(0.0, 5 * y.std()))
    a = numpyro.sample("a", dist.Normal(0.0, scale))
    rows_of(x, y, a)


MODELS = [
    centered_at_the_mean,
    scaled_by_the_deviation,
    by_the_first_entry,
    shrunk_by_the_number_of_rows,
    penalized_by_the_number_of_rows,
    with_pseudo_outcomes,
    hierarchy,
    inducing_points,
    support_that_reads_the_data,
]


def run(method, rows, **kwargs):
    return method.run(rows, progress_bar=False, **kwargs)


def assert_same(one, other):
    np.testing.assert_allclose(one.mean, other.mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(one.covariance, other.covariance, rtol=1e-9, atol=1e-12)
    assert one.elbo == other.elbo or abs(one.elbo - other.elbo) < 1e-9 * abs(one.elbo)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_log_joint_density_is_numpyros(model):
    rows = data()
    options = {"scheme": "laplace"} if model is centered_at_the_mean else {}
    posterior = run(shared(RVGA, model, **options), rows)
    potential, size = potential_of(model, posterior.site_names, **rows)
    program = posterior.program
    for seed in range(3):
        theta = posterior.mean + 0.3 * np.random.default_rng(seed).normal(size=size)
        likelihood = program.log_likelihood(theta, program.inputs(rows))["y"].sum()
        np.testing.assert_allclose(program.log_prior(theta) + likelihood, -potential(theta), rtol=1e-9)


@pytest.mark.parametrize("model", [penalized_by_the_number_of_rows, with_pseudo_outcomes])
def test_terms_of_the_prior_see_the_number_of_all_rows(model):
    rows = data()
    x, residual = rows["x"], rows["y"] - 5.0
    precision = x @ x + NUM_ROWS + 0.01
    posterior = run(shared(RVGA, model), rows)
    np.testing.assert_allclose(posterior.mean, [x @ residual / precision], rtol=1e-6)
    np.testing.assert_allclose(posterior.covariance, [[1 / precision]], rtol=1e-6)


def test_hyperparameters_whose_prior_reads_the_data_are_integrated_out():
    def given_numbers(x, y):
        tau = numpyro.sample("tau", dist.HalfCauchy(1 / np.sqrt(NUM_ROWS)))
        b = numpyro.sample("b", dist.Normal(0.0, tau))
        rows_of(x, y, 5.0 + b * x)

    found, expected = (
        run(FixedPointVI(model, integrate=["tau"]), data()) for model in (shrunk_by_the_number_of_rows, given_numbers)
    )
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=1e-6)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-5)


def counts_of_noisy_rows(y):
    """A Normal latent variable for each row, of a scale that the number of rows determines."""
    mu = numpyro.sample("mu", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 8 / jnp.sqrt(len(y))))
        numpyro.sample("y", dist.Poisson(jnp.exp(mu + z)), obs=y)


def test_latent_variables_of_rows_that_read_the_number_of_rows_are_taken_together():
    rng = np.random.default_rng(0)
    rows = {"y": rng.poisson(np.exp(1 + rng.normal(size=64)))}  # the scale is one
    posterior = run(RVGA(counts_of_noisy_rows), rows)
    assert posterior.info["rows"] == "joint"
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    mu = np.linspace(0, 2, 400)
    likelihood = stats.poisson.pmf(rows["y"][:, None, None], np.exp(mu[:, None] + nodes)) @ (weights / weights.sum())
    log_density = np.log(likelihood).sum(0) + stats.norm.logpdf(mu, 0, 2)
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    mean = density @ mu
    deviation = np.sqrt(density @ (mu - mean) ** 2)
    draws = posterior.sample_posterior(jax.random.key(0), (20_000,))["mu"]
    assert abs(np.mean(draws) - mean) < 0.1 * deviation
    assert abs(np.log(np.std(draws) / deviation)) < 0.1
    with pytest.raises(NotImplementedError, match="not conditionally independent"):
        run(RVGA(counts_of_noisy_rows), blocks({"y": rows["y"]}, 16))


@pytest.mark.parametrize("name", METHODS)
def test_a_prior_at_the_mean_of_all_rows_ends_there(name):
    method = METHODS[name](centered_at_the_mean)
    for shift in (0.0, 10.0):
        rows = data(shift=shift)
        assert abs(float(run(method, rows).mean[0]) - rows["y"].mean()) < 1e-3


@pytest.mark.parametrize("model", MODELS[1:], ids=lambda model: model.__name__)
def test_one_object_takes_other_data_as_a_new_one_does(model):
    """In another number too, where the prior reads it."""
    other_number = {} if model in (scaled_by_the_deviation, by_the_first_entry, hierarchy) else {"n": 200}
    method, rows = shared(RVGA, model), data(seed=1, shift=3.0, **other_number)
    run(method, data())
    assert_same(run(method, rows), run(RVGA(model), rows))


@pytest.mark.parametrize("name", ["FixedPointVI", "BONG"])
def test_other_methods_take_other_data_as_a_new_object_does(name):
    method = METHODS[name](hierarchy)
    run(method, data())
    rows = data(seed=1, shift=3.0)
    assert_same(run(method, rows), run(METHODS[name](hierarchy), rows))


def test_earlier_posteriors_keep_their_prior():
    method = shared(RVGA, hierarchy)
    posterior = run(method, data())
    before = float(posterior.program.log_prior(posterior.mean))
    run(method, data(seed=1, shift=3.0))
    assert float(posterior.program.log_prior(posterior.mean)) == before


def test_rows_that_are_skipped_have_no_say_in_the_prior():
    rows = data()
    spoilt = {name: np.insert(array, 7, np.nan) for name, array in rows.items()}
    method = shared(RVGA, hierarchy)
    assert_same(run(method, spoilt, on_bad_row="skip"), run(method, rows))


def test_posteriors_are_stored_with_what_the_data_determine(tmp_path):
    posterior = run(shared(RVGA, hierarchy), data())
    posterior.save(tmp_path / "posterior.npz")
    again = Posterior.load(tmp_path / "posterior.npz", hierarchy)
    np.testing.assert_allclose(again.program.log_prior(again.mean), posterior.program.log_prior(posterior.mean))


# ---------------------------------------------------------------------- what is refused
def blocks(rows, size=50):
    return ({name: array[i : i + size] for name, array in rows.items()} for i in range(0, len(rows["y"]), size))


@pytest.mark.parametrize(
    "model, message",
    [
        (hierarchy, "the prior of site 'm' reads the data array 'y'"),
        (by_the_first_entry, "the prior of site 'a' reads the data array 'x'"),
        (shrunk_by_the_number_of_rows, "the prior of site 'tau' reads the number of rows"),
        (penalized_by_the_number_of_rows, "the prior of site 'penalty' reads the number of rows"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
@pytest.mark.parametrize("method", [RVGA, BONG])
def test_streams_refuse_such_priors(method, model, message):
    with pytest.raises(ValueError, match=f"{message}, and not all rows are at hand.*as a keyword argument"):
        run(method(model), blocks(data()))


def test_runs_that_go_on_refuse_such_priors():
    posterior = run(shared(RVGA, hierarchy), data())
    with pytest.raises(ValueError, match="the prior of site 'm' reads the data array 'y', and not all rows"):
        posterior.update(data(seed=1), progress_bar=False)
    with pytest.raises(ValueError, match="not all rows are at hand"):
        RVGA(hierarchy).init(data())
    with pytest.raises(ValueError, match="which parameters that move know only in part"):
        run(RVGA(hierarchy, dynamics=RandomWalk(0.1)), data())


def test_keyword_arrays_that_change_in_place_are_noticed():
    def model(x, y, prior_scale):
        rows_of(x, y, numpyro.sample("a", dist.Normal(0.0, prior_scale[0])))

    method, prior_scale = RVGA(model), np.array([1e-3])
    run(method, data(), prior_scale=prior_scale)
    prior_scale[0] = 10.0
    assert_same(run(method, data(), prior_scale=prior_scale), run(RVGA(model), data(), prior_scale=np.array([10.0])))


@pytest.mark.parametrize("keyword", [np.array([1.0, np.nan]), float("nan")], ids=["array", "number"])
def test_missing_values_in_keywords_are_the_same_the_next_time(keyword):
    runs = []

    def model(x, y, offsets):
        runs.append(len(x))
        rows_of(x, y, numpyro.sample("a", dist.Normal(jnp.nan_to_num(jnp.ravel(offsets)[0]), 1.0)))

    method = RVGA(model)
    run(method, data(), offsets=keyword)
    first = len(runs)
    run(method, data(), offsets=np.copy(keyword) if np.ndim(keyword) else float("nan"))
    assert len(runs) == first


# ---------------------------------------------------------------------- deterministic sites
def with_deterministic_sites(x, y=None):
    a = numpyro.sample("a", dist.Normal(0.0, 5.0))
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    line = a + b * x
    numpyro.deterministic("double", 2 * b)
    numpyro.deterministic("average", jnp.exp(line / 10).mean())
    numpyro.deterministic("total", b * len(x))
    numpyro.deterministic("line", line)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(line, 1.0), obs=y)


def assert_deterministic(sites, rows):
    a, b = (np.asarray(sites[name])[:, None] for name in "ab")
    np.testing.assert_allclose(sites["double"], 2 * b[:, 0])
    np.testing.assert_allclose(sites["average"], np.exp((a + b * rows["x"]) / 10).mean(1))
    np.testing.assert_allclose(sites["total"], len(rows["x"]) * b[:, 0])


@pytest.fixture(scope="module")
def regression():
    return run(RVGA(with_deterministic_sites), data())


def test_deterministic_sites_see_all_rows(regression, monkeypatch):
    draws = regression.sample_posterior(jax.random.key(0), (40,))
    assert draws.keys() == {"a", "b", "double", "average", "total"}
    assert_deterministic(draws, data())
    monkeypatch.setattr("numpyro_rvga.results.fitted.DRAWN_NUMBERS", 7 * 2 * NUM_ROWS)  # seven draws at a time
    again = run(RVGA(with_deterministic_sites), data()).sample_posterior(jax.random.key(0), (40,))
    np.testing.assert_allclose(again["average"], draws["average"])


def test_deterministic_sites_of_other_rows(regression):
    other = data(seed=3, n=20)
    assert_deterministic(regression.sample_posterior(jax.random.key(0), (10,), other), other)
    found = regression.to_arviz(data(), num_samples=10)["posterior"]
    assert_deterministic({name: found[name].values[0] for name in ("a", "b", "double", "average", "total")}, data())


def test_deterministic_sites_of_a_stream_come_with_rows():
    rows = data()
    posterior = run(RVGA(with_deterministic_sites), blocks(rows))
    assert posterior.sample_posterior(jax.random.key(0), (3,)).keys() == {"a", "b", "double"}
    assert_deterministic(posterior.sample_posterior(jax.random.key(0), (3,), rows), rows)


def test_deterministic_sites_with_a_value_for_each_row_need_no_plate(regression):
    new = {"x": np.array([-1.0, 0.0, 2.0])}
    found = regression.predictive(jax.random.key(0), new, num_samples=500)
    assert found["line"].shape == (500, 3)
    a, b = regression.mean
    np.testing.assert_allclose(found["line"].mean(0), a + b * new["x"], atol=0.05)
    assert regression.to_arviz(data(), num_samples=10)["posterior_predictive"]["line"].shape == (1, 10, NUM_ROWS)


# ---------------------------------------------------------------------- arrays that are left out
def with_offset(x, offset=0.0, weights=1.0, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 5.0))
    with numpyro.plate("rows", len(x)), numpyro.handlers.scale(scale=weights):
        numpyro.sample("y", dist.Normal(b * x + offset, 1.0), obs=y)


COMPLETE = data() | {"offset": np.full(NUM_ROWS, 3.0), "weights": np.ones(NUM_ROWS)}


def without(*names):
    return {name: array for name, array in COMPLETE.items() if name not in names}


@pytest.fixture(scope="module")
def offset_posterior():
    return run(RVGA(with_offset), COMPLETE)


def functional_update(posterior, rows):
    method = posterior.continuation
    return method.update(method.init(COMPLETE), rows)


@pytest.mark.parametrize(
    "call",
    [
        lambda posterior, rows: posterior.update(rows, progress_bar=False),
        lambda posterior, rows: posterior.predictive(jax.random.key(0), rows, num_samples=10),
        lambda posterior, rows: posterior.predictive(jax.random.key(0), rows, num_samples=10, method="plugin"),
        lambda posterior, rows: posterior.khat(rows),
        lambda posterior, rows: posterior.to_arviz(rows, num_samples=10),
        lambda posterior, rows: posterior.sample_posterior(jax.random.key(0), (2,), rows),
        functional_update,
    ],
    ids=["update", "predictive", "plugin", "khat", "to_arviz", "sample_posterior", "functional update"],
)
def test_arrays_of_the_run_that_are_left_out_are_named(offset_posterior, call):
    with pytest.raises(ValueError, match="the data lack 'offset', which the posterior was fitted with"):
        call(offset_posterior, without("offset"))


def test_predictions_do_without_outcomes_and_weights(offset_posterior):
    found = offset_posterior.predictive(jax.random.key(0), without("y", "weights"), num_samples=200)
    np.testing.assert_allclose(found["y"].mean(), 3.0, atol=0.3)
    with pytest.raises(ValueError, match="the data lack 'weights'"):
        offset_posterior.khat(without("weights"))
    with pytest.raises(ValueError, match="the data lack the outcome of site 'y'"):
        offset_posterior.khat(without("y"))
