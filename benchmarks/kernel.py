"""The NumPyro path against a hand-written scan of the same algorithm: microseconds a row, of 54 columns.

python -m benchmarks kernel [--rows N] [--float32]
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser
from bong import medians

from numpyro_rvga import RVGA
from numpyro_rvga.core.expectations.closed_forms import MIXTURE_SCALES, MIXTURE_WEIGHTS

SIZE = 54


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def make_data(n: int, p: int, dtype) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, p))
    w = rng.normal(size=p) / np.sqrt(p)
    return {"X": X.astype(dtype), "y": (rng.random(n) < 1 / (1 + np.exp(-3 * X @ w))).astype(dtype)}


@jax.jit
def hand_written(mean, covariance, X, y):
    """One row at a time: the two unknowns alpha and nu of the paper, damped until the row's bound stops rising."""
    weights, scales = (jnp.asarray(v, X.dtype) for v in (MIXTURE_WEIGHTS, MIXTURE_SCALES))

    def bound(m, v, m0, v0, target):
        root = jnp.sqrt(1 + scales**2 * v)
        u = scales * m / root
        cdf, pdf = jax.scipy.special.ndtr(u), jnp.exp(-0.5 * u * u) / jnp.sqrt(2 * jnp.pi)
        softplus = jnp.sum(weights * (m * cdf + root / scales * pdf))
        gradient, curvature = target - jnp.sum(weights * cdf), jnp.sum(weights * scales / root * pdf)
        divergence = 0.5 * (v / v0 - 1 - jnp.log(v / v0) + (m - m0) ** 2 / v0)
        return target * m - softplus - divergence, gradient, curvature

    def row(carry, xy):
        mean, covariance = carry
        x, target = xy
        spread = covariance @ x
        m0, v0 = x @ mean, x @ spread

        def improve(state):
            count, m, v, value, gradient, curvature, _ = state
            to_v, to_m = v0 / (1 + v0 * curvature), -(m - m0 - v0 * gradient) / (1 + v0 * curvature)

            def shorten(trial):
                t = 0.5 * trial[0]
                m_t, v_t = m + t * to_m, 1 / ((1 - t) / v + t / to_v)
                return (t, m_t, v_t, *bound(m_t, v_t, m0, v0, target))

            trial = (1.0, m + to_m, to_v, *bound(m + to_m, to_v, m0, v0, target))
            trial = jax.lax.while_loop(lambda s: ~(s[3] >= value - 1e-12) & (s[0] > 1e-6), shorten, trial)
            return (count + 1, *trial[1:], jnp.abs(trial[3] - value) < 1e-9)

        state = (0, m0, v0, *bound(m0, v0, m0, v0, target), False)
        *_, gradient, curvature, _ = jax.lax.while_loop(lambda s: (s[0] < 100) & ~s[-1], improve, state)
        shrink = curvature / (1 + v0 * curvature)
        return (mean + spread * gradient, covariance - jnp.outer(spread, spread) * shrink), None

    return jax.lax.scan(row, (mean, covariance), (X, y))[0]


def run(rows: dict, **options) -> Callable:
    rvga = RVGA(model, shuffle=False, certify=False, **options)
    return lambda: rvga.run(rows, progress_bar=False).scale


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=100_000)
    options.add_argument("--float32", action="store_true")
    args = options.parse_args()
    if not args.float32:
        numpyro.enable_x64()
    dtype = np.float32 if args.float32 else np.float64
    rows = make_data(args.rows, SIZE, dtype)
    X, y = jnp.asarray(rows["X"]), jnp.asarray(rows["y"])
    mean, covariance = jnp.zeros(SIZE, dtype), 9 * jnp.eye(SIZE, dtype=dtype)
    candidates = {
        "hand-written scan": lambda: hand_written(mean, covariance, X, y),
        "RVGA, block_size=1": run(rows, block_size=1),
        "RVGA, block_size=128": run(rows, block_size=128),
        "RVGA": run(rows),
    }
    found = medians(candidates, repeats=5)
    report = Report(args.output / "kernel.json")
    for name, milliseconds in found.items():
        ratio = milliseconds / found["hand-written scan"]
        report(method=name, ratio=ratio, microseconds_a_row=1e3 * milliseconds / args.rows, dtype=dtype.__name__)


if __name__ == "__main__":
    main()
