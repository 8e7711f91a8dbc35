"""The searches of a joint solve, driven from the host: by coarse expectations first, from other starts, given up."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.updates.drivers import Progress, Steps, begun_again, solve
from ..core.updates.factors import ErrorEstimates, Expected
from ..core.updates.search import Search, SolverState
from ..core.updates.state import State
from .starts import LOWEST, NEAR, NUM_CHECKS, NUM_RETRIES, Solved, are_apart, best_of

ROUGHLY = 0.01  # nats: the squared natural gradient at which a search by coarse expectations has done its part
CLOSE = 1e-3  # and at which a step by corrected ones shows by how much they are off
STEPS_OF_A_CHECK = 2  # times as many as the first search took, from another start, after which it is given up;
FEWEST_STEPS = 40  # but not before this many
FORESEEN = 100.0  # times its squared natural gradient: the most by which a search will still raise its bound
LAST_STEPS = 10  # of which the rise of the bound tells what as many steps again would bring: it must be
WORTHWHILE = 0.05  # times the squared natural gradient (half of that is what a quadratic bound still rises by),
FAR = 1.0  # where that is more than this many nats


class StepCount:
    """Counts the steps of a search, and gives up one that leads nowhere.

    :ivar is_hopeless: whether it was given up.
    :param lowest: a bound that the search must be able to reach. :param most: evaluations that it may take; None: any
        number.
    """

    def __init__(self, lowest: float = -np.inf, most: int | None = None):
        self.count, self.is_hopeless = 0, False
        self._lowest, self._most = lowest, most

    def gives_up(self, progress: Progress) -> bool:
        """Whether to give up after one more step."""
        self.count += 1
        too_low = float(progress.bound + FORESEEN * progress.decrement) < self._lowest
        self.is_hopeless = too_low or (self._most is not None and self.count > self._most)
        return self.is_hopeless


class Crawl:
    """Detects a search that crawls: as many steps again, like the last ones, would come nowhere near its end."""

    def __init__(self):
        self._accepted: deque[tuple[float, float]] = deque(maxlen=1 + LAST_STEPS)  # bounds and squared gradients
        self._iterations = 0

    def detects(self, progress: Progress) -> bool:
        """Whether it does so, after one more step."""
        iterations, bound, decrement = int(progress.iterations), float(progress.bound), float(progress.decrement)
        if iterations < self._iterations:  # the bound has become another one
            self._accepted.clear()
        if iterations != self._iterations:
            self._accepted.append((bound, decrement))
        self._iterations = iterations
        if len(self._accepted) <= LAST_STEPS or not decrement > FAR:
            return False
        before, decrement_before = self._accepted[0]
        rise, is_no_nearer = bound - before, decrement > decrement_before / 2
        return is_no_nearer and rise / LAST_STEPS * max(LAST_STEPS, iterations) < WORTHWHILE * decrement


Suffices = Callable[[ErrorEstimates, float], bool]
"""Error estimates of the factors' expectations at a solution, and its bound -> whether no others are needed."""


class Searches(NamedTuple):
    """The searches of one problem. Each begins by coarse expectations, if there are any, and goes on by exact ones
    where those do not suffice.

    :ivar start: the state that the first one begins with.
    :ivar exact: steps by the problem's own expectations. :ivar coarse: by cheaper ones, or None.
    :ivar corrected: by the coarse ones, corrected roughly: where these hardly move q, nor would the exact ones. Or
        None.
    :ivar suffices: see :data:`Suffices`. :ivar tolerance: see :class:`~.joint_solver.Coarse`.
    :ivar finished: the end of a search and the steps that led there -> its solution.
    """

    search: Search
    start: SolverState
    exact: Steps
    coarse: Steps | None
    corrected: Steps | None
    suffices: Suffices | None
    tolerance: float
    finished: Callable[[SolverState, Steps], Solved]

    def begin(
        self, state: SolverState, count: StepCount, on_step: Callable[[Progress], None] | None = None
    ) -> tuple[SolverState, Steps, bool]:
        """A state near the solution by the coarse steps, or ``state`` where they lead nowhere; the steps to go on with,
        which are the coarse ones if these seem to suffice; and whether the coarse ones have reached a solution.

        :param count: gives up the search. One that crawls is given up too.
        """
        if self.coarse is None:
            return state, self.exact, False
        crawl = Crawl()

        def is_enough(least: float, at: Progress) -> bool:
            return count.gives_up(at) or crawl.detects(at) or float(at.decrement) <= least

        near = solve(self.search, self.coarse, state, on_step, is_enough=partial(is_enough, ROUGHLY))
        if count.is_hopeless:
            return state, self.exact, False
        if not float(near.evaluation.decrement) <= ROUGHLY:
            return self._of_highest_bound(begun_again(near), state), self.exact, False
        if self._coarse_suffices(near):
            return near, self.coarse, True
        if self.corrected is not None:
            near = solve(self.search, self.coarse, near, on_step, is_enough=partial(is_enough, CLOSE))
            if self._coarse_suffices(near):
                return near, self.coarse, True
        return begun_again(near), self.exact, True

    def refined(self, state: SolverState, steps: Steps, **options: Any) -> tuple[SolverState, Steps]:
        """The solution that ``steps`` have led to; or that of the exact ones, if the coarse do not suffice.

        :param options: of :func:`~numpyro_rvga.core.updates.drivers.solve`.
        """
        if steps is self.exact or self._coarse_suffices(state):
            return state, steps
        return solve(self.search, self.exact, begun_again(state), **options), self.exact

    def with_other_starts(
        self, first: Solved, other_means: Callable[[State, int], np.ndarray], num_steps: int
    ) -> Solved:
        """The solution of the first search, or one of a higher bound where searches from other means end.

        :param other_means: the first solution, number -> a mean (P,) to start from.
        :param num_steps: that the first search took.
        """
        if bool(first[1].converged) or float(first[1].decrement) <= NEAR:
            most = max(FEWEST_STEPS, STEPS_OF_A_CHECK * num_steps)
            others = [self._check(other_means(first[0], number), first, most) for number in range(NUM_CHECKS)]
        else:
            others = [self._retry(other_means(first[0], number), first) for number in range(NUM_RETRIES)]
        return best_of([first, *[other for other in others if other is not None]])

    def _check(self, mean: np.ndarray, first: Solved, most: int) -> Solved | None:
        """Where a search from another mean (P,) ends; None if that is where the first one did, or it leads nowhere.

        :param most: evaluations that it may take.
        """
        count = StepCount(_bound(first) - LOWEST, most)

        def is_near(at: Progress) -> bool:
            return count.gives_up(at) or float(at.decrement) <= NEAR

        state, steps, is_solved = self.begin(self.start._replace(mean=jnp.asarray(mean)), count)
        if count.is_hopeless or (is_solved and not are_apart(self.finished(state, steps), first)):
            return None
        state = solve(self.search, steps, state, is_enough=is_near)
        if count.is_hopeless or not are_apart(self.finished(state, steps), first):
            return None
        state = solve(self.search, steps, state, is_enough=count.gives_up)
        state, steps = self.refined(state, steps, is_enough=count.gives_up)
        return None if count.is_hopeless else self.finished(state, steps)

    def _retry(self, mean: np.ndarray, first: Solved) -> Solved:
        """Where a search from another mean (P,) ends, or is given up since it cannot reach the first one's bound."""
        state, steps, _ = self.begin(self.start._replace(mean=jnp.asarray(mean)), StepCount())
        count = StepCount(_bound(first))
        state = solve(self.search, steps, state, is_enough=count.gives_up)
        return self.finished(*self.refined(state, steps, is_enough=count.gives_up))

    def _of_highest_bound(self, *states: SolverState) -> SolverState:
        """The state of the highest bound by exact expectations: a bound by few nodes may be high where it alone is."""
        evaluated = [solve(self.search, self.exact, state, is_enough=lambda at: True) for state in states]
        bounds = np.array([float(state.evaluation.bound) for state in evaluated])
        return evaluated[int(np.argmax(np.where(np.isnan(bounds), -np.inf, bounds)))]

    def _coarse_suffices(self, state: SolverState) -> bool:
        if self.coarse is None or self.suffices is None:
            return False
        if self.suffices(expected_at(self.coarse, state).error_estimates, float(state.evaluation.bound)):
            return True
        if self.corrected is None or not float(state.evaluation.decrement) <= CLOSE:
            return False
        after = solve(self.search, self.corrected, begun_again(state), is_enough=lambda at: True)
        return float(after.evaluation.decrement) <= self.tolerance


def _bound(solved: Solved) -> float:
    """The bound at a solution; that of a failed search is -inf."""
    return float(solved[0].log_evidence) if bool(solved[1].ok) else -np.inf


def expected_at(steps: Steps, state: SolverState) -> Expected:
    """The expectations at the q of a state."""
    at_rest = steps.propose(state._replace(step=jax.device_put(np.zeros_like(state.step))))
    return steps.evaluate(at_rest, state.mean).slope
