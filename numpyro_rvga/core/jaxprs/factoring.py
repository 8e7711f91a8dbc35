"""Numbers taken out of linear functions: sum(tau * z) and X @ (tau * z) depend on two numbers, not on all of z.

What is not affine may be a sum of products: each some numbers that depend on theta, times an array that is affine in it
or constant. A linear function of the sum is then the sum of the same numbers times functions of the arrays. A function
along some axes, such as a cumulative sum, leaves arrays that are the same along these as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from .nodes import AFFINE, CONSTANT, POINTWISE, Node, NodeCache
from .primitives import ARITHMETIC
from .selection import Selection, everything, of_indices, trailing, with_trailing

MOST_PRODUCTS = 8  # in a sum
FACTORABLE = frozenset(["reduce_sum", "cumsum", "dot_general", "conv_general_dilated"])  # zero where an operand is
ADDED = frozenset(["sum", "combined"])
Axes = tuple[int, ...]
OPERATIONS: dict[str, Callable] = {"mul": jnp.multiply, "div": jnp.divide}


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
        of_array = array[0].stands_for or array[0]
        is_simple = of_array is not array[0] or of_array.kind == CONSTANT
        if is_simple and all(number[1].shape[axis] == 1 for axis in axes):
            return Contraction(number, (of_array, array[1]), count)
    return None


class Product(NamedTuple):
    """An array, multiplied or divided by numbers.

    :ivar numbers: "mul" or "div", and nodes of one entry, or that are the same along the axes in question.
    :ivar array: a node that is affine or constant, or a contraction.
    """

    numbers: tuple[tuple[str, Node], ...]
    array: Node

    def of(self, apply: Callable[[Array], Array], like: Node, name: str, params: dict[str, Any]) -> Product:
        """With a linear function of the array in place of it.

        :param like: a node of the same shape and type. :param params: of the function, beside its name.
        """
        array = self.array
        return self._replace(array=Node(array.kind, like.shape, like.dtype, [array], apply, name=name, params=params))


def products_of(graph: NodeCache, node: Node, axes: Axes = ()) -> list[Product] | None:
    """A node as a sum of products; None if it is none, or of too many.

    :param axes: along which a linear function runs, if there are others.
    """

    def find() -> list[Product] | None:
        products = _products_of(graph, node, axes)
        return products if products is not None and len(products) <= MOST_PRODUCTS else None

    return graph.node(("products of", node.serial, axes), find)


def _products_of(graph: NodeCache, node: Node, axes: Axes) -> list[Product] | None:
    affine = node.stands_for
    if affine is not None or node.kind in (AFFINE, CONSTANT):
        return [Product((), affine or node)]
    if contraction(node, axes) is not None:
        return [Product((), node)]
    if node.name in ADDED or (node.name == "neg" and node.kind == POINTWISE):
        return _sum(graph, node, axes)
    if node.name in OPERATIONS and node.kind == POINTWISE:
        return _multiple(graph, node, axes)
    if node.name in ("copy", "convert_element_type") and node.kind == POINTWISE:
        products = products_of(graph, node.parents[0], axes)
        return products and [product.of(node.apply, node, node.name, node.params) for product in products]
    return _joined(graph, node) if node.name == "concatenate" else None


def _sum(graph: NodeCache, node: Node, axes: Axes) -> list[Product] | None:
    negative = node.name == "neg" or node.params.get("sign", 1) < 0
    total: list[Product] = []
    for i, parent in enumerate(node.parents):
        products = products_of(graph, parent, axes)
        if products is None:
            return None
        if negative and i == len(node.parents) - 1:
            products = [product.of(jnp.negative, product.array, "neg", {}) for product in products]
        total += products
    return total


def _multiple(graph: NodeCache, node: Node, axes: Axes) -> list[Product] | None:
    """Of numbers times an array, or of an array of constants times another, entry by entry."""
    first, second = node.parents
    pairs = [(first, second), (second, first)] if node.name == "mul" else [(first, second)]
    for array, factor in pairs:
        if factor.kind == CONSTANT and (products := products_of(graph, array, axes)) is not None:
            return [_scaled(product, factor, node) for product in products]
    for array, factor in pairs:
        if _is_same_along(factor, axes) and (products := products_of(graph, array, axes)) is not None:
            number = node.name, factor
            return [product._replace(numbers=(*product.numbers, number)) for product in products]
    return None


def _is_same_along(node: Node, axes: Axes) -> bool:
    """Whether it is one number, or known to be the same along all of some axes."""
    if node.shape == ():
        return True
    if not axes:
        return False
    stands_for = node.stands_for or node
    if stands_for.selection is not None:
        return all(index.shape[axis] == 1 for index in stands_for.selection.indices for axis in axes)
    if stands_for.kind == POINTWISE or stands_for.name in ARITHMETIC:
        return all(_is_same_along(parent, axes) for parent in stands_for.parents)
    return False


def _scaled(product: Product, constant: Node, node: Node) -> Product:
    array, shape = product.array, node.shape
    shapes = [shape if parent.shape != () else () for parent in (array, constant)]
    made = Node(array.kind, shape, array.dtype, [array, constant], OPERATIONS[node.name], shapes, node.name, params={})
    return product._replace(array=made)


def _joined(graph: NodeCache, node: Node) -> list[Product] | None:
    """Of arrays laid one after the other: each beside zeros."""
    axis, total, start = node.params["dimension"], [], 0
    length = node.shape[axis] if node.shape else 1
    for parent, shape in zip(node.parents, node.in_shapes):
        products = products_of(graph, parent)
        if products is None:
            return None
        beside = [(0, 0, 0)] * len(shape)
        beside[axis] = (start, length - start - shape[axis], 0)
        start += shape[axis]

        def embedded(array: Array, shape: tuple = shape, beside: list = beside) -> Array:
            return lax.pad(jnp.broadcast_to(array, shape), jnp.zeros((), array.dtype), beside)

        params = {"shape": shape, "padding": tuple(beside)}
        total += [product.of(embedded, node, "beside zeros", params) for product in products]
    return total


def image_of(
    graph: NodeCache, products: Iterable[Product], image: Callable[[Node], Node], unwrap: Callable[[Node], Node]
) -> Node:
    """A linear function of a sum of products, as one node of what is not affine.

    :param image: an array -> the function of it. :param unwrap: an affine node -> what stands for it in what is not.
    """
    images: dict[tuple, tuple[tuple, Node]] = {}  # the numbers, and the arrays that they multiply together
    for numbers, array in products:
        key, made = tuple((name, number.serial) for name, number in numbers), image(array)
        images[key] = numbers, _added(graph, images[key][1], made) if key in images else made
    addends = [_product(graph, numbers, unwrap(x) if x.kind == AFFINE else x) for numbers, x in images.values()]
    return reduce(partial(_added, graph), addends)


def _added(graph: NodeCache, a: Node, b: Node) -> Node:
    kinds = {a.kind, b.kind}
    kind = POINTWISE if kinds - {AFFINE, CONSTANT} else AFFINE if AFFINE in kinds else CONSTANT
    shape = a.shape if a.size > 1 else b.shape
    return graph.elementwise(kind, shape, a.dtype, [a, b], jnp.add, "sum", {"sign": 1}, "of products")


def _product(graph: NodeCache, numbers: Sequence[tuple[str, Node]], array: Node) -> Node:
    for name, number in numbers:
        shape, parents = array.shape if array.size > 1 else number.shape, [array, number]
        array = graph.elementwise(POINTWISE, shape, array.dtype, parents, OPERATIONS[name], name, {}, "product")
    return array
