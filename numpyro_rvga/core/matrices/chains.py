"""Precisions of chains, as of latent states that follow one another in time: no factor depends on two entries that lie
far apart. A matrix is [[D, B^T], [B, A]] with D block tridiagonal, and work grows with the length of the chain."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .jacobians import SparseJacobian
from .linalg import cholesky, inverse_from_cholesky, solve_lower
from .packing import Packing
from .precisions import Arrow, Bordered

ChainParts = tuple[Array, Array, Array, Array]  # blocks (N, m, m), those below (N - 1, m, m), border (k, h), corner


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainPacking:
    """A vector holds the N diagonal blocks of D, the N - 1 blocks below these, B (k, h), and A (k, k).

    The last block is filled up with zeros where h is no multiple of m.

    :ivar num_chain: h. :ivar num_corner: k.
    :ivar block: m, no less than the distance of two entries that any factor depends on; less than h.
    """

    num_chain: int = field(metadata={"static": True})
    num_corner: int = field(metadata={"static": True})
    block: int = field(metadata={"static": True})

    @property
    def num_blocks(self) -> int:
        """N."""
        return -(-self.num_chain // self.block)

    @property
    def ends(self) -> tuple[int, int, int]:
        """Where the diagonal blocks, those below, and the border end."""
        blocks, square = self.num_blocks, self.block**2
        return blocks * square, (2 * blocks - 1) * square, (2 * blocks - 1) * square + self.num_corner * self.num_chain

    @property
    def size(self) -> int:
        """The vector's."""
        return self.ends[-1] + self.num_corner**2

    def pack(self, blocks: Array, below: Array, border: Array, corner: Array) -> Array:
        return jnp.concatenate([x.reshape(-1) for x in (blocks, below, border, corner)])

    def parts(self, x: Array) -> ChainParts:
        blocks, below, border, corner = jnp.split(x, self.ends)
        square = self.block, self.block
        return (
            blocks.reshape(-1, *square),
            below.reshape(-1, *square),
            border.reshape(self.num_corner, self.num_chain),
            corner.reshape(self.num_corner, self.num_corner),
        )

    def placed(self, jacobian: SparseJacobian, border: Array) -> ChainJacobian:
        """The Jacobian with the indices of its products in packed matrices. ``border``: not needed."""
        del border
        fields = {name: getattr(jacobian, name) for name in ("index", "values", "size", "num_diagonal", "num_leading")}
        return ChainJacobian(**fields, num_packed=self.size, packing=self)

    def in_blocks(self, rows: Array) -> Array:
        """Rows (h, n) of the chain, filled up with zeros: (N, m, n)."""
        missing = self.num_blocks * self.block - self.num_chain
        return jnp.pad(rows, ((0, missing), (0, 0))).reshape(self.num_blocks, self.block, rows.shape[1])

    def out_of_blocks(self, blocks: Array) -> Array:
        """The rows again."""
        return blocks.reshape(self.num_blocks * self.block, blocks.shape[-1])[: self.num_chain]

    def diagonal(self, x: Array) -> Array:
        """The diagonal of the whole matrix, (h + k,)."""
        blocks, _, _, corner = self.parts(x)
        of_chain = jnp.diagonal(blocks, axis1=1, axis2=2).reshape(-1)[: self.num_chain]
        return jnp.concatenate([of_chain, jnp.diagonal(corner)])

    def coordinates(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """As of :class:`~.packing.Packing`. What fills up the last block counts for its last entry, as zeros."""
        h, k, m, blocks = self.num_chain, self.num_corner, self.block, self.num_blocks
        block, row, column = (x.ravel() for x in np.indices((blocks, m, m)))
        below, row_below, column_below = (x.ravel() for x in np.indices((blocks - 1, m, m)))
        border = np.arange(k * h)
        corner = h + np.arange(k)
        of_chain = [np.minimum(x, h - 1) for x in (block * m + row, (below + 1) * m + row_below)]
        beside = [np.minimum(x, h - 1) for x in (block * m + column, below * m + column_below)]
        rows = np.concatenate([*of_chain, h + border // h, np.repeat(corner, k)])
        columns = np.concatenate([*beside, border % h, np.tile(corner, k)])
        return rows, columns, np.repeat([1, 2, 2, 1], [len(block), len(below), k * h, k * k])

    def inner(self, a: Array, b: Array) -> Array:
        """The sum over all entries of the product of two matrices."""
        product = a * b
        return jnp.sum(product) + jnp.sum(product[self.ends[0] : self.ends[2]])

    def whole(self, x: Array) -> Array:
        """The matrix (h + k, h + k), zero where packing leaves something out."""
        blocks, below, border, corner = self.parts(x)
        number, m, h = np.arange(self.num_blocks), self.block, self.num_chain
        chain = jnp.zeros((self.num_blocks, m, self.num_blocks, m), x.dtype)
        chain = chain.at[number, :, number].set(blocks).at[number[1:], :, number[:-1]].set(below)
        chain = chain.at[number[:-1], :, number[1:]].set(jnp.swapaxes(below, 1, 2))
        chain = chain.reshape(self.num_blocks * m, -1)[:h, :h]
        return jnp.block([[chain, border.T], [border, corner]])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ChainJacobian(SparseJacobian):
    """The ``num_leading`` first entries of each factor are in the chain, and the others in the corner."""

    packing: ChainPacking = field(kw_only=True)

    def _places(self) -> tuple[Array, Array]:
        """Where a packed matrix has each product of two entries, and whether it is to be added there: those below the
        diagonal blocks and those of the border are there once, (n, K, K)."""
        packing, chain = self.packing, self.index[:, : self.num_leading]
        others = self.index[:, self.num_leading :] - packing.num_chain
        m, (of_below, of_border, of_corner) = packing.block, packing.ends
        block, place = chain // m, chain % m
        row_block, column_block = block[:, :, None], block[:, None]
        row, column = place[:, :, None], place[:, None]
        is_within, is_below = row_block == column_block, row_block > column_block
        within = row_block * m**2 + row * m + column
        beside = of_below + jnp.minimum(row_block, column_block) * m**2
        beside = beside + jnp.where(is_below, row * m + column, column * m + row)
        top = jnp.where(is_within, within, beside)
        border = of_border + others[:, :, None] * packing.num_chain + chain[:, None]
        corner = of_corner + others[:, :, None] * packing.num_corner + others[:, None]
        places = _bordered(top, border, corner)
        counts = _bordered(is_within | is_below, jnp.ones_like(border, bool), jnp.ones_like(corner, bool))
        upper = np.zeros(places.shape[1:], bool)
        upper[: self.num_leading, self.num_leading :] = True
        return places, counts & ~upper

    def entries(self, x: Array) -> Array:
        return x[self._places()[0]]

    def gram(self, weights: Array) -> Array:
        products = jnp.einsum("nca,ncd,ndb->nab", self.values, weights, self.values)
        places, counts = self._places()
        return jnp.zeros(self.num_packed, products.dtype).at[places].add(jnp.where(counts, products, 0))


def _bordered(top: Array, border: Array, corner: Array) -> Array:
    """Matrices [[top, border^T], [border, corner]]."""
    above = jnp.concatenate([top, jnp.swapaxes(border, 1, 2)], axis=2)
    return jnp.concatenate([above, jnp.concatenate([border, corner], axis=2)], axis=1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chain(Bordered):
    """Bordered precisions with D block tridiagonal.

    The Cholesky factor is [[L, 0], [W, M]]: L has lower triangular blocks L_i and blocks F_i below them, so that
    L_i L_i^T = D_i - F_{i-1} F_{i-1}^T and F_i = E_i L_i^-T, where E_i are the blocks below those of D.
    W = B L^-T, and M M^T = A - W W^T. It is packed like the precision.
    """

    packing: ChainPacking

    def begin(self, mean: Array) -> Array:
        packing = self.packing
        diagonal, corner = jnp.split(self.start, [packing.num_chain])
        of_blocks = packing.in_blocks(diagonal[:, None])[..., 0]
        below = jnp.zeros((packing.num_blocks - 1, packing.block, packing.block), corner.dtype)
        border = jnp.zeros((packing.num_corner, packing.num_chain), corner.dtype)
        return packing.pack(jax.vmap(jnp.diag)(of_blocks), below, border, jnp.diag(corner))

    def factor(self, x: Array) -> Array:
        packing, m = self.packing, self.packing.block
        blocks, below, border, corner = packing.parts(x)
        filled = np.arange(packing.num_blocks * m).reshape(-1, m) >= packing.num_chain
        blocks = blocks + np.eye(m, dtype=x.dtype) * filled[:, None]

        def step(before, block):
            side, of_border = before
            d, e, b = block
            root = cholesky(d - side @ side.T)
            solved = solve_lower(root, jnp.concatenate([e.T, b - side @ of_border], axis=1))
            side, of_border = solved[:, :m].T, solved[:, m:]
            return (side, of_border), (root, side, of_border)

        nothing = jnp.zeros((m, m), x.dtype), jnp.zeros((m, packing.num_corner), x.dtype)
        blocks = blocks, jnp.concatenate([below, nothing[0][None]]), packing.in_blocks(border.T)
        _, (roots, sides, of_border) = lax.scan(step, nothing, blocks)
        border = packing.out_of_blocks(of_border).T
        return packing.pack(roots, sides[:-1], border, cholesky(corner - border @ border.T))

    def half_log_determinant(self, factor: Array) -> Array:
        roots, _, _, corner = self.packing.parts(factor)
        return jnp.sum(jnp.log(jnp.diagonal(roots, axis1=1, axis2=2))) + jnp.sum(jnp.log(jnp.diagonal(corner)))

    def covariance_root(self, factor: Array) -> Array:
        """The blocks of D's inverse follow from the last to the first (Takahashi, Fagan and Chin, 1973)."""
        packing = self.packing
        roots, sides, border, corner = packing.parts(factor)
        rest = inverse_from_cholesky(corner)
        regression = packing.in_blocks(_chain_solved(packing, roots, sides, border.T, transpose=True))  # D^-1 B^T
        own = jax.vmap(inverse_from_cholesky)(roots)
        links = jnp.swapaxes(lax.linalg.triangular_solve(roots[:-1], sides, lower=True), 1, 2)  # (F_i L_i^-1)^T

        def step(after, block):
            inverse, link = block
            beside = -after @ link.T
            return inverse - link @ beside, (after, beside)

        first, (others, below) = lax.scan(step, own[-1], (own[:-1], links), reverse=True)
        blocks = jnp.concatenate([first[None], others])
        explained = regression @ rest
        return packing.pack(
            blocks + explained @ jnp.swapaxes(regression, 1, 2),
            below + explained[1:] @ jnp.swapaxes(regression[:-1], 1, 2),
            -packing.out_of_blocks(explained).T,
            rest,
        )

    def times(self, parts: ChainParts, vectors: Array) -> Array:
        blocks, below, border, corner = parts
        h = self.packing.num_chain
        chain, rest = self.packing.in_blocks(vectors[:h]), vectors[h:]
        product = blocks @ chain
        product = product.at[1:].add(below @ chain[:-1])
        product = product.at[:-1].add(jnp.swapaxes(below, 1, 2) @ chain[1:])
        above = self.packing.out_of_blocks(product) + border.T @ rest
        return jnp.concatenate([above, border @ vectors[:h] + corner @ rest])

    def by_lower(self, parts: ChainParts, vectors: Array) -> Array:
        roots, sides, border, corner = parts
        h = self.packing.num_chain
        chain = _chain_solved(self.packing, roots, sides, vectors[:h], transpose=False)
        return jnp.concatenate([chain, solve_lower(corner, vectors[h:] - border @ chain)])

    def by_transposed(self, parts: ChainParts, vectors: Array) -> Array:
        roots, sides, border, corner = parts
        h = self.packing.num_chain
        rest = solve_lower(corner, vectors[h:], transpose=True)
        chain = _chain_solved(self.packing, roots, sides, vectors[:h] - border.T @ rest, transpose=True)
        return jnp.concatenate([chain, rest])

    def transposed_times(self, parts: ChainParts, vectors: Array) -> Array:
        roots, sides, border, corner = parts
        chain, rest = self.packing.in_blocks(vectors[: self.packing.num_chain]), vectors[self.packing.num_chain :]
        product = jnp.swapaxes(roots, 1, 2) @ chain
        product = product.at[:-1].add(jnp.swapaxes(sides, 1, 2) @ chain[1:])
        return jnp.concatenate([self.packing.out_of_blocks(product) + border.T @ rest, corner.T @ rest])


def packed_form(start: Array, packing: Packing | ChainPacking) -> Bordered:
    """The form of packed precisions. ``start``: the diagonal to start from."""
    return Chain(start, packing) if isinstance(packing, ChainPacking) else Arrow(start, packing)


def _chain_solved(packing: ChainPacking, roots: Array, sides: Array, vectors: Array, *, transpose: bool) -> Array:
    """L^-1, or L^-T, times vectors (h, n)."""

    def step(beside, block):
        root, side, wanted = block
        solved = solve_lower(root, wanted - (side.T if transpose else side) @ beside, transpose=transpose)
        return solved, solved

    wanted, nothing = packing.in_blocks(vectors), jnp.zeros_like(roots[:1])
    sides = jnp.concatenate([sides, nothing] if transpose else [nothing, sides])
    blocks = lax.scan(step, jnp.zeros_like(wanted[0]), (roots, sides, wanted), reverse=transpose)[1]
    return packing.out_of_blocks(blocks)
