"""Polynomials are fitted by values and gradients, and left-out points are foretold as by fits without them."""

import numpy as np
import pytest

from numpyro_rvga.engines.integration.polynomials import Coordinates, fit

SIZE = 4


def function(x):
    """A cubic polynomial of products of at most two coordinates, and its gradient."""
    value = 1 + x[:, 0] - x[:, 1] * x[:, 2] + 0.5 * x[:, 3] ** 2 * x[:, 0] - 0.3 * x[:, 1] ** 3
    slopes = np.stack(
        [1 + 0.5 * x[:, 3] ** 2, -x[:, 2] - 0.9 * x[:, 1] ** 2, -x[:, 1], x[:, 3] * x[:, 0]],
        axis=1,
    )
    return value, slopes


def points(count):
    """Points z, and coordinates sinh(z) in which the function is a polynomial."""
    z = np.random.default_rng(0).normal(size=(count, SIZE))
    at = Coordinates(np.sinh(z), np.cosh(z))
    value, slopes = function(at.values)
    return at, value, slopes * at.slopes


def test_gradients_make_few_points_enough():
    at, values, gradients = points(14)
    found = fit(at, values, gradients, np.ones(14), 3)
    assert len(found.polynomial.coefficients) > 14
    others = points(200)
    np.testing.assert_allclose(found.polynomial(others[0].values), others[1], rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("degree", [2, 3])
def test_each_point_is_foretold_by_the_others(degree):
    at, values, gradients = points(40)
    rng = np.random.default_rng(1)
    values, root = values + rng.normal(size=40), rng.uniform(0.5, 1.0, 40)
    found = fit(at, values, gradients, root, degree)
    for left_out in (0, 7):
        others = np.arange(40) != left_out
        without = Coordinates(at.values[others], at.slopes[others])
        again = fit(without, values[others], gradients[others], root[others], degree)
        expected = again.polynomial(at.values[left_out : left_out + 1])[0]
        np.testing.assert_allclose(found.without_own[left_out], expected, rtol=0.1, atol=0.05)


@pytest.mark.parametrize(("size", "count"), [(4, 3), (30, 400)])
def test_there_is_no_fit_of_more_coefficients_than_the_points_can_tell_or_than_are_quick(size, count):
    x = np.random.default_rng(0).normal(size=(count, size))
    at = Coordinates(x, np.ones_like(x))
    assert fit(at, np.zeros(count), np.zeros_like(x), np.ones(count), 3) is None
