"""One solve of a stream of groups: q of the shared sites and of some groups, from what was there and the rows at hand.

The rows of a group that are kept are a sample of all that it has had. Each stands for several, and what looking at it
again changes is taken to change for those too. Rows that are not kept are thus never seen again, and follow the sample.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...core.groups.factors import (
    GroupSummaries,
    QuadraticFactors,
    factors,
    nothing,
    rest_of_groups,
    rest_of_shared,
    sampling_variance,
    summarize,
)
from ...core.groups.steps import Groups
from ...engines.groups import GroupEvaluations
from ...user_warnings import warn
from ..merging.summaries import TOLERANCE
from .blocks import Bound, Piece, together
from .rounds import Shared, in_group_rounds
from .rows import GroupRows

BLOCK_TOLERANCE = 1e-3  # standard deviations: what blocks leave adds up


class SharedState(NamedTuple):
    """q(s), the factor in it that stands for the prior of s, and the log evidence of all rows so far."""

    shared: Shared
    prior: QuadraticFactors
    evidence: float


class Given(NamedTuple):
    """Some groups of a solve.

    :ivar groups: where they are looked for first. :ivar earlier: those of which there were rows before, in ``places``
        among them. :ivar kept: rows of these. :ivar new: rows.
    """

    groups: Groups
    earlier: GroupSummaries
    kept: GroupRows
    places: np.ndarray
    new: GroupRows | None

    def rows(self, *, alone: bool) -> GroupRows:
        """Those kept and the new ones. ``alone``: each stands for itself."""
        kept = self.kept.alone() if alone else self.kept
        return kept.at(self.places).and_then(self.new)

    @property
    def weights(self) -> np.ndarray:
        """How many rows each kept one stands for, by group that there was."""
        return self.kept.weights(len(self.places))


class Solved(NamedTuple):
    """The result of a solve.

    :ivar kept: of each piece, computed one after the other: what is kept of its groups, their rows, and the variance of
        the gradient in s, since some rows stand for others, (k, k).
    :ivar error: of the solve, in standard deviations of s.
    :ivar expectation_error: of the evidence, in nats.
    :ivar stood_alone: whether it was given up that rows stand for others.
    """

    moments: SharedState
    kept: Iterator[tuple[GroupSummaries, GroupRows, np.ndarray]]
    error: float
    expectation_error: float
    stood_alone: bool


def solved(bound: Bound, before: SharedState | None, start: Shared, given: Sequence[Callable[[], Given]]) -> Solved:
    """q of the shared sites and of groups.

    :param before: None in the first block. :param start: q(s) that the search begins with.
    :param given: reads the groups of a piece: twice, so that no more than is evaluated need be held.
    :raises ValueError: if the bound is not finite where the search begins.
    """
    rows_stand_for_others = any((read().kept.multiplicity > 1).any() for read in given)
    for alone in (False, True) if rows_stand_for_others else (False,):
        is_last = alone or not rows_stand_for_others
        pieces = _pieces(bound, before, given, alone=alone)
        try:
            result = in_group_rounds(start, together(pieces), None, BLOCK_TOLERANCE)
        except ValueError:
            if is_last:
                raise
            continue
        if result.errors[-1] < TOLERANCE:
            break
    else:
        warn(
            f"after {len(result.errors)} rounds of a block, the shared sites may still be {result.errors[-1]:.2g} "
            "standard deviations from the best Gaussian."
        )
    (mean, _), root = result.shared, result.shared.root
    moments = SharedState(result.shared, _prior_factor(bound, mean, root), result.bound)
    kept = (_kept(bound, read(), piece.place.groups, mean, root, alone=alone) for read, piece in zip(given, pieces))
    return Solved(moments, kept, result.errors[-1], result.expectation_error, alone)


def _pieces(
    bound: Bound, before: SharedState | None, given: Sequence[Callable[[], Given]], *, alone: bool
) -> list[Piece]:
    """The first one has what q(s) says."""
    pieces = []
    for number, read in enumerate(given):
        some = read()
        rows, count, k = some.rows(alone=alone), len(some.groups.mean), bound.members.shared.size
        others = nothing(count, len(bound.members.columns), k)
        if before is not None:
            weights = np.ones(len(some.places)) if alone else some.weights
            others = rest_of_groups(some.earlier, weights, some.places, count)
            if number == 0:
                (mean, precision), prior, evidence = before
                of_shared = rest_of_shared(evidence, mean, precision, prior)
                others = others._replace(shared=others.shared.and_powers(of_shared, np.ones(1)))
        pieces.append(Piece(bound, rows, some.groups, others, with_shared_prior=number == 0))
    return pieces


def _prior_factor(bound: Bound, mean: np.ndarray, root: np.ndarray) -> QuadraticFactors:
    """That which stands for the prior of s in q(s)."""
    size, k = len(bound.members.columns), len(mean)
    nobody = Groups(np.zeros((0, size)), np.zeros((0, size, size)), np.zeros((0, size, k)))
    sums = GroupEvaluations(bound.terms, [], 0, with_shared_prior=True)(mean, root, nobody)
    moments = mean[None], (root @ root.T)[None]
    return factors(np.array([sums.shared_value]), sums.shared_gradient[None], sums.shared_precision[None], *moments)


def _kept(
    bound: Bound, some: Given, groups: Groups, mean: np.ndarray, root: np.ndarray, *, alone: bool
) -> tuple[GroupSummaries, GroupRows, np.ndarray]:
    """As of :class:`Solved`. ``groups``: where the solve has left them."""
    rows = some.rows(alone=False).sampled(bound.form.most, len(groups.mean))
    variance, weights = np.zeros_like(root), some.weights
    if not alone and (weights > 1).any():
        again = Groups(*[x[some.places] for x in groups])
        now = _summaries(bound, again, mean, root, some.kept).rows
        variance = sampling_variance(some.earlier.rows, now, weights, some.kept.counts(len(weights)), again, mean)
    return _summaries(bound, groups, mean, root, rows), rows, variance


def _summaries(bound: Bound, groups: Groups, mean: np.ndarray, root: np.ndarray, rows: GroupRows) -> GroupSummaries:
    """What is kept of groups, with their rows, which count once each."""
    return summarize(groups, mean, root, *bound.terms.open_sums(mean, root, groups, bound.chunks(rows.alone())))
