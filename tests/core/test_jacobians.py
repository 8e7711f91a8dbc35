"""Sparse Jacobians and packed precisions against whole matrices."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.matrices import precisions
from numpyro_rvga.core.matrices.jacobians import SparseJacobian, covariance, gram, times_root, times_vector, vjp
from numpyro_rvga.core.matrices.packing import Packing, border_pattern
from numpyro_rvga.core.matrices.precisions import Arrow

N, C, HEADS, SIZE = 30, 2, 5, 9
DENSE = Packing(HEADS, SIZE - HEADS)


def jacobian_of(rng, num_leading, packing_of=lambda index: DENSE):
    """Each row depends on one of the first 5 entries, if any, on one of 5 and 6, and on one of 7 and 8."""
    index = np.stack([rng.integers(0, HEADS, N), rng.integers(5, 7, N), rng.integers(7, 9, N)], axis=1)
    packing = packing_of(index)
    border = packing.border_places(index) if num_leading else np.zeros((N, 0), np.int32)
    index = index if num_leading else index[:, 1:]
    values = jnp.asarray(rng.normal(size=(N, C, index.shape[1])))
    jacobian = SparseJacobian(jnp.asarray(index), values, SIZE, HEADS, num_leading)
    return packing.placed(jacobian, jnp.asarray(border))


def sparse_packing(index, num_diagonal=HEADS, num_corner=SIZE - HEADS):
    """Of the entries that rows with these indices have."""
    columns, rows = np.repeat(index[:, 0], index.shape[1] - 1), index[:, 1:].reshape(-1) - num_diagonal
    pattern = border_pattern(columns, rows, num_diagonal, num_corner)
    return Packing(num_diagonal, num_corner, pattern)


def whole(jacobian):
    dense = np.zeros((N, C, SIZE))
    for i, (places, values) in enumerate(zip(np.asarray(jacobian.index), np.asarray(jacobian.values))):
        dense[i][:, places] = values
    return jnp.asarray(dense)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("num_leading", [True, False])
def test_sparse_jacobians_do_as_whole_ones(rng, num_leading):
    jacobian = jacobian_of(rng, num_leading)
    dense = whole(jacobian)
    vector, slopes, root = rng.normal(size=SIZE), rng.normal(size=(N, C)), rng.normal(size=(SIZE, SIZE))
    weights = rng.normal(size=(N, C, C))
    weights = jnp.asarray(weights + np.swapaxes(weights, 1, 2))
    np.testing.assert_allclose(times_vector(jacobian, jnp.asarray(vector)), dense @ vector, rtol=1e-12)
    np.testing.assert_allclose(times_root(jacobian, jnp.asarray(root)), dense @ root, rtol=1e-12)
    np.testing.assert_allclose(vjp(jacobian, jnp.asarray(slopes)), np.einsum("ncp,nc->p", dense, slopes), rtol=1e-12)
    expected = np.einsum("ncp,ncd,ndq->pq", dense, weights, dense)
    np.testing.assert_allclose(DENSE.whole(gram(jacobian, weights)), expected, atol=1e-12)
    assert np.all(expected[:HEADS, :HEADS][~np.eye(HEADS, dtype=bool)] == 0)


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("num_leading", [True, False])
def test_covariances_of_predictors_need_only_what_is_packed(rng, num_leading, is_sparse, all_sparse):
    packing_of = sparse_packing if is_sparse else lambda index: DENSE
    jacobian = jacobian_of(rng, num_leading, packing_of)
    root = jnp.asarray(rng.normal(size=(12, SIZE)))
    sigma = np.asarray(root.T @ root)
    packing = packing_of(np.asarray(jacobian.index)) if num_leading else DENSE
    below = sigma[HEADS:, :HEADS]
    border = below.reshape(-1) if packing.pattern is None else below[packing.pattern.row, packing.pattern.column]
    array = packing.pack(
        jnp.diag(sigma)[:HEADS], packing.border(jnp.asarray(border)), jnp.asarray(sigma[HEADS:, HEADS:])
    )
    expected = np.einsum("ncp,pq,ndq->ncd", whole(jacobian), sigma, whole(jacobian))
    if not num_leading:
        jacobian = packing.placed(jacobian, jacobian.border)
    np.testing.assert_allclose(covariance(jacobian, array), expected, rtol=1e-10)


def test_terms_that_each_look_at_one_entry_have_a_diagonal_gram(rng):
    index, scale = rng.integers(0, SIZE, N), rng.normal(size=N)
    jacobian = SparseJacobian(jnp.asarray(index)[:, None], jnp.asarray(scale)[:, None, None], SIZE, SIZE, True)
    gathered = gram(jacobian, jnp.ones((N, 1, 1)))
    np.testing.assert_allclose(gathered, np.bincount(index, scale**2, SIZE), rtol=1e-12)
    root = rng.normal(size=(12, SIZE))
    variances = scale**2 * np.sum(root**2, axis=0)[index]
    np.testing.assert_allclose(covariance(jacobian, jnp.asarray(root))[:, 0, 0], variances, rtol=1e-12)


@pytest.fixture
def all_sparse(monkeypatch):
    """Borders are sparse, however many entries they have."""
    monkeypatch.setattr("numpyro_rvga.core.matrices.packing.DENSE_SPEEDUP", 0)


@pytest.fixture(params=[False, True], ids=["dense", "sparse"])
def arrow(request, rng, all_sparse):
    """A form, two differences of its precisions, and a precision."""
    packing_of = sparse_packing if request.param else lambda index: DENSE
    jacobian = jacobian_of(rng, True, packing_of)
    form = Arrow(jnp.full(SIZE, 2.0), packing_of(np.asarray(jacobian.index)))
    jacobians = [replace(jacobian, values=jnp.asarray(rng.normal(size=jacobian.values.shape))) for _ in range(3)]
    grams = [gram(each, jnp.broadcast_to(w * jnp.eye(C), (N, C, C))) for each, w in zip(jacobians, (1.0, -0.4, 0.7))]
    return form, grams[1], grams[2], grams[0] + form.begin(jnp.zeros(SIZE))


def test_arrows_do_as_whole_precisions(arrow):
    form, _, _, x = arrow
    precision, vector = np.asarray(form.packing.whole(x)), np.arange(SIZE, dtype=float)
    factor, sigma = form.factor(x), np.linalg.inv(precision)
    np.testing.assert_allclose(form.solver(factor)(vector), np.linalg.solve(precision, vector), rtol=1e-10)
    np.testing.assert_allclose(form.half_log_determinant(factor), 0.5 * np.linalg.slogdet(precision)[1], rtol=1e-12)
    root = np.asarray(form.dense_root(factor))
    np.testing.assert_allclose(root.T @ root, sigma, atol=1e-12)
    packed = form.covariance_root(factor)
    needed = np.asarray(form.packing.whole(jnp.ones(form.packing.size))) != 0
    np.testing.assert_allclose(np.asarray(form.packing.whole(packed))[needed], sigma[needed], atol=1e-12)
    np.testing.assert_allclose(form.packing.diagonal(packed), np.diag(sigma), rtol=1e-10)


def test_products_of_arrows_are_estimated(arrow, monkeypatch):
    form, a, b, x = arrow
    monkeypatch.setattr(precisions, "LEAST_PROBES", 100_000)
    monkeypatch.setattr(precisions, "MOST_PROBES", 100_000)
    factor = form.factor(x)
    whole = form.packing.whole
    sigma, first, second = np.linalg.inv(np.asarray(whole(x))), np.asarray(whole(a)), np.asarray(whole(b))
    expected = np.trace(sigma @ first @ sigma @ first), np.trace(sigma @ first @ sigma @ second)
    np.testing.assert_allclose(form.products(factor, form.covariance_root(factor), a, b), expected, rtol=0.02)


def test_borders_that_are_full_are_left_to_whole_matrices():
    column, row = np.divmod(np.arange(40 * 30), 30)
    assert border_pattern(column, row, 40, 30) is None
    chosen = np.arange(40)
    pattern = border_pattern(chosen, chosen % 30, 40, 30)
    assert pattern is None or len(pattern.first) == 40


def test_an_arrow_that_is_not_positive_definite_has_no_factor(arrow):
    form, *_, x = arrow
    for bad in (x.at[0].set(-1.0), x.at[-1].set(-1.0)):
        assert not np.isfinite(form.factor(bad)).all()


def test_entries_of_arrows_stand_for_the_whole_matrix(arrow):
    form, *_, x = arrow
    matrix, entries, vector = np.asarray(form.packing.whole(x)), form.entries(), np.arange(1.0, SIZE + 1)
    np.testing.assert_allclose(entries.times(np.asarray(x), vector), matrix @ vector, rtol=1e-10)
    np.testing.assert_allclose(entries.diagonal(np.asarray(x)), np.diag(matrix), rtol=1e-12)
    squares = np.sum(entries.scaled(np.asarray(x), vector) ** 2)
    np.testing.assert_allclose(squares, np.sum((vector[:, None] * matrix * vector) ** 2), rtol=1e-10)


def test_inner_products_of_packed_matrices_count_both_sides(arrow):
    form, a, b, _ = arrow
    whole = form.packing.whole
    np.testing.assert_allclose(form.packing.inner(a, b), np.sum(np.asarray(whole(a) * whole(b))), rtol=1e-12)


def test_factors_without_predictors_have_no_curvature():
    """As of a prior that says nothing, or rows whose parameters are all given."""
    nothing = jnp.zeros((3, 0, 2))
    np.testing.assert_array_equal(gram(nothing, jnp.zeros((3, 0, 0))), np.zeros((2, 2)))
    assert covariance(nothing, jnp.eye(2)).shape == (3, 0, 0)
