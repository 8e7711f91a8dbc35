"""The block problem, which every batch and implicit method here solves.

Over q = N(m, Lambda^-1) in R^r, maximise

    sum_i E_q[phi_i(F_i(e))] + E_q[log base(e)] + entropy(q),      log base(e) = linear . e - e' precision e / 2,

where factor i sees e through its predictors, a_i ~ N(F_i(m), Z_i Lambda^-1 Z_i^T). With one row this is R-VGA's
implicit update, with all rows batch variational Gaussian inference. A step takes

    Lambda(t) = (1 - t) Lambda + t Lambda_new,   Lambda_new = precision - sum Z_i^T G_i Z_i,
    m(t) = m + t Lambda(t)^-1 (sum Z_i^T g_i + linear - precision m):

at t = 1 the fixed-point (Newton) step, for t -> 0 the natural gradient, which always rises. So halving t makes the
bound monotone without any assumption of concavity, and leaves its stationary points alone. The first t that a step
tries is where, by the last move's slopes at both ends, that move had better ended: the map from Lambda to Lambda_new
may turn errors around, and then t = 1 goes to and fro.

Where the predictors are affine, their covariances do not depend on the mean, and Newton steps of the mean take no
product of matrices. Then the mean is solved for at each new Lambda, which takes a third as many steps as both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .objective import Objective
from .precisions import Dense, Form

SMALLEST_STEP = 2.0**-30
SHARE = 1e-6
SHORTEST = 0.1  # first step tried
NEARLY_FULL = 0.05  # a full step forgets the old precision, however large, and is taken in place of one so near
MAX_NARROWINGS = 10
WORTH = 0.1  # of a negative bound that narrowing must leave of it, if factors are log-concave
REFINEMENTS = 20  # at most
REFINED = 0.01  # of the natural gradient's squared length before a step: where the mean is solved well enough for now
SHORTER = 0.25  # of a Newton step of the mean that lowered the bound


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
    """Stopping rule (static).

    :ivar tolerance: for the natural gradient's squared length, in nats.
    :ivar max_iterations: and ``min_iterations``: the number of steps, at most and at least.
    :ivar share: of what that length was at the start, which must be reached too.
    :ivar refinements: Newton steps of the mean after one of the covariance, at most, where they need no matrix product.
    """

    tolerance: float
    max_iterations: int
    min_iterations: int = 0
    share: float = SHARE
    refinements: int = REFINEMENTS


class _Evaluation(NamedTuple):
    bound: Array
    gradient: Array
    target: Array  # the precision that a full step takes
    decrement: Array
    spread: Array  # the covariance's part of the decrement
    clamped: Array  # whether the target leaves out positive curvatures of phi
    factor: Array | None  # of the target, if it was needed: to find that out, or for a mode


class Trial(NamedTuple):
    """Where a search stands: q = N(mean, matrix^-1), evaluated, and the step to try next."""

    iterations: Array  # while the start is sought: trials
    step: Array  # 0 while the start is sought
    mean: Array
    matrix: Array
    at: _Evaluation
    first: Array  # the decrement at the start
    stuck: Array
    of_mean: Array  # if alternating: whose turn it is


class Search(NamedTuple):
    """A loop: ``try_once`` from ``begin`` while ``unfinished``, then read the ``solution``."""

    begin: Trial
    try_once: Callable[[Trial], Trial]
    unfinished: Callable[[Trial], Array]
    solution: Callable[[Trial], Solution]


def standard_base(dtype) -> Base:
    """The standard normal, normalised."""
    return Base(None, None, jnp.zeros((), dtype))


def seek_start(search: Search) -> Solution:
    """What a search knows once it has found how wide to start."""
    return search.solution(
        lax.while_loop(lambda trial: (trial.step == 0) & ~trial.stuck, search.try_once, search.begin)
    )


def run_search(search: Search) -> Solution:
    return search.solution(lax.while_loop(search.unfinished, search.try_once, search.begin))


def block_search(
    objective: Objective,
    base: Base,
    dimension: int,
    dtype,
    settings: Settings,
    *,
    start: Array | None = None,
    start_precision: Array | None = None,
    point: bool = False,
    alternating: bool = False,
    form: Form | None = None,
) -> Search:
    """The search for a block's solution.

    It begins at the standard normal, made narrower until the bound is finite; with ``start`` at that mean and the width
    with the highest bound: far from the solution, expectations over a wide q say little. Log-concave factors over a
    wide q do lead on, and faster, but where exponentials dwarf all else.

    :param start: mean (r,) to start from.
    :param start_precision: if the width is known too: as an array of ``form``.
    :param point: seek the mode instead (q a point mass, derivatives at the mean), and the precision there: Laplace's
        approximation.
    :param alternating: solve for the mean alone, by Newton's method, and for the covariance alone, by its fixed point,
        in turn; not for both at once.
    :param form: in which ``objective`` sees covariances and has curvatures. Default: dense matrices.
    """
    identity = jnp.eye(dimension, dtype=dtype)
    precision = identity if base.precision is None else base.precision
    linear = jnp.zeros(dimension, dtype) if base.linear is None else base.linear
    form = Dense(precision, base.precision is None) if form is None else form
    seek_root = not all(kind.conservative for kind in objective.kinds) and not point
    safe = all(kind.concave for kind in objective.kinds)
    keeps_factor = point or not safe
    if not objective.staged or point or alternating or seek_root:
        settings = settings._replace(refinements=0)
    unknown = jnp.full((), jnp.nan, dtype)
    seek_width = start is not None and start_precision is None and not point
    share = WORTH if safe and not alternating else 1.0

    def rounding(merit: Array) -> Array:
        """Of a bound, or what else is compared. In a bound the covariance's trace cancels, which is of about the
        dimension and may be far larger."""
        cancelling = 0 if point or seek_root else dimension
        return 8 * jnp.finfo(dtype).eps * (cancelling + jnp.abs(merit))

    def slope_at(mean: Array, covariances: Any) -> tuple[Array, Array, Any]:
        value, gradient, hessians = objective.expect(mean, covariances)
        pull = form.pull(mean)
        return value + linear @ mean - 0.5 * mean @ pull + base.constant, gradient + linear - pull, hessians

    def refined(
        mean: Array, spread: Any, factor: Array, most: Array, enough: Array
    ) -> tuple[Array, tuple[Array, Array, Any]]:
        """The mean, after Newton steps at this covariance that raise the bound, and the slope there.

        :param most: number of steps. :param enough: squared length of the mean's natural gradient at which to stop.
        """
        if not settings.refinements:
            return mean, slope_at(mean, spread)

        def unfinished(carry):
            count, *_, left = carry
            return (count <= most) & ~(left <= enough)

        solve = form.solver(factor)

        def visit(carry):  # a loop, so that expectations are compiled once
            count, tried, mean, found, left = carry
            new = slope_at(tried, spread)
            move = solve(new[1])
            better = (count == 0) | (new[0] > found[0])
            taken = (tried, new, new[1] @ move)
            kept = jax.tree.map(lambda a, b: jnp.where(better, a, b), taken, (mean, found, left))
            return count + 1, jnp.where(better, tried + move, mean + SHORTER * (tried - mean)), *kept

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(slope_at, mean, spread))
        begin = (jnp.zeros((), jnp.int32), mean, mean, nothing, unknown)
        _, _, mean, found, _ = lax.while_loop(unfinished, visit, begin)
        return mean, found

    def measure(mean: Array, root: Array, here: Array, turn: Array, *limits: Array) -> tuple[Array, _Evaluation, Array]:
        """At N(mean, (root root^T)^-1), whose precision is ``here``, the mean refined within limits. Also half
        <target - here, turn>."""
        known = None if point else form.spread(root)
        spread = None if point else objective.spread(mean, known)
        mean, (bound, gradient, hessians) = refined(mean, spread, root, *limits)
        exact = form.target(objective.curve(mean, hessians, False))
        target, clamped, of_target = exact, jnp.asarray(False), None
        if keeps_factor:
            of_target = form.factor(exact)
        if not safe:

            def clamp():
                target = form.target(objective.curve(mean, hessians, True))
                return target, form.factor(target)

            of_exact = of_target
            clamped = ~jnp.all(jnp.isfinite(of_exact))
            target, of_target = lax.cond(clamped, clamp, lambda: (exact, of_exact))
        if point:
            length = gradient @ form.solver(of_target)(gradient)
            zero = jnp.zeros((), dtype)
            return mean, _Evaluation(bound, gradient, target, length, zero, clamped, of_target), zero
        bound = bound - 0.5 * (form.trace(here, known) - dimension) - form.half_log_determinant(root)
        length = gradient @ form.solver(root)(gradient)
        square, along = form.products(root, known, exact - here, turn)
        found = _Evaluation(bound, gradient, target, length + 0.5 * square, 0.5 * square, clamped, of_target)
        return mean, found, 0.5 * along

    def try_once(trial: Trial) -> Trial:
        t, at = trial.step, trial.at
        starting = t == 0
        turn = at.target - trial.matrix
        if alternating:
            turn = jnp.where(trial.of_mean, 0.0, turn)
        keeps_matrix = starting | (trial.of_mean & alternating)
        # Not matrix + t turn, which would lose a target far smaller than the matrix.
        mixed = trial.matrix if point else jnp.where(keeps_matrix, trial.matrix, (1 - t) * trial.matrix + t * at.target)
        if point:
            factor = at.factor
        elif keeps_factor:
            factor = lax.cond(~keeps_matrix & (t == 1), lambda: at.factor, lambda: form.factor(mixed))
        else:
            factor = form.factor(mixed)
        mean = trial.mean
        if not settings.refinements:
            metric = form.factor(at.target) if alternating else factor
            keeps_mean = starting | (~trial.of_mean & alternating)
            mean = jnp.where(keeps_mean, mean, mean + t * form.solver(metric)(at.gradient))
        most = jnp.where(starting, 0, settings.refinements)
        mean, new, along = measure(mean, factor, mixed, turn, most, REFINED * at.decrement)
        direction = (mean - trial.mean) / t
        next_step = jnp.ones((), dtype)
        if not point:
            # The step at which the bound's slope along this move would have vanished (secant): T(V) may oscillate.
            rise = jnp.where(trial.of_mean, 0.0, at.spread) if alternating else at.spread
            before = at.gradient @ direction + rise
            after = new.gradient @ direction + along
            best = t * before / (before - after)
            known = (after < before) & jnp.isfinite(best)
            known = known & (jnp.abs(best - 1) > NEARLY_FULL)
            next_step = jnp.where(known, jnp.clip(best, SHORTEST, 1.0), 1.0).astype(dtype)
        stepped = _after_step(trial, mean, mixed, new, next_step)
        return jax.tree.map(lambda a, b: jnp.where(starting, a, b), _after_start(trial, new), stepped)

    def _after_start(trial: Trial, new: _Evaluation) -> Trial:
        """A wider start was the better one, or: narrow it further, or go on from it."""
        finite = jnp.isfinite(new.bound) & jnp.all(jnp.isfinite(new.gradient))
        if not seek_width:
            done, at = finite, new
            matrix = jnp.where(finite, trial.matrix, form.narrower(trial.matrix))
        else:
            before = trial.at.bound
            better = finite & ~(new.bound <= jnp.maximum(before, share * before))
            done = finite & ~better
            matrix = jnp.where(done, form.wider(trial.matrix), form.narrower(trial.matrix))
            at = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, trial.at)
        count = jnp.where(done, 0, trial.iterations + 1)
        stuck = count > MAX_NARROWINGS
        return Trial(count, done.astype(dtype), trial.mean, matrix, at, at.decrement, stuck, trial.of_mean)

    def _after_step(trial: Trial, mean: Array, matrix: Array, new: _Evaluation, next_step: Array) -> Trial:
        at = trial.at
        merit, before = (-new.decrement, -at.decrement) if seek_root else (new.bound, at.bound)
        accepted = merit >= before - rounding(before)
        resolvable = rounding(new.bound)  # gains below rounding error cannot be told from losses
        idle = accepted & (new.decrement <= resolvable) & (new.decrement > 0.5 * at.decrement)
        of_mean = trial.of_mean
        if alternating:
            share = jnp.where(of_mean, new.decrement - new.spread, new.spread)
            of_mean = of_mean ^ (share <= 0.5 * tolerance(trial))
        after = Trial(trial.iterations + 1, next_step, mean, matrix, new, trial.first, idle, of_mean)
        halved = trial._replace(step=0.5 * trial.step, stuck=trial.step < SMALLEST_STEP)
        return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), after, halved)

    def tolerance(trial: Trial) -> Array:
        # Relative for rows that hardly move q: passed over, a million of them would add up.
        return jnp.minimum(settings.tolerance, settings.share * trial.first)

    def unfinished(trial: Trial) -> Array:
        unsolved = ~(trial.at.decrement <= tolerance(trial)) | (trial.iterations < settings.min_iterations)
        unsolved = unsolved & (trial.iterations < settings.max_iterations)
        return (unsolved | (trial.step == 0)) & ~trial.stuck

    def solution(found: Trial) -> Solution:
        at = found.at
        converged = at.decrement <= jnp.maximum(settings.tolerance, rounding(at.bound))
        root = at.factor if point else form.factor(found.matrix)
        return Solution(found.mean, root, at.bound, at.decrement, found.iterations, converged & jnp.isfinite(at.bound))

    mean = jnp.zeros(dimension, dtype) if start is None else start
    count, step = jnp.zeros((), jnp.int32), jnp.zeros((), dtype)
    matrix = form.begin() if start_precision is None else start_precision
    factor = jnp.full(jax.eval_shape(form.factor, matrix).shape, jnp.nan, dtype) if keeps_factor else None
    unmeasured = _Evaluation(unknown, jnp.zeros(dimension, dtype), matrix, unknown, unknown, jnp.asarray(False), factor)
    begin = Trial(count, step, mean, matrix, unmeasured, unknown, jnp.asarray(False), jnp.asarray(True))
    return Search(begin, try_once, unfinished, solution)
