"""Programs whose calls of LAPACK for batches of matrices are made one after the other.

On CPUs, jaxlib divides such a call among the threads of a pool, and waits for them in one of these threads. As many
calls at the same time as there are threads wait for ever. Two are enough on a machine with two cores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core as jex_core

from .primitives import binder, form_of

LAPACK_PRIMITIVES = frozenset(
    "cholesky eig eigh geqp3 geqrf hessenberg householder_product lu schur svd triangular_solve tridiagonal".split()
)


def may_wait_for_ever(jaxpr: jex_core.Jaxpr) -> bool:
    """Whether a program has two calls for batches: XLA may start them at the same time."""
    return _num_calls(jaxpr) > 1


def in_turn(closed: jex_core.ClosedJaxpr) -> Callable[..., list[Any]]:
    """The program as a function of its inputs, with each call for a batch after the last one."""
    return lambda *inputs: _evaluate(closed.jaxpr, closed.consts, inputs, None)[0]


def _num_calls(jaxpr: jex_core.Jaxpr) -> int:
    """How many calls for batches it has, those of a loop once; no more than two are counted."""
    count = 0
    for eqn in jaxpr.eqns:
        count += _num_calls_of(eqn)
        if count > 1:
            break
    return count


def _num_calls_of(eqn: jex_core.JaxprEqn) -> int:
    if eqn.primitive.name in LAPACK_PRIMITIVES:
        return int(math.prod(form_of(eqn.invars[0]).shape[:-2]) > 1)
    return reduce(lambda count, closed: count + _num_calls(closed.jaxpr), _programs_in(eqn), 0)


def _programs_in(eqn: jex_core.JaxprEqn) -> Iterator[jex_core.ClosedJaxpr]:
    for value in eqn.params.values():
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, jex_core.ClosedJaxpr):
                yield each
            elif isinstance(each, jex_core.Jaxpr):
                yield jex_core.ClosedJaxpr(each, ())


def _evaluate(jaxpr: jex_core.Jaxpr, consts: Sequence[Any], inputs: Sequence[Any], last: Any) -> tuple[list[Any], Any]:
    """The outputs, and a result of the last call; None if there was none."""
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs]))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, jex_core.Literal) else values[variable]

    for eqn in jaxpr.eqns:
        given = [read(v) for v in eqn.invars]
        outputs, last = _in_turn(eqn, given, last) if _num_calls_of(eqn) else (_bound(eqn, given), last)
        values.update(zip(eqn.outvars, outputs))
    return [read(v) for v in jaxpr.outvars], last


def _in_turn(eqn: jex_core.JaxprEqn, inputs: list[Any], last: Any) -> tuple[list[Any], Any]:
    """The outputs of an equation with calls, which begin once ``last`` is there, and a result of its last call."""
    programs, is_loop = list(_programs_in(eqn)), eqn.primitive.name in ("while", "scan", "cond")
    if len(programs) == 1 and not is_loop:
        return _evaluate(programs[0].jaxpr, programs[0].consts, inputs, last)
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
