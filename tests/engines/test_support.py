"""Likelihoods that are zero for some parameters: no Gaussian has a finite bound."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA

DATA = {"y": 2 * np.random.default_rng(0).beta(3, 3, 60)}


def shares_of_a_largest_value(y):
    """Outcomes between zero and an unknown largest value."""
    most = numpyro.sample("most", dist.LogNormal(0, 1))
    inside = y < most
    share = jnp.where(inside, y / most, 0.5)
    with numpyro.plate("rows", len(y)):
        numpyro.factor("y", jnp.where(inside, 2 * jnp.log(share * (1 - share)) - jnp.log(most), -jnp.inf))


def log_joint(log_most):
    """Up to a constant, by location, on a grid of places."""
    shares = DATA["y"] / np.exp(log_most)[:, None]
    with np.errstate(invalid="ignore", divide="ignore"):
        each = 2 * np.log(shares * (1 - shares)) - log_most[:, None]
    return np.where((shares < 1).all(axis=1), each.sum(axis=1), -np.inf) - 0.5 * log_most**2


@pytest.fixture(scope="module")
def posterior():
    with pytest.warns(UserWarning, match="no Gaussian has a finite bound"):
        return RVGA(shares_of_a_largest_value).run(DATA, progress_bar=False)


def test_laplaces_approximation_stands_for_the_best_gaussian(posterior):
    grid = np.linspace(0.5, 1.5, 100_001)
    values = log_joint(grid)
    best = np.argmax(values)
    step = 20
    curvature = (values[best + step] - 2 * values[best] + values[best - step]) / (grid[step] - grid[0]) ** 2
    np.testing.assert_allclose(posterior.mean, grid[best], atol=2e-5)
    np.testing.assert_allclose(posterior.covariance, -1 / curvature, rtol=0.01)
    assert posterior.elbo is None
    assert posterior.info["scheme"] == "laplace" and "log-likelihood of -inf" in posterior.info["no_bound"]


def test_resampled_draws_are_the_posteriors(posterior):
    grid = np.linspace(0.3, 1.5, 4001)
    weights = np.exp(log_joint(grid) - log_joint(grid).max())
    mean = np.average(np.exp(grid), weights=weights)
    deviation = np.sqrt(np.average((np.exp(grid) - mean) ** 2, weights=weights))
    drawn = posterior.resample(DATA, num_samples=4000, rng_key=jax.random.key(0))["posterior"]["most"]
    assert abs(float(drawn.mean()) - mean) < 0.1 * deviation
    assert abs(np.log(float(drawn.std()) / deviation)) < 0.1


def test_the_bounds_error_stays_where_no_point_of_the_prior_is_possible():
    def later(y):
        start = numpyro.sample("start", dist.Normal(100, 1))
        with numpyro.plate("rows", len(y)):
            numpyro.factor("y", jnp.where(y > start, start - y, -jnp.inf))

    with pytest.raises(ValueError, match="site 'y' gives row 0 a log-likelihood of -inf"):
        RVGA(later).run({"y": np.array([0.5, 1.0, 2.0])}, progress_bar=False)
