"""Data as a pass takes them: opened as a source, without the rows that cannot be used, in the order of the visit."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import numpy as np

from ..model.bad_rows import NotFinite
from ..model.data.arguments import check_finite, declared_dtypes, finite_rows, named_rows, refuse_frames
from ..model.data.arrays import BadData
from ..model.data.rows import Data, Keywords, Rows, num_rows, selected
from ..model.program import Program
from ..options import check_choice, is_count
from .checkpoints import EVERY, Checkpoint
from .source import NOTHING, SLICE, RowSource, chunks, rows_in_memory, rows_of_blocks

BAD_ROW_POLICIES = ("raise", "skip")
SHUFFLES = ("auto", True, False)
HEAD = 32  # rows from which the form of the data is read
SEARCHED = 2**16  # rows among which there must be one with finite values


@dataclass
class PassOptions:
    """A user's options of a pass; see :meth:`RVGA.run`.

    :ivar opened: the checkpoint, checked before any row is read; None if there is to be none.
    :raises ValueError: for options that do not exist or exclude each other, and for checkpoints that cannot be
        written.
    """

    checkpoint: str | os.PathLike | None = None
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
        """The most rows of a step, so that checkpoints are written in time."""
        return sys.maxsize if self.checkpoint is None else self.every


def open_source(
    data: Data | Iterable, model: Callable, model_kwargs: Keywords, options: PassOptions, shuffle: bool | str = "auto"
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
        source = rows_in_memory(rows, declared_dtypes(model, data))
        return source, source.as_declared(with_finite_head(rows)), rows
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
        check_finite_at(source, head, 0)
    elif not finite_rows(head).any():
        head = source.peek(SEARCHED)
    return source, source.as_declared(with_finite_head(head)), None


def usable_source(
    program: Program, source: RowSource, head: Rows, all_rows: Rows | None, options: PassOptions
) -> tuple[RowSource, Rows]:
    """The source and the head that :func:`open_source` gave, without the rows that cannot be used.

    Of rows in memory, the head is then all that can. Of a source that can be read again, all rows are read for this:
    their order and the sizes of steps depend on how many there are. One that is read once is as it was: its pass leaves
    rows out.

    :raises ValueError: for a row in memory that cannot be used, if such rows are not skipped; and if none is left.
    """
    if not (options.skips and source.takes_any_order):
        if all_rows is not None:
            program.check_rows(head)
        return source, head
    bad = NOTHING
    for position, rows in chunks(source, SLICE):
        bad = np.concatenate([bad, position + np.flatnonzero(~usable_rows(program, source, rows, position))])
    if len(bad) == source.total:
        raise ValueError(f"none of the {source.total} rows can be used.")
    source.rewind()
    source = source.without(bad)
    return source, head if all_rows is None else source.peek(num_rows(all_rows))


def usable_rows(program: Program, source: RowSource, rows: Rows, position: int) -> np.ndarray:
    """Which rows are finite, with outcomes in their support, (n,). ``position``: at which the source gave the first."""
    usable = finite_rows(rows)
    if usable.any():
        whole = source.as_declared(replaced(rows, usable)[0])
        check_integers(program, source, whole, position)
        usable &= program.begin_check(whole)()
    return usable


def check_integers(program: Program, source: RowSource, rows: Rows, position: int) -> None:
    """:raises ValueError: naming an array of numbers that are no integers, where those of the first block are, and the
    model indexes by them. ``position``: at which the source gave the first row."""
    for name in program.index_arrays:
        array = rows[name]
        if array.dtype.kind == "f":
            row = int(np.argwhere(array != np.round(array))[0][0]) if (array != np.round(array)).any() else 0
            with located(source, position + row) as number:
                raise BadData(
                    f"row {number}: data array {name!r} holds {array[row]} there, in a block of dtype {array.dtype}, "
                    f"and the model indexes by this array, of integers in the first block: give integers in all blocks."
                )


def ordered(source: RowSource, shuffle: bool | str, rng_key: jax.Array, *, useful: bool) -> RowSource:
    """The source in the order in which its rows are to be visited.

    :param shuffle: one of ``SHUFFLES``. :param useful: what ``"auto"`` stands for, where any order is possible.
    """
    shuffled = useful and source.takes_any_order if shuffle == "auto" else shuffle
    return source.in_random_order(rng_key) if shuffled else source


def with_finite_head(rows: Rows) -> Rows:
    """As many rows, the first of which hold finite values."""
    finite = finite_rows({name: array[:HEAD] for name, array in rows.items()})
    if finite.all():
        return rows
    usable = np.flatnonzero(finite_rows(rows))
    if not len(usable):
        raise ValueError(f"the first {num_rows(rows)} rows all hold NaN or infinite values.")
    return selected(rows, usable[np.arange(num_rows(rows)) % len(usable)])


@contextmanager
def located(source: RowSource, position: int) -> Generator[int]:
    """The number in the data of the row at a position; errors that are raised about it say where that is."""
    number = source.number(position)
    try:
        yield number
    except ValueError as error:
        kind = NotFinite if isinstance(error, NotFinite) else ValueError
        raise kind(f"{error}{source.about(number)}") from error


def check_finite_at(source: RowSource, rows: Rows, position: int) -> None:
    """:raises ValueError: naming the first row that is not finite. ``position``: at which the source gave the first."""
    finite = finite_rows(rows)
    if not finite.all():
        row = int(np.argmin(finite))
        with located(source, position + row) as number:
            check_finite(selected(rows, slice(row, row + 1)), number)


def replaced(rows: Rows, kept: np.ndarray) -> tuple[Rows, np.ndarray]:
    """The rows with weights: those not kept have weight zero and the values of the kept row before, or else after."""
    weights = kept.astype(np.float32)
    if kept.all() or not kept.any():
        return rows, weights
    source = np.maximum.accumulate(np.where(kept, np.arange(len(kept)), -1))
    return selected(rows, np.where(source < 0, np.argmax(kept), source)), weights
