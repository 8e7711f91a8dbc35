"""The forms in which a solve keeps precisions: as matrices, as weights of rows, or packed (see also :mod:`~.chains`).

An array x of a form represents a precision. Another array represents its Cholesky factor, with NaN where the precision
is not positive definite. Forms are pytrees: arguments of compiled functions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..pytrees import PyTree
from .linalg import cholesky, inverse_from_cholesky, product, solve_lower
from .packing import Border, Packing

NARROWING = 256.0  # of the start's covariance, at a time
PROBED = 2**15  # numbers in the directions along which products of packed matrices are estimated
LEAST_PROBES, MOST_PROBES = 8, 32


class WholeMatrix:
    """Arrays that are symmetric matrices (r, r), on the host."""

    @staticmethod
    def times(x: np.ndarray, vector: np.ndarray) -> np.ndarray:
        """The matrix times a vector (r,)."""
        return x @ vector

    @staticmethod
    def scaled(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        """Its entries between diag(scale), such that their squares sum to the squared norm."""
        return (scale[:, None] * x * scale).ravel()

    @staticmethod
    def diagonal(x: np.ndarray) -> np.ndarray:
        """The diagonal, (r,)."""
        return np.diagonal(x)


class PackedMatrix(NamedTuple):
    """Arrays (z,) of the entries of symmetric matrices.

    :ivar row: (z,). :ivar column: (z,). :ivar count: (z,), two for an entry off the diagonal, given once for both
        sides.
    """

    row: np.ndarray
    column: np.ndarray
    count: np.ndarray

    def times(self, x: np.ndarray, vector: np.ndarray) -> np.ndarray:
        above = np.bincount(self.row, x * vector[self.column], len(vector))
        return above + np.bincount(self.column, (self.count - 1) * x * vector[self.row], len(vector))

    def scaled(self, x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return np.sqrt(self.count) * scale[self.row] * x * scale[self.column]

    def diagonal(self, x: np.ndarray) -> np.ndarray:
        is_diagonal = self.row == self.column
        return np.bincount(self.row[is_diagonal], x[is_diagonal])


Entries = WholeMatrix | PackedMatrix


class Dense(NamedTuple):
    """Precisions as matrices (r, r).

    :ivar precision: the base's; None: the identity.
    """

    precision: Array | None

    def begin(self, mean: Array) -> Array:
        """The precision to start from."""
        return jnp.eye(mean.size, dtype=mean.dtype)

    def narrower(self, x: Array) -> Array:
        """``NARROWING`` times the precision."""
        return NARROWING * x

    def wider(self, x: Array) -> Array:
        """The inverse of :meth:`narrower`."""
        return x / NARROWING

    def target(self, curvature: Array) -> Array:
        """The base's precision plus the curvature of the factors."""
        precision = jnp.eye(len(curvature), dtype=curvature.dtype) if self.precision is None else self.precision
        return precision + curvature

    def precision_times(self, mean: Array) -> Array:
        """The base's precision times the mean."""
        return mean if self.precision is None else self.precision @ mean

    def factor(self, x: Array) -> Array:
        """The Cholesky factor."""
        return cholesky(x)

    def solver(self, factor: Array) -> Callable[[Array], Array]:
        """Takes a vector to the covariance times it."""
        return lambda vector: solve_lower(factor, solve_lower(factor, vector), transpose=True)

    def half_log_determinant(self, factor: Array) -> Array:
        """Half the log determinant of the precision."""
        return jnp.sum(jnp.log(jnp.diagonal(factor)))

    def covariance_root(self, factor: Array) -> Array:
        """A (r, r) with A^T A the covariance, from which the predictors' covariances are computed."""
        return solve_lower(factor, jnp.eye(len(factor), dtype=factor.dtype))

    def trace(self, x: Array, covariance_root: Array) -> Array:
        """The trace of the base's precision times the covariance."""
        weighted = covariance_root if self.precision is None else product(covariance_root, self.precision)
        return jnp.sum(covariance_root * weighted)

    def products(self, factor: Array, covariance_root: Array, a: Array, b: Array) -> tuple[Array, Array]:
        """<a, a> and <a, b> of differences a and b of precisions, in q's metric: tr(Sigma a Sigma b)."""
        a, b = (product(product(covariance_root, x), covariance_root.T) for x in (a, b))
        return jnp.sum(a * a), jnp.sum(a * b)

    def entries(self) -> WholeMatrix:
        """How arrays are read as matrices, on the host; None for forms whose arrays are no matrices by themselves."""
        return WholeMatrix()


class Weighted(NamedTuple):
    """Precisions ``precision + frame^T diag(w) frame`` as their w (n,): those of factors that each depend on one
    entry of frame e. Beside a factorization and a triangular solve, an iteration then takes two products of matrices,
    not eight.

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
        """A (r, n) with A^T A the covariance of the entries that factors depend on."""
        return solve_lower(factor, self.frame.T)

    def trace(self, x: Array, covariance_root: Array) -> Array:
        return len(self.precision) - x @ jnp.sum(covariance_root**2, axis=0)

    def products(self, factor: Array, covariance_root: Array, a: Array, b: Array) -> tuple[Array, Array]:
        weighted = (covariance_root.T @ covariance_root) ** 2 @ a
        return a @ weighted, b @ weighted

    def entries(self) -> None:
        return None


@dataclass(frozen=True)
class Bordered:
    """Precisions [[D, B^T], [B, A]] with few entries in D, packed as a vector (z,). The base has none.

    Subclasses say how D is factorized.

    :ivar start: the precision to start from, (h + k,), diagonal.
    :ivar packing: has ``parts``, which cuts a packed matrix or factor in its parts, and ``coordinates``, the rows and
        columns of all entries, and how often each counts.
    """

    start: Array
    packing: Any

    narrower, wider = Dense.narrower, Dense.wider

    def target(self, curvature: Array) -> Array:
        return curvature

    def precision_times(self, mean: Array) -> Array:
        return jnp.zeros_like(mean)

    def trace(self, x: Array, covariance_root: Array) -> Array:
        return jnp.zeros((), x.dtype)

    def solver(self, factor: Array) -> Callable[[Array], Array]:
        parts = self.packing.parts(factor)  # here: in a loop, they would be cut out each time
        return lambda vector: self.by_transposed(parts, self.by_lower(parts, vector[:, None]))[:, 0]

    def products(self, factor: Array, covariance_root: Array, a: Array, b: Array) -> tuple[Array, Array]:
        """Estimates, along a few directions: whole products would take most of the time, and are asked for to know
        when and how far to go."""
        count = int(np.clip(PROBED // self.start.size, LEAST_PROBES, MOST_PROBES))
        probes = jnp.asarray(np.random.default_rng(0).normal(size=(self.start.size, count)), a.dtype)
        parts = self.packing.parts(factor)
        directions = self.by_transposed(parts, probes)
        both = [self.times(self.packing.parts(x), directions) for x in (a, b)]
        a, b = jnp.split(self.by_lower(parts, jnp.concatenate(both, axis=1)), 2, axis=1)
        return jnp.sum(a * a) / count, jnp.sum(a * b) / count

    def entries(self) -> PackedMatrix:
        return PackedMatrix(*self.packing.coordinates())

    def begin(self, mean: Array) -> Array:
        raise NotImplementedError

    def factor(self, x: Array) -> Array:
        raise NotImplementedError

    def half_log_determinant(self, factor: Array) -> Array:
        raise NotImplementedError

    def covariance_root(self, factor: Array) -> Array:
        """The covariance itself, packed: the part that products with sparse Jacobians need."""
        raise NotImplementedError

    def variances(self, factor: Array) -> Array:
        """The covariance's diagonal, (h + k,)."""
        return self.packing.diagonal(self.covariance_root(factor))

    def dense_root(self, factor: Array) -> Array:
        """The factor's inverse, (h + k, h + k)."""
        return self.by_lower(self.packing.parts(factor), jnp.eye(self.start.size, dtype=factor.dtype))

    def times(self, parts: PyTree, vectors: Array) -> Array:
        """A matrix, by its parts, times vectors (h + k, n)."""
        raise NotImplementedError

    def by_lower(self, parts: PyTree, vectors: Array) -> Array:
        """The inverse of a factor, by its parts, times vectors (h + k, n)."""
        raise NotImplementedError

    def by_transposed(self, parts: PyTree, vectors: Array) -> Array:
        """The inverse of a transposed factor, by its parts, times vectors (h + k, n)."""
        raise NotImplementedError

    def transposed_times(self, parts: PyTree, vectors: Array) -> Array:
        """A transposed factor, by its parts, times vectors (h + k, n)."""
        raise NotImplementedError


PrecisionForm = Dense | Weighted | Bordered
ArrowParts = tuple[Array, Border, Array]  # the diagonal (h,), the border (k, h), the corner (k, k)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Arrow(Bordered):
    """Bordered precisions with D diagonal.

    The Cholesky factor is [[s, 0], [W, L]] with s = D^(1/2), W = B / s and L L^T = A - W W^T, and packed like the
    precision: work grows with h k^2 + k^3, not with (h + k)^3.
    """

    packing: Packing

    def begin(self, mean: Array) -> Array:
        diagonal, corner = jnp.split(self.start, [self.packing.num_diagonal])
        border = self.packing.border(jnp.zeros(self.packing.num_border, corner.dtype))
        return self.packing.pack(diagonal, border, jnp.diag(corner))

    def factor(self, x: Array) -> Array:
        diagonal, border, corner = self.packing.parts(x)
        scale = jnp.sqrt(diagonal)
        border = border.scaled(1 / scale)
        return self.packing.pack(scale, border, cholesky(border.taken_from(corner)))

    def half_log_determinant(self, factor: Array) -> Array:
        scale, _, corner = self.packing.parts(factor)
        return jnp.sum(jnp.log(scale)) + jnp.sum(jnp.log(jnp.diagonal(corner)))

    def covariance_root(self, factor: Array) -> Array:
        scale, border, corner = self.packing.parts(factor)
        rest, border = inverse_from_cholesky(corner), border.scaled(1 / scale)
        between, explained = border.multiplied_by(-rest)
        return self.packing.pack(1 / scale**2 - explained, between, rest)

    def variances(self, factor: Array) -> Array:
        scale, border, corner = self.packing.parts(factor)
        rest = inverse_from_cholesky(corner)
        explained = border.scaled(1 / scale).squared_by(rest)
        return jnp.concatenate([1 / scale**2 + explained, jnp.diagonal(rest)])

    def dense_root(self, factor: Array) -> Array:
        scale, border, corner = self.packing.parts(factor)
        top = jnp.concatenate([jnp.diag(1 / scale), jnp.zeros((scale.size, len(corner)), factor.dtype)], axis=1)
        border = -border.scaled(1 / scale).whole()
        rest = jnp.concatenate([border, jnp.eye(len(corner), dtype=factor.dtype)], axis=1)
        return jnp.concatenate([top, solve_lower(corner, rest)])

    def times(self, parts: ArrowParts, vectors: Array) -> Array:
        diagonal, border, corner = parts
        top, rest = vectors[: diagonal.size], vectors[diagonal.size :]
        above = diagonal[:, None] * top + border.transposed_times(rest)
        return jnp.concatenate([above, border.times(top) + corner @ rest])

    def by_lower(self, parts: ArrowParts, vectors: Array) -> Array:
        scale, border, corner = parts
        top = vectors[: scale.size] / scale[:, None]
        return jnp.concatenate([top, solve_lower(corner, vectors[scale.size :] - border.times(top))])

    def by_transposed(self, parts: ArrowParts, vectors: Array) -> Array:
        scale, border, corner = parts
        rest = solve_lower(corner, vectors[scale.size :], transpose=True)
        return jnp.concatenate([(vectors[: scale.size] - border.transposed_times(rest)) / scale[:, None], rest])

    def transposed_times(self, parts: ArrowParts, vectors: Array) -> Array:
        scale, border, corner = parts
        top, rest = vectors[: scale.size], vectors[scale.size :]
        return jnp.concatenate([scale[:, None] * top + border.transposed_times(rest), corner.T @ rest])
