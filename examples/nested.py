"""A spread integrated out: 50 groups of three binary rows, as one Gaussian, a mixture of Gaussians and NUTS see them.

Three rows tell little about a group, and 50 groups little about the spread of their intercepts. Its posterior is wide
and skewed, and one Gaussian is far too sure of it. A mixture is not: it has a Gaussian at each of many values of the
spread, weighted by the data.
"""

from __future__ import annotations

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.handlers import reparam
from numpyro.infer import MCMC, NUTS
from numpyro.infer.reparam import LocScaleReparam
from plots import COLORS, REFERENCE, RVGA_COLOR, TRUTH, WIDTH, intervals, parse_arguments, plt, save

from numpyro_rvga import FixedPointVI

ROWS = 3  # of each group
TRUE_TAU = 1.5
SINGLE, INTEGRATED = "one Gaussian", "tau integrated out"
COLOR = {SINGLE: COLORS[1], INTEGRATED: RVGA_COLOR, "NUTS": REFERENCE}


def model(group, y=None, num_groups=None):
    center = numpyro.sample("center", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("groups", num_groups):
        intercept = numpyro.sample("intercept", dist.Normal(center, tau))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Bernoulli(logits=intercept[group]), obs=y)


def make_data(num_groups: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(50)
    group = np.repeat(np.arange(num_groups), ROWS)
    intercept = 0.3 + TRUE_TAU * rng.normal(size=num_groups)
    return {"group": group, "y": (rng.random(len(group)) < 1 / (1 + np.exp(-intercept[group]))).astype(int)}


def run_nuts(data, num_groups: int, length: int) -> tuple[dict[str, np.ndarray], int]:
    """Draws, and how many of them diverged. Intercepts are not centered: NUTS is caught in the funnel otherwise."""
    kernel = NUTS(reparam(model, config={"intercept": LocScaleReparam(0)}))
    mcmc = MCMC(kernel, num_warmup=length // 10, num_samples=length, progress_bar=False)
    mcmc.run(jax.random.key(0), **data, num_groups=num_groups)
    return mcmc.get_samples(), int(mcmc.get_extra_fields()["diverging"].sum())


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    numpyro.enable_x64()
    num_groups = 15 if arguments.quick else 50
    data = make_data(num_groups)
    draws, seconds = {}, {}
    for name, integrate in ((SINGLE, False), (INTEGRATED, "auto")):
        start = time.perf_counter()
        posterior = FixedPointVI(model, integrate=integrate).run(data, num_groups=num_groups, progress_bar=False)
        seconds[name] = time.perf_counter() - start
        draws[name] = posterior.sample_posterior(jax.random.key(1), (40_000,))
        print(f"{name:20s} bound {posterior.elbo:9.3f} nats, Pareto k {posterior.khat(data).khat:.2f}")
    start = time.perf_counter()
    draws["NUTS"], diverged = run_nuts(data, num_groups, 100 if arguments.quick else 20_000)
    seconds["NUTS"] = time.perf_counter() - start
    effective = effective_sample_size(np.asarray(draws["NUTS"]["tau"])[None])
    print(f"{'NUTS':20s} {len(draws['NUTS']['tau']):,} draws, {effective:,.0f} effective of tau, {diverged} diverged\n")

    draws = {name: {site: np.asarray(found[site]) for site in ("tau", "intercept")} for name, found in draws.items()}
    print(f"{'':20s} {'tau':>16s} {'90% interval':>16s} {'log tau':>16s} {'seconds':>8s}")
    for name, found in draws.items():
        tau, log_tau = found["tau"], np.log(found["tau"])
        low, high = np.quantile(tau, [0.05, 0.95])
        print(
            f"{name:20s} {f'{tau.mean():.2f} +- {tau.std():.2f}':>16s} {f'{low:.2f} to {high:.2f}':>16s} "
            f"{f'{log_tau.mean():.2f} +- {log_tau.std():.2f}':>16s} {seconds[name]:8.1f}"
        )
    save(draw(draws, data["y"].reshape(-1, ROWS).sum(axis=1)), arguments.output, "nested")


def draw(draws, ones):
    """:param ones: how many of each group's rows are one: groups that have as many have the same posterior."""
    figure = plt.figure(figsize=(WIDTH, 3.3))
    axis, panel = figure.subplots(1, 2, width_ratios=[1.7, 1])
    bins = np.linspace(0, 2.5, 51)
    for name in ("NUTS", SINGLE, INTEGRATED):
        style = {"alpha": 0.35} if name == "NUTS" else {"histtype": "step", "lw": 1.8}
        axis.hist(draws[name]["tau"], bins, density=True, color=COLOR[name], **style)
    axis.axvline(TRUE_TAU, color=TRUTH, lw=0.8, ls="--")
    axis.set_xlim(0, 2.5)
    axis.set_xlabel("tau, the spread of the groups' intercepts (log odds)")
    axis.set_ylabel("posterior density (per log odds)")

    counts, first = np.unique(ones, return_index=True)
    for name, shift in (("NUTS", -0.2), (SINGLE, 0), (INTEGRATED, 0.2)):
        probability = 1 / (1 + np.exp(-draws[name]["intercept"][:, first]))
        intervals(panel, counts + shift, *np.quantile(probability, [0.05, 0.5, 0.95], axis=0), COLOR[name])
    panel.set_xticks(counts, [f"{count} of {ROWS}" for count in counts])
    panel.set_ylim(0, 1)
    panel.set_xlabel("rows of the group that are one")
    panel.set_ylabel("probability, median and 90% interval")
    handles = [plt.Line2D([], [], color=COLOR[name], lw=3, label=name) for name in (SINGLE, INTEGRATED, "NUTS")]
    handles.append(plt.Line2D([], [], color=TRUTH, lw=0.8, ls="--", label="truth"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


if __name__ == "__main__":
    main()
