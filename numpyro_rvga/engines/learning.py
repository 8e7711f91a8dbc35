"""Learning ``numpyro.param`` sites: the bound, maximized over q, as a function of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from ..progress import Bar
from .engine import Engine
from .maximized_bound import MaximizedBound

MAX_STEPS = 200
FIRST_MOVE = 0.3  # largest change of a parameter in the first step, in unconstrained space
LONGEST_MOVE = 1.0  # in others: beyond, the bound may be flat (a scale near zero), and nothing leads back
HALVINGS = 12
ENOUGH = 1e-4  # of the rise that the slope promises


class Learned(NamedTuple):
    """Where learning ended.

    :ivar params: (K,), in unconstrained space.
    :ivar start: mean and precision of q there, in the initial state's standard coordinates.
    :ivar bounds: the bound after each step.
    """

    params: Array | np.ndarray
    start: tuple[Array, Array]
    bounds: list[float]
    converged: bool


class Learner:
    """Climbs by L-BFGS in the parameters, q solved for at each; see :class:`~.maximized_bound.MaximizedBound`.

    :raises ImportError: without optax.
    """

    def __init__(self, engine: Engine):
        self.engine, self._optimizer = engine, import_optax("numpyro.param sites").scale_by_lbfgs()
        self._turn = engine.compiled(self._optimizer.update)
        self._bound = MaximizedBound(engine)

    def __call__(self, chunks: tuple, start: tuple[Array, Array] | None, tolerance: float, bar: Bar) -> Learned:
        """Learn from where the model starts the parameters.

        :param chunks: rows and weights, as :func:`~.row_chunks.chunks_of` makes them.
        :param start: mean and precision of a q to start from, in the initial state's standard coordinates, or None.
        :param tolerance: rise of the bound, in nats, that the last step promises.
        :raises ValueError: if the bound or its slope is not finite there.
        """
        params = np.asarray(self.engine.program.params.values)
        if start is None:  # the search would seek one itself, but that is another form of it to compile
            start = self._bound.begin(params, chunks)
        bound, slope, start = self._bound.solve(params, chunks, start)[:3]
        if not np.isfinite(bound) or not np.isfinite(slope).all():
            raise ValueError(
                f"the bound or its slope is not finite where the numpyro.param sites start ({self._shown(params)}): "
                "give them other initial values, or a covariance matrix of the model more jitter."
            )
        memory, bounds = self._optimizer.init(params), [float(bound)]
        for _ in range(MAX_STEPS):
            direction, memory = self._turn(-slope, memory, params)
            direction, slope = np.asarray(direction), np.asarray(slope)
            step = -direction if slope @ direction < 0 else slope
            longest = FIRST_MOVE if len(bounds) == 1 else LONGEST_MOVE
            step = step * min(1.0, longest / float(np.max(np.abs(step))))
            rise = float(slope @ step)
            better = self._first_better(params, step, rise, bounds[-1], chunks, start)
            if better is None:
                return Learned(params, start, bounds, rise <= tolerance)
            params, (bound, slope, start, *_) = better
            bounds.append(float(bound))
            bar.update(1)
            bar.set_postfix(bound=f"{bounds[-1]:.6g}", refresh=False)
            if rise <= tolerance and len(bounds) > 2:  # the first step has no curvature to go by
                return Learned(params, start, bounds, True)
        return Learned(params, start, bounds, False)

    def _first_better(self, params, step, rise, bound, chunks, start) -> tuple | None:
        """The parameters, and the value there, of the longest of a few steps that raises the bound enough."""
        for halving in range(HALVINGS):
            share = 0.5**halving
            maximum = self._bound.solve(params + share * step, chunks, start)
            if float(maximum.bound) - bound >= ENOUGH * share * rise and np.isfinite(maximum.gradient).all():
                return params + share * step, maximum
        return None

    def _shown(self, params: Any) -> str:
        values = self.engine.program.params.constrained(params)
        return ", ".join(f"{name} = {np.asarray(value)}" for name, value in values.items())


def import_optax(purpose: str) -> ModuleType:
    """:raises ImportError: naming the extra."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"{purpose} need optax: pip install 'numpyro_rvga[gradient]'.") from error
    return optax
