"""FixedPointVI's record of its steps, and its ascent by gradients."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..core.matrices.linalg import solve_lower
from ..core.updates.drivers import Progress
from ..core.updates.joint import base_terms, expected_at
from ..core.updates.maximize import with_base
from ..core.updates.search import Search
from ..core.updates.state import State, StepInfo
from ..progress import Bar
from .engine import Engine
from .joint_solver import JointProblem, whitened

GRADIENT_STEPS = 20  # between evaluations of the natural gradient
TOLERANCE = 1e-6  # nats: L-BFGS compares values of the bound, and smaller rises are lost in their rounding
CYCLE = 0.5  # best step of a map that reverses the sign of errors and keeps their size


class Record:
    """The bound after each iteration, the time, and both on a progress bar.

    :ivar clamped: iterations whose target left out curvatures. :ivar cycling: iterations that the plain map repeats.
    """

    def __init__(self, bar: Bar, started: float):
        self._bar, self._started = bar, started
        self._last = time.perf_counter() - started
        self.bounds: list[float] = []
        self.seconds: list[float] = []
        self.clamped = self.cycling = 0

    def step(self, progress: Progress) -> None:
        """A step of the fixed point. One of a number that is here already begins a search by other expectations."""
        number = int(progress.iterations)
        del self.bounds[number:], self.seconds[number:]
        if number == 0:
            self.clamped = self.cycling = 0
        self.clamped += bool(progress.clamped)
        self.cycling += bool(progress.step <= CYCLE)
        self.add([float(progress.bound)])

    def add(self, bounds: list[float]) -> None:
        """Bounds of iterations that together took the time since those before."""
        now = time.perf_counter() - self._started
        self.seconds += np.linspace(self._last, now, len(bounds) + 1)[1:].tolist()
        self._last = now
        self.bounds += bounds
        self._bar.update(len(bounds))
        self._bar.set_postfix(bound=f"{bounds[-1]:.6g}", refresh=False)


class GradientAscent:
    """L-BFGS in the mean and the covariance's Cholesky factor, whose diagonal is kept as logarithms (GRAD of the
    fixed-point paper).
    """

    def __init__(self, engine: Engine):
        self._engine, self._max_iterations = engine, engine.options.max_iterations
        self._bound = engine.compiled(self._bound_and_slopes, ("search",))

    def __call__(self, problem: JointProblem, num_rows: ArrayLike, record: Record) -> tuple[State, StepInfo]:
        import scipy.optimize  # here: it takes long to import, and other schedules do without

        engine, before = self._engine, problem.state
        # No step of the fixed point: where the search would begin, and how good that is.
        search = engine.search_all(problem)
        tolerance = engine.options.tolerance or max(TOLERANCE, search.settings.tolerance)
        search = search._replace(settings=search.settings._replace(max_iterations=0, tolerance=tolerance))

        def evaluate(problem: JointProblem) -> tuple[State, StepInfo]:
            return engine.joint_solver(search._replace(seek_scale=problem.init is None), problem, num_rows)

        def judge(x: np.ndarray) -> tuple[State, StepInfo]:
            mean, lower = unpacked(x)
            inverse = solve_lower(_root_of(lower), jnp.eye(mean.size, dtype=mean.dtype))
            after, info = evaluate(problem._replace(init=(mean, inverse.T @ inverse)))
            return after, info._replace(iterations=jnp.asarray(len(record.bounds)))

        started, info = evaluate(problem)
        if not bool(info.ok):
            return started, info
        mean, precision = whitened(before.mean, before.root, started.mean, started.root)
        root = np.linalg.cholesky(np.linalg.inv(np.asarray(precision, np.float64)))
        size, dtype, lower_part = mean.size, before.mean.dtype, np.tril_indices(mean.size)

        def packed(mean: Array, lower: Array) -> np.ndarray:
            return np.concatenate([np.asarray(mean, np.float64), np.asarray(lower, np.float64)[lower_part]])

        def unpacked(x: np.ndarray) -> tuple[Array, Array]:
            lower = np.zeros((size, size))
            lower[lower_part] = x[size:]
            return jnp.asarray(x[:size], dtype), jnp.asarray(lower, dtype)

        def negative_bound(x: np.ndarray) -> tuple[float, np.ndarray]:
            bound, slopes = jax.device_get(self._bound(problem, *unpacked(x), search=search))
            return -float(bound), -packed(*slopes)

        judged = started, info

        def on_iteration(intermediate_result: Any) -> None:
            nonlocal judged
            record.add([-float(intermediate_result.fun)])
            if len(record.bounds) % GRADIENT_STEPS == 0:
                judged = judge(intermediate_result.x)
                if bool(judged[1].converged):
                    raise StopIteration

        log_root = np.tril(root, -1) + np.diag(np.log(np.diagonal(root)))
        options = {"maxiter": self._max_iterations, "maxfun": 20 * self._max_iterations, "ftol": 0.0, "gtol": 0.0}
        x0 = packed(mean, log_root)
        ended = scipy.optimize.minimize(
            negative_bound, x0, jac=True, method="L-BFGS-B", callback=on_iteration, options=options
        )
        return judged if bool(judged[1].converged) else judge(ended.x)

    def _bound_and_slopes(
        self, problem: JointProblem, mean: Array, lower: Array, *, search: Search
    ) -> tuple[Array, tuple[Array, Array]]:
        """The bound at N(mean, root root^T) and its slopes in the mean and in ``lower``: E[grad], and
        (Lambda + E[hess] - precision) root."""
        root, identity = _root_of(lower), jnp.eye(mean.size, dtype=mean.dtype)
        problem = problem._replace(init=(mean, identity))  # with a start, precisions are whole matrices
        joint = self._engine.joint_parts(search._replace(seek_scale=False), problem)
        base, form, _ = joint.start()
        expected = with_base(base, form, mean, expected_at(joint, mean, root.T))
        precision, _ = base_terms(base, mean)
        divergence = 0.5 * (jnp.sum(root * (precision @ root)) - mean.size) - jnp.sum(jnp.log(jnp.diagonal(root)))
        curvature = joint.objective.curvature(mean, expected.hessians, False)
        of_root = jnp.tril(solve_lower(root, identity).T - (precision + curvature) @ root)
        of_diagonal = jnp.diagonal(of_root) * jnp.diagonal(root)
        of_lower = jnp.tril(of_root, -1) + jnp.diag(of_diagonal)
        return expected.value - divergence, (expected.gradient, of_lower)


def _root_of(lower: Array) -> Array:
    """The covariance's Cholesky factor, whose diagonal is kept as logarithms."""
    return jnp.tril(lower, -1) + jnp.diag(jnp.exp(jnp.diagonal(lower)))
