"""Rounds over parts with groups of their own: the shared sites' Gaussian is moved to that of one solve of all rows.

In a round every part maximizes the bound over its groups at q(s), and sends its share of the next natural-gradient step
of q(s), with its groups eliminated (:mod:`~numpyro_rvga.core.groups.steps`). Where groups and shared sites depend on
each other, as scales do, plain steps leave the same share of the error each time. So steps are combined with those
before them (Anderson 1965), as long as the bound does not fall.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax.numpy as jnp
import numpy as np

from ...core.groups.steps import Message
from ...core.pytrees import summed
from ...core.updates.acceleration import shares_of
from ..merging.rounds import TOLERANCE, distance

MAX_ROUNDS = 40
MAX_HALVINGS = 12
MEMORY = 6  # rounds that a step is combined with
RESOLVED = 1e-6  # of moves, see :func:`shares_of`
FEWEST = 4  # rounds before their errors are trusted


class Shared(NamedTuple):
    """q(s) = N(mean, precision^-1): (k,), (k, k)."""

    mean: np.ndarray
    precision: np.ndarray

    @property
    def root(self) -> np.ndarray:
        """root root^T is the covariance."""
        return np.linalg.inv(np.linalg.cholesky(self.precision)).T

    @property
    def is_gaussian(self) -> bool:
        """Whether there is such a Gaussian."""
        if not (np.isfinite(self.mean).all() and np.isfinite(self.precision).all()):
            return False
        return bool(np.linalg.eigvalsh(self.precision)[0] > 0)

    @property
    def entropy(self) -> float:
        """The entropy of q(s), in nats."""
        k = len(self.mean)
        return 0.5 * k * (1 + math.log(2 * math.pi)) - 0.5 * float(np.linalg.slogdet(self.precision)[1])


class Parts(Protocol):
    """What rounds ask of parts, whose groups may be elsewhere: places stand for these."""

    def advanced(self, places: list, step: float, shift: np.ndarray, shared: Shared) -> list:
        """The groups of each part after a step of q(s) of this length, which has moved its mean by ``shift``."""
        ...

    def messages(self, places: list, step: float) -> list[Message]:
        """The message of each part for a step of this length."""
        ...


class GroupResult(NamedTuple):
    """:ivar places: the groups. :ivar bound: on the log evidence. :ivar errors: how far q(s) may have been off after
    each round, in standard deviations. :ivar expectation_error: of the bound, in nats."""

    shared: Shared
    places: list
    bound: float
    errors: list[float]
    expectation_error: float


class _Candidate(NamedTuple):
    """A q(s) with the groups and the parts' message there. :ivar ahead: q(s) after a full step."""

    shared: Shared
    places: list
    message: Message
    ahead: Shared

    @property
    def bound(self) -> float:
        return self.message.value + self.shared.entropy


def in_group_rounds(
    start: Shared, places: list, parts: Parts, rounds: int | None, tolerance: float = TOLERANCE
) -> GroupResult:
    """The best Gaussian of all parts.

    :param start: q(s) that the search begins with. :param places: the parts' groups there.
    :param rounds: how many; None: until q(s) is off by less than ``tolerance``, in standard deviations.
    :raises ValueError: if the bound is not finite at the start.
    """
    current = _candidate(parts, places, 1.0, np.zeros_like(start.mean), start)
    if not math.isfinite(current.bound):
        raise ValueError("the bound is not finite where the search begins: are the priors proper?")
    past, errors = [current._replace(places=[])], [_error(current, current.ahead)]
    while len(errors) < (MAX_ROUNDS if rounds is None else rounds):
        if rounds is None and len(errors) >= FEWEST and errors[-1] < tolerance:
            break
        least = current.bound - relative_rounding() * (1 + abs(current.bound))
        candidate = _combined_step(current, _combined(past), parts, least) or _plain_step(current, parts, least)
        if candidate is None:
            break
        current = candidate
        past = [*past, current._replace(places=[])][-MEMORY:]  # groups of one round need be held
        errors.append(_error(current, _combined(past)))
    return GroupResult(current.shared, current.places, current.bound, errors, current.message.error)


def relative_rounding() -> float:
    """Relative, of sums of expectations."""
    return 8 * float(np.finfo(jnp.result_type(float)).eps)


def _candidate(parts: Parts, places: list, step: float, shift: np.ndarray, shared: Shared) -> _Candidate:
    """After a step from these ``places``."""
    places = parts.advanced(places, step, shift, shared)
    message = _message(parts, places, 1.0)
    ahead = np.linalg.solve(message.precision, message.gradient) if np.isfinite(message.precision).all() else np.nan
    return _Candidate(shared, places, message, Shared(shared.mean + ahead, message.precision))


def _message(parts: Parts, places: list, step: float) -> Message:
    """That of all parts."""
    return summed(parts.messages(places, step))


def _combined_step(current: _Candidate, predicted: Shared, parts: Parts, least: float) -> _Candidate | None:
    if predicted is current.ahead or not predicted.is_gaussian:
        return None
    candidate = _candidate(parts, current.places, 1.0, predicted.mean - current.shared.mean, predicted)
    return candidate if candidate.bound >= least and candidate.ahead.is_gaussian else None


def _plain_step(current: _Candidate, parts: Parts, least: float) -> _Candidate | None:
    """The first step that does not lower the bound."""
    for halvings in range(MAX_HALVINGS):
        step = 0.5**halvings
        message = _message(parts, current.places, step) if halvings else current.message
        precision = (1 - step) * current.shared.precision + message.precision
        if not Shared(current.shared.mean, precision).is_gaussian or not np.isfinite(message.gradient).all():
            continue
        shift = step * np.linalg.solve(precision, message.gradient)
        shared = Shared(current.shared.mean + shift, precision)
        candidate = _candidate(parts, current.places, step, shift, shared)
        if candidate.bound >= least:
            return candidate
    return None


def _combined(past: Sequence[_Candidate]) -> Shared:
    """The combination of steps whose sum of moves is shortest; the last step itself where there is but one."""
    last, before = past[-1], past[:-1]
    if not before or not all(candidate.ahead.is_gaussian for candidate in past):
        return last.ahead
    root = last.shared.root
    moves = [_whitened(x.ahead.mean - x.shared.mean, x.ahead.precision - x.shared.precision, root) for x in past]
    mean, precision = last.ahead
    for weight, candidate in zip(shares_of(moves, RESOLVED), before):
        mean = mean - weight * (last.ahead.mean - candidate.ahead.mean)
        precision = precision - weight * (last.ahead.precision - candidate.ahead.precision)
    predicted = Shared(mean, precision)
    return predicted if predicted.is_gaussian else last.ahead


def _whitened(mean: np.ndarray, precision: np.ndarray, root: np.ndarray) -> np.ndarray:
    """A move in coordinates in which q(s) is standard normal, as one vector whose length is that of the metric."""
    return np.concatenate([np.linalg.solve(root, mean), np.ravel(root.T @ precision @ root) / math.sqrt(2)])


def _error(current: _Candidate, predicted: Shared) -> float:
    """The distance of q(s) from the next one, by a plain step or the combined one, in standard deviations."""
    return max(_distance(current.shared, current.ahead), _distance(current.shared, predicted))


def _distance(one: Shared, other: Shared) -> float:
    """Infinite where one of them is no Gaussian."""
    if not (one.is_gaussian and other.is_gaussian):
        return math.inf
    return distance(one, other)
