"""The rows that a stream keeps of each group: a random sample of all that came, in whatever blocks."""

import numpy as np

from numpyro_rvga.results.groups.rows import GroupRows, RowForm, new_rows


def kept_after(blocks, most, seed=0):
    """Of three groups, each block's rows being numbered from where the last one ended."""
    rng, form, vectors, first = np.random.default_rng(seed), None, None, 0
    for number in blocks:
        rows = {"x": np.arange(first, first + len(number))}
        first += len(number)
        form = form or RowForm.of({**rows, "user": number}, "user", most)
        new = new_rows(rows, number, rng)
        before = new if vectors is None else form.unpacked(vectors).and_then(new)
        vectors = form.packed(before.sampled(most, 3), 3)
    return form.unpacked(vectors)


def test_rows_kept_stand_for_all_of_their_group():
    blocks = [np.array([0, 1, 0, 0, 0, 1]), np.array([0, 2, 0, 0, 1])]
    kept = kept_after(blocks, 3)
    np.testing.assert_array_equal(kept.counts(3), [3, 3, 1])
    np.testing.assert_array_equal(kept.totals(3), [7, 3, 1])
    np.testing.assert_allclose(kept.weights(3), [7 / 3, 1, 1])
    every = np.concatenate(blocks)
    np.testing.assert_array_equal(every[kept.rows["x"]], kept.number)
    assert set(kept.rows["x"][kept.number == 1]) == {1, 5, 10}


def test_early_and_late_rows_are_kept_alike():
    blocks = [np.zeros(4, int), np.zeros(5, int), np.zeros(3, int)]
    times = np.bincount(np.concatenate([kept_after(blocks, 4, seed).rows["x"] for seed in range(600)]), minlength=12)
    assert times.sum() == 2400 and np.abs(times - 200).max() < 4 * np.sqrt(200 * 2 / 3)


def test_wide_integers_and_vectors_come_back_as_they_were():
    big = np.array([2**53 + 1, -(2**62) - 1, 7])
    rows = {"id": big, "x": np.arange(6, dtype=np.float32).reshape(3, 2), "seen": np.array([True, False, True])}
    number = np.array([1, 0, 1])
    form = RowForm.of({**rows, "user": number}, "user", 2)
    kept = new_rows(rows, number, np.random.default_rng(0))
    again = form.unpacked(form.packed(kept, 2))
    assert isinstance(again, GroupRows)
    order = [np.flatnonzero(again.rows["seen"] == False)[0], *np.flatnonzero(again.rows["seen"])]  # noqa: E712
    np.testing.assert_array_equal(sorted(again.rows["id"][order[1:]]), [7, 2**53 + 1])
    assert again.rows["id"][order[0]] == -(2**62) - 1 and again.rows["id"].dtype == np.int64
    assert again.rows["x"].dtype == np.float64 and again.rows["seen"].dtype == bool
    np.testing.assert_array_equal(again.rows["x"][order[0]], [2, 3])
