"""The prior: its exactly Gaussian part, its other terms as factors, and a Gaussian to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.recursion import Quadratic, State, new_state
from .terms import Terms, constants, flatten, linearise

CHECKED_ELEMENTS = 32  # of a site, when asking whether its terms are quadratic
NUM_DRAWS = 2000
WINSOR = 4.0  # robust standard deviations at which prior draws are cut before their moments are taken


class Prior(NamedTuple):
    """log p(theta) = gaussian(theta) + sum of ``terms``.

    :ivar gaussian: the exactly Gaussian terms; proper by itself if there are no others.
    :ivar terms: the others.
    """

    gaussian: Quadratic
    terms: tuple[Terms, ...]


def split_prior(all_terms: list[Terms], theta: jax.ShapeDtypeStruct) -> Prior:
    """Collect terms whose Hessian is constant into one Gaussian; correlated and linear-Gaussian priors are exact."""
    size, dtype = theta.shape[0], theta.dtype
    affine = [terms for terms in all_terms if terms.is_affine]
    spreads, parts = jax.device_get(
        jax.jit(lambda: ([_spread(t, dtype) for t in affine], [_expand(t, size, dtype) for t in affine]))()
    )
    precision, linear, constant = np.zeros((size, size), dtype), np.zeros(size, dtype), np.zeros((), dtype)
    others = [terms for terms in all_terms if not terms.is_affine]
    for terms, (spread, largest), part in zip(affine, spreads, parts):
        if spread <= 100 * jnp.finfo(dtype).eps * largest:
            precision, linear, constant = precision + part[0], linear + part[1], constant + part[2]
        else:
            others.append(terms)
    gaussian = Quadratic(*[jnp.asarray(x) for x in (precision, linear, constant, np.zeros(size, dtype))])
    return Prior(gaussian, tuple(others))


def initial_state(prior: Prior, draw: Callable[[Array], Array]) -> State:
    """The Gaussian prior itself, or a Gaussian fitted to draws of the prior with its stand-in part recorded.

    :param draw: rng_key -> theta (P,), a draw from the prior.
    """
    size, dtype = prior.gaussian.linear.shape[0], prior.gaussian.linear.dtype
    if not prior.terms:
        mean, root, log_normalizer = _from_quadratic(prior.gaussian)
        state = new_state(mean, root, None)
        return state._replace(log_evidence=log_normalizer)
    many = jax.jit(lambda key: jax.vmap(draw)(jax.random.split(key, NUM_DRAWS)))
    draws = np.asarray(many(jax.random.key(0)), np.float64)
    mean, root = _robust_moments(draws)
    gaussian = Quadratic(*[np.asarray(x, np.float64) for x in prior.gaussian])
    shift = mean - gaussian.centre
    pull = gaussian.precision @ shift
    normal = -0.5 * size * np.log(2 * np.pi) - np.sum(np.log(np.diagonal(root)))
    value = gaussian.constant + gaussian.linear @ shift - 0.5 * shift @ pull
    inverse = np.linalg.inv(root)
    site = (inverse.T @ inverse - gaussian.precision, pull - gaussian.linear, normal - value, mean)
    mean, root, *site = [jnp.asarray(x, dtype) for x in (mean, root, *site)]
    return new_state(mean, root, Quadratic(*site))


def _spread(terms: Terms, dtype) -> tuple[Array, Array]:
    """How much the terms' Hessians differ from point to point, and how large they are: quadratics have no spread."""
    rng = np.random.default_rng(0)
    chosen = jnp.asarray(rng.permutation(terms.num_elements)[:CHECKED_ELEMENTS].astype(np.int32))
    points = jnp.asarray(rng.normal(size=(3, terms.num_predictors)), dtype)

    def curvatures(element):
        values = terms.constants({}, element)
        return jax.vmap(lambda u: jax.hessian(terms.density)(u, values))(points)

    found = jax.vmap(curvatures)(chosen)
    return jnp.max(jnp.abs(found - found[:, :1]), initial=0.0), jnp.max(jnp.abs(found), initial=0.0)


def _expand(terms: Terms, size: int, dtype) -> tuple[Array, Array, Array]:
    """Precision, slope and value of the terms at theta = 0."""
    offset, design, values = flatten(*linearise(terms, jnp.zeros(size, dtype), {}), constants(terms, {}))
    value = jax.vmap(terms.density)(offset, values)
    slope = jax.vmap(jax.grad(terms.density))(offset, values)
    curvature = jax.vmap(jax.hessian(terms.density))(offset, values)
    flat = design.reshape(-1, size)
    weighted = jnp.einsum("ncd,ndp->ncp", curvature, design).reshape(flat.shape)
    return -flat.T @ weighted, slope.reshape(-1) @ flat, jnp.sum(value)


def _from_quadratic(quadratic: Quadratic) -> tuple[Array, Array, Array]:
    """Mean, root of the covariance and log normaliser of a Gaussian given by its log density up to a constant."""
    precision = np.asarray(quadratic.precision, np.float64)
    scale = 1 / np.sqrt(np.diagonal(precision))
    try:
        factor = np.linalg.cholesky(scale[:, None] * precision * scale)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the prior's precision matrix is not positive definite: some direction has no prior."
        ) from error
    root = scale[:, None] * np.linalg.inv(factor).T
    linear = np.asarray(quadratic.linear, np.float64)
    mean = np.asarray(quadratic.centre, np.float64) + root @ (root.T @ linear)
    half_log_det = np.sum(np.log(np.diagonal(factor)) - np.log(scale))
    quadratic_term = 0.5 * np.sum((root.T @ linear) ** 2)
    log_normalizer = float(quadratic.constant) + quadratic_term + 0.5 * len(mean) * np.log(2 * np.pi) - half_log_det
    dtype = quadratic.linear.dtype
    return jnp.asarray(mean, dtype), jnp.asarray(root, dtype), jnp.asarray(log_normalizer, dtype)


def _robust_moments(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and lower root of the covariance of draws (n, P), each coordinate winsorised: heavy tails must not rule."""
    finite = draws[np.isfinite(draws).all(axis=1)]
    low, centre, high = np.quantile(finite, [0.25, 0.5, 0.75], axis=0)
    deviation = np.maximum((high - low) / 1.349, 1e-6)
    cut = np.clip(finite, centre - WINSOR * deviation, centre + WINSOR * deviation)
    covariance = np.atleast_2d(np.cov(cut.T))
    scale = np.sqrt(np.diagonal(covariance))
    correlation = covariance / np.outer(scale, scale)
    shrunk = 0.95 * correlation + 0.05 * np.eye(len(scale))  # more coordinates than draws can support stay regular
    return cut.mean(axis=0), scale[:, None] * np.linalg.cholesky(shrunk)
