"""Rows that are kept from a stream: those whose Gaussian approximations are least exact, and a sample of all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from ..core.updates.state import Absorbed
from ..model.data.rows import Rows, joined, num_rows, selected

NEGLIGIBLE_ERROR = 1e-6  # nats: of a row whose Gaussian approximation is as good as exact


class KeptRows(NamedTuple):
    """Rows, their positions in the order in which they came, and the moments (n, E, ...) of their predictors when they
    became part of q."""

    priority: np.ndarray
    positions: np.ndarray
    rows: Rows
    absorbed: tuple[Absorbed, ...]


class RowMemory:
    """The rows of the highest priorities, up to a number.

    :param capacity: rows kept.
    :param least: rows of no higher priority are not kept.

    :ivar num_seen: how many rows were considered.
    """

    def __init__(self, capacity: int, least: float = -np.inf):
        self.capacity, self._least = capacity, least
        self._pieces: list[KeptRows] = []
        self._count = self.num_seen = 0

    def add(self, kept: KeptRows) -> None:
        """Keep those of the rows that are among the highest priorities so far."""
        self.num_seen += len(kept.positions)
        chosen = np.flatnonzero(kept.priority > self._least)
        if not (self.capacity and len(chosen)):
            return
        self._keep(KeptRows(*selected(tuple(kept), chosen)))
        if self._count > 2 * self.capacity:
            self._prune()

    def items(self) -> KeptRows | None:
        """The kept rows; None if there are none."""
        if not self._pieces:
            return None
        self._prune()
        return self._pieces[0]

    @property
    def holds_all(self) -> bool:
        """Whether rows went by, and every one is kept."""
        return 0 < self.num_seen == self._count <= self.capacity

    def stored(self) -> list:
        """Plain arrays from which :meth:`restore` makes this memory again."""
        if self._pieces:
            self._prune()
        pieces = [(*piece[:3], [tuple(moments) for moments in piece.absorbed]) for piece in self._pieces]
        return [self.num_seen, pieces]

    def restore(self, stored: Sequence[Any]) -> None:
        self.num_seen, pieces = stored
        for *fields, absorbed in pieces:
            self._keep(KeptRows(*fields, tuple(Absorbed(*moments) for moments in absorbed)))

    def _keep(self, kept: KeptRows) -> None:
        self._pieces.append(kept)
        self._count += len(kept.positions)

    def _prune(self) -> None:
        priority = np.concatenate([piece.priority for piece in self._pieces])
        order = np.argsort(-priority, kind="stable")[: self.capacity]
        positions = np.concatenate([piece.positions for piece in self._pieces])[order]
        rows = selected(joined([piece.rows for piece in self._pieces]), order)
        absorbed = jax.tree.map(lambda *x: np.concatenate(x)[order], *[piece.absorbed for piece in self._pieces])
        self._pieces, self._count = [], 0
        self._keep(KeptRows(priority[order], positions, rows, absorbed))
        if len(order) == self.capacity:
            self._least = priority[order[-1]]


def inexactness(absorbed: tuple[Absorbed, ...]) -> np.ndarray:
    """The error of each row's Gaussian approximations, in nats, (n,)."""
    return np.sum([np.sum(moments.error, axis=1) for moments in absorbed], axis=0)


def unranked(rows: Rows, absorbed: tuple[Absorbed, ...], offset: int) -> KeptRows:
    """Rows, with no priority yet.

    :param absorbed: of the rows, and perhaps of padding. :param offset: of the first row.
    """
    count = num_rows(rows)
    own = jax.tree.map(lambda x: np.asarray(x)[:count], absorbed)
    return KeptRows(np.zeros(count), offset + np.arange(count), rows, own)
