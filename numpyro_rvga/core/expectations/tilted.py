"""Densities that are sums of coefficient * u_i u_j exp(b . u), and their Gaussian expectations in closed form.

exp(b . u) tilts N(m, S): it leaves exp(b . m + b' S b / 2) of the mass, with mean m + S b and covariance S. So normal
observations of unknown scale whose mean has products in it, such as effects written as scale * z, need no nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.extend import core as jex_core
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from ..compilation import abstractly
from ..jaxprs.interpret import interpret
from ..jaxprs.primitives import INLINED_PRIMITIVES, SELECTING_PRIMITIVES, form_of, is_float, results
from ..pytrees import PyTree

MOST_SUMMANDS = 64
MOST_ENTRIES = 64  # of an intermediate array
INLINED = INLINED_PRIMITIVES | {"custom_jvp_call"}
STRUCTURAL = SELECTING_PRIMITIVES | {"concatenate", "split", "stack", "unstack"}


class TiltedForm(NamedTuple):
    """Which products and exponentials there are, T of each (static).

    :ivar factors: the two predictors of each product; C means none: a factor of one.
    :ivar exponents: (predictor, number) pairs of each b.
    """

    num_predictors: int
    factors: tuple[tuple[int, int], ...]
    exponents: tuple[tuple[tuple[int, float], ...], ...]

    def arrays(self, dtype: DTypeLike) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The exponents and, as rows of identity matrices, both factors: (T, C) each."""
        tilts = np.zeros((len(self.factors), self.num_predictors), dtype)
        for row, pairs in zip(tilts, self.exponents):
            for index, number in pairs:
                row[index] = number
        unit = np.eye(self.num_predictors + 1, self.num_predictors, dtype=dtype)
        first, second = (unit[list(indices)] for indices in zip(*self.factors))
        return tilts, first, second

    @property
    def lone(self) -> np.ndarray:
        """Whether each factor is one: (2, T)."""
        return np.equal(self.num_predictors, np.array(self.factors).T)


class Tilted(NamedTuple):
    """phi(u) = sum_t coefficients[t] * v_i v_j exp(b . v) with v = u - center; i, j and b are parts of a form."""

    center: Array
    coefficients: Array


def tilted_density(form: TiltedForm, u: Array, c: Tilted) -> Array:
    return tilted(form, u, jnp.zeros((len(u), len(u)), u.dtype), c)[0]


def tilted(form: TiltedForm, mean: Array, covariance: Array, c: Tilted) -> tuple[Array, Array, Array]:
    """E[phi(u)], E[phi'(u)], E[phi''(u)] for u ~ N(mean, covariance)."""
    tilts, first, second = form.arrays(mean.dtype)
    centered, moved = mean - c.center, tilts @ covariance
    weights = c.coefficients * jnp.exp(tilts @ centered + 0.5 * jnp.sum(moved * tilts, axis=1))
    means = centered + moved
    one, other = (
        jnp.where(lone, 1.0, jnp.sum(factor * means, axis=1)) for lone, factor in zip(form.lone, (first, second))
    )
    products = weights * (one * other + jnp.sum((first @ covariance) * second, axis=1))
    slopes = weights[:, None] * (first * other[:, None] + second * one[:, None])
    half = 0.5 * (tilts.T * products) @ tilts + tilts.T @ slopes + (first.T * weights) @ second
    return jnp.sum(products), products @ tilts + jnp.sum(slopes, axis=0), half + half.T


# ---------------------------------------------------------------------- reading a density
def read_tilted(
    density: Callable[[Array, PyTree], Array], num_predictors: int, dtype: DTypeLike, constants: PyTree
) -> tuple[TiltedForm, Callable[[Any], Tilted]] | None:
    """The form of ``density(u, constants)`` and a function from constants to coefficients; None if it has none.

    :param constants: abstract arrays.
    """
    closed = jax.make_jaxpr(density)(jax.ShapeDtypeStruct((num_predictors,), dtype), constants)
    if not may_be_tilted(closed):
        return None

    def summands(constants):
        """Read twice: around the centers that the first reading finds, few summands cancel."""
        leaves = jax.tree.leaves(constants)
        predictors = [_Sum({((i,), ()): 1.0}) for i in range(num_predictors)]
        at_zero = _read(closed, predictors, leaves)
        centers = [at_zero.center(i) for i in range(num_predictors)]
        shifted = [u + _Sum.number(center) for u, center in zip(predictors, centers)]
        return centers, sorted(_read(closed, shifted, leaves).summands.items())

    def coefficients(constants):
        centers, terms = summands(constants)
        return Tilted(*[jnp.stack([jnp.asarray(x, dtype) for x in each]) for each in (centers, dict(terms).values())])

    try:
        keys = [key for key, _ in abstractly(summands, constants)[1]]
    except _NotTilted:
        return None
    if not keys:
        return None
    padded = [(*indices, num_predictors, num_predictors) for indices, _ in keys]
    factors = tuple((first, second) for first, second, *_ in padded)
    return TiltedForm(num_predictors, factors, tuple(tilt for _, tilt in keys)), coefficients


class _NotTilted(Exception):
    pass


class _Sum:
    """A number as a sum: coefficients by the predictors that are multiplied and their exponents; Python's numbers where
    they are constants.
    """

    def __init__(self, summands: dict[tuple, Any]):
        self.summands = {key: x for key, x in summands.items() if not (isinstance(x, float) and x == 0)}
        if len(self.summands) > MOST_SUMMANDS or any(len(indices) > 2 for indices, _ in self.summands):
            raise _NotTilted

    @classmethod
    def number(cls, x: Any) -> _Sum:
        return cls({((), ()): x})

    def __add__(self, other: _Sum) -> _Sum:
        total = dict(self.summands)
        for key, x in other.summands.items():
            total[key] = total[key] + x if key in total else x
        return _Sum(total)

    def __mul__(self, other: _Sum) -> _Sum:
        total = _Sum({})
        for (indices, tilt), x in self.summands.items():
            for (more, by), y in other.summands.items():
                total = total + _Sum({(tuple(sorted(indices + more)), _added(tilt, by)): x * y})
        return total

    def __neg__(self) -> _Sum:
        return self * _Sum.number(-1.0)

    def power(self, exponent: float) -> _Sum:
        if exponent == 2:
            return self * self
        tilt, x = self._lone_exponential()
        if isinstance(x, float) and x < 0 and exponent % 1:
            raise _NotTilted
        return _Sum({((), tuple((i, exponent * b) for i, b in tilt)): x**exponent})

    def exp(self) -> _Sum:
        rest, tilt = 0.0, []
        for (indices, inner), x in self.summands.items():
            if inner or len(indices) > 1 or (indices and not isinstance(x, float)):
                raise _NotTilted
            if indices:
                tilt.append((indices[0], x))
            else:
                rest = x
        return _Sum({((), tuple(sorted(tilt))): math.exp(rest) if isinstance(rest, float) else jnp.exp(rest)})

    def log(self) -> _Sum:
        tilt, x = self._lone_exponential()
        if isinstance(x, float) and x < 0:
            raise _NotTilted
        log = math.log(x) if isinstance(x, float) else jnp.log(x)
        return _Sum({((i,), ()): b for i, b in tilt}) + _Sum.number(log)

    def select(self, other: _Sum, which: Any) -> _Sum:
        """The other where ``which`` is true."""
        if isinstance(which, float):
            return other if which else self
        keys = self.summands | other.summands
        return _Sum({k: jnp.where(which, other.summands.get(k, 0.0), self.summands.get(k, 0.0)) for k in keys})

    def center(self, i: int) -> Any:
        """Where a square of predictor i, and what is linear in it beside the same exponential, has its vertex."""
        for (indices, tilt), square in self.summands.items():
            if indices == (i, i) and ((i,), tilt) in self.summands:
                slope = self.summands[(i,), tilt]
                return jnp.where(square == 0, 0.0, -0.5 * slope / jnp.where(square == 0, 1.0, square))
        return 0.0

    def _lone_exponential(self) -> tuple[tuple, Any]:
        if len(self.summands) != 1:
            raise _NotTilted
        ((indices, tilt), x), *_ = self.summands.items()
        if indices:
            raise _NotTilted
        return tilt, x


def _added(a: tuple, b: tuple) -> tuple:
    total = dict(a)
    for i, number in b:
        total[i] = total.get(i, 0.0) + number
    return tuple(sorted((i, number) for i, number in total.items() if number))


ELEMENTWISE = {
    "add": _Sum.__add__,
    "add_any": _Sum.__add__,
    "sub": lambda x, y: x + -y,
    "mul": _Sum.__mul__,
    "div": lambda x, y: x * y.power(-1.0),
    "neg": _Sum.__neg__,
    "exp": _Sum.exp,
    "log": _Sum.log,
    "square": lambda x: x * x,
    "sqrt": lambda x: x.power(0.5),
    "rsqrt": lambda x: x.power(-0.5),
    "copy": lambda x: x,
    "copy_p": lambda x: x,
}
READABLE = STRUCTURAL.union(ELEMENTWISE, ["reduce_sum", "select_n", "integer_pow", "pow", "convert_element_type"])


def may_be_tilted(closed: jex_core.ClosedJaxpr) -> bool:
    """Whether all that the result takes of the predictors, the first input, goes through operations that sums have.
    Nothing is computed to see that, and most densities fail here."""
    constant, readable, other = range(3)

    def rule(eqn: JaxprEqn, inputs: list[int]) -> list[int] | None:
        name, worst = eqn.primitive.name, max(inputs, default=constant)
        if worst == readable:
            if name in INLINED:
                return None
            is_small = all(form_of(v).size <= MOST_ENTRIES for v in eqn.outvars)
            worst = readable if is_small and name in READABLE else other
        return [worst] * len(eqn.outvars)

    inputs = [readable] + [constant] * (len(closed.in_avals) - 1)
    return interpret(closed.jaxpr, closed.consts, inputs, rule, lambda value: constant) == [readable]


def _read(closed: jex_core.ClosedJaxpr, predictors: list[_Sum], constants: list[Array]) -> _Sum:
    """:raises _NotTilted: if the program's one result is no such sum."""
    inputs = [_object_array(predictors, (len(predictors),)), *constants]
    numeric = lambda array: array if isinstance(array, Tracer) else np.asarray(array)  # noqa: E731
    (out,) = interpret(closed.jaxpr, closed.consts, inputs, _equation_or_none, numeric)
    if not _is_symbolic(out):
        raise _NotTilted
    return out.ravel()[0]


def _equation_or_none(eqn: JaxprEqn, inputs: list) -> list | None:
    """Arrays of objects are of sums, others of numbers: NumPy's where they are constants. None is neither, which only
    matters if it is used: programs check what they then pass over."""
    try:
        return [None] * len(eqn.outvars) if any(x is None for x in inputs) else _equation(eqn, inputs)
    except (_NotTilted, OverflowError):  # the latter of Python's numbers
        return [None] * len(eqn.outvars)


def _equation(eqn: JaxprEqn, inputs: list) -> list | None:
    """The outputs of an equation of sums and numbers.

    :return: None for a call, whose program is to be read in its place. :raises _NotTilted: if they are no sums.
    """
    name = eqn.primitive.name
    if not any(map(_is_symbolic, inputs)):
        return _evaluated(eqn, inputs)
    if name in INLINED:
        return None
    if name in STRUCTURAL:
        return _rearranged(eqn, inputs)
    if name == "reduce_sum":
        return [_summed(inputs[0], eqn.params["axes"])]
    if name == "select_n" and not _is_symbolic(inputs[0]) and len(inputs) == 3:
        return [_each(lambda p, x, y: x.select(y, p), _numbers(inputs[0]), *map(_symbolic, inputs[1:]))]
    if name == "integer_pow":
        return [_each(partial(_Sum.power, exponent=eqn.params["y"]), inputs[0])]
    if name == "pow" and _is_numeric(inputs[1]):
        return [_each(_Sum.power, inputs[0], _numbers(inputs[1]))]
    if name == "convert_element_type" and is_float(form_of(eqn.outvars[0]).dtype):
        return inputs
    if name not in ELEMENTWISE:
        raise _NotTilted
    return [_each(ELEMENTWISE[name], *map(_symbolic, inputs))]


def _evaluated(eqn: JaxprEqn, inputs: list) -> list:
    if not all(map(_is_numeric, inputs)):
        return results(eqn, inputs)
    with jax.ensure_compile_time_eval():
        return [np.asarray(x) for x in results(eqn, inputs)]


def _rearranged(eqn: JaxprEqn, inputs: list) -> list:
    """Operands are numbered, the numbers moved, and what they stand for read from where they came to lie."""
    moved = inputs if eqn.primitive.name in ("concatenate", "stack") else inputs[:1]
    if not all(map(_is_numeric, inputs[len(moved) :])):
        raise _NotTilted
    entries, numbered = [], []
    for array in map(_symbolic, moved):
        indices = np.arange(len(entries), len(entries) + array.size, dtype=np.int32)
        numbered.append(indices.reshape(array.shape))
        entries += array.ravel().tolist()
    outputs = _evaluated(eqn, [*numbered, *inputs[len(moved) :]])
    return [_object_array([entries[i] for i in x.ravel()], x.shape) for x in outputs]


def _summed(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    rest = [axis for axis in range(array.ndim) if axis not in axes]
    rows = array.transpose([*rest, *axes]).reshape(*[array.shape[axis] for axis in rest], -1)
    sums = [sum(row, _Sum({})) for row in rows.reshape(-1, rows.shape[-1])]
    return _object_array(sums, rows.shape[:-1])


def _is_symbolic(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype == object


def _is_numeric(array: Any) -> bool:
    return isinstance(array, np.ndarray) and array.dtype != object


def _symbolic(array: Any) -> np.ndarray:
    return array if _is_symbolic(array) else _each(_Sum.number, _numbers(array))


def _numbers(array: Any) -> np.ndarray:
    """The entries, Python's numbers where they are constants."""
    if math.prod(array.shape) > MOST_ENTRIES:
        raise _NotTilted
    return _object_array([float(x) if _is_numeric(array) else x for x in array.ravel()], array.shape)


def _each(function: Callable, *arrays: np.ndarray) -> np.ndarray:
    arrays = np.broadcast_arrays(*arrays)
    return _object_array([function(*each) for each in zip(*(a.ravel() for a in arrays))], arrays[0].shape)


def _object_array(entries: list, shape: tuple[int, ...]) -> np.ndarray:
    if len(entries) > MOST_ENTRIES:
        raise _NotTilted
    array = np.empty(len(entries), object)
    for index, entry in enumerate(entries):  # all at once, NumPy would ask JAX's what they hold
        array[index] = entry
    return array.reshape(shape)
