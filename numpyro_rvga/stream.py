"""Rows from memory or from an iterable of blocks, re-cut to the sizes that the compiled steps take."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from .model.arguments import check_row_shapes, named_rows, num_rows, row_shapes

Rows = dict[str, np.ndarray]
NEGLIGIBLE_ERROR = 1e-6  # nats: of a row whose Gaussian site is as good as exact
SLICE = 2**16  # rows that are permuted, or passed over, at a time


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
        return _joined(pieces) if pieces else None

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
                yield permuted(rows, order[first : first + SLICE])

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


class RowMemory:
    """The rows whose Gaussian sites are least exact, with these sites: bounded, filled while the data go by.

    :param capacity: rows kept.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._pieces: list[tuple[np.ndarray, Rows, tuple]] = []
        self._count = 0
        self._least = NEGLIGIBLE_ERROR  # rows of no larger error would not be among those kept

    def offer(self, rows: Rows, sites: tuple) -> None:
        """Consider rows; ``sites`` is a tuple of sites of (n, E, ...) arrays, empty where none are wanted."""
        if not (self._capacity and sites):
            return
        error = sum(np.asarray(site.error).sum(axis=1) for site in sites)[: num_rows(rows)]
        chosen = np.flatnonzero(error > self._least)
        if not len(chosen):
            return
        self._keep(error[chosen], permuted(rows, chosen), _map_sites(lambda x: np.asarray(x)[chosen], sites))
        if self._count > 2 * self._capacity:
            self._prune()

    def contents(self) -> tuple[Rows, tuple] | None:
        """The kept rows and their sites; None if there are none."""
        if not self._pieces:
            return None
        self._prune()
        _, rows, sites = self._pieces[0]
        return rows, sites

    def stored(self) -> list:
        """Plain arrays from which :meth:`restore` makes this memory again."""
        if self._pieces:
            self._prune()
        return [(error, rows, [tuple(site) for site in sites]) for error, rows, sites in self._pieces]

    def restore(self, stored: list, site_type: type) -> None:
        for error, rows, sites in stored:
            self._keep(error, rows, tuple(site_type(*site) for site in sites))

    def _keep(self, error: np.ndarray, rows: Rows, sites: tuple) -> None:
        self._pieces.append((error, rows, sites))
        self._count += len(error)

    def _prune(self) -> None:
        errors, rows, sites = zip(*self._pieces)
        error = np.concatenate(errors)
        order = np.argsort(-error, kind="stable")[: self._capacity]
        kept = _map_sites(lambda *x: np.concatenate(x)[order], *sites)
        self._pieces, self._count = [], 0
        self._keep(error[order], permuted(_joined(list(rows)), order), kept)
        if len(order) == self._capacity:
            self._least = error[order[-1]]


def pad(rows: Rows, size: int, weights: np.ndarray | None = None) -> tuple[Rows, np.ndarray]:
    """Rows repeated up to ``size``, and weights (size,): zero for the repeats, one for rows unless they are given."""
    length = num_rows(rows)
    weights = np.ones(length, np.float32) if weights is None else weights
    if length == size:
        return rows, weights
    taken = np.minimum(np.arange(size), length - 1)
    return permuted(rows, taken), np.concatenate([weights, np.zeros(size - length, weights.dtype)])


def permuted(rows: Rows, order: np.ndarray) -> Rows:
    return {name: array[order] for name, array in rows.items()}


def in_blocks(arrays: Any, block_size: int) -> Any:
    """A pytree of (n, ...) arrays as (blocks, B, ...)."""
    return jax.tree.map(lambda x: x.reshape(-1, block_size, *x.shape[1:]), arrays)


def progress(enabled: bool, total: int | None, name: str, unit: str) -> Any:
    """A progress bar."""
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=unit, unit_scale=True, disable=not enabled, desc=name)


def _joined(pieces: list[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def _map_sites(function: Callable, *several: tuple) -> tuple:
    """Field by field, over tuples of sites of the same form."""
    return tuple(type(same[0])(*[function(*fields) for fields in zip(*same)]) for same in zip(*several))
