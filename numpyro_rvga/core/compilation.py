"""Compilation of what runs once."""

from __future__ import annotations

from collections.abc import Callable

import jax


def jit_once(function: Callable) -> Callable:
    """``jax.jit`` for a function that is called once or twice on little data: compiled fast rather than well."""
    return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0})
