"""What is read off a posterior: against closed forms, scipy and other posteriors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gaussian_posteriors import (
    MEAN,
    NOISE,
    ROOT,
    constrained_posterior,
    exact_regression,
    flat,
    logistic_posterior,
    posterior_of,
    regression,
    regression_answer,
    regression_data,
)
from scipy import stats
from scipy.special import expit

from numpyro_rvga import RVGA, FixedPointVI, Posterior
from numpyro_rvga.core.gaussians import FullGaussian
from numpyro_rvga.results import fitted

KEY = jax.random.key(3)
COVARIANCE = ROOT @ ROOT.T
TOLERANCE = 1e-9 if jax.config.jax_enable_x64 else 2e-5


@pytest.fixture(scope="module")
def posterior():
    return constrained_posterior()


@pytest.fixture(scope="module")
def conjugate():
    return exact_regression(regression_data())


# ---------------------------------------------------------------------- moments
def test_covariance_and_scale_tril_belong_to_the_root(posterior):
    np.testing.assert_allclose(posterior.covariance, COVARIANCE, atol=TOLERANCE)
    np.testing.assert_allclose(posterior.scale_tril, np.linalg.cholesky(COVARIANCE), atol=TOLERANCE)


@pytest.mark.parametrize("field, value", [("mean", np.zeros(3)), ("root", np.ones(4)), ("root", np.ones((4, 3)))])
def test_moments_of_the_wrong_shape_are_refused(posterior, field, value):
    moments = {"mean": MEAN, "root": ROOT} | {field: value}
    with pytest.raises(ValueError, match=f"{field} must have 4 entries"):
        Posterior(posterior.program, FullGaussian(**moments), num_rows=3)


def test_repr_names_sites_and_size(posterior):
    assert repr(posterior) == "Posterior(sites=(shift, share, deviation), size=4, num_rows=3)"


# ---------------------------------------------------------------------- draws, quantiles, density
@pytest.mark.parametrize("sample_shape", [(), (3,), (2, 3)])
def test_draws_have_the_sample_shape_and_the_models_global_sites(posterior, sample_shape):
    draws = posterior.sample_posterior(KEY, sample_shape)
    shapes = {name: value.shape for name, value in draws.items()}
    event_shapes = {"shift": (2,), "share": (), "deviation": (), "twice": ()}
    assert shapes == {name: sample_shape + shape for name, shape in event_shapes.items()}
    np.testing.assert_allclose(draws["twice"], 2 * draws["deviation"], rtol=1e-6)


def test_a_number_of_draws_is_refused_with_the_shape_that_works(posterior):
    for draw in (posterior.sample_posterior, posterior.sample_unconstrained):
        with pytest.raises(ValueError, match=r"must be a tuple, not 3: for one axis, \(3,\)"):
            draw(KEY, 3)


def test_draws_have_the_moments_of_q(posterior):
    theta = flat(posterior.sample_posterior(KEY, (40_000,)))
    standard_error = np.sqrt(np.diagonal(COVARIANCE) / len(theta))
    assert np.all(np.abs(theta.mean(0) - MEAN) < 5 * standard_error)
    np.testing.assert_allclose(np.cov(theta.T), COVARIANCE, atol=0.02)


@pytest.mark.parametrize("quantiles", [0.3, [0.05, 0.5, 0.975]])
def test_quantiles_are_transformed_marginal_quantiles(posterior, quantiles):
    found = posterior.quantiles(quantiles)
    normal = stats.norm.ppf(np.asarray(quantiles)[..., None], MEAN, np.sqrt(np.diagonal(COVARIANCE)))
    np.testing.assert_allclose(found["shift"], normal[..., :2], atol=1e-5)
    np.testing.assert_allclose(found["share"], expit(normal[..., 2]), atol=1e-5)
    np.testing.assert_allclose(found["deviation"], np.exp(normal[..., 3]), rtol=1e-5)


def shares_and_bounds(y=None):
    shares = numpyro.sample("shares", dist.Dirichlet(jnp.ones(3)))
    below = numpyro.sample("below", dist.TruncatedNormal(0.0, 1.0, high=0.0))
    numpyro.deterministic("last less first", shares[2] - shares[0])
    numpyro.deterministic("twice", 2 * below)
    with numpyro.plate("rows", 40):
        numpyro.sample("y", dist.Normal(below, 1.0).mask(y < 3), obs=y)
        numpyro.factor("counts", jnp.log(shares)[jnp.arange(40) % 3])


def test_quantiles_of_sites_without_a_monotone_transform_are_those_of_draws():
    posterior = FixedPointVI(shares_and_bounds).run({"y": np.full(40, -0.5)}, progress_bar=False)
    levels = [0.05, 0.5, 0.95]
    found, draws = posterior.quantiles(levels), posterior.sample_posterior(jax.random.key(8), (20_000,))
    for name, values in found.items():
        spread = np.asarray(draws[name]).std(0)
        np.testing.assert_allclose(values, np.quantile(draws[name], levels, axis=0), atol=0.06 * spread.max())
    np.testing.assert_allclose(found["twice"], 2 * found["below"], rtol=1e-5)


def test_quantiles_of_booleans_and_integers_are_values_of_theirs():
    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.deterministic("rises", slope > 0)
        numpyro.deterministic("tenths away", jnp.floor(10 * jnp.abs(slope)).astype(int))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(slope * x, 1.0), obs=y)

    posterior = posterior_of(model, {"x": np.ones(3), "y": np.ones(3)}, np.array([0.1]), np.array([[0.2]]))
    found = posterior.quantiles([0.2, 0.5, 0.9])
    assert found["rises"].dtype == bool
    assert found["rises"].tolist() == [False, True, True]  # P(slope <= 0) = 0.31
    folded = stats.foldnorm.ppf([0.2, 0.5, 0.9], c=0.5, scale=0.2)
    assert found["tenths away"].tolist() == np.floor(10 * folded).astype(int).tolist()


def bounded_by_another(y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.Uniform(0.0, scale))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(level, 1.0), obs=y)


def test_quantiles_of_a_site_whose_bound_is_another_site_are_those_of_their_product():
    posterior = posterior_of(bounded_by_another, {"y": np.zeros(3)}, np.array([0.2, -0.4]), np.diag([0.7, 1.2]))
    levels = np.array([0.05, 0.5, 0.95])
    rng = np.random.default_rng(0)
    level = np.exp(rng.normal(0.2, 0.7, 1_000_000)) * expit(rng.normal(-0.4, 1.2, 1_000_000))
    np.testing.assert_allclose(posterior.quantiles(levels)["level"], np.quantile(level, levels), rtol=0.05)
    np.testing.assert_allclose(posterior.quantiles(levels)["scale"], stats.lognorm(0.7, 0, np.exp(0.2)).ppf(levels))


def test_quantiles_of_draws_that_are_computed_in_parts_are_those_of_all(monkeypatch):
    given = bounded_by_another, {"y": np.zeros(3)}, np.array([0.2, -0.4]), np.diag([0.2, 0.3])
    at_once = posterior_of(*given).quantiles([0.1, 0.6])
    monkeypatch.setattr(fitted, "DRAWN_NUMBERS", 5_000)
    in_parts = posterior_of(*given).quantiles([0.1, 0.6])
    for name, values in at_once.items():
        np.testing.assert_allclose(in_parts[name], values, atol=0.01)


def test_quantiles_are_asked_for_by_probabilities(posterior):
    with pytest.raises(ValueError, match=r"must be probabilities, from 0 to 1, not \[5, 95\]"):
        posterior.quantiles([5, 95])


def test_median_is_the_half_quantile_at_the_mean(posterior):
    np.testing.assert_allclose(flat(posterior.median()), MEAN, atol=1e-5)
    half = posterior.quantiles(0.5)
    for name, value in posterior.median().items():
        np.testing.assert_allclose(half[name], value, rtol=1e-5)


@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 3)])
def test_log_prob_is_the_normal_density_in_unconstrained_space(posterior, sample_shape):
    draws = posterior.sample_posterior(KEY, sample_shape)
    expected = stats.multivariate_normal(MEAN, COVARIANCE).logpdf(flat(draws))
    assert posterior.log_prob(draws).shape == sample_shape
    np.testing.assert_allclose(posterior.log_prob(draws), expected, atol=1e-3)


def test_log_prob_refuses_missing_and_misshapen_sites(posterior):
    draws = posterior.sample_posterior(KEY, (5,))
    with pytest.raises(ValueError, match="share"):
        posterior.log_prob({name: value for name, value in draws.items() if name != "share"})
    with pytest.raises(ValueError, match="'deviation' must have shape"):
        posterior.log_prob(draws | {"deviation": jnp.ones(4)})
    with pytest.raises(ValueError, match="'shift' must have shape"):
        posterior.log_prob(draws | {"shift": jnp.ones(())})


# ---------------------------------------------------------------------- what is compiled
def centered(X, y=None):
    """By the mean of all rows: no row stands alone."""
    regression(X - X.mean(axis=0), y)


def shrunk(X, y=None):
    """Given the scale, all is Normal."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ slopes, 1), obs=y)


ANSWERS = {
    "khat": lambda posterior, data: posterior.khat(data, num_samples=200),
    "log_prob": lambda posterior, data: posterior.log_prob(posterior.median()),
    "predictive": lambda posterior, data: posterior.predictive(KEY, {"X": data["X"]}, num_samples=10),
    "quantiles": lambda posterior, data: posterior.quantiles([0.1, 0.9]),
    "sample_posterior": lambda posterior, data: posterior.sample_posterior(KEY, (10,), data=data),
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize(
    "method",
    [RVGA(regression), RVGA(centered), FixedPointVI(shrunk, integrate=["scale"])],
    ids=["regression", "centered", "integrated"],
)
def test_a_posterior_compiles_what_it_is_asked_once(method, answer, count_compilations):
    data = regression_data(seed=5)
    posterior = method.run(data, progress_bar=False)
    first = ANSWERS[answer](posterior, data)
    compiled, second = count_compilations(lambda: ANSWERS[answer](posterior, data))
    assert not compiled
    jax.tree.map(np.testing.assert_array_equal, jax.tree.leaves(second), jax.tree.leaves(first))


# ---------------------------------------------------------------------- predictions
NEW_X = np.array([[0.0, 0.0], [1.0, -2.0], [3.0, 10.0]])


def test_monte_carlo_has_the_conjugate_predictive_moments(conjugate):
    drawn = conjugate.predictive(KEY, {"X": NEW_X}, num_samples=20_000)
    mean, covariance = regression_answer(regression_data())
    design = np.column_stack([NEW_X, np.ones(3)])
    variance = np.einsum("np,pq,nq->n", design, covariance, design)
    assert set(drawn) == {"y", "line"}
    assert drawn["y"].shape == (20_000, 3)
    np.testing.assert_allclose(drawn["y"].mean(0), design @ mean, atol=0.03)
    np.testing.assert_allclose(drawn["y"].var(0), variance + NOISE**2, rtol=0.05)
    np.testing.assert_allclose(drawn["line"].var(0), variance, rtol=0.05)


def test_monte_carlo_does_not_look_at_the_outcome(conjugate):
    without = conjugate.predictive(KEY, {"X": NEW_X}, num_samples=5)
    given = conjugate.predictive(KEY, {"X": NEW_X, "y": np.full(3, 1e6)}, num_samples=5)
    positional = conjugate.predictive(KEY, (NEW_X, np.full(3, 1e6)), num_samples=5)
    np.testing.assert_allclose(given["line"], without["line"], rtol=1e-6)
    assert np.all(np.abs(given["y"]) < 100)
    np.testing.assert_array_equal(given["y"], positional["y"])


@pytest.mark.parametrize("num_samples", [1, 7])
def test_monte_carlo_keeps_the_axis_of_draws(conjugate, num_samples):
    assert conjugate.predictive(KEY, {"X": NEW_X}, num_samples)["y"].shape == (num_samples, 3)


def test_monte_carlo_predicts_every_row_of_a_subsampling_model():
    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        numpyro.factor("nudge", -0.1 * slope**2)
        with numpyro.plate("rows", x.shape[0], subsample_size=2) as index:
            outcome = None if y is None else y[index]
            numpyro.sample("y", dist.Normal(slope * x[index], 0.01), obs=outcome)

    x = np.arange(6.0)
    posterior = posterior_of(model, {"x": x, "y": 2 * x}, np.array([2.0]), np.array([[1e-3]]))
    drawn = posterior.predictive(KEY, {"x": x, "y": 2 * x}, num_samples=50)
    assert set(drawn) == {"y"}
    np.testing.assert_allclose(drawn["y"].mean(0), 2 * x, atol=0.02)


@pytest.mark.parametrize("location, deviation", [(0.0, 1.0), (1.5, 0.5), (-2.0, 3.0), (0.7, 1e-4)])
def test_closed_form_is_close_to_the_logistic_normal_moments(location, deviation):
    posterior = logistic_posterior([location, -location], np.diag([deviation, deviation]))
    found = posterior.predictive(None, {"X": np.eye(2)}, method="closed_form")["y"]
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)
    probabilities = expit(location + deviation * nodes)
    weights = weights / weights.sum()
    mean = weights @ probabilities
    variance = weights @ (probabilities - mean) ** 2
    np.testing.assert_allclose(found["mean"], [mean, 1 - mean], atol=0.02)
    np.testing.assert_allclose(found["variance"], [variance, variance], atol=0.02, rtol=0.2)
    assert np.all(found["variance"] > 0)


def test_closed_form_is_the_papers_formula():
    posterior = logistic_posterior([1.2, 0.4], np.array([[0.8, 0.0], [0.3, 0.5]]))
    X = np.array([[1.0, 0.0], [2.0, -1.0]])
    found = posterior.predictive(None, {"X": X, "y": np.ones(2)}, method="closed_form")["y"]
    m = X @ [1.2, 0.4]
    v = np.sum((X @ np.array([[0.8, 0.0], [0.3, 0.5]])) ** 2, axis=1)
    k = np.sqrt(8 / np.pi) / np.sqrt(v + 8 / np.pi)
    np.testing.assert_allclose(found["mean"], expit(k * m), rtol=1e-5)
    np.testing.assert_allclose(found["variance"], expit(k * m) * (1 - expit(k * m)) * (1 - k), rtol=1e-4)


def as_event(c, X=None, Y=None):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("Y", dist.Bernoulli(logits=c[:, None] + X @ weights).to_event(1), obs=Y)


def as_plate_before_rows(c, X=None, Y=None):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([2, 3]).to_event(2))
    with numpyro.plate("rows", X.shape[0], dim=-1), numpyro.plate("outputs", 3, dim=-2):
        numpyro.sample("Y", dist.Bernoulli(logits=c + (X @ weights).T), obs=None if Y is None else Y.T)


@pytest.mark.parametrize("model", [as_event, as_plate_before_rows])
def test_closed_form_has_rows_first_and_then_elements(model):
    rng = np.random.default_rng(0)
    data = {"c": rng.normal(size=4), "X": rng.normal(size=(4, 2)), "Y": np.ones((4, 3))}
    mean = rng.normal(size=6)
    posterior = posterior_of(model, data, mean, 1e-4 * np.eye(6))
    found = posterior.predictive(None, {"c": data["c"], "X": data["X"]}, method="closed_form")["Y"]["mean"]
    np.testing.assert_allclose(found, expit(data["c"][:, None] + data["X"] @ mean.reshape(2, 3)), rtol=1e-4)


@pytest.mark.parametrize("name", ["A_outcome", "z_outcome"])
def test_closed_form_needs_the_covariates_alone(name):
    """Wherever the outcome's name sorts among the arguments."""

    def model(c, X, **outcome):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=c + slope * X), obs=outcome.get(name))

    data = {"c": np.array([1.0, -1.0, 0.5]), "X": np.array([2.0, 0.1, 3.0]), name: np.ones(3)}
    posterior = posterior_of(model, data, np.array([0.7]), np.array([[1e-4]]))
    found = posterior.predictive(None, {"c": data["c"], "X": data["X"]}, method="closed_form")["y"]["mean"]
    np.testing.assert_allclose(found, expit(data["c"] + 0.7 * data["X"]), rtol=1e-4)


def test_closed_form_refuses_to_guess_a_covariate():
    def model(X, c=0.0, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Bernoulli(logits=c + slope * X), obs=y)

    data = {"X": np.ones(3), "c": np.ones(3), "y": np.ones(3)}
    posterior = posterior_of(model, data, np.array([0.7]), np.array([[0.1]]))
    with pytest.raises(ValueError, match=r"the data lack 'c'"):
        posterior.predictive(None, {"X": data["X"]}, method="closed_form")


def test_closed_form_names_the_site_that_has_none(conjugate):
    with pytest.raises(NotImplementedError, match="'y'"):
        conjugate.predictive(KEY, {"X": NEW_X}, method="closed_form")


def test_unknown_method_is_refused_with_the_choices(conjugate):
    with pytest.raises(ValueError, match="'linearized', 'plugin', 'closed_form', not 'exact'"):
        conjugate.predictive(KEY, {"X": NEW_X}, method="exact")


# ---------------------------------------------------------------------- going on
def test_update_without_a_method_says_how_to_go_on(posterior):
    with pytest.raises(ValueError, match="init=posterior"):
        posterior.update({"y": np.ones(3)})


def test_update_is_the_posterior_of_all_rows():
    data = regression_data()
    halves = [{name: array[part] for name, array in data.items()} for part in (slice(25), slice(25, None))]
    first = RVGA(regression).run(halves[0], progress_bar=False)
    both = first.update(halves[1], progress_bar=False)
    for found, rows in ((first, halves[0]), (both, data)):
        mean, covariance = regression_answer(rows)
        np.testing.assert_allclose(found.mean, mean, rtol=2e-3, atol=1e-3)
        np.testing.assert_allclose(found.covariance, covariance, rtol=2e-2, atol=1e-5)
        assert found.num_rows == len(rows["y"])


def test_after_an_update_convergence_is_not_claimed():
    """The second rows' own solve converges, and the first rows are an approximation."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 2))
    y = (rng.random(60) < expit(x @ [1.5, -1.0])).astype(int)
    halves = [{"X": x[part], "y": y[part]} for part in (slice(0, 30), slice(30, 60))]
    first = RVGA(logistic).run(halves[0], progress_bar=False)
    assert first.info["converged"] is True
    assert first.update(halves[1], progress_bar=False).info["converged"] is None


def logistic(X, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ slopes), obs=y)


@pytest.mark.parametrize("method", ["predictive", "to_arviz"])
def test_a_number_of_draws_is_positive(method):
    data = {"X": np.ones((3, 2)), "y": np.array([0, 1, 1])}
    posterior = RVGA(logistic).run(data, progress_bar=False)
    arguments = {"predictive": (KEY, data), "to_arviz": (data,)}[method]
    with pytest.raises(ValueError, match="num_samples must be a positive integer, not 0"):
        getattr(posterior, method)(*arguments, num_samples=0)


def test_outcomes_outside_their_support_are_refused_after_a_run_too():
    data = {"X": np.ones((3, 2)), "y": np.array([0, 1, 1])}
    posterior = RVGA(logistic).run(data, progress_bar=False)
    with pytest.raises(ValueError, match="row 1 of array 'y' holds 2"):
        posterior.khat(data | {"y": np.array([0, 2, 1])})


def test_one_name_is_no_list_of_sites():
    data = {"X": np.ones((3, 2)), "y": np.array([0, 1, 1])}
    posterior = RVGA(logistic).run(data, progress_bar=False)
    with pytest.raises(ValueError, match="sites must be 'auto' or a list of site names, not 'slopes'"):
        posterior.integrate(data, sites="slopes")


def test_merge_takes_a_list_of_posteriors(posterior):
    with pytest.raises(ValueError, match=r"merge takes a list of posteriors: Posterior.merge\(\[first, second\]\)"):
        Posterior.merge(posterior, posterior)


def test_deterministic_sites_that_are_no_arrays_are_left_out():
    def pairs(x, y=None):
        mu = numpyro.sample("mu", dist.Normal(0, 1))
        numpyro.deterministic("twice", 2 * mu)
        numpyro.deterministic("both", (mu, mu + 1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(mu * x, 1), obs=y)

    data = {"x": np.linspace(-1, 1, 20), "y": np.linspace(-1, 2, 20)}
    posterior = RVGA(pairs).run(data, progress_bar=False)
    assert posterior.sample_posterior(jax.random.key(0), (3,)).keys() == {"mu", "twice"}
    assert posterior.khat(data).verdict.startswith("good")
