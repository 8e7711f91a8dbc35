"""A certificate: looks at all rows that evaluate the bound and its natural gradient at q, and steps where q is off."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.factors import add_curves, evaluate
from ..core.objective import Group
from ..core.recursion import Quadratic, State
from ..model.rows import Rows, num_rows, pad, selected
from .engine import Engine

CHUNK_NUMBERS = 2**21  # in the Jacobians of the rows that are looked at together
MAX_CHUNK = 2**16
AHEAD = 2  # chunks under way
SHORTEST = 1e-3  # of a step whose precision is not positive definite
SHORTER = 0.5

Chunks = Callable[[int], Iterable[tuple[Rows, np.ndarray]]]


class Sums(NamedTuple):
    """Of terms, at q and by site: E[phi] (S,), its gradient in the mean (S, P), and minus its Hessian (S, P, P)."""

    values: np.ndarray
    gradients: np.ndarray
    curvatures: np.ndarray


class Look(NamedTuple):
    """The bound at q, in nats, and what it is made of.

    :ivar prior: the prior's terms that are not Gaussian.
    :ivar gradient: of the bound in the mean, (P,), in coordinates in which q is standard normal.
    :ivar precision: minus the expected Hessian of the log joint density, (P, P), in these; the identity at the best q.
    """

    bound: float
    prior: Sums
    gradient: np.ndarray
    precision: np.ndarray

    @property
    def squared_natural_gradient(self) -> float:
        """In nats: about twice the Kullback-Leibler divergence from the best Gaussian."""
        off = self.precision - np.eye(len(self.gradient))
        return float(self.gradient @ self.gradient + 0.5 * np.sum(off * off))


class Certified(NamedTuple):
    """:ivar looks: at all rows. :ivar before: at the first q. :ivar after: at the last one that was accepted."""

    state: State
    looks: int
    before: Look
    after: Look


class Certificate:
    """Looks at all rows, compiled for an engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._size: int | None = None
        self._of_rows = engine.compiled(self._row_sums)
        self._of_prior = engine.compiled(self._prior_sums)

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
        """The state, moved by natural-gradient steps on all rows for as long as these raise the bound.

        :param start: before the first row. :param state: after the last.
        :param chunks: size -> all rows and their weights, by chunks of this size.
        :param total: number of rows, if it is known.
        :param prior_inputs: as ``program.prior_inputs``.
        :param tolerance: squared length of the natural gradient, in nats, at which no step is taken.
        """
        base, size, put = _Base(start), self._chunk(total), self._engine.devices.put
        self._size = size

        def look_at(state: State) -> Look:
            mean, root = put((state.mean, state.root))
            return base.look(
                state, self._all_rows(mean, root, chunks(size), size), _double(self._of_prior(prior_inputs, mean, root))
            )

        before = at = look_at(state)
        looks, step = 1, 1.0
        while at.squared_natural_gradient > tolerance and looks < max_looks:
            trial, step = _moved(state, at, step)
            if trial is None:
                break
            found = look_at(trial)
            looks += 1
            if self._is_better(found, at):
                state, at, step = trial, found, 1.0
            else:
                step *= SHORTER
        return Certified(_stored(state, at, start), looks, before, at)

    def terms_at(self, state: State, rows: Rows) -> Sums:
        """Of some rows."""
        size = self._size or self._chunk(num_rows(rows))  # as for all rows: nothing is compiled anew
        starts = range(0, num_rows(rows), size)
        pieces = [selected(rows, slice(start, start + size)) for start in starts]
        mean, root = self._engine.devices.put((state.mean, state.root))
        return self._all_rows(mean, root, [(piece, np.ones(num_rows(piece), np.float32)) for piece in pieces], size)

    def _chunk(self, total: int | None) -> int:
        """Rows of a chunk: all have as many, but for the last. Data of nearly as many rows are compiled once."""
        size = min(MAX_CHUNK, max(CHUNK_NUMBERS // self._engine.numbers_per_row, 1))
        if total is not None:
            size = -(-total // -(-total // size))
        step = 1 << max(size.bit_length() - 4, 0)
        return self._engine.devices.rounded_up(-(-size // step) * step)

    def _all_rows(self, mean: Array, root: Array, chunks: Iterable[tuple[Rows, np.ndarray]], size: int) -> Sums:
        """Chunk by chunk, added up in double precision."""
        total, under_way = None, deque()
        for rows, weights in chunks:
            placed = self._engine.devices.put_rows(pad(rows, size, weights))
            under_way.append(self._of_rows(mean, root, *placed))
            if len(under_way) > AHEAD:
                total = _added(total, _double(under_way.popleft()))
        for found in under_way:
            total = _added(total, _double(found))
        return total

    def _is_better(self, found: Look, at: Look) -> bool:
        """By the bound; by the natural gradient where rounding hides the difference, or there is no bound."""
        nearer = found.squared_natural_gradient < at.squared_natural_gradient
        if not all(kind.conservative for kind in self._engine.kinds):
            return nearer
        rounding = 8 * float(np.finfo(self._engine.program.dtype).eps) * abs(at.bound)
        return found.bound > at.bound + rounding or (found.bound > at.bound - rounding and nearer)

    # ------------------------------------------------------------------ compiled
    def _row_sums(self, mean: Array, root: Array, rows: dict, weights: Array) -> Sums:
        engine = self._engine
        return _sums(engine.kinds, engine.linearise(engine.prepare(rows, weights), mean), root)

    def _prior_sums(self, prior_inputs: dict, mean: Array, root: Array) -> Sums:
        prior: Group = self._engine.prior_group(prior_inputs)
        return _sums(prior.kinds, prior.linearise(prior.first, mean), root)


def _sums(kinds: tuple, factors: tuple, root: Array) -> Sums:
    size = root.shape[0]
    each = [evaluate((kind,), (block,), root.T) for kind, block in zip(kinds, factors)]
    zeros = Sums(jnp.zeros(0, root.dtype), jnp.zeros((0, size), root.dtype), jnp.zeros((0, size, size), root.dtype))
    whole = [Sums(s.value, s.gradient, add_curves(s.curvature, jnp.zeros((size, size), root.dtype))) for s in each]
    return Sums(*[jnp.stack(parts) for parts in zip(*whole)]) if whole else zeros


def _added(total: Sums | None, found: Sums) -> Sums:
    return found if total is None else Sums(*[a + b for a, b in zip(total, found)])


class _Base:
    """The start's log density without what stands for prior terms, in double precision."""

    def __init__(self, start: State):
        self._start = _double(start)
        size = len(self._start.mean)
        inverse = np.linalg.inv(self._start.root)
        self._precision = inverse.T @ inverse
        self._constant = self._start.log_evidence - 0.5 * size * math.log(2 * math.pi) - _half_log_det(self._start.root)
        if self._start.prior_site is not None:
            self._constant = self._constant - self._start.prior_site.constant

    def look(self, state: State, rows: Sums, prior: Sums) -> Look:
        at, start = _double(state), self._start
        delta = at.mean - start.mean
        linear = -self._precision @ delta
        precision, value = self._precision, self._constant + 0.5 * delta @ linear
        site = start.prior_site
        if site is not None:
            off = at.mean - site.centre
            pull = site.precision @ off
            value = value - (site.linear - 0.5 * pull) @ off
            precision, linear = precision - site.precision, linear - site.linear + pull
        value = value - 0.5 * np.sum(at.root * (precision @ at.root))
        size = len(at.mean)
        entropy = _half_log_det(at.root) + 0.5 * size * (1 + math.log(2 * math.pi))
        bound = float(value + entropy + rows.values.sum() + prior.values.sum())
        gradient = linear + rows.gradients.sum(axis=0) + prior.gradients.sum(axis=0)
        target = precision + rows.curvatures.sum(axis=0) + prior.curvatures.sum(axis=0)
        target = at.root.T @ target @ at.root
        return Look(bound, prior, at.root.T @ gradient, 0.5 * (target + target.T))


def _moved(state: State, at: Look, step: float) -> tuple[State | None, float]:
    """The state after a natural-gradient step, and its length: Lambda' = (1 - t) Lambda + t E[-hess], which must be
    positive definite, and mean' = mean + t Sigma' gradient."""
    old, identity = _double(state), np.eye(len(at.gradient))
    while step >= SHORTEST and np.isfinite(at.precision).all() and np.isfinite(at.gradient).all():
        try:
            factor = np.linalg.cholesky((1 - step) * identity + step * at.precision)
        except np.linalg.LinAlgError:
            step *= SHORTER
            continue
        inverse = np.linalg.inv(factor)
        mean, root = old.mean + step * old.root @ (inverse.T @ (inverse @ at.gradient)), old.root @ inverse.T
        return _in_precision(state, mean, root), step
    return None, step


def _in_precision(state: State, mean: np.ndarray, root: np.ndarray) -> State:
    """With this mean and root in the state's own precision."""
    dtype = state.mean.dtype
    rounded = mean.astype(dtype)
    error = (mean - rounded).astype(dtype)
    return state._replace(mean=rounded, mean_error=error, root=root.astype(dtype))


def _stored(state: State, at: Look, start: State) -> State:
    """The state with the bound, and with what now stands for the prior terms."""
    dtype = state.mean.dtype
    site = None
    if start.prior_site is not None:
        old = _double(state)
        curvature, gradient = at.prior.curvatures.sum(axis=0), at.prior.gradients.sum(axis=0)
        trace = np.sum(old.root * (curvature @ old.root))
        site = Quadratic(curvature, gradient, at.prior.values.sum() + 0.5 * trace, old.mean)
        site = jax.tree.map(lambda x: np.asarray(x, dtype), site)
    return jax.device_put(state._replace(log_evidence=np.asarray(at.bound, dtype), prior_site=site))


def _half_log_det(root: np.ndarray) -> float:
    return float(np.linalg.slogdet(root)[1])


def _double(state: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), state)
