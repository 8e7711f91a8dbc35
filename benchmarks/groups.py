"""Groups that stay with their part: many users of five rows each over two workers, against the best Gaussian of all.

OPENBLAS_NUM_THREADS=1 python -m benchmarks groups [--quick]

Parts are of users at random, and of users with low and with high levels. Up to 500 users are solved for by
FixedPointVI too; errors are in its standard deviations. Memory is that of the process that has Dask's scheduler, and
times are of the clock, with reading, compiling and writing.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import RVGA, FixedPointVI, ParquetRows, distributed

ROWS_OF_EACH = 5
MOST_SOLVED_AT_ONCE = 500
COLUMNS = {"user": "user", "X": ["x0", "x1"], "y": "y"}


def model(user, X, num_users, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("users", num_users):
        level = numpyro.sample("level", dist.Normal(mean, scale))
        trend = numpyro.sample("trend", dist.Normal(0, 0.5))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=level[user] + X @ slopes + trend[user] * X[:, 0]), obs=y)


def write_parts(folder: Path, num_users: int, order: str) -> dict[str, np.ndarray]:
    """Two files, each with the rows of half of the users or so; all rows."""
    import pyarrow as pa
    from pyarrow import parquet

    rng = np.random.default_rng(0)
    user = np.repeat(np.arange(num_users), ROWS_OF_EACH)
    level, trend, x = rng.normal(0.3, 0.7, num_users), 0.5 * rng.normal(size=num_users), rng.normal(size=(2, len(user)))
    logits = level[user] + (0.5 + trend[user]) * x[0]
    data = {"user": user, "x0": x[0], "x1": x[1], "y": (logits > rng.logistic(size=len(user))).astype(int)}
    second = user % 2 == 1 if order == "random" else level[user] > 0.3
    for number, part in enumerate((~second, second)):
        parquet.write_table(pa.table({name: array[part] for name, array in data.items()}), folder / f"{number}.parquet")
    return {"user": user, "X": x.T, "y": data["y"]}


def errors(found: Any, best: Any) -> dict[str, float]:
    places = best.program.layout.indices_of(found.site_names)
    deviation = np.asarray(best.gaussian.deviation())[places]
    of_mean = np.max(np.abs(found.mean - best.mean[places]) / deviation)
    of_deviation = np.max(np.abs(np.sqrt(np.diag(found.covariance)) / deviation - 1))
    below = best.elbo - found.elbo
    return {"error_of_means_in_sds": float(of_mean), "relative_error_of_sds": float(of_deviation), "bound_below": below}


def memory() -> float:
    """Of this process now, in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmRSS")).split()[1]) / 1024


def run(parts: list[ParquetRows], folder: Path) -> tuple[Any, dict[str, float]]:
    """The posterior, and what it took."""
    from distributed import Client, LocalCluster

    where = {"plate": "users", "index": "user", "size": "num_users", "folder": folder}
    with LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster, Client(cluster) as client:
        before, started = memory(), time.perf_counter()
        found = distributed.run_groups(RVGA(model), parts, client=client, progress_bar=False, **where)
        seconds, grown = time.perf_counter() - started, memory() - before
    of_rounds = {"rounds": found.info["rounds"], "error": found.info["error"], "elbo": found.elbo}
    return found, {"seconds": seconds, "memory_mib": grown} | of_rounds


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--quick", action="store_true", help="fewer users")
    args = options.parse_args()
    numpyro.enable_x64()
    report = Report(args.output / "groups.json")
    for num_users in (500, 2_000) if args.quick else (500, 2_000, 200_000):
        for order in ("random", "sorted"):
            with tempfile.TemporaryDirectory() as folder:
                data = write_parts(Path(folder), num_users, order)
                parts = [ParquetRows(f"{folder}/{number}.parquet", COLUMNS) for number in range(2)]
                found, facts = run(parts, Path(folder) / "users")
            compared = {}
            if num_users <= MOST_SOLVED_AT_ONCE:
                compared = errors(found, FixedPointVI(model).run(data, num_users=num_users, progress_bar=False))
            report(users=num_users, order=order, **facts, **compared)


if __name__ == "__main__":
    main()
