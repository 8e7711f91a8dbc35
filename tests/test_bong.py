"""BONG: exact where it can be, every combination of its parts, and what a user can ask of a run."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer import init_to_uniform, init_to_value
from references import REFERENCE, needs_reference
from shared_methods import shared
from sklearn.datasets import load_digits

from numpyro_rvga import BONG, RVGA, FixedPointVI, LinearDynamics, OrnsteinUhlenbeck, RandomWalk, init_to_module
from numpyro_rvga.core.gaussians import FAMILIES
from numpyro_rvga.engines.online import OnlineUpdates

NOISE, PRIOR_MEAN, PRIOR_SCALE = 0.7, 0.5, 2.0
RULES = ("bong", "bog", "blr", "bbb")
HESSIANS = ("lin-hess", "lin-ef", "mc-hess", "mc-ef", "mc-fisher")
MEMBERS = [(f, c) for f in ("full", "diagonal") for c in ("natural", "moment")] + [("low-rank", "natural")]


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(PRIOR_MEAN, PRIOR_SCALE).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def logistic(X, y=None, scale=0.5):
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def unknown_scale(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2.0).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)


def hierarchical(g, y=None):
    center = numpyro.sample("center", dist.Normal(0, 1.0))
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 5):
        a = numpyro.sample("a", dist.Normal(center, spread))
    with numpyro.plate("rows", len(g)):
        numpyro.sample("y", dist.Normal(a[g], NOISE), obs=y)


def deviation(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(0.0, scale), obs=y)


CORRELATED = np.array([[1.0, 0.6, -0.2], [0.6, 2.0, 0.3], [-0.2, 0.3, 0.5]])


def correlated(X, y=None):
    w = numpyro.sample("w", dist.MultivariateNormal(PRIOR_MEAN * jnp.ones(3), CORRELATED))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def data(kind="linear", n=30, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X, w = rng.normal(size=(n, d)), rng.normal(size=d)
    if kind == "one-hot":
        X = np.eye(d)[rng.integers(0, d, n)] * rng.uniform(0.5, 1.5, n)[:, None]
    if kind == "noise":
        return {"y": NOISE * rng.normal(size=n)}
    if kind == "groups":
        g = np.arange(n) % 5
        return {"g": g, "y": np.linspace(-1, 2, 5)[g] + NOISE * rng.normal(size=n)}
    if kind == "logistic":
        return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-X @ w))).astype(float)}
    return {"X": X, "y": X @ w + NOISE * rng.normal(size=n)}


def part(rows, *limits):
    return {name: array[slice(*limits)] for name, array in rows.items()}


def fit(model, rows, run=None, **options):
    return shared(BONG, model, **{"shuffle": False, **options}).run(rows, progress_bar=False, **(run or {}))


def exact_posterior(rows, mean=PRIOR_MEAN, covariance=None):
    X, y = rows["X"], rows["y"]
    kept = np.linalg.inv(PRIOR_SCALE**2 * np.eye(X.shape[1]) if covariance is None else covariance)
    precision = kept + X.T @ X / NOISE**2
    pull = kept @ (mean * np.ones(len(kept))) + X.T @ y / NOISE**2
    return np.linalg.solve(precision, pull), np.linalg.inv(precision)


def assert_exact(posterior, expected, rtol=1e-10):
    np.testing.assert_allclose(posterior.mean, expected[0], rtol=rtol, atol=rtol)
    np.testing.assert_allclose(posterior.covariance, expected[1], rtol=rtol, atol=0.01 * rtol)


def assert_same(a, b, rtol=1e-12):
    assert_exact(a, (b.mean, b.covariance), rtol)
    assert a.num_rows == b.num_rows


# ---------------------------------------------------------------------- conjugate models (Proposition 4.1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"hessian": "auto"},
        {"block_size": 2},
        {"hessian": "mc-hess", "num_samples": 500, "block_size": 30, "rule": "blr", "learning_rate": 1.0},
        {"rule": "blr", "num_iters": 3, "hessian": "auto", "block_size": 2},
        {"family": "low-rank", "rank": 3},
        {"family": "low-rank", "rank": 20, "hessian": "auto", "rule": "blr", "num_iters": 3, "block_size": 4},
    ],
    ids=str,
)
def test_linear_gaussian_rows_give_the_exact_posterior(options):
    rows = data()
    posterior = fit(linear, rows, **options)
    mean, covariance = exact_posterior(rows)
    if options.get("hessian") == "mc-hess":  # the Hessian is constant, the gradient a draw's
        np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(posterior.mean, mean, atol=0.6)
        return
    assert_exact(posterior, (mean, covariance))
    assert posterior.num_rows == 30 and posterior.info["clipped"] == 0


@pytest.mark.parametrize("options", [{}, {"rule": "blr", "num_iters": 3}, {"projection": "inclusive"}], ids=str)
def test_the_diagonal_family_is_exact_where_the_posterior_is_diagonal(options):
    rows = data("one-hot")
    assert_exact(fit(linear, rows, family="diagonal", **options), exact_posterior(rows))


@pytest.mark.parametrize("rule, hessian", [("bong", "lin-hess"), ("implicit", "auto")])
def test_the_block_diagonal_family_has_a_block_for_each_site_and_is_exact_where_the_posterior_has(rule, hessian):
    """Rows of one site each. Of rows of both, each block of the precision is exact, in any order."""

    def two(X, which, y=None):
        a = numpyro.sample("a", dist.Normal(PRIOR_MEAN, PRIOR_SCALE).expand([2]).to_event(1))
        b = numpyro.sample("b", dist.Normal(PRIOR_MEAN, PRIOR_SCALE).expand([3]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(X[:, :2] @ a * which[:, 0] + X[:, 2:] @ b * which[:, 1], NOISE), obs=y)

    rows = data(n=20, d=5)
    alone = np.eye(2)[np.arange(20) % 2]
    for which in (alone, np.ones((20, 2))):
        posterior = fit(two, rows | {"which": which}, rule=rule, hessian=hessian, family="block-diagonal")
        X = rows["X"] * np.repeat(which, (2, 3), axis=1)
        mean, covariance = exact_posterior({"X": X, "y": rows["y"]})
        precision = np.linalg.inv(covariance)
        precision[:2, 2:] = precision[2:, :2] = 0.0
        np.testing.assert_allclose(np.linalg.inv(posterior.covariance), precision, rtol=1e-8, atol=1e-9)
        if which is alone:
            np.testing.assert_allclose(posterior.mean, mean, rtol=1e-8)


@pytest.mark.parametrize("rank", [1, 2])
def test_low_rank_precisions_have_the_exact_diagonal(rank):
    rows = data(n=8)
    posterior = fit(linear, rows, family="low-rank", rank=rank)
    precision = np.linalg.inv(exact_posterior(rows)[1])
    np.testing.assert_allclose(np.diag(np.linalg.inv(posterior.covariance)), np.diag(precision), rtol=1e-10)
    assert posterior.gaussian.factor.shape == (rank, 3)


@pytest.mark.parametrize("rule", ["bog", "bbb"])
def test_plain_gradients_learn_correlations_that_a_diagonal_cannot_hold(rule):
    """They start from a small random factor."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(400, 2)) @ rng.normal(size=(2, 6)) + 0.5 * rng.normal(size=(400, 6))
    rows = {"X": X, "y": X @ rng.normal(size=6) + NOISE * rng.normal(size=400)}
    mean, covariance = exact_posterior(rows)

    def divergence(family):
        q = fit(linear, rows, rule=rule, learning_rate=0.01, family=family, rank=2)
        shift, precision = q.mean - mean, np.linalg.inv(covariance)
        log_ratio = np.linalg.slogdet(covariance)[1] - np.linalg.slogdet(q.covariance)[1]
        return 0.5 * (np.trace(precision @ q.covariance) + shift @ precision @ shift - 6 + log_ratio)

    assert divergence("low-rank") < 0.8 * divergence("diagonal")


# ---------------------------------------------------------------------- the product of rules, hessians and families
def options_of(rule, hessian, family, chart):
    several = {"num_iters": 2} if rule in ("blr", "bbb") else {}
    rate = {} if rule == "bong" else {"learning_rate": 0.05}
    return {"rule": rule, "hessian": hessian, "family": family, "parameterization": chart, "rank": 1} | several | rate


@pytest.mark.parametrize("rule, hessian, member", list(itertools.product(RULES, HESSIANS, MEMBERS)))
def test_every_combination_can_be_made_but_for_one_that_makes_no_sense(rule, hessian, member):
    """That an update of each leaves a Gaussian is among the tests of the estimators."""
    if hessian == "mc-hess" and member[0] == "low-rank":
        with pytest.raises(ValueError, match="positive semi-definite curvature"):
            BONG(logistic, **options_of(rule, hessian, *member))
    else:
        BONG(logistic, **options_of(rule, hessian, *member))


@pytest.mark.parametrize(
    "rule, hessian, member",
    [
        ("bong", "mc-ef", ("full", "moment")),
        ("bog", "lin-hess", ("low-rank", "natural")),
        ("blr", "mc-hess", ("diagonal", "natural")),
        ("bbb", "lin-ef", ("full", "natural")),
        ("blr", "mc-fisher", ("low-rank", "natural")),
    ],
)
def test_combinations_take_in_all_rows(rule, hessian, member):
    rows = data("logistic", n=5)
    posterior = fit(logistic, rows, **options_of(rule, hessian, *member), num_samples=4, block_size=2)
    assert posterior.num_rows == 5
    assert np.isfinite(posterior.mean).all() and np.max(np.abs(posterior.mean)) > 0
    assert np.all(np.linalg.eigvalsh(posterior.covariance) > 0)
    assert {key: posterior.info[key] for key in ("rule", "hessian", "family", "parameterization")} == {
        "rule": rule,
        "hessian": hessian,
        "family": member[0],
        "parameterization": member[1],
    }


@pytest.mark.parametrize("expectation", ["probit", "auto"])
def test_with_rvgas_expectations_bong_is_its_explicit_scheme(expectation):
    rows = data("logistic")
    in_order = {"shuffle": False, "certify": False}
    explicit = RVGA(logistic, scheme="explicit", expectation=expectation, **in_order)
    expected = explicit.run(rows, progress_bar=False, scale=3.0)
    assert_same(fit(logistic, rows, hessian=expectation, run={"scale": 3.0}), expected, rtol=1e-10)


def test_lin_hess_is_the_extended_kalman_filter():
    rows = data("logistic")
    expected = RVGA(logistic, scheme="ekf", shuffle=False).run(rows, progress_bar=False, scale=3.0)
    assert_same(fit(logistic, rows, run={"scale": 3.0}), expected, rtol=1e-10)


def probit(u):
    return dist.Bernoulli(probs=jax.scipy.stats.norm.cdf(u))


@pytest.mark.parametrize(
    "make, y, mean, variance",
    [
        (probit, 0.0, jax.scipy.stats.norm.cdf, lambda h: h * (1 - h)),
        (lambda u: dist.Poisson(jax.nn.softplus(u)), 3.0, jax.nn.softplus, lambda h: h),
        (lambda u: dist.Normal(jnp.tanh(u), NOISE), 1.5, jnp.tanh, lambda h: NOISE**2),
    ],
    ids=["probit", "Poisson of softplus", "Normal of tanh"],
)
def test_lin_hess_is_a_gaussian_with_the_rows_own_mean_and_variance_whatever_the_link(make, y, mean, variance):
    """Equations 14-25: whichever predictors the model is taken to have."""

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.3, 1.0).expand([2]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", make(X @ w), obs=y)

    x, start = np.array([1.0, -0.5]), jnp.array([0.3, 0.3])
    h, H = jax.value_and_grad(lambda w: mean(x @ w))(start)
    gain = np.asarray(H) / (variance(h) + H @ H)
    posterior = fit(model, {"X": x[None], "y": np.array([y])})
    assert_exact(posterior, (start + gain * (y - h), np.eye(2) - np.outer(gain, H)))


def location_and_scale(distribution):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", distribution(X @ w, scale), obs=y)

    return model


@pytest.mark.parametrize("distribution", [dist.Normal, dist.Laplace])
def test_lin_hess_learns_unknown_scales_by_their_information(distribution):
    """The curvature that is observed would be zero, or grow with the square of the first rows' residuals."""
    rng = np.random.default_rng(0)
    X = rng.normal(size=(1000, 3))
    noise = np.asarray(distribution(0.0, 0.3).sample(jax.random.key(0), (1000,)))
    rows = {"X": X, "y": X @ np.array([1.0, -1.0, 0.5]) + noise}
    model = location_and_scale(distribution)
    online, best = fit(model, rows), FixedPointVI(model).run(rows, progress_bar=False)
    deviations = np.sqrt(np.diag(best.covariance))
    assert np.all(np.abs(online.mean - best.mean)[:3] < 1.0 * deviations[:3])
    assert abs(float(online.mean[3] - best.mean[3])) < 0.2  # of a log scale
    np.testing.assert_allclose(np.sqrt(np.diag(online.covariance)), deviations, rtol=0.3)


# ---------------------------------------------------------------------- the authors' results
@needs_reference("logreg")
@pytest.mark.parametrize("case", ["d10", "d100"])
def test_the_authors_linearized_results_are_reproduced(case):
    def model(X, y=None, mean=None, covariance=None):
        w = numpyro.sample("w", dist.MultivariateNormal(mean, covariance))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    folder = REFERENCE / "logreg"
    with np.load(folder / f"{case}.npz") as problem, np.load(folder / f"{case}_linhess_authors.npz") as expected:
        prior = {"mean": problem["prior_mean"], "covariance": problem["prior_cov"]}
        posterior = fit(model, {"X": problem["X"], "y": problem["y"]}, run=prior)
        np.testing.assert_allclose(posterior.mean, expected["mu"], rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(posterior.covariance, expected["Sigma"], rtol=1e-10, atol=1e-10)


# ---------------------------------------------------------------------- dynamics
MATRIX = np.array([[0.9, 0.2, 0.0], [-0.1, 1.0, 0.1], [0.0, 0.0, 0.8]])
OFFSET, Q = np.array([0.05, -0.1, 0.2]), np.array([[0.04, 0.01, 0.0], [0.01, 0.02, 0.0], [0.0, 0.0, 0.03]])
SYSTEMS = {
    "random walk": (RandomWalk(0.3), (np.eye(3), np.zeros(3), 0.09 * np.eye(3))),
    "Ornstein-Uhlenbeck": (
        OrnsteinUhlenbeck(0.95),
        (0.95 * np.eye(3), 0.05 * PRIOR_MEAN * np.ones(3), (1 - 0.95**2) * PRIOR_SCALE**2 * np.eye(3)),
    ),
    "entry by entry": (
        LinearDynamics(np.diag([0.9, 1.0, 0.5]), OFFSET, np.diag([0.1, 0.0, 0.2])),
        (np.diag([0.9, 1.0, 0.5]), OFFSET, np.diag([0.1, 0.0, 0.2])),
    ),
    "general": (LinearDynamics(MATRIX, OFFSET, Q), (MATRIX, OFFSET, Q)),
}


def kalman_filter(rows, matrix, offset, noise, block_size=1, prior=None):
    mean, covariance, evidence = PRIOR_MEAN * np.ones(3), PRIOR_SCALE**2 * np.eye(3) if prior is None else prior, 0.0
    for start in range(0, len(rows["y"]), block_size):
        X, y = (rows[name][start : start + block_size] for name in ("X", "y"))
        mean, covariance = matrix @ mean + offset, matrix @ covariance @ matrix.T + noise
        innovation = X @ covariance @ X.T + NOISE**2 * np.eye(len(y))
        residual, gain = y - X @ mean, np.linalg.solve(innovation, X @ covariance).T
        evidence -= 0.5 * residual @ np.linalg.solve(innovation, residual)
        evidence -= 0.5 * np.linalg.slogdet(2 * np.pi * innovation)[1]
        mean, covariance = mean + gain @ residual, covariance - gain @ X @ covariance
    return mean, covariance, evidence


@pytest.mark.parametrize(
    "family, name, block_size",
    [
        ("full", "general", 4),
        ("low-rank", "Ornstein-Uhlenbeck", 4),
        ("low-rank", "general", 1),
        ("diagonal", "random walk", 1),
        ("diagonal", "Ornstein-Uhlenbeck", 4),
    ],
)
def test_parameters_move_as_in_a_kalman_filter(family, name, block_size):
    rows = data("one-hot" if family == "diagonal" else "linear", n=21)
    dynamics, system = SYSTEMS[name]
    posterior = fit(linear, rows, family=family, rank=3, dynamics=dynamics, block_size=block_size)
    assert_exact(posterior, kalman_filter(rows, *system, block_size)[:2], rtol=1e-9)
    assert posterior.info["dynamics"] == type(dynamics).__name__


def test_random_walks_may_name_sites():
    rows = data(n=10)
    assert_same(
        fit(linear, rows, dynamics=RandomWalk({"w": [0.3, 0.3, 0.3]})), fit(linear, rows, dynamics=RandomWalk(0.3))
    )
    with pytest.raises(ValueError, match="no latent site 'v'"):
        fit(linear, rows, dynamics=RandomWalk({"v": 0.3}))


# ---------------------------------------------------------------------- priors
def gap(a, b):
    """Largest difference of means, in standard deviations, and of log standard deviations."""
    deviation = np.sqrt(np.diag(a.covariance))
    means = np.max(np.abs(np.asarray(a.mean - b.mean)) / deviation)
    return means, np.max(np.abs(np.log(np.sqrt(np.diag(b.covariance)) / deviation)))


@functools.cache
def best_of(model, kind):
    return FixedPointVI(model).run(data(kind, n=60), progress_bar=False)


ALL_AT_ONCE = {"rule": "blr", "learning_rate": 0.5, "block_size": 60}


@pytest.mark.parametrize(
    "model, kind, family, options",
    [
        (unknown_scale, "one-hot", "full", {"num_iters": 40, **ALL_AT_ONCE}),
        (unknown_scale, "one-hot", "diagonal", {"num_epochs": 40, **ALL_AT_ONCE}),
        (hierarchical, "groups", "full", {}),
        (hierarchical, "groups", "diagonal", {}),
    ],
)
def test_priors_that_are_not_gaussian_end_in_the_best_gaussian(model, kind, family, options):
    posterior = fit(model, data(kind, n=60), hessian="auto", family=family, **options)
    assert max(gap(best_of(model, kind), posterior)) < 0.05


def test_correlated_priors_are_exact_in_the_full_family():
    rows = data()
    assert_exact(fit(correlated, rows), exact_posterior(rows, covariance=CORRELATED), rtol=1e-9)


@pytest.mark.parametrize("family", ["diagonal", "low-rank"])
def test_correlated_priors_take_the_place_of_what_stood_for_them(family):
    """Rows that see one parameter each leave exact sites: the mean is then exact, and the precision's diagonal."""
    rows = data("one-hot")
    posterior = fit(correlated, rows, family=family, rank=2)
    mean, covariance = exact_posterior(rows, covariance=CORRELATED)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-8)
    found = np.diag(np.linalg.inv(posterior.covariance))
    np.testing.assert_allclose(found, np.diag(np.linalg.inv(covariance)), rtol=1e-8)


@pytest.mark.parametrize("family", ["block-diagonal", "low-rank"])
@pytest.mark.parametrize("decay", [None, 1.0, 0.8])
def test_correlated_priors_are_exact_in_every_family_that_holds_them(family, decay):
    """With dynamics too, under which they are stationary. Rows are predicted by them from the first."""
    rows, kept = data(n=6), 1.0 if decay is None else decay
    dynamics = None if decay is None else OrnsteinUhlenbeck(decay)
    run = {"prequential": "linearized"}
    posterior = fit(correlated, rows, family=family, rank=3, dynamics=dynamics, run=run)
    system = kept * np.eye(3), (1 - kept) * PRIOR_MEAN * np.ones(3), (1 - kept**2) * CORRELATED
    *moments, evidence = kalman_filter(rows, *system, prior=CORRELATED)
    assert_exact(posterior, moments)
    np.testing.assert_allclose(posterior.info["log_predictive"].sum(), evidence, rtol=1e-8)


def levels(X, y=None):
    center = numpyro.sample("center", dist.Normal(0.0, 2.0))
    w = numpyro.sample("w", dist.Normal(center, 0.3).expand([2]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 3.0), obs=y)


@pytest.mark.parametrize("dynamics", [None, RandomWalk(0.0)])
def test_effects_around_a_mean_are_exact_in_a_low_rank_that_holds_all(dynamics):
    rows = data(d=2)
    posterior = fit(levels, rows, family="low-rank", rank=3, dynamics=dynamics)
    prior = np.array([[0.25 + 2 / 0.09, -1 / 0.09, -1 / 0.09], [-1 / 0.09, 1 / 0.09, 0], [-1 / 0.09, 0, 1 / 0.09]])
    design = np.pad(rows["X"], ((0, 0), (1, 0)))
    covariance = np.linalg.inv(prior + design.T @ design / 9)
    assert_exact(posterior, (covariance @ design.T @ rows["y"] / 9, covariance))


def test_a_correlated_prior_is_a_block_from_the_start_beside_one_that_is_not_gaussian():
    def unknown_noise(X, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        w = numpyro.sample("w", dist.MultivariateNormal(PRIOR_MEAN * jnp.ones(3), CORRELATED))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)

    for member in ({"family": "block-diagonal"}, {"family": "low-rank", "rank": 4}):
        method = BONG(unknown_noise, **member)
        q = method.init(data(n=2)).gaussian
        np.testing.assert_allclose(q.mean[1:], PRIOR_MEAN, rtol=1e-9)
        np.testing.assert_allclose(q.covariance()[1:, 1:], CORRELATED, rtol=1e-9)
        posterior = method.posterior(method.init(data(n=2)))
        np.testing.assert_allclose(posterior.covariance[1:, 1:], CORRELATED, rtol=1e-9)


@pytest.mark.parametrize(
    "member", [{"family": "diagonal"}, {"family": "block-diagonal"}, {"family": "low-rank", "rank": 1}], ids=str
)
def test_families_that_drop_what_a_prior_couples_say_so(member):
    rows = data(d=2)
    with pytest.warns(UserWarning, match=f"couples entries of site 'center', and family='{member['family']}' drops"):
        fit(levels, rows, **member)
    with pytest.warns(UserWarning, match=f"with dynamics family='{member['family']}' begins without"):
        before = BONG(levels, dynamics=RandomWalk(0.1), **member).init(rows).gaussian
    np.testing.assert_allclose(before.deviation(), np.sqrt([4.0, 4.09, 4.09]), rtol=1e-9)


# ---------------------------------------------------------------------- starts
def network(X, y=None):
    from flax import linen
    from numpyro.contrib.module import random_flax_module

    class Network(linen.Module):
        @linen.compact
        def __call__(self, x):
            hidden = jnp.tanh(linen.Dense(4, name="first")(x))
            return linen.Dense(1, name="last", bias_init=linen.initializers.constant(0.25))(hidden)

    shift = numpyro.sample("shift", dist.Normal(0.7, 1.0))
    net = random_flax_module("net", Network(), prior=dist.Normal(0.0, 1.0), input_shape=(1, X.shape[1]))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(net(X)[:, 0] + shift, 0.5), obs=y)


def test_weights_start_where_their_layers_would_and_other_sites_at_the_priors_mean():
    bong = BONG(network, family="diagonal", init_loc_fn=init_to_module)
    start = bong.posterior(bong.init(data(n=6)))
    found = start.median()
    np.testing.assert_allclose(found["shift"], 0.7)
    np.testing.assert_allclose(found["net/first.bias"], 0.0)
    np.testing.assert_allclose(found["net/last.bias"], 0.25)
    assert len(np.unique(found["net/first.kernel"])) == 12
    np.testing.assert_allclose(np.diag(start.covariance), 1.0, rtol=1e-12)


def test_a_network_that_starts_at_rest_is_warned_of():
    rows = data(n=6)
    with pytest.warns(UserWarning, match="start at zero, where it has no slope.*init_to_module"):
        BONG(network, family="diagonal").init(rows)
    start = BONG(network, family="diagonal", init_loc_fn=init_to_module).run(rows, progress_bar=False)
    assert np.any(start.median()["net/first.kernel"])


def test_init_to_module_needs_a_module():
    with pytest.raises(ValueError, match="found no weights"):
        fit(linear, data(n=4), init_loc_fn=init_to_module)


@pytest.mark.parametrize("family", FAMILIES)
def test_numpyros_strategies_set_where_the_mean_starts(family):
    rows, values = data(n=5), np.array([1.0, -2.0, 3.0])
    bong = BONG(linear, family=family, init_loc_fn=init_to_value(values={"w": values}))
    start = bong.posterior(bong.init(rows))
    np.testing.assert_allclose(start.mean, values)
    np.testing.assert_allclose(start.covariance, PRIOR_SCALE**2 * np.eye(3), rtol=1e-12)
    if family == "full":
        assert_exact(bong.run(rows, progress_bar=False), exact_posterior(rows, mean=values))


# ---------------------------------------------------------------------- looks into a run
def test_callbacks_see_the_posterior_after_every_few_rows_and_at_the_end():
    rows, seen = data(n=11), []
    bong = BONG(linear, shuffle=False)

    def callback(posterior):
        seen.append(posterior)
        return posterior.num_rows if posterior.num_rows > 4 else None

    posterior = bong.run(rows, progress_bar=False, callback=callback, callback_every=4)
    assert [p.num_rows for p in seen] == [4, 8, 11]
    assert posterior.info["callback"] == [8, 11]
    for p in seen:
        assert_exact(p, exact_posterior(part(rows, p.num_rows)))
    plain = bong.run(rows, progress_bar=False)
    assert_same(plain, posterior)
    assert "callback" not in plain.info
    assert bong.run(rows, progress_bar=False, callback=lambda p: p.num_rows).info["callback"] == [11]


def test_callbacks_come_after_whole_blocks():
    counts = fit(linear, data(n=11), block_size=3, run={"callback": lambda p: p.num_rows, "callback_every": 4})
    assert counts.info["callback"] == [6, 11]


@pytest.mark.parametrize("family, dynamics", [("full", None), ("diagonal", "random walk"), ("low-rank", None)])
def test_linearized_prequential_densities_add_up_to_the_log_evidence(family, dynamics):
    rows = data("one-hot" if family == "diagonal" else "linear", n=12)
    dynamics, system = SYSTEMS[dynamics] if dynamics else (None, (np.eye(3), np.zeros(3), np.zeros((3, 3))))
    posterior = fit(linear, rows, family=family, dynamics=dynamics, run={"prequential": "linearized"})
    found = posterior.info["log_predictive"]
    assert found.shape == (12,)
    np.testing.assert_allclose(np.sum(found), kalman_filter(rows, *system)[2], rtol=1e-9)


def test_plugin_prequential_densities_are_those_at_the_mean_before():
    rows, bong = data(n=7), BONG(linear)
    found = bong.run(rows, progress_bar=False, prequential="plugin").info["log_predictive"]
    means = [PRIOR_MEAN * np.ones(3), *[exact_posterior(part(rows, k))[0] for k in range(1, 7)]]
    residuals = rows["y"] - np.einsum("nd,nd->n", rows["X"], np.array(means))
    np.testing.assert_allclose(found, -0.5 * (residuals / NOISE) ** 2 - np.log(NOISE * np.sqrt(2 * np.pi)), rtol=1e-9)


def test_rows_of_a_block_are_predicted_before_any_of_them_is_taken_in():
    rows = data(n=5)
    found = fit(linear, rows, block_size=3, run={"prequential": "plugin"}).info["log_predictive"]
    means = [PRIOR_MEAN * np.ones(3)] * 3 + [exact_posterior(part(rows, 3))[0]] * 2
    residuals = rows["y"] - np.einsum("nd,nd->n", rows["X"], np.array(means))
    np.testing.assert_allclose(found, -0.5 * (residuals / NOISE) ** 2 - np.log(NOISE * np.sqrt(2 * np.pi)), rtol=1e-9)


# ---------------------------------------------------------------------- forms of data, states
def test_drawn_outcomes_give_the_information_of_scaled_and_masked_rows_of_any_distribution():
    """nu + 1 over nu + 3 for a Student's t of nu degrees, where the observed Hessian may have any sign."""
    rows = data(n=12) | {"y": np.linspace(-9.0, 9.0, 12), "kept": np.arange(12) != 3}

    def robust(X, kept, y=None):
        w = numpyro.sample("w", dist.Normal(0, 2.0).expand([3]).to_event(1))
        with numpyro.plate("rows", len(X)), numpyro.handlers.scale(scale=1.5), numpyro.handlers.mask(mask=kept):
            numpyro.sample("y", dist.StudentT(4.0, X @ w, 1.0), obs=y)

    count = 4000
    posterior = fit(robust, rows, hessian="mc-fisher", num_samples=count, block_size=12)
    X = rows["X"][rows["kept"]]
    expected = np.eye(3) / 4 + 1.5 * 5 / 7 * X.T @ X
    found = np.linalg.inv(posterior.covariance)
    np.testing.assert_allclose(found, expected, atol=6 * 2 * np.linalg.norm(expected) / np.sqrt(count))
    assert posterior.info["clipped"] == 0


def test_outcomes_that_cannot_be_drawn_are_refused_by_their_site():
    def penalized(X, y):
        w = numpyro.sample("w", dist.Normal(0, 2.0).expand([3]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.factor("penalty", -jnp.abs(y - X @ w))

    def residuals(X, y):
        w = numpyro.sample("w", dist.Normal(0, 2.0).expand([3]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("error", dist.Normal(0, 1.0), obs=y - X @ w)

    for model, message in ((penalized, "'penalty' is a factor"), (residuals, "'error' observes a value that is com")):
        with pytest.raises(NotImplementedError, match=message):
            fit(model, data(n=4), hessian="mc-fisher")


@pytest.mark.parametrize(
    "cut, options", [([1, 6], {"block_size": 4}), ([9, 3], {"hessian": "mc-ef", "num_samples": 3})], ids=str
)
def test_the_posterior_does_not_depend_on_how_the_stream_was_cut(cut, options):
    rows = data("logistic", n=22)
    bong = BONG(logistic, shuffle=False, **options)
    stops = list(itertools.accumulate(itertools.chain([0], itertools.islice(itertools.cycle(cut), 8))))
    blocks = [part(rows, a, b) for a, b in itertools.pairwise(stops) if a < 22]
    streamed = bong.run(iter(blocks), progress_bar=False, callback=lambda p: p.num_rows, callback_every=8)
    assert_same(streamed, bong.run(rows, progress_bar=False))
    assert streamed.info["callback"] == [8, 16, 22]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_posterior_is_the_next_prior(family):
    rows, options = data("logistic", n=20), {"family": family, "rank": 2, "hessian": "auto"}
    bong = BONG(logistic, shuffle=False, **options)
    once = bong.run(rows, progress_bar=False)
    first = bong.run(part(rows, 10), progress_bar=False)
    before = np.array(first.mean)
    assert_same(first.update(part(rows, 10, None), progress_bar=False), once)
    assert_same(bong.run(part(rows, 10, None), init=first, progress_bar=False), once)
    np.testing.assert_array_equal(first.mean, before)


def test_random_draws_go_on_after_an_update_as_they_would_have():
    rows = data("logistic", n=12)
    bong = BONG(logistic, hessian="mc-ef", num_samples=3, shuffle=False)
    key = jax.random.key(7)
    once = bong.run(rows, rng_key=key, progress_bar=False)
    first = bong.run(part(rows, 6), rng_key=key, progress_bar=False)
    assert_same(first.update(part(rows, 6, None), rng_key=key, progress_bar=False), once)


def test_a_prior_that_is_not_gaussian_is_counted_once_over_updates():
    rows = data("noise", n=16)
    bong = BONG(deviation, hessian="auto", shuffle=False)
    once = bong.run(rows, progress_bar=False)
    twice = bong.run(part(rows, 8), progress_bar=False).update(part(rows, 8, None), progress_bar=False)
    assert_same(twice, once, rtol=1e-9)


@pytest.mark.parametrize("family, method", [("full", RVGA), ("diagonal", RVGA), ("low-rank", BONG)])
def test_posteriors_of_other_methods_and_families_are_starts(family, method):
    rows = data("one-hot", n=20)
    first = method(linear).run(part(rows, 10), progress_bar=False)
    posterior = fit(linear, part(rows, 10, None), family=family, rank=3, run={"init": first})
    assert_exact(posterior, exact_posterior(rows))
    assert posterior.num_rows == 20


@pytest.mark.parametrize("family", ["diagonal", "low-rank"])
def test_the_full_family_goes_on_from_any_other(family):
    rows = data("one-hot", n=20)
    first = fit(linear, part(rows, 10), family=family)
    assert_exact(fit(linear, part(rows, 10, None), run={"init": first}), exact_posterior(rows))


@pytest.mark.parametrize(
    "method, maker, message",
    [
        (BONG(linear), RVGA(linear), "state of this method, not State"),
        (RVGA(linear), BONG(linear), "state of this method, not OnlineState"),
        (RVGA(unknown_scale), RVGA(linear), r"another model or family: its arrays have shapes \[\(3,\), \(3, 3\)\]"),
        (
            BONG(linear, family="diagonal"),
            BONG(linear),
            r"have shapes \[\(3,\), \(3, 3\)\], here they have \[\(3,\), \(3,\)",
        ),
        (BONG(linear, family="low-rank", rank=1), BONG(linear, family="low-rank", rank=2), "method.posterior"),
    ],
)
def test_a_state_of_another_method_model_or_family_is_no_start(method, maker, message):
    rows = data(n=4)
    with pytest.raises(ValueError, match=message):
        method.run(rows, init=maker.init(rows), progress_bar=False)


def test_a_posterior_of_other_sites_is_no_start():
    first = fit(linear, data(n=4))
    with pytest.raises(ValueError, match="latent sites"):
        fit(unknown_scale, data(n=4), hessian="auto", run={"init": first})


@pytest.mark.parametrize("options", [{"block_size": 3}, {"dynamics": RandomWalk(0.3), "family": "diagonal"}], ids=str)
def test_the_functional_form_is_pure_and_equals_run(options):
    rows = data(n=14)
    bong = BONG(linear, shuffle=False, **options)
    with pytest.raises(RuntimeError, match="call init"):
        bong.update(None, rows)
    with pytest.raises(RuntimeError, match="call init"):
        bong.posterior(None)
    start = bong.init(rows)
    before = jax.tree.map(np.array, start.gaussian)
    after = bong.update(start, rows)
    assert_same(bong.posterior(after), bong.run(rows, progress_bar=False))
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.array, start.gaussian))
    update = jax.jit(bong.update)
    state = update(update(start, part(rows, 9)), part(rows, 9, None))  # whole blocks first: the same cut
    assert_same(bong.posterior(state), bong.posterior(after))


def test_an_update_that_leaves_no_gaussian_leaves_the_state_as_it_is():
    rows = data(n=4)
    bong = BONG(linear)
    state = bong.update(bong.init(rows), rows)
    bad = {"X": rows["X"], "y": np.array([0.0, np.nan, 0.0, 0.0])}
    after = bong.update(state, bad)
    assert int(after.num_rows) == 5, "rows before the bad one count"
    assert np.isfinite(bong.posterior(after).mean).all()


def test_rows_at_hand_are_each_visited_once_in_an_order_of_the_keys():
    rows = data("logistic", n=15)
    options = {"family": "diagonal", "shuffle": "auto"}
    first, again, other = (
        fit(logistic, rows, run={"rng_key": jax.random.key(k), "scale": 3.0}, **options) for k in (1, 1, 2)
    )
    assert_same(first, again)
    assert np.max(np.abs(np.asarray(first.mean - other.mean))) > 1e-6
    assert_exact(fit(linear, data(), shuffle="auto"), exact_posterior(data()))
    with pytest.raises(ValueError, match="can be read once"):
        fit(logistic, iter([rows]), shuffle=True)


def convolutional(X, y=None):
    kernel = numpyro.sample("kernel", dist.Normal(0, 1).expand([3, 3, 1, 1]).to_event(4))
    found = jax.lax.conv_general_dilated(X, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(found).sum((1, 2, 3))), obs=y)


@pytest.mark.parametrize(
    "options",
    [
        {"block_size": 3},
        {"rule": "blr", "num_iters": 3, "learning_rate": 0.3, "block_size": 3},
        {"rule": "blr", "num_iters": 12, "learning_rate": 0.1, "hessian": "mc-ef", "num_samples": 4},
    ],
    ids=["bong", "blr", "many steps"],
)
def test_networks_with_convolutions_take_blocks_by_calls_and_end_where_a_loop_does(options, monkeypatch):
    rng = np.random.default_rng(0)
    rows = {"X": rng.normal(size=(7, 5, 5, 1)), "y": np.arange(7.0) % 2}
    found = fit(convolutional, rows, family="low-rank", rank=2, **options)
    assert found.continuation.online.one_by_one
    monkeypatch.setattr(OnlineUpdates, "one_by_one", False)
    assert_same(found, fit(functools.partial(convolutional), rows, family="low-rank", rank=2, **options))


def test_row_arguments_may_be_positional():
    rows = data(n=5)
    assert_same(fit(linear, (rows["X"], rows["y"])), fit(linear, rows))


# ---------------------------------------------------------------------- batch mode (appendix E.6)
@pytest.mark.parametrize(
    "options, rate",
    [
        ({"rule": "blr"}, 1.0),
        ({"rule": "blr", "num_epochs": 200, "parameterization": "moment"}, 0.1),
        ({"rule": "blr", "num_epochs": 60, "family": "low-rank", "rank": 3}, 0.3),
        ({"rule": "bbb", "num_epochs": 300, "parameterization": "moment"}, 0.15),
    ],
    ids=str,
)
def test_epochs_converge_to_the_exact_posterior_of_all_rows(options, rate):
    rows = data()
    rows["X"] = 0.15 * rows["X"]  # for moment steps from the prior
    posterior = fit(linear, rows, block_size=30, learning_rate=rate, **({"num_epochs": 1} | options))
    assert_exact(posterior, exact_posterior(rows), rtol=1e-10 if rate == 1 else 1e-6)
    assert posterior.num_rows == 30


def test_epochs_in_the_diagonal_family_end_at_the_best_diagonal_gaussian():
    """Of all: the exact mean, and the exact precision's diagonal. One pass would miss the mean."""
    rows = data()
    posterior = fit(linear, rows, rule="blr", family="diagonal", num_epochs=300, block_size=30, learning_rate=0.3)
    mean, covariance = exact_posterior(rows)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-6)
    np.testing.assert_allclose(np.diag(posterior.covariance), 1 / np.diag(np.linalg.inv(covariance)), rtol=1e-8)


@pytest.mark.parametrize("hessian", ["lin-hess", "lin-ef", "mc-ef"])
def test_a_block_speaks_for_all_rows(hessian):
    """Equal rows: blocks of any size say the same, the smaller last one included."""
    rows = {"X": np.tile([[0.6, -0.4, 0.3]], (6, 1)), "y": np.ones(6)}
    options = {"rule": "blr", "hessian": hessian, "learning_rate": 0.5, "num_samples": 3}
    whole = fit(logistic, rows, num_epochs=2, block_size=6, **options)
    parts = fit(logistic, rows, num_epochs=1, block_size=4, **options)
    assert_same(parts, whole, rtol=1e-10)


def test_epochs_in_blocks_and_random_order_come_close():
    rows = data(n=60)
    run = {"callback": lambda p: p.num_rows}
    options = {"rule": "blr", "num_epochs": 40, "block_size": 20, "learning_rate": 0.05, "shuffle": True}
    posterior = fit(linear, rows, run=run, **options)
    mean, covariance = exact_posterior(rows)
    assert np.max(np.abs(posterior.mean - mean) / np.sqrt(np.diag(covariance))) < 0.5
    np.testing.assert_allclose(np.diag(posterior.covariance) / np.diag(covariance), 1.0, atol=0.15)
    assert posterior.info["callback"] == [60] * 40


def test_epochs_go_on_from_a_posterior_as_their_prior():
    rows = data()
    bong = BONG(linear, rule="blr", block_size=15, num_epochs=1)
    first = bong.run(part(rows, 15), progress_bar=False)
    expected = exact_posterior(rows)
    for second in (
        first.update(part(rows, 15, None), progress_bar=False),
        bong.run(part(rows, 15, None), init=fit(linear, part(rows, 15)), progress_bar=False),
    ):
        assert_exact(second, expected, rtol=1e-9)
        assert second.num_rows == 30


@pytest.mark.parametrize(
    "options", [{"family": "low-rank", "rank": 2}, {"init_loc_fn": init_to_uniform}], ids=["factors", "mean"]
)
def test_each_key_begins_elsewhere(options):
    """With factors or a mean of its own, whichever keys the method has had before."""
    rows, keys = data("logistic"), [jax.random.key(number) for number in (0, 1)]
    used, means = BONG(logistic, rule="bog", learning_rate=0.1, **options), []
    for key in keys:
        again = used.run(rows, rng_key=key, progress_bar=False)
        alone = BONG(logistic, rule="bog", learning_rate=0.1, **options).run(rows, rng_key=key, progress_bar=False)
        np.testing.assert_array_equal(again.mean, alone.mean)
        means.append(again.mean)
    assert np.max(np.abs(means[0] - means[1])) > 1e-6


# ---------------------------------------------------------------------- learning rates
@pytest.mark.parametrize(
    "options",
    [
        {"rule": "bog", "family": "diagonal"},
        {"rule": "blr", "family": "low-rank", "rank": 2, "num_iters": 2},
        {"rule": "bbb", "num_iters": 3, "hessian": "mc-ef", "num_samples": 4},
        {"rule": "blr", "num_epochs": 2, "block_size": 5},
    ],
    ids=str,
)
def test_another_learning_rate_is_another_method_that_needs_no_compilation(options, count_compilations):
    """At 1e-12, as a rate that is known when a step is compiled may round otherwise."""
    rows = data("logistic")
    method = BONG(logistic, learning_rate=0.3, **options)
    first = method.run(rows, progress_bar=False)
    compiled, slower = count_compilations(lambda: method.with_learning_rate(0.01).run(rows, progress_bar=False))
    assert not compiled
    alone = BONG(logistic, learning_rate=0.01, **options).run(rows, progress_bar=False)
    np.testing.assert_allclose(slower.mean, alone.mean, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(slower.covariance, alone.covariance, rtol=1e-12, atol=1e-14)
    assert np.max(np.abs(slower.mean - first.mean)) > 0.01
    again = method.run(rows, progress_bar=False)
    np.testing.assert_array_equal(again.mean, first.mean)


def test_rates_that_a_rule_does_not_take_are_refused():
    with pytest.raises(ValueError, match="at most 1, not 2"):
        BONG(linear, rule="blr").with_learning_rate(2.0)
    with pytest.raises(ValueError, match="must be positive"):
        BONG(linear, rule="bog").with_learning_rate(0.0)
    with pytest.raises(ValueError, match="takes no learning rate"):
        BONG(linear).with_learning_rate(0.5)


# ---------------------------------------------------------------------- bad input
@pytest.mark.parametrize(
    "options, message",
    [
        ({"rule": "sgd"}, "rule must be one of 'bong', 'bog', 'blr', 'bbb'"),
        ({"hessian": "exactly"}, "hessian must be one of 'lin-hess'"),
        ({"hessian": "linearized"}, "hessian must be one of"),
        ({"family": "sparse"}, "family must be one of 'full', 'diagonal', 'block-diagonal', 'low-rank'"),
        ({"parameterization": "mean"}, "parameterization must be one of 'natural', 'moment', 'softplus'"),
        ({"projection": "both"}, "projection must be one of None, 'exclusive', 'inclusive', 'first'"),
        ({"rank": 0}, "rank must be a positive integer, not 0"),
        ({"rank": True}, "rank must be a positive integer"),
        ({"num_iters": 0}, "num_iters must be a positive integer"),
        ({"num_samples": 2.5}, "num_samples must be a positive integer"),
        ({"block_size": -1}, "block_size must be a positive integer"),
        ({"rule": "blr", "num_epochs": 0}, "num_epochs must be a positive integer"),
        ({"rule": "blr", "learning_rate": 0.0}, "learning_rate must be positive"),
        ({"rule": "bog", "learning_rate": -0.1}, "learning_rate must be positive"),
        ({"rule": "bog", "learning_rate": float("nan")}, "learning_rate must be positive"),
        ({"learning_rate": 0.5}, "rule='bong' takes no learning rate"),
        ({"num_iters": 2}, "rule='bong' takes one step.*rule='blr'"),
        ({"rule": "bog", "num_iters": 2}, "rule='bog' takes one step.*rule='bbb'"),
        ({"rule": "blr", "learning_rate": 1.5}, "at most 1, not 1.5"),
        ({"family": "low-rank", "hessian": "mc-hess"}, "positive semi-definite curvature"),
        ({"family": "low-rank", "parameterization": "moment"}, "one parameterization"),
        ({"parameterization": "softplus", "family": "diagonal"}, "is for rule='bog' or 'bbb'"),
        ({"hessian": "delta-hess", "family": "low-rank"}, "positive semi-definite curvature"),
        ({"projection": "inclusive"}, "is for family='diagonal' or 'block-diagonal'"),
        ({"projection": "inclusive", "family": "diagonal", "rule": "blr"}, "is for rule='bong'"),
        ({"projection": "inclusive", "family": "diagonal", "parameterization": "moment"}, "is for rule='bong'"),
        ({"projection": "inclusive", "family": "diagonal", "hessian": "mc-hess"}, "curvature of low rank"),
        ({"projection": "first", "family": "diagonal"}, "is for family='low-rank', not 'diagonal'"),
        ({"projection": "first", "family": "low-rank", "rule": "bbb"}, "is for rule='bong'"),
        ({"dynamics": "random walk"}, "dynamics must be a RandomWalk"),
        ({"num_epochs": 2}, "num_epochs is for rule='blr' or 'bbb'"),
        ({"rule": "blr", "num_epochs": 2, "num_iters": 2}, "num_epochs is for"),
        ({"rule": "blr", "num_epochs": 2, "dynamics": RandomWalk(0.1)}, "num_epochs is for"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        BONG(linear, **options)


def test_what_a_run_cannot_do_is_refused():
    rows = data(n=4)
    with pytest.raises(ValueError, match="prequential must be one of"):
        fit(linear, rows, run={"prequential": "monte_carlo"})
    with pytest.raises(ValueError, match="callback_every"):
        fit(linear, rows, run={"callback_every": 0})
    with pytest.raises(ValueError, match="num_epochs needs the data in memory"):
        fit(linear, iter([rows]), rule="blr", num_epochs=2)
    with pytest.raises(ValueError, match="ended before its first row"):
        fit(linear, iter([]))


def test_bad_rows_are_named():
    rows = data("logistic", n=6)
    rows["y"][4] = 2.0
    for form in (rows, iter([part(rows, 3), part(rows, 3, None)])):
        with pytest.raises(ValueError, match="row 4"):
            fit(logistic, form)


def test_curvature_that_a_low_rank_precision_cannot_hold_is_refused_by_its_site():
    with pytest.raises(NotImplementedError, match=r"'y'.*not concave"):
        fit(unknown_scale, data(n=4), family="low-rank", hessian="auto")


def test_latents_of_single_rows_need_an_expectation():
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(X)):
            e = numpyro.sample("e", dist.Normal(0, 0.5))
            numpyro.sample("y", dist.Poisson(jnp.exp(X[:, 0] * w + e)), obs=y)

    rows = {"X": np.ones((3, 1)), "y": np.arange(3)}
    with pytest.raises(ValueError, match="hessian='auto'"):
        fit(model, rows)


@pytest.mark.parametrize("block_size, rows_named", [(1, "row {first} "), (4, "rows {first} to {last} ")])
def test_a_learning_rate_that_is_too_large_is_reported_and_the_last_good_state_kept(block_size, rows_named):
    """A plain gradient step in mean and variance takes half the curvature, 0.7, from the variance, 4."""
    rows = {"X": np.eye(3)[np.arange(40) // 4 % 3], "y": np.zeros(40)}
    options = {"family": "diagonal", "parameterization": "moment", "shuffle": False}
    bong = BONG(linear, rule="bog", learning_rate=0.9 * NOISE**2, **options)
    bong.block_size = block_size
    with pytest.raises(ValueError, match=r"learning rate 0\.441 is too large here: lower") as caught:
        bong.run(rows, progress_bar=False)
    first = int(bong.state.num_rows)
    assert 24 <= first < 40 and rows_named.format(first=first, last=first + 3) in str(caught.value)
    np.testing.assert_allclose(bong.state.gaussian.variance, 4 - 0.45 * np.array([first - 16, 8, 8]), rtol=1e-12)
    assert np.isfinite(bong.state.gaussian.mean).all()


@pytest.mark.parametrize(("rule", "num_iters"), [("bog", 1), ("bbb", 5)])
def test_divergence_is_reported_before_numbers_overflow(rule, num_iters):
    rows = data("linear", n=100)
    bong = BONG(linear, rule=rule, num_iters=num_iters, family="low-rank", rank=2, learning_rate=1.0)
    with pytest.raises(ValueError, match="absurdly far away; the learning rate 1 is too large here: lower"):
        bong.run(rows, progress_bar=False)
    assert float(np.abs(bong.state.gaussian.mean).max()) < 1e6


def test_moment_steps_that_leave_the_positive_definite_matrices_advise_natural_ones():
    with pytest.raises(ValueError, match="parameterization='natural'"):
        fit(linear, data(n=4), parameterization="moment")


# ---------------------------------------------------------------------- single precision
@pytest.mark.parametrize(
    "options",
    [
        {"family": "diagonal", "hessian": "mc-hess", "num_samples": 5, "rule": "bog", "learning_rate": 0.01},
        {"family": "low-rank", "rank": 2, "rule": "blr", "num_iters": 2, "learning_rate": 0.5},
    ],
    ids=str,
)
def test_single_precision_stays_close_to_double(options):
    rows = data("logistic", n=60)
    double = fit(logistic, rows, **options)
    with jax.enable_x64(False):
        single = fit(logistic, {name: array.astype(np.float32) for name, array in rows.items()}, **options)
        assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(single.gaussian))
        mean, covariance = (np.asarray(x, np.float64) for x in (single.mean, single.covariance))
    assert np.isfinite(mean).all() and np.all(np.linalg.eigvalsh(covariance) > 0)
    if "mc-hess" not in options.values():  # whose draws are others
        np.testing.assert_allclose(mean, double.mean, atol=1e-4)
        np.testing.assert_allclose(covariance, double.covariance, atol=1e-4)


def test_digits_sorted_by_class_are_learned():
    """In their own order, the last class is what is known best."""
    digits = load_digits()
    order = np.argsort(digits.target, kind="stable")
    rows = {"X": digits.data[order] / 16.0, "y": digits.target[order]}

    def classes(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([640]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=X @ w.reshape(64, 10)), obs=y)

    def accuracy(method):
        w = np.asarray(method.run(rows, progress_bar=False).mean).reshape(64, 10)
        return np.mean(np.argmax(rows["X"] @ w, axis=1) == rows["y"])

    options = {"family": "diagonal", "block_size": 10}
    assert accuracy(BONG(classes, **options)) > 0.9 > 0.8 > accuracy(BONG(classes, shuffle=False, **options))


# ---------------------------------------------------------------------- rows that are left out, and updates
@pytest.mark.parametrize("bad", [[0, 5], [9, 10, 11], [3, 11]], ids=str)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_row_has_a_prequential_density_and_bad_ones_have_nan_wherever_they_are(bad, streamed):
    rows = data(n=12)
    good = np.setdiff1d(np.arange(12), bad)
    expected = fit(linear, {name: array[good] for name, array in rows.items()}, run={"prequential": "plugin"}).info[
        "log_predictive"
    ]
    rows["y"] = np.where(np.isin(np.arange(12), bad), np.nan, rows["y"])
    blocks = iter([part(rows, 5), part(rows, 5, 12)]) if streamed else rows
    posterior = BONG(linear, shuffle=False).run(blocks, progress_bar=False, prequential="plugin", on_bad_row="skip")
    found = posterior.info["log_predictive"]
    assert found.shape == (12,)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(found)), bad)
    np.testing.assert_allclose(found[good], expected, rtol=1e-9)


METHODS = [lambda: RVGA(linear), lambda: BONG(linear, block_size=4), lambda: RVGA(linear, family="diagonal")]


@pytest.mark.parametrize("make", METHODS, ids=["RVGA", "BONG", "diagonal"])
def test_updates_refuse_arrays_of_unequal_lengths(make):
    method, rows = make(), data(n=12)
    state = method.init(rows)
    with pytest.raises(ValueError, match="must share their leading axis, the rows, but their lengths are X: 5, y: 12"):
        method.update(state, {"X": rows["X"][:5], "y": rows["y"]})


@pytest.mark.parametrize("make", METHODS, ids=["RVGA", "BONG", "diagonal"])
def test_updates_take_tuples_and_no_rows(make):
    method, rows = make(), data(n=12)
    state = method.update(method.init(rows), rows)
    of_tuple = jax.jit(method.update)(method.init(rows), (rows["X"], rows["y"]))
    same = method.update(state, part(rows, 0))
    for other in (of_tuple, same):
        assert int(other.num_rows) == 12
        np.testing.assert_allclose(method.posterior(other).mean, method.posterior(state).mean, rtol=1e-9)
