"""Merging: posteriors of parts of the data, merged once and in rounds, against the best Gaussian of all rows.

OPENBLAS_NUM_THREADS=1 python -m benchmarks merging [--quick] [--models NAME ...]
python -m benchmarks merging --draw figures/merging.json

Errors are in standard deviations of the best Gaussian (FixedPointVI's): the largest error of a mean, and the largest
relative error of a standard deviation. Parts are of rows in random order, sorted by outcome, and in order of time: by
the first predictor, as a trend has it, by group, or by the first of two crossed effects. Times are of one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import RVGA, FixedPointVI, Posterior

COUNTS = (4, 16, 64)
ORDERS = ("random", "sorted", "time")
STYLES = dict(zip(ORDERS, ("-", "--", ":")))


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def counts(X, g, y=None):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", 20):
        a = numpyro.sample("a", dist.Normal(0, spread))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w + a[g])), obs=y)


def crossed(i, j, y=None):
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([2]).to_event(1))
    center = numpyro.sample("center", dist.Normal(0, 2))
    with numpyro.plate("first", 30):
        a = numpyro.sample("a", dist.Normal(0, scales[0]))
    with numpyro.plate("second", 20):
        b = numpyro.sample("b", dist.Normal(0, scales[1]))
    with numpyro.plate("rows", len(i)):
        numpyro.sample("y", dist.Bernoulli(logits=center + a[i] + b[j]), obs=y)


def cases(num_rows: int):
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(num_rows, 10)), rng.normal(size=10)
    yield "linear-Gaussian", linear, {"X": X, "y": X @ w + rng.normal(size=num_rows)}
    yield "logistic", logistic, {"X": X, "y": (rng.random(num_rows) < 1 / (1 + np.exp(-X @ w))).astype(float)}
    g, a = rng.integers(0, 20, num_rows), rng.normal(size=20)
    y = rng.poisson(np.exp(X[:, :3] @ w[:3] / 3 + a[g])).astype(float)
    yield "Poisson, 20 groups", counts, {"X": X[:, :3], "g": g, "y": y}
    i, j = rng.integers(0, 30, num_rows), rng.integers(0, 20, num_rows)
    logits = 0.5 + rng.normal(size=30)[i] + 0.5 * rng.normal(size=20)[j]
    yield "crossed, 50 effects", crossed, {"i": i, "j": j, "y": (rng.logistic(size=num_rows) < logits).astype(float)}


def errors(posterior: Posterior, best: Posterior) -> dict[str, float]:
    deviation = np.sqrt(np.diag(best.covariance))
    of_mean = np.max(np.abs(posterior.mean - best.mean) / deviation)
    of_deviation = np.max(np.abs(np.sqrt(np.diag(posterior.covariance)) / deviation - 1))
    return {"error_of_means_in_sds": float(of_mean), "relative_error_of_sds": float(of_deviation)}


def main() -> None:
    options = parser(__doc__, drawn=True)
    options.add_argument("--quick", action="store_true", help="fewer rows")
    options.add_argument("--models", nargs="*", default=[], help="beginnings of names; default: all")
    args = options.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return
    numpyro.enable_x64()
    num_rows, report = 6_400 if args.quick else 128_000, Report(args.output / "merging.json")
    for name, model, data in cases(num_rows):
        if args.models and not name.startswith(tuple(args.models)):
            continue
        best, seconds = timed(lambda model=model, data=data: FixedPointVI(model).run(data, progress_bar=False))
        report(model=name, parts=1, order="as it is", seconds=seconds)
        for order in ORDERS:
            places = places_in(order, data)
            for count in COUNTS:
                method = RVGA(model)
                blocks = [{n: x[i] for n, x in data.items()} for i in np.array_split(places, count)]
                parts, of_parts = timed(lambda m=method, b=blocks: [m.run(x, progress_bar=False) for x in b])
                once = Posterior.merge(parts)
                merged, of_rounds = timed(lambda p=parts, b=blocks: Posterior.merge(p, data=b))
                report(
                    model=name,
                    parts=count,
                    order=order,
                    seconds=of_parts + of_rounds,
                    **{f"{what}_merged_once": value for what, value in errors(once, best).items()},
                    **errors(merged, best),
                    bound_below=best.elbo - merged.elbo,
                    rounds=merged.info.get("rounds", 1),
                    merge_errors=np.asarray(merged.info.get("merge_errors", [])).tolist(),
                )


def places_in(order: str, data: dict[str, np.ndarray]) -> np.ndarray:
    """The numbers of the rows in this order."""
    if order == "random":
        return np.arange(len(data["y"]))
    of_time = data.get("g", data.get("i", data["X"][:, 0] if "X" in data else None))
    return np.argsort(data["y"] if order == "sorted" else of_time, kind="stable")


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """The result, and the processor's seconds."""
    started = time.process_time()
    found = call()
    return found, time.process_time() - started


def draw(results: dict[str, Any], path: Path) -> None:
    """The error after each round, for each model and order."""
    import matplotlib.pyplot as plt

    rows = [row for row in results["cases"] if row.get("merge_errors")]
    names = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(4 * len(names), 3.2), sharey=True, squeeze=False)
    for name, ax in zip(names, axes[0]):
        for row in (row for row in rows if row["model"] == name):
            style, label = STYLES[row["order"]], f"{row['parts']} parts, {row['order']}"
            color = f"C{COUNTS.index(row['parts'])}"
            where = np.arange(1, 1 + len(row["merge_errors"]))
            ax.plot(where, row["merge_errors"], style, color=color, marker="o", label=label)
        ax.axhline(0.01, color="0.7", linewidth=0.8)
        most = max(len(row["merge_errors"]) for row in rows)
        ax.set(title=name, xlabel="round", yscale="log", xticks=range(1, 1 + most), xlim=(0.8, most + 0.2))
    axes[0, -1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.02, 0.5))
    axes[0, 0].set_ylabel("standard deviations from all rows")
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
