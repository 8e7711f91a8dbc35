"""The integral of a known marginal, with x given h known too: against closed forms and dense quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from numpyro_rvga.core.groups.importance import Estimate
from numpyro_rvga.engines.integration.design import kernel_weights, mixture_of
from numpyro_rvga.engines.integration.importance import _Moments, _stratified, integrate_by_importance
from numpyro_rvga.engines.integration.lattice import integrate_lattice
from numpyro_rvga.engines.integration.nested import Marginal, Mode, Point, _axes, find_mode
from numpyro_rvga.engines.maximized_bound import Maximum
from numpyro_rvga.model.bad_rows import NotFinite
from numpyro_rvga.results.arviz import smoothed
from numpyro_rvga.results.marginal_nuts import integrate_by_nuts


class Skewed:
    """log of a Gamma variable for each parameter, turned; x | h ~ N(slope h, (exp(h_0 / 2))^2)."""

    def __init__(self, size, shape=2.0):
        self.size, self.shape = size, shape
        self.turn = stats.ortho_group.rvs(size, random_state=0) if size > 1 else np.eye(1)

    def solve(self, h, start):
        z = self.turn @ h
        value = np.sum(stats.loggamma(self.shape).logpdf(z)) + 3.0
        gradient = self.turn.T @ (self.shape - np.exp(z))
        return Maximum(value, gradient, start, True)

    def moments(self, point):
        return np.array([2 * point.h[0]]), np.array([[np.exp(0.5 * point.h[0])]])

    def draws(self, count):
        rng = np.random.default_rng(1)
        h = np.log(rng.gamma(self.shape, size=(count, self.size))) @ self.turn
        return h, 2 * h[:, 0] + np.exp(0.5 * h[:, 0]) * rng.normal(size=count)

    def marginal(self):
        return Marginal(lambda h: None, self.solve)


def integrated(case):
    marginal = case.marginal()
    mode = find_mode(marginal, np.zeros(case.size), np.full(case.size, 3.0))
    if case.size <= 2:
        integral = integrate_lattice(marginal, mode, case.moments)
    else:
        integral = integrate_by_importance(marginal, mode, case.moments, smoothed)
    mixture = mixture_of(integral.design, np.arange(case.size), np.array([case.size]), jnp.result_type(float))
    return marginal, mode, integral, mixture


@pytest.mark.parametrize(("size", "tolerance"), [(1, 0.01), (2, 0.02), (3, 0.06), (6, 0.08)])
def test_mixture_has_the_moments_of_the_posterior(size, tolerance):
    case = Skewed(size)
    _, _, integral, mixture = integrated(case)
    h, x = case.draws(400_000)
    theta = np.column_stack([h, x])
    np.testing.assert_allclose(integral.log_evidence, 3.0, atol=tolerance)
    np.testing.assert_allclose((np.asarray(mixture.mean) - theta.mean(0)) / theta.std(0), 0, atol=tolerance)
    np.testing.assert_allclose(np.log(np.asarray(mixture.deviation()) / theta.std(0)), 0, atol=tolerance)
    np.testing.assert_allclose(
        np.asarray(mixture.covariance()) / np.outer(theta.std(0), theta.std(0)),
        np.corrcoef(theta.T),
        atol=3 * tolerance,
    )


def test_no_design_is_made_of_one_point_that_has_all_the_mass():
    """As where rounding in single precision makes the density of a far point larger than all others."""

    def solve(h, start):
        return Maximum(-0.5 * h @ h + (1e3 * h[0] if h[0] > 2.5 else 0.0), -h, start, True)

    marginal = Marginal(lambda h: None, solve)
    mode = Mode(marginal(np.zeros(3)), np.eye(3))
    assert integrate_by_importance(marginal, mode, Skewed(3).moments, smoothed) is None


def test_few_points_are_enough_where_the_marginal_is_nearly_gaussian():
    case = Skewed(3, shape=50.0)
    _, _, integral, mixture = integrated(case)
    mean, deviation = special.digamma(case.shape), np.sqrt(special.polygamma(1, case.shape))
    z = case.turn @ np.asarray(mixture.mean)[:3]
    covariance = case.turn @ np.asarray(mixture.covariance())[:3, :3] @ case.turn.T
    assert len(integral.info["mass"]) <= 64
    np.testing.assert_allclose(integral.log_evidence, 3.0, atol=0.005)
    np.testing.assert_allclose((z - mean) / deviation, 0, atol=0.02)
    np.testing.assert_allclose(covariance / deviation**2, np.eye(3), atol=0.02)
    case.turn = np.eye(3)
    levels = np.array([0.05, 0.25, 0.5, 0.75, 0.95])
    found = np.asarray(integrated(case)[3].marginal_quantiles(jnp.asarray(levels)[:, None]))[:, :3]
    expected = np.log(stats.gamma(case.shape).ppf(levels))[:, None]
    np.testing.assert_allclose((found - expected) / deviation, 0, atol=0.12)
    assert len(integrated(Skewed(3))[2].info["mass"]) > 128


@pytest.mark.parametrize("size", [1, 2])
def test_mixture_on_a_lattice_has_the_posteriors_quantiles(size):
    case = Skewed(size)
    mixture = integrated(case)[-1]
    theta = np.column_stack(case.draws(400_000))
    levels = np.array([0.02, 0.25, 0.5, 0.75, 0.98])
    found = np.asarray(mixture.marginal_quantiles(jnp.asarray(levels)[:, None]))
    np.testing.assert_allclose((found - np.quantile(theta, levels, axis=0)) / theta.std(0), 0, atol=0.04)


def test_mode_is_found_from_afar_and_its_axes_are_those_of_the_curvature():
    case = Skewed(2)
    marginal = case.marginal()
    mode = find_mode(marginal, np.array([8.0, -5.0]), np.array([10.0, 6.0]))
    np.testing.assert_allclose(case.turn @ mode.point.h, np.log(case.shape), atol=0.05)
    np.testing.assert_allclose(mode.axes @ mode.axes.T, np.eye(2) / case.shape, rtol=0.15, atol=0.05)


def test_axes_of_a_narrow_mode_take_two_gradients_each():
    scale = np.array([0.003, 0.02, 0.4, 1.5])
    slopes = []

    def gradient(h, start):
        slopes.append(h)
        return -h / scale**2, np.zeros(0)

    marginal = Marginal(
        lambda h: None, lambda h, start: Maximum(-0.5 * np.sum((h / scale) ** 2), None, start, True), gradient
    )
    top = marginal(np.zeros(4))
    axes = _axes(marginal, top, np.full(4, 3.0), np.full(4, 3.0))
    np.testing.assert_allclose(axes, np.diag(scale), rtol=1e-6, atol=1e-12)
    assert len(slopes) == 8


def test_change_of_moments_is_the_largest_in_standard_deviations():
    before = _Moments(1.0, np.zeros(2), np.diag([1.0, 4.0]), 0.5)
    assert np.isclose(_Moments(1.01, np.array([0.0, 0.1]), np.diag([1.0, 4.0]), 0.5).change_from(before), 0.05)
    assert np.isclose(_Moments(1.01, np.zeros(2), np.diag([1.0, 5.0]), 0.5).change_from(before), 0.5 * np.log(1.25))
    assert np.isclose(_Moments(1.2, np.zeros(2), np.diag([1.0, 4.0]), 0.5).change_from(before), 0.2)


def test_many_points_are_enough_when_twice_as_many_change_little():
    """As independent points, they might be off by twice as much as they are."""
    case = Skewed(5, shape=10.0)
    *_, integral, mixture = integrated(case)
    mean = case.turn @ np.asarray(mixture.mean)[:5]
    assert len(integral.info["points"]) <= 512
    np.testing.assert_allclose((mean - special.digamma(10.0)) / np.sqrt(special.polygamma(1, 10.0)), 0, atol=0.05)
    np.testing.assert_allclose(integral.log_evidence, 3.0, atol=0.03)


def test_points_are_drawn_evenly():
    """Their averages are nearer to the weighted ones than those of independent draws, and none is drawn twice."""
    rng = np.random.default_rng(0)
    points = rng.uniform(-4, 4, size=(4096, 2))
    weights = stats.norm.pdf(points).prod(axis=1)
    sets = [_stratified(points, weights, 48, rng) for _ in range(200)]
    assert all(len(set(drawn)) == 48 for drawn in sets)
    off = np.array([points[drawn].mean(axis=0) for drawn in sets]) - weights @ points / weights.sum()
    np.testing.assert_allclose(off.mean(axis=0), 0, atol=0.02)
    assert np.all(off.std(axis=0) < 0.5 / np.sqrt(48))


def test_searches_that_came_to_nothing_do_not_count():
    """As in single precision, where a scale near zero makes rounding of any size."""
    case = Skewed(1)

    def solve(h, start):
        return Maximum(1e25, np.ones(1), start, False) if h[0] < -4 else case.solve(h, start)

    marginal = Marginal(lambda h: None, solve)
    mode = find_mode(case.marginal(), np.zeros(1), np.full(1, 3.0))
    integral = integrate_lattice(marginal, mode, case.moments)
    np.testing.assert_allclose(integral.log_evidence, 3.0, atol=0.01)
    np.testing.assert_allclose(integral.converged, 1)

    def moments(point):
        mean, root = case.moments(point)
        return mean, np.where(point.h[0] < -4, 0.0, root)

    integral = integrate_lattice(case.marginal(), mode, moments)
    assert np.isfinite(integral.design.roots).all()
    np.testing.assert_allclose(integral.log_evidence, 3.0, atol=0.01)


def test_other_modes_are_not_passed_over():
    def solve(h, start):
        densities = [stats.norm(-4, 0.5).pdf(h[0]), stats.norm(4, 1.0).pdf(h[0])]
        gradient = densities[0] * (-4 - h) / 0.25 + densities[1] * (4 - h)
        total = sum(densities) + 1e-300
        return Maximum(np.log(0.5 * total), gradient / total, start, True)

    marginal = Marginal(lambda h: None, solve)
    mode = find_mode(marginal, np.zeros(1), np.full(1, 4.0))
    integral = integrate_lattice(marginal, mode, lambda point: (np.zeros(1), np.eye(1)))
    design = integral.design
    np.testing.assert_allclose(integral.log_evidence, 0.0, atol=0.02)
    np.testing.assert_allclose(design.mass @ (design.h[:, 0] > 0), 0.5, atol=0.03)


def test_draws_by_the_bound_are_weighted_to_follow_the_evidence():
    def solve(h):
        return Maximum(-0.5 * h @ h, -h, (jnp.zeros(1), jnp.eye(1)), jnp.asarray(True))

    def estimate(h, start):
        return Estimate(-0.5 * h @ h + 0.5 * h[0], 0.125)

    marginal = Marginal(lambda h: None, lambda h, start: solve(h), estimate=estimate)
    point = marginal(np.zeros(7), Point(np.zeros(7), 0.0, None, None, True, 0.0))
    moments = lambda point: (np.zeros(1), np.eye(1))  # noqa: E731
    integral = integrate_by_nuts(marginal, Mode(point, np.eye(7)), moments, jax.random.key(0))
    mean = integral.design.mass @ integral.design.h
    np.testing.assert_allclose(mean, [0.5] + [0.0] * 6, atol=0.15)
    covariance = np.cov(integral.design.h.T, aweights=integral.design.mass)
    np.testing.assert_allclose(np.sqrt(covariance.diagonal()), 1, atol=0.15)
    np.testing.assert_allclose(integral.error, 0.125)
    np.testing.assert_allclose(integral.info["relative_sample_size"], np.exp(-0.25), atol=0.1)


@pytest.mark.parametrize("slope", [0.0, 0.1])
def test_estimates_are_computed_everywhere_unless_they_are_higher_by_as_much(slope):
    evaluated = []

    def estimate(h, start):
        evaluated.append(h)
        return Estimate(-0.5 * h @ h + 0.3 + slope * h[0], 0.0)

    def solve(h, start):
        return Maximum(-0.5 * h @ h, -h, (jnp.zeros(1), jnp.eye(1)), jnp.asarray(True))

    marginal = Marginal(lambda h: None, solve, estimate=estimate)
    points = [marginal(h) for h in np.random.default_rng(0).normal(size=(100, 3))]
    for _ in range(2):
        estimated = marginal.estimated(points)
        expected = [-0.5 * point.h @ point.h + 0.3 + slope * point.h[0] for point in points]
        np.testing.assert_allclose([point.evidence for point in estimated], expected, atol=1e-6)
    assert len(evaluated) < 30 if slope == 0 else len(evaluated) >= 200


def test_improper_marginal_is_reported():
    marginal = Marginal(lambda h: None, lambda h, start: Maximum(-1e-9 * h[0] ** 2, -2e-9 * h, start, True))
    mode = find_mode(marginal, np.zeros(1), np.ones(1))
    integral = integrate_lattice(marginal, mode, lambda point: (np.zeros(1), np.eye(1)))
    assert not integral.info["is_complete"]


@pytest.mark.parametrize("size", [1, 2])
def test_a_lattice_does_without_gradients_that_are_rounding(size):
    case, rng = Skewed(size), np.random.default_rng(0)
    _, mode, integral, _ = integrated(case)
    solve = case.solve
    case.solve = lambda h, start: solve(h, start)._replace(
        gradient=solve(h, start).gradient + 100 * rng.normal(size=size)
    )
    found = integrate_lattice(case.marginal(), mode, case.moments)
    moments = [
        mixture_of(x.design, np.arange(size), np.array([size]), jnp.result_type(float)) for x in (found, integral)
    ]
    for name in ("mean", "deviation"):
        values = [np.asarray(x.mean if name == "mean" else x.deviation()) for x in moments]
        np.testing.assert_allclose(*values, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(("size", "direction"), [(1, "axis"), (3, "axis"), (3, "diagonal")])
@pytest.mark.parametrize("edge", [0.5, 3.2])
def test_integrals_beside_points_without_a_bound_are_refused_if_mass_may_be_lost_there(size, direction, edge):
    normal = np.eye(size)[0] if direction == "axis" else np.ones(size) / np.sqrt(size)

    def solve(h, start):
        return Maximum(-0.5 * h @ h if h @ normal < edge else -np.inf, -h, start, True)

    marginal, moments = Marginal(lambda h: None, solve), Skewed(1).moments
    mode = Mode(marginal(np.zeros(size)), np.eye(size))

    def integrated():
        if size == 1:
            return integrate_lattice(marginal, mode, moments)
        return integrate_by_importance(marginal, mode, moments, smoothed)

    if edge < 1:
        with pytest.raises(NotFinite):
            integrated()
    else:
        np.testing.assert_allclose(integrated().log_evidence, 0.5 * size * np.log(2 * np.pi), atol=0.02)


def test_importance_sampling_that_meets_no_finite_bound_is_refused():
    """L is finite along the axes, where its profiles are taken, and nowhere else."""

    def solve(h, start):
        return Maximum(-0.5 * h @ h if np.count_nonzero(h) <= 1 else -np.inf, -h, start, True)

    marginal = Marginal(lambda h: None, solve)
    with pytest.raises(NotFinite):
        integrate_by_importance(marginal, Mode(marginal(np.zeros(3)), np.eye(3)), Skewed(1).moments, smoothed)


def test_points_without_a_finite_bound_are_begun_anew_and_left_out():
    begun = []

    def solve(h, start):
        bound = -0.5 * h[0] ** 2 if start == "fresh" or abs(h[0]) < 1 else np.nan
        return Maximum(bound if abs(h[0]) < 5 else -np.inf, -h, "stale", True)

    marginal = Marginal(lambda h: begun.append(h) or "fresh", solve)
    assert marginal(np.array([2.0])).bound == -2.0
    assert marginal(np.array([3.0])).bound == -4.5 and len(begun) == 2
    assert marginal(np.array([6.0])).bound == -np.inf and len(marginal.points) == 2


def test_kernel_weights_make_up_for_the_kernels_width():
    h = 0.3 * np.arange(-20, 21)[:, None]
    mass = stats.norm.pdf(h[:, 0]) * 0.3
    weights = kernel_weights(h, mass, np.array([[0.18]]))
    variance = weights @ h[:, 0] ** 2 + 0.18**2
    np.testing.assert_allclose(variance, 1.0, atol=1e-3)


def test_kernel_weights_of_thousands_of_points_leave_the_mass_as_it_is():
    side = np.arange(-40, 41)
    h = 0.2 * np.stack(np.meshgrid(side, side), -1).reshape(-1, 2)  # 6,561 points: a dense matrix takes a minute
    mass = stats.norm.pdf(h).prod(axis=1) * 0.04
    weights = kernel_weights(h, mass, 0.12 * np.eye(2))
    np.testing.assert_allclose(weights @ h**2 + 0.12**2, 1.0, atol=1e-3)


def test_a_marginal_that_is_finite_at_one_point_only_is_refused_with_a_remedy():
    def solve(h, start):
        return Maximum(0.0 if h[0] == 0 else np.nan, np.nan * h if h[0] else h, "start", True)

    with pytest.raises(ValueError, match=r"not finite around the best point.*float64"):
        find_mode(Marginal(lambda h: "start", solve), np.zeros(1), np.ones(1), np.zeros(1))
