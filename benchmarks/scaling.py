"""How time and memory grow: with rows, parameters, predictors of a row, rows of a block, and the rank of a precision.

python -m benchmarks scaling [--parts NAME ...] [--largest P] [--output FOLDER]
python -m benchmarks scaling --draw FOLDER/scaling.json

Seconds are medians of compiled runs, in float32 and float64. An exponent is the slope of log seconds between the last
two sizes. Memory is what the process holds at most during a run, above what it held before and the rows (on Linux).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

import ctypes
import json
import math
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import psutil
from _results import parser, write
from bong import medians, step_of
from kernel import make_data, model

from numpyro_rvga import BONG, RVGA, FixedPointVI

PASS = {"shuffle": False, "certify": False}  # alone
REPEATS = 3
STEPS = 10  # of BONG
OUTPUTS = 10
FAMILIES = [("diagonal", "lin-hess"), ("diagonal", "mc-ef"), ("low-rank", "lin-hess"), ("low-rank", "mc-ef")]
RATE = {"learning_rate": 0.01}  # it changes no time
RULES = {  # BBB with one step is BOG
    "bong": {},
    "bog": {"rule": "bog"} | RATE,
    "blr, 1 step": {"rule": "blr"} | RATE,
    "blr, 10 steps": {"rule": "blr", "num_iters": 10} | RATE,
    "bbb, 10 steps": {"rule": "bbb", "num_iters": 10} | RATE,
}
BOTH = (np.float32, np.float64)


class Measured(NamedTuple):
    """Of one size."""

    seconds: float
    mebibytes: float | None = None


class Part(NamedTuple):
    """A series of sizes.

    :ivar axis: what grows.
    :ivar sizes: its values.
    :ivar measure: of a size and a dtype.
    :ivar dtypes: each has a curve.
    """

    axis: str
    sizes: tuple[int, ...]
    measure: Callable[[int, type], Measured]
    dtypes: tuple[type, ...] = BOTH


# ---------------------------------------------------------------------- what is measured
class Memory:
    """Resident memory at its largest inside the block, in MiB above what there was."""

    def __enter__(self) -> Memory:
        ctypes.CDLL(None).malloc_trim(0)  # what earlier runs freed goes back to the system, to be counted again
        self._process, self._over = psutil.Process(), threading.Event()
        self._before = self._most = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._over.wait(0.002):
            self._most = max(self._most, self._process.memory_info().rss)

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()
        self.mebibytes = (self._most - self._before) / 2**20


def measured(method: Any, rows: dict[str, np.ndarray]) -> Measured:
    """A run's median seconds and its memory, once compiled."""
    method.run(rows, progress_bar=False)
    seconds = []
    for _ in range(REPEATS):
        with Memory() as memory:
            start = time.perf_counter()
            posterior = method.run(rows, progress_bar=False)
            jax.block_until_ready(posterior.gaussian)
            spent = time.perf_counter() - start
        seconds.append(spent)
    return Measured(float(np.median(seconds)), memory.mebibytes)


def categories(num_rows: int, size: int, count: int, dtype: type) -> tuple[Callable, dict[str, np.ndarray]]:
    """Softmax rows of ``size`` parameters in all and ``count`` predictors each."""

    def softmax(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Categorical(logits=X @ w.reshape(-1, count)), obs=y)

    rng = np.random.default_rng(0)
    X = rng.normal(size=(num_rows, size // count))
    logits = X @ rng.normal(size=(size // count, count)) + rng.gumbel(size=(num_rows, count))
    return softmax, {"X": X.astype(dtype), "y": np.argmax(logits, axis=1)}


def predictors(count: int, dtype: type) -> Measured:
    if count == 1:
        return measured(RVGA(model, block_size=128, **PASS), make_data(2_000, 60, dtype))
    softmax, rows = categories(2_000, 60, count, dtype)
    return measured(RVGA(softmax, block_size=128, **PASS), rows)


def bong_step(family: str, hessian: str, size: int, dtype: type, *, rank: int = 10, **options: Any) -> Measured:
    """What BONG or another rule does for a row of a softmax model whose logits are sums of ``size`` weights, squashed.

    Memory is above that of the state.
    """

    def squashed(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            logits = X @ jnp.tanh(w).reshape(-1, OUTPUTS)
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    rng = np.random.default_rng(0)
    rows = {"X": rng.normal(size=(2, size // OUTPUTS)).astype(dtype) / math.sqrt(size), "y": np.array([0, 1])}
    rows["X"] = rows["X"].astype(dtype)
    step = step_of(BONG(squashed, family=family, hessian=hessian, rank=rank, num_samples=10, **options), rows)
    seconds = 1e-3 * medians({0: step}, STEPS)[0]
    with Memory() as memory:
        jax.block_until_ready(step())
    return Measured(seconds, memory.mebibytes)


PARTS = {
    "RVGA, rows": Part("rows (20 parameters)", (10_000, 100_000, 1_000_000), lambda n, d: rvga(n, 20, d)),
    "RVGA, parameters": Part("parameters", (10, 50, 200, 500), lambda p, d: rvga(10_000, p, d, block_size=128)),
    "RVGA, predictors": Part("predictors of a row", (1, 2, 5, 10), predictors),
    "RVGA, block": Part("rows of a block", (1, 16, 128, 1024), lambda b, d: rvga(10_000, 50, d, block_size=b)),
    "FixedPointVI, rows": Part("rows (20 parameters)", (10_000, 100_000, 1_000_000), lambda n, d: iteration(n, 20, d)),
    "FixedPointVI, parameters": Part("parameters", (10, 50, 200, 500), lambda p, d: iteration(10_000, p, d)),
}
PARTS |= {
    f"BONG, {family}, {hessian}": Part(
        "weights", (1_000, 10_000, 100_000, 1_000_000), lambda p, d, f=family, h=hessian: bong_step(f, h, p, d)
    )
    for family, hessian in FAMILIES
}
PARTS |= {
    f"{rule}, {family}": Part(
        "weights",
        (1_000, 10_000, 100_000, 1_000_000) if family == "low-rank" else (100, 300, 1_000, 3_000),
        lambda p, d, f=family, o=options: bong_step(f, "lin-hess", p, d, **o),
        (np.float32,),
    )
    for family in ("low-rank", "full")
    for rule, options in RULES.items()
}
PARTS |= {
    f"bong, full, {hessian}": Part(
        "weights", (100, 300, 1_000), lambda p, d, h=hessian: bong_step("full", h, p, d), (np.float32,)
    )
    for hessian in ("mc-ef", "mc-hess")
}
PARTS["BONG, rank"] = Part(
    "rank (100,000 weights)", (5, 10, 20, 40), lambda r, d: bong_step("low-rank", "lin-hess", 100_000, d, rank=r)
)


def rvga(num_rows: int, size: int, dtype: type, **options: Any) -> Measured:
    return measured(RVGA(model, **PASS | options), make_data(num_rows, size, dtype))


def iteration(num_rows: int, size: int, dtype: type) -> Measured:
    """Of FixedPointVI: a run of five, which do not converge, by five."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = measured(FixedPointVI(model, max_iterations=5), make_data(num_rows, size, dtype))
    return found._replace(seconds=found.seconds / 5)


# ---------------------------------------------------------------------- runs
def run(name: str, part: Part) -> Iterator[dict[str, Any]]:
    """A curve for each dtype."""
    for dtype in part.dtypes:
        with jax.enable_x64(dtype is np.float64):
            found = [part.measure(size, dtype) for size in part.sizes]
        seconds, mebibytes = zip(*found)
        exponent = float(np.diff(np.log(seconds[-2:]))[0] / np.diff(np.log(part.sizes[-2:]))[0])
        cells = "  ".join(f"{size:,}: {1e3 * spent:.4g} ms" for size, spent in zip(part.sizes, seconds))
        print(f"{name:26s} {np.dtype(dtype).name}  exponent {exponent:5.2f}   {cells}", flush=True)
        if mebibytes[0] is not None:
            print(f"{'':26s} MiB: " + "  ".join(f"{m:.0f}" for m in mebibytes), flush=True)
        curve = {"sizes": part.sizes, "seconds": seconds, "mebibytes": mebibytes, "exponent": exponent}
        yield {"name": name, "axis": part.axis, "dtype": np.dtype(dtype).name} | curve


PANELS = {
    "RVGA against rows, and FixedPointVI's iteration": ("RVGA, rows", "FixedPointVI, rows"),
    "against parameters (10,000 rows)": ("RVGA, parameters", "FixedPointVI, parameters"),
    "RVGA against predictors, and rows of a block": ("RVGA, predictors", "RVGA, block"),
    "a step of BONG against weights": tuple(f"BONG, {family}, {hessian}" for family, hessian in FAMILIES),
    "a row by rule against weights (low rank of ten)": tuple(f"{rule}, low-rank" for rule in RULES),
    "a row by rule against weights (full)": tuple(f"{rule}, full" for rule in RULES),
}
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")


def draw(results: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(4 * len(PANELS), 3.4), layout="constrained")
    for axis, (title, names) in zip(axes, PANELS.items()):
        for case in results["cases"]:
            if case["name"] not in names:
                continue
            single = case["dtype"] == "float32"
            label = f"{case['name']}: exponent {case['exponent']:.2f}" if single else None
            style = {"color": COLORS[names.index(case["name"])], "ls": "-" if single else ":", "marker": "."}
            axis.loglog(case["sizes"], case["seconds"], label=label, **style)
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.lines:
            axis.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel("seconds (lines: float32, dots: float64)", fontsize=9)
    figure.savefig(path, dpi=110)
    print(f"saved {path}")


def main() -> None:
    options = parser(__doc__, drawn=True)
    options.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS))
    options.add_argument("--largest", type=int, help="leave out larger sizes but the first two, to see that it runs")
    args = options.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return
    found = []
    for name in args.parts:
        part = PARTS[name]
        sizes = part.sizes[:2] + tuple(size for size in part.sizes[2:] if args.largest is None or size <= args.largest)
        for curve in run(name, part._replace(sizes=sizes)):
            found.append(curve)
            results = write(found, args.output / "scaling.json")
    draw(results, args.output / "scaling.png")


if __name__ == "__main__":
    main()
