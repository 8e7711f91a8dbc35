"""A sparse Gaussian process of a Poisson rate: 3,000 counts, 30 inducing points, the kernel learned on the bound.

Given the function at the inducing points, that at each row is Normal with a known standard deviation. Such a latent
inside the row plate is integrated out, so the posterior is of the inducing values alone, whatever the number of rows.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.linalg import solve_triangular
from plots import COLORS, REFERENCE, RVGA_COLOR, TRUTH, WIDTH, parse_arguments, plt, save

from numpyro_rvga import FixedPointVI

JITTER = 1e-5
GAP = (5.5, 6.7)  # without data
SPAN = (0.0, 10.0)


def model(x, count=None, inducing=None):
    length = numpyro.param("length", 1.0, constraint=dist.constraints.positive)
    amplitude = numpyro.param("amplitude", 1.0, constraint=dist.constraints.positive)
    level = numpyro.param("level", 0.0)

    def kernel(a, b):
        return amplitude**2 * jnp.exp(-0.5 * ((a[:, None] - b) / length) ** 2)

    lower = jnp.linalg.cholesky(kernel(inducing, inducing) + JITTER * jnp.eye(len(inducing)))
    u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(len(inducing)), scale_tril=lower))
    half = solve_triangular(lower, kernel(inducing, x), lower=True)
    mean = level + half.T @ solve_triangular(lower, u, lower=True)
    spread = jnp.sqrt(jnp.maximum(amplitude**2 - jnp.sum(half**2, axis=0), JITTER))
    with numpyro.plate("rows", len(x)):
        f = numpyro.sample("f", dist.Normal(mean, spread))
        numpyro.sample("count", dist.Poisson(jnp.exp(f)), obs=count)


def true_rate(x: np.ndarray) -> np.ndarray:
    return np.exp(1.2 + 0.9 * np.sin(1.7 * x) + 0.5 * np.cos(4.1 * x) + 0.1 * x)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    numpyro.enable_x64()
    num_rows, num_inducing = (100, 6) if arguments.quick else (3000, 30)
    rng = np.random.default_rng(0)
    x = rng.uniform(*SPAN, 2 * num_rows)
    x = np.sort(x[(x < GAP[0]) | (x > GAP[1])][:num_rows])
    data = {"x": x, "count": rng.poisson(true_rate(x))}
    inducing = np.linspace(SPAN[0], SPAN[1] + 1, num_inducing)
    start = time.perf_counter()
    posterior = FixedPointVI(model).run(data, inducing=inducing, progress_bar=False)
    seconds = time.perf_counter() - start
    learned = ", ".join(f"{name} {float(value):.2f}" for name, value in posterior.params.items())
    print(f"bound {posterior.elbo:.2f}, {seconds:.1f} s with compilation, {learned}")

    grid = np.linspace(SPAN[0], SPAN[1] + 1, 40 if arguments.quick else 300)
    draws = posterior.predictive(jax.random.key(1), {"x": grid}, num_samples=200 if arguments.quick else 4000)
    rate = np.quantile(np.exp(draws["f"]), [0.05, 0.5, 0.95], axis=0)
    counts = np.quantile(draws["count"], [0.05, 0.95], axis=0)
    at_rows = posterior.predictive(jax.random.key(2), {"x": x}, num_samples=1000)["count"]
    low, high = np.quantile(at_rows, [0.05, 0.95], axis=0)
    inside = np.mean((low <= data["count"]) & (data["count"] <= high))
    print(f"{100 * inside:.1f}% of the counts lie within their 90% bands")
    covered = np.mean((rate[0] <= true_rate(grid)) & (true_rate(grid) <= rate[2]))
    print(f"the true rate lies within its 90% band on {100 * covered:.1f}% of the line")
    save(draw(data, inducing, grid, rate, counts), arguments.output, "sparse_gp_counts")


def draw(data, inducing, grid, rate, counts):
    figure, axis = plt.subplots(figsize=(WIDTH, 3.6))
    axis.plot(data["x"], data["count"], ".", color=REFERENCE, ms=3, alpha=0.4, mew=0, label="counts")
    axis.fill_between(grid, *counts, color=RVGA_COLOR, alpha=0.15, lw=0, label="90% of new counts")
    axis.fill_between(grid, rate[0], rate[2], color=RVGA_COLOR, alpha=0.45, lw=0, label="90% of the rate")
    axis.plot(grid, rate[1], color=RVGA_COLOR, lw=1.4, label="rate, median")
    axis.plot(grid, true_rate(grid), "--", color=TRUTH, lw=1, label="true rate")
    style = {"color": COLORS[4], "ms": 9, "mew": 1.5, "clip_on": False}
    axis.plot(inducing, np.zeros(len(inducing)), "|", label="inducing points", **style)
    axis.set(xlim=(SPAN[0], SPAN[1] + 1), ylim=(0, 1.2 * np.quantile(data["count"], 0.999)), xlabel="x", ylabel="count")
    figure.legend(loc="outside lower center", ncols=6, columnspacing=1.5)
    return figure


if __name__ == "__main__":
    main()
