"""Node-based expectations against dense numerical integration, for all orders of Corollary 1.1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_rvga.core.expectations import by_nodes as ex


def logistic(u):
    return -jnp.logaddexp(0.0, -u[0])


def student(u):
    return -2.5 * jnp.log1p((u[0] - 1.0) ** 2 / 4)


def laplace(u):
    return -jnp.abs(u[0] - 0.5)


def poisson(u):
    return 3 * u[0] - jnp.exp(u[0])


quadrature = jax.jit(ex.quadrature, static_argnums=(0, 1))


def from_nodes(density, mean, covariance, nodes):
    return jax.jit(lambda m, s: ex.from_nodes(density, m, s, *nodes, 2))(mean, covariance)


def dense(function, mean, deviation, feature):
    grid = np.concatenate([mean + deviation * np.linspace(-10, 10, 200_001), feature + np.linspace(-80, 80, 200_001)])
    grid = np.unique(grid[np.abs(grid - mean) < 10 * deviation])
    return np.trapezoid(function(grid) * stats.norm(mean, deviation).pdf(grid), grid)


@pytest.mark.parametrize("deviation", [1e-3, 1.0, 30.0, 1e3])
@pytest.mark.parametrize("shift", [-1.0, 0.3])
@pytest.mark.parametrize("order", [2, 1, 0])
def test_quadrature_resolves_a_feature_a_thousand_times_narrower_or_wider_than_q(deviation, shift, order):
    mean = shift * deviation
    value, gradient, hessian = quadrature(order, logistic, jnp.array([mean]), jnp.array([[deviation**2]]))
    sigmoid = lambda a: 0.5 * (1 + np.tanh(0.5 * a))  # noqa: E731
    np.testing.assert_allclose(value, dense(lambda a: -np.logaddexp(0, -a), mean, deviation, 0.0), rtol=1e-6)
    np.testing.assert_allclose(gradient[0], dense(lambda a: sigmoid(-a), mean, deviation, 0.0), atol=1e-6)
    slope = dense(lambda a: sigmoid(a) * sigmoid(-a), mean, deviation, 0.0)
    np.testing.assert_allclose(-hessian[0, 0], slope, rtol=5e-4 if order == 0 else 1e-5)


@pytest.mark.parametrize("density", [logistic, student, poisson])
def test_the_three_orders_agree_on_smooth_densities(density):
    mean, covariance = jnp.array([0.4]), jnp.array([[0.8]])
    found = [quadrature(o, density, mean, covariance) for o in (2, 1, 0)]
    for other in found[1:]:
        for a, b in zip(found[0], other):
            np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("order", [1, 0])
def test_lower_orders_see_the_curvature_of_a_kink_that_the_hessian_misses(order):
    mean, variance = jnp.array([0.1]), 0.7
    hessian = quadrature(order, laplace, mean, jnp.array([[variance]]))[2][0, 0]
    expected = -2 * stats.norm(0.1, np.sqrt(variance)).pdf(0.5)  # -|u - 1/2| bends by -2 at 1/2
    np.testing.assert_allclose(hessian, expected, rtol=1e-7)
    missed = quadrature(2, laplace, mean, jnp.array([[variance]]))[2][0, 0]
    assert missed == 0


@pytest.mark.parametrize("size", [2, 3, 6])
@pytest.mark.parametrize("rule", ["sigma_points", "monte_carlo", "hermite"])
def test_rules_are_exact_for_quadratics_even_if_the_covariance_is_singular(size, rule):
    if rule == "hermite" and size > 3:
        pytest.skip("Gauss-Hermite is for at most three predictors")
    rng = np.random.default_rng(size)
    slope, curvature = rng.normal(size=size), rng.normal(size=(size, size))
    curvature = curvature + curvature.T
    mean, root = jnp.asarray(rng.normal(size=size)), rng.normal(size=(size, size))
    root[:, -1] = 0.0
    covariance = jnp.asarray(root @ root.T)
    density = lambda u: slope @ u + 0.5 * u @ curvature @ u  # noqa: E731
    if rule == "hermite":
        nodes = ex.hermite_rule(size, ex.HERMITE_NODES[size])
    else:
        nodes = ex.sigma_points(size) if rule == "sigma_points" else ex.monte_carlo_points([0], 64, size)
    value, gradient, hessian = from_nodes(density, mean, covariance, nodes)
    np.testing.assert_allclose(value, density(mean) + 0.5 * np.trace(curvature @ covariance), rtol=1e-10)
    np.testing.assert_allclose(gradient, slope + curvature @ mean, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(hessian, curvature, rtol=1e-9, atol=1e-9)


def test_monte_carlo_converges_to_quadrature():
    density = lambda u: -jnp.logaddexp(0.0, u[0] + 0.5 * u[1])  # noqa: E731
    mean, covariance = jnp.array([0.3, -1.0]), jnp.array([[1.0, 0.3], [0.3, 2.0]])
    exact = quadrature(2, density, mean, covariance)
    errors = []
    for count in (64, 16384):
        found = from_nodes(density, mean, covariance, ex.monte_carlo_points([1], count, 2))
        errors.append(max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(exact, found)))
    assert errors[1] < 0.01 < 0.5
    assert errors[1] < errors[0]
