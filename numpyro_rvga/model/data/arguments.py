"""The user's data and keyword arguments: which is which, and are they fit to be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .arrays import BadData, as_data_array, declared_dtype, is_array, is_frame
from .rows import Arrays, Data, Keywords, Rows, num_rows, same

ROW = "numpyro_rvga.row"  # among a program's rows: their numbers, where the model always runs on all data
PARAMS = "numpyro_rvga.params"  # among a program's rows: the numpyro.param sites, the same for all of them
CONSTANTS = "numpyro_rvga.constants"  # likewise: what the data determine of the prior
SHARED = (PARAMS, CONSTANTS)
MISSING = (  # what to do with values that are not finite
    "Drop such rows, or pass on_bad_row='skip'; or let the model handle them: all rows at hand, with "
    "numpyro.handlers.mask(mask=jnp.isfinite(y)) around the observed site."
)


class NotRows(ValueError):
    """Data that cannot be taken row by row, and that all of them together may be of use."""


def named_rows(model: Callable, data: Data, model_kwargs: Keywords) -> Rows:
    """The data as arrays by argument name, checked.

    :raises NotRows: naming the argument, if arrays differ in length, have no leading axis, or if there are none.
    :raises ValueError: naming the argument (and the row) if arrays are not numbers that JAX can hold, or if the model
        takes no such argument.
    """
    named = {name: value for name, value in _named(model, data, model_kwargs).items() if value is not None}
    for name, value in named.items():
        if not is_array(value):
            what = _what_it_is(value)
            raise NotRows(f"data array {name!r} is {what}: pass what is not per row as a keyword argument of run().")
    rows = {name: as_data_array(name, value) for name, value in named.items()}
    if not rows:
        raise NotRows("the data hold no array: give a mapping from the model's argument names to arrays of rows.")
    check_lengths(rows)
    if not num_rows(rows):
        raise BadData(f"the data have no rows: {', '.join(rows)} are empty.")
    return rows


def check_lengths(rows: Arrays) -> None:
    """:raises NotRows: for arrays that differ in length."""
    lengths = {name: len(array) if np.ndim(array) else "none" for name, array in rows.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name}: {length}" for name, length in lengths.items())
        raise NotRows(
            f"the data arrays must share their leading axis, the rows, but their lengths are {listed}. "
            "Pass what is not per row as a keyword argument of run()."
        )


def whole_data(
    model: Callable, data: Data, model_kwargs: Keywords, *, keeps_frames: bool = False
) -> tuple[Rows, dict[str, Any]]:
    """The data as arrays of any shape by argument name, for a model that takes all of them at once; and all keyword
    arguments, with what of the data is no array.

    Arrays of JAX's stay what they are, and others are NumPy's.

    :param keeps_frames: whether frames stay frames, for a model that takes their columns by name.
    """
    arrays, keywords = {}, dict(model_kwargs)
    for name, value in _named(model, data, model_kwargs).items():
        if value is None:
            continue
        if is_array(value) and not (keeps_frames and is_frame(value)):
            array = as_data_array(name, value)
            arrays[name] = jnp.asarray(array) if isinstance(value, jax.Array) else array
        else:
            keywords[name] = value
    return arrays, keywords


def declared_dtypes(model: Callable, data: Data) -> dict[str, np.dtype]:
    """The types of arrays that come as floating-point numbers because values are missing, by argument name."""
    declared = {name: declared_dtype(value) for name, value in by_name(model, data).items()}
    return {
        name: as_data_array(name, np.zeros(1, dtype)).dtype for name, dtype in declared.items() if dtype is not None
    }


def has_frames(model: Callable, data: Data) -> bool:
    return any(map(is_frame, by_name(model, data).values()))


def whole_data_again(model: Callable, data: Data, model_kwargs: Keywords) -> Rows:
    """The arrays of :func:`whole_data`, for a model that has been run with keyword arguments, which the data may hold
    again.

    :param model_kwargs: those of the run, with what of its data was no array.
    :raises ValueError: for what is no array and not as it was in the run.
    """
    named = {name: value for name, value in by_name(model, data).items() if name in model_kwargs and value is not None}
    again = {name for name, value in named.items() if is_frame(value) or not is_array(value)}
    others = {name: value for name, value in model_kwargs.items() if name not in again}
    arrays, keywords = whole_data(model, data, others, keeps_frames=any(map(is_frame, named.values())))
    for name in sorted(again):
        if not same({name: keywords[name]}, {name: model_kwargs[name]}):
            raise BadData(
                f"{name!r} is not as it was in the run, and a posterior of a whole model holds for that value alone: "
                "give it as it was. Arrays to be replaced have to be arguments of the model themselves."
            )
    return arrays


def _what_it_is(value: object) -> str:
    if np.isscalar(value) or isinstance(value, (np.ndarray, jax.Array)):
        return "a scalar"
    if isinstance(value, (list, tuple)):
        return "not rectangular, its rows differ in shape"
    return f"a {type(value).__name__}, no array"


def _named(model: Callable, data: Data, model_kwargs: Keywords) -> dict[str, Any]:
    """:raises ValueError: for arguments that are given twice, missing, or not the model's."""
    named = by_name(model, data)
    clash = sorted(set(named) & set(model_kwargs))
    if clash:
        raise BadData(f"{clash[0]!r} is given twice: in the data and as a keyword argument of run().")
    _check_names(model, [*named, *model_kwargs])
    return named


def checked_rows(model: Callable, data: Any, model_kwargs: Keywords) -> Rows:
    """The data as arrays by argument name.

    :raises ValueError: naming the array and the row, for unequal lengths and values that are not finite.
    """
    rows = named_rows(model, data, model_kwargs)
    check_finite(rows)
    return rows


def check_finite(rows: Mapping[str, np.ndarray], first_row: int = 0, advice: str = MISSING) -> None:
    """:raises NotRows: naming the array and the first row that holds NaN or an infinite value.
    :raises BadData: likewise, for a value that is infinite in the precision of the computation."""
    for name, array in rows.items():
        bad = ~_finite(array)
        if bad.any():
            row = int(np.argmax(bad))
            if np.isfinite(array[row]).all():
                value, dtype = np.max(np.abs(array[row])), jax.dtypes.canonicalize_dtype(array.dtype)
                raise BadData(
                    f"data array {name!r} holds a value of size {value:.3g} in row {first_row + row}, too large for "
                    f"{dtype}: give it in a larger unit, call numpyro.enable_x64() first, or pass on_bad_row='skip'."
                )
            kind = "NaN" if np.isnan(array[row]).any() else "an infinite value"
            raise NotRows(f"data array {name!r} holds {kind} in row {first_row + row}. {advice}")


def row_shapes(rows: Arrays) -> dict[str, tuple[int, ...]]:
    """The shape of one row of each array."""
    return {name: tuple(np.shape(array)[1:]) for name, array in rows.items()}


def check_row_shapes(rows: Arrays, shapes: Mapping[str, tuple[int, ...]], which: str) -> None:
    """:raises ValueError: naming an array whose rows are of another shape than those that are known, and ``which``
    these are."""
    for name, shape in row_shapes(rows).items():
        if shape != shapes.get(name, shape):
            raise BadData(
                f"data array {name!r} has rows of shape {shape}, and those {which} have {shapes[name]}: give the same "
                "columns, in the same order."
            )


def finite_rows(rows: Mapping[str, np.ndarray]) -> np.ndarray:
    """Which rows hold neither NaN nor values that are infinite in the precision of the computation, (n,)."""
    return np.all([_finite(array) for array in rows.values()], axis=0)


def _finite(array: np.ndarray) -> np.ndarray:
    """Which rows of an array hold finite values only, (n,)."""
    if not array.size or not np.issubdtype(array.dtype, np.inexact):
        return np.ones(len(array), bool)
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    largest = np.finfo(dtype).max
    if np.isfinite(array.sum()) if dtype == array.dtype else array.max() <= largest and array.min() >= -largest:
        return np.ones(len(array), bool)  # finite sums have finite terms
    return np.all(np.abs(array.reshape(len(array), -1)) <= largest, axis=1)


def split_call(model: Callable, rows: Arrays, model_kwargs: Keywords) -> tuple[tuple, dict]:
    """(args, kwargs) for a call of the model: ``*args`` parameters positionally, with those before them, all others by
    name."""
    named, variadic = {**rows, **model_kwargs}, _variadic_name(model)
    numbers = {int(name[len(variadic) + 1 : -1]): name for name in rows if variadic and name.startswith(f"{variadic}[")}
    kinds = {inspect.Parameter.POSITIONAL_ONLY} | ({inspect.Parameter.POSITIONAL_OR_KEYWORD} if numbers else set())
    names = [p.name for p in _parameters(model) if p.kind in kinds and p.name in named]
    names += [numbers[number] for number in sorted(numbers)]
    return tuple(named[name] for name in names), {name: x for name, x in named.items() if name not in names}


def refuse_frames(data: Any) -> None:
    """:raises ValueError: for a DataFrame, whose columns are no arguments of the model."""
    if is_frame(data):
        raise BadData(
            f"data is a {type(data).__name__}: give its columns as the arrays that the model takes, as in "
            "{'X': frame[['a', 'b']], 'y': frame['y']}."
        )


def absent_arguments(model: Callable, given: Iterable[str]) -> list[str]:
    """The model's arguments that are not given and that are None by default."""
    given = set(given)
    return [p.name for p in _parameters(model) if p.default is None and p.name not in given]


def by_name(model: Callable, data: Data) -> dict[str, Any]:
    """The data by argument name.

    :raises ValueError: for what is neither a mapping nor a tuple of the model's positional arguments.
    """
    if isinstance(data, Mapping):
        return dict(data)
    refuse_frames(data)
    if not isinstance(data, tuple):
        raise BadData(
            f"data must be a mapping from the model's argument names to arrays, a tuple of arrays in the order of its "
            f"arguments, or an iterable of such blocks, not {type(data).__name__}."
        )
    parameters = _parameters(model)
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    variadic = _variadic_name(model)
    if len(data) > len(names) and variadic is None:
        raise BadData(f"the model takes {len(names)} positional arguments ({', '.join(names)}), {len(data)} are given.")
    names += [f"{variadic}[{i}]" for i in range(len(data) - len(names))]
    return dict(zip(names, data))


def _check_names(model: Callable, given: list[str]) -> None:
    parameters = _parameters(model)
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return
    variadic = _variadic_name(model)
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for name in given:
        if name not in names and not (variadic and name.startswith(f"{variadic}[")):
            raise BadData(
                f"run() and the model take no argument {name!r}; the model takes {', '.join(names) or 'none'}."
            )
    required = [p.name for p in parameters if p.default is p.empty and p.name in names]
    missing = [name for name in required if name not in given]
    if missing:
        raise BadData(f"the model needs {missing[0]!r}: give it in the data or as a keyword argument of run().")


def _parameters(model: Callable) -> list[inspect.Parameter]:
    while callable(inner := getattr(model, "fn", None)):  # handlers wrap the model in .fn
        model = inner
    return list(inspect.signature(model).parameters.values())


def _variadic_name(model: Callable) -> str | None:
    return next((p.name for p in _parameters(model) if p.kind == p.VAR_POSITIONAL), None)
