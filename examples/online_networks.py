"""Rules and families for a network that learns online: test NLPD against rows absorbed (BONG paper, figures 1 and 2).

Left: four rules with three ways to find the curvature, all with a low-rank precision. Right: one rule, BONG, with
several families. Learning rates are those that do best on rows held out, after a part of the rows. The network is a
flax module, and starts from weights that its layers would start from. By default it is small, and learns
scikit-learn's digits. With ``--data FOLDER`` it is the paper's convolutional network of 57,722 weights, on the first
2,000 rows of MNIST, which may take hours; or of Fashion-MNIST, if its files are there.
"""

from __future__ import annotations

import gzip
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn
from matplotlib.ticker import LogLocator, NullLocator
from numpyro.contrib.module import random_flax_module
from plots import COLORS, WIDTH, parse_arguments, plt, save
from sklearn.datasets import load_digits

from numpyro_rvga import BONG, init_to_module
from numpyro_rvga.metrics import nlpd

HESSIANS = {"lin-hess": "-", "lin-ef": "--", "mc-ef": ":"}
RULES = {"bong": {}, "bog": {}, "blr": {"num_iters": 5}, "bbb": {"num_iters": 5}}
FAMILIES = {
    "diagonal, natural": {"family": "diagonal"},
    "diagonal, moment": {"family": "diagonal", "parameterization": "moment"},
    "low-rank 1": {"family": "low-rank", "rank": 1},
    "low-rank 10": {"family": "low-rank", "rank": 10},
    "full": {"family": "full"},
}


class Perceptron(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(16)(x.reshape(len(x), -1))))


class Convolutional(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.avg_pool(nn.relu(nn.Conv(16, (5, 5))(x)), (2, 2), strides=(2, 2))
        return nn.Dense(10)(nn.relu(nn.Dense(64)(x.reshape(len(x), -1))))


class Problem(NamedTuple):
    """What is learned, on which rows, and what it may cost."""

    module: nn.Module
    prior_scale: float
    train: dict[str, np.ndarray]
    held_out: dict[str, np.ndarray]
    test: dict[str, np.ndarray]
    rates: tuple[float, ...]
    num_samples: int

    def model(self, X, y=None):
        prior = dist.Normal(0, self.prior_scale)
        network = random_flax_module("network", self.module, prior=prior, input_shape=(1, *X.shape[1:]))
        with numpyro.plate("images", len(X)):
            numpyro.sample("y", dist.Categorical(logits=network(X)), obs=y)


def digits(quick: bool) -> Problem:
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    X, y = (found.images[order] / 16).astype(np.float32)[..., None], found.target[order]
    num_train = 60 if quick else 500
    ends = num_train, num_train + 200, num_train + (300 if quick else 600)
    parts = [{"X": X[low:high], "y": y[low:high]} for low, high in zip((0, *ends), ends)]
    return Problem(Perceptron(), 0.3, *parts, (0.1,) if quick else (0.1, 0.3), 10)


def images(folder: Path) -> dict[str, np.ndarray]:
    """MNIST from ``mnist.npz``; or this or Fashion-MNIST from the four files in which they are published."""
    if (folder / "mnist.npz").exists():
        with np.load(folder / "mnist.npz") as file:
            return {name: file[name] for name in file.files}
    arrays = {}
    for part, prefix in (("train", "train"), ("test", "t10k")):
        pixels, labels = (
            np.frombuffer(gzip.decompress((folder / f"{prefix}-{kind}-ubyte.gz").read_bytes()), np.uint8)
            for kind in ("images-idx3", "labels-idx1")
        )
        arrays |= {f"x_{part}": pixels[16:].reshape(-1, 28, 28), f"y_{part}": labels[8:]}  # after sizes
    return arrays


def mnist(folder: Path) -> Problem:
    arrays = images(folder)
    X = {part: (arrays[f"x_{part}"] / 255).astype(np.float32)[..., None] for part in ("train", "test")}
    rows = {"train": slice(2000), "held_out": slice(2000, 2500), "test": slice(1000)}
    parts = [
        {"X": X[part][rows[name]], "y": arrays[f"y_{part}"][rows[name]].astype(int)}
        for name, part in (("train", "train"), ("held_out", "train"), ("test", "test"))
    ]
    return Problem(Convolutional(), 0.17, *parts, (0.01, 0.03, 0.1, 0.3), 10)


def tuned(problem: Problem, options: dict) -> BONG | None:
    """At the learning rate with the least plug-in NLPD of the rows held out, after two fifths of the training rows.

    None if all runs are refused.
    """
    method = BONG(problem.model, init_loc_fn=init_to_module, **options)
    if method.rule.name == "bong":
        return method
    length, found = 2 * len(problem.train["y"]) // 5, {}
    part = {name: array[:length] for name, array in problem.train.items()}
    for rate in problem.rates:
        tried = method.with_learning_rate(rate)
        try:
            score = nlpd(tried.run(part, progress_bar=False), problem.held_out, method="plugin")
        except ValueError:
            continue
        if np.isfinite(score):
            found[score] = tried
    return found[min(found)] if found else None


def curve(problem: Problem, label: str, options: dict) -> tuple[str, np.ndarray] | None:
    """The label with its learning rate, and rows absorbed against NLPD."""
    method = tuned(problem, options)
    if method is None:
        print(f"{label:24s} refused at all learning rates")
        return None
    if method.rule.name != "bong":
        label = f"{label} ({method.rule.learning_rate:g})"
    evaluating = 0.0

    def look(posterior):
        nonlocal evaluating
        begin = time.perf_counter()
        scores = nlpd(posterior, problem.test), nlpd(posterior, problem.test, method="plugin")
        evaluating += time.perf_counter() - begin
        return posterior.num_rows, *scores

    begin = time.perf_counter()
    keywords = {"callback": look, "callback_every": len(problem.train["y"]) // 5, "progress_bar": False}
    try:
        posterior = method.run(problem.train, **keywords)
    except ValueError as error:
        print(f"{label:24s} {error}")
        return None
    seconds = time.perf_counter() - begin - evaluating
    found = np.array(posterior.info["callback"])
    print(f"{label:24s} {found[-1, 1]:8.3f} {found[-1, 2]:8.3f} {seconds:8.1f}")
    return label, found


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv, data="mnist.npz")
    problem = digits(arguments.quick) if arguments.data is None else mnist(arguments.data)
    hessians = {"lin-hess": "-"} if arguments.quick else HESSIANS
    families = ["diagonal, natural"] if arguments.quick else list(FAMILIES)
    if arguments.data is not None:
        families.remove("full")
    print(f"{'':24s} {'NLPD':>8s} {'plug-in':>8s} {'seconds':>8s}")
    rules, others = [], []
    for rule, color in zip(("bog",) if arguments.quick else RULES, COLORS):
        for hessian, dashes in hessians.items():
            options = {"rule": rule, "hessian": hessian, "family": "low-rank", "num_samples": problem.num_samples}
            rules.append((curve(problem, f"{rule} {hessian}", options | RULES[rule]), color, dashes))
    for family, color in zip(families, COLORS):
        dashes = "--" if family == "diagonal, moment" else "-"
        others.append((curve(problem, family, FAMILIES[family]), color, dashes))
    save(draw(rules, others, len(problem.test["y"])), arguments.output, "online_networks")


def draw(rules, families, num_test):
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 5.4), sharey=True)
    for axis, curves in ((left, rules), (right, families)):
        for found, color, dashes in curves:
            if found is not None:
                label, scores = found
                style = {"color": color, "ls": dashes, "lw": 1.5, "marker": ".", "ms": 5}
                axis.plot(scores[:, 0], scores[:, 1], label=label, **style)
        axis.set_xlabel("rows absorbed")
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7), numticks=20))
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_locator(NullLocator())
        axis.legend(loc="upper center", bbox_to_anchor=(0.5, -0.13), ncols=2, fontsize=8, handlelength=3.2)
    left.set_title("rules and curvatures (learning rate), low-rank 10")
    right.set_title("families, bong lin-hess")
    left.set_ylabel(f"NLPD of {num_test:,} test rows, linearized, nats a row")
    return figure


if __name__ == "__main__":
    main()
