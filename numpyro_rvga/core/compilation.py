"""``jax.jit`` with options that shorten compilation, and with matrix products in the precision of their factors."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import os
from collections.abc import Callable, Generator
from contextvars import ContextVar
from typing import Any, TypeVar

import jax
from jax import Array, lax
from jax.core import Tracer
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core

from .jaxprs.lapack_calls import in_turn, may_wait_for_ever
from .jaxprs.primitives import POINTWISE_PRIMITIVES, SELECTING_PRIMITIVES, equations
from .matrices.linalg import SINGLE_KERNEL_SIZE

Tree = TypeVar("Tree")
with_routines: ContextVar[bool] = ContextVar("with_routines", default=True)  # while a function is traced

# On CPUs, XLA's newer emitters take half of the compilation, and LLVM's higher levels a quarter of what is left. Both
# gain nothing for most functions here: the time goes to matrix products and LAPACK, which are compiled already. But
# passes over long arrays take a fifth less time by the newer emitters.
OLDER_EMITTERS = ("xla_cpu_use_fusion_emitters", False)
FEW_PARTS = ("xla_cpu_parallel_codegen_split_count", 4)  # more cost more than their threads gain
LLVM_LEVEL = "xla_backend_optimization_level"
# Some versions call a library for sums: it has ended whole processes (jaxlib 0.10.2, a segmentation fault in slinky).
NO_LIBRARY = ("xla_cpu_experimental_ynn_fusion_type", "")
MOST_EQUATIONS = 2000  # in a single kernel: what more take to compile, few rows win back
# With products that have a vector, what XLA can fuse into one kernel: nothing that calls a library, and no scatter.
ROUTINE_PRIMITIVES = frozenset(
    """jit pjit closed_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr while cond scan platform_index
    xla_metadata_value concatenate stack unstack split pad iota reduce_sum reduce_max reduce_min reduce_and reduce_or
    argmax argmin random_fold_in random_split random_wrap random_unwrap""".split()
).union(POINTWISE_PRIMITIVES, SELECTING_PRIMITIVES)


@contextlib.contextmanager
def full_precision() -> Generator[None]:
    """Where matrix products have the precision of their factors, unless the user has chosen another. Also a decorator.

    GPUs and TPUs otherwise round the factors of products in single precision to three digits.
    """
    chosen = jax.config.jax_default_matmul_precision  # ty: ignore[missing-attribute]
    with jax.default_matmul_precision("highest" if chosen is None else chosen):
        yield


def jit(function: Callable, *, static_argnames: str | tuple[str, ...] = (), **options: Any) -> Any:
    """``jax.jit`` of the function in :func:`full_precision`, and on CPUs with calls of LAPACK that could wait for each
    other one after the other: see :mod:`~.jaxprs.lapack_calls`."""
    inner = jax.jit(full_precision()(function), static_argnames=static_argnames)
    static = {static_argnames} if isinstance(static_argnames, str) else set(static_argnames)

    @functools.wraps(function)
    def run(*args: Any, **named: Any) -> Any:
        traced = inner.trace(*args, **named)
        if jax.default_backend() != "cpu" or not may_wait_for_ever(traced.jaxpr.jaxpr):
            return inner(*args, **named)
        arguments = inspect.signature(function).bind(*args, **named).arguments
        inputs = jax.tree.leaves([value for name, value in arguments.items() if name not in static])
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), in_turn(traced.jaxpr)(*inputs))

    return jax.jit(run, static_argnames=static_argnames, **options)


def jit_once(function: Callable) -> Callable:
    """:func:`jit` for a function that is called once or twice on little data: fast to compile, slower to run."""
    return jit(function, compiler_options=_options(0))


def at_once(function: Callable[[], Tree]) -> Tree:
    """The result of a function without arguments, compiled as one step, as NumPy arrays."""
    return jax.device_get(jit_once(function)())


def abstractly(function: Callable[..., Tree], *arguments: Any) -> Tree:
    """A function's result for arguments of these shapes, without computing values: for its parts that are no arrays."""
    returned: list[Tree] = []

    def run(*arguments: Any) -> None:
        returned.append(function(*arguments))

    jax.eval_shape(run, *arguments)
    return returned[0]


class Compiled:
    """:func:`jit` for a function that takes long to compile. Inside another compiled function it has no options.

    :param static_argnames: as for ``jax.jit``.
    :param out_shardings: as for ``jax.jit``.
    :param routines: whether it contains functions made by :func:`single_kernel`. Where XLA cannot compile these, they
        are compiled operation by operation.
    :param long_arrays: whether it spends its time in passes over arrays of many thousand entries.
    :param level: LLVM's: 0 for functions that do little work, which take half of the time to compile.
    """

    def __init__(
        self,
        function: Callable,
        static_argnames: tuple[str, ...] = (),
        out_shardings: Any = None,
        *,
        routines: bool = False,
        long_arrays: bool = False,
        level: int = 1,
    ):
        functools.update_wrapper(self, function)
        options: dict[str, Any] = {"static_argnames": static_argnames, "out_shardings": out_shardings}
        compiler_options = _options(level, long_arrays=long_arrays, routines=routines)
        self._light = jit(function, compiler_options=compiler_options, **options)
        self._by_operations = None
        if routines:
            self._by_operations = jit(_without_routines(function), compiler_options=compiler_options, **options)
        self._nested = jit(function, static_argnames=static_argnames)  # the outer function has the options

    def __call__(self, *args: Any, **static: Any) -> Any:
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(args)):
            return self._nested(*args, **static)
        try:
            return self._light(*args, **static)
        except jax.errors.JaxRuntimeError:
            if self._by_operations is None:
                raise
        self._light, self._by_operations = self._by_operations, None
        return self._light(*args, **static)


def single_kernel(function: Callable) -> Callable:
    """``function`` of few numbers as a single kernel, inside a compiled function on a CPU.

    XLA otherwise runs it operation by operation, and starting an operation costs ten times its work on a few numbers.
    A function with operations that cannot be in such a kernel is unchanged, as is one that computes long arrays, whose
    operations are better divided among threads.
    """
    jitted = jax.jit(function)

    def call(*args: Any) -> Any:
        possible = with_routines.get() and jax.default_backend() == "cpu"
        if possible and _is_elementary(jitted.trace(*args).jaxpr) and _routines_exist():
            return _as_routine(jitted)(*args)
        return jitted(*args)

    return call


def _without_routines(function: Callable) -> Callable:
    @functools.wraps(function)
    def run(*args: Any, **static: Any) -> Any:
        before = with_routines.set(False)
        try:
            return function(*args, **static)
        finally:
            with_routines.reset(before)

    return run


def _as_routine(jitted: Callable) -> Callable:
    return lambda *args: set_xla_metadata(jitted(*args), inlineable="false", xla_cpu_small_call="true")


def _is_elementary(jaxpr: jex_core.ClosedJaxpr) -> bool:
    """Whether all operations can be in one kernel, on arrays of few numbers."""

    def elementary(eqn):
        if any(math.prod(v.aval.shape) > SINGLE_KERNEL_SIZE for v in eqn.outvars):
            return False
        return _has_vector(eqn) if eqn.primitive.name == "dot_general" else eqn.primitive.name in ROUTINE_PRIMITIVES

    inside = list(equations(jaxpr))
    return len(inside) <= MOST_EQUATIONS and all(map(elementary, inside))


def _has_vector(dot_general: jex_core.JaxprEqn) -> bool:
    """Whether a product, or each of a batch, has a vector: those of two matrices call a library."""

    def is_vector(v, batch):
        return sum(size > 1 for axis, size in enumerate(v.aval.shape) if axis not in batch) <= 1

    return any(map(is_vector, dot_general.invars, dot_general.params["dimension_numbers"][1]))


@functools.cache
def _routines_exist() -> bool:
    def doubled(x: Array) -> Array:
        return lax.while_loop(lambda y: y < 1, lambda y: 2 * y, x)

    try:
        jax.jit(_as_routine(jax.jit(doubled))).lower(1.0).compile()
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _wanted(level: int) -> dict[str, Any]:
    return dict([OLDER_EMITTERS, FEW_PARTS, (LLVM_LEVEL, level), NO_LIBRARY])


def _options(level: int, *, long_arrays: bool = False, routines: bool = False) -> dict[str, Any]:
    """The compiler options that this XLA has and that the user has not set.

    :param long_arrays: as for :class:`Compiled`, and so are ``routines``.
    """
    chosen = os.environ.get("XLA_FLAGS", "")
    options = _wanted(level)
    if long_arrays:
        options.pop(OLDER_EMITTERS[0])
    used = {name: value for name, value in options.items() if name in _supported_options() and name not in chosen}
    if routines and LLVM_LEVEL in _supported_options():  # at level 0, a second routine of other types may never end
        used[LLVM_LEVEL] = 1
    return used


@functools.cache
def _supported_options() -> frozenset[str]:
    """The names of the options that this XLA has."""
    options = _wanted(1)
    return frozenset(options if _exist(options) else (n for n, value in options.items() if _exist({n: value})))


def _exist(options: dict[str, Any]) -> bool:
    """Whether this version of XLA has the options."""
    try:
        jax.jit(lambda: 0, compiler_options=options)()
    except jax.errors.JaxRuntimeError:
        return False
    return True
