"""The torque that moves a robot's arm: Kalman filters of a small network's weights, one pass, row by row.

A network with two hidden layers of 20 learns the torque at the first joint from positions, velocities and accelerations
of all joints. The filters differ in what they keep of the weights' covariance: all of it, diagonal plus low rank of the
precision, or a diagonal in two ways. The prior is a Gaussian around weights that a layer would start from, and how wide
it may be is chosen for each filter on rows held out. For comparison, least squares on all rows, and the same network
trained by Adam over and over. By default the arm is simulated: three links of point masses under gravity. With
``--data FOLDER`` it is the SARCOS arm with its seven joints (the published test part, split here).
"""

from __future__ import annotations

import time
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import COLORS, REFERENCE, WIDTH, parse_arguments, plt, save
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression
from sklearn.neural_network import MLPRegressor

from numpyro_rvga import BONG
from numpyro_rvga.metrics import nlpd

ARM_FILE = "uci_reg__sarcos_test_only.npz"
HIDDEN = 20
PRIOR_SCALES = (0.3, 0.1, 0.03)
NOISE = 0.2  # standard deviation of what the network does not explain, where targets have standard deviation 1
METHODS = {
    "cm-ekf": ("CM-EKF: full covariance", {}),
    "lo-fi": ("LO-FI: low rank (10)", {"rank": 10}),
    "vd-ekf": ("VD-EKF: diagonal precision", {}),
    "fd-ekf": ("FD-EKF: diagonal covariance", {}),
}


def shapes(num_inputs: int) -> list[tuple[int, int]]:
    """Of each layer's weights, the biases as their first row."""
    return [(num_inputs + 1, HIDDEN), (HIDDEN + 1, HIDDEN), (HIDDEN + 1, 1)]


def network(w, X):
    x = X
    for i, (size, width) in enumerate(shapes(X.shape[-1])):
        layer, w = w[: size * width].reshape(size, width), w[size * width :]
        x = (jnp.tanh(x) if i else x) @ layer[1:] + layer[0]
    return x[..., 0]


def starting_weights(num_inputs: int) -> np.ndarray:
    """Independent, of variance one over the number of a layer's inputs; biases zero."""
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=shape) / np.sqrt(shape[0] - 1) for shape in shapes(num_inputs)]
    for layer in layers:
        layer[0] = 0.0
    return np.concatenate([layer.ravel() for layer in layers]).astype(np.float32)


def model(X, y=None, start=None, prior_scale=None):
    w = numpyro.sample("w", dist.Normal(start, prior_scale).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(network(w, X), NOISE), obs=y)


def simulated_arm(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """States drawn at random, and the torque at the shoulder by Lagrange's equation."""
    lengths, masses, gravity = jnp.array([0.5, 0.4, 0.3]), jnp.array([2.0, 1.5, 1.0]), 9.81

    def ends(q):
        angle = jnp.cumsum(q)
        return jnp.cumsum(lengths * jnp.sin(angle)), -jnp.cumsum(lengths * jnp.cos(angle))

    def lagrangian(q, velocity):
        _, (x, y) = jax.jvp(ends, (q,), (velocity,))
        return 0.5 * masses @ (x**2 + y**2) - gravity * masses @ ends(q)[1]

    def torque(q, velocity, acceleration):
        momentum = jax.grad(lagrangian, argnums=1)
        _, change = jax.jvp(momentum, (q, velocity), (velocity, acceleration))
        return (change - jax.grad(lagrangian)(q, velocity))[0]

    rng = np.random.default_rng(0)
    q = rng.uniform(-2, 2, size=(num_rows, 3))
    velocity, acceleration = 2 * rng.normal(size=(num_rows, 3)), 4 * rng.normal(size=(num_rows, 3))
    y = np.asarray(jax.jit(jax.vmap(torque))(*map(jnp.asarray, (q, velocity, acceleration))))
    return np.column_stack([q, velocity, acceleration]), y + 0.05 * y.std() * rng.normal(size=num_rows)


def arm(folder: Path | None, num_simulated: int) -> tuple[np.ndarray, np.ndarray]:
    """States and torques of the SARCOS arm, if its file is in a folder, or else of the simulated one."""
    if folder is None:
        return simulated_arm(num_simulated)
    with np.load(folder / ARM_FILE) as file:
        return file["X"], file["Y"][:, 0]


def split(X: np.ndarray, y: np.ndarray, num_test: int):
    """Training and test rows, in random order, standardized by the training rows."""
    order = np.random.default_rng(1).permutation(len(y))
    test, train = order[:num_test], order[num_test:]
    X = (X - X[train].mean(0)) / X[train].std(0)
    y = (y - y[train].mean()) / y[train].std()
    return [{"X": X[rows].astype(np.float32), "y": y[rows].astype(np.float32)} for rows in (train, test)]


def normal_nlpd(residuals: np.ndarray, variance: float) -> float:
    return 0.5 * float(np.log(2 * np.pi * variance) + np.mean(residuals**2) / variance)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv, data=ARM_FILE)
    X, y = arm(arguments.data, 500 if arguments.quick else 4000)
    train, test = split(X, y, len(y) // 4)
    start = starting_weights(X.shape[1])
    print(f"{len(train['y'])} rows, {len(test['y'])} test rows, {X.shape[1]} inputs, {len(start)} weights\n")
    print(f"{'':28s} {'test MSE':>9s} {'NLPD':>8s} {'seconds':>8s} {'prior sd':>9s}")

    predict = jax.jit(network)

    def look(posterior):
        error = np.mean((np.asarray(predict(posterior.mean, test["X"])) - test["y"]) ** 2)
        return posterior.num_rows, error, nlpd(posterior, test)

    part = len(train["y"]) // 4
    short, held_out = (
        {name: array[rows] for name, array in train.items()} for rows in (slice(part), slice(-part, None))
    )
    curves, scales = {}, {}
    for preset in ("lo-fi", "vd-ekf") if arguments.quick else METHODS:
        label, options = METHODS[preset]
        method, found = BONG.preset(preset, model, **options), {}
        for scale in (0.1,) if arguments.quick else PRIOR_SCALES:
            tried = method.run(short, start=start, prior_scale=scale, progress_bar=False)
            found[scale] = nlpd(tried, held_out)
        scales[preset] = min(found, key=found.get)
        begin = time.perf_counter()
        keywords = {"callback": look, "callback_every": -(-len(train["y"]) // 20), "progress_bar": False}
        posterior = method.run(train, start=start, prior_scale=scales[preset], **keywords)
        curves[preset] = np.array(posterior.info["callback"])
        report(label, *curves[preset][-1, 1:], time.perf_counter() - begin, scales[preset])

    lines = {}
    epochs = 20 if arguments.quick else 200
    adam = MLPRegressor(
        hidden_layer_sizes=(HIDDEN, HIDDEN), activation="tanh", max_iter=epochs, n_iter_no_change=epochs, random_state=0
    )
    for label, regressor in (("least squares", LinearRegression()), (f"Adam, {epochs} epochs", adam)):
        begin = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            regressor.fit(train["X"], train["y"])
        residuals = test["y"] - regressor.predict(test["X"])
        variance = np.mean((train["y"] - regressor.predict(train["X"])) ** 2)
        lines[label] = np.mean(residuals**2), normal_nlpd(residuals, variance)
        report(label, *lines[label], time.perf_counter() - begin)
    save(draw(curves, scales, lines), arguments.output, "network_regression")


def report(label: str, error: float, density: float, seconds: float, scale: float | None = None) -> None:
    print(f"{label:28s} {error:9.4f} {density:8.3f} {seconds:8.1f} {'' if scale is None else scale:>9}")


def draw(curves, scales, lines):
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3.8))
    for axis, column, what in (
        (axes[0], 1, "test mean squared error / variance"),
        (axes[1], 2, "test NLPD, nats a row"),
    ):
        for (preset, curve), color in zip(curves.items(), COLORS):
            label = f"{METHODS[preset][0]}, prior sd {scales[preset]:g}"
            axis.plot(curve[:, 0], curve[:, column], "o-", color=color, ms=3, lw=1.4, label=label)
        for (label, values), style in zip(lines.items(), ("--", ":")):
            axis.axhline(values[column - 1], color=REFERENCE, lw=1.2, ls=style, label=label)
        axis.set_xlabel("rows absorbed")
        axis.set_ylabel(what)
        if column == 1:
            axis.set_yscale("log")
        else:
            low = min(curve[:, column].min() for curve in curves.values())
            axis.set_ylim(low - 0.5, low + 2)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    main()
