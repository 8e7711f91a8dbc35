"""Expectations of log-likelihoods without a closed form: microseconds a row, beside the closed form of a logistic row,
and errors against dense quadrature. Then whole runs of likelihoods that are hard: RVGA, FixedPointVI and NUTS.

python -m benchmarks expectations [--rows N] [--no-nuts]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _results import Report, parser
from bong import medians
from jax import Array
from numpyro.infer import MCMC, NUTS

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.core.expectations.by_nodes import hermite_rule
from numpyro_rvga.core.expectations.closed_forms import Logistic, logistic_mixture
from numpyro_rvga.core.expectations.ladder import expectations
from numpyro_rvga.core.jaxprs.symbolic import factorize

REPEATS = 7
CLOSED = "logistic, closed form"
DENSE = {1: 120, 2: 60, 3: 24}  # nodes along each axis; of rows with kinks these are rough


def negative_binomial(u: Array, y: Array) -> Array:
    return dist.NegativeBinomial2(jnp.exp(u[0]), jnp.exp(u[1])).log_prob(y)


def student_t(u: Array, y: Array) -> Array:
    return dist.StudentT(jnp.exp(u[2]), u[0], jnp.exp(u[1])).log_prob(y)


def beta(u: Array, y: Array) -> Array:
    mean, k = jax.nn.sigmoid(u[0]), jnp.exp(u[1])
    return dist.Beta(mean * k, (1 - mean) * k).log_prob((y + 0.5) / 12)


def gamma(u: Array, y: Array) -> Array:
    return dist.Gamma(jnp.exp(u[1]), jnp.exp(u[1] - u[0])).log_prob(y + 0.5)


def zero_inflated_poisson(u: Array, y: Array) -> Array:
    return dist.ZeroInflatedPoisson(jax.nn.sigmoid(u[1]), jnp.exp(u[0])).log_prob(y)


def tanh_network(u: Array, y: Array) -> Array:
    return dist.Normal(jnp.tanh(u[0]), 0.5).log_prob(y)


def absolute_loss(u: Array, y: Array) -> Array:
    return -jnp.abs(y - u[0]) / 0.5


def insensitive_loss(u: Array, y: Array) -> Array:
    return -jnp.maximum(0.0, jnp.abs(y - u[0]) - 0.3) / 0.2


def quantile_regression(u: Array, y: Array) -> Array:
    return dist.AsymmetricLaplaceQuantile(u[0], jnp.exp(u[1]), 0.8).log_prob(y)


def categorical(u: Array, y: Array) -> Array:
    return dist.Categorical(logits=jnp.concatenate([jnp.zeros(1), u])).log_prob(jnp.minimum(y, 2.0).astype(int))


def ordered_logistic(u: Array, y: Array) -> Array:
    """Of NumPyro's OrderedLogistic with cutpoints u[1] and u[1] + exp(u[2]), where it does not underflow to -inf."""
    gap = jnp.exp(u[2])
    low, high = u[1] - u[0], u[1] - u[0] + gap
    middle = jax.nn.log_sigmoid(high) + jax.nn.log_sigmoid(-low) + jnp.log(-jnp.expm1(-gap))
    return jnp.select([y < 1, y < 2], [jax.nn.log_sigmoid(low), middle], jax.nn.log_sigmoid(-high))


def mixture_for_outliers(u: Array, y: Array) -> Array:
    parts = jnp.stack([jax.nn.log_sigmoid(-u[2]), jax.nn.log_sigmoid(u[2])])
    scales = jnp.stack([jnp.exp(u[1]), jnp.full_like(u[1], 10.0)])
    return jax.nn.logsumexp(parts + dist.Normal(u[0], scales).log_prob(y))


LIKELIHOODS = [
    (negative_binomial, 2),
    (student_t, 3),
    (beta, 2),
    (gamma, 2),
    (zero_inflated_poisson, 2),
    (tanh_network, 1),
    (absolute_loss, 1),
    (insensitive_loss, 1),
    (quantile_regression, 2),
    (categorical, 2),
    (ordered_logistic, 3),
    (mixture_for_outliers, 3),
]
SIZES = {phi.__name__: size for phi, size in LIKELIHOODS}


def dense(phi: Callable, means: Array, covariances: Array, outcomes: Array) -> Array:
    z, weights = hermite_rule(means.shape[1], DENSE[means.shape[1]])

    def one(row):
        mean, covariance, y = row
        points = mean + z @ jnp.linalg.cholesky(covariance).T
        return weights @ jax.vmap(lambda u: phi(u, y))(points)

    return jax.jit(partial(jax.lax.map, one))((means, covariances, outcomes))


def rows_of(size: int, deviation: float, count: int) -> tuple[Array, Array, Array]:
    rng = np.random.default_rng(0)
    root = deviation * np.tril(np.full((size, size), 0.3)) + 0.7 * deviation * np.eye(size)
    covariances = np.broadcast_to(root @ root.T, (count, size, size))
    outcomes = rng.poisson(2.0, count).astype(float)
    return tuple(map(jnp.asarray, (rng.normal(size=(count, size)), covariances, outcomes)))


def as_read(phi: Callable, size: int) -> Callable:
    """The density as it is read from a model, whose predictors come in an order of their own."""
    split = factorize(phi, jnp.zeros(size), jnp.zeros(()))
    turned = jax.jacobian(lambda u: split.predictors(u, (jnp.zeros(()),)))(jnp.zeros(size))
    if split.num_predictors != size:
        return phi
    return lambda u, y: split.density(turned @ u, split.constants((y,)))


def measure_rules(count: int, report: Report) -> None:
    rules, few = [], {}
    for phi, size in LIKELIHOODS:
        read = as_read(phi, size)
        rules.append((phi, size, jax.jit(expectations(read, size))))
        few[phi.__name__] = jax.jit(expectations(read, size, effort="few"))
    for deviation in (0.01, 0.1, 1.0):
        means, covariances, outcomes = rows_of(1, deviation, count)
        ones = jnp.ones(count)
        closed = jax.jit(lambda m, s, y, ones=ones: jax.vmap(logistic_mixture)(m, s, Logistic(y, ones, ones, ones)))
        steps = {CLOSED: partial(closed, means, covariances, outcomes)}
        steps |= {phi.__name__: partial(expect, *rows_of(size, deviation, count)) for phi, size, expect in rules}
        steps |= {f"few {n}": partial(few[n], *rows_of(size, deviation, count)) for n, size in SIZES.items()}
        milliseconds = medians(steps, REPEATS)
        shown = {name: 1e3 * value / count for name, value in milliseconds.items()}
        report(likelihood=CLOSED, deviation=deviation, microseconds_a_row=shown[CLOSED])
        for phi, size, expect in rules:
            some = tuple(x[:64] for x in rows_of(size, deviation, count))
            found, estimates = expect(*some)
            report(
                likelihood=phi.__name__,
                deviation=deviation,
                microseconds_a_row=shown[phi.__name__],
                ratio=shown[phi.__name__] / shown[CLOSED],
                ratio_by_few_nodes=shown[f"few {phi.__name__}"] / shown[CLOSED],
                error=float(jnp.max(jnp.abs(found[0] - dense(phi, *some)))),
                estimated_error=float(jnp.max(estimates)),
            )


# ---------------------------------------------------------------------- whole runs
def counts(X, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Exponential(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ slopes), concentration), obs=y)


def outliers(x, y=None):
    mean = numpyro.sample("a", dist.Normal(0, 5)) + numpyro.sample("b", dist.Normal(0, 5)) * x
    scale, share = numpyro.sample("scale", dist.HalfNormal(1)), numpyro.sample("share", dist.Beta(1, 9))
    parts = dist.Categorical(jnp.stack([1 - share, share]))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.MixtureGeneral(parts, [dist.Normal(mean, scale), dist.Normal(mean, 10.0)]), obs=y)


def quantile(x, y=None):
    mean = numpyro.sample("a", dist.Normal(0, 5)) + numpyro.sample("b", dist.Normal(0, 5)) * x
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.AsymmetricLaplaceQuantile(mean, scale, 0.8), obs=y)


def absolute(x, y=None):
    mean = numpyro.sample("a", dist.Normal(0, 5)) + numpyro.sample("b", dist.Normal(0, 5)) * x
    with numpyro.plate("rows", len(x)):
        numpyro.factor("loss", -jnp.abs(y - mean) / 0.5)


def cases() -> dict[str, tuple[Callable, dict[str, np.ndarray]]]:
    rng = np.random.default_rng(0)
    X = 0.3 * rng.normal(size=(20_190, 10))
    x = rng.normal(size=500)
    y = 1 + 0.5 * x + 0.5 * rng.laplace(size=500)
    far = 1 + 0.5 * x + 0.3 * rng.normal(size=500) + 10 * rng.normal(size=500) * (rng.random(500) < 0.05)
    return {
        "negative binomial, 20,190 rows of 10": (
            counts,
            {"X": X, "y": rng.negative_binomial(2, 2 / (2 + np.exp(0.5 * X.sum(axis=1))))},
        ),
        "mixture for outliers, 500 rows": (outliers, {"x": x, "y": far}),
        "quantile regression, 500 rows": (quantile, {"x": x, "y": y}),
        "absolute loss, 500 rows": (absolute, {"x": x, "y": y}),
    }


def run_twice(method: Callable, model: Callable, data: dict) -> tuple:
    method, seconds = method(model), []
    for _ in range(2):
        start = time.perf_counter()
        posterior = method.run(data, progress_bar=False)
        seconds.append(time.perf_counter() - start)
    return posterior, *seconds


def run_nuts(model: Callable, data: dict) -> tuple[dict[str, np.ndarray], float]:
    start = time.perf_counter()
    mcmc = MCMC(NUTS(model), num_warmup=500, num_samples=1000, progress_bar=False)
    mcmc.run(jax.random.key(0), **data)
    return {name: np.asarray(x) for name, x in mcmc.get_samples().items()}, time.perf_counter() - start


def compare_runs(report: Report, *, nuts: bool) -> None:
    for name, (model, data) in cases().items():
        draws, seconds = run_nuts(model, data) if nuts else ({}, None)
        if nuts:
            report(case=name, method="NUTS", cold=seconds)
        for method in (RVGA, FixedPointVI):
            posterior, cold, warm = run_twice(method, model, data)
            facts = {"elbo": posterior.elbo, "elbo_error": posterior.info["elbo_error"]}
            if nuts:
                ours = posterior.sample_posterior(jax.random.key(1), (4000,))
                apart = [np.abs(np.mean(ours[n], axis=0) - x.mean(axis=0)) / x.std(axis=0) for n, x in draws.items()]
                facts["worst_mean_in_sd"] = float(max(np.max(x) for x in apart))
            report(case=name, method=method.__name__, cold=cold, warm=warm, **facts)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--rows", type=int, default=10_000)
    options.add_argument("--no-nuts", action="store_true")
    args = options.parse_args()
    numpyro.enable_x64()
    report = Report(args.output / "expectations.json")
    measure_rules(args.rows, report)
    compare_runs(report, nuts=not args.no_nuts)


if __name__ == "__main__":
    main()
