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
    with pytest.raises(ValueError, match="record batch 0 has no column 'w'"):
        list(arrow_blocks(ragged.to_batches(), {"v": "w"}))


# ---------------------------------------------------------------------- streams that go on
def grouped(g, y=None):
    a = numpyro.sample("a", dist.Normal(0, 1).expand([4]).to_event(1))
    with numpyro.plate("rows", len(g)):
        numpyro.sample("y", dist.Normal(a[g], 1.0), obs=y)


@pytest.mark.parametrize("at", ["the beginning", "a later row group"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_missing_integers_leave_the_other_rows_integers(tmp_path, at, shuffle):
    rng = np.random.default_rng(0)
    g, y = rng.integers(0, 4, 300).astype(np.int32), rng.normal(size=300)
    missing = 1 if at == "the beginning" else 222
    column = pa.array([None if i == missing else int(value) for i, value in enumerate(g)], pa.int32())
    pq.write_table(pa.table({"g": column, "y": y}), tmp_path / "t.parquet", row_group_size=100)
    rows = ParquetRows(tmp_path / "t.parquet", {"g": "g", "y": "y"})
    method = RVGA(grouped, block_size=50, shuffle=shuffle)
    found = method.run(rows, on_bad_row="skip", progress_bar=False)
    assert found.info["skipped_rows"].tolist() == [missing] and found.num_rows == 299
    table = pq.read_table(tmp_path / "t.parquet")
    blocks = arrow_blocks([table.slice(0, 0), *table.to_batches(50)], {"g": "g", "y": "y"})
    streamed = method.run(blocks, on_bad_row="skip", progress_bar=False) if not shuffle else found
    others = np.arange(300) != missing
    exact = RVGA(grouped).run({"g": g[others], "y": y[others]}, progress_bar=False)
    for posterior in (found, streamed):
        np.testing.assert_allclose(posterior.mean, exact.mean, rtol=1e-8)
    row = missing % 100
    with pytest.raises(
        ValueError, match=rf"row {missing}.* It is row {row} of row group {missing // 100} of .*t.parquet"
    ):
        method.run(rows, progress_bar=False)


def test_batches_without_rows_are_passed_over():
    table = pa.table(columns())
    batches = [table.slice(0, 0), *table.to_batches(90), table.slice(3, 0)]
    found = RVGA(model).run(arrow_blocks(batches, COLUMNS), progress_bar=False)
    assert found.num_rows == NUM_ROWS


def test_outcomes_outside_their_support_are_found_in_their_files(tmp_path):
    table = columns()
    table["y"][170] = 7
    pq.write_table(pa.table(table), tmp_path / "t.parquet", row_group_size=100)
    for shuffle in (True, False):
        with pytest.raises(ValueError, match=r"row 170 of array 'y' holds 7.* row 70 of row group 1 of .*t.parquet"):
            RVGA(model, block_size=50, shuffle=shuffle).run(
                ParquetRows(tmp_path / "t.parquet", COLUMNS), progress_bar=False
            )


@pytest.mark.parametrize("size", [100, 1000])
@pytest.mark.parametrize("shuffle", [True, False])
def test_files_that_were_replaced_by_shorter_ones_are_refused_with_both_numbers(tmp_path, size, shuffle):
    pq.write_table(pa.table(columns()), tmp_path / "t.parquet", row_group_size=size)
    rows = ParquetRows(tmp_path / "t.parquet", COLUMNS)
    pq.write_table(pa.table(columns(150)), tmp_path / "t.parquet", row_group_size=size)
    expected = r"row group 1 had 100 rows, and has 50" if size == 100 else r"row group 0 had 500 rows, and has 150"
    with pytest.raises(ValueError, match=f"t.parquet has changed since its rows were counted: its {expected}"):
        RVGA(model, shuffle=shuffle).run(rows, progress_bar=False)


@pytest.mark.parametrize("kind", ["list_", "large_list", "list_view", "large_list_view"])
def test_lists_of_one_length_are_rows_of_a_matrix_in_every_type_of_arrow(kind):
    values = np.arange(20.0).reshape(10, 2)
    table = pa.table({"X": pa.array(values.tolist(), getattr(pa, kind)(pa.float64()))})
    batches = table.slice(0, 4).to_batches() + table.slice(4).to_batches()
    blocks = arrow_blocks(batches, {"X": "X"})
    np.testing.assert_array_equal(joined(blocks)["X"], values)
    assert blocks.dtypes == {"X": np.float64}


def test_parquet_with_long_lists_gives_the_posterior_of_the_arrays(tmp_path):
    lists = pa.array(data()["X"].tolist(), pa.large_list(pa.float64()))
    pq.write_table(pa.table({"X": lists, "y": data()["y"]}), tmp_path / "rows.parquet", row_group_size=100)
    rows = ParquetRows(tmp_path, {"X": "X", "y": "y"})
    found = RVGA(model).run(rows, progress_bar=False)
    np.testing.assert_allclose(found.mean, RVGA(model).run(data(), progress_bar=False).mean, atol=1e-4)


@pytest.mark.parametrize(
    "columns, message",
    [({}, "columns is empty: name a column for each argument"), ({"X": [], "y": "y"}, "no column for 'X': .* has")],
)
def test_arguments_without_columns_are_refused(folder, columns, message):
    with pytest.raises(ValueError, match=message):
        ParquetRows(folder, columns)


def test_no_files_are_refused():
    with pytest.raises(ValueError, match="the list of them is empty"):
        ParquetRows([], COLUMNS)
