"""The integral of exp L(h) over three to forty parameters h, by importance sampling.

A polynomial f is fitted to L and its gradients at the points. The integral and the moments of exp(f) are averages over
thousands of points, and only the difference exp(L) - exp(f) is averaged over few: f is a control variate. The first
points are those of the profiles of L along its axes. Where these are no good proposal, later points follow exp(f). So
the less L differs from a polynomial, the fewer points it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from scipy.special import logsumexp

from ...core.expectations.by_nodes import power_of_two
from ...model.bad_rows import NotFinite
from .design import FEW, ProfileCoordinates, narrow_design, thinned, wide_design
from .nested import MOST_MISSED, NOT_FINITE, Integral, Marginal, Mode, Moments, Point
from .polynomials import Polynomial, fit
from .profiles import Profiles, profiles_of

NUM_POINTS = 128  # for each parameter, their number rounded up to a power of two: the most points,
FEW_POINTS = 32  # or so many, where each takes much memory,
MOST_POINTS = 1024  # up to this number
MOST_WITH_DENSITY = 6  # parameters: of more, the points are too far apart for Gaussians around them,
LEAST_WITHOUT = 256  # and are so many at least, as draws that stand for themselves
FIRST_POINTS, FIRST_SHARE = 32, 16  # so many points are tried first, or one in so many of the most
LEAST_SHARE = 0.2  # effective sample size over the number of points, below which the proposal is fitted anew
MOST_KHAT = 0.7  # above which it is, too
HOPELESS_SHARE = 0.02  # below which it is so at once
MAX_FITS = 3
CONTROL_SETS, NUM_CONTROLS = 8, 2**12  # so many points at which a polynomial is evaluated
OF_PROFILES = 0.25  # of the later points: in the tails, a polynomial may be far too low
GOOD_SHARE = 0.78  # of the points, above which these stay with the profiles
CONTROLS_PER_POINT = 4  # effective ones, for each point that is drawn from them
DEGREES = (2, 3)  # of polynomials that are tried
MARGIN = 1.0  # nats above the points, up to which polynomials are taken at their word
SINGULAR = 1e-12  # of a covariance: its smallest eigenvalue over the largest
LEAST_WEIGHT = 1e-4  # of a point in the fit, over the largest: far ones keep the polynomial low
TOLERANCE = 0.03  # standard error, or the change when many points become twice as many, in standard deviations
ROUGH_TOLERANCE = 0.05  # where many parameters take many points
LARGE_ERROR = 0.1  # a standard error in these units, for which few parameters take twice the most points

Smoothed = Callable[[np.ndarray], tuple[np.ndarray, float]]
"""Log importance ratios (n,) -> normalized log weights, their tail smoothed, and the Pareto k."""


def integrate_by_importance(
    marginal: Marginal,
    mode: Mode,
    moments: Moments,
    smoothed: Smoothed,
    *,
    few_points: bool = False,
    least_points: int = 0,
) -> Integral | None:
    """The integral by points of a proposal that is as wide and skewed as the marginal along the axes of its mode. Where
    few points have most of the weight, the axes are those of the weighted points, once more.

    :param few_points: whether each takes much memory. :param least_points: so many are taken in any case.
    :return: None if so few points have weight that they span no volume.
    :raises NotFinite: where more than a little of the mass may be at points without a finite bound.
    """
    size = len(mode.point.h)
    center, axes = mode.point.h, mode.axes
    profiles = profiles_of(marginal, mode, axes)
    most = min((FEW_POINTS if few_points else NUM_POINTS) * power_of_two(size), MOST_POINTS)
    if size > MOST_WITH_DENSITY:
        counts = _Counts(LEAST_WITHOUT, most, most)
    else:
        counts = _Counts(least_points, most, most if few_points else 2 * most)
    for seed in range(MAX_FITS):
        sample, of_z = _sampled(marginal, ProfileCoordinates(center, axes, profiles), counts, seed)
        log_weights, khat = smoothed(sample.log_ratios)
        mass = np.exp(log_weights)
        effective = 1 / np.sum(mass**2)
        if effective < size + 1:
            return None
        share = effective / len(mass)
        if (share > LEAST_SHARE and khat < MOST_KHAT) or seed + 1 == MAX_FITS:
            break
        axes = _axes_of(np.array([point.h for point in sample.points]), mass)
        z = np.linalg.solve(axes, (np.array([point.h for point in sample.points]) - center).T).T
        profiles = profiles_of(marginal, mode, axes, np.sqrt(mass @ z**2))
    if _share_missed(sample, profiles) > MOST_MISSED:
        raise NotFinite(NOT_FINITE)
    points, mass = thinned(sample.points, mass, moments)
    info = {
        "method": "importance",
        "evaluations": len(marginal.points),
        "points": np.array([point.h for point in points]),
        "mass": mass,
        "relative_sample_size": float(share),
        "khat": float(khat),
        "error": of_z.error,
    }
    mean, covariance = center + axes @ of_z.mean, axes @ of_z.covariance @ axes.T
    log_evidence = of_z.log_integral + np.linalg.slogdet(axes)[1]
    if size > MOST_WITH_DENSITY:
        design = narrow_design(points, mass, moments, mean, covariance)
        info |= {"bounds": np.array([point.evidence for point in points]), "effective_sample_size": float(effective)}
    else:
        given = ProfileCoordinates(center, axes, profiles)
        design = wide_design(points, mass, moments, given, mean, covariance)
    return Integral.over(points, mass, design, float(log_evidence), info)


def relative_sample_size(log_ratios: np.ndarray) -> float:
    """Effective sample size of importance weights over their number."""
    weights = np.exp(log_ratios - log_ratios.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))


def _share_missed(sample: _Sample, profiles: Profiles) -> float:
    """Of the mass that the profiles foretell, the share where L is not finite. Where a profile ends early: the ratio of
    exp(L) there and at the mode, if it is more."""
    at_ends = [np.exp(-0.5 * profile.roots[[0, -1]] ** 2) for profile in profiles.axes]
    foretold = np.exp(-0.5 * np.sum(profiles.roots(sample.z).values ** 2, axis=1) - sample.log_proposal)
    is_missed = ~np.isfinite([point.evidence for point in sample.points])
    return float(max(np.max(at_ends), foretold[is_missed].sum() / foretold.sum()))


class _Surrogate(NamedTuple):
    """exp(f): along the axes L falls by roots^2 / 2, and what f adds to that is a polynomial up to a limit.

    :ivar limit: above it, a polynomial may be anything: it is little more than what L adds at the points.
    :ivar log_weights: f less the log density of the profiles at the controls, (N,): the mean of exp is its integral.
    """

    polynomial: Polynomial
    limit: float
    log_weights: np.ndarray

    @property
    def log_integral(self) -> float:
        return float(logsumexp(self.log_weights)) - np.log(len(self.log_weights))

    @property
    def effective(self) -> float:
        """How many of the controls have weight."""
        return len(self.log_weights) * relative_sample_size(self.log_weights)

    def log_density(self, roots: np.ndarray) -> np.ndarray:
        """Of points (n, d)."""
        return _limited(self.polynomial(roots), roots, self.limit) - self.log_integral


def _limited(values: np.ndarray, roots: np.ndarray, limit: float) -> np.ndarray:
    """A polynomial's values (n,) at points (n, d), limited."""
    fall = -0.5 * np.sum(roots**2, axis=1)
    return fall + np.minimum(values - fall, limit)


class _Proposal(NamedTuple):
    """Where ``count`` points come from: the profiles, or the normalized surrogate."""

    count: int
    surrogate: _Surrogate | None = None


class _Sample(NamedTuple):
    """Points h = center + axes z with their evidence.

    :ivar z: (n, d). :ivar gradients: of L in z, (n, d). :ivar log_proposal: the log density of z, (n,).
    """

    points: list[Point]
    z: np.ndarray
    gradients: np.ndarray
    log_proposal: np.ndarray

    @property
    def log_ratios(self) -> np.ndarray:
        """Log importance ratios, (n,)."""
        return np.array([point.evidence for point in self.points]) - self.log_proposal

    @property
    def share(self) -> float:
        """The effective sample size over the number of points."""
        return relative_sample_size(self.log_ratios)


class _Counts(NamedTuple):
    """How many points there are: at least, at most, and at most where the error is a :data:`LARGE_ERROR`."""

    least: int
    most: int
    most_if_large: int


def _sampled(marginal: Marginal, given: ProfileCoordinates, counts: _Counts, seed: int) -> tuple[_Sample, _Moments]:
    """Points, and moments of z. Their number doubles until the moments' error is within the tolerance. The change by
    the second half is about the error of the first, and more than that of both. Of few points, around which Gaussians
    are wide, that is not enough."""
    center, axes, profiles = given
    controls, rng = _Controls.of(profiles), np.random.default_rng(seed)
    points: list[Point] = []
    z, by_half = np.empty((0, len(center))), None
    tolerance = TOLERANCE if len(center) <= MOST_WITH_DENSITY else ROUGH_TOLERANCE
    new = [_Proposal(max(counts.most // FIRST_SHARE, FIRST_POINTS))]
    proposals: list[_Proposal] = []
    while True:
        for proposal in new:
            z = np.concatenate([z, _drawn(proposal, proposals, profiles, controls, seed, rng)])
            proposals.append(proposal)
        points += marginal.estimated([marginal.with_gradient(center + axes @ one) for one in z[len(points) :]])
        if not np.isfinite([point.evidence for point in points]).any():
            raise NotFinite(NOT_FINITE)
        gradients = np.array([_finite_gradient(point) for point in points]) @ axes
        sample = _Sample(points, z, gradients, _log_density(proposals, profiles, z))
        moments, surrogate = _moments_of(sample, profiles, controls)
        change = np.inf if by_half is None or len(z) <= FEW else moments.change_from(by_half)
        most = counts.most_if_large if moments.error > LARGE_ERROR else counts.most
        is_enough = min(moments.error, change) < tolerance and len(z) >= counts.least
        is_hopeless = len(z) > FEW and sample.share < HOPELESS_SHARE
        if is_enough or len(z) >= most or is_hopeless:
            return sample, moments
        by_half, new = moments, _next_proposals(surrogate, sample, proposals)


def _finite_gradient(point: Point) -> np.ndarray:
    if point.gradient is None or not np.isfinite(point.bound):
        return np.zeros_like(point.h)
    return point.gradient


def _next_proposals(surrogate: _Surrogate | None, sample: _Sample, before: list[_Proposal]) -> list[_Proposal]:
    """The surrogate for most of as many points again, if enough of the controls have weight in it. Else the profiles,
    and where these alone are good: their quasi-random points are more even."""
    count, are_good = len(sample.z), sample.share > GOOD_SHARE and all(other.surrogate is None for other in before)
    if surrogate is None or are_good or surrogate.effective < CONTROLS_PER_POINT * count:
        return [_Proposal(count)]
    of_profiles = int(OF_PROFILES * count)
    return [_Proposal(of_profiles), _Proposal(count - of_profiles, surrogate)]


def _drawn(
    proposal: _Proposal,
    before: list[_Proposal],
    profiles: Profiles,
    controls: _Controls,
    seed: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """The points z (n, d) of a proposal. ``before``: other proposals, whose quasi-random points are passed over."""
    if proposal.surrogate is None:
        taken = sum(other.count for other in before if other.surrogate is None)
        return _proposed(profiles, taken + proposal.count, seed)[taken:]
    log_weights = proposal.surrogate.log_weights
    return controls.z[_stratified(controls.roots, np.exp(log_weights - log_weights.max()), proposal.count, rng)]


def _stratified(points: np.ndarray, weights: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    """The numbers of so many of the points (N, d), one from each of as many cells of equal weight. Cells are cut in two
    along the axis of their largest variance."""
    cells, drawn = [(np.flatnonzero(weights > 0), count)], []
    while cells:
        cell, size = cells.pop()
        share = weights[cell] / weights[cell].sum()
        if size == 1:
            drawn.append(int(rng.choice(cell, p=share)))
            continue
        axis = np.argmax(share @ (points[cell] - share @ points[cell]) ** 2)
        cell = cell[np.argsort(points[cell, axis])]
        below = np.cumsum(weights[cell])
        half = size // 2
        cut = np.clip(np.searchsorted(below, below[-1] * half / size), half, len(cell) - (size - half))
        cells += [(cell[:cut], half), (cell[cut:], size - half)]
    return drawn


def _log_density(proposals: list[_Proposal], profiles: Profiles, z: np.ndarray) -> np.ndarray:
    """The log density (n,) of points that come from all proposals, as many from each as it has."""
    of_profiles, roots = profiles.log_density(z), profiles.roots(z).values
    each = [of_profiles if surrogate is None else surrogate.log_density(roots) for _, surrogate in proposals]
    counts = np.array([proposal.count for proposal in proposals], float)
    return logsumexp(each, axis=0, b=(counts / counts.sum())[:, None])


def _axes_of(h: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """The symmetric root (d, d) of the covariance of weighted points (n, d), in units of their standard deviations."""
    steps = h - mass @ h
    covariance = (mass[:, None] * steps).T @ steps
    deviation = np.sqrt(np.diagonal(covariance))
    values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
    return deviation[:, None] * (vectors * np.sqrt(np.maximum(values, 1e-6 * values.max()))) @ vectors.T


def _proposed(profiles: Profiles, count: int, seed: int) -> np.ndarray:
    """Quasi-random points z (n, d) of the profiles."""
    import scipy.stats  # here: slow to import, and seldom needed

    uniform = scipy.stats.qmc.Sobol(len(profiles.axes), rng=seed).random(power_of_two(count))[:count]
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


def _moments_of(sample: _Sample, profiles: Profiles, controls: _Controls) -> tuple[_Moments, _Surrogate | None]:
    """The moments by the control variate of the least error, or without one, and the best surrogate."""
    evidence = np.array([point.evidence for point in sample.points])
    shift, finite = np.max(evidence), np.isfinite(evidence)
    ratios = np.exp(evidence - shift - sample.log_proposal)
    at = profiles.roots(sample.z)
    plain, best, surrogate = _combined(_Weighted(sample.z, ratios)), None, None
    values, root = np.where(finite, evidence - shift, 0.0), np.sqrt(finite * (ratios / ratios.max() + LEAST_WEIGHT))
    added = (values + 0.5 * np.sum(at.values**2, axis=1))[finite]
    limit = float(np.max(added)) + MARGIN
    for degree in DEGREES:
        fitted = fit(at, values, sample.gradients, root, degree)
        if fitted is None:
            continue
        log_weights = _limited(fitted.polynomial(controls.roots), controls.roots, limit) - controls.log_proposal
        tried = _Surrogate(fitted.polynomial, limit, log_weights)
        beyond = ratios - np.exp(_limited(fitted.without_own, at.values, limit) - sample.log_proposal)
        own = _Weighted(controls.z, np.exp(tried.log_weights), sets=CONTROL_SETS)
        moments = _combined(own, _Weighted(sample.z, beyond))
        if best is None or moments.error < best.error:
            best, surrogate = moments, tried
    if best is None or plain.error < best.error:
        best = plain
    return best._replace(log_integral=best.log_integral + shift), surrogate


class _Controls(NamedTuple):
    """Many points, at which polynomials are evaluated: (N, d), (N, d) and (N,)."""

    z: np.ndarray
    roots: np.ndarray
    log_proposal: np.ndarray

    @classmethod
    def of(cls, profiles: Profiles) -> _Controls:
        z = np.concatenate([_proposed(profiles, NUM_CONTROLS, MAX_FITS + seed) for seed in range(CONTROL_SETS)])
        return cls(z, profiles.roots(z).values, profiles.log_density(z))


class _Weighted(NamedTuple):
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


def _is_regular(covariance: np.ndarray) -> bool:
    """Whether a covariance has a Cholesky factor, whatever rounding does."""
    values = np.linalg.eigvalsh(covariance)
    return bool(values[0] > SINGULAR * values[-1])


def _combined(*samples: _Weighted) -> _Moments:
    """The moments of a sum of measures, each an average over the points of a sample."""
    total = sum(np.mean(weights) for _, weights, *_ in samples)
    mean = sum(weights @ z / len(z) for z, weights, *_ in samples) / total
    squares = [(weights[:, None] * (z - mean)).T @ (z - mean) / len(z) for z, weights, *_ in samples]
    covariance = np.sum(squares, axis=0) / total
    if not (total > 0 and np.isfinite(covariance).all() and _is_regular(covariance)):
        return _Moments(-np.inf, mean, covariance, np.inf)
    root, variance = np.linalg.cholesky(covariance), 0.0
    for sample in samples:
        lengths = np.linalg.norm(np.linalg.solve(root, (sample.z - mean).T), axis=0) ** 2
        variance += sample.variance_of_mean(sample.weights * (1 + lengths / len(mean)) / total)
    return _Moments(float(np.log(total)), mean, covariance, float(np.sqrt(variance)))
