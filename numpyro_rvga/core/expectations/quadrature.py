"""Rules of quadrature for the expectations of one factor.

Each is a weighted sum over points m + L z with L L^T = S, and gradient and curvature are the derivatives of that very
sum in m and S: the second derivatives of phi are never taken, and phi may have kinks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from scipy.linalg import block_diag

from ..matrices.linalg import product, semidefinite_factor
from ..pytrees import PyTree
from .by_nodes import Moments, hermite_rule, normal_integral, with_slopes

TENSOR_NODES = {2: ((8, 14), (12, 24)), 3: ((5, 10), (6, 16))}  # across and along: of the rule compared, the one used
CUBE_NODES = {1: (40, 64), 2: (14, 20), 3: (8, 12)}  # along each axis: of the rule compared, the one used
LEAST_WEIGHT = 1e-18  # of a node that is worth its evaluation, as far out as it is
ACROSS = {1: 1, 2: 12, 3: 7}  # nodes, beside panels along the difficult direction
PANELS = 0.1  # of a factor's tolerance: that of its panels
NARROWINGS = 16  # of the interval that has a kink
NOTICEABLE = 0.01  # of the gradient's size there: a jump
MOST_DIAGONAL = 3  # predictors, for which diagonals are probed too
FAR = 4.5  # standard deviations: where phi is compared with the polynomial
ROUNDINGS = 500.0  # units in phi's last place: what rounding makes of no difference there
SHARE = 1 / 150  # of what phi differs there: of the sixth derivative's part, 1/167 is missing in the curvature
ODD_SHARE = 1 / 645  # of the seventh derivative's part: what is missing in the gradient

PHI = Callable[[Array, PyTree], Array]


class Factor(NamedTuple):
    """One factor, or many, as rules take them.

    :ivar mean: (C,). :ivar root: L, lower triangular (C, C), and ``inverse``, zero where it has none.
    :ivar direction: along which phi is most difficult, a unit vector (C,) in the coordinates z.
    :ivar slope: the gradient of phi at the mean, (C,). :ivar tolerance: for the factor's error, in nats.
    """

    mean: Array
    root: Array
    inverse: Array
    direction: Array
    slope: Array
    tolerance: Array
    constants: PyTree


def rotated(factor: Factor, is_rotated: Array) -> Factor:
    """The factor with another root of its covariance, if a traced flag says so: its nodes are then elsewhere."""
    size, dtype = factor.mean.size, factor.mean.dtype
    rotation = np.linalg.qr(np.random.default_rng(0).normal(size=(size, size)))[0]
    rotation = jnp.where(is_rotated, jnp.asarray(rotation, dtype), jnp.eye(size, dtype=dtype))
    return factor._replace(root=factor.root @ rotation, inverse=rotation.T @ factor.inverse)


def factor_of(mean: Array, covariance: Array, constants: PyTree) -> Factor:
    """Before any evaluation of phi."""
    nothing = jnp.zeros_like(mean)
    return Factor(mean, *semidefinite_factor(covariance), nothing, nothing, nothing[0], constants)


def fifth_degree(
    factor: Factor, values: Array, gradients: Array, is_corrected: Array | None = None
) -> tuple[Moments, Array, Array, Array]:
    """McNamee and Stenger's rule (1967): the mean, and points on axes and diagonals. With its error, the direction in
    which phi departs from a polynomial, and its gradient at the mean.

    :param values: of phi at the nodes, (K,), and ``gradients`` (K, C).

    Along each line, value and slope at three nodes are those of one polynomial of the fifth degree. What phi differs
    from it farther out is due to its sixth and seventh derivatives, as is the rule's error; or to a kink in between.
    """
    size, dtype = factor.mean.size, factor.mean.dtype
    points, weights, (units, reach, indices) = fifth_degree_nodes(size)
    used = slice(len(weights))
    moments = _summed(values[used], gradients[used], (points[used], weights), factor)
    slopes = gradients @ factor.root  # in the coordinates z
    at = values[indices], jnp.einsum("lkc,lc->lk", slopes[indices], jnp.asarray(units, dtype))
    even, odd = jax.vmap(partial(_off_polynomial, FAR))(jnp.asarray(reach, dtype), *at)
    off = jnp.abs(even) + jnp.abs(odd)
    rounding = ROUNDINGS * jnp.finfo(dtype).eps * jnp.max(jnp.abs(values[used]))
    error = SHARE * jnp.where(off <= rounding, 0.0, off)  # NaN stays
    if is_corrected is not None:
        parts = (jnp.where(is_corrected & (off > rounding), x, 0.0) for x in (even, odd))
        moments = _corrected(moments, factor, jnp.asarray(units, dtype), *parts)
    # Where phi has a kink, its gradient's second differences are along the kink's normal.
    node, far = slopes[indices[:, 1:3]], slopes[indices[:, 3:5]]
    bent = far - node - ((FAR - reach) / reach)[:, None, None] * (node - slopes[0])
    bent = bent[jnp.argmax(error)]
    bent = bent[jnp.argmax(jnp.sum(bent * bent, axis=1))]
    direction = _unit(bent, 0.0, jnp.asarray(np.eye(size)[-1], dtype))
    total = jnp.sum(error) if size <= MOST_DIAGONAL else size * jnp.sum(error)
    total = jnp.where(jnp.isnan(total), jnp.inf, total)  # phi is not defined farther out
    return moments, total, direction, gradients[0]


def fifth_degree_nodes(size: int) -> tuple[np.ndarray, np.ndarray, tuple]:
    """Points z, the weights of the first of them, and lines through the mean: unit vectors (lines, C), the distance of
    their nodes (lines,), and the places (lines, 5) of the mean, these nodes, and the two beyond them."""
    root = np.sqrt(3.0)
    axes = np.eye(size)
    pairs = [
        (axes[i] + sign * axes[j]) / np.sqrt(2) for i in range(size) for j in range(i + 1, size) for sign in (1, -1)
    ]
    pairs = np.array(pairs).reshape(-1, size)
    nodes = [np.zeros((1, size)), root * axes, -root * axes, np.sqrt(6) * pairs, -np.sqrt(6) * pairs]
    weights = [(size**2 - 7 * size) / 18 + 1, *[(4 - size) / 18] * 2 * size, *[1 / 36] * 2 * len(pairs)]
    count = np.cumsum([0, *map(len, nodes)])
    i = np.arange(size)
    units, reach, inner = axes, np.full(size, root), np.stack([count[1] + i, count[2] + i], 1)
    if size <= MOST_DIAGONAL:
        j = np.arange(len(pairs))
        units, reach = np.concatenate([axes, pairs]), np.concatenate([reach, np.full(len(pairs), np.sqrt(6))])
        inner = np.concatenate([inner, np.stack([count[3] + j, count[4] + j], 1)])
    lines = np.arange(len(units))
    beyond = np.stack([count[-1] + lines, count[-1] + len(units) + lines], 1)
    indices = np.concatenate([np.zeros((len(units), 1), int), inner, beyond], axis=1)
    points = np.concatenate([*nodes, FAR * units, -FAR * units])
    return points, np.array(weights), (units, reach, indices)


def fifth_degree_rule(size: int) -> tuple[np.ndarray, np.ndarray]:
    """The points (K, C) of :func:`fifth_degree_nodes` that have weights, and these (K,)."""
    points, weights, _ = fifth_degree_nodes(size)
    return points[: len(weights)], weights


def _corrected(moments: Moments, factor: Factor, units: Array, even: Array, odd: Array) -> Moments:
    """The moments with gradient and curvature corrected for the sixth and seventh derivatives along lines.

    :param units: of the lines, (lines, C). :param even: what phi is off the polynomial farther out, (lines,): the part
        of even degree. :param odd: that of odd degree.
    """
    value, gradient, hessian = moments
    slope = ODD_SHARE * odd @ units @ factor.inverse
    in_z = SHARE * jnp.einsum("l,lc,ld->cd", even, units, units)
    return value, gradient + slope, hessian + product(product(factor.inverse.T, in_z), factor.inverse)


def _off_polynomial(far: float, reach: Array, values: Array, slopes: Array) -> tuple[Array, Array]:
    """By how much phi at +-far is off the polynomial through its values and slopes at 0 and +-reach, (5,) each: the
    parts of even and of odd degree."""
    even, odd = 0.5 * (values[1] + values[2]) - values[0], 0.5 * (values[1] - values[2]) - reach * slopes[0]
    even_slope, odd_slope = 0.5 * (slopes[1] - slopes[2]), 0.5 * (slopes[1] + slopes[2]) - slopes[0]
    b = (0.5 * reach * even_slope - even) / reach**4
    a = even / reach**2 - b * reach**2
    d = (reach * odd_slope - 3 * odd) / (2 * reach**5)
    c = odd / reach**3 - d * reach**2
    even_off = 0.5 * (values[3] + values[4]) - values[0] - a * far**2 - b * far**4
    odd_off = 0.5 * (values[3] - values[4]) - far * slopes[0] - c * far**3 - d * far**5
    return even_off, odd_off


def by_cube(phi: PHI, factor: Factor) -> tuple[Moments, Array]:
    """Gauss and Hermite's rule of as many nodes along each axis, beside one of fewer nodes. Where phi is not finite so
    far out, what the fifth-degree rule finds, with an infinite error."""
    z, weights = _cube_nodes(factor.mean.size)
    values, gradients = at_nodes(phi, factor, z)
    changes = values - values[0]  # from the mean: the rules differ by no rounding of what is the same

    def summed(weights: Array) -> Moments:
        used = weights != 0
        change, slopes = jnp.where(used, changes, 0.0), jnp.where(used[:, None], gradients, 0.0)
        return _summed(change, slopes, (z, weights), factor)

    rules = jax.vmap(summed)(jnp.asarray(weights, factor.mean.dtype))
    apart = jax.tree.map(lambda x: x[1] - x[2], rules)
    error = jnp.abs(apart[0]) + natural_size(factor.root, apart)
    usable = jnp.isfinite(error)
    change, gradient, hessian = jax.tree.map(lambda x: jnp.where(usable, x[2], x[0]), rules)
    return (values[0] + change, gradient, hessian), jnp.where(usable, error, jnp.inf)


def value_by_cube(phi: PHI, factor: Factor) -> tuple[Array, Array]:
    """As :func:`by_cube`, E[phi] alone and by how much it may be off."""
    z, weights = _cube_nodes(factor.mean.size)
    values = jax.vmap(lambda u: phi(u, factor.constants))(_points(factor, z))
    changes = [jnp.sum(jnp.where(w != 0, w * (values - values[0]), 0.0)) for w in jnp.asarray(weights, values.dtype)]
    error = jnp.abs(changes[1] - changes[2])
    usable = jnp.isfinite(error)
    return values[0] + jnp.where(usable, changes[2], changes[0]), jnp.where(usable, error, jnp.inf)


def num_cube_nodes(num_predictors: int) -> int:
    return len(_cube_nodes(num_predictors)[0])


@functools.cache
def _cube_nodes(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Positions (K, C) of the nodes of three rules, and the weights (3, K) of each."""
    rules = [fifth_degree_rule(size)]
    for count in CUBE_NODES[size]:
        z, weights = hermite_rule(size, count)
        rules.append((z[weights > LEAST_WEIGHT], weights[weights > LEAST_WEIGHT]))
    return np.concatenate([z for z, _ in rules]), block_diag(*[weights for _, weights in rules])


def tensor(phi: PHI, factor: Factor) -> tuple[Moments, Array]:
    """Gauss and Hermite's rule, with most nodes along the difficult direction, beside one of fewer nodes."""
    dtype, rotation = factor.mean.dtype, _with_last(factor.direction)
    rules = [_elongated(factor.mean.size, *counts) for counts in TENSOR_NODES[factor.mean.size]]
    z, weights = (np.concatenate(x) for x in zip(*rules))  # phi is compiled once
    z, split = jnp.asarray(z, dtype) @ rotation.T, len(rules[0][1])
    at = *at_nodes(phi, factor, z), (z, weights)
    fewer, finer = (
        _summed(*jax.tree.map(lambda x: x[part], at), factor)  # noqa: B023
        for part in (slice(split), slice(split, None))
    )
    apart = jax.tree.map(jnp.subtract, fewer, finer)
    return finer, jnp.abs(apart[0]) + natural_size(factor.root, apart)


def _elongated(size: int, across: int, along: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes with so many of them along the last axis, and along each of the others."""
    (z, weights), (last, last_weights) = hermite_rule(size - 1, across), hermite_rule(1, along)
    points = np.concatenate([np.repeat(z, along, axis=0), np.tile(last, (len(z), 1))], axis=1)
    return points, np.outer(weights, last_weights).ravel()


def spread_out(nodes: tuple, factor: Factor, values: Array, gradients: Array) -> tuple[Moments, Array]:
    """Many points, which are exact for quadratics. The error is that of as many draws of what is left of phi.

    :param values: of phi at the nodes, (K,), and ``gradients`` (K, C).
    """
    z, weights = (jnp.asarray(x, factor.mean.dtype) for x in nodes)
    result = _summed(values, gradients, nodes, factor)
    value, gradient, hessian = result
    curvature = product(product(factor.root.T, hessian), factor.root)
    square = jnp.sum(z @ curvature * z, axis=1) - jnp.trace(curvature)
    left = values - value - z @ (gradient @ factor.root) - 0.5 * square
    return result, 2 * jnp.sqrt(weights @ (left * left) / len(weights))


def at_nodes(phi: PHI, factor: Factor, z: np.ndarray | Array) -> tuple[Array, Array]:
    """Values (K,) and gradients (K, C) at positions (K, C)."""
    return jax.vmap(jax.value_and_grad(lambda u: phi(u, factor.constants)))(_points(factor, z))


def _points(factor: Factor, z: np.ndarray | Array) -> Array:
    """Predictors (K, C) at positions (K, C)."""
    return factor.mean + jnp.asarray(z, factor.mean.dtype) @ factor.root.T


def _summed(values: Array, gradients: Array, nodes: tuple[Any, Any], factor: Factor) -> Moments:
    z, weights = (jnp.asarray(x, factor.mean.dtype) for x in nodes)
    return with_slopes(weights @ values, weights @ gradients, gradients, z, weights, factor.root, factor.inverse)


def iterated(phi: PHI, factor: Factor) -> tuple[Moments, Array]:
    """Along the difficult direction by panels that adapt to phi, if need be, and across it by Gauss and Hermite's rule:
    integrated over a kink's normal, phi is smooth."""
    size, dtype = factor.mean.size, factor.mean.dtype
    rotation = _with_last(factor.direction if size == 1 else _normal(phi, factor))
    root, inverse = factor.root @ rotation, rotation.T @ factor.inverse
    largest = jnp.max(jnp.abs(root))
    unit = jnp.where(largest > 0, largest, 1.0)  # the panels' errors are those of gradients in the coordinates z

    def of_others(others: Array) -> tuple[Array, Array]:
        def integrands(z: Array) -> tuple[Array, Array, Array]:
            point = factor.mean + root @ jnp.append(others, z)
            value, gradient = jax.value_and_grad(phi)(point, factor.constants)
            change = gradient - factor.slope  # cancels less
            return value, gradient @ root[:, -1], jnp.concatenate([value[None], unit * change, change @ root * z])

        return normal_integral(integrands, dtype, PANELS * factor.tolerance)

    if size == 1:
        sums, error = of_others(jnp.zeros(0, dtype))
    else:
        z, weights = (jnp.asarray(x, dtype) for x in hermite_rule(size - 1, ACROSS[size]))
        each, off = jax.vmap(of_others)(z)
        sums, error = weights @ each, weights @ off
        across = jnp.einsum("k,kc,kd->cd", weights, each[:, 1 : 1 + size] / unit @ root, z)
    gradient = factor.slope + sums[1 : 1 + size] / unit
    last = sums[1 + size :][:, None]
    square = last if size == 1 else jnp.concatenate([across, last], axis=1)
    hessian = product(product(inverse.T, square), inverse)
    return (sums[0], gradient, 0.5 * (hessian + hessian.T)), error


def _normal(phi: PHI, factor: Factor) -> Array:
    """Of the kink on the difficult line through the mean; the line's direction, if there is none.

    An interval of the line is halved again and again, towards the half in which the gradient is less like a line.
    """
    line, dtype = factor.root @ factor.direction, factor.mean.dtype
    slopes = jax.vmap(lambda t: jax.grad(phi)(factor.mean + t * line, factor.constants) @ factor.root)

    def halve(_: int, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        low, width, (at_low, at_middle, at_high) = state
        one, other = slopes(low + width * jnp.array([0.25, 0.75], dtype))
        bends = at_low - 2 * one + at_middle, at_middle - 2 * other + at_high
        first = jnp.sum(bends[0] ** 2) > jnp.sum(bends[1] ** 2)
        ends = jnp.where(first, jnp.stack([at_low, one, at_middle]), jnp.stack([at_middle, other, at_high]))
        return jnp.where(first, low, low + 0.5 * width), 0.5 * width, ends

    begin = jnp.full((), -FAR, dtype), jnp.full((), 2 * FAR, dtype), slopes(jnp.array([-FAR, 0.0, FAR], dtype))
    *_, ends = lax.fori_loop(0, NARROWINGS, halve, begin)
    return _unit(ends[2] - ends[0], NOTICEABLE * jnp.max(jnp.abs(ends)), factor.direction)


def _unit(vector: Array, least: Array | float, default: Array) -> Array:
    """The vector's direction, if it is finite and longer than ``least``."""
    length = jnp.sqrt(vector @ vector)
    is_usable = (length > least) & jnp.isfinite(length)
    return jnp.where(is_usable, vector / jnp.where(is_usable, length, 1.0), default)


def _with_last(direction: Array) -> Array:
    """An orthogonal matrix (Householder's) whose last column is a unit vector."""
    unit = jnp.asarray(np.eye(len(direction))[-1], direction.dtype)
    v = unit - direction
    square = v @ v
    is_usable = square > 0
    reflection = jnp.eye(len(v), dtype=v.dtype) - 2 * jnp.outer(v, v) / jnp.where(is_usable, square, 1.0)
    return jnp.where(is_usable, reflection, jnp.eye(len(v), dtype=v.dtype))


def natural_size(root: Array, moments: Moments) -> Array:
    """The length of the natural gradient."""
    _, gradient, hessian = moments
    return jnp.sum(jnp.abs(gradient @ root)) + jnp.sum(jnp.abs(product(product(root.T, hessian), root)))
