"""Rows shared out among devices: rows a second against the number of devices, P and the block size.

OPENBLAS_NUM_THREADS=1 python -m benchmarks devices [--rows N]

Where there is one device only, more are forced out of the host's cores: figures for what they are worth. Each number of
devices has a process of its own. The ceilings are those of this machine, measured here: products of large matrices, and
sums over large arrays.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import RVGA, FixedPointVI

COUNTS = (1, 2, 4, 8)
SIZES = (20, 100, 400)
BLOCKS = (1024, 4096, 16384)


def seconds(function, *arguments, **keywords) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*arguments, **keywords))
    return time.perf_counter() - start


def best_of(method, data: dict, repeats: int = 3) -> float:
    run = lambda: method.run(data, progress_bar=False).gaussian.root  # noqa: E731
    return min(seconds(run) for _ in range(repeats))


def ceilings() -> dict[str, Any]:
    a, long = jnp.ones((2048, 2048)), jnp.ones(2**27)
    product, total = jax.jit(lambda x: x @ x), jax.jit(lambda x: x.sum())
    of_product, of_total = (min(seconds(f, x) for _ in range(4)) for f, x in ((product, a), (total, long)))
    return {"devices": 1, "gigaflops": 2 * 2048**3 / of_product / 1e9, "gigabytes_a_second": 4 * 2**27 / of_total / 1e9}


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def measure(count: int, num_rows: int) -> Iterator[dict[str, Any]]:
    """Lines of the report, in millions of rows a second; ``batch`` counts each pass of FixedPointVI."""
    if count == 1:
        yield ceilings()
    mesh = None if count == 1 else jax.make_mesh((count,), ("rows",))
    for size in SIZES:
        rng, n = np.random.default_rng(0), num_rows * SIZES[0] // size
        X = rng.standard_normal((n, size), np.float32)
        data = {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-X[:, 0]))).astype(np.float32)}
        batch = FixedPointVI(model, mesh=mesh)
        passes = batch.run(data, progress_bar=False).info["iterations"]
        found = {"batch": passes * n / best_of(batch, data) / 1e6}
        for block in BLOCKS:
            method = RVGA(model, block_size=block, certify=False, mesh=mesh)
            method.run(data, progress_bar=False)
            found[f"blocks_of_{block}"] = n / best_of(method, data) / 1e6
        yield {"devices": count, "parameters": size, "rows": n} | found


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=1_000_000, help="at P = 20; fewer at larger P")
    options.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.devices is not None:
        for line in measure(args.devices, args.rows):
            print(json.dumps(line), flush=True)
        return
    lines = []
    for devices in COUNTS:
        flags = os.environ.get("XLA_FLAGS", "") + f" --xla_force_host_platform_device_count={devices}"
        command = [sys.executable, __file__, "--devices", str(devices), "--rows", str(args.rows)]
        done = subprocess.run(command, env=os.environ | {"XLA_FLAGS": flags}, stdout=subprocess.PIPE, check=True)
        lines += map(json.loads, done.stdout.splitlines())
    report = Report(args.output / "devices.json")  # only now, since it takes hold of the devices
    for line in lines:
        report(**line)


if __name__ == "__main__":
    main()
