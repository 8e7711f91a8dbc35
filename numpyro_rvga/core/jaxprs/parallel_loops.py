"""Loops whose steps hand on no result of the step before, or only multiples of it: all steps at once.

State-space models are written as a scan whose carry is the state. Given the states of all steps, which are latent
sites, a step takes nothing of the step before but its state; so the loop is an operation on arrays, and each term
depends on the few states that it names. Seasons, trends and sums hand on more, c_t = A_t c_(t-1) + b_t, where A_t takes
constants alone: then all c are one product of a constant matrix and all b.

Other loops stay loops, but their outputs that depend on constants alone are computed beforehand.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.flatten_util import ravel_pytree

from .degrees import is_affine
from .interpret import of_outputs, sources_of
from .primitives import inner_program, is_float, scan_counts

MOST_NUMBERS = 2**22  # in the matrix that takes the place of a linear loop


class Stage(NamedTuple):
    """Carried values that are computed together, after those of earlier stages.

    :ivar slopes: of the values after a step in those before it, raveled (n, n), as a program of these and of all inputs
        of the step; None: they do not depend on them.
    """

    carries: list[int]
    slopes: jex_core.ClosedJaxpr | None


def in_parallel(eqn: JaxprEqn, is_constant: Sequence[bool]) -> jex_core.ClosedJaxpr | None:
    """A scan as a program without steps, of the same inputs and outputs.

    The carried values are computed one after the other: first those that take constants alone, as a counter does, by a
    scan of their own; then what a step makes of its inputs and of values that are computed already, shifted by one
    step; and what is linear in itself besides.

    :param is_constant: of the equation's inputs, whether each is a constant.
    :return: None if a carried value is left that is none of these.
    """
    _, sources, alone, precomputed = _dependences(eqn, is_constant)
    carries = frozenset(sources)
    stages: list[Stage] = []
    resolved = alone
    while resolved != carries:
        left = sorted(carries - resolved)
        ready = [c for c in left if sources[c] & carries <= resolved]
        stage = Stage(ready, None) if ready else _linear_stage(eqn, left, sources, precomputed)
        if stage is None:
            return None
        stages.append(stage)
        resolved = resolved | frozenset(stage.carries)
    return _program(eqn, is_constant, sorted(alone), stages, range(len(eqn.outvars)))


def constant_outputs(eqn: JaxprEqn, is_constant: Sequence[bool]) -> tuple[list[int], jex_core.ClosedJaxpr] | None:
    """The outputs of a scan that depend on constants alone: their numbers, and a program of the same inputs.

    :return: None if there are none.
    """
    takes, sources, _, precomputed = _dependences(eqn, is_constant)
    numbers = [i for i, own in enumerate(takes) if own <= precomputed]
    alone = sources.keys() & frozenset().union(*[takes[i] for i in numbers])
    while (more := alone.union(*[sources.keys() & sources[c] for c in alone])) != alone:
        alone = more
    return (numbers, _program(eqn, is_constant, sorted(alone), [], numbers)) if numbers else None


def _dependences(
    eqn: JaxprEqn, is_constant: Sequence[bool]
) -> tuple[list[frozenset[int]], dict[int, frozenset[int]], frozenset[int], frozenset[int]]:
    """Which inputs the results of a scan's step take.

    :return: by output; by carried value, as an input: those of its value after the step; carried values that take
        constants and each other only; these, and all constants.
    """
    start, num_carry = scan_counts(eqn)
    carries = frozenset(range(start, start + num_carry))
    takes = sources_of(_body(eqn), [frozenset([i]) for i in range(len(eqn.invars))])
    sources = dict(zip(sorted(carries), takes))
    constants = frozenset(i for i, constant in enumerate(is_constant) if constant)
    alone = carries & constants
    while (fewer := frozenset(c for c in alone if sources[c] <= alone | (constants - carries))) != alone:
        alone = fewer
    return takes, sources, alone, alone | (constants - carries)


def _program(
    eqn: JaxprEqn, is_constant: Sequence[bool], alone: list[int], stages: list[Stage], numbers: Sequence[int]
) -> jex_core.ClosedJaxpr:
    """See :func:`_at_once`."""
    avals = [v.aval for v in eqn.invars]
    return jax.make_jaxpr(lambda *inputs: _at_once(eqn, is_constant, alone, stages, numbers, inputs))(*avals)


def _body(eqn: JaxprEqn) -> jex_core.ClosedJaxpr:
    """The traced function of one step."""
    return jex_core.ClosedJaxpr(*inner_program(eqn))


def _linear_stage(
    eqn: JaxprEqn, left: list[int], sources: dict[int, frozenset[int]], precomputed: frozenset[int]
) -> Stage | None:
    """A carried value that is linear in itself, or all that are left together.

    :param sources: which inputs of a step each takes. :param precomputed: inputs of a step that are constants.
    """
    body, start = _body(eqn), scan_counts(eqn)[0]
    for group in [*([c] for c in left), left]:
        avals = [body.in_avals[c] for c in group]
        size = sum(aval.size for aval in avals)
        takes_others = any(sources[c] & frozenset(left) - frozenset(group) for c in group)
        fits = (eqn.params["length"] * size) ** 2 <= MOST_NUMBERS
        if takes_others or not fits or not all(is_float(aval.dtype) for aval in avals):
            continue
        if not is_affine(of_outputs(body, [c - start for c in group]), [i in group for i in range(len(body.in_avals))]):
            continue
        slopes = jax.make_jaxpr(jax.jacfwd(_raveled(body, start, group)))(
            jnp.zeros(size, avals[0].dtype), *[jnp.zeros(aval.shape, aval.dtype) for aval in body.in_avals]
        )
        takes = sources_of(slopes, [frozenset(), *[frozenset([i]) for i in range(len(body.in_avals))]])[0]
        if takes <= precomputed:
            return Stage(group, slopes)
    return None


def _raveled(body: jex_core.ClosedJaxpr, start: int, group: list[int]) -> Callable[..., Array]:
    """Some carried values before a step, raveled (n,), and all inputs of the step -> those values after it."""
    program = of_outputs(body, [c - start for c in group])
    unravel = ravel_pytree([jnp.zeros(body.in_avals[c].shape, body.in_avals[c].dtype) for c in group])[1]

    def after(before: Array, *inputs: Array) -> Array:
        at = list(inputs)
        for c, value in zip(group, unravel(before)):
            at[c] = value
        return ravel_pytree(jex_core.jaxpr_as_fun(program)(*at))[0]

    return after


def _at_once(
    eqn: JaxprEqn,
    is_constant: Sequence[bool],
    alone: list[int],
    stages: list[Stage],
    numbers: Sequence[int],
    inputs: Sequence[Array],
) -> list[Array]:
    """Some outputs of a scan, all steps at once.

    :param alone: carried values that take constants and each other only: a scan of their own. :param stages: others,
        in an order in which each takes the results of those before it. :param numbers: of the outputs.
    """
    params, body, (start, count) = eqn.params, _body(eqn), scan_counts(eqn)
    length = params["length"]
    stop = start + count
    flip = (lambda x: x[::-1]) if params["reverse"] else (lambda x: x)
    arguments = [*inputs[:stop], *map(flip, inputs[stop:])]
    before: dict[int, Array] = {}  # what each step starts from

    def each(program: jex_core.ClosedJaxpr, at: list[Array], *first: Array) -> list[Array]:
        """A program's outputs for all steps. :param first: inputs before those of a step, the same for all."""
        axes = [None] * (len(first) + start) + [0] * (len(at) - start)
        return jax.vmap(lambda *x: jex_core.jaxpr_as_fun(program)(*x), axes, axis_size=length)(*first, *at)

    def with_carried(arguments: list[Array], carried: dict[int, Array]) -> list[Array]:
        """Inputs of all steps, with zeros for carried values that are not given."""
        zeros = {c: jnp.zeros((length, *inputs[c].shape), inputs[c].dtype) for c in range(start, stop)}
        return [*arguments[:start], *(zeros | carried).values(), *arguments[stop:]]

    def at_steps(numbers: list[int]) -> list[Array]:
        """Some outputs of all steps, from the inputs that are computed so far."""
        return each(of_outputs(body, numbers), with_carried(arguments, before))

    def slopes_of(program: jex_core.ClosedJaxpr) -> Array:
        """(length, n, n), of constants alone, so that they are one."""
        constants = [x if constant else jnp.zeros_like(x) for x, constant in zip(arguments, is_constant)]
        nowhere = jnp.zeros(program.in_avals[0].shape, program.in_avals[0].dtype)
        return each(program, with_carried(constants, {c: before[c] for c in alone}), nowhere)[0]

    if alone:
        before.update(zip(alone, _histories(eqn, is_constant, alone, arguments)))
    for stage in stages:
        after = at_steps([c - start for c in stage.carries])
        shifted = [jnp.concatenate([inputs[c][None], x[:-1]]) for c, x in zip(stage.carries, after)]
        if stage.slopes is not None:
            shifted = _added_up(slopes_of(stage.slopes), shifted)
        before.update(zip(stage.carries, shifted))
    return [x[-1] if i < count else flip(x) for i, x in zip(numbers, at_steps(list(numbers)))]


def _added_up(slopes: Array, added: list[Array]) -> list[Array]:
    """The carried values before each step: c_t = A_(t-1) c_(t-1) + b_t, with c_0 = b_0.

    :param slopes: A, (T, n, n). :param added: b, arrays (T, ...) of n numbers for each step together.
    """
    length, size = slopes.shape[:2]

    def step(t: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        now, rows = carry  # now: dc_t / db_k, (T, n, n)
        now = jnp.einsum("ij,kjl->kil", slopes[t - 1], now).at[t].set(jnp.eye(size, dtype=slopes.dtype))
        return now, rows.at[t].set(now)

    nothing = jnp.zeros((length, size, size), slopes.dtype)
    first = nothing.at[0].set(jnp.eye(size, dtype=slopes.dtype))
    rows = jnp.zeros((length, *first.shape), slopes.dtype).at[0].set(first)
    _, rows = lax.fori_loop(1, length, step, (first, rows))  # (T, T, n, n)
    matrix = jnp.swapaxes(rows, 1, 2).reshape(length * size, length * size)
    unravel = ravel_pytree([x[0] for x in added])[1]
    flat = jax.vmap(lambda x: ravel_pytree(x)[0])(added)
    return jax.vmap(unravel)((matrix @ jnp.ravel(flat)).reshape(length, size))


def _histories(eqn: JaxprEqn, is_constant: Sequence[bool], alone: list[int], arguments: list[Array]) -> list[Array]:
    """The carried values before each step, of those that take constants only."""
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
