"""What the examples' figures have in common: colours, labels, where they are saved."""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

REFERENCE = "#555555"  # NUTS, or the true posterior
METHODS = {
    "default": ("RVGA's default", "black"),
    "implicit": ("R-VGA, implicit", "#0072B2"),
    "explicit": ("R-VGA, explicit", "#E69F00"),
    "ekf": ("EKF", "#009E73"),
    "qkf": ("QKF", "#CC79A7"),
    "laplace": ("Laplace", "#D55E00"),
}
RVGA_COLOUR = "#0072B2"
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9")

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
    parser = argparse.ArgumentParser(description=description)
    if data is not None:
        parser.add_argument("--data", type=Path, metavar="FOLDER", help=f"folder with {data}, to use instead")
    parser.add_argument("--output", type=Path, default=Path("figures"), help="folder for the figures")
    parser.add_argument("--quick", action="store_true", help="a smaller problem, to see whether it runs")
    return parser.parse_args(argv)


def save(figure: Figure, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png")
    plt.close(figure)
    print(f"saved {folder / f'{name}.png'}")
