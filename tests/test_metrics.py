"""Predictive densities against closed forms and draws made here; error rates and calibration as they are defined."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from scipy.special import expit, log_softmax, logsumexp
from scipy.stats import norm

from numpyro_rvga import RVGA, metrics

NOISE = 0.05  # much less than the prior's spread


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def softmax(X, label=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1], 4]).to_event(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=X @ w), obs=label)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def squashed(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.5, 0.3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=3 * jnp.tanh(X @ w)), obs=y)


def data(model, n=40, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 3))
    if model is linear:
        return {"X": X, "y": X @ np.array([1.0, -1.0, 0.5]) + NOISE * rng.normal(size=n)}
    if model is softmax:
        logits = X @ np.array([[2.0, 0, -1, 0], [0, 1, 0, -2], [1, 0, 0, 0]]) + rng.gumbel(size=(n, 4))
        return {"X": X, "label": logits.argmax(axis=1)}
    return {"X": X, "y": (X.sum(axis=1) + rng.normal(size=n) > 0).astype(int)}


@pytest.fixture(scope="module")
def posteriors():
    return {model: RVGA(model).run(data(model), progress_bar=False) for model in (linear, logistic, softmax, squashed)}


@pytest.mark.parametrize("method, tolerance", [("linearized", 1e-8), ("monte_carlo", 0.05)])
def test_density_of_linear_gaussian_rows_is_that_of_the_exact_predictive(posteriors, method, tolerance):
    posterior, new = posteriors[linear], data(linear, 25, 1)
    mean, covariance = np.asarray(posterior.mean), np.asarray(posterior.covariance)
    deviation = np.sqrt(NOISE**2 + np.einsum("ni,ij,nj->n", new["X"], covariance, new["X"]))
    exact = norm.logpdf(new["y"], new["X"] @ mean, deviation)
    found = metrics.log_predictive_density(posterior, new, method=method, num_samples=20_000)
    np.testing.assert_allclose(found, exact, atol=tolerance)
    assert metrics.nlpd(posterior, new, method="linearized") == pytest.approx(-exact.mean())


@pytest.mark.parametrize("model", [linear, softmax, squashed])
def test_plugin_density_is_the_likelihood_at_the_mean(posteriors, model):
    posterior, new = posteriors[model], data(model, 25, 1)
    found = metrics.log_predictive_density(posterior, new, method="plugin")
    exact = posterior.program.log_likelihood(posterior.mean, posterior.program.rows(new))["y"]
    np.testing.assert_allclose(found, exact, rtol=1e-10)


def test_averaged_probabilities_are_less_certain_than_those_at_the_mean(posteriors):
    """Equation 122 of the R-VGA paper, and the average itself."""
    posterior, new = posteriors[logistic], data(logistic, 25, 1)
    averaged, plugin = (
        metrics.outcome_probabilities(posterior, new, method=method)[1][:, 1] for method in ("linearized", "plugin")
    )
    assert np.all(np.abs(averaged - 0.5) < np.abs(plugin - 0.5))
    deviations = np.sqrt(np.einsum("ni,ij,nj->n", new["X"], posterior.covariance, new["X"]))
    z = np.linspace(-9, 9, 2001)
    logits = (new["X"] @ posterior.mean)[:, None] + deviations[:, None] * z
    np.testing.assert_allclose(averaged, expit(logits) @ norm.pdf(z) * (z[1] - z[0]), atol=1e-6)


@pytest.mark.parametrize("method", ["linearized", "monte_carlo"])
def test_softmax_probabilities_are_averaged_not_logits(posteriors, method):
    posterior, new = posteriors[softmax], data(softmax, 25, 1)
    draws = np.random.default_rng(0).multivariate_normal(posterior.mean, posterior.covariance, 20_000)
    logits = np.einsum("ni,sik->snk", new["X"], draws.reshape(-1, 3, 4))
    averaged = logsumexp(log_softmax(logits, axis=-1), axis=0) - np.log(len(draws))
    outcomes, probabilities = metrics.outcome_probabilities(posterior, new, method=method, num_samples=20_000)
    np.testing.assert_array_equal(outcomes, np.arange(4))
    np.testing.assert_allclose(probabilities, np.exp(averaged), atol=0.015)
    np.testing.assert_allclose(probabilities.sum(axis=1), 1.0, rtol=1e-6)
    density = metrics.log_predictive_density(posterior, new, method=method, num_samples=20_000)
    np.testing.assert_allclose(density, np.log(probabilities[np.arange(25), new["label"]]), atol=1e-10)


def test_density_of_a_bent_logit_is_averaged_over_what_it_is_a_function_of(posteriors):
    posterior, new = posteriors[squashed], data(squashed, 10, 1)
    draws = np.random.default_rng(0).multivariate_normal(posterior.mean, posterior.covariance, 100_000)
    success = (1 / (1 + np.exp(-3 * np.tanh(draws @ new["X"].T)))).mean(axis=0)
    found = metrics.log_predictive_density(posterior, new)
    np.testing.assert_allclose(np.exp(found), np.where(new["y"] == 1, success, 1 - success), atol=0.003)


def test_error_rate_and_calibration_are_as_defined(posteriors):
    posterior, new = posteriors[softmax], data(softmax, 200, 1)
    options = {"method": "plugin"}
    _, probabilities = metrics.outcome_probabilities(posterior, new, **options)
    right = probabilities.argmax(axis=1) == new["label"]
    assert metrics.misclassification(posterior, new, **options) == pytest.approx(1 - right.mean())
    confidence, total = probabilities.max(axis=1), 0.0
    for low in np.arange(5) / 5:
        inside = (confidence >= low) & (confidence < low + 0.2)
        if inside.any():
            total += inside.mean() * abs(right[inside].mean() - confidence[inside].mean())
    assert metrics.expected_calibration_error(posterior, new, num_bins=5, **options) == pytest.approx(total)


def masked(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]), handlers.mask(mask=X[:, 0] > 0):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def scaled(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0], subsample_size=10) as index, handlers.scale(scale=3.0):
        outcome = None if y is None else y[index]
        numpyro.sample("y", dist.Bernoulli(logits=X[index] @ w), obs=outcome)


@pytest.mark.parametrize("model", [masked, scaled])
def test_probabilities_are_those_of_the_outcomes_own_distribution(model):
    posterior, new = RVGA(model).run(data(model), progress_bar=False), data(model, 60, 1)
    _, at_mean = metrics.outcome_probabilities(posterior, new, method="plugin")
    success = expit(new["X"] @ np.asarray(posterior.mean))
    np.testing.assert_allclose(at_mean, np.column_stack([1 - success, success]), atol=1e-6)
    _, averaged = metrics.outcome_probabilities(posterior, new)
    draws = np.random.default_rng(0).multivariate_normal(posterior.mean, posterior.covariance, 100_000)
    np.testing.assert_allclose(averaged[:, 1], expit(draws @ new["X"].T).mean(axis=0), atol=0.005)
    np.testing.assert_allclose(averaged.sum(axis=1), 1, atol=1e-4)


def test_masked_rows_are_left_out_of_means():
    posterior, new = RVGA(masked).run(data(masked), progress_bar=False), data(masked, 60, 1)
    seen = {name: values[new["X"][:, 0] > 0] for name, values in new.items()}
    for measure in (metrics.nlpd, metrics.misclassification, metrics.expected_calibration_error):
        assert measure(posterior, new) == pytest.approx(measure(posterior, seen))
    hidden = {name: values[new["X"][:, 0] <= 0] for name, values in new.items()}
    with pytest.raises(ValueError, match="outcomes of all rows are masked"):
        metrics.nlpd(posterior, hidden)


@pytest.mark.parametrize("method", ["linearized", "plugin"])
@pytest.mark.parametrize("model", [linear, softmax])
def test_drawn_outcomes_have_the_moments_of_the_densities(posteriors, model, method):
    posterior, new = posteriors[model], data(model, 5, 1)
    drawn = posterior.predictive(jax.random.key(0), {"X": new["X"]}, num_samples=20_000, method=method)["y"]
    assert drawn.shape == (20_000, 5)
    if model is softmax:
        _, probabilities = metrics.outcome_probabilities(posterior, new, method=method, num_samples=20_000)
        shares = (np.asarray(drawn)[..., None] == np.arange(4)).mean(axis=0)
        np.testing.assert_allclose(shares, probabilities, atol=0.02)
    else:
        spread = np.einsum("ni,ij,nj->n", new["X"], posterior.covariance, new["X"]) if method == "linearized" else 0.0
        np.testing.assert_allclose(drawn.mean(axis=0), new["X"] @ np.asarray(posterior.mean), atol=0.02)
        np.testing.assert_allclose(drawn.std(axis=0), np.sqrt(NOISE**2 + spread), atol=0.02)


@pytest.mark.parametrize("count", [0, 2.5])
def test_counts_that_are_none_are_named(posteriors, count):
    new = data(softmax, 5, 1)
    with pytest.raises(ValueError, match=f"num_samples must be a positive integer, not {count}"):
        metrics.nlpd(posteriors[softmax], new, method="monte_carlo", num_samples=count)
    with pytest.raises(ValueError, match=f"num_bins must be a positive integer, not {count}"):
        metrics.expected_calibration_error(posteriors[softmax], new, num_bins=count)


def test_what_has_no_such_measure_is_refused(posteriors):
    new = data(linear, 5, 1)
    with pytest.raises(ValueError, match="method must be one of 'plugin', 'linearized', 'monte_carlo'"):
        metrics.nlpd(posteriors[linear], new, method="exact")
    with pytest.raises(ValueError, match="finitely many outcomes"):
        metrics.misclassification(posteriors[linear], new)
