"""Rows at hand in random order: each once, by the key alone, from any place on, and mixed from all over the data."""

import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from numpyro_rvga import ParquetRows
from numpyro_rvga.streams import order
from numpyro_rvga.streams.source import rows_in_memory, rows_of_blocks

KEY = jax.random.key(3)


def model(x, y=None):
    """Takes these arguments."""


def array_of(num_rows):
    return {"x": np.arange(num_rows), "y": np.arange(num_rows) * 0.5}


def blocks_of(num_rows, size):
    rows = array_of(num_rows)
    return [{n: a[i : i + size] for n, a in rows.items()} for i in range(0, num_rows, size)]


class Seekable:
    """Rows of a source of one's own."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def from_row(self, row):
        for start in range(row, self.num_rows, 100):
            yield {n: a[start : start + 100] for n, a in array_of(self.num_rows).items()}


def parquet_of(folder, num_rows, group):
    pq.write_table(pa.table(array_of(num_rows)), folder / "rows.parquet", row_group_size=group)
    return ParquetRows(folder / "rows.parquet", {"x": "x", "y": "y"})


SOURCES = {
    "arrays": lambda folder: rows_in_memory(array_of(3000), {}),
    "list": lambda folder: rows_of_blocks(blocks_of(3000, 70), model, {}),
    "own": lambda folder: rows_of_blocks(Seekable(3000), model, {}),
    "row groups": lambda folder: rows_of_blocks(parquet_of(folder, 3000, 37), model, {}),
    "two row groups": lambda folder: rows_of_blocks(parquet_of(folder, 3000, 1500), model, {}),
}


@pytest.fixture(params=SOURCES)
def source(request, tmp_path, monkeypatch):
    monkeypatch.setattr(order, "SLICE", 64)
    monkeypatch.setattr(order, "BUFFER_NUMBERS", 2 * 500)  # two numbers a row: 500 rows are mixed at a time
    monkeypatch.setattr("numpyro_rvga.streams.source.PIECE", 200)
    return SOURCES[request.param](tmp_path)


def visited(source, sizes=(1000,)):
    found, turn = [], 0
    while (rows := source.take(sizes[turn % len(sizes)])) is not None:
        np.testing.assert_array_equal(rows["y"], 0.5 * rows["x"])
        found.append(rows["x"])
        turn += 1
    return np.concatenate(found)


def test_every_row_is_visited_once_in_an_order_of_the_key(source):
    first, again = (visited(source.in_random_order(KEY), sizes) for sizes in ((1000,), (7, 130)))
    np.testing.assert_array_equal(np.sort(first), np.arange(3000))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, visited(source.in_random_order(jax.random.key(4))))


def test_rows_of_all_over_the_data_come_together(source):
    """Of sorted rows, any 500 in a row have nearly the mean of all: 1500, with standard error 39."""
    means = visited(source.in_random_order(KEY)).reshape(6, 500).mean(axis=1)
    assert np.abs(means - 1500).max() < 350  # in their own order: 1250


@pytest.mark.parametrize("place", [1, 499, 500, 1234, 2999])
def test_reading_goes_on_from_any_place_and_rows_keep_their_numbers(source, place):
    whole = visited(source.in_random_order(KEY))
    rest = source.in_random_order(KEY)
    np.testing.assert_array_equal(rest.take(place)["x"], whole[:place])
    np.testing.assert_array_equal(visited(rest), whole[place:])
    assert rest.number(place) == whole[place]


@pytest.mark.parametrize("groups", [[10], [1] * 1000, [5, 0, 7], [2**20] * 3, [100_000, 3, 250_000] * 40])
def test_rounds_hold_every_row_once_and_are_bounded(groups):
    rounds = order.rounds_of(groups, 16, KEY)
    parts = np.concatenate(rounds)
    parts = parts[np.argsort(parts[:, 0])]
    np.testing.assert_array_equal(parts[:, 0], np.cumsum(parts[:, 1]) - parts[:, 1])
    assert parts[:, 1].sum() == sum(groups)
    assert max(x[:, 1].sum() for x in rounds) <= order.BUFFER_NUMBERS // 16 + max(len(x) for x in rounds)


def test_rows_that_can_be_read_once_have_no_other_order():
    assert not rows_of_blocks(iter(blocks_of(100, 10)), model, {}).takes_any_order


def test_blocks_that_do_not_fit_are_named_whatever_the_order():
    blocks = blocks_of(300, 100)
    blocks[1]["x"] = blocks[1]["x"][:, None]
    with pytest.raises(ValueError, match="row 100"):
        visited(rows_of_blocks(blocks, model, {}).in_random_order(KEY))
