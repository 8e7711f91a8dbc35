"""A step of BONG beside plain code, in turns.

python -m benchmarks bong [--repeats N]

The model is a convolutional network of 57,722 weights, and the plain code the update equations of the BONG paper (E.3.2
and E.5.2) written out with a Jacobian, an SVD and a pseudo-inverse.
"""

from __future__ import annotations

import collections
import time

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


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--repeats", type=int, default=30)
    args = options.parse_args()
    network(args.repeats, Report(args.output / "bong.json"))


if __name__ == "__main__":
    main()
