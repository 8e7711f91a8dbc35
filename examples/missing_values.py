"""Predictors that are measured with error, and missing in a third of the rows: integrated out of each row.

Who leaves the error out of the model finds too flat a line, and who drops the rows with gaps loses what their outcomes
say. Here each row's true value is a latent variable of that row. All is Normal given the parameters that rows share, so
these variables are integrated out exactly, and drawn afterwards given their row.
"""

from __future__ import annotations

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from plots import COLORS, REFERENCE, RVGA_COLOR, TRUTH, WIDTH, density_axis, intervals, parse_arguments, plt, save

from numpyro_rvga import RVGA

TRUE_SLOPE, ERROR = 1.5, 0.7
SHOWN = 12  # rows with gaps


def model(seen, measured, y):
    mean, sd = numpyro.sample("mean", dist.Normal(0, 1)), numpyro.sample("sd", dist.HalfNormal(2))
    intercept, slope = numpyro.sample("intercept", dist.Normal(0, 2)), numpyro.sample("slope", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(seen)):
        x = numpyro.sample("x", dist.Normal(mean, sd))
        with handlers.mask(mask=measured):
            numpyro.sample("seen", dist.Normal(x, ERROR), obs=seen)
        numpyro.sample("y", dist.Normal(intercept + slope * x, sigma), obs=y)


def naive(seen, measured, y):
    intercept, slope = numpyro.sample("intercept", dist.Normal(0, 2)), numpyro.sample("slope", dist.Normal(0, 2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(seen)):
        numpyro.sample("y", dist.Normal(intercept + slope * seen, sigma), obs=y)


def make_data(count: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.normal(0.5, 1, count)
    measured = rng.random(count) > 1 / 3
    seen = np.where(measured, x + ERROR * rng.normal(size=count), 0.0)
    return {"seen": seen, "measured": measured, "y": 0.3 + TRUE_SLOPE * x + 0.4 * rng.normal(size=count)}, x


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    data, x = make_data(40 if arguments.quick else 150)
    length = 100 if arguments.quick else 2000
    start = time.perf_counter()
    posterior = RVGA(model).run(data, progress_bar=False)
    seconds = {"RVGA": time.perf_counter() - start}
    draws = {"RVGA": posterior.sample_posterior(jax.random.key(1), (length,), data=data)}
    print(f"rows {posterior.info['rows']}, bound {posterior.elbo:.2f} nats, {posterior.khat(data).verdict}")
    print(f"q is of {', '.join(posterior.site_names)}")
    whole = {name: values[data["measured"]] for name, values in data.items()}
    draws["naive"] = RVGA(naive).run(whole, progress_bar=False).sample_posterior(jax.random.key(1), (length,))
    chain = MCMC(NUTS(model), num_warmup=length // 2, num_samples=length, progress_bar=False)
    start = time.perf_counter()
    chain.run(jax.random.key(0), **data)
    seconds["NUTS"] = time.perf_counter() - start
    draws["NUTS"] = chain.get_samples()
    for name, sites in draws.items():
        slope = np.asarray(sites["slope"])
        print(f"{name:6s} slope {slope.mean():.3f} +- {slope.std():.3f}", end="")
        print(f", {seconds[name]:.1f} s" if name in seconds else "")
    save(draw(draws, np.flatnonzero(~data["measured"])[:SHOWN], x), arguments.output, "missing_values")


def draw(draws, gaps, x):
    """:param gaps: rows without a measurement."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3), width_ratios=[1, 1.6])
    bins = np.linspace(0.4, 2.2, 60)
    axes[0].hist(draws["NUTS"]["slope"], bins, density=True, color=REFERENCE, alpha=0.35)
    for name, color in (("RVGA", RVGA_COLOR), ("naive", COLORS[4])):
        axes[0].hist(draws[name]["slope"], bins, density=True, histtype="step", color=color, lw=1.6)
    axes[0].axvline(TRUE_SLOPE, color=TRUTH, lw=0.8, ls="--")
    density_axis(axes[0], "slope")
    places = np.arange(len(gaps))
    for name, shift, color in (("NUTS", -0.12, REFERENCE), ("RVGA", 0.12, RVGA_COLOR)):
        drawn = np.asarray(draws[name]["x"])[:, gaps]
        intervals(axes[1], places + shift, *np.quantile(drawn, [0.05, 0.5, 0.95], axis=0), color)
    axes[1].plot(places, x[gaps], "_", color=TRUTH, ms=10)
    axes[1].set(xticks=places, xticklabels=gaps, xlabel="row without a measurement", ylabel="its predictor")
    labels = {"RVGA": RVGA_COLOR, "NUTS": REFERENCE, "error left out, gaps dropped": COLORS[4], "truth": TRUTH}
    handles = [plt.Line2D([], [], color=color, lw=2, label=label) for label, color in labels.items()]
    figure.legend(handles=handles, loc="outside upper center", ncols=4)
    return figure


if __name__ == "__main__":
    main()
