"""Gaussian approximations of rows that have become part of q: what they are, and by how much they are off."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from ..matrices.linalg import semidefinite_factor, solve_lower
from .factors import Factors, Kind, Moments, Sums
from .state import Absorbed, QuadraticFactors


def absorbed_moments(
    kinds: tuple[Kind, ...], factors: tuple[Factors, ...], predictor_scales: tuple[Array, ...]
) -> tuple[Absorbed, ...]:
    """Moments of the factors' predictors under q: means ``predictors`` and covariances scale_i scale_i^T.

    :param predictor_scales: scale_i by kind, (n, C, r).
    """

    def one(kind, mean, scale, constants):
        covariance = scale @ scale.T
        steps = semidefinite_factor(covariance)[0].T
        points = jnp.concatenate([mean[None], mean + steps, mean - steps])
        curvatures = jax.vmap(lambda u: kind.plugin(u, covariance, constants)[2])(points)
        changes = (curvatures[1:] - curvatures[0]).reshape(2, *covariance.shape, len(mean))
        along = jnp.abs(jnp.einsum("ki,skij,kj->sk", steps, changes, steps))
        return Absorbed(mean, covariance, jnp.sum(jnp.max(along, axis=0)))

    return tuple(
        jax.vmap(partial(one, kind))(block.predictors, scale, block.constants)
        for kind, block, scale in zip(kinds, factors, predictor_scales)
    )


def row_factors_of(
    kinds: tuple[Kind, ...], factors: tuple[Factors, ...], absorbed: tuple[Absorbed, ...]
) -> tuple[QuadraticFactors, ...]:
    """The Gaussian approximations by which factors are part of q, from their predictors' moments at that time.

    With E[phi], g = E[grad phi] and G = E[hess phi] under u ~ N(m, S), the approximation's logarithm is
    E[phi] + g . (u - m) + (u - m)' G (u - m) / 2 - tr(G S) / 2: it has the same three expectations.
    """
    return tuple(
        _row_factors(old, kind.expect(old.mean, old.covariance, block.constants)[0])
        for kind, block, old in zip(kinds, factors, absorbed)
    )


def _row_factors(old: Absorbed, moments: Moments) -> QuadraticFactors:
    """The approximations of n factors of one kind, from E[phi] (n,), g (n, C) and G (n, C, C)."""
    value, gradient, hessian = moments
    return QuadraticFactors.expected(value, gradient, -hessian, old.mean, old.covariance)


def row_factors_and_residuals(
    kinds: tuple[Kind, ...],
    factors: tuple[Factors, ...],
    predictor_scales: tuple[Array, ...],
    absorbed: tuple[Absorbed, ...],
) -> tuple[tuple[QuadraticFactors, ...], tuple[Array, ...]]:
    """The approximations of :func:`row_factors_of`, and their residuals at this q, (n,) by kind.

    A residual is the length of what a factor's natural gradient at q differs by from its approximation's, in standard
    deviations of q: sqrt(dg' S dg + tr((S dG)^2) / 2), with S the predictors' covariance under q.
    """

    def one(mean, covariance, moments, site):
        _, gradient, hessian = moments
        slope = gradient - (site.linear - site.precision @ mean)
        change = covariance @ (hessian + site.precision)
        return jnp.sqrt(jnp.maximum(slope @ covariance @ slope + 0.5 * jnp.sum(change * change.T), 0.0))

    def of_kind(kind, block, scale, old):
        covariance = jnp.einsum("ncr,ndr->ncd", scale, scale)
        then, now = (old.mean, old.covariance, block.constants), (block.predictors, covariance, block.constants)
        both, _ = kind.expect(*jax.tree.map(lambda *x: jnp.concatenate(x), then, now))  # at once: compiled once
        count = len(block.predictors)
        row_factors = _row_factors(old, tuple(x[:count] for x in both))
        return row_factors, jax.vmap(one)(block.predictors, covariance, tuple(x[count:] for x in both), row_factors)

    pairs = list(map(of_kind, kinds, factors, predictor_scales, absorbed))
    return tuple(row_factors for row_factors, _ in pairs), tuple(residuals for _, residuals in pairs)


def quadratic_sums(factors: Factors, approximations: QuadraticFactors) -> Sums:
    """Value, gradient (r,) and minus Hessian (r, r) in e of the summed approximations, where e = 0."""
    product = jnp.einsum("ncd,nd->nc", approximations.precision, factors.predictors)
    weighted = jnp.einsum("ncd,ndr->ncr", approximations.precision, factors.jacobian)
    gradient = jnp.einsum("nc,ncr->r", approximations.linear - product, factors.jacobian)
    linear = jnp.sum((approximations.linear - 0.5 * product) * factors.predictors, axis=1)
    value = jnp.sum(approximations.constant + linear)
    return Sums(value, gradient, jnp.einsum("ncr,ncs->rs", factors.jacobian, weighted))


def predictor_scales(factors: tuple[Factors, ...], precision_root: Array) -> tuple[Array, ...]:
    """J_i L^-T for each factor, (n, C, r), with the precision L L^T: J_i Lambda^-1 J_i^T is its square."""

    def scale(jacobian):
        n, c, r = jacobian.shape
        return solve_lower(precision_root, jacobian.reshape(n * c, r).T).T.reshape(n, c, r)

    return tuple(scale(f.jacobian) for f in factors)
