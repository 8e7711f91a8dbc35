"""Five Gaussian approximations of a two-dimensional logistic posterior (R-VGA paper, figures 3 to 6).

Rows: a tight prior, a wide one, a very wide one, each with its mean off the truth, and an ill-conditioned design. Left
and middle: one standard deviation ellipses over the true posterior's density. Right: KL(q || posterior of all rows)
as the rows come in one by one. Laplace's approximation and RVGA's default, which takes so few rows jointly, see them
all at once.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import METHODS, WIDTH, parse_arguments, plt, save
from scipy.special import log_expit, logsumexp

from numpyro_rvga import RVGA


class Case(NamedTuple):
    title: str
    prior_scale: float
    prior_mean: float
    condition: float


CASES = [
    Case("prior sd 1, off by 0.1", 1.0, 0.1, 0.0),
    Case("prior sd 10, off by 1", 10.0, 1.0, 0.0),
    Case("prior sd 100, off by 10", 100.0, 10.0, 0.0),
    Case("prior sd 10, ill-conditioned", 10.0, 0.0, 4.0),
]
BATCH = ("default", "laplace")  # these see all rows at once
PANELS = (("implicit", "explicit"), ("ekf", "qkf"))
FARTHEST = 15  # standard deviations, beyond which an ellipse is not drawn


def model(X, y=None, prior_mean=0.0, prior_scale=1.0):
    theta = numpyro.sample("theta", dist.Normal(prior_mean, prior_scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ theta), obs=y)


def two_classes(num_rows: int, condition: float) -> dict[str, np.ndarray]:
    """Two Gaussians of common covariance, rotated and scaled as in section 6 of the paper."""
    rng = np.random.default_rng(7)
    y = rng.permutation(np.arange(num_rows) % 2)
    rotation = np.linalg.qr(rng.normal(size=(2, 2)))[0]
    noise = rng.normal(size=(num_rows, 2)) * np.array([1.0, 2.0 ** (-condition / 2)]) @ rotation
    center = np.array([1.0, 1.0]) / np.sqrt(2)
    return {"X": np.where(y[:, None] == 1, center, -center) + noise / np.linalg.norm(noise.std(0)), "y": y}


class Found(NamedTuple):
    """What there is to draw of a case: the true density on its grid, Gaussians, and their divergences from it."""

    axes: list[np.ndarray]
    log_density: np.ndarray
    moments: dict[str, tuple[np.ndarray, np.ndarray]]
    curves: dict[str, tuple[np.ndarray, list[float]]]
    divergence: dict[str, float]


class TruePosterior:
    """The posterior of all rows: log density, and its normalizer by summation over a grid."""

    def __init__(self, data, case: Case):
        self._rows = (2 * data["y"] - 1)[:, None] * data["X"]
        self._case = case

    def log_joint(self, theta: np.ndarray) -> np.ndarray:
        mean, scale = self._case.prior_mean, self._case.prior_scale
        prior = -0.5 * np.sum(((theta - mean) / scale) ** 2, axis=-1) - 2 * np.log(scale) - np.log(2 * np.pi)
        return prior + sum(log_expit(theta @ row) for row in self._rows)

    def normalize(self, center: np.ndarray, reach: np.ndarray, size: int) -> None:
        self.axes = [np.linspace(c - r, c + r, size) for c, r in zip(center, reach)]
        grid = np.stack(np.meshgrid(*self.axes), -1)
        self.log_density = self.log_joint(grid)
        cell = np.prod([axis[1] - axis[0] for axis in self.axes])
        self.log_evidence = logsumexp(self.log_density) + np.log(cell)

    def divergence_from(self, mean: np.ndarray, covariance: np.ndarray) -> float:
        """KL(q || posterior) with q = N(mean, covariance), by Gauss-Hermite quadrature."""
        nodes, weights = np.polynomial.hermite_e.hermegauss(30)
        standard = np.stack(np.meshgrid(nodes, nodes), -1).reshape(-1, 2)
        weight = np.outer(weights, weights).ravel() / (2 * np.pi)
        root = np.linalg.cholesky(covariance)
        entropy = 1 + np.log(2 * np.pi) + np.log(np.diagonal(root)).sum()
        return float(self.log_evidence - entropy - weight @ self.log_joint(mean + standard @ root.T))


def trajectory(method: RVGA, data, **prior) -> tuple[np.ndarray, np.ndarray]:
    """Means and covariances before any row and after each, by the functional form: init, then a jitted update."""
    state = method.init(data, **prior)
    update = jax.jit(method.update)
    means, roots = [state.mean], [state.root]
    for row in range(len(data["y"])):
        state = update(state, {name: jnp.asarray(array[row : row + 1]) for name, array in data.items()})
        means.append(state.mean)
        roots.append(state.root)
    roots = np.asarray(jnp.stack(roots), np.float64)
    return np.asarray(jnp.stack(means), np.float64), roots @ np.swapaxes(roots, 1, 2)


def ellipse(mean, covariance):
    angle = np.linspace(0, 2 * np.pi, 200)
    return mean[:, None] + np.linalg.cholesky(covariance) @ np.stack([np.cos(angle), np.sin(angle)])


def compare(case: Case, num_rows: int, size: int) -> Found:
    data = two_classes(num_rows, case.condition)
    prior = {"prior_mean": case.prior_mean, "prior_scale": case.prior_scale}
    moments, curves = {}, {}
    for name, scheme in (("default", "implicit"), ("laplace", "laplace")):
        found = RVGA(model, scheme=scheme).run(data, progress_bar=False, **prior)
        moments[name] = np.asarray(found.mean, np.float64), np.asarray(found.covariance, np.float64)
    posterior = TruePosterior(data, case)
    center, covariance = moments["default"]
    posterior.normalize(center, 9 * np.sqrt(np.diagonal(covariance)), size)
    after = np.unique(np.geomspace(1, num_rows, 40).round().astype(int))
    for scheme in sum(PANELS, ()):
        means, covariances = trajectory(RVGA(model, scheme=scheme), data, **prior)
        moments[scheme] = means[-1], covariances[-1]
        curves[scheme] = after, [posterior.divergence_from(means[t], covariances[t]) for t in after]
    divergence = {name: posterior.divergence_from(*found) for name, found in moments.items()}
    return Found(posterior.axes, posterior.log_density, moments, curves, divergence)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    num_rows, size = (30, 60) if arguments.quick else (200, 300)
    results = {}
    print(f"{'KL, nats':30s}" + "".join(f"{label:>18s}" for label, _ in METHODS.values()))
    for case in CASES[:1] if arguments.quick else CASES:
        results[case.title] = found = compare(case, num_rows, size)
        print(f"{case.title:30s}" + "".join(f"{found.divergence[name]:18.3g}" for name in METHODS))
    save(draw(results), arguments.output, "ellipses")


def draw(results):
    figure, grid = plt.subplots(
        len(results), 3, figsize=(WIDTH, 2.3 * len(results) + 0.4), squeeze=False, width_ratios=[1, 1, 1.2]
    )
    for (*ellipses, right), (title, found) in zip(grid, results.items()):
        for axis, schemes in zip(ellipses, PANELS):
            draw_ellipses(axis, found, (*schemes, *BATCH))
        for name, curve in found.curves.items():
            right.plot(*curve, color=METHODS[name][1], lw=1.6)
        for name in BATCH:
            right.axhline(found.divergence[name], color=METHODS[name][1], lw=1.2, ls="--")
        right.set(xscale="log", yscale="log")
        ellipses[0].set_ylabel(f"{title}\n\nparameter 2")
    for axis, title in zip(grid[0], ("R-VGA", "Kalman filters", "KL(q || posterior), nats")):
        axis.set_title(title)
    for axis, label in zip(grid[-1], ("parameter 1", "parameter 1", "rows absorbed")):
        axis.set_xlabel(label)
    handles = [
        plt.Line2D([], [], color=color, lw=1.6, ls="--" if name in BATCH else "-", label=label)
        for name, (label, color) in METHODS.items()
    ]
    handles.append(plt.Rectangle((0, 0), 1, 1, color="#bbbbbb", label="true posterior"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), columnspacing=1.2, handlelength=1.6)
    return figure


def draw_ellipses(axis, found, schemes):
    relative = np.exp(found.log_density - found.log_density.max())
    axis.contourf(*found.axes, relative, np.linspace(0.05, 1, 8), cmap="Greys", alpha=0.6)
    center, covariance = found.moments["default"]
    spread, absent = np.sqrt(np.diagonal(covariance)), []
    low, high = center - 3 * spread, center + 3 * spread
    for name in schemes:
        label, color = METHODS[name]
        curve = ellipse(*found.moments[name])
        if np.any(np.abs(found.moments[name][0] - center) > FARTHEST * spread):
            absent.append(label)
            continue
        axis.plot(*curve, color=color, lw=1.6, ls="--" if name in BATCH else "-")
        low, high = np.minimum(low, curve.min(1)), np.maximum(high, curve.max(1))
    margin = 0.04 * (high - low)
    (left_end, bottom), (right_end, top) = low - margin, high + margin
    axis.set(xlim=(left_end, right_end), ylim=(bottom, top))
    if absent:
        axis.text(0.03, 0.97, f"far outside: {', '.join(absent)}", va="top", transform=axis.transAxes)


if __name__ == "__main__":
    main()
