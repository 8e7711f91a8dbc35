"""Expectations of functions of many numbers, by draws: for densities without structure.

**Interface.** ``expect, held_out = by_draws(phi, nodes_of, num_held_out)`` has the form of every other expectation, so
the solver takes it as one more kind of factor, next to those that are exact. A factor may be a term of C predictors, or
a whole log likelihood whose C predictors are all of theta: one factor then represents all rows (see
:class:`~numpyro_rvga.model.terms.terms.Terms`, ``by_draws``).

Values are means over fixed points m + L z_k, L L^T = S; gradient and curvature are the derivatives of that very sum in
m and S, from first derivatives of phi alone (Bonnet, 1964; Price, 1958). So the sum over factors is the bound of a
deterministic problem, and a search that never lets it fall converges (Giordano, Ingram and Broderick, 2024: DADVI; with
a full covariance here). The points are antithetic, from a scrambled Sobol sequence, with exactly the identity as their
covariance: what is quadratic in phi comes out exact, and only the rest has an error. There must be more points than
twice C: along directions that no point has, the covariance could grow for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..jaxprs.primitives import equations, numbers_in
from ..matrices.linalg import semidefinite_factor
from ..pytrees import PyTree
from .by_nodes import Moments, power_of_two, with_slopes

Nodes = tuple[np.ndarray, np.ndarray]

POINTS = 512  # at least,
POINTS_PER_PREDICTOR = 8
MORE_PER_PREDICTOR = 512  # where they cost little,
MOST_POINTS = 8192  # up to so many, unless there must be more
NUMBERS = 2**28  # that are computed for one expectation
MORE_POINTS = 8  # times as many, where these do not suffice
LARGEST_ARRAY = 2**20  # numbers in the largest array of what is evaluated at once


def by_draws(
    phi: Callable[[Array, PyTree], Array],
    nodes_of: Callable[[int, int], Nodes],
    num_held_out: int,
    *,
    more: bool = False,
) -> tuple[Callable, Callable]:
    """(means (n, C), covariances (n, C, C), constants (n, ...), whether few points will do) -> E[phi], E[grad phi],
    E[hess phi] of n factors; and, without the latter, -> E[phi] over as many sets of other points, which q was not
    fitted to, (n, num_held_out).

    :param phi: of predictors (C,) and one factor's constants.
    :param nodes_of: number of a set, and of points -> positions (K, C) of these points and weights (K,).
    :param more: take more points than phi's cost would have it.
    """

    def expect_one(mean: Array, covariance: Array, constants: PyTree, is_coarse: Array | None = None) -> Moments:
        cost = _cost(phi, mean, constants)
        few, many = _least_points(mean.size), _num_points(mean.size, cost, more)
        if few == many:
            is_coarse = None
        with jax.ensure_compile_time_eval():  # the nodes are constants
            z, weights = nodes_of(0, many)
            if is_coarse is not None:
                z, weights = (np.concatenate(parts) for parts in zip(nodes_of(num_held_out + 1, few), (z, weights)))
        z, weights = (jnp.asarray(x, mean.dtype) for x in (z, weights))
        root, inverse = semidefinite_factor(covariance)
        points, slope = mean + z @ root.T, jax.value_and_grad(phi)
        if is_coarse is None:
            at = _at_points(slope, points, constants, cost)
        else:
            weights = jnp.where((jnp.arange(len(z)) < few) == is_coarse, weights, 0.0)
            at = _at_few_or_others(slope, points, constants, cost, few, is_coarse)
        return with_slopes(weights @ at[0], weights @ at[1], at[1], z, weights, root, inverse)

    def held_out_of_one(mean: Array, covariance: Array, constants: PyTree) -> Array:
        cost = _cost(phi, mean, constants)
        count = max(_num_points(mean.size, cost, more) // num_held_out, 2 * mean.size)
        with jax.ensure_compile_time_eval():
            sets = [nodes_of(number, count)[0] for number in range(1, num_held_out + 1)]
        z = jnp.asarray(np.concatenate(sets), mean.dtype)
        values = _at_points(phi, mean + z @ semidefinite_factor(covariance)[0].T, constants, cost)
        return jnp.mean(values.reshape(num_held_out, -1), axis=1)

    def of_each(function: Callable, *factors: Any) -> PyTree:
        return lax.map(lambda one: function(*one), factors)

    def expect(means: Array, covariances: Array, constants: PyTree, is_coarse: Array | None = None) -> Moments:
        return of_each(partial(expect_one, is_coarse=is_coarse), means, covariances, constants)

    return expect, partial(of_each, held_out_of_one)


class _Cost(NamedTuple):
    """The cost of one evaluation of phi: numbers that it computes, and those in its largest array."""

    numbers: int
    largest: int


def _cost(phi: Callable, mean: Array, constants: PyTree) -> _Cost:
    program = jax.make_jaxpr(phi)(mean, constants).jaxpr
    largest = max((v.aval.size for eqn in equations(program) for v in eqn.outvars), default=1)
    return _Cost(1 + numbers_in(program), largest)


def _num_points(num_predictors: int, cost: _Cost, more: bool) -> int:
    """A power of two."""
    affordable = min(MOST_POINTS, MORE_PER_PREDICTOR * num_predictors, NUMBERS // cost.numbers)
    return power_of_two(max(_least_points(num_predictors), affordable) * (MORE_POINTS if more else 1))


def _least_points(num_predictors: int) -> int:
    """A power of two."""
    return power_of_two(max(POINTS, POINTS_PER_PREDICTOR * num_predictors))


def _at_points(function: Callable, points: Array, constants: PyTree, cost: _Cost) -> PyTree:
    """``function(point, constants)`` at all points (K, C), as many at a time as memory has room for."""
    size = min(len(points), _num_at_once(cost))
    return lax.map(lambda point: function(point, constants), points, batch_size=size)


def _at_few_or_others(
    function: Callable, points: Array, constants: PyTree, cost: _Cost, few: int, is_coarse: Array
) -> PyTree:
    """``function(point, constants)`` at the first few points, or at all others; zeros elsewhere."""
    start, stop = jnp.where(is_coarse, jnp.array([0, few]), jnp.array([few, len(points)]))
    size = min(few, 1 << (_num_at_once(cost).bit_length() - 1))  # both sets are whole batches
    count = -(-len(points) // size)
    padded = jnp.concatenate([points, jnp.broadcast_to(points[:1], (count * size - len(points), points.shape[1]))])
    parts, at_all = padded.reshape(count, size, -1), jax.vmap(lambda point: function(point, constants))

    def take(number: Array, results: PyTree) -> PyTree:
        new = at_all(parts[number])
        return jax.tree.map(lambda x, y: lax.dynamic_update_slice_in_dim(x, y, number * size, 0), results, new)

    shapes = jax.eval_shape(at_all, parts[0])
    nothing = jax.tree.map(lambda x: jnp.zeros((len(padded), *x.shape[1:]), x.dtype), shapes)
    results = lax.fori_loop(start // size, -(-stop // size), take, nothing)
    return jax.tree.map(lambda x: x[: len(points)], results)


def _num_at_once(cost: _Cost) -> int:
    return max(1, LARGEST_ARRAY // cost.largest)
