"""When does the covariance's fixed point converge? (Fixed-point paper, figure 1.)

``FixedPointVI.conditions`` looks at gamma(m, v), the expected curvature of a row whose predictor has mean m, variance
v. The theorem asks that gamma is not negative (condition 1), and that at each m it nowhere falls (2a) or nowhere rises
(2b) as v grows. Counts have 1 and 2a everywhere. Binary outcomes have 2b near m = 0 and 2a far from it; the rows of a
posterior, the dots, lie in both. FixedPointVI converges all the same, as it shortens steps that lower the bound.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from plots import WIDTH, parse_arguments, plt, save

from numpyro_rvga import FixedPointVI

LIKELIHOODS = {
    "counts": lambda u: dist.Poisson(jnp.exp(u)),
    "binary outcomes": lambda u: dist.Bernoulli(logits=u),
}


def model(X, y=None, likelihood="counts"):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", LIKELIHOODS[likelihood](X @ w), obs=y)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(__doc__, argv)
    numpyro.enable_x64()
    X = np.random.default_rng(0).normal(size=(30 if arguments.quick else 100, 3))
    names = list(LIKELIHOODS)[1:2] if arguments.quick else list(LIKELIHOODS)
    figure, axes = plt.subplots(1, len(names), figsize=(WIDTH, 3.4), squeeze=False)
    for name, axis in zip(names, axes.flat):
        y = LIKELIHOODS[name](jnp.asarray(X @ [1.0, -1.0, 0.5])).sample(jax.random.key(0))
        data = {"X": X, "y": np.asarray(y)}
        posterior = FixedPointVI(model).run(data, likelihood=name, progress_bar=False)
        found = FixedPointVI.conditions(model, data, posterior=posterior, likelihood=name)
        print(f"{name:16s} {found.verdict}")
        found.plot(axis)
        axis.set_title(name)
    save(figure, arguments.output, "conditions")


if __name__ == "__main__":
    main()
