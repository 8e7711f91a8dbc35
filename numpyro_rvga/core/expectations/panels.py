"""Integrals over one standard normal variable, by panels that are split where they need it (QUADPACK's scheme)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

REACH = 12.0  # standard deviations: the mass outside is below 1e-32, and exponentials have some far out
FIRST_PANELS = 6
MOST_PANELS = 48
NEAR_END = 1e-3  # of a panel: a split so near to its end leaves as much to do

# Lobatto's rule of four nodes as Kronrod extends it to seven, and that to thirteen (W. Gander and W. Gautschi, Adaptive
# quadrature - revisited, 2000). Both have the ends as nodes: no kink hides beyond the last one.
_INNER = (0.942882415695480, (2 / 3) ** 0.5, 0.641853342345781, 0.2**0.5, 0.236383199662150)


def _rule(nodes: np.ndarray) -> np.ndarray:
    """The weights with which as many nodes integrate polynomials exactly."""
    moments = np.zeros(len(nodes))
    moments[0] = 2.0
    return np.linalg.solve(np.polynomial.legendre.legvander(nodes, len(nodes) - 1).T, moments)


NODES = np.array([-1.0, *(-x for x in _INNER), 0.0, *_INNER[::-1], 1.0])
WEIGHTS, FEWER = _rule(NODES), np.zeros(len(NODES))
FEWER[::2] = _rule(NODES[::2])


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
    weights, fewer = (jnp.asarray(x, dtype) for x in (WEIGHTS, FEWER))
    within = np.sqrt(np.finfo(dtype).eps)  # where a panel ends at a kink, on its side of it
    nodes = jnp.asarray(np.clip(NODES, within - 1, 1 - within), dtype)
    panel_indices, width = jnp.arange(MOST_PANELS), 2 * REACH / FIRST_PANELS

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
        start = width * count.astype(dtype) - REACH
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
