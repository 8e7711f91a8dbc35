"""Indices that a program computes: constant as far as they can be known now."""

from __future__ import annotations

import numpy as np

from .nodes import CONSTANT, Node, Value
from .selection import Index, constant_index, constant_value


def columns_of(indices: Value) -> list[Index]:
    """The columns of a gather's indices, as far as each by itself is constant."""
    node, shape = indices.rest, indices.shape
    assert node is not None
    count = shape[-1]
    if node.name == "concatenate" and len(node.parents) == count and node.params["dimension"] == len(shape) - 1:
        return [index_of(parent, shape[:-1]) for parent in node.parents]
    if count == 1:
        return [index_of(node, shape[:-1])]
    whole = constant_value(node)
    if whole is not None:
        return [constant_index(whole.reshape(shape)[..., i]) for i in range(count)]
    return [Index(shape[:-1], _column(node, shape, i), ("column", node.serial, i)) for i in range(count)]


def _column(node: Node, shape: tuple[int, ...], i: int) -> Node:
    apply = lambda array: array[..., i]  # noqa: E731
    return Node(CONSTANT, shape[:-1], node.dtype, [node], apply, [shape], f"column {i}")


def index_of(node: Node, shape: tuple[int, ...]) -> Index:
    """A constant, of so many places, as an index."""
    value = constant_value(node)
    if value is not None:
        return constant_index(np.broadcast_to(value, shape) if value.ndim == 0 else value.reshape(shape))
    return Index(tuple(shape), node)
