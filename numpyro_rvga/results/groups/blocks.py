"""Blocks of a stream of groups: the model bound to so many groups, and such groups as parts of rounds."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import reduce
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
from .rounds import Parts, Shared
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

    :param groups: where the search begins. :param with_shared_prior: in one piece only.
    :ivar evaluated: the current groups.
    """

    def __init__(self, model: BlockModel, rows: GroupRows, groups: Groups, others: Rest, *, with_shared_prior: bool):
        chunks, count = model.chunks(rows), len(groups.mean)
        self._sums = GroupEvaluations(model.terms, chunks, count, with_shared_prior=with_shared_prior)
        self._rest = others
        self.evaluated = self._next = EvaluatedGroups(groups, None)

    def _evaluations(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """Sums at q."""
        return self._rest.added_to(self._sums(mean, root, groups), mean, root, groups)

    def advance(self, step: float, shift: np.ndarray, shared: Shared) -> Message:
        """The message after a step of q(s); see :class:`Parts`."""
        self._next = advanced(self._evaluations, self.evaluated, step, shift, shared)
        return message_of(self._next, 1.0)

    def message(self, step: float) -> Message:
        """The message for a step of this length from the current groups."""
        return message_of(self.evaluated, step)

    def keep(self) -> None:
        """Accept the last :meth:`advance`."""
        self.evaluated = self._next


def as_parts(pieces: Sequence[GroupPiece]) -> Parts:
    """All pieces as the parts of rounds."""

    def advance(step: float, shift: np.ndarray, shared: Shared) -> Message:
        return reduce(Message.plus, (piece.advance(step, shift, shared) for piece in pieces))

    def message(step: float) -> Message:
        return reduce(Message.plus, (piece.message(step) for piece in pieces))

    def keep() -> None:
        for piece in pieces:
            piece.keep()

    return Parts(advance, message, keep)
