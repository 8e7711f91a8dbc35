"""The rows that can be used, in pieces: how those that cannot be used are cut changes nothing about the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ..model.row_set import row_digests
from ..model.rows import Rows, joined, num_rows, selected
from .source import NOTHING, RowSource

Check = Callable[[Rows], np.ndarray]


class Taken(NamedTuple):
    """Rows that a step takes.

    :ivar places: at which the source handed them out, (n,). :ivar digests: see :func:`row_digests`, (n,).
    :ivar left_out: places up to ``stop`` of rows that were left out since the piece before, sorted.
    :ivar stop: the place after these rows.
    """

    rows: Rows
    places: np.ndarray
    digests: np.ndarray
    left_out: np.ndarray
    stop: int

    @property
    def num_rows(self) -> int:
        return len(self.places)

    def without(self, bad: np.ndarray) -> Taken:
        """The others. ``bad``: indices of rows."""
        kept = np.setdiff1d(np.arange(self.num_rows), bad)
        left_out = np.union1d(self.left_out, self.places[bad])
        return Taken(*selected((self.rows, self.places, self.digests), kept), left_out, self.stop)

    def split(self, size: int) -> tuple[Taken, Taken]:
        """The first rows, and the rest."""
        stop = int(self.places[size])
        before, rest = self.left_out < stop, self.left_out >= stop
        arrays = self.rows, self.places, self.digests
        first = Taken(*selected(arrays, slice(size)), self.left_out[before], stop)
        return first, Taken(*selected(arrays, slice(size, None)), self.left_out[rest], self.stop)


class Feed:
    """Rows of a source, piece by piece.

    :param source: at its place ``start``.
    :param usable: rows -> which of them can be used, (n,); None: all.
    """

    def __init__(self, source: RowSource, start: int, usable: Check | None):
        self._source, self._place, self._usable = source, start, usable
        self._held: deque[Taken] = deque()

    def take(self, size: int) -> Taken | None:
        """The next ``size`` rows that can be used, fewer at the end; None after it."""
        pieces: list[Taken] = []
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

    def put_back(self, pieces: list[Taken]) -> None:
        """Pieces that were taken last, in their order."""
        self._held.extendleft(reversed(pieces))

    def _read(self, size: int) -> Taken | None:
        rows = self._source.take(size)
        if rows is None:
            return None
        start, count = self._place, num_rows(rows)
        self._place += count
        places = np.arange(start, self._place)
        if self._usable is None:
            return Taken(rows, places, row_digests(rows), NOTHING, self._place)
        usable = self._usable(rows)
        if not usable.all():
            rows = selected(rows, usable)
        rows = self._source.as_declared(rows)
        return Taken(rows, places[usable], row_digests(rows), places[~usable], self._place)


def _together(pieces: list[Taken]) -> Taken:
    if len(pieces) == 1:
        return pieces[0]
    some = [piece for piece in pieces if piece.num_rows] or pieces[:1]
    places, digests, left_out = (
        np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("places", "digests", "left_out")
    )
    return Taken(joined([piece.rows for piece in some]), places, digests, left_out, pieces[-1].stop)
