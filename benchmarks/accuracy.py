"""How good a Gaussian after how many seconds: RVGA, BONG, FixedPointVI, SVI, Laplace and NUTS on the same rows.

OPENBLAS_NUM_THREADS=1 python -m benchmarks accuracy [--data FOLDER] [--cases NAME ...] [--output FOLDER]
python -m benchmarks accuracy --draw FOLDER/accuracy.json

Without ``--data`` (a folder with load.py and the data files) the rows are made. All seconds include compilation, but
NUTS's. A gap is the distance in nats of a Gaussian's bound, evaluated exactly and off the clock, from that of the best
Gaussian, and an error the largest distance of a mean from its, in standard deviations. NUTS is timed for a few draws of
at most 63 steps; its seconds for 1,000 of warm-up and 1,000 draws are extrapolated.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _data import load_module
from _results import write
from covertype import load_rows
from covertype import model as logistic
from fixed_point import Case, exact_bound
from numpyro.infer import MCMC, NUTS, SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoLaplaceApproximation, AutoMultivariateNormal

from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior

NUTS_ITERATIONS = 2000  # of which half are warm-up
SVI_BATCH = 4096
LAPLACE_STEPS = 2000


# ---------------------------------------------------------------------- models and data
def claims(X, log_exposure, y=None, batch=None):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=batch) as index:
        x, offset, target = (X, log_exposure, y) if batch is None else (X[index], log_exposure[index], y[index])
        numpyro.sample("y", dist.Poisson(jnp.exp(offset + x @ w)), obs=target)


def made(folder: str | None) -> Case:
    rng = np.random.default_rng(0)
    count, size = 200_000, 20
    mixing = np.eye(size) + 0.5 * rng.normal(size=(size, size)) / np.sqrt(size)
    X = np.column_stack([np.ones(count), rng.normal(size=(count, size)) @ mixing])
    logits = X @ np.concatenate([[-1.0], rng.normal(size=size) / 2])
    rows = {"X": X, "y": (rng.random(count) < 1 / (1 + np.exp(-logits))).astype(float)}
    return Case(f"logistic, made: {count:,} x {size + 1}", logistic, rows, {})


def covertype(folder: str) -> Case:
    rows = load_rows(folder, 400_000)
    count, size = rows["X"].shape
    return Case(f"logistic, Covertype: {count:,} x {size}", logistic, rows, {})


def insurance(folder: str) -> Case:
    load = load_module(folder)
    X, counts, _ = load.design("freMTPL2freq")
    order = np.random.default_rng(0).permutation(len(counts))
    X = np.column_stack([np.ones(len(order)), X[order]]).astype(np.float64)
    rows = {"X": X, "log_exposure": np.log(load.load("freMTPL2freq")["exposure"][order])}
    rows["y"] = counts[order].astype(np.float64)
    return Case(f"Poisson, freMTPL2freq: {len(order):,} x {X.shape[1]}", claims, rows, {})


BUNDLED = {"made": made}
CASES = BUNDLED | {"covertype": covertype, "insurance": insurance}


# ---------------------------------------------------------------------- methods
class Point(NamedTuple):
    """A Gaussian over the latents, in the order of the posterior's sites, and when it was there."""

    seconds: float
    mean: np.ndarray
    scale_tril: np.ndarray


def passes(case: Case) -> dict[str, Callable[[], Posterior]]:
    """One pass each, by name."""
    run = lambda method: method.run(case.rows, progress_bar=False)  # noqa: E731
    return {
        "RVGA": lambda: run(RVGA(case.model)),
        "RVGA, block_size=1": lambda: run(RVGA(case.model, block_size=1)),
        "RVGA, Laplace": lambda: run(RVGA(case.model, scheme="laplace")),
        "BONG, cm-ekf": lambda: run(BONG.preset("cm-ekf", case.model)),
        "FixedPointVI": lambda: run(FixedPointVI(case.model)),
    }


def timed(run: Callable[[], Posterior]) -> tuple[Point, Posterior]:
    start = time.perf_counter()
    posterior = run()
    jax.block_until_ready(posterior.gaussian)
    return Point(time.perf_counter() - start, posterior.mean, posterior.scale_tril), posterior


def svi(case: Case, num_steps: int, learning_rate: float) -> list[Point]:
    """Adam on batches of rows, the rate falling by two orders of magnitude; a point after each twentieth."""
    guide = AutoMultivariateNormal(case.model)
    rate = lambda step: learning_rate * 0.01 ** (step / num_steps)  # noqa: E731
    method = SVI(case.model, guide, numpyro.optim.Adam(rate), Trace_ELBO())
    start = time.perf_counter()
    rows = {name: jnp.asarray(array) for name, array in case.rows.items()}
    state = method.init(jax.random.key(0), **rows, batch=SVI_BATCH)

    @jax.jit
    def advance(state, count):
        step = lambda _, s: method.update(s, **rows, batch=SVI_BATCH)[0]  # noqa: E731
        return jax.lax.fori_loop(0, count, step, state)

    points = []
    for _ in range(20):
        state = jax.block_until_ready(advance(state, num_steps // 20))
        params = method.get_params(state)
        points.append(Point(time.perf_counter() - start, params["auto_loc"], params["auto_scale_tril"]))
    return points


def auto_laplace(case: Case) -> Point:
    """Adam on all rows to the mode, and the Hessian there."""
    guide = AutoLaplaceApproximation(case.model)
    method = SVI(case.model, guide, numpyro.optim.Adam(0.03), Trace_ELBO())
    start = time.perf_counter()
    found = method.run(jax.random.key(0), LAPLACE_STEPS, **case.rows, progress_bar=False)
    transform = guide.get_transform(found.params)
    return Point(time.perf_counter() - start, transform.loc, jax.block_until_ready(transform.scale_tril))


def nuts_seconds(case: Case, num_draws: int = 4) -> float:
    """Of NUTS with trees of at most 63 steps, extrapolated from a few of its first draws: the second run of a compiled
    chain is timed. Later draws, of an adapted step size, may take more or fewer steps."""
    kernel = MCMC(NUTS(case.model, max_tree_depth=6), num_warmup=num_draws, num_samples=num_draws, progress_bar=False)
    kernel.run(jax.random.key(0), **case.rows)
    start = time.perf_counter()
    kernel.run(jax.random.key(1), **case.rows)
    jax.block_until_ready(kernel.get_samples())
    return (time.perf_counter() - start) / (2 * num_draws) * NUTS_ITERATIONS


# ---------------------------------------------------------------------- runs
def run_case(case: Case, svi_steps: int, learning_rate: float) -> dict[str, Any]:
    """What there is to draw."""
    print(case.name, flush=True)
    found: dict[str, list[Point]] = {}
    for name, run in passes(case).items():
        point, posterior = timed(run)
        found[name] = [point]
        print(f"  {name:24s} {point.seconds:8.2f} s", flush=True)
    best = posterior  # the last one is the batch optimum
    bound, deviation = exact_bound(case, best), np.sqrt(np.diag(best.covariance))
    found["AutoLaplaceApproximation"] = [auto_laplace(case)]
    found["SVI, AutoMultivariateNormal"] = svi(case, svi_steps, learning_rate)
    curves = {}
    for name, points in found.items():
        gaps = [best.elbo - bound(point.mean, point.scale_tril) for point in points]
        errors = [float(np.max(np.abs(point.mean - best.mean) / deviation)) for point in points]
        curves[name] = {"seconds": [point.seconds for point in points], "gaps": gaps, "errors": errors}
        print(f"  {name:28s} {points[-1].seconds:8.2f} s  {gaps[-1]:12.4g} nats  {errors[-1]:9.3g} sd", flush=True)
    seconds = nuts_seconds(case)
    print(f"  NUTS, {NUTS_ITERATIONS:,} iterations, extrapolated: {seconds:.0f} s", flush=True)
    return {"title": case.name, "curves": curves, "nuts_seconds": seconds}


# ---------------------------------------------------------------------- the picture
COLOURS = {
    "RVGA": "#0072B2",
    "RVGA, block_size=1": "#56B4E9",
    "RVGA, Laplace": "#009E73",
    "BONG, cm-ekf": "#999999",
    "FixedPointVI": "#000000",
    "AutoLaplaceApproximation": "#D55E00",
    "SVI, AutoMultivariateNormal": "#CC79A7",
}
SMALLEST_GAP = 1e-3


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = results["cases"]
    figure, axes = plt.subplots(1, len(cases), figsize=(4.4 * len(cases), 3.4), squeeze=False, layout="constrained")
    for axis, case in zip(axes[0], cases):
        for name, curve in case["curves"].items():
            gaps = np.maximum(curve["gaps"], SMALLEST_GAP)
            style = {"ls": "-", "marker": "."} if len(gaps) > 1 else {"ls": "", "marker": "o", "ms": 7}
            axis.loglog(curve["seconds"], gaps, color=COLOURS[name], label=name, lw=1.2, **style)
        axis.axvline(case["nuts_seconds"], color="#E69F00", ls="--", lw=1.2, label="NUTS, 2,000 iterations")
        axis.set_title(case["title"], fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.set_xlabel("seconds, compilation included", fontsize=8)
    axes[0, 0].set_ylabel("nats below the best Gaussian's bound", fontsize=8)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    print(f"saved {path}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="folder with load.py and the data files")
    parser.add_argument("--cases", nargs="*", choices=CASES, help="default: all that the data allow")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for accuracy.json and the picture")
    parser.add_argument("--draw", type=Path, help="draw the picture of this file and do no more")
    parser.add_argument("--svi-steps", type=int, default=10_000)
    parser.add_argument("--svi-learning-rate", type=float, default=0.01)
    args = parser.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return
    names = args.cases or list(BUNDLED if args.data is None else CASES)
    if args.data is None and not set(names) <= set(BUNDLED):
        parser.error(f"without --data there are only {', '.join(BUNDLED)}")
    numpyro.enable_x64()
    found = []
    for name in names:
        found.append(run_case(CASES[name](args.data), args.svi_steps, args.svi_learning_rate))
        results = write(found, args.output / "accuracy.json")
    draw(results, args.output / "accuracy.png")


if __name__ == "__main__":
    main()
