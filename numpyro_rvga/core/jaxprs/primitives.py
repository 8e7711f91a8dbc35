"""JAX's primitives by what they do to entries, and functions that apply them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr

from ..matrices.linalg import cholesky_by_columns, solve_triangular
from ..special import log_beta, log_gamma, maximum, minimum

POINTWISE_PRIMITIVES = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp copy copy_p
    convert_element_type cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt igamma igammac integer_pow
    is_finite le lgamma log log1p logistic lt max min mul ne neg nextafter not or polygamma pow reduce_precision
    regularized_incomplete_beta rem round rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor
    zeta""".split()
)
SELECTING_PRIMITIVES = frozenset(
    "reshape squeeze expand_dims broadcast_in_dim tile transpose rev slice dynamic_slice gather".split()
)
LINEAR_PRIMITIVES = frozenset(
    """reduce_sum cumsum concatenate stack unstack split pad dynamic_update_slice scatter scatter-add scatter_add
    real imag""".split()
)
BILINEAR_PRIMITIVES = frozenset(["dot_general", "conv_general_dilated"])
ARITHMETIC = frozenset("sum offset mul div neg copy convert_element_type".split())
INLINED_PRIMITIVES = frozenset("jit pjit closed_call core_call remat checkpoint remat2".split())
# By the names of primitives, and of JAX's own programs; programs of other names are written out.
SPECIAL_PRIMITIVES = {"lgamma": log_gamma, "max": maximum, "min": minimum}
SPECIAL_PROGRAMS = {"betaln": log_beta, "_betaln_impl": log_beta}

UNKNOWN_LENGTH = 128  # taken of loops that end when their results say so
UNROLLED_SIZE = 16  # batches of small LAPACK calls are slow, and two at once deadlock jaxlib's pool of two threads


def equations(jaxpr) -> Iterator:
    """The equations of a jaxpr and of the jaxprs inside it."""
    for eqn in jaxpr.eqns:
        yield from equations_of(eqn)


def equations_of(eqn) -> Iterator:
    """An equation, and those of the jaxprs inside it."""
    yield eqn
    for inner in jaxprs_of(eqn):
        yield from equations(inner)


def numbers_in(jaxpr) -> int:
    """How many numbers it computes, those of a loop as often as it runs; a guess where that depends on the data."""
    return sum(map(numbers_of, jaxpr.eqns))


def numbers_of(eqn) -> int:
    """The numbers that one equation computes."""
    times = UNKNOWN_LENGTH if eqn.primitive.name == "while" else eqn.params.get("length", 1)
    return times * sum(map(numbers_in, jaxprs_of(eqn))) + sum(v.aval.size for v in eqn.outvars)


def jaxprs_of(eqn) -> list:
    """The jaxprs inside an equation."""
    parameters = (x if isinstance(x, tuple | list) else (x,) for x in eqn.params.values())
    return [x for several in parameters for x in several if hasattr(x, "eqns")]


def form_of(variable) -> jax.ShapeDtypeStruct:
    """Shape and type of a variable of a jaxpr. (Only some abstract values have them; those of arrays do.)"""
    return variable.aval


def is_float(dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)


def special_function(eqn) -> Callable | None:
    """This package's implementation of an elementwise special function; None if it has none."""
    if eqn.primitive.name in INLINED_PRIMITIVES:
        return SPECIAL_PROGRAMS.get(eqn.params.get("name"))
    return SPECIAL_PRIMITIVES.get(eqn.primitive.name)


def binder(eqn, *, unrolled: bool = True, **changed: Any) -> Callable:
    """A function of the equation's inputs that returns its outputs.

    :param unrolled: whether small LAPACK calls are. :param changed: parameters in place of the equation's.
    """
    small = unrolled and bool(eqn.invars) and max(eqn.invars[0].aval.shape[-1:], default=0) <= UNROLLED_SIZE
    if eqn.primitive.name == "triangular_solve" and small:
        return partial(solve_triangular, **eqn.params)
    if eqn.primitive.name == "cholesky" and small:
        return cholesky_by_columns
    bind_params = eqn.primitive.get_bind_params(eqn.params | changed)
    functions, params = (
        bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    )  # the form depends on the JAX version
    return lambda *arguments: eqn.primitive.bind(*functions, *arguments, **params)


def inner_program(eqn) -> tuple:
    """The jaxpr that an equation calls, and its constants."""
    inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
    return (inner.jaxpr, inner.consts) if hasattr(inner, "consts") else (inner, [])


def scan_counts(eqn) -> tuple[int, int]:
    """How many inputs of a scan are the same at all steps, and how many are carried from step to step."""
    if "ft_in" in eqn.params:  # in newer versions of JAX
        constants, carried, _ = eqn.params["ft_in"].unpack()
        return len(constants), len(carried)
    return eqn.params["num_consts"], eqn.params["num_carry"]


def results(eqn, inputs: list, **options: Any) -> list:
    """The outputs of an equation, as a list. ``options``: of :func:`binder`."""
    result = binder(eqn, **options)(*inputs)
    return list(result) if eqn.primitive.multiple_results else [result]


def freeze(params: dict) -> tuple | object:
    """Parameters of an equation as a key: equal for equal parameters. Those that cannot be hashed equal no other."""
    try:
        frozen = tuple(sorted((k, v) for k, v in params.items() if k not in ("sharding", "out_sharding")))
        hash(frozen)
        return frozen
    except TypeError:
        return object()  # unlike anything else: this step is never merged with another


def work_of_outputs(jaxpr: Jaxpr, group: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """How many numbers groups of outputs need, and how many of these no other group needs.

    :param jaxpr: an open jaxpr. :param group: of each output: the number of its group.
    :return: of each group, (G,) and (G,).
    """
    needed_by: dict[Any, int] = {}  # variables -> the groups, as bits

    def need(atoms: Sequence[Any], groups: int) -> None:
        for atom in atoms:
            if not isinstance(atom, jex_core.Literal):
                needed_by[atom] = needed_by.get(atom, 0) | groups

    for atom, number in zip(jaxpr.outvars, group):
        need([atom], 1 << number)
    needed, own = (np.zeros(max(group, default=-1) + 1) for _ in range(2))
    for eqn in reversed(jaxpr.eqns):
        groups = 0
        for variable in eqn.outvars:
            groups |= needed_by.get(variable, 0)
        need(eqn.invars, groups)
        members = [i for i in range(len(needed)) if groups >> i & 1]
        needed[members] += numbers_of(eqn)
        if len(members) == 1:
            own[members] += numbers_of(eqn)
    return needed, own
