"""Jacobians of the predictors of n factors: arrays (n, C, r), or only their entries that are not zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Packed(NamedTuple):
    """The part of a symmetric matrix (r, r) that products with sparse Jacobians need: of its leading block of size d
    only the diagonal.

    :ivar array: (1 + r - d, r): the diagonal and zeros; below it the rows of the other entries.
    """

    array: Array

    @property
    def num_diagonal(self) -> int:
        """d."""
        return self.array.shape[1] - self.array.shape[0] + 1


def packed_gram(root: Array, num_diagonal: int) -> Packed:
    """root^T root. ``root``: (k, r)."""
    diagonal = jnp.sum(root[:, :num_diagonal] ** 2, axis=0)
    first = jnp.concatenate([diagonal, jnp.zeros(root.shape[1] - num_diagonal, root.dtype)])
    return Packed(jnp.concatenate([first[None], root[:, num_diagonal:].T @ root]))


def packed_inner(a: Array, b: Array) -> Array:
    """The sum over all entries of a product of two packed matrices."""
    num_diagonal = Packed(a).num_diagonal
    product = a * b
    return jnp.sum(product) + jnp.sum(product[1:, :num_diagonal])


def unpacked(array: Array) -> Array:
    """The whole matrix (r, r), zero where packing left something out."""
    num_diagonal, size = Packed(array).num_diagonal, array.shape[1]
    border = array[1:, :num_diagonal].T
    whole = jnp.zeros((size, size), array.dtype).at[num_diagonal:].set(array[1:])
    whole = whole.at[:num_diagonal, num_diagonal:].set(border)
    indices = jnp.arange(num_diagonal)
    return whole.at[indices, indices].set(array[0, :num_diagonal])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseJacobian:
    """A Jacobian (n, C, r) in which all predictors of a factor depend on the same K entries, and on no others.

    :ivar index: (n, K). :ivar values: (n, C, K). :ivar size: r.
    :ivar num_diagonal: d: no factor depends on two of the first d entries.
    :ivar has_diagonal: whether each factor depends on one of these; it then comes first in ``index``.
    """

    index: Array
    values: Array
    size: int = field(metadata={"static": True})
    num_diagonal: int = field(metadata={"static": True})
    has_diagonal: bool = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        n, num_predictors, _ = self.values.shape
        return n, num_predictors, self.size

    @property
    def _rows(self) -> Array:
        """The rows in a packed matrix of the entries after the first d, (n, K or K - 1, 1)."""
        return self.index[:, int(self.has_diagonal) :, None] - self.num_diagonal + 1

    def entries(self, matrix: Packed) -> Array:
        """The block of the matrix that each factor depends on, (n, K, K)."""
        below = matrix.array[self._rows, self.index[:, None, :]]
        if not self.has_diagonal:
            return below
        first = jnp.concatenate([matrix.array[0, self.index[:, :1]], below[..., 0]], axis=1)
        return jnp.concatenate([first[:, None], below], axis=1)

    def gram(self, weights: Array) -> Array:
        products = jnp.einsum("nca,ncd,ndb->nab", self.values, weights, self.values)
        shape = 1 + self.size - self.num_diagonal, self.size
        # Flat: what it scatters into by two indices, XLA may turn round, for everything after it to turn back.
        total = jnp.zeros(shape[0] * shape[1], products.dtype)
        total = total.at[self._rows * self.size + self.index[:, None, :]].add(products[:, int(self.has_diagonal) :])
        if self.has_diagonal:
            total = total.at[self.index[:, 0]].add(products[:, 0, 0])
        return total if self.num_diagonal == self.size else total.reshape(shape)


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
    """sum Z_i^T g_i, (r,)."""
    if isinstance(jacobian, SparseJacobian):
        products = jnp.einsum("nck,nc->nk", jacobian.values, gradients)
        return jnp.zeros(jacobian.size, gradients.dtype).at[jacobian.index].add(products)
    return gradients.reshape(-1) @ jacobian.reshape(-1, jacobian.shape[-1])


def gram(jacobian: Array | SparseJacobian, weights: Array) -> Array:
    """sum Z_i^T W_i Z_i: (r, r); of sparse Jacobians packed, and only the diagonal (r,) if d = r."""
    if isinstance(jacobian, SparseJacobian):
        return jacobian.gram(weights)
    n, c, r = jacobian.shape
    return jacobian.reshape(n * c, r).T @ jnp.einsum("ncd,ndr->ncr", weights, jacobian).reshape(n * c, r)


def covariance(jacobian: Array | SparseJacobian, sigma: Array | Packed) -> Array:
    """Z_i Sigma Z_i^T for each factor, (n, C, C).

    :param sigma: Sigma packed (for sparse Jacobians only), or any A with A^T A = Sigma.
    """
    if isinstance(jacobian, SparseJacobian):
        matrix = sigma if isinstance(sigma, Packed) else packed_gram(sigma, jacobian.num_diagonal)
        return jnp.einsum("nca,nab,ndb->ncd", jacobian.values, jacobian.entries(matrix), jacobian.values)
    n, c, r = jacobian.shape
    assert not isinstance(sigma, Packed)
    rotated = (sigma @ jacobian.reshape(n * c, r).T).reshape(sigma.shape[0], n, c)
    return jnp.einsum("rnc,rnd->ncd", rotated, rotated)
