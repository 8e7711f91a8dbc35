"""One pass over rows: pieces through compiled steps, with checkpoints, and without the rows that cannot be used."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.compilation import jit_once
from ..files import digest
from ..model.arguments import check_finite, finite_rows, named_rows, refuse_frames
from ..model.program import Program
from ..model.rows import Rows, num_rows, selected
from ..options import check_choice, is_count
from .checkpoints import EVERY, Checkpoint
from .source import RowSource, rows_in_memory, rows_of_blocks

BAD_ROW_POLICIES = ("raise", "skip")
SHUFFLES = ("auto", True, False)
HEAD = 32  # rows from which the form of the data is found out
SEARCHED = 2**16  # rows among which there must be one with finite values
AHEAD = 8  # steps under way: while they compute, the next rows are read
LISTED = 1000  # skipped rows whose numbers are kept


@dataclass
class PassOptions:
    """What a user may ask of a pass; see :meth:`RVGA.run`.

    :ivar opened: the checkpoint, looked at before any row is read; None if there is to be none.
    :raises ValueError: for options that do not exist or exclude each other, and for checkpoints that cannot be
        written.
    """

    checkpoint: Any = None
    every: int = EVERY
    resume: bool = False
    on_bad_row: str = "raise"

    def __post_init__(self):
        check_choice("on_bad_row", self.on_bad_row, BAD_ROW_POLICIES)
        if self.resume and self.checkpoint is None:
            raise ValueError("resume=True needs checkpoint=, the file to go on from.")
        if not is_count(self.every, 1):
            raise ValueError(f"every must be a positive number of rows, not {self.every!r}.")
        self.opened = None
        if self.checkpoint is not None:
            self.opened = Checkpoint(self.checkpoint, self.every, resume=self.resume)

    @property
    def skips(self) -> bool:
        return self.on_bad_row == "skip"

    @property
    def most_rows(self) -> int:
        """Of a step, for checkpoints to come in time."""
        return sys.maxsize if self.checkpoint is None else self.every


def open_source(
    data: Any, model: Any, model_kwargs: Mapping[str, Any], options: PassOptions, shuffle: bool | str = "auto"
) -> tuple[RowSource, Rows, Rows | None]:
    """The data as a source of rows, in their own order.

    :param shuffle: True: they must allow any other.
    :return: the source; rows that show the form of the data, with finite values; and all rows, if they are in memory.
    :raises ValueError: for data of no use, naming the array and the row.
    """
    if isinstance(data, (Mapping, tuple)):
        rows = named_rows(model, data, model_kwargs)
        if not options.skips:
            check_finite(rows)
        return rows_in_memory(rows), _with_finite_head(rows), rows
    refuse_frames(data)
    if not isinstance(data, Iterable):
        raise ValueError(
            "data must be a mapping from the model's argument names to arrays, a tuple of arrays, or an iterable of "
            f"such blocks, not {type(data).__name__}."
        )
    source = rows_of_blocks(data, model, model_kwargs)
    if shuffle is True and not source.takes_any_order:
        raise ValueError(
            "shuffle=True needs rows that can be read in any order: arrays, a list of blocks, ParquetRows, or an "
            "iterable with num_rows and from_row. This one can be read once: shuffle it where it is made."
        )
    head = source.peek(HEAD)
    if not options.skips:
        check_finite(head)
    elif not finite_rows(head).any():
        head = source.peek(SEARCHED)
    return source, _with_finite_head(head), None


def ordered(source: RowSource, shuffle: bool | str, rng_key: jax.Array, *, useful: bool) -> RowSource:
    """The source in the order in which its rows are to be visited.

    :param shuffle: one of ``SHUFFLES``. :param useful: what ``"auto"`` stands for, where any order is possible.
    """
    shuffled = useful and source.takes_any_order if shuffle == "auto" else shuffle
    return source.in_random_order(rng_key) if shuffled else source


def _with_finite_head(rows: Rows) -> Rows:
    """The same number of rows, of which the first hold finite values."""
    finite = finite_rows({name: array[:HEAD] for name, array in rows.items()})
    if finite.all():
        return rows
    usable = np.flatnonzero(finite_rows(rows))
    if not len(usable):
        raise ValueError(f"the first {num_rows(rows)} rows all hold NaN or infinite values.")
    return selected(rows, usable[np.arange(num_rows(rows)) % len(usable)])


class _Step(NamedTuple):
    """A compiled step under way.

    :ivar weights: zero for rows that are left out.
    :ivar inside: waits for the answer, which rows' outcomes are in their support.
    :ivar report: None if no row could be used.
    """

    before: Any
    rows: Rows
    weights: np.ndarray
    place: int
    inside: Callable[[], np.ndarray]
    after: Any
    report: Any


class Pass(ABC):
    """Rows from a source, piece by piece, each result looked at while the next ones are under way.

    :param bar: a progress bar.
    :param publish: called with each state that is known to be good.
    :param checked: whether it is known that the rows are finite, and their outcomes in their support.

    :ivar state: after the last piece whose result is known to be good.
    :ivar done: how many rows that was.
    """

    def __init__(
        self,
        program: Program,
        source: RowSource,
        options: PassOptions,
        bar: Any,
        publish: Callable[[Any], None],
        *,
        checked: bool,
    ):
        self._program, self._source, self._options, self._bar, self._publish = program, source, options, bar, publish
        self._checked = checked and not options.skips
        self._checkpoint = options.opened
        self.state: Any = None
        self.done = self._written = 0
        self._skipped: list[int] = []
        self._whole = True  # whether notes, state and place are of the same moment

    # ------------------------------------------------------------------ what a method does with rows
    @abstractmethod
    def size(self, place: int) -> int:
        """How many rows are taken at a place."""

    @abstractmethod
    def step(self, state: Any, rows: Rows, weights: np.ndarray, place: int) -> tuple[Any, Any]:
        """State and report after rows, of weight one or zero. The results need not be waited for."""

    @abstractmethod
    def failed(self, report: Any, length: int) -> tuple[int, int] | None:
        """The first row, and that after the last, of the first block that left no finite Gaussian."""

    @abstractmethod
    def refuse(self, before: Any, after: Any, rows: Rows, numbers: np.ndarray) -> None:
        """:raises ValueError: about these rows, whose numbers in the data are given."""

    @abstractmethod
    def accept(self, state: Any, rows: Rows, weights: np.ndarray, report: Any, place: int) -> None:
        """Take note of a good result."""

    @abstractmethod
    def notes(self) -> dict[str, Any]:
        """What was taken note of, as plain values and arrays."""

    @abstractmethod
    def read_notes(self, notes: Mapping[str, Any]) -> None:
        """Go on from such notes."""

    # ------------------------------------------------------------------ the pass
    def __call__(self, state: Any, run: Mapping[str, Any]) -> Any:
        """The state after all rows.

        :param run: facts that tell this run from others; see :class:`Checkpoint`.
        """
        self.state = state
        if self._checkpoint is not None:
            self._resume(self._checkpoint.read({**run, **self._data_facts(state)}))
        place, under_way = self.done, deque()
        try:
            while (rows := self._source.take(self.size(place))) is not None:
                latest = under_way[-1].after if under_way else self.state
                under_way.append(self._begin(latest, *self._finite(rows, place), place))
                place += num_rows(rows)
                if len(under_way) > AHEAD:
                    self._finish(under_way)
        finally:  # also when it is interrupted, or the source fails
            while under_way:
                self._finish(under_way)
            if self._checkpoint is not None and self._whole and self.done > self._written:
                self._write()
        if self.done == len(self._skipped) and self.done:
            raise ValueError(f"none of the {self.done} rows can be used.")
        return self.state

    def skipped(self) -> dict[str, Any]:
        """For the posterior's ``info``."""
        if not self._options.skips:
            return {}
        return {"num_skipped": len(self._skipped), "skipped_rows": self.left_out[:LISTED]}

    @property
    def left_out(self) -> np.ndarray:
        """The numbers of the rows that were skipped."""
        return np.sort(np.array(self._skipped, np.int64))

    def _begin(self, state: Any, rows: Rows, weights: np.ndarray, place: int) -> _Step:
        inside = (lambda: np.ones(len(weights), bool)) if self._checked else self._program.begin_check(rows)
        after, report = self.step(state, rows, weights, place) if weights.any() else (state, None)
        return _Step(state, rows, weights, place, inside, after, report)

    def _finish(self, under_way: deque[_Step]) -> None:
        """Wait for the first step's result, and begin the others anew if rows had to be left out."""
        first = under_way.popleft()
        try:
            step = self._good(first)
            self._take_note(step)
        except BaseException:
            under_way.clear()  # they follow a state that is not good
            raise
        if step is not first:
            state = self.state
            for number, later in enumerate(under_way):
                under_way[number] = self._begin(state, later.rows, later.weights, later.place)
                state = under_way[number].after

    def _take_note(self, step: _Step) -> None:
        self._whole = False
        if step.report is not None:
            self._publish(step.after)
            self.accept(step.after, step.rows, step.weights, step.report, step.place)
        left_out = np.flatnonzero(step.weights == 0)
        self._skipped += [self._source.number(step.place + int(row)) for row in left_out]
        self.state, self.done = step.after, step.place + num_rows(step.rows)
        self._whole = True
        self._bar.update(num_rows(step.rows))
        if self._checkpoint is not None and self.done - self._written >= self._checkpoint.every:
            self._write()

    def _good(self, step: _Step) -> _Step:
        """The step, if need be without the rows that cannot be used."""
        usable = step.inside() | (step.weights == 0)
        if not usable.all():
            if not self._options.skips:
                self._program.check_rows(step.rows, step.place)
            step = self._begin(step.before, *replaced(step.rows, usable & (step.weights > 0)), step.place)
        failed = self._failed(step)
        if failed is not None and not self._options.skips:
            first, stop = failed
            rows = {name: array[first:stop] for name, array in step.rows.items()}
            numbers = [self._source.number(step.place + row) for row in range(first, stop)]
            self.refuse(step.before, step.after, rows, np.array(numbers))
        while failed is not None:
            step = self._without_bad_rows(step, *failed)
            failed = self._failed(step)
        return step

    def _failed(self, step: _Step) -> tuple[int, int] | None:
        return None if step.report is None else self.failed(step.report, num_rows(step.rows))

    # ------------------------------------------------------------------ rows that cannot be used
    def _finite(self, rows: Rows, place: int) -> tuple[Rows, np.ndarray]:
        """The rows with weights: those that are not finite have weight zero, and another one's values."""
        if self._options.skips:
            return replaced(rows, finite_rows(rows))
        if not self._checked:
            check_finite(rows, place)
        return rows, np.ones(num_rows(rows), np.float32)

    def _without_bad_rows(self, step: _Step, first: int, stop: int) -> _Step:
        """The step again, without the rows of a block that are to blame for its failure."""
        suspects = first + np.flatnonzero(step.weights[first:stop])
        others = step.weights > 0
        others[suspects] = False

        def again(kept_suspects: np.ndarray) -> _Step:
            kept = others.copy()
            kept[kept_suspects] = True
            return self._begin(step.before, *replaced(step.rows, kept), step.place)

        to_blame = suspects
        while len(to_blame) > 1:
            halves = np.array_split(to_blame, 2)
            blocks = [self._failed(again(half)) for half in halves]
            failing = [half for half, bad in zip(halves, blocks) if bad is not None and bad[0] <= first]
            if not failing:
                break  # only together
            to_blame = failing[0]
        return again(np.setdiff1d(suspects, to_blame))

    # ------------------------------------------------------------------ checkpoints
    def _data_facts(self, state: Any) -> dict[str, Any]:
        """What changes if the rows, the prior or the likelihood do."""
        head = _with_finite_head(self._source.peek(HEAD))
        origin = jnp.zeros(self._program.layout.size, self._program.dtype)
        densities = jit_once(lambda rows: self._program.log_likelihood(origin, rows))(head)
        return {
            "sites": {n: list(self._program.layout.shapes[n]) for n in self._program.layout.site_names},
            "dtype": str(self._program.dtype),
            "the start": np.array([_summary(x) for x in _plain(state)]),
            "the beginning of the data": digest(head),
            "the likelihood of the first rows": np.concatenate([np.ravel(x) for x in densities.values()]),
        }

    def _write(self) -> None:
        contents = {"state": _plain(self.state), "done": self.done, "notes": self.notes()}
        self._checkpoint.write(contents | {"skipped": self.left_out})
        self._written = self.done

    def _resume(self, contents: Mapping[str, Any] | None) -> None:
        if contents is None:
            return
        self.state = _as_before(contents["state"], self.state)
        self.done = self._written = contents["done"]
        self._skipped = contents["skipped"].tolist()
        self.read_notes(contents["notes"])
        self._publish(self.state)
        self._source.skip(self.done)
        self._bar.update(self.done)


def first_failed(ok: np.ndarray, block_size: int, length: int) -> tuple[int, int] | None:
    """The rows of the first of equal blocks that is not ok, of ``length`` rows in all; None if there is none."""
    bad = np.flatnonzero(~ok)
    return (int(bad[0]) * block_size, min(int(bad[0] + 1) * block_size, length)) if len(bad) else None


def rows_named(numbers: np.ndarray) -> str:
    """Rows by their numbers in the data, which in random order need not be consecutive."""
    first, last = numbers[0], numbers[-1]
    if len(numbers) == 1:
        return f"row {first}"
    if np.all(np.diff(numbers) == 1):
        return f"rows {first} to {last}"
    return f"{len(numbers)} rows, from row {first} to row {last} in random order"


def usable_chunks(source: RowSource, left_out: np.ndarray, size: int) -> Iterator[tuple[int, Rows, np.ndarray]]:
    """All rows of a source that can be read again, in their own order, with the number of the first, and weights.

    :param left_out: the numbers of rows of weight zero, sorted.
    """
    source.rewind()
    place = 0
    while (rows := source.take(size)) is not None:
        kept = np.ones(num_rows(rows), bool)
        first, stop = np.searchsorted(left_out, [place, place + len(kept)])
        kept[left_out[first:stop] - place] = False
        if kept.any():
            yield place, *replaced(rows, kept)
        place += len(kept)


def replaced(rows: Rows, kept: np.ndarray) -> tuple[Rows, np.ndarray]:
    """The rows with weights: those not kept have weight zero and the values of the kept row before, or else after."""
    weights = kept.astype(np.float32)
    if kept.all() or not kept.any():
        return rows, weights
    source = np.maximum.accumulate(np.where(kept, np.arange(len(kept)), -1))
    return selected(rows, np.where(source < 0, np.argmax(kept), source)), weights


def _plain(state: Any) -> list[np.ndarray]:
    """The arrays of a state, keys of random numbers as their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in map(jnp.asarray, jax.tree.leaves(state))]


def _summary(array: np.ndarray) -> list[float]:
    """Numbers that change if the array does, and hardly by rounding."""
    flat = np.ravel(array).astype(np.float64)
    return [flat.sum(), np.abs(flat).sum(), flat @ np.cos(np.arange(len(flat)))]


def _as_before(arrays: list[np.ndarray], like: Any) -> Any:
    """A state from its arrays.

    :raises ValueError: for arrays of another form.
    """
    leaves, structure = jax.tree.flatten(like)
    forms = [(x.shape, x.dtype) for x in _plain(like)]
    if [(x.shape, x.dtype) for x in arrays] != forms:
        raise ValueError("the checkpoint holds a state of another form than this run's.")

    def restored(array, leaf):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        return jnp.asarray(array)

    return jax.tree.unflatten(structure, [restored(a, leaf) for a, leaf in zip(arrays, leaves)])
