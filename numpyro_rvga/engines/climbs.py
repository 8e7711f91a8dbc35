"""The climbs of FixedPointVI: by the fixed point, and by gradients."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.block import seek_start
from ..core.compilation import Compiled
from ..core.joint import Joint, base_terms, bound_at
from ..core.linalg import lower_from_root, solve_lower
from ..core.recursion import State, StepInfo
from ..core.sparse import SparseJoint
from .engine import Engine
from .learning import import_optax

GRADIENT_STEPS = 20  # between looks at the natural gradient
MOST_AT_ONCE = 16  # iterations between looks at the bound,
SHORT = 0.1  # if those before took fewer seconds
CYCLE = 0.5  # best step of a map that turns errors around and leaves them as large as they were


class Problem(NamedTuple):
    """What the compiled steps of a climb take.

    :ivar state: the prior. :ivar chunks: rows and weights. :ivar start: mean and precision of a q to start from, in the
        state's standard coordinates, or None. :ivar prior_inputs: as ``program.prior_inputs``.
    """

    state: State
    chunks: tuple[dict[str, Array], Array]
    start: tuple[Array, Array] | None
    prior_inputs: dict[str, Any]

    @property
    def num_rows(self) -> Array:
        return jnp.sum(self.chunks[1]).astype(jnp.int32)


class Record:
    """The bound after each iteration, when it was known, and both on a progress bar.

    :ivar clamped: iterations whose target left out curvatures. :ivar cycling: iterations that the plain map repeats.
    """

    def __init__(self, bar: Any, started: float):
        self._bar, self._started = bar, started
        self._last = time.perf_counter() - started
        self.bounds: list[float] = []
        self.seconds: list[float] = []
        self.clamped = self.cycling = 0

    def add(self, bounds: list[float]) -> float:
        """Bounds of iterations that together took the time since those before, which is returned, in seconds."""
        now = time.perf_counter() - self._started
        self.seconds += np.linspace(self._last, now, len(bounds) + 1)[1:].tolist()
        spent, self._last = now - self._last, now
        self.bounds += bounds
        self._bar.update(len(bounds))
        self._bar.set_postfix(bound=f"{bounds[-1]:.6g}", refresh=False)
        return spent


class Steps(NamedTuple):
    """Iterations that were compiled as one loop.

    :ivar count: how many there were. :ivar bounds: after each, as its clamped curvatures and the step it ended on in
        ``clamped`` and ``steps``, (MOST_AT_ONCE,).
    """

    count: Array
    bounds: Array
    clamped: Array
    steps: Array


class FixedPointClimb:
    """Newton steps of the mean and fixed-point steps of the covariance, compiled for an engine.

    :param compiled: as :meth:`Engine.compiled`. :param joint: problem, with its ``chunks``, -> search.
    """

    def __init__(self, compiled: Callable[[Callable], Compiled], joint: Callable[[Any], Joint | SparseJoint]):
        @compiled
        def begin(problem):
            return joint(problem).search.begin

        @compiled
        def advance(problem, trial, limit):
            search = joint(problem).search

            def going(carry):
                trial, steps = carry
                return (steps.count < limit) & search.unfinished(trial)

            def step(carry):
                trial, steps = carry
                after = search.try_once(trial)
                begun = (trial.step == 0) & (after.step > 0)
                new = begun | (after.iterations > trial.iterations) & (trial.step > 0)
                place = jnp.where(new, steps.count, MOST_AT_ONCE)  # out of bounds: dropped
                found = (after.at.bound, after.at.clamped, after.step)
                kept = [old.at[place].set(value, mode="drop") for old, value in zip(steps[1:], found)]
                return after, Steps(steps.count + new, *kept)

            nothing = jnp.zeros(MOST_AT_ONCE, trial.step.dtype)
            steps = Steps(jnp.zeros((), jnp.int32), nothing, nothing > 0, nothing)
            trial, steps = jax.lax.while_loop(going, step, (trial, steps))
            return trial, steps, search.unfinished(trial)

        @compiled
        def finish(problem, trial):
            found = joint(problem)
            return found.absorb(found.search.solution(trial), problem.num_rows)

        self._begin, self._advance, self._finish = begin, advance, finish

    def __call__(self, problem: Problem, record: Record) -> tuple[State, StepInfo]:
        trial, more, limit = self._begin(problem), True, 1
        while more:
            trial, steps, more = self._advance(problem, trial, limit)
            steps = jax.tree.map(np.asarray, steps)
            record.clamped += int(np.sum(steps.clamped[: steps.count]))
            record.cycling += int(np.sum(steps.steps[: steps.count] <= CYCLE))
            if steps.count:
                spent = record.add(steps.bounds[: steps.count].tolist())
                limit = min(2 * limit, MOST_AT_ONCE) if spent < SHORT else 1
        return self._finish(problem, trial)


class GradientClimb:
    """L-BFGS in the mean and the covariance's Cholesky factor, compiled for an engine.

    :raises ImportError: without optax.
    """

    def __init__(self, engine: Engine, max_iterations: int):
        optax = import_optax("schedule='gradient' and numpyro.param sites")
        joint = joint_of(engine, alternating=False)
        optimizer = optax.lbfgs()

        def negative_bound(problem):
            found = joint(problem)

            def value_and_slopes(parameters):
                mean, lower = parameters
                value, (of_mean, of_root) = _bound_and_slopes(found, mean, _root_of(lower))
                of_diagonal = jnp.diagonal(of_root) * jnp.exp(jnp.diagonal(lower))
                return -value, (-of_mean, -jnp.tril(of_root, -1) - jnp.diag(of_diagonal))

            function = jax.custom_vjp(lambda parameters: value_and_slopes(parameters)[0])
            function.defvjp(value_and_slopes, lambda slopes, scale: (jax.tree.map(lambda x: scale * x, slopes),))
            return function

        @engine.compiled
        def begin(problem):
            found = seek_start(joint(problem).search)
            root = lower_from_root(jnp.linalg.inv(found.root).T)
            lower = jnp.tril(root, -1) + jnp.diag(jnp.log(jnp.diagonal(root)))
            return (found.mean, lower), optimizer.init((found.mean, lower))

        @engine.compiled
        def climb(problem, parameters, memory):
            objective = negative_bound(problem)
            look = optax.value_and_grad_from_state(objective)

            def step(carry, _):
                parameters, memory = carry
                value, slope = look(parameters, state=memory)
                moves, memory = optimizer.update(slope, memory, parameters, value=value, grad=slope, value_fn=objective)
                return (optax.apply_updates(parameters, moves), memory), -value

            return jax.lax.scan(step, (parameters, memory), None, length=GRADIENT_STEPS)

        @engine.compiled
        def judge(problem, parameters, iterations):
            inverse = solve_lower(_root_of(parameters[1]), jnp.eye(parameters[0].size, dtype=parameters[0].dtype))
            found = joint(problem._replace(start=(parameters[0], inverse.T @ inverse)))
            trial = found.search.try_once(found.search.begin)._replace(iterations=iterations)
            return found.absorb(found.search.solution(trial), problem.num_rows)

        self._begin, self._climb, self._judge = begin, climb, judge
        self._max_iterations = max_iterations

    def __call__(self, problem: Problem, record: Record) -> tuple[State, StepInfo]:
        parameters, memory = self._begin(problem)
        bounds = record.bounds
        while True:
            (parameters, memory), values = self._climb(problem, parameters, memory)
            record.add(np.asarray(values).tolist())
            after, info = self._judge(problem, parameters, len(bounds))
            stalled = len(bounds) > 2 * GRADIENT_STEPS and bounds[-1] <= bounds[-GRADIENT_STEPS]
            if bool(info.converged) or stalled or len(bounds) >= self._max_iterations:
                return after, info


def joint_of(engine: Engine, *, alternating: bool) -> Callable[[Problem], Joint]:
    """Searches for whole precision matrices.

    :param alternating: for the mean and the covariance in turn, each to its end.
    """

    def joint(problem):
        state, chunks, start, prior_inputs = problem
        return engine.batch(state, *chunks, prior_inputs=prior_inputs, init=start, alternating=alternating)

    return joint


def _root_of(lower: Array) -> Array:
    """The covariance's Cholesky factor, whose diagonal is kept as logarithms."""
    return jnp.tril(lower, -1) + jnp.diag(jnp.exp(jnp.diagonal(lower)))


def _bound_and_slopes(joint: Joint, mean: Array, root: Array) -> tuple[Array, tuple[Array, Array]]:
    """The bound at N(mean, root root^T) and its slopes in both: E[grad], and (Lambda + E[hess] - precision) root."""
    precision, linear = base_terms(joint.base, mean)
    bound, sums = bound_at(joint, mean, root)
    inverse = solve_lower(root, jnp.eye(mean.size, dtype=mean.dtype))
    of_root = jnp.tril(inverse.T - (precision + sums.curvature) @ root)
    return bound, (sums.gradient + linear - precision @ mean, of_root)
