"""Digests of traced programs: the same operations on the same inputs and constants have the same digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr, JaxprEqn

from .interpret import interpret, is_inlined
from .primitives import form_of, inner_program

ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# What an equation's parameters say of how it is compiled, differentiated or shown, and not of what it computes.
INCIDENTAL = frozenset(
    """name sharding out_sharding ctx_mesh debug_info inline keep_unused donated_invars compiler_options_kvs
    jvp_jaxpr_fun jvp_jaxpr_thunk fwd_jaxpr_thunk bwd bwd_jaxpr symbolic_zeros""".split()
)


class _Digest(str):
    """Of a constant, in its place."""


def output_digests(function: Callable[..., Mapping[str, Any]], *arguments: Any) -> dict[str, str]:
    """A digest of what leads to each named output: of operations, shapes, types and constants, in whatever order they
    are written. What no output depends on has no part in it.

    :param function: gives a mapping from names to arrays.
    :param arguments: of the function, or their shapes.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(*arguments)
    names = [name for name in sorted(shape) for _ in jax.tree.leaves(shape[name])]
    digests: dict[str, list[str]] = {name: [] for name in shape}
    for name, digest in zip(names, _of_program(closed.jaxpr, closed.consts)):
        digests[name].append(digest)
    return {name: _digest("output", *parts) for name, parts in digests.items()}


def _of_program(jaxpr: Jaxpr, consts: Iterable) -> list[str]:
    inputs = [
        _digest("input", str(i), str(form_of(v).shape), str(form_of(v).dtype)) for i, v in enumerate(jaxpr.invars)
    ]
    return interpret(jaxpr, list(consts), inputs, _of_equation, digest_of)


def _of_equation(eqn: JaxprEqn, inputs: list[str]) -> list[str] | None:
    if is_inlined(eqn):
        return None
    if eqn.primitive.name == "custom_jvp_call":
        return interpret(*inner_program(eqn), inputs, _of_equation, digest_of)
    params = [f"{name}={digest_of(eqn.params[name])}" for name in sorted(set(eqn.params) - INCIDENTAL)]
    whole = _digest(eqn.primitive.name, *params, *inputs)
    return [_digest(whole, str(number)) for number in range(len(eqn.outvars))]


def digest_of(value: Any) -> str:
    """A digest of a constant, of a program, or of a parameter of an equation."""
    if isinstance(value, _Digest):
        return value
    if isinstance(value, jex_core.ClosedJaxpr):
        return _digest("program", *_of_program(value.jaxpr, value.consts))
    if isinstance(value, jex_core.Jaxpr):
        constants = [_digest("constant", str(number)) for number in range(len(value.constvars))]
        return _digest("program", *_of_program(value, map(_Digest, constants)))
    if isinstance(value, Mapping):
        return _digest("mapping", *[f"{key}={digest_of(value[key])}" for key in sorted(value, key=str)])
    if isinstance(value, (tuple, list)):
        return _digest("sequence", *map(digest_of, value))
    if isinstance(value, jax.Array) and jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(value)
    if isinstance(value, (np.ndarray, np.generic, jax.Array, bool, int, float, complex)):
        array = np.ascontiguousarray(value)
        return _digest("array", str(array.dtype), str(np.shape(value)), array.tobytes().hex())
    return _digest(type(value).__name__, ADDRESS.sub("", repr(value)))


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
