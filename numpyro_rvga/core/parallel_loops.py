"""Loops whose steps hand on no result of the step before: all steps at once.

State-space models are written as a scan whose carry is the state. Once the states of all steps are known, as latent
sites are, a step takes nothing of the step before but its state; so the loop is an operation on arrays, and each term
depends on the few states that it names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core as jex_core

from .interpret import of_outputs, sources_of


def in_parallel(eqn: Any, is_constant: Sequence[bool]) -> jex_core.ClosedJaxpr | None:
    """A scan as a program without steps, of the same inputs and outputs.

    What is carried is found one after the other: first what takes constants alone, as a counter does, by a scan of its
    own; then what a step makes of its inputs and of what is found already, shifted by one step. None: there is more.

    :param is_constant: of the equation's inputs, whether each is a constant.
    """
    start, num_carry = eqn.params["num_consts"], eqn.params["num_carry"]
    carries = frozenset(range(start, start + num_carry))
    of_outputs_all = sources_of(eqn.params["jaxpr"], [frozenset([i]) for i in range(len(eqn.invars))])
    sources = dict(zip(sorted(carries), of_outputs_all))
    alone = _closed(carries, sources, frozenset(i for i, known in enumerate(is_constant) if known))
    stages, found = [], alone
    while found != carries:
        ready = [c for c in sorted(carries - found) if sources[c] & carries <= found]
        if not ready:
            return None
        stages.append(ready)
        found = found | frozenset(ready)
    avals = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(lambda *inputs: _at_once(eqn, is_constant, sorted(alone), stages, inputs))(*avals)


def _closed(carries: frozenset[int], sources: dict[int, frozenset[int]], constants: frozenset[int]) -> frozenset[int]:
    """The carried values that take constants and each other only."""
    closed = carries & constants
    while True:
        fewer = frozenset(c for c in closed if sources[c] <= closed | (constants - carries))
        if fewer == closed:
            return closed
        closed = fewer


def _at_once(
    eqn: Any, is_constant: Sequence[bool], alone: list[int], stages: list[list[int]], inputs: Sequence[Array]
) -> list[Array]:
    params, body = eqn.params, eqn.params["jaxpr"]
    start, count, length = params["num_consts"], params["num_carry"], params["length"]
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


def _histories(eqn: Any, is_constant: Sequence[bool], alone: list[int], arguments: list[Array]) -> list[Array]:
    """What each step starts from, of carried values that take constants only."""
    start, count = eqn.params["num_consts"], eqn.params["num_carry"]
    stop = start + count
    program = of_outputs(eqn.params["jaxpr"], [c - start for c in alone])
    avals = eqn.params["jaxpr"].in_avals

    def step(state: list[Array], slices: list[Array]) -> tuple[list[Array], list[Array]]:
        values = [x if is_constant[i] else jnp.zeros(avals[i].shape, avals[i].dtype) for i, x in enumerate(arguments)]
        for c, value in zip(alone, state):
            values[c] = value
        known = iter(slices)
        for i in range(stop, len(values)):
            if is_constant[i]:
                values[i] = next(known)
        return jex_core.jaxpr_as_fun(program)(*values), state

    constant_slices = [arguments[i] for i in range(stop, len(arguments)) if is_constant[i]]
    return lax.scan(step, [arguments[c] for c in alone], constant_slices, length=eqn.params["length"])[1]
