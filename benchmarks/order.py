"""Whether the order of the rows matters: RVGA on the same rows in several orders, from memory, files and streams.

OPENBLAS_NUM_THREADS=1 python -m benchmarks order [--data FOLDER] [--cases NAME ...] [--rows N] [--output FOLDER]

Rows of five likelihoods are made. With ``--data`` (a folder with load.py and the data files) those of Covertype, an
electricity market, insurance claims and hourly bike rentals are added. The orders: random, the file's own, sorted by
outcome, and sorted by a column. The sources: arrays, Parquet files, and blocks that can be read once.

A row of the table holds the seconds of a warm run, and their ratio to those of the pass alone in the order given, in
turns with it; the Kullback-Leibler divergence from FixedPointVI's Gaussian; the bound less FixedPointVI's; the looks at
all rows; and whether a warning was given. The command fails where rows that can be read again end further than 0.01
nats from the best Gaussian, or others do so without a warning.
"""

from __future__ import annotations

import sys
import tempfile
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
import pyarrow as pa
import pyarrow.parquet as pq
from _data import load_module
from _results import Report, parser

from numpyro_rvga import RVGA, FixedPointVI, ParquetRows, Posterior

jax.config.update("jax_enable_x64", True)

Rows = dict[str, np.ndarray]
SHAPE, TRIALS = 1.5, 5
BLOCK = 8192
GROUP = 20_000  # rows of a row group
TURNS = 3
CLOSE = 0.01  # nats


class Case(NamedTuple):
    name: str
    model: Callable
    rows: Rows


# ---------------------------------------------------------------------- models
def regression(distribution: Callable, scale: float = 2.0) -> Callable:
    def model(X, y=None, offset=None):
        w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
        line = X @ w if offset is None else offset + X @ w
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", distribution(line), obs=y)

    return model


def unknown_scale(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    scale = numpyro.sample("scale", dist.HalfNormal(2.0))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)


LIKELIHOODS = {
    "logistic": lambda line: dist.Bernoulli(logits=line),
    "poisson": lambda line: dist.Poisson(jnp.exp(line)),
    "binomial": lambda line: dist.Binomial(TRIALS, logits=line),
    "gamma": lambda line: dist.Gamma(SHAPE, SHAPE / jnp.exp(line)),
}
MODELS = {name: regression(make) for name, make in LIKELIHOODS.items()} | {"normal": unknown_scale}


# ---------------------------------------------------------------------- data
def made(kind: str, num_rows: int) -> Case:
    rng = np.random.default_rng(0)
    X = np.column_stack([np.ones(num_rows), rng.normal(size=(num_rows, 4))])
    line = X @ [0.3, 0.5, -0.4, 0.2, 0.1]
    if kind == "normal":
        y = line + 1.5 * rng.normal(size=num_rows)
    else:
        y = np.asarray(LIKELIHOODS[kind](jnp.asarray(line)).sample(jax.random.key(0)))
    return Case(kind, MODELS[kind], {"X": X, "y": y})


def with_intercept(X: np.ndarray) -> np.ndarray:
    """And without columns that are constant: indicators of levels that do not occur."""
    X = np.asarray(X, np.float64)
    return np.column_stack([np.ones(len(X)), X[:, X.std(0) > 0]])


def real(folder: str) -> Iterator[Case]:
    data = load_module(folder)
    logistic, counts = regression(LIKELIHOODS["logistic"]), regression(LIKELIHOODS["poisson"])
    X, y, _ = data.design("covtype")
    yield Case("Covertype", logistic, {"X": with_intercept(X[:400_000]), "y": (y[:400_000] == 2).astype(float)})
    few = with_intercept(X[:400_000, :10])
    yield Case("Covertype, 11 columns", logistic, {"X": few, "y": (y[:400_000] == 2).astype(float)})
    X, y, _ = data.design("elec2")
    yield Case("elec2", logistic, {"X": with_intercept(X), "y": y.astype(float)})
    X, y, _ = data.design("freMTPL2freq")
    exposure = data.load("freMTPL2freq")["exposure"]
    yield Case("freMTPL2freq", counts, {"X": with_intercept(X), "y": y.astype(float), "offset": np.log(exposure)})
    X, y, _ = data.design("bike_hour")
    yield Case("bike_hour", counts, {"X": with_intercept(X), "y": y.astype(float)})


def orders(rows: Rows) -> dict[str, np.ndarray]:
    total = len(rows["y"])
    return {
        "random": np.random.default_rng(0).permutation(total),
        "its own": np.arange(total),
        "by outcome": np.argsort(rows["y"], kind="stable"),
        "by a column": np.argsort(rows["X"][:, 1], kind="stable"),
    }


# ---------------------------------------------------------------------- sources
def in_files(rows: Rows, folder: Path) -> ParquetRows:
    columns = {f"x{i}": column for i, column in enumerate(rows["X"].T)}
    others = {name: array for name, array in rows.items() if name != "X"}
    pq.write_table(pa.table(columns | others), folder / "rows.parquet", row_group_size=GROUP)
    return ParquetRows(folder / "rows.parquet", {"X": list(columns)} | {name: name for name in others})


def in_stream(rows: Rows) -> Iterator[Rows]:
    for start in range(0, len(rows["y"]), BLOCK):
        yield {name: array[start : start + BLOCK] for name, array in rows.items()}


SOURCES: dict[str, Callable[[Rows, Path], Callable[[], Any]]] = {
    "arrays": lambda rows, folder: lambda: rows,
    "files": lambda rows, folder: (lambda source: lambda: source)(in_files(rows, folder)),
    "a stream": lambda rows, folder: lambda: in_stream(rows),
}


# ---------------------------------------------------------------------- measurement
def divergence(p: Posterior, q: Posterior) -> float:
    delta = np.asarray(p.mean) - np.asarray(q.mean)
    precision = np.linalg.inv(np.asarray(q.covariance))
    ratio = precision @ np.asarray(p.covariance)
    return float(0.5 * (np.trace(ratio) + delta @ precision @ delta - len(delta) - np.linalg.slogdet(ratio)[1]))


def timed(method: RVGA, data: Any) -> tuple[float, Posterior, bool]:
    """Seconds, the posterior, and whether there was a warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        start = time.perf_counter()
        posterior = method.run(data, progress_bar=False)
        jax.block_until_ready(posterior.mean)
        return time.perf_counter() - start, posterior, bool(caught)


def measure(case: Case, report: Report) -> bool:
    """Whether all orders and sources end well."""
    method, plain = RVGA(case.model), RVGA(case.model, shuffle=False, certify=False)
    best = FixedPointVI(case.model).run(case.rows, progress_bar=False)
    good = True
    for order_name, order in orders(case.rows).items():
        rows = {name: array[order] for name, array in case.rows.items()}
        for source_name, source_of in SOURCES.items():
            with tempfile.TemporaryDirectory() as folder:
                source = source_of(rows, Path(folder))
                timed(method, source()), timed(plain, source())  # these compile
                seconds, alone = [], []
                for _ in range(TURNS):
                    took, posterior, warned = timed(method, source())
                    seconds.append(took)
                    alone.append(timed(plain, source())[0])
            off = divergence(posterior, best)
            is_right = off < CLOSE if source_name != "a stream" else off < CLOSE or warned
            if posterior.elbo is not None:
                is_right &= posterior.elbo < best.elbo + CLOSE and (warned or posterior.elbo > best.elbo - CLOSE)
            good &= is_right
            report(
                case=case.name,
                order=order_name,
                source=source_name,
                seconds=float(np.median(seconds)),
                ratio=float(np.median(seconds) / np.median(alone)),
                divergence=off,
                bound_gap=None if posterior.elbo is None else posterior.elbo - best.elbo,
                looks=posterior.info.get("looks"),
                warned=warned,
                right=bool(is_right),
            )
    return good


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--data", help="folder with load.py and the data files")
    options.add_argument("--cases", nargs="*", help="names of cases; default: all")
    options.add_argument("--rows", type=int, default=50_000, help="that are made of each likelihood")
    arguments = options.parse_args()
    report, good = Report(arguments.output / "order.json"), True
    cases = [made(kind, arguments.rows) for kind in MODELS]
    if arguments.data:
        cases += real(arguments.data)
    for case in cases:
        if not arguments.cases or case.name in arguments.cases:
            good &= measure(case, report)
    sys.exit(not good)


if __name__ == "__main__":
    main()
