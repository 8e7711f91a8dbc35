"""Expectations whose cost follows their difficulty, factor by factor.

Each is a weighted sum E[phi] = sum_k w_k phi(m + L z_k), L L^T = S, with its own slopes in m and S as E[grad phi] and
E[hess phi] / 2. All factors begin with a rule of few nodes, which is exact for polynomials of the fifth degree. A few
more nodes, further out, measure by how much phi is not such a polynomial. Only factors with errors that matter go on to
the next rule: a compiled loop takes them a batch at a time.

Where factors are few, a compiled ladder costs more than it saves: then all take a rule of many nodes at once. A search
begins with the few nodes in either case, and mostly ends there, see
:class:`~numpyro_rvga.engines.joint_solver.JointSolver`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..matrices.linalg import semidefinite_factor
from ..pytrees import PyTree
from .by_nodes import PANEL_NODES, Moments, hermite_rule
from .quadrature import (
    ACROSS,
    CUBE_NODES,
    MOST_DIAGONAL,
    PHI,
    TENSOR_NODES,
    Factor,
    at_nodes,
    by_cube,
    factor_of,
    fifth_degree,
    fifth_degree_nodes,
    fifth_degree_rule,
    iterated,
    natural_size,
    num_cube_nodes,
    rotated,
    spread_out,
    tensor,
    value_by_cube,
)

EXACT = {64: 1e-8, 32: 1e-6}  # nats: an error of no consequence, by the precision's bits
SMALL = 1e-5  # of a factor's natural gradient: an error of no consequence, far from the solution
ENOUGH, FAIRLY_SMALL = {64: 1e-6, 32: 1e-5}, 1e-3  # the same of factors that are integrals themselves
MODEST = 10.0  # times the tolerance: the difference of two rules that calls for panels. The better one's error is less
SLOPE_NODES = {1: 80, 2: 20}  # along each axis, for slopes in phi's constants
DIRECT_POINTS = 2**18  # in all, at which a rule of many nodes is no dearer
DIRECT_NODES = 2**19  # of integrals at all points: likewise
CACHED_POINTS = 2**14  # at which phi is evaluated at once, if all factors take the same rule
CHUNK_NODES = 2**22  # of integrals at these points: their values are in memory together
BATCH_POINTS = 2**16  # and if they take finer ones
MOST_BATCH = 1024  # factors
LEAST_POINTS = 2**10  # of a batch, however dear each is: they are enough for one call of the compiled functions

Rule = Callable[[PHI, Factor], tuple[Moments, Array]]


def expectations(
    phi: PHI,
    num_predictors: int,
    nodes: tuple[np.ndarray, np.ndarray] | None = None,
    *,
    effort: str = "usual",
    cost: int = 1,
) -> Callable[..., tuple[Moments, Array]]:
    """(means (n, C), covariances (n, C, C), constants (n, ...)) -> E[phi], E[grad phi], E[hess phi] of n factors, and
    the estimated errors of E[phi], in nats (n,).

    :param nodes: positions (K, C) and weights (K,) of the last rule, for more than three predictors: the fifth-degree
        rule's work is then kept where that is the better one.
    :param effort: ``"few"``: the fifth-degree rule alone.
        ``"direct"``: a rule of many nodes for all, if that is little work. It takes a fifth of the time to compile.
        ``"thorough"``: also the rule that kinks need in two or three dimensions; it takes long to compile.
    :param cost: the number of nodes of which each value of phi is itself an integral; one, if it is none. A value takes
        as much longer, and is as exact as these.
    """
    ladder = _Ladder(phi, num_predictors, nodes, effort == "thorough", cost)
    measure = {"few": ladder.by_first_rule, "direct": ladder.by_many_nodes}.get(effort, ladder.by_one_after_another)
    if num_predictors in SLOPE_NODES and effort != "few":
        slope_nodes = hermite_rule(num_predictors, SLOPE_NODES[num_predictors])
    else:
        slope_nodes = fifth_degree_rule(num_predictors)
    return _differentiable(measure, phi, slope_nodes)


def values_by_many_nodes(phi: PHI, cost: int = 1) -> Callable[[Array, Array, PyTree], tuple[Array, Array]]:
    """(means (n, C), covariances (n, C, C), constants (n, ...)) -> E[phi] of n factors and the estimated errors, (n,)
    each, by many nodes for all. Without slopes, which take longer to compile and to compute.

    :param cost: as in :func:`expectations`.
    """

    def values(means: Array, covariances: Array, constants: PyTree) -> tuple[Array, Array]:
        of_each = jax.vmap(lambda *factor: value_by_cube(phi, factor_of(*factor)))
        return _in_chunks(of_each, num_cube_nodes(means.shape[1]), cost, (means, covariances, constants))

    return values


class _Ladder(NamedTuple):
    """Rules for factors of one phi. ``nodes`` and ``cost``: as in :func:`expectations`; ``thorough``: its effort."""

    phi: PHI
    num_predictors: int
    nodes: tuple[np.ndarray, np.ndarray] | None
    thorough: bool
    cost: int

    def by_first_rule(self, *factors: Any) -> tuple[Moments, Array]:
        """n factors by the fifth-degree rule. ``factors``: means, covariances, constants, and a flag or none, whether
        gradient and curvature are corrected."""
        return self._begun(*factors)[1]

    def by_many_nodes(self, means: Array, covariances: Array, constants: PyTree) -> tuple[Moments, Array]:
        """All factors by a rule of many nodes, if there is one and that is little work."""
        rule, num_points = self._rule_of_many_nodes()
        most = DIRECT_POINTS if self.cost == 1 else DIRECT_NODES // self.cost
        if rule is None or len(means) * num_points > most:
            return self.by_one_after_another(means, covariances, constants)
        return _in_chunks(jax.vmap(rule), num_points, self.cost, (means, covariances, constants))

    def by_one_after_another(self, means: Array, covariances: Array, constants: PyTree) -> tuple[Moments, Array]:
        """All factors by the fifth-degree rule, and those whose errors are too large by one finer rule after the
        other."""
        factors, result = self._begun(means, covariances, constants)
        # If one value is not finite, the sum of all is of no use, however exact the others are.
        is_finite = jnp.all(jnp.isfinite(result[0][0]))
        for least, rule, num_points in self._finer():
            batch_points = max(BATCH_POINTS // self.cost, LEAST_POINTS)
            size = min(max(batch_points // num_points, 1), MOST_BATCH)
            hard = is_finite & ~(result[1] <= least * factors.tolerance)
            result = _refined(jax.vmap(partial(rule, self.phi)), size, factors, hard, result)
        return result

    def _begun(
        self, means: Array, covariances: Array, constants: PyTree, is_corrected: Array | None = None
    ) -> tuple[Factor, tuple[Moments, Array]]:
        """n factors, with the moments (n, ...) and their errors (n,) by the fifth-degree rule."""
        num_points = len(fifth_degree_nodes(self.num_predictors)[0])
        first = jax.vmap(partial(self._first_rule, is_corrected))
        return _in_chunks(first, num_points, self.cost, (means, covariances, constants))

    def _first_rule(
        self, is_corrected: Array | None, mean: Array, covariance: Array, constants: PyTree
    ) -> tuple[Factor, tuple[Moments, Array]]:
        factor = factor_of(mean, covariance, constants)
        if is_corrected is not None and mean.size > MOST_DIAGONAL:  # mixed derivatives show at other nodes alone
            factor = rotated(factor, is_corrected)
        points, _, _ = fifth_degree_nodes(mean.size)
        moments, error, direction, slope = fifth_degree(factor, *at_nodes(self.phi, factor, points), is_corrected)
        exact, small = (ENOUGH, FAIRLY_SMALL) if self.cost > 1 else (EXACT, SMALL)
        tolerance = jnp.maximum(exact[jnp.finfo(mean.dtype).bits], small * natural_size(factor.root, moments))
        return factor._replace(direction=direction, slope=slope, tolerance=tolerance), (moments, error)

    def _rule_of_many_nodes(self) -> tuple[Callable | None, int]:
        """A rule for one factor, and the number of its points."""
        if self.nodes is None:
            if self.num_predictors not in CUBE_NODES:
                return None, 0
            return lambda *factor: by_cube(self.phi, factor_of(*factor)), num_cube_nodes(self.num_predictors)
        nodes, points = self.nodes, fifth_degree_nodes(self.num_predictors)[0]
        z, count = np.concatenate([points, nodes[0]]), len(points)

        def mean_of_two(*arguments: Any) -> tuple[Moments, Array]:
            factor = factor_of(*arguments)
            values, gradients = at_nodes(self.phi, factor, z)
            moments, error, _, _ = fifth_degree(factor, values[:count], gradients[:count])
            return _more_exact((moments, error), spread_out(nodes, factor, values[count:], gradients[count:]))

        return mean_of_two, len(z)

    def _finer(self) -> list[tuple[float, Rule, int]]:
        """The rules after the first: each with the error that calls for it, in tolerances, and the number of its
        points."""
        nodes, size = self.nodes, self.num_predictors
        if size > len(ACROSS):
            if nodes is None:
                return []
            rule = lambda phi, factor: spread_out(nodes, factor, *at_nodes(phi, factor, nodes[0]))  # noqa: E731
            return [(1.0, rule, len(nodes[1]))]
        panels = iterated, 4 * len(PANEL_NODES) * ACROSS[size] ** (size - 1)
        if size == 1:
            return [(1.0, *panels)]
        count = sum(a ** (size - 1) * b for a, b in TENSOR_NODES[size])
        return [(1.0, tensor, count), *([(MODEST, *panels)] if self.thorough else [])]


def _in_chunks(function: Callable, num_points: int, cost: int, arguments: tuple) -> PyTree:
    """``function(*arguments)`` of n factors, some at a time: what it computes at their points then stays in the cache.

    Each takes factors from all over: where devices share them, all work on each chunk.

    :param cost: as in :func:`expectations`.
    """
    total = len(arguments[0])
    most = min(CACHED_POINTS, CHUNK_NODES // cost)
    count = min(-(-total * num_points // most), total)
    if count == 1:
        return function(*arguments)
    size = -(-total // count)

    def split(x: Array) -> Array:
        padded = jnp.concatenate([x, x[: size * count - total]])
        return padded.reshape(size, count, *x.shape[1:]).swapaxes(0, 1)

    results = lax.map(lambda chunk: function(*chunk), jax.tree.map(split, arguments))
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(size * count, *x.shape[2:])[:total], results)


def _refined(rule: Callable, size: int, factors: Factor, hard: Array, result: PyTree) -> PyTree:
    """The results, by this rule for the hard factors, ``size`` at a time."""
    if len(hard) == 1:
        return lax.cond(hard[0], lambda: _more_exact(result, rule(factors)), lambda: result)
    total, size = len(hard), min(size, len(hard))
    count = jnp.sum(hard)
    indices = jnp.argsort(~hard, stable=True)
    indices = jnp.concatenate([indices, jnp.full(size - 1, total, indices.dtype)])

    def take_batch(carry: tuple[Array, Any]) -> tuple[Array, Any]:
        start, result = carry
        chosen = lax.dynamic_slice(indices, (start,), (size,))
        some, before = jax.tree.map(lambda x: x.at[chosen].get(mode="clip"), (factors, result))
        new = _more_exact(before, rule(some))
        target = jnp.where(start + jnp.arange(size) < count, chosen, total)  # out of bounds: dropped
        return start + size, jax.tree.map(lambda old, x: old.at[target].set(x, mode="drop"), result, new)

    return lax.while_loop(lambda carry: carry[0] < count, take_batch, (jnp.zeros((), count.dtype), result))[1]


def _more_exact(before: PyTree, after: PyTree) -> PyTree:
    """A mean of two results, of one factor or of many, with weights 1 / error^2: the more exact one where errors differ
    much. Without a jump between the two, at which a search would not come to rest."""
    is_usable = after[1] < jnp.inf  # rules with nodes farther out may find NaN
    ratio = jnp.where(is_usable, before[1] / after[1], 0.0)
    weight = jnp.nan_to_num(1 / (1 + ratio**-2))

    def mixed(a: Array, b: Array) -> Array:
        w = weight.reshape(*weight.shape, *[1] * (a.ndim - weight.ndim))
        return jnp.where(w > 0, w * b, 0.0) + jnp.where(w < 1, (1 - w) * a, 0.0)

    return jax.tree.map(mixed, before, after)


# ---------------------------------------------------------------------- derivatives in what phi takes
def _differentiable(expect: Callable, phi: PHI, slope_nodes: tuple[np.ndarray, np.ndarray]) -> Callable:
    """``expect`` (means, covariances, constants, and a flag or none -> moments and their errors), whose value can be
    differentiated once, in reverse mode. Its loops are not: E[grad phi] and E[hess phi] / 2 are the slopes in mean and
    covariance, and the slopes in phi's constants are expectations too.

    :param slope_nodes: of these: positions (K, C) and weights (K,).
    """
    z, weights = slope_nodes

    def of_constants(mean: Array, covariance: Array, constants: PyTree) -> Array:
        root, _ = semidefinite_factor(covariance)
        points = mean + z @ root.T
        each = jax.vmap(phi, (0, None))
        is_defined = jnp.isfinite(each(points, lax.stop_gradient(constants)))
        points = jnp.where(is_defined[:, None], points, mean)  # so too where phi is not defined far out
        return jnp.sum(jnp.asarray(weights) * is_defined * each(points, constants))

    def function(means: Array, covariances: Array, constants: PyTree, is_corrected: PyTree = None) -> tuple:
        return with_slopes(means, covariances, constants, () if is_corrected is None else (is_corrected,))

    def of_factors(means: Array, covariances: Array, constants: PyTree, flags: tuple) -> tuple[Moments, Any]:
        return expect(means, covariances, constants, *flags)

    def forward(means: Array, covariances: Array, constants: PyTree, flags: tuple) -> tuple:
        result = expect(means, covariances, constants, *flags)
        return result, (means, covariances, constants, result[0])

    def backward(residuals: PyTree, slopes: tuple[Moments, Any]) -> tuple:
        means, covariances, constants, (_, gradients, hessians) = residuals
        scale = slopes[0][0]
        vjp = jax.vjp(lambda c: jax.vmap(of_constants)(means, covariances, c), constants)[1]
        return scale[:, None] * gradients, 0.5 * scale[:, None, None] * hessians, vjp(scale)[0], None

    with_slopes = jax.custom_vjp(of_factors)
    with_slopes.defvjp(forward, backward)
    return function
