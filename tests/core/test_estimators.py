"""Gradients and curvatures of rows against quadrature, and the two linearizations that must agree (Proposition 4.2)."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.expectations import by_nodes as ex
from numpyro_rvga.core.gaussians import DiagonalGaussian, FullGaussian, LowRankGaussian
from numpyro_rvga.core.updates.estimators import Observation, make_estimator
from numpyro_rvga.core.updates.factors import Factors, Kind, without_errors
from numpyro_rvga.core.updates.rules import Rule, update

KEY = jax.random.key(3)
POINTS, WEIGHTS = np.polynomial.hermite_e.hermegauss(40)
HERMITE = POINTS[:, None], WEIGHTS / WEIGHTS.sum()
P = 2
FAMILIES = {
    "full": FullGaussian(jnp.array([0.3, -0.5]), jnp.array([[0.8, 0.0], [-0.5, 0.6]])),
    "diagonal": DiagonalGaussian(jnp.array([0.3, -0.5]), jnp.array([0.7, 0.4])),
    "low-rank": LowRankGaussian(jnp.array([0.3, -0.5]), jnp.array([1.2, 2.0]), jnp.array([[0.9, -0.7]])),
}


class Sites(NamedTuple):
    """Observed sites of the same rows, as densities of their predictors.

    ``draws`` map a key and the predictor to an outcome.
    """

    densities: tuple
    predictors: tuple
    concave: tuple
    draws: tuple = ()

    def observe(self, rows, weights):
        """:param rows: pytree of (n, ...) arrays. :param weights: (n,)."""
        kinds = []
        for density, concave in zip(self.densities, self.concave):

            def moments(mean, covariance, known, density=density):
                row, weight = known
                bound = lambda u: density(u, row)  # noqa: E731
                found = ex.from_nodes(bound, mean, covariance, *HERMITE, 2)
                return tuple(weight * x for x in found)

            def plugin(mean, covariance, known, density=density):
                row, weight = known
                return tuple(weight * x for x in ex.linearized(lambda u: density(u, row), mean, covariance))

            kinds.append(Kind(without_errors(jax.vmap(moments)), plugin, moments, concave))

        def linearize(theta):
            def one(f):
                offset = jax.vmap(lambda row: f(theta, row))(rows)
                design = jax.vmap(lambda row: jax.jacfwd(f)(theta, row))(rows)
                return Factors(offset, design, (rows, weights))

            return tuple(map(one, self.predictors))

        return Observation(tuple(kinds), linearize, rows, self.log_lik, weights, self.drawn_log_lik)

    def log_lik(self, theta, row):
        return sum(density(f(theta, row), row) for density, f in zip(self.densities, self.predictors))

    def drawn_log_lik(self, theta, row, key):
        total = 0.0
        for i, (density, f, draw) in enumerate(zip(self.densities, self.predictors, self.draws, strict=True)):
            u = f(theta, row)
            y = jax.lax.stop_gradient(draw(jax.random.fold_in(key, i), u[0]))
            total = total + density(u, row | {"y": y})
        return total


def bernoulli(u, row):
    return row["y"] * u[0] - jax.nn.softplus(u[0])


def poisson(u, row):
    return row["y"] * u[0] - jnp.exp(u[0])


def student(u, row):
    return -2.5 * jnp.log1p((row["y"] - u[0]) ** 2 / 4)


def affine(theta, row):
    return (row["x"] @ theta)[None]


def draw_bernoulli(key, u):
    return jax.random.bernoulli(key, jax.nn.sigmoid(u)).astype(u.dtype)


def draw_student(key, u):
    return u + jax.random.t(key, 4.0)


LOGISTIC = Sites((bernoulli,), (affine,), (True,), (draw_bernoulli,))
ROBUST = Sites((student,), (affine,), (False,), (draw_student,))
TWO = Sites(
    (bernoulli, student),
    (affine, lambda theta, row: (0.5 * row["x"] @ theta)[None]),
    (True, False),
    (draw_bernoulli, draw_student),
)
ROWS = {"x": jnp.array([[1.0, -0.8], [0.4, 1.5], [-1.2, 0.3]]), "y": jnp.array([1.0, 0.0, 1.0])}
ONE_ROW = {name: array[:1] for name, array in ROWS.items()}


def exact(sites, rows, q, weights=None):
    """E[grad], E[hess] and the sum of E[grad grad^T] over rows, by Gauss-Hermite quadrature over theta."""
    x, w = POINTS, HERMITE[1]
    z = np.stack([a.ravel() for a in np.meshgrid(x, x, indexing="ij")], -1)
    thetas = jnp.asarray(np.asarray(q.mean) + z @ np.linalg.cholesky(np.asarray(q.covariance())).T)
    nodes = np.outer(w, w).ravel()
    count = len(rows["y"])
    weights = np.ones(count) if weights is None else np.asarray(weights)
    gradients = np.asarray(jax.jit(jax.vmap(jax.vmap(jax.grad(sites.log_lik), (None, 0)), (0, None)))(thetas, rows))
    hessians = np.asarray(jax.jit(jax.vmap(jax.vmap(jax.hessian(sites.log_lik), (None, 0)), (0, None)))(thetas, rows))
    return (
        np.einsum("k,n,knp->p", nodes, weights, gradients),
        np.einsum("k,n,knpq->pq", nodes, weights, hessians),
        np.einsum("k,n,knp,knq->pq", nodes, weights, gradients, gradients),
    )


def curvature(site):
    """H, densely."""
    factor = np.asarray(site.factor)
    found = factor.T @ (factor if site.weight is None else np.asarray(site.weight) @ factor)
    return found if site.diagonal is None else found + np.diag(np.asarray(site.diagonal))


@functools.cache
def compiled(hessian, sites, num_samples):
    estimator = make_estimator(hessian, num_samples)
    return jax.jit(lambda key, q, rows, weights: estimator(key, q, sites.observe(rows, weights)))


def estimated(hessian, q, sites, rows, num_samples=1, weights=None, key=KEY):
    weights = jnp.ones(len(jax.tree.leaves(rows)[0])) if weights is None else jnp.asarray(weights)
    return compiled(hessian, sites, num_samples)(key, q, rows, weights)


# ---------------------------------------------------------------------- draws of theta
COUNT = 20_000


@pytest.mark.parametrize("sites, rows", [(LOGISTIC, ONE_ROW), (TWO, ROWS)], ids=["one row", "rows and sites"])
@pytest.mark.parametrize("family", ["full", "diagonal"])
def test_sampled_hessians_converge_to_the_expected_one(sites, rows, family):
    q = FAMILIES[family]
    gradient, hessian, _ = exact(sites, rows, q)
    found = estimated("mc-hess", q, sites, rows, COUNT)
    np.testing.assert_allclose(found.gradient, gradient, atol=6 / np.sqrt(COUNT))
    if family == "diagonal":
        np.testing.assert_allclose(found.curvature_diagonal(), -np.diag(hessian), atol=15 / np.sqrt(COUNT))
    else:
        np.testing.assert_allclose(curvature(found), -hessian, atol=10 / np.sqrt(COUNT))


@pytest.mark.parametrize("sites, rows", [(LOGISTIC, ONE_ROW), (TWO, ROWS)], ids=["one row", "rows and sites"])
@pytest.mark.parametrize("family", FAMILIES)
def test_sampled_gradients_squared_converge_to_each_rows_expected_square(sites, rows, family):
    q = FAMILIES[family]
    gradient, _, square = exact(sites, rows, q)
    found = estimated("mc-ef", q, sites, rows, COUNT)
    assert found.factor.shape == (COUNT * len(rows["y"]), P)
    assert not found.may_be_indefinite
    np.testing.assert_allclose(found.gradient, gradient, atol=6 / np.sqrt(COUNT))
    np.testing.assert_allclose(curvature(found), square, atol=10 / np.sqrt(COUNT))


@pytest.mark.parametrize("family", FAMILIES)
def test_squares_at_drawn_outcomes_converge_to_the_fisher_information(family):
    """Section 4.5. Of a logit it is p (1 - p), of the location of a Student's t of nu degrees (nu + 1) / (nu + 3)."""
    q, x = FAMILIES[family], np.asarray(ROWS["x"])
    gradient, _, square = exact(TWO, ROWS, q)
    mean, deviation = x @ np.asarray(q.mean), np.sqrt(np.einsum("np,pq,nq->n", x, np.asarray(q.covariance()), x))
    p = 1 / (1 + np.exp(-(mean + np.outer(POINTS, deviation))))
    expected = (x * (HERMITE[1] @ (p * (1 - p)) + 0.25 * 5 / 7)[:, None]).T @ x
    found = estimated("mc-fisher", q, TWO, ROWS, COUNT)
    assert not found.may_be_indefinite
    np.testing.assert_allclose(found.gradient, gradient, atol=6 / np.sqrt(COUNT))
    np.testing.assert_allclose(curvature(found), expected, atol=10 / np.sqrt(COUNT))
    assert np.max(np.abs(square - expected)) > 40 / np.sqrt(COUNT), "the observed outcomes' squares are others"


@pytest.mark.parametrize("num_samples", [1, 5])
def test_the_empirical_fishers_factor_holds_the_gradients_whose_mean_is_the_gradient(num_samples):
    """Equation 26."""
    found = estimated("mc-ef", FAMILIES["full"], LOGISTIC, ONE_ROW, num_samples)
    np.testing.assert_allclose(found.factor.sum(axis=0) / np.sqrt(num_samples), found.gradient, rtol=1e-12)
    x = np.asarray(ONE_ROW["x"][0])
    residual = np.asarray(found.factor) @ x / (x @ x) * np.sqrt(num_samples)
    np.testing.assert_allclose(found.factor * np.sqrt(num_samples), np.outer(residual, x), atol=1e-12)
    assert np.all((residual > 0) & (residual < 1)), "each is y - p, at a draw of its own"
    assert len(np.unique(residual)) == num_samples


@pytest.mark.parametrize("coupled", [False, True])
def test_hutchinsons_diagonal_is_exact_for_diagonal_hessians_and_unbiased_for_others(coupled):
    A = np.array([[1.5, 0.8 if coupled else 0.0], [0.8 if coupled else 0.0, 0.7]])
    quadratic = lambda theta, row: -0.5 * theta @ A @ theta * row["y"]  # noqa: E731
    observation = Observation((), lambda theta: (), {"y": jnp.ones(1)}, quadratic, jnp.ones(1))
    q = FAMILIES["diagonal"]
    single, many = (make_estimator("mc-hess", count)(KEY, q, observation) for count in (1, COUNT))
    np.testing.assert_allclose(many.diagonal, np.diag(A), atol=4 * 0.8 / np.sqrt(COUNT) if coupled else 1e-12)
    error = np.abs(np.asarray(single.diagonal) - np.diag(A))
    np.testing.assert_allclose(error, 0.8 if coupled else 0.0, atol=1e-12)


@pytest.mark.parametrize("hessian", ["mc-hess", "mc-ef", "mc-fisher"])
def test_draws_follow_the_key(hessian):
    q = FAMILIES["full"]
    first, again = (estimated(hessian, q, LOGISTIC, ROWS, 4) for _ in range(2))
    other = estimated(hessian, q, LOGISTIC, ROWS, 4, key=jax.random.key(4))
    jax.tree.map(np.testing.assert_array_equal, first, again)
    assert np.max(np.abs(np.asarray(first.gradient - other.gradient))) > 1e-3
    assert np.max(np.abs(curvature(first) - curvature(other))) > 1e-3


# ---------------------------------------------------------------------- at the mean
def network(theta, row, outputs):
    """Not linear in theta, whose first entries are the first layer's."""
    hidden = jnp.tanh(theta[:4].reshape(2, 2) @ row["x"])
    return theta[4 : 4 + 2 * outputs].reshape(outputs, 2) @ hidden


NOISE = np.array([[1.0, 0.3, 0.0], [0.3, 0.8, -0.2], [0.0, -0.2, 0.5]])


def vector_gaussian(u, row):
    residual = row["y"] - u
    return -0.5 * residual @ jnp.asarray(np.linalg.inv(NOISE)) @ residual


def softmax(u, row):
    return jax.nn.log_softmax(u)[row["y"]]


EXPONENTIAL_FAMILIES = {
    # density, number of predictors, y, mean function, covariance at the mean, sufficient statistic
    "softmax": (softmax, 10, 3, jax.nn.softmax, lambda h: np.diag(h) - np.outer(h, h), lambda y: np.eye(10)[y]),
    "Poisson": (poisson, 1, 4.0, jnp.exp, np.diag, np.atleast_1d),
    "Bernoulli": (bernoulli, 1, 1.0, jax.nn.sigmoid, lambda h: np.diag(h * (1 - h)), np.atleast_1d),
    "vector Gaussian": (vector_gaussian, 3, np.array([0.5, -1.0, 2.0]), lambda u: u, lambda h: NOISE, np.asarray),
}


@pytest.mark.parametrize(
    "name, concave",
    [("softmax", True), ("softmax", False), ("Poisson", True), ("Bernoulli", False), ("vector Gaussian", False)],
)
def test_linearized_hessians_are_those_of_a_gaussian_with_the_rows_own_mean_and_covariance(name, concave):
    """Proposition 4.2: linear(f)-delta = linear(h)-Gaussian, whether or not the density is known to be concave."""
    density, outputs, y, mean, covariance, statistic = EXPONENTIAL_FAMILIES[name]
    predictors = lambda theta, row: network(theta, row, outputs)  # noqa: E731
    rng = np.random.default_rng(0)
    theta = jnp.asarray(rng.normal(size=4 + 2 * outputs))
    row = {"x": jnp.array([1.2, -0.7]), "y": jnp.asarray(y)}
    H = np.asarray(jax.jacobian(lambda t: mean(predictors(t, row)))(theta))
    h = np.asarray(mean(predictors(theta, row)))
    inverse = np.linalg.pinv(covariance(h), rcond=1e-10)
    sites, rows = Sites((density,), (predictors,), (concave,)), jax.tree.map(lambda a: a[None], row)
    q = DiagonalGaussian(theta, 0.3 * jnp.ones(len(theta)))
    found = estimated("lin-hess", q, sites, rows)
    assert found.factor.shape == (outputs, len(theta))
    assert not found.may_be_indefinite
    np.testing.assert_allclose(found.gradient, H.T @ inverse @ (statistic(y) - h), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(curvature(found), H.T @ inverse @ H, rtol=1e-7, atol=1e-8)
    squared = estimated("lin-ef", q, sites, rows)
    np.testing.assert_allclose(squared.gradient, found.gradient, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(curvature(squared), np.outer(found.gradient, found.gradient), rtol=1e-8, atol=1e-10)


def test_linearized_hessians_of_rows_that_are_not_log_concave_lose_their_negative_part():
    q, rows = FAMILIES["full"], {"x": ROWS["x"], "y": jnp.array([0.0, 5.0, -4.0])}
    found = estimated("lin-hess", q, ROBUST, rows)
    expected, some_negative = np.zeros((P, P)), False
    for x, y in zip(np.asarray(rows["x"]), np.asarray(rows["y"])):
        second = float(jax.grad(jax.grad(lambda u: student(u[None], {"y": y})))(x @ np.asarray(q.mean)))  # noqa: B023
        some_negative |= second > 0
        expected += max(-second, 0.0) * np.outer(x, x)
    assert some_negative
    np.testing.assert_allclose(curvature(found), expected, rtol=1e-10)


# ---------------------------------------------------------------------- expectations in predictor space
@pytest.mark.parametrize("sites", [LOGISTIC, ROBUST, TWO], ids=["concave", "not concave", "both"])
@pytest.mark.parametrize("family", FAMILIES)
def test_expectations_in_predictor_space_are_those_over_theta(sites, family):
    q = FAMILIES[family]
    gradient, hessian, _ = exact(sites, ROWS, q)
    found = estimated("expected", q, sites, ROWS)
    np.testing.assert_allclose(found.gradient, gradient, atol=1e-6)
    np.testing.assert_allclose(curvature(found), -hessian, atol=1e-6)
    assert found.may_be_indefinite == (sites is not LOGISTIC)


# ---------------------------------------------------------------------- weights
@pytest.mark.parametrize(
    "hessian, family",
    [*[(name, "full") for name in ("lin-hess", "lin-ef", "mc-hess", "mc-ef", "expected")], ("mc-hess", "diagonal")],
)
def test_a_weighted_row_counts_as_so_many_rows(hessian, family):
    """Gradient and curvature both; a row of weight zero is as good as absent."""
    q, weights = FAMILIES[family], [2.0, 3.0, 0.0]
    repeated = {name: array[jnp.array([0, 0, 1, 1, 1])] for name, array in ROWS.items()}
    weighted = estimated(hessian, q, TWO, ROWS, 4, weights)
    plain = estimated(hessian, q, TWO, repeated, 4)
    np.testing.assert_allclose(weighted.gradient, plain.gradient, rtol=1e-10)
    np.testing.assert_allclose(weighted.curvature_diagonal(), plain.curvature_diagonal(), rtol=1e-10)
    if hessian != "mc-hess":
        np.testing.assert_allclose(curvature(weighted), curvature(plain), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("hessian", ["lin-hess", "lin-ef", "mc-hess", "mc-ef", "expected"])
def test_rows_and_sites_add_up(hessian):
    q = FAMILIES["full"]
    whole = estimated(hessian, q, TWO, ROWS, 4)
    parts = [estimated(hessian, q, TWO, {n: a[i : i + 1] for n, a in ROWS.items()}, 4) for i in range(3)]
    np.testing.assert_allclose(whole.gradient, sum(part.gradient for part in parts), rtol=1e-10)
    np.testing.assert_allclose(curvature(whole), sum(map(curvature, parts)), rtol=1e-10, atol=1e-12)
    if hessian not in ("lin-ef", "mc-ef"):  # the square of a row's gradient is over all of its sites
        alone = [Sites(*[part[i : i + 1] for part in TWO]) for i in range(2)]
        alone = [estimated(hessian, q, sites, ROWS, 4) for sites in alone]
        np.testing.assert_allclose(curvature(whole), sum(map(curvature, alone)), rtol=1e-10, atol=1e-12)


# ---------------------------------------------------------------------- with every rule
COMBINATIONS = [
    (rule, hessian, family, parameterization)
    for rule in ("bong", "bog", "blr", "bbb")
    for hessian in ("lin-hess", "lin-ef", "mc-hess", "mc-ef")
    for family in FAMILIES
    for parameterization in ("natural", "moment")
    if family != "low-rank" or (parameterization == "natural" and hessian != "mc-hess")
]


@pytest.mark.parametrize("rule, hessian, family, parameterization", COMBINATIONS)
def test_every_combination_leaves_a_gaussian(rule, hessian, family, parameterization):
    observation, estimator = LOGISTIC.observe(ROWS, jnp.ones(3)), make_estimator(hessian, 3)
    prior = FAMILIES[family]
    rule = Rule(rule, parameterization, 1.0 if rule == "bong" else 0.05)
    with jax.disable_jit():  # operations are compiled once for all
        found = update(rule, prior, lambda key, q: estimator(key, q, observation), KEY)
    assert bool(found.ok)
    assert np.all(np.linalg.eigvalsh(found.q.covariance()) > 0)
    assert float(jnp.linalg.norm(found.q.mean - prior.mean)) > 1e-3
