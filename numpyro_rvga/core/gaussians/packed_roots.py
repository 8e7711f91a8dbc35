"""Square roots of the covariances of a mixture's components: whole matrices, or as packed solves leave them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from ..matrices.chains import ChainPacking, packed_form
from ..matrices.linalg import solve_lower
from ..matrices.packing import Packing
from ..matrices.precisions import Bordered

Metric = Callable[[Array], Array]
"""Squared lengths (n,) of steps (n, P)."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseRoot:
    """``matrix``: (P, P), lower triangular."""

    matrix: Array

    def times(self, noise: Array) -> Array:
        """The root times a vector (P,)."""
        return jnp.matmul(self.matrix, noise, precision="highest")

    def metric(self, count: int) -> Metric:
        """Squared lengths in the precision, of about ``count`` steps. For many the root is inverted: products of
        matrices take a third of the time of solves."""
        if count < len(self.matrix):
            return lambda steps: jnp.sum(solve_lower(self.matrix, steps.T) ** 2, axis=0)
        inverse = solve_lower(self.matrix, jnp.eye(len(self.matrix), dtype=self.matrix.dtype))
        return lambda steps: jnp.sum(jnp.matmul(steps, inverse.T, precision="highest") ** 2, axis=1)

    def log_determinant(self) -> Array:
        """Of the root."""
        return jnp.sum(jnp.log(jnp.diagonal(self.matrix)))

    def whole(self) -> Array:
        """A root (P, P)."""
        return self.matrix


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRoot:
    """A root of the covariance of theta = (h, x) with h = kernel e, x = slopes h + R e', R R^T a packed precision's
    inverse.

    :ivar factor: the precision's, packed. :ivar packing: says how. :ivar kernel: (d, d), lower triangular.
    :ivar slopes: (P - d, d). :ivar places: (P,), the entries of theta that are h, and x in the order of the packing.
    """

    factor: Array
    packing: Packing | ChainPacking
    kernel: Array
    slopes: Array
    places: Array

    def _split(self, vectors: Array) -> tuple[Array, Array]:
        size = len(self.kernel)
        return vectors[:size], vectors[size:]

    @property
    def _form(self) -> Bordered:
        return packed_form(jnp.ones(len(self.slopes), self.slopes.dtype), self.packing)

    def times(self, noise: Array) -> Array:
        """The root times a vector (P,)."""
        return self._times(noise[:, None])[:, 0]

    def _times(self, noise: Array) -> Array:
        of_h, of_x = self._split(noise)
        h = self.kernel @ of_h
        x = self.slopes @ h + self._form.by_transposed(self.packing.parts(self.factor), of_x)
        return jnp.zeros_like(noise).at[self.places].set(jnp.concatenate([h, x]))

    def metric(self, count: int) -> Metric:
        """Of the precision."""
        del count

        def lengths(steps: Array) -> Array:
            h, x = self._split(steps.T[self.places])
            of_x = self._form.transposed_times(self.packing.parts(self.factor), x - self.slopes @ h)
            return jnp.sum(solve_lower(self.kernel, h) ** 2, axis=0) + jnp.sum(of_x**2, axis=0)

        return lengths

    def log_determinant(self) -> Array:
        """Of the root."""
        return jnp.sum(jnp.log(jnp.diagonal(self.kernel))) - self._form.half_log_determinant(self.factor)

    def whole(self) -> Array:
        """A root (P, P), not triangular."""
        return self._times(jnp.eye(self.places.size, dtype=self.slopes.dtype))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PackedRoots:
    """K of them, as :class:`PackedRoot`: with the components along the leading axis of ``factors``, ``kernels`` and
    ``slopes``.

    :ivar variances: of the entries of theta, (K, P).
    """

    factors: Array
    packing: Packing | ChainPacking
    kernels: Array
    slopes: Array
    places: Array
    variances: Array

    @property
    def shape(self) -> tuple[int, int, int]:
        size = self.places.size
        return len(self.variances), size, size

    def component(self, k: int | Array) -> PackedRoot:
        return PackedRoot(self.factors[k], self.packing, self.kernels[k], self.slopes[k], self.places)


def root_of(roots: Array | PackedRoots, k: int | Array) -> DenseRoot | PackedRoot:
    """The one of component k."""
    return roots.component(k) if isinstance(roots, PackedRoots) else DenseRoot(roots[k])


def variances_of(roots: Array | PackedRoots) -> Array:
    """The variances of the entries of theta, (K, P)."""
    return roots.variances if isinstance(roots, PackedRoots) else jnp.sum(roots**2, axis=2)
