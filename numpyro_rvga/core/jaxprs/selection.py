"""Which entries of an array a program selects: one index for each axis of the operand.

Slices, transposes, reshapes, broadcasts and gathers are all of this form, and one after another they compose to one.
An index varies only along the axes of the result that it depends on, so that rows and columns stay apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from .nodes import CONSTANT, Node, ancestors, evaluate_nodes
from .primitives import form_of


class Index(NamedTuple):
    """Places along one axis of the operand.

    :ivar shape: it has the result's number of axes, and length one along those that it does not depend on.
    :ivar value: numbers of that shape, or a node that has them.
    :ivar origin: how the node was made: equal for indices that are equal but for axes of length one.
    :ivar read: another index, and the selection of its entries (without axes of length one) that these are; or None.
    """

    shape: tuple[int, ...]
    value: Any
    origin: tuple = ()
    read: tuple[Index, Selection] | None = None

    @property
    def is_constant(self) -> bool:
        return isinstance(self.value, np.ndarray)

    @property
    def source(self) -> tuple:
        """Equal for indices that are equal but for axes of length one."""
        if self.is_constant:
            return without_ones(self.shape), self.value.tobytes()
        return self.origin or (self.value.serial,)

    @property
    def key(self) -> tuple:
        return self.shape, self.source


class Selection(NamedTuple):
    """``result[o] = operand[indices[0][o], indices[1][o], ...]``.

    :ivar shape: of the result. :ivar indices: one for each axis of the operand.
    """

    shape: tuple[int, ...]
    indices: tuple[Index, ...]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def key(self) -> tuple:
        return self.shape, tuple(index.key for index in self.indices)

    @property
    def source(self) -> tuple:
        """Equal for selections that are equal but for axes of length one."""
        return without_ones(self.shape), _sources(self.indices)

    @property
    def nodes(self) -> list[Node]:
        """The traced indices."""
        return [index.value for index in self.indices if not index.is_constant]

    @property
    def node_shapes(self) -> list[tuple[int, ...]]:
        return [index.shape for index in self.indices if not index.is_constant]

    def flat(self, operand_shape: tuple[int, ...]) -> np.ndarray:
        """Places in the flattened operand, of constant indices."""
        positions = np.broadcast_arrays(*[index.value for index in self.indices])
        return np.ravel_multi_index(positions, operand_shape)


def without_ones(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(length for length in shape if length > 1)


def _sources(indices: Sequence[Index]) -> tuple:
    """Equal for indices that are equal but for axes along which all of them have length one."""
    axes = [axis for axis, lengths in enumerate(zip(*[index.shape for index in indices])) if max(lengths) > 1]
    return tuple((tuple(index.shape[axis] for axis in axes), index.source) for index in indices)


def constant_index(value: np.ndarray) -> Index:
    value = np.asarray(value, np.int32)
    for axis in range(value.ndim):
        first = value.take([0], axis) if value.shape[axis] else value
        value = first if (value == first).all() else value
    return Index(value.shape, value)


def along(length: int, axis: int, num_axes: int) -> Index:
    """0, 1, ... along one axis of the result."""
    return constant_index(np.arange(length).reshape([-1 if i == axis else 1 for i in range(num_axes)]))


def everything(shape: Sequence[int]) -> Selection:
    return Selection(tuple(shape), tuple(along(n, i, len(shape)) for i, n in enumerate(shape)))


def with_trailing(index: Index, count: int) -> Index:
    """The same with so many further axes, on which it does not depend."""
    shape, read = (*index.shape, *[1] * count), index.read
    if read is not None:
        read = read[0], Selection(shape, tuple(with_trailing(i, count) for i in read[1].indices))
    return Index(shape, _reshaped(index.value, shape), index.source, read)


def of_indices(indices: Sequence[Index], num_axes: int) -> Selection:
    """The smallest result of these indices."""
    shape = np.broadcast_shapes(*[index.shape for index in indices]) if indices else (1,) * num_axes
    return Selection(tuple(shape), tuple(indices))


# ---------------------------------------------------------------------- applying and composing
def select_entries(selection: Selection) -> Callable[..., Array]:
    """(operand, *traced indices) -> the result."""
    slices = _as_slices(selection)

    def apply(operand: Array, *nodes: Array) -> Array:
        if slices is not None:
            lengths = np.broadcast_shapes(*[index.shape for index in selection.indices])
            return jnp.broadcast_to(jnp.reshape(operand[slices], lengths), selection.shape)
        operand, rest = jnp.asarray(operand), iter(nodes)
        values = [index.value if index.is_constant else next(rest) for index in selection.indices]
        positions = tuple(jnp.asarray(value).astype(jnp.uint32) for value in values)  # unsigned: none is from the end
        return jnp.broadcast_to(operand[positions], selection.shape)

    return apply


def _as_slices(selection: Selection) -> tuple[slice, ...] | None:
    """The selection as slices, a reshape and a broadcast, which a derivative passes faster than a gather; or None."""
    slices, last = [], -1
    for index in selection.indices:
        if not index.is_constant:
            return None
        flat = index.value.ravel()
        if len(flat) == 0:
            return None
        steps = np.diff(flat)
        long = [axis for axis, length in enumerate(index.shape) if length > 1]
        if len(long) > 1 or (long and (long[0] <= last or steps[0] <= 0 or (steps != steps[0]).any())):
            return None
        last = long[0] if long else last
        slices.append(slice(int(flat[0]), int(flat[-1]) + 1, int(steps[0]) if len(steps) else 1))
    return tuple(slices) if slices else None


def composed(inner: Selection, outer: Selection) -> Selection:
    """``outer`` of what ``inner`` selects."""
    return Selection(outer.shape, tuple(_index_at(index, outer) for index in inner.indices))


def _index_at(index: Index, outer: Selection) -> Index:
    """The index, where another selection reads it."""
    if index.read is not None:
        table, chosen = index.read
        return _read(table, composed(chosen, outer).indices, len(outer.shape))
    axes = [axis for axis, length in enumerate(index.shape) if length > 1]
    return _read(index, [outer.indices[axis] for axis in axes], len(outer.shape))


def _read(index: Index, at: Sequence[Index], num_axes: int) -> Index:
    """The index at places along its axes that are longer than one."""
    if not at:
        one = (1,) * num_axes
        return Index(one, _reshaped(index.value, one), index.source)
    if index.is_constant and len(at) == 1 and np.array_equal(index.value.ravel(), np.arange(index.value.size)):
        return at[0]
    squeezed = without_ones(index.shape)
    shape = tuple(np.broadcast_shapes(*[i.shape for i in at]))
    if index.is_constant and all(i.is_constant for i in at):
        return constant_index(np.broadcast_to(index.value.reshape(squeezed)[tuple(i.value for i in at)], shape))
    operand = index.value if not index.is_constant else _constant(index.value)
    chosen = Selection(shape, tuple(at))

    def apply(array: Array, *nodes: Array) -> Array:
        return jnp.reshape(select_entries(chosen)(jnp.reshape(array, squeezed), *nodes), shape)

    in_shapes = [index.shape, *chosen.node_shapes]
    parents, values = [operand, *chosen.nodes], possible_values(index)
    made = Node(CONSTANT, shape, operand.dtype, parents, apply, in_shapes, "index", params=values)
    return Index(shape, made, ("at", index.source, *_sources(at)), (index, chosen))


def possible_values(index: Index) -> np.ndarray | None:
    """The values that the index may have; None if they may be any."""
    if index.is_constant:
        return np.unique(index.value)
    return index.value.params if index.value.name == "index" else None


def _constant(array: np.ndarray) -> Node:
    return Node(CONSTANT, array.shape, array.dtype, apply=lambda: jnp.asarray(array))


# ---------------------------------------------------------------------- reading JAX's primitives
def constant_value(node: Node) -> np.ndarray | None:
    """The value of a constant that no row enters and that can be computed now."""
    live = ancestors([node])
    if any(n.name in ("row", "traced") for n in live):
        return None
    with jax.ensure_compile_time_eval():
        return np.asarray(evaluate_nodes([node], {})[0])


def selection_of(eqn: JaxprEqn, indices: Sequence[Index] | None) -> Selection | None:
    """The selection that an equation makes from its first input; None if it makes none.

    :param indices: of a gather, one for each column of its indices; of a dynamic slice, one for each axis. They have
        the shape of the gather's batch axes, or none.
    """
    name, params = eqn.primitive.name, eqn.params
    shape, out = form_of(eqn.invars[0]).shape, form_of(eqn.outvars[0]).shape
    if name in ("reshape", "squeeze", "expand_dims", "reduce_sum"):
        return None if params.get("dimensions") is not None and name == "reshape" else reshaped(shape, out)
    if name == "broadcast_in_dim":
        axes = params["broadcast_dimensions"]
        return Selection(out, tuple(_stretched(n, axis, out) for n, axis in zip(shape, axes)))
    if name == "tile":
        return Selection(out, tuple(constant_index(i.value % n) for i, n in zip(everything(out).indices, shape)))
    if name == "transpose":
        positions = {axis: position for position, axis in enumerate(params["permutation"])}
        return Selection(out, tuple(along(n, positions[axis], len(out)) for axis, n in enumerate(shape)))
    if name == "rev":
        indices = everything(out).indices
        reversed_indices = [constant_index(out[a] - 1 - i.value) for a, i in enumerate(indices)]
        return Selection(
            out, tuple(reversed_indices[a] if a in params["dimensions"] else i for a, i in enumerate(indices))
        )
    if name == "slice":
        strides = params["strides"] or (1,) * len(shape)
        moved = [
            constant_index(start + stride * i.value)
            for start, stride, i in zip(params["start_indices"], strides, everything(out).indices)
        ]
        return Selection(out, tuple(moved))
    if indices is None:
        return None
    if name == "dynamic_slice":
        starts = [clamped(index, 0, n - k) for index, n, k in zip(indices, shape, out)]
        one = (1,) * len(out)
        starts = [Index(one, _reshaped(start.value, one), start.source) for start in starts]
        return Selection(
            out, tuple(_plus(start, along(k, a, len(out))) for a, (start, k) in enumerate(zip(starts, out)))
        )
    return _gathered(params, shape, out, indices) if name == "gather" else None


def broadcast_selection(shape: tuple[int, ...], out: tuple[int, ...]) -> Selection:
    """Axes of length one, stretched, and new ones in front, as NumPy broadcasts."""
    new = len(out) - len(shape)
    return Selection(tuple(out), tuple(_stretched(n, axis, out) for axis, n in enumerate(shape, new)))


def _stretched(length: int, axis: int, out: tuple[int, ...]) -> Index:
    return along(length if out[axis] == length else 1, axis, len(out))


def reshaped(shape: tuple[int, ...], out: tuple[int, ...]) -> Selection:
    """A reshape, with the axes that it leaves alone kept apart."""
    indices: list[Index] = []
    for ins, outs in _groups(shape, out):
        lengths = [out[axis] for axis in outs]
        flat = np.arange(math.prod(lengths)).reshape([out[a] if a in outs else 1 for a in range(len(out))])
        for position in np.unravel_index(flat, [shape[axis] for axis in ins]) if ins else ():
            indices.append(constant_index(position))
    return Selection(tuple(out), tuple(indices))


def _groups(shape: Sequence[int], out: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """Runs of axes of the operand and of the result that hold the same entries."""
    groups, ins, outs, i, j = [], [], [], 0, 0
    while i < len(shape) or j < len(out):
        before, after = math.prod(shape[a] for a in ins), math.prod(out[a] for a in outs)
        if ins and before == after:
            groups.append((ins, outs))
            ins, outs = [], []
        elif i < len(shape) and (before <= after or j >= len(out)):
            ins = [*ins, i]
            i += 1
        else:
            outs = [*outs, j]
            j += 1
    return [*groups, (ins, outs)] if ins or outs else groups


def _gathered(params: dict, shape: tuple, out: tuple, columns: Sequence[Index]) -> Selection | None:
    """What a gather reads: along each axis of its operand, the start in ``columns`` and the place in the slice."""
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    batch_axes = [axis for axis in range(len(out)) if axis not in numbers.offset_dims]
    offsets = iter(numbers.offset_dims)
    indices = []
    for axis, length in enumerate(shape):
        index = constant_index(np.zeros((1,) * len(out)))
        if axis in numbers.start_index_map:
            column = columns[numbers.start_index_map.index(axis)]
            placed = dict(zip(batch_axes, column.shape))
            shape_of_column = tuple(placed.get(a, 1) for a in range(len(out)))
            column = Index(shape_of_column, _reshaped(column.value, shape_of_column), column.source)
            index = clamped(column, 0, length - sizes[axis])
        if axis in numbers.operand_batching_dims:
            position = numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(axis)]
            index = along(length, batch_axes[position], len(out))
        elif axis not in numbers.collapsed_slice_dims:
            index = _plus(index, along(sizes[axis], next(offsets), len(out)))
        indices.append(index)
    return Selection(tuple(out), tuple(indices))


def are_inside(eqn: JaxprEqn, columns: Sequence[Index]) -> bool:
    """Whether all that a gather takes must be in the operand: nothing is filled in then."""
    shape, params = form_of(eqn.invars[0]).shape, eqn.params
    largest = [shape[axis] - params["slice_sizes"][axis] for axis in params["dimension_numbers"].start_index_map]
    return all(
        column.is_constant and np.all((column.value >= 0) & (column.value <= last))
        for column, last in zip(columns, largest)
    )


def _reshaped(value: np.ndarray | Node, shape: tuple[int, ...]) -> np.ndarray | Node:
    return value.reshape(shape) if isinstance(value, np.ndarray) else value


def clamped(index: Index, start: int, largest: int) -> Index:
    """Places from ``start`` on, counted from there; those outside 0 to ``largest`` moved to the nearest inside."""
    if index.is_constant:
        return constant_index(np.clip(index.value - start, 0, largest))
    if largest == 0:
        return constant_index(np.zeros((1,) * len(index.shape)))
    apply = lambda i: jnp.clip(i.astype(jnp.int32) - start, 0, largest)  # noqa: E731
    return _made(index, index.shape, apply, ("clamped", index.source, start, largest), np.arange(largest + 1))


def within(index: Index, length: int) -> Index:
    """Traced places in pieces of one length, laid one after the other: each inside its piece."""
    if length == 1:
        return constant_index(np.zeros((1,) * len(index.shape)))
    return _made(index, index.shape, lambda i: i % length, ("within", index.source, length), np.arange(length))


def _plus(start: Index, steps: Index) -> Index:
    if start.is_constant:
        return constant_index(start.value + steps.value)
    if steps.value.size == 1:
        return start
    shape = tuple(np.broadcast_shapes(start.shape, steps.shape))
    return _made(start, shape, lambda i: i + steps.value, ("plus", *_sources([start, steps])))


def _made(index: Index, shape: tuple, apply: Callable, origin: tuple, values: np.ndarray | None = None) -> Index:
    """:param values: that the index may have."""
    node = Node(CONSTANT, shape, np.dtype(np.int32), [index.value], apply, [index.shape], "index", params=values)
    return Index(shape, node, origin)


def picked(array: Array, index: Array) -> Array:
    """Entries along the last axis: ``array`` (*shape, n), ``index`` of a shape that broadcasts with ``shape``."""
    shape = jnp.broadcast_shapes(array.shape[:-1], index.shape)
    array = jnp.broadcast_to(array, (*shape, array.shape[-1]))
    return jnp.take_along_axis(array, jnp.broadcast_to(index, shape)[..., None], axis=-1, mode="clip")[..., 0]


def trailing(selection: Selection, lengths: Sequence[int]) -> list[Index]:
    """Indices that run over further axes of these lengths, after those of a selection's result."""
    total = len(selection.shape) + len(lengths)
    return [along(length, len(selection.shape) + i, total) for i, length in enumerate(lengths)]
