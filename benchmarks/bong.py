"""A step of BONG beside plain code, in turns.

python -m benchmarks bong [--repeats N]

The model is a convolutional network of 57,722 weights, and the plain code the update equations of the BONG paper (E.3.2
and E.5.2) written out with a Jacobian, an SVD and a pseudo-inverse. Then a logistic row of a million weights with a
diagonal, beside its two equations in a scan: processor time.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser

from numpyro_rvga import BONG, init_to_module


def step_of(bong: BONG, rows: dict):
    """A function of no arguments that takes in one row."""
    state = bong.init(rows)
    online = bong.online
    row = jax.device_put({name: array[:1] for name, array in rows.items()})
    return lambda: online.one_block(state, row, np.ones(1, np.float32), 1)


def medians(steps: dict, repeats: int) -> dict:
    """Milliseconds a step, taken in turns."""
    seconds = collections.defaultdict(list)
    for step in steps.values():
        jax.block_until_ready(step())
    for _ in range(repeats):
        for name, step in steps.items():
            start = time.perf_counter()
            jax.block_until_ready(step())
            seconds[name].append(time.perf_counter() - start)
    return {name: 1e3 * float(np.median(found)) for name, found in seconds.items()}


def network(repeats: int, report: Report) -> None:
    import flax.linen as nn
    from numpyro.contrib.module import random_flax_module

    class Network(nn.Module):
        @nn.compact
        def __call__(self, x):
            for _ in range(2):
                x = nn.avg_pool(nn.relu(nn.Conv(16, (5, 5))(x)), (2, 2), (2, 2))
            x = nn.relu(nn.Dense(64)(x.reshape(len(x), -1)))
            return nn.Dense(10)(x)

    def model(X, y=None):
        net = random_flax_module("net", Network(), dist.Normal(0, 0.2), input_shape=(1, 28, 28, 1))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=net(X)), obs=y)

    rng = np.random.default_rng(0)
    rows = {"X": rng.uniform(size=(2, 28, 28, 1)).astype(np.float32), "y": np.array([3, 4])}
    weights = Network().init(jax.random.key(0), rows["X"])
    theta, unravel = jax.flatten_util.ravel_pytree(weights)
    probabilities = lambda t, x: jax.nn.softmax(Network().apply(unravel(t), x[None])[0])  # noqa: E731

    def linearized(mean, x, y):
        predicted, jacobian = probabilities(mean, x), jax.jacrev(probabilities)(mean, x)
        covariance = jnp.diag(predicted) - jnp.outer(predicted, predicted) + 1e-5 * jnp.eye(10)
        return jacobian, covariance, jax.nn.one_hot(y, 10) - predicted

    @jax.jit
    def plain_diagonal(mean, variance, x, y):
        jacobian, covariance, error = linearized(mean, x, y)
        precision = 1 / variance + jnp.sum(jacobian * jnp.linalg.solve(covariance, jacobian), axis=0)
        return mean + jacobian.T @ jnp.linalg.solve(covariance, error) / precision, 1 / precision

    @jax.jit
    def plain_low_rank(mean, diagonal, factor, x, y):
        jacobian, covariance, error = linearized(mean, x, y)
        root = jnp.linalg.cholesky(jnp.linalg.inv(covariance))
        wide = jnp.concatenate([factor, jacobian.T @ root], axis=1)
        scaled = wide / diagonal[:, None]
        pull = jacobian.T @ (root @ (root.T @ error))
        inner = jnp.linalg.pinv(jnp.eye(20) + wide.T @ scaled)
        vectors, values, _ = jnp.linalg.svd(wide, full_matrices=False)
        turned = vectors * values
        mean = mean + pull / diagonal - scaled @ (inner @ (scaled.T @ pull))
        return mean, diagonal + jnp.sum(turned[:, 10:] ** 2, axis=1), turned[:, :10]

    x, y = jax.device_put((rows["X"][0], rows["y"][0]))
    precision, nothing = jnp.full(theta.shape, 25.0), jnp.zeros((len(theta), 10))
    steps = {
        "low-rank, plain": lambda: plain_low_rank(theta, precision, nothing, x, y),
        "low-rank": step_of(BONG(model, family="low-rank", init_loc_fn=init_to_module), rows),
        "diagonal, plain": lambda: plain_diagonal(theta, 1 / precision, x, y),
        "diagonal": step_of(BONG(model, family="diagonal", init_loc_fn=init_to_module), rows),
    }
    found = medians(steps, repeats)
    for family in ("low-rank", "diagonal"):
        plain = found[f"{family}, plain"]
        report(family=family, ratio=found[family] / plain, milliseconds=found[family], plain_milliseconds=plain)


def million(repeats: int, report: Report) -> None:
    """Of a pass over few rows, all in memory."""
    size, num_rows = 1_000_000, 32

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 0.1).expand([size]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)

    rng = np.random.default_rng(0)
    rows = {"X": 0.01 * rng.standard_normal((num_rows, size), np.float32), "y": rng.integers(0, 2, num_rows)}
    bong = BONG(model, family="diagonal")
    state, weights = bong.init(rows), np.ones(num_rows, np.float32)
    online, rows = bong.online, jax.device_put(rows)

    @jax.jit
    def plain(mean, variance, rows):
        def step(q, row):
            (mean, variance), (x, y) = q, row
            p = jax.nn.sigmoid(x @ mean)
            variance = variance / (1 + p * (1 - p) * x**2 * variance)
            return (mean + variance * (y - p) * x, variance), None

        return jax.lax.scan(step, (mean, variance), (rows["X"], rows["y"]))[0]

    passes = {
        "diagonal": lambda: online.unchecked_stream(state, rows, weights, block_size=1),
        "plain": lambda: plain(state.gaussian.mean, state.gaussian.variance, rows),
    }
    found = {name: 1e3 * spent / num_rows for name, spent in least_seconds(passes, repeats, time.process_time).items()}
    ratio = found["diagonal"] / found["plain"]
    report(weights=size, ratio=ratio, milliseconds=found["diagonal"], plain_milliseconds=found["plain"])


def least_seconds(steps: dict, repeats: int, clock: Callable[[], float]) -> dict:
    """The least seconds of each, taken in turns."""
    seconds = collections.defaultdict(list)
    for _ in range(1 + repeats):  # the first compiles
        for name, step in steps.items():
            start = clock()
            jax.block_until_ready(step())
            seconds[name].append(clock() - start)
    return {name: min(spent) for name, spent in seconds.items()}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=30)
    args = options.parse_args()
    report = Report(args.output / "bong.json")
    network(args.repeats, report)
    million(args.repeats, report)


if __name__ == "__main__":
    main()
