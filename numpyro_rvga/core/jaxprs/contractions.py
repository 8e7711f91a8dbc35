"""Sums over the products of two arrays' entries, as matrix products are."""

from __future__ import annotations

from typing import NamedTuple

from .nodes import AFFINE, CONSTANT, Node
from .selection import Selection, everything, of_indices, trailing, with_trailing

Axes = tuple[int, ...]


class Contraction(NamedTuple):
    """A node that is ``sum(number * array, axis=trailing)``, both laid out to broadcast.

    :ivar number: what does not vary along the axes of a function, as a node and the selection of its entries. These
        have the axes of the result, of length one where they do not vary, and then those that are summed over.
    :ivar array: the other factor, affine or constant.
    :ivar count: the number of axes that are summed over.
    """

    number: tuple[Node, Selection]
    array: tuple[Node, Selection]
    count: int


def sides_of(product: Node, selection: Selection) -> list[tuple[Node, Selection]]:
    """What entries of a product of two arrays are sums over: a selection from either one, with the axes that are summed
    over behind those of the entries."""
    contracted, batch = product.params["dimension_numbers"]
    lengths = [product.in_shapes[0][axis] for axis in contracted[0]]
    count, used, sides = len(lengths), len(batch[0]), []
    num_axes = len(selection.shape) + count
    for parent, shape, summed, shared in zip(product.parents, product.in_shapes, contracted, batch):
        positions = dict(zip(summed, trailing(selection, lengths)))
        positions |= {axis: with_trailing(selection.indices[i], count) for i, axis in enumerate(shared)}
        for axis in (axis for axis in range(len(shape)) if axis not in positions):
            positions[axis] = with_trailing(selection.indices[used], count)
            used += 1
        sides.append((parent, of_indices([positions[axis] for axis in range(len(shape))], num_axes)))
    return sides


def contraction(node: Node, axes: Axes) -> Contraction | None:
    """A product of two arrays, or entries of one, of which one factor is the same along some axes and the other affine
    in theta or constant; None if the node is none."""
    product, selection = node, None
    if node.selection is not None:
        product, selection = node.parents[0], node.selection
    if product.name != "dot_general" or product.kind in (AFFINE, CONSTANT) or product.shape == () or not axes:
        return None
    sides = sides_of(product, everything(product.shape) if selection is None else selection)
    count = len(product.params["dimension_numbers"][0][0])
    for number, array in (sides, sides[::-1]):
        of_array = array[0].leaf_of or array[0].unwraps or array[0]
        is_simple = of_array is not array[0] or of_array.kind == CONSTANT
        if is_simple and all(number[1].shape[axis] == 1 for axis in axes):
            return Contraction(number, (of_array, array[1]), count)
    return None
