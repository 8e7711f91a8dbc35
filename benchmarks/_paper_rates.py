"""How much hangs on the learning rate, for a network with two hidden layers of 20 that learns a robot arm's torque.

Prior and noise are the BONG paper's (B.3): a standard deviation of one about weights that a layer would start from, and
a tenth of the targets' variance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from network_regression import arm, network, shapes, split
from plots import COLORS

from numpyro_rvga import BONG
from numpyro_rvga.metrics import nlpd

RATES = (0.005, 0.01, 0.05, 0.1, 0.5)
RULES = {
    "blr, 1 step": {"rule": "blr"},
    "blr, 10 steps": {"rule": "blr", "num_iters": 10},
    "bog": {"rule": "bog"},  # BBB of one step is the same
    "bbb, 10 steps": {"rule": "bbb", "num_iters": 10},
}
HESSIANS = {"lin-hess": ({}, 3), "mc-ef": ({"num_samples": 100}, 1)}  # trials, each of other weights and order
BEST = {"1 step": ("blr, 1 step", "bog"), "10 steps": ("blr, 10 steps", "bbb, 10 steps", "bog")}
NUM_ROWS = 1000
NUM_LOOKS = 10
PRIOR_SCALE = 1.0
NOISE = math.sqrt(0.1)  # where targets have standard deviation one
TOP = 3.0  # nats, above which nothing is drawn
Curve = tuple[list[int], np.ndarray]


def model(X, y=None, start=None):
    w = numpyro.sample("w", dist.Normal(start, PRIOR_SCALE).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(network(w, X), NOISE), obs=y)


def starting_weights(num_inputs: int, seed: int) -> np.ndarray:
    """Independent, of variance one over the number of a layer's inputs; biases zero."""
    rng, layers = np.random.default_rng(seed), []
    for size, width in shapes(num_inputs):
        weights = rng.normal(size=(size - 1, width)) / math.sqrt(size - 1)
        layers.append(np.concatenate([np.zeros((1, width)), weights]).ravel())
    return np.concatenate(layers).astype(np.float32)


def load(folder: Path | None, quick: bool) -> tuple[dict, dict]:
    train, test = split(*arm(folder, 2000), 1000)
    return {name: array[: 100 if quick else NUM_ROWS] for name, array in train.items()}, test


def follow(train: dict, test: dict, method: BONG, trials: int) -> Curve | None:
    """Rows absorbed, and there the NLPD of each trial; None if an update of any was refused."""

    def look(posterior):
        return posterior.num_rows, nlpd(posterior, test, method="plugin")

    runs, every = [], len(train["y"]) // NUM_LOOKS
    for seed in range(trials):
        start, key = starting_weights(train["X"].shape[1], seed), jax.random.key(seed)
        try:
            posterior = method.run(
                train, rng_key=key, callback=look, callback_every=every, progress_bar=False, start=start
            )
        except ValueError as error:
            print(f"  refused: {error}", flush=True)
            return None
        runs.append([score for _, score in posterior.info["callback"]])
    return [rows for rows, _ in posterior.info["callback"]], np.array(runs)


def said_of(curve: Curve | None) -> str:
    if curve is None:
        return "refused"
    ends = curve[1][:, -1]
    return f"{ends.mean():.3f}" + (f" ± {ends.std():.3f}" if len(ends) > 1 else "")


def rates(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    train, test = load(folder, quick)
    tried = RATES[-1:] if quick else RATES
    panels, bests = [], []
    for hessian, (sampling, trials) in HESSIANS.items():
        trials = 1 if quick else trials
        options = {"family": "low-rank", "hessian": hessian} | sampling
        of_bong = follow(train, test, BONG(model, **options), trials)
        print(f"{hessian} bong {said_of(of_bong)}", flush=True)
        bong = {} if of_bong is None else {"bong": (*of_bong, {"color": "black"})}
        best = {}
        for rule, steps in RULES.items():
            method = BONG(model, **options, **steps)
            found = {rate: follow(train, test, method.with_learning_rate(rate), trials) for rate in tried}
            curves = {
                f"learning rate {rate:g}": (*curve, {"color": color})
                for (rate, curve), color in zip(found.items(), COLORS)
                if curve is not None
            }
            ends = {rate: curve[1][:, -1].mean() for rate, curve in found.items() if curve is not None}
            ends = {rate: score for rate, score in ends.items() if np.isfinite(score)}
            if ends:
                best[rule] = found[min(ends, key=ends.get)]
            said = "  ".join(f"{rate:g}: {said_of(curve)}" for rate, curve in found.items())
            print(f"{hessian} {rule:14s} NLPD at the end: {said}", flush=True)
            panels.append(panel(f"{rule}, {hessian}", bong | curves))
            yield panels
        for title, rules in BEST.items():
            curves = {
                f"{rule}, at its best": (*best[rule], {"color": color, "ls": "--"})
                for rule, color in zip(RULES, COLORS)
                if rule in rules and rule in best
            }
            bests.append(panel(f"{title}, {hessian}", bong | curves))
    yield panels + bests


def panel(title: str, curves: dict[str, tuple[list[int], np.ndarray, dict]]) -> dict[str, Any]:
    drawn = {
        label: {"rows": rows, "values": [v if v < TOP else None for v in values.mean(0).tolist()], "style": style}
        for label, (rows, values, style) in curves.items()
    }
    shared = {"scale": "linear", "row_scale": "linear", "columns": 4, "curves": drawn}
    return {"title": title, "what": "NLPD, nats, plug-in", "top": TOP} | shared
