"""Predictions of models that read the values of their data, which have none under a transformation of JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA

RNG = np.random.default_rng(0)
GROUP = np.repeat(np.arange(3), 20)
Y = np.array([0.0, 1.0, -2.0])[GROUP] + 0.3 * RNG.normal(size=60)


def in_numpy(group, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0).expand([int(group.max()) + 1]))
    numpyro.sample("y", dist.Normal(level[group], 0.3), obs=y)


def in_jax(group, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0).expand([int(jnp.max(jnp.asarray(group))) + 1]))
    numpyro.sample("y", dist.Normal(level[group], 0.3), obs=y)


@pytest.mark.parametrize("model", [in_numpy, in_jax])
def test_outcomes_are_predicted_where_the_model_reads_its_data(model):
    data = {"group": GROUP, "y": Y}
    posterior = RVGA(model).run(data, progress_bar=False)
    drawn = posterior.predictive(jax.random.key(0), {"group": GROUP}, 2000)["y"]
    of_groups = np.stack([Y[k == GROUP].mean() for k in range(3)])
    np.testing.assert_allclose(drawn.mean(0), of_groups[GROUP], atol=0.05)
    predicted = posterior.to_arviz(data, num_samples=20)["posterior_predictive"]["y"]
    assert predicted.shape == (1, 20, 60)


@pytest.mark.parametrize("model", [in_numpy, in_jax])
def test_new_rows_are_predicted_where_the_model_reads_its_data(model):
    posterior = RVGA(model).run({"group": GROUP, "y": Y}, progress_bar=False)
    drawn = posterior.predictive(jax.random.key(0), {"group": np.array([2, 0])}, 2000)["y"]
    np.testing.assert_allclose(drawn.mean(0), [Y[GROUP == 2].mean(), Y[GROUP == 0].mean()], atol=0.05)
