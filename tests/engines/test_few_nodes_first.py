"""Searches of many nodes begin with few: where they end, and what that saves."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import numpy as jnp

from numpyro_rvga import FixedPointVI


def bounded_scale(x, y=None):
    """A scale of uniform prior: no closed form."""
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.Uniform(0, 10))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + slope * x, scale), obs=y)


def process(x, y=None):
    """One factor of all rows."""
    length = numpyro.sample("length", dist.LogNormal(0, 0.5))
    variance = numpyro.sample("variance", dist.LogNormal(0, 0.5))
    kernel = variance * jnp.exp(-0.5 * (x[:, None] - x) ** 2 / length**2) + 0.1 * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(len(x)), kernel), obs=y)


def data(count):
    rng = np.random.default_rng(0)
    x = np.linspace(-2, 2, count)
    return {"x": x, "y": np.sin(2 * x) + 0.3 * rng.normal(size=count)}


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
@pytest.mark.parametrize("model, count", [(bounded_scale, 150), (process, 6)])
def test_few_steps_are_left_for_many_nodes_and_they_end_where_all_of_them_would(model, count, double, monkeypatch):
    with jax.enable_x64(double):
        found = FixedPointVI(model).run(data(count), progress_bar=False)
        monkeypatch.setattr("numpyro_rvga.engines.engine.Engine._takes_many_nodes", lambda *_: False)
        by_many = FixedPointVI(model).run(data(count), progress_bar=False)
    assert found.info["converged"] and len(found.info["bounds"]) < min(8, len(by_many.info["bounds"]))
    deviation = np.sqrt(np.diagonal(by_many.covariance))
    np.testing.assert_allclose((found.mean - by_many.mean) / deviation, 0, atol=2e-3)
    np.testing.assert_allclose(found.elbo, by_many.elbo, atol=1e-5 if double else 2e-3)
    assert np.all(np.diff(found.info["bounds"]) > -1e-4)
