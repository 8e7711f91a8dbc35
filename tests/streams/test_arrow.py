"""Rows from Arrow and Parquet."""

import sys

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, ParquetRows, arrow_blocks

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NUM_ROWS = 500
COLUMNS = {"X": ["a", "b"], "y": "y"}


def model(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def columns(n=NUM_ROWS):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, n))
    return {"y": (rng.random(n) < 1 / (1 + np.exp(a - b))).astype(np.int32), "b": b, "other": np.zeros(n), "a": a}


def data():
    found = columns()
    return {"X": np.stack([found["a"], found["b"]], 1), "y": found["y"]}


@pytest.fixture
def folder(tmp_path):
    """Three files of uneven row groups, columns in different orders."""
    table = pa.table(columns())
    for number, (start, stop, size) in enumerate([(0, 200, 64), (200, 201, 1), (201, 500, 150)]):
        part = table.slice(start, stop - start)
        part = part.select(part.column_names[::-1]) if number else part
        pq.write_table(part, tmp_path / f"part-{number}.parquet", row_group_size=size)
    (tmp_path / "notes.txt").write_text("not rows")
    return tmp_path


def joined(blocks):
    blocks = list(blocks)
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def test_rows_come_in_order_with_columns_by_name(folder):
    rows = ParquetRows(folder, COLUMNS)
    assert rows.num_rows == NUM_ROWS
    for _ in range(2):  # each time anew
        for name, array in joined(rows).items():
            np.testing.assert_array_equal(array, data()[name])


@pytest.mark.parametrize("row", [0, 63, 64, 200, 201, 352, 499])
def test_rows_can_be_read_from_any_row_on(folder, row):
    for name, array in joined(ParquetRows(folder, COLUMNS).from_row(row)).items():
        np.testing.assert_array_equal(array, data()[name][row:])


@pytest.mark.parametrize("count", [1, 2, 3, 20])
def test_parts_hold_every_row_once(folder, count):
    parts = ParquetRows(folder, COLUMNS).split(count)
    assert len(parts) <= count
    assert sum(part.num_rows for part in parts) == NUM_ROWS
    np.testing.assert_array_equal(np.concatenate([joined(part)["y"] for part in parts]), data()["y"])


def test_parquet_gives_the_posterior_of_the_arrays(folder, tmp_path):
    method = RVGA(model, first_block=50, memory=20)
    expected = method.run(data(), progress_bar=False)
    checkpoint = tmp_path / "run"
    for _ in range(2):
        found = method.run(ParquetRows(folder, COLUMNS), progress_bar=False, checkpoint=checkpoint, resume=True)
        np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-12)
        np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-12)


def test_missing_values_are_rows_to_skip(tmp_path):
    table = pa.table({"x": [0.5, None, 1.5, 2.0], "y": pa.array([1, 2, None, 4], pa.int64())})
    pq.write_table(table, tmp_path / "t.parquet")
    found = joined(ParquetRows(tmp_path / "t.parquet", {"x": "x", "y": "y"}))
    np.testing.assert_array_equal(found["x"], [0.5, np.nan, 1.5, 2.0])
    np.testing.assert_array_equal(found["y"], [1, 2, np.nan, 4])


@pytest.mark.parametrize("kind", [pa.list_(pa.float32()), pa.list_(pa.float32(), 3)])
def test_lists_are_rows_of_a_matrix_and_truth_values_are_numbers(kind):
    table = pa.table({"v": pa.array([[1, 2, 3], [4, 5, 6]], kind), "flag": [True, False]})
    for batches in (table.to_batches(), [table]):
        (block,) = arrow_blocks(batches, {"v": "v", "flag": "flag"})
        np.testing.assert_array_equal(block["v"], [[1, 2, 3], [4, 5, 6]])
        assert block["flag"].dtype.kind in "biu"


def test_decimals_and_missing_truth_values_are_numbers():
    decimals = pa.array([1.5, None], pa.float64()).cast(pa.decimal128(5, 2))
    table = pa.table({"amount": decimals, "flag": [True, None]})
    (block,) = arrow_blocks(table.to_batches(), {"amount": "amount", "flag": "flag"})
    np.testing.assert_array_equal(block["amount"], [1.5, np.nan])
    np.testing.assert_array_equal(block["flag"], [1.0, np.nan])


def test_pyarrow_is_named_where_it_is_needed(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "t.parquet").write_bytes(b"")
    with pytest.raises(ImportError, match=r"pip install 'numpyro_rvga\[stream\]'"):
        ParquetRows(tmp_path / "t.parquet", COLUMNS)


def test_what_cannot_be_read_is_named(folder, tmp_path):
    with pytest.raises(ValueError, match=r"part-0.parquet has no column 'c' for 'X'; it has y, b, other, a"):
        ParquetRows(folder, {"X": ["a", "c"]})
    with pytest.raises(FileNotFoundError, match="neither a file nor a folder"):
        ParquetRows(folder / "nothing", COLUMNS)
    with pytest.raises(ValueError, match="count must be at least 1"):
        ParquetRows(folder, COLUMNS).split(0)
    ragged = pa.table({"v": pa.array([[1.0], [1.0, 2.0]])})
    with pytest.raises(ValueError, match="column 'v' holds lists of different lengths"):
        list(arrow_blocks(ragged.to_batches(), {"v": "v"}))
    with pytest.raises(ValueError, match="the record batch has no column 'w'"):
        list(arrow_blocks(ragged.to_batches(), {"v": "w"}))
