"""Rows from memory or from an iterable of blocks, re-cut to the sizes that the compiled steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from ..model.arguments import check_row_shapes, named_rows, row_shapes
from ..model.rows import Rows, joined, num_rows, selected

SLICE = 2**16  # rows that are selected, or passed over, at a time


class RowSource:
    """Hands out rows in pieces of any size, however the source was cut.

    :param open_at: row -> an iterator of the blocks from this row on, mappings of arrays that share their leading axis.
        Of sources that can only be read from their first row on, it is called with 0 alone.
    :param total: the number of rows, where it is known.
    :param seekable: whether ``open_at`` takes any row.
    :param number: place in the order in which rows are handed out -> number of the row in the data.
    """

    def __init__(
        self,
        open_at: Callable[[int], Iterator[Rows]],
        total: int | None = None,
        *,
        seekable: bool = False,
        number: Callable[[int], int] = int,
    ):
        self._open_at, self._seekable = open_at, seekable
        self._blocks = open_at(0)
        self.total, self.number = total, number
        self._held: deque[Rows] = deque()
        self._num_held = 0

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
        if self._seekable:
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


def rows_in_memory(rows: Rows, order: np.ndarray | None = None) -> RowSource:
    """A source of arrays, in an order of their rows."""
    total = num_rows(rows)

    def slices(start: int) -> Iterator[Rows]:
        if order is None and start < total:
            yield {name: array[start:] for name, array in rows.items()}
        elif order is not None:
            for first in range(start, total, SLICE):
                yield selected(rows, order[first : first + SLICE])

    number = int if order is None else lambda place: int(order[place])
    return RowSource(slices, total, seekable=True, number=number)


def rows_of_blocks(blocks: Iterable, model: Callable, model_kwargs: Mapping[str, Any]) -> RowSource:
    """A source of blocks. They may know their ``num_rows``, and may be read ``from_row(n)`` on.

    :raises ValueError: when rows are asked for: naming the row from which on blocks do not fit together or the model.
    """
    seekable = hasattr(blocks, "from_row")

    def open_at(row: int) -> Iterator[Rows]:
        opened = iter(blocks.from_row(row) if seekable else blocks)
        return _checked_blocks(opened, row, partial(named_rows, model, model_kwargs=model_kwargs))

    return RowSource(open_at, getattr(blocks, "num_rows", None), seekable=seekable)


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
