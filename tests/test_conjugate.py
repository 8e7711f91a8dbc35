"""Rates and shares whose exact posterior is known: how far the best Gaussian on the log or logit scale is from it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special, stats

from numpyro_rvga import RVGA, FixedPointVI

ROW_BY_ROW = {"block_size": 1, "first_block": 1, "shuffle": False, "certify": False}
PROBABILITIES = np.array([0.025, 0.1, 0.5, 0.9, 0.975])
SHARES = np.array([0.6, 0.3, 0.08, 0.02])


def rate(y=None):
    of_rows = numpyro.sample("p", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(of_rows), obs=y)


def share(y=None):
    of_rows = numpyro.sample("p", dist.Beta(1.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Bernoulli(probs=of_rows), obs=y)


def shares(y=None):
    of_rows = numpyro.sample("p", dist.Dirichlet(jnp.ones(4)))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Categorical(probs=of_rows), obs=y)


def exact(model, y):
    """The marginals of each entry."""
    if model is rate:
        return [stats.gamma(2 + y.sum(), scale=1 / (1 + len(y)))]
    counts = 1 + np.bincount(y.astype(int), minlength=4 if model is shares else 2)
    betas = [stats.beta(count, counts.sum() - count) for count in counts]
    return betas if model is shares else betas[1:]


def rows(model, n):
    rng = np.random.default_rng(0)
    if model is rate:
        return rng.poisson(1.5, n).astype(float)
    return (rng.random(n) < 0.2).astype(float) if model is share else rng.choice(4, n, p=SHARES)


def log_evidence(model, y):
    if model is rate:
        shape, inverse_scale = 2 + y.sum(), 1 + len(y)
        return special.gammaln(shape) - shape * np.log(inverse_scale) - special.gammaln(y + 1).sum()
    counts = 1 + np.bincount(y.astype(int), minlength=4 if model is shares else 2)
    return special.gammaln(counts).sum() - special.gammaln(counts.sum()) + special.gammaln(len(counts))


def worst(model, y, **options):
    return error_of(RVGA(model, **options).run({"y": y}, progress_bar=False), model, y)


def error_of(posterior, model, y):
    """By how much probability a quantile is off at most. Of Dirichlet shares, whose Gaussian is on sticks, by draws."""
    if model is shares:
        draws = np.asarray(posterior.sample_posterior(jax.random.key(0), (20_000,))["p"])
        quantiles = np.quantile(draws, PROBABILITIES, axis=0)
    else:
        quantiles = np.asarray(posterior.quantiles(PROBABILITIES)["p"])[:, None]
    found = [marginal.cdf(quantiles[:, i]) for i, marginal in enumerate(exact(model, y))]
    return np.abs(np.transpose(found) - PROBABILITIES[:, None]).max()


@pytest.mark.parametrize(
    "model, n, close", [(rate, 20, 0.015), (share, 20, 0.02), (shares, 20, 0.035), (rate, 1000, 0.004)]
)
def test_the_best_gaussian_of_conjugate_rows_is_close_to_their_exact_posterior(model, n, close):
    assert worst(model, rows(model, n)) < close


@pytest.mark.parametrize("model, close", [(rate, 0.045), (share, 0.06)])
def test_so_is_one_pass_row_by_row(model, close):
    assert worst(model, rows(model, 20), **ROW_BY_ROW) < close


def test_three_rows_without_an_event_are_within_a_twentieth():
    for model in (rate, share):
        assert 0.01 < worst(model, np.zeros(3)) < 0.05


@pytest.mark.parametrize("model, n", [(rate, 3), (rate, 1000), (share, 3), (share, 20)])
def test_integrated_by_quadrature_rates_and_shares_have_their_exact_posterior_and_evidence(model, n):
    y = np.zeros(3) if n == 3 else rows(model, n)
    posterior = FixedPointVI(model, integrate=["p"]).run({"y": y}, progress_bar=False)
    assert error_of(posterior, model, y) < 1e-3
    np.testing.assert_allclose(posterior.elbo, log_evidence(model, y), atol=1e-4)
    assert posterior.info["integration"]["method"] == "lattice" and posterior.info["converged"]


def test_three_shares_are_weighed_by_importance_after_a_stream():
    y = rows(shares, 20)
    stream = ({"y": y[start : start + 5]} for start in range(0, 20, 5))
    posterior = RVGA(shares).run(stream, progress_bar=False).integrate({"y": y}, sites=["p"], progress_bar=False)
    assert error_of(posterior, shares, y) < 0.03
    np.testing.assert_allclose(posterior.elbo, log_evidence(shares, y), atol=0.01)


def test_what_is_integrated_alone_may_have_one_outcome_for_all_rows():
    covariance = 0.5 + np.eye(6)
    y = np.linspace(0.0, 2.0, 6)

    def model(y):
        level = numpyro.sample("level", dist.Normal(0.0, 2.0))
        numpyro.sample("y", dist.MultivariateNormal(level * jnp.ones(len(y)), covariance), obs=y)

    posterior = FixedPointVI(model, integrate=["level"]).run({"y": y}, progress_bar=False)
    precision = 0.25 + np.linalg.solve(covariance, np.ones(6)).sum()
    np.testing.assert_allclose(posterior.mean, [np.linalg.solve(covariance, y).sum() / precision], atol=1e-3)
    np.testing.assert_allclose(posterior.covariance, [[1 / precision]], rtol=1e-2)
