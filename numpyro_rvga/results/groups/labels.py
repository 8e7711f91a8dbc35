"""Labels of groups: what they are, and whether any are missing or of another kind than the others."""

from __future__ import annotations

from typing import Any

import numpy as np

KINDS = {"i": "integers", "u": "integers", "U": "strings", "b": "booleans", "f": "numbers with a point"}


def label_kind(labels: Any, index: str, first_row: int, before: str | None = None) -> str | None:
    """What the labels of some rows are, such as "integers" or "strings".

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
