"""The check at the end of a pass: the bound and its natural gradient on all rows, and natural-gradient steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.matrices.jacobians import gram, vjp
from ..core.pytrees import PyTree, summed
from ..core.updates.factors import Factors, Kind, add_curvatures, covariances, expected_values
from ..core.updates.maximize import rounding_of_sum
from ..core.updates.objective import FactorSet
from ..core.updates.row_factors import quadratic_sums, row_factors_of
from ..core.updates.state import Absorbed, QuadraticFactors, State
from ..model.data.rows import Rows, num_rows, pad, selected
from ..model.terms.terms import merged
from .engine import Engine
from .natural_steps import (
    SHORTER,
    BoundEvaluation,
    Noise,
    SiteSums,
    best_step,
    evaluate_bound,
    in_double,
    joint_density,
    natural_step,
    stored,
    without_prior_factor,
)

CHUNK_NUMBERS = 2**21  # in the Jacobians of the rows that are evaluated together
MAX_CHUNK = 2**16
AHEAD = 2  # chunks that are computed while the next ones are read
NOISE_FACTOR = 4.0  # an estimated squared natural gradient below so many times its noise is taken for zero

Chunks = Callable[[int], Iterable[tuple[Rows, np.ndarray]]]


class Certified(NamedTuple):
    """The result of a check.

    :ivar num_evaluations: of the bound on all rows. :ivar before: at the first q. :ivar after: at the last q.
    """

    state: State
    num_evaluations: int
    before: BoundEvaluation
    after: BoundEvaluation


class Stratum(NamedTuple):
    """Rows, the moments of their predictors when the state absorbed them (n, E, ...), and their weights (n,)."""

    rows: Rows
    absorbed: tuple[Absorbed, ...]
    weights: np.ndarray

    def in_chunks(self, size: int) -> Iterator[tuple[Rows, np.ndarray, tuple[Absorbed, ...]]]:
        for start in range(0, len(self.weights), size):
            part = slice(start, start + size)
            yield selected(self.rows, part), self.weights[part], selected(self.absorbed, part)


class Certificate:
    """Evaluations of the bound on all rows, compiled for an engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._size: int | None = None
        self._of_rows = engine.compiled(partial(self._row_sums, engine.kinds))
        few = tuple(kind.by_nodes("few") for kind in engine.kinds)
        takes_few = engine.effort.rows_can_do_with_few and not engine.effort.is_thorough
        self._by_few_nodes = engine.compiled(partial(self._row_sums, few)) if takes_few else None
        self._of_prior = engine.compiled(self._prior_sums)
        self._of_each = engine.compiled(self._row_values)

    @classmethod
    def of(cls, engine: Engine) -> Certificate:
        """The one of an engine."""
        return engine.once(cls, lambda: cls(engine))

    def __call__(
        self,
        start: State,
        state: State,
        chunks: Chunks,
        *,
        prior_inputs: dict,
        total: int | None,
        tolerance: float,
        max_looks: int,
    ) -> Certified:
        """The state after natural-gradient steps on all rows, for as long as these raise the bound.

        :param start: before the first row. :param state: after the last.
        :param chunks: size -> all rows and their weights, by chunks of this size.
        :param total: number of rows, or None.
        :param prior_inputs: as ``program.prior_inputs``.
        :param tolerance: squared length of the natural gradient, in nats, at which no step is taken.
        :param max_looks: evaluations of the bound on all rows, at most.
        """
        self._size = self._chunk(total)

        def evaluate(state: State) -> BoundEvaluation:
            return self.evaluate(start, state, self.sums(state, chunks, total), prior_inputs)

        certified = self._ascend(evaluate, state, tolerance, max_looks)
        return certified._replace(state=stored(certified.state, certified.after, start))

    def sums(self, state: State, chunks: Chunks, total: int | None) -> SiteSums:
        """Sums over all rows; see :meth:`__call__`."""
        size = self._chunk(total)
        return self._summed(*self._placed(state), chunks(size), size, total)

    def evaluate(self, start: State, state: State, rows: SiteSums, prior_inputs: dict) -> BoundEvaluation:
        """The bound at a state and its natural gradient. ``start``: before the first row. ``rows``: sums over all."""
        prior = self._of_prior(prior_inputs, *self._placed(state))
        return evaluate_bound(state, without_prior_factor(start), rows, in_double(prior))

    def _placed(self, state: State) -> tuple[Array, Array]:
        return self._engine.devices.put((state.mean, state.root))

    def estimated(self, state: State, kept: Stratum | None, batches: Sequence[Stratum], max_looks: int) -> Certified:
        """The state after natural-gradient steps, with the bound and its natural gradient estimated from some rows.

        All rows are in the state by their Gaussian summaries. Only the errors of the summaries are estimated. These are
        small, so a sample determines them much better than the bound itself. Steps are taken while the natural gradient
        exceeds what sampling errors explain.

        :param state: after the last row.
        :param kept: rows that represent themselves; None: there are none.
        :param batches: a sample of the other rows, in batches of equal sizes, weighted to represent all of them.
        """
        base, no_prior_terms = joint_density(state, np.asarray(state.mean, np.float64)), _no_sums(state)
        strata = [*batches] if kept is None else [kept, *batches]
        size = self._chunk(max(len(stratum.weights) for stratum in strata))

        def evaluate(state: State) -> BoundEvaluation:
            placed = self._placed(state)
            sums = [self._summed(*placed, stratum.in_chunks(size), size) for stratum in strata]
            noise = _noise(state, sums[-len(batches) :])
            return evaluate_bound(state, base, summed(sums), no_prior_terms)._replace(noise=noise)

        return self._ascend(evaluate, state, 0.0, max_looks)

    def _ascend(
        self, evaluate: Callable[[State], BoundEvaluation], state: State, tolerance: float, max_looks: int
    ) -> Certified:
        """Natural-gradient steps, as long as evaluations are left and the squared natural gradient exceeds the
        tolerance and what sampling errors alone may produce."""
        before = current = evaluate(state)
        num_evaluations, step = 1, 1.0
        while num_evaluations < max_looks:
            noise = 0.0 if current.noise is None else NOISE_FACTOR * current.noise.squared
            if not current.squared_natural_gradient > tolerance + noise:
                break
            taken = natural_step(state, current, step)
            if taken is None:
                break
            after = evaluate(taken.state)
            num_evaluations += 1
            step = best_step(taken, current, after)
            if self._is_better(after, current):
                state, current = taken.state, after
            else:
                step = min(step, SHORTER * taken.step)
        return Certified(state, num_evaluations, before, current)

    def terms_at(self, state: State, rows: Rows) -> SiteSums:
        """Sums over some rows at the state's q."""
        size = self._size or self._chunk(num_rows(rows))  # as for all rows: nothing is compiled anew
        starts = range(0, num_rows(rows), size)
        pieces = [selected(rows, slice(start, start + size)) for start in starts]
        mean, root = self._placed(state)
        weighted = [(piece, np.ones(num_rows(piece), np.float32)) for piece in pieces]
        return self._summed(mean, root, weighted, size, num_rows(rows))

    def values_at(self, state: State, rows: Rows) -> np.ndarray:
        """The expected log-likelihood of each row, (n,)."""
        mean, root = self._placed(state)
        return np.asarray(self._of_each(mean, root, *pad(rows, num_rows(rows))))

    def _chunk(self, total: int | None) -> int:
        """The number of rows in a chunk."""
        size = min(MAX_CHUNK, max(CHUNK_NUMBERS // self._engine.numbers_per_row, 1))
        if total is not None:
            size = -(-total // -(-total // size))
        return self._engine.devices.padded(size)

    def _summed(
        self, mean: Array, root: Array, chunks: Iterable[tuple], size: int, num_rows: int | None = None
    ) -> SiteSums:
        """Sums over chunks of rows, weights and, if given, absorbed moments; in double precision.

        :param num_rows: of all chunks. If it is given, few nodes are taken until their errors are too large.
        """
        total: PyTree = None
        evaluate = self._of_rows if num_rows is None or self._by_few_nodes is None else self._by_few_nodes
        num_rows = num_rows or size
        pending: deque = deque()

        def add_first() -> None:
            nonlocal total, evaluate
            arguments, taken, sums = pending.popleft()
            sums = in_double(sums)
            if taken is not self._of_rows and not self._few_nodes_suffice(sums, size, num_rows):
                evaluate = self._of_rows
                sums = in_double(evaluate(mean, root, *arguments))
            total = sums if total is None else summed((total, sums))

        for rows, weights, *absorbed in chunks:
            (rows, *absorbed), weights = pad((rows, *absorbed), size, weights)
            arguments = self._engine.devices.put_rows((rows, weights, *absorbed))
            pending.append((arguments, evaluate, evaluate(mean, root, *arguments)))
            if len(pending) > AHEAD:
                add_first()
        while pending:
            add_first()
        return total

    def _few_nodes_suffice(self, sums: SiteSums, size: int, num_rows: int) -> bool:
        """Whether the errors of a chunk are no more than its share of what is of no consequence in all."""
        share = size / max(num_rows, size)
        allowed = self._engine.effort.allowed_error(float(np.sum(sums.values)) / share, num_rows)
        return float(np.sum(sums.errors)) <= share * allowed

    def _is_better(self, after: BoundEvaluation, before: BoundEvaluation) -> bool:
        """Whether the bound is higher; or, where rounding hides that or there is none, the natural gradient shorter."""
        nearer = after.squared_natural_gradient < before.squared_natural_gradient
        if not all(kind.conservative for kind in self._engine.kinds):
            return nearer
        rounding = rounding_of_sum(before.bound, self._engine.program.dtype)
        return after.bound > before.bound + rounding or (after.bound > before.bound - rounding and nearer)

    # ------------------------------------------------------------------ compiled
    def _row_sums(
        self,
        kinds: tuple[Kind, ...],
        mean: Array,
        root: Array,
        rows: dict,
        weights: Array,
        absorbed: tuple[Absorbed, ...] | None = None,
    ) -> SiteSums:
        """Sums over the rows; with ``absorbed``, less the sums over their Gaussian summaries in the state."""
        engine = self._engine
        factors = engine.linearize(engine.prepare(rows, weights), mean)
        sums = _sums(kinds, factors, root)
        if absorbed is None:
            return sums
        approximations = row_factors_of(kinds, factors, merged(absorbed))
        approximated = [_row_factor_sums(*each, root) for each in zip(factors, approximations)]
        return jax.tree.map(lambda x, *parts: x - jnp.stack(parts), sums, *approximated)

    def _row_values(self, mean: Array, root: Array, rows: dict, weights: Array) -> Array:
        engine = self._engine
        factors = engine.linearize(engine.prepare(rows, weights), mean)
        return expected_values(engine.kinds, factors, root.T, (len(weights),))

    def _prior_sums(self, prior_inputs: dict, mean: Array, root: Array) -> SiteSums:
        prior: FactorSet = self._engine.prior_set(prior_inputs)
        return _sums(prior.kinds, prior.linearize(prior.first, mean), root)


def _sums(kinds: tuple, factors: tuple, root: Array) -> SiteSums:
    """For each site: the sums over its factors of E[phi], J^T g, -J^T G J and the errors, at q = N(., root root^T)."""
    size = root.shape[0]
    sums = []
    for kind, block, covariance in zip(kinds, factors, covariances(factors, root.T)):
        (value, gradient, hessian), errors = kind.expect(block.predictors, covariance, block.constants)
        curvature = add_curvatures(gram(block.jacobian, -hessian), jnp.zeros((size, size), root.dtype))
        sums.append(SiteSums(jnp.sum(value), vjp(block.jacobian, gradient), curvature, jnp.sum(errors)))
    zeros = [jnp.zeros((0, *shape), root.dtype) for shape in ((), (size,), (size, size), ())]
    return SiteSums(*[jnp.stack(parts) for parts in zip(*sums)]) if sums else SiteSums(*zeros)


def _row_factor_sums(block: Factors, site: QuadraticFactors, root: Array) -> SiteSums:
    """Sums over the Gaussian approximations of n factors, expected under q."""
    value, gradient, curvature = quadratic_sums(block, site)
    scaled = block.jacobian @ root
    trace = jnp.einsum("ncr,ncd,ndr->", scaled, site.precision, scaled)
    return SiteSums(value - 0.5 * trace, gradient, curvature, jnp.zeros((), value.dtype))


def _no_sums(state: State) -> SiteSums:
    """Sums of no sites."""
    size = state.mean.shape[0]
    return SiteSums(np.zeros(0), np.zeros((0, size)), np.zeros((0, size, size)), np.zeros(0))


def _noise(state: State, batches: list[SiteSums]) -> Noise:
    """Estimated from the differences between batches."""
    root, count = in_double(state.root), len(batches)

    def error(parts: list[np.ndarray]) -> np.ndarray:
        return np.std(parts, axis=0, ddof=1) * math.sqrt(count)

    gradient = error([root.T @ batch.gradients.sum(axis=0) for batch in batches])
    curvature = error([root.T @ batch.curvatures.sum(axis=0) @ root for batch in batches])
    squared = float(gradient @ gradient + 0.5 * np.sum(curvature**2))
    return Noise(float(error([np.asarray(batch.values.sum()) for batch in batches])), squared)
