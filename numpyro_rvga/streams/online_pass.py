"""BONG's passes over rows: once, block by block, or again and again.

Each block is one update of :mod:`~numpyro_rvga.core.updates.rules`. In epochs, a block of B rows of N stands for all of
them: its log-likelihood counts N / B times, and the prior stays that of the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ..core.updates.rules import Rule
from ..engines.online import BlockInfo, OnlineState, OnlineUpdates
from ..model.bad_rows import describe_bad_rows
from ..model.data.rows import Rows, num_rows, pad, selected
from ..options import Info, key_numbers
from ..progress import Bar
from .passes import Pass, PendingStep, rows_named

CHUNK_BLOCKS = 1024
CHUNK_NUMBERS = 2**24  # in the Jacobians of the rows that are worked on between updates of the progress bar


class CallBack:
    """The user's function of the posterior so far, and what it returned."""

    def __init__(self, posterior_of: Callable[[OnlineState], Any], function: Callable | None):
        self._posterior_of, self._function, self._returned = posterior_of, function, []

    def __call__(self, state: OnlineState) -> None:
        if self._function is not None:
            returned = self._function(self._posterior_of(state))
            if returned is not None:
                self._returned.append(returned)

    def info(self) -> Info:
        return {"callback": self._returned} if self._returned else {}


class OnlinePass(Pass[OnlineState, BlockInfo]):
    """One pass of :meth:`BONG.run`.

    :param rule: that of ``online``, maybe with another learning rate.
    :param every: rows between calls of ``call_back``, rounded up to whole blocks; None: at the end alone.
    :param predict: how rows are predicted before they are taken in, if they are.
    :param of_pass: what else :class:`~.passes.Pass` takes.
    """

    def __init__(
        self,
        online: OnlineUpdates,
        rule: Rule,
        call_back: CallBack,
        *,
        every: int | None,
        block_size: int,
        predict: str | None,
        **of_pass: Any,
    ):
        super().__init__(online.engine.program, movement=online.movement, block_size=block_size, **of_pass)
        self._online, self._rule, self._rate = online, rule, online.rate(rule)
        self._call_back, self._predict = call_back, predict
        self._every = None if every is None else -(-every // block_size) * block_size
        of_memory = CHUNK_NUMBERS // (block_size * online.engine.numbers_per_row)
        blocks = min(CHUNK_BLOCKS, self._options.most_rows // block_size, of_memory)
        self._chunk = max(1, blocks) * block_size
        self.notes |= {"clipped": 0, "log_predictive": []}

    def size(self, offset: int) -> int:
        return self._chunk if self._every is None else min(self._chunk, self._every - offset % self._every)

    def step(self, state: OnlineState, rows: Rows, weights: np.ndarray, offset: int) -> tuple[OnlineState, BlockInfo]:
        if self._online.one_by_one:
            return self._one_by_one(state, rows, weights)
        if self._checks_later and weights.all():
            return self._online.unchecked_stream(state, *self._padded(rows, weights), block_size=self._block)
        return self._checked_step(state, rows, weights)

    @property
    def _checks_later(self) -> bool:
        """Whether steps are taken without a check of each update, and once more with it if the last result is no
        Gaussian."""
        return self._online.may_check_later and self._predict is None and not self._online.one_by_one

    def _checked_step(self, state: OnlineState, rows: Rows, weights: np.ndarray) -> tuple[OnlineState, BlockInfo]:
        padded = self._padded(rows, weights)
        return self._online.stream(state, *padded, self._rate, block_size=self._block, predict=self._predict)

    def _padded(self, rows: Rows, weights: np.ndarray) -> tuple:
        return jax.device_put(pad(rows, self._chunk, weights))

    def rechecked(self, step: PendingStep[OnlineState, BlockInfo]) -> PendingStep[OnlineState, BlockInfo]:
        if not self._checks_later or np.all(step.report.ok):
            return step
        after, report = self._checked_step(step.before, step.piece.rows, np.ones(step.piece.num_rows, np.float32))
        return step._replace(after=after, report=report)

    def _one_by_one(self, state: OnlineState, rows: Rows, weights: np.ndarray) -> tuple[OnlineState, BlockInfo]:
        infos = []
        rows, weights = pad(rows, -(-num_rows(rows) // self._block) * self._block, weights)
        for start in range(0, len(weights), self._block):
            part = {name: array[start : start + self._block] for name, array in rows.items()}
            taken = weights[start : start + self._block]
            count = int(np.count_nonzero(taken))
            after, info = self._online.one_block(state, part, taken, count, self._rate, predict=self._predict)
            state = after if count else state
            infos.append(info)
        return state, jax.tree.map(lambda *x: np.stack(x), *jax.device_get(infos))

    def on_result(self, state: OnlineState, rows: Rows, report: BlockInfo, offset: int) -> None:
        self.notes["clipped"] += int(np.sum(np.asarray(report.clipped)))
        if self._predict is not None:
            self.notes["log_predictive"].append(np.asarray(report.log_predictive).reshape(-1)[: num_rows(rows)])
        if self._every is not None and (offset + num_rows(rows)) % self._every == 0:
            self._call_back(state)

    def raise_bad_rows(self, before: OnlineState, after: OnlineState, rows: Rows, numbers: np.ndarray) -> None:
        self._on_state(after)  # which has the blocks before these rows
        _refuse_update(self._online, self._rule, after, rows, numbers)

    def info(self) -> Info:
        """For the posterior's ``info``; with a last call back, if rows came after the one before."""
        if self._every is None or self.num_taken % self._every:
            self._call_back(self.state)
        info: Info = {"clipped": self.notes["clipped"]}
        if self.notes["log_predictive"]:
            taken, total = np.setdiff1d(np.arange(self.done), self._left_out), self.done
            if self._source.order is None:  # else they are in the order of the visit
                taken, total = self._source.numbers(taken), self.done + len(self._source.left_out)
            densities = info["log_predictive"] = np.full(total, np.nan)
            densities[taken] = np.concatenate(self.notes["log_predictive"])
        return info | self._call_back.info() | self.skipped()


def run_epochs(
    online: OnlineUpdates,
    rule: Rule,
    state: OnlineState,
    rows: Rows,
    bar: Bar,
    on_state: Callable[[OnlineState], None],
    call_back: CallBack,
    *,
    block_size: int,
    num_epochs: int,
    shuffle: bool,
) -> tuple[OnlineState, Info]:
    """Several passes over all rows, in blocks that each represent all of them.

    :param on_state: called with each good state.
    """
    total, clipped = num_rows(rows), 0
    prior, all_rows, rate = state.gaussian, state.num_rows + total, online.rate(rule)
    order, rng = np.arange(total), np.random.default_rng(key_numbers(state.rng_key))
    for _ in range(num_epochs):
        if shuffle:
            order = rng.permutation(total)
        for start in range(0, total, block_size):
            taken = order[start : start + block_size]
            part, weights = pad(selected(rows, taken), min(block_size, total))
            weights = (total / len(taken) * weights).astype(online.engine.program.dtype)
            state, info = online.one_iteration(prior, state, part, weights, rate)
            on_state(state)
            if not bool(info.ok):
                _refuse_update(online, rule, state, selected(rows, taken), taken)
            clipped += int(info.clipped)
            bar.update(len(taken))
        state = state._replace(num_rows=all_rows)
        on_state(state)
        call_back(state)
    return state, {"clipped": clipped} | call_back.info()


def _refuse_update(online: OnlineUpdates, rule: Rule, state: OnlineState, rows: Rows, numbers: np.ndarray) -> None:
    """:raises ValueError: about rows that left no Gaussian of the last good state."""
    reason = describe_bad_rows(online.engine.program, state.gaussian.mean, rows, numbers)
    if reason is not None:
        advice = "check these rows, mask them in the model, or pass on_bad_row='skip'"
    elif callable(rule.name):
        advice = "your rule's step is too long here"
    elif rule.has_rate:
        advice = f"the learning rate {rule.learning_rate:g} is too large here: lower learning_rate"
    elif rule.parameterization == "moment":
        advice = "moment steps may leave the positive definite matrices: use parameterization='natural'"
    else:
        advice = (
            "standardize the data, give the prior a smaller scale, or use rule='implicit' with hessian='auto', which "
            "integrates over the q that a step leads to"
        )
    before = int(state.num_blocks)
    where = f"{rows_named(numbers)} (after {before} update{'' if before == 1 else 's'})"
    reason = ", or one absurdly far away" if reason is None else f": {reason}"
    raise ValueError(
        f"the update on {where} leaves no finite Gaussian{reason}; {advice}. The last good state is kept as .state."
    )
