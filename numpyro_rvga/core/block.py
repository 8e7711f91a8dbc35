"""The block problem, which every batch and implicit method here solves.

Over q = N(m, Lambda^-1) in R^r, maximise

    sum_i E_q[phi_i(F_i(e))] + E_q[log base(e)] + entropy(q),      log base(e) = linear . e - e' precision e / 2,

where factor i sees e through its predictors, a_i ~ N(F_i(m), Z_i Lambda^-1 Z_i^T). With one row this is R-VGA's
implicit update, with all rows batch variational Gaussian inference. A step takes

    Lambda(t) = (1 - t) Lambda + t Lambda_new,   Lambda_new = precision - sum Z_i^T G_i Z_i,
    m(t) = m + t Lambda(t)^-1 (sum Z_i^T g_i + linear - precision m):

at t = 1 the fixed-point (Newton) step, for t -> 0 the natural gradient, which always rises. So halving t makes the
bound monotone without any assumption of concavity, and leaves its stationary points alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .linalg import cholesky, positive_part, solve_lower

Moments = tuple[Array, Array, Array]
SMALLEST_STEP = 2.0**-30
NARROWING = 4.0  # of the start's covariance, at a time
MAX_NARROWINGS = 40


class Factors(NamedTuple):
    """n factors of the same kind, linearised: a_i = offset_i + design_i e.

    :ivar offset: (n, C).
    :ivar design: (n, C, r).
    :ivar constants: pytree of (n, ...) arrays that the factors' densities take.
    """

    offset: Array
    design: Array
    constants: tuple


class Kind(NamedTuple):
    """What the factors of one kind have in common (static).

    :ivar expect: (mean (C,), covariance (C, C), constants) -> E[phi], E[grad phi], E[hess phi].
    :ivar plugin: the same at the mean, covariance ignored.
    :ivar concave: whether phi is known to be log-concave.
    :ivar conservative: whether ``expect``'s gradient and curvature derive from its value. If not (inverse probit),
        the fixed-point equations are solved as a root instead.
    """

    expect: Callable[[Array, Array, tuple], Moments]
    plugin: Callable[[Array, Array, tuple], Moments]
    concave: bool
    conservative: bool = True


class Base(NamedTuple):
    """log base(e) = linear . e - e' precision e / 2 + constant. ``None`` precision: the identity."""

    precision: Array | None
    linear: Array | None
    constant: Array


class Solution(NamedTuple):
    """q = N(mean, (root root^T)^-1) and how it was found.

    :ivar mean: (r,). :ivar root: lower Cholesky factor of the precision, (r, r).
    :ivar bound: the maximised objective; with a normalised base, sum E[phi] - KL(q || base).
    :ivar decrement: squared length of the last natural gradient, in nats: twice the distance to the optimum.
    """

    mean: Array
    root: Array
    bound: Array
    decrement: Array
    iterations: Array
    converged: Array


class Settings(NamedTuple):
    """Stopping rule (static): the natural gradient's squared length, in nats, and the number of steps."""

    tolerance: float
    max_iterations: int


class _Evaluation(NamedTuple):
    root: Array
    bound: Array
    merit: Array  # what must not fall: the bound, or minus the decrement if there is no bound
    gradient: Array
    target: Array  # the precision that a full step takes
    decrement: Array


class _Search(NamedTuple):
    iterations: Array
    trials: Array
    step: Array  # 0 while the start is sought
    mean: Array
    matrix: Array  # precision
    at: _Evaluation
    stuck: Array


def standard_base(dtype) -> Base:
    """The standard normal, normalised."""
    return Base(None, None, jnp.zeros((), dtype))


def evaluate(kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], covariance_root: Callable | None, plugin: bool):
    """Sum of E[phi], sum Z' g, -sum Z' G Z, and the latter made positive semi-definite factor by factor.

    The last is None where it is the same: all kinds are concave.

    :param covariance_root: maps Z^T (r, n C) to Lambda^(-1/2) Z^T; None for a point mass.
    """
    value, gradient, curvature, correction = 0.0, 0.0, 0.0, 0.0
    for kind, block in zip(kinds, blocks):
        n, c, r = block.design.shape
        flat = block.design.reshape(n * c, r)
        if covariance_root is None:
            covariance = jnp.zeros((n, c, c), flat.dtype)
        else:
            spread = covariance_root(flat.T).reshape(-1, n, c)
            covariance = jnp.einsum("rnc,rnd->ncd", spread, spread)
        moments = jax.vmap(kind.plugin if plugin else kind.expect)
        e, g, h = moments(block.offset, covariance, block.constants)
        weighted = jnp.einsum("ncd,ndr->ncr", -h, block.design).reshape(n * c, r)
        value, gradient = value + jnp.sum(e), gradient + g.reshape(n * c) @ flat
        curvature = curvature + flat.T @ weighted
        if not kind.concave:
            removed = jnp.einsum("ncd,ndr->ncr", positive_part(h), block.design).reshape(n * c, r)
            correction = correction + flat.T @ removed
    fallback = None if all(kind.concave for kind in kinds) else curvature + correction
    return value, gradient, curvature, fallback


def solve_block(
    kinds: tuple[Kind, ...],
    predict: Callable[[Array], tuple[Factors, ...]],
    base: Base,
    dimension: int,
    dtype,
    settings: Settings,
    *,
    start: Array | None = None,
    point: bool = False,
) -> Solution:
    """Solve the block problem.

    It begins at the standard normal, made narrower until the bound is finite. With ``start`` it begins at that mean
    and the width with the highest bound: far from the solution, expectations over a wide q say little.

    :param predict: m (r,) -> the factors linearised at m, their ``offset`` holding F_i(m).
    :param start: mean (r,) to start from.
    :param point: seek the mode instead (q a point mass, derivatives at the mean), and the precision there: Laplace's
        approximation.
    """
    identity = jnp.eye(dimension, dtype=dtype)
    precision = identity if base.precision is None else base.precision
    linear = jnp.zeros(dimension, dtype) if base.linear is None else base.linear
    seek_root = not all(kind.conservative for kind in kinds) and not point
    safe = all(kind.concave for kind in kinds)
    seek_width = start is not None and not point
    slack = 8 * jnp.finfo(dtype).eps

    def measure(mean: Array, root: Array) -> _Evaluation:
        value, gradient, curvature, fallback = evaluate(
            kinds, predict(mean), None if point else lambda z: solve_lower(root, z), point
        )
        pull, exact = precision @ mean, precision + curvature
        bound = value + linear @ mean - 0.5 * mean @ pull + base.constant
        gradient = gradient + linear - pull
        target = exact
        if not safe:
            target = jnp.where(jnp.all(jnp.isfinite(cholesky(exact))), exact, precision + fallback)
        if point:
            root = cholesky(target)
            slope = solve_lower(root, gradient)
            return _Evaluation(root, bound, bound, gradient, target, slope @ slope)
        inverse = solve_lower(root, identity)
        trace = jnp.sum(inverse * inverse) if base.precision is None else jnp.sum(inverse * (inverse @ precision))
        bound = bound - 0.5 * (trace - dimension) - jnp.sum(jnp.log(jnp.diagonal(root)))
        slope = inverse @ gradient
        relative = inverse @ exact @ inverse.T - identity
        decrement = slope @ slope + 0.5 * jnp.sum(relative * relative)
        return _Evaluation(root, bound, -decrement if seek_root else bound, gradient, target, decrement)

    def try_once(search: _Search) -> _Search:
        t, at = search.step, search.at
        starting = t == 0
        mixed = jnp.where(starting, search.matrix, (1 - t) * search.matrix + t * at.target)
        factor = cholesky(at.target if point else mixed)
        move = t * solve_lower(factor, solve_lower(factor, at.gradient), transpose=True)
        mean = search.mean + jnp.where(starting, 0.0, move)
        new = measure(mean, factor)
        stepping = _after_step(search, mean, mixed, new)
        return jax.tree.map(lambda a, b: jnp.where(starting, a, b), _after_start(search, new), stepping)

    def _after_start(search: _Search, new: _Evaluation) -> _Search:
        """A wider start was the better one, or: narrow it further, or go on from it."""
        finite = jnp.isfinite(new.bound) & jnp.all(jnp.isfinite(new.gradient))
        if not seek_width:
            matrix = jnp.where(finite, search.matrix, NARROWING * search.matrix)
            at, step = new, jnp.where(finite, 1.0, 0.0)
        else:
            better = finite & ~(new.bound <= search.at.bound)
            worse = finite & ~better
            matrix = jnp.where(worse, search.matrix / NARROWING, NARROWING * search.matrix)
            at = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, search.at)
            step = jnp.where(worse, 1.0, 0.0)
        step = step.astype(dtype)
        stuck = (search.trials >= MAX_NARROWINGS) & (step == 0)
        return search._replace(trials=search.trials + 1, step=step, matrix=matrix, at=at, stuck=stuck)

    def _after_step(search: _Search, mean: Array, matrix: Array, new: _Evaluation) -> _Search:
        t, at = search.step, search.at
        accepted = new.merit >= at.merit - slack * jnp.abs(at.merit)
        resolvable = slack * jnp.abs(new.bound)  # gains below rounding error cannot be told from losses
        idle = accepted & (new.decrement <= resolvable) & (new.decrement > 0.5 * at.decrement)
        after = _Search(search.iterations + 1, search.trials + 1, jnp.ones((), dtype), mean, matrix, new, idle)
        halved = search._replace(trials=search.trials + 1, step=0.5 * t, stuck=t < SMALLEST_STEP)
        return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), after, halved)

    def unfinished(search: _Search) -> Array:
        unsolved = (search.iterations < settings.max_iterations) & ~(search.at.decrement <= settings.tolerance)
        return (unsolved | (search.step == 0)) & ~search.stuck

    mean = jnp.zeros(dimension, dtype) if start is None else start
    zeros, unknown = jnp.zeros((dimension, dimension), dtype), jnp.full((), jnp.nan, dtype)
    unmeasured = _Evaluation(zeros, unknown, unknown, jnp.zeros(dimension, dtype), zeros, unknown)
    count, step = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
    begin = _Search(count, count, step, mean, identity, unmeasured, jnp.asarray(False))
    found = lax.while_loop(unfinished, try_once, begin)
    at = found.at
    converged = at.decrement <= jnp.maximum(settings.tolerance, slack * jnp.abs(at.bound))
    converged = converged & jnp.isfinite(at.bound)
    return Solution(found.mean, at.root, at.bound, at.decrement, found.iterations, converged)
