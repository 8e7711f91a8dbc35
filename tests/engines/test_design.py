"""What a mixture is made of: its moments are those that were asked for, and x given h moves with h."""

import numpy as np
import pytest

from numpyro_rvga.engines.integration import design
from numpyro_rvga.engines.integration.design import _slopes, narrow_design, thinned
from numpyro_rvga.engines.integration.nested import Point


def points_of(count, size=8):
    h = np.random.default_rng(0).normal(size=(count, size))
    return [Point(x, 0.0, None, None, True, 0.0) for x in h], np.full(count, 1 / count)


def moments(point):
    return np.array([np.exp(point.h[0])]), np.array([[0.1]])


def test_points_get_masses_of_the_right_mean_and_variances():
    points, mass = points_of(400)
    mean, variances = np.linspace(-0.1, 0.1, 8), np.linspace(0.9, 1.1, 8)
    found = narrow_design(points, mass, moments, mean, np.diag(variances))
    middle = found.mass @ found.h
    around = found.mass @ (found.h - middle) ** 2 + np.sum(found.kernel**2, axis=1)
    np.testing.assert_allclose(middle, mean, atol=1e-4)
    np.testing.assert_allclose(around, variances, rtol=1e-3)
    np.testing.assert_allclose(found.means[:, 0], np.exp([point.h[0] for point in points]))


def test_masses_stay_where_points_are_too_far_from_what_is_asked_for():
    points, mass = points_of(60)
    found = narrow_design(points, mass, moments, np.full(8, 1.5), 0.3 * np.eye(8))
    np.testing.assert_array_equal(found.mass, mass)


@pytest.mark.parametrize(("most", "expected"), [(1000, 99), (50, 50)])
def test_points_without_mass_are_left_out_and_some_of_too_many(most, expected, monkeypatch):
    monkeypatch.setattr(design, "MOST_NUMBERS", most)
    points, mass = points_of(100)
    mass[3] = 1e-9
    kept, masses = thinned(points, mass, moments)
    assert len(kept) == len(masses) == expected
    np.testing.assert_allclose(masses.sum(), 1)


def test_slopes_do_not_depend_on_where_zero_is():
    """Points in five dimensions are far apart: what keeps their slopes small must not draw means to zero."""
    z = np.random.default_rng(0).normal(size=(60, 5)) * 2
    means = np.tanh(z @ np.random.default_rng(1).normal(size=(5, 3)))
    np.testing.assert_allclose(_slopes(z, 1000.0 + means), _slopes(z, means), atol=1e-6)
    near, slopes = 0.3 * z, np.arange(15.0).reshape(5, 3)
    np.testing.assert_allclose(_slopes(near, 1000.0 + near @ slopes).mean(axis=0), slopes.T, atol=1e-3)
