"""E[phi(a)], E[grad phi(a)], E[hess phi(a)] for a ~ N(m, S) in R^C, by nodes: knows no model and no family.

``order`` says how many derivatives of phi are taken (R-VGA paper, Theorem 1 and Corollary 1.1): 2 uses the Hessian,
1 the gradient only (equation 17), 0 none (equations 18-19). The three agree wherever phi is smooth enough.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .linalg import semidefinite_factor

Density = Callable[[Array], Array]
Moments = tuple[Array, Array, Array]

GRID_HALF_WIDTH = 8.5  # standard deviations; the mass outside is below 1e-16
GRID_CENTRE_RANGE = 3.0  # the crowded place stays within so many; farther out, the bulk would be sampled too coarsely
GRID_NODES = 81
HERMITE_NODES = {2: 20, 3: 6}  # along each axis, of log densities
DENSITY_NODES = {1: 32, 2: 20, 3: 10}  # of densities, which have the sharper peaks
BISECTIONS = 40


class Nodes(NamedTuple):
    """Weighted points: a = m + factor @ z.

    :ivar points: (K, C). :ivar whitened: z, (K, C). :ivar weights: (K,).
    :ivar factor: lower triangular, (C, C). :ivar inverse: its inverse, zero where it has none.
    """

    points: Array
    whitened: Array
    weights: Array
    factor: Array
    inverse: Array


def linearized(density: Density, mean: Array, covariance: Array) -> Moments:
    """Derivatives at the mean; the covariance is ignored."""

    if mean.shape[0] == 1:  # the same, but shorter to compile

        def slope(u: Array) -> tuple[Array, Array]:
            return jax.jvp(density, (u,), (jnp.ones_like(u),))

        (value, first), (_, second) = jax.jvp(slope, (mean,), (jnp.ones_like(mean),))
        return value, first[None], second[None, None]

    def gradient_and_value(u: Array) -> tuple[Array, tuple[Array, Array]]:
        value, gradient = jax.value_and_grad(density)(u)
        return gradient, (value, gradient)

    hessian, (value, gradient) = jax.jacfwd(gradient_and_value, has_aux=True)(mean)
    return value, gradient, hessian


def from_nodes(density: Density, nodes: Nodes, order: int) -> Moments:
    """Expectations as weighted sums over nodes; a node of no weight counts nothing, whatever phi is there."""
    used = nodes.weights > 0
    weights = jnp.where(used, nodes.weights, 0.0)
    points = jnp.where(used[:, None], nodes.points, nodes.points[jnp.argmax(weights)])
    if order == 0:
        values = jax.vmap(density)(points)
        value = weights @ values
        weighted = weights * (values - value)  # centred: the same expectation, less cancellation
        score = weighted @ nodes.whitened
        square = jnp.einsum("k,ki,kj->ij", weighted, nodes.whitened, nodes.whitened)
        return value, nodes.inverse.T @ score, nodes.inverse.T @ square @ nodes.inverse
    values, gradients = jax.vmap(jax.value_and_grad(density))(points)
    value, gradient = weights @ values, weights @ gradients
    if order == 1:
        # The derivative of the sum in S, through S's Cholesky factor: exact for any nodes, were they few and random.
        slopes = (gradients - gradient) @ nodes.factor
        lower = jnp.tril(jnp.einsum("k,ki,kj->ij", weights, slopes, nodes.whitened))
        symmetric = lower + jnp.tril(lower, -1).T
        return value, gradient, nodes.inverse.T @ symmetric @ nodes.inverse
    hessians = jax.vmap(jax.hessian(density))(points)
    return value, gradient, jnp.einsum("k,kij->ij", weights, hessians)


def quadrature_nodes(density: Density, mean: Array, covariance: Array, order: int) -> Nodes:
    """One predictor: a grid that resolves both N(m, v) and the feature of phi. Two or three: Gauss-Hermite."""
    if mean.shape[0] == 1:
        return _adaptive_grid(density, mean[0], covariance[0, 0], order)
    return fixed_nodes(mean, covariance, *_hermite_rule(mean.shape[0], HERMITE_NODES[mean.shape[0]]))


def fixed_nodes(mean: Array, covariance: Array, whitened: Array, weights: Array) -> Nodes:
    """Nodes at given positions of the standard normal: whitened (K, C), weights (K,)."""
    factor, inverse = semidefinite_factor(covariance)
    z = jnp.asarray(whitened, mean.dtype)
    return Nodes(mean + z @ factor.T, z, jnp.asarray(weights, mean.dtype), factor, inverse)


def sigma_points(num_predictors: int) -> tuple[np.ndarray, np.ndarray]:
    """The 2 C points of the third-degree spherical rule: exact for polynomials of degree three."""
    unit = np.sqrt(num_predictors) * np.eye(num_predictors)
    return np.concatenate([unit, -unit]), np.full(2 * num_predictors, 0.5 / num_predictors)


def monte_carlo_points(rng_key: Array, num_samples: int, num_predictors: int) -> tuple[np.ndarray, np.ndarray]:
    """Antithetic normal points from a scrambled Sobol sequence, rescaled to have exactly the identity as covariance:
    quadratics come out exact."""
    from scipy.special import ndtri
    from scipy.stats import qmc  # slow to import, and seldom needed

    half = max(num_samples // 2, num_predictors)
    seed = np.asarray(jax.random.key_data(rng_key)).tolist()
    uniform = qmc.Sobol(num_predictors, rng=np.random.default_rng(seed)).random(1 << (half - 1).bit_length())[:half]
    points = ndtri(uniform)
    points = np.concatenate([points, -points])
    root = np.linalg.cholesky(points.T @ points / len(points))
    return np.linalg.solve(root, points.T).T, np.full(len(points), 1.0 / len(points))


def normal_rule(dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (K, dimension) and weights (K,) for expectations over the standard normal.

    :raises NotImplementedError: for more than three dimensions.
    """
    if dimension not in DENSITY_NODES:
        raise NotImplementedError(
            f"no quadrature over the {dimension} variables of a row: at most three are integrated."
        )
    return _hermite_rule(dimension, DENSITY_NODES[dimension])


def _hermite_rule(dimension: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    x, w = np.polynomial.hermite_e.hermegauss(num_nodes)
    w = w / w.sum()
    axes = np.meshgrid(*[x] * dimension, indexing="ij")
    weights = np.meshgrid(*[w] * dimension, indexing="ij")
    return np.stack([a.ravel() for a in axes], -1), np.prod([a.ravel() for a in weights], axis=0)


def _adaptive_grid(density: Density, mean: Array, variance: Array, order: int) -> Nodes:
    """Trapezoidal rule in t with a = centre + width sinh(t).

    Its nodes crowd at ``centre``, where phi bends most (half of the change of phi' lies on either side), down to a
    thousandth of the standard deviation, and still cover N(m, v) with spacing of a fraction of its standard
    deviation: accurate when the standard deviation is 1e-3 and when it is 1e3 times the width of phi.
    """
    deviation = jnp.sqrt(variance)
    safe = jnp.where(deviation > 0, deviation, 1.0)
    low, high = mean - GRID_HALF_WIDTH * safe, mean + GRID_HALF_WIDTH * safe
    reach = GRID_CENTRE_RANGE * safe
    centre = mean if order == 0 else _bend(lambda a: density(a[None]), mean - reach, mean + reach)
    width = 1e-3 * safe
    start, stop = jnp.arcsinh((low - centre) / width), jnp.arcsinh((high - centre) / width)
    t = start + (stop - start) * jnp.linspace(0.0, 1.0, GRID_NODES, dtype=mean.dtype)
    offset = centre - mean + width * jnp.sinh(t)
    z = offset / safe
    weights = jnp.exp(-0.5 * z * z) * jnp.cosh(t)
    weights = weights / jnp.sum(weights)
    alive = deviation > 0
    inverse = jnp.where(alive, 1.0 / safe, 0.0)
    points = mean + jnp.where(alive, offset, 0.0)
    return Nodes(points[:, None], z[:, None], weights, deviation[None, None], inverse[None, None])


def _bend(function: Callable[[Array], Array], low: Array, high: Array) -> Array:
    slope = jax.grad(function)
    at_low, at_high = slope(low), slope(high)
    middle = 0.5 * (at_low + at_high)
    falling = at_low > at_high

    def halve(_, bracket):
        left, right = bracket
        centre = 0.5 * (left + right)
        go_right = (slope(centre) > middle) == falling
        return jnp.where(go_right, centre, left), jnp.where(go_right, right, centre)

    left, right = lax.fori_loop(0, BISECTIONS, halve, (low, high))
    return 0.5 * (left + right)
