"""FixedPointVI: exact where the answer is known, its schedules against each other, the bound's rise, chunks, starts."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from shared_methods import shared

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.core.updates.state import StepInfo
from numpyro_rvga.engines import row_chunks
from numpyro_rvga.engines.batch import is_maximized

SCHEDULES = ("incremental", "batch", "gradient")
NOISE = 0.7


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.5, 2.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def robust(X, y=None):
    w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.StudentT(4.0, X @ w, scale), obs=y)


def hierarchical(X, g, y=None):
    spread = numpyro.sample("spread", dist.HalfCauchy(1.0))
    with numpyro.plate("groups", 5):
        a = numpyro.sample("a", dist.Normal(0.0, spread))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(a[g] + 0.3 * X[:, 0])), obs=y)


def of_line(make):
    """A model whose rows see theta through one line."""

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", make(X @ w), obs=y)

    return model


CUTS = jnp.array([-1.0, 0.5])
LIKELIHOODS = {
    "poisson": lambda line: dist.Poisson(jnp.exp(line)),
    "laplace": lambda line: dist.Laplace(line, 0.5),
    "student": lambda line: dist.StudentT(3.0, line, 0.5),
    "ordinal": lambda line: dist.OrderedLogistic(line, CUTS),
    "volatility": lambda line: dist.Normal(0.0, jnp.exp(0.5 * line)),
    "exponential": lambda line: dist.Exponential(jnp.exp(-line)),
}
MODELS = {"linear": linear, "logistic": logistic, "robust": robust, "hierarchical": hierarchical}
MODELS |= {name: of_line(make) for name, make in LIKELIHOODS.items()}


def data(kind, n=150):
    rng = np.random.default_rng(4)
    X = rng.normal(size=(n, 3))
    line = X @ [1.0, -0.5, 0.2]
    if kind == "linear":
        return {"X": X, "y": line + NOISE * rng.normal(size=n)}
    if kind == "logistic":
        return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-line))).astype(float)}
    if kind in LIKELIHOODS:
        return {"X": X, "y": np.asarray(LIKELIHOODS[kind](jnp.asarray(line)).sample(jax.random.key(0)))}
    if kind == "robust":
        return {"X": X, "y": line + 0.5 * rng.standard_t(4, n)}
    g = rng.integers(0, 5, n)
    return {"X": X, "g": g, "y": rng.poisson(np.exp(0.8 * rng.normal(size=5)[g] + 0.3 * X[:, 0]))}


def fit(kind, rows=None, init=None, **options):
    rows = data(kind) if rows is None else rows
    return shared(FixedPointVI, MODELS[kind], **options).run(rows, init=init, progress_bar=False)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_linear_gaussian_rows_give_the_exact_posterior_and_evidence(schedule):
    rows = data("linear")
    posterior = fit("linear", rows, schedule=schedule, tolerance=1e-12)
    X, y = rows["X"], rows["y"]
    precision = np.eye(3) / 4 + X.T @ X / NOISE**2
    np.testing.assert_allclose(posterior.mean, np.linalg.solve(precision, 0.5 / 4 + X.T @ y / NOISE**2), atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, np.linalg.inv(precision), atol=1e-7)
    marginal = 4 * X @ X.T + NOISE**2 * np.eye(len(y))
    residual = y - X @ np.full(3, 0.5)
    log_det = np.linalg.slogdet(2 * np.pi * marginal)[1]
    evidence = -0.5 * (residual @ np.linalg.solve(marginal, residual) + log_det)
    np.testing.assert_allclose(posterior.elbo, evidence, rtol=1e-9)
    assert posterior.info["converged"]


@pytest.mark.parametrize("kind", ["logistic", "robust", "hierarchical"])
def test_fixed_points_are_where_a_gradient_climb_ends(kind):
    """L-BFGS on the mean and the Cholesky factor shares neither steps nor covariance update with the fixed points."""
    found = {schedule: fit(kind, schedule=schedule) for schedule in SCHEDULES}
    climbed = found["gradient"]
    deviation = np.sqrt(np.diagonal(climbed.covariance))
    for schedule, posterior in found.items():
        assert posterior.info["converged"], schedule
        np.testing.assert_allclose(posterior.elbo, climbed.elbo, atol=1e-6)
        np.testing.assert_allclose((posterior.mean - climbed.mean) / deviation, 0.0, atol=1e-3)
        np.testing.assert_allclose(np.sqrt(np.diagonal(posterior.covariance)) / deviation, 1.0, atol=1e-3)


def bound_of(kind, mean, root, rows):
    """sum E[log lik] - KL of N(mean, root root^T), by NumPyro's densities on a fine grid."""
    z = np.linspace(-8.5, 8.5, 1701)
    weights = np.exp(-0.5 * z**2) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    design = rows["X"]
    line = (design @ mean)[:, None] + np.linalg.norm(design @ root, axis=1)[:, None] * z
    expected = np.sum(np.asarray(LIKELIHOODS[kind](jnp.asarray(line)).log_prob(rows["y"][:, None])) @ weights)
    divergence = 0.5 * (np.sum(root**2) + mean @ mean) / 9.0 - 1.5 + 1.5 * np.log(9.0)
    return expected - divergence + np.sum(np.log(np.abs(np.diagonal(root))))


@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_bound_has_no_slope_where_the_fixed_point_ends(kind):
    rows = data(kind, n=40)
    posterior = fit(kind, rows)
    mean, root = np.asarray(posterior.mean), np.asarray(posterior.scale_tril)
    np.testing.assert_allclose(posterior.elbo, bound_of(kind, mean, root, rows), atol=1e-4)
    for place in np.eye(3):  # in units of the posterior's standard deviations
        step, turn = 0.02 * root @ place, np.eye(3) + 0.02 * np.outer(np.ones(3), place)
        slope = [bound_of(kind, mean + sign * step, root, rows) for sign in (1, -1)]
        turned = [bound_of(kind, mean, root @ np.linalg.matrix_power(np.tril(turn), sign), rows) for sign in (1, -1)]
        assert abs(slope[0] - slope[1]) < 4e-5 and abs(turned[0] - turned[1]) < 1e-4
        assert max(slope) < posterior.elbo and max(turned) < posterior.elbo


def test_the_order_of_rows_does_not_matter():
    rows = data("logistic")
    turned = {name: array[::-1] for name, array in rows.items()}
    np.testing.assert_allclose(fit("logistic", rows).elbo, fit("logistic", turned).elbo, atol=1e-9)


# ---------------------------------------------------------------------- the theory of the paper
def counts_of_one_rate(y=None):
    rate = numpyro.sample("rate", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(rate)), obs=y)


def plain_map(mean, count, variance):
    """T(V) of equation 8 for Poisson rows: gamma = exp(m + v / 2)."""
    return 1 / (0.01 + count * np.exp(mean + 0.5 * variance))


@pytest.mark.parametrize("schedule", ["incremental", "batch"])
@pytest.mark.parametrize("y", [[0.0], [0.0, 0.0], [1.0], [3.0, 5.0, 4.0]], ids=str)
def test_poisson_solutions_are_the_only_fixed_points_and_bracketed(y, schedule):
    """Proposition 1, and the monotone sequences of equation 13 about it."""
    options = {"schedule": schedule, "tolerance": 1e-12}
    posterior = FixedPointVI(counts_of_one_rate, **options).run({"y": np.array(y)}, progress_bar=False)
    mean, best = float(posterior.mean[0]), float(posterior.covariance[0, 0])
    np.testing.assert_allclose(plain_map(mean, len(y), best), best, rtol=1e-4)
    np.testing.assert_allclose(sum(y) - len(y) * np.exp(mean + best / 2), mean / 100, atol=1e-5)
    sequence = [100.0]
    for _ in range(12):
        sequence.append(plain_map(mean, len(y), sequence[-1]))
    above, below = np.array(sequence[::2]), np.array(sequence[1::2])
    assert np.all(np.diff(above) <= 1e-9) and np.all(np.diff(below) >= -1e-9)
    assert above[-1] >= best * (1 - 1e-4) and below[-1] <= best * (1 + 1e-4)


def test_where_curvatures_fall_the_plain_map_falls_to_the_optimum():
    """Theorem 1 under condition 2b: Sigma, T(Sigma), T(T(Sigma)), ... each below the one before, down to V*. Logistic
    rows at a mean of zero have it, and rows that come with both outcomes have that mean."""
    X = np.random.default_rng(0).normal(size=(6, 3))
    posterior = fit("logistic", {"X": np.concatenate([X, X]), "y": np.repeat([0.0, 1.0], 6)}, tolerance=1e-14)
    z = np.linspace(-10, 10, 4001)
    weights = np.exp(-0.5 * z * z) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    prior = covariance = 9.0 * np.eye(3)
    drops = []
    for _ in range(60):
        deviations = np.sqrt(np.einsum("nd,de,ne->n", X, covariance, X))
        gamma = (0.25 / np.cosh(0.5 * deviations[:, None] * z) ** 2) @ weights
        before, covariance = covariance, np.linalg.inv(np.linalg.inv(prior) + 2 * X.T @ (gamma[:, None] * X))
        drops.append(np.linalg.eigvalsh(before - covariance).min())
    assert min(drops) > -1e-12 < drops[0]
    np.testing.assert_allclose(posterior.mean, 0.0, atol=1e-7)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-5)


def test_the_cycle_of_two_that_theorem_1_allows_is_damped_and_told():
    y = np.zeros(1)
    posterior = FixedPointVI(counts_of_one_rate, schedule="batch").run({"y": y}, progress_bar=False)
    mean, best = float(posterior.mean[0]), float(posterior.covariance[0, 0])
    variance = 1.01 * best
    for _ in range(200):
        variance = plain_map(mean, 1, variance)
    assert abs(plain_map(mean, 1, variance) - variance) > 1.0  # the plain map ends in the cycle
    assert posterior.info["converged"] and posterior.info["cycling_iterations"] > 0
    assert fit("logistic").info["cycling_iterations"] == 0


def outliers(y=None):
    place = numpyro.sample("place", dist.Normal(0.0, 10.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.StudentT(3.0, place, 0.3), obs=y)


def test_positive_curvatures_are_clamped_and_counted():
    """Condition 1 fails for Student's t, which has its positive curvatures far from the outcomes."""
    near_zero = FixedPointVI(outliers).run({"y": np.zeros(4)}, progress_bar=False)
    y = np.array([5.0, -5.0, 5.1, 4.9])
    posterior = FixedPointVI(outliers).run({"y": y}, init=near_zero, progress_bar=False)
    assert posterior.info["converged"] and posterior.info["clamped_iterations"] > 0
    assert fit("logistic").info["clamped_iterations"] == 0


def test_a_run_that_ends_early_says_why():
    with pytest.warns(UserWarning, match=r"not maximized: all 2 iterations were spent.*integrate='auto'"):
        posterior = fit("robust", max_iterations=2)
    assert not posterior.info["converged"]


@pytest.mark.parametrize(
    ("left", "error", "is_enough"), [(6e-5, 0.03, True), (6e-5, 1e-6, False), (6e-5, 0.0, False), (0.01, 0.03, False)]
)
def test_a_rise_that_is_lost_in_the_errors_of_expectations_is_no_alarm(left, error, is_enough):
    info = StepInfo(0.0, left, 20, False, True)
    assert is_maximized(info, error) is is_enough
    assert is_maximized(info._replace(converged=True), error)


@pytest.mark.parametrize("kind", ["robust", "hierarchical"])
@pytest.mark.parametrize("schedule", ["incremental", "batch"])
def test_the_bound_never_falls(kind, schedule):
    posterior = fit(kind, schedule=schedule)
    bounds = posterior.info["bounds"]
    assert len(bounds) == posterior.info["iterations"] + 1 > 2
    assert np.all(np.diff(bounds) >= -1e-9 * np.abs(bounds[1:]))
    np.testing.assert_allclose(bounds[-1], posterior.elbo, rtol=1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_bound_has_its_time_and_a_second_run_compiles_nothing(schedule, count_compilations):
    method, rows = FixedPointVI(logistic, schedule=schedule), data("logistic")
    first = method.run(rows, progress_bar=False).info
    assert len(first["seconds"]) == len(first["bounds"])
    assert first["seconds"][0] > 0 and np.all(np.diff(first["seconds"]) > 0)
    compiled, second = count_compilations(lambda: method.run({**rows, "y": 1 - rows["y"]}, progress_bar=False).info)
    assert not compiled
    assert second["seconds"][-1] < first["seconds"][-1]


def test_a_gaussian_process_may_bring_its_covariance_along(count_compilations):
    """On a few of its rows alone, this model fails."""
    x = np.linspace(0.0, 3.0, 20)
    covariance = np.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * np.eye(20)
    y = np.sin(x) + 0.1 * np.cos(40 * x)

    def process(y, covariance):
        f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(f, NOISE), obs=y)

    method = FixedPointVI(process)
    posterior = method.run({"y": y}, covariance=covariance, progress_bar=False)
    gain = covariance @ np.linalg.inv(covariance + NOISE**2 * np.eye(20))
    np.testing.assert_allclose(posterior.mean, gain @ y, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, covariance - gain @ covariance, atol=1e-6)
    assert not count_compilations(lambda: method.run({"y": y}, covariance=covariance, progress_bar=False))[0]


def test_all_rows_in_one_block_of_rvga_are_the_same_problem():
    best, recursive = fit("hierarchical"), RVGA(hierarchical).run(data("hierarchical"), progress_bar=False)
    np.testing.assert_allclose(best.elbo, recursive.elbo, atol=1e-7)


@pytest.mark.parametrize("chunk", [90, 40], ids=["chunks, covariances kept", "chunks, too many to keep them"])
@pytest.mark.parametrize("schedule", ["incremental", "batch"])
def test_chunks_of_rows_do_not_change_the_result(schedule, chunk, monkeypatch):
    whole = fit("logistic", schedule=schedule, tolerance=1e-12)
    monkeypatch.setattr(row_chunks, "CHUNK_NUMBERS", chunk * 3)  # 3 parameters
    rows = data("logistic")
    cut = FixedPointVI(logistic, schedule=schedule, tolerance=1e-12).run(rows, progress_bar=False)
    np.testing.assert_allclose(cut.mean, whole.mean, atol=2e-6)
    np.testing.assert_allclose(cut.elbo, whole.elbo, rtol=1e-9)


def test_a_start_near_the_end_saves_iterations_and_counts_no_row_twice():
    rows = data("logistic")
    cold = fit("logistic", rows)
    rough = RVGA(logistic, block_size=10).run(rows, progress_bar=False)
    warm = fit("logistic", rows, init=rough)
    assert warm.info["iterations"] <= cold.info["iterations"]
    assert warm.info["bounds"][0] > cold.info["bounds"][1]
    np.testing.assert_allclose(warm.elbo, cold.elbo, atol=1e-7)
    assert warm.num_rows == len(rows["y"])


def test_the_posterior_goes_on_by_rvga_and_samples():
    posterior = fit("robust")
    draws = posterior.sample_posterior(jax.random.key(0), (7,))
    assert draws["w"].shape == (7, 3) and np.all(draws["scale"] > 0)
    with pytest.raises(ValueError, match=r"RVGA\(model\).run"):
        posterior.update(data("robust"))
    more = RVGA(robust).run(data("robust", n=20), init=posterior, progress_bar=False)
    assert more.num_rows == 170


@pytest.mark.parametrize(
    "options, message",
    [
        ({"schedule": "newton"}, "'incremental', 'batch', 'gradient'"),
        ({"expectation": "hermite"}, "expectation must be one of"),
        ({"order": 3}, "order must be one of"),
        ({"tolerance": 0.0}, "tolerance must be positive"),
        ({"max_iterations": 0}, "max_iterations"),
        ({"schedule": "gradient", "expectation": "probit"}, "no"),
        ({"integrate": []}, r"integrate=\[\] names no sites"),
    ],
)
def test_options_that_do_not_exist_are_refused_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        FixedPointVI(linear, **options)


def test_a_start_of_another_model_and_data_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="the same"):
        fit("linear", init=fit("hierarchical"))
    rows = data("linear")
    rows["y"][7] = np.nan
    with pytest.raises(ValueError, match=r"'y'.*row 7|row 7.*'y'"):
        fit("linear", rows)


@pytest.mark.filterwarnings("ignore:q is at one of")
def test_a_bound_of_linearized_predictors_that_draws_do_not_confirm_is_none():
    """Few rows and many weights: q is nearly as wide as the prior, where the network is not its tangent."""

    def network(x, y=None):
        inner = numpyro.sample("inner", dist.Normal(0, 1).expand([60]).to_event(1))
        outer = numpyro.sample("outer", dist.Normal(0, 1).expand([60]).to_event(1))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(jnp.tanh(x[:, None] * inner) @ outer, 0.3), obs=y)

    x = np.linspace(-1, 1, 30)
    with pytest.warns(UserWarning, match="by 200 draws from q"), pytest.warns(UserWarning, match="not maximized"):
        posterior = FixedPointVI(network, max_iterations=30).run({"x": x, "y": np.sin(3 * x)}, progress_bar=False)
    assert posterior.elbo is None and posterior.info["log_evidence_estimate"] < 0
