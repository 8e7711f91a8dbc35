"""FixedPointVI: exact where the answer is known, its schedules against each other, the bound's rise, chunks, starts."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI, fixed_point

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


MODELS = {"linear": linear, "logistic": logistic, "robust": robust, "hierarchical": hierarchical}


def data(kind, n=150):
    rng = np.random.default_rng(4)
    X = rng.normal(size=(n, 3))
    line = X @ [1.0, -0.5, 0.2]
    if kind == "linear":
        return {"X": X, "y": line + NOISE * rng.normal(size=n)}
    if kind == "logistic":
        return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-line))).astype(float)}
    if kind == "robust":
        return {"X": X, "y": line + 0.5 * rng.standard_t(4, n)}
    g = rng.integers(0, 5, n)
    return {"X": X, "g": g, "y": rng.poisson(np.exp(0.8 * rng.normal(size=5)[g] + 0.3 * X[:, 0]))}


def fit(kind, rows=None, init=None, **options):
    rows = data(kind) if rows is None else rows
    return FixedPointVI(MODELS[kind], **options).run(rows, init=init, progress_bar=False)


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


@pytest.mark.parametrize("kind", ["logistic", "robust", "hierarchical"])
@pytest.mark.parametrize("schedule", ["incremental", "batch"])
def test_the_bound_never_falls(kind, schedule):
    posterior = fit(kind, schedule=schedule)
    bounds = posterior.info["bounds"]
    assert len(bounds) == posterior.info["iterations"] + 1 > 3
    assert np.all(np.diff(bounds) >= -1e-9 * np.abs(bounds[1:]))
    np.testing.assert_allclose(bounds[-1], posterior.elbo, rtol=1e-12)


def test_all_rows_in_one_block_of_rvga_are_the_same_problem():
    best, recursive = fit("hierarchical"), RVGA(hierarchical).run(data("hierarchical"), progress_bar=False)
    np.testing.assert_allclose(best.elbo, recursive.elbo, atol=1e-7)


@pytest.mark.parametrize("schedule", ["incremental", "gradient"])
def test_chunks_of_rows_do_not_change_the_result(schedule, monkeypatch):
    whole = fit("logistic", schedule=schedule)
    monkeypatch.setattr(fixed_point, "CHUNK_NUMBERS", 40 * 3)  # rows x parameters
    cut = fit("logistic", schedule=schedule)
    np.testing.assert_allclose(cut.mean, whole.mean, atol=2e-6)
    np.testing.assert_allclose(cut.elbo, whole.elbo, rtol=1e-9)


def test_a_start_near_the_end_saves_iterations_and_counts_no_row_twice():
    rows = data("logistic")
    cold = fit("logistic", rows)
    rough = RVGA(logistic, block_size=10).run(rows, progress_bar=False)
    warm = fit("logistic", rows, init=rough)
    assert warm.info["iterations"] < cold.info["iterations"]
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


def test_without_optax_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "optax", None)
    with pytest.raises(ImportError, match="gradient"):
        fit("linear", schedule="gradient")
