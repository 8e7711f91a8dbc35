"""The Gaussian families against dense matrices."""

import dataclasses

import dense_rules as dense
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.linalg import block_diag
from scipy.stats import multivariate_normal

from numpyro_rvga.core.gaussians import (
    FAMILIES,
    BlockDiagonalGaussian,
    DiagonalGaussian,
    ExpectedDerivatives,
    FullGaussian,
    LowRankGaussian,
    Transition,
    converted,
)

P, RANK, SIZES = 5, 2, (2, 1, 2)
WITHIN = block_diag(*[np.ones((n, n)) for n in SIZES])  # ones within blocks
CHARTED = [(f, c) for f in ("full", "diagonal", "block-diagonal") for c in ("natural", "moment")] + [
    ("low-rank", "natural")
]


def gaussian(family, seed=0, rank=RANK):
    rng = np.random.default_rng(seed)
    mean = jnp.asarray(rng.normal(size=P))
    if family == "full":  # the root is no Cholesky factor
        return FullGaussian(mean, jnp.asarray(rng.normal(size=(P, P))))
    if family == "diagonal":
        return DiagonalGaussian(mean, jnp.asarray(rng.uniform(0.3, 2.0, P)))
    if family == "block-diagonal":
        return BlockDiagonalGaussian(mean, tuple(jnp.asarray(np.eye(n) + 0.4 * rng.normal(size=(n, n))) for n in SIZES))
    return LowRankGaussian(mean, jnp.asarray(rng.uniform(0.5, 2.0, P)), jnp.asarray(rng.normal(size=(rank, P))))


def moments(q):
    q = dense.as_dense(q)
    return q.mean, q.covariance


def curvature(rng, form):
    """A site and its H."""
    factor = rng.normal(size=(3, P))
    if form == "factor":
        return ExpectedDerivatives(jnp.zeros(P), jnp.asarray(factor)), factor.T @ factor
    weight, diagonal = rng.normal(size=(3, 3)), rng.normal(size=P)
    weight = weight + weight.T
    site = ExpectedDerivatives(jnp.zeros(P), jnp.asarray(factor), jnp.asarray(weight), jnp.asarray(diagonal))
    return site, factor.T @ weight @ factor + np.diag(diagonal)


@pytest.fixture(params=FAMILIES)
def q(request):
    return gaussian(request.param)


# ---------------------------------------------------------------------- what is read off
def test_covariance_its_factor_and_deviations_are_those_of_the_dense_matrix(q):
    _, covariance = moments(q)
    np.testing.assert_allclose(q.covariance(), covariance, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(q.scale_tril(), np.linalg.cholesky(covariance), rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(q.deviation(), np.sqrt(np.diag(covariance)), rtol=1e-12)
    np.testing.assert_allclose(moments(q.as_full())[1], covariance, rtol=1e-11, atol=1e-12)
    np.testing.assert_array_equal(q.as_full().mean, q.mean)


@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
def test_log_density_is_scipys(q, shape):
    theta = np.random.default_rng(1).normal(size=(*shape, P))
    found = q.log_prob(jnp.asarray(theta))
    assert found.shape == shape
    np.testing.assert_allclose(found, multivariate_normal(*moments(q)).logpdf(theta), rtol=1e-11)


@pytest.mark.parametrize("shape", [(1,), (4, 3)])
def test_spread_is_a_root_of_the_predictors_covariance(q, shape):
    design = np.random.default_rng(1).normal(size=(*shape, P))
    spread = np.asarray(q.predictor_root(jnp.asarray(design)))
    assert spread.shape[:-1] == shape
    found = np.einsum("...ck,...dk->...cd", spread, spread)
    np.testing.assert_allclose(found, design @ moments(q)[1] @ np.swapaxes(design, -1, -2), rtol=1e-11, atol=1e-12)


def test_draws_are_an_affine_map_of_standard_normals_with_the_covariance(q):
    """The map's matrix A is read off unit vectors: exactly, A A^T is the covariance."""
    units = jnp.eye(q.noise_size)
    columns = np.asarray(q.transform(units) - q.transform(jnp.zeros(q.noise_size)))
    np.testing.assert_allclose(columns.T @ columns, moments(q)[1], rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(q.transform(jnp.zeros((2, 3, q.noise_size))), np.broadcast_to(q.mean, (2, 3, P)))


def test_draws_have_the_mean_and_covariance(q):
    mean, covariance = moments(q)
    count = 100_000
    draws = np.asarray(q.transform(jax.random.normal(jax.random.key(0), (count, q.noise_size))))
    deviation = np.sqrt(np.diag(covariance))
    assert np.max(np.abs(draws.mean(0) - mean) / deviation) < 5 / np.sqrt(count)
    assert np.max(np.abs(np.cov(draws.T) - covariance) / np.outer(deviation, deviation)) < 7 / np.sqrt(count)


@pytest.mark.parametrize("family, form", [("full", "factor"), ("full", "all"), ("diagonal", "factor"),
                                          ("diagonal", "all"), ("low-rank", "factor")])  # fmt: skip
def test_mean_curvature_is_a_trace(family, form):
    q = gaussian(family)
    site, H = curvature(np.random.default_rng(1), form)
    np.testing.assert_allclose(q.expected_quadratic(site), np.trace(H @ moments(q)[1]), rtol=1e-11)


@pytest.mark.parametrize("form", ["factor", "all"])
def test_a_sites_parts_are_those_of_its_dense_matrix(form):
    rng = np.random.default_rng(1)
    site, H = curvature(rng, form)
    spread = rng.normal(size=(P, 4))
    np.testing.assert_allclose(site.curvature_diagonal(), np.diag(H), rtol=1e-12)
    np.testing.assert_allclose(site.gram(jnp.asarray(spread)), spread.T @ H @ spread, rtol=1e-11, atol=1e-11)
    positive = site.clipped()
    if form == "factor":
        np.testing.assert_array_equal(positive.factor, site.factor)
        return
    np.testing.assert_array_equal(positive.diagonal, np.maximum(site.diagonal, 0))
    values, vectors = np.linalg.eigh(np.asarray(site.weight))
    np.testing.assert_allclose(positive.weight, (vectors * np.maximum(values, 0)) @ vectors.T, atol=1e-9)


# ---------------------------------------------------------------------- divergence, coordinates
def kl(a, b):
    inverse, shift = np.linalg.inv(b.covariance), b.mean - a.mean
    log_det = np.linalg.slogdet(b.covariance)[1] - np.linalg.slogdet(a.covariance)[1]
    return 0.5 * (np.trace(inverse @ a.covariance) + shift @ inverse @ shift - len(shift) + log_det)


def test_divergence_is_the_dense_formula(q):
    other = gaussian(next(name for name, family in FAMILIES.items() if isinstance(q, family)), seed=3)
    np.testing.assert_allclose(q.kl_divergence(other), kl(dense.as_dense(q), dense.as_dense(other)), rtol=1e-10)
    np.testing.assert_allclose(q.kl_divergence(q), 0.0, atol=1e-12)


@pytest.mark.parametrize("family, parameterization", [*CHARTED, ("diagonal", "softplus")])
def test_coordinates_are_the_papers_and_lead_back(family, parameterization):
    q = gaussian(family)
    mean, covariance = moments(q)
    found = q.coordinates(parameterization)
    precision = np.linalg.inv(covariance)
    if family == "block-diagonal":
        found = [jnp.concatenate([block[0] for block in found]), block_diag(*[block[1] for block in found])]
        expected = (mean, covariance) if parameterization == "moment" else (precision @ mean, -0.5 * precision)
    elif family == "low-rank":
        expected = (mean, q.diagonal, q.factor)
    elif parameterization == "softplus":
        expected = (mean, np.log(np.expm1(np.sqrt(np.diag(covariance)))))
    elif parameterization == "moment":
        expected = (mean, covariance if family == "full" else np.diag(covariance))
    else:
        expected = (precision @ mean, -0.5 * precision if family == "full" else -0.5 * np.diag(precision))
    for x, y in zip(found, expected):
        np.testing.assert_allclose(x, y, rtol=1e-9, atol=1e-10)
    again = type(q).from_coordinates(q.coordinates(parameterization), parameterization)
    np.testing.assert_allclose(again.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(again.covariance(), covariance, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("family, parameterization", CHARTED)
def test_the_divergences_gradient_is_that_of_finite_differences_and_zero_at_the_prior(family, parameterization):
    """In every coordinate of the parameterization, the dense formula differenced."""
    prior, q = gaussian(family, seed=4), gaussian(family)
    flat, unravel = jax.flatten_util.ravel_pytree(q.coordinates(parameterization))
    build = jax.jit(lambda c: type(q).from_coordinates(unravel(c), parameterization))
    gradient = jax.jit(jax.grad(lambda c: build(c).kl_divergence(prior)))
    differences, step = [], 1e-5
    for unit in np.eye(len(flat)):
        ahead, behind = (kl(dense.as_dense(build(flat + s * unit)), dense.as_dense(prior)) for s in (step, -step))
        differences.append((ahead - behind) / (2 * step))
    np.testing.assert_allclose(gradient(flat), differences, rtol=1e-5, atol=1e-6)
    at_the_prior = gradient(jax.flatten_util.ravel_pytree(prior.coordinates(parameterization))[0])
    np.testing.assert_allclose(at_the_prior, 0.0, atol=1e-10)


def test_a_gaussian_is_valid_and_its_broken_forms_are_not(q):
    assert bool(q.is_valid())
    leaves, structure = jax.tree.flatten(q)
    for i, value in enumerate(leaves):
        broken = [*leaves[:i], value.at[(0,) * value.ndim].set(jnp.nan), *leaves[i + 1 :]]
        assert not bool(jax.tree.unflatten(structure, broken).is_valid())
    for name in {"variance", "diagonal"} & set(vars(q)):
        for bad in (0.0, -1.0):
            assert not bool(type(q)(**{**vars(q), name: vars(q)[name].at[1].set(bad)}).is_valid())


BROKEN = [
    ("full", "natural", -1e3),
    ("full", "moment", 1e3),
    ("diagonal", "natural", -1e3),
    ("diagonal", "moment", 1e3),
    *((family, "natural", value) for family in FAMILIES for value in (np.nan, np.inf)),
]


@pytest.mark.parametrize("family, parameterization, weight", BROKEN)
def test_a_step_that_leaves_no_gaussian_leaves_a_mean_that_is_not_a_number(family, parameterization, weight):
    """Of weights that are too negative for a precision, or too large for a covariance, or not finite."""
    q, row = gaussian(family), np.ones((1, P))
    if np.isfinite(weight):
        site = ExpectedDerivatives(jnp.zeros(P), jnp.asarray(row), jnp.full((1, 1), weight))
    else:
        site = ExpectedDerivatives(jnp.zeros(P), jnp.asarray(row).at[0, 2].set(weight))
    assert not np.isfinite(q.natural_step(site, 1.0, parameterization).mean).any()
    fine = q.natural_step(ExpectedDerivatives(jnp.ones(P), jnp.asarray(0.1 * row)), 1.0, parameterization)
    assert bool(fine.is_valid()) and np.isfinite(fine.mean).all()


# ---------------------------------------------------------------------- dynamics
SCALES = np.linspace(0.2, 1.1, P)
TRANSITIONS = {
    "random walk": (np.ones(P), np.zeros(P), np.full(P, 0.3)),
    "random walk of some": (np.ones(P), np.zeros(P), np.array([0.0, 0.5, 0.0, 0.1, 0.0])),
    "Ornstein-Uhlenbeck": (np.full(P, 0.9), np.full(P, 0.1), np.sqrt(1 - 0.81) * np.linspace(0.5, 2, P)),
    "start afresh": (np.zeros(P), np.arange(P) / 3.0, np.linspace(0.5, 2, P)),
    "entry by entry": (SCALES, np.arange(P) / 7.0, SCALES[::-1].copy()),
    "standing still": (np.ones(P), np.zeros(P), np.zeros(P)),
}


def dense_transition(matrix, offset, noise):
    matrix = matrix if matrix.ndim == 2 else np.diag(matrix)
    return matrix, offset, noise @ noise.T if noise.ndim == 2 else np.diag(noise**2)


@pytest.mark.parametrize("name", TRANSITIONS)
def test_entrywise_dynamics_are_exact_in_every_family(q, name):
    matrix, offset, noise = dense_transition(*TRANSITIONS[name])
    mean, covariance = moments(q)
    moved = q.predict(Transition(*map(jnp.asarray, TRANSITIONS[name])))
    assert type(moved) is type(q)
    np.testing.assert_allclose(moved.mean, matrix @ mean + offset, rtol=1e-12)
    np.testing.assert_allclose(moments(moved)[1], matrix @ covariance @ matrix.T + noise, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("which", ["matrix", "noise", "both"])
def test_general_dynamics_are_exact_up_to_the_familys_projection(q, which):
    """Diagonal: the variances. Blocks: the covariance's. Low rank: the precision's diagonal, and what rank allows."""
    rng = np.random.default_rng(5)
    matrix = SCALES if which == "noise" else np.eye(P) + 0.3 * rng.normal(size=(P, P))
    noise = SCALES if which == "matrix" else 0.4 * rng.normal(size=(P, 3))
    parts = matrix, rng.normal(size=P), noise
    A, offset, Q = dense_transition(*parts)
    mean, covariance = moments(q)
    expected = A @ covariance @ A.T + Q
    moved = q.predict(Transition(*map(jnp.asarray, parts)))
    np.testing.assert_allclose(moved.mean, A @ mean + offset, rtol=1e-11)
    if isinstance(q, FullGaussian):
        np.testing.assert_allclose(moments(moved)[1], expected, rtol=1e-11, atol=1e-12)
    elif isinstance(q, DiagonalGaussian):
        np.testing.assert_allclose(moved.variance, np.diag(expected), rtol=1e-11)
    elif isinstance(q, BlockDiagonalGaussian):
        np.testing.assert_allclose(moments(moved)[1], expected * WITHIN, rtol=1e-11, atol=1e-12)
    else:
        assert moved.factor.shape == q.factor.shape
        precision = np.linalg.inv(expected)
        found = dense.as_dense(moved).precision
        np.testing.assert_allclose(np.diag(found), np.diag(precision), rtol=1e-9)
        assert bool(moved.is_valid())
        error = np.linalg.norm(found - precision)
        assert error < np.linalg.norm(np.diag(np.diag(precision)) - precision), "better than no factor at all"


@pytest.mark.parametrize("rank", [P - 1, P])
def test_low_rank_of_almost_full_rank_holds_any_dynamics(rank):
    rng = np.random.default_rng(6)
    q = gaussian("low-rank", rank=rank)
    A, root = np.eye(P) + 0.3 * rng.normal(size=(P, P)), 0.4 * rng.normal(size=(P, P))
    moved = q.predict(Transition(jnp.asarray(A), jnp.zeros(P), jnp.asarray(root)))
    np.testing.assert_allclose(moments(moved)[1], A @ moments(q)[1] @ A.T + root @ root.T, rtol=1e-8, atol=1e-9)


# ---------------------------------------------------------------------- from family to family
@pytest.mark.parametrize("family", FAMILIES)
def test_conversion_keeps_mean_and_precisions_and_what_the_family_can_hold(q, family):
    found = converted(q, family, 3, SIZES)
    assert isinstance(found, FAMILIES[family])
    np.testing.assert_array_equal(found.mean, q.mean)
    before, after = np.linalg.inv(moments(q)[1]), np.linalg.inv(moments(found)[1])
    np.testing.assert_allclose(np.diag(after), np.diag(before), rtol=1e-9)
    if family == "full" or isinstance(q, DiagonalGaussian | FAMILIES[family]):  # rank two fits into rank three
        np.testing.assert_allclose(after, before, rtol=1e-8, atol=1e-9)
    if family == "low-rank":
        assert found.factor.shape == (3, P)
    if family == "block-diagonal":
        np.testing.assert_allclose(after, before * WITHIN, rtol=1e-9, atol=1e-10)


def test_a_smaller_rank_keeps_the_leading_directions():
    q = gaussian("low-rank", rank=4)
    found = dense.as_dense(converted(q, "low-rank", 2))
    start = dense.as_dense(q)
    expected = dense.projected(start.mean, start.diagonal, start.factor, 2)
    np.testing.assert_allclose(found.diagonal, expected.diagonal, rtol=1e-11)
    np.testing.assert_allclose(found.factor @ found.factor.T, expected.factor @ expected.factor.T, atol=1e-11)


@pytest.mark.parametrize("rank", [P - 1, P])
def test_low_rank_of_almost_full_rank_holds_any_full_gaussian(rank):
    q = gaussian("full")
    found = converted(q, "low-rank", rank)
    assert bool(found.is_valid())
    np.testing.assert_allclose(moments(found)[1], moments(q)[1], rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("coupling", [0.0, 0.1, -0.9])
def test_a_raised_gaussian_is_pulled_by_its_covariance_and_has_what_its_family_holds_of_the_precision(q, coupling):
    """Entries 3 and 4 are one block, entry 1 is of another."""
    places, pull = np.array([1, 3, 4]), np.array([0.7, -0.4, 0.2])
    more = np.array([[0.5, coupling, -coupling], [coupling, 2.0, coupling], [-coupling, coupling, -0.1]])
    found = q.with_information(places, jnp.asarray(pull), jnp.asarray(more))
    mean, covariance = moments(q)
    np.testing.assert_allclose(found.mean, mean + covariance[:, places] @ pull, rtol=1e-11)
    precision = np.linalg.inv(covariance)
    precision[np.ix_(places, places)] += more
    after = np.linalg.inv(moments(found)[1])
    np.testing.assert_allclose(np.diag(after), np.diag(precision), rtol=1e-9)
    if isinstance(q, DiagonalGaussian):
        precision = np.diag(np.diag(precision))
    elif isinstance(q, BlockDiagonalGaussian):
        precision = precision * WITHIN
    elif isinstance(q, LowRankGaussian) and coupling:  # better than its factor alone
        start = dense.as_dense(q).precision
        assert np.linalg.norm(after - precision) < np.linalg.norm(
            start - np.diag(np.diag(start - precision)) - precision
        )
        return
    np.testing.assert_allclose(after, precision, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("rank", [P - 1, P])
def test_low_rank_of_almost_full_rank_holds_any_information(rank):
    q = gaussian("low-rank", rank=rank)
    more = np.random.default_rng(7).normal(size=(P, P)) * 0.1
    found = q.with_information(np.arange(P), jnp.zeros(P), jnp.asarray(more + more.T))
    np.testing.assert_allclose(np.linalg.inv(moments(found)[1]), dense.as_dense(q).precision + more + more.T, rtol=1e-9)


@pytest.mark.parametrize("family", ["diagonal", "block-diagonal", "low-rank"])
def test_parts_are_joined_by_their_natural_parameters(family):
    """Exactly, where the rank holds the sum: prior + sum of (part - prior)."""
    parts = [gaussian(family, seed=i, rank=P) for i in (1, 2)]
    prior = converted(DiagonalGaussian(jnp.ones(P), jnp.full(P, 20.0)), family, P, SIZES)
    if family == "low-rank":
        prior = dataclasses.replace(prior, factor=0.1 * gaussian(family, seed=3, rank=P).factor)
    found = prior.joined(parts)

    def natural(q):
        mean, covariance = moments(q)
        return np.linalg.solve(covariance, mean), np.linalg.inv(covariance)

    expected = [sum(natural(q)[i] for q in parts) - natural(prior)[i] for i in (0, 1)]
    for x, y in zip(natural(found), expected):
        np.testing.assert_allclose(x, y, rtol=1e-8, atol=1e-9)
