"""Closed-form expectations against dense numerical integration in NumPy."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import integrate, special, stats

from numpyro_rvga.core.expectations import closed_forms as cf

ONE, ZERO = jnp.asarray(1.0), jnp.asarray(0.0)


def dense_expectation(function, mean, deviation, features=(0.0,)):
    """E[function(a)] for a ~ N(mean, deviation^2), by adaptive integration split at the function's features."""
    low, high = mean - 12 * deviation, mean + 12 * deviation
    points = sorted({p for f in features for p in (f - 30, f - 3, f, f + 3, f + 30) if low < p < high} | {mean})
    edges = [low, *points, high]
    density = stats.norm(mean, deviation).pdf
    pieces = [
        integrate.quad(lambda a: function(a) * density(a), a, b, epsabs=1e-13) for a, b in itertools.pairwise(edges)
    ]
    return sum(p[0] for p in pieces)


@pytest.mark.parametrize("mean", [-30.0, -2.0, 0.0, 1.5, 40.0])
@pytest.mark.parametrize("deviation", [1e-3, 1.0, 10.0, 1e3])
def test_scale_mixture_of_probits_is_accurate_for_any_mean_and_variance(mean, deviation):
    coefficients = cf.Logistic(ONE, ONE, ZERO, ONE)
    value, gradient, hessian = cf.logistic_mixture(jnp.array([mean]), jnp.array([[deviation**2]]), coefficients)
    softplus = dense_expectation(lambda a: np.logaddexp(0, a), mean, deviation)
    sigmoid = dense_expectation(special.expit, mean, deviation)
    slope = dense_expectation(lambda a: special.expit(a) * special.expit(-a), mean, deviation)
    np.testing.assert_allclose(value, mean - softplus, rtol=1e-7, atol=2e-8)
    np.testing.assert_allclose(gradient[0], 1 - sigmoid, atol=1e-8)
    np.testing.assert_allclose(-hessian[0, 0], slope, atol=6e-8)


@pytest.mark.parametrize("is_high", [False, True])
@pytest.mark.parametrize("mean, deviation", [(-7.0, 0.3), (-9.0, 1.0), (-14.0, 0.05), (-20.0, 1.5), (-25.0, 0.2)])
def test_rare_outcomes_of_many_trials_are_exact_beside_their_number(mean, deviation, is_high):
    """By dense quadrature. The mixture alone has errors as large as what is expected here."""
    z = np.linspace(-12, 12, 20001)
    mass = np.exp(-0.5 * z**2) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    u = mean + deviation * z
    sigmoid = special.expit(u)
    expected = [mass @ x for x in (np.logaddexp(0, u), sigmoid, sigmoid * special.expit(-u))]
    trials, one = 1e9, jnp.ones(())
    coefficients = cf.Logistic(trials * one * is_high, trials * one, 0 * one, one)
    arguments = jnp.array([-mean if is_high else mean]), jnp.array([[deviation**2]]), coefficients
    value, gradient, hessian = jax.jit(cf.logistic_mixture)(*arguments)
    sign = 1 if is_high else -1
    found = [-value / trials, sign * gradient[0] / trials, -hessian[0, 0] / trials]
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-15)


def test_probit_form_is_the_papers_equations_58_to_61():
    m, v, y = 0.7, 4.0, 1.0
    k = np.sqrt((8 / np.pi) / (8 / np.pi + v))
    _, gradient, hessian = cf.logistic_probit(jnp.array([m]), jnp.array([[v]]), cf.Logistic(ONE * y, ONE, ZERO, ONE))
    np.testing.assert_allclose(gradient[0], y - special.expit(k * m), rtol=1e-12)
    np.testing.assert_allclose(hessian[0, 0], -k * special.expit(k * m) * special.expit(-k * m), rtol=1e-12)


@pytest.mark.parametrize("mean", [-3.0, 0.0, 2.0])
@pytest.mark.parametrize("variance", [1e-8, 0.5, 9.0])
def test_quadratic_bound_lies_below_the_expectation_and_touches_it_at_a_point(mean, variance):
    coefficients = cf.Logistic(ONE, ONE, ZERO, ONE)
    arguments = jnp.array([mean]), jnp.array([[variance]]), coefficients
    bound, exact = cf.logistic_quadratic_bound(*arguments)[0], cf.logistic_mixture(*arguments)[0]
    assert bound <= exact + 1e-8
    if variance < 1e-6:
        np.testing.assert_allclose(bound, exact, atol=1e-7)


CASES = {
    "exponential": (cf.exponential, cf.exponential_density, cf.Exponential(ONE * 3, ONE * 0.7, ONE * -1.2, ONE * 2)),
    "gaussian": (cf.gaussian, cf.gaussian_density, cf.Gaussian(ONE * 1.3, ONE * 0.6, ONE * 0.2, ONE * 1.5)),
    "gaussian, log scale": (
        cf.gaussian_log_scale,
        cf.gaussian_log_scale_density,
        cf.GaussianLogScale(ONE * 0.4, ONE * 0.1, ONE * 1.5),
    ),
    "laplace": (cf.laplace, cf.laplace_density, cf.Laplace(ONE * 0.4, ONE * 0.6, ONE * 0.1, ONE * 1.5)),
    "laplace, log scale": (
        cf.laplace_log_scale,
        cf.laplace_log_scale_density,
        cf.LaplaceLogScale(ONE * 0.4, ONE * 0.1, ONE * 1.5),
    ),
    "binomial": (cf.logistic_mixture, cf.logistic_density, cf.Logistic(ONE * 4, ONE * 9, ONE * 0.3, ONE)),
}


@pytest.mark.parametrize("case", [c for c in CASES if "laplace" in c])
def test_value_across_a_kink_equals_a_dense_sum(case):
    """Gradient and curvature then follow, by the test below."""
    expectation, density, coefficients = CASES[case]
    size = 2 if "log scale" in case else 1
    mean, covariance = jnp.array([0.3, -0.4])[:size], jnp.array([[0.5, 0.2], [0.2, 0.3]])[:size, :size]
    axes = [np.linspace(-9, 9, 2001), np.linspace(-9, 9, 201)][:size]
    grid = np.stack([g.ravel() for g in np.meshgrid(*axes, indexing="ij")], -1)
    mass = np.exp(-0.5 * (grid**2).sum(-1))
    values = jax.vmap(lambda u: density(u, coefficients))(mean + grid @ np.linalg.cholesky(covariance).T)
    np.testing.assert_allclose(expectation(mean, covariance, coefficients)[0], mass @ values / mass.sum(), rtol=1e-5)


@pytest.mark.parametrize("case", [c for c in CASES if "laplace" not in c])
def test_closed_form_equals_gauss_hermite_of_the_density_and_its_derivatives(case):
    expectation, density, coefficients = CASES[case]
    size = 2 if "log scale" in case else 1
    mean = jnp.array([0.3, -0.4])[:size]
    covariance = jnp.array([[0.5, 0.2], [0.2, 0.3]])[:size, :size]
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    grid = np.stack([g.ravel() for g in np.meshgrid(*[nodes] * size, indexing="ij")], -1)
    mass = np.prod([g.ravel() for g in np.meshgrid(*[weights / weights.sum()] * size, indexing="ij")], axis=0)
    points = mean + grid @ np.linalg.cholesky(covariance).T
    for order, found in enumerate(expectation(mean, covariance, coefficients)):
        derivative = [density, jax.grad(density), jax.hessian(density)][order]
        expected = np.tensordot(mass, jax.vmap(lambda u: derivative(u, coefficients))(points), 1)  # noqa: B023
        np.testing.assert_allclose(found, expected, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("case", CASES)
def test_gradient_and_curvature_derive_from_the_value(case):
    """Bonnet and Price: dE/dm = E[grad], 2 dE/dS = E[hess]: what makes the block bound's fixed point stationary."""
    expectation, _, coefficients = CASES[case]
    size = 2 if "log scale" in case else 1
    mean, covariance = jnp.array([0.3, -0.4])[:size], jnp.array([[0.5, 0.2], [0.2, 0.3]])[:size, :size]
    value = lambda m, s: expectation(m, s, coefficients)[0]  # noqa: E731
    _, gradient, hessian = expectation(mean, covariance, coefficients)
    np.testing.assert_allclose(jax.grad(value, 0)(mean, covariance), gradient, rtol=1e-9, atol=1e-11)
    slope = jax.grad(value, 1)(mean, covariance)
    np.testing.assert_allclose(slope + slope.T, hessian, rtol=1e-9, atol=1e-11)


OUTCOMES = {
    "normal": (cf.gaussian_log_scale_information, cf.GaussianLogScale, lambda y: (y, ZERO, ONE), [0.4, 0.3]),
    "laplace": (cf.laplace_information, cf.Laplace, lambda y: (y, jnp.asarray(0.7), ZERO, ONE), [0.4]),
    "laplace, unknown scale": (
        cf.laplace_log_scale_information,
        cf.LaplaceLogScale,
        lambda y: (y, ZERO, ONE),
        [0.4, 0.3],
    ),
}


@pytest.mark.parametrize("name", OUTCOMES)
def test_the_information_is_the_scores_variance_over_outcomes(name):
    information, form, coefficients, mean = OUTCOMES[name]
    y = jnp.asarray(np.concatenate([np.linspace(-40.0, mean[0], 200_001)[:-1], np.linspace(mean[0], 40.0, 200_001)]))
    mean = jnp.asarray(mean)
    density = lambda u, y: cf.DENSITIES[form](u, form(*coefficients(y)))  # noqa: E731
    values, scores = jax.vmap(jax.value_and_grad(density), (None, 0))(mean, y)
    weights = np.exp(values) * np.gradient(np.asarray(y))
    np.testing.assert_allclose(weights.sum(), 1.0, atol=1e-4)
    known = form(*coefficients(ONE))
    np.testing.assert_allclose(information(mean, known), np.einsum("k,ki,kj", weights, scores, scores), atol=2e-3)
