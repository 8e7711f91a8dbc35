"""Single precision: what finer rules cannot mend is not sent to them."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import MCMC, NUTS

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.engines.engine import Engine
from numpyro_rvga.engines.rounding_errors import is_worth_more, rounding_errors

RNG = np.random.default_rng(0)
X = RNG.normal(size=1000)
ROWS = {"x": X, "y": RNG.poisson(np.exp(3 + 0.5 * X))}


def negative_binomial(x, y):
    """Of a concentration that Poisson counts leave as wide as its prior: at large ones, the density is rounded."""
    a, b = numpyro.sample("a", dist.Normal(0, 5)), numpyro.sample("b", dist.Normal(0, 2))
    concentration = numpyro.sample("concentration", dist.HalfCauchy(100.0))
    numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(a + b * x), concentration), obs=y)


def fit(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return method.run(ROWS, progress_bar=False)


@pytest.fixture(scope="module")
def exact():
    with jax.enable_x64(True):
        return fit(RVGA(negative_binomial))


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_rounding_does_not_call_for_finer_rules(method, exact, monkeypatch):
    """They would take minutes, and the result is that of double precision."""
    efforts = []
    with_effort = Engine.with_effort
    monkeypatch.setattr(Engine, "with_effort", lambda *given: efforts.append(given[1:]) or with_effort(*given))
    with jax.enable_x64(False):
        posterior = fit(method(negative_binomial))
    assert posterior.info["elbo_error"] > 1e-3 and not efforts
    deviation = np.sqrt(np.diagonal(exact.covariance))
    np.testing.assert_allclose((posterior.mean - exact.mean) / deviation, 0, atol=0.1)
    np.testing.assert_allclose(np.sqrt(np.diagonal(posterior.covariance)), deviation, rtol=0.05)


def shifted(x, y, shift):
    """Student's t around ``shift``: beyond 2**24 units of the scale, single precision has no digits for it."""
    location = numpyro.sample("location", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(5))
    numpyro.sample("y", dist.StudentT(4.0, shift + location, scale), obs=shift + 0.1 * y)


@pytest.mark.parametrize("shift, is_rounded", [(0.0, False), (1e6, True)])
def test_rounding_errors_are_those_of_the_density(shift, is_rounded):
    """None to speak of near zero; large where digits cancel, and the warning says what to do."""
    with jax.enable_x64(False):
        method = RVGA(shifted)
        state = method.init(ROWS, shift=shift)._replace(num_rows=len(X))
        assert (rounding_errors(method.last_engine, state, ROWS).of_sum > 0.1) is is_rounded
        if is_rounded:
            with pytest.warns(UserWarning, match=r"32-bit numbers.*enable_x64"):
                assert not is_worth_more(method.last_engine, state, ROWS, 1.0, 0.0)


def correlated(x, y):
    scale, noise = (numpyro.sample(name, dist.HalfNormal(1.0)) for name in ("scale", "noise"))
    covariance = jnp.exp(-0.5 * ((x[:, None] - x) / scale) ** 2) + noise**2 * jnp.eye(len(x))
    numpyro.sample("y", dist.MultivariateNormal(0.0, covariance), obs=y)


def test_rounding_errors_of_a_model_that_nuts_has_run_in_single_precision_may_be_unknown():
    """JAX keeps parts of it as they were compiled, and these do not take double precision."""
    x = np.linspace(-3.0, 3.0, 30)
    data = {"x": x, "y": np.sin(x) + 0.2 * np.random.default_rng(1).normal(size=30)}
    with jax.enable_x64(False):
        mcmc = MCMC(NUTS(correlated), num_warmup=5, num_samples=5, progress_bar=False)
        mcmc.run(jax.random.key(0), **data)
        method = RVGA(correlated)
        method.run(data, progress_bar=False)
        assert rounding_errors(method.last_engine, method.state, data) is None
