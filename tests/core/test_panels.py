"""Integrals by panels against closed forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from numpyro_rvga.core.expectations.by_nodes import normal_integral


def integral(phi, tolerance=1e-10):
    def function(z):
        value, slope = jax.value_and_grad(phi)(z)
        return value, slope, jnp.stack([value, slope])

    return jax.jit(lambda: normal_integral(function, jnp.float64, tolerance))()


@pytest.mark.parametrize("place", [-6.0, -1.3, 0.0, 0.7, 2.0 / 3, 4.0])
def test_a_kink_is_found_wherever_it_is(place):
    (value, slope), _ = integral(lambda z: jnp.abs(z - place))
    at, below = stats.norm.pdf(place), stats.norm.cdf(place)
    np.testing.assert_allclose(value, place * (2 * below - 1) + 2 * at, atol=1e-9)
    np.testing.assert_allclose(slope, 1 - 2 * below, atol=1e-8)


@pytest.mark.parametrize("width", [1.0, 1e-2, 1e-4])
def test_a_bend_far_narrower_than_the_normal_is_resolved(width):
    (value, slope), error = integral(lambda z: width * jnp.logaddexp(0.0, (z - 0.4) / width))
    grid = np.linspace(-9, 9, 4_000_001)
    density = stats.norm.pdf(grid)
    exact = np.trapezoid(width * np.logaddexp(0, (grid - 0.4) / width) * density, grid)
    np.testing.assert_allclose(value, exact, atol=1e-7)
    np.testing.assert_allclose(
        slope, np.trapezoid(density / (1 + np.exp(-np.clip((grid - 0.4) / width, -700, 700))), grid), atol=1e-7
    )
    assert float(error) < 1e-6


def test_an_integral_that_does_not_exist_is_not_finite():
    (value, _), _ = integral(lambda z: -jnp.exp(200 * z))
    assert not np.isfinite(value) or value < -1e300


def test_single_precision_stops_at_its_rounding():
    def function(z):
        return jnp.abs(z), jnp.sign(z), jnp.abs(z)[None]

    found, _ = jax.jit(lambda: normal_integral(function, jnp.float32, 1e-12))()
    np.testing.assert_allclose(found[0], np.sqrt(2 / np.pi), rtol=1e-5)
