"""The integral of exp L(h) over three to six parameters h, by importance sampling at randomized quasi-random points.

A polynomial that is fitted to L at the points is a control variate. The integral and the moments of exp(polynomial) are
averages over thousands of points, and only the difference exp(L) - exp(polynomial) is averaged over few. So the less L
differs from the polynomial, the fewer points it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...core.expectations.by_nodes import power_of_two
from .nested import Design, Integral, Marginal, Mode, Moments, Point, stacked, variances_of
from .profiles import Profiles, profiles_of

NUM_POINTS = 128  # at most, for each parameter, their number rounded up to a power of two
FEW_POINTS = 32  # likewise, where each takes much memory
FIRST_POINTS, FIRST_SHARE = 32, 16  # so many points are tried first, or one in so many of the most
LEAST_SHARE = 0.2  # effective sample size over the number of points, below which the proposal is fitted anew
MOST_KHAT = 0.5  # above which it is, too
MAX_FITS = 3
FEW = 128  # points, up to which the Gaussians are as wide as Scott's rule says: L is nearly quadratic then
BANDWIDTH = 0.2  # else, in standard deviations of h: x given h is not one Gaussian for long
REACH = 0.6  # of the regressions for the slopes of x's mean: a bandwidth, in standard deviations of h
CONTROL_SETS, NUM_CONTROLS = 8, 2**12  # so many points at which a polynomial is evaluated
DEGREES = (3, 2)  # of polynomials that are tried
POINTS_PER_COEFFICIENT = 1.5  # at least: with fewer, the fit would be an interpolation
MOST_LEVERAGE = 0.99
CEILING, FLATTEST = 1.0, 0.25  # above the highest point, and how fast it falls: along the axes, L falls by roots^2 / 2
LEAST_WEIGHT = 1e-4  # of a point in the fit, over the largest: far ones keep the polynomial low
MOST_RESCALED = 2.0  # log of how much x is widened or narrowed where points are moved
TOLERANCE = 0.03  # standard error, or the change when many points become twice as many, in standard deviations
ROUGH_TOLERANCE = 0.04  # where each point takes much memory and time
NEGLIGIBLE = 1e-6  # mass of a point that is left out

Smoothed = Callable[[np.ndarray], tuple[np.ndarray, float]]
"""Log importance ratios (n,) -> normalized log weights, their tail smoothed, and the Pareto k."""


def integrate_by_importance(
    marginal: Marginal,
    mode: Mode,
    moments: Moments,
    smoothed: Smoothed,
    num_points: int = NUM_POINTS,
    tolerance: float = TOLERANCE,
) -> Integral | None:
    """The integral by points of a proposal that is as wide and skewed as the marginal along the axes of its mode. Where
    few points have most of the weight, the axes are those of the weighted points, once more.

    :param num_points: at most, for each parameter.
    :param tolerance: of the means, in standard deviations, and of log standard deviations.
    :return: None if so few points have weight that they span no volume.
    """
    size = len(mode.point.h)
    center, axes = mode.point.h, mode.axes
    profiles = profiles_of(marginal, mode, axes)
    count = num_points * power_of_two(size)
    for seed in range(MAX_FITS):
        points, log_proposal, of_z = _sampled(marginal, center, axes, profiles, count, tolerance, seed)
        log_ratios = np.array([point.evidence for point in points]) - log_proposal
        log_weights, khat = smoothed(log_ratios)
        mass = np.exp(log_weights)
        effective = 1 / np.sum(mass**2)
        if effective < size + 1:
            return None
        share = effective / len(mass)
        if (share > LEAST_SHARE and khat < MOST_KHAT) or seed + 1 == MAX_FITS:
            break
        axes = _axes_of(np.array([point.h for point in points]), mass)
        z = np.linalg.solve(axes, (np.array([point.h for point in points]) - center).T).T
        profiles = profiles_of(marginal, mode, axes, np.sqrt(mass @ z**2))
    info = {
        "method": "importance",
        "evaluations": len(marginal.points),
        "points": np.array([point.h for point in points]),
        "mass": mass,
        "relative_sample_size": float(share),
        "khat": float(khat),
    }
    mean, covariance = center + axes @ of_z.mean, axes @ of_z.covariance @ axes.T
    log_evidence = of_z.log_integral + np.linalg.slogdet(axes)[1]
    design = _design(points, mass, moments, ProfileCoordinates(center, axes, profiles), mean, covariance)
    return Integral.over(points, mass, design, float(log_evidence), info)


def _sampled(
    marginal: Marginal, center: np.ndarray, axes: np.ndarray, profiles: Profiles, most: int, tolerance: float, seed: int
) -> tuple[list[Point], np.ndarray, _Moments]:
    """Points, the log density of their coordinates z, and moments of z. The number of points doubles, up to ``most``,
    until the moments' error is below ``tolerance``. The first half of quasi-random points is quasi-random too, so the
    change by the second half is about the error of the first, and more than that of both. Of few points, around which
    Gaussians are wide, that is not enough."""
    points: list[Point] = []
    by_half = None
    controls = _Controls.of(profiles)
    count = max(most // FIRST_SHARE, FIRST_POINTS)
    while True:
        z, log_proposal = _proposed(profiles, count, seed)
        points += [marginal.estimated(marginal(center + axes @ one)) for one in z[len(points) :]]
        bounds = np.array([point.evidence for point in points])
        moments = _moments_of(z, bounds, log_proposal, profiles, controls)
        change = np.inf if by_half is None or count <= FEW else moments.change_from(by_half)
        if min(moments.error, change) < tolerance or count >= most:
            return points, log_proposal, moments
        by_half = moments
        count *= 2


def _axes_of(h: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """The symmetric root (d, d) of the covariance of weighted points (n, d), in units of their standard deviations."""
    steps = h - mass @ h
    covariance = (mass[:, None] * steps).T @ steps
    deviation = np.sqrt(np.diagonal(covariance))
    values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
    return deviation[:, None] * (vectors * np.sqrt(np.maximum(values, 1e-6 * values.max()))) @ vectors.T


def _proposed(profiles: Profiles, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Quasi-random points z (n, d) and their log density."""
    import scipy.stats  # here: slow to import, and seldom needed

    uniform = scipy.stats.qmc.Sobol(len(profiles.axes), rng=seed).random(count)
    return profiles.propose(np.clip(uniform, 1e-12, 1 - 1e-12))


class _Moments(NamedTuple):
    """:ivar log_integral: of exp(L). :ivar mean: (d,), and ``covariance`` (d, d), of the points' coordinates.
    :ivar error: a standard error of these, in standard deviations, as if points were independent."""

    log_integral: float
    mean: np.ndarray
    covariance: np.ndarray
    error: float

    def change_from(self, other: _Moments) -> float:
        """The largest change of a mean, in standard deviations, of the log of one of these, or of the integral's."""
        deviation, before = (np.sqrt(np.diagonal(moments.covariance)) for moments in (self, other))
        of_mean = np.abs(self.mean - other.mean) / deviation
        of_integral = abs(self.log_integral - other.log_integral)
        return float(np.max([of_integral, *of_mean, *np.abs(np.log(deviation / before))]))


def _moments_of(
    z: np.ndarray, bounds: np.ndarray, log_proposal: np.ndarray, profiles: Profiles, controls: _Controls
) -> _Moments:
    """The moments by the control variate of the least error, or without one.

    :param z: points (n, d). :param bounds: L there. :param profiles: the proposal.
    """
    shift = np.max(bounds)
    ratios = np.exp(bounds - shift - log_proposal)
    roots = profiles.roots(z)
    candidates = [_combined(_Sample(z, ratios))]
    finite = np.isfinite(bounds)
    values, root = np.where(finite, bounds - shift, 0.0), np.sqrt(finite * (ratios / ratios.max() + LEAST_WEIGHT))
    for degree in DEGREES:
        features = _polynomials(roots, degree)
        size = features.shape[1]
        if POINTS_PER_COEFFICIENT * size > np.sum(finite):
            continue
        coefficients, without_own = _fit(features, values, root)
        own = np.exp(np.minimum(_polynomials(controls.roots, degree) @ coefficients, _ceiling(controls.roots)))
        beyond = ratios - np.exp(np.minimum(without_own, _ceiling(roots)) - log_proposal)
        own_weights = own / np.exp(controls.log_proposal)
        candidates.append(_combined(_Sample(controls.z, own_weights, sets=CONTROL_SETS), _Sample(z, beyond)))
    best = min(candidates, key=lambda moments: moments.error)
    return best._replace(log_integral=best.log_integral + shift)


class _Controls(NamedTuple):
    """Many points, at which polynomials are evaluated: (N, d), (N, d) and (N,)."""

    z: np.ndarray
    roots: np.ndarray
    log_proposal: np.ndarray

    @classmethod
    def of(cls, profiles: Profiles) -> _Controls:
        sets = [_proposed(profiles, NUM_CONTROLS, MAX_FITS + seed) for seed in range(CONTROL_SETS)]
        z, log_proposal = (np.concatenate(parts) for parts in zip(*sets))
        return cls(z, profiles.roots(z), log_proposal)


def _fit(features: np.ndarray, values: np.ndarray, root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of a regression with weights root^2, and leave-one-out predictions of the values, (n,)."""
    basis, triangle = np.linalg.qr(root[:, None] * features)
    coefficients = np.linalg.lstsq(triangle, basis.T @ (root * values), rcond=None)[0]
    leverage = np.minimum(np.sum(basis**2, axis=1), MOST_LEVERAGE)
    return coefficients, values - (values - features @ coefficients) / (1 - leverage)


def _ceiling(roots: np.ndarray) -> np.ndarray:
    """An upper limit of the fitted polynomial, (n,), which may be anything far out."""
    return CEILING - FLATTEST * np.sum(roots**2, axis=1)


class _Sample(NamedTuple):
    """Points (n, d) with weights (n,).

    :ivar sets: of quasi-random points, each of its own randomization, that are one after the other.
    """

    z: np.ndarray
    weights: np.ndarray
    sets: int = 1

    def variance_of_mean(self, values: np.ndarray) -> float:
        """The variance of the mean of values (n,): by the sets' differences, or as if points were independent."""
        if self.sets == 1:
            return float(np.var(values) / len(values))
        return float(np.var(values.reshape(self.sets, -1).mean(axis=1)) / (self.sets - 1))


def _combined(*samples: _Sample) -> _Moments:
    """The moments of a sum of measures, each an average over the points of a sample."""
    total = sum(np.mean(weights) for _, weights, *_ in samples)
    mean = sum(weights @ z / len(z) for z, weights, *_ in samples) / total
    squares = [(weights[:, None] * (z - mean)).T @ (z - mean) / len(z) for z, weights, *_ in samples]
    covariance = np.sum(squares, axis=0) / total
    if not (total > 0 and np.isfinite(covariance).all() and np.linalg.eigvalsh(covariance)[0] > 0):
        return _Moments(-np.inf, mean, covariance, np.inf)
    root, variance = np.linalg.cholesky(covariance), 0.0
    for sample in samples:
        lengths = np.linalg.norm(np.linalg.solve(root, (sample.z - mean).T), axis=0) ** 2
        variance += sample.variance_of_mean(sample.weights * (1 + lengths / len(mean)) / total)
    return _Moments(float(np.log(total)), mean, covariance, float(np.sqrt(variance)))


def _polynomials(z: np.ndarray, degree: int) -> np.ndarray:
    """All monomials of the columns up to a degree, (n, number)."""
    size = z.shape[1]
    chosen = [c for d in range(degree + 1) for c in itertools.combinations_with_replacement(range(size), d)]
    return np.stack([np.prod(z[:, list(c)], axis=1) for c in chosen], axis=1)


class ProfileCoordinates(NamedTuple):
    """h = center + axes z, and of each z the coordinates of its profile."""

    center: np.ndarray
    axes: np.ndarray
    profiles: Profiles


def _design(
    points: list[Point],
    mass: np.ndarray,
    moments: Moments,
    given: ProfileCoordinates,
    mean: np.ndarray,
    covariance: np.ndarray,
) -> Design:
    """Gaussians in h around the points, which are shrunk towards their mean, so that the mixture is as wide as the
    points were. Both in coordinates in which the marginal is nearly Gaussian, which keeps its shape.

    :param mean: of h, (d,), with ``covariance`` (d, d), which the design has too.
    """
    kept = np.flatnonzero(mass > NEGLIGIBLE)
    mass = mass[kept] / mass[kept].sum()
    h = np.array([points[k].h for k in kept])
    means, roots = zip(*[moments(points[k]) for k in kept])
    means, roots = np.array(means), stacked(roots)
    scale = np.linalg.cholesky(covariance)
    is_whole = isinstance(roots, np.ndarray)
    values = np.concatenate([means, 0.5 * np.log(variances_of(roots))], axis=1) if is_whole else means
    slopes = _slopes(np.linalg.solve(scale, (h - mean).T).T, values) @ np.linalg.inv(scale)
    slopes, widths = np.split(slopes, [means.shape[1]], axis=1)
    bandwidth = len(h) ** (-1 / (h.shape[1] + 4)) if len(h) <= FEW else BANDWIDTH
    v = given.profiles.standard(np.linalg.solve(given.axes, (h - given.center).T).T)
    middle = mass @ v
    root = np.linalg.cholesky((mass[:, None] * (v - middle)).T @ (v - middle))
    z, along = given.profiles.from_standard(middle + np.sqrt(1 - bandwidth**2) * (v - middle))
    moved = given.center + z @ given.axes.T
    kernel = given.axes @ (along[:, :, None] * (bandwidth * root))
    # Mean and covariance are now about the marginal's, and become so exactly by one linear map.
    center = mass @ moved
    whole = (mass[:, None] * (moved - center)).T @ (moved - center) + np.einsum("k,kij,klj->il", mass, kernel, kernel)
    correction = scale @ np.linalg.inv(np.linalg.cholesky(whole))
    moved, kernel = mean + (moved - center) @ correction.T, correction @ kernel
    means = means + np.einsum("kpd,kd->kp", slopes, moved - h)
    if is_whole:
        roots = _rescaled(roots, mass, np.einsum("kpd,kd->kp", widths, moved - h))
    return Design(moved, mass, means, roots, slopes, kernel, is_weighted=True)


def _rescaled(roots: np.ndarray, mass: np.ndarray, log_scale: np.ndarray) -> np.ndarray:
    """Roots (K, P, P) of components whose standard deviations (K, P) become exp(log_scale) times as large, but for a
    factor that leaves the average variance as it is: within a component they are the same on both sides."""
    variances = np.sum(roots**2, axis=2)
    scale = np.exp(np.clip(log_scale, -MOST_RESCALED, MOST_RESCALED))
    scale *= np.sqrt((mass @ variances) / (mass @ (scale**2 * variances)))
    return scale[:, :, None] * roots


def _slopes(z: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Slopes (K, P, d) of means (K, P) in z (K, d), by regressions weighted towards near points."""
    slopes = np.empty((*means.shape, z.shape[1]))
    for k, here in enumerate(z):
        steps = z - here
        root = np.exp(-0.25 * np.sum(steps**2, axis=1) / REACH**2)
        regressors = np.column_stack([np.ones(len(z)), steps])
        slopes[k] = np.linalg.lstsq(root[:, None] * regressors, root[:, None] * means, rcond=None)[0][1:].T
    return slopes
