"""The papers' benchmark takes minimizers of KL(p || q) for a comparison: against quadrature."""

import itertools
from pathlib import Path

import numpy as np
import pytest
from scipy.integrate import quad
from scipy.special import log_expit

pytest.importorskip("matplotlib")

FOLDERS = [Path(__file__).parents[1] / name for name in ("examples", "benchmarks")]


@pytest.fixture
def benchmark(monkeypatch):
    for folder in FOLDERS:
        monkeypatch.syspath_prepend(folder)
    return pytest.importorskip("_paper_inclusive")


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


def test_one_row_is_absorbed_with_the_moments_of_its_posterior_and_many_rows_nearly_so(benchmark):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 2)) @ np.array([[1.0, 0.8], [0.0, 1.0]])
    data = {"X": X, "y": (rng.logistic(size=40) < X @ [1.0, -1.0]).astype(int)}
    for count in (1, 40):
        rows = {name: array[:count] for name, array in data.items()}
        signed = (2 * rows["y"] - 1)[:, None] * rows["X"]
        posterior = benchmark.TruePosterior(rows, benchmark.Case("", 2.0, 0.5, 0.0))
        posterior.normalize(np.zeros(2), np.array([18.0, 18.0]), 601)
        moments = benchmark.moments_of(posterior)
        start = 0.5 * np.ones(2), 4.0 * np.eye(2)
        one, last = benchmark.first_and_last(benchmark.expectation_propagation(signed, *start))
        scores = [benchmark.compared(posterior, moments, *q) for q in (one, last)]
        if count == 1:
            assert all(score["mean"] < 1e-6 and score["log sd"] < 1e-6 for score in scores)
        else:
            assert scores[1]["mean"] < 0.01 and scores[1]["log sd"] < 0.03 < scores[0]["mean"]
