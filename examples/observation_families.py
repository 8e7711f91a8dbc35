"""A gallery: the same regression under twelve observation families, RVGA beside NUTS.

Each function below turns a linear predictor into an observation's distribution; what it samples on the way (scales,
shapes, cutpoints) is inferred too. The data are simulated, so the truth is known.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.infer import MCMC, NUTS
from plots import REFERENCE, RVGA_COLOUR, parse_arguments, plt, save

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
IN_A_HURRY = ("Bernoulli", "NegativeBinomial2")


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


def intervals(draws, names):
    """5, 50 and 95% quantiles (3, number of scalars), and a label for each scalar."""
    labels = [f"{n}[{i}]" if np.ndim(draws[n]) > 1 else n for n in names for i in range(draws[n][0].size)]
    columns = np.concatenate([np.reshape(draws[n], (len(draws[n]), -1)) for n in names], axis=1)
    return np.quantile(columns, [0.05, 0.5, 0.95], axis=0), labels


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    chosen = {name: FAMILIES[name] for name in IN_A_HURRY} if arguments.quick else FAMILIES
    length = 100 if arguments.quick else 500
    columns = min(3, len(chosen))
    figure, axes = plt.subplots(-(-len(chosen) // columns), columns, figsize=(9, 1.9 * -(-len(chosen) // columns)))
    for axis, (title, (family, extra)) in zip(np.ravel(axes), chosen.items()):
        truth = {"intercept": 0.5, "slope": -0.8, **extra}
        data = simulate(family, truth, 300)
        posterior = RVGA(model).run(data, family=family, progress_bar=False)
        mcmc = MCMC(NUTS(model), num_warmup=length, num_samples=2 * length, progress_bar=False)
        mcmc.run(jax.random.key(3), **data, family=family)

        names = list(truth)
        reference, labels = intervals(mcmc.get_samples(), names)
        ours, _ = intervals(posterior.sample_posterior(jax.random.key(4), (4000,)), names)
        true_values = np.concatenate([np.ravel(truth[name]) for name in names])
        place = np.arange(len(labels))
        for shift, colour, (low, middle, high) in ((-0.15, REFERENCE, reference), (0.15, RVGA_COLOUR, ours)):
            axis.hlines(place + shift, low, high, color=colour, lw=2.5)
            axis.plot(middle, place + shift, "o", color=colour, ms=4)
        axis.vlines(true_values, place - 0.4, place + 0.4, color="black", lw=1, ls=":")
        axis.set_yticks(place, labels)
        axis.set_ylim(len(labels) - 0.4, -0.6)
        axis.set_title(title)
        error = np.max(np.abs(ours[1] - reference[1]) / (reference[2] - reference[0]) * 3.29)
        print(f"{title:24s} medians differ by at most {error:.2f} posterior standard deviations")
    handles = [
        plt.Line2D([], [], color=REFERENCE, lw=2.5, marker="o", ms=4, label="NUTS, 90% interval"),
        plt.Line2D([], [], color=RVGA_COLOUR, lw=2.5, marker="o", ms=4, label="RVGA, 90% interval"),
        plt.Line2D([], [], color="black", lw=1, ls=":", label="truth"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    save(figure, arguments.output, "observation_families")


if __name__ == "__main__":
    main()
