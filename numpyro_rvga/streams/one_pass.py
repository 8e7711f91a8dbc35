"""RVGA's one pass: the recursion over the rows, and then all of them once more, for the bound and its error."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from jax import Array

from ..core.recursion import State
from ..dynamics import Dynamics
from ..engines.engine import Engine
from ..engines.expectation_errors import expectation_errors, warn_of
from ..engines.registry import Engines
from ..engines.starts import warn_of_modes
from ..model.row_set import RowSet
from ..model.rows import Rows, without
from ..options import Info, key_numbers
from ..progress import progress
from .block_plan import BlockPlan, Sizes
from .certification import Certification
from .opening import PassOptions, ordered
from .recursive_pass import FEW_NUMBERS, SAMPLE_NUMBERS, RecursivePass
from .source import RowSource


class Outcome(NamedTuple):
    """:ivar info: for the posterior's. :ivar bound: on the log evidence, or None. :ivar absorbed: the rows."""

    state: State
    info: Info
    bound: float | None
    absorbed: RowSet


@dataclass(frozen=True)
class OnePass:
    """One call of :meth:`RVGA.run`, over rows that have been opened; see :func:`~.opening.usable_source`.

    :ivar engines: from which other engines are taken for some rows.
    """

    engines: Engines
    blocks: BlockPlan
    certification: Certification
    dynamics: Dynamics | None
    shuffle: bool | str

    def __call__(
        self,
        engine: Engine,
        source: RowSource,
        head: Rows,
        options: PassOptions,
        rng_key: Array,
        init: State | None,
        on_state: Callable[[State], None],
        *,
        in_memory: bool,
        progress_bar: bool,
    ) -> Outcome | None:
        """The state after all rows; None if all is to be done again, by the engine that ``engines`` now has.

        :param source: of the usable rows. :param head: some of them, or all, if they are in memory.
        :param init: to go on from; None: the prior. :param on_state: called with each good state.
        """
        plan, certifies = self.blocks, self.certification.certifies(engine)
        sizes = plan.sizes(engine, source, options.most_rows)
        several_blocks = source.is_longer_than(sizes.first)
        visited = ordered(source, self.shuffle, rng_key, useful=several_blocks and not plan.is_moving)
        at_hand = source.total if init is None and in_memory and options.checkpoint is None else None
        sparse, quick = None if at_hand is None else plan.sparse_engine(engine, head), None
        if at_hand is not None and sparse is not None:
            start, sizes = sparse.initial_state(), sizes._replace(first=at_hand, keeps_rows=False)
        else:
            start = initial_state(engine) if init is None else init
            if at_hand is not None:
                distinct = plan.num_distinct(head, sizes)
                quick = plan.quick_engine(self.engines, engine, distinct) if self.certification.certify else None
                if quick is not None or plan.takes_all(engine, distinct, sizes):
                    sizes = sizes._replace(first=max(at_hand, sizes.first), keeps_rows=False)
        on_state(start)
        with progress(progress_bar, source.total, "RVGA", "row") as bar:
            sampled = self.certification.certify and sizes.keeps_rows and engine.options.has_bound
            taken = RecursivePass(
                engine if quick is None else quick,
                visited,
                options,
                bar,
                on_state,
                sizes,
                sparse,
                checked=in_memory,
                sampled_by=rng_key if sampled else None,
                sample_numbers=FEW_NUMBERS if source.seekable else SAMPLE_NUMBERS,
            )
            taken(engine.devices.put(start), self._facts(rng_key, sizes, shuffled=visited.order is not None))
            state, info = taken.finished()
            state = engine.devices.fetch(state)
        findings = self.certification(engine, start, state, source, taken, rng_key, exact=quick is None)
        info |= findings.info
        if certifies:
            if "elbo_error" not in info or engine.effort.is_sampled:
                rows = without(head, taken.left_out)
                info["elbo_error"], excess = expectation_errors(engine, findings.state, rows, findings.accounts)
                findings = findings.lowered(excess)
            more = engine.effort.calls_for_more(info["elbo_error"], findings.bound)
            if more and source.seekable and options.checkpoint is None:
                self.engines.make_thorough(engine)
                return None
            if quick is not None and not info["converged"]:
                self.engines.forget_quick(engine)
                return None
            warn_of(info["elbo_error"])
        warn_of_modes(info)
        bound = self.certification.checked(engine, findings, rng_key)
        return Outcome(findings.state, info, bound if int(start.num_rows) == 0 else None, taken.absorbed)

    def _facts(self, rng_key: Array, sizes: Sizes, *, shuffled: bool) -> Info:
        """The options that determine the result."""
        facts = {"method": "RVGA", "dynamics": repr(self.dynamics), "shuffle": shuffled}
        facts["rng_key"] = key_numbers(rng_key)
        blocks = {"first block": sizes.first, "block": sizes.block, "memory": sizes.memory}
        return facts | self.blocks.options.facts | blocks | {"certify": self.certification.certify}


def initial_state(engine: Engine) -> State:
    """The state before any row."""
    return in_motion(engine.program.initial_state(), engine, None)


def in_motion(state: State, engine: Engine, time: float | None) -> State:
    """The state for an engine's dynamics. ``time``: of its last row, or None.

    Parameters that move leave the prior behind: it is where they start from, and its Gaussian is enough for that.
    """
    if engine.movement is None:
        return state._replace(time=None)
    return state._replace(prior_factor=None, time=engine.movement.start(time, engine.program.dtype))
