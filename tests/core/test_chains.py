"""Precisions of chains against whole matrices."""

import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.matrices import precisions
from numpyro_rvga.core.matrices.chains import Chain, ChainPacking
from numpyro_rvga.core.matrices.jacobians import SparseJacobian, covariance, gram

NUM_FACTORS, C = 60, 2


def chain_of(length, num_corner, block):
    """A form, factors of two entries of the chain and one of the corner, and the same as whole Jacobians."""
    rng = np.random.default_rng(0)
    packing = ChainPacking(length, num_corner, block)
    later = rng.integers(1, length, NUM_FACTORS)
    index = [np.maximum(later - rng.integers(1, block, NUM_FACTORS), 0), later]
    index += [length + rng.integers(0, num_corner, NUM_FACTORS)] if num_corner else []
    index, size = np.stack(index, axis=1), length + num_corner
    values = rng.normal(size=(NUM_FACTORS, C, index.shape[1]))
    jacobian = packing.placed(SparseJacobian(jnp.asarray(index), jnp.asarray(values), size, length, 2), jnp.zeros(0))
    whole = np.zeros((NUM_FACTORS, C, size))
    for each, places, entries in zip(whole, index, values):
        each[:, places] = entries
    return Chain(jnp.full(size, 2.0), packing), jacobian, whole


@pytest.fixture(params=[(23, 4, 5), (20, 0, 5), (24, 1, 6)], ids=["filled up", "no corner", "corner of one"])
def chain(request):
    return chain_of(*request.param)


@pytest.fixture
def precision(chain):
    """Packed, and as a matrix."""
    form, jacobian, whole = chain
    weights = jnp.broadcast_to(jnp.eye(C), (NUM_FACTORS, C, C))
    packed = form.begin(jnp.zeros(form.start.size)) + gram(jacobian, weights)
    return packed, 2 * np.eye(form.start.size) + np.einsum("nca,ncb->ab", whole, whole)


def test_curvatures_are_packed(chain, precision):
    packed, matrix = precision
    np.testing.assert_allclose(chain[0].packing.whole(packed), matrix, atol=1e-12)


def test_chains_do_as_whole_precisions(chain, precision):
    form = chain[0]
    packed, matrix = precision
    factor, sigma, vector = form.factor(packed), np.linalg.inv(matrix), np.arange(form.start.size, dtype=float)
    parts = form.packing.parts(packed)
    np.testing.assert_allclose(form.times(parts, jnp.asarray(vector[:, None]))[:, 0], matrix @ vector, rtol=1e-10)
    np.testing.assert_allclose(form.solver(factor)(jnp.asarray(vector)), sigma @ vector, rtol=1e-9)
    np.testing.assert_allclose(form.half_log_determinant(factor), 0.5 * np.linalg.slogdet(matrix)[1], rtol=1e-12)
    root = np.asarray(form.dense_root(factor))
    np.testing.assert_allclose(root.T @ root, sigma, atol=1e-12)
    transposed = form.transposed_times(form.packing.parts(factor), jnp.asarray(vector[:, None]))[:, 0]
    np.testing.assert_allclose(np.sum(transposed**2), vector @ matrix @ vector, rtol=1e-10)


def test_the_part_of_the_covariance_that_factors_need_is_found(chain, precision):
    form, jacobian, whole = chain
    packed, matrix = precision
    found, sigma = form.covariance_root(form.factor(packed)), np.linalg.inv(matrix)
    needed = np.asarray(form.packing.whole(jnp.ones(form.packing.size))) != 0
    np.testing.assert_allclose(np.asarray(form.packing.whole(found))[needed], sigma[needed], atol=1e-12)
    np.testing.assert_allclose(form.packing.diagonal(found), np.diag(sigma), rtol=1e-10)
    expected = np.einsum("nca,ab,ndb->ncd", whole, sigma, whole)
    np.testing.assert_allclose(covariance(jacobian, found), expected, atol=1e-12)


def test_inner_products_and_products_in_the_metric_of_q(chain, precision, monkeypatch):
    form, jacobian, _ = chain
    packed, matrix = precision
    other = gram(jacobian, jnp.broadcast_to(jnp.eye(C).at[0, 0].set(-0.5), (NUM_FACTORS, C, C)))
    dense, sigma = np.asarray(form.packing.whole(other)), np.linalg.inv(matrix)
    np.testing.assert_allclose(form.packing.inner(packed, other), np.sum(matrix * dense), rtol=1e-12)
    monkeypatch.setattr(precisions, "LEAST_PROBES", 5_000)
    monkeypatch.setattr(precisions, "MOST_PROBES", 5_000)
    expected = np.trace(sigma @ dense @ sigma @ dense), np.trace(sigma @ dense @ sigma @ matrix)
    factor = form.factor(packed)
    found = form.products(factor, form.covariance_root(factor), other, packed)
    np.testing.assert_allclose(found, expected, rtol=0.1)


def test_a_chain_that_is_not_positive_definite_has_no_factor(chain, precision):
    form, packed = chain[0], precision[0]
    block, place = divmod(form.packing.num_chain - 1, form.packing.block)
    for entry in (0, block * form.packing.block**2 + place * (form.packing.block + 1)):  # the first one, and the last
        assert not np.isfinite(form.factor(packed.at[entry].set(-1.0))).all()


def test_entries_stand_for_the_whole_matrix(chain, precision):
    packed, matrix = precision
    entries, vector = chain[0].entries(), np.arange(1.0, len(matrix) + 1)
    np.testing.assert_allclose(entries.times(np.asarray(packed), vector), matrix @ vector, rtol=1e-10)
    np.testing.assert_allclose(entries.diagonal(np.asarray(packed)), np.diag(matrix), rtol=1e-12)
    squares = np.sum(entries.scaled(np.asarray(packed), vector) ** 2)
    np.testing.assert_allclose(squares, np.sum((vector[:, None] * matrix * vector) ** 2), rtol=1e-10)
