"""Arrays by which a model cannot index as it means to: not of integers, of one column, or out of range."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...core.compilation import jit_once
from ...core.jaxprs.interpret import indexings
from ..data.arrays import BadData
from ..data.rows import Arrays, Keywords
from ..handlers.failures import needs_numbers
from ..handlers.tracing import run_model, sample_sites
from .row_checks import outside_message

NO_INTEGER = "Indexer must have integer or boolean type"


class _MoreDistributions(ValueError):
    """A site has more distributions than outcomes."""

    def __init__(self, site: str, outcomes: tuple[int, ...], distributions: tuple[int, ...]):
        super().__init__(f"site {site!r}: {outcomes} outcomes and {distributions} distributions")
        self.outcomes = outcomes


def explained(model: Callable, rows: Arrays, model_kwargs: Keywords, error: Exception) -> BadData | None:
    """An explanation of the error of a model that cannot be run on its rows; None unless other integers or columns mend
    it."""
    forms = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in rows.items()}

    def failure(changed: Mapping[str, jax.ShapeDtypeStruct]) -> Exception | None:
        try:
            jax.eval_shape(lambda rows: _run(model, rows, model_kwargs), {**forms, **changed})
        except Exception as other:  # a model may fail in any way: this one is asked only whether it still does
            return other
        return None

    if NO_INTEGER in str(error):
        floats = {n: jax.ShapeDtypeStruct(f.shape, np.int32) for n, f in forms.items() if f.dtype.kind == "f"}
        for name in floats:
            others = {n: form for n, form in floats.items() if n != name}
            if NO_INTEGER in str(failure(others)) and NO_INTEGER not in str(failure(floats)):
                return BadData(_no_integers(name, rows[name]))
    why = None if needs_numbers(error) else failure({})
    if why is not None and not needs_numbers(why):
        for name, form in forms.items():
            if isinstance(why, _MoreDistributions) and why.outcomes == form.shape:
                continue  # the outcomes: the model's own error names them
            if form.shape[1:] == (1,) and failure({name: jax.ShapeDtypeStruct(form.shape[:1], form.dtype)}) is None:
                return BadData(
                    f"data array {name!r} has shape {form.shape}, with which the model fails ({why}), and without "
                    f"the second axis it does not: give {{{name!r}: {name}[:, 0]}}."
                )
    return None


def _run(model: Callable, rows: Arrays, model_kwargs: Keywords) -> int:
    """:raises _MoreDistributions: besides what the model raises."""
    for name, site in sample_sites(*run_model(model, rows, model_kwargs)).items():
        outcomes = jnp.shape(site.value)[: jnp.ndim(site.value) - len(site.fn.event_shape)]
        if site.is_observed and np.broadcast_shapes(outcomes, site.fn.batch_shape) != outcomes:
            raise _MoreDistributions(name, outcomes, site.fn.batch_shape)
    return 0


def _no_integers(name: str, array: Any) -> str:
    array = np.asarray(array)
    column = "[:, 0]" if array.shape[1:] == (1,) else ""
    message = f"the model indexes by data array {name!r}, which has dtype {array.dtype}, and indices are integers"
    fractional = np.argwhere(array != np.round(array))
    if len(fractional):
        place = tuple(fractional[0])
        return (
            f"{message}: row {place[0]} holds {array[place]}. Number the groups: "
            f"{{{name!r}: np.unique({name}{column}, return_inverse=True)[1]}}."
        )
    return f"{message}: give {{{name!r}: {name}{column}.astype(int)}}."


def check_whole_indices(parameters: Callable[[], Any], rows: Arrays, first_row: int) -> None:
    """:raises BadData: naming the row, if an array of integers indexes what is not there.

    :param parameters: those of the observed sites of a whole program.
    """
    arrays = {name: np.asarray(array) for name, array in rows.items() if np.asarray(array).dtype.kind in "iu"}
    if not arrays:
        return
    sizes: list[tuple[int, ...]] = []

    def are_inside():
        all_indexings = indexings(parameters)
        sizes[:] = [indexing.sizes for indexing in all_indexings]
        return [indexing.inside for indexing in all_indexings]

    for inside, lengths in zip(jit_once(are_inside)(), sizes):
        for axis, size in enumerate(lengths):
            _check_inside(arrays, np.asarray(inside)[..., axis], size, first_row)


def _check_inside(arrays: Mapping[str, np.ndarray], inside: np.ndarray, size: int, first_row: int) -> None:
    if inside.all():
        return
    for name, array in arrays.items():
        within = (array >= -size) & (array < size)
        if within.shape == inside.shape and np.array_equal(within, inside):
            row = int(np.argwhere(~within)[0][0])
            raise BadData(outside_message(first_row + row, f"{name!r} holds {array[row]}", size))
