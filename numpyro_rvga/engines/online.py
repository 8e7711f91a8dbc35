"""BONG's updates for a model, a family and a rule, compiled."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.compilation import Compiled, single_kernel
from ..core.gaussians import Family, LowRankGaussian, Movement, converted
from ..core.updates.estimators import Observation, implicit, make_estimator
from ..core.updates.rules import Rule, Updated, iterate, update
from ..core.updates.state import Count
from ..dynamics import Dynamics, movement_of
from ..initialization import initial_location
from ..model.data.rows import num_rows
from ..model.predictive import check_can_be_drawn, drawn_log_likelihood, log_predictive
from ..options import check_state
from .engine import Engine
from .online_prior import start_of, warn_of_dropped, warn_of_start, with_exact_prior

RANDOM_SHARE = 0.01  # of the precision, in a low-rank factor from which plain gradients start
MANY_PARAMETERS = 10_000  # from which passes over arrays of them take most of a step
MOST_UNROLLED = 10  # steps for a row, of networks with convolutions; each is compiled by itself
SEMIDEFINITE = ("lin-hess", "lin-ef", "mc-ef", "mc-fisher")  # Hessians without a negative part
PREDICTIVE_SAMPLES = 100  # of the predictors of a row that has more than three


class OnlineOptions(NamedTuple):
    """Options of :class:`BONG` other than the rule (hashable)."""

    family: str
    rank: int
    hessian: str
    num_samples: int


class OnlineState(NamedTuple):
    """q after ``num_rows`` rows.

    :ivar gaussian: q. What the family does not hold of the prior is approximated in it, unless ``has_exact_prior``.
    :ivar num_blocks: the number of updates; with ``rng_key`` it determines the key of the next.
    :ivar has_exact_prior: whether q has the exact prior.
    :ivar time: of the last row, if parameters move by the rows' time stamps; NaN before the first.
    """

    gaussian: Any
    num_rows: Count
    num_blocks: Array
    rng_key: Array
    has_exact_prior: Array
    time: Array | None = None


class BlockInfo(NamedTuple):
    """Diagnostics of an update by one block.

    :ivar ok: whether the update left a Gaussian. Otherwise q is unchanged, and later blocks are skipped.
    :ivar clipped: whether H lost its negative part.
    :ivar log_predictive: (B,), the log predictive density of each row under q before the block; None if not asked for.
    """

    ok: Array
    clipped: Array
    log_predictive: Array | None


class OnlineUpdates:
    """Compiled updates of q.

    :param init: theta (P,) at which q's mean starts, NaN for the prior's mean; None: the prior's mean.
    :param dynamics: how parameters move before each block, or None.
    :raises NotImplementedError: for curvatures that a family cannot hold.
    """

    def __init__(
        self, engine: Engine, options: OnlineOptions, rule: Rule, dynamics: Dynamics | None, init: Array | None
    ):
        self.engine, self.options, self.rule = engine, options, rule
        self._check()
        if rule.name == "implicit":
            self._estimator = partial(implicit, engine.effort.settings)
        else:
            self._estimator = make_estimator(options.hessian, options.num_samples)
        self.is_moving = dynamics is not None
        self._set_prior(init)
        self.movement: Movement | None = None
        if dynamics is not None:
            self.movement = movement_of(dynamics, engine.program, self.start.mean, self._start.noise_root)
        options: dict[str, Any] = {"routines": True, "long_arrays": engine.program.layout.size >= MANY_PARAMETERS}
        self.stream = Compiled(self._stream, ("block_size", "predict"), **options)
        self.unchecked_stream = Compiled(self._unchecked_stream, ("block_size",), **options)
        self.one_block = Compiled(self._one_block, ("predict",), **options)  # rounds as the stream does
        self.one_iteration = Compiled(self._one_iteration)
        self._exact_prior = Compiled(partial(with_exact_prior, engine))

    def bind(self, engine: Engine, init: Array | None) -> OnlineUpdates:
        """The updates for a program that differs in what the data determine; see :meth:`Engine.bind`."""
        other = copy.copy(self)
        other.engine = engine
        other._set_prior(init)
        return other

    def rate(self, rule: Rule) -> np.ndarray | None:
        """A rule's learning rate as an argument of the compiled functions; None for rules without one."""
        return None if not rule.has_rate else np.asarray(rule.learning_rate, self.start.mean.dtype)

    def _check(self) -> None:
        program, options = self.engine.program, self.options
        if options.hessian == "mc-fisher":
            check_can_be_drawn(program)
        if options.family == "low-rank" and options.hessian == "expected":
            for kind, terms in zip(self.engine.kinds, program.terms):
                if not kind.concave:
                    raise NotImplementedError(
                        f"site {terms.site!r} may have a log-likelihood that is not concave, and family='low-rank' "
                        "needs a positive semi-definite curvature: use hessian='lin-hess', 'mc-fisher' or 'mc-ef'."
                    )

    def _set_prior(self, init: Array | None) -> None:
        """Set the first q, and what of the prior it approximates."""
        program, rule = self.engine.program, self.rule
        rank = min(self.options.rank, program.layout.size)
        holds_all = rank == program.layout.size and not rule.is_plain  # of a smaller one, rows need all
        self._start = start_of(program, self.options.family, rank, holds_all=holds_all)
        q = self._start.gaussian
        self.start: Family = dataclasses.replace(q, mean=_first_finite(init, q.mean))
        if isinstance(self.start, LowRankGaussian) and rule.is_plain:
            self.start = self.start.with_random_factor(self.engine.rng_key, RANDOM_SHARE)

    def initial_state(self, rng_key: Array) -> OnlineState:
        zero = jnp.zeros((), jnp.int32)
        exact = jnp.asarray(self._start.factor is None)
        return self.at_time(OnlineState(self.start, Count.of(0), zero, rng_key, exact), None)

    def first_state(self, rng_key: Array) -> OnlineState:
        """:meth:`initial_state`, with a warning if dynamics begin without the prior's correlations."""
        if self.is_moving:
            warn_of_start(self.engine.program, self.options.family, self._start)
        return self.initial_state(rng_key)

    def at_time(self, state: OnlineState, time: Any) -> OnlineState:
        """The state for this method's dynamics. ``time``: of its last row; None if there is none."""
        time = None if self.movement is None else self.movement.start(time, self.engine.program.dtype)
        return state._replace(time=time)

    def state_of(self, gaussian: Family, num_rows: int, rng_key: Array) -> OnlineState:
        """The state of a Gaussian of any family, converted to this one."""
        same = jax.tree.map(lambda x: jnp.asarray(x, self.engine.program.dtype), gaussian)
        gaussian = self._converted(same)
        start = self.initial_state(rng_key)
        return start._replace(gaussian=gaussian, num_rows=Count.of(num_rows), has_exact_prior=jnp.asarray(True))

    def _converted(self, q: Family) -> Family:
        """A Gaussian in the family of this method: a block-diagonal one has a block for each latent site."""
        layout = self.engine.program.layout
        rank = min(self.options.rank, layout.size)
        return converted(q, self.options.family, rank, tuple(size for size in layout.sizes.values() if size))

    def holds(self, state: OnlineState) -> bool:
        """Whether the state's Gaussian is one of this family."""
        shapes = lambda tree: jax.tree.map(jnp.shape, tree)  # noqa: E731
        return shapes(state.gaussian) == shapes(self.start)

    def check_holds(self, init: Any) -> None:
        """:raises ValueError: for what is no state of this method, model and family."""
        check_state(init, self.initial_state(self.engine.rng_key), lambda state: state.gaussian)

    @property
    def one_by_one(self) -> bool:
        """Whether each block is a call of its own: XLA runs a convolution inside a loop on one thread."""
        return jax.default_backend() == "cpu" and self.engine.program.convolves

    # ------------------------------------------------------------------ compiled
    def _stream(
        self,
        state: OnlineState,
        rows: dict,
        weights: Array,
        rate: Array | None = None,
        *,
        block_size: int,
        predict: str | None = None,
    ) -> tuple[OnlineState, BlockInfo]:
        """A scan over blocks of rows.

        :param rate: the learning rate; None: the rule's.
        """

        def body(carry, start):
            state, alive = carry
            block, count = _block_at(start, block_size, rows, weights)
            advance = lambda: self._one_block(state, *block, count, rate, predict=predict)  # noqa: E731
            after, info = lax.cond(
                alive & (count > 0), advance, lambda: (state, self._nothing(alive, block[1], predict))
            )
            return (after, info.ok), info

        starts = jnp.arange(0, len(weights), block_size)
        (state, _), info = lax.scan(single_kernel(body), (state, jnp.asarray(True)), starts)
        return state, info

    @property
    def may_check_later(self) -> bool:
        """Whether an update that leaves no Gaussian is still detected after further ones."""
        rule, options = self.rule, self.options
        is_plain = rule.name == "bong" and rule.parameterization == "natural" and rule.projection is None
        concave = options.hessian == "expected" and all(kind.concave for kind in self.engine.kinds)
        semidefinite = concave or options.hessian in SEMIDEFINITE
        return options.family == "diagonal" and is_plain and semidefinite and self.movement is None

    def _unchecked_stream(
        self, state: OnlineState, rows: dict, weights: Array, *, block_size: int
    ) -> tuple[OnlineState, BlockInfo]:
        """As :meth:`_stream` with BONG's natural steps, but without a check of each result, which takes longer than an
        update of long arrays. If the last result is no Gaussian, no block is ok, and the state is none.

        :param weights: zero for rows that pad the last blocks, and for no others.
        """

        def body(i: Array, state: OnlineState) -> OnlineState:
            block, count = _block_at(i * block_size, block_size, rows, weights)
            estimate = partial(self._estimate, self.observation(*block))
            key, _ = jax.random.split(jax.random.fold_in(state.rng_key, state.num_blocks))
            return state._replace(
                gaussian=state.gaussian.unchecked_step(estimate(key, state.gaussian)),
                num_rows=state.num_rows + count,
                num_blocks=state.num_blocks + 1,
            )

        with_rows = jnp.sum(weights > 0)
        state = lax.fori_loop(0, -(-with_rows // block_size), single_kernel(body), state)
        ok = jnp.broadcast_to(state.gaussian.is_valid(), (len(weights) // block_size,))
        return state, BlockInfo(ok, jnp.zeros_like(ok), None)

    def _one_block(
        self,
        state: OnlineState,
        rows: dict,
        weights: Array,
        count: Array,
        rate: Array | None = None,
        *,
        predict: str | None = None,
    ) -> tuple[OnlineState, BlockInfo]:
        """One update: dynamics, expected derivatives, rule.

        :param weights: (B,), one for rows, zero for padding. :param count: the number of rows.
        """
        prior, time = state.gaussian, None
        if self.movement is not None:
            prior, time = self.movement.before(state.gaussian, state.time, rows)
        observation = self.observation(rows, weights)
        key = jax.random.fold_in(state.rng_key, state.num_blocks)
        log_predictive = None
        if predict is not None:
            plugin = predict == "plugin"
            log_predictive = self._log_predictive(prior, rows, jax.random.fold_in(key, 1), plugin=plugin)
        estimate = partial(self._estimate, observation)
        unroll = self.one_by_one and self.rule.num_iters <= MOST_UNROLLED
        updated = update(self.rule.at(rate), prior, estimate, key, unroll=unroll)
        return self._after(state, updated, count, time), BlockInfo(updated.ok, updated.clipped, log_predictive)

    def _nothing(self, alive: Array, weights: Array, predict: str | None) -> BlockInfo:
        """The diagnostics of a block that is skipped."""
        zeros = jnp.zeros(len(weights), self.start.mean.dtype) if predict is not None else None
        return BlockInfo(alive, jnp.asarray(False), zeros)

    def _one_iteration(
        self, prior: Family, state: OnlineState, rows: dict, weights: Array, rate: Array | None = None
    ) -> tuple[OnlineState, BlockInfo]:
        """One step towards the posterior of all rows, which the weighted rows of the block represent (batch BLR)."""
        observation = self.observation(rows, weights)
        key = jax.random.fold_in(state.rng_key, state.num_blocks)
        updated = iterate(self.rule.at(rate), prior, state.gaussian, partial(self._estimate, observation), key)
        return self._after(state, updated, jnp.zeros((), jnp.int32)), BlockInfo(updated.ok, updated.clipped, None)

    @staticmethod
    def _after(state: OnlineState, updated: Updated, count: Array, time: Array | None = None) -> OnlineState:
        keep = lambda new, old: jnp.where(updated.ok, new, old)  # noqa: E731
        gaussian, time = jax.tree.map(keep, (updated.q, time), (state.gaussian, state.time))
        step = updated.ok.astype(jnp.int32)
        num_rows, num_blocks = state.num_rows + count * step, state.num_blocks + step
        return state._replace(gaussian=gaussian, num_rows=num_rows, num_blocks=num_blocks, time=time)

    # ------------------------------------------------------------------ rows
    def observation(self, rows: dict, weights: Array) -> Observation:
        prepared = self.engine.prepare(rows, weights, once=self.rule.num_iters == 1)
        weights = weights.astype(self.start.mean.dtype)
        linearize, drawn = partial(self.engine.linearize, prepared), partial(drawn_log_likelihood, self.engine.program)
        return Observation(self.engine.kinds, linearize, rows, self._log_lik, weights, drawn)

    def _estimate(self, observation: Observation, rng_key: Array, q: Family):
        return self._estimator(rng_key, q, observation)

    def _log_lik(self, theta: Array, row: dict) -> Array:
        """log p(y_i | theta) of one row."""
        rows = {name: value[None] for name, value in row.items()}
        return jnp.asarray(sum(jnp.sum(terms.log_probs(theta, rows)) for terms in self.engine.program.terms))

    def _log_predictive(self, q: Family, rows: dict, rng_key: Array, *, plugin: bool) -> Array:
        """(B,): each row's log density under q."""
        program, count = self.engine.program, PREDICTIVE_SAMPLES

        def of(row, key):
            return log_predictive(program, q, row, key, count, plugin=plugin)(row)

        return jax.vmap(of)(rows, jax.random.split(rng_key, num_rows(rows)))

    # ------------------------------------------------------------------ prior terms that are not Gaussian
    def with_exact_prior(self, state: OnlineState) -> Family:
        """q with the exact prior in place of its Gaussian approximation.

        :raises ValueError: if the result is not a Gaussian.
        """
        if bool(state.has_exact_prior) or self.movement is not None:
            return state.gaussian
        program, start = self.engine.program, self._start
        after, shares = self._exact_prior(program.prior_inputs, state.gaussian, start.factor, start.indices)
        if not bool(after.is_valid()):
            raise ValueError("the final solve against the true prior has no finite result: is the prior proper?")
        if start.indices is not None:
            warn_of_dropped(program, self.options.family, start.indices, np.asarray(shares))
        return after


def online_of(
    engine: Engine,
    options: OnlineOptions,
    rule: Rule,
    dynamics: Dynamics | None,
    init_loc_fn: Callable | None,
    rng_key: Array,
) -> OnlineUpdates:
    """The updates of an engine, compiled once.

    :param init_loc_fn: where q's mean starts; None: at the prior's.
    """
    online = engine.made.get(OnlineUpdates)
    if online is None or online.engine is not engine:
        location = None if init_loc_fn is None else initial_location(engine.program, init_loc_fn, rng_key)
        made = online is None
        online = OnlineUpdates(engine, options, rule, dynamics, location) if made else online.bind(engine, location)
        engine.made[OnlineUpdates] = online
    return online


def _first_finite(preferred: Array | None, other: Array) -> Array:
    return other if preferred is None else jnp.where(jnp.isnan(preferred), other, preferred)


def _block_at(start: Array, size: int, rows: dict, weights: Array) -> tuple[tuple[dict, Array], Array]:
    """A block of rows with their weights, and how many of them count. A slice of the rows as they come: an axis of
    blocks would cost a copy of all rows."""
    block = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, start, size), (rows, weights))
    return block, jnp.sum(block[1] > 0).astype(jnp.int32)
