"""The integral of exp L(h) over three to six parameters h, by importance sampling at randomized quasi-random points.

A polynomial that is fitted to L at the points is a control variate: of exp(polynomial) the integral and the moments are
known from thousands of points, and what the average over few points adds is the difference from exp(L). So the less L
differs from the polynomial, the fewer points it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ...core.expectations.by_nodes import power_of_two
from .nested import Design, Integral, Marginal, Mode, Moments, Point, kernel_weights, stacked

FREEDOM = 7.0  # of the Student t that proposes
NUM_POINTS = 128  # at most, for each parameter, their number rounded up to a power of two
FEW_POINTS = 32  # likewise, where each takes much memory
FIRST_POINTS, FIRST_SHARE = 32, 16  # so many points are tried first, or one in so many of the most
LEAST_SHARE = 0.2  # effective sample size over the number of points, below which the proposal is fitted anew
MOST_KHAT = 0.5  # above which it is, too
MAX_FITS = 3
WIDER = 1.2  # the proposal than the points that it is fitted to
NARROWEST = 0.3  # standard deviations of h: a half of an axis
LOOK = 1.5  # where the marginal's width is measured, in standard deviations of the Gaussian at the mode
LEAST_DROP, MOST_DROP = 1.0, 5.0  # nats, there
BANDWIDTH = 0.15  # of the Gaussians in h around points, in standard deviations of h
FEW = 128  # points, up to which the Gaussians are as wide as Scott's rule says: these marginals are nearly Gaussian
SHARPENINGS = 20
REACH = 0.6  # of the regressions for the slopes of x's mean, in standard deviations of h
NUM_CONTROLS = 2**13  # points at which a polynomial is evaluated
DEGREES = (3, 2)  # of polynomials that are tried
POINTS_PER_COEFFICIENT = 1.5  # at least: with fewer, the fit would be an interpolation
LEAST_WEIGHT = 1e-4  # of a point in the fit, over the largest: far ones keep the polynomial low
SETTLED = 0.03  # standard error, in standard deviations
NEGLIGIBLE = 1e-6  # mass of a point that is left out

Smoothed = Callable[[np.ndarray], tuple[np.ndarray, float]]
"""Log importance ratios (n,) -> normalized log weights, their tail smoothed, and the Pareto k."""


def integrate_by_importance(
    marginal: Marginal, mode: Mode, moments: Moments, smoothed: Smoothed, num_points: int = NUM_POINTS
) -> Integral:
    """Points of a split Student t around the mode, whose halves are as wide as the marginal is there; fitted anew to
    the points and their weights, where few of them count."""
    size = len(mode.point.h)
    center, axes = mode.point.h, mode.axes
    widths = _widths(marginal, mode)
    count = num_points * power_of_two(size)
    for seed in range(MAX_FITS):
        points, log_proposal, of_z = _sampled(marginal, center, axes, widths, count, seed)
        log_ratios = np.array([point.evidence for point in points]) - log_proposal
        log_weights, khat = smoothed(log_ratios)
        mass = np.exp(log_weights)
        share = 1 / (len(mass) * np.sum(mass**2))
        if (share > LEAST_SHARE and khat < MOST_KHAT) or seed + 1 == MAX_FITS:
            break
        axes, widths = _fitted(np.array([point.h for point in points]) - center, mass)
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
    converged, error = (float(mass @ values) for values in ([p.converged for p in points], [p.error for p in points]))
    design = _design(points, mass, moments, mean, covariance)
    return Integral(design, float(log_evidence), converged, info, error)


def _sampled(
    marginal: Marginal, center: np.ndarray, axes: np.ndarray, widths: np.ndarray, most: int, seed: int
) -> tuple[list[Point], np.ndarray, _Moments]:
    """Points, the log density of their coordinates, and moments of these: few of ``most`` points, and twice as many as
    long as these do not settle the moments."""
    points: list[Point] = []
    count = max(most // FIRST_SHARE, FIRST_POINTS)
    while True:
        z, log_proposal = _proposed(widths, count, seed)
        points += [marginal.estimated(marginal(center + axes @ one)) for one in z[len(points) :]]
        moments = _moments_of(z, np.array([point.evidence for point in points]), log_proposal, widths)
        if moments.error < SETTLED or count >= most:
            return points, log_proposal, moments
        count *= 2


def _widths(marginal: Marginal, mode: Mode) -> np.ndarray:
    """Of each half of each axis, (2, d), by the drop of L there: below the mode first."""
    scales = np.ones((2, len(mode.axes)))
    for axis, direction in enumerate(mode.axes.T):
        for side, sign in enumerate((-1, 1)):
            distance, near = LOOK, mode.point
            for _ in range(4):
                near = marginal(mode.point.h + sign * distance * direction, near)
                drop = mode.point.bound - near.bound
                if LEAST_DROP <= drop <= MOST_DROP:
                    break
                distance *= 2 if drop < LEAST_DROP else 0.5
            scales[side, axis] = distance / np.sqrt(2 * np.clip(drop, LEAST_DROP, MOST_DROP))
    return scales


def _fitted(steps: np.ndarray, mass: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Axes and widths of a proposal from steps h - mode of weighted points."""
    mean = mass @ steps
    values, vectors = np.linalg.eigh((mass[:, None] * (steps - mean)).T @ (steps - mean))
    axes = vectors * np.sqrt(np.maximum(values, 1e-6 * values.max()))
    z = np.linalg.solve(axes, steps.T).T
    halves = [mass @ np.where(sign * z > 0, z**2, 0) / (mass @ (sign * z > 0) + 1e-9) for sign in (-1, 1)]
    return axes, np.clip(WIDER * np.sqrt(np.array(halves)), NARROWEST, None)


def _proposed(widths: np.ndarray, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Points z (n, d) and their log density."""
    import scipy.stats  # here: slow to import, and seldom needed

    size = widths.shape[1]
    uniform = scipy.stats.qmc.Sobol(size + 1, rng=seed).random(count)
    uniform = np.clip(uniform, 1e-12, 1 - 1e-12)
    left = widths[0] / widths.sum(axis=0)
    below = uniform[:, :size] < left
    tail = np.where(below, uniform[:, :size] / left, (1 - uniform[:, :size]) / (1 - left))  # beyond, on its side
    magnitude = scipy.stats.norm.isf(0.5 * tail)
    magnitude /= np.sqrt(scipy.stats.chi2.ppf(uniform[:, size:], FREEDOM) / FREEDOM)
    z = np.where(below, -magnitude * widths[0], magnitude * widths[1])
    log_density = scipy.stats.multivariate_t(np.zeros(size), np.eye(size), FREEDOM).logpdf(magnitude)
    return z, np.reshape(log_density, count) + np.sum(np.log(2 / widths.sum(axis=0)))


class _Moments(NamedTuple):
    """:ivar log_integral: of exp(L). :ivar mean: (d,), and ``covariance`` (d, d), of the points' coordinates.
    :ivar error: a standard error of these, in standard deviations, as if points were independent."""

    log_integral: float
    mean: np.ndarray
    covariance: np.ndarray
    error: float


def _moments_of(z: np.ndarray, bounds: np.ndarray, log_proposal: np.ndarray, widths: np.ndarray) -> _Moments:
    """By the control variates that leave the least error, or without.

    :param z: points (n, d). :param bounds: L there. :param widths: of the proposal.
    """
    shift = np.max(bounds)
    ratios = np.exp(bounds - shift - log_proposal)
    many, log_density = _proposed(widths, NUM_CONTROLS, MAX_FITS)
    candidates = [_combined((z, ratios, 0))]
    finite = np.isfinite(bounds)
    values, root = np.where(finite, bounds - shift, 0.0), np.sqrt(finite * (ratios / ratios.max() + LEAST_WEIGHT))
    for degree in DEGREES:
        features = _polynomials(z, degree)
        size = features.shape[1]
        if POINTS_PER_COEFFICIENT * size > np.sum(finite):
            continue
        coefficients = np.linalg.lstsq(root[:, None] * features, root * values, rcond=None)[0]
        with np.errstate(over="ignore", invalid="ignore"):  # far out, a polynomial may lead anywhere
            own = np.exp(_polynomials(many, degree) @ coefficients - log_density)
            beyond = ratios - np.exp(features @ coefficients - log_proposal)
            candidates.append(_combined((many, own, 0), (z, beyond, size)))
    best = min(candidates, key=lambda moments: moments.error)
    return best._replace(log_integral=best.log_integral + shift)


def _combined(*samples: tuple[np.ndarray, np.ndarray, int]) -> _Moments:
    """Of sums of averages over points (n, d) with weights (n,), of which so many degrees of freedom were fitted."""
    total = sum(np.mean(weights) for _, weights, _ in samples)
    mean = sum(weights @ z / len(z) for z, weights, _ in samples) / total
    spreads = [(weights[:, None] * (z - mean)).T @ (z - mean) / len(z) for z, weights, _ in samples]
    covariance = np.sum(spreads, axis=0) / total
    if not (total > 0 and np.isfinite(covariance).all() and np.linalg.eigvalsh(covariance)[0] > 0):
        return _Moments(-np.inf, mean, covariance, np.inf)
    root, variance = np.linalg.cholesky(covariance), 0.0
    for z, weights, fitted in samples:
        lengths = np.linalg.norm(np.linalg.solve(root, (z - mean).T), axis=0) ** 2
        influence = weights * (1 + lengths / len(mean)) / total
        variance += np.var(influence) / (len(z) - fitted)
    return _Moments(float(np.log(total)), mean, covariance, float(np.sqrt(variance)))


def _polynomials(z: np.ndarray, degree: int) -> np.ndarray:
    """All monomials of the columns up to a degree, (n, number)."""
    size = z.shape[1]
    chosen = [c for d in range(degree + 1) for c in itertools.combinations_with_replacement(range(size), d)]
    return np.stack([np.prod(z[:, list(c)], axis=1) for c in chosen], axis=1)


def _design(
    points: list[Point], mass: np.ndarray, moments: Moments, mean: np.ndarray, covariance: np.ndarray
) -> Design:
    """:param mean: of h, (d,), with ``covariance`` (d, d), which the design has too."""
    kept = np.flatnonzero(mass > NEGLIGIBLE)
    mass = mass[kept] / mass[kept].sum()
    h = np.array([points[k].h for k in kept])
    means, roots = zip(*[moments(points[k]) for k in kept])
    means, roots = np.array(means), stacked(roots)
    scale = np.linalg.cholesky(covariance)
    slopes = _slopes(np.linalg.solve(scale, (h - mean).T).T, means) @ np.linalg.inv(scale)
    bandwidth = len(h) ** (-1 / (h.shape[1] + 4)) if len(h) <= FEW else BANDWIDTH
    kernel = bandwidth * scale
    weights = kernel_weights(h, mass, kernel, SHARPENINGS)
    # The Gaussians around points widen the whole: points are drawn together, so that mean and covariance stay.
    center = weights @ h
    among = np.linalg.cholesky((weights[:, None] * (h - center)).T @ (h - center))
    moved = mean + np.sqrt(1 - bandwidth**2) * (scale @ np.linalg.solve(among, (h - center).T)).T
    means = means + np.einsum("kpd,kd->kp", slopes, moved - h)
    return Design(moved, weights, means, roots, slopes, kernel, is_weighted=True)


def _slopes(z: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Of means (K, P) in z (K, d), by regressions in which near points count: (K, P, d)."""
    slopes = np.empty((*means.shape, z.shape[1]))
    for k, here in enumerate(z):
        steps = z - here
        root = np.exp(-0.25 * np.sum(steps**2, axis=1) / REACH**2)
        regressors = np.column_stack([np.ones(len(z)), steps])
        slopes[k] = np.linalg.lstsq(root[:, None] * regressors, root[:, None] * means, rcond=None)[0][1:].T
    return slopes
