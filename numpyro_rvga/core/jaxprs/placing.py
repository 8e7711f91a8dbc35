"""Arrays that are written into others at known places, and padded: each entry of the result is one of an operand.

``jnp.zeros(K).at[1:].set(tau * z)`` is a selection from the zeros and ``tau * z``, laid one after the other. Which, is
what the operation does to arrays that hold their own places.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn

from .nodes import OPAQUE, Node, NodeCache, Value
from .primitives import binder, form_of
from .pushing import materialize, selected_value
from .selection import Selection, constant_index, constant_value, reshaped

FIRST_INDEX = {"scatter": 1, "dynamic_update_slice": 2}  # among the inputs
NUM_INDICES = {"scatter": 1}  # of others: all that are left


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
    known = {i: x for i, value in indices.items() if (x := constant_value(value.rest_node)) is not None}
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
    shapes = [(size,) for size in sizes]
    join = lambda *arrays: jnp.concatenate(arrays)  # noqa: E731
    made = partial(Node, OPAQUE, (sum(sizes),), out.dtype, parents, join, shapes, "concatenate")
    node = graph.node(("laid out", *[p.serial for p in parents]), lambda: made(params={"dimension": 0}))
    laid_out = Value((sum(sizes),), out.dtype, None, node)
    return selected_value(graph, laid_out, Selection(out.shape, (constant_index(place_of),)))


def _padded(graph: NodeCache, eqn: JaxprEqn, value: Value, padding: Value) -> Value | None:
    """A concatenation along each axis that is padded; None if entries are cut off, or padded between."""
    widths = [tuple(map(int, width)) for width in eqn.params["padding_config"]]
    if any(low < 0 or high < 0 or between for low, high, between in widths):
        return None
    shape, node, beside = list(value.shape), materialize(graph, value), materialize(graph, padding)
    for axis, (low, high, _) in enumerate(widths):
        if low or high:
            lengths = (low, shape[axis], high)
            shapes = [(*shape[:axis], length, *shape[axis + 1 :]) for length in lengths]
            shape[axis] = sum(lengths)
            join = partial(lambda axis, *arrays: jnp.concatenate(arrays, axis), axis)
            made = partial(Node, OPAQUE, tuple(shape), value.dtype, [beside, node, beside], join, shapes, "concatenate")
            key = "padded", node.serial, beside.serial, axis, low, high
            node = graph.node(key, partial(made, params={"dimension": axis}))
    return Value(tuple(shape), value.dtype, None, node)
