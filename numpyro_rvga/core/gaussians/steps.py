"""What moves a Gaussian: what rows say of it, dynamics, and what a step must leave."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..linalg import column_sums, positive_part

CHARTS = ("natural", "moment")


class Site(NamedTuple):
    """What a block of rows says at q: g and H = factor^T weight factor + diag(diagonal).

    :ivar gradient: g, (P,). :ivar factor: (K, P). :ivar weight: (K, K), symmetric; None: the identity.
    :ivar diagonal: (P,), or None.
    """

    gradient: Array
    factor: Array
    weight: Array | None = None
    diagonal: Array | None = None

    @property
    def may_be_indefinite(self) -> bool:
        return self.weight is not None or self.diagonal is not None

    def clipped(self) -> Site:
        """With H's negative part left out."""
        weight = None if self.weight is None else positive_part(self.weight)
        diagonal = None if self.diagonal is None else jnp.maximum(self.diagonal, 0.0)
        return self._replace(weight=weight, diagonal=diagonal)

    def curvature_diagonal(self) -> Array:
        """The diagonal of H, (P,)."""
        weighted = self.factor if self.weight is None else self.weight @ self.factor
        found = column_sums(self.factor * weighted)
        return found if self.diagonal is None else found + self.diagonal

    def gram(self, spread: Array) -> Array:
        """spread^T H spread for spread (P, N)."""
        rows = self.factor @ spread
        found = rows.T @ (rows if self.weight is None else self.weight @ rows)
        return found if self.diagonal is None else found + spread.T @ (self.diagonal[:, None] * spread)


class Transition(NamedTuple):
    """theta' = matrix theta + offset + noise.

    :ivar matrix: (P, P), or its diagonal (P,). :ivar offset: (P,).
    :ivar noise_root: R (P, K), for noise of covariance R R^T, or the standard deviations (P,) of independent noise.
    """

    matrix: Array
    offset: Array
    noise_root: Array

    def mean(self, mean: Array) -> Array:
        return self.applied(mean) + self.offset

    def applied(self, columns: Array) -> Array:
        """matrix columns, (P,) or (P, N)."""
        if self.matrix.ndim == 2:
            return self.matrix @ columns
        return self.matrix * columns if columns.ndim == 1 else self.matrix[:, None] * columns

    @property
    def noise_variance(self) -> Array:
        return self.noise_root**2 if self.noise_root.ndim == 1 else jnp.sum(self.noise_root**2, axis=1)


def refused_if_invalid(q: Any) -> Any:
    """With a mean of NaN if it is no Gaussian."""
    return dataclasses.replace(q, mean=jnp.where(q.is_valid(), q.mean, jnp.nan))


def log_normal(lengths: Array, log_det: Array, size: int) -> Array:
    return -0.5 * (lengths + log_det + size * math.log(2 * math.pi))
