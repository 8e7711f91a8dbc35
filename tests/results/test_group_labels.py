"""Labels of groups are of one kind, or an error names the row."""

import numpy as np
import pytest

from numpyro_rvga.results.groups.parts import label_kind


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        ([1, 2], "integers"),
        (np.array([1, 2], dtype=object), "integers"),
        (["a", "b"], "strings"),
        (np.array(["a", "b"], dtype=object), "strings"),
        (np.array([0.5, 1.0]), "numbers with a point"),
        ([True, False], "booleans"),
    ],
)
def test_labels_of_one_kind(labels, kind):
    assert label_kind(labels, "user", 0) == label_kind(labels, "user", 0, kind) == kind


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, "1"], "labels that are integers, and '1' in row 11"),
        (np.array(["1", 1], dtype=object), "labels that are strings, and 1 in row 11"),
        ([1, 2, True], "labels that are integers, and True in row 12"),
        ([1, None], "no label in row 11"),
        (np.array([1.0, np.nan]), "no label in row 11"),
        (3, r"one label for each row, not shape \(\)"),
        (np.ones((2, 1), int), r"one label for each row, not shape \(2, 1\)"),
    ],
)
def test_others_are_named(labels, message):
    with pytest.raises(ValueError, match=f"array 'user' (has|must have) {message}"):
        label_kind(labels, "user", 10)


def test_blocks_of_rows_must_have_labels_of_one_kind():
    with pytest.raises(ValueError, match="'user' has labels that are strings from row 5 on, and integers before"):
        label_kind(["a"], "user", 5, "integers")
    assert label_kind([], "user", 5, "strings") == "strings"
    assert label_kind([], "user", 5) is None
