"""How much hangs on the learning rate? Test NLPD after one pass: three rules that have one, and BONG, which has none.

A small network learns scikit-learn's handwritten digits. A run that leaves no finite Gaussian is refused, and is shown
by a cross at the top, as are runs that are worse than the top. One panel each for a diagonal family, for a low-rank
one, and for that with the empirical Fisher matrix in place of the exact one. (BBB with one step a row is BOG.)
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import COLORS, WIDTH, parse_arguments, plt, save
from sklearn.datasets import load_digits

from numpyro_rvga import BONG
from numpyro_rvga.metrics import nlpd

HIDDEN = 16
RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
TOP = 3.0  # guessing gives log(10) = 2.3
RULES = {
    "bog": {"rule": "bog"},
    "blr, 1 step a row": {"rule": "blr"},
    "blr, 10 steps": {"rule": "blr", "num_iters": 10},
    "bbb, 10 steps": {"rule": "bbb", "num_iters": 10},
}
PANELS = {
    "diagonal, lin-hess": {"family": "diagonal", "hessian": "lin-hess"},
    "low-rank, lin-hess": {"family": "low-rank", "hessian": "lin-hess"},
    "low-rank, lin-ef": {"family": "low-rank", "hessian": "lin-ef"},
}


def starting_weights() -> np.ndarray:
    rng = np.random.default_rng(0)
    layers = [rng.normal(size=(64, HIDDEN)) / 8, np.zeros(HIDDEN), rng.normal(size=(HIDDEN, 10)) / 4, np.zeros(10)]
    return np.concatenate([layer.ravel() for layer in layers]).astype(np.float32)


START = starting_weights()


def logits(w, X):
    parts = jnp.split(w, np.cumsum([64 * HIDDEN, HIDDEN, HIDDEN * 10]))
    hidden = jnp.tanh(X @ parts[0].reshape(64, HIDDEN) + parts[1])
    return hidden @ parts[2].reshape(HIDDEN, 10) + parts[3]


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(START, 0.3).to_event(1))
    with numpyro.plate("digits", X.shape[0]):
        numpyro.sample("y", dist.Categorical(logits=logits(w, X)), obs=y)


def make_data(num_train: int) -> list[dict[str, np.ndarray]]:
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    parts = order[:num_train], order[num_train:]
    return [{"X": (digits.data[rows] / 16).astype(np.float32), "y": digits.target[rows]} for rows in parts]


def score(method: BONG, train, test) -> float:
    """NaN for a run that is refused."""
    try:
        return nlpd(method.run(train, progress_bar=False), test, method="plugin")
    except ValueError:
        return np.nan


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    train, test = make_data(30 if arguments.quick else 600)
    rates = RATES[2:3] if arguments.quick else RATES
    panels = dict(list(PANELS.items())[1:2]) if arguments.quick else PANELS
    rules = dict(list(RULES.items())[:2]) if arguments.quick else RULES
    print(f"{len(START)} weights, {len(train['y'])} rows; plug-in NLPD of {len(test['y'])} test rows")
    results = {}
    for title, options in panels.items():
        bong = score(BONG(model, **options), train, test)
        print(f"\n{title + ', learning rate':34s}" + " ".join(f"{rate:8g}" for rate in rates))
        print(f"  {'bong':32s}{bong:8.3f}")
        scores = {}
        for name, rule in rules.items():
            method = BONG(model, **rule, **options)
            found = np.array([score(method.with_learning_rate(rate), train, test) for rate in rates])
            print(f"  {name:32s}" + " ".join(f"{value:8.3g}" if value > TOP else f"{value:8.3f}" for value in found))
            scores[name] = found
        results[title] = bong, scores
    save(draw(results, np.array(rates)), arguments.output, "learning_rates")


def draw(results, rates):
    figure, axes = plt.subplots(1, len(results), figsize=(WIDTH, 3.6), sharey=True, squeeze=False)
    for axis, (title, (bong, scores)) in zip(axes[0], results.items()):
        axis.axhline(bong, color="black", lw=1.6, label="bong (has none)")
        for i, ((name, found), marker) in enumerate(zip(scores.items(), "osD^")):
            fine = found < TOP
            style = {"color": COLORS[i], "lw": 1.4, "label": name}
            axis.plot(rates, np.where(fine, found, np.nan), f"{marker}-", ms=4, **style)
            axis.plot(rates[~fine], np.full(sum(~fine), TOP + 0.1 * i), "x", color=COLORS[i], ms=6, mew=1.8)
        if any(np.any(~(found < TOP)) for found in scores.values()):
            axis.text(min(rates), TOP + 0.15, "worse, or refused:", fontsize=8, va="center")
        axis.set_title(f"{title}\nbong: {bong:.2f}", fontsize=9)
        axis.set(xscale="log", ylim=(0, TOP + 0.4), xlim=(0.8 * min(rates), 1.4 * max(rates)), xlabel="learning rate")
    axes[0, 0].set_ylabel("test NLPD (plug-in), nats a row")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
    return figure


if __name__ == "__main__":
    main()
