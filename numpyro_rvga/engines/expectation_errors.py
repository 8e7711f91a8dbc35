"""How well the expectations in a bound are known."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.factors import covariances
from ..core.recursion import State
from ..model.rows import Rows, evenly_spread, num_rows, selected
from .engine import Engine, chunks_of

BUDGET = 1e-3  # nats, in all: what is above calls for finer rules,
WORTH_A_WARNING = 1.0  # and if there are none, for a warning
MOST_ROWS = 4096


class ExpectationErrors:
    """The sums of the estimated errors at q, compiled once for an engine."""

    def __init__(self):
        self._known: dict[Engine, Callable] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is compiled, for other processes."""
        return {"_known": {}}

    def __call__(self, engine: Engine, state: State, rows: Rows) -> float:
        """In nats: over all rows of a state, as some of them let expect, and the prior.

        :param rows: all, or a sample. No more than MOST_ROWS are looked at.
        """
        if not num_rows(rows) or all(kind.measured is None for kind in (*engine.kinds, *engine.prior_kinds)):
            return 0.0
        if engine not in self._known:
            self._known[engine] = _compiled(engine)
        some = selected(rows, evenly_spread(num_rows(rows), MOST_ROWS))
        chunks = chunks_of(engine, some, engine.numbers_per_row)
        place = engine.devices.put((state.mean, state.root))
        of_some, of_prior = self._known[engine](engine.program.prior_inputs, *place, chunks)
        return float(of_some) * int(state.num_rows) / num_rows(some) + float(of_prior)


def warn_of(error: float, stacklevel: int) -> None:
    """If the expectations are so inexact that the user should know."""
    if not error <= WORTH_A_WARNING:
        warnings.warn(
            f"the expectations at q are known to {error:.2g} nats only, and so is elbo. Compare with NUTS, or start "
            "NUTS from this posterior; where rows have more than three predictors, raise num_samples.",
            stacklevel=stacklevel,
        )


def _compiled(engine: Engine) -> Callable:
    """Of rows and of the prior: ``program.prior_inputs``, mean, root and chunks of rows -> sums of errors."""

    @engine.compiled
    def of_all(prior_inputs: dict, mean: Array, root: Array, chunks: tuple) -> tuple[Array, Array]:
        def of_chunk(chunk):
            return _summed(engine.kinds, engine.linearise(engine.prepare(*chunk), mean), root)

        prior = engine.prior_group(prior_inputs)
        of_prior = _summed(prior.kinds, prior.linearise(prior.first, mean), root)
        return jnp.sum(jax.lax.map(of_chunk, chunks)), of_prior

    return of_all


def _summed(kinds: tuple, factors: tuple, root: Array) -> Array:
    total = jnp.zeros((), root.dtype)
    for kind, block, spread in zip(kinds, factors, covariances(factors, root.T)):
        if kind.measured is not None:
            total = total + jnp.sum(kind.measured(block.offset, spread, block.constants)[1])
    return total
