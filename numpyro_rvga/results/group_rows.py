"""The last rows of each group, which a stream keeps to look at them again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from ..model.rows import Rows, num_rows, selected


class RowForm(NamedTuple):
    """The form of rows without their groups, as vectors of numbers.

    :ivar most: rows of a group. :ivar shapes: of one row's arrays, by name. :ivar dtypes: likewise.
    """

    most: int
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, np.dtype]

    @classmethod
    def of(cls, rows: Mapping[str, np.ndarray], index: str, most: int) -> RowForm:
        """``index``: the array of groups."""
        others = sorted(name for name in rows if name != index)
        return cls(most, {name: rows[name].shape[1:] for name in others}, {name: rows[name].dtype for name in others})

    @property
    def width(self) -> int:
        """Of a row."""
        return sum(math.prod(shape) for shape in self.shapes.values())

    def last(self, number: np.ndarray) -> np.ndarray:
        """Which rows are the last ones of their groups. ``number``: the group of each row, (n,)."""
        order = np.argsort(number, kind="stable")[::-1]
        backwards = number[order]
        first = np.searchsorted(-backwards, -backwards)
        kept = np.zeros(len(number), bool)
        kept[order] = np.arange(len(number)) - first < self.most
        return kept

    def packed(self, rows: Rows, number: np.ndarray, count: int) -> np.ndarray:
        """A vector for each of ``count`` groups, (count, 1 + most * width): how many rows it has, and these."""
        order = np.argsort(number, kind="stable")
        ordered = number[order]
        place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
        vectors = np.zeros((count, self.most, self.width))
        parts = [np.asarray(rows[n], np.float64).reshape(len(order), math.prod(x)) for n, x in self.shapes.items()]
        vectors[ordered, place] = np.concatenate([np.zeros((len(order), 0)), *parts], axis=1)[order]
        return np.concatenate([np.bincount(number, minlength=count)[:, None], vectors.reshape(count, -1)], axis=1)

    def unpacked(self, vectors: np.ndarray) -> tuple[Rows, np.ndarray]:
        """The rows of groups, oldest first, and the place of the group of each."""
        counts = vectors[:, 0].astype(int)
        every = vectors[:, 1:].reshape(len(vectors), self.most, self.width)
        flat = every[np.arange(self.most) < counts[:, None]]
        ends = np.cumsum([math.prod(shape) for shape in self.shapes.values()])
        pieces = np.split(flat, ends[:-1], axis=1)
        rows = {
            name: piece.reshape(-1, *shape).astype(self.dtypes[name])
            for piece, (name, shape) in zip(pieces, self.shapes.items())
        }
        return rows, np.repeat(np.arange(len(vectors)), counts)


class GroupRows(NamedTuple):
    """Rows of groups that are numbered from zero.

    :ivar rows: without their groups. :ivar number: the group of each, (n,). :ivar index: the array that the model takes
        it in.
    """

    rows: Rows
    number: np.ndarray
    index: str

    def of_piece(self, piece: slice) -> Rows | None:
        """Those of some groups, which are numbered from zero, as the model takes them; None if there are none."""
        inside = (self.number >= piece.start) & (self.number < piece.stop)
        if not inside.any():
            return None
        number = (self.number[inside] - piece.start).astype(np.int32)
        return selected(self.rows, inside) | {self.index: number}

    def kept(self, which: np.ndarray) -> GroupRows:
        """Some."""
        return self._replace(rows=selected(self.rows, which), number=self.number[which])

    def and_then(self, rows: Rows, number: np.ndarray) -> GroupRows:
        """With others after them."""
        if not num_rows(self.rows):
            return self._replace(rows=rows, number=number)
        joined = {name: np.concatenate([array, rows[name]]) for name, array in self.rows.items()}
        return self._replace(rows=joined, number=np.concatenate([self.number, number]))
