"""Anderson's acceleration of a search (Anderson, 1965; Walker and Ni, 2011).

A full step is a map x -> T(x) of q's natural parameters x = (Lambda, Lambda m), or of Lambda if the mean is solved for
after each step. Where it converges slowly, as where scales and what they scale are sought together, the last few x and
T(x) tell more: the next x is the combination of the T(x) that belongs to the combination of the x whose residuals T(x)
- x cancel best. It is a step like any other: taken if it raises the bound, and forgotten with all before it if not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from ..matrices.precisions import Entries, PrecisionForm
from .search import Search, SolverState

MEMORY = 6  # the x that are combined
NEAR = 10.0  # nats: the squared natural gradient below which the map is smooth enough
MOST_NUMBERS = 2**20  # in a precision: they are combined on the host
RESOLVED = 1e-8  # see :func:`shares_of`


class Visited(NamedTuple):
    """x and T(x) by their parts: precisions, as arrays of a form, and precisions times means (r,)."""

    precision: np.ndarray
    linear: np.ndarray
    next_precision: np.ndarray
    next_linear: np.ndarray


def shares_of(residuals: Sequence[np.ndarray], resolved: float) -> np.ndarray:
    """Weights w with which the last T(x) becomes T(x) - sum_i w_i (T(x) - T(x_i)): such that the same combination of
    the residuals T(x) - x is shortest.

    :param resolved: of the longest change of residuals: what shorter ones say is rounding.
    """
    changes = np.stack([residuals[-1] - other for other in residuals[:-1]], axis=1)
    return np.linalg.lstsq(changes, residuals[-1], rcond=resolved)[0]


def entries_of_steps(search: Search, form: PrecisionForm, state: SolverState) -> Entries | None:
    """The entries of precisions, by which full steps are combined; None where they are no map of natural parameters, or
    these are too many."""
    is_map = not (search.mode or search.alternating or search.by_decrement)
    return form.entries() if is_map and state.precision.size <= MOST_NUMBERS else None


def visited(state: SolverState, entries: Entries) -> Visited:
    """Where a search stands, and where a full step leads."""
    evaluation = state.evaluation
    mean, precision, gradient, target = (
        np.asarray(x, np.float64)
        for x in (state.mean, state.precision, evaluation.gradient, evaluation.target.precision)
    )
    return Visited(precision, entries.times(precision, mean), target, entries.times(target, mean) + gradient)


def accelerated(state: SolverState, history: Sequence[Visited], entries: Entries) -> SolverState | None:
    """The state with the combination's step to try next; None if there is nothing to combine.

    :param history: the last one is where the state stands.
    """
    if len(history) < 2:
        return None
    last, mean = history[-1], np.asarray(state.mean, np.float64)
    scale = 1 / np.sqrt(entries.diagonal(last.precision))

    def residual(x: Visited) -> np.ndarray:
        """About in the coordinates in which q is standard normal, and about the mean."""
        change = x.next_precision - x.precision
        of_mean = x.next_linear - x.linear - entries.times(change, mean)
        return np.append(np.sqrt(0.5) * entries.scaled(change, scale), scale * of_mean)

    residuals = [residual(x) for x in history]
    if not np.isfinite(residuals).all():
        return None
    shares = shares_of(residuals, RESOLVED)
    precision, linear = last.next_precision.copy(), last.next_linear.copy()
    for share, x in zip(shares, history):
        precision -= share * (last.next_precision - x.next_precision)
        linear -= share * (last.next_linear - x.next_linear)
    dtype = state.mean.dtype
    evaluation = state.evaluation._replace(
        target=state.evaluation.target._replace(precision=jax.device_put(precision.astype(dtype))),
        gradient=jax.device_put((linear - entries.times(precision, mean)).astype(dtype)),  # a full step leads there
    )
    short_of_full = np.nextafter(dtype.type(1), dtype.type(0))  # so that its factor is computed
    return state._replace(evaluation=evaluation, step=jax.device_put(short_of_full))
