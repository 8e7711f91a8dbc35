"""Distributions whose log densities are closed forms of their parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpyro.distributions as dist
from jax.scipy.special import gammaln

from ...core.expectations import closed_forms as cf


class FormPattern(NamedTuple):
    """How a distribution's log density is one of the closed forms.

    :ivar parameters: the predictors: attribute name and the link through which it must be affine in theta.
    :ivar fixed: what must not depend on theta, and becomes the arguments of ``coefficients``.
    """

    parameters: tuple[tuple[str, str | None], ...]
    fixed: tuple[str, ...]
    coefficients: Callable[..., Any]


def _bernoulli(value, weight):
    return cf.Logistic(value, jnp.ones_like(value), jnp.zeros_like(value), weight)


def _binomial(value, weight, total_count):
    ways = gammaln(total_count + 1) - gammaln(value + 1) - gammaln(total_count - value + 1)
    return cf.Logistic(value, total_count, ways, weight)


def _poisson(value, weight):
    return cf.Exponential(value, jnp.ones_like(value), -gammaln(value + 1), weight)


def _exponential(value, weight):
    return cf.Gamma(jnp.ones_like(value), value, jnp.zeros_like(value), weight)


def _gamma(value, weight, concentration):
    a = jnp.asarray(concentration, weight.dtype)
    return cf.Gamma(a, value, (a - 1) * jnp.log(value) - gammaln(a), weight)


def _normal(weight, scale=None):
    zero = jnp.zeros_like(weight)
    if scale is None:
        return cf.GaussianLogScale(zero, zero, weight)
    return cf.Gaussian(zero, scale, zero, weight)


def _laplace(weight, scale=None):
    zero = jnp.zeros_like(weight)
    if scale is None:
        return cf.LaplaceLogScale(zero, zero, weight)
    return cf.Laplace(zero, scale, zero, weight)


def _log_normal(value, weight, scale=None):
    logged = jnp.log(value)
    return _normal(weight, scale)._replace(target=logged, constant=-weight * logged)


def patterns_of(kind: type) -> list[FormPattern]:
    """Ways to read a distribution as a closed form, the first that fits the model being used."""
    observed = ("value", "weight")
    error, location, log_scale = ("loc - value", None), ("loc", None), ("scale", "log")
    table = {
        dist.BernoulliLogits: [FormPattern((("logits", None),), observed, _bernoulli)],
        dist.BernoulliProbs: [FormPattern((("probs", "logit"),), observed, _bernoulli)],
        dist.BinomialLogits: [FormPattern((("logits", None),), (*observed, "total_count"), _binomial)],
        dist.BinomialProbs: [FormPattern((("probs", "logit"),), (*observed, "total_count"), _binomial)],
        dist.Poisson: [FormPattern((("rate", "log"),), observed, _poisson)],
        dist.Exponential: [FormPattern((("rate", "log"),), observed, _exponential)],
        dist.Gamma: [FormPattern((("rate", "log"),), (*observed, "concentration"), _gamma)],
        dist.Normal: [
            FormPattern((error,), ("weight", "scale"), _normal),
            FormPattern((error, log_scale), ("weight",), _normal),
        ],
        dist.Laplace: [
            FormPattern((error,), ("weight", "scale"), _laplace),
            FormPattern((error, log_scale), ("weight",), _laplace),
        ],
        dist.LogNormal: [
            FormPattern((location,), (*observed, "scale"), _log_normal),
            FormPattern((location, log_scale), observed, _log_normal),
        ],
    }
    return table.get(kind, [])
