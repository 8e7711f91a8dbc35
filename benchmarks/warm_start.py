"""NUTS warm-started by RVGA against default NUTS: effective draws per second of an ill-conditioned logistic regression.

python benchmarks/warm_start.py

Everything counts: RVGA's own run, the warm-up, and compilation (also given without it).
"""

from __future__ import annotations

import argparse
import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS

from numpyro_rvga import RVGA


def model(X, y=None):
    # In alphabetical order the sites are the other way round.
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    intercept = numpyro.sample("a", dist.Normal(0, 3))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=intercept + X @ w), obs=y)


def make_rows(rows: int, size: int, condition: float) -> dict[str, np.ndarray]:
    """Correlated covariates, the eigenvalues of whose covariance span ``condition``."""
    rng = np.random.default_rng(0)
    turn, _ = np.linalg.qr(rng.normal(size=(size - 1, size - 1)))
    X = (rng.normal(size=(rows, size - 1)) * np.geomspace(1, condition**-0.5, size - 1)) @ turn.T
    logits = X @ rng.normal(size=size - 1)
    return {"X": X, "y": (rng.random(rows) < 1 / (1 + np.exp(-logits))).astype(float)}


def measure(name: str, make_kernel, num_warmup: int, num_samples: int, chains: int, rows: dict) -> float:
    """Smallest effective sample size per second, compilation included. ``make_kernel() -> kernel, initial values``."""
    start = time.perf_counter()
    kernel, values = make_kernel()
    options = {"num_chains": chains, "chain_method": "vectorized", "progress_bar": False}
    mcmc = MCMC(kernel, num_warmup=num_warmup, num_samples=num_samples, **options)
    mcmc.run(jax.random.key(1), **rows, init_params=values)
    draws = jax.device_get(mcmc.get_samples(group_by_chain=True))
    cold = time.perf_counter() - start
    start = time.perf_counter()
    mcmc.run(jax.random.key(2), **rows, init_params=values)
    jax.block_until_ready(mcmc.get_samples())
    again = time.perf_counter() - start
    smallest = min(float(np.min(effective_sample_size(x))) for x in draws.values())
    rhat = max(float(np.max(gelman_rubin(x))) for x in draws.values())
    print(
        f"{name:14s} {cold:7.1f} s cold, {again:6.1f} s compiled (sampling only), smallest effective sample size "
        f"{smallest:6.0f}, R-hat {rhat:.4f}: {smallest / cold:7.1f} per second cold, {smallest / again:7.1f} compiled",
        flush=True,
    )
    return smallest / cold


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=5_000)
    parser.add_argument("--parameters", type=int, default=30)
    parser.add_argument("--conditions", type=float, nargs="+", default=[1e2, 1e3, 1e4])
    parser.add_argument("--chains", type=int, default=4)
    parser.add_argument("--samples", type=int, default=1_000)
    args = parser.parse_args()
    for condition in args.conditions:
        rows = make_rows(args.rows, args.parameters, condition)

        def warm(rows=rows):
            posterior = RVGA(model).run(rows, progress_bar=False)
            return posterior.nuts(), posterior.init_params(jax.random.key(0), args.chains)

        print(f"condition number {condition:.0g}, {args.rows} x {args.parameters}, {args.chains} chains")
        started = measure("warm-started", warm, 200, args.samples, args.chains, rows)
        default = measure("default", lambda: (NUTS(model), None), args.samples, args.samples, args.chains, rows)
        print(f"ratio, cold: {started / default:.1f}", flush=True)


if __name__ == "__main__":
    main()
