"""Rows from memory or from an iterable of blocks, re-cut to the sizes that the compiled steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from ..model.data.arguments import check_row_shapes, declared_dtypes, named_rows, row_shapes
from ..model.data.arrays import as_data_array, as_dtype
from ..model.data.rows import Keywords, Rows, joined, num_rows, selected
from .order import RandomOrder, one_round, rounds_of

SLICE = 2**16  # rows that are read at a time, where all are read once more
NOTHING = np.zeros(0, np.int64)
PIECE = 2**16  # rows of a source that does not say which of them are fast to read one after the other


class RowSource:
    """Hands out rows in pieces of any size, however the source was cut.

    :param open_at: row -> an iterator of the blocks from this row on, mappings of arrays that share their leading axis.
        Of sources that can only be read from their first row on, it is called with 0 alone.
    :param total: the number of rows, or None.
    :param seekable: whether ``open_at`` takes any row, any number of times.
    :param pieces: numbers of rows that are fast to read one after the other, or one number for all of them; None: the
        rows are in memory.
    :param order: in which rows are handed out; None: their own.
    :param left_out: the numbers in the data of rows that are not handed out, sorted.
    :param about: what else there is to say of where a row lies, given its number: a sentence.
    :param dtypes: of arrays that may come as floating-point numbers where values are missing.
    """

    def __init__(
        self,
        open_at: Callable[[int], Iterator[Rows]],
        total: int | None = None,
        *,
        seekable: bool = False,
        pieces: Sequence[int] | int | None = None,
        order: RandomOrder | None = None,
        left_out: np.ndarray = NOTHING,
        about: Callable[[int], str] | None = None,
        dtypes: Callable[[], Mapping[str, np.dtype]] = dict,
    ):
        self._open_at, self.seekable, self._pieces = open_at, seekable, pieces
        self._blocks, self._read = open_at(0), 0
        self.total, self.order = total, order
        self.left_out, self._about, self._dtypes = left_out, about, dtypes
        self._held: deque[Rows] = deque()
        self._num_held = 0

    @property
    def takes_any_order(self) -> bool:
        """Whether :meth:`in_random_order` is at hand."""
        return self.seekable and self.total is not None

    def in_random_order(self, rng_key: Array) -> RowSource:
        """The source's rows in an order that the key determines. For a source in the order of the data."""
        assert self.total is not None
        if self._pieces is None:
            rounds = one_round(self.total)
        else:
            pieces = _even(self.total, self._pieces) if isinstance(self._pieces, int) else self._pieces
            rounds = rounds_of(pieces, sum(x[0].size for x in self.peek(1).values()), rng_key)
        order = RandomOrder(lambda row: RowSource(lambda _: self._open_at(row)).take, rounds, rng_key)
        options: dict[str, Any] = {"left_out": self.left_out, "about": self._about, "dtypes": self._dtypes}
        return RowSource(lambda _: order.blocks(), self.total, seekable=True, order=order, **options)

    def rewind(self) -> None:
        """Begin again, if rows can be read again."""
        if self.seekable:
            self._blocks, self._read, self._num_held = self._open_at(0), 0, 0
            self._held.clear()

    def without(self, left_out: np.ndarray) -> RowSource:
        """The other rows, in the order of the data, of a source of all rows that can be read again.

        :param left_out: rows, sorted, as :meth:`row` gives them.
        """
        if not len(left_out):
            return self

        def rest(row: int) -> Iterator[Rows]:
            number = int(_numbers_of_others(left_out, np.array([row]))[0])
            for rows in self._open_at(number):
                kept = np.ones(num_rows(rows), bool)
                first, stop = np.searchsorted(left_out, [number, number + len(kept)])
                kept[left_out[first:stop] - number] = False
                number += len(kept)
                if kept.any():
                    yield self.as_declared(selected(rows, kept))

        pieces = self._pieces
        if not (pieces is None or isinstance(pieces, int)):
            ends = np.cumsum(pieces)
            pieces = np.asarray(pieces) - np.diff(np.searchsorted(left_out, ends), prepend=0)
        total = None if self.total is None else self.total - len(left_out)
        numbers = self.numbers(left_out)
        options: dict[str, Any] = {"about": self._about, "dtypes": self._dtypes}
        return RowSource(
            rest, total, seekable=True, pieces=pieces, left_out=np.union1d(self.left_out, numbers), **options
        )

    def row(self, position: int) -> int:
        """Which row is handed out at a position, in the source's own order."""
        return position if self.order is None else self.order.number(position)

    def number(self, position: int) -> int:
        """The number in the data of the row that is handed out at a position."""
        return int(self.numbers(np.array([self.row(position)]))[0])

    def numbers(self, rows: np.ndarray) -> np.ndarray:
        """The numbers in the data of rows that are handed out, from their positions in the source's own order."""
        return _numbers_of_others(self.left_out, rows)

    def stored_progress(self, done: int, left_out: np.ndarray) -> tuple[int, np.ndarray]:
        """How many rows were handed out, and which positions among them left out, as a source of all rows says it."""
        if self.order is not None:
            return done, left_out
        done = int(self.numbers(np.array([done - 1]))[0]) + 1 if done else 0
        before = self.left_out[self.left_out < done]
        return done, np.union1d(before, self.numbers(left_out))

    def restored_progress(self, done: int, left_out: np.ndarray) -> tuple[int, np.ndarray]:
        """The inverse of :meth:`stored_progress`."""
        if self.order is not None:
            return done, left_out
        later = np.setdiff1d(left_out, self.left_out)
        return done - int(np.searchsorted(self.left_out, done)), later - np.searchsorted(self.left_out, later)

    def about(self, number: int) -> str:
        """Where a row lies, given its number in the data, for messages."""
        return "" if self._about is None else f" {self._about(number)}"

    def as_declared(self, rows: Rows) -> Rows:
        """Rows without missing values, of the types that their arrays have where none are missing."""
        declared = self._dtypes()
        return {n: as_dtype(x, declared[n]) if n in declared else x for n, x in rows.items()}

    def take(self, size: int) -> Rows | None:
        """The next ``size`` rows, fewer at the end, None after it."""
        self._fill(size)
        pieces = []
        while size and self._held:
            head = self._held.popleft()
            length = num_rows(head)
            if length > size:
                self._held.appendleft({name: array[size:] for name, array in head.items()})
                head, length = {name: array[:size] for name, array in head.items()}, size
            pieces.append(head)
            size -= length
            self._num_held -= length
        return joined(pieces) if pieces else None

    def peek(self, size: int) -> Rows:
        """The rows that :meth:`take` would give, which stay.

        :raises ValueError: if there are none.
        """
        rows = self.take(size)
        if rows is None:
            raise ValueError("the stream of data is empty: it ended before its first row.")
        self.put_back(rows)
        return rows

    def put_back(self, rows: Rows) -> None:
        """Rows that :meth:`take` gave last, to be given once more."""
        if num_rows(rows):
            self._held.appendleft(rows)
            self._num_held += num_rows(rows)

    def is_longer_than(self, size: int) -> bool:
        if self.total is not None:
            return self.total > size
        self._fill(size + 1)
        return self._num_held > size

    def _fill(self, size: int) -> None:
        while self._num_held < size:
            block = next(self._blocks, None)
            if block is None:
                self._check_end()
                return
            self._read += num_rows(block)
            if num_rows(block):
                self._held.append(block)
                self._num_held += num_rows(block)

    def _check_end(self) -> None:
        """:raises ValueError: for fewer or more rows than were promised."""
        if self.total is not None and self._read != self.total:
            raise ValueError(f"the data say that they have num_rows={self.total}, and end after {self._read} rows.")


def _numbers_of_others(left_out: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """The numbers of rows at positions among those that are not left out. ``left_out``: numbers, sorted."""
    return positions + np.searchsorted(left_out - np.arange(len(left_out)), positions, side="right")


def _even(total: int, size: int) -> list[int]:
    """Rows in pieces of one size, but for the last."""
    return [min(size, total - start) for start in range(0, total, size)]


def rows_in_memory(rows: Rows, dtypes: Mapping[str, np.dtype]) -> RowSource:
    """A source of arrays. ``dtypes``: of those that are floating-point numbers because values are missing."""
    total = num_rows(rows)

    def rest(start: int) -> Iterator[Rows]:
        if start < total:
            yield {name: array[start:] for name, array in rows.items()}

    return RowSource(rest, total, seekable=True, dtypes=lambda: dtypes)


def rows_of_blocks(blocks: Iterable, model: Callable, model_kwargs: Keywords) -> RowSource:
    """A source of blocks. They may know their ``num_rows``, may be read ``from_row(n)`` on, and may have
    ``piece_sizes``, of rows that are fast to read one after the other; ``dtypes`` of arrays that have others where
    values are missing; and ``about_row(n)``, a sentence that says where a row lies.

    :raises ValueError: when rows are asked for: naming the row from which on blocks do not fit together or the model.
    """
    listed: Any = _Listed(blocks) if isinstance(blocks, Sequence) else blocks
    seekable, total = hasattr(listed, "from_row"), getattr(listed, "num_rows", None)
    pieces = getattr(listed, "piece_sizes", PIECE)
    of_first: dict[str, np.dtype] = {}  # block: the others have the same, but for where values are missing

    def named(block: Any) -> Rows:
        rows = named_rows(model, block, model_kwargs)
        if not of_first:
            of_first.update({name: array.dtype for name, array in rows.items()} | declared_dtypes(model, block))
        return {name: as_dtype(array, of_first.get(name, array.dtype)) for name, array in rows.items()}

    def open_at(row: int) -> Iterator[Rows]:
        opened = iter(listed.from_row(row) if seekable else listed)
        return _checked_blocks(opened, row, named)

    def dtypes() -> dict[str, np.dtype]:
        declared = getattr(listed, "dtypes", {})
        return of_first | {name: as_data_array(name, np.zeros(1, dtype)).dtype for name, dtype in declared.items()}

    about = getattr(listed, "about_row", None)
    return RowSource(open_at, total, seekable=seekable, pieces=pieces, about=about, dtypes=dtypes)


class _Listed:
    """Blocks in a list, which can be read from any row on."""

    def __init__(self, blocks: Sequence):
        self._blocks = blocks
        self._ends = np.cumsum([_length(block) for block in blocks], dtype=np.int64)
        self.num_rows = int(self._ends[-1]) if len(blocks) else 0

    def from_row(self, row: int) -> Iterator[Any]:
        first = int(np.searchsorted(self._ends, row, side="right")) if row else 0
        for number in range(first, len(self._blocks)):
            block, skipped = self._blocks[number], row - int(self._ends[number] - _length(self._blocks[number]))
            yield _rest(block, skipped) if skipped > 0 else block


def _length(block: Any) -> int:
    """Rows of a block. Blocks that are none are refused when they are read."""
    return next((shape[0] for shape in _shapes(block) if shape), 0)


def _has_no_rows(block: Any) -> bool:
    """Whether all arrays of a block are empty."""
    shapes = _shapes(block)
    return bool(shapes) and all(shape[:1] == (0,) for shape in shapes)


def _shapes(block: Any) -> list[tuple[int, ...]]:
    """The shapes of a block's arrays."""
    arrays = block.values() if isinstance(block, Mapping) else block if isinstance(block, (tuple, list)) else ()
    return [np.shape(array) for array in arrays if array is not None]


def _rest(block: Any, skipped: int) -> Any:
    """A block without its first rows."""
    cut = lambda array: None if array is None else array[skipped:]  # noqa: E731
    return {n: cut(array) for n, array in block.items()} if isinstance(block, Mapping) else tuple(map(cut, block))


def _checked_blocks(blocks: Iterator, first_row: int, named: Callable[[Any], Rows]) -> Iterator[Rows]:
    """All must hold the same arrays."""
    shapes: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        if _has_no_rows(block):
            continue
        rows = named(tuple(block) if isinstance(block, list) else block)
        shapes = shapes or row_shapes(rows)
        if set(rows) != set(shapes):
            raise ValueError(f"row {first_row}: this block holds {sorted(rows)}, those before it {sorted(shapes)}.")
        check_row_shapes(rows, shapes, f"before row {first_row}")
        first_row += num_rows(rows)
        yield rows


def chunks(source: RowSource, size: int) -> Iterator[tuple[int, Rows]]:
    """All rows of a source that can be read again, with the position of the first."""
    source.rewind()
    position = 0
    while (rows := source.take(size)) is not None:
        yield position, rows
        position += num_rows(rows)
