"""Profiles of a skewed marginal: its proposals are densities, its coordinates Gaussian, and few points are enough."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_rvga.engines.integration.importance import integrate_by_importance
from numpyro_rvga.engines.integration.nested import Marginal, find_mode
from numpyro_rvga.engines.integration.profiles import profiles_of
from numpyro_rvga.engines.maximized_bound import Maximum
from numpyro_rvga.results.arviz import smoothed
from numpyro_rvga.results.integration import mixture_of

OFFSET = -1e5  # as of many rows
WIDTHS = np.array([1e-3, 0.2, 1.0])


def half_normal_scale(h, start):
    """log of a half-normal scale, whose density falls exponentially on the left, and three Gaussians, one narrow."""
    rest = (h[1:] - 0.5) / WIDTHS
    value = OFFSET + h[0] - 0.5 * np.exp(2 * h[0]) - 0.5 * rest @ rest
    return Maximum(value, np.concatenate([[1 - np.exp(2 * h[0])], -rest / WIDTHS]), start, True)


def halves(h, start):
    return Maximum(-0.5 * h @ h if h[0] < 1 else -np.inf, -h, start, True)


def mode_of(solve, size):
    marginal = Marginal(lambda h: None, solve)
    return marginal, find_mode(marginal, np.zeros(size), np.full(size, 2.0))


@pytest.fixture(scope="module")
def skewed():
    return mode_of(half_normal_scale, 4)


def test_mode_is_found_however_large_the_bound(skewed):
    np.testing.assert_allclose(skewed[1].point.h, [0, 0.5, 0.5, 0.5], atol=0.05)
    np.testing.assert_allclose(np.diag(skewed[1].axes)[1:], WIDTHS, rtol=0.1)


def test_climbing_goes_on_where_points_around_the_mode_are_higher():
    """A slope so small that a search ends on it."""

    def solve(h, start):
        if h[0] < 3:
            return Maximum(1e-3 * h[0], np.array([1e-3]), start, True)
        return Maximum(3e-3 + 5 - 5 * (h[0] - 4) ** 2, -10 * (h - 4), start, True)

    marginal = Marginal(lambda h: None, solve)
    mode = find_mode(marginal, np.zeros(1), np.full(1, 10.0), np.array([2.5]))
    np.testing.assert_allclose(mode.point.h, 4.0, atol=0.05)


def test_proposals_are_densities_and_coordinates_are_gaussian(skewed):
    marginal, mode = skewed
    profiles = profiles_of(marginal, mode, mode.axes)
    rng = np.random.default_rng(0)
    z = profiles.propose(rng.random((200_000, 4)))
    log_density = profiles.log_density(z)
    # The average of target / proposal is the integral of the target, here one of a standard normal vector.
    ratios = np.exp(np.sum(stats.norm.logpdf(z), axis=1) - log_density)
    np.testing.assert_allclose(ratios.mean(), 1, atol=0.02)
    v = profiles.standard(z)
    again, slopes = profiles.from_standard(v)
    inside = np.all(np.abs(v) < 5, axis=1)
    np.testing.assert_allclose(again[inside], z[inside], atol=1e-6)
    other, _ = profiles.from_standard(v + 1e-3)
    np.testing.assert_allclose((other - again)[inside] / 1e-3, slopes[inside], rtol=0.1)
    np.testing.assert_allclose(profiles.roots(z).values[inside][:, 1:], z[inside][:, 1:], atol=0.25)
    # exp(-drop) along the first axis is the density of a half-normal scale's logarithm.
    scale = np.exp(mode.axes[0, 0] * np.array([-3.0, -1.5, 0.0, 1.0]))
    z = np.log(scale)[:, None] / mode.axes[0, 0] * np.eye(4)[:1]
    np.testing.assert_allclose(stats.norm.cdf(profiles.standard(z)[:, 0]), 2 * stats.norm.cdf(scale) - 1, atol=0.02)


def test_profiles_are_stretched_to_the_least_deviations_and_end_where_there_is_no_bound():
    marginal, mode = mode_of(halves, 1)
    profile = profiles_of(marginal, mode, mode.axes).axes[0]
    assert profile.edges[0] < -5 and profile.edges[-1] > 1
    wider = profiles_of(marginal, mode, mode.axes, np.array([3.0])).axes[0]
    assert np.interp(0.9, wider.proposed, wider.edges) > 1.5 * np.interp(0.9, profile.proposed, profile.edges)


def test_few_points_are_enough_for_a_scale_that_may_be_zero(skewed):
    marginal, mode = skewed
    before = len(marginal.points)
    integral = integrate_by_importance(marginal, mode, lambda point: (np.zeros(1), np.eye(1)), smoothed)
    assert len(marginal.points) - before < 200 and integral.info["khat"] < 0.5
    exact = OFFSET + 0.5 * np.log(np.pi / 2) + np.sum(np.log(WIDTHS)) + 1.5 * np.log(2 * np.pi)
    np.testing.assert_allclose(integral.log_evidence, exact, atol=0.05)
    mixture = mixture_of(integral.design, np.arange(4), np.array([4]), jnp.result_type(float))
    mean, deviation = 0.5 * (special.digamma(0.5) + np.log(2)), 0.5 * np.sqrt(special.polygamma(1, 0.5))
    mean, deviation = np.array([mean, 0.5, 0.5, 0.5]), np.array([deviation, *WIDTHS])
    np.testing.assert_allclose((np.asarray(mixture.mean)[:4] - mean) / deviation, 0, atol=0.06)
    np.testing.assert_allclose(np.log(np.asarray(mixture.deviation())[:4] / deviation), 0, atol=0.08)
    levels = np.array([0.02, 0.25, 0.5, 0.75, 0.98])
    found = np.asarray(mixture.marginal_quantiles(jnp.asarray(levels)[:, None]))[:, 0]
    np.testing.assert_allclose((found - np.log(stats.halfnorm.ppf(levels))) / deviation[0], 0, atol=0.15)
    # The mixture in h is near the marginal itself: its own draws say so.
    h = np.asarray(mixture.transform(jnp.asarray(np.random.default_rng(1).normal(size=(500, 6)))))
    log_p = np.array([half_normal_scale(one[:4], None).bound for one in h]) - 0.5 * h[:, 4] ** 2
    ratios = log_p - np.asarray(mixture.log_prob(jnp.asarray(h)))
    weights = np.exp(ratios - ratios.max())
    assert weights.sum() ** 2 / np.sum(weights**2) > 0.7 * len(weights)
