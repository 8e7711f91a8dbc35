"""How good a Gaussian after how many seconds: RVGA, BONG, FixedPointVI, SVI, Laplace, BlackJAX, and NUTS.

python -m benchmarks accuracy [--data FOLDER] [--cases NAME ...] [--output FOLDER]
python -m benchmarks accuracy --draw FOLDER/accuracy.json

Without ``--data`` (a folder with load.py and the data files) the rows are made; with it, they are those of Covertype
and of insurance claims. All seconds include compilation, but NUTS's. A gap is the distance in nats of a Gaussian's
bound, evaluated exactly and off the clock, from the best that any method found. Errors are the largest of a mean, in
standard deviations of FixedPointVI's Gaussian, and the largest of a standard deviation's logarithm. SVI and BlackJAX's
full-rank VI run once for each of a few learning rates; the run that ends highest is kept, and its seconds alone count.
SVI's steps see a slice of the rows; BlackJAX's see all of them, and are as many, up to SVI's number, as ``--seconds``
allow.

NUTS's seconds are extrapolated from a chain's iterations after the first 20, in which the step size goes up and down,
as many as take that time: 1,000 of warm-up and 1,000 draws with trees of at most 63 steps, or, started from RVGA's
posterior (whose seconds are added), 100 and 1,000.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _comparison import Effort, Reference, compare, run_cases
from _data import load_module
from _gaussians import Case, exact_bound
from _methods import nuts_seconds
from numpyro.infer import NUTS

from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior

SVI_BATCH = 2048


# ---------------------------------------------------------------------- models and data
def logistic(X, y=None, total=None, prior_scale=3.0):
    """``total``: the number of all rows, where these are some of them, as in a step of SVI."""
    w = numpyro.sample("w", dist.Normal(0, prior_scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", total or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def claims(X, log_exposure, y=None, total=None):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", total or len(X), subsample_size=len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(log_exposure + X @ w)), obs=y)


def paper(folder: str | None) -> Case:
    """As in section 6 of the R-VGA paper: two Gaussians of common covariance, two standard deviations apart, and a wide
    prior."""
    rng = np.random.default_rng(0)
    count, size = 500, 30
    y = rng.permutation(np.arange(count) % 2)
    noise = rng.normal(size=(count, size))
    center = np.full(size, size**-0.5)
    X = np.where(y[:, None] == 1, center, -center) + noise / np.linalg.norm(noise.std(0))
    return Case(
        f"logistic, R-VGA paper: {count} x {size}", logistic, {"X": X, "y": y.astype(float)}, {"prior_scale": 30.0}
    )


def made(folder: str | None) -> Case:
    rng = np.random.default_rng(0)
    count, size = 200_000, 20
    mixing = np.eye(size) + 0.5 * rng.normal(size=(size, size)) / np.sqrt(size)
    X = np.column_stack([np.ones(count), rng.normal(size=(count, size)) @ mixing])
    logits = X @ np.concatenate([[-1.0], rng.normal(size=size) / 2])
    rows = {"X": X, "y": (rng.random(count) < 1 / (1 + np.exp(-logits))).astype(float)}
    return Case(f"logistic, made: {count:,} x {size + 1}", logistic, rows, {})


def covertype(folder: str, count: int = 400_000) -> Case:
    """An intercept and all 54 columns; the most frequent cover type against the others; rows in random order."""
    design, cover, _ = load_module(folder).design("covtype", drop_first=False)
    order = np.random.default_rng(0).permutation(len(cover))[:count]
    X = np.column_stack([np.ones(count), design[order]]).astype(np.float64)
    rows = {"X": X, "y": (cover[order] == 1).astype(np.float64)}
    return Case(f"logistic, Covertype: {count:,} x {X.shape[1]}", logistic, rows, {})


def insurance(folder: str) -> Case:
    load = load_module(folder)
    X, counts, _ = load.design("freMTPL2freq")
    count = len(counts)
    order = np.random.default_rng(0).permutation(count)
    X = np.column_stack([np.ones(count), X[order]]).astype(np.float64)
    rows = {"X": X, "log_exposure": np.log(load.load("freMTPL2freq")["exposure"][order])}
    rows["y"] = counts[order].astype(np.float64)
    return Case(f"Poisson, freMTPL2freq: {count:,} x {X.shape[1]}", claims, rows, {})


BUNDLED = {"paper": paper, "made": made}
WITH_DATA = {"covertype": covertype, "insurance": insurance}


# ---------------------------------------------------------------------- runs
def passes(case: Case) -> dict[str, Callable[[], Posterior]]:
    """One pass each, by name."""
    methods = {
        "RVGA": RVGA(case.model),
        "RVGA, block_size=1": RVGA(case.model, block_size=1),
        "RVGA, Laplace": RVGA(case.model, scheme="laplace"),
        "BONG, cm-ekf": BONG.preset("cm-ekf", case.model),
        "FixedPointVI": FixedPointVI(case.model),
    }
    run = lambda method: method.run(case.rows, progress_bar=False, **case.kwargs)  # noqa: E731
    return {name: lambda method=method: run(method) for name, method in methods.items()}


def run_case(case: Case, effort: Effort, kept: Path) -> dict:
    def reference(best):
        return Reference(best.mean, np.sqrt(np.diag(best.covariance)), np.zeros(len(best.mean), bool))

    if len(case.rows["y"]) <= effort.batch:
        effort = effort._replace(batch=None)
    found = compare(case, passes(case), lambda case, _: exact_bound(case), effort, reference)
    start = found.posteriors["RVGA"]
    cold = nuts_seconds(case, NUTS(case.model, max_tree_depth=6), 2000, effort.seconds)
    warm = nuts_seconds(case, start.nuts(), 1100, effort.seconds, start.init_params(jax.random.key(0)))
    nuts = {"NUTS": cold, "NUTS, warm-started": found.seconds["RVGA"] + warm}
    print("  extrapolated: " + ", ".join(f"{name} {seconds:.0f} s" for name, seconds in nuts.items()), flush=True)
    return found.results | {"nuts": nuts}


if __name__ == "__main__":
    run_cases(__doc__, "accuracy", BUNDLED, WITH_DATA, run_case, seconds=5.0, batch=SVI_BATCH)
