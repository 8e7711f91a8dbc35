"""The rows that can be used, in pieces: how those that cannot be used are cut changes nothing about the others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from ..model.data.row_set import row_digests
from ..model.data.rows import Rows, num_rows, selected
from .source import RowSource

POSITION, DIGEST = "#position", "#digest"  # beside a row's arrays, whose names are identifiers


class Piece(NamedTuple):
    """Rows that a step takes.

    :ivar positions: at which the source handed them out, (n,). :ivar digests: see :func:`row_digests`, (n,).
    """

    rows: Rows
    positions: np.ndarray
    digests: np.ndarray

    @property
    def num_rows(self) -> int:
        return len(self.positions)


class Feed:
    """Rows of a source, piece by piece.

    :param source: at its position ``start``.
    :param usable: rows, position of the first -> which of them can be used, (n,); None: all.
    :param left_out: positions before ``start`` of rows that were left out, sorted.

    :ivar left_out: positions of all rows that were left out, sorted. :ivar stop: the position after the rows so far.
    """

    def __init__(
        self, source: RowSource, start: int, usable: Callable[[Rows, int], np.ndarray] | None, left_out: np.ndarray
    ):
        self._source, self._usable, self._size = source, usable, 0
        self.stop, self.left_out = start, left_out
        self._held = RowSource(lambda _: self._read())

    def take(self, size: int) -> Piece | None:
        """The next ``size`` rows that can be used, fewer at the end; None after it."""
        self._size = size
        rows = self._held.take(size)
        if rows is None:
            return None
        arrays = {name: array for name, array in rows.items() if name not in (POSITION, DIGEST)}
        return Piece(arrays, rows[POSITION], rows[DIGEST])

    def put_back(self, pieces: list[Piece], bad: np.ndarray) -> None:
        """Pieces that were taken last, in their order, without the rows at some positions, which are left out."""
        self.left_out = np.union1d(self.left_out, bad)
        for rows, positions, digests in reversed(pieces):
            self._held.put_back(
                selected({**rows, POSITION: positions, DIGEST: digests}, np.isin(positions, bad, invert=True))
            )

    def _read(self) -> Iterator[Rows]:
        """The usable rows, as many of the source at a time as are asked for."""
        while (rows := self._source.take(self._size)) is not None:
            positions = np.arange(self.stop, self.stop + num_rows(rows))
            self.stop += len(positions)
            if self._usable is not None:
                usable = self._usable(rows, self.stop - len(positions))
                self.left_out = np.concatenate([self.left_out, positions[~usable]])
                rows, positions = rows if usable.all() else selected(rows, usable), positions[usable]
                rows = self._source.as_declared(rows)
            yield {**rows, POSITION: positions, DIGEST: row_digests(rows)}
