"""Pytrees of arrays."""

import operator
from collections.abc import Iterable
from functools import reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

PyTree = Any
"""Arrays in tuples, lists and mappings, of any depth: what a function of the caller's own takes, and is handed."""

Tree = TypeVar("Tree")


def summed(trees: Iterable[Tree]) -> Tree:
    """The sum of pytrees of the same form, array by array."""
    return reduce(lambda one, other: jax.tree.map(operator.add, one, other), trees)


def in_precision(tree: Tree, dtype: Any) -> Tree:
    """The pytree with its floating-point arrays in this type, as of JAX's."""
    return jax.tree.map(lambda x: jnp.asarray(x, dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)
