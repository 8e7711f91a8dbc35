"""Fisher information of rows about their predictors: by the variance of the outcome, or by divergences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array

from ...core.jaxprs.symbolic import Factorization, Reading, factorize
from ...core.pytrees import PyTree
from ..handlers.tracing import SiteRecord, base_distribution

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

# Those whose Kullback-Leibler divergence from their own kind NumPyro has.
BY_DIVERGENCE = (dist.Beta, dist.Dirichlet, dist.Gamma, dist.MultivariateNormal, dist.Normal)


class Information(NamedTuple):
    """The Fisher information about a term's predictors.

    :ivar constants: (row, element) -> what ``of`` takes. :ivar of: predictors (C,), these -> the information (C, C).
    """

    constants: Callable[[PyTree, Array], Any]
    of: Callable[[Array, PyTree], Array]


def information_of(
    run_site: Callable[[Array, PyTree], SiteRecord],
    split: Factorization,
    theta: jax.ShapeDtypeStruct,
    row: PyTree,
    kind: type,
) -> Information | None:
    """The Fisher information of a site's terms; None if there is no formula for it.

    :param run_site: (theta, row) -> the site's record. :param split: of the term, as a function of theta, row, element.
    :param kind: the distribution's type.
    """
    information = _by_outcome(run_site, split, theta, row, BY_OUTCOME[kind]) if kind in BY_OUTCOME else None
    if information is None and kind in BY_DIVERGENCE:
        information = _by_divergence(run_site, split, theta, row)
    return information


def _by_divergence(
    run_site: Callable[[Array, PyTree], SiteRecord], split: Factorization, theta: jax.ShapeDtypeStruct, row: PyTree
) -> Information:
    """The Hessian of KL(p_u || p_v) in v, at v = u."""
    size = theta.shape[0]

    def divergence(both, r, e):
        record, other = run_site(both[:size], r), run_site(both[size:], r)
        (fn, mask), (other_fn, _) = base_distribution(record.fn), base_distribution(other.fn)
        batch_shape = jnp.shape(record.value)[: jnp.ndim(record.value) - fn.event_dim]
        total = dist.kl_divergence(fn, other_fn) * mask * record.weight_of(fn)
        return jnp.ravel(jnp.broadcast_to(total, batch_shape))[e]

    pair = factorize(
        divergence, jax.ShapeDtypeStruct((2 * size,), theta.dtype), row, jax.ShapeDtypeStruct((), jnp.int32)
    )

    def constants(r, e):
        arguments, zero = (r, e), jnp.zeros(2 * size, theta.dtype)
        jacobian = jax.jacrev(split.predictors)(zero[:size], arguments)
        from_predictors = jacobian.T @ jnp.linalg.pinv(jacobian @ jacobian.T, hermitian=True)  # (P, C)
        of_both = jax.jacrev(pair.predictors)(zero, arguments)
        first, second = of_both[:, :size] @ from_predictors, of_both[:, size:] @ from_predictors
        offset = pair.predictors(zero, arguments) - (first + second) @ split.predictors(zero[:size], arguments)
        return first, second, offset, pair.constants(arguments)

    def of(u, arguments):
        first, second, offset, rest = arguments
        return jax.hessian(lambda v: pair.density(first @ u + second @ v + offset, rest))(u)

    return Information(constants, of)


def _by_outcome(
    run_site: Callable[[Array, PyTree], SiteRecord],
    split: Factorization,
    theta: jax.ShapeDtypeStruct,
    row: PyTree,
    fixed: str | None,
) -> Information | None:
    """(d mean / du)^2 / variance, for one predictor u (BONG paper, proposition 4.2).

    :param fixed: the parameter that must not depend on theta, if any.
    """
    if split.num_predictors != 1:
        return None

    def attributes_of(t, r, e):
        record = run_site(t, r)
        fn, mask = base_distribution(record.fn)
        attributes = {"mean": fn.mean, "variance": fn.variance, "weight": mask * record.weight_of(fn)}
        attributes |= {"fixed": getattr(fn, fixed)} if fixed else {}
        shape = jnp.shape(record.value)
        return {n: jnp.ravel(jnp.broadcast_to(jnp.asarray(x, t.dtype), shape))[e] for n, x in attributes.items()}

    reading = Reading(attributes_of, theta, row, jax.ShapeDtypeStruct((), jnp.int32))
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

        def in_multiples(other: Factorization) -> tuple:
            """The other's predictor as a multiple of the term's, and an offset."""
            along = jax.jacrev(other.predictors)(zero, arguments)[0] @ slope
            scale = jnp.where(square > 0, along / jnp.where(square > 0, square, 1.0), 0.0)
            return scale, other.predictors(zero, arguments)[0] - scale * begin, other.constants(arguments)

        return (
            in_multiples(mean),
            in_multiples(variance),
            weight.density(jnp.zeros(0, theta.dtype), weight.constants(arguments)),
        )

    def of(u, arguments):
        of_mean, of_variance, times = arguments

        def at(split, v, attributes):
            scale, offset, rest = attributes
            return split.density(scale * v + offset, rest)

        slope = jax.grad(lambda v: at(mean, v, of_mean))(u)[0]
        return (times * slope * slope / at(variance, u, of_variance))[None, None]

    return Information(constants, of)
