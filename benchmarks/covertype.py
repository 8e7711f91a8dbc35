"""Covertype: one pass of RVGA against SVI with AutoMultivariateNormal, both measured against the batch optimum.

OPENBLAS_NUM_THREADS=1 python benchmarks/covertype.py --data FOLDER      FOLDER holds load.py and the covtype file

One thread for OpenBLAS, from which jaxlib has its LAPACK: its threads wait by spinning, on the cores that XLA uses.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _data import load_module
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_rvga import RVGA
from numpyro_rvga.core import closed_forms as cf

PRIOR_SCALE = 3.0


def model(X, y=None, batch=None):
    w = numpyro.sample("w", dist.Normal(0, PRIOR_SCALE).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X), subsample_size=batch) as index:
        x, target = (X, y) if batch is None else (X[index], None if y is None else y[index])
        numpyro.sample("y", dist.Bernoulli(logits=x @ w), obs=target)


def load_rows(folder: str, count: int) -> dict[str, np.ndarray]:
    """An intercept and all 54 columns; the most frequent cover type against the others; rows in random order."""
    design, cover, _ = load_module(folder).design("covtype", drop_first=False)
    order = np.random.default_rng(0).permutation(len(cover))[:count]
    X = np.column_stack([np.ones(count), design[order]]).astype(np.float64)
    return {"X": X, "y": (cover[order] == 1).astype(np.float64)}


def bound(mean, covariance, rows, piece: int = 50_000) -> float:
    """sum E[log lik] - KL(q || prior), with the expectations good to 1e-8."""
    mean, covariance = jnp.asarray(mean), jnp.asarray(covariance)

    @jax.jit
    def part(x, y):
        def one(m, v, target):
            return cf.logistic_mixture(m[None], v[None, None], cf.Logistic(target, 1.0, 0.0, 1.0))[0]

        return jnp.sum(jax.vmap(one)(x @ mean, jnp.sum((x @ covariance) * x, axis=1), y))

    total = sum(
        float(part(rows["X"][i : i + piece], rows["y"][i : i + piece])) for i in range(0, len(rows["y"]), piece)
    )
    size, variance = len(mean), PRIOR_SCALE**2
    divergence = jnp.trace(covariance) / variance + mean @ mean / variance - size
    return total - 0.5 * float(divergence + size * jnp.log(variance) - jnp.linalg.slogdet(covariance)[1])


def run_svi(rows, best: float, max_steps: int, batch: int, learning_rate: float) -> None:
    guide = AutoMultivariateNormal(model)
    svi = SVI(model, guide, numpyro.optim.Adam(learning_rate), Trace_ELBO())
    X, y = jnp.asarray(rows["X"]), jnp.asarray(rows["y"])
    start = time.perf_counter()
    state = svi.init(jax.random.key(0), X, y, batch=batch)
    steps = jax.jit(
        lambda s, count: jax.lax.fori_loop(0, count, lambda _, c: svi.update(c, X, y, batch=batch)[0], s),
        static_argnums=1,
    )
    spent, done = 0.0, 0
    while done < max_steps:
        state = jax.block_until_ready(steps(state, 1000))
        done += 1000
        spent = time.perf_counter() - start
        params = svi.get_params(state)
        tril = params["auto_scale_tril"]
        gap = best - bound(params["auto_loc"], tril @ tril.T, rows)
        start = time.perf_counter() - spent  # evaluating the bound is not SVI's time
        if done % 5000 == 0 or gap < 1:
            print(f"SVI: {done:6d} steps  {spent:8.1f} s  {gap:10.3f} nats below the optimum", flush=True)
        if gap < 1:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", required=True)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--svi-steps", type=int, default=20_000)
    parser.add_argument("--svi-batch", type=int, default=4096)
    parser.add_argument("--svi-learning-rate", type=float, default=0.003)
    args = parser.parse_args()
    numpyro.enable_x64()
    rows = load_rows(args.data, args.rows)
    posteriors = {}
    start = time.perf_counter()
    rvga = RVGA(model)
    posteriors["RVGA, compilation included"] = rvga.run(rows, progress_bar=False)
    jax.block_until_ready(posteriors["RVGA, compilation included"].scale)
    times = {"RVGA, compilation included": time.perf_counter() - start}
    start = time.perf_counter()
    posteriors["RVGA, compiled"] = rvga.run(rows, progress_bar=False)
    times["RVGA, compiled"] = time.perf_counter() - start
    for name, options in {"RVGA, no rows kept": {"memory": 0}, "RVGA, block_size=1": {"block_size": 1}}.items():
        start = time.perf_counter()
        posteriors[name] = RVGA(model, **options).run(rows, progress_bar=False)
        times[name] = time.perf_counter() - start
    start = time.perf_counter()
    joint = RVGA(model, first_block=args.rows).run(rows, progress_bar=False)
    times["all rows in one block"] = time.perf_counter() - start
    best = bound(joint.mean, joint.covariance, rows)
    for name, posterior in (posteriors | {"all rows in one block": joint}).items():
        gap = best - bound(posterior.mean, posterior.covariance, rows)
        print(f"{name:28s} {times[name]:8.2f} s  {gap:10.4f} nats below the optimum", flush=True)
    run_svi(rows, best, args.svi_steps, args.svi_batch, args.svi_learning_rate)


if __name__ == "__main__":
    main()
