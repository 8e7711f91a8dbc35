"""RVGA: the recursive variational Gaussian approximation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .core.gaussians import FullGaussian
from .core.recursion import State, StepInfo, new_state
from .dynamics import Dynamics, check_dynamics
from .engine import Engine, Engines, Known, describe_bad_rows
from .kinds import Options
from .model.arguments import checked_rows
from .options import check_choice, check_options, check_size, default_key
from .posterior import Posterior
from .stream import RowMemory, RowSource, checked_blocks, pad, permuted, progress

SCHEMES = ("implicit", "explicit", "ekf", "qkf", "laplace")
FAMILIES = ("full",)
FIRST_BLOCK_ROWS = 2000
FIRST_BLOCK_ROWS_PER_PARAMETER = 40
FIRST_BLOCK_NUMBERS = 2**26  # in the Jacobians of the first block
MEMORY_ROWS_PER_PARAMETER = 400
MEMORY_NUMBERS = 2**25  # in the Jacobians of the kept rows
CHUNK_NUMBERS = 2**22
MAX_CHUNK = 8192
DEFAULT_BLOCK = 1024
DEFAULT_BLOCK_LINEARISED = 256  # where predictors are not affine


class RVGA:
    """Gaussian posterior of a NumPyro model in one pass over the data.

    **Example**

    .. code-block:: python

        posterior = RVGA(model).run({"X": X, "y": y})
        posterior.print_summary()
        posterior.to_arviz()

    :param model: a NumPyro model whose rows are conditionally independent given global, continuous latents.
    :param str scheme: ``"implicit"`` minimises KL(q_t || p(rows | theta) q_(t-1)) exactly, block by block (equations
        28-29); ``"explicit"`` takes the expectations under q_(t-1) (30-31); ``"ekf"`` is the extended Kalman filter
        (Theorem 3); ``"qkf"`` the quadratic Kalman filter for logistic rows (90); ``"laplace"`` the batch Laplace
        approximation, with all rows in one block.
    :param str expectation: how E_q[log lik] and its derivatives are computed. ``"auto"``: closed forms where there
        are any (``"exact"``), ``"quadrature"`` for up to three predictors, else ``"monte_carlo"`` in predictor space.
        Also ``"probit"`` (58-61), ``"sigma_points"``, ``"linearized"`` (derivatives at the mean).
    :param order: derivatives of the log-likelihood that are used: 2, 1 or 0 (Corollary 1.1). ``"auto"``: 2, or 1
        where the log-likelihood is found to have kinks.
    :param block_size: rows that the implicit scheme takes at once. An integer asks for the plain recursion, in blocks
        of that size from the first row on (1: the paper's); ``"auto"`` takes 1,024 after a large first block, and
        keeps a memory. Explicit schemes take rows one by one.
    :param first_block: rows of a first, joint solve. Much of the error of one pass is made while q is diffuse, so
        ``"auto"`` takes as many as ``memory``, at least 40 per parameter and 2,000, or all of up to twice as many (none
        with a given block_size).
    :param memory: rows to keep for a last solve. While the data go by, the rows whose Gaussian summaries are least
        exact (those that reached q while it was wide in their direction: rare levels, separated classes) are kept,
        and in the end take their summaries' place. ``"auto"``: 400 rows per parameter, within 2^25 numbers (none
        with a given block_size, or if predictors are not affine).
    :param str family: ``"full"``, a Gaussian with a full covariance matrix.
    :param dynamics: how parameters move before each update (:class:`RandomWalk`, :class:`OrnsteinUhlenbeck`,
        :class:`LinearDynamics`), for streams that drift. The posterior is then of the parameters after the last row.
        Blocks have one row unless ``block_size`` says otherwise, and no rows are kept.
    :param bool shuffle: visit rows in random order. In-memory data only; with a file sorted by class or by time, one
        pass in the given order is much less accurate than in a random one.
    :param float improper_prior_scale: standard deviation, in unconstrained space, of the normal that stands for
        improper priors. None (default) refuses them.
    :param float tolerance: squared length of the natural gradient, in nats, at which a block counts as solved, if it
        has also fallen to a millionth of what it was before. Default: 1e-8 (float32: 1e-6), and for blocks of a stream,
        whose errors add up, at most 1e-12 (1e-9) times the square of their number of rows.
    :param int max_iterations: of a block's solve.
    :param int num_samples: nodes of Monte Carlo expectations.
    :raises ValueError: for options that do not exist or exclude each other.

    **References**

    1. *The recursive variational Gaussian approximation (R-VGA)*, M. Lambert, S. Bonnabel, F. Bach (2021)
    """

    def __init__(
        self,
        model: Callable,
        *,
        scheme: str = "implicit",
        expectation: str = "auto",
        order: int | str = "auto",
        block_size: int | str = "auto",
        first_block: int | str = "auto",
        memory: int | str = "auto",
        family: str = "full",
        dynamics: Dynamics | None = None,
        shuffle: bool = False,
        improper_prior_scale: float | None = None,
        tolerance: float | None = None,
        max_iterations: int = 200,
        num_samples: int = 256,
    ):
        check_choice("scheme", scheme, SCHEMES)
        check_choice("family", family, FAMILIES)
        check_size("block_size", block_size, 1)
        check_size("first_block", first_block, 0)
        check_size("memory", memory, 0)
        if scheme != "implicit" and (block_size not in ("auto", 1) or {first_block, memory} - {"auto", 0}):
            raise ValueError(f"scheme={scheme!r} fixes its blocks: leave block_size, first_block and memory at 'auto'.")
        if scheme in ("ekf", "qkf", "laplace") and expectation != "auto":
            raise ValueError(f"scheme={scheme!r} fixes the expectation: leave expectation at 'auto'.")
        check_options(expectation, order, improper_prior_scale, tolerance, max_iterations, num_samples)
        check_dynamics(dynamics)
        if dynamics is not None and (scheme == "laplace" or shuffle or {first_block, memory} - {"auto", 0}):
            raise ValueError(
                "dynamics take rows in their order, block by block: leave shuffle off, first_block and memory at "
                "'auto', and use a recursive scheme."
            )
        self.model = model
        self.dynamics = dynamics
        self.shuffle = shuffle
        self.block_size = block_size
        self.first_block = first_block
        self.memory = memory
        self.options = Options(scheme, expectation, order, tolerance, max_iterations, num_samples)
        self._engines = Engines(model, self.options, improper_prior_scale, dynamics)

    # ------------------------------------------------------------------ one call
    def run(
        self,
        data: Mapping[str, Any] | tuple | Iterable,
        *,
        rng_key: Array | None = None,
        init: Posterior | State | None = None,
        progress_bar: bool = True,
        **model_kwargs: Any,
    ) -> Posterior:
        """One pass over the data.

        :param data: a mapping from the model's argument names to arrays that share their leading axis, the rows; a
            tuple of such arrays for positional arguments; or an iterable of such blocks.
        :param rng_key: for ``shuffle`` and Monte Carlo expectations. Default: ``jax.random.key(0)``.
        :param init: a posterior (or state) to go on from, in place of the prior.
        :param progress_bar: show rows done.
        :param model_kwargs: go to every call of the model unchanged.
        :return: the posterior.
        :raises ValueError: for unusable data, naming the array and the row. ``init`` is never harmed.
        :raises NotImplementedError: for discrete latents, for those of single rows unless they are Normal additions of
            known scale, for ``numpyro.param`` sites, and for rows that are not independent.
        """
        rng_key = default_key() if rng_key is None else rng_key
        in_memory = isinstance(data, (Mapping, tuple))
        if in_memory:
            rows = checked_rows(self.model, data, 0, model_kwargs)
            engine = self._engines.get(rows, model_kwargs, rng_key)
            engine.program.check_rows(rows)
            total = _length(rows)
            if self.shuffle:
                rows = permuted(rows, np.asarray(jax.random.permutation(rng_key, total)))
            source = RowSource(iter([rows]))
        else:
            if self.shuffle:
                raise ValueError("shuffle=True needs the data in memory; shuffle an iterable where it is made.")
            blocks = checked_blocks(iter(data), lambda block, row: checked_rows(self.model, block, row, model_kwargs))
            head = next(blocks)
            engine = self._engines.get(head, model_kwargs, rng_key)
            source, total = RowSource(_chain(head, blocks)), None
        state = self._initial_state(engine) if init is None else _state_of(init, engine)
        with progress(progress_bar, total, "RVGA", "row") as bar:
            state, info = self._absorb(engine, state, source, total, bar, check=not in_memory)
        return self._posterior(engine, state, info, model_kwargs)

    # ------------------------------------------------------------------ functional form
    def init(self, data: Mapping[str, Any] | tuple, *, rng_key: Array | None = None, **model_kwargs: Any) -> State:
        """The state before any row, for data of this form.

        :param data: a block of data, as for :meth:`run`; used for its form only, and not absorbed.
        :return: the state, a pytree.
        """
        rows = checked_rows(self.model, data, 0, model_kwargs)
        rng_key = default_key() if rng_key is None else rng_key
        return self._initial_state(self._engines.get(rows, model_kwargs, rng_key))

    def update(self, state: State, data: Mapping[str, Any]) -> State:
        """Absorb a block of rows: jointly (implicit and Laplace), or one by one (explicit schemes). With dynamics,
        parameters move once before a joint update, and before each row of the others.

        Pure: works under ``jax.jit``. Rows are not checked; a block that has no finite result leaves the state as is.

        :param state: from :meth:`init` or an earlier update.
        :param data: a mapping from argument names to arrays, of the form that :meth:`init` saw.
        :raises RuntimeError: before :meth:`init`.
        """
        if self._engines.last is None:
            raise RuntimeError("call init(data) before update(state, data).")
        engine = self._engines.last
        rows = {name: jnp.asarray(array) for name, array in data.items() if array is not None}
        weights = jnp.ones(_length(rows))
        implicit = self.options.scheme in ("implicit", "laplace")
        if implicit and self.dynamics is None:
            return engine.joint(state, rows, weights)[0]
        return engine.stream(state, rows, weights, block_size=len(weights) if implicit else 1)[0]

    def posterior(self, state: State) -> Posterior:
        """The posterior that a state stands for (prior terms that are not Gaussian solved for once more)."""
        if self._engines.last is None:
            raise RuntimeError("call init(data) before posterior(state).")
        engine = self._engines.last
        model_kwargs = engine.program.model_kwargs
        gathered = _Gathered()
        if state.prior_site is not None:
            state = self._settle(engine, state, gathered)
        return self._posterior(engine, state, gathered.summary(), model_kwargs)

    # ------------------------------------------------------------------ inside
    def _initial_state(self, engine: Engine) -> State:
        state = engine.program.initial_state()
        # Parameters that move leave the prior behind: it is where they start from, and its Gaussian is enough for that.
        return state if self.dynamics is None else state._replace(prior_site=None)

    def _absorb(self, engine, state, source, total, bar, check):
        sizes = self._sizes(engine, total)
        memory, gathered, done = RowMemory(sizes.memory), _Gathered(), 0
        keep = sizes.memory > 0 and (total is None or total > sizes.first)
        finish = lambda: None  # noqa: E731
        while True:
            joint = done == 0 and sizes.first > 0
            piece = source.take(sizes.first if joint else sizes.chunk)
            if piece is None:
                break
            length = _length(piece)
            if check:
                engine.program.check_rows(piece, done)
            if joint:
                known = (engine.unknown(length),) if keep else ()
                after, info = engine.joint(state, *_on_device(piece, length), *known, with_sites=keep)
            else:
                arrays = _on_device(piece, sizes.chunk)
                after, info = engine.stream(state, *arrays, block_size=sizes.block, with_sites=keep)
            finish()  # the piece before: it was under way while this one's step was compiled
            finish = partial(self._finish, engine, state, piece, done, info, memory, gathered, bar)
            state, done = after, done + length
        finish()
        kept = memory.contents() if done > sizes.first else None
        if kept is not None:
            state = self._revisit(engine, state, *kept, sizes.memory, gathered)
        elif state.prior_site is not None and done > sizes.first:
            state = self._settle(engine, state, gathered)
        facts = {"num_rows": done, "block_size": sizes.block, "first_block": min(sizes.first, done)}
        return state, gathered.summary() | facts | {"kept_rows": 0 if kept is None else _length(kept[0])}

    def _finish(self, engine, before, piece, first_row, info, memory, gathered, bar):
        """Wait for a step's result and keep what it has to tell."""
        if not np.asarray(info.ok).all():
            self._refuse(engine, before, piece, first_row)
        memory.offer(piece, info.sites)
        gathered.add(info)
        bar.update(_length(piece))

    def _revisit(self, engine, state, rows, sites, capacity, gathered):
        """Solve once more with the kept rows as themselves, not as their Gaussian sites."""
        rest = capacity - _length(rows)  # padded, the solve has the form of the first: it is compiled
        fill = lambda x: np.concatenate([x, np.broadcast_to(x[-1:], (rest, *x.shape[1:]))])  # noqa: E731
        known = Known(jax.tree.map(fill, sites), np.zeros((), np.int32))
        after, info = engine.joint(state, *_on_device(rows, capacity), known, with_sites=True)
        gathered.add(info)
        return after

    def _settle(self, engine, state, gathered):
        after, info = engine.settle(state)
        if not bool(info.ok):
            raise ValueError("the final solve against the true prior has no finite result: is the prior proper?")
        gathered.add(info)
        return after

    def _sizes(self, engine: Engine, total: int | None) -> _Sizes:
        per_row, size = engine.numbers_per_row, engine.program.layout.size
        plain = self.block_size != "auto" or self.options.scheme != "implicit" or self.dynamics is not None
        default = DEFAULT_BLOCK if engine.is_affine else DEFAULT_BLOCK_LINEARISED
        block = self.block_size if self.block_size != "auto" else 1 if plain else default
        if self.memory == "auto":
            useful = not plain and engine.is_affine
            memory = min(MEMORY_ROWS_PER_PARAMETER * size, MEMORY_NUMBERS // per_row) if useful else 0
        else:
            memory = self.memory
        if self.options.scheme == "laplace":
            if total is None:
                raise ValueError("scheme='laplace' needs all rows in memory at once.")
            first = total
        elif self.first_block == "auto":
            first = 0 if plain else max(FIRST_BLOCK_ROWS, FIRST_BLOCK_ROWS_PER_PARAMETER * size, memory)
            if total is not None and not plain and total <= 2 * first:
                first = total  # half of them would be kept in the end
            first = min(first, max(FIRST_BLOCK_NUMBERS // per_row, 1))
        else:
            first = self.first_block
        chunk = min(MAX_CHUNK, max(CHUNK_NUMBERS // per_row, 1))
        if total is not None:  # pieces of equal length: none is mostly padding
            rest = max(total - first, 1)
            chunk = -(-rest // -(-rest // chunk))
        return _Sizes(first, block, max(1, -(-chunk // block)) * block, memory)

    def _refuse(self, engine, state, piece, first_row):
        reason = describe_bad_rows(engine.program, state.mean, piece, first_row)
        rows = f"rows {first_row} to {first_row + _length(piece) - 1}"
        raise ValueError(
            f"no finite update on {rows}: {reason or 'the expected log-likelihood is not finite'} at the current "
            "state. Check these rows and the prior's scale, or mask the rows in the model. What was passed as init is "
            "unchanged."
        )

    def _posterior(self, engine, state, info, model_kwargs):
        continuation = Continuation(self, state, dict(model_kwargs))
        info = {"scheme": self.options.scheme, "expectation": self.options.expectation, **info}
        if self.dynamics is not None:
            info["dynamics"] = type(self.dynamics).__name__
        expected = self.options.scheme != "ekf" and self.options.expectation != "linearized"
        bound, num_rows = float(state.log_evidence) if expected else None, int(state.num_rows)
        gaussian = FullGaussian(state.mean, state.root)
        return Posterior(engine.program, gaussian, bound, info, continuation, num_rows=num_rows)


@dataclass(frozen=True)
class Continuation:
    """What a posterior needs to take in more rows."""

    rvga: RVGA
    state: State
    model_kwargs: dict

    def update(self, posterior: Posterior, data: Any, **kwargs: Any) -> Posterior:
        """The posterior after more rows; ``posterior`` is unchanged."""
        return self.rvga.run(data, init=self.state, **{**self.model_kwargs, **kwargs})


@dataclass(frozen=True)
class _Sizes:
    first: int
    block: int
    chunk: int
    memory: int


class _Gathered:
    """What the steps of a run have in common to report."""

    def __init__(self):
        self._iterations: list[float] = []
        self._converged, self._decrement = True, 0.0

    def add(self, info: StepInfo) -> None:
        self._iterations.append(float(np.mean(np.asarray(info.iterations))))
        self._converged = self._converged and bool(np.asarray(info.converged).all())
        self._decrement = max(self._decrement, float(np.max(np.asarray(info.decrement))))

    def summary(self) -> dict:
        mean_iterations = float(np.mean(self._iterations)) if self._iterations else 0.0
        return {"converged": self._converged, "mean_iterations": mean_iterations, "largest_decrement": self._decrement}


def _on_device(piece, size):
    rows, weights = pad(piece, size)
    return jax.device_put((rows, weights))


def _state_of(init: Posterior | State, engine: Engine) -> State:
    if isinstance(init, State):
        return init
    engine.check_start(init)
    if isinstance(init.continuation, Continuation):
        return init.continuation.state
    dtype = engine.program.dtype
    state = new_state(jnp.asarray(init.mean, dtype), jnp.asarray(init.scale, dtype), None)
    evidence = jnp.asarray(init.elbo or 0.0, dtype)
    return state._replace(log_evidence=evidence, num_rows=jnp.asarray(init.num_rows, jnp.int32))


def _chain(head, rest):
    yield head
    yield from rest


def _length(rows: Mapping[str, Any]) -> int:
    return len(next(iter(rows.values())))
