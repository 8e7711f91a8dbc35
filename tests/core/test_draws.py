"""Expectations over draws: exact for quadratics, derivatives of their own sum, and near closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.expectations.by_nodes import monte_carlo_points
from numpyro_rvga.core.expectations.draws import by_draws
from numpyro_rvga.core.matrices.linalg import semidefinite_factor

NUM_FRESH = 4


def rule(phi, size):
    return by_draws(phi, lambda number, count: monte_carlo_points([number], count, size), NUM_FRESH)


def gaussian(size, dtype=np.float64):
    rng = np.random.default_rng(size)
    root = np.tril(rng.normal(size=(size, size))) / np.sqrt(size) + np.eye(size)
    return rng.normal(size=(1, size)).astype(dtype), (0.3 * root @ root.T)[None].astype(dtype)


@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-9), (np.float32, 2e-3)])
@pytest.mark.parametrize("size", [1, 3, 17, 60])
def test_quadratics_come_out_exact(size, dtype, tolerance):
    rng = np.random.default_rng(0)
    bend, slope = rng.normal(size=(size, size)).astype(dtype), rng.normal(size=size).astype(dtype)
    bend = (bend + bend.T) / np.sqrt(size)
    mean, covariance = gaussian(size, dtype)
    expect, fresh = rule(lambda u, _: 0.5 * u @ bend @ u + slope @ u, size)
    value, gradient, hessian = (np.asarray(x[0]) for x in expect(mean, covariance, ()))
    exact = 0.5 * mean[0] @ bend @ mean[0] + slope @ mean[0] + 0.5 * np.trace(bend @ covariance[0])
    assert value == pytest.approx(exact, rel=tolerance, abs=tolerance)
    np.testing.assert_allclose(gradient, bend @ mean[0] + slope, atol=10 * tolerance)
    np.testing.assert_allclose(hessian, bend, atol=20 * tolerance)
    np.testing.assert_allclose(fresh(mean, covariance, ())[0], exact, rtol=tolerance, atol=tolerance)


def test_a_flag_in_a_compiled_function_says_whether_few_points_will_do():
    size = 3
    mean, covariance = gaussian(size)
    expect, _ = rule(lambda u, _: jnp.sum(jnp.cos(u)) + 0.3 * u @ u, size)
    compiled = jax.jit(lambda is_coarse: expect(mean, covariance, (), is_coarse))
    few, many, known = compiled(True), compiled(False), expect(mean, covariance, ())
    for found, expected in zip(many, known):
        np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-9)
    variance = np.diagonal(covariance[0])
    exact = np.exp(-0.5 * variance) @ np.cos(mean[0]) + 0.3 * (mean[0] @ mean[0] + variance.sum())
    assert 0 < abs(many[0][0] - exact) < abs(few[0][0] - exact) < 0.02
    np.testing.assert_allclose(few[1], known[1], atol=0.02)
    np.testing.assert_allclose(few[2], known[2], atol=0.1)


def test_derivatives_are_those_of_the_sum():
    """dv/dm, and 2 dv/dS, by finite differences."""
    size = 4
    mean, covariance = gaussian(size)
    expect, _ = rule(lambda u, c: jnp.sum(jnp.cos(c * u)) + jnp.exp(u[0] * u[1]), size)
    constants = (np.ones((1, size)) * 1.3,)
    at = lambda m, s: expect(m, s, constants[0])[0][0]  # noqa: E731
    _, gradient, hessian = (np.asarray(x[0]) for x in expect(mean, covariance, constants[0]))
    step = 1e-5
    for i in range(size):
        unit = np.zeros((1, size))
        unit[0, i] = step
        assert gradient[i] == pytest.approx(
            float(at(mean + unit, covariance) - at(mean - unit, covariance)) / 2e-5, abs=1e-6
        )
        for j in range(i + 1):
            change = np.zeros((1, size, size))
            change[0, i, j] = change[0, j, i] = step
            slope = float(at(mean, covariance + change) - at(mean, covariance - change)) / 2e-5
            assert hessian[i, j] == pytest.approx(2 * slope if i == j else slope, abs=1e-5)


def test_exponentials_are_near_their_closed_form_and_fresh_draws_tell_the_error():
    size = 20
    mean, covariance = gaussian(size)
    expect, fresh = rule(lambda u, _: -jnp.sum(jnp.exp(0.5 * u)), size)
    exact = -np.exp(0.5 * mean[0] + 0.125 * np.diagonal(covariance[0]))
    value, gradient, hessian = (np.asarray(x[0]) for x in expect(mean, covariance, ()))
    others = np.asarray(fresh(mean, covariance, ())[0])
    assert abs(value - exact.sum()) < 1e-3 * size
    assert abs(others.mean() - exact.sum()) < 4 * others.std(ddof=1) / np.sqrt(NUM_FRESH) + 1e-3
    np.testing.assert_allclose(gradient, 0.5 * exact, atol=0.02)
    np.testing.assert_allclose(np.diagonal(hessian), 0.25 * exact, atol=0.1)


@pytest.mark.parametrize("rank", [5, 20])
def test_factors_of_many_columns_may_be_singular(rank):
    rng = np.random.default_rng(rank)
    half = np.eye(20, rank) + 0.1 * rng.normal(size=(20, rank))  # no pivot of the first is near rounding errors
    matrix = half @ half.T
    factor, inverse = (np.asarray(x) for x in semidefinite_factor(jnp.asarray(matrix)))
    np.testing.assert_allclose(factor @ factor.T, matrix, atol=1e-8)
    alive = np.diagonal(factor) > 0
    assert alive.sum() == rank
    np.testing.assert_allclose((inverse @ factor)[np.ix_(alive, alive)], np.eye(rank), atol=1e-6)
