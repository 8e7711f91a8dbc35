"""Rounds over parts of the data: their merged Gaussian is moved to that of one run on all rows.

In a round all rows are evaluated at q, in their parts. A Gaussian factor with the gradient and the curvature of their
expected log-likelihood there takes their place, and is solved for with the true prior: a natural-gradient step in the
rows' factor (Khan & Lin 2017, conjugate-computation variational inference), in which the prior terms are not
approximated. Fixed points are the stationary points of the bound on all rows. A step that lowers the bound, or leaves
no Gaussian, is halved. Parts that contradict each other, as those sorted by outcome do, may have a product that lies
far off. Rounds then begin at the posterior of a sample of all parts' rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ...core.updates.state import CanonicalGaussian, Count, State
from ...engines.certificate import BoundEvaluation, Certificate, SiteSums
from ...engines.engine import Engine
from ...engines.natural_steps import joint_density, with_prior_factor, without_prior_factor
from ...model import Program
from ...model.data.rows import Rows, joined, pad
from ...options import is_count
from ...streams.block_plan import FIRST_BLOCK_NUMBERS
from ...user_warnings import warn

TOLERANCE = 0.01  # standard deviations that rounds may leave q off by
MAX_ROUNDS = 20
MAX_HALVINGS = 10
MOST_TO_COME = 10.0  # moves of the size of the last one
APART = 3.0  # standard deviations that parts would move by, as those sorted by outcome would
FEWEST_ROWS, ROWS_PER_PARAMETER = 2000, 100  # of a sample
NO_GAUSSIAN = (
    "the parts have no merged Gaussian: in some direction they are together wider than the prior, as likelihoods "
    "that are not log-concave may leave them. Use fewer and larger parts."
)

SampleOf = Callable[[Sequence[int], Sequence[int]], Sequence[Rows]]


# ---------------------------------------------------------------------- Gaussian factors, in double precision
def summary(after: State, before: State, origin: np.ndarray) -> CanonicalGaussian:
    """The Gaussian factor of a run's rows: its q over its prior. Each state has its own approximation of prior terms
    that are not Gaussian.

    :param after: that it ended in. :param before: that it began with.
    """
    return without_prior_factor(after, origin).plus(without_prior_factor(before, origin), -1.0)


def row_factor(state: State, sums: SiteSums, origin: np.ndarray) -> CanonicalGaussian:
    """The Gaussian factor with the value, gradient and curvature of the rows' expected log-likelihood at q.

    :param sums: over the rows, at the state.
    """
    mean = np.asarray(state.mean, np.float64) + np.asarray(state.mean_error, np.float64)
    value, gradient, curvature = sums.values.sum(), sums.gradients.sum(axis=0), sums.curvatures.sum(axis=0)
    root = np.asarray(state.root, np.float64)
    return CanonicalGaussian.expected(value, gradient, curvature, mean, root).about(origin)


def state_of(density: CanonicalGaussian, like: State, num_rows: int) -> State | None:
    """The state whose joint density this is; None if there is no such Gaussian.

    :param like: has the approximation of prior terms, and the types of arrays.
    """
    try:
        lower = np.linalg.cholesky(density.precision)
    except np.linalg.LinAlgError:
        return None
    inverse = np.linalg.inv(lower)
    shift = inverse.T @ (inverse @ density.linear)
    evidence = density.constant + 0.5 * density.linear @ shift + 0.5 * len(shift) * np.log(2 * np.pi)
    evidence -= np.sum(np.log(np.diagonal(lower)))
    return State(
        jnp.asarray(density.center + shift, like.mean.dtype),
        jnp.zeros_like(like.mean),
        jnp.asarray(inverse.T, like.root.dtype),
        jnp.asarray(evidence, like.log_evidence.dtype),
        like.prior_factor,
        Count.of(num_rows),
    )


def distance(one: Any, other: Any) -> float:
    """The most by which a mean differs in the other's standard deviations, or a standard deviation in its logarithm.
    Of Gaussians with a ``mean`` (P,) and a ``root`` (P, P) of the covariance."""
    deviation, other_deviation = (np.linalg.norm(np.asarray(q.root, np.float64), axis=1) for q in (one, other))
    shift = (np.asarray(one.mean, np.float64) - np.asarray(other.mean, np.float64)) / other_deviation
    return float(max(np.abs(shift).max(), np.abs(np.log(deviation / other_deviation)).max()))


def merged_state(start: State, states: Sequence[State]) -> State:
    """The state of all rows, from those that runs from ``start`` on parts of them ended in.

    :raises ValueError: if there is no such Gaussian.
    """
    origin = np.asarray(states[0].mean, np.float64)
    summaries = (summary(state, start, origin) for state in states)
    density = reduce(CanonicalGaussian.plus, summaries, joint_density(start, origin))
    state = state_of(density, start, sum(int(state.num_rows) for state in states))
    if state is None:
        raise ValueError(NO_GAUSSIAN)
    return state


# ---------------------------------------------------------------------- rounds
class Evaluations(NamedTuple):
    """The functions that steps call.

    :ivar sums: state -> sums over all parts' rows.
    :ivar evaluate: state, sums -> the bound and its natural gradient.
    :ivar with_exact_prior: a state with the true prior in place of its approximation.
    :ivar of_sample: the number of rows of each part -> the state of a sample of them; see :func:`state_of_sample`.
    """

    sums: Callable[[State], SiteSums]
    evaluate: Callable[[State, SiteSums], BoundEvaluation]
    with_exact_prior: Callable[[State], State]
    of_sample: Callable[[Sequence[int]], State | None]


def evaluations_of(engine: Engine, start: State, sums: Callable[[State], SiteSums], sample_of: SampleOf) -> Evaluations:
    """The functions that steps call, by an engine of the model. ``start``: before the first row."""
    certificate = Certificate.of(engine)

    def with_exact_prior(state: State) -> State:
        return state if state.prior_factor is None else engine.with_exact_prior(state)[0]

    def evaluate(state: State, rows: SiteSums) -> BoundEvaluation:
        return certificate.evaluate(start, state, rows, engine.program.prior_inputs)

    def of_sample(counts: Sequence[int]) -> State | None:
        return state_of_sample(engine, start, counts, sample_of)

    return Evaluations(sums, evaluate, with_exact_prior, of_sample)


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
    """:ivar errors: how far q was off after each round, in standard deviations; see :func:`_error`."""

    state: State
    evaluation: BoundEvaluation
    errors: list[float]


class _Evaluated(NamedTuple):
    """A q at which all rows have been evaluated.

    :ivar rows: the Gaussian factor of all rows in q. :ivar target: the one with their gradient and curvature at q.
    :ivar ahead: where a full step leads, to the prior times ``target``; None if that is no Gaussian.
    :ivar move: how far that is, in standard deviations.
    """

    state: State
    evaluation: BoundEvaluation
    rows: CanonicalGaussian
    target: CanonicalGaussian
    ahead: State | None
    move: float


class _Steps:
    """:param start: the prior. :param origin: of factors, (P,)."""

    def __init__(self, start: State, evaluations: Evaluations, origin: np.ndarray, num_rows: int):
        self._evaluations, self._origin, self._num_rows = evaluations, origin, num_rows
        self._start, self._base = start, without_prior_factor(start, origin)

    def are_apart(
        self, states: Sequence[State], summaries: Sequence[CanonicalGaussian], product: CanonicalGaussian
    ) -> bool:
        """Whether parts contradict each other: by how far each would move the merged mean, if it could alone. Their
        product may then lie far off."""
        merged = self._state(self._start, product)
        if merged is None:
            return True
        shift = np.asarray(merged.mean, np.float64) - self._origin
        moves = []
        for state, part in zip(states, summaries):
            root = np.asarray(state.root, np.float64)
            gradient = part.linear - part.precision @ shift
            moves.append(root @ (root.T @ gradient) / np.linalg.norm(root, axis=1))
        return bool(np.mean(np.square(moves), axis=0).max() > APART**2)

    def from_nothing(self, rows: CanonicalGaussian) -> _Evaluated | None:
        """The merged Gaussian: the prior with the rows' factor, or with as much of it as leaves a Gaussian."""
        for halvings in range(MAX_HALVINGS):
            factor = rows.plus(rows, 0.5**halvings - 1)
            evaluated = self._evaluated(self._state(self._start, factor), factor)
            if evaluated is not None:
                return evaluated
        return None

    def from_sample(self, counts: Sequence[int]) -> _Evaluated | None:
        """A sample's Gaussian. ``counts``: rows of each part."""
        state = self._evaluations.of_sample(counts)
        if state is None:
            return None
        return self._evaluated(state, without_prior_factor(state, self._origin).plus(self._base, -1.0))

    def after(self, current: _Evaluated) -> tuple[_Evaluated, float] | None:
        """Where the first step that does not lower the bound leads, and its length."""
        for halvings in range(MAX_HALVINGS):
            step = 0.5**halvings
            factor = current.rows.plus(current.rows, -step).plus(current.target, step)
            evaluated = self._evaluated(self._state(current.state, factor) if halvings else current.ahead, factor)
            if evaluated is not None and evaluated.evaluation.bound >= current.evaluation.bound - _rounding(current):
                return evaluated, step
        return None

    def _state(self, before: State, rows: CanonicalGaussian) -> State | None:
        """The best Gaussian for a factor of the rows and the prior; ``before`` has its approximation to begin with."""
        state = state_of(with_prior_factor(self._base.plus(rows), before), before, self._num_rows)
        return None if state is None else self._evaluations.with_exact_prior(state)

    def _evaluated(self, state: State | None, rows: CanonicalGaussian) -> _Evaluated | None:
        if state is None:
            return None
        sums = self._evaluations.sums(state)
        evaluation = self._evaluations.evaluate(state, sums)
        if not np.isfinite(evaluation.bound):
            return None
        target = row_factor(state, sums, self._origin)
        ahead = self._state(state, target)
        move = np.inf if ahead is None else distance(state, ahead)
        return _Evaluated(state, evaluation, rows, target, ahead, move)


def in_rounds(start: State, states: Sequence[State], evaluations: Evaluations, rounds: int | None) -> Result:
    """The best Gaussian of all parts.

    :param start: the prior. :param states: those that runs from it on each part ended in: the first round.
    :param rounds: how many; None: until q is off by less than ``TOLERANCE``.
    :raises ValueError: if the parts have no Gaussian together.
    """
    origin, num_rows = np.asarray(states[0].mean, np.float64), sum(int(state.num_rows) for state in states)
    summaries = [summary(state, start, origin) for state in states]
    product = reduce(CanonicalGaussian.plus, summaries)
    steps, current = _Steps(start, evaluations, origin, num_rows), None
    if rounds != 1 and steps.are_apart(states, summaries, product):
        current = steps.from_sample([int(state.num_rows) for state in states])
    current = steps.from_nothing(product) if current is None else current
    if current is None:
        raise ValueError(NO_GAUSSIAN)
    errors = [current.move]
    while len(errors) < (MAX_ROUNDS if rounds is None else rounds) and not (rounds is None and errors[-1] < TOLERANCE):
        step = steps.after(current)
        if step is None:
            break
        errors.append(_error(current.move, step[0].move, step[1]))
        current = step[0]
    return Result(current.state, current.evaluation, errors)


def _error(before: float, after: float, step: float) -> float:
    """The sum of all moves to come, if each is the same share of the one before it.

    :param before: the size of a move, and ``after`` of the next one. :param step: how much of the first one was taken.
    """
    if not np.isfinite(before):
        return MOST_TO_COME * after
    share_left = after / before if before > 0 else 0.0
    return after * float(np.clip(step / max(1 - share_left, 1 / MOST_TO_COME), 1.0, MOST_TO_COME))


def _rounding(current: _Evaluated) -> float:
    return 8 * float(np.finfo(current.state.mean.dtype).eps) * abs(current.evaluation.bound)


def warn_of_one_exchange(program: Program, counts: Sequence[int], remedy: str) -> None:
    """If that may leave q far from the best Gaussian of all rows.

    :param counts: rows of each part. :param remedy: what to do.
    """
    if program.has_gaussian_rows or sum(count > 0 for count in counts) < 2:
        return
    warn(
        "the posteriors of the parts are merged once, and rows that are not linear and Gaussian may leave the result "
        f"standard deviations from that of all rows, the more so the more parts there are: {remedy}."
    )


def rounds_info(result: Result, rounds: int | None) -> dict:
    """For the posterior's ``info``, with a warning if q is not yet that of all rows."""
    error = result.errors[-1]
    if not error < TOLERANCE:
        warn(
            f"the merged posterior may still be {error:.2g} standard deviations from that of all rows, after "
            f"{len(result.errors)} rounds: "
            + ("use fewer and larger parts." if rounds is None else "take more rounds, or rounds='auto'."),
        )
    return {
        "rounds": len(result.errors),
        "merge_errors": np.array(result.errors),
        "merge_error": error,
        "squared_natural_gradient": result.evaluation.squared_natural_gradient,
        "elbo_error": result.evaluation.error,
        "converged": bool(error < TOLERANCE),
    }


def state_of_sample(engine: Engine, start: State, counts: Sequence[int], sample_of: SampleOf) -> State | None:
    """The best Gaussian of a sample, each of whose rows counts as often as there are rows that it stands for.

    :param start: the prior. :param counts: rows of each part.
    :param sample_of: counts, and numbers of rows -> so many rows of each part, drawn at random.
    :return: None if there is none, and for models with so many parameters that one solve cannot take enough rows.
    """
    total = sum(counts)
    size = min(total, max(FEWEST_ROWS, ROWS_PER_PARAMETER * engine.program.layout.size))
    if size * engine.numbers_per_row > FIRST_BLOCK_NUMBERS:
        return None
    shares = [-(-size * count // total) for count in counts]
    rows = joined([rows for rows, share in zip(sample_of(counts, shares), shares) if share])
    weights = np.concatenate(
        [np.full(share, count / max(share, 1), np.float32) for share, count in zip(shares, counts)]
    )
    rows, weights = engine.devices.put_rows(pad(rows, engine.devices.rounded_up(len(weights)), weights))
    state, info = engine.joint(engine.devices.put(start), rows, weights)
    return engine.devices.fetch(state)._replace(num_rows=Count.of(total)) if bool(info.ok) else None
