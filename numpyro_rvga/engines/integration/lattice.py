"""The integral of exp L(h) over one or two parameters h, on a lattice of points."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterator

import numpy as np

from ...model.bad_rows import NotFinite
from .design import kernel_weights
from .nested import (
    ABOVE,
    MOST_MISSED,
    NOT_FINITE,
    Design,
    Integral,
    Marginal,
    Mode,
    Moments,
    Point,
    Root,
    stacked,
    variances_of,
)

DROP = 10.0  # nats below the highest point, where the marginal is cut off
SPACING = 0.75  # of a lattice, in standard deviations of the Gaussian at the mode
CONVERGED = 0.02  # change of means, in standard deviations, and of log standard deviations, when the spacing doubles
MAX_POINTS = 1_000
MOST_AT_EDGE = math.log(1e-3)  # share of the mass in points whose neighbors are left out, in a complete lattice
MOST_FORETOLD_WRONGLY = 0.5  # nats, or of a rise, between neighbors in a lattice
MAX_HALVINGS = 2
REFINEMENT = {1: 4, 2: 3}  # of a lattice by interpolation, by its dimension
MOST_NUMBERS = 2**27  # in the roots of all points
KERNEL = 0.6  # width of the Gaussians in h around points, in a lattice's spacings: wide enough to leave no gaps


def integrate_lattice(marginal: Marginal, mode: Mode, moments: Moments) -> Integral:
    """A lattice in the coordinates of the mode, grown to where L has fallen by ``DROP``, and refined until means and
    standard deviations have converged."""
    size, spacing = len(mode.point.h), SPACING
    lattice = {(0,) * size: mode.point}
    of_x: dict[int, tuple[np.ndarray, Root]] = {}
    for halving in range(MAX_HALVINGS + 1):
        if halving:
            spacing /= 2
            lattice = {tuple(2 * i for i in index): point for index, point in lattice.items()}
        complete = _grow(marginal, lattice, mode, spacing)
        highest = max(point.bound for point in lattice.values())
        kept = {index: point for index, point in lattice.items() if point.bound > highest - DROP}
        for point in kept.values():
            if id(point) not in of_x:
                of_x[id(point)] = moments(point)
        kept = {index: point for index, point in kept.items() if _is_proper(*of_x[id(point)])}
        bounds = np.array([point.bound for point in kept.values()])
        summaries = [_summary(point, *of_x[id(point)]) for point in kept.values()]
        means, variances = map(np.array, zip(*summaries))
        even = np.array([all(i % 2 == 0 for i in index) for index in kept])
        change = _change(bounds, means, variances, even)
        if change < CONVERGED or not complete:
            break
    scale = spacing * mode.axes
    x_means, x_roots = zip(*[of_x[id(point)] for point in kept.values()])
    x_means, x_roots = np.array(x_means), stacked(x_roots)
    points = marginal.estimated(list(kept.values()))
    evidences = np.array([point.evidence for point in points])
    highest = evidences.max()
    mass = np.exp(evidences - highest)
    log_evidence = highest + np.log(mass.sum()) + np.linalg.slogdet(scale)[1]
    mass /= mass.sum()
    if mass @ [_is_beside_nothing(index, lattice) for index in kept] > MOST_MISSED:
        raise NotFinite(NOT_FINITE)
    design = Design(
        np.array([point.h for point in points]),
        mass,
        x_means,
        x_roots,
        _lattice_slopes(kept, x_means, scale),
        KERNEL * scale,
    )
    info = {
        "method": "lattice",
        "evaluations": len(marginal.points),
        "points": design.h,
        "mass": mass,
        "is_complete": complete,
        "change_at_doubled_spacing": change,
    }
    if isinstance(design.roots, np.ndarray):
        gradients = np.array([marginal.with_gradient(point.h, point).gradient for point in points])
        if not _are_slopes_of(kept, evidences, gradients, scale):
            gradients = _lattice_slopes(kept, evidences[:, None], scale)[:, 0]
        design = _refined(list(kept), design, evidences, gradients)
    design = design._replace(mass=kernel_weights(design.h, design.mass, design.kernel))
    return Integral.over(points, mass, design, float(log_evidence), info)


def _grow(marginal: Marginal, lattice: dict, mode: Mode, spacing: float) -> bool:
    """Add to a lattice the neighbors of all its points that are high enough, the highest first. Whether all are in, or
    what is left out has next to no mass."""
    to_lattice, floor = np.linalg.inv(spacing * mode.axes), mode.point.bound - DROP
    count = itertools.count()
    for point in list(marginal.points):  # other modes, where exploring has met them
        index = tuple(np.round(to_lattice @ (point.h - mode.point.h)).astype(int).tolist())
        if point.bound > floor and index not in lattice:
            lattice[index] = _trusted(marginal(mode.point.h + spacing * mode.axes @ index, point), mode)
    queue = [(-point.bound, next(count), index) for index, point in lattice.items()]
    heapq.heapify(queue)
    while queue:
        negative, _, index = heapq.heappop(queue)
        if -negative < floor:
            return True
        for neighbor in _neighbors(index):
            if neighbor in lattice:
                continue
            if len(lattice) >= MAX_POINTS:
                ends = [negative, *(entry[0] for entry in queue)]
                edge, all_of_it = (
                    np.logaddexp.reduce(x) for x in (-np.array(ends), [p.bound for p in lattice.values()])
                )
                return bool(edge - all_of_it < MOST_AT_EDGE)
            h = mode.point.h + spacing * mode.axes @ neighbor
            lattice[neighbor] = _trusted(marginal(h, lattice[index]), mode)
            heapq.heappush(queue, (-lattice[neighbor].bound, next(count), neighbor))
    return True


def _neighbors(index: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """The places next to one in a lattice."""
    for axis, sign in itertools.product(range(len(index)), (1, -1)):
        yield tuple(i + sign * (axis == j) for j, i in enumerate(index))


def _is_beside_nothing(index: tuple[int, ...], lattice: dict) -> bool:
    """Whether L is not finite next to a point."""
    return any(other in lattice and not np.isfinite(lattice[other].bound) for other in _neighbors(index))


def _trusted(point: Point, mode: Mode) -> Point:
    """The point; without a bound if its search has not converged, and yet ended above the mode, by rounding."""
    is_rounding = not point.converged and point.bound > mode.point.bound + ABOVE
    return point._replace(bound=-np.inf, evidence=-np.inf) if is_rounding else point


def _is_proper(mean: np.ndarray, root: Root) -> bool:
    """Whether x is a Gaussian at a point: rounding may have left none."""
    return bool(np.isfinite(mean).all() and np.all(variances_of(root) > 0))


def _summary(point: Point, mean: np.ndarray, root: Root) -> tuple[np.ndarray, np.ndarray]:
    """Means and variances of h and x, (d + P,)."""
    return np.concatenate([point.h, mean]), np.concatenate([0 * point.h, variances_of(root)])


def _change(bounds: np.ndarray, means: np.ndarray, variances: np.ndarray, some: np.ndarray) -> float:
    """The largest difference of means, in standard deviations, and of log standard deviations, if only some points
    count."""

    def moments(chosen):
        weights = np.exp(bounds[chosen] - bounds.max())
        weights /= weights.sum()
        mean = weights @ means[chosen]
        return mean, np.sqrt(weights @ (variances[chosen] + (means[chosen] - mean) ** 2))

    (mean, deviation), (other, other_deviation) = moments(some), moments(np.ones_like(some))
    if not np.all(deviation > 0):
        return np.inf
    changes = np.abs(mean - other) / other_deviation, np.abs(np.log(deviation / other_deviation))
    return float(np.max(changes))


def _are_slopes_of(kept: dict, evidences: np.ndarray, gradients: np.ndarray, scale: np.ndarray) -> bool:
    """Whether log evidences (K,) differ between neighbors by about what their gradients (K, d) foretell: in single
    precision, these may be rounding."""
    if not np.isfinite(gradients).all():
        return False
    number, along = {index: k for k, index in enumerate(kept)}, gradients @ scale
    for index, k in number.items():
        for axis in range(len(index)):
            other = number.get(tuple(i + (axis == j) for j, i in enumerate(index)))
            if other is None:
                continue
            rise = 0.5 * (along[k, axis] + along[other, axis])
            if abs(evidences[other] - evidences[k] - rise) > MOST_FORETOLD_WRONGLY * max(1.0, abs(rise)):
                return False
    return True


def _lattice_slopes(kept: dict, means: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Slopes of values (K, P) in h, (K, P, d), by differences to existing neighbors."""
    number = {index: k for k, index in enumerate(kept)}
    along = np.zeros((*means.shape, len(scale)))
    for index, k in number.items():
        for axis in range(len(index)):
            ends = [number.get(tuple(i + s * (axis == j) for j, i in enumerate(index)), k) for s in (1, -1)]
            steps = (ends[0] != k) + (ends[1] != k)
            along[k, :, axis] = (means[ends[0]] - means[ends[1]]) / max(steps, 1)
    return along @ np.linalg.inv(scale)


def _refined(kept: list[tuple[int, ...]], design: Design, evidences: np.ndarray, gradients: np.ndarray) -> Design:
    """The design on a finer lattice, by interpolation.

    With the hat functions of the coarse lattice, sum hat_k (f_k + f'_k (h - h_k) / 2) is exact for quadratic f. The
    standard deviations of x given h are interpolated as logarithms.

    :param evidences: log evidences (K,). :param gradients: of these, (K, d).
    """
    size = len(kept[0])
    assert isinstance(design.roots, np.ndarray)
    wanted = REFINEMENT[size]
    factor = int(np.clip((MOST_NUMBERS / max(1, design.roots.size)) ** (1 / size), 1, wanted))
    if factor == 1:
        return design
    number = {index: k for k, index in enumerate(kept)}
    corners, hats = [], []
    for index in kept:
        for offset in itertools.product(range(factor), repeat=size):
            share = np.array(offset) / factor
            ends = list(itertools.product(*[(0, 1) if s > 0 else (0,) for s in share]))
            numbers = [number.get(tuple(i + e for i, e in zip(index, end)), -1) for end in ends]
            if min(numbers) < 0:
                continue
            weights = [np.prod([s if e else 1 - s for s, e in zip(share, end)]) for end in ends]
            missing = 2**size - len(ends)
            corners.append(numbers + [numbers[0]] * missing)
            hats.append(weights + [0.0] * missing)
    corners, hats = np.array(corners), np.array(hats)
    h = np.einsum("fc,fcd->fd", hats, design.h[corners])
    steps = 0.5 * hats[:, :, None] * (h[:, None] - design.h[corners])

    def interpolated(values, slopes):
        return np.einsum("fc,fc...->f...", hats, values[corners]) + np.einsum(
            "fcd,fc...d->f...", steps, slopes[corners]
        )

    deviations = np.linalg.norm(design.roots, axis=2)
    fine_deviations = np.exp(np.einsum("fc,fcp->fp", hats, np.log(deviations)[corners]))
    correlations = design.roots / deviations[:, :, None]
    roots = np.zeros((len(h), *design.roots.shape[1:]))
    for corner, hat in zip(corners.T, hats.T):
        roots += hat[:, None, None] * correlations[corner]
    roots *= (fine_deviations / np.linalg.norm(roots, axis=2))[:, :, None]
    levels = interpolated(evidences, gradients)
    mass = np.exp(levels - levels.max())
    slopes = np.einsum("fc,fcpd->fpd", hats, design.slopes[corners])
    means = interpolated(design.means, design.slopes)
    return Design(h, mass / mass.sum(), means, roots, slopes, design.kernel / factor)
