"""Hyperparameters integrated out, against long runs of NUTS: errors, and seconds with compilation.

python -m benchmarks nested [--data FOLDER] [--cases NAME ...] [--methods NAME ...] [--output FOLDER]
python -m benchmarks nested --draw FOLDER/nested.json

Processor seconds are those of all threads: on a machine with other work, they say more than seconds.

Without ``--data`` (a folder with load.py and the data files) radon and the election are left out. Errors are the
largest of a mean, in standard deviations of the reference, and the largest of a standard deviation's logarithm; scales
are compared by their logarithms, and hyperparameters apart from the others; of this package's posteriors there is the
Pareto k. The references are two chains of NUTS, kept in the output folder, with 20,000 draws each, or what ``DRAWS``
says. Those of the horseshoes are 100,000 draws of Gibbs's sampler: those of NUTS, two chains of 6,000 draws, are off by
0.17 standard deviations for 50 coefficients.

"NUTS" is one chain of 1,000 + 1,000 iterations. BlackJAX's laplace_hmc runs 1,000 iterations of 8 leapfrog steps over
the same hyperparameters, from a step size that is halved until 20 of them accept 60%; x is drawn given each. SVI takes
20,000 steps of Adam, at a rate of 0.01 that falls to a thousandth of it, with a full covariance, rank 8 (AutoLowRank)
or two inverse autoregressive flows (AutoIAF).
"""

from __future__ import annotations

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # LAPACK's threads wait for each other where others are busy

import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from _nested_cases import BUNDLED, WITH_DATA, Hierarchy
from _results import Report, parser
from numpyro.infer import MCMC, NUTS, SVI, Predictive, Trace_ELBO, init_to_median
from numpyro.infer.autoguide import AutoIAFNormal, AutoLowRankMultivariateNormal, AutoMultivariateNormal
from numpyro.infer.util import constrain_fn, initialize_model

from numpyro_rvga import FixedPointVI

CHAINS, WARMUP, DRAWS = 2, 2000, {"radon": 6000}
NUM_DRAWS = 20_000  # of a result
STEPS, RATE = 20_000, 0.01
ITERATIONS, LEAPFROGS = 1000, 8

Draws = dict[str, np.ndarray]


# ---------------------------------------------------------------------- methods
def nuts(case: Hierarchy, num_chains: int = 1, num_warmup: int = 1000, num_draws: int = 1000) -> Draws:
    kernel = NUTS(case.model_of_nuts or case.model, target_accept_prob=case.target_accept_prob)
    options = {"num_chains": num_chains, "chain_method": "sequential", "progress_bar": False}
    chains = MCMC(kernel, num_warmup=num_warmup, num_samples=num_draws, **options)
    chains.run(jax.random.key(1), **case.rows, **case.kwargs)
    return case.summary(chains.get_samples())


class OfPackage:
    """FixedPointVI, whose last posterior is kept."""

    def __init__(self, **options):
        self._options, self.posterior = options, None

    def __call__(self, case: Hierarchy) -> Draws:
        self.posterior = FixedPointVI(case.model, **self._options).run(case.rows, progress_bar=False, **case.kwargs)
        return case.summary(self.posterior.sample_posterior(jax.random.key(0), (NUM_DRAWS,)))


def svi(guide: type, **options) -> Callable[[Hierarchy], Draws]:
    def run(case: Hierarchy) -> Draws:
        chosen = guide(case.model, init_loc_fn=init_to_median, **options)
        adam = numpyro.optim.Adam(lambda i: RATE * 0.001 ** (i / STEPS))
        arguments = {name: jnp.asarray(array) for name, array in case.rows.items()} | dict(case.kwargs)
        found = SVI(case.model, chosen, adam, Trace_ELBO()).run(
            jax.random.key(0), STEPS, progress_bar=False, **arguments
        )
        draws = chosen.sample_posterior(jax.random.key(0), found.params, sample_shape=(NUM_DRAWS,))
        return case.summary(_with_deterministic(case, draws))

    return run


def laplace_hmc(case: Hierarchy) -> Draws:
    import blackjax
    from blackjax.mcmc.laplace_marginal import laplace_marginal_factory

    arguments = dict(case.rows) | dict(case.kwargs)
    start, potential, *_ = initialize_model(
        jax.random.key(0), case.model, model_kwargs=arguments, init_strategy=init_to_median
    )
    phi = {name: value for name, value in start.z.items() if name in case.hyperparameters}
    theta = {name: value for name, value in start.z.items() if name not in phi}

    def log_joint(theta, phi):
        return -potential(theta | phi)

    def sampler(step_size):
        mass = jnp.ones(sum(np.size(value) for value in phi.values()))
        return blackjax.laplace_hmc(log_joint, theta, step_size, mass, LEAPFROGS)

    @jax.jit
    def chain(state, step_size, keys):
        def step(state, key):
            state, info = sampler(step_size).step(key, state)
            return state, (state.position, state.theta_star, info.acceptance_rate)

        return jax.lax.scan(step, state, keys)

    state, step_size = sampler(1.0).init(phi), 0.4
    for number in range(10):
        later, (*_, accepted) = chain(state, step_size, jax.random.split(jax.random.key(number), 20))
        if accepted.mean() > 0.6:
            break
        step_size /= 2
    _, (phis, modes, _) = chain(later, step_size, jax.random.split(jax.random.key(99), ITERATIONS))
    laplace = laplace_marginal_factory(log_joint, theta)
    thetas = jax.lax.map(
        lambda at: laplace.sample_theta(*at), (jax.random.split(jax.random.key(3), ITERATIONS), phis, modes)
    )
    constrained = jax.vmap(lambda sites: constrain_fn(case.model, (), arguments, sites))(thetas | phis)
    return case.summary(_with_deterministic(case, constrained))


def _with_deterministic(case: Hierarchy, draws: Draws) -> Draws:
    given = {name: array for name, array in case.rows.items() if name not in case.outcomes}
    sites = Predictive(case.model, draws, infer_discrete=False)(jax.random.key(0), **given, **case.kwargs)
    return dict(draws) | {name: value for name, value in sites.items() if name not in case.outcomes}


METHODS: dict[str, Callable[[Hierarchy], Draws]] = {
    "one Gaussian": OfPackage(),
    "integrated": OfPackage(integrate="auto"),
    "integrated, importance": OfPackage(integrate="auto", marginal="importance"),
    "NUTS": nuts,
    "laplace_hmc": laplace_hmc,
    "SVI, full covariance": svi(AutoMultivariateNormal),
    "SVI, low rank": svi(AutoLowRankMultivariateNormal, rank=8),
    "SVI, flows": svi(AutoIAFNormal, num_flows=2),
}


# ---------------------------------------------------------------------- errors
def reference(name: str, case: Hierarchy, folder: Path) -> dict[str, np.ndarray]:
    """Means and standard deviations by site."""
    path = folder / f"{name.replace(' ', '_').replace(',', '')}.npz"
    if not path.exists():
        if case.sampler is not None:
            draws = case.summary(case.sampler())
        else:
            draws = nuts(case, CHAINS, WARMUP, DRAWS.get(name, 20_000))
        path.parent.mkdir(parents=True, exist_ok=True)
        moments = {f"{site}|mean": values.mean(0) for site, values in draws.items()}
        np.savez(path, **moments, **{f"{site}|sd": values.std(0) for site, values in draws.items()})
    with np.load(path) as file:
        return dict(file)


def errors(case: Hierarchy, draws: Draws, kept: dict[str, np.ndarray]) -> dict[str, float]:
    """The largest of means and of log standard deviations, of hyperparameters and of the others."""
    found = dict.fromkeys(("mean of h", "sd of h", "mean of x", "sd of x"), 0.0)
    for site, values in draws.items():
        if f"{site}|mean" not in kept:
            continue
        mean, deviation, of = kept[f"{site}|mean"], kept[f"{site}|sd"], "h" if site in case.logs else "x"
        off = np.max(np.abs(values.mean(0) - mean) / deviation)
        found[f"mean of {of}"] = max(found[f"mean of {of}"], float(off))
        ratio = float(np.max(np.abs(np.log(values.std(0) / deviation))))
        found[f"sd of {of}"] = max(found[f"sd of {of}"], ratio)
    return found


def draw(path: Path) -> None:
    import matplotlib.pyplot as plt

    lines = json.loads(path.read_text())["cases"]
    methods = list(dict.fromkeys(line["method"] for line in lines))
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharex=True, layout="constrained")
    for axis, which in zip(axes, ("mean of h", "sd of h")):
        for number, method in enumerate(methods):
            own = [line for line in lines if line["method"] == method and np.isfinite(line[which])]
            x, y = ([line[key] for line in own] for key in ("processor seconds", which))
            axis.loglog(x, np.maximum(y, 2e-3), "osD^vPX*"[number % 8], color=f"C{number}", label=method, alpha=0.8)
        axis.axhline(0.05 if which == "mean of h" else 0.1, color="0.6", lw=0.8, ls="--")
        axis.set_xlabel("processor seconds, with compilation")
        axis.set_ylabel(f"largest error, {which.replace(' of h', '')} of a hyperparameter")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(path.with_suffix(".png"), dpi=150)


def main() -> None:
    options = parser(__doc__, drawn=True)
    options.add_argument("--data", help="folder with load.py")
    options.add_argument("--cases", nargs="*", choices=[*BUNDLED, *WITH_DATA])
    options.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    args = options.parse_args()
    if args.draw:
        draw(args.draw)
        return
    numpyro.enable_x64()
    jax.config.update("jax_enable_compilation_cache", False)
    with_data = {name: lambda made=made: made(args.data) for name, made in WITH_DATA.items()} if args.data else {}
    report = Report(args.output / "nested.json")
    for name, made in (BUNDLED | with_data).items():
        if args.cases and name not in args.cases:
            continue
        case = made()
        kept = reference(name, case, args.output / "nested_references")
        for method in args.methods:
            jax.clear_caches()
            start, began = time.perf_counter(), time.process_time()
            draws = METHODS[method](case)
            spent = {"seconds": time.perf_counter() - start, "processor seconds": time.process_time() - began}
            used = METHODS[method]
            khat = {"khat": used.posterior.khat(case.rows).khat} if isinstance(used, OfPackage) else {}
            report(case=name, method=method, **spent, **errors(case, draws, kept), **khat)
    draw(args.output / "nested.json")


if __name__ == "__main__":
    main()
