"""Products of matrices are associative: (A z).sum(axis) is A times sums of z, and X (A z) is A times X z.

A linear function of a product of two arrays, that runs along axes which only one of these has, is the product of the
other with the function of that one. Where that one is affine in theta, so is the function of it: the mean of correlated
effects over all groups takes as many numbers as one group's effects.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .factoring import Axes, Contraction
from .nodes import NodeCache, Value, value_of
from .primitives import binder, form_of
from .pushing import selected_value
from .selection import Selection, along, broadcast_selection, composed, constant_index


class Run(NamedTuple):
    """Along which axes of an operand a linear function runs, and what it leaves of the others.

    :ivar axes: along which it runs. :ivar positions: where the other axes of the operand are in the result; and those
        along which it runs, if the result has them.
    :ivar batch: axes that another operand has too.
    """

    axes: Axes
    positions: dict[int, int]
    batch: Axes = ()


def run_of(eqn: JaxprEqn, which: int, num_axes: int) -> Run:
    """How a linear function runs along the axes of one of its operands: along all, where nothing else is known.

    :param which: the number of the operand. :param num_axes: of the operand.
    """
    params, every = eqn.params, range(num_axes)
    if "axes" in params:
        kept = [axis for axis in every if axis not in params["axes"]]
        return Run(tuple(params["axes"]), {axis: i for i, axis in enumerate(kept)})
    if "axis" in params:
        return Run((params["axis"],), {axis: axis for axis in every})
    if eqn.primitive.name != "dot_general":
        return Run(tuple(every), {})
    contracted, batch = params["dimension_numbers"]
    shared = {axis: i for i, axis in enumerate(batch[which])}
    free = [axis for axis in every if axis not in contracted[which] and axis not in shared]
    start = len(shared) if which == 0 else len(form_of(eqn.outvars[0]).shape) - len(free)
    return Run(tuple(contracted[which]), shared | {axis: start + i for i, axis in enumerate(free)}, tuple(shared))


def carried(shape: tuple[int, ...], run: Run, out: tuple[int, ...]) -> Selection:
    """Of an array that is the same along the axes of a run: its entries, where the result has them.

    :param shape: of the array. :param out: of the result.
    """
    zero = constant_index(np.zeros((1,) * len(out)))
    places = [
        along(n, run.positions[axis], len(out)) if n > 1 and axis in run.positions else zero
        for axis, n in enumerate(shape)
    ]
    return Selection(out, tuple(places))


def associated(
    graph: NodeCache, eqn: JaxprEqn, inputs: Sequence[Value], which: int, made: Contraction, run: Run
) -> tuple[ClosedJaxpr, list[Value]]:
    """The program of the function of a contraction: the other factor times the function of the array.

    :param which: the number of the operand that is the contraction.
    :return: a jaxpr, and the values that it takes.
    """
    count, out = made.count, form_of(eqn.outvars[0])
    (number, number_side), (array, array_side) = made.number, made.array
    num_axes, summed = len(inputs[which].shape), number_side.shape[len(inputs[which].shape) :]
    small = [1] * len(out.shape)
    for axis, n in enumerate(number_side.shape[:num_axes]):
        if n > 1:
            small[run.positions[axis]] = n
    behind = {num_axes + i: len(small) + i for i in range(count)}
    moved = carried(number_side.shape, run._replace(positions=run.positions | behind), (*small, *summed))
    shared = [inputs[which].shape[axis] if axis in run.batch else n for axis, n in enumerate(array_side.shape)]
    values = [
        selected_value(graph, value_of(number, number.shape, number.dtype), composed(number_side, moved)),
        selected_value(
            graph,
            value_of(array, array.shape, array.dtype),
            composed(array_side, broadcast_selection(array_side.shape, tuple(shared))),
        ),
        *[value for i, value in enumerate(inputs) if i != which],
    ]

    def program(number: Array, array: Array, *others: Array) -> Array:
        def function(part: Array) -> Array:
            operands = list(others)
            operands.insert(which, part)
            return binder(eqn)(*operands)

        for _ in range(count):
            function = jax.vmap(function, -1, -1)
        axes = tuple(range(len(out.shape), len(out.shape) + count))
        return jnp.broadcast_to(jnp.sum(number * function(array), axes), out.shape).astype(out.dtype)

    shapes = [jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values]
    return jax.make_jaxpr(program)(*shapes), values
