"""gamma(m, v) = -E[phi''(u)] of a site's densities, u ~ N(m, v), and how it moves with v."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..core.compilation import jit
from ..core.gaussians import Family
from ..core.pytrees import PyTree
from ..core.updates.factors import Kind
from ..model.data.rows import Rows, linspace_indices, num_rows, selected
from ..model.terms.terms import Terms, constants
from .engine import Engine

MOST_DENSITIES = 200  # of a site
SCATTERED_MEANS = 64  # of several predictors
NODE_ERROR = 0.05  # of an eigenvalue, relative to the largest, where few nodes are used for several predictors
CHUNK_NUMBERS = 2**18  # in the Jacobians of a chunk of the posterior's rows
PROBED_DENSITIES = 16
KINK = 0.01  # disagreement of two ways to differentiate, relative to gamma, that smooth densities do not reach
TOLERANCES = {np.dtype(np.float64): 1e-9, np.dtype(np.float32): 1e-5}  # several times the rounding measured
MEANS = np.linspace(-8.0, 8.0, 41)
VARIANCES = np.geomspace(1e-2, 1e2, 33)

Evaluate = Callable[[Array, Array, Any], tuple[Array, Array | None]]


@dataclass(frozen=True, eq=False, repr=False)
class Curvature:
    """gamma(m, v) = -E[phi''(u)] for u ~ N(m, v), and how it moves with v.

    A site with C > 1 predictors has a matrix -E[hess phi(u)], u ~ N(m, S), instead: ``gamma`` is its smallest
    eigenvalue, and what concerns condition 2 is None.

    :param means: m, of a shape that broadcasts with ``gamma``; with C > 1, and C as a last axis.
    :param variances: v, likewise; with C > 1 the covariances S, and (C, C) as last axes.
    :param gamma: (densities, means, variances) over a grid, with C > 1 (densities, points); (rows, elements) at a
        posterior.
    :param slope: the derivative of ``gamma`` in v.
    :param direction: 1 where ``gamma`` rises with v, -1 where it falls, 0 where it does neither beyond rounding.
    :param positive: condition 1, ``gamma >= 0`` throughout; with C > 1 up to a twentieth of the largest absolute
        eigenvalue, the error of few nodes.
    :param increasing: condition 2a, ``gamma`` nowhere falls as v grows.
    :param decreasing: condition 2b, ``gamma`` nowhere rises as v grows.
    """

    means: np.ndarray
    variances: np.ndarray
    gamma: np.ndarray
    slope: np.ndarray | None
    direction: np.ndarray | None
    positive: bool
    increasing: bool | None
    decreasing: bool | None

    def __repr__(self) -> str:
        return f"Curvature({self}, shape={self.gamma.shape})"

    def __str__(self) -> str:
        judged = {"1": self.positive, "2a": self.increasing, "2b": self.decreasing}
        words = {True: "holds", False: "fails", None: "is not defined"}
        text = ", ".join(f"condition {name} {words[holds]}" for name, holds in judged.items())
        unknown = int(np.sum(~np.isfinite(self.gamma)))
        return f"{text} (gamma is not finite at {unknown} of {self.gamma.size} points, left out)" if unknown else text


def distinct_densities(terms: Terms, rows: Rows, shared: dict[str, Array]) -> tuple[np.ndarray, np.ndarray, Any]:
    """Rows, elements and constants (densities, ...) of different densities, from all over the data."""
    chosen = linspace_indices(num_rows(rows), MOST_DENSITIES)
    few = {name: jnp.asarray(array[chosen]) for name, array in rows.items()}
    of_rows = jit(partial(constants, terms))(few | shared)
    values = jax.tree.map(lambda x: np.asarray(x).reshape(-1, *x.shape[2:]), of_rows)
    count = len(chosen) * terms.num_elements
    columns = [np.zeros((count, 1)), *(x.reshape(count, -1) for x in jax.tree.leaves(values))]
    first = np.sort(np.unique(np.concatenate(columns, axis=1), axis=0, return_index=True)[1])
    first = first[linspace_indices(len(first), MOST_DENSITIES)]
    return chosen[first // terms.num_elements], first % terms.num_elements, jax.tree.map(lambda x: x[first], values)


def curvature_of(terms: Terms, kind: Kind, dtype: DTypeLike, values: PyTree) -> Evaluate:
    """(mean (C,), covariance (C, C), constants) -> -E[hess phi] and, of one predictor, its derivative in v."""

    def gamma(mean, covariance, value):
        nothing = jnp.zeros((terms.num_predictors, 0), mean.dtype)  # v has the variance of the row's own variables
        return -kind.finest(mean, covariance, (1.0, value, nothing))[2]

    if terms.num_predictors > 1:
        return lambda mean, covariance, value: (gamma(mean, covariance, value), None)
    return _differenced(gamma) if _has_kinks(gamma, dtype, values) else _differentiated(gamma)


def _has_kinks(gamma: Callable, dtype: DTypeLike, values: PyTree) -> bool:
    """Whether differentiating the quadrature's sum misses part of the slope: nodes pass kinks of phi as v grows."""
    few = jax.tree.map(lambda x: x[linspace_indices(len(x), PROBED_DENSITIES)], values)
    means, covariances = _product(MEANS[::4], VARIANCES[::4], dtype)
    sizes, by_rule = _at_points(_differentiated(gamma), few, means, covariances)
    by_difference = _at_points(_differenced(gamma), few, means, covariances)[1]
    apart = np.abs(np.asarray(covariances) * (by_rule - by_difference))
    return bool(np.sum(apart) > KINK * np.sum(np.abs(sizes)))


def _differentiated(gamma: Callable) -> Evaluate:
    def evaluate(mean, covariance, value):
        return jax.jvp(lambda s: gamma(mean, s, value), (covariance,), (jnp.ones_like(covariance),))

    return evaluate


def _differenced(gamma: Callable) -> Evaluate:
    """Central differences of fourth order, with the step that balances their error against rounding."""

    def evaluate(mean, covariance, value):
        at = lambda change: gamma(mean, covariance + change, value)  # noqa: E731
        # gamma of an exponential grows as exp(v / 2), whatever v is; others change on the scale of v.
        step = jnp.finfo(mean.dtype).eps ** 0.2 * covariance / (1 + covariance)
        slope = (8 * (at(step) - at(-step)) - (at(2 * step) - at(-2 * step))) / (12 * step)
        return at(0.0), slope

    return evaluate


def over_grid(
    evaluate: Evaluate, values: PyTree, means: np.ndarray, variances: np.ndarray, dtype: DTypeLike
) -> Curvature:
    matrices, slopes = _at_points(evaluate, values, *_product(means, variances, dtype))
    shape = (len(matrices), len(means), len(variances))
    return _judge(means[:, None], variances, matrices.reshape(*shape, 1, 1), slopes.reshape(shape), axis=1)


def over_scattered_points(
    evaluate: Evaluate, values: PyTree, means: np.ndarray, variances: np.ndarray, num_predictors: int, dtype: DTypeLike
) -> Curvature:
    """Means anywhere in the box that the grid's ends span, each with every variance."""
    rng = np.random.default_rng(0)
    scattered = rng.uniform(np.min(means), np.max(means), (SCATTERED_MEANS, num_predictors))
    points = np.repeat(scattered, len(variances), axis=0)
    covariances = np.tile(variances, SCATTERED_MEANS)[:, None, None] * np.eye(num_predictors)
    matrices, _ = _at_points(evaluate, values, jnp.asarray(points, dtype), jnp.asarray(covariances, dtype))
    return _judge(points, covariances, matrices, None, axis=1)


def at_posterior(
    engine: Engine, terms: Terms, evaluate: Evaluate, rows: Rows, shared: dict[str, Array], gaussian: Family
) -> Curvature:
    """The curvatures at the predictors' moments of all rows under a Gaussian of theta."""
    program = engine.program
    gaussian = jax.tree.map(lambda x: jnp.asarray(x, program.dtype), gaussian)

    @jit
    def of_chunk(chunk):
        predictors = program.predictors(gaussian, chunk, terms.site)
        return *predictors, *jax.vmap(jax.vmap(evaluate))(*predictors, constants(terms, chunk | shared))

    total, size = num_rows(rows), max(1, CHUNK_NUMBERS // engine.numbers_per_row)
    pieces = [selected(rows, slice(start, start + size)) for start in range(0, total, size)]
    chunks = [jax.device_get(of_chunk(piece)) for piece in pieces]
    means, covariances, matrices, slopes = jax.tree.map(lambda *x: np.concatenate(x), *chunks)
    if terms.num_predictors == 1:
        means, covariances, slopes = means[..., 0], covariances[..., 0, 0], slopes[..., 0, 0]
    return _judge(means, covariances, matrices, slopes, axis=None)


def _at_points(evaluate: Evaluate, values: PyTree, means: Array, covariances: Array) -> tuple[np.ndarray, Any]:
    """Every density at every point: (densities, points, ...)."""

    @jit
    def every_density(values):
        at_points = jax.vmap(evaluate, in_axes=(0, 0, None))
        return jax.lax.map(lambda value: at_points(means, covariances, value), values)

    return jax.device_get(every_density(values))


def _product(means: np.ndarray, variances: np.ndarray, dtype: DTypeLike) -> tuple[Array, Array]:
    """Means (points, 1) and covariances (points, 1, 1) of a grid, variances running fastest."""
    m, v = np.meshgrid(means, variances, indexing="ij")
    return jnp.asarray(m.reshape(-1, 1), dtype), jnp.asarray(v.reshape(-1, 1, 1), dtype)


def _judge(
    means: np.ndarray, variances: np.ndarray, matrices: np.ndarray, slopes: np.ndarray | None, *, axis: int | None
) -> Curvature:
    """:param axis: of the points whose largest gamma says what a negligible gamma is."""
    tolerance, negligible = TOLERANCES[matrices.dtype], np.finfo(matrices.dtype).eps
    gamma, size = _extreme_eigenvalues(matrices)
    is_finite = np.isfinite(gamma) & (True if slopes is None else np.isfinite(slopes))
    largest = np.max(np.where(is_finite, size, 0.0), axis=axis, keepdims=True)

    def throughout(holds: np.ndarray) -> bool:
        return bool(is_finite.any() and holds[is_finite].all())

    if slopes is None:
        return Curvature(means, variances, gamma, None, None, throughout(gamma >= -NODE_ERROR * size), None, None)
    positive = throughout(gamma >= -tolerance * largest)
    change = variances * np.abs(np.where(is_finite, slopes, 0.0))
    moves = is_finite & (change > tolerance * size) & (size > negligible * largest)
    direction = np.where(moves, np.sign(slopes), 0.0).astype(np.int8)
    return Curvature(
        means, variances, gamma, slopes, direction, positive, throughout(direction >= 0), throughout(direction <= 0)
    )


def _extreme_eigenvalues(matrices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The smallest eigenvalue, and the largest absolute one; NaN for matrices that are not finite."""
    if matrices.shape[-1] == 1:
        gamma = matrices[..., 0, 0]
        return gamma, np.abs(gamma)
    finite = np.asarray(np.isfinite(matrices).all(axis=(-2, -1)))
    eigenvalues = np.linalg.eigvalsh(np.where(finite[..., None, None], matrices, 0.0))
    size = np.where(finite, np.max(np.abs(eigenvalues), axis=-1), 0.0)
    return np.where(finite, eigenvalues[..., 0], np.nan), size
