"""Rounds of partitioned variational inference: parts that end where one run on all rows ends.

In a round each part is solved for again, with the summaries of all other parts in place of the prior (its cavity), and
its summary is what it has made of that. Fixed points are the stationary points of the bound on all rows: there, each
summary has the gradient and the curvature of its rows' expected log-likelihood (Ashman et al. 2022; Minka 2001). After
each round all rows are evaluated, which gives the bound at q and how far from its maximum q is. A step that lowers
the bound, or leaves no Gaussian, is halved.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import reduce
from typing import NamedTuple

import jax
import numpy as np

from ..core.recursion import CanonicalGaussian, State
from ..engines.certificate import Certificate, Look, Sums
from ..engines.engine import Engine
from ..options import is_count
from .summaries import added, joint_density, state_of, summary

TOLERANCE = 0.01  # standard deviations that q may be off by in the end
MAX_ROUNDS = 8
MAX_HALVINGS = 10


class Parts(NamedTuple):
    """What parts can be asked for.

    :ivar solve: cavities (None: it is left as it is) -> the states after each part's rows and the true prior.
    :ivar sums: state -> sums over all parts' rows.
    :ivar look: state, sums -> the bound and its natural gradient.
    :ivar with_exact_prior: a state with the true prior in place of its approximation.
    """

    solve: Callable[[Sequence[State | None]], Sequence[State | None]]
    sums: Callable[[State], Sums]
    look: Callable[[State, Sums], Look]
    with_exact_prior: Callable[[State], State]


def parts_of(
    engine: Engine,
    start: State,
    solve: Callable[[Sequence[State | None]], Sequence[State | None]],
    sums: Callable[[State], Sums],
) -> Parts:
    """With what needs an engine of the same model."""
    certificate = Certificate.of(engine)

    def with_exact_prior(state: State) -> State:
        return state if state.prior_factor is None else engine.with_exact_prior(state)[0]

    return Parts(solve, sums, lambda state, rows: certificate.look(start, state, rows), with_exact_prior)


def checked_rounds(rounds: int | str) -> int | None:
    """None for ``"auto"``.

    :raises ValueError: for what is neither that nor a number of rounds.
    """
    if rounds == "auto":
        return None
    if not is_count(rounds, 1):
        raise ValueError(f"rounds must be 'auto' or a positive integer, not {rounds!r}.")
    return int(rounds)


class Result(NamedTuple):
    """:ivar errors: how far q was off after each round, in standard deviations; see :func:`error_of`."""

    state: State
    look: Look
    errors: list[float]


class _Place(NamedTuple):
    summaries: list[CanonicalGaussian]
    state: State
    look: Look


def error_of(state: State, at: Look) -> float:
    """How far q is from where the bound's next Newton step leads: the most by which a mean moves in its standard
    deviations, or a standard deviation in its logarithm."""
    try:
        factor = np.linalg.cholesky(at.precision)
    except np.linalg.LinAlgError:
        return np.inf
    inverse, root = np.linalg.inv(factor), np.asarray(state.root, np.float64)
    deviation = np.linalg.norm(root, axis=1)
    shift = root @ (inverse.T @ (inverse @ at.gradient))
    widening = np.linalg.norm(root @ inverse.T, axis=1) / deviation
    return float(max(np.abs(shift / deviation).max(), np.abs(np.log(widening)).max()))


def in_rounds(start: State, states: Sequence[State], parts: Parts, rounds: int | None) -> Result | None:
    """The best Gaussian of all parts.

    :param start: the prior. :param states: those that runs from it on each part ended in: the first round.
    :param rounds: how many; None: until q is off by less than ``TOLERANCE``.
    :return: None if the parts have no Gaussian together.
    """
    origin, counts = np.asarray(states[0].mean, np.float64), [int(state.num_rows) for state in states]
    base = joint_density(start, origin)

    def place_of(summaries: list[CanonicalGaussian]) -> _Place | None:
        state = state_of(added(base, summaries), start, sum(counts))
        if state is None:
            return None
        state = parts.with_exact_prior(state)
        at = parts.look(state, parts.sums(state))
        return _Place(summaries, state, at) if np.isfinite(at.bound) else None

    nothing = [base.plus(base, -1.0)] * len(counts)
    at = _stepped(place_of, None, nothing, [summary(state, start, origin) for state in states])
    if at is None:
        return None
    errors = [error_of(at.state, at.look)]
    while len(errors) < (MAX_ROUNDS if rounds is None else rounds) and not (rounds is None and errors[-1] < TOLERANCE):
        whole = joint_density(at.state, origin)
        cavities = [
            state_of(whole.plus(own, -1.0), at.state, sum(counts) - count) for own, count in zip(at.summaries, counts)
        ]
        solved = parts.solve(cavities)
        after = [
            own if cavity is None or state is None else summary(state, cavity, origin)
            for own, cavity, state in zip(at.summaries, cavities, solved)
        ]
        new = _stepped(place_of, at, at.summaries, after)
        if new is None:
            break
        at = new
        errors.append(error_of(at.state, at.look))
    return Result(at.state, at.look, errors)


def _stepped(
    place_of: Callable[[list[CanonicalGaussian]], _Place | None],
    at: _Place | None,
    before: list[CanonicalGaussian],
    after: list[CanonicalGaussian],
) -> _Place | None:
    """The place of the first step towards new summaries that leaves a Gaussian, and does not lower the bound."""
    for halvings in range(MAX_HALVINGS):
        step = 0.5**halvings
        new = place_of([old.plus(old, -step).plus(more, step) for old, more in zip(before, after)])
        if new is not None and (at is None or new.look.bound >= at.look.bound - _rounding(at)):
            return new
    return None


def total_of(sums: Sequence[Sums]) -> Sums:
    """Over all parts."""
    return jax.tree.map(lambda *parts: reduce(np.add, parts), *sums)


def _rounding(at: _Place) -> float:
    return 8 * float(np.finfo(at.state.mean.dtype).eps) * abs(at.look.bound)


def facts_of(result: Result, rounds: int | None, stacklevel: int) -> dict:
    """For the posterior's ``info``, with a warning if q is not yet that of all rows.

    :param stacklevel: of the user's call.
    """
    error = result.errors[-1]
    if not error < TOLERANCE:
        warnings.warn(
            f"the merged posterior may still be {error:.2g} standard deviations from that of all rows, after "
            f"{len(result.errors)} rounds: "
            + ("use fewer and larger parts." if rounds is None else "take more rounds, or rounds='auto'."),
            stacklevel=stacklevel,
        )
    return {
        "rounds": len(result.errors),
        "merge_errors": np.array(result.errors),
        "merge_error": error,
        "squared_natural_gradient": result.look.squared_natural_gradient,
        "elbo_error": result.look.error,
        "converged": bool(error < TOLERANCE),
    }
