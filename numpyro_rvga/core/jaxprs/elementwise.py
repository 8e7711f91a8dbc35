"""Programs that do the same to each entry of arrays, applied to arrays of any shape."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from .interpret import interpret
from .primitives import (
    INLINED_PRIMITIVES,
    POINTWISE_PRIMITIVES,
    binder,
    form_of,
    inner_program,
    is_float,
    special_function,
)

RESHAPING_PRIMITIVES = frozenset("broadcast_in_dim expand_dims reshape squeeze".split())


def is_pointwise_call(eqn: JaxprEqn) -> bool:
    """Whether a custom_jvp call is elementwise, its inputs broadcast: only elementwise steps are inside."""
    if len(eqn.outvars) != 1:
        return False
    out = form_of(eqn.outvars[0]).shape
    return all(_stretches(form_of(v).shape, out) for v in eqn.invars) and _is_elementwise(
        eqn.params["call_jaxpr"].jaxpr
    )


def pointwise_apply(eqn: JaxprEqn) -> Callable:
    """The function of an elementwise equation, on arrays of any one shape."""
    special = special_function(eqn)
    if special is not None:
        return special
    bind_all = binder(eqn)

    def bind(*arguments):
        result = bind_all(*arguments)
        return result[0] if eqn.primitive.multiple_results else result

    if eqn.primitive.name != "custom_jvp_call":
        return bind
    shapes = [form_of(v).shape for v in eqn.invars]
    one_entry = _call_on_entry(eqn)

    def apply(*arguments):  # the call is compiled for its own shape; elsewhere it is mapped over entries
        if [jnp.shape(a) for a in arguments] == shapes:
            return bind(*arguments)
        shape = jnp.shape(arguments[0])
        flat = jax.vmap(one_entry)(*[jnp.ravel(a) for a in arguments])
        return jnp.reshape(flat, shape)

    return apply


def _call_on_entry(eqn: JaxprEqn) -> Callable:
    """An elementwise custom_jvp call as a function of scalars, with its own derivative if that is elementwise too."""
    bind_all = binder(eqn)
    avals = [jax.ShapeDtypeStruct(form_of(v).shape, form_of(v).dtype) for v in eqn.invars]

    def of_entry(*scalars):
        return _on_entry(*inner_program(eqn), scalars)[0]

    if not all(is_float(aval.dtype) for aval in avals):
        return of_entry
    moved = jax.make_jaxpr(lambda x, dx: jax.jvp(lambda *x: bind_all(*x)[0], x, dx))(tuple(avals), tuple(avals))
    if not _is_elementwise(moved.jaxpr):
        return of_entry
    call = jax.custom_jvp(of_entry)

    @call.defjvp
    def derivative(primals, tangents):
        return tuple(_on_entry(moved.jaxpr, moved.consts, [*primals, *tangents]))

    return call


def _on_entry(jaxpr: Jaxpr, consts: Sequence, scalars: Sequence) -> list:
    """An elementwise program's outputs for one entry."""

    def rule(eqn: JaxprEqn, inputs: list) -> list | None:
        name = eqn.primitive.name
        if name in RESHAPING_PRIMITIVES:
            return inputs[:1]
        if name in INLINED_PRIMITIVES:
            return None
        return [pointwise_apply(eqn)(*inputs)]

    return interpret(jaxpr, consts, list(scalars), rule, lambda value: jnp.reshape(jnp.asarray(value), ()))


def _is_elementwise(jaxpr: Jaxpr) -> bool:
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in INLINED_PRIMITIVES:
            if not _is_elementwise(inner_program(eqn)[0]):
                return False
        elif name == "custom_jvp_call":
            if not is_pointwise_call(eqn):
                return False
        elif name in RESHAPING_PRIMITIVES:
            before, after = form_of(eqn.invars[0]).shape, form_of(eqn.outvars[0]).shape
            if not _stretches(before, after):
                return False
            axes, last = eqn.params.get("broadcast_dimensions"), range(len(after) - len(before), len(after))
            if axes is not None and math.prod(before) != 1 and tuple(axes) != tuple(last):
                return False  # they go elsewhere than NumPy puts them
        elif name not in POINTWISE_PRIMITIVES:
            return False
    return True


def _stretches(before: tuple[int, ...], after: tuple[int, ...]) -> bool:
    """Whether arrays of one shape are broadcast to the other as NumPy does it."""
    aligned = before[::-1], after[::-1]
    return math.prod(before) == 1 or (len(before) <= len(after) and all(b in (1, a) for b, a in zip(*aligned)))
