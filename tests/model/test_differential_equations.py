"""Stochastic differential equations, whose distribution holds a function of latent sites."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.stats import norm

from numpyro_rvga import RVGA
from numpyro_rvga.model import Program
from numpyro_rvga.model.handlers.tracing import elements

STEP, SIZE = 0.5, 12
TIMES = STEP * np.arange(SIZE)
Y = np.random.default_rng(0).normal(0.7, 0.4, SIZE)


def pulled_to_its_level(y):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    path = numpyro.sample("path", dist.EulerMaruyama(TIMES, lambda x, t: (level - x, 0.5), dist.Normal(0.0, 1.0)))
    numpyro.sample("y", dist.Normal(path, 0.3), obs=y)


def test_a_linear_equation_has_its_exact_posterior():
    """All terms are squares of residuals that are linear in level and path, over their standard deviations."""
    posterior = RVGA(pulled_to_its_level).run({"y": Y}, progress_bar=False)
    level, path = np.eye(1 + SIZE)[0], np.eye(1 + SIZE)[1:]
    steps = (path[1:] - path[:-1] - STEP * (level - path[:-1])) / (0.5 * np.sqrt(STEP))
    matrix = np.vstack([level / 2, path[0], steps, path / 0.3])
    target = np.concatenate([np.zeros(2 + SIZE - 1), Y / 0.3])
    covariance = np.linalg.inv(matrix.T @ matrix)
    assert posterior.site_names == ("level", "path")
    np.testing.assert_allclose(posterior.mean, covariance @ matrix.T @ target, atol=1e-3)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-3)


def of_unknown_noise(y):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.3))
    path = numpyro.sample("path", dist.EulerMaruyama(TIMES, lambda x, t: (level - x, noise), dist.Normal(0.0, 1.0)))
    numpyro.sample("y", dist.Normal(path, 0.3), obs=y)


@pytest.mark.parametrize("theta", np.random.default_rng(1).normal(size=(2, 2 + SIZE)))
def test_a_prior_is_that_of_the_function_at_each_theta(theta):
    program = Program(of_unknown_noise, {"y": Y}, {}, whole=True)
    level, log_noise, path = theta[0], theta[1], theta[2:]
    steps = norm.logpdf(path[1:], path[:-1] + STEP * (level - path[:-1]), np.exp(log_noise) * np.sqrt(STEP))
    others = norm.logpdf([level, log_noise, path[0]], [0.0, -0.5, 0.0], [2.0, 0.3, 1.0])
    record = jax.jit(lambda theta: elements(program.records(theta, program.example_rows)["path"]))
    np.testing.assert_allclose(record(theta).sum(), steps.sum() + others[2], rtol=1e-5)
    np.testing.assert_allclose(program.log_prior(jnp.asarray(theta)), steps.sum() + others.sum(), rtol=1e-5)
