"""Expectations whose cost follows their difficulty, factor by factor.

All factors begin with a rule of few nodes, which is exact for polynomials of the fifth degree. A few more nodes,
further out, tell by how much phi is none. Factors of which that matters go on to the next rule, and only they pay: a
compiled loop takes them a batch at a time.

Each rule is a weighted sum over points m + L z with L L^T = S, and gradient and curvature are the derivatives of that
very sum in m and S: the second derivatives of phi are never taken, and phi may have kinks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .expectations import Moments, fixed_nodes, from_nodes, hermite_rule, with_slopes
from .linalg import semidefinite_factor
from .panels import NODES, normal_integral

EXACT = {64: 1e-8, 32: 1e-6}  # nats: an error of no consequence, by the precision's bits
SMALL = 1e-5  # of a factor's natural gradient: an error of no consequence, far from the solution
ENOUGH, FAIRLY_SMALL = {64: 1e-6, 32: 1e-5}, 1e-3  # the same of factors that are integrals themselves
TENSOR_NODES = {2: ((8, 14), (12, 24)), 3: ((5, 10), (6, 16))}  # across and along: of the rule compared, the one used
ACROSS = {1: 1, 2: 12, 3: 7}  # nodes, beside panels along the difficult direction
PANELS = 0.1  # of a factor's tolerance: that of its panels
MODEST = 10.0  # times the tolerance: the difference of two rules that calls for panels. The better one's error is less
SLOPE_NODES = {1: 80, 2: 20}  # along each axis, for slopes in phi's constants
NARROWINGS = 16  # of the interval that has a kink
NOTICEABLE = 0.01  # of the gradient's size there: a jump
MOST_DIAGONAL = 3  # predictors, for which diagonals are probed too
FAR = 4.5  # standard deviations: where phi is compared with the polynomial
SHARE = 1 / 150  # of what phi differs there: of the sixth derivative's part, 1/167 is missing in the curvature
CACHED_POINTS = 2**14  # at which phi is evaluated at once, if all factors take the same rule
BATCH_POINTS = 2**16  # and if they take finer ones
MOST_BATCH = 1024  # factors

PHI = Callable[[Array, Any], Array]


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
    constants: Any


Rule = Callable[[PHI, Factor], tuple[Moments, Array]]


def expectations(
    phi: PHI,
    num_predictors: int,
    nodes: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    effort: str = "usual",
    is_integral: bool = False,
) -> tuple[Callable, Callable | None]:
    """(means (n, C), covariances (n, C, C), constants (n, ...)) -> E[phi], E[grad phi], E[hess phi] of n factors; and
    -> the same, with the estimated errors, in nats (n,).

    :param nodes: positions (K, C) and weights (K,) of the last rule, for more than three predictors: the fifth-degree
        rule's work is then kept where that is the better one.
    :param effort: ``"few"``: the fifth-degree rule alone, whose errors are not known, in at most three dimensions.
        ``"thorough"``: also the rule that kinks need in two or three dimensions; it takes long to compile.
    :param is_integral: whether each value of phi is an integral, many times as dear, and no more exact than these.
    """
    if effort == "few":
        few = _differentiable(partial(_by_few_nodes, phi), phi, num_predictors)
        return lambda *factors: few(*factors)[0], None
    tolerances = (ENOUGH, FAIRLY_SMALL) if is_integral else (EXACT, SMALL)
    climb = partial(_climb, phi, num_predictors, nodes, effort == "thorough", tolerances)
    measured = _differentiable(climb, phi, num_predictors)
    return lambda *factors: measured(*factors)[0], measured


def _by_few_nodes(phi: PHI, means: Array, covariances: Array, constants: Any) -> tuple[Moments, None]:
    points, weights, _ = _fifth_degree_nodes(means.shape[1])

    def of_each(mean: Array, covariance: Array, constants: Any) -> Moments:
        nodes = fixed_nodes(mean, covariance, points[: len(weights)], weights)
        return from_nodes(lambda u: phi(u, constants), nodes, 1)

    return _in_chunks(jax.vmap(of_each), len(weights), (means, covariances, constants)), None


def _in_chunks(function: Callable, num_points: int, arguments: tuple) -> Any:
    """``function(*known)`` of n factors, some at a time: what it computes at their points then stays in the cache.

    Each takes factors from all over: where devices share them, all work on each chunk.
    """
    total = len(arguments[0])
    count = -(-total * num_points // CACHED_POINTS)
    if count == 1:
        return function(*arguments)
    size = -(-total // count)

    def split(x: Array) -> Array:
        padded = jnp.concatenate([x, x[: size * count - total]])
        return padded.reshape(size, count, *x.shape[1:]).swapaxes(0, 1)

    results = lax.map(lambda chunk: function(*chunk), jax.tree.map(split, arguments))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(size * count, *x.shape[2:])[:total], results)


def _climb(
    phi: PHI,
    num_predictors: int,
    nodes: tuple | None,
    thorough: bool,
    tolerances: tuple[dict[int, float], float],
    means: Array,
    covariances: Array,
    constants: Any,
) -> tuple[Moments, Array]:
    num_points = len(_fifth_degree_nodes(num_predictors)[0])
    first = jax.vmap(partial(_first_rule, phi, tolerances))
    factors, *result = _in_chunks(first, num_points, (means, covariances, constants))
    tolerance, result = factors.tolerance, tuple(result)
    for least, rule, num_points in _finer(num_predictors, nodes, thorough):
        size = min(max(BATCH_POINTS // num_points, 1), MOST_BATCH)
        hard = ~(result[1] <= least * tolerance)
        result = _refined(jax.vmap(partial(rule, phi)), size, factors, hard, result)
    return result


def _first_rule(
    phi: PHI, tolerances: tuple[dict[int, float], float], mean: Array, covariance: Array, constants: Any
) -> tuple[Factor, Moments, Array]:
    """The factor, and what the fifth-degree rule finds."""
    root, inverse = semidefinite_factor(covariance)
    nothing = jnp.zeros_like(mean)
    factor = Factor(mean, root, inverse, nothing, nothing, nothing[0], constants)
    moments, error, direction, slope = _fifth_degree(phi, factor)
    error = jnp.where(jnp.isnan(error), jnp.inf, error)  # phi is not defined farther out
    exact, small = tolerances
    tolerance = jnp.maximum(exact[jnp.finfo(mean.dtype).bits], small * _size(root, moments))
    return factor._replace(direction=direction, slope=slope, tolerance=tolerance), moments, error


def _finer(num_predictors: int, nodes: tuple | None, thorough: bool) -> list[tuple[float, Rule, int]]:
    """The rules after the first: each with the error that calls for it, in tolerances, and the number of its points."""
    if num_predictors > len(ACROSS):
        return [] if nodes is None else [(1.0, partial(_spread_out, nodes), len(nodes[1]))]
    iterated = _iterated, 4 * len(NODES) * ACROSS[num_predictors] ** (num_predictors - 1)
    if num_predictors == 1:
        return [(1.0, *iterated)]
    count = sum(a ** (num_predictors - 1) * b for a, b in TENSOR_NODES[num_predictors])
    return [(1.0, _tensor, count), *([(MODEST, *iterated)] if thorough else [])]


def _refined(rule: Callable, size: int, factors: Factor, hard: Array, result: Any) -> Any:
    """What is found, by this rule for the hard factors, ``size`` at a time."""
    if len(hard) == 1:
        return lax.cond(hard[0], lambda: _better(result, rule(factors)), lambda: result)
    total, size = len(hard), min(size, len(hard))
    count = jnp.sum(hard)
    places = jnp.argsort(~hard, stable=True)
    places = jnp.concatenate([places, jnp.full(size - 1, total, places.dtype)])

    def take_batch(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        start, result = carry
        chosen = lax.dynamic_slice(places, (start,), (size,))
        some, before = jax.tree.map(lambda x: x.at[chosen].get(mode="clip"), (factors, result))
        new = _better(before, rule(some))
        target = jnp.where(start + jnp.arange(size) < count, chosen, total)  # out of bounds: dropped
        return start + size, jax.tree.map(lambda old, x: old.at[target].set(x, mode="drop"), result, new)

    return lax.while_loop(lambda carry: carry[0] < count, take_batch, (jnp.zeros((), count.dtype), result))[1]


def _better(before: Any, after: Any) -> Any:
    """What is found after, but for factors that have no smaller error then."""
    kept = ~(after[1] < before[1])  # so too where rules with nodes farther out find NaN
    return jax.tree.map(lambda a, b: jnp.where(kept.reshape(-1, *[1] * (a.ndim - 1)), a, b), before, after)


# ---------------------------------------------------------------------- rules, of one factor
def _fifth_degree(phi: PHI, factor: Factor) -> tuple[Moments, Array, Array, Array]:
    """McNamee and Stenger's rule (1967): the mean, and points on axes and diagonals. With its error, the direction in
    which phi departs from a polynomial, and its gradient at the mean.

    Along each line, value and slope at three nodes are those of one polynomial of the fifth degree. What phi differs
    from it farther out is due to its sixth and seventh derivatives, as is the rule's error; or to a kink in between.
    """
    size, dtype = factor.mean.size, factor.mean.dtype
    points, weights, (units, reach, places) = _fifth_degree_nodes(size)
    values, gradients, z, weights = _at_nodes(phi, factor, (points, weights))
    used = slice(len(weights))
    moments = _summed(values[used], gradients[used], z[used], weights, factor)
    slopes = gradients @ factor.root  # in the coordinates z
    at = values[places], jnp.einsum("lkc,lc->lk", slopes[places], jnp.asarray(units, dtype))
    error = SHARE * jax.vmap(partial(_off_polynomial, FAR))(jnp.asarray(reach, dtype), *at)
    # Where phi has a kink, its gradient's second differences are along the kink's normal.
    node, far = slopes[places[:, 1:3]], slopes[places[:, 3:5]]
    bent = far - node - ((FAR - reach) / reach)[:, None, None] * (node - slopes[0])
    bent = bent[jnp.argmax(error)]
    bent = bent[jnp.argmax(jnp.sum(bent * bent, axis=1))]
    direction = _unit(bent, 0.0, jnp.zeros(size, dtype).at[-1].set(1.0))
    total = jnp.sum(error) if size <= MOST_DIAGONAL else size * jnp.sum(error)
    return moments, total, direction, gradients[0]


def _fifth_degree_nodes(size: int) -> tuple[np.ndarray, np.ndarray, tuple]:
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
    places = np.concatenate([np.zeros((len(units), 1), int), inner, beyond], axis=1)
    points = np.concatenate([*nodes, FAR * units, -FAR * units])
    return points, np.array(weights), (units, reach, places)


def _off_polynomial(far: float, reach: Array, values: Array, slopes: Array) -> Array:
    """By how much phi at +-far is off the polynomial through its values and slopes at 0 and +-reach: (5,) each."""
    even, odd = 0.5 * (values[1] + values[2]) - values[0], 0.5 * (values[1] - values[2]) - reach * slopes[0]
    even_slope, odd_slope = 0.5 * (slopes[1] - slopes[2]), 0.5 * (slopes[1] + slopes[2]) - slopes[0]
    b = (0.5 * reach * even_slope - even) / reach**4
    a = even / reach**2 - b * reach**2
    d = (reach * odd_slope - 3 * odd) / (2 * reach**5)
    c = odd / reach**3 - d * reach**2
    even_off = 0.5 * (values[3] + values[4]) - values[0] - a * far**2 - b * far**4
    odd_off = 0.5 * (values[3] - values[4]) - far * slopes[0] - c * far**3 - d * far**5
    return jnp.abs(even_off) + jnp.abs(odd_off)


def _tensor(phi: PHI, factor: Factor) -> tuple[Moments, Array]:
    """Gauss and Hermite's rule, with most nodes along the difficult direction, beside one of fewer nodes."""
    dtype, rotation = factor.mean.dtype, _with_last(factor.direction)
    rules = [_elongated(factor.mean.size, *counts) for counts in TENSOR_NODES[factor.mean.size]]
    z, weights = (np.concatenate(x) for x in zip(*rules))  # phi is compiled once
    at, split = _at_nodes(phi, factor, (jnp.asarray(z, dtype) @ rotation.T, weights)), len(rules[0][1])
    fewer, finer = (_summed(*[x[part] for x in at], factor) for part in (slice(split), slice(split, None)))
    apart = jax.tree.map(jnp.subtract, fewer, finer)
    return finer, jnp.abs(apart[0]) + _size(factor.root, apart)


def _elongated(size: int, across: int, along: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes with so many of them along the last axis, and along each of the others."""
    (z, weights), (last, last_weights) = hermite_rule(size - 1, across), hermite_rule(1, along)
    points = np.concatenate([np.repeat(z, along, axis=0), np.tile(last, (len(z), 1))], axis=1)
    return points, np.outer(weights, last_weights).ravel()


def _spread_out(nodes: tuple[np.ndarray, np.ndarray], phi: PHI, factor: Factor) -> tuple[Moments, Array]:
    """Many points, which are exact for quadratics. The error is that of as many draws of what is left of phi."""
    values, gradients, z, weights = _at_nodes(phi, factor, nodes)
    result = _summed(values, gradients, z, weights, factor)
    value, gradient, hessian = result
    curvature = factor.root.T @ hessian @ factor.root
    square = jnp.sum(z @ curvature * z, axis=1) - jnp.trace(curvature)
    left = values - value - z @ (gradient @ factor.root) - 0.5 * square
    return result, 2 * jnp.sqrt(weights @ (left * left) / len(weights))


def _at_nodes(phi: PHI, factor: Factor, nodes: tuple[Any, Any]) -> tuple[Array, Array, Array, Array]:
    """Values (K,) and gradients (K, C) at nodes; then their positions (K, C) and the weights, in the same precision."""
    z, weights = (jnp.asarray(x, factor.mean.dtype) for x in nodes)
    density = lambda u: phi(u, factor.constants)  # noqa: E731
    values, gradients = jax.vmap(jax.value_and_grad(density))(factor.mean + z @ factor.root.T)
    return values, gradients, z, weights


def _summed(values: Array, gradients: Array, z: Array, weights: Array, factor: Factor) -> Moments:
    return with_slopes(weights @ values, weights @ gradients, gradients, z, weights, factor.root, factor.inverse)


def _iterated(phi: PHI, factor: Factor) -> tuple[Moments, Array]:
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
    hessian = inverse.T @ square @ inverse
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
    unit = jnp.zeros_like(direction).at[-1].set(1.0)
    v = unit - direction
    square = v @ v
    is_usable = square > 0
    reflection = jnp.eye(len(v), dtype=v.dtype) - 2 * jnp.outer(v, v) / jnp.where(is_usable, square, 1.0)
    return jnp.where(is_usable, reflection, jnp.eye(len(v), dtype=v.dtype))


def _size(root: Array, moments: Moments) -> Array:
    """Of the natural gradient."""
    _, gradient, hessian = moments
    return jnp.sum(jnp.abs(gradient @ root)) + jnp.sum(jnp.abs(root.T @ hessian @ root))


# ---------------------------------------------------------------------- derivatives in what phi takes
def _differentiable(expect: Callable, phi: PHI, num_predictors: int) -> Callable:
    """``expect``, which finds moments and their errors; the value may be differentiated (once, backwards). Loops may
    not, and need not: gradient and curvature are the slopes in mean and covariance, and those in phi's constants are
    expectations too."""
    if num_predictors in SLOPE_NODES:
        z, weights = hermite_rule(num_predictors, SLOPE_NODES[num_predictors])
    else:
        z, weights, _ = _fifth_degree_nodes(num_predictors)
        z = z[: len(weights)]

    def of_constants(mean: Array, covariance: Array, constants: Any) -> Array:
        root, _ = semidefinite_factor(covariance)
        return jnp.asarray(weights) @ jax.vmap(lambda point: phi(point, constants))(mean + z @ root.T)

    def forward(means: Array, covariances: Array, constants: Any) -> tuple[Moments, Any]:
        found = expect(means, covariances, constants)
        return found, (means, covariances, constants, found[0])

    def backward(residuals: Any, slopes: tuple[Moments, Any]) -> tuple:
        means, covariances, constants, (_, gradients, hessians) = residuals
        scale = slopes[0][0]
        vjp = jax.vjp(lambda c: jax.vmap(of_constants)(means, covariances, c), constants)[1]
        return scale[:, None] * gradients, 0.5 * scale[:, None, None] * hessians, vjp(scale)[0]

    function = jax.custom_vjp(expect)
    function.defvjp(forward, backward)
    return function
