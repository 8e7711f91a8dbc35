"""One pass over rows: pieces through compiled steps, with checkpoints, and without the rows that cannot be used.

A source hands out rows in pieces (:mod:`~.feed`), and a method's step takes a state and a piece to a state. Steps are
begun one after the other, up to ``PREFETCH`` of them before the first result is checked, so that reading and computing
go on at the same time. Results are checked in order. One that is not finite is undone with all that follow: the rows
that cause it are found by halving, left out or named, and the others are taken anew.

A subclass is the pass of one method: :class:`~.recursive_pass.RecursivePass` (RVGA), :class:`~.online_pass.OnlinePass`
(BONG) and :class:`~.mean_field_pass.MeanFieldPass` (RVGA with families by site).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from functools import partial
from operator import index
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from ..core.gaussians import Movement
from ..files import MALFORMED, digest
from ..model.data.arguments import BadData
from ..model.data.row_set import RowSet, row_digests
from ..model.data.rows import Rows, num_rows, selected
from ..model.identity import model_identity
from ..model.program import Program
from ..options import Info
from ..progress import Bar
from .checkpoints import fingerprint, plain_arrays, state_from_arrays
from .feed import Feed, Piece
from .opening import (
    HEAD,
    PassOptions,
    check_finite_at,
    check_integers,
    located,
    replaced,
    usable_rows,
    with_finite_head,
)
from .source import NOTHING, SLICE, RowSource

PREFETCH = 8  # steps under way: while they compute, the next rows are read
MAX_LISTED = 1000  # skipped rows whose numbers are kept
DIGITS = 1e-3  # of the time that passes, which rounding of the time stamps may change


S = TypeVar("S", bound=Any)  # a method's state. ``time``: of its last row, if parameters move by time stamps
R = TypeVar("R", bound=Any)  # a step's report. ``ok``: whether there is a finite Gaussian after each block


class PendingStep(NamedTuple, Generic[S, R]):
    """A compiled step under way.

    :ivar offset: how many rows were taken in before.
    :ivar in_support: waits for the answer, which rows' outcomes are in their support.
    """

    before: S
    piece: Piece
    offset: int
    in_support: Callable[[], np.ndarray]
    after: S
    report: R


class Pass(ABC, Generic[S, R]):
    """Takes rows from a source, piece by piece, and checks each result while the next ones are under way.

    :param bar: a progress bar.
    :param on_state: called with each state that is good.
    :param checked: whether the rows have been checked: finite, with outcomes in their support.
    :param movement: how parameters move before each block: by time stamps, rows come in the order of these.
    :param block_size: rows in an update.

    :ivar notes: of the steps so far, which a checkpoint stores. :ivar state: after the last piece whose result is good.
    :ivar done: how many rows of the source that was.
    :ivar absorbed: the rows that the state has taken in.
    """

    def __init__(
        self,
        program: Program,
        source: RowSource,
        options: PassOptions,
        bar: Bar,
        on_state: Callable[[S], None],
        *,
        checked: bool,
        block_size: int,
        movement: Movement | None = None,
    ):
        self._block = block_size
        self.notes: Info = {}
        self._program, self._source, self._options, self._bar, self._on_state = program, source, options, bar, on_state
        self._checked, self._time = checked, None if movement is None else movement.time
        self._checkpoint = options.opened
        self.state: S
        self.absorbed = RowSet()
        self.done = self._written = 0
        self._left_out = NOTHING  # positions up to ``done``, sorted
        self._feed: Feed
        self._is_consistent = True  # whether state, offset and what is stored are of the same moment

    # ------------------------------------------------------------------ what a method does with rows
    @abstractmethod
    def size(self, offset: int) -> int:
        """How many rows the next step takes, after ``offset`` rows."""

    @abstractmethod
    def step(self, state: S, rows: Rows, weights: np.ndarray, offset: int) -> tuple[S, R]:
        """State and report after n rows (n, ...) with weights (n,), each one or zero. JAX computes them while other
        rows are read.

        :param offset: how many rows came before.
        """

    def rechecked(self, step: PendingStep[S, R]) -> PendingStep[S, R]:
        """The step, taken once more with a report of each block if it was taken without and has failed."""
        return step

    @abstractmethod
    def raise_bad_rows(self, before: S, after: S, rows: Rows, numbers: np.ndarray) -> None:
        """:raises ValueError: saying why these rows have left no finite Gaussian.

        :param numbers: of the rows in the data, (n,).
        """

    @abstractmethod
    def on_result(self, state: S, rows: Rows, report: R, offset: int) -> None:
        """Called with the state after each good step, its rows and report, in order."""

    def stored(self) -> Info:
        """What a checkpoint stores besides the state, for the pass to go on from it."""
        return self.notes

    def restore(self, stored: Info) -> None:
        """Go on from what was :meth:`stored`."""
        self.notes = {name: stored[name] for name in self.notes}

    # ------------------------------------------------------------------ the pass
    def __call__(self, state: S, run: Info) -> S:
        """The state after all rows: steps are begun, and finished in order once enough are under way.

        :param run: options that determine the result; see :class:`Checkpoint`.
        """
        self.state, pending = state, deque()
        with contextlib.ExitStack() as held:
            if self._checkpoint is not None:
                held.enter_context(self._checkpoint.held())
                model = model_identity(self._program, self._head())
                self._resume(self._checkpoint.read({**run, **self._data_identity(state)}, model))
            usable = partial(usable_rows, self._program, self._source)
            usable = usable if self._options.skips and not self._checked else None
            feed = self._feed = Feed(self._source, self.done, usable, self._left_out)
            offset = self.num_taken
            held.callback(self._close, pending)  # also when it is interrupted, or the source fails
            while (piece := feed.take(self.size(offset))) is not None or pending:
                if piece is not None:
                    if not self._checked and not self._options.skips:
                        check_finite_at(self._source, piece.rows, int(piece.positions[0]))
                        check_integers(self._program, self._source, piece.rows, int(piece.positions[0]))
                    latest = pending[-1].after if pending else self.state
                    pending.append(self._begin(latest, piece, offset))
                    offset += piece.num_rows
                if piece is None or len(pending) > PREFETCH:
                    self._finish(pending)
                    offset = pending[-1].offset + pending[-1].piece.num_rows if pending else self.num_taken
            self._go_on_from(self.state, feed.stop)  # past rows after the last step's that were left out
        if not self.num_taken and (self.done or len(self._source.left_out)):
            raise ValueError(f"none of the {self.done + len(self._source.left_out)} rows can be used.")
        return self.state

    def _close(self, pending: deque[PendingStep[S, R]]) -> None:
        """Finish steps under way, as long as they are good, and write the last checkpoint."""
        while pending and self._finish(pending):
            pass
        if self._checkpoint is not None and self._is_consistent and self.done > self._written:
            self._write()

    @property
    def num_taken(self) -> int:
        """How many rows were taken in."""
        return self.done - len(self._left_out)

    def skipped(self) -> Info:
        """For the posterior's ``info``."""
        if not self._options.skips:
            return {}
        numbers = [self._source.number(int(position)) for position in self._left_out]
        numbers = np.union1d(self._source.left_out, np.array(numbers, np.int64))
        return {"num_skipped": len(numbers), "skipped_rows": numbers[:MAX_LISTED]}

    @property
    def left_out(self) -> np.ndarray:
        """The rows of the source that were left out, in its own order."""
        return np.sort(np.array([self._source.row(int(position)) for position in self._left_out], np.int64))

    def _begin(self, state: S, piece: Piece, offset: int, weights: np.ndarray | None = None) -> PendingStep[S, R]:
        """A step under way.

        :param weights: zero for rows that are left out for a trial; None: all count.
        """
        is_checked = self._checked or self._options.skips
        in_support = (lambda: np.ones(piece.num_rows, bool)) if is_checked else self._program.begin_check(piece.rows)
        rows = piece.rows
        if weights is None:
            weights = np.ones(piece.num_rows, np.float32)
        else:
            rows, weights = replaced(rows, weights > 0)
        return PendingStep(state, piece, offset, in_support, *self.step(state, rows, weights, offset))

    def _finish(self, pending: deque[PendingStep[S, R]]) -> bool:
        """Wait for the result of the first step under way, and go on from there if it is good. Else all rows under way
        have to be taken anew, without those that must be left out.

        :return: whether it is good.
        """
        step = pending.popleft()
        try:
            step = self.rechecked(step)
            bad = self._bad_rows(step)
            if not len(bad):
                self._accept(step)
                return True
        except BaseException:
            pending.clear()  # they follow a state that is not good
            raise
        self._feed.put_back([step.piece, *[later.piece for later in pending]], step.piece.positions[bad])
        pending.clear()
        return False

    def _accept(self, step: PendingStep[S, R]) -> None:
        """Go on from the result of a step."""
        self._is_consistent = False
        self._on_state(step.after)
        self.on_result(step.after, step.piece.rows, step.report, step.offset)
        self.absorbed = self.absorbed.with_rows(step.piece.digests)
        self._go_on_from(step.after, int(step.piece.positions[-1]) + 1)
        if self._checkpoint is not None and self.done - self._written >= self._checkpoint.every:
            self._write()

    def _go_on_from(self, state: S, done: int) -> None:
        """Note the state after ``done`` rows of the source, as one that a checkpoint can hold."""
        self._is_consistent, left_out = False, self._feed.left_out
        before, self.state, self.done = self.done, state, done
        self._left_out = left_out[: np.searchsorted(left_out, done)]
        self._is_consistent = True
        self._bar.update(done - before)

    # ------------------------------------------------------------------ rows that cannot be used
    def _bad_rows(self, step: PendingStep[S, R]) -> np.ndarray:
        """The rows of a step that have to be left out for it to be good.

        :raises ValueError: if there are any, and they are not skipped.
        """
        late = self._late_rows(step)
        if len(late):
            return late
        in_support = step.in_support()
        if not in_support.all():
            row = int(np.argmin(in_support))
            with located(self._source, int(step.piece.positions[row])) as number:
                self._program.check_rows(selected(step.piece.rows, slice(row, row + 1)), number)
        failed = self._failed(step)
        if failed is None:
            return NOTHING
        first, stop = failed
        if not self._options.skips:
            numbers = [self._source.number(int(position)) for position in step.piece.positions[first:stop]]
            with located(self._source, int(step.piece.positions[first])):
                rows = selected(step.piece.rows, slice(first, stop))
                self.raise_bad_rows(step.before, step.after, rows, np.array(numbers))
        return self._to_blame(step, first, stop)

    def _late_rows(self, step: PendingStep[S, R]) -> np.ndarray:
        """The rows of a step that come after others of later times.

        :raises ValueError: if there are any, and they are not skipped; and for times with too many digits.
        """
        if self._time is None:
            return NOTHING
        last = np.asarray(step.before.time)
        exact = step.piece.rows[self._time]
        times, elapsed = exact.astype(last.dtype), np.diff(exact)
        if np.abs(np.diff(times) - elapsed).sum() > DIGITS * np.abs(elapsed).sum():
            raise BadData(
                f"the time stamps {self._time!r} have more digits than {times.dtype} holds, so that elapsed times "
                "would be wrong: count from a later origin, or call numpyro.enable_x64() first."
            )
        latest = np.fmax.accumulate(np.append(last, times))[:-1]
        late = np.flatnonzero(times < latest)
        if len(late) and not self._options.skips:
            with located(self._source, int(step.piece.positions[late[0]])) as number:
                raise BadData(
                    f"row {number}: its time stamp {self._time}={exact[late[0]]} comes before {latest[late[0]]}, that "
                    f"of an earlier row. Parameters move forward in time: sort the rows by {self._time!r}, or pass "
                    "on_bad_row='skip' to leave out rows that come late."
                )
        return late

    def _failed(self, step: PendingStep[S, R]) -> tuple[int, int] | None:
        """The first row of the first block that left no finite Gaussian, and the one after its last; None if all are
        finite. A step of one block reports a scalar."""
        ok, length = np.asarray(step.report.ok), step.piece.num_rows
        size = self._block if ok.ndim else length
        bad = np.flatnonzero(~ok)
        return (int(bad[0]) * size, min(int(bad[0] + 1) * size, length)) if len(bad) else None

    def _to_blame(self, step: PendingStep[S, R], first: int, stop: int) -> np.ndarray:
        """The rows of a block that are to blame for its failure."""

        def fails(kept: np.ndarray) -> bool:
            weights = np.ones(step.piece.num_rows)
            weights[first:stop] = 0
            weights[kept] = 1
            failure = self._failed(self._begin(step.before, step.piece, step.offset, weights))
            return failure is not None and failure[0] <= first

        to_blame = np.arange(first, stop)
        while len(to_blame) > 1:
            failing = [half for half in np.array_split(to_blame, 2) if fails(half)]
            if not failing:
                break  # only together
            to_blame = failing[0]
        return to_blame

    # ------------------------------------------------------------------ checkpoints
    def _data_identity(self, state: S) -> Info:
        """What identifies the rows and the prior, for checkpoints."""
        return {
            "on_bad_row": self._options.on_bad_row,
            "sites": {n: list(self._program.layout.shapes[n]) for n in self._program.layout.site_names},
            "dtype": str(self._program.dtype),
            "the start": np.array([fingerprint(x) for x in plain_arrays(state)]),
            "the beginning of the data": digest(self._head()),
        }

    def _head(self) -> Rows:
        return self._source.as_declared(with_finite_head(self._source.peek(HEAD)))

    def _write(self) -> None:
        assert self._checkpoint is not None
        done, left_out = self._source.stored_progress(self.done, self._left_out)
        contents = {"state": plain_arrays(self.state), "done": done, "left_out": left_out, "notes": self.stored()}
        absorbed = self.absorbed
        self._checkpoint.write(contents | {"rows": absorbed.num_rows, "absorbed": f"{absorbed.digest:016x}"})
        self._written = self.done

    def _resume(self, contents: Info | None) -> None:
        """:raises ValueError: if the rows that were taken in are not the first of the data."""
        if contents is None:
            return
        assert self._checkpoint is not None
        try:
            self.state = state_from_arrays(contents["state"], self.state)
            left_out = np.array(contents["left_out"], np.int64).reshape(-1)
            self.done, self._left_out = self._source.restored_progress(index(contents["done"]), left_out)
            self.restore(contents["notes"])
            expected = RowSet(index(contents["rows"]), int(contents["absorbed"], 16))
        except MALFORMED as error:
            raise ValueError("no run can go on from this checkpoint: it does not hold what one does.") from error
        self._written = self.done
        self.absorbed = self._passed_over()
        if self.absorbed != expected:
            self._checkpoint.refuse(f"it has taken in {expected.num_rows} rows that are not the first of these data")
        self._on_state(self.state)
        self._bar.update(self.done)

    def _passed_over(self) -> RowSet:
        """The rows that were taken in before, read once more to see that they are the same."""
        rows_set, offset = RowSet(), 0
        self._source.rewind()
        while offset < self.done:
            rows = self._source.take(min(SLICE, self.done - offset))
            if rows is None:
                raise ValueError(f"the data end after {offset} rows, and {self.done} have been taken in before.")
            kept = np.ones(num_rows(rows), bool)
            first, stop = np.searchsorted(self._left_out, [offset, offset + len(kept)])
            kept[self._left_out[first:stop] - offset] = False
            rows_set = rows_set.with_rows(row_digests(self._source.as_declared(selected(rows, kept))))
            offset += len(kept)
        return rows_set


def rows_named(numbers: np.ndarray) -> str:
    """Rows by their numbers in the data, which in random order need not be consecutive."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"row {first}"
    if np.all(np.diff(numbers) == 1):
        return f"rows {first} to {last}"
    return f"{len(numbers)} rows, from row {first} to row {last} in random order"
