"""Symmetric matrices of the form of an arrow, [[D, B^T], [B, A]] with D diagonal, packed as vectors. The border B
(k, h) is a whole matrix, or its entries that are not zero."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .jacobians import SparseJacobian

DENSE_SPEEDUP = 1_000  # of a multiplication in a product of matrices, over one whose indices are looked up


class BorderPattern(NamedTuple):
    """Where a border is not zero: z entries, and t pairs of entries in one column.

    :ivar column: (z,). :ivar row: (z,). :ivar first: (t,), an entry; ``second`` (t,): one in its column, of no later
        row. Each pair is there once, and each entry with itself.
    """

    column: Array
    row: Array
    first: Array
    second: Array


def border_pattern(columns: np.ndarray, rows: np.ndarray, num_columns: int, num_rows: int) -> BorderPattern | None:
    """The pattern of entries (n,), which may be repeated; None if dense matrices are faster."""
    entries = np.unique(columns.astype(np.int64) * num_rows + rows)
    column, row = np.divmod(entries, num_rows)
    counts = np.bincount(column, minlength=num_columns)
    num_pairs = int(np.sum(counts.astype(np.float64) * (counts + 1)) / 2)
    if num_pairs * DENSE_SPEEDUP > num_columns * num_rows**2:
        return None
    starts = np.cumsum(counts) - counts
    place = np.arange(len(entries)) - starts[column]  # in its column: so many entries come no later, besides itself
    first = np.repeat(np.arange(len(entries)), place + 1)
    before = np.arange(num_pairs) - np.repeat(np.cumsum(place + 1) - (place + 1), place + 1)
    second = starts[column[first]] + before
    return BorderPattern(*[jnp.asarray(numbers, jnp.int32) for numbers in (column, row, first, second)])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DenseBorder:
    """``matrix``: (k, h)."""

    matrix: Array

    @property
    def entries(self) -> Array:
        """The entries that the pattern keeps."""
        return self.matrix.reshape(-1)

    def whole(self) -> Array:
        return self.matrix

    def scaled(self, scale: Array) -> DenseBorder:
        """B diag(scale), scale (h,)."""
        return DenseBorder(self.matrix * scale)

    def times(self, vectors: Array) -> Array:
        """B V, of V (h, n)."""
        return self.matrix @ vectors

    def transposed_times(self, vectors: Array) -> Array:
        """B^T V, of V (k, n)."""
        return self.matrix.T @ vectors

    def taken_from(self, corner: Array) -> Array:
        """A - B B^T, in its lower triangle at least."""
        return corner - self.matrix @ self.matrix.T

    def multiplied_by(self, corner: Array) -> tuple[DenseBorder, Array]:
        """For symmetric A: A B where B is not zero, and the diagonal of B^T A B, (h,)."""
        product = corner @ self.matrix
        return DenseBorder(product), jnp.sum(self.matrix * product, axis=0)

    def squared_by(self, corner: Array) -> Array:
        """The diagonal of B^T A B alone."""
        return self.multiplied_by(corner)[1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class SparseBorder:
    """The same of ``values`` (z,), which stand where ``pattern`` says. ``shape``: (k, h)."""

    values: Array
    pattern: BorderPattern
    shape: tuple[int, int] = field(metadata={"static": True})

    @property
    def entries(self) -> Array:
        return self.values

    def _places(self) -> Array:
        """Where a matrix (k, k), by rows, has the product of each pair, (t,): one index, which XLA on CPUs looks up in
        half of the time that two take."""
        _, row, first, second = self.pattern
        return row[first] * self.shape[0] + row[second]

    def _of(self, values: Array) -> SparseBorder:
        return SparseBorder(values, self.pattern, self.shape)

    def whole(self) -> Array:
        return jnp.zeros(self.shape, self.values.dtype).at[self.pattern.row, self.pattern.column].set(self.values)

    def scaled(self, scale: Array) -> SparseBorder:
        return self._of(self.values * scale[self.pattern.column])

    def times(self, vectors: Array) -> Array:
        products = self.values[:, None] * vectors[self.pattern.column]
        return jnp.zeros((self.shape[0], vectors.shape[1]), vectors.dtype).at[self.pattern.row].add(products)

    def transposed_times(self, vectors: Array) -> Array:
        products = self.values[:, None] * vectors[self.pattern.row]
        return jnp.zeros((self.shape[1], vectors.shape[1]), vectors.dtype).at[self.pattern.column].add(products)

    def taken_from(self, corner: Array) -> Array:
        _, _, first, second = self.pattern
        products = self.values[first] * self.values[second]
        return corner.reshape(-1).at[self._places()].add(-products).reshape(corner.shape)

    def multiplied_by(self, corner: Array) -> tuple[SparseBorder, Array]:
        column, _, first, second = self.pattern
        between, values = corner.reshape(-1)[self._places()], self.values
        total = jnp.zeros_like(values).at[first].add(between * values[second], indices_are_sorted=True)
        product = total.at[second].add(jnp.where(first == second, 0, between * values[first]))
        zero = jnp.zeros(self.shape[1], values.dtype)
        return self._of(product), zero.at[column].add(values * product)

    def squared_by(self, corner: Array) -> Array:
        """The diagonal of B^T A B alone: a third of the time of products."""
        column, _, first, second = self.pattern
        twice = jnp.where(first == second, 1, 2) * corner.reshape(-1)[self._places()]
        products = twice * self.values[first] * self.values[second]
        zero = jnp.zeros(self.shape[1], self.values.dtype)
        return zero.at[column[first]].add(products, indices_are_sorted=True)


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
