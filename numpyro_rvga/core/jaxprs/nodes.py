"""Nodes of a symbolic program, and their values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike

CONSTANT, AFFINE, POINTWISE, OPAQUE = "constant", "affine", "pointwise", "opaque"

Made = TypeVar("Made")
_serial = itertools.count()


class Node:
    """One array-valued step of the symbolic program. Arrays of one element are held as scalars."""

    def __init__(self, kind, shape, dtype, parents=(), apply=None, in_shapes=None, name="", operand=None, params=None):
        self.kind, self.dtype, self.parents, self.name = kind, dtype, tuple(parents), name
        self.apply: Any = apply
        self.shape = () if math.prod(shape) == 1 else tuple(shape)
        self.in_shapes = tuple(p.shape for p in self.parents) if in_shapes is None else tuple(in_shapes)
        self.operand: Any = operand  # for exp, log and logistic: the Value it was applied to
        self.stands_for: Any = None  # for a predictor, or a sum of predictors: the affine node that it replaces
        self.params: Any = params  # of its equation
        self.selection: Any = None  # of its first parent's entries, if it is one
        self.pushed: tuple[Node, Any] | None = None  # the node that a selection was pushed through, and that
        self.serial = next(_serial)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def is_predictor(self) -> bool:
        return self.name == "predictor"

    def of(self, parents: Sequence[Node], kind: str, shape: Sequence[int], in_shapes: Sequence) -> Node:
        """The same step of other parents."""
        return Node(kind, shape, self.dtype, parents, self.apply, in_shapes, self.name, params=self.params)


class Value(NamedTuple):
    """An intermediate result of the program: ``affine + rest``, nodes, either of which may be absent (None)."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    affine: Any
    rest: Any

    @property
    def is_constant(self) -> bool:
        return self.affine is None and self.rest is not None and self.rest.kind == CONSTANT

    @property
    def is_affine(self) -> bool:
        return self.rest is None


def value_of(node: Node, shape: tuple[int, ...], dtype: DTypeLike) -> Value:
    """A node as a value of this shape, of which it is one of the parts."""
    return Value(shape, dtype, node, None) if node.kind == AFFINE else Value(shape, dtype, None, node)


class NodeCache:
    """Nodes that were made, so that equal steps are one node."""

    def __init__(self):
        self._cache: dict = {}

    def constant(self, array) -> Value:
        """An array that does not depend on theta. Equal numbers are one node."""
        array = array if isinstance(array, jax.Array) else jax.device_put(array)

        def make():
            node = Node(CONSTANT, array.shape, array.dtype, apply=lambda: array)
            node.operand = array if number is not None else None
            node.name = "traced" if isinstance(array, Tracer) else ""
            return node

        number = None if isinstance(array, Tracer) or array.size > 1 else np.asarray(array)
        node = make() if number is None else self.node(("number", str(array.dtype), number.tobytes()), make)
        return Value(array.shape, array.dtype, None, node)

    def node(self, key: Any, make: Callable[[], Made]) -> Made:
        try:
            hash(key)
        except TypeError:
            return make()
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def elementwise(self, kind, shape, dtype, parents, apply, name, params, key=None, operand=None) -> Node:
        """A step that works entry by entry on parents of this shape, or numbers. ``key``: what else it depends on."""
        inner = shape if max(p.size for p in parents) > 1 else ()
        in_shapes = [inner] * len(parents)
        make = partial(Node, kind, inner, dtype, parents, apply, in_shapes, name, operand, params)
        return self.node((name, kind, inner, tuple(p.serial for p in parents), key), make)


def ancestors(roots: Sequence[Node], stop: Callable[[Node], bool] = lambda n: False) -> list[Node]:
    visited, stack = {}, list(roots)
    while stack:
        node = stack.pop()
        if node.serial in visited:
            continue
        visited[node.serial] = node
        if not stop(node):
            stack.extend(node.parents)
    return [visited[k] for k in sorted(visited)]  # parents are always older than children


def evaluate_nodes(roots: Sequence[Node], environment: dict[int, jax.Array]) -> list[jax.Array]:
    values = dict(environment)
    for node in ancestors(roots, stop=lambda n: n.serial in environment):
        if node.serial not in values:
            arguments = [_broadcast(values[p.serial], s) for p, s in zip(node.parents, node.in_shapes)]
            result = node.apply(*arguments)
            values[node.serial] = _broadcast(result, ()) if node.shape == () else result
    return [values[n.serial] for n in roots]


def _broadcast(array, shape):
    if isinstance(array, list) or jnp.shape(array) == tuple(shape):
        return array
    return jnp.broadcast_to(array, shape) if jnp.ndim(array) == 0 else jnp.reshape(array, shape)
