"""Expectations of log-likelihoods without a closed form, in three parts:

- rules: microseconds a row beside the closed form of a logistic row, by few nodes, and for value and gradient at one
  node, which no rule is below; and errors against dense quadrature;
- runs: whole runs of likelihoods that are hard, and of the gallery of observation families: RVGA, FixedPointVI and NUTS
  (500 + 500 draws), in processor seconds, and bounds beside those of draws of theta;
- mixtures: 24 data sets with outliers, the bound of FixedPointVI beside the best of L-BFGS's from ten starts.

python -m benchmarks expectations [--parts PART ...] [--rows N] [--gallery-rows N] [--draws N]
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from _expectation_cases import LIKELIHOODS, Case, cases, dense, outliers, with_outliers
from _mixture_bound import best_of_starts, bound_of
from _results import Report, parser
from bong import medians
from jax import Array
from numpyro.infer import MCMC, NUTS
from numpyro.infer.util import potential_energy, unconstrain_fn

from numpyro_rvga import RVGA, FixedPointVI, Posterior
from numpyro_rvga.core.expectations.closed_forms import Logistic, logistic_mixture
from numpyro_rvga.core.expectations.ladder import expectations
from numpyro_rvga.core.jaxprs.symbolic import factorize

REPEATS = 7
CLOSED = "logistic, closed form"
PARTS = ("rules", "runs", "mixtures")
NUM_WARMUP, NUM_TIMED = 500, 500
NUM_OURS = 10_000
NUM_DRAWS, NUM_EVALUATIONS = 100_000, 20_000_000  # of theta, at most, and times the rows
BATCH = 100
SEARCH_NODES, DENSE_NODES = 8, 24  # along each axis of a mixture's row: of L-BFGS, and of the comparison
NUM_STARTS = 10


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
    rules, few, node = [], {}, {}
    for phi, size in LIKELIHOODS:
        read = as_read(phi, size)
        rules.append((phi, size, jax.jit(expectations(read, size))))
        few[phi.__name__] = size, jax.jit(expectations(read, size, effort="few"))
        node[phi.__name__] = size, jax.jit(jax.vmap(jax.value_and_grad(read)))
    for deviation in (0.01, 0.1, 1.0):
        means, covariances, outcomes = rows_of(1, deviation, count)
        ones = jnp.ones(count)
        closed = jax.jit(lambda m, s, y, ones=ones: jax.vmap(logistic_mixture)(m, s, Logistic(y, ones, ones, ones)))
        steps = {CLOSED: partial(closed, means, covariances, outcomes)}
        steps |= {phi.__name__: partial(expect, *rows_of(size, deviation, count)) for phi, size, expect in rules}
        steps |= {f"few {n}": partial(expect, *rows_of(size, deviation, count)) for n, (size, expect) in few.items()}
        for name, (size, evaluate) in node.items():
            at, _, y = rows_of(size, deviation, count)
            steps[f"node {name}"] = partial(evaluate, at, y)
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
                ratio_of_one_node=shown[f"node {phi.__name__}"] / shown[CLOSED],
                error=float(jnp.max(jnp.abs(found[0] - dense(phi, *some)))),
                estimated_error=float(jnp.max(estimates)),
            )


def run_twice(method: Callable, case: Case) -> tuple:
    """The posterior, and processor seconds of both runs."""
    method, seconds = method(case.model), []
    for _ in range(2):
        start = time.process_time()
        posterior = method.run(case.data, progress_bar=False, **case.options)
        jax.block_until_ready(posterior.mean)
        seconds.append(time.process_time() - start)
    return posterior, *seconds


def run_nuts(case: Case, num_draws: int) -> tuple[dict[str, np.ndarray], float]:
    """Draws, and processor seconds of compilation, warmup and the first NUM_TIMED of them."""
    mcmc = MCMC(NUTS(case.model), num_warmup=NUM_WARMUP, num_samples=NUM_TIMED, progress_bar=False)
    start, draws, seconds = time.process_time(), [], []
    for _ in range(-(-max(num_draws, NUM_TIMED) // NUM_TIMED)):
        mcmc.run(jax.random.key(0), **case.data, **case.options)
        draws.append(jax.device_get(mcmc.get_samples()))
        seconds.append(time.process_time() - start)
        mcmc.post_warmup_state = mcmc.last_state
    return {name: np.concatenate([part[name] for part in draws]) for name in draws[0]}, seconds[0]


def bound_by_draws(case: Case, posterior: Posterior) -> tuple[float, float]:
    """The mean of log p(y, theta) - log q(theta) over draws of q, in unconstrained space and through NumPyro's own
    densities, and its standard error."""
    num_rows = len(next(iter(case.data.values())))
    draws = posterior.sample_posterior(jax.random.key(2), (min(NUM_DRAWS, NUM_EVALUATIONS // num_rows),))
    arguments = {**jax.tree.map(jnp.asarray, case.data), **case.options}

    def log_joint(sites: dict[str, Array]) -> Array:
        return -potential_energy(case.model, (), arguments, unconstrain_fn(case.model, (), arguments, sites))

    values = jax.jit(partial(jax.lax.map, log_joint, batch_size=BATCH))(draws) - posterior.log_prob(draws)
    return float(jnp.mean(values)), float(jnp.std(values) / np.sqrt(len(values)))


def compare_runs(num_rows: int, num_draws: int, report: Report) -> None:
    for name, case in cases(num_rows).items():
        draws, seconds = run_nuts(case, num_draws)
        for method in (RVGA, FixedPointVI):
            posterior, cold, warm = run_twice(method, case)
            ours = posterior.sample_posterior(jax.random.key(1), (NUM_OURS,))
            apart = [_apart(np.asarray(ours[n]), x) for n, x in draws.items()]
            by_draws, noise = bound_by_draws(case, posterior)
            report(
                case=name,
                method=method.__name__,
                nuts=seconds,
                cold=cold,
                warm=warm,
                nuts_by_cold=seconds / cold,
                nuts_by_warm=seconds / warm,
                worst_mean_in_sd=max(apart),
                elbo=posterior.elbo,
                elbo_error=posterior.info["elbo_error"],
                elbo_by_draws=by_draws,
                standard_error=noise,
            )


def _apart(ours: np.ndarray, draws: np.ndarray) -> float:
    """The largest difference of means, in standard deviations of the draws; constants are left out."""
    deviation = draws.std(axis=0)
    difference = np.abs(ours.mean(axis=0) - draws.mean(axis=0))[deviation > 1e-9] / deviation[deviation > 1e-9]
    return float(difference.max())


def compare_mixtures(report: Report) -> None:
    for num_rows, seed in product((40, 400), range(12)):
        data = with_outliers(num_rows, seed)
        dense_bound = bound_of(data, DENSE_NODES)
        posterior = FixedPointVI(outliers).run(data, progress_bar=False)
        ours = float(dense_bound(posterior.mean, jnp.linalg.cholesky(posterior.covariance)))
        best = float(dense_bound(*best_of_starts(data, NUM_STARTS, SEARCH_NODES)))
        report(num_rows=num_rows, seed=seed, below=best - ours, elbo_off=posterior.elbo - ours)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--parts", nargs="*", choices=PARTS, default=list(PARTS), help="default: all")
    options.add_argument("--rows", type=int, default=10_000, help="of the rules")
    options.add_argument("--gallery-rows", type=int, default=2000, help="of the gallery's runs")
    options.add_argument("--draws", type=int, default=NUM_TIMED, help="of NUTS, for comparisons of means")
    args = options.parse_args()
    numpyro.enable_x64()
    measure = {
        "rules": partial(measure_rules, args.rows),
        "runs": partial(compare_runs, args.gallery_rows, args.draws),
        "mixtures": compare_mixtures,
    }
    for part in args.parts:
        measure[part](Report(args.output / f"expectations_{part}.json"))


if __name__ == "__main__":
    main()
