"""Joint solves, driven from the host: what is compiled of a model are the moments of its factors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from jax.typing import ArrayLike

from ..core.compilation import Compiled, jit
from ..core.matrices.precisions import PrecisionForm
from ..core.pytrees import PyTree
from ..core.updates.drivers import Evaluated, Pending, Progress, StepParts, Steps, solve
from ..core.updates.factors import Expected, Kind
from ..core.updates.joint import Joint, SolveStart, solve_joint_traced
from ..core.updates.maximize import solution
from ..core.updates.objective import is_conservative, is_log_concave
from ..core.updates.search import Search, Settings, Solution, SolverState
from ..core.updates.state import QuadraticFactors, State, StepInfo
from .devices import Devices
from .searches import Crawl, Searches, StepCount, Suffices, expected_at
from .starts import MOST_PARAMETERS, Solved

FEW_PARAMETERS = 200  # with which steps of q are so little work that compiling them well costs more


class RowChunks(NamedTuple):
    """Rows as the terms take them, and weights: (chunks, n, ...) arrays."""

    rows: dict[str, Array]
    weights: Array


class JointProblem(NamedTuple):
    """The input of a joint solve.

    :ivar state: the Gaussian before it. :ivar chunks: rows, prepared or not, with the chunks along the leading axis. A
        model of priors alone has no arrays there.
    :ivar prior_inputs: as ``program.prior_inputs``.
    :ivar row_factors: by which the rows are part of the state; None: they are not.
    :ivar init: mean and precision of a q to start from, in the state's standard coordinates, or None.
    :ivar is_coarse: whether expectations take few draws; None: they cannot.
    :ivar is_corrected: whether those by few nodes are corrected, see :class:`~numpyro_rvga.core.updates.factors.Kind`;
        None: they are not checked so.
    """

    state: State
    chunks: PyTree
    prior_inputs: dict[str, Any]
    row_factors: tuple[QuadraticFactors, ...] | None = None
    init: tuple[Array, Array] | None = None
    is_coarse: Array | np.ndarray | None = None
    is_corrected: Array | np.ndarray | None = None

    def kind_of_row(self, search: Search, kind: Kind) -> Kind:
        """The kind with the expectations that a search asks for."""
        return kind.by_nodes(search.nodes, self.is_corrected).by_few_draws(self.is_coarse)

    def kind_of_prior(self, search: Search, kind: Kind) -> Kind:
        """The same of a prior term: few nodes replace averages over many, and nothing else."""
        return self.kind_of_row(search, kind) if kind.sampled else kind.by_few_draws(self.is_coarse)

    @property
    def is_far(self) -> bool:
        """Whether a search from the host begins without a q to start from."""
        return self.init is None and not isinstance(self.state.mean, Tracer)

    @property
    def num_chunks(self) -> int:
        return jax.tree.leaves(self.chunks)[0].shape[0]

    @property
    def num_rows(self) -> int:
        """The number of rows in all chunks, with padding."""
        if isinstance(self.chunks, RowChunks):
            return self.chunks.weights.size
        arrays = jax.tree.leaves(self.chunks)
        return arrays[0].shape[0] * arrays[0].shape[1] if arrays else 0


class PriorProblem(NamedTuple):
    """The input of a solve with the true prior alone.

    :ivar among: all entries of theta (P,) and the numbers of those that the state is of; None: it is of all.
    """

    state: State
    prior_inputs: dict[str, Any]
    among: tuple[Any, Any] | None = None

    @property
    def num_rows(self) -> int:
        return 0


class Coarse(NamedTuple):
    """A problem with cheaper expectations, whose solution the search begins at.

    :ivar suffices: see :data:`~.searches.Suffices`; None: others are needed.
    :ivar tolerance: the squared natural gradient by corrected expectations, in nats, up to which these suffice for q.
    """

    search: Search
    problem: Any
    suffices: Suffices | None = None
    tolerance: float = 0.0

    @property
    def corrected(self) -> Coarse | None:
        """The same expectations, corrected; None: they cannot be."""
        if self.problem.is_corrected is None:
            return None
        return self._replace(problem=self.problem._replace(is_corrected=np.asarray(True)))


def search_for(
    kinds: Sequence[Kind],
    settings: Settings,
    *,
    staged: bool,
    has_start: bool = False,
    mode: bool = False,
    alternating: bool = False,
) -> Search:
    """The search of a joint solve of factors of these kinds.

    :param staged: see :func:`~numpyro_rvga.core.updates.objective.in_stages`.
    :param has_start: whether there is a q to start from. How far it is from the solution says nothing of the rows.
    """
    return Search(
        settings._replace(rtol=None) if has_start else settings,
        is_log_concave(kinds),
        by_decrement=not mode and not is_conservative(kinds),
        mode=mode,
        alternating=alternating,
        seek_scale=not mode and not has_start,
        staged=staged,
    )


@partial(Compiled, level=0)
def whitened(origin: Array, scale: Array, mean: Array, root: Array) -> tuple[Array, Array]:
    """Mean and precision of N(mean, root root^T), in coordinates in which N(origin, scale scale^T) is standard
    normal."""
    inverse = jnp.linalg.solve(root, scale)
    return jnp.linalg.solve(scale, mean - origin), inverse.T @ inverse


class JointSolver:
    """Solves problems of one form, driven from the host. Inside a compiled function, XLA runs the steps.

    :param joint: search, problem (a pytree) -> its parts.
    :param num_parameters: P. :param is_little_work: search, problem -> whether an evaluation is.
    """

    def __init__(
        self,
        joint: Callable[[Search, Any], Joint],
        devices: Devices,
        num_parameters: int,
        is_little_work: Callable[[Search, Any], bool] = lambda search, problem: False,
    ):
        self._joint, self._devices, self._is_little_work = joint, devices, is_little_work
        self._is_long = num_parameters > MOST_PARAMETERS
        level = 0 if num_parameters <= FEW_PARAMETERS else 1
        each: Any = devices.everywhere
        pending = None if each is None else Pending(each, each, None)  # rows stay where they are
        slope: Any = None if each is None else Expected(each, each, each, hessians=None, gradients=each)
        evaluated = None if each is None else Evaluated(each, slope, each, each)

        def start(problem: PyTree, *, search: Search) -> SolveStart:
            return joint(search, problem).start()

        self._begin = [Compiled(start, ("search",), each, level=level) for level in (1, 0)]
        parts = StepParts(lambda search, problem: joint(search, problem).objective)
        self._propose = Compiled(parts.propose, ("search",), pending, level=level)
        self._evaluate = [Compiled(parts.evaluate, ("search",), evaluated, level=level) for level in (1, 0)]
        self._update = Compiled(parts.update, ("search",), each, level=level)
        self._finish = Compiled(self._finished, ("search", "with_absorbed"), each, level=level)
        self._traced = jit(self._solved_traced, static_argnames=("search", "with_absorbed"))

    def __call__(
        self,
        search: Search,
        problem: PyTree,
        num_rows: ArrayLike,
        *,
        with_absorbed: bool = False,
        with_error_estimates: bool = False,
        on_step: Callable[[Progress], None] | None = None,
        coarse: Coarse | None = None,
        other_means: Callable[[State, int], np.ndarray] | None = None,
    ) -> Solved:
        """The state after ``num_rows`` new rows.

        A search begins by coarse expectations, if there are any, and goes on by exact ones where those do not suffice.
        With ``other_means`` there are more searches, from these: to look for other modes, if the first one has ended
        near a maximum, and else to come nearer to one.

        :param with_absorbed: report the moments of the rows' predictors.
        :param with_error_estimates: report the factors' expected values and their errors, by kind.
        :param coarse: what the search begins with, or None.
        :param other_means: the first solution, number -> a mean to start from once more; see :mod:`~.starts`.
        """
        if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((problem, num_rows))):
            return self._traced(problem, num_rows, search=search, with_absorbed=with_absorbed)
        start = self._begin[self._is_little_work(search, problem)](problem, search=search)
        steps_by = partial(self._steps, search, problem, start)
        cheap = None if coarse is None else steps_by(coarse)
        corrected = None if coarse is None or coarse.corrected is None else steps_by(coarse.corrected)

        def finished(state: SolverState, steps: Steps) -> Solved:
            expected, refinement = expected_at(steps, state) if with_error_estimates else None, None
            if coarse is not None and corrected is not None and steps is cheap and expected is not None:
                expected, refinement = self._with_finer_values(coarse, steps_by, state, expected)
                bound: Any = self._devices.put(np.asarray(state.evaluation.bound) + refinement)
                state = state._replace(evaluation=state.evaluation._replace(bound=bound))
            options = {"search": search, "with_absorbed": with_absorbed}
            after, info = self._finish(problem, start.form, state, expected, num_rows, **options)
            if refinement is None:
                return after, info
            return after, info._replace(error_estimates=info.error_estimates._replace(refinement=refinement))

        suffices, tolerance = (None, 0.0) if coarse is None else (coarse.suffices, coarse.tolerance)
        searches = Searches(search, start.state, steps_by(), cheap, corrected, suffices, tolerance, finished)
        count, crawl = StepCount(), Crawl()
        is_dear = self._is_long and not search.mode  # a density may rise without end

        def is_enough(at: Progress) -> bool:
            return count.gives_up(at) or (is_dear and crawl.detects(at))

        state, steps, _ = searches.begin(start.state, count, on_step)
        state = solve(search, steps, state, on_step=on_step, is_enough=is_enough)
        first = finished(*searches.refined(state, steps, on_step=on_step, is_enough=is_enough))
        return first if other_means is None else searches.with_other_starts(first, other_means, count.count)

    def _steps(self, search: Search, problem: PyTree, start: SolveStart, coarse: Coarse | None = None) -> Steps:
        """The compiled functions of a problem, which the host calls in turn.

        :param coarse: which expectations are taken in place of the problem's own.
        """
        base, form, _ = start
        of, at = (search, problem) if coarse is None else (coarse.search, coarse.problem)
        evaluate = self._evaluate[self._is_little_work(of, at)]
        return Steps(
            form,
            partial(self._propose, problem, form, search=search),
            partial(evaluate, at, base, form, search=of),
            partial(self._update, problem, form, search=search),
        )

    def _with_finer_values(
        self, coarse: Coarse, steps_by: Callable[[Coarse], Steps], state: SolverState, expected: Expected
    ) -> tuple[Expected, np.ndarray]:
        """The expectations where a search by few nodes has ended, with the rows' values by many nodes where those of
        few do not suffice; and what that adds to the bound."""
        before: Any = jax.device_get(expected.error_estimates)
        assert coarse.suffices is not None
        if coarse.suffices(before, float(state.evaluation.bound)):
            return expected, np.zeros_like(before.values[0])
        many = coarse._replace(search=coarse.search._replace(nodes="values"))
        finer = expected_at(steps_by(many), state).error_estimates
        return expected._replace(error_estimates=finer), np.sum(jax.device_get(finer.values) - before.values)

    def _finished(
        self,
        problem: PyTree,
        form: PrecisionForm,
        state: SolverState,
        expected: Expected | None,
        num_rows: Array,
        *,
        search: Search,
        with_absorbed: bool,
    ) -> tuple[State, StepInfo]:
        joint, result = self._joint(search, problem), solution(search, form, state)
        return _absorbed(joint, result, num_rows, with_absorbed, expected)

    def _solved_traced(
        self, problem: PyTree, num_rows: Array, *, search: Search, with_absorbed: bool
    ) -> tuple[State, StepInfo]:
        joint = self._joint(search, problem)
        return _absorbed(joint, solve_joint_traced(search, joint), num_rows, with_absorbed)


def _absorbed(
    joint: Joint, solution: Solution, num_rows: Array, with_absorbed: bool, expected: Expected | None = None
) -> tuple[State, StepInfo]:
    """The state after the rows, and the moments of their predictors if that is asked for."""
    after, info = joint.absorb(solution, jnp.asarray(num_rows), expected)
    if expected is not None:
        info = info._replace(error_estimates=expected.error_estimates)
    return after, info._replace(absorbed=joint.absorbed(solution)) if with_absorbed else info
