"""A service on a stream that drifts: it reads a log, updates, answers, is killed at random, and goes on where it was.

The log is a Parquet folder to which new files are added, as a message queue or a collector would. The service is a
process of its own. For each new file it answers with the probabilities of its outcomes before it learns from them, then
writes a checkpoint. The parent process here plays the world: it adds files, kills the service at random moments, starts
it again, and in the end compares its answers with those of a service that was never killed. They are the same.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import numpyro
import numpyro.distributions as dist
import pyarrow as pa
import pyarrow.parquet as pq
from plots import COLORS, REFERENCE, TRUTH, WIDTH, parse_arguments, plt, save
from scipy.special import expit

from numpyro_rvga import RVGA, ParquetRows, RandomWalk

COLUMNS = {"X": ["one", "a", "b"], "y": "y"}
ROWS_PER_FILE = 200


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def method() -> RVGA:
    return RVGA(model, block_size=20, dynamics=RandomWalk(0.05))


# ---------------------------------------------------------------------- the service
def serve(folder: Path, num_files: int) -> None:
    """Answer and learn, file by file. Whatever moment it is killed at, no row is lost, and none is taken in twice."""
    rvga, checkpoint = method(), folder / "checkpoint"
    for number in range(num_files):
        answer = folder / f"answer-{number:04}.json"
        if answer.exists():
            continue  # of before the last kill
        while not (folder / f"log/{number:04}.parquet").exists():
            time.sleep(0.02)
        files = [folder / f"log/{i:04}.parquet" for i in range(number + 1)]
        w, deviation = np.zeros(3), np.full(3, 2.0)
        if number:  # takes in what the checkpoint has not yet: the file before, or less after a kill
            seen = ParquetRows(files[:-1], COLUMNS)
            posterior = rvga.run(seen, checkpoint=checkpoint, every=ROWS_PER_FILE, resume=True, progress_bar=False)
            w, deviation = np.asarray(posterior.mean), np.sqrt(np.diag(posterior.covariance))
        (rows,) = ParquetRows(files[-1:], COLUMNS)
        probability = expit(rows["X"] @ w)
        said = np.where(rows["y"] > 0, probability, 1 - probability)
        report = {"w": w.tolist(), "deviation": deviation.tolist(), "score": float(np.mean(np.log(said)))}
        partial = answer.with_suffix(".partial")
        partial.write_text(json.dumps(report))
        partial.replace(answer)


def start(folder: Path, num_files: int) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, __file__, "serve", str(folder), str(num_files)])


# ---------------------------------------------------------------------- the world
def truth(num_files: int) -> np.ndarray:
    """(files, 3) coefficients that wander, and change at once in the middle."""
    rng = np.random.default_rng(3)
    w = np.array([-0.5, 1.5, -1.0]) + np.cumsum(0.1 * rng.normal(size=(num_files, 3)), axis=0)
    w[num_files // 2 :, 2] += 1.8
    return w


def add_file(folder: Path, number: int, w: np.ndarray) -> None:
    rng = np.random.default_rng(number)
    a, b = rng.normal(size=(2, ROWS_PER_FILE))
    y = (rng.random(ROWS_PER_FILE) < expit(w[0] + w[1] * a + w[2] * b)).astype(np.int8)
    table = pa.table({"one": np.ones(ROWS_PER_FILE), "a": a, "b": b, "y": y})
    partial = folder / f"log/{number:04}.partial"
    pq.write_table(table, partial)
    partial.rename(partial.with_suffix(".parquet"))


def answers(folder: Path, num_files: int) -> list[dict]:
    return [json.loads((folder / f"answer-{n:04}.json").read_text()) for n in range(num_files)]


def run_service(folder: Path, w: np.ndarray, num_kills: int) -> tuple[list[dict], list[int]]:
    """Its answers, and the files at which it was killed."""
    num_files, rng, killed_at = len(w), np.random.default_rng(5), []
    kills = set(rng.choice(np.arange(2, num_files - 1), num_kills, replace=False).tolist())
    process = start(folder, num_files)
    for number in range(num_files):
        add_file(folder, number, w[number])
        if number in kills:
            wait_for(folder / f"answer-{number - 1:04}.json", process)
            time.sleep(rng.uniform(0.0, 0.2))  # somewhere in the next file
            process.send_signal(signal.SIGKILL)
            process.wait()
            killed_at.append(number)
            process = start(folder, num_files)
    if process.wait() != 0:
        raise RuntimeError("the service failed.")
    return answers(folder, num_files), killed_at


def wait_for(path: Path, process: subprocess.Popen) -> None:
    while not path.exists():
        if process.poll() is not None:
            raise RuntimeError("the service failed.")
        time.sleep(0.01)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    num_files, num_kills = (8, 1) if arguments.quick else (60, 8)
    w = truth(num_files)
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        folder, undisturbed = Path(one), Path(other)
        (folder / "log").mkdir()
        found, killed_at = run_service(folder, w, num_kills)
        (undisturbed / "log").symlink_to(folder / "log")
        serve(undisturbed, num_files)
        same = found == answers(undisturbed, num_files)
    print(f"killed at files {killed_at}; the answers are those of a service that was never killed: {same}")
    scores = np.array([answer["score"] for answer in found])
    print(f"log probability of what came next, per row: {scores[1:].mean():.3f} (chance: {np.log(0.5):.3f})")
    save(draw(w, found, killed_at), arguments.output, "stream_service")


def draw(w: np.ndarray, found: list[dict], killed_at: list[int]):
    figure, axis = plt.subplots(figsize=(WIDTH, 3.4))
    files = np.arange(len(w))
    mean, deviation = (np.array([answer[name] for answer in found]) for name in ("w", "deviation"))
    for number in killed_at:
        axis.axvline(number, color=REFERENCE, lw=0.8, label="service killed" if number == killed_at[-1] else None)
    for i, (name, color) in enumerate(zip(("intercept", "slope of a", "slope of b"), COLORS)):
        low, high = mean[:, i] - 2 * deviation[:, i], mean[:, i] + 2 * deviation[:, i]
        axis.fill_between(files, low, high, color=color, alpha=0.2, lw=0)
        axis.plot(files, mean[:, i], color=color, lw=1.6, label=f"{name}, mean and 2 sd")
        axis.plot(files, w[:, i], color=TRUTH, lw=1, ls=":", label="truth" if i == 2 else None)
    axis.set(xlim=(0, len(w) - 1), ylim=(-2.5, 3), ylabel="coefficient, before the file is read")
    axis.set_xlabel(f"file of {ROWS_PER_FILE} rows")
    figure.legend(loc="outside lower center", ncols=5)
    return figure


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        serve(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        main()
