"""MNIST and Fashion-MNIST from the files in which they are published."""

import gzip
import importlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flax")
pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


def test_published_files_are_read_like_an_archive_of_arrays(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    load = importlib.import_module("online_networks").mnist
    rng = np.random.default_rng(0)
    arrays = {}
    for part, count in (("train", 2510), ("test", 20)):
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        arrays[f"y_{part}"] = rng.integers(0, 10, count, dtype=np.uint8)
    for part, prefix in (("train", "train"), ("test", "t10k")):
        for kind, array in (("images-idx3", arrays[f"x_{part}"]), ("labels-idx1", arrays[f"y_{part}"])):
            sizes = np.array([0x800 + array.ndim, *array.shape], ">i4").tobytes()
            (tmp_path / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(sizes + array.tobytes()))
    published = load(tmp_path)
    np.savez(tmp_path / "mnist.npz", **arrays)
    archive = load(tmp_path)
    assert [len(rows["y"]) for rows in published[2:5]] == [2000, 500, 20]
    for rows, others in zip(published[2:5], archive[2:5]):
        for name in ("X", "y"):
            np.testing.assert_array_equal(rows[name], others[name])
    np.testing.assert_array_equal(published.held_out["y"], arrays["y_train"][2000:2500])
