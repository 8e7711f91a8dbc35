"""Jacobians of the predictors of n factors: arrays (n, C, r), or only their entries that are not zero."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import Array

from .linalg import MOST_UNROLLED, product


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseJacobian:
    """A Jacobian (n, C, r) in which all predictors of a factor depend on the same K entries, and on no others.

    Of a symmetric matrix (r, r) it needs some entries, packed as a vector; see :class:`~.packing.Packing`.

    :ivar index: (n, K). :ivar values: (n, C, K). :ivar size: r.
    :ivar num_diagonal: d: the first d entries are eliminated.
    :ivar num_leading: on how many of these each factor depends, zero or one; they come first in ``index``.
    :ivar border: where a packed matrix has the products of this one with the others, (n, K - 1); with none of these,
        (n, 0). None: not known yet.
    :ivar num_packed: size of a packed matrix.
    """

    index: Array
    values: Array
    size: int = field(metadata={"static": True})
    num_diagonal: int = field(metadata={"static": True})
    num_leading: int = field(metadata={"static": True})
    border: Array | None = None
    num_packed: int = field(default=0, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        n, num_predictors, _ = self.values.shape
        return n, num_predictors, self.size

    @property
    def is_diagonal(self) -> bool:
        """Whether packed matrices are a diagonal (r,)."""
        return self.num_diagonal == self.size

    @property
    def _corner(self) -> Array:
        """Where packed matrices have the products of entries after the first d, (n, K - 1, K - 1) or (n, K, K)."""
        num_corner = self.size - self.num_diagonal
        others = self.index[:, self.num_leading :] - self.num_diagonal
        return self.num_packed - num_corner**2 + others[:, :, None] * num_corner + others[:, None, :]

    def entries(self, x: Array) -> Array:
        """The block of a packed matrix that each factor depends on, (n, K, K)."""
        if not self.num_leading:
            return x[self._corner]
        first = x[self.index[:, :1]]
        if self.is_diagonal:
            return first[:, None]
        beside = x[self.border]
        below = jnp.concatenate([beside[:, :, None], x[self._corner]], axis=2)
        return jnp.concatenate([jnp.concatenate([first, beside], axis=1)[:, None], below], axis=1)

    def gram(self, weights: Array) -> Array:
        products = jnp.einsum("nca,ncd,ndb->nab", self.values, weights, self.values)
        if self.is_diagonal:
            return jnp.zeros(self.size, products.dtype).at[self.index[:, 0]].add(products[:, 0, 0])
        total, rest = jnp.zeros(self.num_packed, products.dtype), self.num_leading
        total = total.at[self._corner].add(products[:, rest:, rest:])
        if not self.num_leading:
            return total
        return total.at[self.border].add(products[:, 1:, 0]).at[self.index[:, 0]].add(products[:, 0, 0])


def times_vector(jacobian: Array | SparseJacobian, e: Array) -> Array:
    """jacobian_i e for each factor, (n, C)."""
    if isinstance(jacobian, SparseJacobian):
        return jnp.einsum("nck,nk->nc", jacobian.values, e[jacobian.index])
    return jacobian @ e


def times_root(jacobian: Array | SparseJacobian, root: Array) -> Array:
    """jacobian_i root for each factor, (n, C, r)."""
    if isinstance(jacobian, SparseJacobian):
        return jnp.einsum("nck,nkr->ncr", jacobian.values, root[jacobian.index])
    return jacobian @ root


def vjp(jacobian: Array | SparseJacobian, gradients: Array) -> Array:
    """sum J_i^T g_i, (r,), of gradients g_i (n, C)."""
    if isinstance(jacobian, SparseJacobian):
        products = jnp.einsum("nck,nc->nk", jacobian.values, gradients)
        return jnp.zeros(jacobian.size, gradients.dtype).at[jacobian.index].add(products)
    return gradients.reshape(-1) @ jacobian.reshape(-1, jacobian.shape[-1])


def gram(jacobian: Array | SparseJacobian, weights: Array) -> Array:
    """sum J_i^T W_i J_i, (r, r), of weights W_i (n, C, C); of sparse Jacobians packed."""
    if isinstance(jacobian, SparseJacobian):
        return jacobian.gram(weights)
    n, c, r = jacobian.shape
    rows, weighted = (x.reshape(n * c, r) for x in (jacobian, product(weights, jacobian)))
    return product(rows.T, weighted) if r <= MOST_UNROLLED else rows.T @ weighted


def covariance(jacobian: Array | SparseJacobian, sigma: Array) -> Array:
    """J_i Sigma J_i^T for each factor, (n, C, C).

    :param sigma: Sigma packed, a vector, for sparse Jacobians; or any matrix A with A^T A = Sigma, for others, and for
        sparse ones whose products are diagonal.
    """
    if isinstance(jacobian, SparseJacobian):
        assert sigma.ndim == 1 or jacobian.is_diagonal
        packed = sigma if sigma.ndim == 1 else jnp.sum(sigma**2, axis=0)
        return jnp.einsum("nca,nab,ndb->ncd", jacobian.values, jacobian.entries(packed), jacobian.values)
    n, c, r = jacobian.shape
    assert sigma.ndim == 2
    rotated = product(sigma, jacobian.reshape(n * c, r).T).reshape(sigma.shape[0], n, c)
    if not 0 < sigma.shape[0] <= MOST_UNROLLED:
        return jnp.einsum("rnc,rnd->ncd", rotated, rotated)
    return product(rotated.transpose(1, 2, 0), rotated.transpose(1, 0, 2))
