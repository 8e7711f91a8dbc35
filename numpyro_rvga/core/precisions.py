"""The forms in which a solve keeps precisions: as matrices, as weights of rows, or packed.

An array x of a form represents a precision. What represents its Cholesky factor is NaN where it is not positive
definite. Forms are pytrees: arguments of compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .borders import DenseBorder
from .jacobians import Packed
from .linalg import cholesky, inverse_from_cholesky, solve_lower
from .packing import Border, Packing

NARROWING = 256.0  # of the start's covariance, at a time
PROBED = 2**15  # numbers in the directions along which products of packed matrices are estimated
LEAST_PROBES, MOST_PROBES = 8, 32


class Dense(NamedTuple):
    """Precisions as matrices (r, r).

    :ivar precision: the base's; None: the identity.
    """

    precision: Array | None

    def begin(self, mean: Array) -> Array:
        """The precision to start from."""
        return jnp.eye(mean.size, dtype=mean.dtype)

    def narrower(self, x: Array) -> Array:
        return NARROWING * x

    def wider(self, x: Array) -> Array:
        """What was made narrower."""
        return x / NARROWING

    def target(self, curvature: Array) -> Array:
        """The base's precision plus the curvature of the factors."""
        precision = jnp.eye(len(curvature), dtype=curvature.dtype) if self.precision is None else self.precision
        return precision + curvature

    def precision_times(self, mean: Array) -> Array:
        """The base's precision times the mean."""
        return mean if self.precision is None else self.precision @ mean

    def factor(self, x: Array) -> Array:
        return cholesky(x)

    def solver(self, factor: Array) -> Callable[[Array], Array]:
        """Takes a vector to the covariance times it."""
        return lambda vector: solve_lower(factor, solve_lower(factor, vector), transpose=True)

    def half_log_determinant(self, factor: Array) -> Array:
        return jnp.sum(jnp.log(jnp.diagonal(factor)))

    def covariance_root(self, factor: Array) -> Array:
        """What the predictors' covariances are computed from: here A (r, r) with A^T A the covariance."""
        return solve_lower(factor, jnp.eye(len(factor), dtype=factor.dtype))

    def trace(self, x: Array, covariance_root: Array) -> Array:
        """Of the base's precision times the covariance."""
        weighted = covariance_root if self.precision is None else covariance_root @ self.precision
        return jnp.sum(covariance_root * weighted)

    def products(self, factor: Array, covariance_root: Array, a: Array, b: Array) -> tuple[Array, Array]:
        """Of differences of precisions, <a, a> and <a, b> in q's metric."""
        a, b = (covariance_root @ x @ covariance_root.T for x in (a, b))
        return jnp.sum(a * a), jnp.sum(a * b)


class Weighted(NamedTuple):
    """Precisions ``precision + frame^T diag(w) frame`` as their w (n,): what selections, seen through a frame, make of
    the base's. Beside a factorization and a triangular solve, an iteration then takes two products of matrices, not
    eight.

    :ivar frame: (n, r).
    """

    precision: Array
    frame: Array

    def begin(self, mean: Array) -> Array:
        return jnp.zeros(len(self.frame), self.frame.dtype)

    def narrower(self, x: Array) -> Array:
        return NARROWING * x + 1

    def wider(self, x: Array) -> Array:
        return (x - 1) / NARROWING

    def target(self, curvature: Array) -> Array:
        return curvature

    def precision_times(self, mean: Array) -> Array:
        return self.precision @ mean

    def factor(self, x: Array) -> Array:
        return cholesky(self.precision + (self.frame.T * x) @ self.frame)

    solver, half_log_determinant = Dense.solver, Dense.half_log_determinant

    def covariance_root(self, factor: Array) -> Array:
        """In the coordinates of the selections: A (r, n)."""
        return solve_lower(factor, self.frame.T)

    def trace(self, x: Array, covariance_root: Array) -> Array:
        return len(self.precision) - x @ jnp.sum(covariance_root**2, axis=0)

    def products(self, factor: Array, covariance_root: Array, a: Array, b: Array) -> tuple[Array, Array]:
        weighted = (covariance_root.T @ covariance_root) ** 2 @ a
        return a @ weighted, b @ weighted


class ArrowFactor(NamedTuple):
    """The Cholesky factor [[s, 0], [W, L]] of an arrow, by its parts: s (h,), L (k, k), and W (k, h) or its values
    (z,) where a pattern says."""

    scale: Array
    border: Array
    corner: Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrow:
    """Precisions packed: [[D, B^T], [B, A]] with D diagonal. The base has none.

    Its Cholesky factor is [[s, 0], [W, L]] with s = D^(1/2), W = B / s and L L^T = A - W W^T, and packed like it: work
    grows with h k^2 + k^3, not with (h + k)^3.

    :ivar start: the precision to start from, (h + k,), diagonal.
    """

    start: Array
    packing: Packing

    def begin(self, mean: Array) -> Array:
        diagonal, corner = jnp.split(self.start, [self.packing.num_diagonal])
        border = self.packing.border(jnp.zeros(self.packing.num_border, corner.dtype))
        return self.packing.pack(diagonal, border, jnp.diag(corner))

    narrower, wider = Dense.narrower, Dense.wider

    def target(self, curvature: Array) -> Array:
        return curvature

    def precision_times(self, mean: Array) -> Array:
        return jnp.zeros_like(mean)

    def factor(self, x: Array) -> Array:
        diagonal, border, corner = self.packing.parts(x)
        scale = jnp.sqrt(diagonal)
        border = border.scaled(1 / scale)
        return self.packing.pack(scale, border, cholesky(border.taken_from(corner)))

    def solver(self, factor: Array) -> Callable[[Array], Array]:
        parts = self.packing.parts(factor)  # here: in a loop, they would be cut out each time
        return lambda vector: _solve_transposed(parts, _solve_lower(parts, vector[:, None]))[:, 0]

    def half_log_determinant(self, factor: Array) -> Array:
        scale, _, corner = self.packing.parts(factor)
        return jnp.sum(jnp.log(scale)) + jnp.sum(jnp.log(jnp.diagonal(corner)))

    def covariance_root(self, factor: Array) -> Packed:
        """The covariance itself, packed: the part that products with sparse Jacobians need."""
        scale, border, corner = self.packing.parts(factor)
        rest, border = inverse_from_cholesky(corner), border.scaled(1 / scale)
        between, explained = border.multiplied_by(-rest)
        return Packed(self.packing.pack(1 / scale**2 - explained, between, rest))

    def trace(self, x: Array, covariance_root: Packed) -> Array:
        return jnp.zeros((), x.dtype)

    def products(self, factor: Array, covariance_root: Packed, a: Array, b: Array) -> tuple[Array, Array]:
        """Estimates, along a few directions: whole products would take most of the time, and are asked for to know
        when and how far to go."""
        count = int(np.clip(PROBED // self.start.size, LEAST_PROBES, MOST_PROBES))
        probes = jnp.asarray(np.random.default_rng(0).normal(size=(self.start.size, count)), a.dtype)
        parts = self.packing.parts(factor)
        directions = _solve_transposed(parts, probes)
        a, b = (_solve_lower(parts, _times(self.packing.parts(x), directions)) for x in (a, b))
        return jnp.sum(a * a) / count, jnp.sum(a * b) / count

    def dense_root(self, factor: Array) -> Array:
        """The factor's inverse, (h + k, h + k)."""
        scale, border, corner = self.packing.parts(factor)
        top = jnp.concatenate([jnp.diag(1 / scale), jnp.zeros((scale.size, len(corner)), factor.dtype)], axis=1)
        border = -border.scaled(1 / scale).whole()
        rest = jnp.concatenate([border, jnp.eye(len(corner), dtype=factor.dtype)], axis=1)
        return jnp.concatenate([top, solve_lower(corner, rest)])

    def parts(self, factor: Array) -> ArrowFactor:
        """Of a packed factor."""
        scale, border, corner = self.packing.parts(factor)
        return ArrowFactor(scale, border.matrix if isinstance(border, DenseBorder) else border.values, corner)

    def solve_transposed(self, factor: ArrowFactor, vectors: Array) -> Array:
        """The transposed factor's inverse times vectors (h + k, n)."""
        return _solve_transposed(self._bordered(factor), vectors)

    def times_transposed(self, factor: ArrowFactor, vectors: Array) -> Array:
        """The transposed factor times vectors (h + k, n)."""
        scale, border, corner = self._bordered(factor)
        top, rest = vectors[: scale.size], vectors[scale.size :]
        return jnp.concatenate([scale[:, None] * top + border.transposed_times(rest), corner.T @ rest])

    def _bordered(self, factor: ArrowFactor) -> _Parts:
        return factor.scale, self.packing.border(factor.border), factor.corner


_Parts = tuple[Array, Border, Array]  # the diagonal (h,), the border (k, h), the corner (k, k)


def _times(parts: _Parts, vectors: Array) -> Array:
    diagonal, border, corner = parts
    top, rest = vectors[: diagonal.size], vectors[diagonal.size :]
    above = diagonal[:, None] * top + border.transposed_times(rest)
    return jnp.concatenate([above, border.times(top) + corner @ rest])


def _solve_lower(parts: _Parts, vectors: Array) -> Array:
    scale, border, corner = parts
    top = vectors[: scale.size] / scale[:, None]
    return jnp.concatenate([top, solve_lower(corner, vectors[scale.size :] - border.times(top))])


def _solve_transposed(parts: _Parts, vectors: Array) -> Array:
    scale, border, corner = parts
    rest = solve_lower(corner, vectors[scale.size :], transpose=True)
    return jnp.concatenate([(vectors[: scale.size] - border.transposed_times(rest)) / scale[:, None], rest])


PrecisionForm = Dense | Weighted | Arrow
