"""Selections pushed through a program: an entry of a product needs a row and a column, and no more.

Each rule says what a selection of a node's entries is, as a node of selections of its parents. Axes that are summed
over, or that an operation runs along, follow those of the result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .entries import first_of, num_distinct, without_repetition
from .factoring import FACTORABLE, image_of, products_of, sides_of
from .like_pieces import LikePieces, chosen_from_pieces, inside_piece, only_piece, piece_number
from .nodes import AFFINE, CONSTANT, OPAQUE, POINTWISE, Node, NodeCache, Value
from .primitives import ARITHMETIC, freeze
from .selection import (
    Index,
    Selection,
    broadcast_selection,
    composed,
    everything,
    of_indices,
    picked,
    select_entries,
    trailing,
    with_trailing,
)

ELEMENTWISE = ARITHMETIC | {"select_n"}  # affine steps that work entry by entry
REDUCTIONS = {
    "reduce_sum": jnp.sum,
    "reduce_max": jnp.max,
    "reduce_min": jnp.min,
    "reduce_prod": jnp.prod,
    "reduce_and": jnp.all,
    "reduce_or": jnp.any,
}
CUMULATIVE = {
    "cumsum": lax.cumsum,
    "cumprod": lax.cumprod,
    "cummax": lax.cummax,
    "cummin": lax.cummin,
    "cumlogsumexp": lax.cumlogsumexp,
    "sort": lambda array, axis, reverse: jnp.sort(array, axis),
}


def selected_value(graph: NodeCache, value: Value, selection: Selection) -> Value:
    affine, rest = (None if node is None else selected(graph, node, selection) for node in (value.affine, value.rest))
    return Value(selection.shape, value.dtype, affine, rest)


def selected(graph: NodeCache, node: Node, selection: Selection) -> Node:
    """The entries of a node. One that is the same everywhere stays as it is, and one entry is taken once."""
    if selection.size > 1 and all(math.prod(index.shape) == 1 for index in selection.indices):
        selection = of_indices(selection.indices, len(selection.shape))
    if node.shape == () or selection.key == everything(node.shape).key:
        return node
    return graph.node(("selected", node.serial, selection.key), lambda: _selected(graph, node, selection))


def _selected(graph: NodeCache, node: Node, selection: Selection) -> Node:
    """As :func:`selected`: of a step that works entry by entry, the step of its parents' selected entries; else by a
    rule."""
    of_affine = node.stands_for
    if of_affine is not None:
        return unwrap(graph, selected(graph, of_affine, selection))
    if node.name == "pieces" and node.kind == POINTWISE:
        return _from_pieces_again(graph, node, selection)
    if node.kind == AFFINE and node.name == "select_n":  # what repeats entries is known by a selection
        few, back = without_repetition(selection)
        if few.size < selection.size:
            return selection_node(selected(graph, node, few), back)
    if node.parents and (node.kind == POINTWISE or (node.kind == AFFINE and node.name in ELEMENTWISE)):
        parents = [selected(graph, parent, selection) for parent in node.parents]
        shape = selection.shape if any(parent.shape != () for parent in parents) else ()
        in_shapes = [shape if s != () else () for s in node.in_shapes]
        made = node.of(parents, node.kind, shape, in_shapes)
        if node.kind == AFFINE:
            whole, inner = node.pushed or (node, everything(node.shape))
            made.pushed = whole, composed(inner, selection if made.size == selection.size else first_of(selection))
        if node.operand is not None:
            made.operand = selected_value(graph, node.operand, selection)
        return made
    if node.selection is not None:
        return selected(graph, node.parents[0], composed(node.selection, selection))
    if node.pushed is not None:
        pushed_through, inner = node.pushed
        return selected(graph, pushed_through, composed(inner, selection))
    rule = (RULES_OF_CONSTANTS if node.kind == CONSTANT else RULES).get(node.name)
    made = None if rule is None else _pushed(graph, node, selection, rule)
    return selection_node(node, selection) if made is None else made


def _pushed(graph: NodeCache, node: Node, selection: Selection, rule: Callable) -> Node | None:
    """By the rule for the node, of each entry once; None if it has none, or all entries are asked for."""
    few, back = without_repetition(selection)
    repeats = few.size < selection.size
    asked = few if repeats else selection
    made = rule(graph, node, asked) if asked.size < node.size else None
    return made if made is None or not repeats or made.shape == () else selection_node(made, back)


def selection_node(node: Node, selection: Selection) -> Node:
    """The entries as a step of the program, which stays where it is."""
    kind = node.kind if node.kind in (AFFINE, CONSTANT) else OPAQUE
    in_shapes, apply = [node.shape, *selection.node_shapes], select_entries(selection)
    made = Node(kind, selection.shape, node.dtype, [node, *selection.nodes], apply, in_shapes, "selected")
    made.selection = selection
    return made


# ---------------------------------------------------------------------- affine nodes as predictors
def predictor(graph: NodeCache, affine: Node) -> Node:
    """In place of an affine node, in what is not affine."""

    def make():
        node = Node(POINTWISE, affine.shape, affine.dtype, name="predictor")
        node.stands_for = affine
        return node

    return graph.node(("leaf", affine.serial), make)


def unwrap(graph: NodeCache, affine: Node) -> Node:
    """An affine node as elementwise arithmetic with constants on a predictor that several terms can share."""
    of_one = affine.name == "select_n" and sum(parent.kind == AFFINE for parent in affine.parents) == 1
    if of_one or affine.name in ("mul", "div", "neg", "copy", "convert_element_type", "offset"):
        parents = [unwrap(graph, p) if p.kind == AFFINE else p for p in affine.parents]
        key = ("unwrap", affine.serial)
        return graph.node(key, lambda: affine.of(parents, POINTWISE, affine.shape, affine.in_shapes))
    if affine.name == "concatenate" and any(p.kind == CONSTANT for p in affine.parents):
        return graph.node(("unwrap", affine.serial), lambda: _pieces(graph, affine))
    if num_distinct(affine) < affine.size:
        return graph.node(("unwrap", affine.serial), lambda: _from_fewer(graph, affine))
    return predictor(graph, affine)


def _from_fewer(graph: NodeCache, affine: Node) -> Node:
    """What repeats entries, as an outer sum does, from predictors that do not."""
    if affine.name == "sum":
        parents = [unwrap(graph, p) if p.kind == AFFINE else p for p in affine.parents]
        node = Node(POINTWISE, affine.shape, affine.dtype, parents, affine.apply, affine.in_shapes)
        node.stands_for = affine
        return node
    few, back = without_repetition(affine.selection)
    node = predictor(graph, selected(graph, affine.parents[0], few))
    return node if node.shape == () else selection_node(node, back)


def _pieces(graph: NodeCache, affine: Node) -> Node:
    """A concatenation of affine nodes and constants: the constants (a pinned class) need no predictors."""
    parents = [unwrap(graph, p) if p.kind == AFFINE else p for p in affine.parents]
    shapes, params = affine.in_shapes, affine.params
    return Node(OPAQUE, affine.shape, affine.dtype, parents, affine.apply, shapes, "concatenate", params=params)


def materialize(graph: NodeCache, value: Value) -> Node:
    if value.affine is None:
        return value.rest
    linear = unwrap(graph, value.affine)
    if value.rest is None:
        return linear
    return graph.elementwise(POINTWISE, value.shape, value.dtype, [linear, value.rest], jnp.add, "combined", {})


# ---------------------------------------------------------------------- rules
def _product(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    """The product of matrices, or of arrays of these."""
    if node.kind == AFFINE:
        return None
    sides = sides_of(node, selection)
    axes = tuple(range(len(selection.shape), len(sides[0][1].shape)))

    def apply(a: Array, b: Array) -> Array:
        return jnp.broadcast_to(jnp.sum(a * b, axis=axes), selection.shape).astype(node.dtype)

    return _made(graph, node, selection, sides, apply)


def _reduction(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    """Sums, maxima and the like over axes: of the lines that the selected entries are of."""
    if node.kind == AFFINE:
        return None
    (shape,), axes = node.in_shapes, node.params["axes"]
    side = _lines(selection, selection.indices, shape, axes)
    reduced = tuple(range(len(selection.shape), len(side.shape)))
    operation = REDUCTIONS[node.name]

    def apply(array: Array) -> Array:
        return jnp.broadcast_to(operation(array, axis=reduced), selection.shape)

    return _made(graph, node, selection, [(node.parents[0], side)], apply)


def _lines(selection: Selection, others: Sequence[Index], shape: Sequence[int], axes: Sequence[int]) -> Selection:
    """The lines of an operand along some axes, for each entry of the result. ``others``: places along the others."""
    whole, rest = dict(zip(axes, trailing(selection, [shape[axis] for axis in axes]))), iter(others)
    indices = [whole[axis] if axis in whole else with_trailing(next(rest), len(axes)) for axis in range(len(shape))]
    return of_indices(indices, len(selection.shape) + len(axes))


def _cumulative(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    """Cumulative sums and the like along an axis: of the lines that the selected entries are in."""
    if node.kind == AFFINE or len(node.in_shapes) > 1 or len(node.in_shapes[0]) == 1:
        return None
    (shape,), axis = node.in_shapes, node.params["dimension" if node.name == "sort" else "axis"]
    side = _lines(selection, [i for a, i in enumerate(selection.indices) if a != axis], shape, [axis])
    index, operation, reverse = selection.indices[axis], CUMULATIVE[node.name], node.params.get("reverse", False)

    def apply(array: Array, *nodes: Array) -> Array:
        done = operation(array, axis=array.ndim - 1, reverse=reverse)
        return jnp.broadcast_to(picked(done, _value(index, nodes)), selection.shape)

    return _made(graph, node, selection, [(node.parents[0], side)], apply, [index])


def _factorized(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    """Cholesky factors of several matrices."""
    (shape,) = node.in_shapes
    if len(shape) == 2:
        return None
    side = _lines(selection, selection.indices[:-2], shape, [len(shape) - 2, len(shape) - 1])
    row, column = selection.indices[-2:]

    def apply(array: Array, *nodes: Array) -> Array:
        i, j = _value(row, nodes), _value(column, nodes[0 if row.is_constant else 1 :])
        factor = node.apply(array)
        flat = factor.reshape(*factor.shape[:-2], -1)
        return jnp.broadcast_to(picked(flat, i * shape[-1] + j), selection.shape)

    return _made(graph, node, selection, [(node.parents[0], side)], apply, [row, column])


def _solved(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    """The solutions of a triangular system for those of its right-hand sides that are asked for."""
    if node.kind == AFFINE:
        return None
    (matrix, right), (matrix_shape, shape) = node.parents, node.in_shapes
    left_side = node.params["left_side"]
    along_axis = len(shape) - (2 if left_side else 1)
    others = [i for a, i in enumerate(selection.indices) if a != along_axis]
    index, size = selection.indices[along_axis], shape[along_axis]
    of_matrix = everything(matrix_shape)
    if len(matrix_shape) > 2:
        of_matrix = _lines(selection, selection.indices[:-2], matrix_shape, [len(shape) - 2, len(shape) - 1])

    def apply(a: Array, b: Array, *nodes: Array) -> Array:
        lead = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-1])
        a, b = jnp.broadcast_to(a, (*lead, size, size)), jnp.broadcast_to(b, (*lead, size))
        b = b[..., None] if left_side else b[..., None, :]
        x = node.apply(a, b).reshape(*lead, size)
        return jnp.broadcast_to(picked(x, _value(index, nodes)), selection.shape)

    sides = [(matrix, of_matrix), (right, _lines(selection, others, shape, [along_axis]))]
    return _made(graph, node, selection, sides, apply, [index])


def _concatenated(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    axis = node.params["dimension"]
    parts = [(parent, shape[axis]) for parent, shape in zip(node.parents, node.in_shapes) if shape[axis] > 0]
    return _of_pieces(graph, node, selection, axis, parts, keeps_axis=True)


def _stacked(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    parts = [(parent, 1) for parent in node.parents]
    return _of_pieces(graph, node, selection, node.params["axis"], parts, keeps_axis=False)


def _one_of(graph: NodeCache, node: Node, selection: Selection) -> Node | None:
    """The piece whose number is given, of constants: it is chosen for each element, from what that needs."""
    number, *arrays = node.parents
    if any(array.shape != node.shape for array in arrays):
        return None
    parents = [number, *[selected(graph, array, selection) for array in arrays]]
    return node.of(parents, CONSTANT, selection.shape, [parent.shape for parent in parents])


def _of_pieces(
    graph: NodeCache, node: Node, selection: Selection, axis: int, parts: list[tuple[Node, int]], *, keeps_axis: bool
) -> Node | None:
    """:param parts: the arrays along the axis, with their lengths."""
    parents, lengths = zip(*parts)
    index, starts = selection.indices[axis], np.cumsum([0, *lengths])
    piece = only_piece(starts, index)
    if piece is None and node.kind == AFFINE:
        return None

    def of_piece(i: int) -> Node:
        inside = inside_piece(index, starts, i)
        indices = [inside if a == axis else other for a, other in enumerate(selection.indices)]
        kept = tuple(x for a, x in enumerate(indices) if keeps_axis or a != axis)
        return selected(graph, parents[i], Selection(selection.shape, kept))

    made = _from_pieces(graph, of_piece, starts, index, selection.shape, node.dtype)
    return made if node.kind != AFFINE or made.kind == AFFINE else None


def _from_pieces(
    graph: NodeCache, of_piece: Callable[[int], Node], starts: np.ndarray, index: Index, shape: tuple, dtype: Any
) -> Node:
    """Of the one piece in which all entries lie; of what all pieces have in common; or of all, one for each entry.

    :param of_piece: the number of a piece -> the entries, if they lie in it.
    """
    piece = only_piece(starts, index)
    if piece is not None:
        return of_piece(piece)
    pieces = [of_piece(i) for i in range(len(starts) - 1)]
    if not index.is_constant and math.prod(index.shape) == 1:
        like = LikePieces(graph, piece_number(graph, starts, index), partial(unwrap, graph), partial(selected, graph))
        one = like.one_of(pieces)
        if one is not None:
            return one
    if index.is_constant:
        positions = graph.constant(np.broadcast_to(index.value, shape)).rest
    else:
        positions = selected(graph, index.value, broadcast_selection(index.shape, shape))
    return chosen_from_pieces(pieces, positions, starts, index, shape, dtype)


def _from_pieces_again(graph: NodeCache, node: Node, selection: Selection) -> Node:
    """Of entries each of which lies in a piece already."""
    index = composed(Selection(node.shape, (node.params["places"],)), selection).indices[0]
    of_piece = lambda i: selected(graph, node.parents[i], selection)  # noqa: E731
    return _from_pieces(graph, of_piece, np.array(node.params["starts"]), index, selection.shape, node.dtype)


def _value(index: Index, nodes: Sequence[Array]) -> Array:
    return jnp.asarray(index.value) if index.is_constant else nodes[0]


def _made(
    graph: NodeCache,
    node: Node,
    selection: Selection,
    sides: Sequence[tuple[Node, Selection]],
    apply: Callable,
    indices: Sequence[Index] = (),
) -> Node:
    """The step that a rule has made.

    :param sides: the entries of nodes that it takes. :param indices: which it takes besides, where they are traced.
    """
    traced, taken = [index for index in indices if not index.is_constant], [selected(graph, *side) for side in sides]
    parents = [*taken, *[index.value for index in traced]]
    in_shapes = [*[side.shape for _, side in sides], *[index.shape for index in traced]]
    numbers = tuple(index.key if index.is_constant else None for index in indices)
    params = {"of": node.name, "params": freeze(node.params), "in_shapes": node.in_shapes, "indices": numbers}
    varying = [i for i, parent in enumerate(taken) if parent.kind != CONSTANT]
    products = products_of(graph, taken[varying[0]]) if node.name in FACTORABLE and len(varying) == 1 else None
    if products is not None:

        def image(array: Node) -> Node:
            of_array = [array if i in varying else parent for i, parent in enumerate(parents)]
            return Node(array.kind, selection.shape, node.dtype, of_array, apply, in_shapes, "pushed", params=params)

        return image_of(graph, products, image, partial(unwrap, graph))
    made = Node(OPAQUE, selection.shape, node.dtype, parents, apply, in_shapes, "pushed", params=params)
    made.pushed = node, selection
    return made


RULES: dict[str, Callable[..., Node | None]] = {
    "dot_general": _product,
    "cholesky": _factorized,
    "triangular_solve": _solved,
    "concatenate": _concatenated,
    "stack": _stacked,
    **dict.fromkeys(REDUCTIONS, _reduction),
    **dict.fromkeys(CUMULATIVE, _cumulative),
}
RULES_OF_CONSTANTS: dict[str, Callable[..., Node | None]] = {"one of": _one_of}  # others are computed once
