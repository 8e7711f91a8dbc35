"""Varying intercepts: radon in the houses of 85 counties, as FixedPointVI and NUTS see it.

The data are made up after the well-known ones of Minnesota: a few counties with many houses, many with a few. Each
county has its own intercept, and these share a mean and a spread. The Gaussian agrees with NUTS on the intercepts, and
is too sure of one thing: their spread.
"""

from __future__ import annotations

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS
from plots import REFERENCE, RVGA_COLOR, WIDTH, compare_densities, intervals, parse_arguments, plt, save

from numpyro_rvga import FixedPointVI

SHARED = {
    "center": "mean of the intercepts",
    "spread": "spread of the intercepts",
    "slope": "slope of upper floor",
    "noise": "sd of the noise",
}


def model(upper_floor, county, radon=None, num_counties=None):
    center = numpyro.sample("center", dist.Normal(0, 3))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    with numpyro.plate("counties", num_counties):
        intercept = numpyro.sample("intercept", dist.Normal(center, spread))
    with numpyro.plate("houses", len(county)):
        numpyro.sample("radon", dist.Normal(intercept[county] + slope * upper_floor, noise), obs=radon)


def make_data(num_counties: int, num_houses: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    share = 1 / np.arange(1, num_counties + 1)
    first = np.arange(num_counties)  # a house for each county, the others by its share
    county = np.concatenate([first, rng.choice(num_counties, num_houses - num_counties, p=share / share.sum())])
    upper_floor = (rng.random(num_houses) < 0.17).astype(float)
    intercept = 1.5 + 0.35 * rng.normal(size=num_counties)
    radon = intercept[county] - 0.7 * upper_floor + 0.75 * rng.normal(size=num_houses)
    return {"upper_floor": upper_floor, "county": county, "radon": radon}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    numpyro.enable_x64()
    num_counties, num_houses = (12, 150) if arguments.quick else (85, 919)
    data = make_data(num_counties, num_houses)
    start = time.perf_counter()
    posterior = FixedPointVI(model).run(data, num_counties=num_counties, progress_bar=False)
    seconds = time.perf_counter() - start

    length = 40 if arguments.quick else 1000
    mcmc = MCMC(NUTS(model), num_warmup=length, num_samples=2 * length, progress_bar=False)
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), **data, num_counties=num_counties)
    nuts = {name: np.asarray(draws) for name, draws in mcmc.get_samples().items()}
    print(f"FixedPointVI {seconds:.1f} s, NUTS {time.perf_counter() - start:.1f} s, both with compilation\n")

    ours = posterior.sample_posterior(jax.random.key(1), (10_000,))
    ours = {name: np.asarray(draws) for name, draws in ours.items()}
    print(f"{'':12s} {'FixedPointVI':>18s} {'NUTS':>18s}")
    for name in SHARED:
        ends = (f"{draws[name].mean():8.3f} +- {draws[name].std():.3f}" for draws in (ours, nuts))
        print(f"{name:12s} " + " ".join(f"{end:>18s}" for end in ends))
    shift = (ours["intercept"].mean(0) - nuts["intercept"].mean(0)) / nuts["intercept"].std(0)
    ratio = ours["intercept"].std(0) / nuts["intercept"].std(0)
    print(f"intercepts: means within {np.abs(shift).max():.2f} sd, sds within {100 * np.abs(ratio - 1).max():.0f}%")
    save(draw(ours, nuts, np.bincount(data["county"])), arguments.output, "varying_intercepts")


def draw(ours, nuts, sizes):
    figure = plt.figure(figsize=(WIDTH, 5.2))
    above, below = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    axis = above.subplots()
    order = np.argsort(-sizes, kind="stable")
    for draws, color, shift in ((nuts, REFERENCE, -0.2), (ours, RVGA_COLOR, 0.2)):
        place, mean, deviation = np.arange(len(order)) + shift, draws["intercept"].mean(0), draws["intercept"].std(0)
        intervals(axis, place, *(value[order] for value in (mean - deviation, mean, mean + deviation)), color)
    axis.axhline(nuts["center"].mean(), color=REFERENCE, lw=0.8, ls=":")
    shown = np.linspace(0, len(order) - 1, min(len(order), 12)).astype(int)
    axis.set_xticks(shown, [f"{sizes[order[i]]}" for i in shown])
    axis.set_xlim(-1, len(order))
    axis.set_xlabel("counties, by their number of houses")
    axis.set_ylabel("intercept, mean and one sd")

    panels = below.subplots(1, 2 + len(SHARED))
    for panel, name, read in ((panels[0], "means", np.mean), (panels[1], "sds", np.std)):
        x, y = read(nuts["intercept"], axis=0), read(ours["intercept"], axis=0)
        ends = [min(x.min(), y.min()), max(x.max(), y.max())]
        panel.plot(ends, ends, color=REFERENCE, lw=0.8)
        panel.plot(x, y, "o", color=RVGA_COLOR, ms=2.5)
        panel.set_title(f"{name} of the intercepts", fontsize=8)
        panel.set_xlabel("NUTS", fontsize=8)
    panels[0].set_ylabel("FixedPointVI", fontsize=8)
    for panel, (name, title) in zip(panels[2:], SHARED.items()):
        compare_densities(panel, ours[name], nuts[name], title)
    handles = [
        plt.Line2D([], [], color=REFERENCE, lw=2, marker="o", ms=3.5, label="NUTS"),
        plt.Line2D([], [], color=RVGA_COLOR, lw=2, marker="o", ms=3.5, label="FixedPointVI"),
        plt.Line2D([], [], color=REFERENCE, lw=0.8, ls=":", label="mean of the intercepts"),
    ]
    below.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    main()
