"""What the papers say of rules, curvatures and families, and whether it holds here: a network's NLPD after one pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from online_networks import Problem, digits, mnist, tuned

from numpyro_rvga import BONG, init_to_module
from numpyro_rvga.metrics import nlpd

NUM_ORDERS = 3  # of the rows: each is a run
LOW_RANK = {"family": "low-rank", "rank": 10}
SAMPLED = {"num_samples": 10}
METHODS = {
    "bong": LOW_RANK,
    "blr": LOW_RANK | {"rule": "blr", "num_iters": 5},
    "bog": LOW_RANK | {"rule": "bog"},
    "bbb": LOW_RANK | {"rule": "bbb", "num_iters": 5},
    "lin-ef": LOW_RANK | {"hessian": "lin-ef"},
    "mc-ef": LOW_RANK | SAMPLED | {"hessian": "mc-ef"},
    "mc-fisher": LOW_RANK | SAMPLED | {"hessian": "mc-fisher"},
    "diagonal": {"family": "diagonal"},
    "VD-EKF": {"family": "diagonal", "projection": "exclusive"},
    "FD-EKF": {"family": "diagonal", "projection": "inclusive"},
    "blocks, exclusive": {"family": "block-diagonal", "projection": "exclusive"},
    "blocks, inclusive": {"family": "block-diagonal", "projection": "inclusive"},
    "FC-EKF": {"family": "full"},
}


class Claim(NamedTuple):
    """:ivar better: and ``worse``: methods of which a paper says that the one ends with a lower NLPD than the other."""

    source: str
    better: str
    worse: str


CLAIMS = (
    Claim("BONG, figure 1: natural gradients", "bong", "bog"),
    Claim("BONG, figure 1: no divergence from the prior", "bong", "blr"),
    Claim("BONG, figure 1: natural gradients", "bong", "bbb"),
    Claim("BONG, figure 1: linearized", "bong", "mc-ef"),
    Claim("BONG, section 4.5: the Jacobian's curvature", "bong", "lin-ef"),
    Claim("BONG, section 4.5: drawn outcomes", "mc-fisher", "mc-ef"),
    Claim("BONG, figure 2: low rank", "bong", "diagonal"),
    Claim("diagonal EKF, figure 1: exclusive", "VD-EKF", "FD-EKF"),
    Claim("diagonal EKF, equations 12 and 14, blocks", "blocks, exclusive", "blocks, inclusive"),
    Claim("diagonal EKF, figure 4: the full filter", "FC-EKF", "VD-EKF"),
)


def scores_of(problem: Problem, options: dict[str, Any], num_orders: int) -> list[tuple[float, float]]:
    """NLPD of test rows at the mean, and with linearized outputs, for each order of the rows; empty if refused."""
    method = (
        tuned(problem, options) if "rule" in options else BONG(problem.model, init_loc_fn=init_to_module, **options)
    )
    found = []
    for seed in range(num_orders if method is not None else 0):
        order = np.random.default_rng(seed).permutation(len(problem.train["y"]))
        rows = {name: array[order] for name, array in problem.train.items()}
        method.shuffle = False
        try:
            posterior = method.run(rows, progress_bar=False)
        except ValueError as error:
            print(f"  refused: {error}", flush=True)
            return []
        found.append(tuple(nlpd(posterior, problem.test, method=way) for way in ("plugin", "linearized")))
    return found


def claims(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """A line for each claim, with both methods' mean NLPD over orders of the rows, and by how much that varies."""
    problem = digits(quick) if folder is None else mnist(folder)
    warnings.simplefilter("ignore", UserWarning)
    scores = {}
    for name, options in METHODS.items():
        if folder is not None and name in ("FC-EKF", "blocks, exclusive", "blocks, inclusive"):
            continue  # a matrix of the convolutional network's weights is too large
        scores[name] = np.array(scores_of(problem, options, 1 if quick else NUM_ORDERS)).reshape(-1, 2)
        shown = "  ".join(f"{x:.3f} ± {s:.3f}" for x, s in zip(scores[name].mean(0), scores[name].std(0)))
        print(f"{name:20s} NLPD at the mean, linearized: {shown}", flush=True)
    lines = []
    for claim in CLAIMS:
        if claim.better in scores and claim.worse in scores:
            lines.append(
                {"source": claim.source, "better": claim.better, "worse": claim.worse} | _compared(claim, scores)
            )
            print("  ".join(f"{key}: {value}" for key, value in lines[-1].items()), flush=True)
    yield lines


def _compared(claim: Claim, scores: dict[str, np.ndarray]) -> dict[str, Any]:
    """Of the better way to predict for each method, as its authors would choose."""
    best = {name: scores[name].mean(0).min() if len(scores[name]) else np.inf for name in (claim.better, claim.worse)}
    first, second = (float(best[name]) for name in (claim.better, claim.worse))
    return {"first": first, "second": second, "holds": first < second}
