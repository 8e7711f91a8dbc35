"""Which polynomials a traced program computes, as far as its primitives tell. Derivatives at some points do not tell:
those of signs, steps and kinks are constant almost everywhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn

from .interpret import Rule, interpret, is_inlined
from .primitives import (
    BILINEAR_PRIMITIVES,
    LINEAR_PRIMITIVES,
    SELECTING_PRIMITIVES,
    form_of,
    inner_program,
    is_float,
    scan_counts,
)

PRODUCTS = BILINEAR_PRIMITIVES | {"mul"}
AFFINE_PRIMITIVES = LINEAR_PRIMITIVES | SELECTING_PRIMITIVES | frozenset("add add_any sub neg copy copy_p".split())


def is_affine(closed: jex_core.ClosedJaxpr, varies: Sequence[bool]) -> bool:
    """Whether all outputs are affine in some inputs, given the others.

    :param varies: of the inputs, whether each is one of these.
    """
    return _is_polynomial(closed, varies, 1)


def is_quadratic(closed: jex_core.ClosedJaxpr, varies: Sequence[bool]) -> bool:
    """Whether all outputs are polynomials of the second degree, or less, in some inputs. ``varies``: likewise."""
    return _is_polynomial(closed, varies, 2)


def _is_polynomial(closed: jex_core.ClosedJaxpr, varies: Sequence[bool], most: int) -> bool:
    degrees = interpret(closed.jaxpr, closed.consts, list(map(int, varies)), _rule(most + 1), _of_constant)
    return max(degrees, default=0) <= most


def _rule(beyond: int) -> Rule:
    """The degrees of an equation's outputs, from those of its inputs.

    :param beyond: stands for this degree, for all higher ones, and for what is no polynomial.
    """

    def rule(eqn: JaxprEqn, degrees: list[int]) -> list[int] | None:
        if is_inlined(eqn):
            return None
        name = eqn.primitive.name
        if not any(degrees) or _asks_if_finite(eqn):
            return [0] * len(eqn.outvars)
        if name == "scan":
            return _of_scan(eqn, degrees, rule)
        if name == "cond":
            branches = [interpret(b.jaxpr, b.consts, degrees[1:], rule, _of_constant) for b in eqn.params["branches"]]
            return [beyond if degrees[0] else max(own) for own in zip(*branches)]
        return [min(_degree(eqn, degrees, beyond), beyond)] * len(eqn.outvars)

    return rule


def _degree(eqn: JaxprEqn, degrees: list[int], beyond: int) -> int:
    """The degree of a primitive's results, of inputs that are not all given."""
    name, highest = eqn.primitive.name, max(degrees)
    if name in PRODUCTS:
        return sum(degrees)
    if (power := _power(eqn)) is not None:
        return power * degrees[0]
    if name == "convert_element_type":
        return highest if is_float(form_of(eqn.outvars[0]).dtype) else beyond
    given = {
        "div": degrees[1:],
        "select_n": degrees[:1],
        "triangular_solve": degrees[:1],
        "custom_linear_solve": degrees[: sum(eqn.params.get("const_lengths", ()))],
    }.get(name, [] if name in AFFINE_PRIMITIVES else degrees)
    return beyond if any(given) else highest


def _power(eqn: JaxprEqn) -> int | None:
    """To which power a primitive takes its first input; None if it does not, or if the power is no natural number."""
    name, power = eqn.primitive.name, None
    if name == "square":
        power = 2
    elif name == "integer_pow":
        power = eqn.params["y"]
    elif name == "pow" and isinstance(eqn.invars[1], jex_core.Literal):
        power = eqn.invars[1].val
    return int(power) if power is not None and power >= 0 and power == int(power) else None


def _asks_if_finite(eqn: JaxprEqn) -> bool:
    """Whether all finite numbers have the same answer. Densities ask this of their parameters: x == x, x != inf."""
    if eqn.primitive.name == "is_finite":
        return True
    if eqn.primitive.name not in ("eq", "ne"):
        return False
    one, other = eqn.invars
    return one is other or any(isinstance(x, jex_core.Literal) and np.all(np.isinf(x.val)) for x in (one, other))


def _of_scan(eqn: JaxprEqn, degrees: list[int], rule: Rule) -> list[int]:
    """What is carried from step to step has the highest degree that it has at any."""
    start, count = scan_counts(eqn)
    carried = degrees[start : start + count]
    while True:
        inputs = [*degrees[:start], *carried, *degrees[start + count :]]
        after = interpret(*inner_program(eqn), inputs, rule, _of_constant)
        higher = [max(own) for own in zip(carried, after)]
        if higher == carried:
            return [*carried, *after[count:]]
        carried = higher


def _of_constant(value: Any) -> int:
    return 0
