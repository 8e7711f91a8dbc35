"""Streams of logistic rows, made on the fly: speed, memory, single precision, and processes that are killed.

OPENBLAS_NUM_THREADS=1 python -m benchmarks streams rate|memory|precision|kills [--rows N] [--output FOLDER]
python -m benchmarks streams memory --draw FOLDER/streams_memory.json

rate: rows a second from memory, from blocks that are there, and from blocks that are made while the run computes.
memory: this process's resident memory along a stream. precision: float32 against float64. kills: a run that is killed
at random 20 times, and resumed each time, against one that is not.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import psutil
from _results import Report, parser, write

from numpyro_rvga import RVGA

COLUMNS, BLOCK = 20, 2**16
KILLS = 20
PASS = {"shuffle": False, "certify": False}  # alone: blocks are made once
SIZES = {"rate": 4_000_000, "memory": 100_000_000, "precision": 10_000_000, "kills": 4_000_000}


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


class Rows:
    """Blocks of rows, each made anew from its number: a source that can be read from any block on."""

    def __init__(self, num_rows: int, pause: float = 0.0):
        self.num_rows, self._pause = num_rows, pause
        self._w = np.random.default_rng(0).normal(size=COLUMNS).astype(np.float32) / 2

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return self.from_row(0)

    def from_row(self, row: int) -> Iterator[dict[str, np.ndarray]]:
        for start in range(row - row % BLOCK, self.num_rows, BLOCK):
            time.sleep(self._pause)
            rng = np.random.default_rng(start)
            X = rng.standard_normal((min(BLOCK, self.num_rows - start), COLUMNS), np.float32)
            y = (rng.random(len(X), np.float32) < 1 / (1 + np.exp(-(X @ self._w)))).astype(np.float32)
            skipped = max(row - start, 0)
            yield {"X": X[skipped:], "y": y[skipped:]}


def seconds(run, *arguments) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*arguments, progress_bar=False).gaussian.root)
    return time.perf_counter() - start


def rate(num_rows: int, output: Path) -> None:
    blocks = list(Rows(num_rows))
    whole = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    method = RVGA(model, **PASS)
    sources = {"one array": whole, "blocks": blocks, "blocks made on the fly": Rows(num_rows)}
    times = {name: [] for name in sources}
    for turn in range(4):
        for name, source in sources.items():
            took = seconds(method.run, source)
            if turn:  # the first compiles
                times[name].append(took)
    start = time.perf_counter()
    for _ in Rows(num_rows):
        pass
    report = Report(output / "streams_rate.json")
    report(source="making the rows alone", rows_a_second=num_rows / (time.perf_counter() - start))
    for name, found in times.items():
        ratio = min(found) / min(times["one array"])
        report(source=name, rows_a_second=num_rows / min(found), time_to_that_of_one_array=ratio)


class Watched(Rows):
    """Notes the resident memory, in MiB, at every block."""

    def __init__(self, num_rows: int):
        super().__init__(num_rows)
        self.memory: list[tuple[int, float]] = []

    def from_row(self, row: int) -> Iterator[dict[str, np.ndarray]]:
        process, done = psutil.Process(), row
        for block in super().from_row(row):
            self.memory.append((done, process.memory_info().rss / 2**20))
            done += len(block["y"])
            yield block


def memory(num_rows: int, output: Path) -> None:
    source = Watched(num_rows)
    took = seconds(RVGA(model, **PASS).run, source)
    early = [resident for rows, resident in source.memory if rows > num_rows / 10]
    print(f"{num_rows:,} rows in {took:.0f} s, {num_rows / took:,.0f} rows/s with compilation")
    print(f"resident memory after a tenth of them: {min(early):.0f} to {max(early):.0f} MiB")
    found = {"rows": num_rows, "seconds": took, "memory": source.memory}
    draw(write([found], output / "streams_memory.json"), output / "streams_memory.png")


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib.pyplot as plt

    found = results["cases"][0]
    rows, resident = np.array(found["memory"]).T
    plot, axes = plt.subplots(figsize=(6, 3), layout="constrained")
    axes.plot(rows / 1e6, resident)
    axes.set(xlabel="rows taken in, millions", ylabel="resident memory, MiB", ylim=(0, None))
    axes.set_title(f"A stream of {found['rows']:,} rows of {COLUMNS} columns")
    plot.savefig(path, dpi=110)
    print(f"saved {path}")


def precision(num_rows: int, output: Path) -> None:
    found = {}
    for double in (False, True):
        with jax.enable_x64(double):
            posterior = RVGA(model, **PASS).run(Rows(num_rows), progress_bar=False)
            found[double] = np.asarray(posterior.mean, np.float64), np.sqrt(np.diag(posterior.covariance))
    (single, single_deviation), (mean, deviation) = found[False], found[True]
    means = float(np.max(np.abs(single - mean) / deviation))
    deviations = float(np.max(np.abs(single_deviation / deviation - 1)))
    report = Report(output / "streams_precision.json")
    report(rows=num_rows, error_of_means_in_sds=means, relative_error_of_sds=deviations)


def child(num_rows: int, folder: str) -> None:
    """The process that is killed."""
    source = Rows(num_rows, pause=0.5)
    method = RVGA(model, **PASS)
    posterior = method.run(source, checkpoint=Path(folder) / "run", every=100_000, resume=True, progress_bar=False)
    np.savez(Path(folder) / "result.npz", mean=posterior.mean, root=posterior.gaussian.root)


def kills(num_rows: int, output: Path) -> None:
    expected = RVGA(model, **PASS).run(Rows(num_rows), progress_bar=False)
    rng, killed = np.random.default_rng(1), 0
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.npz"
        while not result.exists():
            process = subprocess.Popen([sys.executable, __file__, "child", "--rows", str(num_rows), "--folder", folder])
            if killed == KILLS:
                process.wait()
                continue
            try:
                process.wait(timeout=rng.uniform(2.0, 7.0))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.wait()
                killed += 1
        with np.load(result) as found:
            same = [np.array_equal(found["mean"], expected.mean), np.array_equal(found["root"], expected.gaussian.root)]
    Report(output / "streams_kills.json")(rows=num_rows, kills=killed, mean_and_root_same_to_the_bit=all(same))


def main() -> None:
    options = parser(__doc__, drawn=True)
    options.add_argument("part", choices=[*SIZES, "child"])
    options.add_argument("--rows", type=int)
    options.add_argument("--folder", help=argparse.SUPPRESS)
    args = options.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
    elif args.part == "child":
        child(args.rows, args.folder)
    else:
        parts = {"rate": rate, "memory": memory, "precision": precision, "kills": kills}
        parts[args.part](args.rows or SIZES[args.part], args.output)


if __name__ == "__main__":
    main()
