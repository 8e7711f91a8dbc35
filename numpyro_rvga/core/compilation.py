"""Compilation: its time counts too."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

# On CPUs, XLA's newer emitters take half of the compilation, and LLVM's higher levels a quarter of what is left. Both
# gain nothing here: most of a run is spent in matrix products and LAPACK, which are compiled already.
OLDER_EMITTERS = ("xla_cpu_use_fusion_emitters", False)
LLVM_LEVEL = "xla_backend_optimization_level"


def jit_once(function: Callable) -> Callable:
    """``jax.jit`` for a function that is called once or twice on little data: compiled fast rather than well."""
    return jax.jit(function, compiler_options=_options(0))


class Compiled:
    """``jax.jit`` for a function that takes long to compile.

    :param static_argnames: as for ``jax.jit``.
    """

    def __init__(self, function: Callable, static_argnames: tuple[str, ...] = ()):
        functools.update_wrapper(self, function)
        self._light = jax.jit(function, static_argnames=static_argnames, compiler_options=_options(1))
        self._nested = jax.jit(function, static_argnames=static_argnames)  # the outer function has the options

    def __call__(self, *args: Any, **static: Any) -> Any:
        if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(args)):
            return self._nested(*args, **static)
        return self._light(*args, **static)


def _options(level: int) -> dict[str, Any]:
    return dict(option for option in (OLDER_EMITTERS, (LLVM_LEVEL, level)) if _exists(*option))


@functools.cache
def _exists(name: str, value: Any) -> bool:
    """Whether this version of XLA knows the option: names come and go."""
    try:
        jax.jit(lambda: 0, compiler_options={name: value})()
    except jax.errors.JaxRuntimeError:
        return False
    return True
