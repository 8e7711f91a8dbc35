"""Attacks on streams, checkpoints, files and clusters, before a release: what went wrong is counted, and nothing may.

OPENBLAS_NUM_THREADS=1 python -m benchmarks attack [kills flips disk workers] [--minutes M]

kills: runs over arrays, a generator and Parquet are killed with -9 at random moments and resumed until they end; the
result must be the uninterrupted one to the bit. flips: checkpoints and stored posteriors with a flipped bit, or cut
short, must be refused or be read as they were written. disk: no room for a checkpoint; the error must be the system's,
and the checkpoint before must serve. workers: of a Dask cluster, killed while they compute; every row must count once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import RVGA, ParquetRows, Posterior, distributed, files

NUM_ROWS, BLOCK, EVERY = 40_000, 500, 2_000
SOURCES = ("arrays", "generator", "parquet")
COLUMNS = {"X": ["a", "b", "c"], "y": "y"}


def model(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def rows() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(NUM_ROWS, 3))
    return {"X": X, "y": (rng.random(NUM_ROWS) < 1 / (1 + np.exp(-X @ [1.0, -1.0, 0.5]))).astype(np.int32)}


def blocks(data: dict[str, np.ndarray], size: int = BLOCK) -> Iterator[dict[str, np.ndarray]]:
    for start in range(0, NUM_ROWS, size):
        yield {name: array[start : start + size] for name, array in data.items()}


def source(kind: str, folder: Path) -> Any:
    data = rows()
    if kind == "arrays":
        return data
    if kind == "generator":
        return blocks(data)
    import pyarrow
    import pyarrow.parquet

    path = folder / "rows.parquet"
    if not path.exists():
        table = pyarrow.table(dict(zip("abc", data["X"].T)) | {"y": data["y"]})
        pyarrow.parquet.write_table(table, folder / "part", row_group_size=3000)
        (folder / "part").rename(path)
    return ParquetRows(path, COLUMNS)


def run(kind: str, folder: Path, **options: Any) -> Posterior:
    method = RVGA(model, first_block=2_000, memory=500)
    return method.run(source(kind, folder), progress_bar=False, **options)


def child(kind: str, folder: Path) -> None:
    """What is killed."""
    posterior = run(kind, folder, checkpoint=folder / "run", every=EVERY, resume=True)
    np.savez(folder / "result.tmp.npz", mean=posterior.mean, root=posterior.gaussian.root)
    (folder / "result.tmp.npz").rename(folder / "result.npz")


def kills(until: float, rng: np.random.Generator) -> Counter:
    """Sources by turns, each killed three to eight times."""
    count: Counter = Counter()
    expected: dict[str, Posterior] = {}
    while time.monotonic() < until or not count["runs"]:
        kind = SOURCES[count["runs"] % len(SOURCES)]
        with tempfile.TemporaryDirectory() as name:
            folder, left = Path(name), int(rng.integers(3, 9))
            if kind not in expected:
                expected[kind] = run(kind, folder)
            while not (folder / "result.npz").exists():
                command = [sys.executable, __file__, "--child", kind, "--folder", name]
                process = subprocess.Popen(command)
                try:
                    process.wait(timeout=rng.uniform(1.0, 10.0) if left else None)
                except subprocess.TimeoutExpired:
                    process.send_signal(signal.SIGKILL)
                    process.wait()
                    left, count["kills"] = left - 1, count["kills"] + 1
                else:
                    if process.returncode:
                        count["wrong: a run that does not go on"] += 1
                        break
            else:
                with np.load(folder / "result.npz") as found:
                    same = np.array_equal(found["mean"], expected[kind].mean)
                    same = same and np.array_equal(found["root"], expected[kind].gaussian.root)
                count["wrong: another posterior"] += not same
                leftovers = set(os.listdir(folder)) - {"run", "run.previous", "result.npz", "rows.parquet"}
                count["wrong: files left behind"] += len(leftovers)
        count["runs"] += 1
    return count


def flips(until: float, rng: np.random.Generator) -> Counter:
    count: Counter = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        posterior = run("arrays", folder, checkpoint=folder / "run")
        posterior.save(folder / "posterior")
        while time.monotonic() < until or count["files"] < 200:
            kind, path = ("checkpoint", folder / "run") if count["files"] % 2 else ("posterior", folder / "posterior")
            intact, (metadata, arrays) = path.read_bytes(), files.read(path, kind)
            damaged = bytearray(intact)
            if rng.random() < 0.15:
                damaged = damaged[: int(rng.integers(len(damaged)))]
            else:
                damaged[int(rng.integers(len(damaged)))] ^= 1 << int(rng.integers(8))
            (folder / "damaged").write_bytes(bytes(damaged))
            try:
                found = files.read(folder / "damaged", kind)
            except ValueError:
                count["refused"] += 1
            except Exception as error:
                count[f"wrong: {type(error).__name__}"] += 1
            else:
                same = found[0] == metadata and all(np.array_equal(found[1][n], arrays[n]) for n in arrays)
                count["read as written" if same else "wrong: read as another"] += 1
            count["files"] += 1
    return count


def disk(until: float, rng: np.random.Generator) -> Counter:
    count: Counter = Counter()
    savez = np.savez
    while time.monotonic() < until or not count["runs"]:
        with tempfile.TemporaryDirectory() as name:
            folder, room = Path(name), int(rng.integers(1, 12))
            expected, written = run("generator", folder), Counter()

            def write(file: Any, room: int = room, written: Counter = written, **arrays: Any) -> None:
                written["files"] += 1
                if written["files"] > room:
                    file.write(b"a part of it")
                    raise OSError(28, "No space left on device")
                savez(file, **arrays)

            np.savez = write
            try:
                run("generator", folder, checkpoint=folder / "run", every=EVERY)
                count["wrong: no error"] += 1
            except OSError:
                count["errors of the system"] += 1
            finally:
                np.savez = savez
            again = run("generator", folder, checkpoint=folder / "run", every=EVERY, resume=True)
            count["wrong: another posterior"] += not np.array_equal(again.mean, expected.mean)
            count["wrong: files left behind"] += len(set(os.listdir(folder)) - {"run", "run.previous"})
        count["runs"] += 1
    return count


def workers(until: float, rng: np.random.Generator) -> Counter:
    from distributed import Client, LocalCluster

    count: Counter = Counter()
    with tempfile.TemporaryDirectory() as name:
        parts = source("parquet", Path(name)).split(6)
        method = RVGA(model)
        expected = Posterior.merge([method.run(part, progress_bar=False) for part in parts])
        while time.monotonic() < until or not count["runs"]:
            with (
                LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
                Client(cluster) as client,
            ):
                pids = list(client.run(os.getpid).values())

                def kill(pids: list[int] = pids) -> None:
                    time.sleep(rng.uniform(0.5, 8.0))
                    os.kill(int(rng.choice(pids)), signal.SIGKILL)

                thread = threading.Thread(target=kill, daemon=True)
                thread.start()
                found = distributed.run(method, parts, client=client)
                thread.join()
            count["kills"] += 1
            count["wrong: rows"] += found.num_rows != NUM_ROWS
            count["wrong: another posterior"] += not np.allclose(found.mean, expected.mean, rtol=1e-6)
            count["runs"] += 1
    return count


ATTACKS: dict[str, Callable[[float, np.random.Generator], Counter]] = {
    "kills": kills,
    "flips": flips,
    "disk": disk,
    "workers": workers,
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("attacks", nargs="*", metavar="attack", help=f"any of {', '.join(ATTACKS)}; default: all")
    options.add_argument("--minutes", type=float, default=60.0, help="for all together")
    options.add_argument("--seed", type=int, default=0, help="of the moments and the places")
    for name in ("--child", "--folder"):
        options.add_argument(name, help="for the processes that are killed")
    args = options.parse_args()
    if args.child:
        return child(args.child, Path(args.folder))
    unknown = sorted(set(args.attacks) - set(ATTACKS))
    if unknown:
        options.error(f"there is no attack {unknown[0]!r}: choose from {', '.join(ATTACKS)}")
    chosen, report = args.attacks or list(ATTACKS), Report(args.output / "attack.json")
    wrong = 0
    for name in chosen:
        until = time.monotonic() + 60 * args.minutes / len(chosen)
        count = ATTACKS[name](until, np.random.default_rng(args.seed))
        report(attack=name, **{what: number for what, number in count.items() if number})
        wrong += sum(number for what, number in count.items() if what.startswith("wrong"))
    sys.exit(f"{wrong} things went wrong" if wrong else 0)


if __name__ == "__main__":
    main()
