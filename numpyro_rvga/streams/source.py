"""Rows from memory or from an iterable of blocks, re-cut to the sizes that the compiled steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from jax import Array

from ..model.arguments import check_row_shapes, named_rows, row_shapes
from ..model.rows import Rows, joined, num_rows
from .order import RandomOrder, one_round, rounds_of

SLICE = 2**16  # rows that are passed over at a time
PIECE = 2**16  # rows of a source that does not say which of them are fast to read one after the other


class RowSource:
    """Hands out rows in pieces of any size, however the source was cut.

    :param open_at: row -> an iterator of the blocks from this row on, mappings of arrays that share their leading axis.
        Of sources that can only be read from their first row on, it is called with 0 alone.
    :param total: the number of rows, where it is known.
    :param seekable: whether ``open_at`` takes any row, any number of times.
    :param pieces: numbers of rows that are fast to read one after the other; None: the rows are in memory.
    :param order: in which rows are handed out; None: their own.
    """

    def __init__(
        self,
        open_at: Callable[[int], Iterator[Rows]],
        total: int | None = None,
        *,
        seekable: bool = False,
        pieces: Sequence[int] | None = None,
        order: RandomOrder | None = None,
    ):
        self._open_at, self.seekable, self._pieces = open_at, seekable, pieces
        self._blocks = open_at(0)
        self.total, self.order = total, order
        self._held: deque[Rows] = deque()
        self._num_held = 0

    @property
    def takes_any_order(self) -> bool:
        """Whether :meth:`in_random_order` is at hand."""
        return self.seekable and self.total is not None

    def in_random_order(self, rng_key: Array) -> RowSource:
        """The same rows in an order that the key determines. For a source in the order of the data."""
        if self._pieces is None:
            rounds = one_round(self.total)
        else:
            rounds = rounds_of(self._pieces, sum(x[0].size for x in self.peek(1).values()), rng_key)
        order = RandomOrder(lambda row: RowSource(lambda _: self._open_at(row)).take, rounds, rng_key)
        return RowSource(order.open_at, self.total, seekable=True, order=order)

    def rewind(self) -> None:
        """Begin again, if rows can be read again."""
        self.skip(0)

    def number(self, place: int) -> int:
        """The number in the data of the row that is handed out at a place."""
        return place if self.order is None else self.order.number(place)

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
        self._held.appendleft(rows)
        self._num_held += num_rows(rows)
        return rows

    def skip(self, count: int) -> None:
        """Pass over rows.

        :raises ValueError: if there are not so many.
        """
        if self.seekable:
            self._blocks, self._num_held = self._open_at(count), 0
            self._held.clear()
            return
        left = count
        while left:
            rows = self.take(min(left, SLICE))
            if rows is None:
                raise ValueError(f"the data end after {count - left} rows, and {count} have been taken in before.")
            left -= num_rows(rows)

    def is_longer_than(self, size: int) -> bool:
        if self.total is not None:
            return self.total > size
        self._fill(size + 1)
        return self._num_held > size

    def _fill(self, size: int) -> None:
        while self._num_held < size:
            block = next(self._blocks, None)
            if block is None:
                return
            self._held.append(block)
            self._num_held += num_rows(block)


def rows_in_memory(rows: Rows) -> RowSource:
    """A source of arrays."""
    total = num_rows(rows)

    def rest(start: int) -> Iterator[Rows]:
        if start < total:
            yield {name: array[start:] for name, array in rows.items()}

    return RowSource(rest, total, seekable=True)


def rows_of_blocks(blocks: Iterable, model: Callable, model_kwargs: Mapping[str, Any]) -> RowSource:
    """A source of blocks. They may know their ``num_rows``, may be read ``from_row(n)`` on, and may have
    ``piece_sizes``, of rows that are fast to read one after the other.

    :raises ValueError: when rows are asked for: naming the row from which on blocks do not fit together or the model.
    """
    if isinstance(blocks, Sequence):
        blocks = _Listed(blocks)
    seekable, total = hasattr(blocks, "from_row"), getattr(blocks, "num_rows", None)
    pieces = getattr(blocks, "piece_sizes", None)
    if pieces is None and total is not None:
        pieces = [min(PIECE, total - start) for start in range(0, total, PIECE)]

    def open_at(row: int) -> Iterator[Rows]:
        opened = iter(blocks.from_row(row) if seekable else blocks)
        return _checked_blocks(opened, row, partial(named_rows, model, model_kwargs=model_kwargs))

    return RowSource(open_at, total, seekable=seekable, pieces=pieces)


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
    """Rows of a block. Blocks that are none are found out when they are read."""
    arrays = block.values() if isinstance(block, Mapping) else block if isinstance(block, (tuple, list)) else ()
    return next((np.shape(array)[0] for array in arrays if array is not None and np.ndim(array)), 0)


def _rest(block: Any, skipped: int) -> Any:
    """A block without its first rows."""
    cut = lambda array: None if array is None else array[skipped:]  # noqa: E731
    return {n: cut(array) for n, array in block.items()} if isinstance(block, Mapping) else tuple(map(cut, block))


def _checked_blocks(blocks: Iterator, first_row: int, named: Callable[[Any], Rows]) -> Iterator[Rows]:
    """All must hold the same arrays."""
    known: dict[str, tuple[int, ...]] = {}
    for block in blocks:
        rows = named(tuple(block) if isinstance(block, list) else block)
        known = known or row_shapes(rows)
        if set(rows) != set(known):
            raise ValueError(f"row {first_row}: this block holds {sorted(rows)}, those before it {sorted(known)}.")
        check_row_shapes(rows, known, f"before row {first_row}")
        first_row += num_rows(rows)
        yield rows
