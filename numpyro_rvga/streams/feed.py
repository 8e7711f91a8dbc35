"""The rows that can be used, in pieces: how those that cannot be used are cut changes nothing about the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..model.data.row_set import row_digests
from ..model.data.rows import Rows, joined, num_rows, selected
from .source import NOTHING, RowSource

Check = Callable[[Rows], np.ndarray]


class Piece(NamedTuple):
    """Rows that a step takes.

    :ivar positions: at which the source handed them out, (n,). :ivar digests: see :func:`row_digests`, (n,).
    :ivar left_out: positions up to ``stop`` of rows that were left out since the piece before, sorted.
    :ivar stop: the position after these rows.
    """

    rows: Rows
    positions: np.ndarray
    digests: np.ndarray
    left_out: np.ndarray
    stop: int

    @property
    def num_rows(self) -> int:
        return len(self.positions)

    def without(self, bad: np.ndarray) -> Piece:
        """The others. ``bad``: indices of rows."""
        kept = np.setdiff1d(np.arange(self.num_rows), bad)
        left_out = np.union1d(self.left_out, self.positions[bad])
        return Piece(*selected((self.rows, self.positions, self.digests), kept), left_out, self.stop)

    def split(self, size: int) -> tuple[Piece, Piece]:
        """The first rows, and the rest."""
        stop = int(self.positions[size])
        before, rest = self.left_out < stop, self.left_out >= stop
        arrays = self.rows, self.positions, self.digests
        first = Piece(*selected(arrays, slice(size)), self.left_out[before], stop)
        return first, Piece(*selected(arrays, slice(size, None)), self.left_out[rest], self.stop)


class Feed:
    """Rows of a source, piece by piece.

    :param source: at its position ``start``.
    :param usable: rows -> which of them can be used, (n,); None: all.
    """

    def __init__(self, source: RowSource, start: int, usable: Check | None):
        self._source, self._position, self._usable = source, start, usable
        self._held: deque[Piece] = deque()

    def take(self, size: int) -> Piece | None:
        """The next ``size`` rows that can be used, fewer at the end; None after it."""
        pieces: list[Piece] = []
        missing = size
        while missing:
            piece = self._held.popleft() if self._held else self._read(size)
            if piece is None:
                break
            if piece.num_rows > missing:
                piece, rest = piece.split(missing)
                self._held.appendleft(rest)
            pieces.append(piece)
            missing -= piece.num_rows
        return _together(pieces) if pieces else None

    def put_back(self, pieces: list[Piece]) -> None:
        """Pieces that were taken last, in their order."""
        self._held.extendleft(reversed(pieces))

    def _read(self, size: int) -> Piece | None:
        """The next ``size`` rows of the source, without those that cannot be used."""
        rows = self._source.take(size)
        if rows is None:
            return None
        start, count = self._position, num_rows(rows)
        self._position += count
        positions = np.arange(start, self._position)
        if self._usable is None:
            return Piece(rows, positions, row_digests(rows), NOTHING, self._position)
        usable = self._usable(rows)
        if not usable.all():
            rows = selected(rows, usable)
        rows = self._source.as_declared(rows)
        return Piece(rows, positions[usable], row_digests(rows), positions[~usable], self._position)


def _together(pieces: list[Piece]) -> Piece:
    if len(pieces) == 1:
        return pieces[0]
    some = [piece for piece in pieces if piece.num_rows] or pieces[:1]
    positions, digests, left_out = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("positions", "digests", "left_out")
    )
    return Piece(joined([piece.rows for piece in some]), positions, digests, left_out, pieces[-1].stop)
