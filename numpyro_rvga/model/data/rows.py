"""Rows as arrays by argument name, cut and put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import numpy as np
from jax import Array

Data = Mapping[str, Any] | tuple
"""What a user gives: rows as arrays by argument name, or in the order of the model's positional arguments."""
Keywords = Mapping[str, Any]
"""The model's other arguments, by name."""
Rows = dict[str, np.ndarray]
Arrays = Mapping[str, np.ndarray | Array]
"""By name, NumPy's or JAX's."""
Tree = TypeVar("Tree")  # of arrays (n, ...)


def num_rows(rows: Arrays) -> int:
    """Zero where there are no arrays."""
    return len(next(iter(rows.values()), ()))


def common_length(arrays: Arrays) -> int | None:
    """The common length of arrays' leading axes; None if there is none."""
    lengths = {np.shape(array)[:1] for array in arrays.values()}
    return next(iter(lengths))[0] if len(lengths) == 1 and () not in lengths else None


def pad(rows: Tree, size: int, weights: np.ndarray | None = None) -> tuple[Tree, np.ndarray]:
    """A pytree of (n, ...) arrays whose last row is repeated up to ``size``, and weights (size,): zero for the repeats,
    one for rows unless they are given."""
    length = len(jax.tree.leaves(rows)[0])
    weights = np.ones(length, np.float32) if weights is None else weights
    if length == size:
        return rows, weights
    taken = np.minimum(np.arange(size), length - 1)
    return selected(rows, taken), np.concatenate([weights, np.zeros(size - length, weights.dtype)])


def selected(rows: Tree, which: np.ndarray | slice) -> Tree:
    """Rows of a pytree of (n, ...) arrays."""
    return jax.tree.map(lambda x: x[which], rows)


def linspace_indices(count: int, most: int) -> np.ndarray:
    """At most so many of ``range(count)``."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(int))


def without(rows: Rows, left_out: np.ndarray) -> Rows:
    """Rows but those of some numbers."""
    return selected(rows, np.setdiff1d(np.arange(num_rows(rows)), left_out)) if len(left_out) else rows


def in_blocks(arrays: Tree, block_size: int) -> Tree:
    """A pytree of (n, ...) arrays as (blocks, B, ...)."""
    return jax.tree.map(lambda x: x.reshape(len(x) // block_size, block_size, *x.shape[1:]), arrays)


def joined(pieces: list[Rows]) -> Rows:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}


def snapshot(keywords: Keywords) -> dict[str, Any]:
    """The keywords with copies of arrays that may be written to."""
    return jax.tree.map(lambda value: value.copy() if isinstance(value, np.ndarray) else value, dict(keywords))


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether all keyword arguments are."""
    return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)


def equal(a: Any, b: Any) -> bool:
    """Whether two values are, NaN in the same places too."""
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return same(a, b)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, (np.ndarray, jax.Array)) or isinstance(b, (np.ndarray, jax.Array)):
        a, b = np.asarray(a), np.asarray(b)
        return bool(np.array_equal(a, b, equal_nan=a.dtype.kind in "fc" and b.dtype.kind in "fc"))
    if type(a) is not type(b):
        return False
    if hasattr(a, "equals"):  # pandas and Polars compare entry by entry
        return bool(a.equals(b))
    leaves, structure = jax.tree.flatten(a)
    if not jax.tree_util.treedef_is_leaf(structure):  # as NumPyro's distributions, which do not compare themselves
        others, other_structure = jax.tree.flatten(b)
        return structure == other_structure and all(map(equal, leaves, others))
    return bool(a == b) or (a != a and b != b)  # NaN, where a value is missing, is the same as NaN
