"""What the papers say of rules, curvatures and families, and whether it holds here: a network after one pass.

Each method has the prior scale and the learning rate that do best on rows held out. It then learns from several starts,
with the rows in another order each time. Methods are compared start by start.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from online_networks import Problem, digits, mnist

from numpyro_rvga import BONG, init_to_module
from numpyro_rvga.metrics import misclassification, nlpd

NUM_SEEDS = 10  # each with its own starting weights and order of the rows
NUM_LARGE_SEEDS = 3  # the same for the large network
NUM_TUNED = 500  # rows from which the large network's choices are made
NUM_TIMED = 1  # of these
NUM_DRAWS = 30  # of weights, in Monte Carlo predictions
NUM_TEST = 500
RATES = (0.01, 0.03, 0.1, 0.3)
PREDICTIVES = ("plugin", "linearized", "monte_carlo")
PRIOR_SCALES = (0.5, 1.0, 2.0)  # times the problem's own
LOW_RANK = {"family": "low-rank", "rank": 10}
SAMPLED = {"num_samples": 10}
METHODS = {
    "bong": LOW_RANK,
    "bog": LOW_RANK | {"rule": "bog"},
    "blr": LOW_RANK | {"rule": "blr", "num_iters": 5},
    "bbb": LOW_RANK | {"rule": "bbb", "num_iters": 5},
    "lin-ef": LOW_RANK | {"hessian": "lin-ef"},
    "low-rank 1": LOW_RANK | {"rank": 1},
    "diagonal": {"family": "diagonal"},
    "VD-EKF": {"family": "diagonal", "projection": "exclusive"},
    "FD-EKF": {"family": "diagonal", "projection": "inclusive"},
    "blocks, exclusive": {"family": "block-diagonal", "projection": "exclusive"},
    "blocks, inclusive": {"family": "block-diagonal", "projection": "inclusive"},
    "FC-EKF": {"family": "full"},
    "mc-ef": LOW_RANK | SAMPLED | {"hessian": "mc-ef"},
    "mc-fisher": LOW_RANK | SAMPLED | {"hessian": "mc-fisher"},
}
OF_SMALL_NETWORKS = ("FC-EKF", "blocks, exclusive", "blocks, inclusive")  # matrices of layers or of all weights


class Claim(NamedTuple):
    """:ivar better: and ``worse``: methods of which a paper says that the one is better, by ``measure``."""

    source: str
    better: str
    worse: str
    measure: str = "NLPD"


CLAIMS = (
    Claim("BONG, figure 1: natural gradients", "bong", "bog"),
    Claim("BONG, figure 1: no divergence from the prior", "bong", "blr"),
    Claim("BONG, figure 1: natural gradients", "bong", "bbb"),
    Claim("BONG, figure 1: linearized", "bong", "mc-ef"),
    Claim("BONG, figure 1: the Jacobian's curvature", "bong", "lin-ef"),
    Claim("BONG, section 4.5: drawn outcomes", "mc-fisher", "mc-ef"),
    Claim("BONG, figure 2: low rank", "bong", "diagonal"),
    Claim("BONG, figure 2: a rank of ten", "bong", "low-rank 1"),
    Claim("BONG, figure 3: one step", "bong", "blr", "ms"),
    Claim("BONG, figure 3: linearized", "bong", "mc-ef", "ms"),
    Claim("diagonal EKF, figure 1: exclusive", "VD-EKF", "FD-EKF"),
    Claim("diagonal EKF, equations 12 and 14, blocks", "blocks, exclusive", "blocks, inclusive"),
    Claim("diagonal EKF, figure 4: the full filter", "FC-EKF", "VD-EKF"),
)


class Found(NamedTuple):
    """Of a method.

    :ivar chosen: its prior scale and learning rate. :ivar tried: NLPD of rows held out, for each choice.
    :ivar halfway: NLPD at the mean after half of the rows, of each seed.
    :ivar nlpd: of each way to predict, of each seed. :ivar errors: error rates at the mean, of each seed.
    :ivar ms: processor milliseconds for a row, compiled.
    """

    chosen: tuple[float, float]
    tried: dict[str, float]
    halfway: list[float]
    nlpd: dict[str, list[float]]
    errors: list[float]
    ms: float

    def best(self) -> np.ndarray:
        """NLPD by the better way to predict, as a method's authors would choose."""
        return np.array(min(self.nlpd.values(), key=np.mean))


def run(method: BONG, rows: dict[str, np.ndarray], seed: int, **options: Any) -> Any:
    """The posterior of one pass from the seed's start, in the seed's order; None if an update was refused."""
    try:
        return method.run(rows, rng_key=jax.random.key(seed), progress_bar=False, **options)
    except ValueError as error:
        print(f"  refused: {str(error)[:100]}", flush=True)
        return None


def chosen_for(
    problem: Problem, options: dict[str, Any], num_rows: int | None
) -> tuple[BONG, tuple[float, float], dict[str, float]] | None:
    """At the prior scale and learning rate with the least NLPD of rows held out, after the first rows (None: all)."""
    part = {name: array[:num_rows] for name, array in problem.train.items()}
    rates = RATES if "rule" in options else (1.0,)
    methods, tried = {}, {}
    for factor, rate in product(PRIOR_SCALES, rates):
        scale = factor * problem.prior_scale
        if rate == rates[0]:  # the others take what it compiles
            first = BONG(problem._replace(prior_scale=scale).model, init_loc_fn=init_to_module, **options)
        method = first.with_learning_rate(rate) if "rule" in options else first
        posterior = run(method, part, 0)
        score = np.inf if posterior is None else nlpd(posterior, problem.held_out, method="plugin")
        if np.isfinite(score):
            methods[scale, rate], tried[scale, rate] = method, score
    if not tried:
        return None
    best = min(tried, key=tried.get)
    return methods[best], best, {f"{scale:g}, {rate:g}": score for (scale, rate), score in tried.items()}


def found_of(problem: Problem, options: dict[str, Any], num_seeds: int, num_tuned: int | None) -> Found | None:
    """None if all choices are refused, or the chosen one from some start."""
    choice = chosen_for(problem, options, num_tuned)
    if choice is None:
        return None
    method, chosen, tried = choice
    halves, scores, errors, times = [], {way: [] for way in PREDICTIVES}, [], []
    half = len(problem.train["y"]) // 2

    def at_half(posterior: Any) -> float | None:
        return nlpd(posterior, problem.test, method="plugin") if posterior.num_rows == half else None

    for seed in range(1, 1 + num_seeds):
        posterior = run(method, problem.train, seed, callback=at_half, callback_every=half)
        if posterior is None:
            return None
        halves += posterior.info["callback"]
        for way in PREDICTIVES:
            scores[way].append(nlpd(posterior, problem.test, method=way, num_samples=NUM_DRAWS))
        errors.append(misclassification(posterior, problem.test, method="plugin"))
        if seed <= NUM_TIMED:
            start = time.process_time()
            run(method, {name: array[:half] for name, array in problem.train.items()}, seed)
            times.append(1000 * (time.process_time() - start) / half)
    return Found(chosen, tried, halves, scores, errors, float(np.median(times)))


def claims(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """A line for each method, and one for each claim."""
    problem = digits(quick) if folder is None else mnist(folder)
    problem = problem._replace(test={name: array[:NUM_TEST] for name, array in problem.test.items()})
    warnings.simplefilter("ignore", UserWarning)
    found, lines = {}, []
    num_seeds, num_tuned = (NUM_SEEDS, None) if folder is None else (NUM_LARGE_SEEDS, NUM_TUNED)
    for name, options in METHODS.items():
        if folder is not None and name in OF_SMALL_NETWORKS:
            continue
        result = found_of(problem, options, 2 if quick else num_seeds, num_tuned)
        if result is None:
            print(f"{name:20s} refused", flush=True)
            continue
        found[name] = result
        lines.append({"method": name} | result._asdict())
        ends = "  ".join(f"{way} {np.mean(x):.3f} ± {np.std(x):.3f}" for way, x in result.nlpd.items())
        said = f"prior sd {result.chosen[0]:g}, rate {result.chosen[1]:g}; halfway {np.mean(result.halfway):.3f}"
        print(f"{name:20s} {said}; {ends}; errors {np.mean(result.errors):.3f}; {result.ms:.2f} ms", flush=True)
        yield lines
    for claim in CLAIMS:
        if claim.better in found and claim.worse in found:
            lines.append(claim._asdict() | compared(claim, found[claim.better], found[claim.worse]))
            print("  ".join(f"{key}: {value}" for key, value in lines[-1].items()), flush=True)
    yield lines


def compared(claim: Claim, better: Found, worse: Found) -> dict[str, Any]:
    """Whether a claim holds: "yes" or "no" where the seeds' mean difference is above two of its standard errors."""
    if claim.measure == "ms":
        return {"first": better.ms, "second": worse.ms, "holds": "yes" if better.ms < worse.ms else "no"}
    count = min(len(better.best()), len(worse.best()))
    difference = worse.best()[:count] - better.best()[:count]
    error = difference.std(ddof=1) / np.sqrt(count)
    clear = abs(difference.mean()) > 2 * error
    return {
        "first": float(better.best().mean()),
        "second": float(worse.best().mean()),
        "difference": float(difference.mean()),
        "standard error": float(error),
        "starts": f"{int(np.sum(difference > 0))} of {count}",
        "holds": ("yes" if difference.mean() > 0 else "no") if clear else "no difference",
    }
