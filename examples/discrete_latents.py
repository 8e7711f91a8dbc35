"""A discrete latent variable summed out: when did a rate change?

Counts by year have one rate before a year that is not known, and another one after. Which year is a discrete latent
site, so that a sampler by gradients would need it summed out. RVGA sums over it, and draws it afterwards given the
rates. With gamma priors the probability of each year has a closed form, to compare with.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import REFERENCE, RVGA_COLOR, TRUTH, WIDTH, parse_arguments, plt, save
from scipy.special import gammaln, softmax

from numpyro_rvga import RVGA

RATES, SHAPE, RATE = (3.2, 1.4), 2.0, 1.0  # true rates; the gamma prior


def model(counts):
    early, late = numpyro.sample("early", dist.Gamma(SHAPE, RATE)), numpyro.sample("late", dist.Gamma(SHAPE, RATE))
    change = numpyro.sample("change", dist.DiscreteUniform(1, len(counts) - 1))
    rate = jnp.where(jnp.arange(len(counts)) < change, early, late)
    with numpyro.plate("years", len(counts)):
        numpyro.sample("counts", dist.Poisson(rate), obs=counts)


def exact_probabilities(counts: np.ndarray) -> np.ndarray:
    """Of a change at each year from the second on: the rates are integrated out of gamma times Poisson."""
    years = np.arange(1, len(counts))
    before = np.cumsum(counts)[:-1]

    def log_evidence(total, length):
        return gammaln(SHAPE + total) - (SHAPE + total) * np.log(RATE + length)

    return softmax(log_evidence(before, years) + log_evidence(counts.sum() - before, len(counts) - years))


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    num_years, change = (30, 12) if arguments.quick else (100, 42)
    counts = np.random.default_rng(3).poisson(np.where(np.arange(num_years) < change, *RATES))
    start = time.perf_counter()
    posterior = RVGA(model).run({"counts": counts}, progress_bar=False)
    print(f"{time.perf_counter() - start:.1f} s, bound {posterior.elbo:.2f} nats, modes {posterior.info.get('modes')}")
    drawn = posterior.sample_posterior(jax.random.key(0), (20_000,), data={"counts": counts})
    found = np.bincount(np.asarray(drawn["change"]), minlength=num_years)[1:] / 20_000
    exact = exact_probabilities(counts)
    print(f"largest difference from the exact probability of a year: {np.abs(found - exact).max():.3f}")
    save(draw(counts, drawn, found, exact, change), arguments.output, "discrete_latents")


def draw(counts, drawn, found, exact, change):
    """:param found: probabilities of a change at each year from the second on, and ``exact``."""
    figure, axes = plt.subplots(1, 2, figsize=(WIDTH, 3))
    years = np.arange(len(counts))
    early = years < np.asarray(drawn["change"])[:2000, None]
    rate = np.where(early, np.asarray(drawn["early"])[:2000, None], np.asarray(drawn["late"])[:2000, None])
    low, middle, high = np.quantile(rate, [0.05, 0.5, 0.95], axis=0)
    axes[0].vlines(years, 0, counts, color=REFERENCE, lw=1)
    axes[0].fill_between(years, low, high, color=RVGA_COLOR, alpha=0.3, lw=0)
    axes[0].plot(years, middle, color=RVGA_COLOR)
    axes[0].plot(years, np.where(years < change, *RATES), color=TRUTH, lw=0.8, ls="--")
    axes[0].set(xlabel="year", ylabel="count, and its rate")
    axes[1].bar(years[1:], exact, 1.0, color=REFERENCE, alpha=0.35, label="exact")
    axes[1].step(years[1:], found, where="mid", color=RVGA_COLOR, label="RVGA")
    axes[1].axvline(change, color=TRUTH, lw=0.8, ls="--", label="truth")
    axes[1].set(xlabel="year", ylabel="probability of the change", xlim=(change - 15, change + 15))
    axes[1].legend()
    return figure


if __name__ == "__main__":
    main()
