"""Blocks of a stream of groups: the model bound to so many groups, and such groups as parts of rounds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...core.expectations.by_nodes import power_of_two
from ...core.groups.factors import GroupSummaries, Rest, packed_width
from ...core.groups.steps import Groups, GroupSums, Message
from ...engines.engine import Engine
from ...engines.groups import GroupEvaluations, GroupTerms
from ...model.data.rows import Rows, selected
from ...model.members import Members
from .parts import EvaluatedGroups, GroupModel, advanced, message_of
from .rounds import Shared
from .rows import GroupRows, RowForm

FEWEST = 16  # groups, and rows, that programs are compiled for


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
        return GroupSummaries.unpacked(whole[:, :end], size, k), self.form.unpacked(whole[:, end:], self.index)


class GroupPiece:
    """Groups that are evaluated together, as one part of rounds: their priors, rows, and the rest.

    :param count: of groups. :param with_shared_prior: in one piece only.
    """

    def __init__(self, model: BlockModel, rows: GroupRows, count: int, others: Rest, *, with_shared_prior: bool):
        self._sums = GroupEvaluations(model.terms, model.chunks(rows), count, with_shared_prior=with_shared_prior)
        self._rest = others

    def evaluations(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """Sums at q."""
        return self._rest.added_to(self._sums(mean, root, groups), mean, root, groups)


class GroupPieces(NamedTuple):
    """Pieces as the :class:`Parts` of rounds."""

    pieces: Sequence[GroupPiece]

    def advanced(
        self, places: list[EvaluatedGroups], step: float, shift: np.ndarray, shared: Shared
    ) -> list[EvaluatedGroups]:
        return [advanced(piece, place, step, shift, shared) for piece, place in zip(self.pieces, places)]

    def messages(self, places: list[EvaluatedGroups], step: float) -> list[Message]:
        return [message_of(place, step) for place in places]
