"""Other ways to a Gaussian: NumPyro's SVI and Laplace, BlackJAX's full-rank VI and Pathfinder; and NUTS's time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from _gaussians import Bound, Case, LogDensity, Point, finite, in_order
from numpyro.infer import NUTS, SVI, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoContinuous, AutoLaplaceApproximation, AutoMultivariateNormal

from numpyro_rvga import Posterior

CURVE_POINTS = 10
RATE_FALLS_TO = 0.001  # of the first learning rate, along a run
FULL_RANK_DRAWS = 5  # a step
PATHFINDER_ITERATIONS = 60
PATHFINDER_NUMBERS = 2**26  # of all draws' rows, which it holds at once
OF_LAST_SOLVE = 20  # iterations of NUTS


class Run(NamedTuple):
    """Where a method was along its steps."""

    points: list[Point]
    num_steps: int


def timed(run: Callable[[], Posterior]) -> tuple[Point, Posterior]:
    start = time.perf_counter()
    posterior = run()
    jax.block_until_ready(posterior.gaussian)
    return Point(time.perf_counter() - start, posterior.mean, posterior.scale_tril), posterior


def best_of_rates(run: Callable[[float], Run], rates: list[float], bound: Bound) -> tuple[float, Run]:
    """The learning rate whose run ends highest, and that run: tuning takes none of its time."""

    def end(points: list[Point]) -> float:
        return bound(points[-1].mean, points[-1].scale_tril) if finite(points[-1]) else -np.inf

    runs = {rate: run(rate) for rate in rates}
    best = max(rates, key=lambda rate: end(runs[rate].points))
    return best, runs[best]


def along(start: float, num_steps: int, advance: Callable, state: Any, gaussian: Callable) -> Run:
    """``advance(state, num_steps)`` in equal parts, and the Gaussian after each."""
    states, seconds = [], []
    for _ in range(CURVE_POINTS):
        state = jax.block_until_ready(advance(state, num_steps // CURVE_POINTS))
        states.append(state)
        seconds.append(time.perf_counter() - start)
    return Run([Point(spent, *gaussian(state)) for spent, state in zip(seconds, states)], num_steps)


# ---------------------------------------------------------------------- NumPyro's
def svi(case: Case, site_names: tuple[str, ...], num_steps: int, rate: float, batch: int | None = None) -> Run:
    """Adam.

    :param batch: rows of a step, a random slice of them all, which are in random order. The model's argument ``total``
        has the number of all rows.
    """
    guide = AutoMultivariateNormal(case.model, init_loc_fn=init_to_median)
    method = SVI(case.model, guide, numpyro.optim.Adam(lambda i: rate * RATE_FALLS_TO ** (i / num_steps)), Trace_ELBO())
    start = time.perf_counter()
    rows, total = LogDensity.rows(case), len(next(iter(case.rows.values())))
    kwargs = case.kwargs | ({} if batch is None else {"total": total})

    def taken(rows, key):
        if batch is None:
            return rows
        first = jax.random.randint(key, (), 0, total - batch + 1)
        return {name: jax.lax.dynamic_slice_in_dim(array, first, batch) for name, array in rows.items()}

    @jax.jit
    def steps(state, count, rows):
        def step(i, state):
            return method.update(state, **taken(rows, jax.random.fold_in(state.rng_key, i)), **kwargs)[0]

        return jax.lax.fori_loop(0, count, step, state)

    def gaussian(state):
        params = method.get_params(state)
        return reordered(guide, site_names, params["auto_loc"], params["auto_scale_tril"])

    state = method.init(jax.random.key(0), **taken(rows, jax.random.key(1)), **kwargs)
    return along(start, num_steps, lambda state, count: steps(state, count, rows), state, gaussian)


def auto_laplace(case: Case, site_names: tuple[str, ...]) -> Point:
    """BFGS on all rows to the mode, and the Hessian there."""
    guide = AutoLaplaceApproximation(case.model, init_loc_fn=init_to_median)
    method = SVI(case.model, guide, numpyro.optim.Minimize(), Trace_ELBO())
    start = time.perf_counter()
    rows = LogDensity.rows(case)
    state = method.init(jax.random.key(0), **rows, **case.kwargs)
    state, _ = jax.jit(lambda state, rows: method.update(state, **rows, **case.kwargs))(state, rows)
    transform = guide.get_transform(method.get_params(state))
    scale_tril = jax.block_until_ready(transform.scale_tril)
    return Point(time.perf_counter() - start, *reordered(guide, site_names, transform.loc, scale_tril))


def reordered(guide: AutoContinuous, site_names: tuple[str, ...], mean, root) -> tuple[np.ndarray, np.ndarray]:
    """A guide's Gaussian, in our order of the sites."""
    order = in_order(guide._unpack_latent(np.arange(len(mean))), site_names)
    mean, root = np.asarray(mean)[order], np.asarray(root)[order]
    if not np.all(np.isfinite(root)):
        return mean, root
    upper = np.linalg.qr(root.T, mode="r")
    return mean, upper.T * np.sign(np.diag(upper))


# ---------------------------------------------------------------------- BlackJAX's
def full_rank(case: Case, density: LogDensity, num_steps: int, seconds: float) -> Callable[[float], Run]:
    """BlackJAX's full-rank VI with Adam, on all rows at each step: as many steps as there are seconds for.

    :return: a function of the learning rate. It is compiled once, for all; each run counts that.
    """
    import blackjax
    import optax

    rows = density.rows(case)

    @jax.jit
    def steps(state, first, count, num_steps, rate, rows):
        adam = optax.adam(lambda i: rate * RATE_FALLS_TO ** (i / num_steps))
        method = blackjax.fullrank_vi(lambda theta: density(rows, theta), adam, FULL_RANK_DRAWS)
        step = lambda i, s: method.step(jax.random.fold_in(jax.random.key(0), i), s)[0]  # noqa: E731
        return jax.lax.fori_loop(first, first + count, step, state)

    def gaussian(state):
        mean, numbers = np.asarray(state[1].mu), np.asarray(state[1].chol_params)
        root = np.diag(np.exp(numbers[: len(mean)]))
        root[np.tril_indices(len(mean), -1)] = numbers[len(mean) :]
        return mean, root

    def seconds_of(count):
        start = time.perf_counter()
        jax.block_until_ready(steps(initial, 0, count, num_steps, 1e-3, rows))
        return time.perf_counter() - start

    initial = blackjax.fullrank_vi(None, optax.adam(lambda i: 1.0)).init(density.start)
    compiling = seconds_of(0)
    count = 1
    while (spent := seconds_of(count)) < 0.2 and count < num_steps:
        count *= 4
    num_steps = max(min(num_steps, int(count * seconds / spent)), CURVE_POINTS)

    def run(rate):
        def advance(state, count):
            return state[0] + count, steps(state[1], state[0], count, num_steps, rate, rows)

        return along(time.perf_counter() - compiling, num_steps, advance, (0, initial), gaussian)

    return run


def pathfinder(case: Case, density: LogDensity) -> Point:
    """BlackJAX's Pathfinder, of a single path, with as many draws as its memory allows."""
    import blackjax

    num_rows = len(next(iter(case.rows.values())))
    num_draws = int(np.clip(PATHFINDER_NUMBERS // (PATHFINDER_ITERATIONS * num_rows), 3, 200))
    start = time.perf_counter()

    @jax.jit
    def run(rows):
        found, _ = blackjax.vi.pathfinder.approximate(
            jax.random.key(0),
            lambda theta: density(rows, theta),
            density.start,
            num_draws,
            maxiter=PATHFINDER_ITERATIONS,
            ftol=1e-12,
        )
        covariance = jnp.diag(found.alpha) + found.beta @ found.gamma @ found.beta.T
        return found.position + covariance @ found.grad_position, jnp.linalg.cholesky(covariance)  # as it draws

    mean, root = jax.block_until_ready(run(density.rows(case)))
    return Point(time.perf_counter() - start, mean, root)


# ---------------------------------------------------------------------- NUTS
def nuts_seconds(case: Case, kernel: NUTS, iterations: int, budget: float, start: dict | None = None) -> float:
    """Of so many iterations, extrapolated from as many as the budget allows after those in which the step size settles.
    Compilation is not counted.

    The mass matrix of a cold start is adapted later on, after which iterations may take fewer leapfrog steps.
    """
    rows = LogDensity.rows(case)
    state = kernel.init(jax.random.key(0), iterations, start, model_args=(), model_kwargs=rows | case.kwargs)
    sample = jax.jit(lambda state, rows: kernel.sample(state, (), rows | case.kwargs))
    for _ in range(OF_LAST_SOLVE):
        state = jax.block_until_ready(sample(state, rows))
    spent, done = 0.0, 0
    while done < iterations and spent < budget:
        began = time.perf_counter()
        state = jax.block_until_ready(sample(state, rows))
        spent, done = spent + time.perf_counter() - began, done + 1
    return spent / done * iterations
