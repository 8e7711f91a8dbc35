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
from jax import Array, lax

from ..matrices.linalg import product, semidefinite_factor

Density = Callable[[Array], Array]
Moments = tuple[Array, Array, Array]

HERMITE_NODES = {2: 20, 3: 6}  # along each axis, of log densities
DENSITY_NODES = {1: 32, 2: 20, 3: 10}  # of densities, which have the sharper peaks
QUADRATURE_TOLERANCE = 1e-10
PANELS_REACH = 12.0  # standard deviations: the mass outside is below 1e-32, and exponentials have some far out
FIRST_PANELS = 6
MOST_PANELS = 48
NEAR_END = 1e-3  # of a panel: a split so near to its end leaves as much to do

# Lobatto's rule of four nodes as Kronrod extends it to seven, and that to thirteen (W. Gander and W. Gautschi, Adaptive
# quadrature - revisited, 2000). Both have the ends as nodes: no kink hides beyond the last one.
_INNER = (0.942882415695480, (2 / 3) ** 0.5, 0.641853342345781, 0.2**0.5, 0.236383199662150)


def _rule_of_panels(nodes: np.ndarray) -> np.ndarray:
    """The weights with which as many nodes integrate polynomials exactly."""
    moments = np.zeros(len(nodes))
    moments[0] = 2.0
    return np.linalg.solve(np.polynomial.legendre.legvander(nodes, len(nodes) - 1).T, moments)


PANEL_NODES = np.array([-1.0, *(-x for x in _INNER), 0.0, *_INNER[::-1], 1.0])
PANEL_WEIGHTS, FEWER_WEIGHTS = _rule_of_panels(PANEL_NODES), np.zeros(len(PANEL_NODES))
FEWER_WEIGHTS[::2] = _rule_of_panels(PANEL_NODES[::2])


class Panels(NamedTuple):
    """Pieces of the line, the first ``count`` of MOST_PANELS.

    :ivar left: and ``right``: ends. :ivar split: where to split them. :ivar sums: (panels, V). :ivar error: of these.
    """

    count: Array
    left: Array
    right: Array
    split: Array
    sums: Array
    error: Array


def normal_integral(
    function: Callable[[Array], tuple[Array, Array, Array]], dtype, tolerance: float | Array
) -> tuple[Array, Array]:
    """The integrals of V functions f over the standard normal, (V,), and the largest of their errors.

    A panel is split where the tangents to phi at its ends meet: at the kink, if phi has one there and is else straight.

    :param function: z -> phi(z), phi'(z) and f(z) (V,), which are as smooth as phi.
    :param tolerance: for the largest of the errors, as far as rounding lets it be reached.
    """
    weights, fewer = (jnp.asarray(x, dtype) for x in (PANEL_WEIGHTS, FEWER_WEIGHTS))
    within = np.sqrt(np.finfo(dtype).eps)  # where a panel ends at a kink, on its side of it
    nodes = jnp.asarray(np.clip(PANEL_NODES, within - 1, 1 - within), dtype)
    panel_indices, width = jnp.arange(MOST_PANELS), 2 * PANELS_REACH / FIRST_PANELS

    def measured(left: Array, right: Array) -> tuple[Array, Array, Array]:
        half = 0.5 * (right - left)
        z = 0.5 * (left + right) + half * nodes
        phi, slopes, values = jax.vmap(function)(z)
        density = half * jnp.exp(-0.5 * z * z) * jnp.asarray((2 * np.pi) ** -0.5, dtype)
        sums = (weights * density) @ values
        size = (weights * density) @ jnp.abs(values)
        share = jnp.abs(sums - (fewer * density) @ values) / jnp.where(size > 0, size, 1.0)
        error = size * jnp.minimum(share, (200 * share) ** 1.5)
        return _meeting(z, phi, slopes, left, right), sums, jnp.max(error)

    def take_two(panels: Panels) -> Panels:
        """The next of the first panels, while there are any; then the halves of the worst. One loop for both: what it
        calls is compiled once."""
        count = panels.count
        first = count < FIRST_PANELS
        # By masks: indices that differ from one integral to the next are slow.
        worst = panel_indices == jnp.argmax(panels.error)
        cut = [jnp.sum(jnp.where(worst, x, 0.0)) for x in (panels.left, panels.split, panels.right)]
        start = width * count.astype(dtype) - PANELS_REACH
        between = jnp.where(first, start + width * jnp.arange(3, dtype=dtype), jnp.stack(cut))
        left, right = between[:2], between[1:]
        new = (left, right, *jax.vmap(measured)(left, right))
        here = jnp.where(first, panel_indices == count, worst), panel_indices == jnp.where(first, count + 1, count)

        def put(old: Array, pair: Array) -> Array:
            for mask, x in zip(here, pair):
                old = jnp.where(mask[:, None] if old.ndim == 2 else mask, x, old)
            return old

        return Panels(count + jnp.where(first, 2, 1), *map(put, panels[1:], new))

    def unfinished(panels: Panels) -> Array:
        rounding = 10 * jnp.finfo(dtype).eps * jnp.max(jnp.sum(jnp.abs(panels.sums), axis=0))
        inexact = jnp.sum(panels.error) > jnp.maximum(tolerance, rounding)
        return (inexact & (panels.count < MOST_PANELS)) | (panels.count < FIRST_PANELS)

    line = jnp.zeros(MOST_PANELS, dtype)
    size = jax.eval_shape(function, jax.ShapeDtypeStruct((), dtype))[2].size
    begin = Panels(jnp.zeros((), jnp.int32), line, line, line, jnp.zeros((MOST_PANELS, size), dtype), line)
    panels = lax.while_loop(unfinished, take_two, begin)
    return jnp.sum(panels.sums, axis=0), jnp.sum(panels.error)


def _meeting(z: Array, phi: Array, slopes: Array, left: Array, right: Array) -> Array:
    """Where the tangents at the outermost nodes meet; the middle, if that is outside or near an end."""
    change = slopes[0] - slopes[-1]
    root = (phi[-1] - phi[0] + slopes[0] * z[0] - slopes[-1] * z[-1]) / jnp.where(change == 0, 1.0, change)
    margin = NEAR_END * (right - left)
    inside = (change != 0) & (root > left + margin) & (root < right - margin)
    return jnp.where(inside, root, 0.5 * (left + right))


class Expectation(Protocol):
    """E[log_prob(a)] for a ~ N(mean, covariance), as a number. Steps take its derivatives, by JAX."""

    def __call__(self, log_prob: Density, mean: Array, covariance: Array) -> Array:
        """
        :param log_prob: (C,) -> (), of one row. :param mean: (C,). :param covariance: (C, C), positive definite.
        :return: ().
        """
        ...


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


def from_nodes(
    density: Density, mean: Array, covariance: Array, whitened: np.ndarray, of_nodes: np.ndarray, order: int
) -> Moments:
    """Expectations as weighted sums over nodes mean + L z, L L^T = covariance; a node of no weight counts nothing,
    whatever phi is there.

    :param whitened: z, positions of the standard normal, (K, C). :param of_nodes: their weights, (K,).
    """
    z, weights, used = jnp.asarray(whitened, mean.dtype), jnp.asarray(of_nodes, mean.dtype), of_nodes != 0
    factor, inverse = semidefinite_factor(covariance)
    points = mean + jnp.where(used[:, None], z, z[np.argmax(used)]) @ factor.T
    if order == 0:
        values = jax.vmap(density)(points)
        value = weights @ values
        weighted = weights * (values - value)  # centered: the same expectation, less cancellation
        square = jnp.einsum("k,ki,kj->ij", weighted, z, z)
        return value, inverse.T @ (weighted @ z), inverse.T @ square @ inverse
    values, gradients = jax.vmap(jax.value_and_grad(density))(points)
    value, gradient = weights @ values, weights @ gradients
    if order == 1:
        return with_slopes(value, gradient, gradients, z, weights, factor, inverse)
    hessians = jax.vmap(jax.hessian(density))(points)
    return value, gradient, jnp.einsum("k,kij->ij", weights, hessians)


def with_slopes(
    value: Array, gradient: Array, gradients: Array, z: Array, weights: Array, factor: Array, inverse: Array
) -> Moments:
    """The moments, with the derivative of the sum in S through S's Cholesky factor: exact for any nodes, few or random.

    :param gradients: at the nodes, (K, C), of which ``gradient`` is the weighted mean.
    """
    slopes = (gradients - gradient) @ factor
    lower = jnp.tril(jnp.einsum("k,ki,kj->ij", weights, slopes, z))
    symmetric = lower + jnp.tril(lower, -1).T
    return value, gradient, product(product(inverse.T, symmetric), inverse)


def quadrature(order: int, density: Density, mean: Array, covariance: Array) -> Moments:
    """One predictor: panels that adapt to phi. Two or three: Gauss-Hermite."""
    if mean.shape[0] > 1:
        nodes = hermite_rule(mean.shape[0], HERMITE_NODES[mean.shape[0]])
        return from_nodes(density, mean, covariance, *nodes, order)
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
