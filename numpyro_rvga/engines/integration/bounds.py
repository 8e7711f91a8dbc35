"""The bounds that are integrated, as functions of the hyperparameters on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array

from ...core.groups.importance import Estimate
from ...core.updates.factors import Nodes
from ..maximized_bound import MaximizedBound, Maximum, SparseMaximizedBound, Start
from .log_density import LogDensity
from .nested import Marginal, Point, Root, SolvedRoot

NUM_OTHER_STARTS = 6  # of q given the best hyperparameters, where it may have other maxima

Bound = MaximizedBound | SparseMaximizedBound | LogDensity


def marginal_of(
    bound: Bound, estimate: Callable[..., Estimate] | None, chunks: Any, on_solve: Callable[[], object]
) -> Marginal:
    """L on the host. ``estimate``: of log p(y, h), see :class:`~.nested.Marginal`; None: there is none."""
    dtype = bound.program.dtype

    def solve(h: np.ndarray, start: Start) -> Maximum:
        on_solve()
        return bound.solve(np.asarray(h, dtype), chunks, start)

    def gradient(h: np.ndarray, start: Start) -> tuple[Array, Array]:
        assert isinstance(bound, SparseMaximizedBound)
        return bound.gradient(np.asarray(h, dtype), chunks, start)

    estimated = None
    if estimate is not None:
        estimated = lambda h, start: estimate(np.asarray(h, dtype), chunks, start)  # noqa: E731
    return Marginal(lambda h: bound.begin(np.asarray(h, dtype), chunks), solve, gradient, estimated)


def moments_of(bound: Bound, point: Point, *, is_packed: bool) -> tuple[np.ndarray, Root]:
    """Mean and root of x at a point. ``is_packed``: whether the root stays as the solve has left it."""
    if not isinstance(bound, SparseMaximizedBound):
        mean, root = bound.moments(np.asarray(point.h, bound.program.dtype), point.start)
        return np.asarray(mean, np.float64), np.asarray(root, np.float64)
    if not is_packed:
        return np.asarray(bound.mean(point.start), np.float64), np.asarray(bound.root(point.start), np.float64)
    variance = bound.variances(point.start) if point.variance is None else point.variance
    mean, variance, factor = jax.device_get((bound.mean(point.start), variance, point.start[1]))
    return mean, SolvedRoot(factor, variance)


def from_other_starts(bound: Bound, marginal: Marginal, mode: Point, chunks: Any) -> Point | None:
    """A higher point at the h of the mode, if solves from draws of the prior lead to one."""
    if bound.is_log_concave:
        return None
    assert not isinstance(bound, LogDensity)
    h = np.asarray(mode.h, bound.program.dtype)
    draws = np.random.default_rng(0).normal(size=(NUM_OTHER_STARTS, bound.program.layout.size))
    return marginal.higher_than(mode, (bound.begin(h, chunks, draw) for draw in draws))


def nodes_called_for(bound: Bound, chunks: Any, point: Point) -> Nodes:
    """The nodes with which solves find q, by what those of this bound have left at a point."""
    if isinstance(bound, LogDensity) or bound.nodes == "usual":
        return "usual"
    return bound.nodes_called_for(np.asarray(point.h, bound.program.dtype), chunks, point.start)
