"""Rows of a stream of groups, in blocks of one size however the data are cut."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from ...model.data.arguments import finite_rows
from ...model.data.rows import Data, Rows, joined, num_rows, selected
from .parts import GroupModel, gathered

LABELS = ("integers", "strings")


def blocks_of_rows(model: GroupModel, data: Data | Iterable, block_size: int, kind: str | None) -> Iterator[Rows]:
    """Rows with the labels of their groups, ``block_size`` at a time.

    :param data: a mapping, or an iterable of such. :param kind: what labels of earlier rows are, or None.
    :raises ValueError: naming the array and the row, for data and labels of no use.
    """
    plate = model.plate
    keywords, done, waiting = {**model.model_kwargs, plate.size: 1}, 0, []
    for block in [data] if isinstance(data, (Mapping, tuple)) else data:
        rows, kind = gathered(model.model, block, plate.index, keywords, done, kind)
        if kind not in (None, *LABELS):
            raise ValueError(
                f"array {plate.index!r} must have labels that are integers or strings, and they are {kind}."
            )
        waiting.append(rows)
        done += num_rows(rows)
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


def check_finite(rows: Rows, first_row: int) -> None:
    """:raises ValueError: naming the array and the row of a value that is not finite."""
    for name, array in rows.items():
        finite = finite_rows({name: array})
        if not finite.all():
            raise ValueError(
                f"data array {name!r} holds NaN or an infinite value in row {first_row + int(np.argmin(finite))}: "
                "leave such rows out, as update(..., on_bad_row='skip') does. Rows before them may have been taken in: "
                "see num_rows."
            )
