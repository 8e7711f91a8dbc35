"""One number taken out of linear functions: sum(tau * z) and X @ (tau * z) depend on two numbers, not on all of z.

Products of one number and an affine array remember the array (``Node.operand``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from jax.extend.core import JaxprEqn

from .nodes import POINTWISE, Node, NodeCache, Value
from .pushing import materialize

FACTORABLE = frozenset(["reduce_sum", "cumsum", "dot_general", "conv_general_dilated"])  # zero where an operand is


def multiplied(name: str, inputs: Sequence[Value]) -> Value | None:
    """The affine array that a product multiplies by one number, or divides by it."""
    if name not in ("mul", "div"):
        return None
    pairs = zip(inputs, reversed(inputs)) if name == "mul" else [inputs]
    return next((a for a, b in pairs if a.is_affine and math.prod(a.shape) > 1 == math.prod(b.shape)), None)


def is_product(node: Node) -> bool:
    """Whether a number can be taken out of a node."""
    return node.name in ("mul", "div") and node.operand is not None and node.shape != ()


def factored(
    graph: NodeCache, eqn: JaxprEqn, inputs: list[Value], image: Callable[[list[Value]], Value]
) -> tuple[Value, Value | None] | None:
    """A linear function of a product, perhaps beside an affine term: the number times the function of the array, and
    the function of that term; None if it is no such thing.

    :param image: affine inputs -> the function of these.
    """
    varying = [i for i, value in enumerate(inputs) if not value.is_constant]
    if eqn.primitive.name not in FACTORABLE or len(varying) != 1:
        return None
    (which,) = varying
    target = inputs[which]
    if target.rest is None or not is_product(target.rest):
        return None

    def image_of(value: Value) -> Value:
        return image([value if i == which else v for i, v in enumerate(inputs)])

    assert target.rest.operand is not None
    product = with_other(graph, target.rest, image_of(target.rest.operand))
    return product, None if target.affine is None else image_of(target._replace(rest=None))


def with_other(graph: NodeCache, product: Node, array: Value) -> Value:
    """A product's number times another array."""
    parents = [parent if parent.shape == () else materialize(graph, array) for parent in product.parents]
    shape = () if math.prod(array.shape) == 1 else array.shape

    def make() -> Node:
        node = Node(
            POINTWISE, shape, array.dtype, parents, product.apply, [shape] * 2, product.name, params=product.params
        )
        node.operand = array
        return node

    key = ("product", product.name, shape, *[parent.serial for parent in parents])
    return Value(array.shape, array.dtype, None, graph.node(key, make))
