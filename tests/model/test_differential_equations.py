"""Stochastic differential equations, whose distribution holds a function of latent sites."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_rvga import RVGA

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


def by_its_steps(y):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    noise = numpyro.sample("noise", dist.LogNormal(-0.5, 0.3))
    path = numpyro.sample("path", dist.Normal(0.0, 1.0).expand([SIZE]).mask(jnp.arange(SIZE) == 0))
    steps = dist.Normal(path[:-1] + STEP * (level - path[:-1]), noise * np.sqrt(STEP)).log_prob(path[1:])
    numpyro.factor("steps", steps.sum())
    numpyro.sample("y", dist.Normal(path, 0.3), obs=y)


def test_an_equation_is_read_as_its_steps():
    found, expected = (RVGA(model).run({"y": Y}, progress_bar=False) for model in (of_unknown_noise, by_its_steps))
    deviation = np.sqrt(np.diag(expected.covariance))
    np.testing.assert_allclose((found.mean - expected.mean) / deviation, 0, atol=0.1)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)) / deviation, 1, atol=0.1)
