"""Symmetric matrices of the form of an arrow, [[D, B^T], [B, A]] with D diagonal, packed as vectors."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .borders import BorderPattern, DenseBorder, SparseBorder
from .jacobians import SparseJacobian

Border = DenseBorder | SparseBorder


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packing:
    """A vector holds the diagonal of D (h,), the entries of B (k, h), and A (k, k) by rows.

    :ivar num_diagonal: h. :ivar num_corner: k.
    :ivar pattern: the entries of B that are kept, in this order; None: all of them, by rows.
    """

    num_diagonal: int = field(metadata={"static": True})
    num_corner: int = field(metadata={"static": True})
    pattern: BorderPattern | None = None

    @property
    def num_border(self) -> int:
        """How many entries of B are kept."""
        return self.num_corner * self.num_diagonal if self.pattern is None else self.pattern.row.size

    @property
    def size(self) -> int:
        """The vector's."""
        return self.num_diagonal + self.num_border + self.num_corner**2

    def border_places(self, index: np.ndarray) -> np.ndarray:
        """Where the entries (index_0, index_1), (index_0, index_2), ... are, (..., K - 1), int32.

        :param index: rows of the matrix, (..., K): one of the first h, and others that are not.
        """
        column, row = index[..., :1].astype(np.int64), index[..., 1:] - self.num_diagonal
        if self.pattern is None:
            place = row * self.num_diagonal + column
        else:
            kept = np.asarray(self.pattern.column, np.int64) * self.num_corner + np.asarray(self.pattern.row)
            place = np.searchsorted(kept, column * self.num_corner + row)
        return (self.num_diagonal + place).astype(np.int32)

    def placed(self, jacobian: SparseJacobian, border: Array) -> SparseJacobian:
        """The Jacobian with the indices of its products in packed matrices. ``border``: those of
        :meth:`border_places`."""
        return replace(jacobian, border=border, num_packed=self.size)

    def pack(self, diagonal: Array, border: Border, corner: Array) -> Array:
        return jnp.concatenate([diagonal, border.entries, corner.reshape(-1)])

    def parts(self, x: Array) -> tuple[Array, Border, Array]:
        """The diagonal of D, B and A."""
        ends = self.num_diagonal, self.num_diagonal + self.num_border
        corner = x[ends[1] :].reshape(self.num_corner, self.num_corner)
        return x[: ends[0]], self.border(x[ends[0] : ends[1]]), corner

    def border(self, entries: Array) -> Border:
        """B of the entries that are kept."""
        shape = self.num_corner, self.num_diagonal
        if self.pattern is None:
            return DenseBorder(entries.reshape(shape))
        return SparseBorder(entries, self.pattern, shape)

    def diagonal(self, x: Array) -> Array:
        """The diagonal of the whole matrix, (h + k,)."""
        diagonal, _, corner = self.parts(x)
        return jnp.concatenate([diagonal, jnp.diagonal(corner)])

    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows and columns of all entries, and how often each counts: those of the border stand for both sides."""
        h, k = self.num_diagonal, self.num_corner
        if self.pattern is None:
            row, column = np.divmod(np.arange(k * h), max(h, 1))
        else:
            row, column = np.asarray(self.pattern.row), np.asarray(self.pattern.column)
        corner = h + np.arange(k)
        rows = np.concatenate([np.arange(h), h + row, np.repeat(corner, k)])
        columns = np.concatenate([np.arange(h), column, np.tile(corner, k)])
        return rows, columns, np.repeat([1, 2, 1], [h, len(row), k * k])

    def inner(self, a: Array, b: Array) -> Array:
        """The sum over all entries of the product of two matrices."""
        product = a * b
        return jnp.sum(product) + jnp.sum(product[self.num_diagonal : self.num_diagonal + self.num_border])

    def outer(self, u: Array, v: Array) -> Array:
        """u v^T + v u^T, of a v (h + k,) that is zero in its first h entries."""
        top, rest, corner = u[: self.num_diagonal], u[self.num_diagonal :], v[self.num_diagonal :]
        if self.pattern is None:
            border: Border = DenseBorder(corner[:, None] * top)
        else:
            border = self.border(corner[self.pattern.row] * top[self.pattern.column])
        product = rest[:, None] * corner
        return self.pack(jnp.zeros_like(top), border, product + product.T)

    def whole(self, x: Array) -> Array:
        """The matrix (h + k, h + k), zero where packing leaves something out."""
        diagonal, border, corner = self.parts(x)
        below = border.whole()
        return jnp.block([[jnp.diag(diagonal), below.T], [below, corner]])
