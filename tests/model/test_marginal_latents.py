"""Latent variables of single rows, integrated out of their row: against the marginal models written by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA

RNG = np.random.default_rng(0)
SCHOOLS = {"sd": np.array([15.0, 10, 16, 11, 9, 11, 10, 18]), "y": np.array([28.0, 8, -3, 7, -1, 1, 18, 12])}
X = RNG.normal(size=40)
FIRST = RNG.random(40) < 0.3
MIXED = {"x": X, "y": np.where(FIRST, 1.2, -0.8) * X + 0.3 * RNG.normal(size=40)}
COUNTS = {"x": X, "y": RNG.poisson(np.exp(0.5 * X) * RNG.gamma(2.0, 0.5, size=40)).astype(float)}


def schools(sd, y=None):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(sd)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sd), obs=y)


def schools_by_hand(sd, y=None):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(sd)):
        numpyro.sample("y", dist.Normal(mu, jnp.sqrt(sd**2 + tau**2)), obs=y)


def mixture(x, y=None):
    b = numpyro.sample("b", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    p = numpyro.sample("p", dist.Beta(2, 2))
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(b[z] * x, 0.3), obs=y)


def mixture_by_hand(x, y=None):
    b = numpyro.sample("b", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    p = numpyro.sample("p", dist.Beta(2, 2))
    with numpyro.plate("rows", len(x)):
        first, second = (dist.Normal(b[i] * x, 0.3).log_prob(y) for i in (0, 1))
        numpyro.factor("y", jnp.logaddexp(jnp.log1p(-p) + first, jnp.log(p) + second))


def frailty(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2))
    with numpyro.plate("rows", len(x)):
        f = numpyro.sample("f", dist.Gamma(2.0, 2.0))
        numpyro.sample("y", dist.Poisson(f * jnp.exp(w * x)), obs=y)


def frailty_by_hand(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.GammaPoisson(2.0, 2.0 / jnp.exp(w * x)), obs=y)


@pytest.mark.parametrize(
    "model, by_hand, data",
    [(schools, schools_by_hand, SCHOOLS), (mixture, mixture_by_hand, MIXED), (frailty, frailty_by_hand, COUNTS)],
)
def test_the_posterior_is_that_of_the_marginal_model(model, by_hand, data):
    found = RVGA(model, local="marginal").run(data, progress_bar=False)
    expected = RVGA(by_hand).run(data, progress_bar=False)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-4)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-4)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=1e-3)


def test_options_are_checked():
    with pytest.raises(ValueError, match="local must be one of 'marginal', 'prior'"):
        RVGA(schools, local="exact")


def test_counts_without_a_largest_value_are_refused():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            n = numpyro.sample("n", dist.Poisson(3.0))
            numpyro.sample("y", dist.Normal(w * n, 1.0), obs=y)

    with pytest.raises(NotImplementedError, match=r"site 'n' is a discrete latent.*Categorical\(logits=dist.Poisson"):
        RVGA(model, local="marginal").run(MIXED, progress_bar=False)


def test_rows_log_likelihoods_are_integrals():
    program = RVGA(frailty, local="marginal").run(COUNTS, progress_bar=False).program
    found = program.log_likelihood(jnp.array([0.4]), program.inputs(COUNTS))["y"]
    expected = dist.GammaPoisson(2.0, 2.0 / jnp.exp(0.4 * X)).log_prob(COUNTS["y"])
    np.testing.assert_allclose(found, jax.device_get(expected), atol=1e-5)
