"""Scalar functions that add up an array, as that array."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from ..pytrees import PyTree
from .interpret import interpret, is_inlined
from .primitives import form_of, results

RESHAPING = frozenset(  # of one number
    "reshape squeeze expand_dims broadcast_in_dim convert_element_type copy copy_p reduce_sum".split()
)


class _Sum(NamedTuple):
    """A number as the sum of arrays (n,)."""

    parts: tuple[Array, ...]

    def whole(self, form: jax.ShapeDtypeStruct) -> Array:
        return jnp.reshape(sum(map(jnp.sum, self.parts)), form.shape).astype(form.dtype)

    def times(self, factor: Array | float) -> _Sum:
        """``factor``: one number, of any shape."""
        return _Sum(tuple(part * jnp.reshape(factor, ()) for part in self.parts))

    def plus(self, other: _Sum | Array) -> _Sum:
        """A number is shared out among all addends, so that these stay alike."""
        if isinstance(other, _Sum):
            return _Sum(self.parts + other.parts)
        share = jnp.reshape(other, ()) / sum(map(len, self.parts))
        return _Sum(tuple(part + share for part in self.parts))


def addends_of(function: Callable[..., Array], *args: PyTree) -> Callable[..., Array] | None:
    """A function whose array (n,) adds up to the number that ``function`` returns; None if that is no sum.

    Multiples of sums, their sums, and products of two vectors are sums too.

    :param args: arrays or shapes of the arguments.
    """
    closed = jax.make_jaxpr(function)(*args)

    def evaluated(*args: PyTree) -> Any:
        return interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), _evaluated)[0]

    def addends(*args: PyTree) -> Array:
        return jnp.concatenate(evaluated(*args).parts).astype(form_of(closed.jaxpr.outvars[0]).dtype)

    is_sum = []
    jax.eval_shape(lambda *args: is_sum.append(isinstance(evaluated(*args), _Sum)), *args)
    return addends if is_sum[0] else None


def _evaluated(eqn: JaxprEqn, inputs: list) -> list | None:
    """An equation's outputs; None if it calls a program."""
    if is_inlined(eqn):
        return None
    if inputs and len(eqn.outvars) == 1 and form_of(eqn.outvars[0]).size == 1:
        number = _as_sum(eqn, inputs)
        if number is not None:
            return [number]
    forms = map(form_of, eqn.invars)
    return results(eqn, [x.whole(form) if isinstance(x, _Sum) else x for x, form in zip(inputs, forms)])


def _as_sum(eqn: JaxprEqn, inputs: list) -> _Sum | None:
    """One number as a sum; None if the equation says nothing of how it adds up."""
    name, (first, *others) = eqn.primitive.name, inputs
    if name == "reduce_sum" and not isinstance(first, _Sum) and form_of(eqn.invars[0]).size > 1:
        return _Sum((jnp.ravel(first),))
    if name == "dot_general" and all(map(_is_vector, eqn.invars)):
        return _Sum((jnp.ravel(first) * jnp.ravel(others[0]),))
    if not any(isinstance(x, _Sum) for x in inputs):
        return None
    if name in RESHAPING:
        return first
    if name == "neg":
        return first.times(-1)
    if name == "mul" and not (isinstance(first, _Sum) and isinstance(others[0], _Sum)):
        return first.times(others[0]) if isinstance(first, _Sum) else others[0].times(first)
    if name == "div" and isinstance(first, _Sum):
        return None if isinstance(others[0], _Sum) else first.times(1 / others[0])
    if name in ("add", "add_any", "sub"):
        a, b = first, others[0]
        if name == "sub":
            b = b.times(-1) if isinstance(b, _Sum) else -b
        return a.plus(b) if isinstance(a, _Sum) else b.plus(a)
    return None


def _is_vector(variable: Any) -> bool:
    """Whether it has several entries, along one axis."""
    return sum(size > 1 for size in form_of(variable).shape) == 1
