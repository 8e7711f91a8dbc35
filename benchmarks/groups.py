"""Many users of five rows each: groups that stay with their part, over two workers, and new groups in a stream.

OPENBLAS_NUM_THREADS=1 python -m benchmarks groups [--quick] [--users N ...] [--only parts | killed | stream]
python -m benchmarks groups --draw figures/groups.json

Parts are of users at random, and of users with low and with high levels; streams have rows at random, and user by user.
"killed" is the run over two workers of which one is killed in every round, of more than 500 users only where it is
asked for. Up to 500 users are solved for by FixedPointVI too; errors are in its standard deviations. Memory is by how
much the process has grown that has Dask's scheduler, or the stream. Times are of the clock, and of the processor for
streams, with reading, compiling and writing.
"""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import RVGA, FixedPointVI, ParquetRows, clusters, distributed

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
    return {"error_of_means_in_sds": float(of_mean), "relative_error_of_sds": float(of_deviation)}


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


def killed(parts: list[ParquetRows], folder: Path) -> tuple[Any, dict[str, float]]:
    """The same, with a worker that is killed in every round: that of the first part."""
    told, pids = clusters.GroupCluster._messages_of, []

    def kill_and_tell(self, places, step):
        holders = self._client.who_has(self._parts)[self._parts[0].key]
        if holders:
            pids.append(self._client.run(os.getpid, workers=[holders[0]])[holders[0]])
            os.kill(pids[-1], signal.SIGKILL)
        return told(self, places, step)

    clusters.GroupCluster._messages_of = kill_and_tell
    try:
        found, facts = run(parts, folder)
    finally:
        clusters.GroupCluster._messages_of = told
    return found, facts | {"killed": len(set(pids))}


def stream(data: dict[str, np.ndarray], order: str) -> tuple[Any, dict[str, float]]:
    """The posterior of a stream in blocks of 4,096 rows, and what it took."""
    rows = np.random.default_rng(1).permutation(len(data["y"])) if order == "random" else np.arange(len(data["y"]))
    before, started = memory(), time.process_time()
    found = RVGA(model).stream_groups(plate="users", index="user", size="num_users")
    for start in range(0, len(rows), 4096):
        found.update({name: array[rows[start : start + 4096]] for name, array in data.items()})
    posterior = found.posterior()
    seconds, grown = time.process_time() - started, memory() - before
    facts = {"error": posterior.info["error"], "elbo": posterior.info["log_evidence_estimate"]}
    return posterior, {"seconds": seconds, "memory_mib": grown} | facts


def main() -> None:
    options = parser(__doc__, drawn=True)
    options.add_argument("--quick", action="store_true", help="fewer users")
    options.add_argument("--users", nargs="*", type=int, help="how many; default: 500, 2,000 and 200,000")
    options.add_argument("--only", choices=("parts", "killed", "stream"))
    args = options.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return
    numpyro.enable_x64()
    report = Report(args.output / "groups.json")
    for num_users in args.users or ((500, 2_000) if args.quick else (500, 2_000, 200_000)):
        for kind in ("parts", "killed", "stream"):
            is_long = kind == "killed" and num_users > MOST_SOLVED_AT_ONCE
            if args.only == kind or (args.only is None and not is_long):
                for order in ("random", "sorted") if kind != "killed" else ("random",):
                    compare(num_users, kind, order, report)


def compare(num_users: int, kind: str, order: str, report: Report) -> None:
    """With the best Gaussian, if that can be computed."""
    with tempfile.TemporaryDirectory() as folder:
        data = write_parts(Path(folder), num_users, order)
        parts = [ParquetRows(f"{folder}/{number}.parquet", COLUMNS) for number in range(2)]
        if kind == "stream":
            found, facts = stream(data, order)
        else:
            found, facts = (run if kind == "parts" else killed)(parts, Path(folder) / "users")
    compared = {}
    if num_users <= MOST_SOLVED_AT_ONCE:
        best = FixedPointVI(model).run(data, num_users=num_users, progress_bar=False)
        compared = errors(found, best)
        compared["bound_below"] = best.elbo - facts["elbo"]
    report(kind=kind, users=num_users, order=order, **facts, **compared)


def draw(results: dict[str, Any], path: Path) -> None:
    """Memory and seconds by the number of users."""
    import matplotlib.pyplot as plt

    names = {"parts": "two workers", "killed": "two workers, one killed in every round", "stream": "stream"}
    figure, (memories, times) = plt.subplots(1, 2, figsize=(9, 3.4))
    for kind, name in names.items():
        for order, style in (("random", "-"), ("sorted", "--")):
            rows = [row for row in results["cases"] if (row["kind"], row["order"]) == (kind, order)]
            rows = sorted((row for row in rows if row["users"] > MOST_SOLVED_AT_ONCE), key=lambda row: row["users"])
            if not rows:
                continue
            color, users = f"C{list(names).index(kind)}", [row["users"] / 1000 for row in rows]
            label = f"{name}, {order}"
            memories.plot(users, [row["memory_mib"] for row in rows], style, color=color, marker="o", label=label)
            times.plot(users, [row["seconds"] for row in rows], style, color=color, marker="o", label=label)
    memories.set(xlabel="thousand users", ylabel="MiB more in the process", ylim=(0, None))
    times.set(xlabel="thousand users", ylabel="seconds", ylim=(0, None))
    figure.tight_layout()
    options = {"fontsize": 7, "ncols": 3, "handlelength": 4, "loc": "upper center", "bbox_to_anchor": (0.5, 0)}
    figure.legend(*times.get_legend_handles_labels(), **options)
    figure.savefig(path, dpi=150, bbox_inches="tight")


if __name__ == "__main__":
    main()
