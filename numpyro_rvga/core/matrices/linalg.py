"""Linear algebra. Factorizations of tiny matrices are unrolled, since a LAPACK call costs more than the work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..pytrees import PyTree

UNROLL = 3  # the largest n for which n x n matrices are unrolled
SMALL = 200  # the largest size at which a matrix is inverted by two triangular solves with the identity
MAX_HALVINGS = 2  # of a larger one: more would save little time, and each compiles twice as many operations
MOST_UNROLLED = 7  # the largest n of matrices that XLA multiplies slowly on CPUs: 4 x 4 five times as long as 8 x 8
SINGLE_KERNEL_SIZE = 2**16  # the largest array in a function that is compiled as a single kernel
MOST_ADDED = 64  # the largest number of rows that are added one by one
PIECE = 1024  # columns that are multiplied at once
MOST_FACTORED = 16  # the largest size of a matrix whose root is its semidefinite factor
EQUILIBRATIONS = 5  # ratios of units of 10^16 leave less than 4
SIGN_ITERATIONS = 40  # resolve eigenvalues down to 1e-6 of the norm


def cholesky(matrix: Array) -> Array:
    """Lower Cholesky factor, NaN where ``matrix`` is not positive definite. Shape ``(n, n)``."""
    n = matrix.shape[-1]
    if n > UNROLL or n == 0:
        return jnp.linalg.cholesky(matrix, symmetrize_input=False)
    rows: list[list[Array]] = []
    for i in range(n):
        row: list[Array] = []
        for j in range(i + 1):
            if i == j:
                row.append(jnp.sqrt(matrix[..., i, i] - sum(x * x for x in row)))
            else:
                row.append((matrix[..., i, j] - sum(row[k] * rows[j][k] for k in range(j))) / rows[j][j])
        rows.append(row)
    zero = jnp.zeros_like(matrix[..., 0, 0])
    return jnp.stack([jnp.stack(row + [zero] * (n - len(row)), -1) for row in rows], -2)


def solve_lower(factor: Array, rhs: Array, *, transpose: bool = False) -> Array:
    """``factor^-1 rhs`` or, transposed, ``factor^-T rhs``. factor: lower triangular, (n, n); rhs: (n,) or (n, k)."""
    n = factor.shape[-1]
    if n > UNROLL or n == 0:
        matrix = rhs[:, None] if rhs.ndim == 1 else rhs
        out = lax.linalg.triangular_solve(factor, matrix, left_side=True, lower=True, transpose_a=transpose)
        return out[:, 0] if rhs.ndim == 1 else out
    order = range(n - 1, -1, -1) if transpose else range(n)
    solved: dict[int, Array] = {}
    for i in order:
        used = sum((factor[j, i] if transpose else factor[i, j]) * x for j, x in solved.items())
        solved[i] = (rhs[i] - used) / factor[i, i]
    return jnp.stack([solved[i] for i in range(n)])


def inverse_from_cholesky(factor: Array, max_halvings: int = MAX_HALVINGS) -> Array:
    """``(factor factor^T)^-1``. factor: lower triangular, (n, n). By halves, which takes two thirds of the time that
    solves with the whole identity do: half of its entries are zeros."""
    n = factor.shape[-1]
    if n <= SMALL or not max_halvings:
        inverse = solve_lower(factor, jnp.eye(n, dtype=factor.dtype))
        return solve_lower(factor, inverse, transpose=True)
    top, border, corner = factor[: n // 2, : n // 2], factor[n // 2 :, : n // 2], factor[n // 2 :, n // 2 :]
    between = lax.linalg.triangular_solve(top, border, left_side=False, lower=True)
    between = solve_lower(corner, between)
    side = -solve_lower(corner, between, transpose=True)
    first, second = (inverse_from_cholesky(part, max_halvings - 1) for part in (top, corner))
    above = jnp.concatenate([first + between.T @ between, side.T], axis=1)
    return jnp.concatenate([above, jnp.concatenate([side, second], axis=1)])


def cholesky_by_columns(matrix: Array) -> Array:
    """``lax.linalg.cholesky`` as elementwise arithmetic, for small matrices (..., n, n)."""
    n = matrix.shape[-1]
    indices = jnp.arange(n)

    def eliminate(j: Any, factor: Array) -> Array:
        before = jnp.sum(factor * lax.dynamic_index_in_dim(factor, j, -2), axis=-1)
        rest = lax.dynamic_index_in_dim(matrix, j, -1, keepdims=False) - before
        column = rest / jnp.sqrt(lax.dynamic_index_in_dim(rest, j, -1))
        column = jnp.where(indices < j, 0.0, column)
        return lax.dynamic_update_index_in_dim(factor, column, j, -1)

    return _all_steps(n, eliminate, jnp.zeros_like(matrix))


def solve_triangular(
    a: Array, b: Array, *, left_side: bool, lower: bool, transpose_a: bool, conjugate_a: bool, unit_diagonal: bool
) -> Array:
    """``lax.linalg.triangular_solve`` as elementwise arithmetic, for small real ``a``."""
    del conjugate_a
    if not left_side:  # X op(a) = b: solve op(a)^T X^T = b^T
        solved = solve_triangular(
            a,
            jnp.swapaxes(b, -1, -2),
            left_side=True,
            lower=lower,
            transpose_a=not transpose_a,
            conjugate_a=False,
            unit_diagonal=unit_diagonal,
        )
        return jnp.swapaxes(solved, -1, -2)
    if transpose_a:
        a, lower = jnp.swapaxes(a, -1, -2), not lower
    n = a.shape[-1]
    indices = jnp.arange(n)

    def substitute(step: Any, solved: Array) -> Array:
        i = step if lower else n - 1 - step
        row = lax.dynamic_index_in_dim(a, i, -2, keepdims=False)
        used = jnp.where((indices < i) if lower else (indices > i), row, 0.0)[..., None] * solved
        rest = lax.dynamic_index_in_dim(b, i, -2, keepdims=False) - jnp.sum(used, axis=-2)
        if not unit_diagonal:
            rest = rest / lax.dynamic_index_in_dim(row, i, -1)
        return lax.dynamic_update_index_in_dim(solved, rest, i, -2)

    return _all_steps(n, substitute, jnp.zeros_like(b))


def _all_steps(n: int, step: Callable[[Any, Array], Array], start: Array) -> Array:
    """Steps 0 to n - 1 of a factorization: one by one where they are few, and else a loop, which compiles many times
    faster (with derivatives and n = 12, 16 times) and is as fast."""
    if n > UNROLL:
        return lax.fori_loop(0, n, step, start)
    for i in range(n):
        start = step(i, start)
    return start


def semidefinite_factor(matrix: Array) -> tuple[Array, Array]:
    """Lower L with L L^T = ``matrix`` (n, n), which may be singular, and M with M L = I on its range.

    A pivot that vanishes beside its diagonal entry gives a zero column; so units do not matter, and a variance of 0.01
    stays beside one of 10^9. A loop compiles many times faster than its steps one by one, and is as fast.
    """
    n, dtype = matrix.shape[-1], matrix.dtype
    if n == 1:
        alive = matrix > 0
        root = jnp.sqrt(jnp.where(alive, matrix, 1.0))
        return jnp.where(alive, root, 0.0), jnp.where(alive, 1 / root, 0.0)
    floor = jnp.finfo(dtype).eps * n * jnp.diagonal(matrix)
    indices = jnp.arange(n)

    def eliminate(j: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rest, factor, inverse = carry
        here, alive = indices == j, rest[j, j] > floor[j]
        scale = jnp.where(alive, 1 / jnp.sqrt(jnp.where(alive, rest[j, j], 1.0)), 0.0)
        column = jnp.where(indices < j, 0.0, scale * rest[:, j])
        row = scale * (here.astype(dtype) - jnp.sum(factor[j][:, None] * inverse, axis=0))
        factor = jnp.where(here, column[:, None], factor)
        return rest - jnp.outer(column, column), factor, jnp.where(here[:, None], row, inverse)

    nothing = jnp.zeros_like(matrix)
    return lax.fori_loop(0, n, eliminate, (matrix, nothing, nothing), unroll=n <= UNROLL)[1:]


def semidefinite_root(matrices: Array) -> Array:
    """Roots L with L L^T = M of positive semi-definite matrices, which may be singular. Shape ``(n, C, C)``."""
    if matrices.shape[-1] <= MOST_FACTORED:
        return jax.vmap(lambda matrix: semidefinite_factor(matrix)[0])(matrices)

    def one(matrix):  # one after the other: batches of LAPACK calls can deadlock (see primitives.UNROLLED_SIZE)
        # Of correlations: eigenvalues are as exact as the largest, and small variances would be lost.
        deviations = jnp.sqrt(jnp.diagonal(matrix))
        unit = jnp.where(deviations > 0, deviations, 1.0)
        values, vectors = jnp.linalg.eigh(matrix / jnp.outer(unit, unit))
        return unit[:, None] * vectors * jnp.sqrt(jnp.maximum(values, 0.0))

    return lax.map(one, matrices)


def product(a: Array, b: Array) -> Array:
    """a @ b of many small matrices (..., n, k) and (..., k, m), as a sum of outer products where XLA is slow."""
    if not 0 < a.shape[-1] <= MOST_UNROLLED:
        return a @ b
    return sum(a[..., :, k, None] * b[..., None, k, :] for k in range(1, a.shape[-1])) + a[..., :, :1] * b[..., :1, :]


def few_times(rows: Array, matrix: Array) -> Array:
    """rows @ matrix, for rows (K, n): one by one if they are few. Unlike a product of matrices, one with a vector has a
    place in a single kernel, and is as fast."""
    if not 1 < len(rows) <= UNROLL or matrix.size > SINGLE_KERNEL_SIZE:
        return rows @ matrix
    return jnp.stack([row @ matrix for row in rows])


def positive_part(matrix: Array) -> Array:
    """The nearest positive semi-definite matrix to a symmetric one. Shape ``(..., n, n)``."""
    n = matrix.shape[-1]
    if n == 1:
        return jnp.maximum(matrix, 0.0)
    if n == 2:
        a, b, d = matrix[..., 0, 0], matrix[..., 0, 1], matrix[..., 1, 1]
        half_trace, half_gap = 0.5 * (a + d), 0.5 * (a - d)
        radius = jnp.sqrt(half_gap**2 + b**2)
        high, low = half_trace + radius, half_trace - radius
        ratio = jnp.where(radius > 0, jnp.maximum(high, 0.0) / jnp.where(radius > 0, 2 * radius, 1.0), 0.0)
        identity = jnp.eye(2, dtype=matrix.dtype)
        one_sided = ratio[..., None, None] * (matrix - low[..., None, None] * identity)
        return jnp.where((low >= 0)[..., None, None], matrix, one_sided)
    # |A| = A sign(A), with sign(A) by Newton and Schulz's iteration: batches of LAPACK calls can deadlock.
    size = jnp.max(jnp.sum(jnp.abs(matrix), axis=-1), axis=-1)[..., None, None]  # at least the spectral norm
    scaled = matrix / jnp.where(size > 0, size, 1.0)
    sign = lax.fori_loop(0, SIGN_ITERATIONS, lambda _, x: 1.5 * x - 0.5 * product(product(x, x), x), scaled)
    return 0.5 * (matrix + product(matrix, sign))


def positive_part_in_units(matrix: Array) -> Array:
    """:func:`positive_part` in units in which the matrix's rows are of about one size.

    Eigenvalues are as exact as the largest: in the units of the data, what is small would be lost beside what is large.
    """
    units = _units(matrix)
    return positive_part(matrix / units) * units


def _units(matrix: Array) -> Array:
    """d d^T, (..., n, n), by which to divide a symmetric matrix, so that the largest entry of each row is about one
    (Ruiz, 2001)."""
    d = jnp.ones(matrix.shape[:-1], matrix.dtype)
    for _ in range(EQUILIBRATIONS):
        largest = jnp.max(jnp.abs(matrix) / (d[..., :, None] * d[..., None, :]), axis=-1)
        d = d * jnp.sqrt(jnp.where(largest > 0, largest, 1.0))
    return d[..., :, None] * d[..., None, :]


def lower_from_root(root: Array) -> Array:
    """Lower triangular L (n, n) with positive diagonal and L L^T = root root^T, without squaring. root: (n, k >= n)."""
    upper = jnp.linalg.qr(root.T, mode="r")
    signs = jnp.where(jnp.diagonal(upper) < 0, -1.0, 1.0).astype(root.dtype)
    return (upper * signs[:, None]).T


def inverse(matrix: Array) -> Array:
    """The inverse of a positive definite matrix (n, n)."""
    inverse_root = solve_lower(cholesky(matrix), jnp.eye(len(matrix), dtype=matrix.dtype))
    return inverse_root.T @ inverse_root


def column_sums(rows: Array) -> Array:
    """Sums over the first axis of (K, P), for small K and large P: twenty times as fast as XLA's reduction on CPUs."""
    return sum(rows[i] for i in range(1, len(rows))) + rows[0] if 0 < len(rows) <= MOST_ADDED else jnp.sum(rows, axis=0)


@jax.custom_vjp
def scaled_columns(rows: Array, scale: Array) -> Array:
    """(K, P) times (P,). Its gradient in the scale uses :func:`column_sums`."""
    return rows * scale


scaled_columns.defvjp(
    lambda rows, scale: (rows * scale, (rows, scale)),
    lambda saved, cotangent: (cotangent * saved[1], column_sums(cotangent * saved[0])),
)


def sums_over_columns(function: Callable[..., Any], *arrays: Array) -> PyTree:
    """``function(*arrays)`` for a function that is a sum over the last axis, such as products of long rows.

    On CPUs the sum is taken over pieces of the axis, which stay in the cache.

    :param arrays: (..., P).
    """
    size = arrays[0].shape[-1]
    pieces = size // PIECE
    if pieces < 2 or jax.default_backend() != "cpu":
        return function(*arrays)

    def of_piece(i, width):
        return function(*[lax.dynamic_slice_in_dim(array, i * PIECE, width, -1) for array in arrays])

    def body(i, total):
        return jax.tree.map(jnp.add, total, of_piece(i, PIECE))

    total = lax.fori_loop(1, pieces, body, of_piece(0, PIECE))
    rest = size - pieces * PIECE
    return jax.tree.map(jnp.add, total, of_piece(pieces, rest)) if rest else total


def row_space(rows: Array) -> tuple[Array, Array]:
    """Rows (K, P), K < P, as ``reduced`` (K, K) times an orthonormal ``basis`` (K, P)."""
    if rows.shape[0] == 1:
        length = jnp.sqrt(rows @ rows.T)
        return length, rows / jnp.where(length > 0, length, 1.0)
    # Equal rows would leave columns that shrink from step to step until they underflow, and LAPACK fails on these.
    # A multiple of the identity below keeps every column alive; what is added is at the level of rounding errors.
    count, size = rows.shape
    floor = jnp.finfo(rows.dtype).eps ** 0.5 * jnp.max(jnp.abs(rows))
    columns = jnp.concatenate([rows.T, floor * jnp.eye(count, dtype=rows.dtype)])
    if count > UNROLL:
        orthogonal, upper = jnp.linalg.qr(columns)
        return upper.T, orthogonal[:size].T
    basis: list[Array] = []
    for column in columns.T:
        for _ in range(2):  # the second time removes what rounding errors of the first have left
            column = column - sum((unit @ column) * unit for unit in basis)
        length = jnp.sqrt(column @ column)
        basis.append(column / jnp.where(length > 0, length, 1.0))
    orthogonal = jnp.stack(basis)
    reduced = jnp.stack([jnp.stack([column @ unit for unit in basis]) for column in columns.T])
    return jnp.tril(reduced), orthogonal[:, :size]
