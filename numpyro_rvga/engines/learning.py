"""Learning ``numpyro.param`` sites: the bound, maximised over q, as a function of them."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.block import run_search, seek_start
from ..core.joint import Joint, bound_at
from ..core.linalg import solve_lower
from ..model.arguments import PARAMS
from .engine import Engine

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

    params: Array
    start: tuple[Array, Array]
    bounds: list[float]
    converged: bool


class Learner:
    """Climbs by L-BFGS in the parameters, q solved for at each.

    At the best q the bound does not change with q, so its slope in the parameters is the one with q held fixed: in the
    standard coordinates of the prior, which the parameters move. (A whitened q stays a good start when a kernel's
    length scale changes; the same q over function values would not.)

    :raises ImportError: without optax.
    """

    def __init__(self, engine: Engine):
        self.engine, self._optimizer = engine, import_optax("numpyro.param sites").scale_by_lbfgs()
        self._turn = engine.compiled(self._optimizer.update)
        engine.program.initial_state()  # what is drawn from the prior is drawn here, outside of compiled functions

        def joint(params: Array, chunks: tuple, start: tuple | None) -> Joint:
            state = engine.program.initial_state_at(params)
            prior_inputs = engine.program.prior_inputs | {PARAMS: params}
            return engine.batch(state, *chunks, prior_inputs=prior_inputs, init=start, alternating=False)

        @engine.compiled
        def begin(params, chunks):
            found = seek_start(joint(params, chunks, None).search)
            return found.mean, found.root @ found.root.T

        @engine.compiled
        def look(params, chunks, start):
            found = run_search(joint(params, chunks, start).search)
            inverse = solve_lower(found.root, jnp.eye(found.mean.size, dtype=found.mean.dtype))
            slope = jax.grad(lambda p: bound_at(joint(p, chunks, None), found.mean, inverse.T)[0])(params)
            return found.bound, slope, (found.mean, found.root @ found.root.T)

        self._begin, self._look = begin, look

    def __call__(self, chunks: tuple, start: tuple[Array, Array] | None, tolerance: float, bar: Any) -> Learned:
        """Learn from where the model starts the parameters.

        :param chunks: rows and weights, as ``engine.batch`` takes them.
        :param start: mean and precision of a q to start from, in the initial state's standard coordinates, or None.
        :param tolerance: rise of the bound, in nats, that the last step promises.
        :raises ValueError: if the bound or its slope is not finite there.
        """
        params = np.asarray(self.engine.program.params.values)
        if start is None:  # the search would seek one itself, but that is another form of it to compile
            start = self._begin(params, chunks)
        bound, slope, start = self._look(params, chunks, start)
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
            found = self._first_better(params, step, rise, bounds[-1], chunks, start)
            if found is None:
                return Learned(params, start, bounds, rise <= tolerance)
            params, (bound, slope, start) = found
            bounds.append(float(bound))
            bar.update(1)
            bar.set_postfix(bound=f"{bounds[-1]:.6g}", refresh=False)
            if rise <= tolerance and len(bounds) > 2:  # the first step knows no curvature
                return Learned(params, start, bounds, True)
        return Learned(params, start, bounds, False)

    def _first_better(self, params, step, rise, bound, chunks, start) -> tuple | None:
        """The parameters, and what is found there, of the longest of a few steps that raises the bound enough."""
        for halving in range(HALVINGS):
            share = 0.5**halving
            found = self._look(params + share * step, chunks, start)
            if float(found[0]) - bound >= ENOUGH * share * rise and np.isfinite(found[1]).all():
                return params + share * step, found
        return None

    def _shown(self, params: Array) -> str:
        values = self.engine.program.params.constrained(params)
        return ", ".join(f"{name} = {np.asarray(value)}" for name, value in values.items())


def import_optax(purpose: str) -> ModuleType:
    """:raises ImportError: naming the extra."""
    try:
        import optax
    except ImportError as error:
        raise ImportError(f"{purpose} need optax: pip install 'numpyro_rvga[gradient]'.") from error
    return optax
