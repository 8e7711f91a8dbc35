"""The recursion: exactness where it is exact, the paper's theorems, and what a user can ask of a run."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import polygamma
from shared_methods import shared

from numpyro_rvga import BONG, RVGA
from numpyro_rvga.core.updates.state import State
from numpyro_rvga.engines import registry

SCALE = 0.7


def linear_gaussian(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.5, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, SCALE), obs=y)


def logistic(X, y=None, scale=2.0):
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def hierarchical(X, g, y=None, num_groups=6):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", num_groups):
        a = numpyro.sample("a", dist.Normal(0, scale))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + a[g]), obs=y)


def data(kind, n=90, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X, w = rng.normal(size=(n, d)), rng.normal(size=d)
    if kind == "linear":
        return {"X": X, "y": X @ w + SCALE * rng.normal(size=n)}
    g = rng.integers(0, 6, n)
    effect = rng.normal(size=6)[g] if kind == "groups" else 0.0
    y = (rng.random(n) < 1 / (1 + np.exp(-X @ w - effect))).astype(float)
    return {"X": X, "g": g, "y": y} if kind == "groups" else {"X": X, "y": y}


def fit(model, rows, run=None, **options):
    """One pass over rows in their own order, with nothing before or after it."""
    plain = {"shuffle": False, "certify": False}
    return shared(RVGA, model, **plain | options).run(rows, progress_bar=False, **(run or {}))


def exact_posterior(rows):
    X, y = rows["X"], rows["y"]
    precision = np.eye(X.shape[1]) / 4 + X.T @ X / SCALE**2
    return np.linalg.solve(precision, 0.5 / 4 + X.T @ y / SCALE**2), np.linalg.inv(precision)


def log_evidence(rows):
    X, y = rows["X"], rows["y"]
    covariance = SCALE**2 * np.eye(len(y)) + 4 * X @ X.T
    residual = y - X @ np.full(X.shape[1], 0.5)
    log_det = np.linalg.slogdet(2 * np.pi * covariance)[1]
    return -0.5 * (residual @ np.linalg.solve(covariance, residual) + log_det)


def gap(a, b):
    """Largest difference of means in standard deviations, and of log standard deviations."""
    deviation = np.sqrt(np.diag(a.covariance))
    means = np.max(np.abs(np.asarray(a.mean - b.mean)) / deviation)
    return means, np.max(np.abs(np.log(np.sqrt(np.diag(b.covariance)) / deviation)))


# ---------------------------------------------------------------------- linear-Gaussian rows
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"block_size": 1},
        {"block_size": 7},
        {"block_size": 5, "first_block": 20},
        {"first_block": 20, "memory": 30},
        {"scheme": "explicit"},
        {"scheme": "ekf"},
        {"scheme": "laplace"},
        {"expectation": "quadrature", "block_size": 4},
        {"expectation": "linearized", "block_size": 1},
        {"expectation": "sigma_points", "block_size": 3},
        {"expectation": "monte_carlo", "block_size": 3},
    ],
    ids=str,
)
def test_linear_gaussian_rows_give_the_exact_posterior_and_evidence(options):
    rows = data("linear")
    posterior = fit(linear_gaussian, rows, **options)
    mean, covariance = exact_posterior(rows)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-10, atol=1e-12)
    if "ekf" in options.values() or "linearized" in options.values():
        assert posterior.elbo is None, "derivatives at the mean give no expectation"
    else:
        np.testing.assert_allclose(posterior.elbo, log_evidence(rows), rtol=1e-7)


@pytest.mark.parametrize("order", [2, 1, 0])
def test_derivatives_of_every_order_give_the_exact_posterior(order):
    rows = data("linear")
    posterior = fit(linear_gaussian, rows, expectation="quadrature", order=order, block_size=9)
    mean, covariance = exact_posterior(rows)
    tolerance = 1e-9 if order == 2 else 2e-4
    np.testing.assert_allclose(posterior.mean, mean, atol=tolerance)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=10 * tolerance, atol=1e-6)


# ---------------------------------------------------------------------- the paper's theorems
def online_natural_gradient(rows, scale):
    """Equation (54): J_t the running mean of Fisher matrices, step 1 / (t + 1), from J_0 = the prior's precision."""
    X, y = rows["X"], rows["y"]
    mean, information = np.zeros(X.shape[1]), np.eye(X.shape[1]) / scale**2
    for t, (x, target) in enumerate(zip(X, y), start=1):
        p = 1 / (1 + np.exp(-x @ mean))
        information = t / (t + 1) * information + p * (1 - p) * np.outer(x, x) / (t + 1)
        mean = mean + np.linalg.solve(information, x * (target - p)) / (t + 1)
    return mean, np.linalg.inv(information * (len(y) + 1))


def test_ekf_is_the_online_natural_gradient_theorem_3():
    rows = data("logistic", n=60)
    posterior = fit(logistic, rows, scheme="ekf")
    mean, covariance = online_natural_gradient(rows, 2.0)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-9)


def test_explicit_scheme_with_derivatives_at_the_mean_is_the_ekf_theorem_3():
    rows = data("logistic", n=60)
    ekf = fit(logistic, rows, scheme="ekf")
    linearized = fit(logistic, rows, scheme="explicit", expectation="linearized")
    np.testing.assert_allclose(linearized.mean, ekf.mean, rtol=1e-12)
    np.testing.assert_allclose(linearized.covariance, ekf.covariance, rtol=1e-12)


def test_implicit_updates_satisfy_the_fixed_point_equations_3_and_4():
    rows = data("logistic", n=1)
    posterior = fit(logistic, rows, block_size=1)
    x, y = rows["X"][0], rows["y"][0]
    nodes, weights = np.polynomial.hermite_e.hermegauss(60)
    a = x @ posterior.mean + nodes * np.sqrt(x @ posterior.covariance @ x)
    p = 1 / (1 + np.exp(-a))
    weights = weights / weights.sum()
    np.testing.assert_allclose(posterior.mean, 4.0 * x * (y - weights @ p), atol=1e-4)
    precision = np.eye(3) / 4 + np.outer(x, x) * (weights @ (p * (1 - p)))
    np.testing.assert_allclose(np.linalg.inv(posterior.covariance), precision, atol=1e-4)


def test_quadratic_kalman_filter_follows_equation_90():
    rows = data("logistic", n=25)
    mean, covariance = np.zeros(3), 4 * np.eye(3)
    for x, y in zip(rows["X"], rows["y"]):
        xi = np.sqrt(x @ (covariance + np.outer(mean, mean)) @ x)
        noise = xi / (1 / (1 + np.exp(-xi)) - 0.5)
        gain = covariance @ x / (noise + x @ covariance @ x)
        mean = mean + gain * (noise * (y - 0.5) - x @ mean)
        covariance = covariance - np.outer(gain, x @ covariance)
    posterior = fit(logistic, rows, scheme="qkf")
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-8)


def test_laplace_is_the_mode_and_its_hessian():
    rows = data("logistic")
    posterior = fit(logistic, rows, scheme="laplace")
    X, y = rows["X"], rows["y"]
    log_joint = lambda w: jnp.sum(y * (X @ w) - jnp.logaddexp(0, X @ w)) - w @ w / 8  # noqa: E731
    assert float(jnp.max(jnp.abs(jax.grad(log_joint)(posterior.mean)))) < 1e-4
    np.testing.assert_allclose(posterior.covariance, jnp.linalg.inv(-jax.hessian(log_joint)(posterior.mean)), rtol=1e-6)


@pytest.mark.parametrize("order", [1, 0])
def test_orders_of_corollary_1_1_agree_with_the_second_order_form(order):
    rows = data("logistic")
    second = fit(logistic, rows, expectation="quadrature", order=2)
    other = fit(logistic, rows, expectation="quadrature", order=order)
    assert max(gap(second, other)) < 2e-4


@pytest.mark.parametrize("copies", [1, 40])
def test_blocks_of_equal_rows_are_as_exact_as_others(copies):
    """With more parameters than rows in a block: the rows span few directions, or only one."""
    rng = np.random.default_rng(0)
    X = np.repeat(rng.normal(size=(120 // copies, 60)), copies, axis=0)
    rows = {"X": X, "y": X @ rng.normal(size=60) + SCALE * rng.normal(size=120)}
    posterior = fit(linear_gaussian, rows, block_size=50, first_block=0)
    mean, covariance = exact_posterior(rows)
    np.testing.assert_allclose(posterior.mean, mean, atol=1e-9)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-10)


# ---------------------------------------------------------------------- one pass against the optimum
def test_every_block_size_ends_close_to_the_joint_solve():
    rows = data("logistic", n=400, d=5)
    with_bound = {"certify": True, "max_looks": 1, "certificate_tolerance": 1.0}  # and no step after the pass
    sizes = ({"block_size": 400}, {"block_size": 32, "first_block": 100}, {"block_size": 32}, {"block_size": 1})
    best, *others = [fit(logistic, rows, **with_bound, **size) for size in sizes]
    assert all(max(gap(best, other)) < 0.5 for other in others)
    bounds = [posterior.elbo for posterior in (best, *others)]
    assert np.all(np.diff(bounds) <= 1e-6)


def test_kept_rows_repair_what_one_pass_gets_wrong():
    rng = np.random.default_rng(3)
    n = 600
    X = np.column_stack([rng.normal(size=n), rng.random(n) < 0.05, rng.random(n) < 0.03]).astype(float)
    y = (rng.random(n) < 1 / (1 + np.exp(-X @ [1.0, 4.0, -4.0]))).astype(float)
    y[X[:, 1] == 1] = 1.0  # separated: the posterior of a rare level stays wide and skewed
    rows = {"X": X, "y": y}
    best = fit(logistic, rows, run={"scale": 5.0}, first_block=n)
    plain = fit(logistic, rows, run={"scale": 5.0}, first_block=50, memory=0, block_size=16)
    kept = fit(logistic, rows, run={"scale": 5.0}, first_block=50, memory=300, block_size=16)
    assert max(gap(best, kept)) < 0.02 < max(gap(best, plain))
    assert 0 < kept.info["kept_rows"] <= 300
    np.testing.assert_allclose(kept.info["log_evidence_estimate"], best.elbo, atol=0.05)


def test_kept_rows_that_are_more_than_one_solve_takes_are_solved_for_in_turns():
    rng = np.random.default_rng(4)
    n = 9000
    X = np.column_stack([np.ones(n), rng.normal(size=n), rng.random(n) < 0.1])
    y = rng.poisson(np.exp(X @ [-5.0, 0.4, -1.0])).astype(float)  # few counts: no row says much, and all are skewed

    def counts(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 3).expand([3]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=y)

    rows = {"X": X, "y": y}
    best = fit(counts, rows, first_block=n)
    one, turns = (fit(counts, rows, first_block=50, memory=memory, block_size=16) for memory in (1200, 6000))
    assert turns.info["kept_rows"] == 6000
    assert max(gap(best, turns)) < 0.1 < 0.3 < max(gap(best, one))
    np.testing.assert_allclose(turns.info["log_evidence_estimate"], best.elbo, atol=0.05)


def test_keeping_every_row_is_the_joint_solve():
    rows = data("groups", n=120)
    best = fit(hierarchical, rows)
    kept = fit(hierarchical, rows, first_block=40, memory=1000, block_size=16, tolerance=1e-8)
    assert max(gap(best, kept)) < 1e-3
    np.testing.assert_allclose(kept.info["log_evidence_estimate"], best.elbo, atol=1e-3)


def test_rows_sorted_by_class_ruin_a_pass_and_shuffling_mends_it():
    rows = data("logistic", n=3000)
    rows["X"][:, 0] = 1.0  # an intercept: after 1,500 rows of one class it is far away, and q narrow
    order = np.argsort(rows["y"], kind="stable")
    sorted_rows = {k: v[order] for k, v in rows.items()}
    best = fit(logistic, rows)
    options = {"first_block": 300, "memory": 0, "block_size": 30}
    in_order, shuffled = (max(gap(best, fit(logistic, sorted_rows, shuffle=s, **options))) for s in (False, True))
    assert shuffled < 0.3 < 3.0 < in_order


# ---------------------------------------------------------------------- forms of data, states
@pytest.mark.parametrize("cut", [[7], [1, 50]])
def test_the_posterior_does_not_depend_on_how_the_stream_was_cut(cut):
    rows = data("logistic")
    whole = fit(logistic, rows, first_block=20, memory=0)

    def blocks():
        start, i = 0, 0
        while start < len(rows["y"]):
            stop = start + cut[i % len(cut)]
            yield {k: v[start:stop] for k, v in rows.items()}
            start, i = stop, i + 1

    streamed = fit(logistic, blocks(), first_block=20, memory=0)
    np.testing.assert_allclose(streamed.mean, whole.mean, rtol=1e-12)
    np.testing.assert_allclose(streamed.covariance, whole.covariance, rtol=1e-11)
    assert streamed.num_rows == whole.num_rows == len(rows["y"])


@pytest.mark.parametrize("model, kind", [(linear_gaussian, "linear"), (hierarchical, "groups")])
def test_a_posterior_is_the_next_prior(model, kind):
    rows = data(kind, n=200)
    halves = [{k: v[s] for k, v in rows.items()} for s in (slice(0, 120), slice(120, 200))]
    once = fit(model, rows)
    first = fit(model, halves[0])
    mean_before = np.array(first.mean)
    twice = RVGA(model).run(halves[1], init=first, progress_bar=False)
    assert max(gap(once, twice)) < (1e-8 if kind == "linear" else 0.3)
    assert max(gap(twice, first.update(halves[1], progress_bar=False))) < 1e-10
    np.testing.assert_array_equal(first.mean, mean_before)
    assert twice.num_rows == 200


def test_functional_form_is_pure_and_works_under_jit():
    rows = data("linear")
    rvga = RVGA(linear_gaussian)
    state = rvga.init(rows)
    assert isinstance(state, State)
    update = jax.jit(rvga.update)
    for start in range(0, 90, 30):
        state = update(state, {k: jnp.asarray(v[start : start + 30]) for k, v in rows.items()})
    posterior = rvga.posterior(state)
    mean, covariance = exact_posterior(rows)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-9)
    assert posterior.num_rows == 90


def measured_with_error(X, y):
    """A latent variable of each row, and a deterministic site that reads the data."""
    slope, scale = numpyro.sample("slope", dist.Normal(0, 2)), numpyro.sample("scale", dist.HalfNormal(1))
    numpyro.deterministic("average", slope * jnp.mean(X))
    with numpyro.plate("rows", len(X)):
        true = numpyro.sample("true", dist.Normal(0, 1))
        numpyro.sample("x", dist.Normal(true, 0.5), obs=X[:, 0])
        numpyro.sample("y", dist.Normal(slope * true, scale), obs=y)


@pytest.mark.parametrize(
    "model, name, options", [(hierarchical, "groups", {"first_block": 30}), (measured_with_error, "linear", {})]
)
def test_a_second_run_of_the_same_shapes_compiles_nothing(model, name, options, count_compilations):
    rows = data(name)
    rvga = RVGA(model, **options)
    rvga.run(rows, progress_bar=False)
    other = {**rows, "y": 1 - rows["y"]}
    assert not count_compilations(lambda: rvga.run(other, progress_bar=False))[0]
    assert count_compilations(lambda: jax.jit(lambda x: x + 1.5)(1.0))[0].total() == 1, "compilations are heard"


@pytest.mark.parametrize("model, name", [(logistic, "logistic"), (hierarchical, "groups")])
def test_another_key_compiles_nothing_where_it_draws_no_nodes(model, name, count_compilations):
    rows, options = data(name), {"first_block": 30, "certify": False}
    rvga = RVGA(model, **options)
    rvga.run(rows, progress_bar=False)
    keys = [jax.random.key(number) for number in range(1, 4)]
    compiled, orders = count_compilations(lambda: [rvga.run(rows, rng_key=key, progress_bar=False) for key in keys])
    assert not compiled
    alone = RVGA(model, **options).run(rows, rng_key=keys[-1], progress_bar=False)
    np.testing.assert_array_equal(orders[-1].mean, alone.mean)


def test_another_key_draws_other_nodes():
    rows = data("logistic")
    method = RVGA(logistic, expectation="monte_carlo", num_samples=16, shuffle=False)
    first, second = (method.run(rows, rng_key=jax.random.key(n), progress_bar=False).mean for n in (0, 1))
    assert np.max(np.abs(first - second)) > 1e-6
    np.testing.assert_array_equal(method.run(rows, progress_bar=False).mean, first)


def test_what_is_compiled_for_other_keyword_arguments_does_not_pile_up(monkeypatch):
    monkeypatch.setattr(registry, "MOST_KEPT", 3)
    rows, method = data("logistic", n=20), RVGA(logistic)
    first = method.run(rows, scale=1.0, progress_bar=False)
    engines = []
    for number in range(5):
        method.init(rows, scale=1.0 + number)
        engines.append(weakref.ref(method.last_engine.program))
    gc.collect()
    assert sum(engine() is not None for engine in engines) <= 3
    np.testing.assert_array_equal(method.run(rows, scale=1.0, progress_bar=False).mean, first.mean)


def test_row_arguments_may_be_positional():
    rows = data("linear")
    named, positional = fit(linear_gaussian, rows), fit(linear_gaussian, (rows["X"], rows["y"]))
    np.testing.assert_array_equal(named.mean, positional.mean)


# ---------------------------------------------------------------------- precision
@pytest.mark.parametrize("options", [{}, {"block_size": 1}, {"block_size": 64}], ids=str)
def test_float32_stays_close_to_float64_with_an_ill_conditioned_design(options):
    rng = np.random.default_rng(0)
    n, d = 6000, 10
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    X = rng.normal(size=(n, d)) * np.geomspace(1, 1e-2, d) @ basis  # condition number 1e4 of X'X
    y = (rng.random(n) < 1 / (1 + np.exp(-X @ rng.normal(size=d)))).astype(float)
    rows = {"X": X, "y": y}
    double = fit(logistic, rows, **options)
    with jax.enable_x64(False):
        single = fit(functools.partial(logistic), {k: v.astype(np.float32) for k, v in rows.items()}, **options)
        assert single.mean.dtype == jnp.float32
        single_covariance = np.asarray(single.covariance, np.float64)
    means, deviations = gap(double, single)
    assert np.all(np.linalg.eigvalsh(single_covariance) > 0)
    assert means < 0.02
    assert deviations < 0.01


def two_way(y, group, kind):
    """Effects in the outcome's own units, whose standard deviation may be anywhere in a wide range."""
    sd = y.std()
    intercept = numpyro.sample("intercept", dist.Normal(y.mean(), 5 * sd))
    scale = numpyro.sample("scale", dist.Gamma(1.3, 1 / sd))
    group_effect = numpyro.sample("group_effect", dist.Normal(0, scale).expand([12]))
    kind_effect = numpyro.sample("kind_effect", dist.Normal(0, 2 * sd).expand([5]))
    noise = numpyro.sample("noise", dist.Uniform(sd / 100, 10 * sd))
    numpyro.sample("y", dist.Normal(intercept + group_effect[group] + kind_effect[kind], noise), obs=y)


def test_float32_is_solved_in_the_units_of_large_outcomes():
    rng = np.random.default_rng(8)
    group, kind = rng.integers(0, 12, 300), rng.integers(0, 5, 300)
    means = 1e5 + 2e4 * rng.normal(size=12)[group] + 3e4 * rng.normal(size=5)[kind]
    data = {"y": means + 1.8e4 * rng.normal(size=300), "group": group, "kind": kind}
    with jax.enable_x64(False):
        single = RVGA(functools.partial(two_way)).run(data, progress_bar=False)
        assert single.mean.dtype == jnp.float32
    double = RVGA(two_way).run(data, progress_bar=False)
    assert double.info["converged"]
    sd = np.sqrt(np.diag(double.covariance))
    assert np.max(np.abs(single.mean - double.mean) / sd) < 0.05
    np.testing.assert_allclose(np.sqrt(np.diag(single.covariance)), sd, rtol=0.05)


def test_float32_rows_one_by_one_are_solved_as_far_as_rounding_lets_them():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(20_000, 10)).astype(np.float32)
    rows = {"X": X, "y": (X @ rng.normal(size=10) > rng.logistic(size=20_000)).astype(np.float32)}
    double = fit(logistic, {name: array.astype(float) for name, array in rows.items()}, block_size=1)
    with jax.enable_x64(False):
        single = fit(functools.partial(logistic), rows, block_size=1)
    assert single.info["converged"]
    assert single.info["mean_iterations"] < 1.2 * double.info["mean_iterations"]
    assert max(gap(double, single)) < 0.002


@pytest.mark.parametrize("outcome", ["normal", "laplace"])
def test_the_extended_kalman_filter_goes_by_the_fisher_information(outcome):
    """Observed Hessians of a log scale may have the wrong sign, and those of Laplace rows are zero."""

    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0, 2))
        scale = numpyro.sample("scale", dist.LogNormal(0, 1)) if outcome == "normal" else 0.5
        family = dist.Normal if outcome == "normal" else dist.Laplace
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", family(slope * x, scale), obs=y)

    rng = np.random.default_rng(0)
    x = rng.normal(size=2000)
    data = {"x": x, "y": x + 0.5 * getattr(rng, outcome)(size=2000)}
    posterior = RVGA(model, scheme="ekf").run(data, progress_bar=False)
    sds = np.sqrt(np.diag(posterior.covariance))
    places = posterior.site_names.index("slope")
    np.testing.assert_allclose(sds[places], 0.5 / np.linalg.norm(x), rtol=0.05)
    assert abs(posterior.mean[places] - 1) < 3 * sds[places]
    if outcome == "normal":
        np.testing.assert_allclose(sds[1 - places], 1 / np.sqrt(2 * len(x)), rtol=0.05)
        assert abs(posterior.mean[1 - places] - np.log(0.5)) < 3 * sds[1 - places]


@pytest.mark.parametrize("outcome", ["binary", "count"])
def test_implicit_steps_on_linearized_rows_are_explicit_and_the_extended_kalman_filters(outcome):
    """Theorem 3: a log-likelihood that is quadratic about the mean before the row, with the Fisher information."""
    weights, start = np.array([1.5, -0.5]), np.array([0.3, 0.8])
    before = weights @ start
    family = {"binary": lambda u: dist.Bernoulli(logits=u), "count": lambda u: dist.Poisson(jnp.exp(u))}[outcome]
    derivative = {"binary": 1 / (1 + np.exp(-before)), "count": np.exp(before)}[outcome]
    information = derivative * (1 - derivative) if outcome == "binary" else derivative

    def model(X, y):
        w = numpyro.sample("w", dist.Normal(start, 2.0).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", family(X @ w), obs=y)

    def quadratic(log_prob, mean, covariance):
        slope, curvature = (f(jnp.full_like(mean, before)) for f in (jax.grad(log_prob), jax.hessian(log_prob)))
        away = mean - before
        return slope @ away + 0.5 * (away @ curvature @ away + jnp.sum(curvature * covariance))

    row = {"X": weights[None], "y": np.ones(1)}
    gain = 4 * weights / (4 * weights @ weights + 1 / information)  # of an observation of variance 1 / information
    mean = start + gain * (1 - derivative) / information
    covariance = 4 * (np.eye(2) - np.outer(gain, weights))
    for options in ({"scheme": "ekf"}, {"scheme": "explicit", "expectation": quadratic}, {"expectation": quadratic}):
        found = RVGA(model, block_size=1, certify=False, **options).run(row, progress_bar=False)
        np.testing.assert_allclose(found.mean, mean, rtol=1e-6)
        np.testing.assert_allclose(found.covariance, covariance, rtol=1e-6)


SINGLE_PREDICTOR = {
    "gamma": (lambda u: dist.Gamma(2.0, jnp.exp(-u)), 2.0),
    "exponential": (lambda u: dist.Exponential(jnp.exp(-u)), 1.0),
    "exponential, another link": (lambda u: dist.Exponential(1 / jax.nn.softplus(u)), None),
    "negative binomial": (lambda u: dist.NegativeBinomial2(jnp.exp(u), 3.0), None),
    "geometric": (lambda u: dist.GeometricLogits(u), None),
}


@functools.cache
def average_squared_score(outcome):
    """At the predictor 0.8, of outcomes that are drawn there."""
    family, _ = SINGLE_PREDICTOR[outcome]
    score = jax.grad(lambda u, y: family(u).log_prob(y))
    draws = family(0.8).sample(jax.random.key(0), (200_000,)).astype(float)
    return float(jnp.mean(jax.vmap(score, (None, 0))(0.8, draws) ** 2))


@pytest.mark.parametrize("scheme", ["ekf", "lin-hess"])
@pytest.mark.parametrize("outcome", SINGLE_PREDICTOR)
def test_fisher_information_is_what_outcomes_drawn_at_the_mean_have_on_average(outcome, scheme):
    """One row at a known predictor: the precision grows by E[score^2], whatever the row's own outcome is."""
    family, known = SINGLE_PREDICTOR[outcome]

    def model(x, y):
        slope = numpyro.sample("slope", dist.Normal(0.4, 0.5))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", family(slope * x), obs=y)

    method = RVGA(model, scheme="ekf") if scheme == "ekf" else BONG(model, hessian="lin-hess")
    information = average_squared_score(outcome)
    for y in (1.0, 7.0):
        found = method.run({"x": np.array([2.0]), "y": np.array([y])}, progress_bar=False)
        gained = 1 / float(found.covariance[0, 0]) - 1 / 0.5**2
        np.testing.assert_allclose(gained, 4 * information, rtol=0.03)
        if known is not None:
            np.testing.assert_allclose(gained, 4 * known, rtol=1e-6)


def gamma_information(k, rate):
    """About log k and log rate."""
    return np.array([[k**2 * polygamma(1, k), -k], [-k, k]])


def beta_information(p, q):
    """About log p and log q."""
    cross = -p * q * polygamma(1, p + q)
    return np.array([[p**2 * polygamma(1, p), 0], [0, q**2 * polygamma(1, q)]]) + np.array(
        [[cross * p / q, cross], [cross, cross * q / p]]
    )


TWO_PREDICTORS = {"gamma": (dist.Gamma, gamma_information, 1.3), "beta": (dist.Beta, beta_information, 0.2)}


@pytest.mark.parametrize("scheme", ["ekf", "lin-hess"])
@pytest.mark.parametrize("outcome", TWO_PREDICTORS)
def test_fisher_information_of_two_parameters_that_move_is_that_of_textbooks(outcome, scheme):
    family, information, y = TWO_PREDICTORS[outcome]

    def model(y):
        logs = numpyro.sample("logs", dist.Normal(jnp.array([0.3, -0.4]), 0.5).to_event(1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", family(*jnp.exp(logs)), obs=y)

    method = RVGA(model, scheme="ekf") if scheme == "ekf" else BONG(model, hessian="lin-hess")
    found = method.run({"y": np.array([y])}, progress_bar=False)
    gained = np.linalg.inv(np.asarray(found.covariance, np.float64)) - np.eye(2) / 0.5**2
    np.testing.assert_allclose(gained, information(*np.exp([0.3, -0.4])), rtol=1e-3)
