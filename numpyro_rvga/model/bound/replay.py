"""A function of arrays whose Python code runs once for each form of its inputs; later calls evaluate its jaxpr."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend import core as jex_core

from ...core.jaxprs.interpret import of_outputs


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
        trace, arrays = self._traced_at(inputs)
        return _evaluated(trace, arrays)

    def trace(self, *inputs: Any) -> None:
        """Trace the function for inputs of this form, if it has not been."""
        self._traced_at(inputs)

    def entry(self, name: str, *inputs: Any) -> Any:
        """One entry of the mapping that the function returns: nothing else of it is evaluated."""
        trace, arrays = self._traced_at(inputs, name)
        return _evaluated(trace, arrays)

    def _traced_at(self, inputs: tuple, name: str | None = None) -> tuple[_Trace, list[Array]]:
        leaves, structure = jax.tree.flatten(inputs)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        form = structure, tuple((a.shape, a.dtype, a.weak_type) for a in arrays)
        if (None, form) not in self._traces:
            self._traces[None, form] = self._traced(structure, arrays)
        if (name, form) not in self._traces:
            self._traces[name, form] = _entry_of(self._traces[None, form], name)
        return self._traces[name, form], arrays

    def _traced(self, structure: Any, arrays: list[Array]) -> _Trace:
        outputs: list[Any] = []

        def flat(*arrays: Array) -> list[Array]:
            leaves, of_outputs = jax.tree.flatten(self._function(*jax.tree.unflatten(structure, arrays)))
            traced = [isinstance(leaf, Tracer) for leaf in leaves]
            outputs[:] = of_outputs, [None if t else leaf for t, leaf in zip(traced, leaves)], traced
            return [leaf for leaf in leaves if isinstance(leaf, Tracer)]

        return _Trace(jax.make_jaxpr(flat)(*arrays), *outputs)


def _evaluated(trace: _Trace, arrays: list[Array]) -> Any:
    computed = iter(jex_core.jaxpr_as_fun(trace.jaxpr)(*arrays))
    leaves = [next(computed) if t else x for t, x in zip(trace.is_traced, trace.static)]
    return jax.tree.unflatten(trace.structure, leaves)


def _entry_of(trace: _Trace, name: str | None) -> _Trace:
    """Of the mapping that a trace returns, with the equations that the entry depends on."""
    numbers = jax.tree.unflatten(trace.structure, list(range(len(trace.static))))[name]
    kept, structure = jax.tree.flatten(numbers)
    place = np.cumsum(trace.is_traced) - 1  # among the jaxpr's outputs
    shorter = of_outputs(trace.jaxpr, [place[number] for number in kept if trace.is_traced[number]])
    static, is_traced = ([values[number] for number in kept] for values in (trace.static, trace.is_traced))
    return _Trace(shorter, structure, static, is_traced)
