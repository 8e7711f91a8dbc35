"""RVGA's implicit steps with Gaussians of fewer numbers, against the paper's equations by dense quadrature."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA

POINTS = np.linspace(-9.0, 9.0, 2001)
WEIGHTS = np.exp(-0.5 * POINTS**2)
WEIGHTS = WEIGHTS / WEIGHTS.sum()
SCALE = 3.0
FAMILIES = {"diagonal": {}, "low-rank": {"rank": 1}}


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, SCALE).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def two_sites(X, y=None, count=None):
    w = numpyro.sample("w", dist.Normal(0, 0.7).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)
        numpyro.sample("count", dist.Poisson(jnp.exp(0.5 * X @ w)), obs=count)


def normal(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, SCALE).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def data(n, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d)) + 0.8 * rng.normal(size=(n, 1))
    u = X @ rng.normal(size=d)
    return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-u))).astype(float)}


def expected(mean, variance, derivative):
    return derivative(mean[:, None] + np.sqrt(variance)[:, None] * POINTS) @ WEIGHTS


def assert_implicit(posterior, prior, rows_of_design, gradient_of, curvature_of):
    """mu' = mu + Sigma F^T g and Lambda' = Lambda + F^T H F, with g and H under the unprojected N(mu', Lambda'^-1),
    which these determine: equations 28 and 29. The result keeps its mean and the diagonal of its precision."""
    mean, covariance = prior
    F = rows_of_design
    h = np.ones(len(F))
    for _ in range(500):
        after = np.linalg.inv(np.linalg.inv(covariance) + F.T @ (h[:, None] * F))
        variance = np.einsum("np,pq,nq->n", F, after, F)
        h = 0.5 * h + 0.5 * curvature_of(F @ np.asarray(posterior.mean), variance)
    g = gradient_of(F @ np.asarray(posterior.mean), variance)
    np.testing.assert_allclose(posterior.mean, mean + covariance @ F.T @ g, atol=3e-5)
    precision = np.linalg.inv(posterior.covariance)
    np.testing.assert_allclose(np.diag(precision), np.diag(np.linalg.inv(after)), rtol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n", [1, 2])
def test_implicit_steps_solve_the_papers_equations_and_keep_mean_and_precisions(family, n):
    rows = data(n)
    posterior = RVGA(logistic, family=family, block_size=n, **FAMILIES[family]).run(rows, progress_bar=False)
    sigmoid = lambda u: 1 / (1 + np.exp(-u))  # noqa: E731
    assert_implicit(
        posterior,
        (np.zeros(3), SCALE**2 * np.eye(3)),
        rows["X"],
        lambda m, v: rows["y"] - expected(m, v, sigmoid),
        lambda m, v: expected(m, v, lambda u: sigmoid(u) * (1 - sigmoid(u))),
    )
    assert posterior.elbo is None and posterior.num_rows == n


def test_the_sites_of_a_row_are_solved_for_together():
    rows = data(1) | {"count": np.array([3.0])}
    posterior = RVGA(two_sites, family="diagonal").run(rows, progress_bar=False)
    sigmoid = lambda u: 1 / (1 + np.exp(-u))  # noqa: E731
    F = np.concatenate([rows["X"], 0.5 * rows["X"]])

    def gradient(m, v):
        return np.array([rows["y"][0], rows["count"][0]]) - np.array(
            [expected(m[:1], v[:1], sigmoid)[0], np.exp(m[1] + v[1] / 2)]
        )

    def curvature(m, v):
        return np.array([expected(m[:1], v[:1], lambda u: sigmoid(u) * (1 - sigmoid(u)))[0], np.exp(m[1] + v[1] / 2)])

    assert_implicit(posterior, (np.zeros(3), 0.49 * np.eye(3)), F, gradient, curvature)


def test_with_a_full_covariance_the_rule_is_rvgas_own_recursion():
    rows = data(20)
    own = BONG(logistic, rule="implicit", hessian="auto", shuffle=False).run(rows, progress_bar=False)
    rvga = RVGA(logistic, block_size=1, certify=False, shuffle=False).run(rows, progress_bar=False)
    np.testing.assert_allclose(own.mean, rvga.mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(own.covariance, rvga.covariance, rtol=1e-6, atol=1e-7)


def test_low_rank_of_full_rank_is_the_full_family():
    rows = data(20)
    options = {"shuffle": False, "block_size": 1}
    narrow = RVGA(logistic, family="low-rank", rank=3, **options).run(rows, progress_bar=False)
    full = RVGA(logistic, certify=False, **options).run(rows, progress_bar=False)
    np.testing.assert_allclose(narrow.mean, full.mean, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(narrow.covariance, full.covariance, rtol=1e-6, atol=1e-7)


def test_implicit_steps_end_nearer_to_the_best_gaussian_than_explicit_ones_under_a_wide_prior():
    rows = data(300, d=8)

    def divergence(scheme):
        q = RVGA(logistic, scheme=scheme, family="low-rank", rank=2, shuffle=False).run(rows, progress_bar=False)
        shift, precision = np.asarray(q.mean) - best.mean, np.linalg.inv(best.covariance)
        log_ratio = np.linalg.slogdet(best.covariance)[1] - np.linalg.slogdet(q.covariance)[1]
        return 0.5 * (np.trace(precision @ q.covariance) + shift @ precision @ shift - 8 + log_ratio)

    best = RVGA(logistic).run(rows, progress_bar=False)
    assert divergence("implicit") < 0.8 * divergence("explicit")


def test_memory_is_linear_in_the_number_of_parameters():
    """A matrix of all parameters would take 20 GB. Two rows that share no column do not know of each other."""
    X = np.zeros((2, 50_000))
    X[0, :20_000], X[1, 20_000:] = 0.01, 0.02
    both, first = ({"X": X[:n], "y": np.ones(n)} for n in (2, 1))
    method = RVGA(logistic, family="low-rank", rank=2, shuffle=False)
    of_both, of_first = (method.run(rows, progress_bar=False).mean for rows in (both, first))
    np.testing.assert_allclose(of_both[:20_000], of_first[:20_000], rtol=1e-6)
    assert np.ptp(of_both[20_000:]) < 1e-6 and of_both[-1] > 0


EXCLUSIVE = [{"rule": "bong"}, {"rule": "implicit", "hessian": "auto"}]


@pytest.mark.parametrize("options, block_size", list(zip(EXCLUSIVE, [40, 1])), ids=str)
def test_exclusive_low_rank_projections_end_nearer_to_the_exact_posterior(options, block_size):
    """Of Normal rows, whose posterior is known, in columns of unequal scales."""
    rows = data(40, d=10)
    rows["X"] *= np.geomspace(0.2, 5.0, 10)
    precision = np.eye(10) / SCALE**2 + rows["X"].T @ rows["X"]
    mean = np.linalg.solve(precision, rows["X"].T @ rows["y"])

    def divergence(projection):
        method = BONG(
            normal, family="low-rank", rank=2, projection=projection, block_size=block_size, shuffle=False, **options
        )
        q = method.run(rows, progress_bar=False)
        shift, covariance = np.asarray(q.mean) - mean, np.asarray(q.covariance)
        log_ratio = -np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(precision)[1]
        if block_size == len(rows["y"]):
            np.testing.assert_allclose(q.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(np.diag(np.linalg.inv(covariance)), np.diag(precision), rtol=1e-8)
        return 0.5 * (np.trace(precision @ covariance) + shift @ precision @ shift - 10 + log_ratio)

    assert divergence("exclusive") < 0.95 * divergence(None)


@pytest.mark.parametrize("options", EXCLUSIVE, ids=str)
def test_memory_of_exclusive_projections_is_linear_in_the_number_of_parameters(options):
    """Here too a matrix of all parameters would take 20 GB. The diagonal of the precision is that of all rows."""
    X = np.random.default_rng(0).normal(size=(4, 50_000)) / 100
    rows = {"X": X, "y": np.ones(4)}
    method = BONG(normal, family="low-rank", rank=2, projection="exclusive", shuffle=False, **options)
    method.run(rows, progress_bar=False)
    q = method.state.gaussian
    diagonal = np.asarray(q.diagonal) + np.sum(np.asarray(q.factor) ** 2, axis=0)
    np.testing.assert_allclose(diagonal, 1 / SCALE**2 + np.sum(X**2, axis=0), rtol=1e-8)
    assert np.linalg.matrix_rank(q.factor) == 2


def test_the_functional_form_is_run_and_posteriors_go_on():
    rows = data(12)
    method = RVGA(logistic, family="diagonal", shuffle=False)
    whole = method.run(rows, progress_bar=False)
    state = method.update(method.init(rows), rows)
    np.testing.assert_allclose(method.posterior(state).mean, whole.mean, rtol=1e-10)
    first, rest = ({name: x[part] for name, x in rows.items()} for part in (slice(5), slice(5, None)))
    again = method.run(first, progress_bar=False).update(rest, progress_bar=False)
    np.testing.assert_allclose(again.mean, whole.mean, rtol=1e-10)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"scheme": "ekf"}, "takes scheme='implicit' or 'explicit'"),
        ({"memory": 10}, "leave first_block or memory"),
        ({"tolerance": 1e-3}, "leave tolerance"),
        ({"local": "marginal"}, "leave local"),
    ],
    ids=str,
)
def test_what_these_families_do_not_take_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RVGA(logistic, family="diagonal", **options)


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "rule='implicit' takes expectations under the q"),
        ({"hessian": "auto", "num_iters": 2}, "rule='implicit' takes one step"),
        ({"hessian": "auto", "learning_rate": 0.5}, "rule='implicit' takes no learning rate"),
        ({"hessian": "auto", "parameterization": "moment"}, "in natural parameters"),
    ],
    ids=str,
)
def test_what_the_implicit_rule_does_not_take_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BONG(logistic, rule="implicit", **options)
