"""Vectors by key, in memory and in a file, come back as they were, and take no more memory than they need."""

import numpy as np

from numpyro_rvga.results.groups.store import GroupStore

WIDTH = 96  # which is one of the lengths


def check(vector, expected):
    """The same, but for zeros at the end."""
    np.testing.assert_array_equal(np.pad(vector, (0, WIDTH - len(vector))), expected)


def test_vectors_come_back_from_memory_and_from_the_file(tmp_path):
    rng, expected = np.random.default_rng(0), {}
    store = GroupStore(tmp_path / "vectors.db", 50, resume=False)
    for _ in range(150):
        labels = np.unique(rng.integers(0, 200, 12)).tolist()
        found, places = store.read(labels)
        assert [labels[i] for i in places] == [label for label in labels if label in expected]
        for vector, place in zip(found, places):
            check(vector, expected[labels[place]])
        vectors = rng.normal(size=(len(labels), WIDTH))
        for vector in vectors:
            vector[rng.integers(0, WIDTH + 1) :] = 0  # they grow and shrink
        store.write(labels, vectors)
        expected.update(zip(labels, vectors))
        store.make_room()
        assert len(store.labels_in_memory) <= 50 and store.labels_in_memory[-1] in labels
    store.save({})
    store.close()
    again = GroupStore(tmp_path / "vectors.db", None, resume=True)
    everything = {label: v for labels, vectors in again.pieces(7) for label, v in zip(labels, vectors)}
    assert len(again) == len(everything) == len(expected)
    for label, vector in everything.items():
        check(vector, expected[label])


def test_the_largest_integer_is_no_zero():
    store = GroupStore(None, None, resume=False)
    least = np.array([[1, np.iinfo(np.int64).min, 0]]).view(np.float64)  # whose bits are those of -0.0
    store.write(["a"], least)
    np.testing.assert_array_equal(store.read(["a"])[0][0, :2].view(np.int64), [1, np.iinfo(np.int64).min])


def test_memory_is_that_of_what_is_not_zero():
    store = GroupStore(None, None, resume=False)
    vectors = np.zeros((1000, 2000))
    vectors[:, :9] = 1
    store.write(list(range(1000)), vectors)
    assert store.num_bytes == 1000 * 9 * 8
    vectors[:500, 9:20] = 1
    store.write(list(range(1000)), vectors)
    assert store.num_bytes == 500 * 9 * 8 + 500 * 20 * 8
