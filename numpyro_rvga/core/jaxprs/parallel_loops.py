"""Loops whose steps hand on no result of the step before: all steps at once.

State-space models are written as a scan whose carry is the state. Once the states of all steps are known, as latent
sites are, a step takes nothing of the step before but its state; so the loop is an operation on arrays, and each term
depends on the few states that it names.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from .interpret import of_outputs, sources_of
from .primitives import inner_program, scan_counts


def in_parallel(eqn: JaxprEqn, is_constant: Sequence[bool]) -> jex_core.ClosedJaxpr | None:
    """A scan as a program without steps, of the same inputs and outputs.

    The carried values are computed one after the other: first those that take constants alone, as a counter does, by a
    scan of their own; then what a step makes of its inputs and of values that are computed already, shifted by one
    step.

    :param is_constant: of the equation's inputs, whether each is a constant.
    :return: None if a carried value is left that is neither.
    """
    start, num_carry = scan_counts(eqn)
    carries = frozenset(range(start, start + num_carry))
    of_outputs_all = sources_of(_body(eqn), [frozenset([i]) for i in range(len(eqn.invars))])
    sources = dict(zip(sorted(carries), of_outputs_all))
    alone = _closed(carries, sources, frozenset(i for i, constant in enumerate(is_constant) if constant))
    stages, resolved = [], alone
    while resolved != carries:
        ready = [c for c in sorted(carries - resolved) if sources[c] & carries <= resolved]
        if not ready:
            return None
        stages.append(ready)
        resolved = resolved | frozenset(ready)
    avals = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(lambda *inputs: _at_once(eqn, is_constant, sorted(alone), stages, inputs))(*avals)


def _body(eqn: JaxprEqn) -> jex_core.ClosedJaxpr:
    """What one step does."""
    return jex_core.ClosedJaxpr(*inner_program(eqn))


def _closed(carries: frozenset[int], sources: dict[int, frozenset[int]], constants: frozenset[int]) -> frozenset[int]:
    """The carried values that take constants and each other only."""
    closed = carries & constants
    while True:
        fewer = frozenset(c for c in closed if sources[c] <= closed | (constants - carries))
        if fewer == closed:
            return closed
        closed = fewer


def _at_once(
    eqn: JaxprEqn, is_constant: Sequence[bool], alone: list[int], stages: list[list[int]], inputs: Sequence[Array]
) -> list[Array]:
    """The outputs of a scan, all steps at once.

    :param alone: carried values that take constants and each other only: a scan of their own. :param stages: the
        others, in an order in which each takes what is known before it.
    """
    params, body, (start, count) = eqn.params, _body(eqn), scan_counts(eqn)
    length = params["length"]
    stop = start + count
    flip = (lambda x: x[::-1]) if params["reverse"] else (lambda x: x)
    arguments = [*inputs[:stop], *map(flip, inputs[stop:])]
    before: dict[int, Array] = {}  # what each step starts from

    def at_steps(numbers: list[int]) -> list[Array]:
        """Some outputs of all steps."""
        program = of_outputs(body, numbers)
        at = list(arguments)
        for c in range(start, stop):
            shape = (length, *inputs[c].shape)
            at[c] = before[c] if c in before else jnp.zeros(shape, inputs[c].dtype)
        axes = [None] * start + [0] * (len(at) - start)
        return jax.vmap(lambda *x: jex_core.jaxpr_as_fun(program)(*x), axes, axis_size=length)(*at)

    if alone:
        before.update(zip(alone, _histories(eqn, is_constant, alone, arguments)))
    for stage in stages:
        for c, after in zip(stage, at_steps([c - start for c in stage])):
            before[c] = jnp.concatenate([inputs[c][None], after[:-1]])
    outputs = at_steps(list(range(len(body.out_avals))))
    return [*(x[-1] for x in outputs[:count]), *map(flip, outputs[count:])]


def _histories(eqn: JaxprEqn, is_constant: Sequence[bool], alone: list[int], arguments: list[Array]) -> list[Array]:
    """What each step starts from, of carried values that take constants only."""
    body, (start, count) = _body(eqn), scan_counts(eqn)
    stop = start + count
    program, avals = of_outputs(body, [c - start for c in alone]), body.in_avals

    def step(number: Array, carry: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        state, histories = carry
        values = [x if is_constant[i] else jnp.zeros(avals[i].shape, avals[i].dtype) for i, x in enumerate(arguments)]
        for c, value in zip(alone, state):
            values[c] = value
        for i in range(stop, len(values)):
            if is_constant[i]:
                values[i] = arguments[i][number]
        after = jex_core.jaxpr_as_fun(program)(*values)
        return after, [history.at[number].set(x) for history, x in zip(histories, state)]

    # Not by a scan: while something else is traced, JAX 0.7 cannot evaluate one that stacks its outputs.
    state = [arguments[c] for c in alone]
    length = eqn.params["length"]
    return lax.fori_loop(0, length, step, (state, [jnp.zeros((length, *x.shape), x.dtype) for x in state]))[1]
