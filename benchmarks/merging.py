"""Merging: posteriors of parts of the data, merged, against a single pass and the best Gaussian.

OPENBLAS_NUM_THREADS=1 python -m benchmarks merging [--quick]

Errors are in standard deviations of the best Gaussian (FixedPointVI's): the largest error of a mean, and the largest
relative error of a standard deviation.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import RVGA, FixedPointVI, Posterior

COUNTS = (2, 4, 8, 16, 32, 64)


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def counts(X, g, y=None):
    spread = numpyro.sample("spread", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", 20):
        a = numpyro.sample("a", dist.Normal(0, spread))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w + a[g])), obs=y)


def cases(num_rows: int):
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(num_rows, 10)), rng.normal(size=10)
    yield "linear-Gaussian", linear, {"X": X, "y": X @ w + rng.normal(size=num_rows)}
    yield "logistic", logistic, {"X": X, "y": (rng.random(num_rows) < 1 / (1 + np.exp(-X @ w))).astype(float)}
    g, a = rng.integers(0, 20, num_rows), rng.normal(size=20)
    y = rng.poisson(np.exp(X[:, :3] @ w[:3] / 3 + a[g])).astype(float)
    yield "Poisson, 20 groups", counts, {"X": X[:, :3], "g": g, "y": y}


def errors(posterior: Posterior, best: Posterior) -> dict[str, float]:
    deviation = np.sqrt(np.diag(best.covariance))
    of_mean = np.max(np.abs(posterior.mean - best.mean) / deviation)
    of_deviation = np.max(np.abs(np.sqrt(np.diag(posterior.covariance)) / deviation - 1))
    return {"error_of_means_in_sds": float(of_mean), "relative_error_of_sds": float(of_deviation)}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="fewer rows")
    args = options.parse_args()
    numpyro.enable_x64()
    num_rows, report = 6_400 if args.quick else 128_000, Report(args.output / "merging.json")
    for name, model, data in cases(num_rows):
        best = FixedPointVI(model).run(data, progress_bar=False)
        method = RVGA(model)
        for count in (1, *COUNTS):
            pieces = np.array_split(np.arange(num_rows), count)
            parts = [method.run({n: x[i] for n, x in data.items()}, progress_bar=False) for i in pieces]
            merged = parts[0] if count == 1 else Posterior.merge(parts)
            report(model=name, parts=count, **errors(merged, best))


if __name__ == "__main__":
    main()
