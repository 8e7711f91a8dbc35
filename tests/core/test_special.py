"""Special functions against SciPy's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from scipy import special

from numpyro_rvga.core.jaxprs.symbolic import factorize
from numpyro_rvga.core.special import log_beta, log_gamma, maximum, minimum

SIZES = np.concatenate([10.0 ** np.linspace(-10, 20, 301), np.linspace(0.01, 20, 300), [9999.9, 10000.1]])
PRECISION = {jnp.float64: 1e-14, jnp.float32: 2e-6}


def off(found, truth):
    """In units of the truth where that is large."""
    return np.max(np.abs(found - truth) / np.maximum(1, np.abs(truth)))


@pytest.mark.parametrize("dtype", PRECISION)
def test_log_gamma_and_its_slopes_are_as_exact_as_the_precision(dtype):
    x = SIZES.astype(dtype)
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(log_gamma)))(x)
    assert values.dtype == dtype
    assert off(values, special.gammaln(x.astype(float))) < PRECISION[dtype]
    assert off(slopes, special.digamma(x.astype(float))) < PRECISION[dtype]


def test_log_gamma_of_negative_arguments_is_that_of_the_absolute_value():
    x = np.array([-0.3, -1.5, -2.7, -3.4])
    np.testing.assert_allclose(log_gamma(jnp.asarray(x)), special.gammaln(x), rtol=1e-9)


@pytest.mark.parametrize("dtype", PRECISION)
def test_log_beta_does_not_cancel_at_any_ratio(dtype):
    """B(n, b) = (n - 1)! / (b (b + 1) ... (b + n - 1))."""
    rng = np.random.default_rng(0)
    a = rng.integers(1, 30, 1000).astype(dtype)
    b = 10.0 ** rng.uniform(-5, 10, 1000).astype(dtype)
    values, slopes = jax.jit(jax.vmap(jax.value_and_grad(log_beta, argnums=(0, 1))))(a, b)
    assert off(jax.vmap(log_beta)(b, a), values) < 5 * PRECISION[dtype]
    a, b = a.astype(float), b.astype(float)
    factors = np.log(b[:, None] + np.arange(30)) - np.log(np.maximum(np.arange(30), 1))
    truth = -np.sum(factors * (np.arange(30) < a[:, None]), axis=1)
    assert off(values, truth) < 5 * PRECISION[dtype]
    for x, slope in zip((a, b), slopes):
        assert off(slope, special.digamma(x) - special.digamma(a + b)) < 20 * PRECISION[dtype]


def test_slopes_are_right_however_the_compiler_rounds():
    """Compiled well, an argument may be computed once more, rounded in another way: it must not count as another."""
    nodes = -3 + jnp.array([0.0, 0.1, -0.1])

    def total(size):
        share = jax.nn.sigmoid(nodes)
        a, b = share * size, (1 - share) * size
        return jnp.sum(log_beta(4.0 + a, 2840.0 + b) - log_beta(a, b))

    options = {"xla_backend_optimization_level": 3, "xla_llvm_disable_expensive_passes": False}
    slope = jax.jit(jax.grad(total)).lower(80.3).compile(options)
    numeric = (total(80.3 + 1e-4) - total(80.3 - 1e-4)) / 2e-4
    np.testing.assert_allclose(slope(80.3), numeric, rtol=1e-6)


@pytest.mark.parametrize("function, jaxs", [(maximum, jnp.maximum), (minimum, jnp.minimum)])
def test_maxima_and_their_slopes_are_jaxs(function, jaxs):
    a = jnp.array([0.0, 1.0, -2.0, jnp.nan, 3.0, -jnp.inf, 4.0])
    b = jnp.array([0.0, 1.5, -3.0, 1.0, jnp.nan, -jnp.inf, 4.0])
    np.testing.assert_array_equal(function(a, b), jaxs(a, b))
    found, expected = (
        jax.vmap(jax.grad(f, argnums=(0, 1)))(a[jnp.array([0, 1, 2, 6])], b[jnp.array([0, 1, 2, 6])])
        for f in (function, jaxs)
    )
    np.testing.assert_array_equal(found, expected)
    assert function(jnp.array(3), jnp.array(4)).dtype == jnp.array(3).dtype


def test_a_function_of_the_users_that_is_named_max_stays_theirs():
    @jax.jit
    def max(a, b):
        return jnp.logaddexp(a, b)

    theta = jnp.array([0.3, -0.4])
    split = factorize(lambda t: jnp.sin(max(t[0], t[1])), jax.ShapeDtypeStruct((2,), theta.dtype))
    found = split.density(split.predictors(theta, ()), split.constants(()))
    np.testing.assert_allclose(found, jnp.sin(jnp.logaddexp(0.3, -0.4)), rtol=1e-12)


@pytest.mark.parametrize(
    "density",
    [
        lambda t, y: dist.GammaPoisson(jnp.exp(t[0]), jnp.exp(t[1])).log_prob(y),
        lambda t, y: dist.StudentT(jnp.exp(t[0]), t[1], 2.0).log_prob(y),
        lambda t, y: dist.Beta(jnp.exp(t[0]), jnp.exp(t[1])).log_prob(y / 10),
    ],
)
def test_densities_are_read_with_them(density):
    theta, y = jnp.array([0.3, -0.4]), jnp.array(3.0)
    split = factorize(density, theta, y)
    known = split.constants((y,))
    assert "gamma" not in str(jax.make_jaxpr(split.density)(theta, known))
    found = split.density(split.predictors(theta, (y,)), known)
    np.testing.assert_allclose(found, density(theta, y), rtol=1e-13)
