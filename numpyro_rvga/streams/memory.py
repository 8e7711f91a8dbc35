"""Rows that are kept while a stream goes by: those that one pass does worst by, and a sample of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.recursion import Absorbed
from ..model.rows import Rows, joined, num_rows, selected

NEGLIGIBLE_ERROR = 1e-6  # nats: of a row whose Gaussian site is as good as exact


class Kept(NamedTuple):
    """Rows, their places in the order in which they came, and how q saw them when it took them in (n, E, ...)."""

    priority: np.ndarray
    places: np.ndarray
    rows: Rows
    absorbed: tuple[Absorbed, ...]


class RowMemory:
    """The rows of the highest priorities: bounded, filled while the data go by.

    :param capacity: rows kept.
    :param least: rows of no higher priority are not kept.

    :ivar capacity: rows kept. :ivar num_offered: how many rows went by.
    """

    def __init__(self, capacity: int, least: float = -np.inf):
        self.capacity, self._least = capacity, least
        self._pieces: list[Kept] = []
        self._count = self.num_offered = 0

    def offer(self, kept: Kept) -> None:
        """Consider rows."""
        self.num_offered += len(kept.places)
        chosen = np.flatnonzero(kept.priority > self._least)
        if not (self.capacity and len(chosen)):
            return
        self._keep(Kept(*selected(tuple(kept), chosen)))
        if self._count > 2 * self.capacity:
            self._prune()

    def contents(self) -> Kept | None:
        """What is kept; None if there is nothing."""
        if not self._pieces:
            return None
        self._prune()
        return self._pieces[0]

    @property
    def holds_all(self) -> bool:
        """Whether rows went by, and every one is kept."""
        return 0 < self.num_offered == self._count <= self.capacity

    def stored(self) -> list:
        """Plain arrays from which :meth:`restore` makes this memory again."""
        if self._pieces:
            self._prune()
        pieces = [(*piece[:3], [tuple(moments) for moments in piece.absorbed]) for piece in self._pieces]
        return [self.num_offered, pieces]

    def restore(self, stored: Sequence[Any]) -> None:
        self.num_offered, pieces = stored
        for *fields, absorbed in pieces:
            self._keep(Kept(*fields, tuple(Absorbed(*moments) for moments in absorbed)))

    def _keep(self, kept: Kept) -> None:
        self._pieces.append(kept)
        self._count += len(kept.places)

    def _prune(self) -> None:
        priority = np.concatenate([piece.priority for piece in self._pieces])
        order = np.argsort(-priority, kind="stable")[: self.capacity]
        places = np.concatenate([piece.places for piece in self._pieces])[order]
        rows = selected(joined([piece.rows for piece in self._pieces]), order)
        absorbed = jax.tree.map(lambda *x: np.concatenate(x)[order], *[piece.absorbed for piece in self._pieces])
        self._pieces, self._count = [], 0
        self._keep(Kept(priority[order], places, rows, absorbed))
        if len(order) == self.capacity:
            self._least = priority[order[-1]]


def inexactness(absorbed: tuple[Absorbed, ...]) -> np.ndarray:
    """How many nats the sites of each row may be off, (n,)."""
    return sum(moments.error.sum(axis=1) for moments in absorbed)


def taken_in(rows: Rows, absorbed: tuple[Absorbed, ...], place: int) -> Kept:
    """Rows, with no priority yet.

    :param absorbed: of the rows, and perhaps of padding. :param place: of the first row.
    """
    count = num_rows(rows)
    own = jax.tree.map(lambda x: np.asarray(x)[:count], absorbed)
    return Kept(np.zeros(count), place + np.arange(count), rows, own)
