"""A stream that drifts: logistic regression whose coefficients move, against one that stands still and against SGD.

Each row is predicted before it is seen, and its log predictive density is the score. What has to be chosen (how fast
the coefficients move, SGD's learning rate) is chosen on the first tenth of the stream. By default the stream is made
up: coefficients that wander, and change sign in the middle. With ``--data FOLDER`` it is the electricity market
of New South Wales, 45,312 half hours in their order, where the question is whether the price is above its average of
the last day; there, labels often repeat, and a guess that knows only this is shown too.
"""

from __future__ import annotations

import time

import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import COLORS, REFERENCE, WIDTH, parse_arguments, plt, save
from scipy.special import expit, log_expit

from numpyro_rvga import BONG, OrnsteinUhlenbeck, RandomWalk

SCALES = (0.01, 0.03, 0.1, 0.3, 1.0)
DECAYS = (0.9999, 0.999, 0.99, 0.97, 0.9)
RATES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
STANDING = "static"
LINES = {"random walk": ("-", 2.6), "Ornstein-Uhlenbeck": ("--", 1.2), "repeats": (":", 1.4)}  # the first two coincide


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def make_data(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    w = rng.normal(size=7) + np.cumsum(0.01 * rng.normal(size=(num_rows, 7)), axis=0)
    w[num_rows // 2 :, 1:] *= -1
    X = rng.normal(size=(num_rows, 6)) + 2 * rng.normal(size=(num_rows, 1))  # what they share makes them collinear
    return X, (rng.random(num_rows) < expit(w[:, 0] + (X * w[:, 1:]).sum(1))).astype(np.uint8)


def standardized(X: np.ndarray, start: int) -> np.ndarray:
    """By the first rows; columns that are constant there are only shifted. A column of ones comes first."""
    scale = X[:start].std(0)
    X = (X - X[:start].mean(0)) / np.where(scale > 1e-6, scale, 1.0)
    return np.column_stack([np.ones(len(X)), X]).astype(np.float32)


def bong(data: dict[str, np.ndarray], dynamics=None) -> np.ndarray:
    method = BONG(model, hessian="auto", dynamics=dynamics)
    return method.run(data, prequential="linearized", progress_bar=False).info["log_predictive"]


def sgd(data: dict[str, np.ndarray], rate: float) -> np.ndarray:
    w, found = np.zeros(data["X"].shape[1]), np.zeros(len(data["y"]))
    for i, (x, sign) in enumerate(zip(data["X"].astype(float), 2.0 * data["y"] - 1)):
        found[i] = log_expit(sign * (x @ w))
        w += rate * sign * expit(-sign * (x @ w)) * x
    return found


def repeats(y: np.ndarray) -> np.ndarray:
    """Log probability of each label by how often a label was that of the row before, so far."""
    same = np.concatenate([[0.0], y[1:] == y[:-1]])
    share = (np.cumsum(same) - same + 1) / (np.arange(len(y)) + 2)
    return np.log(np.where(same == 1, share, 1 - share))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv, data="stream__elec2.npz")
    if arguments.data is None:
        X, y = make_data(1000 if arguments.quick else 20_000)
    else:
        with np.load(arguments.data / "stream__elec2.npz") as file:
            X, y = file["X"], file["y"]
    start = len(y) // 10
    data = {"X": standardized(X, start), "y": y}
    first = {name: array[:start] for name, array in data.items()}
    shorten = (lambda grid: grid[1:4:2]) if arguments.quick else (lambda grid: grid)

    methods = {
        STANDING: (lambda rows, _: bong(rows), (None,)),
        "random walk": (lambda rows, scale: bong(rows, RandomWalk(scale)), shorten(SCALES)),
        "Ornstein-Uhlenbeck": (lambda rows, decay: bong(rows, OrnsteinUhlenbeck(decay)), shorten(DECAYS)),
        "SGD": (sgd, shorten(RATES)),
    }
    scores, labels = {}, {}
    print(f"{'':22s} {'chosen':>8s} {'nats per row':>13s} {'errors':>8s} {'seconds':>8s}   (after the first tenth)")
    for name, (run, grid) in methods.items():
        chosen = grid[0] if len(grid) == 1 else max(grid, key=lambda value: run(first, value).mean())
        begin = time.perf_counter()
        scores[name] = run(data, chosen)
        seconds = time.perf_counter() - begin
        labels[name] = name if chosen is None else f"{name} ({chosen:g})"
        report(name, "" if chosen is None else f"{chosen:g}", scores[name][start:], seconds)
    if arguments.data is not None:
        scores["repeats"], labels["repeats"] = repeats(y), "labels repeat"
        report("labels repeat", "", scores["repeats"][start:])
    save(draw(scores, labels, start), arguments.output, "drifting_stream")


def report(name: str, chosen: str, scores: np.ndarray, seconds: float | None = None) -> None:
    errors = np.mean(scores < np.log(0.5))
    took = "" if seconds is None else f"{seconds:8.1f}"
    print(f"{name:22s} {chosen:>8s} {scores.mean():13.4f} {errors:8.3f} {took:>8s}")


def draw(scores, labels, start):
    figure, (above, below) = plt.subplots(2, 1, figsize=(WIDTH, 5), sharex=True, height_ratios=[1.2, 1])
    colors = dict(zip(scores, (REFERENCE, COLORS[0], COLORS[2], COLORS[1], COLORS[3])))
    length = len(scores[STANDING])
    window = max(length // 40, 20)
    rows = np.arange(start, length)
    after = rows[rows >= start + window]
    for name, score in scores.items():
        total = np.concatenate([[0.0], np.cumsum(score)])
        line, width = LINES.get(name, ("-", 1.4))
        style = {"color": colors[name], "lw": width, "ls": line}
        above.plot(after, (total[after + 1] - total[after + 1 - window]) / window, label=labels[name], **style)
        if name not in (STANDING, "repeats"):
            below.plot(rows, np.cumsum((score - scores["SGD"])[start:]), **style)
    above.axhline(np.log(0.5), color=REFERENCE, lw=0.8, ls=":")
    above.text(start, np.log(0.5), "a coin", va="bottom", fontsize=8, color=REFERENCE)
    above.set_ylabel(f"log predictive density,\nmean of {window:,} rows")
    below.set(ylabel="nats gained over SGD,\nsince the first tenth", xlabel="row of the stream", xlim=(start, length))
    below.xaxis.set_major_formatter("{x:,.0f}")
    figure.legend(loc="outside lower center", ncols=len(scores))
    return figure


if __name__ == "__main__":
    main()
