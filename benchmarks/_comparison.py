"""Gaussians from several methods, on one case and in one process: seconds, bounds, errors, and their picture."""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpyro
from _gaussians import Bound, Case, LogDensity, Point, finite
from _methods import auto_laplace, best_of_rates, full_rank, pathfinder, svi, timed
from _results import parser, write

from numpyro_rvga import Posterior

GAPS = 1e-3, 1e6  # of the picture: what is less or more lies on its edges
MOST_LATENTS = 1000  # of methods that take hours with more
COLORS = {
    "RVGA": "#0072B2",
    "RVGA, block_size=1": "#56B4E9",
    "RVGA, Laplace": "#009E73",
    "BONG, cm-ekf": "#999999",
    "FixedPointVI": "#000000",
    "NumPyro, Laplace": "#D55E00",
    "NumPyro, SVI": "#CC79A7",
    "BlackJAX, full-rank VI": "#E69F00",
    "BlackJAX, Pathfinder": "#8C564B",
}
NUTS_LINES = {"NUTS": "--", "NUTS, warm-started": ":"}


class Effort(NamedTuple):
    """What other methods are granted: steps, rows of a step (None: all), learning rates to choose from, seconds."""

    num_steps: int
    batch: int | None
    rates: list[float]
    seconds: float


def add_effort(options: argparse.ArgumentParser, seconds: float) -> None:
    options.add_argument("--steps", type=int, default=10_000, help="of SVI, and at most of BlackJAX's full-rank VI")
    rates = [0.003, 0.01, 0.03, 0.1]
    options.add_argument("--rates", type=float, nargs="+", default=rates, help="learning rates to try")
    options.add_argument("--seconds", type=float, default=seconds, help="of BlackJAX's full-rank VI, and to time NUTS")


class Reference(NamedTuple):
    """What errors are measured against; ``scales`` marks the logarithms of hierarchical scales, told apart."""

    mean: np.ndarray
    deviation: np.ndarray
    scales: np.ndarray

    def errors(self, point: Point) -> dict[str, float]:
        of_means = np.abs(point.mean - self.mean) / self.deviation
        deviation = np.sqrt(np.sum(np.square(point.scale_tril), axis=1))
        of_deviations = np.abs(np.log(deviation / self.deviation))
        found = {"mean": of_means[~self.scales], "deviation": of_deviations[~self.scales]}
        found |= {"scale mean": of_means[self.scales], "scale deviation": of_deviations[self.scales]}
        return {name: float(np.max(values)) for name, values in found.items() if len(values)}


class Compared(NamedTuple):
    """A case's results, and the posteriors and seconds of our own methods."""

    results: dict[str, Any]
    posteriors: dict[str, Posterior]
    seconds: dict[str, float]


def compare(
    case: Case,
    passes: dict[str, Callable[[], Posterior]],
    make_bound: Callable[[Case, LogDensity], Bound],
    effort: Effort,
    reference: Callable[[Posterior], Reference],
) -> Compared:
    """Run all methods.

    :param passes: our methods by name, FixedPointVI last.
    :param make_bound: from the case and the model's log density.
    :param reference: from FixedPointVI's posterior.
    """
    print(case.name, flush=True)
    found, posteriors = {}, {}
    for name, run in passes.items():
        point, posteriors[name] = timed(run)
        found[name] = ([point], {})
        print(f"  {name:24s} {point.seconds:8.2f} s", flush=True)
    best = posteriors["FixedPointVI"]
    density = LogDensity(case, best.site_names)
    bound, against = make_bound(case, density), reference(best)
    found |= rivals(case, density, best.site_names, bound, effort)
    curves = {}
    for name, (points, notes) in found.items():
        bounds = [bound(point.mean, point.scale_tril) if finite(point) else None for point in points]
        errors = against.errors(points[-1]) if finite(points[-1]) else {}
        curves[name] = {"seconds": [point.seconds for point in points], "bounds": bounds, "errors": errors} | notes
    results = {"title": case.name, "curves": curves}
    show(results)
    return Compared(results, posteriors, {name: curves[name]["seconds"][-1] for name in passes})


def rivals(case: Case, density: LogDensity, site_names: tuple[str, ...], bound: Bound, effort: Effort):
    """The other methods' Gaussians, and what is to be noted of them, by name."""
    found, runs, few = {}, {}, len(density.start) <= MOST_LATENTS
    if few:
        found["NumPyro, Laplace"] = ([auto_laplace(case, site_names)], {})
        runs["NumPyro, SVI"] = lambda rate: svi(case, site_names, effort.num_steps, rate, effort.batch)
    else:
        print(f"  {len(density.start):,} latents: SVI, Laplace and full-rank VI are left out", flush=True)
    if all(importlib.util.find_spec(name) for name in ("blackjax", "optax")):
        found["BlackJAX, Pathfinder"] = ([pathfinder(case, density)], {})
        if few:
            runs["BlackJAX, full-rank VI"] = full_rank(case, density, effort.num_steps, effort.seconds)
    else:
        print("  BlackJAX and optax are not installed: their methods are left out", flush=True)
    for name, run in runs.items():
        rate, (points, num_steps) = best_of_rates(run, effort.rates, bound)
        found[name] = (points, {"learning_rate": rate, "steps": num_steps})
        print(f"  {name:24s} {points[-1].seconds:8.2f} s, {num_steps:,} steps, learning rate {rate}", flush=True)
    return found


def gaps(case: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any], np.ndarray]]:
    """For each curve the nats below the best bound of all, NaN where there was no Gaussian."""
    bounds = {name: np.array(curve["bounds"], float) for name, curve in case["curves"].items()}
    best = max(np.nanmax(found) for found in bounds.values() if not np.all(np.isnan(found)))
    for name, curve in case["curves"].items():
        yield name, curve, best - bounds[name]


def show(case: dict[str, Any]) -> None:
    """A table of each method's end; seconds are ratios to RVGA's too."""
    base = case["curves"]["RVGA"]["seconds"][-1]
    for name, curve, found in gaps(case):
        errors = "  ".join(f"{what} {error:.3g}" for what, error in curve["errors"].items())
        spent = curve["seconds"][-1]
        print(f"  {name:24s} {spent / base:7.2f} x RVGA  {spent:8.2f} s  {found[-1]:10.4g} nats  {errors}", flush=True)


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = results["cases"]
    columns = min(len(cases), 2)
    size = (4.6 * columns, 3.2 * -(-len(cases) // columns) + 1.0)
    figure, axes = plt.subplots(-(-len(cases) // columns), columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for axis, case in zip(axes.flat, cases):
        for name, curve, found in gaps(case):
            style = {"ls": "-", "marker": "."} if len(found) > 1 else {"ls": "", "marker": "o", "ms": 7}
            axis.loglog(curve["seconds"], np.clip(found, *GAPS), color=COLORS[name], label=name, **style)
        for name, seconds in case["nuts"].items():
            axis.axvline(seconds, color="#666666", ls=NUTS_LINES[name], lw=1.2, label=name)
        axis.set_title(case["title"], fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=8)
        axis.xaxis.set_minor_formatter("")
        axis.set_xlabel("seconds, compilation included", fontsize=8)
    figure.supylabel("nats below the best Gaussian's bound", fontsize=9)
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2 * columns, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110)
    print(f"saved {path}")


def run_cases(
    description: str,
    name: str,
    bundled: dict[str, Callable[[str | None], Case]],
    with_data: dict[str, Callable[[str], Case]],
    run_case: Callable[[Case, Effort, Path], dict[str, Any]],
    *,
    seconds: float,
    batch: int | None = None,
) -> None:
    """The command line of a comparison: its cases, their results as JSON, and the picture.

    :param bundled: cases that need no data folder, which run without it. :param with_data: those that run with it.
    :param run_case: what there is to draw of a case, from that, the effort and a file for long runs that are kept.
    :param seconds: default of ``--seconds``. :param batch: rows of SVI's steps.
    """
    cases = bundled | with_data
    options = parser(description, drawn=True)
    options.add_argument("--data", help="folder with load.py and the data files")
    add_effort(options, seconds)
    usual = f"{', '.join(bundled)}, or with data {', '.join(with_data)}"
    options.add_argument("--cases", nargs="*", choices=cases, help=f"default: {usual}")
    args = options.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return
    names = args.cases or list(bundled if args.data is None else with_data)
    if args.data is None and not set(names) <= set(bundled):
        options.error(f"without --data there are only {', '.join(bundled)}")
    numpyro.enable_x64()
    effort, found = Effort(args.steps, batch, args.rates, args.seconds), []
    for case in names:
        found.append(run_case(cases[case](args.data), effort, args.output / f"nuts_{case}.json"))
        results = write(found, args.output / f"{name}.json")
    draw(results, args.output / f"{name}.png")
