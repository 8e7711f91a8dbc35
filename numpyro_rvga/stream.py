"""Rows from memory or from an iterable of blocks, re-cut to the sizes that the compiled steps take."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

Rows = dict[str, np.ndarray]
NEGLIGIBLE_ERROR = 1e-6  # nats: of a row whose Gaussian site is as good as exact


class RowSource:
    """Hands out rows in pieces of any size, however the source was cut.

    :param blocks: an iterator of checked blocks, mappings of arrays that share their leading axis.
    """

    def __init__(self, blocks: Iterator[Mapping[str, np.ndarray]]):
        self._blocks = blocks
        self._held: list[Rows] = []
        self._num_held = 0

    def take(self, size: int) -> Rows | None:
        """The next ``size`` rows, fewer at the end, None after it."""
        self._fill(size)
        if not self._num_held:
            return None
        pieces, wanted = [], size
        while wanted and self._held:
            head = self._held[0]
            length = _length(head)
            if length <= wanted:
                pieces.append(self._held.pop(0))
            else:
                pieces.append({name: array[:wanted] for name, array in head.items()})
                self._held[0] = {name: array[wanted:] for name, array in head.items()}
            wanted -= min(length, wanted)
        self._num_held -= size - wanted
        if len(pieces) == 1:
            return pieces[0]
        return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}

    def _fill(self, size: int) -> None:
        while self._num_held < size:
            block = next(self._blocks, None)
            if block is None:
                return
            self._held.append(dict(block))
            self._num_held += _length(block)


class RowMemory:
    """The rows whose Gaussian sites are least exact, with these sites: bounded, filled while the data go by.

    :param capacity: rows kept.
    """

    def __init__(self, capacity: int):
        self._capacity = capacity
        self._pieces: list[tuple[np.ndarray, Rows, list]] = []
        self._count = 0

    def offer(self, rows: Rows, sites: tuple) -> None:
        """Consider rows; ``sites`` is a tuple of sites of (n, E, ...) arrays, empty where none are wanted."""
        if not (self._capacity and sites):
            return
        error = sum(np.asarray(site.error).sum(axis=1) for site in sites)[: _length(rows)]
        chosen = np.flatnonzero(error > NEGLIGIBLE_ERROR)
        if not len(chosen):
            return
        kept = [type(site)(*[np.asarray(x)[chosen] for x in site]) for site in sites]
        self._pieces.append((error[chosen], permuted(rows, chosen), kept))
        self._count += len(chosen)
        if self._count > 2 * self._capacity:
            self._prune()

    def contents(self) -> tuple[Rows, tuple] | None:
        """The kept rows and their sites; None if there are none."""
        if not self._pieces:
            return None
        self._prune()
        _, rows, sites = self._pieces[0]
        return rows, tuple(sites)

    def _prune(self) -> None:
        error = np.concatenate([piece[0] for piece in self._pieces])
        order = np.argsort(-error, kind="stable")[: self._capacity]
        rows = {n: np.concatenate([piece[1][n] for piece in self._pieces])[order] for n in self._pieces[0][1]}
        sites = []
        for same in zip(*[piece[2] for piece in self._pieces]):
            sites.append(type(same[0])(*[np.concatenate(arrays)[order] for arrays in zip(*same)]))
        self._pieces, self._count = [(error[order], rows, sites)], len(order)


def pad(rows: Rows, size: int) -> tuple[Rows, np.ndarray]:
    """Rows repeated up to ``size``, and weights (size,): one for rows, zero for the repeats."""
    length = _length(rows)
    taken = np.minimum(np.arange(size), length - 1)
    weights = (np.arange(size) < length).astype(np.float32)
    return rows if length == size else {name: array[taken] for name, array in rows.items()}, weights


def permuted(rows: Rows, order: np.ndarray) -> Rows:
    return {name: array[order] for name, array in rows.items()}


def checked_blocks(blocks: Iterator, check: Callable[[object, int], Rows]) -> Iterator[Rows]:
    """Blocks after ``check(block, first_row)``; all must hold the same arrays."""
    first_row, names, shapes = 0, None, {}
    for block in blocks:
        rows = check(block, first_row)
        if names is not None and set(rows) != names:
            raise ValueError(f"row {first_row}: this block holds {sorted(rows)}, those before it {sorted(names)}.")
        for name, array in rows.items():
            if array.shape[1:] != shapes.setdefault(name, array.shape[1:]):
                raise ValueError(
                    f"row {first_row}: rows of {name!r} have shape {array.shape[1:]} in this block, "
                    f"{shapes[name]} before it."
                )
        names = set(rows)
        first_row += _length(rows)
        yield rows
    if first_row == 0:
        raise ValueError("the stream of data is empty: it ended before its first row.")


def progress(enabled: bool, total: int | None, name: str, unit: str) -> Any:
    """A progress bar."""
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=unit, unit_scale=True, disable=not enabled, desc=name)


def _length(rows: Mapping[str, np.ndarray]) -> int:
    return len(next(iter(rows.values())))
