"""The functions L(h) that are integrated: bounds, or the log joint density itself; and each on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.compilation import jit
from ...core.groups.importance import Estimate
from ...core.pytrees import PyTree
from ...core.updates.factors import Nodes
from ...model import Program
from ...model.data.row_set import once_each
from ...model.data.rows import Rows, num_rows
from ..maximized_bound import MaximizedBound, Maximum, SparseMaximizedBound, Start
from .nested import Marginal, Point, Root, SolvedRoot

NUM_OTHER_STARTS = 6  # of q given the best hyperparameters, where it may have other maxima


def weighted_rows(program: Program, rows: Rows) -> tuple[Rows, np.ndarray]:
    """The log-likelihood's inputs of the distinct rows, and their multiplicities: of a whole program, one."""
    inputs = program.inputs(rows)
    if program.whole:
        return inputs, np.ones(1, program.dtype)
    return once_each(inputs, np.ones(num_rows(inputs), program.dtype))


class LogDensity:
    """L(h) = log p(y, h) with h all latent sites, as :class:`~.maximized_bound.MaximizedBound` has it: of an x without
    entries, for which there is nothing to maximize. Its chunks of rows are :func:`weighted_rows`."""

    is_log_concave = True  # in the entries that are none
    nodes = "usual"  # there are no expectations

    def __init__(self, program: Program):
        self.program = program
        self._nothing = jnp.zeros(0, program.dtype), jnp.zeros((0, 0), program.dtype)

        def log_joint(h: Array, rows: dict[str, Array], weights: Array) -> Array:
            terms = program.log_likelihood(h, rows).values()
            return program.log_prior(h) + sum(weights @ jnp.sum(x.reshape(len(weights), -1), axis=1) for x in terms)

        self._evaluate = jit(jax.value_and_grad(log_joint))

    def begin(self, params: Array | np.ndarray, chunks: PyTree, mean: np.ndarray | None = None) -> Start:
        """There is nothing to start from."""
        return self._nothing

    def solve(self, params: Array | np.ndarray, chunks: PyTree, start: Start) -> Maximum:
        value, gradient = self._evaluate(params, *chunks)
        return Maximum(value, gradient, start, jnp.asarray(True))

    def moments(self, params: Array | np.ndarray, start: Start) -> Start:
        """The moments of no entries."""
        return start


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
