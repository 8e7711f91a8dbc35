"""Who has affairs? A hierarchical logistic regression of 6,366 women, by RVGA in one pass and by NUTS.

The data are Fair's (1978) survey, which statsmodels ships. Women of the same rating of their marriage and the same
number of years married form a cell. Each cell has its own intercept, and the cells share a mean and a spread.
"""

from __future__ import annotations

import time
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
from numpyro.infer import MCMC, NUTS
from plots import REFERENCE, RVGA_COLOR, WIDTH, density_axis, intervals, parse_arguments, plt, save
from scipy import stats
from scipy.special import expit
from statsmodels.datasets import fair

from numpyro_rvga import RVGA

with warnings.catch_warnings():
    warnings.simplefilter("ignore", FutureWarning)  # ArviZ 0.23 announces ArviZ 1.0
    import arviz as az

COVARIATES = ["age", "children", "religious", "educ"]
RATINGS = {1: "very poor", 2: "poor", 3: "fair", 4: "good", 5: "very good"}


def model(X, cell, affair=None, num_cells=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    center = numpyro.sample("center", dist.Normal(0, 2))
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("cells", num_cells):
        intercept = numpyro.sample("intercept", dist.Normal(center, spread))
    with numpyro.plate("women", X.shape[0]):
        numpyro.sample("affair", dist.Bernoulli(logits=intercept[cell] + X @ slopes), obs=affair)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    table = fair.load_pandas().data
    if arguments.quick:
        table = table.iloc[::10]
    cells, cell = np.unique(table[["rate_marriage", "yrs_married"]].to_numpy(), axis=0, return_inverse=True)
    X = ((table[COVARIATES] - table[COVARIATES].mean()) / table[COVARIATES].std()).to_numpy()
    data = {"X": X, "cell": cell.ravel(), "affair": (table["affairs"] > 0).to_numpy().astype(int)}
    print(f"{len(table)} women in {len(cells)} cells\n")

    start = time.perf_counter()
    posterior = RVGA(model).run(data, num_cells=len(cells), progress_bar=False)
    jax.block_until_ready(posterior.mean)
    rvga_seconds = time.perf_counter() - start

    length = 40 if arguments.quick else 500
    chain_method = "parallel" if jax.local_device_count() > 1 else "sequential"
    mcmc = MCMC(
        NUTS(model),
        num_warmup=length,
        num_samples=2 * length,
        num_chains=2,
        chain_method=chain_method,
        progress_bar=False,
    )
    start = time.perf_counter()
    mcmc.run(jax.random.key(0), **data, num_cells=len(cells))
    nuts_seconds = time.perf_counter() - start

    names = [f"{RATINGS[int(rating)]}, {years:g} years" for rating, years in cells]
    labels = {
        "coords": {"covariate": COVARIATES, "cells": names},
        "dims": {"slopes": ["covariate"], "intercept": ["cells"]},
    }
    results = {
        "RVGA": posterior.to_arviz(num_samples=2000, **labels),
        "NUTS": az.from_numpyro(mcmc, log_likelihood=False, **labels),
    }
    summaries = {name: az.summary(result, kind="stats") for name, result in results.items()}
    with pd.option_context("display.width", 200, "display.max_rows", None, "display.max_columns", None):
        print(pd.concat(summaries, axis=1).loc[summaries["RVGA"].index])
    print(f"\nRVGA {rvga_seconds:.1f} s, NUTS {nuts_seconds:.1f} s, both with compilation")
    print(f"importance ratios of RVGA's posterior: {posterior.khat(data)}")
    save(draw(posterior, mcmc.get_samples(), cells), arguments.output, "quickstart")


def draw(posterior, nuts, cells):
    figure = plt.figure(figsize=(WIDTH, 5.4))
    above, below = figure.subfigures(2, 1, height_ratios=[1.25, 1])
    probabilities = np.array([0.05, 0.5, 0.95])
    rvga = expit(np.asarray(posterior.quantiles(probabilities)["intercept"]))
    reference = expit(np.quantile(nuts["intercept"], probabilities, axis=0))
    ratings = list(RATINGS)
    axes = above.subplots(1, len(ratings), sharey=True)
    for axis, rating in zip(axes, ratings):
        members = np.flatnonzero(cells[:, 0] == rating)
        for shift, color, quantiles in ((-0.17, REFERENCE, reference), (0.17, RVGA_COLOR, rvga)):
            place = np.arange(len(members)) + shift
            intervals(axis, place, *quantiles[:, members], color)
        axis.set_title(f"marriage {RATINGS[rating]}")
        axis.set_xticks(np.arange(len(members)), [f"{years:g}" for years in cells[members, 1]], fontsize=7)
        axis.set_ylim(0, 1)
    axes[0].set_ylabel("probability of an affair")
    above.supxlabel("years married", fontsize=9)

    titles = ["mean of the intercepts", "spread of the intercepts", *(f"slope of {name}" for name in COVARIATES)]
    standard = np.linspace(-3.3, 3.3, 101)
    exact = posterior.quantiles(stats.norm.cdf(standard))
    ours = [exact["center"], exact["spread"], *np.asarray(exact["slopes"]).T]
    draws = [nuts["center"], nuts["spread"], *np.asarray(nuts["slopes"]).T]
    axes = below.subplots(1, len(titles))
    for axis, title, curve, sample in zip(axes, titles, ours, draws):
        place = np.asarray(curve, np.float64)
        axis.fill_between(place, stats.gaussian_kde(sample)(place), color=REFERENCE, alpha=0.3, lw=0)
        axis.plot(place, stats.norm.pdf(standard) / np.gradient(place, standard), color=RVGA_COLOR, lw=1.6)
        density_axis(axis, title)
    axes[0].set_ylabel("density, log odds")
    handles = [
        plt.Line2D([], [], color=REFERENCE, lw=4, alpha=0.6, label="NUTS, 90% interval and density"),
        plt.Line2D([], [], color=RVGA_COLOR, lw=2, label="RVGA"),
    ]
    below.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    numpyro.set_host_device_count(2)
    main()
