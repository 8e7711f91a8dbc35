"""E[phi(a)], E[grad phi(a)], E[hess phi(a)] for a ~ N(m, S) in R^C, by nodes, for any model and family.

``order`` says how many derivatives of phi are taken (R-VGA paper, Theorem 1 and Corollary 1.1): 2 uses the Hessian,
1 the gradient only (equation 17), 0 none (equations 18-19). The three agree wherever phi is smooth enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..matrices.linalg import product, semidefinite_factor
from .panels import normal_integral

Density = Callable[[Array], Array]
Moments = tuple[Array, Array, Array]

HERMITE_NODES = {2: 20, 3: 6}  # along each axis, of log densities
DENSITY_NODES = {1: 32, 2: 20, 3: 10}  # of densities, which have the sharper peaks
QUADRATURE_TOLERANCE = 1e-10


class Expectation(Protocol):
    """E[log_prob(a)] for a ~ N(mean, covariance), as a number. Steps take its derivatives, by JAX."""

    def __call__(self, log_prob: Density, mean: Array, covariance: Array) -> Array:
        """
        :param log_prob: (C,) -> (), of one row. :param mean: (C,). :param covariance: (C, C), positive definite.
        :return: ().
        """
        ...


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


def linearized(density: Density, mean: Array, covariance: Array | None) -> Moments:
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


def differentiated(expectation: Expectation, density: Density, mean: Array, covariance: Array) -> Moments:
    """A value and its derivatives: E[grad phi] = dE/dm and E[hess phi] = 2 dE/dS (Bonnet's and Price's theorems)."""
    epsilon = jnp.finfo(mean.dtype).eps
    variance = jnp.diagonal(covariance)
    jitter = jnp.where(variance > 0, epsilon * variance, epsilon**0.75)  # Cholesky factors have derivatives then
    definite = covariance + jnp.diag(jitter)
    value, (gradient, slope) = jax.value_and_grad(expectation, (1, 2))(density, mean, definite)
    return value, gradient, slope + slope.T


def from_nodes(density: Density, nodes: Nodes, order: int) -> Moments:
    """Expectations as weighted sums over nodes; a node of no weight counts nothing, whatever phi is there."""
    used = nodes.weights != 0
    weights = jnp.where(used, nodes.weights, 0.0)
    points = jnp.where(used[:, None], nodes.points, nodes.points[jnp.argmax(weights)])
    if order == 0:
        values = jax.vmap(density)(points)
        value = weights @ values
        weighted = weights * (values - value)  # centered: the same expectation, less cancellation
        score = weighted @ nodes.whitened
        square = jnp.einsum("k,ki,kj->ij", weighted, nodes.whitened, nodes.whitened)
        return value, nodes.inverse.T @ score, nodes.inverse.T @ square @ nodes.inverse
    values, gradients = jax.vmap(jax.value_and_grad(density))(points)
    value, gradient = weights @ values, weights @ gradients
    if order == 1:
        return with_slopes(value, gradient, gradients, nodes.whitened, weights, nodes.factor, nodes.inverse)
    hessians = jax.vmap(jax.hessian(density))(points)
    return value, gradient, jnp.einsum("k,kij->ij", weights, hessians)


def with_slopes(
    value: Array, gradient: Array, gradients: Array, z: Array, weights: Array, factor: Array, inverse: Array
) -> Moments:
    """With the derivative of the sum in S, through S's Cholesky factor: exact for any nodes, were they few and random.

    :param gradients: at the nodes, (K, C), of which ``gradient`` is the weighted mean.
    """
    slopes = (gradients - gradient) @ factor
    lower = jnp.tril(jnp.einsum("k,ki,kj->ij", weights, slopes, z))
    symmetric = lower + jnp.tril(lower, -1).T
    return value, gradient, product(product(inverse.T, symmetric), inverse)


def quadrature(order: int, density: Density, mean: Array, covariance: Array) -> Moments:
    """One predictor: panels that adapt to phi. Two or three: Gauss-Hermite."""
    if mean.shape[0] > 1:
        return from_nodes(density, fixed_nodes(mean, covariance, *hermite_nodes(mean.shape[0])), order)
    root, inverse = semidefinite_factor(covariance)
    root, inverse = root[0, 0], inverse[0, 0]
    phi = lambda a: density(a[None])  # noqa: E731

    def integrands(z: Array) -> tuple[Array, Array, Array]:
        value, slope = jax.value_and_grad(phi)(mean[0] + root * z)
        value_change, slope_change = value - center, slope - at_center  # what is left cancels less
        if order == 0:
            pair = value_change * z * inverse, value_change * (z * z - 1) * inverse**2
        else:
            pair = slope, slope_change * z * inverse if order == 1 else jax.grad(jax.grad(phi))(mean[0] + root * z)
        return value, slope * root, jnp.stack([value_change, *pair])

    center, at_center = jax.value_and_grad(phi)(mean[0])
    value, gradient, hessian = normal_integral(integrands, mean.dtype, QUADRATURE_TOLERANCE)[0]
    return center + value, gradient[None], hessian[None, None]


def hermite_nodes(dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (K, dimension) and weights (K,) for log densities."""
    return hermite_rule(dimension, HERMITE_NODES[dimension])


def fixed_nodes(mean: Array, covariance: Array, whitened: Array | np.ndarray, weights: Array | np.ndarray) -> Nodes:
    """Nodes at given positions of the standard normal: whitened (K, C), weights (K,)."""
    factor, inverse = semidefinite_factor(covariance)
    z = jnp.asarray(whitened, mean.dtype)
    return Nodes(mean + z @ factor.T, z, jnp.asarray(weights, mean.dtype), factor, inverse)


def sigma_points(num_predictors: int) -> tuple[np.ndarray, np.ndarray]:
    """The 2 C points of the third-degree spherical rule: exact for polynomials of degree three."""
    unit = np.sqrt(num_predictors) * np.eye(num_predictors)
    return np.concatenate([unit, -unit]), np.full(2 * num_predictors, 0.5 / num_predictors)


def monte_carlo_points(seed: Sequence[int], num_samples: int, num_predictors: int) -> tuple[np.ndarray, np.ndarray]:
    """Antithetic normal points from a scrambled Sobol sequence, rescaled to have exactly the identity as covariance:
    quadratics come out exact."""
    from scipy.special import ndtri
    from scipy.stats import qmc  # slow to import, and seldom needed

    half = max(num_samples // 2, num_predictors)
    uniform = qmc.Sobol(num_predictors, rng=np.random.default_rng(seed)).random(power_of_two(half))[:half]
    points = ndtri(uniform)
    points = np.concatenate([points, -points])
    root = np.linalg.cholesky(points.T @ points / len(points))
    return np.linalg.solve(root, points.T).T, np.full(len(points), 1.0 / len(points))


def power_of_two(count: int) -> int:
    """The least that is not below: Sobol's sequences are balanced with so many points."""
    return 1 << (count - 1).bit_length()


def normal_rule(dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Points (K, dimension) and weights (K,) for expectations over the standard normal.

    :raises NotImplementedError: for more than three dimensions.
    """
    if dimension not in DENSITY_NODES:
        raise NotImplementedError(
            f"no quadrature over the {dimension} variables of a row: at most three are integrated."
        )
    return hermite_rule(dimension, DENSITY_NODES[dimension])


def hermite_rule(dimension: int, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Gauss and Hermite's rule of so many nodes along each axis: positions (K, dimension) and weights (K,)."""
    x, w = np.polynomial.hermite_e.hermegauss(num_nodes)
    w = w / w.sum()
    axes = np.meshgrid(*[x] * dimension, indexing="ij")
    weights = np.meshgrid(*[w] * dimension, indexing="ij")
    return np.stack([a.ravel() for a in axes], -1), np.prod([a.ravel() for a in weights], axis=0)
