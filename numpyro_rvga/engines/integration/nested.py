"""The marginal of a few parameters h, exp L(h): its mode, and its integral as points with masses.

L is the bound of :class:`~.maximized_bound.MaximizedBound`. A point stores the q of x given h that attains it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from ...core.expectations.by_nodes import power_of_two
from ...core.groups.importance import Estimate
from ...model.bad_rows import NotFinite
from ...options import Info
from ..maximized_bound import Maximum, Start

NUM_TRIALS = 8  # points of the prior at which L is tried before its mode is sought, for each parameter,
MOST_TRIALS = 64  # and at most
STEP = 0.3  # of differences of gradients, in estimated standard deviations of the mode
MAX_NARROWINGS = 3  # of a step that is too long
FAR = 0.5  # nats: a step that lowers L by more is too long, as it should be a tenth of these
MAX_SHORTENINGS = 6  # of a step along which gradients are compared, to a tenth,
OVERSHOT = 10.0  # if L falls along it by so many nats, and so many times what its slope says
MAX_ASCENTS = 4
LEAST_RISE, LEAST_SLOPE = 1e-4, 1e-2  # nats, of a step and for each standard deviation: where an ascent ends
STEEP = 10.0  # nats for each standard deviation of the prior, beyond which that is no measure of L
FLAT = 0.1  # nats for each standard deviation: a slope at a mode
SAME_PLACE = 0.5  # standard deviations, within which axes are not measured again
ABOVE = 0.5  # nats, by which a point may be higher than the mode
NUM_COMPARED = 12  # points at which estimates are compared with L
SAME_RISE = 0.01  # nats: by how much the largest and the least of differences that are taken for the same may differ
FLATTEST = 3.0  # standard deviations of the prior: no Gaussian at a mode is wider
MOST_MISSED = 0.05  # share of the mass at points without a finite bound, or next to them: more may be lost there
NOT_FINITE = (
    "given the hyperparameters, the bound or its slope is not finite around the best point that was found. Use float64 "
    "(numpyro.enable_x64()), or leave integrate at False."
)


class Point(NamedTuple):
    """L at h.

    :ivar h: (d,). :ivar bound: L, minus infinity where there is none. :ivar gradient: (d,); None if it is not known.
    :ivar start: the q that attains it. :ivar converged: whether it does.
    :ivar variance: of x there, (P,), where the gradient took it; else None.
    :ivar evidence: what the marginal takes for log p(y, h): L, or an estimate. :ivar error: its standard error.
    """

    h: np.ndarray
    bound: float
    gradient: np.ndarray | None
    start: Start
    converged: bool
    evidence: float
    error: float = 0.0
    variance: Array | None = None


class Marginal:
    """L as a function on the host, which caches the points where it was evaluated.

    :param begin: h -> a start, from nothing.
    :param solve: h and a start -> :class:`~.maximized_bound.Maximum`.
    :param gradient: h and the maximizing q there -> L's gradient (d,), and variances of x (P,), where ``solve`` leaves
        that out.
    :param estimate: h and that q -> log p(y, h) and its standard error; None: L is taken for log p(y, h).
    """

    def __init__(
        self,
        begin: Callable[[np.ndarray], Start],
        solve: Callable[[np.ndarray, Start], Maximum],
        gradient: Callable[[np.ndarray, Start], tuple[Array, Array]] | None = None,
        estimate: Callable[[np.ndarray, Start], Estimate] | None = None,
    ):
        self._begin, self._solve, self._gradient, self._estimate = begin, solve, gradient, estimate
        self.points: list[Point] = []
        self._places: np.ndarray | None = None  # their h, (K, d)
        self._cache: dict[bytes, Point] = {}

    def with_gradient(self, h: np.ndarray, near: Point | None = None) -> Point:
        """L at h with its gradient, which may take a computation of its own."""
        point = self(h, near)
        if point.gradient is not None or self._gradient is None:
            return point
        of_device, variance = self._gradient(point.h, point.start)
        gradient = np.asarray(of_device, np.float64)
        if not np.isfinite(gradient).all():
            point = point._replace(bound=-np.inf, evidence=-np.inf)
        self._cache[h.tobytes()] = point = point._replace(gradient=gradient, variance=variance)
        return point

    def estimated(self, points: Sequence[Point]) -> list[Point]:
        """The points with estimates of log p(y, h), where there are any: searches go by L, which takes less. If some of
        them have no errors, and are higher than L by about as much everywhere, the others are so too."""
        if self._estimate is None:
            return list(points)
        rise = self._common_rise(points) if len(points) > 2 * NUM_COMPARED else None
        if rise is None:
            return [self._estimated(point) for point in points]
        return [point._replace(evidence=point.bound + rise) for point in points]

    def _common_rise(self, points: Sequence[Point]) -> float | None:
        """By how much estimates are higher than L, if that is the same at some points, from high to low; else None."""
        finite = sorted((p for p in points if np.isfinite(p.bound)), key=lambda point: -point.bound)
        if len(finite) < NUM_COMPARED:
            return None
        rises: list[float] = []
        for k in np.linspace(0, len(finite) - 1, NUM_COMPARED).astype(int):
            point = self._estimated(finite[k])
            rises.append(point.evidence - point.bound)
            if point.error or not np.isfinite(rises[-1]) or np.ptp(rises) > SAME_RISE:
                return None
        return float(np.mean(rises))

    def _estimated(self, point: Point) -> Point:
        if not np.isfinite(point.bound):
            return point
        assert self._estimate is not None
        estimate = self._estimate(point.h, point.start)
        evidence, error = float(estimate.value), float(estimate.error)
        if not (np.isfinite(evidence) and np.isfinite(error)):  # rounding has left none: L is a bound on it still
            return point
        return point._replace(evidence=evidence, error=error)

    def __call__(self, h: np.ndarray, near: Point | None = None) -> Point:
        """L at h. The solve starts from the q of ``near``, or of the nearest point in the cache."""
        cached = self._cache.get(h.tobytes())
        if cached is not None:
            return cached
        if near is None and self._places is not None:
            near = self.points[int(np.argmin(np.sum((self._places - h) ** 2, axis=1)))]
        point = None if near is None else self._point(h, near.start)
        if point is None or not np.isfinite(point.bound):
            point = self._point(h, self._begin(h))
        if np.isfinite(point.bound):
            self._keep(point)
        return point

    def higher_than(self, point: Point, starts: Iterable[Start]) -> Point | None:
        """A higher point at the same h, if solves from some starts lead to one: given h, the bound may have several
        maxima."""
        highest = max((self._point(point.h, start) for start in starts), key=lambda point: point.bound)
        return highest if highest.bound > point.bound + ABOVE else None

    def begun_again(self, point: Point) -> Marginal:
        """The marginal that knows this point alone, from whose q others are then reached."""
        other = Marginal(self._begin, self._solve, self._gradient, self._estimate)
        other._keep(point)
        return other

    def _keep(self, point: Point) -> None:
        here = point.h[None]
        self.points.append(point)
        self._places = here if self._places is None else np.concatenate([self._places, here])
        self._cache[point.h.tobytes()] = point

    def evaluate_uncached(self, h: np.ndarray, near: Point) -> Point:
        """L at h. The solve starts from the q of ``near``. The point is not cached."""
        return self._point(h, near.start)

    def _point(self, h: np.ndarray, start: Start) -> Point:
        maximum = self._solve(h, start)
        bound, gradient = float(maximum.bound), maximum.gradient
        if gradient is not None:
            gradient = np.asarray(gradient, np.float64)
        if not (np.isfinite(bound) and (gradient is None or np.isfinite(gradient).all())):
            bound = -np.inf
        return Point(np.asarray(h, np.float64), bound, gradient, maximum.start, bool(maximum.converged), bound)


class Mode(NamedTuple):
    """The highest point of L, and coordinates z around it in which a Gaussian there is standard.

    :ivar axes: h = point.h + axes z, (d, d).
    """

    point: Point
    axes: np.ndarray


# ---------------------------------------------------------------------- the mode
def find_mode(
    marginal: Marginal,
    mean: np.ndarray,
    deviation: np.ndarray,
    start: np.ndarray | None = None,
    num_trials: int = NUM_TRIALS,
) -> Mode:
    """Ascend from the best of some points of the prior, at all of which L is evaluated: a marginal may be wide, or have
    several modes.

    :param mean: the prior's, (d,). :param deviation: the prior's standard deviations, (d,).
    :param start: another point, evaluated first.
    :param num_trials: so many points of the prior for each parameter, their number rounded up to a power of two.
    :raises ValueError: if L is finite nowhere.
    """
    import scipy.stats  # here: slow to import, and seldom needed

    size = len(mean)
    noise = scipy.stats.norm.ppf(
        scipy.stats.qmc.Sobol(size, rng=0).random(min(MOST_TRIALS, num_trials * power_of_two(size)))
    )
    tried = [mean, *(mean + deviation * noise)]
    for h in tried if start is None else [start, *tried]:
        marginal(h)
    if not marginal.points:
        raise ValueError("the bound is finite at no value of the integrated sites that the prior proposes.")
    scale, axes, at = np.diag(_widths(marginal, deviation)), None, mean
    for _ in range(MAX_ASCENTS):
        best = _ascend(marginal, scale)
        if axes is None or np.max(np.abs(np.linalg.solve(axes, best.h - at))) > SAME_PLACE:
            axes, at = _axes(marginal, best, deviation, np.linalg.norm(scale, axis=1)), best.h
        is_flat = np.max(np.abs(axes.T @ marginal.with_gradient(best.h, best).gradient)) < FLAT
        if is_flat and _highest(marginal).bound < best.bound + ABOVE:
            break
        scale = axes  # in which L is nearly round, and a search ends in a few steps
    return Mode(best, axes)


def _highest(marginal: Marginal) -> Point:
    return max(marginal.points, key=lambda point: point.bound)


def _ascend(marginal: Marginal, scale: np.ndarray) -> Point:
    """The highest point after L-BFGS from the highest one so far, in coordinates t with h = point.h + scale t."""
    import scipy.optimize  # here: slow to import, and seldom needed

    best, lowest = _highest(marginal), np.inf

    def drop(t: np.ndarray) -> tuple[float, np.ndarray]:  # not L itself: what ends the search is relative
        point = marginal.with_gradient(best.h + scale @ t)
        if not np.isfinite(point.bound):
            return 1e3 + 1e3 * float(t @ t), 2e3 * t
        return best.bound - point.bound, -scale.T @ point.gradient

    def step(intermediate_result: Any) -> None:  # by differences: what would end the search itself is relative
        nonlocal lowest
        if lowest - intermediate_result.fun < LEAST_RISE:
            raise StopIteration
        lowest = intermediate_result.fun

    options = {"ftol": 0.0, "gtol": LEAST_SLOPE}
    start = np.zeros(len(scale))
    scipy.optimize.minimize(drop, start, jac=True, method="L-BFGS-B", callback=step, options=options)
    return _highest(marginal)


def _widths(marginal: Marginal, deviation: np.ndarray) -> np.ndarray:
    """The width of L along each parameter (d,), by its gradients near the highest point: at most the prior's standard
    deviations, and less if L is steep there."""
    best = marginal.with_gradient(_highest(marginal).h)
    slope, widths = np.asarray(best.gradient), deviation.copy()
    if not np.isfinite(best.bound) or np.max(np.abs(deviation * slope)) < STEEP:
        return widths
    for i, unit in enumerate(np.eye(len(deviation))):
        step = STEP * deviation[i]
        for _ in range(MAX_SHORTENINGS):
            near = marginal.with_gradient(best.h + step * unit, best)
            fall = (slope - np.asarray(near.gradient))[i] if np.isfinite(near.bound) else np.inf
            if 0.5 * fall * step < max(OVERSHOT * abs(slope[i]) * step, OVERSHOT):
                break
            step *= 0.1  # L is far from quadratic over so long a step
        curvature = fall / step if np.isfinite(fall) else 0.0
        if curvature > 0:
            widths[i] = min(deviation[i], 1 / np.sqrt(curvature))
    return widths


def _axes(marginal: Marginal, mode: Point, deviation: np.ndarray, width: np.ndarray) -> np.ndarray:
    """The symmetric root of the inverse of L's negative Hessian, by differences of its gradient. It turns the
    parameters, whose marginals are skewed, as little as possible.

    :param deviation: the prior's, (d,). :param width: an upper bound of that of L, (d,).
    :raises NotFinite: if that is not finite.
    """
    columns: list[np.ndarray] = []
    for i, unit in enumerate(np.eye(len(deviation))):
        step = STEP * _narrowed(marginal, mode, unit, width[i])
        for _ in range(2):  # once more, if the mode is far narrower than the prior
            ends = [marginal.with_gradient(mode.h + sign * step * unit, mode) for sign in (1, -1)]
            slopes = np.array([end.gradient for end in ends])
            column = (slopes[1] - slopes[0]) / (2 * step)
            narrow = column[i] > 0 and STEP / np.sqrt(column[i]) < 0.5 * step
            if all(np.isfinite(end.bound) for end in ends) and not narrow:
                break
            step = STEP / np.sqrt(column[i]) if narrow else 0.1 * step
        columns.append(column)
    hessian = deviation * np.array(columns) * deviation[:, None]
    if not np.isfinite(hessian).all():
        raise NotFinite(NOT_FINITE)
    values, vectors = np.linalg.eigh(0.5 * (hessian + hessian.T))
    values = np.where(np.isfinite(values), np.maximum(values, FLATTEST**-2), FLATTEST**-2)
    return deviation[:, None] * (vectors / np.sqrt(values)) @ vectors.T


def _narrowed(marginal: Marginal, mode: Point, direction: np.ndarray, width: float) -> float:
    """The standard deviation of L along a direction, if it is far less than ``width``; else ``width``. By values of L:
    gradients over too long a step are of no use, and take longer."""
    for _ in range(MAX_NARROWINGS):
        drop = mode.bound - marginal(mode.h + STEP * width * direction, mode).bound
        if not np.isfinite(drop):
            width *= 0.1
        elif drop > FAR:
            width *= STEP / np.sqrt(2 * drop)
        else:
            break
    return width


# ---------------------------------------------------------------------- integration
class SolvedRoot(NamedTuple):
    """The packed Cholesky factor of the precision of x in its order of elimination, and variances (P,) of x."""

    factor: np.ndarray
    variance: np.ndarray


Root = np.ndarray | SolvedRoot


class Design(NamedTuple):
    """Gaussians in h around points, and x given h there.

    :ivar h: (K, d). :ivar mass: of the Gaussians, (K,), sums to one. :ivar means: of x, (K, P).
    :ivar roots: Cholesky factors of its covariances, (K, P, P), or :class:`SolvedRoot` with K along the leading axis.
    :ivar slopes: of its mean in h, (K, P, d).
    :ivar kernel: (d, d), a root of the covariance of the Gaussians in h that stand around the points, or one for each
        point, (K, d, d).
    """

    h: np.ndarray
    mass: np.ndarray
    means: np.ndarray
    roots: Root
    slopes: np.ndarray
    kernel: np.ndarray


class Integral(NamedTuple):
    """The integral of exp L over h, and what the posterior takes.

    :ivar log_evidence: the log of the integral; None where only draws of h were taken.
    :ivar converged: the share of the mass at points where the bound is maximized. :ivar info: for the posterior's.
    :ivar error: the standard error of estimates of log p(y, h), on average.
    """

    design: Design
    log_evidence: float | None
    converged: float
    info: Info
    error: float

    @classmethod
    def over(
        cls, points: Sequence[Point], mass: np.ndarray, design: Design, log_evidence: float | None, info: Info
    ) -> Integral:
        """The integral from its points and the mass of each."""
        converged, error = mass @ [point.converged for point in points], mass @ [point.error for point in points]
        return cls(design, log_evidence, float(converged), info, float(error))


Moments = Callable[[Point], tuple[np.ndarray, "Root"]]
"""The mean (P,) of x at a point, and the Cholesky factor (P, P) of its covariance, or a :class:`SolvedRoot`."""


def variances_of(root: Root) -> np.ndarray:
    """The variances of x, (P,)."""
    return root.variance if isinstance(root, SolvedRoot) else np.sum(root**2, axis=1)


def stacked(roots: Sequence[Root]) -> Any:
    """The roots of all points, along a leading axis."""
    return jax.tree.map(lambda *parts: np.stack(parts), *roots)
