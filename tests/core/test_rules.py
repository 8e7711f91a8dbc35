"""The rules against the BONG paper's equations, written out densely, and the laws that bind rules and families."""

import dataclasses
from functools import partial

import dense_rules as dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.gaussians import (
    FAMILIES,
    BlockDiagonalGaussian,
    DiagonalGaussian,
    ExpectedDerivatives,
    FullGaussian,
    LowRankGaussian,
    gradient_step,
)
from numpyro_rvga.core.updates.rules import Rule, iterate, update

P, RANK = 5, 2
KEY = jax.random.key(0)
RATES = {"bong": 1.0, "bog": 0.02, "blr": 0.3, "bbb": 0.02}
MEMBERS = [(f, c) for f in ("full", "diagonal") for c in ("natural", "moment")] + [("low-rank", "natural")]
FORMS = {
    "full": ["two rows", "two rows, weighted", "many rows and a diagonal"],
    "diagonal": ["two rows", "many rows and a diagonal"],
    "low-rank": ["two rows", "many rows"],
}
CASES = [(rule, *member, form) for rule in RATES for member in MEMBERS for form in FORMS[member[0]]]


def gaussian(family, seed=0, size=P, rank=RANK):
    rng = np.random.default_rng(seed)
    mean = jnp.asarray(rng.normal(size=size))
    if family == "full":
        return FullGaussian(mean, jnp.asarray(0.9 * np.eye(size) + 0.2 * rng.normal(size=(size, size))))
    if family == "diagonal":
        return DiagonalGaussian(mean, jnp.asarray(rng.uniform(0.5, 1.5, size)))
    if family == "block-diagonal":
        roots = [0.9 * np.eye(n) + 0.2 * rng.normal(size=(n, n)) for n in (2, size - 2)]
        return BlockDiagonalGaussian(mean, tuple(map(jnp.asarray, roots)))
    return LowRankGaussian(
        mean, jnp.asarray(rng.uniform(0.7, 1.5, size)), jnp.asarray(0.6 * rng.normal(size=(rank, size)))
    )


def described(xp, mean, covariance, form, size=P):
    """Of some rows, at a q: gradient, factor, weight and diagonal. They change with mean and covariance."""
    rng = np.random.default_rng(10)
    many = form.startswith("many rows")
    factor = 0.15 * rng.normal(size=(2 * size, size)) if many else 0.4 * rng.normal(size=(2, size))
    direction, target = rng.normal(size=size), rng.normal(size=size)
    steepness = (1 + 0.3 * xp.tanh(mean @ direction)) / xp.sqrt(1 + 0.1 * xp.trace(covariance))
    gradient = target - 0.5 * mean * steepness
    weight = diagonal = None
    if form == "two rows, weighted":
        weight = np.array([[1.0, 0.6], [0.6, -0.4]])  # indefinite
    if form == "many rows and a diagonal":
        weight = np.diag(np.linspace(-0.5, 1.5, len(factor)))
        diagonal = 0.3 * rng.normal(size=size) * steepness
    return gradient, factor * steepness, weight, diagonal


def estimate(form, size=P):
    def at(rng_key, q):
        gradient, factor, weight, diagonal = described(jnp, q.mean, q.covariance(), form, size)
        return ExpectedDerivatives(gradient, factor, None if weight is None else jnp.asarray(weight), diagonal)

    return at


def dense_estimate(form, size=P):
    def at(mean, covariance):
        gradient, factor, weight, diagonal = described(np, mean, covariance, form, size)
        hessian = factor.T @ factor if weight is None else factor.T @ weight @ factor
        return gradient, -(hessian if diagonal is None else hessian + np.diag(diagonal))

    return at


@pytest.fixture(autouse=True)
def operation_by_operation():
    """Operations are compiled once for all tests, whole updates would be for each."""
    with jax.disable_jit():
        yield


def take(rule, prior, estimator):
    return update(rule, prior, estimator, KEY)


def assert_same(found, expected, rtol=1e-10):
    found = dense.as_dense(found)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=rtol, atol=rtol)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=rtol, atol=rtol)


# ---------------------------------------------------------------------- appendix E
@pytest.mark.parametrize("rule, family, parameterization, form", CASES)
def test_updates_follow_the_papers_equations_and_leave_gaussians(rule, family, parameterization, form):
    prior, num_iters = gaussian(family), 3 if rule in ("blr", "bbb") else 1
    found = take(Rule(rule, parameterization, RATES[rule], num_iters), prior, estimate(form))
    assert bool(found.ok) and not bool(found.clipped)
    start, at = dense.as_dense(prior), dense_estimate(form)
    expected = dense.updated(rule, family, parameterization, start, at, RATES[rule], num_iters)
    assert_same(found.q, expected)
    covariance = np.asarray(found.q.covariance())
    np.testing.assert_allclose(covariance, covariance.T, rtol=1e-13)
    assert np.linalg.eigvalsh(covariance).min() > 0
    if family == "low-rank":
        found = dense.as_dense(found.q)
        np.testing.assert_allclose(found.diagonal, expected.diagonal, rtol=1e-10)
        np.testing.assert_allclose(found.factor @ found.factor.T, expected.factor @ expected.factor.T, atol=1e-10)


def kalman_gain_form(prior, F, R, error):
    """Equations 23-25 and 130-132."""
    S = prior.covariance
    gain = S @ F.T @ np.linalg.inv(R + F @ S @ F.T)
    return dense.Full(prior.mean + gain @ error, S - gain @ F @ S)


def test_lin_hess_is_the_kalman_filters_update():
    rng = np.random.default_rng(0)
    F, R, error = rng.normal(size=(3, P)), np.diag([0.5, 1.0, 2.0]), rng.normal(size=3)
    prior = gaussian("full")
    site = ExpectedDerivatives(jnp.asarray(F.T @ np.linalg.inv(R) @ error), jnp.asarray(np.linalg.inv(R) ** 0.5 @ F))
    found = take(Rule("bong"), prior, lambda key, q: site)
    assert_same(found.q, kalman_gain_form(dense.as_dense(prior), F, R, error))


@pytest.mark.parametrize("num_draws", [1, 4, 7])
def test_empirical_fisher_updates_follow_the_woodbury_form(num_draws):
    """Equations 122-127: with few draws, and with more than there are parameters."""
    gradients = np.random.default_rng(1).normal(size=(P, num_draws))
    prior = gaussian("full")
    S = dense.as_dense(prior).covariance
    gain = S @ gradients @ np.linalg.inv(num_draws * np.eye(num_draws) + gradients.T @ S @ gradients)
    expected = dense.Full(prior.mean + gain @ np.ones(num_draws), S - gain @ gradients.T @ S)
    site = ExpectedDerivatives(jnp.asarray(gradients.mean(axis=1)), jnp.asarray(gradients.T / np.sqrt(num_draws)))
    assert_same(take(Rule("bong"), prior, lambda key, q: site).q, expected)


@pytest.mark.parametrize("family, parameterization", MEMBERS)
@pytest.mark.parametrize("rule", ["blr", "bbb"])
def test_iterations_in_batch_mode_pull_towards_the_prior(rule, family, parameterization):
    q, prior = gaussian(family, seed=1), gaussian(family)
    form = "two rows"
    found = iterate(Rule(rule, parameterization, RATES[rule]), prior, q, estimate(form), KEY)
    start = dense.as_dense(q)
    g, G = dense_estimate(form)(start.mean, start.covariance)
    assert_same(found.q, dense.STEPS[rule, family, parameterization](start, g, G, RATES[rule], dense.as_dense(prior)))


@pytest.mark.parametrize(
    "family, parameterization, expected",
    [
        ("full", "natural", lambda m, S, g, G, a, b: (None, np.linalg.inv((1 - a) * np.linalg.inv(S) + a * (b - G)))),
        ("full", "moment", lambda m, S, g, G, a, b: (m + a * S @ (g - b @ m), (1 + a) * S + a * S @ (G - b) @ S)),
        (
            "diagonal",
            "natural",
            lambda m, S, g, G, a, b: (None, np.diag(1 / ((1 - a) / np.diag(S) + a * np.diag(b - G)))),
        ),
        (
            "diagonal",
            "moment",
            lambda m, S, g, G, a, b: (
                m + a * np.diag(S) * (g - np.diag(b) * m),
                np.diag((1 + a) * np.diag(S) + a * np.diag(S) ** 2 * np.diag(G - b)),
            ),
        ),
    ],
)
def test_batch_blr_with_a_spherical_prior_follows_appendix_e6(family, parameterization, expected):
    """Equations 329-344."""
    scale, rate, q = 0.7, 0.3, gaussian(family, seed=1)
    identity, zeros = jnp.eye(P), jnp.zeros(P)
    prior = FullGaussian(zeros, scale * identity) if family == "full" else DiagonalGaussian(zeros, scale**2 + zeros)
    found = dense.as_dense(iterate(Rule("blr", parameterization, rate), prior, q, estimate("two rows"), KEY).q)
    start = dense.as_dense(q)
    g, G = dense_estimate("two rows")(start.mean, start.covariance)
    mean, covariance = expected(start.mean, start.covariance, g, G, rate, np.eye(P) / scale**2)
    if mean is None:
        mean = start.mean + rate * covariance @ (g - start.mean / scale**2)
    np.testing.assert_allclose(found.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(found.covariance, covariance, rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------- laws between rules
@pytest.mark.parametrize("family, parameterization", MEMBERS)
def test_blr_with_one_step_of_rate_one_is_bong(family, parameterization):
    prior = gaussian(family)
    bong, blr = (take(Rule(name, parameterization, 1.0), prior, estimate("two rows")).q for name in ("bong", "blr"))
    assert_same(blr, dense.as_dense(bong), rtol=1e-13)


@pytest.mark.parametrize("family, parameterization", MEMBERS)
def test_bbb_with_one_step_is_bog(family, parameterization):
    prior = gaussian(family)
    bog, bbb = (take(Rule(name, parameterization, 0.03), prior, estimate("two rows")).q for name in ("bog", "bbb"))
    assert_same(bbb, dense.as_dense(bog), rtol=1e-13)


@pytest.mark.parametrize("family, parameterization", MEMBERS)
def test_the_divergence_counts_nothing_at_the_prior(family, parameterization):
    prior = gaussian(family)
    site = estimate("two rows")(KEY, prior)
    for step in (
        partial(gradient_step, rate=0.02, parameterization=parameterization),
        partial(type(prior).natural_step, step=0.4, parameterization=parameterization),
    ):
        assert_same(
            step(prior, derivatives=site, prior=prior), dense.as_dense(step(prior, derivatives=site)), rtol=1e-11
        )


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("rule", ["bong", "blr"])
def test_natural_and_moment_steps_agree_to_first_order(rule, family):
    prior = gaussian(family)

    def difference(step):
        scaled = lambda key, q: ExpectedDerivatives(step * site.gradient, jnp.sqrt(step) * site.factor)  # noqa: E731
        rate = 1.0 if rule == "bong" else step
        estimator = scaled if rule == "bong" else lambda key, q: site
        pair = [
            take(Rule(rule, parameterization, rate), prior, estimator).q for parameterization in ("natural", "moment")
        ]
        pair = [dense.as_dense(q) for q in pair]
        return max(np.max(np.abs(pair[0].mean - pair[1].mean)), np.max(np.abs(pair[0].covariance - pair[1].covariance)))

    site = estimate("two rows")(KEY, prior)
    assert difference(1e-3) > 1e-8
    assert difference(1e-3) / difference(5e-4) == pytest.approx(4, rel=0.02)


# ---------------------------------------------------------------------- laws between families
def stream(rule, prior, form, size, count=2):
    """Several blocks, each the next one's prior."""
    for _ in range(count):
        found = take(rule, prior, estimate(form, size))
        assert bool(found.ok)
        prior = found.q
    return prior


@pytest.mark.parametrize("rule, num_iters", [("bong", 1), ("blr", 3)])
@pytest.mark.parametrize("form", ["two rows", "many rows"])
def test_low_rank_of_full_rank_is_the_full_family(rule, num_iters, form):
    prior = gaussian("low-rank", rank=P)
    rule = Rule(rule, "natural", RATES[rule], num_iters)
    found = stream(rule, prior, form, P)
    assert_same(found, dense.as_dense(stream(rule, prior.as_full(), form, P)), rtol=1e-9)


@pytest.mark.parametrize("parameterization", ["natural", "moment"])
@pytest.mark.parametrize("rule", RATES)
def test_with_one_parameter_the_diagonal_family_is_the_full_one(rule, parameterization):
    prior = DiagonalGaussian(jnp.array([0.4]), jnp.array([1.3]))
    rule = Rule(rule, parameterization, RATES[rule], 2 if rule in ("blr", "bbb") else 1)
    expected = stream(rule, FullGaussian(prior.mean, jnp.sqrt(prior.variance)[None]), "two rows, weighted", 1)
    assert_same(stream(rule, prior, "two rows, weighted", 1), dense.as_dense(expected), rtol=1e-12)


@pytest.mark.parametrize("projection", [None, "exclusive", "inclusive"])
def test_with_one_parameter_projections_and_full_updates_are_the_same(projection):
    prior = DiagonalGaussian(jnp.array([0.4]), jnp.array([1.3]))
    found = stream(Rule("bong", projection=projection), prior, "two rows", 1)
    full = stream(Rule("bong"), FullGaussian(prior.mean, jnp.sqrt(prior.variance)[None]), "two rows", 1)
    assert_same(found, dense.as_dense(full), rtol=1e-13)


@pytest.mark.parametrize("projection", ["exclusive", "inclusive"])
@pytest.mark.parametrize("form", ["two rows", "two rows, weighted", "many rows"])
def test_projections_keep_the_exact_updates_mean_and_precisions_or_variances(form, projection):
    """The diagonal extended Kalman filters (diagonal EKF paper, equations 4-7, 12 and 13)."""
    prior = gaussian("diagonal")
    found = take(Rule("bong", projection=projection), prior, estimate(form)).q
    start = dense.as_dense(prior)
    exact = dense.bong_full_natural(start, *dense_estimate(form)(start.mean, start.covariance), 1.0, start)
    kept = np.diag(exact.covariance) if projection == "inclusive" else 1 / np.diag(np.linalg.inv(exact.covariance))
    np.testing.assert_allclose(found.mean, exact.mean, rtol=1e-11)
    np.testing.assert_allclose(found.variance, kept, rtol=1e-11)


@pytest.mark.parametrize("projection", ["exclusive", "inclusive"])
def test_projections_minimize_their_divergence_from_the_exact_update(projection):
    prior = gaussian("diagonal")
    found = take(Rule("bong", projection=projection), prior, estimate("two rows")).q
    start = dense.as_dense(prior)
    exact = dense.bong_full_natural(start, *dense_estimate("two rows")(start.mean, start.covariance), 1.0, start)
    target = FullGaussian(jnp.asarray(exact.mean), jnp.linalg.cholesky(jnp.asarray(exact.covariance)))

    def kl_divergence(mean, log_variance):
        q = DiagonalGaussian(mean, jnp.exp(log_variance)).as_full()
        return q.kl_divergence(target) if projection == "exclusive" else target.kl_divergence(q)

    slopes = jax.grad(kl_divergence, (0, 1))(found.mean, jnp.log(found.variance))
    np.testing.assert_allclose(slopes, np.zeros((2, P)), atol=1e-10)


@pytest.mark.parametrize("rule, num_iters", [("bong", 1), ("blr", 3)])
def test_slang_moves_the_mean_by_the_precision_that_it_keeps(rule, num_iters):
    """Mishkin et al. (2018), algorithm 1: U and d first, then mu by the inverse of U U^T + d."""
    rate, prior = RATES[rule], gaussian("low-rank")
    found = take(Rule(rule, "natural", rate, num_iters, "first"), prior, estimate("two rows")).q
    start = q = dense.as_dense(prior)
    for _ in range(num_iters):
        g, G = dense_estimate("two rows")(q.mean, q.covariance)
        kept = dense.blr_low_rank(q, g, G, rate, start)
        pull = g + start.precision @ (start.mean - q.mean)
        q = kept._replace(mean=q.mean + rate * np.linalg.solve(kept.precision, pull))
    assert_same(found, q)


@pytest.mark.parametrize("count", [3, 400])
def test_low_rank_steps_of_more_rows_than_parameters_are_those_of_their_sum(count):
    """Their cost does not grow with the cube of the rows: four hundred took a fifth of a second."""
    rows = np.random.default_rng(2).normal(size=(count, P))
    prior, gradient = gaussian("low-rank"), jnp.ones(P)
    found = prior.natural_step(ExpectedDerivatives(gradient, jnp.asarray(rows)), 1.0, "natural")
    start = dense.as_dense(prior)
    expected = dense.bong_low_rank(start, np.ones(P), -rows.T @ rows, 1.0, start)
    assert_same(found, expected, rtol=1e-9)


# ---------------------------------------------------------------------- blocks
WITHIN = np.kron(np.eye(2), np.ones((3, 3)))[1:, 1:]  # ones within the blocks of two and three entries


@pytest.mark.parametrize(
    "rule, parameterization",
    [("bong", "natural"), ("blr", "natural"), ("bong", "moment"), ("blr", "moment"), ("bbb", "moment")],
)
def test_blocks_take_the_full_familys_step_with_their_own_part_of_g_and_of_the_hessian(rule, parameterization):
    """Of a block-diagonal Gaussian the gradients in natural or mean parameters are the blocks of the full family's."""
    form, num_iters = "two rows, weighted", 3 if rule in ("blr", "bbb") else 1
    prior = gaussian("block-diagonal")
    found = take(Rule(rule, parameterization, RATES[rule], num_iters), prior, estimate(form)).q
    start, at = dense.as_dense(prior), dense_estimate(form)

    def within(mean, covariance):
        g, G = at(mean, covariance)
        return g, G * WITHIN

    q = start
    for _ in range(num_iters):
        q = dense.STEPS[rule, "full", parameterization](q, *within(q.mean, q.covariance), RATES[rule], start)
        q = q._replace(covariance=q.covariance * WITHIN)
    assert_same(found, q)


@pytest.mark.parametrize("projection", ["exclusive", "inclusive"])
@pytest.mark.parametrize("form", ["two rows", "two rows, weighted", "many rows"])
def test_block_projections_keep_the_exact_updates_mean_and_blocks(form, projection):
    """Diagonal EKF paper, equations 10 to 14: S couples the blocks."""
    prior = gaussian("block-diagonal")
    found = take(Rule("bong", projection=projection), prior, estimate(form)).q
    start = dense.as_dense(prior)
    exact = dense.bong_full_natural(start, *dense_estimate(form)(start.mean, start.covariance), 1.0, start)
    if projection == "inclusive":
        expected = exact.covariance * WITHIN
    else:
        expected = np.linalg.inv(np.linalg.inv(exact.covariance) * WITHIN)
    np.testing.assert_allclose(found.mean, exact.mean, rtol=1e-10)
    np.testing.assert_allclose(found.covariance(), expected, rtol=1e-9, atol=1e-12)


def test_inclusive_block_projections_are_the_decoupled_filters_equations():
    """Equation 12 for each block: S = R + sum_j H_j Sigma_jj H_j^T."""
    rng = np.random.default_rng(3)
    F, R = rng.normal(size=(2, P)), np.diag([0.5, 2.0])
    prior = gaussian("block-diagonal")
    site = ExpectedDerivatives(jnp.asarray(F.T @ np.ones(2)), jnp.asarray(np.sqrt(np.linalg.inv(R)) @ F))
    found = take(Rule("bong", projection="inclusive"), prior, lambda key, q: site).q
    blocks = [slice(0, 2), slice(2, P)]
    covariances = [np.asarray(root) @ np.asarray(root).T for root in prior.roots]
    S = R + sum(F[:, b] @ cov @ F[:, b].T for b, cov in zip(blocks, covariances))
    for b, cov, root in zip(blocks, covariances, found.roots):
        expected = cov - cov @ F[:, b].T @ np.linalg.inv(S) @ F[:, b] @ cov
        np.testing.assert_allclose(root @ root.T, expected, rtol=1e-9, atol=1e-12)


# ---------------------------------------------------------------------- what is a Gaussian
@pytest.mark.parametrize("parameterization", ["natural", "moment"])
@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("rule", RATES)
def test_natural_steps_that_would_leave_no_gaussian_lose_their_negative_curvature(rule, family, parameterization):
    """Precisions fall by it beyond zero; covariances rise by it, which needs no help."""
    prior, rng = gaussian(family), np.random.default_rng(4)
    factor, weight, gradient = rng.normal(size=(2, P)), np.diag([0.05, -2000.0]), 0.01 * rng.normal(size=P)
    site = ExpectedDerivatives(*map(jnp.asarray, (gradient, factor, weight)))
    found = take(Rule(rule, parameterization, RATES[rule]), prior, lambda key, q: site)
    assert bool(found.clipped) == (parameterization == "natural")
    assert bool(found.ok)
    G = -factor.T @ (np.maximum(weight, 0) if parameterization == "natural" else weight) @ factor
    start = dense.as_dense(prior)
    assert_same(found.q, dense.STEPS[rule, family, parameterization](start, gradient, G, RATES[rule], start), rtol=1e-9)


@pytest.mark.parametrize("family", ["full", "diagonal"])
@pytest.mark.parametrize("rule", RATES)
def test_a_moment_step_beyond_the_positive_definite_matrices_is_not_ok(rule, family):
    prior = gaussian(family)
    site = ExpectedDerivatives(jnp.zeros(P), 30 * jnp.eye(P))
    assert not bool(take(Rule(rule, "moment", RATES[rule]), prior, lambda key, q: site).ok)


def with_gradients(prior, q, derivatives):
    """A user's rule, which does not look whether its result is finite."""
    return dataclasses.replace(q, mean=q.mean + derivatives.gradient)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rule", ["bong", "blr", "implicit", with_gradients])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_site_of_which_one_entry_is_not_finite_is_not_ok(rule, family, value):
    prior = gaussian(family)
    site = ExpectedDerivatives(jnp.zeros(P).at[P - 1].set(value), jnp.ones((2, P)).at[:, 0].set(0.0))
    assert not bool(take(Rule(rule), prior, lambda key, q: site).ok)


@pytest.mark.parametrize("rule", ["bog", "bbb"])
def test_plain_gradients_of_low_rank_factors_need_a_random_start(rule):
    """At W = 0 the gradient in W is zero (equations 311 and 321): a diagonal precision stays one."""
    prior = LowRankGaussian(jnp.ones(P), 2.0 * jnp.ones(P), jnp.zeros((RANK, P)))
    found = stream(Rule(rule, "natural", 0.02, 1), prior, "two rows", P)
    np.testing.assert_array_equal(found.factor, 0.0)
    assert float(jnp.min(found.diagonal)) > 2.0
    begun = prior.with_random_factor(KEY, 0.01)
    np.testing.assert_allclose(np.diag(dense.as_dense(begun).precision), 2.0, rtol=1e-12)
    learned = stream(Rule(rule, "natural", 0.02, 1), begun, "two rows", P)
    assert np.linalg.norm(learned.factor - begun.factor) > 1e-4
