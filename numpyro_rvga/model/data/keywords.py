"""What a model is called with besides arrays: kept, and compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .rows import Keywords


def snapshot(keywords: Keywords) -> dict[str, Any]:
    """With copies of arrays that may be written to."""
    return jax.tree.map(lambda value: value.copy() if isinstance(value, np.ndarray) else value, dict(keywords))


def same(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether all keyword arguments are."""
    return a.keys() == b.keys() and all(_equal(a[k], b[k]) for k in a)


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return same(a, b)
    if isinstance(a, (list, tuple)) and type(a) is type(b):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, (np.ndarray, jax.Array)) or isinstance(b, (np.ndarray, jax.Array)):
        return np.shape(a) == np.shape(b) and bool(np.array_equal(a, b))
    if type(a) is not type(b):
        return False
    return bool(a.equals(b)) if hasattr(a, "equals") else bool(a == b)  # pandas and Polars compare entry by entry
