"""What a step of BONG costs: against the numbers of parameters, outputs and directions, and against plain code.

``python benchmarks/bong.py`` times single steps of a softmax model of P weights and prints the exponents of their
growth (``--output`` saves the plot). ``--network`` times steps of a convolutional network of 57,722 weights beside the
update equations of the BONG paper (E.3.2 and E.5.2) written out with a Jacobian, an SVD and a pseudo-inverse, in turns.
"""

from __future__ import annotations

import argparse
import collections
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_rvga import BONG, init_to_module

METHODS = [
    ("diagonal", "lin-ef"),
    ("diagonal", "lin-hess"),
    ("diagonal", "mc-ef"),
    ("low-rank", "lin-ef"),
    ("low-rank", "lin-hess"),
    ("low-rank", "mc-ef"),
]
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
SAMPLES = 10


def softmax_step(family: str, hessian: str, size: int, outputs: int = 10, rank: int = 10):
    """A step of a softmax model whose logits are sums of ``size`` weights, squashed."""

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([size]).to_event(1))
        with numpyro.plate("rows", X.shape[0]):
            logits = X @ jnp.tanh(w).reshape(-1, outputs)
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    rng = np.random.default_rng(0)
    rows = {"X": rng.normal(size=(2, size // outputs)).astype(np.float32) / math.sqrt(size), "y": np.array([0, 1])}
    return step_of(BONG(model, family=family, hessian=hessian, rank=rank, num_samples=SAMPLES), rows)


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


def growth(repeats: int, largest: int, output: Path | None) -> None:
    sizes = [size for size in SIZES if size <= largest]
    print(f"{'family':10} {'hessian':9}" + "".join(f"{f'P={size:,}':>13}" for size in sizes) + "   exponent")
    times = {}
    for family, hessian in METHODS:
        found = [medians({0: softmax_step(family, hessian, size)}, repeats)[0] for size in sizes]
        times[family, hessian] = found
        exponent = np.polyfit(np.log(sizes[-3:]), np.log(found[-3:]), 1)[0]
        cells = "".join(f"{milliseconds:10.3f} ms" for milliseconds in found)
        print(f"{family:10} {hessian:9}{cells}   {exponent:8.2f}")
    middle = sizes[-2]
    for name, values in (("outputs", (5, 10, 20)), ("rank", (5, 10, 20, 40))):
        steps = {v: softmax_step("low-rank", "lin-hess", middle, **{name: v}) for v in values}
        found = medians(steps, repeats)
        text = ", ".join(f"{value}: {milliseconds:.2f} ms" for value, milliseconds in found.items())
        print(f"low-rank lin-hess at P={middle:,} against {name}: {text}")
    if output is not None:
        plot(sizes, times, output)


def plot(sizes: list[int], times: dict, output: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 3.6), layout="constrained")
    colours = {"lin-ef": "#0072B2", "lin-hess": "#D55E00", "mc-ef": "#009E73"}
    for (family, hessian), found in times.items():
        style = "-o" if family == "diagonal" else "--s"
        axes.loglog(sizes, found, style, ms=4, color=colours[hessian], label=f"{family}, {hessian}")
    axes.loglog(sizes[-3:], np.array(sizes[-3:]) * 0.3 * found[-1] / sizes[-1], ":k", label="linear")
    axes.set(xlabel="parameters", ylabel="milliseconds a step")
    axes.legend(frameon=False, fontsize=7)
    figure.savefig(output, dpi=110)
    print(f"saved {output}")


# ---------------------------------------------------------------------- a network, beside plain code
def network(repeats: int) -> None:
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

    def linearised(mean, x, y):
        predicted, jacobian = probabilities(mean, x), jax.jacrev(probabilities)(mean, x)
        covariance = jnp.diag(predicted) - jnp.outer(predicted, predicted) + 1e-5 * jnp.eye(10)
        return jacobian, covariance, jax.nn.one_hot(y, 10) - predicted

    @jax.jit
    def plain_diagonal(mean, variance, x, y):
        jacobian, covariance, error = linearised(mean, x, y)
        precision = 1 / variance + jnp.sum(jacobian * jnp.linalg.solve(covariance, jacobian), axis=0)
        return mean + jacobian.T @ jnp.linalg.solve(covariance, error) / precision, 1 / precision

    @jax.jit
    def plain_low_rank(mean, diagonal, factor, x, y):
        jacobian, covariance, error = linearised(mean, x, y)
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
    for name, milliseconds in found.items():
        print(f"{name:16} {milliseconds:8.2f} ms")
    for family in ("low-rank", "diagonal"):
        print(f"{family}: {found[family] / found[family + ', plain']:.2f} of the plain code's time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="store_true")
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--largest", type=int, default=SIZES[-1], help="number of parameters")
    parser.add_argument("--output", type=Path, help="where the plot is saved")
    arguments = parser.parse_args()
    if arguments.network:
        network(arguments.repeats)
    else:
        growth(arguments.repeats, arguments.largest, arguments.output)


if __name__ == "__main__":
    main()
