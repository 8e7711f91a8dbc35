"""One number taken out of linear functions: sum(tau * z) and X @ (tau * z) depend on two numbers, not on all of z.

Products of one number and an affine array remember the array (``Node.operand``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jax.extend.core import JaxprEqn

from .nodes import AFFINE, POINTWISE, Node, Value
from .primitives import form_of

if TYPE_CHECKING:
    from .graph import Graph

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


def factored(graph: Graph, eqn: JaxprEqn, inputs: list[Value]) -> Value | None:
    """A linear function of a product, perhaps beside an affine term: the number times the function of the array."""
    varying = [i for i, value in enumerate(inputs) if not value.is_constant]
    if eqn.primitive.name not in FACTORABLE or len(varying) != 1:
        return None
    (which,), out = varying, form_of(eqn.outvars[0])
    target = inputs[which]
    if target.rest is None or not is_product(target.rest):
        return None

    def image(value: Value) -> Value:
        return graph.whole(eqn, [value if i == which else v for i, v in enumerate(inputs)], AFFINE)[0]

    assert target.rest.operand is not None
    product = with_other(graph, target.rest, image(target.rest.operand))
    if target.affine is None:
        return product
    return graph.add(out, image(target._replace(rest=None)), product, sign=1)


def with_other(graph: Graph, product: Node, array: Value) -> Value:
    """A product's number times another array."""
    parents = [parent if parent.shape == () else graph.materialise(array) for parent in product.parents]
    shape = () if math.prod(array.shape) == 1 else array.shape

    def make() -> Node:
        node = Node(POINTWISE, shape, array.dtype, parents, product.apply, [shape] * 2, product.name)
        node.operand = array
        return node

    key = ("product", product.name, shape, *[parent.serial for parent in parents])
    return Value(array.shape, array.dtype, None, graph.node(key, make))
