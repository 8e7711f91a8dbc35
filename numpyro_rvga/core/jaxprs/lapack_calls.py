"""Programs whose calls of LAPACK for batches of matrices are made one after the other.

On CPUs, jaxlib divides such a call among the threads of a pool, and waits for them in one of these threads. As many
calls at the same time as there are threads wait for ever. Two are enough on a machine with two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core as jex_core

from .interpret import interpret
from .primitives import equations, equations_of, form_of, jaxprs_of, results

LAPACK_PRIMITIVES = frozenset(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu schur svd triangular_solve tridiagonal".split()
)


def may_wait_for_ever(jaxpr: jex_core.Jaxpr) -> bool:
    """Whether a program has two calls for batches: XLA may start them at the same time."""
    return len(list(islice(filter(_is_for_a_batch, equations(jaxpr)), 2))) > 1


def in_turn(closed: jex_core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The program as a function of its inputs, with each call for a batch after the last one."""

    def evaluated(*inputs: Any) -> list[Any]:
        last: Any = None  # a result of the last call

        def rule(eqn: jex_core.JaxprEqn, inputs: list[Any]) -> list[Any] | None:
            nonlocal last
            if not any(map(_is_for_a_batch, equations_of(eqn))):
                return results(eqn, inputs, unrolled=False)
            is_loop = eqn.primitive.name in ("while", "scan", "cond")
            if len(jaxprs_of(eqn)) == 1 and not is_loop:
                return None
            at = next((i for i, x in enumerate(inputs) if _has_numbers(x)), None)
            if last is not None and at is not None:
                inputs[at] = _after(last, inputs[at])
            changed = {name: _ordered(value) for name, value in eqn.params.items()} if is_loop else {}
            outputs = results(eqn, inputs, unrolled=False, **changed)
            last = next((x for x in outputs if _has_numbers(x)), last)
            return outputs

        return interpret(closed.jaxpr, closed.consts, inputs, rule)

    return evaluated


def _is_for_a_batch(eqn: jex_core.JaxprEqn) -> bool:
    return eqn.primitive.name in LAPACK_PRIMITIVES and math.prod(form_of(eqn.invars[0]).shape[:-2]) > 1


def _ordered(value: Any) -> Any:
    """A loop's program, or those of a choice, with the calls of each in turn; other parameters unchanged."""
    if isinstance(value, tuple):
        return tuple(map(_ordered, value))
    if not isinstance(value, jex_core.ClosedJaxpr) or not may_wait_for_ever(value.jaxpr):
        return value
    return jax.make_jaxpr(in_turn(value))(*map(form_of, value.jaxpr.invars))


def _has_numbers(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.number) and jnp.size(x) > 0


def _after(last: Any, x: Array) -> Array:
    """``x``, once ``last`` is there. XLA does not drop a product of floats with zero."""
    number = jnp.real(jnp.ravel(last)[:1]).astype(jnp.float32)
    nothing = 0.0 * jnp.where(jnp.isfinite(number), number, 0.0)
    return x + nothing.reshape((1,) * jnp.ndim(x)).astype(jnp.result_type(x))
