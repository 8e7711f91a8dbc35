"""The best Gaussian for a sum of factors, as pure steps of a visible state.

Over q = N(m, Lambda^-1) in R^r, maximize

    sum_i E_q[log p_i(F_i(e))] + E_q[log base(e)] + entropy(q),      log base(e) = linear . e - e' precision e / 2,

where factor i depends on e through its predictors, u_i ~ N(F_i(m), J_i Lambda^-1 J_i^T). With one row this is R-VGA's
implicit update, with all rows batch variational Gaussian inference. A step takes

    Lambda(t) = (1 - t) Lambda + t Lambda_new,   Lambda_new = precision - sum J_i^T H_i J_i,
    m(t) = m + t Lambda(t)^-1 (sum J_i^T g_i + linear - precision m):

at t = 1 the fixed-point (Newton) step, for t -> 0 the natural gradient, which always rises. So halving t makes the
bound monotone without any assumption of concavity, and leaves its stationary points alone. The first t that a step
tries is where, by the last move's slopes at both ends, that move had better ended: the map from Lambda to Lambda_new
may reverse the sign of errors, and then t = 1 oscillates.

Where Lambda_new is not positive definite, a step leads to what the negative parts of the H_i alone make of it, so that
t = 1 is possible. But that need not raise the bound. Where it does not, the step leads to Lambda_new itself, for a t
small enough.

One step is :func:`propose` (state -> the q to try), an evaluation of the factors there, and :func:`update` (state and
evaluation -> state). :mod:`~.drivers` takes one after the other.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from ..matrices.precisions import PrecisionForm
from ..pytrees import PyTree
from .factors import Expected
from .objective import Objective
from .search import Base, Evaluation, Proposal, Search, Settings, Solution, SolverState, Target

Number = TypeVar("Number", Array, float)

MIN_STEP = 2.0**-30
SHORTEST_STEP = 2.0**-90  # the same, where a step of MIN_STEP should still raise the bound by a nat
SHORTEST_FIRST_TRY = 0.1
NEARLY_FULL = 0.05  # a full step forgets the old precision, however large, and is taken in place of one so near
ROUNDINGS = 8.0  # units in the last place, by which a sum may be off
LOST = 2.0**-8  # of rounding: a rise that no step can show
MAX_NARROWINGS = 10
LITTLE_LESS = 0.9  # of the decrement that a step has left: where the bound has not risen either, none will raise it
ACCEPT_RATIO = 0.1  # of a negative bound that narrowing must leave of it, if factors are log-concave
STEEP = 0.1  # of the bound's slope towards the exact target, that one towards the clamped target must have


def init(search: Search, form: PrecisionForm, mean: Array, precision: Array | None = None) -> SolverState:
    """The state before anything was evaluated.

    :param precision: as an array of ``form``; default: the one to narrow from.
    """
    dtype, unknown = mean.dtype, jnp.full((), jnp.nan, mean.dtype)
    precision = form.begin(mean) if precision is None else precision
    factor = None
    if search.keeps_factor:
        factor = jnp.full(jax.eval_shape(form.factor, precision).shape, jnp.nan, dtype)
    no, zero = jnp.asarray(False), jnp.zeros((), dtype)
    evaluation = Evaluation(unknown, jnp.zeros_like(mean), Target(precision, factor, no), unknown, unknown)
    return SolverState(jnp.zeros((), jnp.int32), zero, mean, precision, evaluation, unknown, no, jnp.asarray(True))


def propose(search: Search, form: PrecisionForm, state: SolverState) -> Proposal:
    """The q to evaluate next: Lambda(t) and m(t), between where the search stands (t = 0) and a full step (t = 1)."""
    t, evaluation, target = state.step, state.evaluation, state.evaluation.target
    starting = t == 0
    change = target.precision - state.precision
    if search.alternating:
        change = jnp.where(state.updating_mean, 0.0, change)
    keeps_precision = starting | (state.updating_mean & search.alternating)
    if search.mode:
        precision, factor = state.precision, target.factor
    else:  # Not precision + t change, which would lose a target far smaller than the precision.
        mixed = (1 - t) * state.precision + t * target.precision
        precision = jnp.where(keeps_precision, state.precision, mixed)
        if search.keeps_factor:
            full = ~keeps_precision & (t == 1)
            factor = lax.cond(full, lambda: target.factor, lambda: form.factor(precision))
        else:
            factor = form.factor(precision)
    mean = state.mean
    if not search.solves_for_mean:
        metric = form.factor(target.precision) if search.alternating else factor
        keeps_mean = starting | (~state.updating_mean & search.alternating)
        mean = jnp.where(keeps_mean, mean, mean + t * form.solver(metric)(evaluation.gradient))
    covariance_root = None if search.mode else form.covariance_root(factor)
    return Proposal(mean, precision, factor, covariance_root, change)


def with_base(base: Base, form: PrecisionForm, mean: Array, expected: Expected) -> Expected:
    """The factors' and the base's: value and gradient are those of the bound's part that depends on the mean."""
    value, gradient = slope_of_base(base, form, mean)
    return expected._replace(value=expected.value + value, gradient=expected.gradient + gradient)


def slope_of_base(base: Base, form: PrecisionForm, mean: Array) -> tuple[Array, Array]:
    """The base's value and gradient."""
    linear = jnp.zeros_like(mean) if base.linear is None else base.linear
    product = form.precision_times(mean)
    return linear @ mean - 0.5 * mean @ product + base.constant, linear - product


def bound_by(
    form: PrecisionForm, value: Array, precision: Array, factor: Array, covariance_root: Any, size: int
) -> Array:
    """The bound at a q of so many entries. ``value``: of its part that depends on the mean, see :func:`with_base`."""
    divergence = 0.5 * (form.trace(precision, covariance_root) - size)
    return value - divergence - form.half_log_determinant(factor)


def update(
    search: Search,
    form: PrecisionForm,
    state: SolverState,
    proposal: Proposal,
    mean: Array,
    slope: Expected,
    exact: Array,
    target: Target,
) -> SolverState:
    """The state after an evaluation of the proposal, at ``mean``.

    :param exact: the precision of the factors' exact curvature, of which the natural gradient is.
    """
    if search.mode:
        length = slope.gradient @ form.solver(target.factor)(slope.gradient)
        along = jnp.zeros((), mean.dtype)
        new = Evaluation(slope.value, slope.gradient, target, length, along)
    else:
        root, covariance_root = proposal.factor, proposal.covariance_root
        bound = bound_by(form, slope.value, proposal.precision, root, covariance_root, mean.size)
        length = slope.gradient @ form.solver(root)(slope.gradient)
        ahead = exact - proposal.precision
        is_rounding = jnp.all(jnp.abs(ahead) <= 8 * jnp.finfo(exact.dtype).eps * jnp.abs(exact))
        square, along = lax.cond(
            is_rounding,
            lambda: (jnp.zeros((), mean.dtype), jnp.zeros((), mean.dtype)),
            lambda: form.products(root, covariance_root, ahead, proposal.change),
        )
        along, square = 0.5 * along, 0.5 * square
        new = Evaluation(bound, slope.gradient, target, length + square, square)
    started = _after_start(search, form, state, mean, new)
    stepped = _after_step(search, state, proposal, mean, new, _next_step(search, state, mean, new, along))
    return jax.tree.map(lambda a, b: jnp.where(state.step == 0, a, b), started, stepped)


def _next_step(search: Search, state: SolverState, mean: Array, new: Evaluation, along: Array) -> Array:
    """The step at which the bound's slope along this move would have vanished (secant): T(V) may oscillate."""
    dtype, t, evaluation = mean.dtype, state.step, state.evaluation
    if search.mode:
        return jnp.ones((), dtype)
    direction = (mean - state.mean) / t
    rise = evaluation.covariance_decrement
    if search.alternating:
        rise = jnp.where(state.updating_mean, 0.0, rise)
    before = evaluation.gradient @ direction + rise
    after = new.gradient @ direction + along
    best = t * before / (before - after)
    is_usable = (after < before) & jnp.isfinite(best) & (jnp.abs(best - 1) > NEARLY_FULL)
    return jnp.where(is_usable, jnp.clip(best, SHORTEST_FIRST_TRY, 1.0), 1.0).astype(dtype)


def _after_start(search: Search, form: PrecisionForm, state: SolverState, mean: Array, new: Evaluation) -> SolverState:
    """A wider start was the better one, or: narrow it further, or go on from it."""
    finite = jnp.isfinite(new.bound) & jnp.all(jnp.isfinite(new.gradient))
    if not search.seek_scale:
        done, evaluation = finite, new
        precision = jnp.where(finite, state.precision, form.narrower(state.precision))
    else:
        before = state.evaluation.bound
        share = ACCEPT_RATIO if search.log_concave and not search.alternating else 1.0
        better = finite & ~(new.bound <= jnp.maximum(before, share * before))
        done = finite & ~better
        precision = jnp.where(done, form.wider(state.precision), form.narrower(state.precision))
        evaluation = jax.tree.map(lambda a, b: jnp.where(better, a, b), new, state.evaluation)
    count = jnp.where(done, 0, state.iterations + 1)
    step = done.astype(state.mean.dtype)
    mean = jnp.where(done, mean, state.mean)
    return SolverState(
        count, step, mean, precision, evaluation, evaluation.decrement, count > MAX_NARROWINGS, state.updating_mean
    )


def _after_step(
    search: Search, state: SolverState, proposal: Proposal, mean: Array, new: Evaluation, next_step: Array
) -> SolverState:
    """The state after a step was tried: where it led, if that is no worse, else as it was, with half the step to try
    next."""
    evaluation = state.evaluation
    merit, before = (-new.decrement, -evaluation.decrement) if search.by_decrement else (new.bound, evaluation.bound)
    accepted = merit >= before - rounding(search, mean, before)
    if not search.mode:  # a bound of infinity is no rise, but a density of infinity says that there is no mode
        accepted = accepted & jnp.isfinite(merit) & jnp.isfinite(new.decrement)
    resolvable = rounding(search, mean, new.bound)  # gains below rounding error may be losses
    near = (new.decrement <= resolvable) & (new.decrement > 0.5 * evaluation.decrement)
    hidden = (merit - before <= resolvable) & (new.decrement > LITTLE_LESS * evaluation.decrement)
    stuck = accepted & (near | hidden)
    updating_mean = state.updating_mean
    if search.alternating:
        share = jnp.where(updating_mean, new.decrement - new.covariance_decrement, new.covariance_decrement)
        updating_mean = updating_mean ^ (share <= 0.5 * _tolerance(search.settings, state))
    after = SolverState(
        state.iterations + 1, next_step, mean, proposal.precision, new, state.initial_decrement, stuck, updating_mean
    )
    is_lost = state.step * evaluation.decrement <= LOST * rounding(search, state.mean, before)
    shortest = jnp.where(MIN_STEP * evaluation.decrement > 1, SHORTEST_STEP, MIN_STEP)
    halved = state._replace(step=0.5 * state.step, stuck=is_lost | (state.step < shortest))
    return jax.tree.map(lambda a, b: jnp.where(accepted, a, b), after, halved)


def rounding(search: Search, mean: Array, merit: Array) -> Array:
    """The rounding error of a bound, or of what else is compared. In a bound the covariance's trace cancels, which is
    of about the dimension and may be far larger."""
    canceling = 0 if search.mode or search.by_decrement else mean.size
    return rounding_of_sum(canceling + jnp.abs(merit), mean.dtype)


def rounding_of_sum(value: Number, dtype: DTypeLike) -> Number:
    """The rounding error of a sum over all factors."""
    return ROUNDINGS * float(jnp.finfo(dtype).eps) * abs(value)


def _tolerance(settings: Settings, state: SolverState) -> Array:
    if settings.rtol is None:
        return jnp.asarray(settings.tolerance, state.initial_decrement.dtype)
    # Relative for rows that hardly move q: passed over, a million of them would add up.
    return jnp.minimum(settings.tolerance, settings.rtol * state.initial_decrement)


def unfinished(search: Search, state: SolverState) -> Array:
    """Whether there is a step to take."""
    settings = search.settings
    unsolved = ~(state.evaluation.decrement <= _tolerance(settings, state))
    unsolved = unsolved | (state.iterations < settings.min_iterations)
    unsolved = unsolved & (state.iterations < settings.max_iterations)
    return (unsolved | (state.step == 0)) & ~state.stuck


def solution(search: Search, form: PrecisionForm, state: SolverState) -> Solution:
    """The result of the search."""
    evaluation = state.evaluation
    tolerance = jnp.maximum(search.settings.tolerance, rounding(search, state.mean, evaluation.bound))
    converged = (evaluation.decrement <= tolerance) & jnp.isfinite(evaluation.bound)
    root = evaluation.target.factor if search.mode else form.factor(state.precision)
    return Solution(state.mean, root, evaluation.bound, evaluation.decrement, state.iterations, converged)


def choose_target(
    search: Search, form: PrecisionForm, objective: Objective, proposal: Proposal, mean: Array, hessians: PyTree
) -> tuple[Array, Target]:
    """The precision of the factors' exact curvature at the proposal, and the one that a full step takes."""
    precision = form.target(objective.curvature(mean, hessians, False))
    exact = Target(precision, form.factor(precision) if search.keeps_factor else None, jnp.asarray(False))
    if search.log_concave:
        return exact.precision, exact

    def clamped() -> Target:
        return _clamped(search, form, proposal, exact, objective.curvature(mean, hessians, True))

    return exact.precision, lax.cond(jnp.all(jnp.isfinite(exact.factor)), lambda: exact, clamped)


def _clamped(
    search: Search, form: PrecisionForm, proposal: Proposal, exact: Target, clamped_curvature: Array
) -> Target:
    """The target in place of an exact one that is not positive definite: the one without the factors' positive
    curvatures, if the bound rises towards it."""
    precision = form.target(clamped_curvature)
    factor = form.factor(precision)
    if search.mode or search.alternating:
        return Target(precision, factor, jnp.asarray(True))
    ahead = exact.precision - proposal.precision
    steepest, slope = form.products(proposal.factor, proposal.covariance_root, ahead, precision - proposal.precision)
    rises = slope >= STEEP * steepest
    return Target(jnp.where(rises, precision, exact.precision), jnp.where(rises, factor, exact.factor), rises)
