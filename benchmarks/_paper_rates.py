"""How much hangs on the learning rate, for a network with two hidden layers of 20 that learns a robot arm's torque."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from network_regression import arm, model, split, starting_weights
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
HESSIANS = {"lin-hess": {}, "mc-ef": {"num_samples": 100}}
BEST = {"1 step": ("blr, 1 step", "bog"), "10 steps": ("blr, 10 steps", "bbb, 10 steps", "bog")}
NUM_ROWS = 1000
NUM_LOOKS = 10
PRIOR_SCALE = 0.1
TOP = 3.0  # nats, above which nothing is drawn
Curve = tuple[list[int], list[float]]


def load(folder: Path | None, quick: bool) -> tuple[dict, dict]:
    train, test = split(*arm(folder, 2000), 1000)
    return {name: array[: 100 if quick else NUM_ROWS] for name, array in train.items()}, test


def follow(train: dict, test: dict, method: BONG) -> Curve:
    """Rows absorbed, and NLPD there; as far as the run came, if an update was refused."""
    rows, scores = [], []

    def look(posterior):
        rows.append(posterior.num_rows)
        scores.append(nlpd(posterior, test, method="plugin"))

    start = starting_weights(train["X"].shape[1])
    every = len(train["y"]) // NUM_LOOKS
    try:
        method.run(train, callback=look, callback_every=every, progress_bar=False, start=start, prior_scale=PRIOR_SCALE)
    except ValueError as error:
        print(f"  refused: {error}", flush=True)
    return rows, scores


def rates(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    train, test = load(folder, quick)
    tried = RATES[-1:] if quick else RATES
    panels, bests = [], []
    for hessian, sampling in HESSIANS.items():
        options = {"family": "low-rank", "hessian": hessian} | sampling
        bong = {"bong": (*follow(train, test, BONG(model, **options)), {"color": "black"})}
        best = {}
        for rule, steps in RULES.items():
            method = BONG(model, **options, **steps)
            found = {rate: follow(train, test, method.with_learning_rate(rate)) for rate in tried}
            curves = {
                f"learning rate {rate:g}": (*curve, {"color": color})
                for (rate, curve), color in zip(found.items(), COLORS)
            }
            ends = {rate: scores[-1] for rate, (rows, scores) in found.items() if rows and rows[-1] == len(train["y"])}
            ends = {rate: score for rate, score in ends.items() if np.isfinite(score)}
            if ends:
                best[rule] = found[min(ends, key=ends.get)]
            said = "  ".join(f"{rate:g}: {score:.3f}" for rate, score in ends.items())
            print(f"{hessian} {rule:14s} NLPD at the end: {said}; bong {bong['bong'][1][-1]:.3f}", flush=True)
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


def panel(title: str, curves: dict[str, tuple[list[int], list[float], dict]]) -> dict[str, Any]:
    drawn = {
        label: {"rows": rows, "values": [v if v < TOP else None for v in values], "style": style}
        for label, (rows, values, style) in curves.items()
    }
    shared = {"scale": "linear", "row_scale": "linear", "columns": 4, "curves": drawn}
    return {"title": title, "what": "NLPD, nats, plug-in", "top": TOP} | shared
