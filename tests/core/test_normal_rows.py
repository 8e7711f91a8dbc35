"""Normal terms by their sums: the expectations of the same terms one by one, and their derivatives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.expectations import closed_forms as cf
from numpyro_rvga.core.matrices.jacobians import SparseJacobian
from numpyro_rvga.core.matrices.packing import Packing, border_pattern
from numpyro_rvga.core.matrices.precisions import Arrow
from numpyro_rvga.core.updates.factors import Factors, Kind
from numpyro_rvga.core.updates.normal_rows import NormalRows, differ_in_scale, have_one_scale, sums_of

NUM_ROWS, NUM_DIAGONAL, NUM_CORNER = 40, 6, 5
SIZE = NUM_DIAGONAL + NUM_CORNER  # the last entry is the log scale
SCALE = 0.7


@pytest.fixture(params=["dense border", "sparse border"])
def rows(request):
    """Factors of y_i ~ N(u[g_i] + x_i . b, s_i exp(ls)^2), as predictors of location and log scale."""
    rng = np.random.default_rng(0)
    group, x = rng.integers(0, NUM_DIAGONAL, NUM_ROWS), rng.normal(size=(NUM_ROWS, NUM_CORNER - 1))
    index = np.column_stack([group, np.tile(NUM_DIAGONAL + np.arange(NUM_CORNER), (NUM_ROWS, 1))])
    values = np.zeros((NUM_ROWS, 2, 1 + NUM_CORNER))
    values[:, 0, 0], values[:, 0, 1:-1], values[:, 1, -1] = 1, x, 1
    predictors = np.column_stack([-(3 + 2 * rng.normal(size=NUM_ROWS)), rng.normal(size=NUM_ROWS)])
    weight = rng.uniform(0.5, 2, size=NUM_ROWS)
    weight[-1] = 0
    pattern = None
    if request.param == "sparse border":
        pattern = border_pattern(np.repeat(group, NUM_CORNER), index[:, 1:].ravel() - NUM_DIAGONAL, 10**6, NUM_CORNER)
    packing = Packing(NUM_DIAGONAL, NUM_CORNER, pattern)
    jacobian = SparseJacobian(jnp.asarray(index), jnp.asarray(values), SIZE, NUM_DIAGONAL, 1)
    jacobian = packing.placed(jacobian, jnp.asarray(packing.border_places(index)))
    zero = jnp.zeros(NUM_ROWS)
    coefficients = cf.GaussianLogScale(zero, zero + 0.1, jnp.asarray(weight))
    factors = Factors(jnp.asarray(predictors), jacobian, (zero + 1.5, coefficients, jnp.zeros((NUM_ROWS, 2, 0))))
    return factors, Arrow(jnp.ones(SIZE), packing)


def with_known_scale(factors):
    weight, values, local = factors.constants
    scale = SCALE * jnp.exp(factors.predictors[:, 1])
    coefficients = cf.Gaussian(values.target, scale, values.constant, values.weight)
    of_location = SparseJacobian(**(vars(factors.jacobian) | {"values": factors.jacobian.values[:, :1]}))
    return Factors(factors.predictors[:, :1], of_location, (weight, coefficients, local[:, :1]))


def whole(jacobian):
    rows = np.arange(NUM_ROWS)[:, None]
    return (
        jnp.zeros((NUM_ROWS, SIZE, jacobian.values.shape[1]))
        .at[rows, jacobian.index]
        .add(jnp.swapaxes(jacobian.values, 1, 2))
        .swapaxes(1, 2)
    )


def expected(form, factors, mean, covariance):
    """The sum over rows, each by its closed form."""
    weight, values, _ = factors.constants
    jacobian = whole(factors.jacobian)
    means, covariances = factors.predictors + jacobian @ mean, jacobian @ covariance @ jacobian.swapaxes(1, 2)
    return jnp.sum(weight * jax.vmap(cf.EXACT[form])(means, covariances, values)[0])


@pytest.mark.parametrize("form", [cf.GaussianLogScale, cf.Gaussian])
def test_sums_are_those_of_rows(rows, form):
    factors, precisions = rows
    packing = precisions.packing
    if form is cf.Gaussian:
        factors = with_known_scale(factors)
    rng = np.random.default_rng(1)
    mean, root = jnp.asarray(0.5 * rng.normal(size=SIZE)), 0.2 * rng.normal(size=(SIZE, SIZE))
    covariance = jnp.asarray(root @ root.T)
    row, column, _ = packing.coordinates()
    kind = Kind(None, None, None, concave=False, quadratic=form is cf.Gaussian)
    summed = NormalRows((kind,), (sums_of(form, factors, precisions),), precisions)
    seen = summed.covariances(mean, covariance[row, column])
    (value, gradient, accounts, *_), hessians = summed.expected(mean, seen)

    exact, slopes = jax.value_and_grad(expected, (2, 3))(form, factors, mean, covariance)
    assert bool(have_one_scale(form, factors))
    np.testing.assert_allclose([value, accounts.values[0]], exact, rtol=1e-10)
    np.testing.assert_allclose(gradient, slopes[0], rtol=1e-8, atol=1e-8)
    curvature = -(slopes[1] + slopes[1].T)  # by Price's theorem, from the slope in the covariance
    np.testing.assert_allclose(packing.whole(summed.curvature(mean, hessians, False)), curvature, rtol=1e-8, atol=1e-8)
    clamped = packing.whole(summed.curvature(mean, hessians, True))
    assert np.linalg.eigvalsh(clamped)[0] > -1e-9
    point = summed.expected(mean, None)[0].value
    np.testing.assert_allclose(point, expected(form, factors, mean, 0 * covariance), rtol=1e-10)


def test_single_precision_does_not_cancel(rows):
    factors, precisions = rows
    single = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.float64 else x, (factors, precisions))
    far = single[0]._replace(predictors=single[0].predictors.at[:, 0].add(-3000.0))
    everywhere = whole(far.jacobian)[:, 0].at[:, -1].set(0)
    mean = jnp.linalg.lstsq(everywhere.astype(jnp.float64), -far.predictors[:, 0].astype(jnp.float64))[0]
    kind = Kind(None, None, None, concave=False)
    summed = NormalRows((kind,), (sums_of(cf.GaussianLogScale, *(far, single[1])),), single[1])
    value = summed.expected(mean.astype(jnp.float32), None)[0].value
    exact = expected(cf.GaussianLogScale, far, mean, jnp.zeros((SIZE, SIZE)))
    assert abs(float(value - exact)) < 1e-3 * abs(float(exact))  # squares of 3000 have no digits left for residuals


def test_scales_that_differ_are_seen(rows):
    factors, _ = rows
    values, index = factors.jacobian.values, factors.jacobian.index

    def with_values(values):
        return factors._replace(
            jacobian=SparseJacobian(**(vars(factors.jacobian) | {"values": values, "index": index}))
        )

    assert bool(have_one_scale(cf.GaussianLogScale, factors))
    assert not bool(have_one_scale(cf.GaussianLogScale, with_values(values.at[3, 1, -1].set(2.0))))
    assert not bool(have_one_scale(cf.GaussianLogScale, with_values(values.at[:, 1, 0].set(1.0))))
    assert bool(have_one_scale(cf.GaussianLogScale, with_values(values.at[-1, 1, -1].set(2.0))))  # of weight zero
    moved = factors._replace(predictors=factors.predictors.at[:, 1].add(0.3))
    assert bool(differ_in_scale(cf.GaussianLogScale, factors, moved))
    assert not bool(differ_in_scale(cf.GaussianLogScale, factors, with_values(values.at[0, 0, 1].add(0.1))))
    assert not bool(
        differ_in_scale(cf.GaussianLogScale, factors, factors._replace(predictors=factors.predictors.at[0, 1].add(0.3)))
    )
