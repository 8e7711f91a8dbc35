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
from .blocks import Bound, EarlierGroups, Piece, together
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

    :ivar groups: where they are looked for first. :ivar earlier: those of them of which there were rows before.
    :ivar new: rows.
    """

    groups: Groups
    earlier: EarlierGroups
    new: GroupRows | None

    def rows(self, *, alone: bool) -> GroupRows:
        """Those kept and the new ones. ``alone``: each stands for itself."""
        kept = self.earlier.rows.alone() if alone else self.earlier.rows
        return kept.at(self.earlier.places).and_then(self.new)


class Kept(NamedTuple):
    """What is kept of the groups of a piece.

    :ivar variance: of the gradient in s, since some rows stand for others, (k, k).
    """

    groups: GroupSummaries
    rows: GroupRows
    variance: np.ndarray


class Solved(NamedTuple):
    """The result of a solve.

    :ivar kept: of each piece, computed one after the other. :ivar error: of the solve, in standard deviations of s.
    :ivar expectation_error: of the evidence, in nats.
    :ivar stood_alone: whether it was given up that rows stand for others.
    """

    moments: SharedState
    kept: Iterator[Kept]
    error: float
    expectation_error: float
    stood_alone: bool


def solved(bound: Bound, before: SharedState | None, start: Shared, given: Sequence[Callable[[], Given]]) -> Solved:
    """q of the shared sites and of groups.

    :param before: None in the first block. :param start: q(s) that the search begins with.
    :param given: reads the groups of a piece: twice, so that no more than is evaluated need be held.
    :raises ValueError: if the bound is not finite where the search begins.
    """
    rows_stand_for_others = any((read().earlier.rows.multiplicity > 1).any() for read in given)
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
        groups, earlier, _ = some = read()
        rows, count, k = some.rows(alone=alone), len(groups.mean), bound.members.shared.size
        others = nothing(count, len(bound.members.columns), k)
        if before is not None:
            weights = np.ones(len(earlier.places)) if alone else earlier.rows.weights(len(earlier.places))
            others = rest_of_groups(earlier.groups, weights, earlier.places, count)
            if number == 0:
                (mean, precision), prior, evidence = before
                of_shared = rest_of_shared(evidence, mean, precision, prior)
                others = others._replace(shared=others.shared.and_powers(of_shared, np.ones(1)))
        pieces.append(Piece(bound, rows, groups, others, with_shared_prior=number == 0))
    return pieces


def _prior_factor(bound: Bound, mean: np.ndarray, root: np.ndarray) -> QuadraticFactors:
    """That which stands for the prior of s in q(s)."""
    size, k = len(bound.members.columns), len(mean)
    nobody = Groups(np.zeros((0, size)), np.zeros((0, size, size)), np.zeros((0, size, k)))
    sums = GroupEvaluations(bound.terms, [], 0, with_shared_prior=True)(mean, root, nobody)
    moments = mean[None], (root @ root.T)[None]
    return factors(np.array([sums.shared_value]), sums.shared_gradient[None], sums.shared_precision[None], *moments)


def _kept(bound: Bound, some: Given, groups: Groups, mean: np.ndarray, root: np.ndarray, *, alone: bool) -> Kept:
    """:param groups: where the solve has left them."""
    earlier, count = some.earlier, len(groups.mean)
    rows = some.rows(alone=False).sampled(bound.form.most, count)
    variance, weights = np.zeros_like(root), earlier.rows.weights(len(earlier.places))
    if not alone and (weights > 1).any():
        again = Groups(*[x[earlier.places] for x in groups])
        now = _summaries(bound, again, mean, root, earlier.rows).rows
        variance = sampling_variance(earlier.groups.rows, now, weights, earlier.rows.counts(len(weights)), again, mean)
    return Kept(_summaries(bound, groups, mean, root, rows), rows, variance)


def _summaries(bound: Bound, groups: Groups, mean: np.ndarray, root: np.ndarray, rows: GroupRows) -> GroupSummaries:
    """What is kept of groups, with their rows, which count once each."""
    return summarize(groups, mean, root, *bound.terms.open_sums(mean, root, groups, bound.chunks(rows.alone())))
