"""Arrays that are written into others at known places, added to them, and padded.

``jnp.zeros(K).at[1:].set(tau * z)`` is a selection from the zeros and ``tau * z``, laid one after the other. Which, is
what the operation does to arrays that hold their own places. Where arrays are added (``jax.ops.segment_sum``), an entry
of the result is the sum of a few.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .nodes import OPAQUE, Node, NodeCache, Value
from .primitives import binder, form_of
from .pushing import materialize, selected_value
from .selection import Selection, constant_index, constant_value, reshaped

FIRST_INDEX = {"scatter": 1, "dynamic_update_slice": 2}  # among the inputs
NUM_INDICES = {"scatter": 1}  # of others: all that are left
ADDING = ("scatter-add", "scatter_add")
MOST_PLACES = 2**24  # whose numbers single precision holds
MOST_PADDING = 4  # times as many places of addends as there are addends and sums


def placed(graph: NodeCache, eqn: JaxprEqn, inputs: Sequence[Value]) -> Value | None:
    """The selection from an operation's operands; None if it is no such operation, or its indices are not known."""
    name = eqn.primitive.name
    if name == "pad":
        return _padded(graph, eqn, *inputs)
    if name not in FIRST_INDEX:
        return None
    first = FIRST_INDEX[name]
    last = first + NUM_INDICES.get(name, len(inputs) - first)
    indices = {i: inputs[i] for i in range(first, last) if inputs[i].is_constant}
    known = {i: x for i, value in indices.items() if (x := constant_value(value.rest)) is not None}
    if len(known) < last - first:
        return None
    operands = [i for i in range(len(inputs)) if not first <= i < last]
    sizes = [math.prod(inputs[i].shape) for i in operands]
    known |= dict(zip(operands, np.split(np.arange(sum(sizes), dtype=np.int32), np.cumsum(sizes)[:-1])))
    with jax.ensure_compile_time_eval():
        place_of = np.asarray(binder(eqn)(*[np.reshape(known[i], value.shape) for i, value in enumerate(inputs)]))
    parents = [
        materialize(graph, selected_value(graph, inputs[i], reshaped(inputs[i].shape, (size,))))
        for i, size in zip(operands, sizes)
    ]
    out = form_of(eqn.outvars[0])
    laid_out = _laid_out(graph, parents, [(size,) for size in sizes], 0)
    return selected_value(graph, laid_out, Selection(out.shape, (constant_index(place_of),)))


def adds_to_zeros(eqn: JaxprEqn, inputs: Sequence[Value]) -> bool:
    """Whether an operation is linear in what it adds."""
    if eqn.primitive.name not in ADDING or not (inputs[0].is_constant and inputs[1].is_constant):
        return False
    before = constant_value(inputs[0].rest)
    return before is not None and not before.any()


def sums_at_places(eqn: JaxprEqn, inputs: Sequence[Value]) -> ClosedJaxpr | None:
    """A program of the array that is added to, and of the array that is added: with a line of addends for each entry.

    :return: None if the places are not known, or some take many more addends than others.
    """
    places = constant_value(inputs[1].rest) if inputs[1].is_constant else None
    if places is None or math.prod(inputs[0].shape) >= MOST_PLACES:
        return None
    before, at, added = jnp.zeros(inputs[0].shape), np.reshape(places, inputs[1].shape), jnp.zeros(inputs[2].shape)
    numbers = np.arange(1.0, before.size + 1)  # zero is for what is dropped
    with jax.ensure_compile_time_eval():
        (pulled_back,) = jax.vjp(lambda x: binder(eqn)(before, at, x), added)[1](jnp.reshape(numbers, before.shape))
    target = np.asarray(pulled_back).astype(int).ravel() - 1
    order = np.argsort(target, kind="stable")[np.sum(target < 0) :]
    counts = np.bincount(target[order], minlength=before.size)
    if before.size * counts.max(initial=0) > MOST_PADDING * (before.size + added.size):
        return None
    table = np.full((before.size, counts.max(initial=1)), added.size)  # a zero is there
    table[target[order], np.arange(len(order)) - np.repeat(np.cumsum(counts) - counts, counts)] = order

    def program(before: Array, added: Array) -> Array:
        addends = jnp.append(added.ravel(), jnp.zeros((), added.dtype)).at[table].get(mode="promise_in_bounds")
        return before + jnp.sum(addends, axis=1).reshape(before.shape)

    return jax.make_jaxpr(program)(*[jax.ShapeDtypeStruct(inputs[i].shape, inputs[i].dtype) for i in (0, 2)])


def _padded(graph: NodeCache, eqn: JaxprEqn, value: Value, padding: Value) -> Value | None:
    """A concatenation along each axis that is padded; None if entries are cut off, or padded between."""
    widths = [tuple(map(int, width)) for width in eqn.params["padding_config"]]
    if any(low < 0 or high < 0 or between for low, high, between in widths):
        return None
    beside = materialize(graph, padding)
    for axis, (low, high, _) in enumerate(widths):
        if low or high:
            shapes = [(*value.shape[:axis], n, *value.shape[axis + 1 :]) for n in (low, value.shape[axis], high)]
            value = _laid_out(graph, [beside, materialize(graph, value), beside], shapes, axis)
    return value


def _laid_out(graph: NodeCache, parents: list[Node], shapes: list[tuple[int, ...]], axis: int) -> Value:
    """Arrays one after the other along an axis. ``shapes``: theirs; numbers fill them."""
    first, dtype = shapes[0], parents[0].dtype
    shape = (*first[:axis], sum(shape[axis] for shape in shapes), *first[axis + 1 :])

    def make() -> Node:
        join = lambda *arrays: jnp.concatenate(arrays, axis)  # noqa: E731
        return Node(OPAQUE, shape, dtype, parents, join, shapes, "concatenate", params={"dimension": axis})

    node = graph.node(("laid out", axis, *shapes, *[parent.serial for parent in parents]), make)
    return Value(shape, dtype, None, node)
