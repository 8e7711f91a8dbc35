"""The full extended Kalman filter, the two diagonal ones and gradient descent: two half circles, told by a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _paper_claims import Effort, chosen_for
from _paper_networks import followed, gradient_descent, panels, show
from flax import linen as nn
from online_networks import Problem
from plots import COLORS, REFERENCE
from sklearn.datasets import make_moons

from numpyro_rvga.metrics import outcome_probabilities

FILTERS = {
    "FC-EKF": {"family": "full"},
    "VD-EKF": {"family": "diagonal", "projection": "exclusive"},
    "FD-EKF": {"family": "diagonal", "projection": "inclusive"},
}
SEARCH = Effort(0, 0, 250, (0.25, 0.5, 1.0, 2.0), (), (), 0)
WAYS = {"plugin": "at the mean", "monte_carlo": "averaged over draws"}
NOISE = 0.2  # standard deviation about the half circles
NUM_ROWS = 500
NUM_PASSES = 200
NUM_DRAWS = 100
EDGES = (-2.0, 3.0), (-1.5, 2.0)
POINTS = 60  # of a map, along each axis


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.tanh(nn.Dense(10)(x))
        return nn.Dense(2)(x)


def moons(quick: bool) -> Problem:
    num_rows = 60 if quick else NUM_ROWS
    parts = []
    for seed, count in enumerate((num_rows, 300, 1000)):
        X, y = make_moons(count, noise=NOISE, random_state=seed)
        parts.append({"X": X.astype(np.float32), "y": y})
    return Problem(Perceptron(), 1.0, *parts, (1.0,), NUM_DRAWS)


def filters(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """Error rate, NLPD and calibration by rows absorbed."""
    problem, curves = moons(quick), {}
    candidates = (
        (f"{name} (prior sd {scale:g})", method, {"color": color})
        for (name, (method, scale)), color in zip(tuned_filters(problem), COLORS)
    )
    yield from followed(problem, candidates, curves)
    label, looks, scores, _ = gradient_descent(problem)
    show(label, {"plugin": scores})
    curves[label] = looks, {"plugin": scores}, {"color": REFERENCE, "ls": ":"}
    yield panels(curves)


def tuned_filters(problem: Problem) -> Iterator[tuple[str, Any]]:
    """Names; methods and their prior scales, which do best on rows held out after a part of the rows."""
    for name, options in FILTERS.items():
        method, (scale, _), _ = chosen_for(problem, options, SEARCH)
        yield name, (method, scale)


def maps(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """The probability of a class in the plane, a line for each way to predict."""
    problem = moons(quick)
    axes = [np.linspace(*edges, POINTS) for edges in EDGES]
    grid = {"X": np.stack(np.meshgrid(*axes), -1).reshape(-1, 2).astype(np.float32)}
    grid["y"] = np.zeros(len(grid["X"]), int)
    found = {way: {} for way in WAYS}
    for name, (method, scale) in tuned_filters(problem):
        posterior = method.run(problem.train, progress_bar=False)
        for way in WAYS:
            _, probabilities = outcome_probabilities(posterior, grid, method=way, num_samples=NUM_DRAWS)
            found[way][f"{name}, prior sd {scale:g}"] = probabilities[:, 1]
    for passes in (1, 2 if quick else NUM_PASSES):
        label, _, _, weights = gradient_descent(problem, passes)
        logits = problem.module.apply(weights, jnp.asarray(grid["X"]))
        found["plugin"][f"{label}, {passes} pass{'' if passes == 1 else 'es'}"] = jax.nn.softmax(logits)[:, 1]
    columns = len(found["plugin"])
    yield [
        {
            "title": f"{label}\n{WAYS[way]}",
            "columns": columns,
            "edges": EDGES,
            "map": np.asarray(probabilities, float).reshape(POINTS, POINTS).round(4).tolist(),
            "points": {name: array.tolist() for name, array in problem.train.items()},
        }
        for way, of_method in found.items()
        for label, probabilities in of_method.items()
    ]
