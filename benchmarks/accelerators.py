"""The same runs on the processor and on the accelerator: seconds, and how far apart the results are.

    python -m benchmarks accelerators [--platforms cpu cuda] [--cases NAME ...]

Each platform has a process of its own. ``cold`` counts all that a first run does, compilation too; ``warm`` is the best
of three runs after it. ``mean`` and ``log_sd`` are the largest differences from the first platform, over all latents:
of the means in its standard deviations, and of the logarithms of these.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser
from devices import model as logistic
from numpyro.infer import MCMC, NUTS

from numpyro_rvga import BONG, RVGA, FixedPointVI

REPEATS = 3
NUM_GROUPS = 1000
HIDDEN = 1000  # units of the network's layer: a million weights
Run = Callable[[], tuple[Any, Any]]  # -> means and standard deviations of the latents


def negative_binomial(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    size = numpyro.sample("size", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ w), size), obs=y)


def groups(group, x, y=None):
    a = numpyro.sample("a", dist.Normal(0, 1))
    b = numpyro.sample("b", dist.Normal(0, 1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("groups", NUM_GROUPS):
        effect = numpyro.sample("effect", dist.Normal(a, tau))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=effect[group] + b * x), obs=y)


def process(X, y=None):
    squares = ((X[:, None] - X) ** 2).sum(-1)
    kernel = jnp.exp(-0.5 * squares) + 1e-4 * jnp.eye(len(X))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(X)), kernel))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def network(X, y=None):
    """Two layers."""
    inner = numpyro.sample("inner", dist.Normal(0, 0.03).expand([X.shape[1], HIDDEN]).to_event(2))
    outer = numpyro.sample("outer", dist.Normal(0, 0.03).expand([HIDDEN, 10]).to_event(2))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Categorical(logits=jnp.tanh(X @ inner) @ outer), obs=y)


def made(num_rows: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, size)).astype(np.float32)
    w = rng.normal(size=size) / np.sqrt(size)
    return {"X": X, "y": (rng.random(num_rows) < 1 / (1 + np.exp(-X @ w))).astype(np.float32)}


def counts(num_rows: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    X = (0.3 * rng.normal(size=(num_rows, size))).astype(np.float32)
    return {"X": X, "y": rng.poisson(np.exp(X.sum(1)) * rng.gamma(2, 0.5, num_rows))}


def grouped(num_rows: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    group, x = rng.integers(NUM_GROUPS, size=num_rows), rng.normal(size=num_rows).astype(np.float32)
    logits = 0.7 * rng.normal(size=NUM_GROUPS)[group] + 0.5 * x
    return {"group": group, "x": x, "y": (rng.random(num_rows) < 1 / (1 + np.exp(-logits))).astype(int)}


def images(num_rows: int, size: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, size)).astype(np.float32)
    return {"X": X, "y": np.argmax(X[:, :10] + rng.gumbel(size=(num_rows, 10)), axis=1)}


def fitted(method: Any, data: dict[str, np.ndarray]) -> Run:
    def run():
        q = method.run(data, progress_bar=False).gaussian
        return q.mean, q.deviation()

    return run


def chain(model: Callable, data: dict[str, np.ndarray], length: int = 200) -> Run:
    def run():
        mcmc = MCMC(NUTS(model), num_warmup=length, num_samples=length, progress_bar=False)
        mcmc.run(jax.random.key(0), **data)
        w = mcmc.get_samples()["w"]
        return w.mean(0), w.std(0)

    return run


CASES: dict[str, Callable[[], Run]] = {
    "RVGA, 10,000 x 20": lambda: fitted(RVGA(logistic), made(10_000, 20)),
    "RVGA, 1,000,000 x 20": lambda: fitted(RVGA(logistic), made(1_000_000, 20)),
    "RVGA, 200,000 x 400": lambda: fitted(RVGA(logistic), made(200_000, 400)),
    "NUTS, 200 + 200, 1,000,000 x 20": lambda: chain(logistic, made(1_000_000, 20)),
    "FixedPointVI, 1,000,000 x 20": lambda: fitted(FixedPointVI(logistic), made(1_000_000, 20)),
    "FixedPointVI, 200,000 x 400": lambda: fitted(FixedPointVI(logistic), made(200_000, 400)),
    "FixedPointVI, process of 2,000 rows": lambda: fitted(FixedPointVI(process), made(2_000, 2)),
    "RVGA, negative binomial, 50,000 x 10": lambda: fitted(RVGA(negative_binomial), counts(50_000, 10)),
    "RVGA, 20,000 rows of 1,000 groups": lambda: fitted(RVGA(groups), grouped(20_000)),
    "BONG, diagonal, a million weights, 500 rows": lambda: fitted(BONG(network, family="diagonal"), images(500, 990)),
    "BONG, low-rank, a million weights, 500 rows": lambda: fitted(BONG(network, family="low-rank"), images(500, 990)),
}


def measure(name: str) -> dict[str, Any]:
    run, seconds = CASES[name](), []
    for _ in range(1 + REPEATS):
        start = time.perf_counter()
        mean, sd = jax.block_until_ready(run())
        seconds.append(time.perf_counter() - start)
    return {"cold": seconds[0], "warm": min(seconds[1:]), "mean": mean, "sd": sd}


def on_this_platform(names: list[str], folder: Path) -> None:
    """A file of results for each case."""
    for i, name in enumerate(names):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                np.savez(folder / f"{i}.npz", **measure(name))
            except Exception:  # the other cases can still be measured
                traceback.print_exc()
        print(jax.default_backend(), name, *{str(w.message)[:200] for w in caught}, sep="\n    ", flush=True)


def compared(path: Path, reference: Path) -> dict[str, Any]:
    """Of one platform's results: seconds, and the differences from the first platform's, if it has any."""
    if not path.exists():
        return {"failed": True}
    found = np.load(path)
    values = {"cold": float(found["cold"]), "warm": float(found["warm"])}
    if reference.exists():
        first = np.load(reference)
        values["mean"] = float(np.max(np.abs(found["mean"] - first["mean"]) / first["sd"]))
        values["log_sd"] = float(np.max(np.abs(np.log(found["sd"] / first["sd"]))))
    return values


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--platforms", nargs="*", default=["cpu", "cuda"], help="by JAX's names; the first is compared with"
    )
    options.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="default: all")
    options.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.here is not None:
        on_this_platform(args.cases, args.here)
        return
    folders = {platform: args.output / f"accelerators_{platform}" for platform in args.platforms}
    for platform, folder in folders.items():
        shutil.rmtree(folder, ignore_errors=True)  # a case that fails now must not have the results of another run
        folder.mkdir(parents=True)
        command = [sys.executable, __file__, "--here", str(folder), "--cases", *args.cases]
        subprocess.run(command, env=os.environ | {"JAX_PLATFORMS": platform}, check=True)
    report = Report(args.output / "accelerators.json")
    for i, name in enumerate(args.cases):
        reference = folders[args.platforms[0]] / f"{i}.npz"
        for platform, folder in folders.items():
            report(case=name, platform=platform, **compared(folder / f"{i}.npz", reference))


if __name__ == "__main__":
    main()
