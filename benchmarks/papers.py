"""The papers' curves, drawn anew from runs of this package.

    python -m benchmarks papers [--data FOLDER] [--parts PART ...]

Parts, and the figures whose settings they take:

- posteriors: divergence from a logistic posterior by rows absorbed ("The recursive variational Gaussian
  approximation", figures 3 to 10 and 14 to 16);
- rules: error rate, NLPD and calibration of a network by rows absorbed, for rules and curvatures ("Bayesian online
  natural gradient", figures 1, 5, 7);
- families: the same for families of Gaussians, with diagonal Kalman filters and stochastic gradient descent (the same
  paper, figures 2, 6, 8; "Diagonal extended Kalman filters", figures 1 and 2);
- filters, maps: the same for the full Kalman filter beside the diagonal ones, and probabilities in the plane of two
  inputs ("Diagonal extended Kalman filters", figures 4 and 3);
- rates: NLPD of a network for regression by rows absorbed, for learning rates ("Bayesian online natural gradient",
  figures 9 to 13);
- claims: a table of what the papers say of rules, curvatures and families, and whether it holds for tuned methods from
  several starts (the figures of rules and families, and "Bayesian online natural gradient", figure 3);
- inclusive: a table of both divergences from a logistic posterior, and of errors of its moments, with assumed density
  filtering and expectation propagation beside R-VGA and the diagonal Kalman filters.

The networks learn scikit-learn's digits, and a simulated robot arm; with ``--data`` they learn MNIST, which takes
hours, and SARCOS. In a folder without mnist.npz, and with the four files in which Fashion-MNIST or MNIST are
published, they learn these. Curves against time have benchmarks of their own: ``fixed_point`` ("A fixed-point operator
for inference in variational Bayesian latent Gaussian models", figures 2 to 5), and ``scaling`` and ``bong`` (running
times of the BONG paper, figures 3 and 4).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))  # their problems are taken over

from _paper_claims import claims
from _paper_filters import filters, maps
from _paper_inclusive import inclusive
from _paper_networks import families, rules
from _paper_posteriors import posteriors
from _paper_rates import rates
from _results import parser, write
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, NullLocator
from plots import plt, save

TABLES = {"claims": claims, "inclusive": inclusive}
FIGURES = {"posteriors": posteriors, "rules": rules, "families": families, "rates": rates}
PARTS = FIGURES | {"filters": filters, "maps": maps} | TABLES


def draw(results: dict[str, Any], path: Path) -> None:
    panels = results["cases"]
    columns = panels[0]["columns"]
    lines = -(-len(panels) // columns)
    size = (2.9 * columns, 2.3 * lines + 1.0)
    figure, axes = plt.subplots(lines, columns, figsize=size, squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels):
        if "map" in panel:
            draw_map(axis, panel)
            continue
        for label, curve in panel["curves"].items():
            axis.plot(curve["rows"], curve["values"], label=label, lw=1.4, **curve["style"])
        axis.set_title(panel["title"], fontsize=9)
        axis.set_ylabel(panel["what"], fontsize=8)
        axis.set_yscale(panel["scale"])
        axis.set_xscale(panel["row_scale"])
        low, high = axis.get_ylim()
        if panel["scale"] == "log" and high < 100 * low:  # or the powers of ten are enough
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=20))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_locator(NullLocator())
        axis.set_ylim(top=panel.get("top"))
        axis.tick_params(labelsize=7)
    handles = {label: handle for axis in axes.flat for handle, label in zip(*axis.get_legend_handles_labels())}
    if handles:
        for axis in axes.flat[len(panels) - columns : len(panels)]:
            axis.set_xlabel("rows absorbed", fontsize=8)
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, fontsize=8)
    save(figure, path.parent, path.stem)


def draw_map(axis: Axes, panel: dict[str, Any]) -> None:
    """The probability of the second of two classes, with the rows that were learned."""
    axis.imshow(
        panel["map"], extent=np.ravel(panel["edges"]), origin="lower", cmap="RdBu_r", vmin=0, vmax=1, aspect="auto"
    )
    X, y = np.array(panel["points"]["X"]), np.array(panel["points"]["y"])
    for label, color in enumerate(("#2166ac", "#b2182b")):
        axis.plot(*X[y == label].T, "o", color=color, ms=2.5, mec="white", mew=0.3)
    axis.set_title(panel["title"], fontsize=8)
    axis.set_xticks([])
    axis.set_yticks([])


def main() -> None:
    options = parser(__doc__, drawn=True)
    options.add_argument("--data", type=Path, help="folder with mnist.npz, load.py and the data files it reads")
    options.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="default: all")
    options.add_argument("--quick", action="store_true", help="fewer rows and panels, to see whether it runs")
    arguments = options.parse_args()
    if arguments.draw is not None:
        draw(json.loads(arguments.draw.read_text()), arguments.draw.with_suffix(".png"))
        return
    for name in arguments.parts:
        path = arguments.output / f"papers_{name}.json"
        for panels in PARTS[name](arguments.data, arguments.quick):  # those that there are so far
            results = write(panels, path)
        if name not in TABLES:
            draw(results, path.with_suffix(".png"))


if __name__ == "__main__":
    main()
