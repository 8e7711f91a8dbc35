"""The integral of exp L(h) over three to six parameters h, by importance sampling at randomized quasi-random points."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import scipy.special

from ..core.expectations import power_of_two
from .nested import Design, Integral, Marginal, Mode, Moments, Point, kernel_weights, stacked

FREEDOM = 7.0  # of the Student t that proposes
NUM_POINTS = 128  # for each parameter, their number rounded up to a power of two
FEW_POINTS = 32  # likewise, where each takes long
LEAST_SHARE = 0.2  # effective sample size over the number of points, below which the proposal is fitted anew
MOST_KHAT = 0.5  # above which it is, too
MAX_FITS = 3
WIDER = 1.2  # the proposal than the points that it is fitted to
NARROWEST = 0.3  # standard deviations of h: a half of an axis
LOOK = 1.5  # where the marginal's width is measured, in standard deviations of the Gaussian at the mode
LEAST_DROP, MOST_DROP = 1.0, 5.0  # nats, there
BANDWIDTH = 0.15  # of the Gaussians in h, in standard deviations of h
SHARPENINGS = 20
REACH = 0.6  # of the regressions for the slopes of x's mean, in standard deviations of h
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
        z, log_proposal = _proposed(widths, count, seed)
        points = [marginal(center + axes @ one) for one in z]
        log_ratios = np.array([point.bound for point in points]) - log_proposal + np.linalg.slogdet(axes)[1]
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
    log_evidence = scipy.special.logsumexp(log_ratios) - np.log(len(mass))
    converged, error = (float(mass @ values) for values in ([p.converged for p in points], [p.error for p in points]))
    return Integral(_design(points, mass, moments), float(log_evidence), converged, info, error)


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


def _design(points: list[Point], mass: np.ndarray, moments: Moments) -> Design:
    kept = np.flatnonzero(mass > NEGLIGIBLE)
    mass = mass[kept] / mass[kept].sum()
    h = np.array([points[k].h for k in kept])
    means, roots = zip(*[moments(points[k]) for k in kept])
    means, roots = np.array(means), stacked(roots)
    mean = mass @ h
    covariance = (mass[:, None] * (h - mean)).T @ (h - mean)
    scale = np.linalg.cholesky(covariance)
    slopes = _slopes(np.linalg.solve(scale, (h - mean).T).T, means) @ np.linalg.inv(scale)
    kernel = BANDWIDTH * scale
    weights = kernel_weights(h, mass, kernel, SHARPENINGS)
    # The Gaussians around points widen the whole: points are drawn together, so that mean and covariance stay.
    center = weights @ h
    among = np.linalg.cholesky((weights[:, None] * (h - center)).T @ (h - center))
    moved = mean + np.sqrt(1 - BANDWIDTH**2) * (scale @ np.linalg.solve(among, (h - center).T)).T
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
