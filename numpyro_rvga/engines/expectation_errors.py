"""How well the expectations in a bound are known."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.factors import covariances
from ..core.objective import Group
from ..core.recursion import State
from ..model.program import Program
from ..model.rows import Rows, num_rows, pad, selected
from .engine import Engine

BUDGET = 1e-3  # nats, in all: what is above calls for finer rules,
WORTH_A_WARNING = 1.0  # and if there are none, for a warning
MOST_ROWS = 4096
CHUNK_NUMBERS = 2**21  # in the Jacobians of the rows that are looked at together


class KnownErrors:
    """By engine, compiled once."""

    def __init__(self):
        self._known: dict[Engine, ExpectationErrors] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is compiled, for other processes."""
        return {"_known": {}}

    def at(self, engine: Engine, state: State, rows: Rows) -> float:
        """See :class:`ExpectationErrors`."""
        if engine not in self._known:
            self._known[engine] = ExpectationErrors(engine)
        return self._known[engine](engine.program, state, rows)


def warn_of(error: float, stacklevel: int) -> None:
    """If the expectations are so inexact that the user should know."""
    if not error <= WORTH_A_WARNING:
        warnings.warn(
            f"the expectations at q are known to {error:.2g} nats only, and so is elbo. Compare with NUTS, or start "
            "NUTS from this posterior; where rows have more than three predictors, raise num_samples.",
            stacklevel=stacklevel,
        )


class ExpectationErrors:
    """The sum of the estimated errors at q, compiled for an engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._of_rows = engine.compiled(self._row_errors)
        self._of_prior = engine.compiled(self._prior_errors)

    def __call__(self, program: Program, state: State, rows: Rows) -> float:
        """In nats: over all rows of a state, as some of them let expect, and the prior.

        :param program: the engine's, or what :meth:`Program.bind` made of it.
        :param rows: all, or a sample. No more than MOST_ROWS are looked at.
        """
        engine, found, total = self._engine, 0.0, int(state.num_rows)
        mean, root = engine.devices.put((state.mean, state.root))
        if any(kind.errors is not None for kind in engine.prior_kinds):
            found += float(self._of_prior(program.prior_inputs, mean, root))
        if num_rows(rows) and any(kind.errors is not None for kind in engine.kinds):
            rows = program.inputs(rows)
            some = selected(rows, np.unique(np.linspace(0, num_rows(rows) - 1, MOST_ROWS).astype(int)))
            size = min(num_rows(some), max(CHUNK_NUMBERS // engine.numbers_per_row, 1))
            size = engine.devices.rounded_up(size)
            of_some = 0.0
            for start in range(0, num_rows(some), size):
                piece = pad(selected(some, slice(start, start + size)), size)
                of_some += float(self._of_rows(mean, root, *engine.devices.put_rows(piece)))
            found += of_some * total / num_rows(some)
        return found

    def _row_errors(self, mean: Array, root: Array, rows: dict, weights: Array) -> Array:
        factors = self._engine.linearise(self._engine.prepare(rows, weights), mean)
        return _summed(self._engine.kinds, factors, root)

    def _prior_errors(self, prior_inputs: dict, mean: Array, root: Array) -> Array:
        prior: Group = self._engine.prior_group(prior_inputs)
        return _summed(prior.kinds, prior.linearise(prior.first, mean), root)


def _summed(kinds: tuple, factors: tuple, root: Array) -> Array:
    spreads = covariances(factors, root.T)
    return sum(
        (
            jnp.sum(kind.errors(block.offset, spread, block.constants))
            for kind, block, spread in zip(kinds, factors, spreads)
            if kind.errors is not None
        ),
        jnp.zeros((), root.dtype),
    )
