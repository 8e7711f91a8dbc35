"""Draws by the No-U-Turn Sampler (Hoffman and Gelman, 2014), whose steps the host takes one by one.

Each step is a call of the compiled function that maximizes a bound, and starts from the q of the step before. A sampler
that is compiled itself would contain this function several times, and could not stop once there are enough draws.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

TARGET = 0.8  # of the mean acceptance probability
MAX_DEPTH = 8  # of a tree
DIVERGED = 1000.0  # nats: a rise of the energy that ends a trajectory
FIRST_STEP = 0.5
ADAPTED = 2 / 3  # of the warm-up, after which the metric is learned from the second half of its draws
SHRINKAGE = 5.0  # draws of unit variance that the metric is learned from too


class Position(NamedTuple):
    """The log density at z.

    :ivar z: (d,). :ivar log_density: minus infinity where there is none. :ivar slope: its gradient, (d,).
    :ivar point: what a later evaluation nearby starts from.
    """

    z: np.ndarray
    log_density: float
    slope: np.ndarray
    point: Any


Evaluate = Callable[[np.ndarray, Any], Position]
"""z, and the ``point`` of a position nearby -> the log density at z."""


class _State(NamedTuple):
    position: Position
    momentum: np.ndarray


class _Tree(NamedTuple):
    """A trajectory.

    :ivar first: its first state, in the order of its steps. :ivar last: its last one. :ivar draw: one of its positions.
    :ivar log_weight: log sum of exp(- energy) over its states, relative to the start. :ivar momentum: the sum of its
        momenta, (d,).
    :ivar is_over: whether it makes a U-turn or diverges.
    :ivar acceptance: the sum of its states' acceptance probabilities. :ivar count: the number of these.
    """

    first: _State
    last: _State
    draw: Position
    log_weight: float
    momentum: np.ndarray
    is_over: bool
    diverges: bool
    acceptance: float
    count: int


class Draw(NamedTuple):
    """:ivar diverges: whether its trajectory diverged."""

    position: Position
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


class NutsChain:
    """Draws from a log density whose scale is about one.

    :param evaluate: of the log density. :param start: z (d,), where it is finite.
    """

    def __init__(self, evaluate: Evaluate, start: Position, rng: np.random.Generator):
        self._evaluate, self._rng, self._start = evaluate, rng, start
        self._variance = np.ones_like(start.z)

    def draws(self, num_warmup: int) -> Iterator[Draw]:
        """An endless iterator, after the warm-up."""
        position, size, warmup = self._start, _StepSize(FIRST_STEP), []
        for number in range(num_warmup):
            tree = self._trajectory(position, size.now)
            position = tree.draw
            size.update(tree.acceptance / tree.count)
            warmup.append(position.z)
            if number + 1 == int(ADAPTED * num_warmup):
                some = np.array(warmup[len(warmup) // 2 :])
                count = len(some) + SHRINKAGE
                self._variance = (len(some) * some.var(axis=0) + SHRINKAGE) / count
                size = _StepSize(size.average)
        while True:
            tree = self._trajectory(position, size.average)
            position = tree.draw
            yield Draw(position, tree.diverges)

    def _trajectory(self, position: Position, step: float) -> _Tree:
        """A trajectory that doubles, forward or backward, until it makes a U-turn. Its draw is the chain's next one."""
        begin = _State(position, self._rng.normal(size=len(position.z)) / np.sqrt(self._variance))
        tree = _Tree(begin, begin, position, 0.0, begin.momentum, False, False, 0.0, 0)
        energy = self._energy(begin)
        for depth in range(MAX_DEPTH):
            is_forward = self._rng.random() < 0.5
            new = self._doubled(tree.last if is_forward else tree.first, depth, step if is_forward else -step, energy)
            acceptance, count = tree.acceptance + new.acceptance, tree.count + new.count
            if new.is_over:
                return tree._replace(acceptance=acceptance, count=count, diverges=new.diverges)
            draw = new.draw if np.log(self._rng.random()) < new.log_weight - tree.log_weight else tree.draw
            in_time = new if is_forward else new._replace(first=new.last, last=new.first)
            sides = (tree, in_time) if is_forward else (in_time, tree)
            tree = self._merged(*sides, draw)._replace(acceptance=acceptance, count=count)
            if tree.is_over:
                break
        return tree

    def _doubled(self, state: _State, depth: int, step: float, energy: float) -> _Tree:
        """The trajectory of the 2^depth leapfrog steps that follow a state."""
        if depth == 0:
            return self._leaf(state, step, energy)
        near = self._doubled(state, depth - 1, step, energy)
        if near.is_over:
            return near
        far = self._doubled(near.last, depth - 1, step, energy)
        total = np.logaddexp(near.log_weight, far.log_weight)
        is_far = np.log(self._rng.random()) < far.log_weight - total
        merged = self._merged(near, far, far.draw if is_far else near.draw)
        return merged._replace(is_over=merged.is_over or far.is_over, diverges=far.diverges)

    def _leaf(self, state: _State, step: float, energy: float) -> _Tree:
        """One leapfrog step: p' = p + step / 2 grad log p(z), z' = z + step V p', and half a step of p' at z'."""
        (z, _, slope, point), momentum = state.position, state.momentum
        momentum = momentum + 0.5 * step * slope
        position = self._evaluate(z + step * self._variance * momentum, point)
        new = _State(position, momentum + 0.5 * step * position.slope)
        gain = energy - self._energy(new)
        if not np.isfinite(gain):
            gain = -np.inf
        diverges = bool(gain < -DIVERGED)
        return _Tree(new, new, position, gain, new.momentum, diverges, diverges, float(np.exp(min(gain, 0.0))), 1)

    def _merged(self, a: _Tree, b: _Tree, draw: Position) -> _Tree:
        """The trajectory of two, of which the second goes on from the first. It is over at a U-turn of the whole, or of
        either part with the next state of the other."""
        momentum = a.momentum + b.momentum
        is_over = (
            self._is_u_turn(momentum, a.first, b.last)
            or self._is_u_turn(a.momentum + b.first.momentum, a.first, b.first)
            or self._is_u_turn(a.last.momentum + b.momentum, a.last, b.last)
        )
        log_weight = float(np.logaddexp(a.log_weight, b.log_weight))
        acceptance, count = a.acceptance + b.acceptance, a.count + b.count
        return _Tree(a.first, b.last, draw, log_weight, momentum, is_over, False, acceptance, count)

    def _is_u_turn(self, momentum: np.ndarray, first: _State, last: _State) -> bool:
        direction = self._variance * momentum
        return bool(direction @ first.momentum <= 0 or direction @ last.momentum <= 0)

    def _energy(self, state: _State) -> float:
        return 0.5 * float(state.momentum**2 @ self._variance) - state.position.log_density
