"""A stream of rows in which new groups may come at any time: the shared sites' Gaussian, and each group's given these.

A block is solved for q of the shared sites and of the block's groups together, as one part of
:mod:`~numpyro_rvga.results.groups.rounds`. What earlier blocks have made of these groups, and of the shared sites, is a
Gaussian factor (:mod:`~numpyro_rvga.core.groups.factors`). The other groups stay as they are given the shared sites.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ...core.expectations.by_nodes import power_of_two
from ...core.groups.steps import conditionals
from ...core.updates.state import QuadraticFactors
from ...engines.expectation_errors import warn_of
from ...model.data.arguments import check_finite, check_row_shapes, finite_rows, row_shapes
from ...model.data.rows import Data, Rows, num_rows, selected
from ...model.identity import ModelIdentity
from ...options import Info, check_choice
from ...streams.opening import BAD_ROW_POLICIES
from ...user_warnings import warn
from ..merging.rounds import distance
from .parts import LABELS, GroupModel, GroupStart, blocks_of_rows, initial_groups, numbered, start_from_some
from .posterior import GroupFiles, GroupPosterior, check_kind, checked_folder, write_groups
from .rounds import Shared
from .rows import new_rows
from .solves import FEWEST, BlockModel, PieceInput, SharedState, solved
from .store import GroupStore

GROWTH = 1.5  # of the number of rows, after which all groups are solved for once more
TOLERANCE = 0.1  # standard deviations
MOST_PASSES = 10  # over groups that are not all in memory
WRITTEN = 2**16  # groups of a file
MISSING = "Leave such rows out, as update(..., on_bad_row='skip') does. See num_rows for how many were taken in before."


class GroupStream:
    """The posterior of a model with very many groups, such as users, of rows that keep coming; groups may be new.

    Made by :meth:`~numpyro_rvga.RVGA.stream_groups`, which says what the arguments mean.

    :ivar num_rows: that it has taken in. :ivar num_groups: likewise. :ivar num_bytes: what is kept of the groups in
        memory, with their rows.
    """

    def __init__(self, model: GroupModel, store: GroupStore, block_size: int, rows_kept: int):
        self._model, self._store, self._block_size, self._rows_kept = model, store, block_size, rows_kept
        self._block_model: BlockModel | None = None
        self._start: GroupStart | None = None
        self._moments: SharedState | None = None
        self._kind: str | None = None
        self.num_rows, self._settled_at, self._version = 0, 0, 0
        self._error, self._expectation_error, self._moved, self._num_revisited = 0.0, 0.0, 0.0, 0
        self._variance, self._stood_alone, self._num_skipped = np.zeros((1, 1)), False, 0
        try:
            state = store.saved_state()
            if state is not None:
                self._restore(state)
        except BaseException:
            store.close()
            raise

    @property
    def num_groups(self) -> int:
        return len(self._store)

    @property
    def num_bytes(self) -> int:
        return self._store.num_bytes

    def __repr__(self) -> str:
        return f"GroupStream(num_rows={self.num_rows}, num_groups={self.num_groups})"

    # ------------------------------------------------------------------ rows
    def update(self, data: Data | Iterable, *, on_bad_row: str = "raise") -> None:
        """Take in rows, of groups seen before and of new ones. They are taken as they come, in blocks.

        :param data: a mapping from the model's argument names to arrays that share their leading axis, the rows; or an
            iterable of such blocks.
        :param on_bad_row: ``"skip"``: leave out rows with values that are not finite, or that the model cannot have
            observed. ``info["num_skipped"]`` of the posterior tells how many. A missing label is an error.
        :raises ValueError: naming the array and the row, for data of no use; blocks before that row have been taken in.
        """
        check_choice("on_bad_row", on_bad_row, BAD_ROW_POLICIES)
        first = 0
        for rows in blocks_of_rows(self._model, data, self._block_size, self._kind):
            good = self._good(rows) if on_bad_row == "skip" else rows
            if num_rows(good):
                self._take(good, first)
            first, self._num_skipped = first + num_rows(rows), self._num_skipped + num_rows(rows) - num_rows(good)

    def _good(self, rows: Rows) -> Rows:
        """The rows that can be used."""
        rows = selected(rows, finite_rows(rows))
        if not num_rows(rows):
            return rows
        labels, by_number = numbered(rows, self._model.plate.index)
        return selected(rows, self._program(by_number, len(labels)).engine.program.begin_check(by_number)())

    def _take(self, rows: Rows, first: int) -> None:
        """One block. ``first``: the number of its first row."""
        index = self._model.plate.index
        check_finite(rows, first, MISSING)
        labels, rows = numbered(rows, index)
        block_model = self._program(rows, len(labels))
        block_model.engine.program.check_rows(rows, first)
        others, number = block_model.form.fitted(rows), rows[index]
        if self._start is None:
            self._start = start_from_some(self._model, others | {index: number}, len(labels))
        vectors, places = self._store.read(labels)
        earlier, kept = block_model.unpacked(vectors)
        groups = initial_groups(len(labels), self._start).groups
        if self._moments is not None:
            for mine, theirs in zip(groups, earlier.at(self._moments.shared.mean)):
                mine[places] = theirs
        new = new_rows(others, number, np.random.default_rng(self.num_rows))
        try:
            self._solve(block_model, [labels], [lambda: PieceInput(groups, earlier, kept, places, new)])
        except ValueError as error:
            raise ValueError(f"rows {first} to {first + num_rows(rows) - 1}: {error}") from error
        self.num_rows, self._kind = self.num_rows + num_rows(rows), LABELS[isinstance(labels[0], str)]
        self._store.make_room()
        if not self._settled_at:
            self._settled_at = self._num_revisited = self.num_rows  # all groups are in the first block
        elif self.num_rows > GROWTH * self._settled_at:
            self.settle()

    def settle(self) -> None:
        """Solve once more for the shared sites and all groups, with the priors and the kept rows of these as
        themselves. Where some are in the file, as many at a time as memory may have, again and again until that moves
        the shared sites by less than a tenth of a standard deviation. A stream does it each time that it has grown by
        half, and :meth:`posterior` does it. Where all is linear and Gaussian, or no rows have come since, nothing is
        done.
        """
        if self._settled_at == self.num_rows:
            return
        self._settled_at = self.num_rows
        if self._block_model is None or self._block_model.is_exact:
            return
        before, error = self._shared_state.shared, self._expectation_error
        for _ in range(MOST_PASSES):
            start, parts, self._num_revisited = self._shared_state.shared, self._store.parts(), 0
            for labels in parts:
                self._num_revisited += self._revisit(self._block_model, labels)
                self._store.make_room()
            last = distance(start, self._shared_state.shared)
            if len(parts) == 1 or last < TOLERANCE:
                break
        else:
            warn(
                f"after {MOST_PASSES} passes over the groups in the file, one still moves the shared sites by "
                f"{last:.2g} standard deviations: keep more groups in memory."
            )
        self._moved = distance(before, self._shared_state.shared)
        if len(parts) == 1 and self._num_revisited == self.num_rows:  # the errors of blocks are no part of q any more
            self._expectation_error -= error

    def _revisit(self, block_model: BlockModel, labels: list[Hashable]) -> int:
        """Solve for these groups with their kept rows; the number of these rows."""
        pieces = block_model.pieces(labels)
        return self._solve(
            block_model, pieces, [partial(self._without_new_rows, block_model, piece) for piece in pieces]
        )

    def _without_new_rows(self, block_model: BlockModel, labels: Sequence[Hashable]) -> PieceInput:
        """The input of a solve for these groups, without new rows."""
        groups, rows = block_model.unpacked(self._store.read(labels)[0])
        return PieceInput(groups.at(self._shared_state.shared.mean), groups, rows, np.arange(len(labels)), None)

    def _solve(
        self, block_model: BlockModel, pieces: Sequence[Sequence[Hashable]], given: Sequence[Callable[[], PieceInput]]
    ) -> int:
        """Solve for q(s) and these groups, and store the result; the number of rows that are kept of them.

        :param pieces: their labels. :param given: reads the input of each piece.
        """
        assert self._start is not None
        start = self._start.shared if self._moments is None else self._moments.shared
        solution, num_kept = solved(block_model, self._moments, start, given), 0
        for labels, (groups, rows, variance) in zip(pieces, solution.kept):
            self._store.write(labels, block_model.packed(groups, rows))
            self._variance = self._variance + variance
            num_kept += len(rows.number)
        self._moments = solution.moments
        self._error = max(self._error, solution.error)
        self._expectation_error += solution.expectation_error
        self._stood_alone = self._stood_alone or solution.stood_alone
        self._version += 1
        return num_kept

    def _program(self, rows: Rows, count: int) -> BlockModel:
        """The model, bound to at least ``count`` groups."""
        slots = max(power_of_two(count), FEWEST)
        if self._block_model is None or slots > self._block_model.members.number:
            self._block_model = BlockModel.of(self._model, rows, slots, self._rows_kept)
        program = self._block_model.engine.program
        program.check_given(rows, program.example_row)
        check_row_shapes(rows, row_shapes(program.example_row), "that the stream has taken in")
        return self._block_model

    @property
    def _shared_state(self) -> SharedState:
        if self._moments is None:
            raise ValueError("the stream has taken in no rows yet: call update first.")
        return self._moments

    # ------------------------------------------------------------------ files
    def save(self) -> None:
        """Write the stream to its file, so that one with ``resume=True`` goes on from here. What was not saved when a
        process ends is lost, and the file is as it was saved last.

        :raises ValueError: for a stream without a file, or without rows.
        """
        if not self._store.has_file:
            raise ValueError("the stream has no file: make it with stream_groups(..., file='users.db').")
        (shared, prior, evidence), block_model, start = self._shared_state, self._block_model, self._start
        assert block_model is not None and start is not None
        self._store.save(
            {
                "facts": self._options,
                "model": block_model.engine.program.identity._asdict(),
                "dtype": str(np.dtype(block_model.engine.program.dtype)),
                "head": block_model.head,
                "slots": block_model.members.number,
                "start": [start.mean, start.precision, *start.shared, start.head],
                "moments": [list(shared), list(prior), evidence],
                "counts": [self.num_rows, self._settled_at, self._num_revisited, self._num_skipped],
                "errors": [self._error, self._expectation_error, self._moved, self._variance, self._stood_alone],
                "labels": self._kind,
                "in_memory": np.array(self._store.labels_in_memory),
            }
        )

    def close(self) -> None:
        """Leave the file, as it was saved last, to others. The stream cannot be used any more."""
        self._store.close()

    @property
    def _options(self) -> Info:
        """The options that must be the same when a stream is resumed."""
        return {**self._model.plate._asdict(), "rows_kept": self._rows_kept}

    def _restore(self, state: Info) -> None:
        """:raises ValueError: for a file of another model, or of other options."""
        for name, value in self._options.items():
            if state["facts"][name] != value:
                raise ValueError(f"the file is of a stream with {name}={state['facts'][name]!r}, not {value!r}.")
        block_model = BlockModel.of(self._model, state["head"], state["slots"], self._rows_kept)
        dtype = str(np.dtype(block_model.engine.program.dtype))
        if state["dtype"] != dtype:
            raise ValueError(f"the file is of a stream in {state['dtype']}, and JAX computes in {dtype} now.")
        difference = ModelIdentity(**state["model"]).difference(block_model.engine.program.identity)
        if difference is not None:
            raise ValueError(f"the file belongs to another model than the given one: {difference}.")
        mean, precision, *shared, head = state["start"]
        self._start = GroupStart(Shared(*shared), mean, precision, head)
        shared, prior, evidence = state["moments"]
        self._moments = SharedState(Shared(*shared), QuadraticFactors(*prior), evidence)
        self.num_rows, self._settled_at, self._num_revisited, self._num_skipped = state["counts"]
        self._error, self._expectation_error, self._moved, self._variance, self._stood_alone = state["errors"]
        self._block_model, self._kind = block_model, state["labels"]
        self._store.read(state["in_memory"].tolist())

    # ------------------------------------------------------------------ results
    def posterior(self, folder: str | os.PathLike | None = None, *, settle: bool = True) -> GroupPosterior:
        """The posterior of the rows taken in so far.

        :param folder: write all groups to Parquet files there, as :func:`~numpyro_rvga.distributed.run_groups` does.
            None: groups are read from the stream, as long as it takes in no more rows.
        :param settle: :meth:`settle` first. False: as the last block has left it, which takes no time.
        :return: the posterior. ``elbo`` is None unless it is exact; ``info`` holds ``log_evidence_estimate``,
            ``error`` (by how much a block's solve may have left the shared sites off, in standard deviations),
            ``sampling_error`` (by how much they may be off since not all rows are kept, likewise),
            ``moved`` (by how much :meth:`settle` has last moved them), ``settled`` (whether no rows have come since),
            ``elbo_error`` as in :meth:`RVGA.run`, and ``plate``.
        :raises ValueError: if there are no rows yet, and if the folder holds Parquet files.
        """
        if settle:
            self.settle()
        shared, _, evidence = self._shared_state
        assert self._block_model is not None
        engine, members = self._block_model.engine, self._block_model.members
        warn_of(self._expectation_error)
        if self._sampling_error > TOLERANCE:
            warn(
                f"some groups have had more rows than the {self._rows_kept} that are kept, and a sample stands for all "
                f"of them: the shared sites may be off by {self._sampling_error:.2g} standard deviations. Keep more "
                "rows of each group (rows_kept)."
            )
        if self._stood_alone:
            warn(
                "of groups with more rows than are kept, a sample could not stand for all of them, as where rows come "
                "in the order of their outcomes: rows that are not kept may be far off. Keep more rows of each group "
                "(rows_kept), or give them in another order."
            )
        info = {
            "plate": self._model.plate.name,
            "log_evidence_estimate": evidence,
            "error": self._error,
            "sampling_error": self._sampling_error,
            "moved": self._moved,
            "num_skipped": self._num_skipped,
            "settled": self._block_model.is_exact or self._settled_at == self.num_rows,
            "elbo_error": self._expectation_error,
        }
        program = engine.program
        groups = _Streamed(self, self._version) if folder is None else self._written(checked_folder(folder))
        mean, scale = (jnp.asarray(x, program.dtype) for x in (shared.mean, shared.root))
        elbo = evidence if program.is_conjugate else None
        common = (groups, self._model.plate, self.num_rows, self.num_groups)
        return GroupPosterior(program, members, mean, scale, elbo, info, *common)

    @property
    def _sampling_error(self) -> float:
        """In standard deviations: three times the expected error, as standard deviations are off too."""
        covariance = self._shared_state.shared.root @ self._shared_state.shared.root.T
        variances = np.diag(covariance @ self._variance @ covariance) / np.diag(covariance)
        return 3 * float(np.sqrt(variances.max()))

    def _written(self, folder: str) -> GroupFiles:
        shared, index = self._shared_state.shared, self._model.plate.index
        assert self._block_model is not None
        block_model, names = self._block_model, self._block_model.members.of_members.entry_names
        for number, (labels, vectors) in enumerate(self._store.pieces(WRITTEN)):
            order = np.argsort(np.array(labels))
            groups = block_model.unpacked(vectors[order])[0].at(shared.mean)
            write_groups(folder, number, index, np.array(labels)[order], names, groups, shared.root)
        return GroupFiles(folder, index, block_model.members)


class _Streamed(NamedTuple):
    """A :class:`GroupSource`: the stream, as long as it is the same."""

    stream: GroupStream
    version: int

    def contains(self, wanted: np.ndarray) -> np.ndarray:
        self._check(wanted)
        is_known = np.zeros(len(wanted), bool)
        is_known[self.stream._store.read(wanted.tolist())[1]] = True
        self.stream._store.make_room()
        return is_known

    def read(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        self._check(wanted)
        labels, where = np.unique(wanted, return_inverse=True)
        vectors, places = self.stream._store.read(labels.tolist())
        if len(places) < len(labels):
            raise ValueError(
                f"the stream has had no rows of group {np.delete(labels, places)[0]}: leave it out, take new_groups=1 "
                "for it, or call update with some."
            )
        assert self.stream._block_model is not None
        groups = self.stream._block_model.unpacked(vectors)[0].at(self.stream._shared_state.shared.mean)
        given = conditionals(groups)
        self.stream._store.make_room()
        return groups.mean[where], given.slope[where], given.root[where]

    def _check(self, labels: np.ndarray) -> None:
        """:raises ValueError: for labels of another kind, and if the stream has gone on."""
        stream = self.stream
        if self.version != stream._version:
            raise ValueError(
                "the stream has taken in rows since this posterior was made: ask it for a new one with posterior(), or "
                "keep groups in files with posterior(folder=...)."
            )
        check_kind(labels, stream._kind == "strings", f"{stream._kind} in the stream")
