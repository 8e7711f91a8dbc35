"""Posteriors with a known q on small models, without running any recursion."""

import functools

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_rvga import Posterior
from numpyro_rvga.core.gaussians import FullGaussian
from numpyro_rvga.model import Program

NOISE = 0.5


def posterior_of(model, data, mean, scale, **model_kwargs):
    program = Program(model, {name: np.asarray(array) for name, array in data.items()}, model_kwargs)
    return Posterior(program, FullGaussian(mean, scale), num_rows=len(next(iter(data.values()))))


def regression(X, y=None):
    """Conjugate, with sites whose alphabetical order is not the model's."""
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    intercept = numpyro.sample("intercept", dist.Normal(1.0, 3.0))
    numpyro.deterministic("slope_sum", slopes.sum())
    with numpyro.plate("rows", X.shape[0]):
        line = numpyro.deterministic("line", intercept + X @ slopes)
        numpyro.sample("y", dist.Normal(line, NOISE), obs=y)


def regression_data(num_rows=40, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(num_rows, 2)) * np.array([1.0, 5.0]) + 1.0
    y = 0.5 + X @ np.array([1.0, -0.3]) + NOISE * rng.normal(size=num_rows)
    return {"X": X, "y": y}


def regression_answer(data):
    """Mean and covariance of the exact posterior, in the model's order: slopes, intercept."""
    design = np.column_stack([data["X"], np.ones(len(data["y"]))])
    prior_mean, prior_precision = np.array([0.0, 0.0, 1.0]), np.diag([0.25, 0.25, 1 / 9])
    covariance = np.linalg.inv(prior_precision + design.T @ design / NOISE**2)
    return covariance @ (prior_precision @ prior_mean + design.T @ data["y"] / NOISE**2), covariance


@functools.cache
def regression_program():
    return Program(regression, regression_data(), {})


def exact_regression(data, inflation=1.0, shift=0.0):
    """The exact posterior; or wider by ``inflation``, or off by ``shift`` standard deviations."""
    mean, covariance = regression_answer(data)
    mean = mean + shift * np.sqrt(np.diagonal(covariance))
    scale = inflation * np.linalg.cholesky(covariance)
    return Posterior(regression_program(), FullGaussian(mean, scale), num_rows=len(data["y"]))


def constrained(y=None):
    """Sites on the whole line, the positive half line and the unit interval, out of alphabetical order."""
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    numpyro.deterministic("twice", 2 * deviation)
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(shift.sum() + share, deviation), obs=y)


MEAN = np.array([0.5, -1.0, 0.3, -0.2])  # shift[0], shift[1], logit share, log deviation
ROOT = np.array([[0.5, 0.2, 0.1, 0.0], [-0.3, 0.4, 0.2, 0.1], [0.0, 0.1, -0.6, 0.2], [0.1, 0.2, 0.1, 0.3]])


def constrained_posterior():
    return posterior_of(constrained, {"y": np.array([0.1, 0.4, -0.3])}, MEAN, ROOT)


def flat(sites):
    """The unconstrained vector of :func:`constrained`'s sites, by formulas of its own."""
    share, deviation = np.asarray(sites["share"], float), np.asarray(sites["deviation"], float)
    parts = [np.asarray(sites["shift"], float), np.log(share / (1 - share))[..., None], np.log(deviation)[..., None]]
    return np.concatenate(parts, axis=-1)


def logistic(X, y=None):
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ weights), obs=y)


def logistic_posterior(mean, scale):
    X = np.eye(len(mean))
    return posterior_of(logistic, {"X": X, "y": np.ones(len(mean))}, jnp.asarray(mean), jnp.asarray(scale))
