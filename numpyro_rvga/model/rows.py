"""Rows as arrays by argument name, cut and put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

Rows = dict[str, np.ndarray]


def num_rows(rows: Mapping[str, Any]) -> int:
    return len(next(iter(rows.values())))


def pad(rows: Rows, size: int, weights: np.ndarray | None = None) -> tuple[Rows, np.ndarray]:
    """Rows repeated up to ``size``, and weights (size,): zero for the repeats, one for rows unless they are given."""
    length = num_rows(rows)
    weights = np.ones(length, np.float32) if weights is None else weights
    if length == size:
        return rows, weights
    taken = np.minimum(np.arange(size), length - 1)
    return permuted(rows, taken), np.concatenate([weights, np.zeros(size - length, weights.dtype)])


def permuted(rows: Rows, order: np.ndarray) -> Rows:
    return {name: array[order] for name, array in rows.items()}


def in_blocks(arrays: Any, block_size: int) -> Any:
    """A pytree of (n, ...) arrays as (blocks, B, ...)."""
    return jax.tree.map(lambda x: x.reshape(-1, block_size, *x.shape[1:]), arrays)


def joined(pieces: list[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
