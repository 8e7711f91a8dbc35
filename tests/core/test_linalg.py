"""Small linear algebra against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_rvga.core.jaxprs.primitives import equations
from numpyro_rvga.core.matrices import linalg


def symmetric(size, seed=0):
    a = np.random.default_rng(seed).normal(size=(size, size))
    return a + a.T


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_cholesky_and_triangular_solves_equal_numpys(size):
    a = symmetric(size)
    matrix = a @ a + np.eye(size)
    factor = linalg.cholesky(jnp.asarray(matrix))
    np.testing.assert_allclose(factor, np.linalg.cholesky(matrix), atol=1e-12)
    for rhs in (np.arange(1.0, size + 1), np.random.default_rng(1).normal(size=(size, 3))):
        np.testing.assert_allclose(
            linalg.solve_lower(factor, jnp.asarray(rhs)), np.linalg.solve(factor, rhs), atol=1e-12
        )
        found = linalg.solve_lower(factor, jnp.asarray(rhs), transpose=True)
        np.testing.assert_allclose(found, np.linalg.solve(np.asarray(factor).T, rhs), atol=1e-12)


@pytest.mark.parametrize("size", [1, 3, 4, 9])
def test_elementwise_cholesky_and_its_derivatives_equal_lapacks(size):
    a = symmetric(size)
    matrix, weights = jnp.asarray(a @ a + np.eye(size)), jnp.asarray(np.tril(symmetric(size, 1)))

    def total(cholesky, m):
        return jnp.sum(weights * jnp.sin(jnp.tril(cholesky(m))))

    ours, lapacks = (
        jax.vmap(jax.value_and_grad(lambda m, f=f: total(f, 0.5 * (m + m.T))))(jnp.stack([matrix, 2 * matrix]))
        for f in (linalg.cholesky_by_columns, lax.linalg.cholesky)
    )
    np.testing.assert_allclose(ours[0], lapacks[0], rtol=1e-10)
    np.testing.assert_allclose(ours[1], lapacks[1], atol=1e-10)


@pytest.mark.parametrize("size", [1, 3, 4, 9])
@pytest.mark.parametrize("transpose_a", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("left_side", [False, True])
@pytest.mark.parametrize("unit_diagonal", [False, True])
def test_elementwise_triangular_solves_and_their_derivatives_equal_lapacks(
    size, transpose_a, lower, left_side, unit_diagonal
):
    """The other triangle is not read: LU factors have something else there."""
    a = symmetric(size) / size + 2 * np.eye(size)
    b = np.random.default_rng(1).normal(size=(size, 2) if left_side else (2, size))
    other = np.triu(np.ones((size, size)), 1) if lower else np.tril(np.ones((size, size)), -1)
    options = {"lower": lower, "left_side": left_side, "transpose_a": transpose_a, "unit_diagonal": unit_diagonal}
    options |= {"conjugate_a": False}

    def total(solve, a, b):
        return jnp.sum(jnp.sin(solve(a, b, **options)))

    arguments = jnp.asarray(np.where(other, np.inf, a)), jnp.asarray(b)
    ours, lapacks = (
        jax.value_and_grad(lambda a, b, f=f: total(f, a, b), (0, 1))(*arguments)
        for f in (linalg.solve_triangular, lax.linalg.triangular_solve)
    )
    np.testing.assert_allclose(ours[0], lapacks[0], rtol=1e-10)
    for mine, its in zip(ours[1], lapacks[1]):
        np.testing.assert_allclose(mine, its, atol=1e-10)


def test_elementwise_factorizations_compile_no_more_for_larger_matrices():
    """XLA takes a minute for the steps of a 12 x 12 matrix with derivatives, one by one."""

    def log_density(matrix):
        factor = linalg.cholesky_by_columns(matrix)
        options = {"lower": True, "left_side": True, "transpose_a": False, "unit_diagonal": False}
        left = linalg.solve_triangular(factor, jnp.ones((len(matrix), 1)), **options, conjugate_a=False)
        return -jnp.sum(jnp.log(jnp.diagonal(factor))) - 0.5 * jnp.sum(left**2)

    few, many = (len([*equations(jax.make_jaxpr(jax.grad(log_density))(jnp.eye(n)).jaxpr)]) for n in (6, 16))
    assert many == few


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_cholesky_of_an_indefinite_matrix_is_not_a_number(size):
    assert not np.isfinite(np.asarray(linalg.cholesky(-jnp.eye(size)))).all()


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_semidefinite_factor_squares_to_the_matrix_and_inverts_on_its_range(size, rank):
    root = np.random.default_rng(rank).normal(size=(size, min(rank, size)))
    matrix = root @ root.T
    factor, inverse = linalg.semidefinite_factor(jnp.asarray(matrix))
    np.testing.assert_allclose(factor @ factor.T, matrix, atol=1e-10)
    np.testing.assert_allclose(factor @ inverse @ factor, factor, atol=1e-8)


@pytest.mark.parametrize("size", [2, 5, linalg.MOST_FACTORED + 3])
def test_roots_do_not_lose_small_variances_beside_large_ones(size):
    units = 10.0 ** np.linspace(-4, 5, size)
    a = symmetric(size)
    matrix = (a @ a + size * np.eye(size)) * np.outer(units, units)
    root = np.asarray(linalg.semidefinite_root(jnp.asarray(matrix[None], np.float32))[0], float)
    found, expected = root @ root.T / np.outer(units, units), matrix / np.outer(units, units)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def positive_part(matrix, units):
    """Of a matrix in these units, by eigenvalues."""
    values, vectors = np.linalg.eigh(matrix / np.outer(units, units))
    return (vectors * np.maximum(values, 0)) @ vectors.T * np.outer(units, units)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-10), (np.float32, 1e-5)])
def test_positive_part_keeps_the_nonnegative_eigenvalues(dtype, tolerance, size, scale):
    matrices = np.stack([symmetric(size, seed) for seed in range(4)])
    expected = np.stack([positive_part(matrix, np.ones(size)) for matrix in matrices])
    found = linalg.positive_part(jnp.asarray(scale * matrices, dtype))
    np.testing.assert_allclose(np.asarray(found, float) / scale, expected, atol=tolerance * size)


@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
@pytest.mark.parametrize("ratio", [1.0, 1e4])
@pytest.mark.parametrize("size", [1, 2, 3, 6, 9])
@pytest.mark.parametrize("dtype, tolerance", [(np.float64, 1e-6), (np.float32, 1e-5)])
def test_positive_part_in_units_keeps_the_nonnegative_eigenvalues_of_rows_of_one_size(
    dtype, tolerance, size, ratio, scale
):
    units = np.geomspace(1 / ratio, ratio, size) if size > 1 else np.ones(1)
    for seed in range(4):
        signs = np.where(np.arange(size) % 2, -1.0, 1.0) * 3
        matrix = (symmetric(size, seed) / size + np.diag(signs)) * np.outer(units, units)
        found = np.asarray(linalg.positive_part_in_units(jnp.asarray(scale * matrix, dtype)), float) / scale
        d = np.sqrt(np.diag(np.asarray(linalg._units(jnp.asarray(matrix)))))
        expected = positive_part(matrix, d)
        np.testing.assert_allclose(found / np.outer(d, d), expected / np.outer(d, d), atol=tolerance * size)
        assert np.abs(matrix / np.outer(d, d)).max(axis=1).min() > 0.4


@pytest.mark.parametrize("size", [0, 1, 2, linalg.MOST_UNROLLED, linalg.MOST_UNROLLED + 1])
def test_products_of_many_small_matrices_are_those_of_numpy(size):
    a, b = np.random.default_rng(0).normal(size=(2, 5, size, size))
    np.testing.assert_allclose(linalg.product(jnp.asarray(a), jnp.asarray(b)), a @ b, atol=1e-12)


def test_positive_part_of_a_multiple_of_the_identity_is_itself_or_zero():
    for scale in (2.0, -2.0):
        found = linalg.positive_part(scale * jnp.eye(2)[None])[0]
        np.testing.assert_allclose(found, max(scale, 0.0) * np.eye(2), atol=1e-12)


def test_lower_from_root_is_the_cholesky_factor():
    root = np.random.default_rng(0).normal(size=(6, 6))
    np.testing.assert_allclose(linalg.lower_from_root(jnp.asarray(root)), np.linalg.cholesky(root @ root.T), atol=1e-10)


@pytest.mark.parametrize("size", [1, 7, linalg.PIECE, 2 * linalg.PIECE, 3 * linalg.PIECE + 5])
def test_sums_over_columns_are_those_of_all_at_once(size):
    rng = np.random.default_rng(0)
    rows, scale = rng.normal(size=(3, size)), rng.uniform(1, 2, size=size)
    products = lambda rows, scale: {"gram": rows @ rows.T, "vector": rows @ scale}  # noqa: E731
    found = linalg.sums_over_columns(products, jnp.asarray(rows), jnp.asarray(scale))
    np.testing.assert_allclose(found["gram"], rows @ rows.T, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(found["vector"], rows @ scale, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("size", [3, linalg.SMALL + 1, 3 * linalg.SMALL + 5])
def test_inverses_by_halves_are_numpys(size):
    a = symmetric(size)
    matrix = a @ a + size * np.eye(size)
    inverse = linalg.inverse_from_cholesky(jnp.asarray(np.linalg.cholesky(matrix)))
    np.testing.assert_allclose(inverse, np.linalg.inv(matrix), atol=1e-12)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("apart", [1.0, 1e-7, 0.0], ids=["general", "nearly equal", "equal"])
def test_rows_are_a_triangular_matrix_times_an_orthonormal_basis(count, apart):
    rng = np.random.default_rng(0)
    rows = 1e3 * (rng.normal(size=9) + apart * rng.normal(size=(count, 9)))
    reduced, basis = linalg.row_space(jnp.asarray(rows))
    np.testing.assert_allclose(reduced @ basis, rows, atol=1e-4 * np.abs(rows).max() * 1e-3)
    np.testing.assert_allclose(reduced, np.tril(reduced))
    if apart == 1:
        np.testing.assert_allclose(basis @ basis.T, np.eye(count), atol=1e-12)
    assert np.linalg.eigvalsh(basis @ basis.T).max() < 1 + 1e-12  # no direction counts twice


def test_rows_of_zeros_span_nothing():
    reduced, _ = linalg.row_space(jnp.zeros((2, 5)))
    np.testing.assert_allclose(reduced, 0)


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_few_rows_times_a_matrix_are_their_product(count):
    rows, matrix = np.random.default_rng(0).normal(size=(count, 6)), symmetric(6)
    np.testing.assert_allclose(linalg.few_times(jnp.asarray(rows), jnp.asarray(matrix)), rows @ matrix, rtol=1e-12)
