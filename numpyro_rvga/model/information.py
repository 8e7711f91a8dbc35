"""Fisher information of rows about their one predictor, where the outcome itself is the sufficient statistic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from ..core.symbolic import Factorisation, Reading
from .tracing import SiteRecord, peel

# Exponential families in the outcome: what must not depend on theta for that, if anything.
BY_OUTCOME = {
    dist.Exponential: None,
    dist.Gamma: "concentration",
    dist.GammaPoisson: "concentration",
    dist.NegativeBinomial2: "concentration",
    dist.NegativeBinomialProbs: "concentration",
    dist.NegativeBinomialLogits: "concentration",
    dist.GeometricProbs: None,
    dist.GeometricLogits: None,
}


class Information(NamedTuple):
    """(d mean / du)^2 / variance (BONG paper, proposition 4.2).

    :ivar constants: (row, element) -> what ``of`` takes. :ivar of: predictor (1,), these -> the information (1, 1).
    """

    constants: Callable[[Any, Array], Any]
    of: Callable[[Array, Any], Array]


def information_of(
    run_site: Callable[[Array, Any], SiteRecord],
    split: Factorisation,
    theta: jax.ShapeDtypeStruct,
    row: Any,
    kind: type,
) -> Information | None:
    """Of one of a site's terms; None if it is not known.

    :param run_site: (theta, row) -> the site's record. :param split: of the term, as a function of theta, row, element.
    :param kind: the distribution's type.
    """
    if kind not in BY_OUTCOME or split.num_predictors != 1:
        return None
    fixed = BY_OUTCOME[kind]

    def facts(t, r, e):
        record = run_site(t, r)
        fn, mask = peel(record.fn)
        attributes = {"mean": fn.mean, "variance": fn.variance, "weight": mask * record.weight}
        attributes |= {"fixed": getattr(fn, fixed)} if fixed else {}
        shape = jnp.shape(record.value)
        return {n: jnp.ravel(jnp.broadcast_to(jnp.asarray(x, t.dtype), shape))[e] for n, x in attributes.items()}

    reading = Reading(facts, theta, row, jax.ShapeDtypeStruct((), jnp.int32))
    mean, variance, weight = (reading.split(name) for name in ("mean", "variance", "weight"))
    if mean.num_predictors != 1 or variance.num_predictors != 1 or weight.num_predictors:
        return None
    if fixed and reading.split("fixed").num_predictors:
        return None
    zero = jnp.zeros(theta.shape, theta.dtype)

    def constants(r, e):
        arguments = (r, e)
        begin, slope = split.predictors(zero, arguments)[0], jax.jacrev(split.predictors)(zero, arguments)[0]
        square = slope @ slope

        def seen(other: Factorisation) -> tuple:
            """The other's predictor as a multiple of the term's, and an offset."""
            along = jax.jacrev(other.predictors)(zero, arguments)[0] @ slope
            scale = jnp.where(square > 0, along / jnp.where(square > 0, square, 1.0), 0.0)
            return scale, other.predictors(zero, arguments)[0] - scale * begin, other.constants(arguments)

        return seen(mean), seen(variance), weight.density(jnp.zeros(0, theta.dtype), weight.constants(arguments))

    def of(u, arguments):
        of_mean, of_variance, times = arguments

        def at(split, v, attributes):
            scale, offset, rest = attributes
            return split.density(scale * v + offset, rest)

        slope = jax.grad(lambda v: at(mean, v, of_mean))(u)[0]
        return (times * slope * slope / at(variance, u, of_variance))[None, None]

    return Information(constants, of)
