"""How likely a row is under a Gaussian over theta, by way of its predictors."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp

from ..core.expectations import HERMITE_NODES, normal_rule
from ..core.gaussians import Family
from ..core.linalg import semidefinite_root
from .program import Program
from .terms import linearise, predictors_of

METHODS = ("plugin", "linearized", "monte_carlo")
Row = Mapping[str, Array]


def linearized_predictors(
    program: Program, gaussian: Family, row: Row, rng_key: Array, num_samples: int, *, plugin: bool = False
) -> tuple[Array, Array]:
    """A row's predictors, linearised in theta at the mean: nodes (S, T) and log weights (S,).

    All T predictors of its sites and elements are drawn together: by quadrature if there are up to three.

    :param row: without a leading axis. :param plugin: theta stays at its mean.
    """
    rows = {name: value[None] for name, value in row.items()}
    centres, spreads = [], []
    for terms in program.terms:
        offset, design, local = linearise(terms, gaussian.mean, rows)
        parts = [local] if plugin else [gaussian.spread(design), local]
        centres.append(offset.reshape(-1))
        spreads.append(jnp.concatenate(parts, axis=-1).reshape(offset.size, -1))
    centre, spread = jnp.concatenate(centres), jnp.concatenate(spreads)
    if not spread.shape[1]:
        return centre[None], jnp.zeros(1, centre.dtype)
    root = semidefinite_root((spread @ spread.T)[None])[0]
    standard, log_weights = _nodes(rng_key, num_samples, len(centre), centre.dtype)
    return centre + standard @ root.T, log_weights


def sampled_predictors(program: Program, theta: Array, row: Row, rng_key: Array) -> tuple[Array, Array]:
    """A row's predictors at draws of theta (S, P), with draws of the row's own variables."""
    rows = {name: value[None] for name, value in row.items()}
    local = jax.random.normal(rng_key, (len(theta), program.local.size), theta.dtype)

    def at(everything):
        return jnp.concatenate([predictors_of(terms, everything, rows).reshape(-1) for terms in program.terms])

    nodes = jax.vmap(at)(jnp.concatenate([theta, local], axis=1))
    return nodes, jnp.full(len(theta), -math.log(len(theta)), theta.dtype)


def log_mean_density(program: Program, predictors: Array, log_weights: Array, row: Row) -> Array:
    """The logarithm of a row's density, averaged over nodes (S, T) of its predictors."""
    rows, total, start = {name: value[None] for name, value in row.items()}, 0.0, 0
    for terms in program.terms:
        shape = terms.num_elements, terms.num_predictors
        own = predictors[:, start : start + math.prod(shape)].reshape(-1, *shape)
        start += math.prod(shape)
        known = jax.vmap(lambda e, terms=terms: terms.constants(rows, e))(jnp.arange(shape[0], dtype=jnp.int32))
        density = jax.vmap(jax.vmap(terms.density), (0, None))(own, known)
        total = total + jnp.sum(density, axis=1)
    return logsumexp(total + log_weights)


def _nodes(rng_key: Array, num_samples: int, size: int, dtype) -> tuple[Array, Array]:
    if size in HERMITE_NODES:
        points, weights = normal_rule(size)
        return jnp.asarray(points, dtype), jnp.asarray(np.log(weights), dtype)
    return jax.random.normal(rng_key, (num_samples, size), dtype), jnp.full(num_samples, -math.log(num_samples), dtype)
