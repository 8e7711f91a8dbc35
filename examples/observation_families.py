"""A gallery: the same regression under twelve observation families, RVGA beside NUTS.

Each function below turns a linear predictor into an observation's distribution; what it samples on the way (scales,
shapes, cutpoints) is inferred too. The data are simulated, so the truth is known.
"""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from plots import REFERENCE, RVGA_COLOR, TRUTH, WIDTH, intervals, parse_arguments, plt, save

from numpyro_rvga import RVGA


def bernoulli(line, exposure):
    return dist.Bernoulli(logits=line)


def binomial(line, exposure):
    return dist.Binomial(total_count=20, logits=line)


def categorical(line, exposure):
    third = numpyro.sample("third", dist.Normal(0, 1))
    return dist.Categorical(logits=jnp.stack([jnp.zeros_like(line), line, third - line], axis=-1))


def poisson(line, exposure):
    return dist.Poisson(exposure * jnp.exp(line))


def negative_binomial(line, exposure):
    concentration = numpyro.sample("concentration", dist.Gamma(2, 1))
    return dist.NegativeBinomial2(jnp.exp(line), concentration)


def zero_inflated_poisson(line, exposure):
    gate = numpyro.sample("gate", dist.Beta(1, 1))
    return dist.ZeroInflatedPoisson(gate, jnp.exp(line))


def normal(line, exposure):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    return dist.Normal(line, scale)


def student_t(line, exposure):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    freedom = numpyro.sample("freedom", dist.Gamma(3, 1))
    return dist.StudentT(freedom, line, scale)


def laplace(line, exposure):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    return dist.Laplace(line, scale)


def gamma(line, exposure):
    concentration = numpyro.sample("concentration", dist.Gamma(2, 1))
    return dist.Gamma(concentration, concentration * jnp.exp(-line))


def beta(line, exposure):
    concentration = numpyro.sample("concentration", dist.Gamma(2, 0.2))
    mean = jax.nn.sigmoid(line)
    return dist.Beta(mean * concentration, (1 - mean) * concentration)


def ordered_logistic(line, exposure):
    steps = dist.TransformedDistribution(dist.Normal(0, 2).expand([2]), dist.transforms.OrderedTransform())
    return dist.OrderedLogistic(line, numpyro.sample("cutpoints", steps))


FAMILIES = {
    "Bernoulli": (bernoulli, {}),
    "Binomial": (binomial, {}),
    "Categorical": (categorical, {"third": 0.3}),
    "Poisson with exposure": (poisson, {}),
    "NegativeBinomial2": (negative_binomial, {"concentration": 1.5}),
    "ZeroInflatedPoisson": (zero_inflated_poisson, {"gate": 0.3}),
    "Normal": (normal, {"scale": 0.7}),
    "StudentT": (student_t, {"scale": 0.5, "freedom": 3.0}),
    "Laplace": (laplace, {"scale": 0.6}),
    "Gamma": (gamma, {"concentration": 2.0}),
    "Beta": (beta, {"concentration": 6.0}),
    "OrderedLogistic": (ordered_logistic, {"cutpoints": jnp.array([-0.5, 1.0])}),
}
IN_A_HURRY = ("NegativeBinomial2",)


def model(x, exposure, y=None, family=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    distribution = family(intercept + slope * x, exposure)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", distribution, obs=y)


def simulate(family, truth, num_rows):
    rng = np.random.default_rng(1)
    data = {"x": rng.normal(size=num_rows), "exposure": rng.gamma(2.0, 0.5, size=num_rows)}
    known = handlers.substitute(handlers.seed(model, jax.random.key(2)), truth)
    y = handlers.trace(known).get_trace(**data, family=family)["y"]["value"]
    return data | {"y": np.asarray(y)}


def summary(draws, names):
    """5, 50 and 95% quantiles (3, number of scalars), and a label for each scalar."""
    labels = [f"{n}[{i}]" if np.ndim(draws[n]) > 1 else n for n in names for i in range(draws[n][0].size)]
    columns = np.concatenate([np.reshape(draws[n], (len(draws[n]), -1)) for n in names], axis=1)
    return np.quantile(columns, [0.05, 0.5, 0.95], axis=0), labels


def deviations(quantiles):
    """Standard deviations of Gaussians with these 90% intervals."""
    return (quantiles[2] - quantiles[0]) / 3.29


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    chosen = {name: FAMILIES[name] for name in IN_A_HURRY} if arguments.quick else FAMILIES
    length = 40 if arguments.quick else 500
    found = {}
    print(f"{'':22s} {'medians differ by':>18s} {'intervals by':>13s} {'RVGA':>8s} {'NUTS':>8s}")
    for title, (family, extra) in chosen.items():
        truth = {"intercept": 0.5, "slope": -0.8, **extra}
        data = simulate(family, truth, 300)
        start = time.perf_counter()
        posterior = RVGA(model).run(data, family=family, progress_bar=False)
        jax.block_until_ready(posterior.mean)
        rvga_seconds = time.perf_counter() - start
        mcmc = MCMC(NUTS(model), num_warmup=length, num_samples=2 * length, progress_bar=False)
        start = time.perf_counter()
        mcmc.run(jax.random.key(3), **data, family=family)
        draws = jax.block_until_ready(mcmc.get_samples())
        nuts_seconds = time.perf_counter() - start

        reference, labels = summary(draws, list(truth))
        ours, _ = summary(posterior.sample_posterior(jax.random.key(4), (4000,)), list(truth))
        found[title] = labels, np.concatenate([np.ravel(value) for value in truth.values()]), reference, ours
        shift = np.max(np.abs(ours[1] - reference[1]) / deviations(reference))
        ratio = np.max(np.abs(deviations(ours) / deviations(reference) - 1))
        print(f"{title:22s} {shift:15.2f} sd {ratio:13.0%} {rvga_seconds:6.1f} s {nuts_seconds:6.1f} s")
    truth, reference, ours = (np.concatenate(parts, axis=-1) for parts in list(zip(*found.values()))[1:])
    for name, (low, _, high) in (("RVGA", ours), ("NUTS", reference)):
        print(f"{name}: {np.sum((low <= truth) & (truth <= high))} of {len(truth)} intervals hold the truth")
    save(draw(found), arguments.output, "observation_families")


def draw(found):
    columns = min(3, len(found))
    rows = -(-len(found) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(WIDTH, 1.5 * rows + 0.6), sharex=True)
    for axis, (title, (labels, truth, reference, ours)) in zip(np.ravel(axes), found.items()):
        place, center, scale = np.arange(len(labels)), reference[1], deviations(reference)
        intervals(axis, place - 0.17, *(reference - center) / scale, REFERENCE, across=True)
        intervals(axis, place + 0.17, *(ours - center) / scale, RVGA_COLOR, across=True)
        axis.vlines((truth - center) / scale, place - 0.45, place + 0.45, color=TRUTH, lw=1.2, ls=":")
        axis.set_yticks(place, labels)
        axis.set_ylim(len(labels) - 0.4, -0.6)
        axis.set_title(title)
    for axis in np.atleast_2d(axes)[-1]:
        axis.set_xlabel("sd from NUTS's median")
    handles = [
        plt.Line2D([], [], color=REFERENCE, lw=2, marker="o", ms=3.5, label="NUTS, median and 90% interval"),
        plt.Line2D([], [], color=RVGA_COLOR, lw=2, marker="o", ms=3.5, label="RVGA, median and 90% interval"),
        plt.Line2D([], [], color=TRUTH, lw=1, ls=":", label="truth"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


if __name__ == "__main__":
    main()
