"""A network that learns online: error rate, NLPD and calibration of test rows, by rows absorbed."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from online_networks import HESSIANS, RULES, Problem, digits, mnist, tuned
from plots import COLORS, REFERENCE
from sklearn.metrics import log_loss, zero_one_loss

from numpyro_rvga import BONG, init_to_module
from numpyro_rvga.metrics import outcome_probabilities

PREDICTIVES = ("plugin", "linearized", "monte_carlo")
MEASURES = {"error rate": "linear", "NLPD, nats": "log", "calibration error": "linear"}
NUM_LOOKS = 4
NUM_BINS = 20
NUM_DRAWS = 30
NUM_TEST = 500
SGD_RATES = (0.003, 0.01, 0.03, 0.1)
FAMILIES = {
    "bong, diagonal, natural": ({"family": "diagonal"}, "-"),
    "bong, diagonal, moment": ({"family": "diagonal", "parameterization": "moment"}, "--"),
    "bong, low-rank 1": ({"family": "low-rank", "rank": 1}, "-"),
    "bong, low-rank 10": ({"family": "low-rank", "rank": 10}, "-"),
    "VD-EKF": ({"family": "diagonal", "projection": "exclusive"}, "-"),
    "FD-EKF": ({"family": "diagonal", "projection": "inclusive"}, "-"),
}


def measure(labels: np.ndarray, probabilities: np.ndarray) -> list[float]:
    """Error rate, NLPD and expected calibration error."""
    classes, best = np.arange(probabilities.shape[1]), probabilities.argmax(1)
    confidence, right = probabilities.max(1), best == labels
    bins = np.minimum((confidence * NUM_BINS).astype(int), NUM_BINS - 1)
    gaps = np.bincount(bins, right - confidence)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # float32 sums to one less well than is asked for
        score = log_loss(labels, probabilities, labels=classes)
    return [zero_one_loss(labels, best), score, float(np.abs(gaps).sum() / len(labels))]


def follow(problem: Problem, method: BONG) -> tuple[list[int], dict[str, list[list[float]]]] | None:
    """Rows absorbed, and measures there for each predictive; None if an update was refused."""

    def look(posterior):
        scores = {}
        for method in PREDICTIVES:
            _, probabilities = outcome_probabilities(posterior, problem.test, method=method, num_samples=NUM_DRAWS)
            scores[method] = measure(problem.test["y"], probabilities)
        return posterior.num_rows, scores

    every = len(problem.train["y"]) // NUM_LOOKS
    try:
        found = method.run(problem.train, callback=look, callback_every=every, progress_bar=False).info["callback"]
    except ValueError as error:
        print(f"  refused: {error}", flush=True)
        return None
    return [rows for rows, _ in found], {name: [scores[name] for _, scores in found] for name in PREDICTIVES}


def gradient_descent(problem: Problem, passes: int = 1) -> tuple[str, list[int], list[list[float]], Any]:
    """Stochastic gradient descent, one row at a time, with the rate that ends best on rows held out.

    :return: a label with the rate; rows absorbed in the last pass, and measures there; the weights at the end.
    """
    start = problem.module.init(jax.random.key(0), problem.train["X"][:1])

    def loss(weights, x, y):
        return optax.softmax_cross_entropy_with_integer_labels(problem.module.apply(weights, x), y).mean()

    @jax.jit
    def descend(weights, rate, X, y):
        def step(weights, row):
            slopes = jax.grad(loss)(weights, *(x[None] for x in row))
            return jax.tree.map(lambda w, slope: w - rate * slope, weights, slopes), None

        return jax.lax.scan(step, weights, (X, y))[0]

    def run(rate, looks):
        X, y = jnp.asarray(problem.train["X"]), jnp.asarray(problem.train["y"])
        weights = start
        for _ in range(passes - 1):
            weights = descend(weights, rate, X[: looks[-1]], y[: looks[-1]])
        seen = []
        for begin, end in zip([0, *looks], looks):
            weights = descend(weights, rate, X[begin:end], y[begin:end])
            seen.append(weights)
        return seen

    def probabilities(weights, X):
        return np.asarray(jax.nn.softmax(problem.module.apply(weights, jnp.asarray(X))))

    total, held_out = len(problem.train["y"]), problem.held_out
    looks = list(range(total // NUM_LOOKS, total + 1, total // NUM_LOOKS))
    runs = {rate: run(rate, looks) for rate in SGD_RATES}
    rate = min(runs, key=lambda rate: loss(runs[rate][-1], held_out["X"], held_out["y"]))
    scores = [measure(problem.test["y"], probabilities(weights, problem.test["X"])) for weights in runs[rate]]
    return f"SGD, plug-in ({rate:g})", looks, scores, runs[rate][-1]


def panels(curves: dict[str, tuple[list[int], dict[str, list[list[float]]], dict]]) -> list[dict[str, Any]]:
    """A line of panels for each predictive, a column for each measure."""
    made = []
    for method in PREDICTIVES:
        for i, (what, scale) in enumerate(MEASURES.items()):
            drawn = {
                label: {"rows": rows, "values": [values[i] for values in scores[method]], "style": style}
                for label, (rows, scores, style) in curves.items()
                if method in scores
            }
            shared = {"scale": scale, "row_scale": "linear", "columns": len(MEASURES), "curves": drawn}
            made.append({"title": method, "what": what} | shared)
    return made


def load(folder: Path | None, quick: bool) -> Problem:
    problem = digits(quick) if folder is None else mnist(folder)
    return problem._replace(test={name: array[:NUM_TEST] for name, array in problem.test.items()})


def show(label: str, scores: dict[str, list[list[float]]]) -> None:
    ends = "  ".join(f"{name} {values[-1][1]:.3f}" for name, values in scores.items())
    print(f"{label:30s} NLPD at the end: {ends}", flush=True)


def followed(problem: Problem, candidates: Iterable[tuple[str, BONG, dict]], curves: dict) -> Iterator[list[dict]]:
    """Panels after each of the candidates, labels, methods and styles, whose curves are added."""
    for label, method, style in candidates:
        found = follow(problem, method)
        if found is not None:
            show(label, found[1])
            curves[label] = (*found, style)
            yield panels(curves)


def colored(choices: dict[str, Any], quick: bool) -> list[tuple[tuple[str, Any], str]]:
    """Names, choices and their colors; in a hurry the first alone."""
    return list(zip(choices.items(), COLORS))[: 1 if quick else None]


def tuned_rules(problem: Problem, quick: bool) -> Iterator[tuple[str, BONG, dict]]:
    for (rule, steps), color in colored(RULES, quick):
        for hessian, dashes in HESSIANS.items():
            options = {"rule": rule, "hessian": hessian, "family": "low-rank", "num_samples": problem.num_samples}
            method, label = tuned(problem, options | steps), f"{rule} {hessian}"
            if method is None:
                print(f"{label}: refused at all learning rates", flush=True)
                continue
            if rule != "bong":
                label = f"{label} ({method.rule.learning_rate:g})"
            yield label, method, {"color": color, "ls": dashes}


def rules(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    problem = load(folder, quick)
    yield from followed(problem, tuned_rules(problem, quick), {})


def families(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    problem, curves = load(folder, quick), {}
    candidates = (
        (label, BONG(problem.model, init_loc_fn=init_to_module, **options), {"color": color, "ls": dashes})
        for (label, (options, dashes)), color in colored(FAMILIES, quick)
    )
    yield from followed(problem, candidates, curves)
    label, looks, scores, _ = gradient_descent(problem)
    show(label, {"plugin": scores})
    curves[label] = looks, {"plugin": scores}, {"color": REFERENCE, "ls": ":"}
    yield panels(curves)
