"""Factors that add up an array: each of its entries is a term of few predictors."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI

SIZE = 20
EDGES = np.array([(i, (i + step) % SIZE) for i in range(SIZE) for step in (1, 3)]).T
Y = np.random.default_rng(0).normal(size=SIZE)


def differences(y):
    """An intrinsic autoregression, known only from a factor."""
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), (SIZE,)))
    numpyro.factor("neighbors", -2.0 * jnp.sum((level[EDGES[0]] - level[EDGES[1]]) ** 2))
    numpyro.sample("y", dist.Normal(level, 0.5), obs=y)


def quadratic_form(y):
    """The same, by its precision matrix."""
    precision = np.zeros((SIZE, SIZE))
    for i, j in EDGES.T:
        precision[[i, j], [i, j]] += 4.0
        precision[[i, j], [j, i]] -= 4.0
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), (SIZE,)))
    numpyro.factor("neighbors", -0.5 * level @ (jnp.asarray(precision) @ level))
    numpyro.sample("y", dist.Normal(level, 0.5), obs=y)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize("model, num_predictors", [(differences, 1), (quadratic_form, 2)])
def test_a_penalty_of_differences_gives_the_gaussian_posterior(method, model, num_predictors):
    precision = np.eye(SIZE) / 0.25
    for i, j in EDGES.T:
        precision[[i, j], [i, j]] += 4.0
        precision[[i, j], [j, i]] -= 4.0
    posterior = method(model).run({"y": Y}, progress_bar=False)
    (factor,) = [terms for terms in posterior.program.terms if terms.site == "neighbors"]
    assert factor.num_predictors == num_predictors and not factor.by_draws
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(posterior.mean, covariance @ Y / 0.25, atol=2e-4)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=2e-4)
    assert posterior.info["converged"] and posterior.info["elbo_error"] == 0
