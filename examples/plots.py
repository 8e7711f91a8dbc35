"""What the examples' figures have in common: colors, shapes, how they are saved."""

from __future__ import annotations

import argparse
import io
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

REFERENCE = "#555555"  # NUTS, or whatever else the Gaussian is compared with
TRUTH = "black"  # what the data were made with, always as a broken line
RVGA_COLOR = "#0072B2"
# Okabe and Ito's colors, which color-blind readers can tell apart.
COLORS = (RVGA_COLOR, "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")
METHODS = {
    "default": ("RVGA's default", "black"),
    "implicit": ("R-VGA, implicit", COLORS[0]),
    "explicit": ("R-VGA, explicit", COLORS[1]),
    "ekf": ("EKF", COLORS[2]),
    "qkf": ("QKF", COLORS[3]),
    "laplace": ("Laplace", COLORS[4]),
}
WIDTH = 9  # inches

plt.rcParams.update(
    {
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": 10,
        "axes.labelsize": 9,
        "figure.constrained_layout.use": True,
        "font.size": 9,
        "legend.frameon": False,
        "savefig.dpi": 110,
        "xtick.labelsize": 8,
        "ytick.labelsize": 8,
    }
)


def parse_arguments(description: str | None, argv: list[str] | None, *, data: str | None = None) -> argparse.Namespace:
    """:param data: the file that ``--data FOLDER`` is to hold, for examples that can take a paper's own data."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if data is not None:
        parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"folder with {data}, to use instead")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--quick", action="store_true", help="a smaller problem, to see whether it runs")
    return parser.parse_args(argv)


def intervals(axis: Axes, place, low, middle, high, color: str, *, across: bool = False) -> None:
    """A line from ``low`` to ``high`` with a dot at ``middle``, upright or ``across``."""
    if across:
        axis.hlines(place, low, high, color=color, lw=2)
        axis.plot(middle, place, "o", color=color, ms=3.5)
    else:
        axis.vlines(place, low, high, color=color, lw=2)
        axis.plot(place, middle, "o", color=color, ms=3.5)


def density_axis(axis: Axes, title: str) -> None:
    """Densities are compared by their shapes: no scale for their heights."""
    axis.set_title(title, fontsize=8)
    axis.set_yticks([])
    axis.set_ylim(0, None)
    axis.spines["left"].set_visible(False)


def compare_densities(axis: Axes, ours, reference, title: str) -> None:
    """Histograms of draws, the reference's filled."""
    bins = np.histogram_bin_edges(np.concatenate([ours, reference]), 40)
    axis.hist(reference, bins, density=True, color=REFERENCE, alpha=0.35)
    axis.hist(ours, bins, density=True, histtype="step", color=RVGA_COLOR, lw=1.4)
    density_axis(axis, title)


def save(figure: Figure, folder: Path, name: str) -> None:
    """With a palette of 256 colors: a third of the bytes, for the same picture."""
    folder.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    path = folder / f"{name}.png"
    Image.open(buffer).convert("RGB").quantize(256, method=Image.Quantize.MEDIANCUT).save(path, optimize=True)
    print(f"saved {path}")
