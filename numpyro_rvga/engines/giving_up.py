"""When a search is given up: it leads nowhere, or comes nowhere near its end."""

from __future__ import annotations

from collections import deque

import numpy as np

from ..core.updates.drivers import Progress

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
