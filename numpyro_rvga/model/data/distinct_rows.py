"""Rows that occur several times, as where outcomes and predictors are categories: each once, and how often."""

from __future__ import annotations

import numpy as np

from .row_set import row_digests
from .rows import Rows, num_rows, selected

LARGEST_SHARE = 0.5  # of distinct rows among all: with more, leaving out the others saves less than it costs


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
