"""A function of arrays whose Python code runs once for each form of its inputs; later calls evaluate its jaxpr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.core import Tracer
from jax.extend import core as jex_core


class _Trace(NamedTuple):
    """:ivar jaxpr: inputs -> the outputs that depend on them, or are computed. :ivar structure: of all outputs.
    :ivar static: outputs that are no tracers, by position; None for the others."""

    jaxpr: jex_core.ClosedJaxpr
    structure: Any
    static: list[Any]
    is_traced: list[bool]


class Replay:
    """``function``, traced once for each form of its inputs.

    :param function: of pytrees of arrays; its outputs are a pytree, of which what is no array is the same each time.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._traces: dict[tuple, _Trace] = {}

    def __call__(self, *inputs: Any) -> Any:
        leaves, structure = jax.tree.flatten(inputs)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        form = structure, tuple((a.shape, a.dtype, a.weak_type) for a in arrays)
        if form not in self._traces:
            self._traces[form] = self._traced(structure, arrays)
        jaxpr, outputs, static, is_traced = self._traces[form]
        computed = iter(jex_core.jaxpr_as_fun(jaxpr)(*arrays))
        return jax.tree.unflatten(outputs, [next(computed) if t else x for t, x in zip(is_traced, static)])

    def _traced(self, structure: Any, arrays: list[Array]) -> _Trace:
        outputs: list[Any] = []

        def flat(*arrays: Array) -> list[Array]:
            leaves, of_outputs = jax.tree.flatten(self._function(*jax.tree.unflatten(structure, arrays)))
            traced = [isinstance(leaf, Tracer) for leaf in leaves]
            outputs[:] = of_outputs, [None if t else leaf for t, leaf in zip(traced, leaves)], traced
            return [leaf for leaf in leaves if isinstance(leaf, Tracer)]

        return _Trace(jax.make_jaxpr(flat)(*arrays), *outputs)
