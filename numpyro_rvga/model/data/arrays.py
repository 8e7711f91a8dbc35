"""The user's arrays as NumPy arrays that mean the same in JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer

NUMERIC_KINDS = "biuf"
ADVICE = {
    "OSUT": " Encode categories as integers.",
    "mM": " Convert times to numbers, counted from a near origin: (time - time.min()) / np.timedelta64(1, 'D').",
}  # by the kinds of objects and text, and of times


class BadData(ValueError):
    """Data that are of no use to any model."""


def is_array(value: Any) -> bool:
    """Whether there are rows: mappings, lists of arrays of several lengths or types, frames with columns of text, text
    and numbers have none."""
    try:
        if isinstance(value, (list, tuple)) and value and np.ndim(value[0]) and len(set(map(_kind_of, value))) > 1:
            return False
        return np.ndim(value) > 0 and not (is_frame(value) and _numeric("", value).dtype.kind not in NUMERIC_KINDS)
    except ValueError:  # not rectangular
        return False


def _kind_of(value: Any) -> str | None:
    """The kind of an array's numbers; None for what is no array."""
    return getattr(getattr(value, "dtype", None), "kind", None)


def is_frame(value: Any) -> bool:
    """Whether a model may take its columns by name."""
    return hasattr(value, "columns") and hasattr(value, "to_numpy")


def as_data_array(name: str, value: Any) -> np.ndarray:
    """An array of numbers.

    Integers of fewer than 32 bits are widened, and so are unsigned ones, so that no arithmetic in the model wraps.
    Masked and missing entries become NaN. Floating-point numbers are of 32 or 64 bits, in the machine's byte order.

    :param name: of the argument, for messages.
    :param value: anything that NumPy, pandas or Polars take for an array.
    :raises ValueError: naming the argument, for what is traced, not numeric or not rectangular, and the row of an
        integer that JAX would wrap or that is masked.
    """
    if isinstance(value, Tracer):
        raise BadData(
            f"data array {name!r} is traced by jax.jit, jax.grad or jax.vmap, and its values are read here: call run() "
            "outside of these. For steps inside them there is update()."
        )
    array = _in_own_types(_unmasked(name, _numeric(name, value)))
    if array.dtype.kind not in NUMERIC_KINDS:
        advice = next((advice for kinds, advice in ADVICE.items() if array.dtype.kind in kinds), "")
        raise BadData(f"data array {name!r} has dtype {array.dtype}; numbers are needed.{advice}")
    return _widened(name, array)


def _numeric(name: str, value: Any) -> np.ndarray:
    """As NumPy reads it; columns of several numeric types, or with missing values, as floating-point numbers."""
    try:
        array = value if isinstance(value, np.ma.MaskedArray) else np.asarray(value)
    except ValueError as error:
        raise BadData(f"data array {name!r} is not rectangular: its rows differ in shape.") from error
    kinds = _kinds_of_columns(value)
    if array.dtype.kind != "O" or not kinds or not kinds <= set(NUMERIC_KINDS):
        return array
    complete = not np.asarray(value.isna()).any()
    declared = declared_dtype(value)
    if complete and declared is not None:
        return value.to_numpy(dtype=declared)
    return value.to_numpy(dtype=np.float64, na_value=np.nan)


def _kinds_of_columns(value: Any) -> set[str]:
    """The kinds of numbers that the columns of a frame hold, or a column; empty for others."""
    dtypes = getattr(value, "dtypes", None)  # of a DataFrame one a column, of a Series its own
    if dtypes is None or not hasattr(value, "to_numpy"):
        return set()
    columns = list(dtypes) if hasattr(dtypes, "__iter__") else [dtypes]
    return {getattr(dtype, "kind", "O") for dtype in columns}


def declared_dtype(value: Any) -> np.dtype | None:
    """What the numbers of a frame's integer or boolean columns are where none is missing; None for others."""
    kinds = _kinds_of_columns(value)
    if kinds == {"b"}:
        return np.dtype(bool)
    return np.dtype(np.int64) if kinds and kinds <= set("iu") else None


def _unmasked(name: str, array: np.ndarray) -> np.ndarray:
    if not isinstance(array, np.ma.MaskedArray):
        return array
    if not np.ma.is_masked(array):
        return array.data
    if array.dtype.kind == "f":
        return array.filled(np.nan)
    row = int(np.argwhere(np.ma.getmaskarray(array))[0][0])
    raise BadData(
        f"data array {name!r} is masked in row {row}, and integers have no value for what is missing: drop such rows, "
        "or fill them and mask them in the model with numpyro.handlers.mask."
    )


def _in_own_types(array: np.ndarray) -> np.ndarray:
    """Numbers of JAX's narrow types, as bfloat16, in NumPy's, and all in the machine's byte order."""
    if array.dtype.kind == "V" and array.dtype.names is None:
        wide = next((wide for wide in (np.float32, np.int32) if _is_narrow(array.dtype, wide)), None)
        return array if wide is None else array.astype(wide)
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def _is_narrow(dtype: np.dtype, wide: type) -> bool:
    return jnp.issubdtype(dtype, np.floating if wide is np.float32 else np.integer)


def _widened(name: str, array: np.ndarray) -> np.ndarray:
    kind, size = array.dtype.kind, array.dtype.itemsize
    if kind == "f":
        return array if size in (4, 8) else array.astype(np.float32 if size < 4 else np.float64)
    if kind == "b" or (kind == "i" and size == 4):
        return array
    if size < 4:
        return array.astype(np.int32)
    largest = np.iinfo(jax.dtypes.canonicalize_dtype(np.int64))
    wraps = (array > largest.max) | (array < largest.min)
    if wraps.any():
        row = tuple(np.argwhere(wraps)[0])
        raise BadData(
            f"data array {name!r} holds {array[row]} in row {row[0]}, which JAX would wrap to {largest.bits} bits. "
            "Call numpyro.enable_x64() first, count from a later origin or in a larger unit, or give floating-point "
            "numbers."
        )
    return array if kind == "i" else array.astype(largest.dtype)


def as_dtype(array: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Numbers in floating point in a type of integers or booleans, if they can be: whole ones, or zeros and ones."""
    if array.dtype.kind != "f" or dtype.kind not in "biu" or not np.isfinite(array).all():
        return array
    converted = array.astype(dtype)
    return converted if (converted == array).all() else array


def as_jax_array(name: str, value: Any) -> Array:
    """The same for JAX, whose arrays may be traced and are then widened only."""
    if not isinstance(value, Array):
        return jnp.asarray(as_data_array(name, value))
    narrow, dtype = value.dtype.itemsize < 4, value.dtype
    if narrow and jnp.issubdtype(dtype, jnp.integer):
        return value.astype(jnp.int32)
    return value.astype(jnp.float32) if narrow and jnp.issubdtype(dtype, jnp.floating) else value


def is_equal(a: object, b: object) -> bool:
    """Whether two arrays hold the same in the lower of their precisions, NaN in the same places too."""
    a, b = np.asarray(a), np.asarray(b)
    if not (a.dtype.kind == "f" and b.dtype.kind == "f"):
        return np.array_equal(a, b)
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return np.array_equal(a.astype(dtype), b.astype(dtype), equal_nan=True)
