"""Designs: how n factors of C predictors each look at r coordinates. Arrays (n, C, r), or only what is not zero."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Packed(NamedTuple):
    """A symmetric matrix (r, r), as far as sparse designs look at it: they do not see two of its first entries, the
    heads, at once.

    :ivar array: (1 + r - heads, r): the heads' diagonal, then zeros; and below it the rows of the other entries.
    """

    array: Array

    @property
    def heads(self) -> int:
        return self.array.shape[1] - self.array.shape[0] + 1


def packed_gram(root: Array, heads: int) -> Packed:
    """root^T root. ``root``: (k, r)."""
    diagonal = jnp.sum(root[:, :heads] ** 2, axis=0)
    first = jnp.concatenate([diagonal, jnp.zeros(root.shape[1] - heads, root.dtype)])
    return Packed(jnp.concatenate([first[None], root[:, heads:].T @ root]))


def packed_inner(a: Array, b: Array) -> Array:
    """The sum over all entries of a product of two packed matrices."""
    heads = Packed(a).heads
    product = a * b
    return jnp.sum(product) + jnp.sum(product[1:, :heads])


def unpacked(array: Array) -> Array:
    """The whole matrix (r, r), zero where packing left something out."""
    heads, size = Packed(array).heads, array.shape[1]
    whole = jnp.zeros((size, size), array.dtype).at[heads:].set(array[1:]).at[:heads, heads:].set(array[1:, :heads].T)
    places = jnp.arange(heads)
    return whole.at[places, places].set(array[0, :heads])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Sparse:
    """A design (n, C, r) of which each factor's predictors look at the same K entries, and at nothing else.

    :ivar index: (n, K). :ivar values: (n, C, K). :ivar size: r.
    :ivar heads: of the first ``heads`` coordinates no factor looks at two.
    :ivar headed: whether that one comes first in ``index``; else the factors look at none.
    """

    index: Array
    values: Array
    size: int = field(metadata={"static": True})
    heads: int = field(metadata={"static": True})
    headed: bool = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        n, num_predictors, _ = self.values.shape
        return n, num_predictors, self.size

    @property
    def _rows(self) -> Array:
        """Where in a packed matrix the rows of the entries are that are no heads, (n, K or K - 1, 1)."""
        return self.index[:, int(self.headed) :, None] - self.heads + 1

    def entries(self, matrix: Packed) -> Array:
        """Of the matrix, those that each factor looks at, (n, K, K)."""
        below = matrix.array[self._rows, self.index[:, None, :]]
        if not self.headed:
            return below
        first = jnp.concatenate([matrix.array[0, self.index[:, :1]], below[..., 0]], axis=1)
        return jnp.concatenate([first[:, None], below], axis=1)

    def gram(self, weights: Array) -> Array:
        products = jnp.einsum("nca,ncd,ndb->nab", self.values, weights, self.values)
        shape = 1 + self.size - self.heads, self.size
        # Flat: what it scatters into by two indices, XLA may turn round, for everything after it to turn back.
        found = jnp.zeros(shape[0] * shape[1], products.dtype)
        found = found.at[self._rows * self.size + self.index[:, None, :]].add(products[:, int(self.headed) :])
        if self.headed:
            found = found.at[self.index[:, 0]].add(products[:, 0, 0])
        return found if self.heads == self.size else found.reshape(shape)


def apply_design(design: Array | Sparse, e: Array) -> Array:
    """design_i e for each factor, (n, C)."""
    if isinstance(design, Sparse):
        return jnp.einsum("nck,nk->nc", design.values, e[design.index])
    return design @ e


def times_root(design: Array | Sparse, root: Array) -> Array:
    """design_i root for each factor, (n, C, r)."""
    if isinstance(design, Sparse):
        return jnp.einsum("nck,nkr->ncr", design.values, root[design.index])
    return design @ root


def pull_back(design: Array | Sparse, gradients: Array) -> Array:
    """sum Z_i^T g_i, (r,)."""
    if isinstance(design, Sparse):
        pulls = jnp.einsum("nck,nc->nk", design.values, gradients)
        return jnp.zeros(design.size, gradients.dtype).at[design.index].add(pulls)
    return gradients.reshape(-1) @ design.reshape(-1, design.shape[-1])


def gram(design: Array | Sparse, weights: Array) -> Array:
    """sum Z_i^T W_i Z_i: (r, r); of sparse designs packed, and if all entries are heads its diagonal (r,)."""
    if isinstance(design, Sparse):
        return design.gram(weights)
    n, c, r = design.shape
    return design.reshape(n * c, r).T @ jnp.einsum("ncd,ndr->ncr", weights, design).reshape(n * c, r)


def covariance(design: Array | Sparse, spread: Array | Packed) -> Array:
    """Z_i Sigma Z_i^T for each factor, (n, C, C).

    :param spread: Sigma packed (for sparse designs only), or any A with A^T A = Sigma.
    """
    if isinstance(design, Sparse):
        matrix = spread if isinstance(spread, Packed) else packed_gram(spread, design.heads)
        return jnp.einsum("nca,nab,ndb->ncd", design.values, design.entries(matrix), design.values)
    n, c, r = design.shape
    assert not isinstance(spread, Packed)
    moved = (spread @ design.reshape(n * c, r).T).reshape(spread.shape[0], n, c)
    return jnp.einsum("rnc,rnd->ncd", moved, moved)
