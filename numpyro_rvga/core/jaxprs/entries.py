"""What selections from one array have in common: entries twice, and entries of another selection."""

from __future__ import annotations

import math

import numpy as np

from .nodes import AFFINE, Node
from .primitives import ARITHMETIC
from .selection import (
    Selection,
    broadcast_selection,
    composed,
    constant_index,
    of_indices,
    possible_values,
    without_ones,
)

MOST_COUNTED = 4096  # entries of an affine node whose columns are listed one by one
LARGEST_MAP = 2**16  # entries of an array of which it is looked up where a selection has them


def entries_within(
    operand_shape: tuple[int, ...], inner: Selection, outer: Selection
) -> tuple[np.ndarray, Selection] | None:
    """Where the result of ``inner`` has the entries that ``outer`` selects; None if it may not have all.

    Along an axis where both have the same traced place, there is nothing to look up. Where both are entries of the same
    index, as after a reshape, it is that whose entries are looked up.

    :return: an array of places in the flattened result, -1 for nowhere, and ``outer`` as a selection from that array.
    """
    read = [selection.indices[0].read for selection in (inner, outer)]
    if len(operand_shape) == 1 and all(read):
        (table, few), (other, chosen) = (x for x in read if x is not None)
        if table.source == other.source and few.size == inner.size and chosen.size == outer.size:
            return entries_within(without_ones(table.shape), few, chosen)
    same = [
        not a.is_constant and math.prod(a.shape) == math.prod(b.shape) == 1 and a.source == b.source
        for a, b in zip(inner.indices, outer.indices)
    ]
    inner, outer = (_without_axes(selection, same) for selection in (inner, outer))
    shape = tuple(1 if is_same else n for is_same, n in zip(same, operand_shape))
    if inner.nodes or math.prod(shape) > LARGEST_MAP:
        return None
    places = np.full(shape, -1)
    at = tuple(np.broadcast_to(index.value, inner.shape) for index in inner.indices)
    places[at] = np.arange(inner.size).reshape(inner.shape)
    values = [possible_values(index) for index in outer.indices]
    axes = [np.arange(n) if v is None else v for v, n in zip(values, shape)]
    return (places, outer) if (places[np.ix_(*axes)] >= 0).all() else None


def without_repetition(selection: Selection) -> tuple[Selection, Selection]:
    """A selection as one of each entry once, as far as the indices are constant, and one of these."""
    if selection.nodes:
        few = of_indices(selection.indices, len(selection.shape))
        return few, broadcast_selection(few.shape, selection.shape)
    uniques = [np.unique(index.value, return_inverse=True) for index in selection.indices]
    shape = tuple(len(values) for values, _ in uniques)
    few = [values.reshape([-1 if a == i else 1 for a in range(len(shape))]) for i, (values, _) in enumerate(uniques)]
    back = [constant_index(at.reshape(index.shape)) for (_, at), index in zip(uniques, selection.indices)]
    return Selection(shape, tuple(map(constant_index, few))), Selection(selection.shape, tuple(back))


def first_of(selection: Selection) -> Selection:
    """The first of the entries."""
    one = (1,) * len(selection.shape)
    return composed(selection, Selection(one, (constant_index(np.zeros(one)),) * len(one)))


def num_distinct(affine: Node) -> int:
    """Entries of which an affine node is made, those that it repeats counted once."""
    return len(_sources(affine)) if affine.size <= MOST_COUNTED else affine.size


def _sources(affine: Node) -> set[tuple]:
    """Numbers of nodes, and places in them."""
    if affine.selection is not None:
        operand, selection = affine.parents[0], affine.selection
        if selection.nodes:
            few = of_indices(selection.indices, len(selection.shape))
            return {(operand.serial, few.key, i) for i in range(few.size)}
        return {(operand.serial, int(i)) for i in np.unique(selection.flat(operand.shape))}
    if affine.name not in ARITHMETIC:
        return {(affine.serial, i) for i in range(affine.size)}
    return set().union(*[_sources(parent) for parent in affine.parents if parent.kind == AFFINE])


def _without_axes(selection: Selection, left_out: list[bool]) -> Selection:
    """The selection with place zero along some axes of the operand."""
    zero = constant_index(np.zeros((1,) * len(selection.shape)))
    return selection._replace(indices=tuple(zero if out else i for out, i in zip(left_out, selection.indices)))
