"""Which rows they were: digests that distinguish sets of rows, whatever their order and however they are cut."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from .rows import Rows, num_rows, selected

GOLDEN = 0x9E3779B97F4A7C15
MIX = np.uint64(0xD6E8FEB86659FD93)
HALF = np.uint64(32)
PIECE = 2**16  # numbers that are worked on at a time, to stay in the processor's cache
LARGEST_SHARE = 0.5  # of distinct rows among all: with more, leaving out the others saves less than it costs


class RowSet(NamedTuple):
    """Rows, by what they hold: the sum of a 64-bit digest of each. Sets are added, and taken away, by their sums.

    A row's digest is a sum of its words, each times an odd number of its own, modulo 2^64, which is then mixed: it
    guards against mistakes, not against forgery.
    """

    num_rows: int = 0
    digest: int = 0

    def __add__(self, other: RowSet) -> RowSet:  # ty: ignore[incompatible-method-override]
        return RowSet(self.num_rows + other.num_rows, (self.digest + other.digest) % 2**64)

    def with_rows(self, digests: np.ndarray) -> RowSet:
        """The set with rows of these digests (n,) too."""
        return self + RowSet(len(digests), int(np.sum(digests, dtype=np.uint64)))


def row_set(rows: Mapping[str, np.ndarray]) -> RowSet:
    """The set of all these rows."""
    return RowSet().with_rows(row_digests(rows))


def total(sets: Iterable[RowSet]) -> RowSet:
    return sum(sets, RowSet())


def row_digests(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """A digest of what each row holds, (n,) 64-bit numbers."""
    digests = np.zeros((), np.uint64)
    for name in sorted(rows):
        array = np.asarray(rows[name])
        digests = digests + _mixed(_words_digest(array) + _salt(name, array))
    return _mixed(digests)


def _words_digest(array: np.ndarray) -> np.ndarray:
    words = np.ascontiguousarray(array).reshape(len(array), math.prod(array.shape[1:])).view(np.uint8)
    size = next(size for size in (8, 4, 2, 1) if words.shape[1] % size == 0)
    words = words.view(f"u{size}")
    keys = _mixed(np.arange(1, words.shape[1] + 1, dtype=np.uint64) * np.uint64(GOLDEN)) | np.uint64(1)
    digests = np.empty(len(words), np.uint64)
    length = max(PIECE // max(words.shape[1], 1), 1)
    for start in range(0, len(words), length):
        piece = words[start : start + length].astype(np.uint64)
        if size == 8:
            piece ^= piece >> HALF  # the low bits of most floating-point numbers are zero
        digests[start : start + length] = np.einsum("ij,j->i", piece, keys)
    return digests


def _salt(name: str, array: np.ndarray) -> np.uint64:
    text = repr((name, array.dtype.str, array.shape[1:]))
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], np.uint64)[0]


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Every bit of the result depends on every bit of the number, one to one."""
    for _ in range(2):
        numbers = (numbers ^ (numbers >> HALF)) * MIX
    return numbers ^ (numbers >> HALF)


def num_distinct(rows: Rows, most: int) -> int:
    """The number of distinct rows, or that of all if more than ``most`` are distinct."""
    count = 0
    for stop in sorted({min(2 * most, num_rows(rows)), num_rows(rows)}):  # the first of many rows often tell already
        count = len(np.unique(row_digests(selected(rows, slice(stop)))))
        if count > most:
            return num_rows(rows)
    return count


def once_each(rows: Rows, weights: np.ndarray) -> tuple[Rows, np.ndarray]:
    """Each distinct row once, in order of appearance, with the sum of the weights of all that are equal to it: a sum
    over rows is the same. Rows of which more than half are distinct stay as they are.

    :param rows: (n, ...) arrays. :param weights: (n,).
    """
    if not rows:
        return rows, weights
    _, first, which = np.unique(row_digests(rows), return_index=True, return_inverse=True)
    order = np.argsort(first)
    first, which = first[order], np.argsort(order)[which]
    if len(first) > LARGEST_SHARE * len(weights):
        return rows, weights
    once = selected(rows, first)
    if not all(np.array_equal(array, once[name][which], equal_nan=True) for name, array in rows.items()):
        return rows, weights  # two rows share a digest by chance
    return once, np.bincount(which, weights, len(first)).astype(weights.dtype)
