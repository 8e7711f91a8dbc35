"""Predictions of models that read the values of their data, which have none under a transformation of JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

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


def two_tables(xa, xb, ya=None, yb=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("ya", dist.Normal(slope * xa, 0.1), obs=ya)
    numpyro.sample("yb", dist.Normal(10.0 + slope * xb, 0.1), obs=yb)


@pytest.mark.parametrize("lengths", [(40, 15), (15, 40)])
def test_new_rows_of_each_of_two_tables_are_predicted(lengths):
    xa, xb = (RNG.normal(size=n) for n in lengths)
    data = {"xa": xa, "xb": xb, "ya": xa, "yb": 10.0 + xb}
    posterior = RVGA(two_tables).run(data, progress_bar=False)
    drawn = posterior.predictive(jax.random.key(0), {"xa": np.arange(3.0), "xb": np.array([5.0, 6.0])})
    np.testing.assert_allclose(drawn["ya"].mean(0), np.arange(3.0), atol=0.1)
    np.testing.assert_allclose(drawn["yb"].mean(0), [15.0, 16.0], atol=0.2)


def counts_of_steps(y):
    base = numpyro.sample("base", dist.Normal(0.0, 1.0))

    def step(before, now):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(base) * (1 + before), 2.0), obs=now)
        return now, None

    scan(step, y[0], y[1:])


def test_outcomes_of_steps_are_drawn_one_by_one():
    """Their distributions are made of others."""
    y = np.array([2, 0, 3, 1, 4, 2, 2, 0, 1, 3, 5, 1, 2, 0, 3, 2])
    posterior = RVGA(counts_of_steps).run({"y": y}, progress_bar=False)
    assert set(posterior.sample_posterior(jax.random.key(0), (3,), {"y": y})) == {"base"}
    drawn = posterior.predictive(jax.random.key(0), {"y": y}, 4000)["y"]
    base, variance = posterior.mean[0], posterior.covariance[0, 0]
    np.testing.assert_allclose(drawn.mean(0), np.exp(base + variance / 2) * (1 + y[:-1]), rtol=0.1)
    correlations = np.corrcoef((np.asarray(drawn) / (1 + y[:-1])).T)
    assert np.all(np.abs(correlations - np.eye(15)) < 0.25)  # they share one parameter
