"""One part of the data whose groups are its own, and its share of every round."""

from __future__ import annotations

import functools
import inspect
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from jax.sharding import Mesh

from ...core.groups.steps import Groups, GroupSums, Message, maximize_groups, message, take_step
from ...engines.batch import BatchSolver
from ...engines.engine import Engine
from ...engines.groups import GroupEvaluations, GroupTerms
from ...engines.registry import Engines
from ...model.data.arguments import named_rows
from ...model.data.rows import Data, Keywords, Rows, joined, num_rows, selected
from ...model.members import Members, members_of
from ...options import Options, checked_key
from .rounds import Shared, relative_rounding

SAMPLE = 200  # groups that are solved for first
MOST_AT_START, MOST_STEPS = 30, 10  # of groups, in a round
KINDS = {"i": "integers", "u": "integers", "U": "strings", "b": "booleans", "f": "numbers with a point"}
LABELS = ("integers", "strings")
SumsAt = Callable[[np.ndarray, np.ndarray, Groups], GroupSums]
"""mean (k,) and root (k, k) of q(s), groups -> the sums over a part there."""


class LocalPlate(NamedTuple):
    """A plate whose members each live in one part.

    :ivar name: the plate's. :ivar index: the model's argument that has the member of each row. :ivar size: the one that
        has their number.
    """

    name: str
    index: str
    size: str


class GroupModel(NamedTuple):
    """The model, options and plate that all parts share.

    :ivar mesh: devices that share the rows of a solve.
    """

    model: Callable
    options: Options
    improper_prior_scale: float | None
    plate: LocalPlate
    model_kwargs: Keywords
    rng_key: Array | None
    mesh: Mesh | None

    @classmethod
    def of(cls, method: Any, plate: LocalPlate, model_kwargs: Keywords, rng_key: Array | None) -> GroupModel:
        """That of an :class:`RVGA`.

        :raises ValueError: for a method that does not seek the best full Gaussian or that has dynamics, and for
            arguments that the model does not take, or that are given.
        """
        if not getattr(method, "takes_rounds", False):
            raise ValueError("groups are for RVGA with the implicit scheme and full Gaussians, without dynamics.")
        parameters = inspect.signature(method.model).parameters
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
        for what, name in (("index", plate.index), ("size", plate.size)):
            if name not in parameters and not takes_any:
                raise ValueError(f"{what}={name!r} is no argument of the model, which takes {list(parameters)}.")
            if name in model_kwargs:
                raise ValueError(
                    f"{name!r} is of the data ({what}={name!r}), and cannot be given as a keyword argument."
                )
        of_method = method.model, method.options, method.improper_prior_scale
        return cls(*of_method, plate, model_kwargs, rng_key, method.mesh)

    def bind(self, rows: Rows, count: int) -> tuple[Engine, Members]:
        """The model bound to rows of ``count`` members, and perhaps one more, of which there are no rows."""
        key = checked_key(self.rng_key)
        apart = count + (num_rows(rows) == count)  # a plate that is as long as the rows would be one of theirs
        engines = Engines(self.model, self.options, self.improper_prior_scale, batch=True, mesh=self.mesh)
        engine = engines.get(rows, {**self.model_kwargs, self.plate.size: apart}, key, rows)
        return engine, members_of(engine.program, self.plate.name, apart)

    def solved(self, rows: Rows, count: int) -> tuple[Members, np.ndarray, np.ndarray]:
        """The members, and the best Gaussian's mean and a root of its covariance, of all latent sites at once."""
        engine, members = self.bind(rows, count)
        engine.program.check_rows(rows)
        solver = BatchSolver(self.options, "incremental", "groups")
        fit = solver(engine, rows, progress_bar=False, started=time.perf_counter())
        return members, np.asarray(fit.state.mean, np.float64), np.asarray(fit.state.root, np.float64)


class GroupStart(NamedTuple):
    """Where a search begins, from a solve of some groups.

    :ivar shared: q(s). :ivar mean: of groups, (d,). :ivar precision: of a group without rows, (d, d).
    :ivar head: rows of two groups, for a program of the model.
    """

    shared: Shared
    mean: np.ndarray
    precision: np.ndarray
    head: Rows


class GroupPart:
    """A part's rows, its groups numbered from zero in the order of their labels.

    :param data: as the methods' ``run`` takes them. :param with_shared_prior: in one part only.
    :ivar labels: (n,). :raises ValueError: for data that the model cannot take.
    """

    def __init__(self, model: GroupModel, data: Data | Iterable, *, with_shared_prior: bool):
        index = model.plate.index
        rows = read_rows(model.model, data, index, {**model.model_kwargs, model.plate.size: 1})
        self.model, self._with_shared_prior = model, with_shared_prior
        self.labels, number = np.unique(rows[index], return_inverse=True)
        self.rows = rows | {index: number.astype(np.int32)}

    def __getstate__(self) -> dict[str, object]:
        """Without what is compiled."""
        return {name: value for name, value in self.__dict__.items() if name != "evaluations"}

    @functools.cached_property
    def evaluations(self) -> GroupEvaluations:
        """Compiled for this part."""
        engine, members = self.model.bind(self.rows, len(self.labels))
        engine.program.check_rows(self.rows)
        terms = GroupTerms(engine, members)
        chunks = terms.chunks(self.rows, self.rows[self.model.plate.index])
        return GroupEvaluations(terms, chunks, len(self.labels), with_shared_prior=self._with_shared_prior)

    def __call__(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """The sums over the part at q."""
        return self.evaluations(mean, root, groups)

    def counts(self) -> tuple[int, int]:
        """How many groups and rows there are."""
        return len(self.labels), num_rows(self.rows)

    def sample(self, num_parts: int) -> Rows:
        """The rows of some groups, chosen at random: this part's share of what is solved for first."""
        return sampled(self.rows, self.model.plate.index, len(self.labels), -(-SAMPLE // num_parts))


def sampled(rows: Rows, index: str, num_groups: int, most: int) -> Rows:
    """The rows of some groups, chosen at random, and numbered anew."""
    groups = np.sort(np.random.default_rng(0).permutation(num_groups)[:most])
    rows = selected(rows, np.isin(rows[index], groups))
    return rows | {index: np.searchsorted(groups, rows[index]).astype(np.int32)}


def start_from(model: GroupModel, *samples: Rows) -> GroupStart:
    """From some groups of all parts, solved for together."""
    index, count, renumbered = model.plate.index, 0, []
    for rows in samples:
        renumbered.append(rows | {index: rows[index] + np.int32(count)})
        count += int(rows[index].max()) + 1
    rows = {name: np.concatenate([some[name] for some in renumbered]) for name in samples[0]}
    members, mean, root = model.solved(rows, count)
    covariance = root @ root.T
    shared = Shared(mean[members.shared], np.linalg.inv(covariance[np.ix_(members.shared, members.shared)]))
    columns = members.columns[:, :count]
    values, variances = mean[columns], np.diagonal(covariance)[columns]
    variance = values.var(axis=1) + variances.mean(axis=1)
    return GroupStart(shared, values.mean(axis=1), np.diag(1 / variance), selected(rows, rows[index] < 2))


def start_from_some(model: GroupModel, rows: Rows, count: int) -> GroupStart:
    """From some of the groups of rows. Without warnings: later solves go on from there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return start_from(model, sampled(rows, model.plate.index, count, SAMPLE))


class EvaluatedGroups(NamedTuple):
    """A part's groups, and the sums at their q; None before the first evaluation."""

    groups: Groups
    at: GroupSums | None


def initial_groups(count: int, start: GroupStart) -> EvaluatedGroups:
    """``count`` groups before the first evaluation: all have the same Gaussian."""
    size, k = len(start.mean), len(start.shared.mean)
    precision = np.tile(start.precision, (count, 1, 1))
    return EvaluatedGroups(Groups(np.tile(start.mean, (count, 1)), precision, np.zeros((count, size, k))), None)


def advanced(
    sums_at: SumsAt, evaluated: EvaluatedGroups, step: float, shift: np.ndarray, shared: Shared
) -> EvaluatedGroups:
    """A part's groups after a step of q(s) to ``shared``, maximized there."""
    groups, most = evaluated.groups, MOST_AT_START
    if evaluated.at is not None:
        groups, most = take_step(groups, evaluated.at, step, shift), MOST_STEPS
    root = shared.root
    return EvaluatedGroups(*maximize_groups(lambda g: sums_at(shared.mean, root, g), groups, most, relative_rounding()))


def message_of(evaluated: EvaluatedGroups, step: float) -> Message:
    """The part's message for a step of this length."""
    assert evaluated.at is not None
    return message(evaluated.groups, evaluated.at, step)


def named_blocks(
    model: Callable, data: Data | Iterable, index: str, model_kwargs: Keywords, kind: str | None = None
) -> Iterator[tuple[Rows, str | None]]:
    """Blocks of rows by name, of which labels may be strings, and what labels are up to there: see :func:`label_kind`.

    :param index: the array of labels. :param kind: what labels of earlier rows are, or None.
    :raises ValueError: for labels of no use, or as :func:`named_rows` does.
    """
    first_row = 0
    for block in [data] if isinstance(data, (Mapping, tuple)) else data:
        if isinstance(block, Mapping) and block.get(index) is not None:  # strings are for no model
            labels = block[index]
            kind = label_kind(labels, index, first_row, kind)
            numbers = np.zeros(len(labels), np.int32)
            rows = named_rows(model, {**block, index: numbers}, model_kwargs) | {index: labels}
        else:
            rows = named_rows(model, block, model_kwargs)
            if index not in rows:
                raise ValueError(f"the data have no array {index!r}, which tells the group of each row.")
            kind = label_kind(rows[index], index, first_row, kind)
        yield {name: np.array(array) for name, array in rows.items()}, kind  # a source may use its arrays again
        first_row += num_rows(rows)


def read_rows(model: Callable, data: Data | Iterable, index: str, model_kwargs: Keywords) -> Rows:
    """All rows, which may come in blocks; see :func:`named_blocks`."""
    blocks = [rows for rows, _ in named_blocks(model, data, index, model_kwargs)]
    if not blocks:
        raise ValueError("the data have no rows.")
    return joined(blocks)


def check_apart(plate: str, *all_labels: np.ndarray) -> None:
    """:raises ValueError: naming a label that is in two parts."""
    labels, counts = np.unique(np.concatenate(all_labels), return_counts=True)
    if counts.max(initial=1) == 1:
        return
    twice = labels[counts > 1][0]
    first, second = [number for number, own in enumerate(all_labels) if np.isin(twice, own)][:2]
    raise ValueError(
        f"member {twice} of plate {plate!r} has rows in part {first} and in part {second}: all rows of a group must be "
        "in one part. Cut the data by group."
    )


def label_kind(labels: Any, index: str, first_row: int, before: str | None = None) -> str | None:
    """The kind of some rows' labels, such as "integers" or "strings".

    :param index: the array of labels. :param first_row: the number of the first row.
    :param before: what those of earlier rows are, or None. So are these, if there are none.
    :raises ValueError: naming the row of a label that is missing, or of another kind than those before it. NumPy would
        make one kind of them, and one group of labels such as 1 and "1".
    """
    kind = _kind_of_all(labels, index, first_row) or before
    if kind != (before or kind):
        raise ValueError(
            f"array {index!r} has labels that are {kind} from row {first_row} on, and {before} before: groups would be "
            "taken for new ones. Convert them."
        )
    return kind


def _kind_of_all(labels: Any, index: str, first_row: int) -> str | None:
    array = np.asarray(labels)
    if array.ndim != 1:
        raise ValueError(f"array {index!r} must have one label for each row, not shape {array.shape}.")
    if not array.size:
        return None
    is_list = isinstance(labels, (list, tuple))
    if not is_list and array.dtype.kind not in "fO":
        return _kind_of(array)
    first = None
    for row, label in enumerate(labels if is_list else array):
        if label is None or label != label:
            raise ValueError(f"array {index!r} has no label in row {first_row + row}.")
        kind = _kind_of(np.asarray(label))
        first = first or kind
        if kind != first:
            raise ValueError(
                f"array {index!r} has labels that are {first}, and {label!r} in row {first_row + row}: convert it, or "
                "leave the row out."
            )
    return first


def _kind_of(array: np.ndarray) -> str:
    return KINDS.get(array.dtype.kind, f"of type {array.dtype}")


def blocks_of_rows(model: GroupModel, data: Data | Iterable, block_size: int, before: str | None) -> Iterator[Rows]:
    """Rows with the labels of their groups, ``block_size`` at a time.

    :param data: a mapping, or an iterable of such. :param before: what labels of earlier rows are, or None.
    :raises ValueError: naming the array and the row, for data and labels of no use.
    """
    plate = model.plate
    keywords, waiting = {**model.model_kwargs, plate.size: 1}, []
    for rows, kind in named_blocks(model.model, data, plate.index, keywords, before):
        if kind not in (None, *LABELS):
            raise ValueError(
                f"array {plate.index!r} must have labels that are integers or strings, and they are {kind}."
            )
        waiting.append(rows)
        if sum(map(num_rows, waiting)) < block_size:
            continue
        whole = joined(waiting)
        ends = range(block_size, num_rows(whole) + 1, block_size)
        for end in ends:
            yield selected(whole, slice(end - block_size, end))
        waiting = [selected(whole, slice(ends[-1], None))]
    if sum(map(num_rows, waiting)):
        yield joined(waiting)


def numbered(rows: Rows, index: str) -> tuple[list[Any], Rows]:
    """Labels, and the rows with their numbers in place of them."""
    labels, number = np.unique(np.asarray(rows[index].tolist()), return_inverse=True)
    return labels.tolist(), rows | {index: number.astype(np.int32)}
