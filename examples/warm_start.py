"""NUTS from a running start: an ill-conditioned logistic regression, with and without RVGA's covariance.

The 30 measurements of scikit-learn's breast cancer data are close to collinear, so NUTS needs a dense mass matrix and
has to learn it from its own warm-up. ``posterior.nuts()`` brings one along.
"""

from __future__ import annotations

import time

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.diagnostics import effective_sample_size
from numpyro.infer import MCMC, NUTS
from plots import REFERENCE, RVGA_COLOR, WIDTH, parse_arguments, plt, save
from sklearn.datasets import load_breast_cancer

from numpyro_rvga import RVGA

NUM_CHAINS = 2


def model(X, benign=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 3))
    slopes = numpyro.sample("slopes", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("patients", X.shape[0]):
        numpyro.sample("benign", dist.Bernoulli(logits=intercept + X @ slopes), obs=benign)


def sample(kernel, num_warmup, num_samples, data, init_params=None):
    """Effective sample sizes, leapfrog steps (warm-up included) and seconds (compilation included)."""
    mcmc = MCMC(
        kernel,
        num_warmup=num_warmup,
        num_samples=num_samples,
        num_chains=NUM_CHAINS,
        chain_method="vectorized",
        progress_bar=False,
    )
    keywords = {**data, "extra_fields": ("num_steps",)}
    start = time.perf_counter()
    mcmc.warmup(jax.random.key(0), init_params=init_params, collect_warmup=True, **keywords)
    steps = int(mcmc.get_extra_fields()["num_steps"].sum())
    mcmc.run(mcmc.post_warmup_state.rng_key, **keywords)
    steps += int(mcmc.get_extra_fields()["num_steps"].sum())
    seconds = time.perf_counter() - start
    draws = mcmc.get_samples(group_by_chain=True)
    sizes = np.concatenate([np.ravel(effective_sample_size(np.asarray(x))) for x in draws.values()])
    return sizes, steps, seconds


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    bunch = load_breast_cancer()
    data = {"X": (bunch.data - bunch.data.mean(0)) / bunch.data.std(0), "benign": bunch.target}
    num_samples = 20 if arguments.quick else 500

    start = time.perf_counter()
    posterior = RVGA(model).run(data, progress_bar=False)
    jax.block_until_ready(posterior.mean)
    print(f"RVGA: {time.perf_counter() - start:.1f} s, condition number {np.linalg.cond(posterior.covariance):.0f}")

    start_values = posterior.init_params(jax.random.key(1), NUM_CHAINS)
    kernels = {
        "default NUTS": (NUTS(model), num_samples, None),
        "posterior.nuts()": (posterior.nuts(), num_samples // 5, start_values),
    }
    found = {}
    print(f"{'':18s} {'steps':>8s} {'seconds':>8s} {'smallest ESS':>13s} {'per 1,000 steps':>16s}")
    for name, (kernel, num_warmup, values) in kernels.items():
        sizes, steps, seconds = sample(kernel, num_warmup, num_samples, data, values)
        found[name] = num_warmup, steps, sizes
        rate = 1000 * sizes.min() / steps
        print(f"{name:18s} {steps:8,} {seconds:8.1f} {sizes.min():13.0f} {rate:16.1f}")
    save(draw(found), arguments.output, "warm_start")


def draw(found):
    figure, (left, right) = plt.subplots(1, 2, figsize=(WIDTH, 3.2), width_ratios=[1, 1.6])
    for i, ((name, (num_warmup, steps, sizes)), color) in enumerate(zip(found.items(), (REFERENCE, RVGA_COLOR))):
        left.bar(i, steps, color=color, width=0.6)
        left.text(i, steps, f"{steps:,}", ha="center", va="bottom", fontsize=8)
        rates = np.sort(1000 * sizes / steps)
        label = f"{name}, {num_warmup} warm-up steps a chain"
        right.plot(np.arange(1, len(rates) + 1), rates, "o-", color=color, ms=3.5, lw=1, label=label)
    left.set_xticks(range(len(found)), list(found))
    left.set_ylabel("leapfrog steps with warm-up")
    left.yaxis.set_major_formatter("{x:,.0f}")
    right.set_xlabel("parameter, from the worst to the best")
    right.set_ylabel("effective draws per 1,000 steps")
    right.set_ylim(0, None)
    figure.legend(loc="outside lower center", ncols=2)
    return figure


if __name__ == "__main__":
    main()
