"""Updates of a Gaussian beside members of exponential families, block by block.

With q = q(h) N(x), a block of rows B and the q before it, the next q maximizes

    E_q[sum over B of log p(y_i | h, x)] - KL(q || q before).

Given q(h) the best N(x) is that of an implicit step in which each row counts once for each node of q(h). Given N(x),
q(h) has the natural parameters before it plus the gradient of E[F] in the expected statistics, where F(h) is the
expectation of the rows' log-likelihood over N(x): the coefficients of a regression of F on the statistics, at the same
nodes. Where F is linear in them, as for conjugate rows, these are exact at whatever nodes.
"""

from __future__ import annotations

import copy
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.compilation import Compiled, jit
from ..core.expectations.by_nodes import hermite_rule, monte_carlo_points
from ..core.exponential import regressed
from ..core.gaussians import FullGaussian
from ..core.gaussians.mean_field import MeanField
from ..core.updates.factors import Factors, expected_values
from ..core.updates.joint import DenseJoint, solve_joint_traced
from ..core.updates.objective import FactorSet
from ..core.updates.state import Count, State, new_state
from ..model.data.arguments import PARAMS
from ..model.site_families import SiteEntries
from ..options import key_numbers
from .engine import Engine
from .joint_solver import search_for, whitened

MOST_IN_GRID = 2  # entries that a row depends on; of more, nodes are random in all entries
NODES = {1: 32, 2: 20}  # along each axis of a grid, by the number of its axes
MORE_NODES = 4  # times ``num_samples``, for regressions on all entries at once
SHORTEST_STEP = 1e-6
LESS = 0.8  # of the decrement that a step leaves, for one by which the bound does not rise
NEAR_ZERO = 0.9  # of the way to a natural parameter of zero, at most, in a step
TOLERANCE = {64: 1e-10, 32: 1e-6}  # nats: decrement at which a block is left
SETTLED = 1e-4  # nats: decrement of a block that counts as solved
EXACT = {64: 1e-7, 32: 1e-3}  # residual of rows that are conjugate, relative


class MeanFieldState(NamedTuple):
    """q after some rows.

    :ivar gaussian: of the entries without a family. :ivar natural: parameters of the others, (H, 2).
    :ivar is_exact: whether all rows so far were conjugate: then q is the posterior.
    """

    gaussian: State
    natural: Array
    is_exact: Array
    time: None = None

    @property
    def num_rows(self) -> Count:
        return self.gaussian.num_rows


class MeanFieldInfo(NamedTuple):
    """Diagnostics of an update by a block. :ivar decrement: squared length of the natural gradient that is left, in
    nats."""

    ok: Array
    bound: Array
    decrement: Array
    iterations: Array


class _Nodes(NamedTuple):
    """Nodes of q(h) as scores of the standard normal, (A, H) or (A, 1), with weights (A,); and those of a row: which of
    these each of its D entries is at, (K, D), with weights (K,)."""

    scores: np.ndarray
    weights: np.ndarray
    members: np.ndarray
    row_weights: np.ndarray


class _Block(NamedTuple):
    """A block of rows, with the state before it.

    :ivar active: which entries of h each row depends on, (n, D); None: any.
    """

    prior_inputs: dict
    state: MeanFieldState
    rows: dict
    weights: Array
    active: Array | None


class _At(NamedTuple):
    """An evaluation at some natural parameters: the best Gaussian given these, the bound (minus infinity if there is
    none), and the full step from them."""

    natural: Array
    gaussian: State
    bound: Array
    direction: Array
    decrement: Array
    residual: Array


class MeanFieldUpdates:
    """Compiled updates of q by blocks of rows.

    :param engine: of the model given h, whose parameters h is.
    :param given: the entries of theta that are h. :param others: those that are x.
    :param rows: some rows, to see how many of h's entries one depends on.
    """

    def __init__(self, engine: Engine, given: SiteEntries, others: np.ndarray, rows: dict):
        self.engine, self.given, self._others = engine, given, others
        size = len(given.places)
        some = {name: jnp.asarray(array) for name, array in rows.items()}
        self.width = size
        if size > MOST_IN_GRID:
            most = int(jnp.max(jnp.sum(jit(self._dependence)(some, self.start.gaussian.mean), axis=1)))
            self.width = most if most <= MOST_IN_GRID else size
        self._nodes = self._make_nodes()
        self._compiled = Compiled(self._block)

    def bind(self, engine: Engine, given: SiteEntries) -> MeanFieldUpdates:
        """The updates for a program that differs in what the data determine; see :meth:`Engine.bind`."""
        other = copy.copy(self)
        other.engine, other.given = engine, given
        return other

    def block(self, state: MeanFieldState, rows: dict, weights: Array) -> tuple[MeanFieldState, MeanFieldInfo]:
        """The state after a block of rows, of weight one or zero."""
        return self._compiled(self.engine.program.prior_inputs, state, rows, weights)

    @property
    def start(self) -> MeanFieldState:
        """The prior."""
        program = self.engine.program
        nothing = new_state(jnp.zeros(0, program.dtype), jnp.zeros((0, 0), program.dtype), None)
        of_x = program.initial_state if len(self._others) else nothing
        return MeanFieldState(of_x, self.given.prior, jnp.asarray(True))

    def gaussian(self, state: MeanFieldState) -> MeanField:
        """q."""
        of_x = state.gaussian
        places = (jnp.asarray(x, jnp.int32) for x in (self.given.places, self._others))
        return MeanField(FullGaussian(of_x.mean, of_x.root), state.natural, self.given.entries, *places)

    @property
    def numbers_per_row(self) -> int:
        """The number of entries of a row's Jacobians at all nodes, or of the nodes."""
        entries = 1 if self._is_shared else len(self.given.places)
        return max(entries, self.engine.numbers_per_row) * len(self._nodes.row_weights)

    def dependence(self, rows: dict) -> Array:
        """How many entries each row depends on, (n,)."""
        return jnp.sum(self._dependence(rows, self.start.gaussian.mean), axis=1)

    # ------------------------------------------------------------------ nodes
    @property
    def _is_shared(self) -> bool:
        """Whether all rows have the same nodes."""
        return self.width == len(self.given.places)

    def _make_nodes(self) -> _Nodes:
        size, width = len(self.given.places), self.width
        if width > MOST_IN_GRID:
            count = max(MORE_NODES * self.engine.options.num_samples, 2 * MORE_NODES * size)
            points, weights = monte_carlo_points(key_numbers(self.engine.rng_key), count, size)
            members = np.broadcast_to(np.arange(len(points))[:, None], (len(points), size))
            return _Nodes(points, weights, members, weights)
        scores, weights = hermite_rule(1, NODES[width])
        members = np.stack([x.ravel() for x in np.meshgrid(*[np.arange(len(scores))] * width, indexing="ij")], -1)
        return _Nodes(scores, weights, members, np.prod(weights[members], axis=1))

    def _dependence(self, rows: dict, x: Array) -> Array:
        """Which entries of h each row depends on, (n, H)."""
        dtype = self.engine.program.dtype
        points = np.random.default_rng(0).normal(size=(2, len(self.given.places))).astype(dtype)

        def of_row(row, h):
            def log_likelihood(h):
                factors = self._factors_of_one(x, row, jnp.ones((), dtype), h)
                return sum(jnp.sum(k.at(f.predictors, f.constants)[0]) for k, f in zip(self.engine.kinds, factors))

            return jax.grad(log_likelihood)(h) != 0

        each = jax.vmap(jax.vmap(of_row, (None, 0)), (0, None))
        return jnp.any(each(rows, jnp.asarray(points)), axis=1)

    def _factors_of_one(self, x: Array, row: dict, weight: Array, h: Array) -> tuple[Factors, ...]:
        rows = {name: value[None] for name, value in row.items()} | {PARAMS: h}
        return self.engine.linearize(self.engine.prepare(rows, weight[None]), x)

    def _factors(self, x: Array, rows: dict, weights: Array, nodes: Array) -> tuple[Factors, ...]:
        """The factors of each row at each node, (n K E, ...). ``nodes``: (K, H), or of each row (n, K, H)."""
        of_row = jax.vmap(self._factors_of_one, (None, None, None, 0))
        factors = jax.vmap(of_row, (None, 0, 0, None if nodes.ndim == 2 else 0))(x, rows, weights, nodes)
        return jax.tree.map(lambda a: a.reshape(math.prod(a.shape[:3]), *a.shape[3:]), factors)

    # ------------------------------------------------------------------ a block
    def _block(
        self, prior_inputs: dict, state: MeanFieldState, rows: dict, weights: Array
    ) -> tuple[MeanFieldState, MeanFieldInfo]:
        """The state after rows of weight one or zero. ``prior_inputs``: as ``program.prior_inputs``."""
        dtype = self.engine.program.dtype
        active, fits = None, jnp.asarray(True)
        if not self._is_shared:
            depends = self._dependence(rows, state.gaussian.mean).astype(jnp.int32)
            fits = jnp.all((jnp.sum(depends, axis=1) <= self.width) | (weights == 0))
            active = lax.top_k(depends, self.width)[1]
        block = _Block(prior_inputs, state, rows, weights.astype(dtype), active)
        settings = self.engine.effort.settings()
        tolerance = self.engine.options.tolerance or TOLERANCE[jnp.finfo(dtype).bits]

        def proceed(carry):
            best, step, iterations = carry
            falling = jnp.max(jnp.where(best.direction < 0, -best.direction / best.natural, 0.0))
            length = jnp.minimum(step, NEAR_ZERO / jnp.maximum(falling, NEAR_ZERO))
            tried = self._at(block, best.natural + length * best.direction, best.gaussian)
            is_better = (tried.bound > best.bound) | (tried.decrement < LESS * best.decrement)
            best = jax.tree.map(lambda new, old: jnp.where(is_better, new, old), tried, best)
            return best, jnp.where(is_better, jnp.minimum(2 * length, 1.0), length / 2), iterations + 1

        def goes_on(carry):
            best, step, iterations = carry
            is_far = (best.decrement > tolerance) & (step > SHORTEST_STEP)
            return is_far & (iterations < settings.max_iterations)

        far, zero = jnp.asarray(jnp.inf, dtype), jnp.zeros((), dtype)  # the first step is none, and always taken
        start = _At(state.natural, state.gaussian, -far, jnp.zeros_like(state.natural), far, zero)
        best, _, iterations = lax.while_loop(goes_on, proceed, (start, jnp.ones((), dtype), jnp.zeros((), jnp.int32)))
        ok = jnp.isfinite(best.bound) & fits
        gaussian = best.gaussian._replace(
            log_evidence=state.gaussian.log_evidence + best.bound,
            num_rows=state.gaussian.num_rows + jnp.sum(weights).astype(jnp.int32),
        )
        after = MeanFieldState(gaussian, best.natural, state.is_exact & self._is_conjugate(best))
        after = jax.tree.map(lambda new, old: jnp.where(ok, new, old), after, state)
        return after, MeanFieldInfo(ok, best.bound, best.decrement, iterations)

    def _is_conjugate(self, at: _At) -> Array:
        is_exact = at.residual <= EXACT[jnp.finfo(at.residual.dtype).bits]
        return is_exact & (self._is_shared or self.width == 1) & (not len(self._others))

    def _at(self, block: _Block, natural: Array, near: State) -> _At:
        """The bound at natural parameters of h, with the Gaussian of x that is best there, and where a step leads.

        :param near: the Gaussian to begin at.
        """
        entries, nodes = self.given.entries, self._nodes
        scores = jnp.asarray(nodes.scores, natural.dtype).reshape(len(nodes.scores), -1)
        points = entries.quantile(natural, jnp.broadcast_to(scores, (len(scores), len(natural))))
        of_rows = self._of_rows(block, points, entries.mean(natural))
        gaussian, bound = self._best_gaussian(block, of_rows, near)
        values = self._expected(gaussian, block, of_rows)
        change, correction, residual = self._gradient(natural, points, values, block.active)
        bound = bound + correction - entries.kl_divergence(natural, block.state.natural)
        direction = block.state.natural + change - natural
        statistics = jnp.sum(entries.statistics(points) * direction, axis=-1)
        node_weights = jnp.asarray(nodes.weights, values.dtype)[:, None]
        deviations = statistics - jnp.sum(node_weights * statistics, axis=0)
        decrement = jnp.sum(node_weights * deviations**2)
        is_finite = jnp.isfinite(bound) & jnp.isfinite(decrement)
        bound, decrement = jnp.where(is_finite, bound, -jnp.inf), jnp.where(is_finite, decrement, jnp.inf)
        return _At(natural, gaussian, bound, direction, decrement, residual)

    def _of_rows(self, block: _Block, points: Array, mean: Array) -> Array:
        """The nodes (K, H) of all rows, or those of each (n, K, H), of which entries that it does not depend on are at
        their mean. ``points``: (A, H)."""
        members = self._nodes.members
        if block.active is None:
            return points[members, jnp.arange(len(mean))]
        own = points[members, block.active[:, None, :]]
        start = jnp.broadcast_to(mean, (*own.shape[:2], len(mean)))
        return jax.vmap(lambda h, index, values: h.at[:, index].set(values))(start, block.active, own)

    def _best_gaussian(self, block: _Block, nodes: Array, near: State) -> tuple[State, Array]:
        """The best Gaussian of x given q(h), and the bound without the divergence of q(h). The prior's true terms take
        part.

        :param near: where the search begins.
        """
        node_weights = jnp.asarray(self._nodes.row_weights, block.weights.dtype)
        before = block.state.gaussian
        if not len(self._others):
            return before, jnp.sum(self._expected(before, block, nodes) @ node_weights)

        def linearize(_, x):
            def weighed(factors):
                weight, *rest = factors.constants
                by_node = weight.reshape(len(block.weights), len(node_weights), -1) * node_weights[:, None]
                return factors._replace(constants=(by_node.ravel(), *rest))

            return tuple(map(weighed, self._factors(x, block.rows, block.weights, nodes)))

        engine = self.engine
        search = search_for((*engine.prior_kinds, *engine.kinds), engine.effort.settings(), staged=False)
        rows, prior = FactorSet(engine.kinds, linearize), engine.prior_set(block.prior_inputs)
        init = whitened(before.mean, before.root, near.mean, near.root)
        parts = DenseJoint(search, rows, prior, before, init=init)
        after, info = parts.absorb(solve_joint_traced(search, parts), jnp.zeros((), jnp.int32), None)
        return after, jnp.where(info.ok, info.bound, jnp.nan)

    def _expected(self, gaussian: State, block: _Block, nodes: Array) -> Array:
        """The log-likelihood of each row at each node, expected over x: (n, K)."""
        factors = self._factors(gaussian.mean, block.rows, block.weights, nodes)
        shape = len(block.weights), len(self._nodes.row_weights)
        return expected_values(self.engine.kinds, factors, gaussian.root.T, shape)

    def _gradient(
        self, natural: Array, points: Array, values: Array, active: Array | None
    ) -> tuple[Array, Array, Array]:
        """The gradient (H, 2) of the rows' expected log-likelihood in the expected statistics; the expectation less its
        sum over nodes; and the regression's residual, relative to what the statistics explain."""
        entries, nodes = self.given.entries, self._nodes
        statistics = entries.statistics(points)  # (A, H, 2)
        weights = jnp.asarray(nodes.weights, values.dtype)
        if active is None:
            own = statistics[nodes.members, jnp.arange(len(natural))].reshape(len(nodes.members), -1)
            change, residual, explained = regressed(
                own, jnp.sum(values, axis=0), jnp.asarray(nodes.row_weights, values.dtype)
            )
            change = change.reshape(-1, 2)
        else:
            of_nodes = values * jnp.asarray(nodes.row_weights, values.dtype)
            sums = jnp.zeros((len(natural), len(weights)), values.dtype)
            for d in range(self.width):
                sums = sums.at[active[:, d, None], nodes.members[:, d]].add(of_nodes)
            change, residual, explained = jax.vmap(regressed, (1, 0, None))(statistics, sums / weights, weights)
            residual, explained = jnp.linalg.norm(residual), jnp.linalg.norm(explained)
        off = entries.expected_statistics(natural) - jnp.tensordot(weights, statistics, 1)
        return change, jnp.sum(change * off), residual / (1 + explained)
