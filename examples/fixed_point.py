"""How fast the best Gaussian is found: FixedPointVI's three schedules and NumPyro's SVI, on two models.

A Poisson regression of the visits to a doctor by 20,190 people (the RAND health insurance experiment, which statsmodels
ships), and a Gaussian process that tells two moons apart, written with standard normal latents, which suit SVI best.
``info["bounds"]`` and ``info["seconds"]`` are the curves. SVI's bound is not its own noisy estimate but the bound at
which a fixed point that starts from SVI's Gaussian begins.
"""

from __future__ import annotations

import dataclasses
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal
from plots import COLORS, REFERENCE, WIDTH, parse_arguments, plt, save
from sklearn.datasets import make_moons
from statsmodels.datasets import randhie

from numpyro_rvga import FixedPointVI
from numpyro_rvga.core.gaussians import FullGaussian

SCHEDULES = {
    "incremental": ("fixed point, step by step", COLORS[0]),
    "batch": ("fixed point, one to its end, then the other", COLORS[2]),
    "gradient": ("L-BFGS", COLORS[1]),
}
SVI_STYLE = ("SVI, AutoMultivariateNormal", COLORS[3])
CLOSE = 1e-3  # nats, a dotted line
SMALLEST_GAP = 1e-6


def regression(X, visits=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("people", X.shape[0]):
        numpyro.sample("visits", dist.Poisson(jnp.exp(X @ w)), obs=visits)


def process(root, moon=None):
    """``root``: the rows of a square root of the function values' covariance."""
    z = numpyro.sample("z", dist.Normal(0, 1).expand([root.shape[1]]).to_event(1))
    with numpyro.plate("points", root.shape[0]):
        numpyro.sample("moon", dist.Bernoulli(logits=root @ z), obs=moon)


def covariance_root(points, amplitude=3.0, length=0.4):
    distances = np.sum((points[:, None] - points) ** 2, axis=-1)
    return np.linalg.cholesky(amplitude**2 * np.exp(-0.5 * distances / length**2) + 1e-4 * np.eye(len(points)))


class Curve(NamedTuple):
    label: str
    color: str
    seconds: np.ndarray
    bounds: np.ndarray


def climb(model, data):
    """Curves of the three schedules, run again after compilation; and the fixed point with its posterior."""
    curves = []
    for schedule, (label, color) in SCHEDULES.items():
        method = FixedPointVI(model, schedule=schedule, max_iterations=1000)
        method.run(data, progress_bar=False)
        posterior = method.run(data, progress_bar=False)
        curves.append(Curve(label, color, posterior.info["seconds"], posterior.info["bounds"]))
        if schedule == "incremental":
            fixed_point, best = method, posterior
    return curves, fixed_point, best


def climb_by_svi(model, data, fixed_point, best, num_looks, num_steps, learning_rate=0.01):
    """The curve of SVI, compiled before the clock starts and stopped while its bound is evaluated."""
    svi = SVI(model, AutoMultivariateNormal(model), numpyro.optim.Adam(learning_rate), Trace_ELBO())
    arguments = {name: jnp.asarray(array) for name, array in data.items()}

    @jax.jit
    def advance(state):
        return jax.lax.fori_loop(0, num_steps, lambda _, s: svi.update(s, **arguments)[0], state)

    state = svi.init(jax.random.key(0), **arguments)
    jax.block_until_ready(advance(state))
    seconds, bounds = [], []
    for _ in range(num_looks):
        start = time.perf_counter()
        state = jax.block_until_ready(advance(state))
        seconds.append(time.perf_counter() - start)
        params = svi.get_params(state)
        here = dataclasses.replace(best, gaussian=FullGaussian(params["auto_loc"], params["auto_scale_tril"]))
        bounds.append(fixed_point.run(data, init=here, progress_bar=False).info["bounds"][0])
    return Curve(*SVI_STYLE, np.cumsum(seconds), np.array(bounds))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    numpyro.enable_x64()
    table = randhie.load_pandas().data
    columns = table.drop(columns="mdvis")
    X = np.column_stack([np.ones(len(table)), (columns - columns.mean()) / columns.std()])
    people = {"X": X, "visits": table["mdvis"].to_numpy()}
    points, moon = make_moons(300, noise=0.25, random_state=0)
    problems = {
        f"Poisson regression, {len(X):,} people": (regression, people),
        f"Gaussian process, {len(points)} points": (process, {"root": covariance_root(points), "moon": moon}),
    }
    num_looks, num_steps = 25, 200
    if arguments.quick:
        problems = {"Poisson regression": (regression, {name: array[::100] for name, array in people.items()})}
        num_looks, num_steps = 3, 5

    results = {}
    for title, (model, data) in problems.items():
        curves, fixed_point, best = climb(model, data)
        curves.append(climb_by_svi(model, data, fixed_point, best, num_looks, num_steps))
        results[title] = curves
        optimum = max(curve.bounds.max() for curve in curves)
        print(title)
        for curve in curves:
            gaps = optimum - curve.bounds
            near = np.flatnonzero(gaps < CLOSE)
            when = f"{curve.seconds[near[0]]:.2f} s to {CLOSE} nats" if len(near) else f"{gaps[-1]:.2g} nats left"
            print(f"  {curve.label:44s} {when:>20s}, {curve.seconds[-1]:6.2f} s in all")
    save(draw(results), arguments.output, "fixed_point")


def draw(results):
    figure, axes = plt.subplots(1, len(results), figsize=(WIDTH, 3.6), squeeze=False, sharey=True)
    for axis, (title, curves) in zip(axes[0], results.items()):
        optimum = max(curve.bounds.max() for curve in curves)
        for curve in curves:
            gaps = np.maximum(optimum - curve.bounds, SMALLEST_GAP)
            axis.loglog(curve.seconds, gaps, ".-", color=curve.color, ms=4, lw=1.2, label=curve.label)
        axis.axhline(CLOSE, color=REFERENCE, lw=0.8, ls=":")
        axis.set(title=title, xlabel="seconds, compilation not counted")
    axes[0, 0].set_ylabel("nats below the best bound")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(handles))
    return figure


if __name__ == "__main__":
    main()
