"""One solve of a stream of groups: q of the shared sites and of some groups, from the q before and rows.

The kept rows of a group are a sample of all its rows. Each represents several: the change of its Gaussian factor in a
later solve is taken for the change of the others' factors too.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...core.expectations.by_nodes import power_of_two
from ...core.groups.factors import (
    GroupSummaries,
    Rest,
    nothing,
    packed_width,
    rest_of_groups,
    rest_of_shared,
    sampling_variance,
    summarize,
)
from ...core.groups.steps import Groups, GroupSums, Message
from ...core.updates.state import QuadraticFactors
from ...engines.engine import Engine
from ...engines.groups import GroupEvaluations, GroupTerms
from ...model.data.rows import Rows, selected
from ...model.members import Members
from ...user_warnings import warn
from ..merging.rounds import TOLERANCE
from .parts import EvaluatedGroups, GroupModel, SumsAt, advanced, message_of
from .rounds import Shared, in_group_rounds
from .rows import GroupRows, RowForm

FEWEST = 16  # groups, and rows, that programs are compiled for
BLOCK_TOLERANCE = 1e-3  # standard deviations: what blocks leave adds up


class BlockModel(NamedTuple):
    """The model, bound to as many groups as a block may have, and compiled.

    :ivar form: of the rows that are kept. :ivar head: rows that it was read with.
    """

    engine: Engine
    members: Members
    terms: GroupTerms
    form: RowForm
    index: str
    head: Rows

    @classmethod
    def of(cls, model: GroupModel, rows: Rows, slots: int, rows_kept: int) -> BlockModel:
        """The model bound to ``slots`` groups."""
        index = model.plate.index
        head = selected(rows, slice(0, FEWEST // 2))  # as many rows as groups would seem to have a group each
        engine, members = model.bind(head, slots)
        most = 0 if engine.program.has_gaussian_rows else rows_kept
        return cls(engine, members, GroupTerms(engine, members), RowForm.of(rows, index, most), index, head)

    @property
    def is_exact(self) -> bool:
        """Whether all terms of groups are Gaussian, so that their Gaussian factors are exact."""
        return self.engine.program.has_gaussian_rows and self.terms.has_gaussian_groups

    def pieces(self, labels: Sequence[Hashable]) -> list[Sequence[Hashable]]:
        """Labels in pieces of as many groups as the model is bound to."""
        size = self.members.number
        return [labels[start : start + size] for start in range(0, len(labels), size)]

    def chunks(self, rows: GroupRows) -> list[Any]:
        """On the device."""
        count = len(rows.number)
        if not count:
            return []
        all_arrays = rows.rows | {self.index: rows.number.astype(np.int32)}
        return self.terms.chunks(
            all_arrays, all_arrays[self.index], max(power_of_two(count), FEWEST), rows.multiplicity
        )

    def packed(self, kept: GroupSummaries, rows: GroupRows) -> np.ndarray:
        """One vector for each group."""
        return np.concatenate([kept.packed(), self.form.packed(rows, len(kept.linear))], axis=1)

    def unpacked(self, vectors: np.ndarray) -> tuple[GroupSummaries, GroupRows]:
        """The summaries and the kept rows of groups, from one vector for each, with fewer or more zeros at its end."""
        size, k = len(self.members.columns), self.members.shared.size
        end = packed_width(size, k)
        whole = np.zeros((len(vectors), end + self.form.packed_width))
        given = vectors[:, : whole.shape[1]]
        whole[:, : given.shape[1]] = given
        return GroupSummaries.unpacked(whole[:, :end], size, k), self.form.unpacked(whole[:, end:])


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


class GroupPieces(NamedTuple):
    """Some groups of a solve each, as the :class:`Parts` of rounds.

    :ivar sums_at: of the groups' priors and rows, and of the factor of the others.
    """

    sums_at: Sequence[SumsAt]

    def advanced(
        self, places: list[EvaluatedGroups], step: float, shift: np.ndarray, shared: Shared
    ) -> list[EvaluatedGroups]:
        return [advanced(sums_at, place, step, shift, shared) for sums_at, place in zip(self.sums_at, places)]

    def messages(self, places: list[EvaluatedGroups], step: float) -> list[Message]:
        return [message_of(place, step) for place in places]


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
) -> list[tuple[SumsAt, EvaluatedGroups]]:
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
        evaluations = GroupEvaluations(model.terms, model.chunks(rows), count, with_shared_prior=number == 0)
        pieces.append((partial(_with_rest, evaluations, others), EvaluatedGroups(some.groups, None)))
    return pieces


def _with_rest(sums_at: SumsAt, rest: Rest, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
    return rest.added_to(sums_at(mean, root, groups), mean, root, groups)


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
