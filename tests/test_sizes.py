"""Every closed form, of one parameter and of many, one row and thousands, in both precisions, from arrays and blocks:
at the best Gaussian the slope of NumPyro's own log joint density averages to zero."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from references import potential_of

from numpyro_rvga import RVGA

LIKELIHOODS = {
    "bernoulli": lambda line: dist.Bernoulli(logits=line),
    "binomial": lambda line: dist.Binomial(4, logits=line),
    "poisson": lambda line: dist.Poisson(jnp.exp(line)),
    "exponential": lambda line: dist.Exponential(jnp.exp(line)),
    "gamma": lambda line: dist.Gamma(2.0, jnp.exp(line)),
    "normal": lambda line: dist.Normal(line, 0.7),
    "lognormal": lambda line: dist.LogNormal(line, 0.7),
    "laplace": lambda line: dist.Laplace(line, 0.7),
    "volatility": lambda line: dist.Normal(0.0, jnp.exp(line)),
}
PARAMETERS, FEW_ROWS = (1, 17), (1, 5)
DRAWS = 600


def regression(likelihood):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", likelihood(X @ w), obs=y)

    return model


def rows_of(kind, num_parameters, num_rows):
    rng = np.random.default_rng(num_parameters)
    X = np.column_stack([np.ones(num_rows), rng.normal(size=(num_rows, num_parameters - 1))])
    line = X @ (0.5 * rng.normal(size=num_parameters) / np.sqrt(num_parameters))
    return {"X": X, "y": np.asarray(LIKELIHOODS[kind](jnp.asarray(line)).sample(jax.random.key(1)))}


def slope(model, rows, posterior):
    """The mean of the log joint density's slope over draws, in q's standard coordinates, and its standard error."""
    potential, size = potential_of(model, posterior.site_names, **rows)
    half = np.random.default_rng(0).normal(size=(DRAWS // 2, size))
    scale, mean = np.asarray(posterior.scale, np.float64), np.asarray(posterior.mean, np.float64)
    slopes = jax.jit(lambda points: jax.lax.map(jax.grad(potential), points, batch_size=20))
    found = np.asarray(slopes(mean + np.concatenate([half, -half]) @ scale.T)) @ scale
    pairs = 0.5 * (found[: DRAWS // 2] + found[DRAWS // 2 :])
    return pairs.mean(axis=0), pairs.std(axis=0) / np.sqrt(DRAWS / 2)


def grid():
    """Each form with each number of parameters, rows, precision and source: all pairs of them, not all combinations."""
    for (form, kind), (number, num_parameters) in itertools.product(enumerate(LIKELIHOODS), enumerate(PARAMETERS)):
        odd, odd_pair, odd_four = ((form // n + number) % 2 == 1 for n in (1, 2, 4))
        yield kind, num_parameters, 5000, odd, odd_pair
        yield kind, num_parameters, FEW_ROWS[odd], odd_pair, odd_four
    for double, in_blocks in itertools.product((False, True), (False, True)):  # long one-parameter blocks
        yield "bernoulli", 1, 5000, double, in_blocks
        yield "binomial", 1, 5000, double, in_blocks


@pytest.mark.parametrize(("kind", "num_parameters", "num_rows", "double", "in_blocks"), sorted(set(grid())))
def test_q_is_where_the_slope_averages_to_zero(kind, num_parameters, num_rows, double, in_blocks):
    model, rows = regression(LIKELIHOODS[kind]), rows_of(kind, num_parameters, num_rows)
    with jax.enable_x64(double):
        given = {
            name: array if double or array.dtype.kind == "i" else array.astype("f4") for name, array in rows.items()
        }
        data = given
        if in_blocks:
            data = ({name: array[i : i + 700] for name, array in given.items()} for i in range(0, num_rows, 700))
        posterior = RVGA(model).run(data, progress_bar=False)
    assert posterior.num_rows == num_rows and posterior.info["converged"]
    found, error = slope(model, rows, posterior)
    np.testing.assert_array_less(np.abs(found), 5 * error + 0.03)
