"""The drop of L along the axes of its mode: a skewed marginal is proposed from it, and nearly Gaussian in its terms."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from .nested import Marginal, Mode
from .polynomials import Coordinates

FREEDOM = 7.0  # of the Student t that a Gaussian profile proposes from
FIRST_DISTANCE = 1.5  # where a profile is measured first, in standard deviations of the Gaussian at the mode
NEARLY_GAUSSIAN = 0.1  # nats, by which the drop there may differ from a Gaussian's, to be taken for one
NEAR_DROP, FAR_DROP = 1.5, 4.5  # nats: a profile is measured from a drop below the first to one above the second
MAX_POINTS = 6  # of a profile, on each side
LEAST_SLOPE = 0.2  # of a profile beyond where it was measured, in nats for each standard deviation
LAST_DROP = 30.0  # nats, where a profile ends
NUM_CELLS = 4_000
FARTHEST = 8.5  # standard deviations of a standard normal variable, beyond which there is nothing


class Profile(NamedTuple):
    """One axis, z, cut in cells.

    :ivar edges: of the cells (G + 1,). :ivar roots: signed roots of twice the drop at these edges.
    :ivar log_density: of what is proposed, in each cell (G,). :ivar proposed: its distribution function at the edges.
    :ivar standard: where a standard normal variable has as much mass below as exp(-drop) has below an edge.
    """

    edges: np.ndarray
    roots: np.ndarray
    log_density: np.ndarray
    proposed: np.ndarray
    standard: np.ndarray

    def cells(self, z: np.ndarray) -> np.ndarray:
        """The numbers of the cells in which points (n,) lie."""
        return np.clip(np.searchsorted(self.edges, z, side="right") - 1, 0, NUM_CELLS - 1)


class Profiles(NamedTuple):
    """Profiles of all axes: a proposal in which they are independent, and two nonlinear coordinates of each.

    Along an axis the marginal is exp(-drop). A proposal with the density of a Student t, in place of a Gaussian of the
    root of twice the drop, has its skewness, and heavier tails.
    """

    axes: tuple[Profile, ...]

    def propose(self, uniform: np.ndarray) -> np.ndarray:
        """Points z (n, d) for points (n, d) of the unit cube."""
        return np.stack([np.interp(uniform[:, j], p.proposed, p.edges) for j, p in enumerate(self.axes)], axis=1)

    def log_density(self, z: np.ndarray) -> np.ndarray:
        """The log density (n,) of what is proposed, at points (n, d)."""
        by_axis = [profile.log_density[profile.cells(z[:, j])] for j, profile in enumerate(self.axes)]
        outside = [(z[:, j] < p.edges[0]) | (z[:, j] > p.edges[-1]) for j, p in enumerate(self.axes)]
        return np.where(np.any(outside, axis=0), -np.inf, np.sum(by_axis, axis=0))

    def roots(self, z: np.ndarray) -> Coordinates:
        """Signed roots of twice the drop along each axis, (n, d): those of a Gaussian are z."""
        values = [np.interp(z[:, j], p.edges, p.roots) for j, p in enumerate(self.axes)]
        slopes = [(np.diff(p.roots) / np.diff(p.edges))[p.cells(z[:, j])] for j, p in enumerate(self.axes)]
        return Coordinates(np.stack(values, axis=1), np.stack(slopes, axis=1))

    def standard(self, z: np.ndarray) -> np.ndarray:
        """Coordinates (n, d) in which exp(-drop) along each axis is standard normal."""
        return np.stack([np.interp(z[:, j], p.edges, p.standard) for j, p in enumerate(self.axes)], axis=1)

    def from_standard(self, v: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """z and its derivative along each axis, both (n, d), of such coordinates."""
        z, slopes = np.empty_like(v), np.empty_like(v)
        for j, profile in enumerate(self.axes):
            z[:, j] = np.interp(v[:, j], profile.standard, profile.edges)
            slopes[:, j] = (np.diff(profile.edges) / np.diff(profile.standard))[profile.cells(z[:, j])]
        return z, slopes


def profiles_of(
    marginal: Marginal, mode: Mode, axes: np.ndarray, least_deviation: np.ndarray | None = None
) -> Profiles:
    """The profiles along axes through the mode, (d, d).

    :param least_deviation: (d,), standard deviations that profiles have at least: those that are less are stretched.
    """
    least = np.zeros(len(axes)) if least_deviation is None else least_deviation
    sides = [[_side(marginal, mode, sign * direction) for sign in (-1, 1)] for direction in axes.T]
    return Profiles(tuple(_profile(*pair, deviation) for pair, deviation in zip(sides, least)))


class _Side(NamedTuple):
    """Roots of twice the drop (m,) at distances (m,) on one side of the mode, both rising from zero.

    :ivar slope: of the drop beyond. :ivar limit: a distance where there is no bound.
    """

    distances: np.ndarray
    roots: np.ndarray
    slope: float
    limit: float

    def at(self, distances: np.ndarray) -> np.ndarray:
        """Roots at distances (n,)."""
        if len(self.distances) == 1:
            return np.sqrt(2 * self.slope * distances)
        from scipy.interpolate import PchipInterpolator  # here: slow to import, and seldom needed

        last = self.distances[-1]
        inside = PchipInterpolator(self.distances, self.roots)(np.minimum(distances, last))
        return np.sqrt(inside**2 + 2 * self.slope * np.maximum(distances - last, 0))

    @property
    def end(self) -> float:
        """Where the drop is ``LAST_DROP``, or there is no bound."""
        left = LAST_DROP - 0.5 * self.roots[-1] ** 2
        if left > 0:
            return min(self.limit, float(self.distances[-1] + left / self.slope))
        return min(self.limit, float(np.interp(np.sqrt(2 * LAST_DROP), self.roots, self.distances)))


def _side(marginal: Marginal, mode: Mode, direction: np.ndarray) -> _Side:
    points, drops, limit = {0.0: mode.point}, {0.0: 0.0}, np.inf
    distance = FIRST_DISTANCE
    for _ in range(MAX_POINTS):
        nearest = min(points, key=lambda other: abs(other - distance))
        point = marginal(mode.point.h + distance * direction, points[nearest])
        if np.isfinite(point.bound):
            points[distance], drops[distance] = point, max(mode.point.bound - point.bound, 0.0)
        else:
            limit = min(limit, distance)
        measured = sorted(points)
        if (
            distance == FIRST_DISTANCE
            and abs(drops.get(FIRST_DISTANCE, 0.0) - 0.5 * FIRST_DISTANCE**2) < NEARLY_GAUSSIAN
        ):
            drops |= {factor * FIRST_DISTANCE: factor**2 * drops[FIRST_DISTANCE] for factor in (2, 3)}
            break
        if len(measured) == 1 or drops[measured[1]] > NEAR_DROP:
            distance = 0.5 * min(limit, *measured[1:], FIRST_DISTANCE)
        elif max(drops.values()) < FAR_DROP:
            distance = min(2 * measured[-1], 0.5 * (measured[-1] + limit))
        else:
            break
    distances = np.array(sorted(drops))
    drop = np.minimum.accumulate(np.array([drops[d] for d in distances])[::-1])[::-1]  # a second mode is covered
    slope = LEAST_SLOPE if len(drop) < 2 else (drop[-1] - drop[-2]) / (distances[-1] - distances[-2])
    return _Side(distances, np.sqrt(2 * drop), max(float(slope), LEAST_SLOPE), limit)


def _roots(below: _Side, above: _Side, z: np.ndarray) -> np.ndarray:
    return np.where(z < 0, -below.at(np.maximum(-z, 0)), above.at(np.maximum(z, 0)))


def _profile(below: _Side, above: _Side, least_deviation: float) -> Profile:
    from scipy.stats import norm  # here: slow to import, and seldom needed

    half = NUM_CELLS // 2
    edges = np.concatenate([np.linspace(-below.end, 0, half + 1), np.linspace(0, above.end, half + 1)[1:]])
    middles = 0.5 * (edges[1:] + edges[:-1])
    roots = _roots(below, above, middles)
    mass = np.exp(-0.5 * roots**2) * np.diff(edges)
    mass /= mass.sum()
    deviation = np.sqrt(np.average(middles**2, weights=mass))
    stretch = max(1.0, float(least_deviation / deviation))
    heavy = (1 + roots**2 / FREEDOM) ** (-0.5 * (FREEDOM + 1)) * np.diff(edges)
    heavy /= heavy.sum()
    lower = np.concatenate([[0], np.cumsum(mass)])
    upper = np.concatenate([np.cumsum(mass[::-1])[::-1], [0]])
    standard = np.clip(np.where(lower < 0.5, norm.ppf(lower), norm.isf(upper)), -FARTHEST, FARTHEST)
    proposed = np.concatenate([[0], np.cumsum(heavy)])
    return Profile(
        stretch * edges,
        _roots(below, above, edges),
        np.log(heavy / (stretch * np.diff(edges))),
        proposed / proposed[-1],
        np.maximum.accumulate(standard + 1e-9 * np.arange(len(standard))),
    )
