"""How sure is a classifier away from its data? Iso-probabilities of six Gaussians (R-VGA paper, figure 11).

Two well separated classes leave the direction of the boundary and the steepness open. The predictive probability
averages over what is left open, in closed form (equation 62), and is compared with the true posterior's.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import METHODS, WIDTH, parse_arguments, plt, save
from scipy.special import expit, log_expit

from numpyro_rvga import RVGA

PRIOR_SCALE = 10.0
LEVELS = (0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99)
FILLED = np.linspace(0, 1, 21)
MARKERS = {0: ("o", "#7A1020"), 1: ("^", "#08306B")}
REACH = 6.0


def model(X, y=None):
    theta = numpyro.sample("theta", dist.Normal(0, PRIOR_SCALE).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ theta), obs=y)


def two_classes(num_rows: int, separation: float) -> dict[str, np.ndarray]:
    """Two Gaussians whose means are ``separation`` apart, each scaled as in section 6 of the paper."""
    rng = np.random.default_rng(3)
    y = np.arange(num_rows) % 2
    noise = rng.normal(size=(num_rows, 2))
    center = 0.5 * separation * np.array([1.0, 1.0]) / np.sqrt(2)
    return {"X": np.where(y[:, None] == 1, center, -center) + noise / np.linalg.norm(noise.std(0)), "y": y}


def true_probabilities(data, points, size: int) -> np.ndarray:
    """The posterior mean of the probability, by brute force on a polar grid of theta."""
    angle = np.linspace(-np.pi, np.pi, size, endpoint=False)
    length = np.linspace(0, 6 * PRIOR_SCALE, size)[1:]
    theta = (length[:, None, None] * np.stack([np.cos(angle), np.sin(angle)], -1)).reshape(-1, 2)
    sign = 2 * data["y"] - 1
    log_density = np.log(np.linalg.norm(theta, axis=1)) - 0.5 * (theta**2).sum(1) / PRIOR_SCALE**2
    for row in sign[:, None] * data["X"]:
        log_density += log_expit(theta @ row)
    weight = np.exp(log_density - log_density.max())
    kept = weight > 1e-7
    weight, theta = weight[kept] / weight[kept].sum(), theta[kept]
    return np.concatenate([expit(part @ theta.T) @ weight for part in np.array_split(points, 50)])


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    num_rows, resolution = (60, 25) if arguments.quick else (300, 81)
    data = two_classes(num_rows, separation=5.0)
    axis_points = np.linspace(-REACH, REACH, resolution)
    points = np.stack(np.meshgrid(axis_points, axis_points), -1).reshape(-1, 2)

    maps = {"true posterior": true_probabilities(data, points, 100 if arguments.quick else 500)}
    print(f"{'':16s} {'theta':>16s} {'mean error of the probability':>32s}")
    for scheme, (label, _) in METHODS.items():
        options = {} if scheme == "default" else {"scheme": scheme}
        if scheme == "implicit":
            options |= {"first_block": 0, "block_size": 1}  # the paper's recursion, row by row
        posterior = RVGA(model, certify=False, **options).run(data, progress_bar=False)
        answer = posterior.predictive(None, {"X": points}, method="closed_form")
        maps[label] = np.asarray(jnp.ravel(answer["y"]["mean"]))
        error = np.abs(maps[label] - maps["true posterior"]).mean()
        print(f"{label:16s} {np.array2string(np.asarray(posterior.mean), precision=2):>16s} {error:32.3f}")
    save(draw(data, axis_points, maps), arguments.output, "predictive_uncertainty")


def draw(data, axis_points, maps):
    figure, axes = plt.subplots(2, 4, figsize=(WIDTH, 5), sharex=True, sharey=True)
    for axis, (title, probabilities) in zip(axes.ravel(), maps.items()):
        error = np.abs(probabilities - maps["true posterior"]).mean()
        surface = probabilities.reshape(len(axis_points), -1)
        image = axis.contourf(axis_points, axis_points, surface, FILLED, cmap="RdBu", vmin=-0.3, vmax=1.3)
        lines = axis.contour(axis_points, axis_points, surface, LEVELS, colors="black", linewidths=0.7)
        axis.clabel(lines, fmt="%g", fontsize=7)
        for label, (marker, color) in MARKERS.items():
            axis.plot(*data["X"][data["y"] == label].T, marker, color=color, ms=2, label=f"class {label}")
        axis.set_title(title if title == "true posterior" else f"{title}\nmean error {error:.3f}", fontsize=9)
        axis.set(aspect="equal", xlabel="input 1", xticks=(-5, 0, 5), yticks=(-5, 0, 5))
        axis.tick_params(labelbottom=True)
    for axis in axes[:, 0]:
        axis.set_ylabel("input 2")
    spare = axes[-1, -1]
    spare.axis("off")
    scale = figure.colorbar(image, cax=spare.inset_axes([0.05, 0.5, 0.9, 0.08]), orientation="horizontal")
    scale.set_label("probability of class 1")
    scale.set_ticks([0, 0.25, 0.5, 0.75, 1])
    spare.legend(*axes[0, 0].get_legend_handles_labels(), loc="upper center", ncols=2, markerscale=2.5)
    return figure


if __name__ == "__main__":
    main()
