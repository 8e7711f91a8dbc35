"""Expectations on the ladder against dense numerical integration, and the errors that it reports."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.scipy.special import gammaln, logsumexp
from scipy import stats

from numpyro_rvga.core.expectations import ladder
from numpyro_rvga.core.expectations.by_nodes import hermite_rule, monte_carlo_points
from numpyro_rvga.core.expectations.ladder import expectations, values_by_many_nodes
from numpyro_rvga.core.jaxprs.primitives import equations


def negative_binomial(u, y):
    rate = jnp.logaddexp(u[0], u[1])
    k = jnp.exp(u[1])
    return gammaln(y + k) - gammaln(k) - gammaln(y + 1) + k * (u[1] - rate) + y * (u[0] - rate)


def student_t(u, y):
    return -2.5 * jnp.log1p(((y - u[0]) * jnp.exp(-u[1])) ** 2 / 4) - u[1]


def tanh_network(u, y):
    return -0.5 * ((y / 5 - jnp.tanh(u[0])) / 0.2) ** 2


def outliers(u, y):
    z = (y - u[0]) / 0.1
    return jnp.logaddexp(-0.5 * z * z - jnp.log(0.1), -4 - 0.5 * (z / 100) ** 2)


def mixture_of_three(u, y):
    return jax.nn.logsumexp(-0.5 * ((y - u) / jnp.array([0.5, 1.0, 2.0])) ** 2)


def tilted_absolute(u, y):
    return -jnp.abs(y - u[0]) * jnp.exp(-u[1]) - u[1]


def hinge(u, y):
    return -jnp.maximum(0.0, jnp.abs(y - u[0]) - 0.5) / 0.2


SMOOTH = [(negative_binomial, 2), (student_t, 2), (tanh_network, 1), (outliers, 1), (mixture_of_three, 3)]


def factors(size, deviation, count=7, seed=0):
    """Means, covariances of about ``deviation``, and outcomes."""
    rng = np.random.default_rng(seed)
    roots = deviation * np.tril(rng.normal(size=(count, size, size)) / np.sqrt(size))
    covariances = roots @ roots.swapaxes(1, 2)
    return jnp.asarray(rng.normal(size=(count, size))), jnp.asarray(covariances), jnp.asarray(rng.poisson(2.0, count))


def by_many_nodes(phi, means, covariances, outcomes, nodes):
    """E[phi], E[grad phi], E[hess phi] from gradients at nodes, factor by factor: Gauss-Hermite's, or on a line."""
    z, weights = hermite_rule(means.shape[1], nodes)
    if means.shape[1] == 1:
        z = np.linspace(-9, 9, 20_001)[:, None]
        weights = np.exp(-0.5 * z[:, 0] ** 2) / np.sum(np.exp(-0.5 * z**2))

    def one(mean, covariance, y):
        root = jnp.linalg.cholesky(covariance)
        values, slopes = jax.vmap(jax.value_and_grad(lambda u: phi(u, y)))(mean + z @ root.T)
        square = jnp.einsum("k,ki,kj->ij", weights, slopes, z) @ jnp.linalg.inv(root)
        return weights @ values, weights @ slopes, 0.5 * (square + square.T)

    return jax.jit(jax.vmap(one))(means, covariances, outcomes)


@pytest.mark.parametrize("effort", ["few", "direct", "usual"])
@pytest.mark.parametrize("deviation", [0.01, 0.1, 0.5])
@pytest.mark.parametrize("phi, size", SMOOTH)
def test_smooth_densities_are_integrated_to_within_the_reported_error(phi, size, deviation, effort):
    known = factors(size, deviation)
    measured = expectations(phi, size, effort=effort)
    found, estimates = jax.tree.map(np.asarray, jax.jit(measured)(*known))
    dense = by_many_nodes(phi, *known, {1: 1, 2: 80, 3: 30}[size])
    roots = np.linalg.cholesky(known[1])
    off = [np.asarray(a - b) for a, b in zip(found, dense)]
    scaled = [off[0], np.einsum("nc,ncd->nd", off[1], roots), roots.swapaxes(1, 2) @ off[2] @ roots]
    worst = np.max([np.abs(x.reshape(len(x), -1)).max(axis=1) for x in scaled], axis=0)
    assert np.all(worst <= np.maximum(3 * estimates, 1e-9))
    calls_for_the_ladder = effort in ("few", "direct") and estimates.max() > 1e-3
    assert worst.max() < 3e-5 * max(1.0, np.abs(dense[0]).max()) or calls_for_the_ladder


@pytest.mark.parametrize("size", [4, 5])
def test_few_nodes_of_many_predictors_know_that_they_are_not_enough(size):
    known = factors(size, 0.5)
    nodes = monte_carlo_points([0], 256, size)

    def wave(u, y):
        return jnp.sum(jnp.cos(2 * u)) + y * u[0] * u[1]

    few, errors = expectations(wave, size, effort="few")(*known)
    many, _ = jax.jit(expectations(wave, size, nodes))(*known)
    off = np.abs(few[0] - many[0])
    assert np.all(off <= errors + 1e-3) and off.max() > 1e-3


@pytest.mark.parametrize("shift", [-2.0, 0.3, 4.0])
@pytest.mark.parametrize("deviation", [1e-3, 0.1, 3.0])
def test_a_kink_anywhere_near_q_is_seen(deviation, shift):
    expect = expectations(hinge, 1)
    kink = 1.7 - 0.5  # phi(u) = -max(0, |1.7 - u| - 0.5) / 0.2
    mean = kink - shift * deviation
    found, _ = jax.jit(expect)(jnp.array([[mean]]), jnp.array([[[deviation**2]]]), jnp.array([1.7]))
    grid = np.linspace(-10, 10, 2_000_001)
    density = np.exp(-0.5 * grid**2) / np.sqrt(2 * np.pi)
    u = mean + deviation * grid
    values = -np.maximum(0, np.abs(1.7 - u) - 0.5) / 0.2
    slopes = 5.0 * np.sign(1.7 - u) * (np.abs(1.7 - u) > 0.5)
    size = 5.0 * deviation
    np.testing.assert_allclose(found[0][0], np.trapezoid(values * density, grid), atol=2e-5 * size)
    np.testing.assert_allclose(
        found[1][0, 0] * deviation, np.trapezoid(slopes * density, grid) * deviation, atol=2e-5 * size
    )
    curvature = np.trapezoid(slopes * grid * density, grid) * deviation
    np.testing.assert_allclose(found[2][0, 0, 0] * deviation**2, curvature, atol=2e-5 * size)


@pytest.mark.parametrize("deviation", [0.05, 0.5])
def test_kinks_in_two_dimensions_need_the_thorough_ladder_and_the_other_says_so(deviation):
    means, covariances, outcomes = factors(2, deviation)
    means = means.at[:, 0].set(outcomes + 0.3 * deviation)
    m, s = np.asarray(means), np.asarray(covariances)
    # exp(-u1) tilts the Gaussian of u0: what is left is the mean of a folded normal.
    scale = np.exp(-m[:, 1] + 0.5 * s[:, 1, 1])
    center, width = outcomes - m[:, 0] + s[:, 0, 1], np.sqrt(s[:, 0, 0])
    folded = center * (1 - 2 * stats.norm.cdf(-center / width)) + 2 * width * stats.norm.pdf(center / width)
    truth = -scale * folded - m[:, 1]
    off = {}
    for effort in ("direct", "usual", "thorough"):
        measured = expectations(tilted_absolute, 2, effort=effort)
        found, estimates = jax.jit(measured)(means, covariances, outcomes)
        off[effort] = np.abs(found[0] - truth)
        assert np.all(off[effort] <= np.maximum(estimates, 1e-5 * deviation))
    assert off["thorough"].max() < 1e-4 * deviation < min(off["usual"].max(), off["direct"].max())


@pytest.mark.parametrize("phi, size", SMOOTH)
def test_few_nodes_are_exact_where_factors_are_narrow(phi, size):
    known = factors(size, 0.003)
    few, errors = jax.jit(expectations(phi, size, effort="few"))(*known)
    assert errors.max() < 1e-8
    for a, b in zip(few, by_many_nodes(phi, *known, {1: 1, 2: 40, 3: 12}[size])):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("degree", [6, 7])
def test_what_few_nodes_miss_of_the_next_derivatives_is_what_corrected_ones_add(degree):
    """E[d/dz z^7] = 105 and E[d^2/dz^2 z^6] = 90, of which three nodes find 63 and 54."""
    few = expectations(lambda u, y: u[0] ** degree, 1, effort="few")
    one = jnp.zeros((1, 1)), jnp.ones((1, 1, 1)), jnp.zeros(1)

    def slopes(**options):
        (_, gradient, hessian), _ = few(*one, **options)
        return [float(gradient[0, 0]), float(hessian[0, 0, 0])]

    assert slopes(is_corrected=jnp.asarray(False)) == slopes()
    np.testing.assert_allclose(slopes(), (0, 54) if degree == 6 else (63, 0), atol=1e-4)
    exact = (0, 90) if degree == 6 else (105, 0)
    np.testing.assert_allclose(slopes(is_corrected=jnp.asarray(True)), exact, rtol=0.05, atol=1e-3)


@pytest.mark.parametrize("phi, size", [each for each in SMOOTH if each[1] > 1])
def test_values_that_are_corrected_for_good_have_the_corrected_slopes(phi, size):
    """A bound at a q that corrected expectations have found is stationary in q by these alone."""
    means, covariances, outcomes = factors(size, 1.0)
    corrected = partial(expectations(phi, size, effort="few"), is_corrected=np.asarray(True))

    def total(means, covariances):
        (values, _, _), _ = corrected(means, covariances, outcomes)
        return jnp.sum(values)

    (_, gradients, hessians), _ = corrected(means, covariances, outcomes)
    in_mean, in_covariance = jax.grad(total, (0, 1))(means, covariances)
    np.testing.assert_allclose(in_mean, gradients, rtol=1e-6)
    np.testing.assert_allclose(in_covariance, 0.5 * hessians, rtol=1e-6)


@pytest.mark.parametrize("deviation", [0.3, 1.0])
@pytest.mark.parametrize("phi, size", [each for each in SMOOTH if each[1] > 1])
def test_values_by_many_nodes_are_as_exact_as_they_say(phi, size, deviation, monkeypatch):
    monkeypatch.setattr(ladder, "CACHED_POINTS", 4096)  # in several chunks
    means, covariances, outcomes = factors(size, deviation)
    values, errors = values_by_many_nodes(phi)(means, covariances, outcomes)
    exact, _, _ = by_many_nodes(phi, means, covariances, outcomes, {2: 80, 3: 30}[size])
    assert np.all(np.abs(values - exact) <= errors + 1e-6)
    assert np.all(errors < 0.1)


@pytest.mark.parametrize("effort", ["few", "direct", "usual"])
def test_many_factors_are_taken_in_chunks_and_none_is_lost(effort, monkeypatch):
    known = factors(2, 0.4, count=53)
    expect = expectations(negative_binomial, 2, effort=effort)
    whole = jax.jit(expect)(*known)
    monkeypatch.setattr(ladder, "CACHED_POINTS", 100)
    expect = expectations(negative_binomial, 2, effort=effort)
    for a, b in zip(jax.tree.leaves(jax.jit(expect)(*known)), jax.tree.leaves(whole)):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("effort", ["direct", "usual"])
def test_with_many_predictors_the_better_of_two_rules_is_taken(effort):
    size = 6
    phi = lambda u, y: -jnp.exp(jnp.sum(u) / np.sqrt(size)) + y * u[0]  # noqa: E731
    expect = expectations(phi, size, monte_carlo_points([0], 256, size), effort=effort)
    for deviation, bound in ((0.05, 1e-8), (0.3, 1e-3), (1.0, 0.3)):
        means, covariances, outcomes = factors(size, deviation)
        variance = jnp.einsum("ncd->n", covariances) / size
        truth = -jnp.exp(jnp.sum(means, axis=1) / np.sqrt(size) + 0.5 * variance) + outcomes * means[:, 0]
        assert float(jnp.max(jnp.abs(expect(means, covariances, outcomes)[0][0] - truth))) < bound * 3


@pytest.mark.parametrize("effort", ["direct", "usual"])
def test_with_many_predictors_a_density_that_is_nan_far_out_has_a_finite_error(effort):
    """Four standard deviations out, where the few nodes' error is estimated, and no node of the many is."""
    size = 6
    phi = lambda u, y: -jnp.exp(0.1 * jnp.sum(u)) - 0.001 * jnp.sum(jnp.log(4.4 - u))  # noqa: E731
    nodes = monte_carlo_points([0], 256, size)
    assert np.abs(nodes[0]).max() < 4.4
    means, covariances = jnp.zeros((5, size)), jnp.tile(jnp.eye(size), (5, 1, 1))
    (value, _, _), error = expectations(phi, size, nodes, effort=effort)(means, covariances, jnp.zeros(5))
    z, step = np.linspace(-4.3, 4.3, 10_001, retstep=True)
    truth = -np.exp(0.005 * size) - 0.001 * size * step * (stats.norm.pdf(z) @ np.log(4.4 - z))
    np.testing.assert_allclose(value, truth, atol=0.01)
    assert np.all(error < 0.1)


@pytest.mark.parametrize("phi, size", [(negative_binomial, 2), (hinge, 1)])
def test_the_value_may_be_differentiated(phi, size):
    means, covariances, _ = factors(size, 0.3)
    covariances = covariances + 0.02 * jnp.eye(size)
    outcomes = jnp.linspace(0.5, 3.0, len(means))
    expect = expectations(phi, size)
    total = lambda *known: jnp.sum(expect(*known)[0][0])  # noqa: E731
    slopes = jax.jit(jax.grad(total, argnums=(0, 1, 2)))(means, covariances, outcomes)
    for place in range(3):
        known = [means, covariances, outcomes]
        turn = jnp.asarray(np.random.default_rng(place).normal(size=known[place].shape))
        turn = turn + turn.swapaxes(1, 2) if place == 1 else turn
        moved = [[x + sign * 1e-4 * turn if i == place else x for i, x in enumerate(known)] for sign in (1, -1)]
        difference = (total(*moved[0]) - total(*moved[1])) / 2e-4
        np.testing.assert_allclose(jnp.sum(slopes[place] * turn), difference, rtol=2e-2 if phi is hinge else 1e-5)


def test_single_precision_is_as_good_as_its_rounding():
    known = factors(2, 0.3)
    expect = expectations(negative_binomial, 2)
    double, _ = expect(*known)
    single, _ = expect(*(x.astype(jnp.float32) for x in known))
    for a, b in zip(double, single):
        assert b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("count, is_direct", [(100, True), (2000, False)])
def test_a_rule_of_many_nodes_is_for_few_factors(count, is_direct):
    known = factors(2, 0.4, count=count)
    found = [jax.jit(expectations(negative_binomial, 2, effort=effort))(*known)[1] for effort in ("direct", "usual")]
    assert np.array_equal(*found) is not is_direct


@pytest.mark.parametrize("num_hard", [1, 5])
def test_of_densities_that_are_integrals_only_the_hard_ones_pay(num_hard):
    places = []

    def phi(u, y):
        jax.debug.callback(places.append, u)
        return student_t(u, y)

    means, covariances, outcomes = factors(2, 1.0, count=40)
    covariances = covariances * jnp.where(jnp.arange(40) < num_hard, 1.0, 1e-6)[:, None, None]
    measured = expectations(phi, 2, effort="direct", cost=900)
    jax.block_until_ready(measured(means, covariances, outcomes))
    jax.effects_barrier()
    of_all = 40 * len(ladder.fifth_degree_nodes(2)[0])
    of_one = sum(across * along for across, along in ladder.TENSOR_NODES[2])
    assert of_all + num_hard * of_one <= len(places) <= of_all + (num_hard + 2) * of_one


def test_where_one_value_is_not_finite_no_factor_pays_for_finer_rules():
    """A search has overshot, and leaves that place whatever the others are worth there."""

    def phi(u, y):
        return student_t(u, y) + jnp.where(y > 0, 0.0, -jnp.inf)

    means, covariances, _ = factors(2, 1.0, count=40)
    few, usual = (jax.jit(expectations(phi, 2, effort=effort)) for effort in ("few", "usual"))
    impossible, possible = jnp.arange(40.0), 1.0 + jnp.arange(40.0)
    assert usual(means, covariances, impossible)[0][0][0] == -jnp.inf
    np.testing.assert_array_equal(usual(means, covariances, impossible)[1], few(means, covariances, impossible)[1])
    assert jnp.sum(usual(means, covariances, possible)[1]) < 0.1 * jnp.sum(few(means, covariances, possible)[1])


def test_the_error_of_a_rule_of_many_nodes_is_not_that_of_rounding_large_values():
    large = lambda u, y: 100.0 * y + student_t(u, y)  # noqa: E731
    known = [jnp.asarray(x, jnp.float32) for x in factors(2, 0.05, count=100)]
    assert jnp.sum(expectations(large, 2, effort="direct")(*known)[1]) < 1e-3


@pytest.mark.parametrize("effort", ["direct", "usual"])
@pytest.mark.parametrize("deviation", [0.05, 0.15, 0.3])
def test_a_density_that_is_nan_far_out_has_the_expectation_of_where_it_is_defined(deviation, effort):
    """A normal scale that is itself normal: no draw in 2,000 is negative, and the farthest nodes are."""

    def normal(u, y):
        return -0.5 * ((y - u[0]) / u[1]) ** 2 - jnp.log(u[1])

    covariance = jnp.diag(jnp.array([0.01, deviation**2]))
    expect = expectations(normal, 2, effort=effort)
    (value, gradient, _), _ = expect(jnp.array([[0.0, 1.0]]), covariance[None], jnp.array([0.3]))
    scale, step = np.linspace(0.15, 3, 20001, retstep=True)
    weights = step * stats.norm(1, deviation).pdf(scale)
    np.testing.assert_allclose(value[0], weights @ (-0.5 * (0.09 + 0.01) / scale**2 - np.log(scale)), atol=0.01)
    np.testing.assert_allclose(gradient[0, 0], weights @ (0.3 / scale**2), rtol=0.1)


def test_the_slope_in_a_constant_is_that_of_where_the_density_is_defined():
    expect = expectations(lambda u, y: jnp.log(y + u[0]), 1)
    mean, covariance = jnp.ones((1, 1)), jnp.full((1, 1, 1), 0.0625)
    slope = jax.grad(lambda y: expect(mean, covariance, y[None])[0][0][0])(0.05)
    z, step = np.linspace(-3.5, 8, 20001, retstep=True)
    np.testing.assert_allclose(slope, step * np.sum(stats.norm.pdf(z) / (1.05 + 0.25 * z)), rtol=0.01)


@pytest.mark.parametrize("effort", ["few", "usual", "direct"])
def test_values_that_are_integrals_are_in_memory_some_at_a_time(effort):
    """Of 500 factors at their points, with 4,096 numbers for each: 300 million numbers, and a tenth at once."""
    cost, factors = 4096, 500

    def phi(u, constants):
        return logsumexp(jnp.arange(cost) * u[0] + constants * u[1])

    expect = expectations(phi, 2, effort=effort, cost=cost)
    arrays = jnp.zeros((factors, 2)), jnp.tile(jnp.eye(2), (factors, 1, 1)), jnp.zeros(factors)
    jaxpr = jax.make_jaxpr(expect)(*arrays).jaxpr
    sizes = [v.aval.size for eqn in equations(jaxpr) for v in eqn.outvars if hasattr(v.aval, "size")]
    assert max(sizes) < 3e7
