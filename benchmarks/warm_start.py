"""NUTS warm-started by RVGA against default NUTS: effective draws per second of an ill-conditioned logistic regression.

python -m benchmarks warm_start [--conditions NUMBER ...] [--rows N] [--parameters P]

Everything counts: RVGA's own run, the warm-up, and compilation (also given without it).
"""

from __future__ import annotations

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser
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


def measure(make_kernel, num_warmup: int, num_samples: int, chains: int, rows: dict) -> dict[str, float]:
    """Seconds, and what they buy. ``make_kernel() -> kernel, initial values``."""
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
    found = {"seconds": cold, "seconds_of_sampling_again": again, "smallest_effective_sample_size": smallest}
    return found | {"rhat": rhat, "effective_draws_a_second": smallest / cold}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=5_000)
    options.add_argument("--parameters", type=int, default=30)
    options.add_argument("--conditions", type=float, nargs="+", default=[1e2, 1e3, 1e4])
    options.add_argument("--chains", type=int, default=4)
    options.add_argument("--samples", type=int, default=1_000)
    args = options.parse_args()
    report = Report(args.output / "warm_start.json")
    for condition in args.conditions:
        rows = make_rows(args.rows, args.parameters, condition)

        def warm(rows=rows):
            posterior = RVGA(model).run(rows, progress_bar=False)
            return posterior.nuts(), posterior.init_params(jax.random.key(0), args.chains)

        started = measure(warm, 200, args.samples, args.chains, rows)
        default = measure(lambda: (NUTS(model), None), args.samples, args.samples, args.chains, rows)
        ratio = started["effective_draws_a_second"] / default["effective_draws_a_second"]
        report(method="warm-started", condition=condition, ratio=ratio, **started)
        report(method="default", condition=condition, ratio=1.0, **default)


if __name__ == "__main__":
    main()
