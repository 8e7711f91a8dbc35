"""Is each row one that the model can take? Questions that are compiled once and asked of every block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.compilation import Compiled, full_precision, jit, jit_once
from ...core.expectations.by_nodes import power_of_two
from ...core.jaxprs.interpret import depends_on, indexings
from ..data.arrays import BadData
from ..data.rows import Arrays, num_rows
from ..handlers.tracing import base_distribution
from .bound_model import BoundModel

SUPPORT_PIECE = 2**16
Message = Callable[[Arrays, int, list[int], int], str]


class RowCheck:
    """A question about each row, compiled once, for pieces of a few fixed sizes.

    :param question: row -> array of bool, of any shape: true if all is well.
    :param message: rows, a row among them where it is not, and the place in its answer -> what is wrong, given the
        number of the row in the data.
    """

    @full_precision()  # as where it is asked: then it is traced once
    def __init__(self, program: BoundModel, question: Callable[[dict], Array], message: Message):
        traced_once, example = jit(question), program.example_row
        self.arrays = sorted(depends_on(lambda row: {"answer": traced_once(row)}, example)["answer"])
        self._message, self._shape = message, jax.eval_shape(traced_once, example).shape

        @Compiled
        def many(arrays):
            return jax.vmap(lambda row: traced_once({**example, **{n: v[None] for n, v in row.items()}}))(arrays)

        self._many = many

    def __call__(self, rows: Mapping[str, np.ndarray], first_row: int) -> None:
        """:raises ValueError: naming site or array, and row, if all is not well."""
        if not rows.keys() >= set(self.arrays):  # rows to predict may lack what the model takes None for
            return
        inside = self.answers(rows)()
        if not inside.all():
            row, *place = np.argwhere(~inside)[0].tolist()
            raise ValueError(self._message(rows, row, place, first_row + row))

    def answers(self, rows: Arrays) -> Callable[[], np.ndarray]:
        """Start to ask; what is returned waits for the answers, (n, ...)."""
        total = num_rows(rows)
        if not self.arrays:
            return lambda: np.ones((total, *self._shape), bool)
        size = min(SUPPORT_PIECE, power_of_two(total))
        starts = range(0, total, size)
        taken = [np.minimum(np.arange(start, start + size), total - 1) for start in starts]
        answers = [self._many({name: rows[name][places] for name in self.arrays}) for places in taken]
        return lambda: np.concatenate([np.asarray(x) for x in answers])[:total]

    def begin(self, rows: Arrays) -> Callable[[], np.ndarray]:
        """Start to ask; what is returned waits for the answer: with which rows all is well, (n,)."""
        waiting, total = self.answers(rows), num_rows(rows)
        return lambda: np.all(waiting().reshape(total, -1), axis=1)


def support_check(program: BoundModel, site: str) -> RowCheck:
    """Are a site's observed values in its distribution's support?"""

    def message(rows: Arrays, row: int, place: list[int], number: int) -> str:
        return _support_message(program, site, rows, row, number - row)

    return RowCheck(program, lambda row: jnp.all(_elements_inside(program, site, row)), message)


def index_check(program: BoundModel, parameters: Callable[[dict], Any]) -> RowCheck:
    """Do the rows index what there is?

    :param parameters: row -> what the model makes of a row: a pytree.
    """
    sizes: list[int] = []

    def inside(row):
        all_indexings = indexings(parameters, row)
        sizes[:] = [indexing.sizes[0] for indexing in all_indexings]
        return jnp.stack([jnp.all(indexing.inside) for indexing in all_indexings])

    def message(rows: Arrays, row: int, place: list[int], number: int) -> str:
        integers = [name for name in check.arrays if np.issubdtype(rows[name].dtype, np.integer)]
        return _index_message(number, _held(rows, row, integers, ", ") or " and ".join(check.arrays), sizes[place[0]])

    check = RowCheck(program, inside, message)
    return check


def _index_message(row: int, held: str, size: int) -> str:
    return (
        f"row {row} indexes what is not there: array {held}, and what the model indexes has {size} "
        f"entries, 0 to {size - 1}. Count groups from 0, or make the model's plate larger."
    )


def states_check(
    program: BoundModel, site: str, bounds: Callable[[dict, Mapping[str, Array]], dict[str, Array]]
) -> RowCheck:
    """Are the states of a discrete latent of each row among those that are summed over?

    :param bounds: (rows, states of the discrete latents) -> site -> smallest and largest state, (M, 2).
    """
    others = program.row_latents.states
    states = np.asarray(others[site])

    def inside(row):
        bounds_of_row = bounds(row, {name: values for name, values in others.items() if name != site})[site]
        return jnp.all((bounds_of_row[:, 0] >= states[0]) & (bounds_of_row[:, 1] <= states[-1]))

    def message(rows: Arrays, row: int, place: list[int], number: int) -> str:
        return (
            f"site {site!r}: in row {number} ({_held(rows, row, check.arrays)}) this discrete latent variable has "
            f"states beyond those of the rows that the model was read with, up to {int(states[-1])}. Give all rows at "
            "once, as arrays, or put a row with the most states into the first block."
        )

    check = RowCheck(program, inside, message)
    return check


def _held(rows: Arrays, row: int, arrays: Iterable[str], separator: str = " and ") -> str:
    return separator.join(f"{name!r} holds {rows[name][row]}" for name in arrays)


def check_whole_support(program: BoundModel, site: str, rows: Mapping[str, np.ndarray], first_row: int) -> None:
    """:raises ValueError: naming the row, if an outcome of a whole program lies outside of its distribution's support.
    Values that are computed from latent sites are not checked."""
    if program.is_value_of_latents(site):
        return
    bad = np.argwhere(~np.asarray(jit_once(lambda: _elements_inside(program, site, program.example_row))()))
    if len(bad):
        axis, place = program.row_axis(site), bad[0]
        row = int(place[axis]) if axis < len(place) else None
        raise ValueError(_support_message(program, site, rows, row, first_row))


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
            raise BadData(_index_message(first_row + row, f"{name!r} holds {array[row]}", size))


def _support_message(program: BoundModel, site: str, rows: Arrays, row: int | None, first_row: int) -> str:
    """:param row: None for values that are not of rows."""
    fn = program.abstractly(lambda row: base_distribution(program.site_record(site, row).fn)[0], program.example_row)
    outside = f"outside the support ({fn.support}) of its distribution"
    names = sorted(program.outcome_arrays(site))
    if row is None:
        return f"site {site!r}: a value lies {outside}."
    if not names:
        return f"site {site!r}: row {first_row + row} lies {outside}."
    return f"site {site!r}: row {first_row + row} of array {_held(rows, row, names)}, which lies {outside}."


def _elements_inside(program, name, rows):
    record = program.site_record(name, rows)
    fn, mask = base_distribution(record.fn)
    inside = fn.support(record.value)
    return inside | ~jnp.asarray(mask) if jnp.ndim(inside) >= jnp.ndim(mask) else inside
