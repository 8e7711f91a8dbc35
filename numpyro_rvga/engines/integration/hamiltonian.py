"""Draws by the No-U-Turn Sampler (Hoffman and Gelman, 2014), whose steps the host takes one by one.

Each is a call of the compiled function that maximizes a bound, and starts from the q of the step before. A sampler that
is compiled itself would have this function in it several times, and not end where there are draws enough.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

TARGET = 0.8  # of the mean acceptance probability
MAX_DEPTH = 8  # of a tree
DIVERGED = 1000.0  # nats of energy
FIRST_STEP = 0.5
ADAPTED = 2 / 3  # of the warm-up: where the metric is learned, from the second half of the draws before
SHRINKAGE = 5.0  # draws of unit variance that the metric is learned from besides


class Place(NamedTuple):
    """:ivar z: (d,). :ivar log_density: minus infinity where there is none. :ivar slope: its gradient (d,).
    :ivar point: what else is known there."""

    z: np.ndarray
    log_density: float
    slope: np.ndarray
    point: Any


Visit = Callable[[np.ndarray, Any], Place]
"""z, and what is known at a place nearby -> the place."""


class _State(NamedTuple):
    place: Place
    momentum: np.ndarray


class _Tree(NamedTuple):
    """Of a trajectory: its two ends, in the order of its steps; a draw, the log of the trajectory's weight, the sum of
    its momenta; whether it turns back or diverges; and the sum of acceptance probabilities, with their number."""

    first: _State
    last: _State
    draw: Place
    log_weight: float
    momentum: np.ndarray
    is_over: bool
    diverges: bool
    acceptance: float
    count: int


class Draw(NamedTuple):
    """:ivar diverges: whether the trajectory did that it is drawn from."""

    place: Place
    diverges: bool


class _StepSize:
    """Dual averaging (Nesterov, 2009), toward the target acceptance."""

    def __init__(self, first: float):
        self.now = self.average = first
        self._center, self._error, self._count = np.log(10 * first), 0.0, 0

    def update(self, acceptance: float) -> None:
        self._count += 1
        share = 1 / (self._count + 10)
        self._error += share * (TARGET - acceptance - self._error)
        log_step = self._center - np.sqrt(self._count) / 0.05 * self._error
        weight = self._count**-0.75
        self.now = float(np.exp(log_step))
        self.average = float(np.exp(weight * log_step + (1 - weight) * np.log(self.average)))


class Chain:
    """Draws from a log density whose scale is about one.

    :param visit: of the log density. :param start: z (d,), where it is finite.
    """

    def __init__(self, visit: Visit, start: Place, rng: np.random.Generator):
        self._visit, self._rng, self._start = visit, rng, start
        self._variance = np.ones_like(start.z)

    def draws(self, num_warmup: int) -> Iterator[Draw]:
        """Without end, after the warm-up."""
        place, size, seen = self._start, _StepSize(FIRST_STEP), []
        for number in range(num_warmup):
            tree = self._trajectory(place, size.now)
            place = tree.draw
            size.update(tree.acceptance / tree.count)
            seen.append(place.z)
            if number + 1 == int(ADAPTED * num_warmup):
                some = np.array(seen[len(seen) // 2 :])
                count = len(some) + SHRINKAGE
                self._variance = (len(some) * some.var(axis=0) + SHRINKAGE) / count
                size = _StepSize(size.average)
        while True:
            tree = self._trajectory(place, size.average)
            place = tree.draw
            yield Draw(place, tree.diverges)

    def _trajectory(self, place: Place, step: float) -> _Tree:
        """One that doubles, forward or backward, until it turns back. Its draw is the next one."""
        begin = _State(place, self._rng.normal(size=len(place.z)) / np.sqrt(self._variance))
        tree = _Tree(begin, begin, place, 0.0, begin.momentum, False, False, 0.0, 0)
        energy = self._energy(begin)
        for depth in range(MAX_DEPTH):
            is_forward = self._rng.random() < 0.5
            new = self._doubled(tree.last if is_forward else tree.first, depth, step if is_forward else -step, energy)
            acceptance, count = tree.acceptance + new.acceptance, tree.count + new.count
            if new.is_over:
                return tree._replace(acceptance=acceptance, count=count, diverges=new.diverges)
            draw = new.draw if np.log(self._rng.random()) < new.log_weight - tree.log_weight else tree.draw
            sides = (tree, new) if is_forward else (_reversed(new), tree)
            tree = self._joined(*sides, draw)._replace(acceptance=acceptance, count=count)
            if tree.is_over:
                break
        return tree

    def _doubled(self, state: _State, depth: int, step: float, energy: float) -> _Tree:
        """The 2^depth steps that follow a state."""
        if depth == 0:
            return self._leaf(state, step, energy)
        near = self._doubled(state, depth - 1, step, energy)
        if near.is_over:
            return near
        far = self._doubled(near.last, depth - 1, step, energy)
        total = np.logaddexp(near.log_weight, far.log_weight)
        is_far = np.log(self._rng.random()) < far.log_weight - total
        joined = self._joined(near, far, far.draw if is_far else near.draw)
        return joined._replace(is_over=joined.is_over or far.is_over, diverges=far.diverges)

    def _leaf(self, state: _State, step: float, energy: float) -> _Tree:
        (z, _, slope, point), momentum = state.place, state.momentum
        momentum = momentum + 0.5 * step * slope
        place = self._visit(z + step * self._variance * momentum, point)
        new = _State(place, momentum + 0.5 * step * place.slope)
        gain = energy - self._energy(new)
        if not np.isfinite(gain):
            gain = -np.inf
        diverges = bool(gain < -DIVERGED)
        return _Tree(new, new, place, gain, new.momentum, diverges, diverges, float(np.exp(min(gain, 0.0))), 1)

    def _joined(self, a: _Tree, b: _Tree, draw: Place) -> _Tree:
        """Two trajectories of which the second goes on from the first."""
        momentum = a.momentum + b.momentum
        turns = (
            self._turns(momentum, a.first, b.last)
            or self._turns(a.momentum + b.first.momentum, a.first, b.first)
            or self._turns(a.last.momentum + b.momentum, a.last, b.last)
        )
        log_weight = float(np.logaddexp(a.log_weight, b.log_weight))
        acceptance, count = a.acceptance + b.acceptance, a.count + b.count
        return _Tree(a.first, b.last, draw, log_weight, momentum, turns, False, acceptance, count)

    def _turns(self, momentum: np.ndarray, first: _State, last: _State) -> bool:
        moved = self._variance * momentum
        return bool(moved @ first.momentum <= 0 or moved @ last.momentum <= 0)

    def _energy(self, state: _State) -> float:
        return 0.5 * float(state.momentum**2 @ self._variance) - state.place.log_density


def _reversed(tree: _Tree) -> _Tree:
    """A trajectory of steps backward, in the order of time."""
    return tree._replace(first=tree.last, last=tree.first)
