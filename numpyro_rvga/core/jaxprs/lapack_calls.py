"""Programs whose calls of LAPACK for batches of matrices are made one after the other.

On CPUs, jaxlib divides such a call among the threads of a pool, and waits for them in one of these threads. As many
calls at the same time as there are threads wait for ever. Two are enough on a machine with two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core as jex_core

from .primitives import binder, equations, equations_of, form_of, inner_program, jaxprs_of

LAPACK_PRIMITIVES = frozenset(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu schur svd triangular_solve tridiagonal".split()
)


def may_wait_for_ever(jaxpr: jex_core.Jaxpr) -> bool:
    """Whether a program has two calls for batches: XLA may start them at the same time."""
    return len(list(islice(filter(_is_for_a_batch, equations(jaxpr)), 2))) > 1


def in_turn(closed: jex_core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The program as a function of its inputs, with each call for a batch after the last one."""
    return lambda *inputs: _evaluate(closed.jaxpr, closed.consts, inputs, None)[0]


def _is_for_a_batch(eqn: jex_core.JaxprEqn) -> bool:
    return eqn.primitive.name in LAPACK_PRIMITIVES and math.prod(form_of(eqn.invars[0]).shape[:-2]) > 1


def _evaluate(jaxpr: jex_core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], last: Any) -> tuple[list[Any], Any]:
    """The outputs, and a result of the last call; None if there was none."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs]))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, jex_core.Literal) else values[variable]

    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        has_calls = any(map(_is_for_a_batch, equations_of(eqn)))
        outputs, last = _in_turn(eqn, given, last) if has_calls else (_bound(eqn, given), last)
        values.update(zip(eqn.outvars, outputs))
    return [read(v) for v in jaxpr.outvars], last


def _in_turn(eqn: jex_core.JaxprEqn, inputs: list[Any], last: Any) -> tuple[list[Any], Any]:
    """The outputs of an equation with calls, which begin once ``last`` is there, and a result of its last call."""
    is_loop = eqn.primitive.name in ("while", "scan", "cond")
    if len(jaxprs_of(eqn)) == 1 and not is_loop:
        return _evaluate(*inner_program(eqn), inputs, last)
    at = next((i for i, x in enumerate(inputs) if _has_numbers(x)), None)
    if last is not None and at is not None:
        inputs[at] = _after(last, inputs[at])
    changed = {name: _ordered(value) for name, value in eqn.params.items()} if is_loop else {}
    outputs = _bound(eqn, inputs, **changed)
    return outputs, next((x for x in outputs if _has_numbers(x)), last)


def _ordered(value: Any) -> Any:
    """A loop's program, or those of a choice, with the calls of each in turn; other parameters unchanged."""
    if isinstance(value, tuple):
        return tuple(map(_ordered, value))
    if not isinstance(value, jex_core.ClosedJaxpr) or not may_wait_for_ever(value.jaxpr):
        return value
    return jax.make_jaxpr(in_turn(value))(*map(form_of, value.jaxpr.invars))


def _bound(eqn: jex_core.JaxprEqn, inputs: list[Any], **changed: Any) -> list[Any]:
    outputs = binder(eqn, unrolled=False, **changed)(*inputs)
    return list(outputs) if eqn.primitive.multiple_results else [outputs]


def _has_numbers(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.number) and jnp.size(x) > 0


def _after(last: Any, x: Array) -> Array:
    """``x``, once ``last`` is there. XLA does not drop a product of floats with zero."""
    number = jnp.real(jnp.ravel(last)[:1]).astype(jnp.float32)
    nothing = 0.0 * jnp.where(jnp.isfinite(number), number, 0.0)
    return x + nothing.reshape((1,) * jnp.ndim(x)).astype(jnp.result_type(x))
