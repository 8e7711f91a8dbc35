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
        return np.shape(a) == np.shape(b) and _arrays_equal(np.asarray(a), np.asarray(b))
    if type(a) is not type(b):
        return False
    if hasattr(a, "equals"):  # pandas and Polars compare entry by entry
        return bool(a.equals(b))
    return bool(a == b) or (a != a and b != b)  # NaN, where a value is missing, is the same as NaN


def _arrays_equal(a: np.ndarray, b: np.ndarray) -> bool:
    may_be_missing = a.dtype.kind in "fc" and b.dtype.kind in "fc"
    return bool(np.array_equal(a, b, equal_nan=may_be_missing))
