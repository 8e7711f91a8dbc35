"""Arrays that were computed alike, one by one, as one computation of the array whose number is given.

A loop in Python makes them: ``jnp.stack([a[j] * x for j in range(J)])``. Entry (j, i) of it is ``a[j] * x[i]`` for each
of them. So it needs two predictors, and is compiled once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import ClosedJaxpr

from .fingerprint import INCIDENTAL, digest_of
from .nodes import CONSTANT, POINTWISE, Node, NodeCache, Value
from .primitives import freeze
from .selection import Index, Selection, clamped, within

Nodes = tuple[Node, ...]


class LikePieces:
    """The pieces whose number is ``number``, a constant node of one entry.

    :param unwrap: an affine node -> what stands for it in what is not affine.
    :param selected: a node and a selection -> the entries.
    """

    def __init__(
        self,
        graph: NodeCache,
        number: Node,
        unwrap: Callable[[Node], Node],
        selected: Callable[[Node, Selection], Node],
    ):
        self._graph, self._number, self._unwrap, self._selected = graph, number, unwrap, selected

    def one_of(self, pieces: Sequence[Node]) -> Node | None:
        """The piece; None if they are not computed alike."""
        nodes = tuple(pieces)
        if all(node is nodes[0] for node in nodes):
            return nodes[0]
        key = ("one of", self._number.serial, *[node.serial for node in nodes])
        return self._graph.node(key, lambda: self._one_of(nodes))

    def _one_of(self, nodes: Nodes) -> Node | None:
        first = nodes[0]
        if any(
            (n.kind, n.shape, n.dtype, n.in_shapes) != (first.kind, first.shape, first.dtype, first.in_shapes)
            for n in nodes
        ):
            are_constant = all(node.kind == CONSTANT and node.size == first.size for node in nodes)
            return self._constant(nodes) if are_constant else None
        if first.kind == CONSTANT:
            return self._constant(nodes)
        stands_for = [node.stands_for for node in nodes]
        if all(stands_for):
            affine = self.one_of(stands_for)
            return None if affine is None else self._unwrap(affine)
        if any(stands_for):
            return None
        if all(node.selection is not None for node in nodes):
            return self._selection(nodes)
        operation, *others = map(_operation, nodes)
        is_one = operation is not None and all(other == operation for other in others)
        return self._step(nodes) if is_one else None

    def _constant(self, nodes: Nodes) -> Node | None:
        """Of constants of one shape: they are computed for each row, and the piece's is chosen."""
        shape = np.broadcast_shapes(*[node.shape for node in nodes])
        dtype = jnp.result_type(*[node.dtype for node in nodes])

        def apply(number: Array, *arrays: Array) -> Array:
            return jnp.stack(jnp.broadcast_arrays(*arrays))[number].astype(dtype)

        in_shapes = [(), *[node.shape for node in nodes]]
        return Node(CONSTANT, shape, dtype, [self._number, *nodes], apply, in_shapes, "one of")

    def _selection(self, nodes: Nodes) -> Node | None:
        """Of selections from one array, or from arrays that are computed alike."""
        operand = self.one_of([node.parents[0] for node in nodes])
        indices = [self._index(of_axis) for of_axis in zip(*[node.selection.indices for node in nodes])]
        if operand is None or any(index is None for index in indices):
            return None
        return self._selected(operand, Selection(nodes[0].selection.shape, tuple(i for i in indices if i is not None)))

    def _index(self, indices: Sequence[Index]) -> Index | None:
        first = indices[0]
        if all(index.key == first.key for index in indices):
            return first
        if any(index.shape != first.shape for index in indices):
            return None
        if not all(index.is_constant for index in indices):
            if any(index.is_constant for index in indices):
                return None
            node, key = self.one_of([index.value for index in indices]), tuple(index.key for index in indices)
            return None if node is None else Index(first.shape, node, ("one of", self._number.serial, key))
        table = np.stack([index.value for index in indices])
        values, key = np.unique(table), ("one of", self._number.serial, first.shape, table.tobytes())

        def make() -> Node:
            apply = lambda number: jnp.asarray(table)[number]  # noqa: E731
            return Node(CONSTANT, first.shape, np.dtype(np.int32), [self._number], apply, [()], "index", params=values)

        return Index(first.shape, self._graph.node(key, make), key)

    def _step(self, nodes: Nodes) -> Node | None:
        """Of one operation."""
        first = nodes[0]
        parents = [self.one_of(of_parent) for of_parent in zip(*[node.parents for node in nodes])]
        alike = [parent for parent in parents if parent is not None]
        if not alike or len(alike) < len(parents):
            return None
        made = first.of(alike, first.kind, first.shape, first.in_shapes)
        if "places" in first.params:
            places = self._index([node.params["places"] for node in nodes])
            if places is None:
                return None
            made.params = first.params | {"places": places}
        if all(node.operand is not None for node in nodes):
            made.operand = self._value([node.operand for node in nodes])
        return made

    def _value(self, values: Sequence[Value]) -> Value | None:
        parts = []
        for of_part in ([value.affine for value in values], [value.rest for value in values]):
            nodes = [node for node in of_part if node is not None]
            part = self.one_of(nodes) if len(nodes) == len(values) else None
            if part is None and nodes:
                return None
            parts.append(part)
        return Value(values[0].shape, values[0].dtype, *parts)


def _operation(node: Node) -> tuple | None:
    """What a step does to its parents: equal for equal operations; None if that is not known."""
    if not node.name or not isinstance(node.params, dict):
        return None
    params = {name: value for name, value in node.params.items() if name not in INCIDENTAL and name != "places"}
    return node.name, freeze({k: digest_of(v) if isinstance(v, ClosedJaxpr) else v for k, v in params.items()})


# ---------------------------------------------------------------------- pieces laid one after the other
def only_piece(starts: np.ndarray, index: Index) -> int | None:
    """The piece in which all places lie; None if they are traced, or lie in several.

    :param starts: where each piece starts, and where the last ends.
    """
    if len(starts) == 2:
        return 0
    if not index.is_constant:
        return None
    pieces = np.unique(np.searchsorted(starts, index.value, side="right") - 1)
    return int(pieces[0]) if len(pieces) == 1 else None


def inside_piece(index: Index, starts: np.ndarray, piece: int) -> Index:
    """The places inside a piece, for those that lie in it. Where pieces are of one length, traced places are the same
    for all."""
    lengths = np.diff(starts)
    if not index.is_constant and np.all(lengths == lengths[0]):
        return within(index, int(lengths[0]))
    return clamped(index, int(starts[piece]), int(lengths[piece]) - 1)


def piece_number(graph: NodeCache, starts: np.ndarray, index: Index) -> Node:
    """The number of the piece in which a traced place lies."""

    def make() -> Node:
        apply = lambda place: jnp.sum(place >= jnp.asarray(starts[1:-1]), dtype=jnp.int32)  # noqa: E731
        return Node(CONSTANT, (), np.dtype(np.int32), [index.value], apply, [()], "piece number")

    return graph.node(("piece number", index.key, starts.tobytes()), make)


def chosen_from_pieces(
    pieces: Sequence[Node], positions: Node, starts: np.ndarray, index: Index, shape: tuple[int, ...], dtype: Any
) -> Node:
    """Entries, each from the piece in which its place lies.

    :param positions: the places, of the entries' ``shape``; as an index they are ``index``.
    """

    def apply(*arrays: Array) -> Array:
        result = arrays[0]
        for start, array in zip(starts[1:], arrays[1:-1]):
            result = jnp.where(arrays[-1] >= int(start), array, result)
        return result.astype(dtype)

    kind = CONSTANT if all(piece.kind == CONSTANT for piece in pieces) else POINTWISE
    params = {"starts": tuple(starts.tolist()), "places": index}
    return Node(kind, shape, dtype, [*pieces, positions], apply, [shape] * (len(pieces) + 1), "pieces", params=params)
