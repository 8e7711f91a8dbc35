"""Interpreters of jaxprs: dependence of outputs on inputs, partial evaluation, and what a program indexes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn

from ..pytrees import PyTree
from .primitives import INLINED_PRIMITIVES, inner_program, results

Rule = Callable[[JaxprEqn, list], list | None]


def interpret(
    jaxpr: Jaxpr, consts: Sequence, inputs: Sequence, rule: Rule, constant: Callable[[Any], Any] = lambda value: value
) -> list:
    """Evaluate a jaxpr with a rule in place of each equation.

    :param jaxpr: an open jaxpr.
    :param consts: values of its constants.
    :param inputs: one for each input variable, of any type that the rule understands.
    :param rule: (equation, its inputs) -> its outputs. None: the equation calls a program, which is then read.
    :param constant: a constant's value -> what the rule gets in its place.
    :return: one result for each output variable.
    """
    environment = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*map(constant, consts), *inputs]))
    return _evaluate(jaxpr.eqns, environment, jaxpr.outvars, rule, constant)


def _evaluate(
    equations: Sequence,
    environment: dict,
    outputs: Sequence,
    rule: Rule = results,
    constant: Callable[[Any], Any] = jnp.asarray,
) -> list:
    """The outputs of equations. ``environment``: values of the variables that are known; results are added to it."""

    def read(atom: Any) -> Any:
        return constant(atom.val) if isinstance(atom, jex_core.Literal) else environment[atom]

    for eqn in equations:
        arguments = [read(atom) for atom in eqn.invars]
        made = rule(eqn, arguments)
        if made is None:
            made = interpret(*inner_program(eqn), arguments, rule, constant)
        environment.update(zip(eqn.outvars, made))
    return [read(atom) for atom in outputs]


def is_inlined(eqn: JaxprEqn) -> bool:
    """Whether an equation calls a jaxpr that can be inlined."""
    return eqn.primitive.name in INLINED_PRIMITIVES and ("jaxpr" in eqn.params or "call_jaxpr" in eqn.params)


def inlined_results(eqn: JaxprEqn, inputs: list) -> list | None:
    """The rule that evaluates an equation, or has the program that it calls read in its place."""
    return None if is_inlined(eqn) else results(eqn, inputs)


def depends_on(function: Callable[[dict], dict], inputs: dict[str, Any]) -> dict[str, frozenset[str]]:
    """The names of the inputs that each named output depends on, read from the jaxpr."""
    names = sorted(inputs)
    closed, shape = jax.make_jaxpr(lambda *arrays: function(dict(zip(names, arrays))), return_shape=True)(
        *[inputs[n] for n in names]
    )
    sources = [frozenset([name]) for name in names for _ in jax.tree.leaves(inputs[name])]

    outputs = iter(sources_of(closed, sources))
    return {name: frozenset().union(*[next(outputs) for _ in jax.tree.leaves(shape[name])]) for name in sorted(shape)}


def sources_of(closed: jex_core.ClosedJaxpr, sources: Sequence[frozenset]) -> list[frozenset]:
    """For each output, the union of the sets that stand for the inputs which it depends on."""

    def union(eqn: JaxprEqn, arguments: list) -> list | None:
        return None if is_inlined(eqn) else [frozenset().union(*arguments)] * len(eqn.outvars)

    return interpret(closed.jaxpr, closed.consts, sources, union, lambda value: frozenset())


class PartialEvaluation(NamedTuple):
    """A function of data and parameters in two stages: the part that depends on the data alone, and the rest.

    :ivar residuals: data -> the arrays that depend on the data alone and that ``finish`` needs.
    :ivar finish: (residuals, *parameters) -> the function's value.
    :ivar shapes: shapes of the residuals.
    :ivar program: the jaxpr of ``finish`` as text, and its constants. Equal for equal programs.
    """

    residuals: Callable[[Any], tuple[Array, ...]]
    finish: Callable[..., Any]
    shapes: tuple[jax.ShapeDtypeStruct, ...]
    program: tuple

    def is_same(self, other: PartialEvaluation) -> bool:
        """Whether ``finish`` is the same function."""
        (text, consts), (other_text, other_consts) = self.program, other.program
        same = self.shapes == other.shapes and text == other_text and len(consts) == len(other_consts)
        may_be_nan = [jnp.issubdtype(jnp.result_type(a), jnp.inexact) for a in consts]
        return same and all(np.array_equal(a, b, equal_nan=nan) for a, b, nan in zip(consts, other_consts, may_be_nan))


def partial_evaluation(function: Callable, data: PyTree, *parameters: Any) -> PartialEvaluation:
    """Split ``function(data, *parameters)``.

    :param data: a pytree of arrays, or of their shapes.
    :param parameters: likewise.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(data, *parameters)
    inlined = jax.make_jaxpr(lambda *leaves: interpret(closed.jaxpr, closed.consts, leaves, inlined_results))(
        *jax.tree.leaves((data, *parameters))
    )
    jaxpr, consts = inlined.jaxpr, inlined.consts
    count, structure = len(jax.tree.leaves(data)), jax.tree.structure(shape)
    of_parameters, of_data = set(jaxpr.invars[count:]), set(jaxpr.invars[:count])
    equations = _live_equations(jaxpr.eqns, jaxpr.outvars)
    for eqn in equations:
        variables = set(_variables(eqn.invars))
        if variables & of_parameters:
            of_parameters.update(eqn.outvars)
        elif variables & of_data:
            of_data.update(eqn.outvars)
    late = [eqn for eqn in equations if not set(eqn.outvars) & of_data]
    early = [eqn for eqn in equations if not set(eqn.outvars) & of_parameters]
    needed = _variables([*jaxpr.outvars, *[atom for eqn in late for atom in eqn.invars]])
    passed = tuple(dict.fromkeys(v for v in needed if v in of_data))
    fixed = dict(zip(jaxpr.constvars, consts))

    def residuals(data: PyTree) -> tuple[Array, ...]:
        environment = fixed | dict(zip(jaxpr.invars, map(jnp.asarray, jax.tree.leaves(data))))
        return tuple(_evaluate(early, environment, passed))

    def finish(residuals: Sequence[Array], *parameters: Any) -> Any:
        environment = fixed | dict(zip(passed, residuals))
        environment |= dict(zip(jaxpr.invars[count:], map(jnp.asarray, jax.tree.leaves(parameters))))
        return jax.tree.unflatten(structure, _evaluate(late, environment, jaxpr.outvars))

    shapes = tuple(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in passed)
    text = str(jax.make_jaxpr(finish)(shapes, *parameters)) if late else ""
    return PartialEvaluation(residuals, finish, shapes, (text, consts))


def of_outputs(closed: jex_core.ClosedJaxpr, numbers: Sequence[int]) -> jex_core.ClosedJaxpr:
    """The program of some outputs alone: with the equations that they depend on, and those with effects."""
    jaxpr = closed.jaxpr
    kept = [jaxpr.outvars[number] for number in numbers]
    equations = _live_equations(jaxpr.eqns, kept, keeps_effects=True)

    def evaluated(*inputs: Array) -> list:
        return _evaluate(equations, dict(zip([*jaxpr.constvars, *jaxpr.invars], [*closed.consts, *inputs])), kept)

    return jax.make_jaxpr(evaluated)(*closed.in_avals)


def _live_equations(equations: Sequence, outputs: Sequence, *, keeps_effects: bool = False) -> list:
    """The equations that an output depends on, and those with effects if they are to be kept."""
    needed, live = set(_variables(outputs)), []
    for eqn in reversed(equations):
        if needed.intersection(eqn.outvars) or (keeps_effects and eqn.effects):
            needed.update(_variables(eqn.invars))
            live.append(eqn)
    return live[::-1]


def _variables(atoms: Iterable) -> list:
    return [atom for atom in atoms if not isinstance(atom, jex_core.Literal)]


class Indexing(NamedTuple):
    """:ivar inside: whether the indices of one place in the program lie within bounds, (*indices, axes).
    :ivar sizes: lengths of the axes that they index."""

    inside: Array
    sizes: tuple[int, ...]


def indexes(function: Callable, *args: Any) -> bool:
    """Whether a function indexes anything by plain ``array[index]``, for abstract arguments."""
    return bool(jax.eval_shape(lambda *args: [indexing.inside for indexing in indexings(function, *args)], *args))


def indexings(function: Callable, *args: Any) -> list[Indexing]:
    """All plain ``array[index]`` in a function of pytrees, at these arguments."""
    closed = jax.make_jaxpr(function)(*args)
    result: list[Indexing] = []

    def evaluate(eqn: JaxprEqn, inputs: list) -> list | None:
        # Of other modes, which say what is to be done with indices that are out of bounds, nothing is asked.
        if eqn.primitive.name == "gather" and eqn.params["mode"] == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
            (operand, indices), axes = inputs, eqn.params["dimension_numbers"].start_index_map
            lengths = tuple(operand.shape[axis] for axis in axes)
            last = np.array(lengths) - np.array([eqn.params["slice_sizes"][axis] for axis in axes])
            result.append(Indexing((indices >= 0) & (indices <= last), lengths))
        return inlined_results(eqn, inputs)

    interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), evaluate)
    return result
