"""A stream of rows in which new groups may come at any time: the shared sites' Gaussian, and each group's given these.

A block is solved for q of the shared sites and of the block's groups together, as one part of
:mod:`~numpyro_rvga.results.group_rounds`. What earlier blocks have made of these groups, and of the shared sites, is a
Gaussian factor (:mod:`~numpyro_rvga.core.group_factors`). The other groups stay as they are given the shared sites.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..core.expectations import power_of_two
from ..core.group_factors import Factors, KnownGroups, Rest, factors, known, nothing, rest
from ..core.groups import Groups, GroupSums, Message, conditionals
from ..engines.engine import Engine
from ..engines.expectation_errors import warn_of
from ..engines.groups import GroupEvaluations, GroupTerms
from ..model.arguments import check_finite, check_row_shapes, row_shapes
from ..model.members import Members
from ..model.rows import Rows, joined, num_rows, selected
from .group_parts import (
    GroupModel,
    GroupPlace,
    Start,
    advanced,
    first_place,
    gathered,
    message_of,
    rounding,
    started,
)
from .group_rounds import GroupResult, Parts, Shared, in_group_rounds
from .group_rows import GroupRows, RowForm
from .group_store import GroupStore
from .groups import GroupFiles, GroupPosterior, checked_folder, write_groups
from .summaries import TOLERANCE

BLOCK = 4096  # rows that are solved for together
BLOCK_TOLERANCE = 1e-3  # standard deviations: what blocks leave adds up
FEWEST = 16  # groups, and rows, that programs are compiled for
GROWTH = 1.5  # of the number of rows, after which the priors of all groups in memory are looked at again
WRITTEN = 2**16  # groups of a file


class _Moments(NamedTuple):
    """q(s), the factor in it that stands for the prior of s, and the log evidence of all rows so far."""

    shared: Shared
    prior: Factors
    evidence: float


class GroupStream:
    """The posterior of a model with very many groups, such as users, of rows that keep coming; groups may be new.

    Made by :meth:`~numpyro_rvga.RVGA.stream_groups`, which says what the arguments mean.

    :ivar num_rows: that it has taken in. :ivar num_groups: likewise.
    """

    def __init__(self, model: GroupModel, store: GroupStore, block_size: int, rows_kept: int):
        self._model, self._store, self._block_size, self._rows_kept = model, store, block_size, rows_kept
        self._bound: _Bound | None = None
        self._start: Start | None = None
        self._moments: _Moments | None = None
        self._kind: str | None = None
        self.num_rows, self._settled_at, self._version = 0, 0, 0
        self._error, self._expectation_error = 0.0, 0.0

    @property
    def num_groups(self) -> int:
        return len(self._store)

    def __repr__(self) -> str:
        return f"GroupStream(num_rows={self.num_rows}, num_groups={self.num_groups})"

    # ------------------------------------------------------------------ rows
    def update(self, data: Mapping[str, Any] | tuple | Iterable) -> None:
        """Take in rows, of groups seen before and of new ones. They are taken as they come, in blocks.

        :param data: a mapping from the model's argument names to arrays that share their leading axis, the rows; or an
            iterable of such blocks.
        :raises ValueError: naming the array and the row, for data of no use; blocks before that row have been taken in.
        """
        first = 0
        for rows in self._blocks(data):
            self._take(rows, first)
            first += num_rows(rows)

    def _blocks(self, data: Any) -> Iterator[Rows]:
        """Of ``block_size`` rows, however the data are cut."""
        plate = self._model.plate
        keywords, done, waiting = {**self._model.model_kwargs, plate.size: 1}, 0, []
        for block in [data] if isinstance(data, (Mapping, tuple)) else data:
            rows = gathered(self._model.model, block, plate.index, keywords, done)
            self._check_labels(rows[plate.index], done)
            waiting.append(rows)
            done += num_rows(rows)
            while sum(map(num_rows, waiting)) >= self._block_size:
                whole = joined(waiting)
                yield selected(whole, slice(0, self._block_size))
                waiting = [selected(whole, slice(self._block_size, None))]
        if sum(map(num_rows, waiting)):
            yield joined(waiting)

    def _check_labels(self, labels: np.ndarray, first_row: int) -> None:
        """:raises ValueError: for labels that are neither integers nor strings, or others than before."""
        index = self._model.plate.index
        kinds = {"i": "integers", "u": "integers", "U": "strings", "b": "booleans", "f": "numbers with a point"}
        found = np.asarray(labels.tolist()) if labels.dtype.kind == "O" else labels
        kind = kinds.get(found.dtype.kind, f"of type {labels.dtype}")
        if kind not in ("integers", "strings"):
            raise ValueError(f"array {index!r} must have labels that are integers or strings, and they are {kind}.")
        if kind != (self._kind or kind):
            raise ValueError(
                f"array {index!r} has labels that are {kind} from row {first_row} on, and {self._kind} before: groups "
                "would be taken for new ones. Convert them."
            )
        self._kind = kind

    def _take(self, rows: Rows, first: int) -> None:
        """One block. ``first``: the number of its first row."""
        index = self._model.plate.index
        unique, number = np.unique(np.asarray(rows[index].tolist()), return_inverse=True)
        labels, rows = unique.tolist(), rows | {index: number.astype(np.int32)}
        check_finite(rows, first)
        bound = self._program(rows, len(labels))
        bound.engine.program.check_rows(rows, first)
        if self._start is None:
            self._start = started(self._model, rows, len(labels))
        vectors, places = self._store.read(labels)
        old, open_rows = bound.unpacked(vectors)
        groups = first_place(len(labels), self._start).groups
        if self._moments is not None:
            for mine, theirs in zip(groups, old.at(self._moments.shared.mean)):
                mine[places] = theirs
        new = {name: array for name, array in rows.items() if name != index}
        open_rows = open_rows._replace(number=places[open_rows.number]).and_then(new, number)
        try:
            self._solve(bound, labels, groups, open_rows, self._rest(bound, old, places, len(labels)))
        except ValueError as error:
            raise ValueError(f"rows {first} to {first + num_rows(rows) - 1}: {error}") from error
        self.num_rows += num_rows(rows)
        self._store.make_room()
        if self.num_rows > GROWTH * self._settled_at:
            self.settle()

    def settle(self) -> None:
        """Solve once more for the shared sites and all groups in memory, with the priors and the kept rows of these
        groups as themselves. A stream does it each time that it has grown by half. In the end of one it brings the
        shared sites nearer to what all rows together say of them. Where all is linear and Gaussian, nothing is done.
        """
        self._settled_at = self.num_rows
        if self._bound is None or self._bound.is_exact:
            return
        labels = self._store.labels_in_memory
        old, open_rows = self._bound.unpacked(self._store.read(labels)[0])
        others = self._rest(self._bound, old, np.arange(len(labels)), len(labels))
        self._solve(self._bound, labels, old.at(self._so_far.shared.mean), open_rows, others)

    def _solve(self, bound: _Bound, labels: list[Any], groups: Groups, open_rows: GroupRows, others: Rest) -> None:
        """For q(s) and these groups, which are where they are looked for first."""
        start = self._moments.shared if self._moments is not None else self._first.shared
        solve = _Solve(_Block(bound, open_rows, others), GroupPlace(groups, None))
        result = in_group_rounds(start, solve.parts, None, rounding(), BLOCK_TOLERANCE)
        if not result.errors[-1] < TOLERANCE:
            warnings.warn(
                f"after {len(result.errors)} rounds of a block, the shared sites may still be {result.errors[-1]:.2g} "
                "standard deviations from the best Gaussian.",
                stacklevel=4,
            )
        self._keep(bound, result, labels, solve.place.groups, open_rows)

    def _keep(
        self, bound: _Bound, result: GroupResult, labels: list[Any], groups: Groups, open_rows: GroupRows
    ) -> None:
        """What a solve has found."""
        mean, root, terms = result.shared.mean, result.shared.root, bound.terms
        of_all = GroupEvaluations(terms, [], 0, with_shared_prior=True)(mean, root, _cut(groups, slice(0, 0)))
        prior = factors(
            np.array([of_all.shared_value]), of_all.shared_gradient[None], of_all.shared_precision[None], mean[None],
            (root @ root.T)[None],
        )  # fmt: skip
        open_rows = open_rows.kept(bound.form.last(open_rows.number))
        rows_of_each = bound.form.packed(open_rows.rows, open_rows.number, len(labels))
        for some in bound.pieces(len(labels)):
            piece = _cut(groups, some)
            kept = known(piece, mean, root, terms.open_sums(mean, root, piece, bound.chunks(open_rows, some)))
            self._store.write(labels[some], np.concatenate([_packed(kept), rows_of_each[some]], axis=1))
        self._moments = _Moments(result.shared, prior, result.bound)
        self._error = max(self._error, result.errors[-1])
        self._expectation_error += result.expectation_error
        self._version += 1

    def _rest(self, bound: _Bound, old: KnownGroups, places: np.ndarray, count: int) -> Rest:
        if self._moments is None:
            return nothing(count, len(bound.members.columns), bound.members.shared.size)
        (mean, precision), prior, evidence = self._moments
        return rest(evidence, mean, precision, prior, old, places, count)

    def _program(self, rows: Rows, count: int) -> _Bound:
        """Of at least so many groups."""
        slots = max(power_of_two(count), FEWEST)
        if self._bound is None or slots > self._bound.members.number:
            self._bound = _Bound.of(self._model, rows, slots, self._rows_kept)
        program = self._bound.engine.program
        program.check_given(rows, program.example_row)
        check_row_shapes(rows, row_shapes(program.example_row), "that the stream has taken in")
        return self._bound

    @property
    def _so_far(self) -> _Moments:
        if self._moments is None:
            raise ValueError("the stream has taken in no rows yet: call update first.")
        return self._moments

    @property
    def _first(self) -> Start:
        assert self._start is not None
        return self._start

    # ------------------------------------------------------------------ results
    def posterior(self, folder: str | os.PathLike | None = None) -> GroupPosterior:
        """The posterior of the rows taken in so far.

        :param folder: write all groups to Parquet files there, as :func:`~numpyro_rvga.distributed.run_groups` does.
            None: groups are read from the stream, as long as it takes in no more rows.
        :return: the posterior. ``elbo`` is None unless it is exact; ``info`` holds ``log_evidence_estimate``,
            ``error`` (by how much a block's solve may have left the shared sites off, in standard deviations),
            ``elbo_error`` as in :meth:`RVGA.run`, and ``plate``.
        :raises ValueError: if there are no rows yet, and if the folder holds Parquet files.
        """
        shared, _, evidence = self._so_far
        assert self._bound is not None
        engine, members = self._bound.engine, self._bound.members
        warn_of(self._expectation_error, stacklevel=2)
        info = {
            "plate": self._model.plate.name,
            "log_evidence_estimate": evidence,
            "error": self._error,
            "elbo_error": self._expectation_error,
        }
        program = engine.program
        groups = _Streamed(self, self._version) if folder is None else self._written(checked_folder(folder))
        mean, scale = (jnp.asarray(x, program.dtype) for x in (shared.mean, shared.root))
        elbo = evidence if program.is_conjugate else None
        return GroupPosterior(program, members, mean, scale, elbo, info, groups, self.num_rows, self.num_groups)

    def _written(self, folder: str) -> GroupFiles:
        shared, index = self._so_far.shared, self._model.plate.index
        bound = self._bound
        assert bound is not None
        for number, (labels, vectors) in enumerate(self._store.pieces(WRITTEN)):
            order = np.argsort(np.array(labels))
            groups = bound.unpacked(vectors[order])[0].at(shared.mean)
            write_groups(folder, number, index, np.array(labels)[order], bound.members.names, groups, shared.root)
        return GroupFiles(folder, index)

    def read(self, labels: np.ndarray, version: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """What a posterior needs of groups.

        :raises ValueError: naming a label of which there were no rows, and if the stream has gone on.
        """
        if version != self._version:
            raise ValueError(
                "the stream has taken in rows since this posterior was made: ask it for a new one with posterior(), or "
                "keep groups in files with posterior(folder=...)."
            )
        assert self._bound is not None
        wanted, where = np.unique(labels, return_inverse=True)
        vectors, places = self._store.read(wanted.tolist())
        if len(places) < len(wanted):
            missing = np.delete(wanted, places)[0]
            raise ValueError(f"the stream has had no rows of group {missing}: leave it out, or call update with some.")
        groups = self._bound.unpacked(vectors)[0].at(self._so_far.shared.mean)
        given = conditionals(groups)
        self._store.make_room()
        return groups.mean[where], given.slope[where], given.root[where]


class _Streamed(NamedTuple):
    """A :class:`GroupSource`: the stream, as long as it is the same."""

    stream: GroupStream
    version: int

    def read(self, wanted: np.ndarray, members: Members) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.stream.read(wanted, self.version)


class _Bound(NamedTuple):
    """The model, bound to as many groups as a block may have.

    :ivar form: of the rows that are kept.
    """

    engine: Engine
    members: Members
    terms: GroupTerms
    form: RowForm
    index: str

    @classmethod
    def of(cls, model: GroupModel, rows: Rows, slots: int, rows_kept: int) -> _Bound:
        index = model.plate.index
        head = selected(rows, slice(0, FEWEST // 2))  # as many rows as groups would seem to have a group each
        engine, members = model.bound(head, slots)
        most = 0 if engine.program.has_gaussian_rows else rows_kept
        return cls(engine, members, GroupTerms(engine, members), RowForm.of(rows, index, most), index)

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
        return self.terms.chunks(some, some[self.index], max(power_of_two(num_rows(some)), FEWEST))

    def unpacked(self, vectors: np.ndarray) -> tuple[KnownGroups, GroupRows]:
        """What is kept of groups, from one vector for each."""
        d, k = len(self.members.columns), self.members.shared.size
        shapes = [(d, d), (d, k), (d,), (), (d + k,), (d + k, d + k)]
        ends = np.cumsum([math.prod(shape) for shape in shapes])
        vectors = vectors.reshape(-1, ends[-1] + 1 + self.form.most * self.form.width)
        pieces = [x.reshape(-1, *shape) for x, shape in zip(np.split(vectors, ends, axis=1), shapes)]
        rows = GroupRows(*self.form.unpacked(vectors[:, ends[-1] :]), self.index)
        return KnownGroups(*pieces[:3], Factors(*pieces[3:])), rows


class _Block:
    """Rows, the priors of their groups and of the shared sites, and the rest."""

    def __init__(self, bound: _Bound, rows: GroupRows, others: Rest):
        self._rest, self._parts = others, []
        for some in bound.pieces(len(others.linear)):
            chunks, count = bound.chunks(rows, some), some.stop - some.start
            self._parts.append((some, GroupEvaluations(bound.terms, chunks, count, with_shared_prior=not some.start)))

    def evaluations(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """Sums at q."""
        found = [evaluate(mean, root, _cut(groups, some)) for some, evaluate in self._parts]
        of_groups = [np.concatenate(of_all) for of_all in zip(*[sums[:4] for sums in found])]
        of_all = [np.sum(of_all, axis=0) for of_all in zip(*[sums[4:] for sums in found])]
        return self._rest.added_to(GroupSums(*of_groups, *of_all), mean, root, groups)


class _Solve:
    """A block as the only part of rounds.

    :ivar place: where its groups are.
    """

    def __init__(self, block: _Block, place: GroupPlace):
        self._block, self.place, self._next = block, place, place
        self.parts = Parts(self._advance, lambda step: message_of(self.place, step), self._keep)

    def _advance(self, step: float, shift: np.ndarray, shared: Shared) -> Message:
        self._next = advanced(self._block, self.place, step, shift, shared)
        return message_of(self._next, 1.0)

    def _keep(self) -> None:
        self.place = self._next


def _cut(groups: Groups, some: slice) -> Groups:
    return Groups(*[x[some] for x in groups])


def _packed(kept: KnownGroups) -> np.ndarray:
    """One vector for each group."""
    return np.concatenate([x.reshape(len(x), -1) for x in (*kept[:3], *kept.open)], axis=1)
