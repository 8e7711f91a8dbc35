"""Two loops over the steps of :mod:`~.maximize`: in a compiled function, and from the host.

A step proposes N(m, Lambda^-1), evaluates the factors there, and goes there or halves the step:

    propose: m(t), Lambda(t), S_i = J_i Lambda(t)^-1 J_i^T   ->   evaluate: sum E[phi_i], sum J_i^T g_i   ->   update.

Where predictors are affine, S_i does not depend on m. The mean then takes Newton steps m + Lambda^-1 (sum J_i^T g_i +
linear - precision m) of its own before the update, and each is one more evaluation.

:func:`solve_traced` is for blocks of a stream, thousands of which are one compiled loop. :func:`solve` is for joint
solves: its three functions are compiled one by one, in less time, and each step is seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike

from ..matrices.precisions import PrecisionForm
from ..pytrees import PyTree
from .acceleration import MEMORY, NEAR, accelerated, entries_of_steps, visited
from .factors import Expected
from .maximize import choose_target, propose, rounding_of_sum, solution, unfinished, update, with_base
from .objective import Objective
from .search import Base, Proposal, Search, Solution, SolverState

MAX_MEAN_STEPS = 20  # Newton steps of the mean after one of the covariance, where they need no matrix product
INNER_RTOL = 0.01  # of the squared natural gradient before a step: where the mean is solved well enough for now
LEAST_RISE = 0.1  # of what its gradient foretold, that a Newton step of the mean must bring (Armijo, 1966), or else
BACKTRACK = 0.25  # of it is tried


# ---------------------------------------------------------------------- inside a compiled function
def solve_traced(search: Search, objective: Objective, base: Base, form: PrecisionForm, state: SolverState) -> Solution:
    """The solution, by a loop that XLA runs.

    :param base: log base(e) = linear . e - e' precision e / 2. :param form: how precisions are kept as arrays.
    :param state: not yet evaluated.
    """

    def slope_at(mean: Array, covariances: PyTree) -> Expected:
        return with_base(base, form, mean, objective.expect(mean, covariances))

    def step(state: SolverState) -> SolverState:
        proposal = propose(search, form, state)
        mean = proposal.mean
        covariances = None if search.mode else objective.predictor_covariances(mean, proposal.covariance_root)
        if search.solves_for_mean:
            num_steps = jnp.where((state.step > 0) | search.solves_for_first_mean, MAX_MEAN_STEPS, 0)
            tolerance = jnp.where(state.step > 0, INNER_RTOL * state.evaluation.decrement, search.settings.tolerance)
            mean, slope = _solve_mean_traced(form, slope_at, proposal, covariances, num_steps, tolerance)
        else:
            slope = slope_at(mean, covariances)
        exact, target = choose_target(search, form, objective, proposal, mean, slope.hessians)
        return update(search, form, state, proposal, mean, slope, exact, target)

    return solution(search, form, lax.while_loop(lambda state: unfinished(search, state), step, state))


def _solve_mean_traced(
    form: PrecisionForm,
    slope_at: Callable[[Array, PyTree], Expected],
    proposal: Proposal,
    covariances: PyTree,
    num_steps: Array,
    tolerance: Array,
) -> tuple[Array, Expected]:
    """As :func:`_solve_mean`."""
    solver = form.solver(proposal.factor)

    def is_unsolved(carry: tuple) -> Array:
        count, *_, length = carry
        return (count <= num_steps) & ~(length <= tolerance)

    def next_evaluation(carry: tuple) -> tuple:  # a loop, so that expectations are compiled once
        count, tried, mean, slope, length = carry
        new = slope_at(tried, covariances)
        move = solver(new.gradient)
        foretold, new_length = slope.gradient @ (tried - mean), new.gradient @ move
        is_progress = _is_progress(new.value, slope.value, foretold, mean.dtype, is_shorter=new_length < length)
        better = (count == 0) | is_progress
        taken = (tried, new, new_length)
        best = jax.tree.map(lambda a, b: jnp.where(better, a, b), taken, (mean, slope, length))
        return count + 1, jnp.where(better, tried + move, mean + BACKTRACK * (tried - mean)), *best

    mean = proposal.mean
    nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(slope_at, mean, covariances))
    unknown = jnp.full((), jnp.nan, mean.dtype)
    begin = (jnp.zeros((), jnp.int32), mean, mean, nothing, unknown)
    _, _, mean, slope, _ = lax.while_loop(is_unsolved, next_evaluation, begin)
    return mean, slope


def _is_progress(new_value: Any, value: Any, foretold: Any, dtype: DTypeLike, *, is_shorter: Any) -> Any:
    """Whether a step of the mean has brought a share of the rise that it foretold; or, where rounding would hide that
    rise, a shorter gradient. Of traced numbers, or of the host's."""
    rises = new_value > value + LEAST_RISE * foretold
    return rises | ((foretold <= rounding_of_sum(value, dtype)) & is_shorter)


# ---------------------------------------------------------------------- from the host
class Pending(NamedTuple):
    """A state, the q to evaluate next, and what the objective takes of its covariance: S_i (n, C, C), or a root."""

    state: SolverState
    proposal: Proposal
    covariances: PyTree


class Progress(NamedTuple):
    """Numbers () of a state after each step, for the host.

    :ivar unfinished: whether there is another step. :ivar step: t of that step; 0 while the initial scale is sought.
    :ivar clamped: whether positive curvatures were left out.
    """

    unfinished: Array
    iterations: Array
    step: Array
    bound: Array
    decrement: Array
    clamped: Array


class Evaluated(NamedTuple):
    """The factors' expectations at N(mean, Lambda^-1), with Lambda that of the proposal.

    :ivar slope: value and gradient b of the bound's part that depends on the mean (r,).
    :ivar newton_step: Lambda^-1 b (r,). :ivar squared_length: b' Lambda^-1 b, of the mean's natural gradient, in nats.
    """

    mean: Array
    slope: Expected
    newton_step: Array
    squared_length: Array


class Steps(NamedTuple):
    """The three functions of a step for one problem, compiled; see :class:`StepParts`. :ivar form: of precisions."""

    form: PrecisionForm
    propose: Callable[[SolverState], Pending]
    evaluate: Callable[[Pending, Array | np.ndarray], Evaluated]
    update: Callable[[Pending, Evaluated], tuple[SolverState, Progress]]


class StepParts(NamedTuple):
    """The three parts of a step, as functions of a problem's arrays, to be compiled one by one. Of a model, only
    :meth:`evaluate` has the log-likelihoods in it.

    :ivar objective_of: search, problem (a pytree) -> what the search asks of the factors.
    """

    objective_of: Callable[[Search, Any], Objective]

    def propose(self, problem: PyTree, form: PrecisionForm, state: SolverState, *, search: Search) -> Pending:
        """The first part: the state's proposal, and the covariances of predictors there."""
        proposal, objective = propose(search, form, state), self.objective_of(search, problem)
        covariances = None if search.mode else objective.predictor_covariances(proposal.mean, proposal.covariance_root)
        return Pending(state, proposal, covariances)

    def evaluate(
        self, problem: PyTree, base: Base, form: PrecisionForm, pending: Pending, mean: Array, *, search: Search
    ) -> Evaluated:
        """The second part: expectations over the factors, at a mean and the proposal's covariance."""
        expected = self.objective_of(search, problem).expect(mean, pending.covariances)
        slope = with_base(base, form, mean, expected)
        move = form.solver(pending.proposal.factor)(slope.gradient)
        return Evaluated(mean, slope, move, slope.gradient @ move)

    def update(
        self, problem: PyTree, form: PrecisionForm, pending: Pending, evaluated: Evaluated, *, search: Search
    ) -> tuple[SolverState, Progress]:
        """The third part: the state after an evaluation."""
        (state, proposal, _), objective = pending, self.objective_of(search, problem)
        exact, target = choose_target(search, form, objective, proposal, evaluated.mean, evaluated.slope.hessians)
        state = update(search, form, state, proposal, evaluated.mean, evaluated.slope, exact, target)
        new = state.evaluation
        more = unfinished(search, state)
        return state, Progress(more, state.iterations, state.step, new.bound, new.decrement, new.target.clamped)


def solve(
    search: Search,
    steps: Steps,
    state: SolverState,
    on_step: Callable[[Progress], None] | None = None,
    *,
    is_enough: Callable[[Progress], bool] = lambda progress: False,
) -> SolverState:
    """The state where the search ends; its :func:`solution` is q. Steps are accelerated once it is near.

    :param on_step: called after each accepted step, and at the start.
    :param is_enough: whether the search is left unfinished after a step; it can go on from there.
    """
    started, iterations, tolerance, more = False, 0, search.settings.tolerance, True
    entries = entries_of_steps(search, steps.form, state)
    plain, history = None, deque(maxlen=MEMORY)  # the state before an accelerated step, and the last states
    while more:
        pending = steps.propose(state)
        solves_for_mean = search.solves_for_mean if started else search.solves_for_first_mean
        evaluated = steps.evaluate(pending, pending.proposal.mean)
        if solves_for_mean:
            evaluated = _solve_mean(steps.evaluate, pending, evaluated, tolerance)
        state, progress = steps.update(pending, evaluated)
        progress = jax.device_get(progress)
        has_moved = started and int(progress.iterations) > iterations
        if plain is not None and (not has_moved or bool(state.stuck)):  # it failed: plain steps from before it
            state, plain = plain, None
            history.clear()
            continue
        if on_step is not None and progress.step > 0 and (not started or has_moved):
            on_step(progress)
        started, iterations, plain = bool(progress.step > 0), int(progress.iterations), None
        decrement = float(progress.decrement)
        tolerance = INNER_RTOL * decrement
        more = bool(progress.unfinished) and not (started and is_enough(progress))
        if more and has_moved and decrement <= NEAR and entries is not None:
            history.append(visited(state, entries))
            faster = accelerated(state, history, entries)
            if faster is not None:
                state, plain = faster, state
    return state


def begun_again(state: SolverState) -> SolverState:
    """The state of a search that goes on with other expectations, whose bounds do not compare with those before: the
    next step is accepted whatever its bound, and steps are counted from there."""
    evaluation = state.evaluation
    lowest = evaluation.bound - jnp.inf
    evaluation = evaluation._replace(bound=lowest, decrement=-lowest)
    before_the_first = jnp.full_like(state.iterations, -1)
    return state._replace(iterations=before_the_first, evaluation=evaluation, stuck=jnp.zeros_like(state.stuck))


def _solve_mean(
    evaluate: Callable[[Pending, Array | np.ndarray], Evaluated], pending: Pending, best: Evaluated, tolerance: float
) -> Evaluated:
    """The evaluation after Newton steps of the mean that raise the bound, at the proposal's covariance:

    m <- m + Lambda^-1 b, with b the gradient of the bound in the mean.

    :param best: before them. :param tolerance: squared length of the mean's natural gradient at which to stop.
    """
    mean, move, value, length = _on_host(best)
    share = 1.0  # of the Newton step that is tried
    for _ in range(MAX_MEAN_STEPS):
        if length <= tolerance:
            break
        new = evaluate(pending, mean + move)
        new_mean, new_move, new_value, new_length = _on_host(new)
        if _is_progress(new_value, value, share * length, mean.dtype, is_shorter=new_length < length):
            best, mean, move, value, length = new, new_mean, new_move, new_value, new_length
            share = 1.0
        else:
            move, share = BACKTRACK * move, BACKTRACK * share
    return best


def _on_host(evaluated: Evaluated) -> tuple[np.ndarray, np.ndarray, float, float]:
    """The mean, the Newton step, the bound and the mean's squared natural gradient."""
    return jax.device_get((evaluated.mean, evaluated.newton_step, evaluated.slope.value, evaluated.squared_length))
