"""Gaussian process classification in the plane: a banana among other points, the kernel chosen by the bound.

The latent function has a value for each point, so ``FixedPointVI`` runs the model on all points at once. The kernel's
length scale and amplitude are ``numpyro.param`` sites. The bound on the log evidence also compares kernels, as the
evidence itself would. The picture asks for the function at new points, on a grid: it is drawn there given its values at
the old ones.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import RVGA_COLOR, WIDTH, parse_arguments, plt, save
from scipy.special import expit

from numpyro_rvga import FixedPointVI

JITTER = 1e-4
EXTENT = (-4.0, 4.0, -3.5, 5.0)
MARKERS = {0: ("o", "white"), 1: ("^", "#E69F00")}

KERNELS = {
    "linear": lambda X, length: 1 + X @ X.T / length**2,
    "quadratic": lambda X, length: (1 + X @ X.T / length**2) ** 2,
    "Matérn 3/2": lambda X, length: (1 + distances(X) / length) * jnp.exp(-distances(X) / length),
    "squared exponential": lambda X, length: jnp.exp(-0.5 * (distances(X) / length) ** 2),
}


def distances(X):
    return jnp.sqrt(jnp.sum((X[:, None] - X) ** 2, axis=-1) + 1e-12)  # smooth at zero


def model(X, inside=None, kernel="squared exponential"):
    length = numpyro.param("length", 1.0, constraint=dist.constraints.positive)
    amplitude = numpyro.param("amplitude", 1.0, constraint=dist.constraints.positive)
    covariance = amplitude**2 * KERNELS[kernel](X, length) + JITTER * jnp.eye(len(X))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(X)), covariance))
    with numpyro.plate("points", len(X)):
        numpyro.sample("inside", dist.Bernoulli(logits=f), obs=inside)


def make_data(count: int) -> dict[str, np.ndarray]:
    """Points along a bent line, and as many around and inside the bend."""
    rng = np.random.default_rng(0)
    inside = rng.permutation(np.arange(count) % 2)
    across = 2.6 * rng.uniform(-1, 1, count)
    banana = np.column_stack([across, 0.7 * across**2 - 1.2 + 0.45 * rng.normal(size=count)])
    rest = np.column_stack([1.4 * rng.normal(size=count), 1.3 + 1.1 * rng.normal(size=count)])
    return {"X": np.where(inside[:, None] == 1, banana, rest), "inside": inside}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    numpyro.enable_x64()
    data = make_data(60 if arguments.quick else 250)
    method, found = FixedPointVI(model), {}
    for kernel in list(KERNELS)[-1 if arguments.quick else 0 :]:
        start = time.perf_counter()
        found[kernel] = posterior = method.run(data, kernel=kernel, progress_bar=False)
        seconds = time.perf_counter() - start
        learned = ", ".join(f"{name} {float(value):.2f}" for name, value in posterior.params.items())
        print(f"{kernel:20s} bound {posterior.elbo:8.2f}, {seconds:5.1f} s with compilation, {learned}")
    bounds = {kernel: posterior.elbo for kernel, posterior in found.items()}
    posterior = found[max(bounds, key=bounds.get)]

    side = 12 if arguments.quick else 48
    across, up = np.linspace(*EXTENT[:2], side), np.linspace(*EXTENT[2:], side)
    grid = np.stack(np.meshgrid(across, up), axis=-1).reshape(-1, 2)
    start = time.perf_counter()
    draws = posterior.predictive(jax.random.key(1), {"X": grid}, num_samples=100 if arguments.quick else 1000)["f"]
    draws = np.asarray(draws).reshape(-1, side, side)
    print(f"{len(draws)} functions drawn at {len(grid)} new points in {time.perf_counter() - start:.1f} s")
    save(draw(data, across, up, draws, bounds), arguments.output, "gp_classification")


def draw(data, across, up, draws, bounds):
    probability, deviation = expit(draws).mean(axis=0), draws.std(axis=0)
    surfaces = {
        "probability to be in the banana": (probability, "RdBu", np.linspace(0, 1, 5)),
        "standard deviation of the latent function": (deviation, "viridis", np.arange(np.ceil(deviation.max()) + 1)),
    }
    figure = plt.figure(figsize=(WIDTH, 5.6))
    above, below = figure.subfigures(2, 1, height_ratios=[3.2, 1])
    axes = above.subplots(1, 2, sharey=True)
    for axis, (title, (values, colors, ticks)) in zip(axes, surfaces.items()):
        filled = axis.contourf(across, up, values, np.linspace(0, ticks[-1], 4 * len(ticks) - 3), cmap=colors)
        above.colorbar(filled, ax=axis, ticks=ticks)
        for value, (marker, color) in MARKERS.items():
            chosen = data["X"][data["inside"] == value]
            label = "in the banana" if value else "outside"
            axis.plot(*chosen.T, marker, mfc=color, mec="black", mew=0.5, ms=3.5, ls="", label=label)
        axis.set(title=title, xlim=EXTENT[:2], ylim=EXTENT[2:], xlabel="input 1")
    axes[0].set_ylabel("input 2")
    axes[0].contour(across, up, probability, [0.5], colors="black", linewidths=1.2)
    above.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)

    axis, gaps = below.subplots(), [max(bounds.values()) - bound for bound in bounds.values()]
    axis.barh(list(bounds), gaps, color=RVGA_COLOR, height=0.55)
    for place, gap in enumerate(gaps):
        axis.text(gap, place, f" {gap:.1f}", va="center", fontsize=8)
    axis.set_xlabel("bound on the log evidence: nats below the best kernel's")
    return figure


if __name__ == "__main__":
    main()
