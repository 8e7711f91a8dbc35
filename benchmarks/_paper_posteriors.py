"""How far recursions are from the best Gaussian, by rows absorbed: made-up logistic regressions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ellipses import model, trajectory
from plots import METHODS
from scipy.stats import norm

from numpyro_rvga import RVGA, FixedPointVI

RECURSIONS = {
    "implicit": {"expectation": "probit", "block_size": 1},
    "explicit": {"scheme": "explicit", "expectation": "probit"},
    "ekf": {"scheme": "ekf"},
    "qkf": {"scheme": "qkf"},
}
AT_ONCE = {"default": {}, "laplace": {"scheme": "laplace"}}
NUM_LOOKS = 30
SMALLEST = 1e-4  # nats, below which a divergence is drawn at this height
NODES = np.linspace(-9, 9, 2001)
MASS = norm.pdf(NODES) * (NODES[1] - NODES[0])


class Setting(NamedTuple):
    figure: str
    dimension: int
    num_rows: int
    separation: float
    condition: float
    prior_scale: float
    prior_norm: float = 0.0

    @property
    def title(self) -> str:
        said = f"figure {self.figure}: d = {self.dimension}, s = {self.separation:g}, c = {self.condition:g}"
        return f"{said}\nprior sd {self.prior_scale:g}" + (f", off by {self.prior_norm:g}" if self.prior_norm else "")


SETTINGS = [
    *(Setting(f"{3 + i}", 2, 100, 2, 2, *prior) for i, prior in enumerate([(1, 0.1), (10, 1), (100, 10)])),
    Setting("6", 2, 100, 5, 2, 10),
    *(Setting(f"{14 + i}", 2, 100, s, 1, 10) for i, s in enumerate([2, 5, 10])),
    Setting("10", 100, 200, 2, 1, 10),
    *(Setting("7", d, 500, 2, 0, 1) for d in (30, 70, 100)),
    Setting("10", 100, 200, 2, 2, 10),
    *(Setting("8", d, 500, 2, 0, 30) for d in (30, 70, 100)),
    Setting("10", 100, 200, 2, 3, 10),
    *(Setting("9", 100, 200, s, 0, 10) for s in (1, 3, 5)),
]


def two_classes(setting: Setting) -> dict[str, np.ndarray]:
    """Two Gaussians of a covariance that is turned at random, each class scaled by its spread (section 6, eq. 91)."""
    d, rng = setting.dimension, np.random.default_rng(10)
    y = rng.permutation(np.arange(setting.num_rows) % 2)
    rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
    noise = rng.normal(size=(setting.num_rows, d)) * np.arange(1, d + 1) ** (-setting.condition / 2) @ rotation
    for label in (0, 1):
        of_class = noise[y == label]
        noise[y == label] = (of_class - of_class.mean(0)) / np.linalg.norm(of_class.std(0))
    direction = rng.normal(size=d)
    center = 0.5 * setting.separation * direction / np.linalg.norm(direction)
    return {"X": np.where(y[:, None] == 1, center, -center) + noise, "y": y}


def divergence(data: dict[str, np.ndarray], prior: dict[str, float], mean: np.ndarray, covariance: np.ndarray) -> float:
    """KL(q || posterior of all rows), less the log evidence (equation 94), expectations by the trapezoidal rule."""
    signed = (2 * data["y"] - 1)[:, None] * data["X"]
    spread = np.sqrt(np.einsum("nd,de,ne->n", signed, covariance, signed))
    likelihood = -(np.logaddexp(0, -((signed @ mean)[:, None] + spread[:, None] * NODES)) @ MASS).sum()
    variance, size = prior["prior_scale"] ** 2, len(mean)
    apart = np.trace(covariance) + np.sum((mean - prior["prior_mean"]) ** 2)
    entropy = 0.5 * (np.linalg.slogdet(covariance)[1] + size)
    return float(-likelihood + 0.5 * (apart / variance + size * np.log(variance)) - entropy)


def panel(setting: Setting) -> dict[str, Any]:
    data = two_classes(setting)
    prior_mean = setting.prior_norm / np.sqrt(setting.dimension)
    prior = {"prior_mean": prior_mean, "prior_scale": float(setting.prior_scale)}

    def end(method):
        found = method.run(data, progress_bar=False, **prior)
        return divergence(data, prior, np.asarray(found.mean, float), np.asarray(found.covariance, float))

    best = end(FixedPointVI(model))
    after = np.unique(np.geomspace(1, setting.num_rows, NUM_LOOKS).round().astype(int))
    curves = {}
    for name, options in RECURSIONS.items():
        means, covariances = trajectory(RVGA(model, **options), data, **prior)
        curves[name] = after, [divergence(data, prior, means[t], covariances[t]) - best for t in after]
    for name, options in AT_ONCE.items():
        curves[name] = after[[0, -1]], [end(RVGA(model, **options)) - best] * 2
    said = "  ".join(f"{name} {values[-1]:.3g}" for name, (_, values) in curves.items())
    print(f"{setting.title.replace(chr(10), ', '):60s} {said}", flush=True)
    drawn = {
        METHODS[name][0]: {
            "rows": rows.tolist(),
            "values": np.maximum(values, SMALLEST).tolist(),
            "style": {"color": METHODS[name][1], "ls": "--" if name in AT_ONCE else "-"},
        }
        for name, (rows, values) in curves.items()
    }
    what = "nats above the best Gaussian"
    return {"title": setting.title, "what": what, "scale": "log", "row_scale": "log", "columns": 4, "curves": drawn}


def posteriors(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    panels = []
    for setting in SETTINGS[:1] if quick else SETTINGS:
        with jax.enable_x64(True):
            panels.append(panel(setting))
        yield panels
