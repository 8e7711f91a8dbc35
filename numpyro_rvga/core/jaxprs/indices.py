"""Do indices lie within what they index? XLA reads something else where they do not, and says nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array, lax
from jax.extend.core import JaxprEqn

from .interpret import interpret, is_inlined
from .primitives import results


class Indexing(NamedTuple):
    """:ivar inside: whether the indices of one place in the program lie within bounds, (*indices, axes).
    :ivar sizes: lengths of the axes that they index."""

    inside: Array
    sizes: tuple[int, ...]


def indexes(function: Callable, *args: Any) -> bool:
    """Whether a function indexes anything by plain ``array[index]``, for abstract arguments."""
    return bool(jax.eval_shape(lambda *args: [indexing.inside for indexing in indexings(function, *args)], *args))


def indexings(function: Callable, *args: Any) -> list[Indexing]:
    """All plain ``array[index]`` in a function of pytrees, at these arguments."""
    closed = jax.make_jaxpr(function)(*args)
    result: list[Indexing] = []

    def evaluate(eqn, inputs):
        if _is_plain(eqn):
            result.append(_indexing(eqn, *inputs))
        return None if is_inlined(eqn) else results(eqn, inputs)

    interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), evaluate)
    return result


def _is_plain(eqn: JaxprEqn) -> bool:
    """Others say what is to be done with indices that are out of bounds."""
    return eqn.primitive.name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS


def _indexing(eqn: JaxprEqn, operand: Array, indices: Array) -> Indexing:
    axes, sizes = eqn.params["dimension_numbers"].start_index_map, eqn.params["slice_sizes"]
    last = np.array([operand.shape[axis] - sizes[axis] for axis in axes])
    return Indexing((indices >= 0) & (indices <= last), tuple(operand.shape[axis] for axis in axes))
