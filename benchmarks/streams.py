"""Streams of logistic rows, made on the fly: speed, memory, single precision, and processes that are killed.

OPENBLAS_NUM_THREADS=1 python benchmarks/streams.py rate|memory|precision|kills [--rows N] [--figure FILE]

rate: rows a second from memory, from blocks that are there, and from blocks that are made while the run computes.
memory: this process's resident memory along a stream. precision: float32 against float64. kills: a run that is killed
at random 20 times, and resumed each time, against one that is not.
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import psutil

from numpyro_rvga import RVGA

COLUMNS, BLOCK = 20, 2**16
KILLS = 20
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


def rate(num_rows: int, figure: str | None) -> None:
    blocks = list(Rows(num_rows))
    whole = {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}
    method = RVGA(model)
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
    print(f"making the rows alone: {num_rows / (time.perf_counter() - start):,.0f} rows/s")
    fastest = min(times["one array"])
    for name, found in times.items():
        print(f"{name:24} {num_rows / min(found):>12,.0f} rows/s, {min(found) / fastest:.2f} times the array's time")


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


def memory(num_rows: int, figure: str | None) -> None:
    source = Watched(num_rows)
    took = seconds(RVGA(model).run, source)
    rows, resident = np.array(source.memory).T
    early = resident[rows > num_rows / 10]
    print(f"{num_rows:,} rows in {took:.0f} s, {num_rows / took:,.0f} rows/s with compilation")
    print(f"resident memory after a tenth of them: {early.min():.0f} to {early.max():.0f} MiB")
    if figure is not None:
        import matplotlib.pyplot as plt

        plot, axes = plt.subplots(figsize=(6, 3), layout="constrained")
        axes.plot(rows / 1e6, resident)
        axes.set(xlabel="rows taken in, millions", ylabel="resident memory, MiB", ylim=(0, None))
        axes.set_title(f"A stream of {num_rows:,} rows of {COLUMNS} columns")
        plot.savefig(figure, dpi=110)
        print(f"saved {figure}")


def precision(num_rows: int, figure: str | None) -> None:
    found = {}
    for double in (False, True):
        with jax.enable_x64(double):
            posterior = RVGA(model).run(Rows(num_rows), progress_bar=False)
            found[double] = np.asarray(posterior.mean, np.float64), np.sqrt(np.diag(posterior.covariance))
    (single, single_deviation), (mean, deviation) = found[False], found[True]
    print(f"means differ by at most {np.max(np.abs(single - mean) / deviation):.5f} standard deviations")
    print(f"standard deviations differ by at most {np.max(np.abs(single_deviation / deviation - 1)):.2%}")


def child(num_rows: int, folder: str) -> None:
    """The process that is killed."""
    source = Rows(num_rows, pause=0.5)
    posterior = RVGA(model).run(source, checkpoint=Path(folder) / "run", every=100_000, resume=True, progress_bar=False)
    np.savez(Path(folder) / "result.npz", mean=posterior.mean, root=posterior.gaussian.root)


def kills(num_rows: int, figure: str | None) -> None:
    expected = RVGA(model).run(Rows(num_rows), progress_bar=False)
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
    print(f"killed {killed} times; mean and root are the same to the bit: {same}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=[*SIZES, "child"])
    parser.add_argument("--rows", type=int)
    parser.add_argument("--figure", help="where to save the picture of memory")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part == "child":
        child(arguments.rows, arguments.folder)
    else:
        parts = {"rate": rate, "memory": memory, "precision": precision, "kills": kills}
        parts[arguments.part](arguments.rows or SIZES[arguments.part], arguments.figure)
