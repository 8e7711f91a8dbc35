"""The rows that one pass does worst by, kept for a last solve."""

from __future__ import annotations

import jax
import numpy as np

from ..core.recursion import Sites
from ..model.rows import Rows, joined, num_rows, selected

NEGLIGIBLE_ERROR = 1e-6  # nats: of a row whose Gaussian site is as good as exact


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
        self._keep(error[chosen], *selected((rows, jax.tree.map(np.asarray, sites)), chosen))
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

    def restore(self, stored: list) -> None:
        for error, rows, sites in stored:
            self._keep(error, rows, tuple(Sites(*site) for site in sites))

    def _keep(self, error: np.ndarray, rows: Rows, sites: tuple) -> None:
        self._pieces.append((error, rows, sites))
        self._count += len(error)

    def _prune(self) -> None:
        errors, rows, sites = zip(*self._pieces)
        error = np.concatenate(errors)
        order = np.argsort(-error, kind="stable")[: self._capacity]
        kept = jax.tree.map(lambda *x: np.concatenate(x)[order], *sites)
        self._pieces, self._count = [], 0
        self._keep(error[order], selected(joined(list(rows)), order), kept)
        if len(order) == self._capacity:
            self._least = error[order[-1]]
