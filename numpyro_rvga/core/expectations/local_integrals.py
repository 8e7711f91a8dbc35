"""Integrals of exp(h(z)) over z in R^K, K up to three, by nodes that go where the integrand is.

Width, mode and tails of h, which may be those of a normal or of a Student t, are found from its values alone. One
dimension: grids that narrow down on the mode, then the distances at which h has fallen enough on
either side, then the trapezoidal rule in t, z = mode + scale sinh(t), whose error falls exponentially with the number
of nodes for analytic integrands (Trefethen and Weideman, The exponentially convergent trapezoidal rule, 2014). Two and
three: the mode by Levenberg and Marquardt's method, and the same rule along the axes of the curvature there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import logsumexp

from ..matrices.linalg import cholesky, positive_part, solve_lower

MAX_DIMENSIONS = 3
NODES = {1: 32, 2: 20, 3: 16}  # along each axis: smooth integrands are off by 1e-7 nats on the line, 1e-6 in the plane
FINER = {1: 224, 2: 60, 3: 22}  # likewise, of integrals that others are compared with
SPREAD = 1024  # nodes of such an integral on the line that do not know of the mode
DROP = {32: 16.0, 64: 24.0}  # nats below the mode, where nodes end in one dimension
DROP_OF_MANY = 16.0  # likewise, in more
GRID = 16  # points of each grid that narrows down on the mode
WIDEST = 16.0  # the first grid is sinh of a grid from minus this to this: up to 4e6
NEAR_MODE = 2.0  # nats: the grids narrow down on what is less than this below the best
MAX_GRIDS = 24
FURTHEST = 11  # powers of four, times the scale: the furthest point of a tail
REFINED = 6  # distances between two powers of four
MARGIN = 1.15  # of the box in two and three dimensions: the integrand's axes turn away from the mode
MAX_STEPS = 60
ENOUGH = 1e-3  # nats that a step towards the mode could still gain

LogIntegrand = Callable[[Array], Array]


class LocalNodes(NamedTuple):
    """Where an integrand is evaluated.

    :ivar points: z, (N, K). :ivar log_weights: logarithms of the weights, (N,).
    :ivar axes: of the grid, columns of (K, K). :ivar steps: from a node to the next along each axis, (N, K), in units
        of these columns.
    """

    points: Array
    log_weights: Array
    axes: Array
    steps: Array


def log_integral(log_integrand: LogIntegrand, nodes: LocalNodes) -> Array:
    """log of the integral of exp(h), over nodes that were placed for h, or for one that is much like it."""
    return logsumexp(jax.vmap(log_integrand)(nodes.points) + nodes.log_weights)


def num_nodes(num_dimensions: int) -> int:
    """The number of nodes of one integral."""
    return NODES[num_dimensions] ** num_dimensions


def finer_log_integral(log_integrand: LogIntegrand, num_dimensions: int, dtype: jnp.dtype) -> Array:
    """The same by more nodes, for comparison. In one dimension some of them lie far and wide, and see modes that
    :func:`place_nodes` does not."""
    nodes = place_nodes(log_integrand, num_dimensions, dtype, finer=True)
    if num_dimensions > 1:
        return log_integral(log_integrand, nodes)
    wide = jnp.asarray(np.sinh(np.linspace(-WIDEST, WIDEST, SPREAD)), dtype)
    z = jnp.sort(jnp.concatenate([nodes.points[:, 0], wide]))
    values = jax.vmap(lambda z: _finite_or_low(log_integrand(z[None])))(z)
    return logsumexp(jnp.logaddexp(values[1:], values[:-1]), b=0.5 * jnp.diff(z))


def place_nodes(
    log_integrand: LogIntegrand, num_dimensions: int, dtype: jnp.dtype, *, finer: bool = False
) -> LocalNodes:
    """Nodes for the integral of exp(h), along the axes of its mode and as far as it reaches from there.

    They are not to be differentiated: an integral's derivatives are those of :func:`log_integral` over fixed nodes, as
    exact as the integral itself.

    :param log_integrand: h, z (K,) -> its value. Where that is not finite, the integrand counts as zero.
    :param num_dimensions: K, one to three.
    :param finer: whether there are more nodes than the usual ones.
    """
    finite = lambda z: _finite_or_low(log_integrand(z))  # noqa: E731
    if num_dimensions == 1:
        mode, best, scale = _narrowed(lambda z: finite(z[None]), dtype)
        mode, axes = mode[None], scale[None, None]
    else:
        mode, best, axes = _maximum(finite, num_dimensions, dtype)
    drop = DROP[jnp.finfo(dtype).bits] if num_dimensions == 1 else DROP_OF_MANY
    rays = jnp.concatenate([-axes.T, axes.T])  # (2 K, K)
    reach = lax.map(lambda ray: _reach(lambda d: finite(mode + d * ray), best, drop, dtype), rays)
    margin = MARGIN if num_dimensions > 1 else 1.0
    low, high = margin * reach.reshape(2, num_dimensions)  # in units of the axes
    start, stop = -jnp.arcsinh(low), jnp.arcsinh(high)
    count = (FINER if finer else NODES)[num_dimensions]
    spacing = (stop - start) / (count - 1)
    t = start + spacing * jnp.arange(count, dtype=dtype)[:, None]  # (N, K)
    steps = spacing * jnp.cosh(t)

    def tensor(x: Array) -> Array:
        return jnp.stack([g.ravel() for g in jnp.meshgrid(*x.T, indexing="ij")], axis=-1)

    steps = tensor(steps)
    volume = jnp.log(jnp.abs(axes[0, 0])) if num_dimensions == 1 else jnp.linalg.slogdet(axes)[1]
    return LocalNodes(mode + tensor(jnp.sinh(t)) @ axes.T, jnp.sum(jnp.log(steps), axis=1) + volume, axes, steps)


def _finite_or_low(value: Array) -> Array:
    return jnp.where(jnp.isfinite(value), value, -jnp.inf)


def _narrowed(h: Callable[[Array], Array], dtype: jnp.dtype) -> tuple[Array, Array, Array]:
    """Mode, value there, and scale of h on the line.

    The mode of a unimodal h lies between the neighbors of a grid's best point, whatever the grid.
    """
    first = jnp.asarray(np.sinh(np.linspace(-WIDEST, WIDEST, GRID)), dtype)
    share = jnp.linspace(0.0, 1.0, GRID, dtype=dtype)
    places = jnp.arange(GRID, dtype=jnp.int32)

    def narrow(state: tuple) -> tuple:
        number, _, low, high, *_ = state
        z = jnp.where(number == 0, first, low + (high - low) * share)
        values = jax.vmap(h)(z)
        best = jnp.max(values)
        near = values > best - NEAR_MODE
        start, stop = jnp.min(jnp.where(near, places, GRID)), jnp.max(jnp.where(near, places, -1))
        ends = z[jnp.maximum(start - 1, 0)], z[jnp.minimum(stop + 1, GRID - 1)]
        return number + 1, stop - start, *ends, z[jnp.argmax(values)], best

    def unfinished(state: tuple) -> Array:
        return (state[0] < MAX_GRIDS) & (state[1] < GRID // 3)

    zero = jnp.zeros((), dtype)
    begin = jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), first[0], first[-1], zero, zero
    _, _, low, high, mode, best = lax.while_loop(unfinished, narrow, begin)
    smallest = 4 * jnp.finfo(dtype).eps * (1.0 + jnp.abs(mode))
    return mode, best, jnp.maximum((high - low) / (2 * np.sqrt(2 * NEAR_MODE)), smallest)


def _maximum(h: LogIntegrand, size: int, dtype: jnp.dtype) -> tuple[Array, Array, Array]:
    """Mode, value there, and axes (K, K): columns as long as h is wide, by its curvature."""
    starts = np.concatenate([np.zeros((1, size)), *[s * np.eye(size) for s in (1, -1, 4, -4, 16, -16)]])
    starts = jnp.asarray(starts, dtype)
    values = jax.vmap(h)(starts)
    gradient_of, hessian_of = jax.grad(h), jax.hessian(h)

    def curvature(z: Array) -> tuple[Array, Array, Array]:
        gradient, hessian = gradient_of(z), hessian_of(z)
        size_of_both = jnp.sqrt(jnp.sum(hessian**2)) + gradient @ gradient
        return gradient, positive_part(-hessian), size_of_both

    def step(state: tuple) -> tuple:
        number, _, z, value, damping = state
        gradient, precision, unit = curvature(z)
        damped = precision + (damping * unit + jnp.finfo(dtype).tiny) * jnp.eye(size, dtype=dtype)
        move = jnp.linalg.solve(damped, gradient)
        there = h(z + move)
        better = there > value
        gain = jnp.where(jnp.isfinite(gradient @ move), gradient @ move, jnp.inf)
        left = jnp.where(better, gain, jnp.where(damping > 1e8, 0.0, jnp.inf))
        left = jnp.where(gain < ENOUGH, 0.0, left)
        z, value = jnp.where(better, z + move, z), jnp.where(better, there, value)
        return number + 1, left, z, value, jnp.where(better, 0.1, 10.0) * damping

    best = jnp.argmax(values)
    infinite = jnp.full((), jnp.inf, dtype)
    begin = jnp.zeros((), jnp.int32), infinite, starts[best], values[best], jnp.full((), 1e-4, dtype)
    _, _, mode, value, _ = lax.while_loop(lambda s: (s[0] < MAX_STEPS) & (s[1] > ENOUGH), step, begin)
    _, precision, unit = curvature(mode)
    factor = cholesky(precision + (1e-6 * unit + jnp.finfo(dtype).tiny) * jnp.eye(size, dtype=dtype))
    return mode, value, solve_lower(factor, jnp.eye(size, dtype=dtype), transpose=True)


def _reach(h: Callable[[Array], Array], best: Array, drop: float, dtype: jnp.dtype) -> Array:
    """How far from the mode h falls by ``drop`` for good, in units of the scale."""
    above = lambda distance: jax.vmap(h)(distance) > best - drop  # noqa: E731
    powers = jnp.asarray(4.0 ** np.arange(FURTHEST + 1), dtype)
    last = jnp.max(jnp.where(above(powers), jnp.arange(len(powers), dtype=jnp.int32), 0))
    between = powers[last] * jnp.asarray(4.0 ** (np.arange(1, REFINED + 1) / REFINED), dtype)
    still = jnp.max(jnp.where(above(between), jnp.arange(REFINED, dtype=jnp.int32), -1))
    return between[jnp.minimum(still + 1, REFINED - 1)]
