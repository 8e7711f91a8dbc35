"""What the benchmark of expectations is run on: log-likelihoods of a row, with references, and models with data."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array

from numpyro_rvga.core.expectations.by_nodes import hermite_rule

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

DENSE = {1: 120, 2: 60, 3: 24}  # nodes along each axis, where there are no kinks
PIECE = 120  # nodes between two kinks, and beyond the last
ENDS = 12.0  # standard deviations


# ---------------------------------------------------------------------- of a row
def negative_binomial(u: Array, y: Array) -> Array:
    return dist.NegativeBinomial2(jnp.exp(u[0]), jnp.exp(u[1])).log_prob(y)


def student_t(u: Array, y: Array) -> Array:
    return dist.StudentT(jnp.exp(u[2]), u[0], jnp.exp(u[1])).log_prob(y)


def beta(u: Array, y: Array) -> Array:
    mean, k = jax.nn.sigmoid(u[0]), jnp.exp(u[1])
    return dist.Beta(mean * k, (1 - mean) * k).log_prob((y + 0.5) / 12)


def gamma(u: Array, y: Array) -> Array:
    return dist.Gamma(jnp.exp(u[1]), jnp.exp(u[1] - u[0])).log_prob(y + 0.5)


def zero_inflated_poisson(u: Array, y: Array) -> Array:
    return dist.ZeroInflatedPoisson(jax.nn.sigmoid(u[1]), jnp.exp(u[0])).log_prob(y)


def tanh_network(u: Array, y: Array) -> Array:
    return dist.Normal(jnp.tanh(u[0]), 0.5).log_prob(y)


def absolute_loss(u: Array, y: Array) -> Array:
    return -jnp.abs(y - u[0]) / 0.5


def insensitive_loss(u: Array, y: Array) -> Array:
    return -jnp.maximum(0.0, jnp.abs(y - u[0]) - 0.3) / 0.2


def quantile_regression(u: Array, y: Array) -> Array:
    return dist.AsymmetricLaplaceQuantile(u[0], jnp.exp(u[1]), 0.8).log_prob(y)


def categorical(u: Array, y: Array) -> Array:
    return dist.Categorical(logits=jnp.concatenate([jnp.zeros(1), u])).log_prob(jnp.minimum(y, 2.0).astype(int))


def ordered_logistic(u: Array, y: Array) -> Array:
    """Of NumPyro's OrderedLogistic with cutpoints u[1] and u[1] + exp(u[2]), where it does not underflow to -inf."""
    gap = jnp.exp(u[2])
    low, high = u[1] - u[0], u[1] - u[0] + gap
    middle = jax.nn.log_sigmoid(high) + jax.nn.log_sigmoid(-low) + jnp.log(-jnp.expm1(-gap))
    return jnp.select([y < 1, y < 2], [jax.nn.log_sigmoid(low), middle], jax.nn.log_sigmoid(-high))


def mixture_for_outliers(u: Array, y: Array) -> Array:
    parts = jnp.stack([jax.nn.log_sigmoid(-u[2]), jax.nn.log_sigmoid(u[2])])
    scales = jnp.stack([jnp.exp(u[1]), jnp.full_like(u[1], 10.0)])
    return jax.nn.logsumexp(parts + dist.Normal(u[0], scales).log_prob(y))


LIKELIHOODS = [
    (negative_binomial, 2),
    (student_t, 3),
    (beta, 2),
    (gamma, 2),
    (zero_inflated_poisson, 2),
    (tanh_network, 1),
    (absolute_loss, 1),
    (insensitive_loss, 1),
    (quantile_regression, 2),
    (categorical, 2),
    (ordered_logistic, 3),
    (mixture_for_outliers, 3),
]
KINKS = {absolute_loss: (0.0,), insensitive_loss: (-0.3, 0.3), quantile_regression: (0.0,)}  # at u[0] = y + these


def dense(phi: Callable, means: Array, covariances: Array, outcomes: Array) -> Array:
    """E[phi] of each row, by Gauss and Hermite's rule, or between kinks by Gauss and Legendre's."""
    points_of = partial(_pieces, KINKS[phi]) if phi in KINKS else _product_rule

    def one(row):
        mean, covariance, y = row
        points, weights = points_of(mean, covariance, y)
        return weights @ jax.vmap(lambda u: phi(u, y))(points)

    return jax.jit(partial(jax.lax.map, one))((means, covariances, outcomes))


def _product_rule(mean: Array, covariance: Array, y: Array) -> tuple[Array, Array]:
    del y
    z, weights = hermite_rule(mean.size, DENSE[mean.size])
    return mean + z @ jnp.linalg.cholesky(covariance).T, jnp.asarray(weights)


def _pieces(kinks: tuple[float, ...], mean: Array, covariance: Array, y: Array) -> tuple[Array, Array]:
    """Nodes for u[0] given the second predictor, if there is one, in pieces that end at kinks."""
    z, across = hermite_rule(1, DENSE[2]) if mean.size == 2 else (np.zeros((1, 1)), np.ones(1))
    t, weights = np.polynomial.legendre.leggauss(PIECE)
    root = jnp.linalg.cholesky(covariance[::-1, ::-1])  # of the others first, and then of u[0]
    others = mean[1:] + z[:, : mean.size - 1] @ root[:-1, :-1].T
    centers, spread = mean[0] + z[:, : mean.size - 1] @ root[-1, :-1], root[-1, -1]

    def given(center):
        low, high = center - ENDS * spread, center + ENDS * spread
        ends = jnp.stack([low, *[jnp.clip(y + kink, low, high) for kink in kinks], high])
        middle, half = 0.5 * (ends[1:] + ends[:-1])[:, None], 0.5 * (ends[1:] - ends[:-1])[:, None]
        u = (middle + half * t).ravel()
        return u, (half * weights).ravel() * jnp.exp(-0.5 * ((u - center) / spread) ** 2) / spread

    u, inner = jax.vmap(given)(centers)
    points = [u.ravel(), *[jnp.repeat(column, u.shape[1]) for column in others.T]]
    return jnp.stack(points, axis=1), (across[:, None] * inner / np.sqrt(2 * np.pi)).ravel()


# ---------------------------------------------------------------------- whole runs
class Case(NamedTuple):
    """:ivar options: keyword arguments of the model, that are no rows."""

    model: Callable
    data: dict[str, np.ndarray]
    options: dict[str, Any]


def counts(X, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    concentration = numpyro.sample("concentration", dist.Exponential(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(X @ slopes), concentration), obs=y)


def _line(x):
    return numpyro.sample("a", dist.Normal(0, 5)) + numpyro.sample("b", dist.Normal(0, 5)) * x


def outliers(x, y=None):
    mean = _line(x)
    scale, share = numpyro.sample("scale", dist.HalfNormal(1)), numpyro.sample("share", dist.Beta(1, 9))
    parts = dist.Categorical(jnp.stack([1 - share, share]))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.MixtureGeneral(parts, [dist.Normal(mean, scale), dist.Normal(mean, 10.0)]), obs=y)


def quantile(x, y=None):
    mean, scale = _line(x), numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.AsymmetricLaplaceQuantile(mean, scale, 0.8), obs=y)


def absolute(x, y=None):
    mean = _line(x)
    with numpyro.plate("rows", len(x)):
        numpyro.factor("loss", -jnp.abs(y - mean) / 0.5)


def insensitive(x, y=None):
    mean = _line(x)
    with numpyro.plate("rows", len(x)):
        numpyro.factor("loss", -jnp.maximum(0.0, jnp.abs(y - mean) - 0.3) / 0.2)


def _covariance_root(scale):
    scales = numpyro.sample("scales", dist.HalfNormal(scale).expand([2]).to_event(1))
    return scales[:, None] * numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))


def bivariate(x, y=None):
    a = numpyro.sample("a", dist.Normal(0, 2).expand([2]).to_event(1))
    b = numpyro.sample("b", dist.Normal(0, 2).expand([2]).to_event(1))
    root = _covariance_root(2.0)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.MultivariateNormal(a + x[:, None] * b, scale_tril=root), obs=y)


def varying_slopes(x, group, y=None, num_groups=20):
    mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
    root, scale = _covariance_root(1.0), numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("groups", num_groups):
        line = numpyro.sample("line", dist.MultivariateNormal(mean, scale_tril=root))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(line[group, 0] + line[group, 1] * x, scale), obs=y)


def half_student(x, y=None):
    mean = _line(x)
    scale = numpyro.sample("scale", dist.TruncatedDistribution(dist.StudentT(3.0, 0.0, 10.0), low=0.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def cases(num_rows: int) -> dict[str, Case]:
    """Those that are hard, and the gallery of ``examples/observation_families.py``.

    :param num_rows: of the gallery.
    """
    from observation_families import FAMILIES, model, simulate

    rng = np.random.default_rng(0)
    X = 0.3 * rng.normal(size=(20_190, 10))
    x = rng.normal(size=500)
    y = 1 + 0.5 * x + 0.5 * rng.laplace(size=500)
    both = 1 + 0.5 * x[:, None] + rng.normal(size=(500, 2)) @ np.array([[1.0, 0.6], [0.0, 0.8]])
    group = rng.integers(20, size=500)
    lines = np.array([1.0, 0.5]) + rng.normal(size=(20, 2)) @ np.array([[0.8, 0.3], [0.0, 0.4]])
    slopes = {"x": x, "group": group, "y": lines[group, 0] + lines[group, 1] * x + 0.5 * rng.normal(size=500)}
    counted = rng.negative_binomial(2, 2 / (2 + np.exp(0.5 * X.sum(axis=1))))
    found = {
        "mixture for outliers, 500 rows": Case(outliers, with_outliers(500, 0), {}),
        "quantile regression, 500 rows": Case(quantile, {"x": x, "y": y}, {}),
        "absolute loss, 500 rows": Case(absolute, {"x": x, "y": y}, {}),
        "insensitive loss, 500 rows": Case(insensitive, {"x": x, "y": y}, {}),
        "two outcomes, LKJ, 500 rows": Case(bivariate, {"x": x, "y": both}, {}),
        "varying slopes, LKJ, 500 rows": Case(varying_slopes, slopes, {}),
        "half-Student-t prior, 500 rows": Case(half_student, {"x": x, "y": y}, {}),
    }
    for title, (family, extra) in FAMILIES.items():
        data = simulate(family, {"intercept": 0.5, "slope": -0.8, **extra}, num_rows)
        found[f"{title}, {num_rows:,} rows"] = Case(model, data, {"family": family})
    found["negative binomial, 20,190 rows of 10"] = Case(counts, {"X": X, "y": counted}, {})
    return found


def with_outliers(num_rows: int, seed: int) -> dict[str, np.ndarray]:
    """Of which a twentieth has ten times the scale and more."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=num_rows)
    far = 10 * rng.normal(size=num_rows) * (rng.random(num_rows) < 0.05)
    return {"x": x, "y": 1 + 0.5 * x + 0.3 * rng.normal(size=num_rows) + far}
