"""A sample of each group's rows, which a stream keeps for later solves."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax
import numpy as np

from ...model.data.rows import Rows, selected

WIDE = (np.dtype(np.int64), np.dtype(np.uint64))


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
        dtypes = {n: np.dtype(np.float64) if rows[n].dtype.kind == "f" else rows[n].dtype for n in others}
        return cls(most, {name: rows[name].shape[1:] for name in others}, dtypes)

    def fitted(self, rows: Rows) -> Rows:
        """Rows of these types.

        :raises ValueError: naming an array that would not be the same.
        """
        fitted = {name: rows[name].astype(dtype) for name, dtype in self.dtypes.items()}
        for name, array in fitted.items():
            if not np.array_equal(array, rows[name]):
                raise ValueError(
                    f"data array {name!r} was of type {self.dtypes[name]} in the first rows that the stream has taken "
                    f"in, which cannot hold these values of type {rows[name].dtype}: begin with rows of that type."
                )
        return fitted

    @property
    def width(self) -> int:
        """The numbers of a row, with its key."""
        return 1 + sum(math.prod(shape) for shape in self.shapes.values())

    @property
    def packed_width(self) -> int:
        """The length of a group's vector."""
        return 1 + self.most * self.width

    def packed(self, kept: GroupRows, count: int) -> np.ndarray:
        """A vector for each of ``count`` groups, (count, 1 + most * width): how many it has had, and those kept."""
        order = np.argsort(kept.number, kind="stable")
        ordered = kept.number[order]
        place = np.arange(len(order)) - np.searchsorted(ordered, ordered)
        vectors = np.zeros((count, self.most, self.width))
        parts = [_as_numbers(kept.rows[n]).reshape(len(order), math.prod(x)) for n, x in self.shapes.items()]
        vectors[ordered, place] = np.concatenate([kept.key[:, None], *parts], axis=1)[order]
        return np.concatenate([kept.totals(count)[:, None], vectors.reshape(count, -1)], axis=1)

    def unpacked(self, vectors: np.ndarray) -> GroupRows:
        """The rows of groups, numbered by their order in ``vectors``."""
        totals = vectors[:, 0].astype(int)
        counts = np.minimum(totals, self.most)
        every = vectors[:, 1:].reshape(len(vectors), self.most, self.width)
        flat = every[np.arange(self.most) < counts[:, None]]
        ends = 1 + np.cumsum([0, *(math.prod(shape) for shape in self.shapes.values())])
        pieces = np.split(flat, ends[:-1], axis=1)[1:]
        rows = {
            name: _from_numbers(piece.reshape(-1, *shape), self.dtypes[name])
            for piece, (name, shape) in zip(pieces, self.shapes.items())
        }
        number = np.repeat(np.arange(len(vectors)), counts)
        return GroupRows(rows, number, flat[:, 0], (totals / np.maximum(counts, 1))[number])


class GroupRows(NamedTuple):
    """Rows of groups that are numbered from zero.

    :ivar rows: without their groups. :ivar number: the group of each, (n,). :ivar key: a random number of each, (n,).
    :ivar multiplicity: how many rows each represents, (n,).
    """

    rows: Rows
    number: np.ndarray
    key: np.ndarray
    multiplicity: np.ndarray

    def totals(self, count: int) -> np.ndarray:
        """How many rows each group has had, (count,)."""
        return np.rint(np.bincount(self.number, self.multiplicity, minlength=count))

    def counts(self, count: int) -> np.ndarray:
        """How many there are of each group, (count,)."""
        return np.bincount(self.number, minlength=count)

    def weights(self, count: int) -> np.ndarray:
        """The multiplicity of each group's rows, (count,)."""
        return self.totals(count) / np.maximum(self.counts(count), 1)

    def alone(self) -> GroupRows:
        """All of multiplicity one."""
        return self._replace(multiplicity=np.ones(len(self.number)))

    def sampled(self, most: int, count: int) -> GroupRows:
        """The ``most`` rows of smallest keys of each of ``count`` groups: a random sample of all rows that it has
        had."""
        order = np.lexsort((self.key, self.number))
        ordered = self.number[order]
        kept = np.sort(order[np.arange(len(order)) - np.searchsorted(ordered, ordered) < most])
        totals, number = self.totals(count), self.number[kept]
        multiplicity = totals[number] / np.minimum(totals[number], most)
        return GroupRows(selected(self.rows, kept), number, self.key[kept], multiplicity)

    def at(self, indices: np.ndarray) -> GroupRows:
        """With group i numbered ``indices[i]``."""
        return self._replace(number=indices[self.number])

    def and_then(self, new: GroupRows | None) -> GroupRows:
        """These rows and new ones."""
        if new is None or not len(self.number):
            return new or self
        return jax.tree.map(lambda *both: np.concatenate(both), self, new)


def new_rows(rows: Rows, number: np.ndarray, rng: np.random.Generator) -> GroupRows:
    """Rows of multiplicity one, with random keys."""
    return GroupRows(rows, number, rng.random(len(number)), np.ones(len(number)))


def _as_numbers(array: np.ndarray) -> np.ndarray:
    """In double precision, or of wide integers the bits: they may be too large for that."""
    array = np.asarray(array)
    return np.ascontiguousarray(array).view(np.float64) if array.dtype in WIDE else array.astype(np.float64)


def _from_numbers(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    return np.ascontiguousarray(numbers).view(dtype) if dtype in WIDE else numbers.astype(dtype)
