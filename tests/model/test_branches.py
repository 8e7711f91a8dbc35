"""Models with sites in branches of NumPyro's cond are read as the same models without it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import cond
from scipy.stats import norm

from numpyro_rvga import RVGA
from numpyro_rvga.model import Program

RNG = np.random.default_rng(0)
X = RNG.normal(size=30)
Y = 0.7 * X + 0.5 * RNG.normal(size=30)


def slope_of(scale):
    slope = numpyro.sample("slope", dist.Normal(0.0, scale))
    numpyro.deterministic("twice", 2 * slope)
    return slope


def by_data(x, y):
    """A prior that the data choose."""
    slope = cond(jnp.sum(y * x) > 0, lambda _: slope_of(0.1), lambda _: slope_of(3.0), None)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(slope * x, 0.5), obs=y)


@pytest.mark.parametrize("sign, scale", [(1, 0.1), (-1, 3.0)])
def test_a_prior_that_the_data_choose_is_that_of_their_branch(sign, scale):
    y = sign * Y
    posterior = RVGA(by_data).run({"x": X, "y": y}, progress_bar=False)
    precision = X @ X / 0.25 + scale**-2
    np.testing.assert_allclose(posterior.mean, [X @ y / 0.25 / precision], rtol=1e-4)
    np.testing.assert_allclose(posterior.covariance, [[1 / precision]], rtol=1e-4)
    drawn = posterior.sample_posterior(jax.random.key(0), (3,), {"x": X, "y": y})
    np.testing.assert_allclose(drawn["twice"], 2 * drawn["slope"], rtol=1e-6)


def by_latent(x, y):
    """The sign of one site chooses the prior of another."""
    a = numpyro.sample("a", dist.Normal(1.0, 1.0))
    b = cond(
        a > 0,
        lambda a: numpyro.sample("b", dist.Normal(a, 1.0)),
        lambda a: numpyro.sample("b", dist.Normal(-a, 2.0)),
        a,
    )
    numpyro.sample("y", dist.Normal(b * x, 0.5), obs=y)


@pytest.mark.parametrize("theta", [[0.5, 0.3], [-0.7, 1.4]])
def test_a_prior_that_a_site_chooses_is_that_of_its_branch(theta):
    program = Program(by_latent, {"x": X, "y": Y}, {})
    a, b = theta
    expected = norm.logpdf(a, 1, 1) + (norm.logpdf(b, a, 1) if a > 0 else norm.logpdf(b, -a, 2))
    assert float(program.log_prior(jnp.array(theta))) == pytest.approx(expected, rel=1e-5)
