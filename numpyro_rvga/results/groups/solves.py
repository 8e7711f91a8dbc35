"""One solve of a stream of groups: q of the shared sites and of some groups, from the q before and rows.

The kept rows of a group are a sample of all its rows. Each represents several: the change of its Gaussian factor in a
later solve is taken for the change of the others' factors too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ...core.groups.factors import (
    GroupSummaries,
    nothing,
    rest_of_groups,
    rest_of_shared,
    sampling_variance,
    summarize,
)
from ...core.groups.steps import Groups
from ...core.updates.state import QuadraticFactors
from ...engines.groups import GroupEvaluations
from ...user_warnings import warn
from ..merging.summaries import TOLERANCE
from .blocks import BlockModel, GroupPiece, GroupPieces
from .parts import EvaluatedGroups
from .rounds import Shared, in_group_rounds
from .rows import GroupRows

BLOCK_TOLERANCE = 1e-3  # standard deviations: what blocks leave adds up


class SharedState(NamedTuple):
    """q(s), the factor in it that stands for the prior of s, and the log evidence of all rows so far."""

    shared: Shared
    prior: QuadraticFactors
    evidence: float


class PieceInput(NamedTuple):
    """Some groups of a solve.

    :ivar groups: where the search begins, n of them. :ivar earlier: the m that had rows before.
    :ivar places: their indices among the n, (m,). :ivar kept: rows kept of these. :ivar new: new rows, or None.
    """

    groups: Groups
    earlier: GroupSummaries
    kept: GroupRows
    places: np.ndarray
    new: GroupRows | None

    def rows(self, *, alone: bool) -> GroupRows:
        """The kept rows and the new ones. ``alone``: each of multiplicity one."""
        kept = self.kept.alone() if alone else self.kept
        return kept.at(self.places).and_then(self.new)

    @property
    def weights(self) -> np.ndarray:
        """The multiplicity of kept rows by group, (m,)."""
        return self.kept.weights(len(self.places))


class Solved(NamedTuple):
    """The result of a solve.

    :ivar kept: of each piece, computed one after the other: what is kept of its groups, their rows, and the variance of
        the gradient in s, since some rows stand for others, (k, k).
    :ivar error: of the solve, in standard deviations of s.
    :ivar expectation_error: of the evidence, in nats.
    :ivar stood_alone: whether kept rows were given multiplicity one, as otherwise the solve failed.
    """

    moments: SharedState
    kept: Iterator[tuple[GroupSummaries, GroupRows, np.ndarray]]
    error: float
    expectation_error: float
    stood_alone: bool


def solved(
    model: BlockModel, before: SharedState | None, start: Shared, given: Sequence[Callable[[], PieceInput]]
) -> Solved:
    """q of the shared sites and of groups.

    :param before: None in the first block. :param start: q(s) that the search begins with.
    :param given: reads the groups of a piece: twice, so that no more than is evaluated need be held.
    :raises ValueError: if the bound is not finite where the search begins.
    """
    rows_stand_for_others = any((read().kept.multiplicity > 1).any() for read in given)
    for alone in (False, True) if rows_stand_for_others else (False,):
        is_last = alone or not rows_stand_for_others
        pieces, places = zip(*_pieces(model, before, given, alone=alone))
        try:
            result = in_group_rounds(start, [*places], GroupPieces(pieces), None, BLOCK_TOLERANCE)
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
    moments = SharedState(result.shared, _prior_factor(model, mean, root), result.bound)
    ends = zip(given, result.places)
    kept = (_kept(model, read(), place.groups, mean, root, alone=alone) for read, place in ends)
    return Solved(moments, kept, result.errors[-1], result.expectation_error, alone)


def _pieces(
    model: BlockModel, before: SharedState | None, given: Sequence[Callable[[], PieceInput]], *, alone: bool
) -> list[tuple[GroupPiece, EvaluatedGroups]]:
    """The pieces to solve for together, and where the search begins. The first one has the factor of q(s)."""
    pieces = []
    for number, read in enumerate(given):
        some = read()
        rows, count, k = some.rows(alone=alone), len(some.groups.mean), model.members.shared.size
        others = nothing(count, len(model.members.columns), k)
        if before is not None:
            weights = np.ones(len(some.places)) if alone else some.weights
            others = rest_of_groups(some.earlier, weights, some.places, count)
            if number == 0:
                (mean, precision), prior, evidence = before
                of_shared = rest_of_shared(evidence, mean, precision, prior)
                others = others._replace(shared=others.shared.and_powers(of_shared, np.ones(1)))
        piece = GroupPiece(model, rows, count, others, with_shared_prior=number == 0)
        pieces.append((piece, EvaluatedGroups(some.groups, None)))
    return pieces


def _prior_factor(model: BlockModel, mean: np.ndarray, root: np.ndarray) -> QuadraticFactors:
    """The factor in q(s) that approximates the prior of s."""
    size, k = len(model.members.columns), len(mean)
    nobody = Groups(np.zeros((0, size)), np.zeros((0, size, size)), np.zeros((0, size, k)))
    sums = GroupEvaluations(model.terms, [], 0, with_shared_prior=True)(mean, root, nobody)
    moments = mean[None], (root @ root.T)[None]
    expected = np.array([sums.shared_value]), sums.shared_gradient[None], sums.shared_precision[None]
    return QuadraticFactors.expected(*expected, *moments)


def _kept(
    model: BlockModel, some: PieceInput, groups: Groups, mean: np.ndarray, root: np.ndarray, *, alone: bool
) -> tuple[GroupSummaries, GroupRows, np.ndarray]:
    """As of :class:`Solved`. ``groups``: the solution's."""
    rows = some.rows(alone=False).sampled(model.form.most, len(groups.mean))
    variance, weights = np.zeros_like(root), some.weights
    if not alone and (weights > 1).any():
        again = Groups(*[x[some.places] for x in groups])
        now = _summaries(model, again, mean, root, some.kept).rows
        variance = sampling_variance(some.earlier.rows, now, weights, some.kept.counts(len(weights)), again, mean)
    return _summaries(model, groups, mean, root, rows), rows, variance


def _summaries(
    model: BlockModel, groups: Groups, mean: np.ndarray, root: np.ndarray, rows: GroupRows
) -> GroupSummaries:
    """The summaries of groups with their kept rows, of multiplicity one."""
    return summarize(groups, mean, root, *model.terms.open_sums(mean, root, groups, model.chunks(rows.alone())))
