"""Exponential families of single entries against SciPy's gamma and beta distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_rvga.core.exponential import Entries, regressed

A = np.array([0.05, 0.3, 1.0, 5.0, 200.0, 5e3, 1e6, 100.0, 1.5])
B = np.array([1e-3, 1.0, 2.0, 30.0, 0.1, 3.0, 1.0, 1e6, 1e6])
NATURAL = np.stack([A, B], axis=-1)
SCORES = np.array([-8.0, -3.0, -1.0, 0.0, 0.4, 2.0, 5.0])


def entries(is_gamma, dtype=float, sign=1.0, offset=0.0):
    ones = jnp.ones(len(A), dtype)
    return Entries(jnp.full(len(A), is_gamma), sign * ones, offset * ones)


def variables(is_gamma):
    return [stats.gamma(a, scale=1 / b) if is_gamma else stats.beta(a, b) for a, b in NATURAL]


def scores(is_gamma, theta):
    """Of theta (K, H) under SciPy's distributions, from the smaller tail."""
    found = []
    for j, (variable, (a, b)) in enumerate(zip(variables(is_gamma), NATURAL)):
        t = theta[:, j]
        low = variable.cdf(np.exp(t) if is_gamma else 1 / (1 + np.exp(-t)))
        high = variable.sf(np.exp(t)) if is_gamma else stats.beta(b, a).cdf(1 / (1 + np.exp(t)))
        found.append(np.where(low < 0.5, stats.norm.ppf(low), -stats.norm.ppf(high)))
    return np.transpose(found)


@pytest.mark.parametrize("is_gamma", [True, False])
@pytest.mark.parametrize("dtype, close", [(jnp.float64, 2e-4), (jnp.float32, 0.02)])
def test_quantiles_are_those_of_scipy(is_gamma, dtype, close):
    wanted = np.broadcast_to(SCORES[:, None], (len(SCORES), len(A)))
    theta = jax.jit(entries(is_gamma, dtype).quantile)(jnp.asarray(NATURAL, dtype), jnp.asarray(wanted, dtype))
    with np.errstate(over="ignore"):
        found = scores(is_gamma, np.asarray(theta, np.float64))
    usable = np.isfinite(found)  # e^700 is no number
    assert usable.mean() > 0.9
    np.testing.assert_allclose(found[usable], wanted[usable], atol=close)
    ordinary = usable & (A < 1e3) & (B < 1e3) & (np.abs(wanted) < 4)
    np.testing.assert_allclose(found[ordinary], wanted[ordinary], atol=1e-10 if dtype == jnp.float64 else 1e-3)


@pytest.mark.parametrize("is_gamma", [True, False])
def test_densities_moments_and_divergences_are_those_of_quadrature(is_gamma):
    family, some = entries(is_gamma), slice(1, 4)
    z, weights = np.polynomial.hermite_e.hermegauss(80)
    theta = np.asarray(family.quantile(jnp.asarray(NATURAL), jnp.asarray(z[:, None] * np.ones(len(A)))))
    weights = weights / weights.sum()

    def expected(values):
        return np.tensordot(weights, np.asarray(values), 1)[some]

    np.testing.assert_allclose(family.mean(jnp.asarray(NATURAL))[some], expected(theta), rtol=1e-6)
    variance = expected(theta**2) - expected(theta) ** 2
    np.testing.assert_allclose(family.variance(jnp.asarray(NATURAL))[some], variance, rtol=1e-4)
    statistics = expected(family.statistics(theta))
    np.testing.assert_allclose(family.expected_statistics(jnp.asarray(NATURAL))[some], statistics, rtol=1e-5)
    for j, variable in enumerate(variables(is_gamma)[some], start=1):
        inner = theta[20:60, j]
        value = np.exp(inner) if is_gamma else 1 / (1 + np.exp(-inner))
        log_scale = inner if is_gamma else inner - 2 * np.log1p(np.exp(inner))
        density = family.log_prob(jnp.asarray(NATURAL), theta)[20:60, j]
        np.testing.assert_allclose(density, variable.logpdf(value) + log_scale, rtol=1e-6, atol=1e-6)
    other = NATURAL * np.array([1.2, 0.7])
    ratio = family.log_prob(jnp.asarray(NATURAL), theta) - family.log_prob(jnp.asarray(other), theta)
    one = Entries(*(x[some] for x in family))
    np.testing.assert_allclose(one.kl_divergence(NATURAL[some], other[some]), expected(ratio).sum(), rtol=1e-5)


def test_an_entry_may_be_reflected_and_moved():
    own, moved = entries(True), entries(True, sign=-1.0, offset=0.5)
    natural, z = jnp.asarray(NATURAL), jnp.asarray(SCORES[1:-1, None] * np.ones(len(A)))
    np.testing.assert_allclose(moved.quantile(natural, -z), 0.5 - own.quantile(natural, z), rtol=1e-12)
    np.testing.assert_allclose(moved.log_prob(natural, 0.5 - z), own.log_prob(natural, z), rtol=1e-9)
    np.testing.assert_allclose(moved.mean(natural), 0.5 - own.mean(natural))


def test_regression_finds_the_coefficients_of_what_is_linear_at_any_nodes_and_else_the_gradient():
    rng = np.random.default_rng(0)
    statistics, weights = jnp.asarray(rng.normal(size=(9, 2))), jnp.asarray(rng.uniform(size=9))
    found, residual, _ = regressed(statistics, 3 + statistics @ jnp.array([2.0, -0.5]), weights)
    np.testing.assert_allclose(found, [2.0, -0.5], rtol=1e-12)
    assert residual < 1e-12
    family, natural = Entries(*(x[:1] for x in entries(True))), jnp.array([[3.0, 2.0]])
    z, weights = np.polynomial.hermite_e.hermegauss(60)
    weights = jnp.asarray(weights / weights.sum())

    def expectation(natural):  # of sqrt(h) log(1 + h)
        theta = jnp.linspace(-14.0, 4.0, 4001)[:, None]
        density = jnp.exp(family.log_prob(natural, theta))[:, 0]
        return jnp.sum(density * value(theta[:, 0])) * (theta[1, 0] - theta[0, 0])

    def value(theta):
        return jnp.exp(theta / 2) * jnp.log1p(jnp.exp(theta))

    theta = family.quantile(natural, jnp.asarray(z)[:, None])
    found, residual, _ = regressed(family.statistics(theta)[:, 0], value(theta[:, 0]), weights)
    fisher = jax.jacfwd(family.expected_statistics)(natural)[0, :, 0]
    np.testing.assert_allclose(found, np.linalg.solve(fisher, jax.grad(expectation)(natural)[0]), rtol=1e-6)
    assert residual > 1e-3
