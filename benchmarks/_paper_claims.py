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

NUM_TEST = 500
EIGHTHS = (1, 2, 4)  # of the rows, after which predictions are scored too
PREDICTIVES = ("plugin", "linearized", "monte_carlo")
LOW_RANK = {"family": "low-rank", "rank": 10}
DIAGONAL = {"family": "diagonal"}
PLAIN = DIAGONAL | {"parameterization": "softplus"}  # in others plain steps leave the Gaussians, or learn nothing
SAMPLED = {"num_samples": 10}
BLR, BBB = {"rule": "blr", "num_iters": 5}, {"rule": "bbb", "num_iters": 5}
METHODS = {
    "diagonal": DIAGONAL,
    "bog, diagonal": PLAIN | {"rule": "bog"},
    "blr, diagonal": DIAGONAL | BLR,
    "bbb, diagonal": PLAIN | BBB,
    "bong": LOW_RANK,
    "mc-ef": LOW_RANK | SAMPLED | {"hessian": "mc-ef"},
    "mc-fisher": LOW_RANK | SAMPLED | {"hessian": "mc-fisher"},
    "lin-ef": LOW_RANK | {"hessian": "lin-ef"},
    "low-rank 1": LOW_RANK | {"rank": 1},
    "VD-EKF": DIAGONAL | {"projection": "exclusive"},
    "FD-EKF": DIAGONAL | {"projection": "inclusive"},
    "bog": LOW_RANK | {"rule": "bog"},
    "blr": LOW_RANK | BLR,
    "bbb": LOW_RANK | BBB,
    "blocks, exclusive": {"family": "block-diagonal", "projection": "exclusive"},
    "blocks, inclusive": {"family": "block-diagonal", "projection": "inclusive"},
    "FC-EKF": {"family": "full"},
}
OF_SMALL_NETWORKS = ("FC-EKF", "blocks, exclusive", "blocks, inclusive")  # matrices of layers or of all weights


class Effort(NamedTuple):
    """How much is run.

    :ivar num_seeds: each with its own starting weights and order of the rows. :ivar num_rows: that are learned.
    :ivar num_tuned: rows after which prior scale and rate are chosen. :ivar prior_scales: times the problem's own.
    :ivar rates: of BLR. :ivar plain_rates: of BOG and BBB. :ivar num_draws: of weights, in Monte Carlo predictions.
    """

    num_seeds: int
    num_rows: int
    num_tuned: int
    prior_scales: tuple[float, ...]
    rates: tuple[float, ...]
    plain_rates: tuple[float, ...]
    num_draws: int

    def rates_of(self, options: dict[str, Any]) -> tuple[float, ...]:
        """The learning rates to choose from; one of no meaning for rules that have none."""
        return {"blr": self.rates, "bog": self.plain_rates, "bbb": self.plain_rates}.get(options.get("rule"), (1.0,))


SMALL = Effort(10, 500, 500, (0.5, 1.0, 2.0), (0.01, 0.03, 0.1, 0.3), (0.01, 0.03, 0.1, 0.3), 30)
LARGE = Effort(10, 1000, 300, (1.0, 2.0), (0.03, 0.1, 0.3), (0.003, 0.01, 0.03), 10)


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
    Claim("BONG, figure 1: natural gradients, of diagonals", "diagonal", "bog, diagonal"),
    Claim("BONG, figure 1: no divergence from the prior, of diagonals", "diagonal", "blr, diagonal"),
    Claim("BONG, figure 1: natural gradients, of diagonals", "diagonal", "bbb, diagonal"),
    Claim("BONG, figure 1: linearized gradients", "lin-ef", "mc-ef"),
    Claim("BONG, section 4.5: drawn outcomes", "mc-fisher", "mc-ef"),
    Claim("BONG, figure 2: low rank", "bong", "diagonal"),
    Claim("BONG, figure 2: a rank of ten", "bong", "low-rank 1"),
    Claim("BONG, figure 3: one step", "bong", "blr", "ms"),
    Claim("BONG, figure 3: linearized", "bong", "mc-ef", "ms"),
    Claim("BONG, figure 3: gradients alone", "lin-ef", "bong", "ms"),
    Claim("diagonal EKF, figure 1: exclusive", "VD-EKF", "FD-EKF"),
    Claim("diagonal EKF, equations 12 and 14, blocks", "blocks, exclusive", "blocks, inclusive"),
    Claim("diagonal EKF, figure 4: the full filter", "FC-EKF", "VD-EKF"),
)


class Found(NamedTuple):
    """Of a method.

    :ivar chosen: its prior scale and learning rate. :ivar tried: NLPD of rows held out, for each choice.
    :ivar earlier: NLPD at the mean after fewer rows, by their number, of each seed.
    :ivar nlpd: of each way to predict, of each seed. :ivar errors: error rates at the mean, of each seed.
    :ivar ms: processor milliseconds for a row, compiled.
    """

    chosen: tuple[float, float]
    tried: dict[str, float]
    earlier: dict[int, list[float]]
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
    problem: Problem, options: dict[str, Any], effort: Effort
) -> tuple[BONG, tuple[float, float], dict[str, float]] | None:
    """At the prior scale and learning rate with the least NLPD of rows held out, after the first rows."""
    part = {name: array[: effort.num_tuned] for name, array in problem.train.items()}
    rates = effort.rates_of(options)
    methods, tried = {}, {}
    for factor, rate in product(effort.prior_scales, rates):
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


def found_of(problem: Problem, options: dict[str, Any], effort: Effort) -> Found | None:
    """None if all choices are refused, or the chosen one from some start."""
    choice = chosen_for(problem, options, effort)
    if choice is None:
        return None
    method, chosen, tried = choice
    scores, errors = {way: [] for way in PREDICTIVES}, []
    eighth = len(problem.train["y"]) // 8
    earlier = {count * eighth: [] for count in EIGHTHS}

    def score(posterior: Any) -> None:
        if posterior.num_rows in earlier:
            earlier[posterior.num_rows].append(nlpd(posterior, problem.test, method="plugin"))

    for seed in range(1, 1 + effort.num_seeds):
        posterior = run(method, problem.train, seed, callback=score, callback_every=eighth)
        if posterior is None:
            return None
        for way in PREDICTIVES:
            scores[way].append(nlpd(posterior, problem.test, method=way, num_samples=effort.num_draws))
        errors.append(misclassification(posterior, problem.test, method="plugin"))
    half = 4 * eighth
    start = time.process_time()
    run(method, {name: array[:half] for name, array in problem.train.items()}, 1)
    return Found(chosen, tried, earlier, scores, errors, 1000 * (time.process_time() - start) / half)


def claims(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """A line for each method, and one for each claim once both of its methods have run."""
    problem, effort = (digits(quick), SMALL) if folder is None else (mnist(folder), LARGE)
    effort = effort._replace(num_seeds=2) if quick else effort
    train = {name: array[: effort.num_rows] for name, array in problem.train.items()}
    test = {name: array[:NUM_TEST] for name, array in problem.test.items()}
    problem = problem._replace(train=train, test=test)
    warnings.simplefilter("ignore", UserWarning)
    found, lines = {}, []
    for name, options in METHODS.items():
        if folder is not None and name in OF_SMALL_NETWORKS:
            continue
        found[name] = result = found_of(problem, options, effort)
        if result is None:
            lines.append({"method": name, "refused": True})
            print(f"{name:20s} refused", flush=True)
        else:
            lines.append({"method": name} | result._asdict())
            print(f"{name:20s} {said_of(result)}", flush=True)
        for claim in CLAIMS:
            if name in (claim.better, claim.worse) and claim.better in found and claim.worse in found:
                lines.append(claim._asdict() | compared(claim, found[claim.better], found[claim.worse]))
                print("  ".join(f"{key}: {shown(value)}" for key, value in lines[-1].items()), flush=True)
        yield lines


def said_of(found: Found) -> str:
    ends = "  ".join(f"{way} {np.mean(x):.3f} ± {np.std(x):.3f}" for way, x in found.nlpd.items())
    after = ", ".join(f"{np.mean(x):.3f} after {rows}" for rows, x in found.earlier.items())
    chosen = f"prior sd {found.chosen[0]:g}, rate {found.chosen[1]:g}; {after}"
    return f"{chosen}; {ends}; errors {np.mean(found.errors):.3f}; {found.ms:.2f} ms"


def shown(value: Any) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def compared(claim: Claim, better: Found | None, worse: Found | None) -> dict[str, Any]:
    """Whether a claim holds: "yes" or "no" where the seeds' mean difference is above two of its standard errors. After
    fewer rows, this is said of predictions at the mean.

    :param better: and ``worse``: None if refused, which is worse than any number.
    """
    if better is None or worse is None:
        holds = "no difference" if better is worse else "yes" if worse is None else "no"
        ends = [
            "refused" if found is None else found.ms if claim.measure == "ms" else float(found.best().mean())
            for found in (better, worse)
        ]
        return {"first": ends[0], "second": ends[1], "holds": holds}
    if claim.measure == "ms":
        return {"first": better.ms, "second": worse.ms, "holds": "yes" if better.ms < worse.ms else "no"}
    difference = worse.best() - better.best()
    earlier = {rows: np.subtract(worse.earlier[rows], better.earlier[rows]) for rows in better.earlier}
    return {
        "first": float(better.best().mean()),
        "second": float(worse.best().mean()),
        "difference": float(difference.mean()),
        "standard error": standard_error(difference),
        "starts": f"{int(np.sum(difference > 0))} of {len(difference)}",
        **{f"after {rows}": judged(x) for rows, x in earlier.items()},
        "holds": judged(difference),
    }


def standard_error(difference: np.ndarray) -> float:
    return float(difference.std(ddof=1) / np.sqrt(len(difference)))


def judged(difference: np.ndarray) -> str:
    """Of the starts' differences, above zero where a claim holds."""
    if abs(difference.mean()) <= 2 * standard_error(difference):
        return "no difference"
    return "yes" if difference.mean() > 0 else "no"
