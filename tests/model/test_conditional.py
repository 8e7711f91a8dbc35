"""Models with some latent sites held at values in unconstrained space have the log joint density of the model."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.infer.util import log_density
from references import potential_of

from numpyro_rvga.model.handlers.conditional import PREFIX, conditional_model

Y = np.array([0.3, -0.4, 1.0])


def model(weight):
    with handlers.scale(scale=weight):
        scale = numpyro.sample("scale", dist.Gamma(3.0, jnp.ones((2, 3))).to_event(1))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    numpyro.sample("y", dist.Normal(mean, scale.sum(axis=0)).to_event(1), obs=Y)


@pytest.mark.parametrize("weight", [1.0, 2.5, np.array([0.5, 3.0])], ids=str)
def test_the_log_joint_density_is_that_of_the_model(weight):
    potential, size = potential_of(lambda: model(weight), ["scale", "mean"])
    z = np.random.default_rng(0).normal(size=size)
    given = conditional_model(lambda: model(weight), {"scale": np.zeros((2, 3))})
    found = log_density(given, (), {}, {PREFIX + "scale": z[:6].reshape(2, 3), "mean": z[6]})[0]
    np.testing.assert_allclose(found, -potential(z), rtol=1e-10)
