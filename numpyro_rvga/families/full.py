"""RVGA with a full Gaussian: one pass over the rows, or one solve of all of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..core.gaussians import FullGaussian
from ..core.pytrees import in_precision
from ..core.updates.state import State
from ..dynamics import dynamics_info
from ..engines.batch import BatchSolver, Fit, rows_info
from ..engines.engine import Engine
from ..engines.expectation_errors import expectation_errors, has_finite_bound, warn_of
from ..engines.registry import Engines
from ..engines.rounding_errors import is_worth_more
from ..engines.starts import modes_info, warn_of_modes
from ..model.bad_rows import NotFinite
from ..model.data.arguments import BadData, checked_rows
from ..model.data.row_set import RowSet
from ..model.data.rows import Data, Rows, in_blocks, num_rows, without
from ..model.handlers.failures import of_stream
from ..options import Info, check_state, checked_key, key_numbers
from ..progress import progress
from ..results.joint import joint_posterior
from ..results.merging.merge import state_of_gaussian
from ..results.posterior import Posterior
from ..results.rounding import warn_of_lost_digits
from ..streams.block_plan import FIRST_BLOCK_NUMBERS, RECURSIONS, Sizes
from ..streams.certification import Certification, warn_unless_converged
from ..streams.opening import PassOptions, open_source, ordered, usable_source
from ..streams.recursive_pass import FEW_NUMBERS, SAMPLE_NUMBERS, RecursivePass, RunSummary
from ..streams.source import RowSource

NEARBY = 1.0  # nats: the squared natural gradient of a q that is worth starting from


class _Repeat(NamedTuple):
    """The pass is to be repeated by a thorough engine: expectations were too inexact.

    :ivar nearby: the solution of one solve of all rows, to start from. :ivar modes: for the posterior's ``info``.
    """

    nearby: FullGaussian | None
    modes: Info


class FullFamily:
    """:class:`RVGA` with ``family="full"``: it has the same methods.

    :param method: that, with which posteriors go on. :param engines: of its model.
    """

    def __init__(self, method: Any, engines: Engines, certification: Certification):
        self.model, self.options, self.blocks = engines.model, method.options, method.blocks
        self.dynamics = method.dynamics
        self._method, self._engines, self.certification, self._shuffle = method, engines, certification, method.shuffle
        self._solver = BatchSolver(self.options, "incremental", "RVGA")
        self.state: State | None = None

    def __getstate__(self) -> dict[str, object]:
        """Without the state, for other processes."""
        return self.__dict__ | {"state": None}

    def run(
        self,
        data: Data | Iterable,
        *,
        rng_key: Array,
        init: Posterior | State | None,
        progress_bar: bool,
        checkpoint: str | os.PathLike | None,
        every: int,
        resume: bool,
        on_bad_row: str,
        **model_kwargs: Any,
    ) -> Posterior:
        """As :meth:`RVGA.run`."""
        started = time.perf_counter()
        run_jointly = partial(self._run_jointly, rng_key=rng_key, progress_bar=progress_bar, started=started)
        options, joint_data = PassOptions(checkpoint, every, resume, on_bad_row), None
        if self.blocks.may_be_joint and not options.skips and init is None and checkpoint is None:
            # One solve may take the place of the pass.
            joint_data = data if isinstance(data, (Mapping, tuple)) else None
        cached = None if joint_data is None else self._engines.cached_whole(joint_data, model_kwargs, rng_key)
        if cached is not None:
            return run_jointly(*cached)
        repeat: _Repeat | None = None
        while True:
            try:
                source, head, all_rows = open_source(data, self.model, model_kwargs, options, self._shuffle)
                engine = self._engines.get(head, model_kwargs, rng_key, all_rows if init is None else None)
                if repeat is not None:  # what is compiled of a search from nearby is of no use to one from afar
                    engine = self._engines.make_thorough(engine, replaces=repeat.nearby is None)
                engine.program.check_prior()
            except BadData:
                raise
            except Exception as error:  # whatever a model cannot do row by row, it may do with all rows
                if joint_data is None:
                    raise of_stream(error) from error
                return run_jointly(*self._engines.whole(joint_data, model_kwargs, rng_key, error))
            source, head = usable_source(engine.program, source, head, all_rows, options)
            passed = {"in_memory": all_rows is not None, "progress_bar": progress_bar}
            try:
                result = self._in_one_pass(engine, source, head, options, rng_key, init, repeat, **passed)
            except NotFinite as error:
                if joint_data is None or all_rows is None or self._too_many_for_one(engine, head):
                    raise
                fit = self._solver.of_mode(error, engine, head, progress_bar=progress_bar, started=started)
                return self._joint_posterior(fit, head, None, rng_key)
            if isinstance(result, Posterior):
                return result
            options, repeat = PassOptions(on_bad_row=on_bad_row), result

    def _in_one_pass(
        self,
        engine: Engine,
        source: RowSource,
        head: Rows,
        options: PassOptions,
        rng_key: Array,
        init: Posterior | State | None,
        repeat: _Repeat | None,
        *,
        in_memory: bool,
        progress_bar: bool,
    ) -> Posterior | _Repeat:
        """The recursion over the rows, and then all of them once more, for the bound and its error.

        :param source: of the usable rows. :param head: some of them, or all, if they are in memory.
        :param repeat: the end of a pass by an engine that was not thorough; None: this is the first pass.
        :return: ``_Repeat``, if a thorough engine is worth its time.
        """
        sizes = self.blocks.sizes(engine, source, options.most_rows)
        shuffles = source.is_longer_than(sizes.first) and not self.blocks.is_moving
        visited, sparse = ordered(source, self._shuffle, rng_key, useful=shuffles), None
        if init is None and in_memory and options.checkpoint is None:
            sizes, sparse = self.blocks.sizes_in_memory(engine, head, sizes)
        if sparse is not None:
            start = sparse.initial_state()
        else:
            start = initial_state(engine) if init is None else self._state_of(init, engine)
        self.state = start
        with progress(progress_bar, source.total, "RVGA", "row") as bar:
            sampled = self.certification.certify and sizes.keeps_rows and engine.options.has_bound
            row_pass = RecursivePass(
                engine,
                sizes,
                sparse,
                source=visited,
                options=options,
                bar=bar,
                on_state=partial(setattr, self, "state"),
                checked=in_memory,
                sampled_by=rng_key if sampled else None,
                sample_numbers=FEW_NUMBERS if source.seekable else SAMPLE_NUMBERS,
                nearby=None if repeat is None else repeat.nearby,
            )
            row_pass(engine.devices.put(start), self._run_options(rng_key, sizes, shuffled=visited.order is not None))
            state, info = row_pass.finished()
            state = engine.devices.fetch(state)
        result = self.certification(engine, start, state, source, row_pass, rng_key)
        info |= result.info | ({} if repeat is None else repeat.modes)
        if self.certification.certifies(engine):
            rows = without(head, row_pass.left_out)
            mendable = info.get("elbo_error", 0.0)
            if "elbo_error" not in info or engine.effort.is_sampled:
                error, excess, mendable = expectation_errors(engine, result.state, rows, result.error_estimates)
                info["elbo_error"], result = error, result.lowered(excess)
            can_repeat = source.seekable and options.checkpoint is None
            if can_repeat and is_worth_more(engine, result.state, rows, mendable, result.bound):
                is_near = info["squared_natural_gradient"] <= NEARBY and row_pass.is_one_solve and sparse is None
                nearby = FullGaussian(state.mean, state.root) if is_near else None
                return _Repeat(nearby, modes_info(info.get("modes", ())))
            warn_of(info["elbo_error"])
        warn_of_modes(info)
        bound = self.certification.checked(engine, result, rng_key)
        if not has_finite_bound(info.get("elbo_error", 0.0)):
            bound, info["log_evidence_estimate"] = None, result.bound
        row_sets = (*getattr(init, "row_sets", ()), row_pass.absorbed)
        if int(start.num_rows):
            bound = None
            if info["converged"] and not engine.program.is_conjugate:
                info["converged"] = None  # of earlier rows there is only what an earlier run has made of them
        return self._posterior(engine, result.state, info, bound, row_sets)

    def _run_options(self, rng_key: Array, sizes: Sizes, *, shuffled: bool) -> Info:
        """The options that determine the result, which a checkpoint stores."""
        method = {
            "method": "RVGA",
            "dynamics": repr(self.dynamics),
            "shuffle": shuffled,
            "rng_key": key_numbers(rng_key),
        }
        blocks = {"first block": sizes.first, "block": sizes.block, "memory": sizes.memory}
        return method | self.options.as_info | blocks | {"certify": self.certification.certify}

    # ------------------------------------------------------------------ functional form
    def init(self, data: Data, *, rng_key: Array | None = None, **model_kwargs: Any) -> State:
        """As :meth:`RVGA.init`."""
        rows = checked_rows(self.model, data, model_kwargs)
        rng_key = checked_key(rng_key)
        return initial_state(self._engines.get(rows, model_kwargs, rng_key))

    def update(self, state: State, data: Data) -> State:
        """As :meth:`RVGA.update`."""
        engine = self._engines.last_engine
        rows = engine.program.rows_to_absorb(data)
        weights = jnp.ones(num_rows(rows))
        implicit = self.options.scheme in ("implicit", "laplace")
        if implicit and self.dynamics is None:
            return engine.joint(state, rows, weights)[0]
        return engine.stream(state, *in_blocks((rows, weights), len(weights) if implicit else 1))[0]

    def posterior(self, state: State) -> Posterior:
        """As :meth:`RVGA.posterior`."""
        engine = self._engines.last_engine
        summary = RunSummary()
        if state.prior_factor is not None:
            state, info = engine.with_exact_prior(state)
            summary.add(info)
        return self._posterior(engine, state, summary.info())

    # ------------------------------------------------------------------ inside
    def _run_jointly(
        self, engine: Engine, rows: Rows, reason: str, *, rng_key: Array, progress_bar: bool, started: float
    ) -> Posterior:
        """All rows in one solve. They need not be independent.

        :raises ValueError: for more than a first block may hold.
        """
        if self._too_many_for_one(engine, rows):
            raise ValueError(
                f"{reason} All rows together are too many for one joint solve: their Jacobians hold more than "
                f"{FIRST_BLOCK_NUMBERS:.2g} numbers. FixedPointVI(model).run(data) takes them in parts."
            )
        fit = self._solver(engine, rows, progress_bar=progress_bar, started=started)
        return self._joint_posterior(fit, rows, reason, rng_key)

    def _joint_posterior(self, fit: Fit, rows: Rows, reason: str | None, rng_key: Array) -> Posterior:
        self.state = fit.state
        info = {"scheme": self.options.scheme, "expectation": self.options.as_info["expectation"]}
        if fit.bound is None:
            info["log_evidence_estimate"] = float(fit.state.log_evidence)
        return joint_posterior(fit, rows, reason, info, rng_key)

    @staticmethod
    def _too_many_for_one(engine: Engine, rows: Rows) -> bool:
        return engine.numbers_per_row * num_rows(engine.program.inputs(rows)) > FIRST_BLOCK_NUMBERS

    @staticmethod
    def _state_of(init: Posterior | State, engine: Engine) -> State:
        dtype = engine.program.dtype
        if not isinstance(init, Posterior):
            check_state(init, engine.program.initial_state, lambda state: (state.mean, state.root))
            return in_precision(init, dtype)
        engine.program.check_continues(init.program)
        state = init.state if isinstance(init.state, State) else state_of_gaussian(init, init.gaussian)
        return in_motion(in_precision(state, dtype), engine, init.info.get("time"))

    def _posterior(
        self,
        engine: Engine,
        state: State,
        info: Info,
        bound: float | None = None,
        row_sets: tuple[RowSet, ...] = (),
    ) -> Posterior:
        """The posterior, with warnings of solves that have not converged, or lack digits.

        :param bound: on the log evidence, or None. :param row_sets: the rows that were taken in, if they are recorded.
        """
        if self.options.scheme in RECURSIONS:
            info["converged"] = None
        warn_unless_converged(info)
        options = {"scheme": self.options.scheme, "expectation": self.options.as_info["expectation"]}
        info = options | rows_info(None) | info | dynamics_info(self.dynamics, state)
        if self.options.scheme != "ekf" and self.options.expectation != "linearized":  # a Laplace evidence is one too
            evidence = float(state.log_evidence)
            if bound is None and engine.program.is_conjugate:
                bound = evidence
            if bound is None:
                info["log_evidence_estimate"] = evidence
        posterior = Posterior(
            engine.program,
            FullGaussian(state.mean, state.root),
            bound,
            info,
            self._method,
            state,
            num_rows=int(state.num_rows),
            row_sets=row_sets,
        )
        warn_of_lost_digits(posterior)
        return posterior


def initial_state(engine: Engine) -> State:
    """The state before any row."""
    return in_motion(engine.program.initial_state, engine, None)


def in_motion(state: State, engine: Engine, time: float | None) -> State:
    """The state for an engine's dynamics. ``time``: of its last row, or None.

    For parameters that move, the prior is a start alone, and its Gaussian approximation takes its place.
    """
    if engine.movement is None:
        return state._replace(time=None)
    return state._replace(prior_factor=None, time=engine.movement.start(time, engine.program.dtype))
