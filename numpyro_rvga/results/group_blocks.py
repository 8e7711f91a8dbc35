"""Blocks of a stream of groups: the model bound to so many groups, and a block as the only part of rounds."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from ..core.expectations import power_of_two
from ..core.group_factors import Factors, KnownGroups, Rest
from ..core.groups import Groups, GroupSums, Message
from ..engines.engine import Engine
from ..engines.groups import GroupEvaluations, GroupTerms
from ..model.members import Members
from ..model.rows import Rows, selected
from .group_parts import GroupModel, GroupPlace, advanced, message_of
from .group_rounds import Parts, Shared
from .group_rows import GroupRows, RowForm

FEWEST = 16  # groups, and rows, that programs are compiled for


class Bound(NamedTuple):
    """The model, bound to as many groups as a block may have.

    :ivar form: of the rows that are kept. :ivar head: rows that it was read with.
    """

    engine: Engine
    members: Members
    terms: GroupTerms
    form: RowForm
    index: str
    head: Rows

    @classmethod
    def of(cls, model: GroupModel, rows: Rows, slots: int, rows_kept: int) -> Bound:
        """To ``slots`` groups."""
        index = model.plate.index
        head = selected(rows, slice(0, FEWEST // 2))  # as many rows as groups would seem to have a group each
        engine, members = model.bound(head, slots)
        most = 0 if engine.program.has_gaussian_rows else rows_kept
        return cls(engine, members, GroupTerms(engine, members), RowForm.of(rows, index, most), index, head)

    @property
    def is_exact(self) -> bool:
        """Whether Gaussian factors are the terms that they stand for."""
        return self.engine.program.has_gaussian_rows and self.terms.has_gaussian_groups

    def pieces(self, count: int) -> list[slice]:
        """Of so many groups, as many as there are places for."""
        size = self.members.number
        return [slice(start, min(start + size, count)) for start in range(0, count, size)]

    def chunks(self, rows: GroupRows, piece: slice) -> list[Any]:
        """On the device."""
        some = rows.of_piece(piece)
        if some is None:
            return []
        found, weights = some
        return self.terms.chunks(found, found[self.index], max(power_of_two(len(weights)), FEWEST), weights)

    def packed(self, kept: KnownGroups, rows: GroupRows) -> np.ndarray:
        """One vector for each group."""
        own = [x.reshape(len(x), -1) for x in (*kept[:3], *kept.prior, *kept.rows)]
        return np.concatenate([*own, self.form.packed(rows, len(kept.linear))], axis=1)

    def unpacked(self, vectors: np.ndarray) -> tuple[KnownGroups, GroupRows]:
        """What is kept of groups, from one vector for each."""
        d, k = len(self.members.columns), self.members.shared.size
        of_factor = [(), (d + k,), (d + k, d + k)]
        shapes = [(d, d), (d, k), (d,), *of_factor, *of_factor]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        vectors = vectors.reshape(-1, ends[-1] + 1 + self.form.most * self.form.width)
        pieces = [x.reshape(-1, *shape) for x, shape in zip(np.split(vectors, ends, axis=1), shapes)]
        rows = self.form.unpacked(vectors[:, ends[-1] :], self.index)
        return KnownGroups(*pieces[:3], Factors(*pieces[3:6]), Factors(*pieces[6:9])), rows


class Seen(NamedTuple):
    """Groups of a block that were seen before.

    :ivar rows: those kept. :ivar places: of the groups, among the block's.
    """

    groups: KnownGroups
    rows: GroupRows
    places: np.ndarray


class Block:
    """Rows, the priors of their groups and of the shared sites, and the rest."""

    def __init__(self, bound: Bound, rows: GroupRows, others: Rest):
        self._rest, self._parts = others, []
        for some in bound.pieces(len(others.linear)):
            chunks, count = bound.chunks(rows, some), some.stop - some.start
            self._parts.append((some, GroupEvaluations(bound.terms, chunks, count, with_shared_prior=not some.start)))

    def evaluations(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """Sums at q."""
        found = [evaluate(mean, root, cut(groups, some)) for some, evaluate in self._parts]
        of_groups = [np.concatenate(of_all) for of_all in zip(*[sums[:4] for sums in found])]
        of_all = [np.sum(of_all, axis=0) for of_all in zip(*[sums[4:] for sums in found])]
        return self._rest.added_to(GroupSums(*of_groups, *of_all), mean, root, groups)


class Solve:
    """A block as the only part of rounds.

    :ivar place: where its groups are.
    """

    def __init__(self, block: Block, place: GroupPlace):
        self._block, self.place, self._next = block, place, place
        self.parts = Parts(self._advance, lambda step: message_of(self.place, step), self._keep)

    def _advance(self, step: float, shift: np.ndarray, shared: Shared) -> Message:
        self._next = advanced(self._block, self.place, step, shift, shared)
        return message_of(self._next, 1.0)

    def _keep(self) -> None:
        self.place = self._next


def cut(groups: Groups, some: slice) -> Groups:
    return Groups(*[x[some] for x in groups])
