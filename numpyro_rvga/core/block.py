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
MAX_INFLATIONS = 40


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
    merit: Array  # what must not fall: the bound, or minus the natural gradient's length if there is no bound
    gradient: Array
    curvature: Array  # -sum Z' G Z
    fallback: Array | None  # the same with each G's negative-curvature part removed; None if it has none


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
    start: tuple[Array, Array] | None = None,
    point: bool = False,
) -> Solution:
    """Solve the block problem.

    :param predict: m (r,) -> the factors linearised at m, their ``offset`` holding F_i(m).
    :param start: mean (r,) and root of the precision (r, r) to start from; default: the base, which is then proper.
        Where the bound is not finite there, the covariance is shrunk until it is.
    :param point: seek the mode instead (q a point mass, derivatives at the mean): Laplace's approximation.
    """
    identity = jnp.eye(dimension, dtype=dtype)
    precision = identity if base.precision is None else base.precision
    linear = jnp.zeros(dimension, dtype) if base.linear is None else base.linear
    seek_root = not all(kind.conservative for kind in kinds) and not point
    safe = all(kind.concave for kind in kinds)

    def measure(mean, matrix) -> _Evaluation:
        root = cholesky(matrix)
        blocks = predict(mean)
        to_root = None if point else lambda z: solve_lower(root, z)
        value, gradient, curvature, fallback = evaluate(kinds, blocks, to_root, point)
        pull = precision @ mean
        bound = value + linear @ mean - 0.5 * mean @ pull + base.constant
        if not point:
            inverse = solve_lower(root, identity)
            trace = jnp.sum(inverse * inverse) if base.precision is None else jnp.sum(inverse * (inverse @ precision))
            bound = bound - 0.5 * (trace - dimension) - jnp.sum(jnp.log(jnp.diagonal(root)))
        evaluation = _Evaluation(root, bound, bound, gradient + linear - pull, curvature, fallback)
        return evaluation._replace(merit=-decrement_of(evaluation)) if seek_root else evaluation

    def decrement_of(at: _Evaluation) -> Array:
        if point:
            slope = solve_lower(cholesky(target_of(at)), at.gradient)
            return slope @ slope
        slope = solve_lower(at.root, at.gradient)
        relative = solve_lower(at.root, solve_lower(at.root, precision + at.curvature).T) - identity
        return slope @ slope + 0.5 * jnp.sum(relative * relative)

    def target_of(at: _Evaluation):
        exact = precision + at.curvature
        if safe:
            return exact
        usable = jnp.all(jnp.isfinite(cholesky(exact)))
        return jnp.where(usable, exact, precision + at.fallback)

    slack = 8 * jnp.finfo(dtype).eps

    def resolvable(at: _Evaluation) -> Array:
        return slack * jnp.abs(at.bound)  # gains below rounding error cannot be told from losses

    def iterate(carry):
        count, mean, matrix, at, before, _ = carry
        target = target_of(at)
        if point:
            factor = cholesky(target)
            newton = solve_lower(factor, solve_lower(factor, at.gradient), transpose=True)

        def propose(t):
            if point:
                return mean + t * newton, matrix, measure(mean + t * newton, matrix)
            mixed = (1 - t) * matrix + t * target
            root = cholesky(mixed)
            moved = mean + t * solve_lower(root, solve_lower(root, at.gradient), transpose=True)
            return moved, mixed, measure(moved, mixed)

        floor = at.merit - slack * jnp.abs(at.merit)

        def failing(trial):
            t, _, _, new = trial
            return ~(new.merit >= floor) & (t > 0)

        def halve(trial):
            t = jnp.where(trial[0] > SMALLEST_STEP, 0.5 * trial[0], 0.0)  # a step of zero: nothing rises any more
            return (t, *propose(t))

        untried = (jnp.full((), 2.0, dtype), mean, matrix, at._replace(merit=jnp.full((), jnp.nan, dtype)))
        t, mean, matrix, at = lax.while_loop(failing, halve, untried)
        decrement = decrement_of(at)
        stuck = (t == 0) | (decrement <= resolvable(at)) & (decrement > 0.5 * before)
        return count + 1, mean, matrix, at, decrement, stuck

    def unfinished(carry):
        count, _, _, _, decrement, stuck = carry
        return (count < settings.max_iterations) & ~(decrement <= settings.tolerance) & ~stuck

    if start is None:
        mean, matrix = jnp.zeros(dimension, dtype), identity
    else:
        mean, matrix = start

    def inflate(carry):
        count, matrix, _ = carry
        return count + 1, 4 * matrix, measure(mean, 4 * matrix)

    square, unknown = jnp.zeros((dimension, dimension), dtype), jnp.full((), jnp.nan, dtype)
    unmeasured = _Evaluation(square, unknown, unknown, jnp.zeros(dimension, dtype), square, None if safe else square)
    _, matrix, at = lax.while_loop(
        lambda carry: ~jnp.isfinite(carry[2].bound) & (carry[0] < MAX_INFLATIONS),
        inflate,
        (0, 0.25 * matrix, unmeasured),
    )
    carry = (0, mean, matrix, at, decrement_of(at), jnp.asarray(False))
    count, mean, matrix, at, decrement, _ = lax.while_loop(unfinished, iterate, carry)
    converged = jnp.isfinite(at.bound) & (decrement <= jnp.maximum(settings.tolerance, resolvable(at)))
    return Solution(mean, at.root, at.bound, decrement, count, converged)
