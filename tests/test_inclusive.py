"""The papers' benchmark takes minimizers of KL(p || q) for a comparison: against quadrature."""

import itertools

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_expit

pytest.importorskip("matplotlib")


@pytest.fixture
def benchmark(import_benchmark):
    return import_benchmark("_paper_inclusive")


@pytest.mark.parametrize("mean, variance", [(0.3, 0.5), (-4.0, 1e-6), (12.0, 30.0), (-30.0, 100.0), (5.0, 1e6)])
def test_tilted_moments_are_those_of_the_density(benchmark, mean, variance):
    peak = max(mean, min(mean + variance, 0.0))
    log_density = lambda u: log_expit(u) - 0.5 * (u - mean) ** 2 / variance  # noqa: E731
    deviation = np.sqrt(variance)
    cuts = sorted({*(peak + deviation * np.linspace(-12, 12, 25)), *([-5.0, 0.0, 5.0] if variance > 1e-3 else [])})

    def integral(function):
        weighted = lambda u: function(u) * np.exp(log_density(u) - log_density(peak))  # noqa: E731
        return sum(quad(weighted, a, b, epsabs=0, epsrel=1e-11)[0] for a, b in itertools.pairwise(cuts))

    mass = integral(lambda u: 1.0)
    center = peak + integral(lambda u: u - peak) / mass
    spread = integral(lambda u: (u - center) ** 2) / mass
    np.testing.assert_allclose(benchmark.tilted_moments(mean, variance), (center, spread), rtol=1e-7)


def correlated_rows():
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2)) @ np.array([[1.0, 0.8], [0.0, 1.0]])
    return {"X": X, "y": (rng.logistic(size=40) < X @ [1.0, -1.0]).astype(int)}


def test_one_row_is_absorbed_with_the_moments_of_its_posterior_and_many_rows_nearly_so(benchmark):
    data = correlated_rows()
    for count in (1, 40):
        rows = {name: array[:count] for name, array in data.items()}
        signed = (2 * rows["y"] - 1)[:, None] * rows["X"]
        posterior = benchmark.TruePosterior(rows, benchmark.Case("", 2.0, 0.5, 0.0))
        posterior.normalize(np.zeros(2), np.array([18.0, 18.0]), 601)
        moments = benchmark.moments_of(posterior)
        start = 0.5 * np.ones(2), 4.0 * np.eye(2)
        one, last = benchmark.first_and_last(benchmark.passes(signed, *start))
        scores = [benchmark.compared(posterior, moments, *q) for q in (one, last)]
        if count == 1:
            assert all(score["mean"] < 1e-6 and score["log sd"] < 1e-6 for score in scores)
        else:
            assert scores[1]["mean"] < 0.01 and scores[1]["log sd"] < 0.03 < scores[0]["mean"]


@pytest.mark.parametrize("kept, projection", [("precision", "exclusive"), ("covariance", "inclusive"), ("all", None)])
def test_the_first_linearized_pass_is_the_kalman_filter_and_repeated_ones_end_at_the_mode(benchmark, kept, projection):
    data = correlated_rows()
    signed = (2 * data["y"] - 1)[:, None] * data["X"]
    start = 0.5 * np.ones(2), 4.0 * np.eye(2)
    one, last = benchmark.first_and_last(benchmark.passes(signed, *start, kept=kept, linearize=True))
    family = {"family": "diagonal", "projection": projection} if projection else {}
    options = {"prior_mean": 0.5, "prior_scale": 2.0, "progress_bar": False}
    kalman = benchmark.BONG(benchmark.model, shuffle=False, **family).run(data, **options)
    np.testing.assert_allclose(one[0], kalman.mean, rtol=1e-6)
    np.testing.assert_allclose(one[1], kalman.covariance, rtol=1e-6, atol=1e-9)
    laplace = benchmark.RVGA(benchmark.model, scheme="laplace").run(data, **options)
    np.testing.assert_allclose(last[0], laplace.mean, atol=1e-5)
    precision = np.linalg.inv(laplace.covariance)
    if kept == "all":
        np.testing.assert_allclose(np.linalg.inv(last[1]), precision, rtol=1e-4)
    elif kept == "precision":
        np.testing.assert_allclose(last[1], np.diag(1 / np.diagonal(precision)), rtol=1e-4)
