"""The bound against time: FixedPointVI's three schedules and SVI, on the models of Sheth and Khardon's Figures 2 to 5.

python -m benchmarks fixed_point --data FOLDER      FOLDER holds load.py and the data files

A gap is the distance, in nats, to the best bound that any of the methods reached. SVI's bound is not its own noisy
estimate but the exact one, evaluated off the clock. GRAD climbs in coordinates where the prior is standard normal:
Gaussian processes need far fewer steps there than in their function values.
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

import json
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _data import load_module
from _gaussians import Case, exact_bound
from _results import parser, write
from numpyro import handlers
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoMultivariateNormal

from numpyro_rvga import FixedPointVI, Posterior

TARGET = 1e-3  # nats
SCHEDULES = {"FPi": "incremental", "FPb": "batch", "GRAD": "gradient"}
COLORS = {"FPi": "#0072B2", "FPb": "#009E73", "GRAD": "#E69F00", "SVI": "#CC79A7"}
GP_ROWS = 500
INDUCING = 100
JITTER = 1e-4
GRADIENT_ITERATIONS = 3000
RATE_FALLS_TO = 1e-5  # of SVI's first learning rate


# ---------------------------------------------------------------------- models
def logistic(f, y):
    numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def poisson(f, y):
    numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def laplace(scale: float) -> Callable:
    def observe(f, y):
        numpyro.sample("y", dist.Laplace(f, scale), obs=y)

    return observe


def student_t(f, y):
    numpyro.sample("y", dist.StudentT(3.0, f, np.sqrt(1 / 3)), obs=y)


def linear(observe: Callable) -> Callable:
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, np.sqrt(0.1)).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            observe(X @ w, y)

    return model


def process(observe: Callable) -> Callable:
    def model(y, scale_tril, center):
        f = numpyro.sample("f", dist.MultivariateNormal(center, scale_tril=scale_tril))
        with numpyro.plate("rows", len(y)):
            observe(f, y)

    return model


def whitened_process(observe: Callable) -> Callable:
    def model(y, scale_tril, center):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([len(y)]).to_event(1))
        with numpyro.plate("rows", len(y)):
            observe(center + scale_tril @ z, y)

    return model


def sparse_process(observe: Callable) -> Callable:
    """``A``: the regression of a row's value on those at the inducing points, and ``spread`` what it leaves open."""

    def model(A, spread, y, scale_tril):
        u = numpyro.sample("u", dist.MultivariateNormal(jnp.zeros(A.shape[1]), scale_tril=scale_tril))
        with numpyro.plate("rows", A.shape[0]):
            f = numpyro.sample("f", dist.Normal(A @ u, spread))
            observe(f, y)

    return model


def whitened_sparse_process(observe: Callable) -> Callable:
    def model(A, spread, y, scale_tril):
        z = numpyro.sample("z", dist.Normal(0, 1).expand([A.shape[1]]).to_event(1))
        with numpyro.plate("rows", A.shape[0]):
            f = numpyro.sample("f", dist.Normal(A @ (scale_tril @ z), spread))
            observe(f, y)

    return model


def glm(name: str, observe: Callable, X: np.ndarray, y: np.ndarray) -> Case:
    return Case(f"{name} ({len(y)}, {X.shape[1]})", linear(observe), {"X": X, "y": y}, {})


def gp(name: str, observe: Callable, X: np.ndarray, y: np.ndarray, kernel: Callable, center: float = 0.0) -> Case:
    scale_tril = np.linalg.cholesky(kernel(X, X) + JITTER * np.eye(len(y)))
    kwargs = {"scale_tril": scale_tril, "center": np.full(len(y), center)}
    return Case(f"{name} ({len(y)})", process(observe), {"y": y}, kwargs, whitened_process(observe))


def sparse_gp(name: str, observe: Callable, X: np.ndarray, y: np.ndarray, kernel: Callable) -> Case:
    inducing = X[np.random.default_rng(1).choice(len(y), INDUCING, replace=False)]
    covariance = kernel(inducing, inducing) + JITTER * np.eye(INDUCING)
    A = np.linalg.solve(covariance, kernel(inducing, X)).T
    spread = np.sqrt(np.maximum(kernel(X[:1], X[:1])[0, 0] - np.sum(A * kernel(X, inducing), axis=1), JITTER))
    rows, kwargs = {"A": A, "spread": spread, "y": y}, {"scale_tril": np.linalg.cholesky(covariance)}
    name = f"{name} ({len(y)}, {INDUCING})"
    return Case(name, sparse_process(observe), rows, kwargs, whitened_sparse_process(observe))


def squared_exponential(length: float, amplitude: float) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    def kernel(a, b):
        distances = np.sum(a**2, 1)[:, None] + np.sum(b**2, 1) - 2 * a @ b.T
        return amplitude**2 * np.exp(-0.5 * np.maximum(distances, 0) / length**2)

    return kernel


# ---------------------------------------------------------------------- data
def standardized(X: np.ndarray) -> np.ndarray:
    X = X.astype(np.float64)
    deviation = X.std(0)
    return (X - X.mean(0)) / np.where(deviation > 0, deviation, 1)


def with_intercept(X: np.ndarray) -> np.ndarray:
    return np.column_stack([np.ones(len(X)), standardized(X)])


def shuffled(X: np.ndarray, y: np.ndarray, count: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    order = np.random.default_rng(0).permutation(len(y))[:count]
    return np.asarray(X, np.float64)[order], np.asarray(y, np.float64)[order]


def cases(folder: str) -> dict[str, Callable[[], Case]]:
    """By name, made when asked for."""
    load = load_module(folder)

    def covertype():
        X, cover, _ = load.design("covtype", drop_first=False)
        X, y = shuffled(X, cover == 1, 20_000)
        return glm("GLM, logistic: covertype", logistic, with_intercept(X), y)

    def digits():
        data = load.load("usps")
        X, y = shuffled(data["X"], data["y"] % 2)
        return glm("GLM, logistic: USPS odd or even", logistic, with_intercept(X), y)

    def bike():
        data = load.load("bike_hour")
        X, y = shuffled(data["X"], data["y"])
        return glm("GLM, Poisson: bike", poisson, with_intercept(X), y)

    def protein():
        data = load.load("protein")
        X, y = shuffled(data["X"], standardized(data["y"]))
        return glm("GLM, Laplace: protein", laplace(0.6), with_intercept(X), y)

    def banana():
        data = load.load("banana")
        X, y = shuffled(standardized(data["X"]), data["y"], GP_ROWS)
        return gp("GP, logistic: banana", logistic, X, y, squared_exponential(0.6, 2.0))

    def usps():
        data = load.load("usps")
        taken = np.isin(data["y"], (3, 5))
        X, y = shuffled(standardized(data["X"][taken]), data["y"][taken] == 3, GP_ROWS)
        return gp("GP, logistic: USPS 3 or 5", logistic, X, y, squared_exponential(12.0, 4.0))

    def bike_process():
        data = load.load("bike_hour")
        X, y = shuffled(standardized(data["X"]), data["y"], GP_ROWS)
        return gp("GP, Poisson: bike", poisson, X, y, squared_exponential(2.5, 1.2), center=np.log(y.mean()))

    def kin8nm_process():
        data = load.load("kin8nm")
        X, y = shuffled(standardized(data["X"]), standardized(data["y"]), GP_ROWS)
        return gp("GP, Laplace: kin8nm", laplace(0.3), X, y, squared_exponential(3.0, 1.0))

    def kin8nm_sparse():
        data = load.load("kin8nm")
        X, y = shuffled(standardized(data["X"]), standardized(data["y"]))
        return sparse_gp("sparse GP, Laplace: kin8nm", laplace(0.3), X, y, squared_exponential(3.0, 1.0))

    def energy_student():
        data = load.load("energy")
        X, y = shuffled(standardized(data["X"]), standardized(data["y"]), GP_ROWS)
        return gp("GP, Student's t: energy", student_t, X, y, squared_exponential(2.0, 1.0))

    found = [
        covertype,
        digits,
        bike,
        protein,
        banana,
        usps,
        bike_process,
        kin8nm_process,
        kin8nm_sparse,
        energy_student,
    ]
    return {make.__name__: make for make in found}


# ---------------------------------------------------------------------- runs
class Curve(NamedTuple):
    """A method's bounds, and when each was known after the start of a run of compiled code.

    :ivar compiling: seconds that a first run takes longer.
    """

    seconds: np.ndarray
    bounds: np.ndarray
    compiling: float


def run_schedule(case: Case, schedule: str) -> tuple[Curve, Posterior]:
    iterations = GRADIENT_ITERATIONS if schedule == "gradient" else 500
    method = FixedPointVI(case.model, schedule=schedule, max_iterations=iterations)
    first, second = (method.run(case.rows, progress_bar=False, **case.kwargs) for _ in range(2))
    seconds = second.info["seconds"]
    compiling = max(first.info["seconds"][-1] - seconds[-1], 0.0)
    return Curve(seconds, second.info["bounds"], compiling), second


def run_svi(case: Case, best: Posterior, budget: float, learning_rate: float) -> Curve:
    """Adam on all rows, until the target is reached or the budget spent.

    The noise of its gradients sets a floor to the gap, in proportion to its rate. So the rate falls, by five orders of
    magnitude over the steps that the budget allows.
    """
    model = case.whitened or case.model
    auto = AutoMultivariateNormal(handlers.block(model, hide=["f"]) if "spread" in case.rows else model)
    guide = auto
    if "spread" in case.rows:  # the rows' own latents follow their prior, as in the bound

        def guide(A, spread, y, scale_tril):
            z = auto(A, spread, y, scale_tril)["z"]
            with numpyro.plate("rows", A.shape[0]):
                numpyro.sample("f", dist.Normal(A @ (scale_tril @ z), spread))

    arguments = {name: jnp.asarray(array) for name, array in (case.rows | case.kwargs).items()}
    bound = exact_bound(case)

    def prepare(num_steps):
        rate = lambda step: learning_rate * RATE_FALLS_TO ** (step / num_steps)  # noqa: E731
        svi = SVI(model, guide, numpyro.optim.Adam(rate), Trace_ELBO())

        @jax.jit
        def advance(state, count):
            return jax.lax.fori_loop(0, count, lambda _, s: svi.update(s, **arguments)[0], state)

        state = svi.init(jax.random.key(0), **arguments)
        jax.block_until_ready(advance(state, 1))
        return svi, state, advance

    start = time.perf_counter()
    _, state, advance = prepare(1e6)
    compiling = time.perf_counter() - start
    start = time.perf_counter()
    jax.block_until_ready(advance(state, 100))
    num_steps = int(budget / (time.perf_counter() - start) * 100)
    svi, state, advance = prepare(num_steps)
    seconds, bounds, spent, steps = [], [], 0.0, max(num_steps // 100, 1)
    while spent < budget and (not bounds or best.elbo - bounds[-1] > TARGET):
        start = time.perf_counter()
        state = jax.block_until_ready(advance(state, steps))
        spent += time.perf_counter() - start
        params = svi.get_params(state)
        seconds.append(spent)
        bounds.append(bound(params["auto_loc"], params["auto_scale_tril"]))
    return Curve(np.array(seconds), np.array(bounds), compiling)


def time_to_target(curve: Curve, best: float, *, compiling: bool) -> float:
    """Seconds; infinite if it never got there."""
    reached = np.flatnonzero(curve.bounds >= best - TARGET)
    return curve.seconds[reached[0]] + compiling * curve.compiling if len(reached) else np.inf


def report(curves: dict[str, Curve], best: float) -> None:
    for compiling in (False, True):
        times = {name: time_to_target(curve, best, compiling=compiling) for name, curve in curves.items()}
        ends = {name: curve.seconds[-1] + compiling * curve.compiling for name, curve in curves.items()}
        shown = [f"{n} {t:8.2f} s" if np.isfinite(t) else f"{n} > {ends[n]:6.1f} s" for n, t in times.items()]
        slower = []
        for name in ("GRAD", "SVI"):
            reached = np.isfinite(times[name])
            ratio = (times[name] if reached else ends[name]) / times["FPi"]
            slower.append(f"{name}/FPi {'' if reached else '> '}{ratio:.1f}")
        label = "with compilation" if compiling else "compiled"
        print(f"  {label:17s} {'  '.join(shown)}   {'  '.join(slower)}")
    left = {name: best - curve.bounds[-1] for name, curve in curves.items()}
    print("  nats below the best at the end: " + "  ".join(f"{name} {gap:.1e}" for name, gap in left.items()))
    print("  iterations: " + "  ".join(f"{n} {len(c.bounds)}" for n, c in curves.items() if n != "SVI"), flush=True)


def draw(results: dict[str, Any], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    cases = results["cases"]
    columns = min(len(cases), 5)
    rows = -(-len(cases) // columns)
    size = 2.7 * columns, 2.4 * rows + 0.3
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, sharey=True, layout="constrained")
    for axis in axes.flat[len(cases) :]:
        axis.set_visible(False)
    for axis, case in zip(axes.flat, cases):
        for method, curve in case["curves"].items():
            gaps = np.maximum(case["best"] - np.array(curve["bounds"]), 1e-6)
            axis.loglog(curve["seconds"], gaps, ".-", color=COLORS[method], ms=3, lw=1.2, label=method)
        axis.axhline(TARGET, color="#999999", lw=0.8, ls=":")
        axis.set_title(case["title"], fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
    figure.supxlabel("seconds, compilation not counted", fontsize=9)
    figure.supylabel("nats below the best bound", fontsize=9)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=90)
    print(f"saved {path}")


def main() -> None:
    options = parser(__doc__, drawn=True)
    options.add_argument("--data", help="folder with load.py and the data files")
    options.add_argument("--cases", nargs="*", help="some of them, by name; default: all")
    options.add_argument("--svi-seconds", type=float, default=30.0)
    options.add_argument("--svi-learning-rate", type=float, default=0.01)
    args = options.parse_args()
    if args.draw is not None:
        draw(json.loads(args.draw.read_text()), args.draw.with_suffix(".png"))
        return
    if args.data is None:
        options.error("--data is needed")
    numpyro.enable_x64()
    known, found = cases(args.data), []
    for name in args.cases or known:
        case, curves = known[name](), {}
        print(case.name, flush=True)
        for method, schedule in SCHEDULES.items():
            curves[method], posterior = run_schedule(case, schedule)
            if method == "FPi":
                fixed_point = posterior
        curves["SVI"] = run_svi(case, fixed_point, args.svi_seconds, args.svi_learning_rate)
        best = max(curve.bounds.max() for curve in curves.values())
        report(curves, best)
        saved = {method: {k: np.asarray(v).tolist() for k, v in c._asdict().items()} for method, c in curves.items()}
        found.append({"title": case.name, "best": float(best), "curves": saved})
        results = write(found, args.output / "fixed_point.json")
    draw(results, args.output / "fixed_point.png")


if __name__ == "__main__":
    main()
