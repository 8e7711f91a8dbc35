"""Types of arrays in blocks that are read one after the other, against the group means of normal outcomes."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest

from numpyro_rvga import BONG, RVGA

RNG = np.random.default_rng(0)
NUM_ROWS, SIZE = 120, 40
GROUP = RNG.integers(0, 4, NUM_ROWS)
Y = np.array([0.0, 1.0, 5.0, 2.0])[GROUP] + 0.5 * RNG.normal(size=NUM_ROWS)


def groups(g, y):
    w = numpyro.sample("w", dist.Normal(0, 2).expand([4]).to_event(1))
    with numpyro.plate("rows", g.shape[0]):
        numpyro.sample("y", dist.Normal(w[g], 0.5), obs=y)


def exact_mean(kept):
    counts, sums = np.bincount(GROUP[kept], minlength=4), np.bincount(GROUP[kept], Y[kept], minlength=4)
    return 4 * sums / (0.25 + 4 * counts)


def blocks(of_last):
    """The last block is of other types: as pandas reads a file in pieces."""
    for start in range(0, NUM_ROWS, SIZE):
        g = GROUP[start : start + SIZE]
        yield {"g": of_last(g) if start + SIZE == NUM_ROWS else g, "y": Y[start : start + SIZE]}


def with_missing(g):
    return np.where(np.arange(SIZE) == 3, np.nan, g)


METHODS = [lambda model: RVGA(model), lambda model: BONG(model, family="full")]
EVERY = np.ones(NUM_ROWS, bool)
KEPT = np.arange(NUM_ROWS) != NUM_ROWS - SIZE + 3


@pytest.mark.parametrize("make", METHODS, ids=["RVGA", "BONG"])
@pytest.mark.parametrize("listed", [False, True])
def test_integers_with_missing_values_in_a_later_block_are_integers_in_the_other_rows(make, listed):
    data = list(blocks(with_missing)) if listed else blocks(with_missing)
    posterior = make(groups).run(data, on_bad_row="skip", progress_bar=False)
    np.testing.assert_array_equal(posterior.info["skipped_rows"], np.flatnonzero(~KEPT))
    np.testing.assert_allclose(posterior.mean, exact_mean(KEPT), atol=1e-6)


def test_whole_numbers_in_a_later_block_are_integers_as_in_the_first():
    posterior = RVGA(groups).run(blocks(lambda g: g.astype(float)), progress_bar=False)
    np.testing.assert_allclose(posterior.mean, exact_mean(EVERY), atol=1e-6)


@pytest.mark.parametrize("on_bad_row", ["raise", "skip"])
def test_fractions_where_a_model_indexes_are_refused_by_row_array_and_type(on_bad_row):
    data = blocks(lambda g: np.where(np.arange(SIZE) == 3, 0.5, g))
    with pytest.raises(ValueError, match=f"row {NUM_ROWS - SIZE + 3}: data array 'g' holds 0.5 there, .* float64"):
        RVGA(groups).run(data, on_bad_row=on_bad_row, progress_bar=False)


def test_outcomes_may_have_fractions_in_later_blocks_alone():
    def model(y):
        a = numpyro.sample("a", dist.Normal(0, 2))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(a, 0.5), obs=y)

    y = np.concatenate([np.arange(40.0), np.arange(40) + 0.25])
    posterior = RVGA(model).run(iter([{"y": y[:40].astype(int)}, {"y": y[40:]}]), progress_bar=False)
    np.testing.assert_allclose(posterior.mean, 4 * y.sum() / (0.25 + 4 * 80), atol=1e-6)


@pytest.mark.parametrize("make", METHODS, ids=["RVGA", "BONG"])
@pytest.mark.parametrize("streamed", [False, True])
def test_missing_entries_of_nullable_integer_columns_are_missing_rows(make, streamed):
    missing = np.isin(np.arange(NUM_ROWS), [1, 77])
    frame = pandas.DataFrame({"g": GROUP, "y": Y}).astype({"g": "Int64"})
    frame["g"] = frame["g"].mask(missing)
    parts = [frame.iloc[start : start + SIZE] for start in range(0, NUM_ROWS, SIZE)] if streamed else [frame]
    pieces = [{"g": part["g"], "y": part["y"]} for part in parts]
    data = iter(pieces) if streamed else pieces[0]
    posterior = make(groups).run(data, on_bad_row="skip", progress_bar=False)
    np.testing.assert_array_equal(posterior.info["skipped_rows"], [1, 77])
    np.testing.assert_allclose(posterior.mean, exact_mean(~missing), atol=1e-6)
