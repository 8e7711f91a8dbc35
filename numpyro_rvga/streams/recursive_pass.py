"""RVGA's pass: a joint solve of the first rows, a recursion over the others, and a last solve with those kept.

The recursion takes block B of rows and N(mu_0, Lambda_0^-1) to the Gaussian that maximizes

    sum_{i in B} E_q[log p(y_i | theta)] - KL(q || N(mu_0, Lambda_0^-1)),

and keeps the rows whose Gaussian approximations are furthest off. In the end these approximations are divided out of q,
and the rows themselves take their place, with the prior's own terms.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax import Array

from ..core.gaussians import FullGaussian
from ..core.updates.factors import ErrorEstimates
from ..core.updates.state import Absorbed, QuadraticFactors, State, StepInfo
from ..engines.engine import Engine
from ..engines.linearized import no_row_factors, num_absorbed
from ..engines.sparse import SparseEngine
from ..engines.starts import modes_info
from ..model.bad_rows import NotFinite, describe_bad_rows
from ..model.data.row_set import once_each
from ..model.data.rows import Rows, in_blocks, num_rows, pad, selected
from ..options import Info, key_numbers
from .block_plan import Sizes
from .memory import NEGLIGIBLE_ERROR, KeptRows, RowMemory, inexactness, unranked
from .passes import Pass, rows_named

MAX_REFITS = 8  # of kept rows that are more than one solve takes
SAMPLE_NUMBERS = 2**23  # in the rows of a sample, and the moments of their predictors
FEW_NUMBERS = 2**18  # if the rows can be read again
RESIDUAL_TOLERANCE = 0.1  # standard deviations: the residuals of all rows, summed as if of one sign


class RecursivePass(Pass[State, StepInfo]):
    """One call of :meth:`RVGA.run`.

    :param sparse: solves for all rows together; None: the recursion.
    :param sampled_by: the key of a sample of all rows; None: there is to be none.
    :param sample_numbers: how many numbers the sample may hold, in rows and in moments of their predictors.
    :param nearby: where the first solve starts; None: at the state before it.
    :param of_pass: what else :class:`~.passes.Pass` takes.

    :ivar summary: of all steps so far.
    :ivar only_rows: the usable rows of the first, joint solve, if no others followed.
    :ivar error_estimates: of that solve's expectations.
    :ivar sample: of all rows, uniform, with the moments of their predictors when they became part of q.
    :ivar kept: the rows of the last solves, with the moments of their predictors then; None if there are none.
    :ivar predicted: of each block after the first solve, its bound (a lower bound of its log predictive density), and
        its number of rows.
    """

    def __init__(
        self,
        engine: Engine,
        sizes: Sizes,
        sparse: SparseEngine | None,
        *,
        sampled_by: Array | None,
        sample_numbers: int,
        nearby: FullGaussian | None,
        **of_pass: Any,
    ):
        super().__init__(engine.program, movement=engine.movement, block_size=sizes.block, **of_pass)
        self._engine, self._sizes, self._sparse = engine, sizes, sparse
        self._memory, self.summary = RowMemory(sizes.memory, NEGLIGIBLE_ERROR), RunSummary()
        self._sampled_by, self._nearby = sampled_by, nearby
        of_data = sum(math.prod(row.shape[1:]) for row in engine.program.example_row.values())
        numbers = num_absorbed(engine.program.terms) + of_data
        self.sample = RowMemory(0 if sampled_by is None else sample_numbers // numbers)
        self.only_rows: Rows = {}
        self.error_estimates: ErrorEstimates | None = None
        self.kept: KeptRows | None = None
        self.predicted: list[tuple[float, int]] = []

    def size(self, offset: int) -> int:
        return self._sizes.first if self._is_joint(offset) else self._sizes.chunk

    def step(self, state: State, rows: Rows, weights: np.ndarray, offset: int) -> tuple[State, StepInfo]:
        sizes, engine = self._sizes, self._engine
        if self._sparse is not None:
            return self._sparse.solve(self._sparse.problem(rows, weights=weights))
        if self._is_joint(offset):
            if not sizes.keeps_rows:
                rows, weights = once_each(rows, weights)
            rows, weights = pad(rows, engine.devices.padded(len(weights)), weights)
            program, row_factors = engine.program, None
            if sizes.keeps_rows:
                row_factors = no_row_factors(program.terms, len(weights), program.dtype)
            rows, weights = engine.devices.put_rows((rows, weights))
            options: Info = {"nearby": self._nearby, "with_absorbed": sizes.keeps_rows}
            return engine.joint(state, rows, weights, row_factors, **options)
        blocks = in_blocks(pad(rows, sizes.chunk, weights), sizes.block)
        return engine.stream(state, *engine.devices.put_rows(blocks, axis=1), with_absorbed=sizes.keeps_rows)

    def on_result(self, state: State, rows: Rows, report: StepInfo, offset: int) -> None:
        self.only_rows, self.error_estimates = (rows, report.error_estimates) if self._is_joint(offset) else ({}, None)
        self.summary.add(report)
        if report.absorbed:
            taken = unranked(rows, report.absorbed, offset)
            self._memory.add(taken._replace(priority=inexactness(taken.absorbed)))
            if self._sampled_by is not None:
                draws = np.random.default_rng([*key_numbers(self._sampled_by), offset]).random(len(taken.positions))
                self.sample.add(taken._replace(priority=draws))
        if np.ndim(report.bound):
            starts = np.arange(np.size(report.bound)) * self._sizes.block
            counts = np.clip(num_rows(rows) - starts, 0, self._sizes.block)
            self.predicted += zip(np.asarray(report.bound)[counts > 0].tolist(), counts[counts > 0].tolist())

    def stored(self) -> Info:
        return {
            "memory": self._memory.stored(),
            "sample": self.sample.stored(),
            "predicted": np.array(self.predicted, np.float64),
            "gathered": self.summary.stored(),
        }

    def restore(self, stored: Info) -> None:
        self._memory.restore(stored["memory"])
        self.sample.restore(stored["sample"])
        self.predicted = [(bound, int(count)) for bound, count in stored["predicted"].reshape(-1, 2)]
        self.summary.restore(stored["gathered"])

    def raise_bad_rows(self, before: State, after: State, rows: Rows, numbers: np.ndarray) -> None:
        reason = describe_bad_rows(self._program, before.mean, rows, numbers)
        prior_sites = [terms.site for terms in self._program.prior.terms]
        if reason is None and self._engine.options.scheme == "laplace" and prior_sites:
            raise ValueError(
                f"no mode was found with {rows_named(numbers)}: the joint density of a scale and its effects has "
                f"none, as it grows without bound where all of them go to zero (see {prior_sites[0]!r}). "
                "Use the default scheme, or write the effects as location + scale * z with standard normal z."
            )
        raise NotFinite(
            f"no finite update on {rows_named(numbers)}: "
            f"{reason or 'the expected log-likelihood is not finite'} at the current state. Check these rows and the "
            "prior's scale, mask the rows in the model, or pass on_bad_row='skip'. What was passed as init is "
            "unchanged, and the state before these rows is kept as .state."
        )

    def finished(self) -> tuple[State, Info]:
        """The state with the true terms of kept rows and of the prior in place of their approximations; and the
        posterior's ``info``."""
        state, sizes, summary = self.state, self._sizes, self.summary
        kept = self._memory.items() if self.num_taken > sizes.first else None
        if kept is not None:
            state, absorbed = self._refit(state, kept.rows, kept.absorbed)
            self.kept = kept._replace(absorbed=absorbed)
        elif state.prior_factor is not None and self.num_taken > sizes.first:
            state, info = self._engine.with_exact_prior(state)
            summary.add(info)
        first, count = min(sizes.first, self.num_taken), self.done + len(self._source.left_out)
        num_kept = 0 if kept is None else num_rows(kept.rows)
        counts = {"num_rows": count, "block_size": sizes.block, "first_block": first, "kept_rows": num_kept}
        return state, summary.info() | counts | self.skipped()

    @property
    def is_one_solve(self) -> bool:
        """Whether all rows were solved for together, and the bound was maximized."""
        options = self._engine.options
        return options.scheme == "implicit" and options.has_bound and 0 < self.num_taken <= self._sizes.first

    def _is_joint(self, offset: int) -> bool:
        return offset == 0 and self._sizes.first > 0

    def _refit(self, state: State, rows: Rows, absorbed: tuple[Absorbed, ...]) -> tuple[State, tuple[Absorbed, ...]]:
        """The state after solves in which kept rows replace their Gaussian approximations, and the moments of their
        predictors then. Of more rows than one solve takes, each solve takes those of the largest residuals."""
        most, count = self._sizes.joint, num_rows(rows)
        if count <= most:
            row_factors = self._residuals(state, rows, absorbed)[1]
            state, info = self._solved(state, rows, row_factors)
            now = jax.tree.map(lambda moments: np.asarray(moments)[:count], info.absorbed)
            return state, now if bool(info.ok) else absorbed
        absorbed = jax.tree.map(np.array, absorbed)
        for refit in range(MAX_REFITS):
            residuals, row_factors = self._residuals(state, rows, absorbed)
            if refit and residuals.sum() < RESIDUAL_TOLERANCE:
                break
            worst = np.argsort(-residuals, kind="stable")[:most]
            state, info = self._solved(state, *selected((rows, row_factors), worst))
            if not bool(info.ok):
                break
            for kept, moments in zip(jax.tree.leaves(absorbed), jax.tree.leaves(info.absorbed)):
                kept[worst] = np.asarray(moments)[: len(worst)]
        return state, absorbed

    def _residuals(
        self, state: State, rows: Rows, absorbed: tuple[Absorbed, ...]
    ) -> tuple[np.ndarray, tuple[QuadraticFactors, ...]]:
        """The residuals (n,) of the rows' Gaussian approximations in the state, and these; see :class:`Engine`."""
        size, count = self._engine.devices.padded(self._sizes.joint), num_rows(rows)
        results = []
        for start in range(0, count, size):
            part = selected((rows, absorbed), slice(start, start + size))
            results.append(self._engine.residuals(state, *self._placed(*part, size)))
        return jax.tree.map(lambda *parts: np.concatenate(parts)[:count], *jax.device_get(results))

    def _solved(self, state: State, rows: Rows, row_factors: tuple[QuadraticFactors, ...]) -> tuple[State, StepInfo]:
        """The state with these rows in place of ``row_factors``, by which they are part of it."""
        rows, weights, row_factors = self._placed(rows, row_factors, self._engine.devices.padded(self._sizes.joint))
        options: Info = {"num_new": np.zeros((), np.int32), "with_absorbed": True}
        after, info = self._engine.joint(state, rows, weights, row_factors, **options)
        self.summary.add(info)
        return after, info

    def _placed(self, rows: Rows, row_arrays: tuple, size: int) -> tuple[Rows, Array, tuple]:
        """``size`` rows and their weights, on the devices, and arrays of the same rows, padded alike."""
        (rows, row_arrays), weights = pad((rows, row_arrays), size)
        return *self._engine.devices.put_rows((rows, weights)), row_arrays


class RunSummary:
    """Iterations, convergence and modes over all steps of a run."""

    def __init__(self):
        self._iterations, self._steps = 0.0, 0
        self._converged, self._decrement = True, 0.0
        self._modes: tuple[float, ...] = ()

    def add(self, info: StepInfo) -> None:
        iterations = np.asarray(info.iterations)
        self._iterations += float(iterations.sum())
        self._steps += int(np.count_nonzero(iterations))  # none in blocks of padding
        self._converged = self._converged and bool(np.asarray(info.converged).all())
        self._decrement = max(self._decrement, float(np.max(np.asarray(info.decrement))))
        self._modes = info.modes or self._modes

    def stored(self) -> list:
        """Plain values from which :meth:`restore` makes this summary again."""
        return [self._iterations, self._steps, self._converged, self._decrement, list(self._modes)]

    def restore(self, stored: list) -> None:
        self._iterations, self._steps, self._converged, self._decrement, modes = stored
        self._modes = tuple(modes)

    def info(self) -> Info:
        """For the posterior's ``info``: whether every step was solved to its tolerance, their mean number of
        iterations, and the largest squared natural gradient that one has left, in nats."""
        mean_iterations = self._iterations / max(self._steps, 1)
        info = {"converged": self._converged, "mean_iterations": mean_iterations, "largest_decrement": self._decrement}
        return info | modes_info(self._modes)
