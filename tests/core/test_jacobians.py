"""Sparse Jacobians and packed precisions against whole matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core import borders, precisions
from numpyro_rvga.core.jacobians import (
    Packed,
    SparseJacobian,
    covariance,
    gram,
    packed_gram,
    packed_inner,
    times_root,
    times_vector,
    unpacked,
    vjp,
)
from numpyro_rvga.core.precisions import Arrow

N, C, HEADS, SIZE = 30, 2, 5, 9


def jacobian_of(rng, has_diagonal):
    """Each row depends on one of the first 5 entries, if any, on one of 5 and 6, and on one of 7 and 8."""
    index = np.stack([rng.integers(0, HEADS, N), rng.integers(5, 7, N), rng.integers(7, 9, N)], axis=1)
    index = index if has_diagonal else index[:, 1:]
    return SparseJacobian(
        jnp.asarray(index), jnp.asarray(rng.normal(size=(N, C, index.shape[1]))), SIZE, HEADS, has_diagonal
    )


def whole(jacobian):
    dense = np.zeros((N, C, SIZE))
    for i, (places, values) in enumerate(zip(np.asarray(jacobian.index), np.asarray(jacobian.values))):
        dense[i][:, places] = values
    return jnp.asarray(dense)


@pytest.fixture
def rng():
    return np.random.default_rng(0)


@pytest.mark.parametrize("has_diagonal", [True, False])
def test_sparse_jacobians_do_as_whole_ones(rng, has_diagonal):
    jacobian = jacobian_of(rng, has_diagonal)
    dense = whole(jacobian)
    vector, slopes, root = rng.normal(size=SIZE), rng.normal(size=(N, C)), rng.normal(size=(SIZE, SIZE))
    weights = rng.normal(size=(N, C, C))
    weights = jnp.asarray(weights + np.swapaxes(weights, 1, 2))
    np.testing.assert_allclose(times_vector(jacobian, jnp.asarray(vector)), dense @ vector, rtol=1e-12)
    np.testing.assert_allclose(times_root(jacobian, jnp.asarray(root)), dense @ root, rtol=1e-12)
    np.testing.assert_allclose(vjp(jacobian, jnp.asarray(slopes)), np.einsum("ncp,nc->p", dense, slopes), rtol=1e-12)
    expected = np.einsum("ncp,ncd,ndq->pq", dense, weights, dense)
    np.testing.assert_allclose(unpacked(gram(jacobian, weights)), expected, atol=1e-12)
    assert np.all(expected[:HEADS, :HEADS][~np.eye(HEADS, dtype=bool)] == 0)


@pytest.mark.parametrize("has_diagonal", [True, False])
def test_covariances_of_predictors_need_only_what_is_packed(rng, has_diagonal):
    jacobian, root = jacobian_of(rng, has_diagonal), jnp.asarray(rng.normal(size=(12, SIZE)))
    expected = np.einsum("ncp,kp,kq,ndq->ncd", whole(jacobian), root, root, whole(jacobian))
    np.testing.assert_allclose(covariance(jacobian, root), expected, rtol=1e-10)
    np.testing.assert_allclose(covariance(jacobian, packed_gram(root, HEADS)), expected, rtol=1e-10)


def test_terms_that_each_look_at_one_entry_have_a_diagonal_gram(rng):
    index, scale = rng.integers(0, SIZE, N), rng.normal(size=N)
    jacobian = SparseJacobian(jnp.asarray(index)[:, None], jnp.asarray(scale)[:, None, None], SIZE, SIZE, True)
    found = gram(jacobian, jnp.ones((N, 1, 1)))
    np.testing.assert_allclose(found, np.bincount(index, scale**2, SIZE), rtol=1e-12)


@pytest.fixture
def packed(rng):
    """Two differences of packed precisions, and a precision."""
    arrays = [gram(jacobian_of(rng, True), jnp.broadcast_to(w * jnp.eye(C), (N, C, C))) for w in (1.0, -0.4, 0.7)]
    return arrays[1], arrays[2], arrays[0] + Arrow(jnp.full(SIZE, 2.0), HEADS).begin(jnp.zeros(SIZE))


def form_of(x, is_sparse, monkeypatch):
    monkeypatch.setattr(borders, "DENSE_SPEEDUP", 0)
    row, column = np.nonzero(np.asarray(x)[1:, :HEADS])
    pattern = borders.border_pattern(np.repeat(column, 2), np.repeat(row, 2), HEADS, SIZE - HEADS)
    return Arrow(jnp.ones(SIZE), HEADS, pattern if is_sparse else None)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_arrows_do_as_whole_precisions(packed, is_sparse, monkeypatch):
    _, _, x = packed
    x = x.at[1:3, : HEADS - 2].set(0.0)
    form, precision, vector = form_of(x, is_sparse, monkeypatch), np.asarray(unpacked(x)), np.arange(SIZE, dtype=float)
    factor, sigma = form.factor(x), np.linalg.inv(np.asarray(unpacked(x)))
    np.testing.assert_allclose(form.solver(factor)(vector), np.linalg.solve(precision, vector), rtol=1e-10)
    np.testing.assert_allclose(form.half_log_determinant(factor), 0.5 * np.linalg.slogdet(precision)[1], rtol=1e-12)
    root = np.asarray(form.dense_root(factor))
    np.testing.assert_allclose(root.T @ root, sigma, atol=1e-12)
    spread = form.covariance_root(factor)
    needed = np.asarray(x)[1:] != 0 if is_sparse else slice(None)
    np.testing.assert_allclose(spread.array[1:][needed], sigma[HEADS:][needed], atol=1e-12)
    np.testing.assert_allclose(spread.array[0, :HEADS], np.diag(sigma)[:HEADS], rtol=1e-10)


@pytest.mark.parametrize("is_sparse", [False, True])
def test_products_of_arrows_are_estimated(packed, is_sparse, monkeypatch):
    a, b, x = packed
    monkeypatch.setattr(precisions, "NUM_PROBES", 100_000)
    form = form_of(x, is_sparse, monkeypatch)
    factor = form.factor(x)
    sigma, first, second = np.linalg.inv(np.asarray(unpacked(x))), np.asarray(unpacked(a)), np.asarray(unpacked(b))
    expected = np.trace(sigma @ first @ sigma @ first), np.trace(sigma @ first @ sigma @ second)
    np.testing.assert_allclose(form.products(factor, form.covariance_root(factor), a, b), expected, rtol=0.02)


def test_borders_that_are_full_are_left_to_whole_matrices():
    column, row = np.divmod(np.arange(40 * 30), 30)
    assert borders.border_pattern(column, row, 40, 30) is None
    chosen = np.arange(40)
    pattern = borders.border_pattern(chosen, chosen % 30, 40, 30)
    assert pattern is None or len(pattern.first) == 40


def test_an_arrow_that_is_not_positive_definite_has_no_factor(packed):
    x = packed[2]
    form = Arrow(jnp.ones(SIZE), HEADS)
    for bad in (x.at[0, 0].set(-1.0), x.at[-1, -1].set(-1.0)):
        assert not np.isfinite(form.factor(bad)).all()


def test_inner_products_of_packed_matrices_count_both_sides(packed):
    a, b, _ = packed
    np.testing.assert_allclose(packed_inner(a, b), np.sum(np.asarray(unpacked(a) * unpacked(b))), rtol=1e-12)
    assert Packed(a).num_diagonal == HEADS
    assert jax.tree.leaves(Packed(a))[0].shape == (1 + SIZE - HEADS, SIZE)
