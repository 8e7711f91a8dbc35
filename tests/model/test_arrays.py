"""Data arrays mean in the model what they mean to the user: no wrapped integers, no lost masks, no objects."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas
import pytest
from shared_methods import shared

from numpyro_rvga import BONG, RVGA, FixedPointVI
from numpyro_rvga.model.data.arrays import as_data_array
from numpyro_rvga.model.data.rows import equal, snapshot

NUM_ROWS = 200


def regression(x, y):
    """With a square, which wraps in 8 bits from 12 on."""
    b = numpyro.sample("b", dist.Normal(0.0, 10.0).expand([2]).to_event(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(b[0] + b[1] * x**2 / 1000, 0.1), obs=y)


def data(dtype=float):
    rng = np.random.default_rng(0)
    x = rng.integers(0, 100, NUM_ROWS)
    return {"x": x.astype(dtype), "y": 1.0 - 2.0 * (x / 1.0) ** 2 / 1000 + 0.1 * rng.normal(size=NUM_ROWS)}


def run(rows):
    return shared(RVGA, regression).run(rows, progress_bar=False)


@pytest.fixture(scope="module")
def plain():
    return run(data())


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.uint64, np.float16, np.longdouble])
def test_narrow_and_unsigned_numbers_are_widened(dtype, plain):
    np.testing.assert_allclose(run(data(dtype)).mean, plain.mean, rtol=1e-9)


@pytest.mark.parametrize("dtype", [">f8", ">f4", ">i4", ">i8", ">u2"])
def test_numbers_in_another_byte_order_are_the_same_numbers(dtype, plain):
    np.testing.assert_allclose(run(data(dtype)).mean, plain.mean, rtol=1e-9)


@pytest.mark.parametrize("dtype, wide", [("bfloat16", np.float32), ("float8_e4m3fn", np.float32), ("int4", np.int32)])
def test_narrow_types_of_jax_are_widened(dtype, wide):
    values = np.arange(-4, 4)
    for array in (values.astype(dtype), jnp.asarray(values, dtype)):
        widened = as_data_array("x", array)
        assert widened.dtype == wide
        np.testing.assert_array_equal(widened, values)


def test_codes_of_categories_are_widened():
    codes = pandas.Categorical([f"level {i % 100}" for i in range(NUM_ROWS)]).codes
    assert codes.dtype == np.int8 and as_data_array("g", codes).dtype == np.int32


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("value", [5_000_000_000, -(2**31) - 1, 1_700_000_000_000])
def test_integers_that_jax_would_wrap_are_refused(value, double):
    counts = np.zeros(7, np.int64)
    counts[3] = value
    with jax.enable_x64(double):
        if double:
            assert as_data_array("count", counts)[3] == value
        else:
            with pytest.raises(ValueError, match=rf"'count' holds {value} in row 3, which JAX would wrap to 32 bits"):
                as_data_array("count", counts)


def test_masked_floating_point_entries_are_missing_rows(plain):
    rows = data()
    rows["x"] = np.ma.masked_equal(np.where(np.arange(NUM_ROWS) % 10 == 4, -9999.0, rows["x"]), -9999.0)
    with pytest.raises(ValueError, match="'x' holds NaN in row 4"):
        run(rows)
    skipped = RVGA(regression).run(rows, on_bad_row="skip", progress_bar=False)
    kept = np.arange(NUM_ROWS) % 10 != 4
    np.testing.assert_allclose(skipped.mean, run({n: np.asarray(a)[kept] for n, a in rows.items()}).mean, rtol=1e-6)


def test_masked_integers_are_refused_and_masks_of_nothing_are_not(plain):
    x = np.ma.masked_equal(data(int)["x"], data(int)["x"][5])
    first = int(np.argmax(x.mask))
    with pytest.raises(ValueError, match=f"'x' is masked in row {first}, and integers have no value"):
        run({**data(), "x": x})
    np.testing.assert_allclose(run({**data(), "x": np.ma.masked_array(data()["x"])}).mean, plain.mean)


FRAME = pandas.DataFrame({"a": [0.5, 1.5, 2.5], "b": [True, False, True], "c": [3, 4, 5]})


@pytest.mark.parametrize(
    "value, expected",
    [
        (FRAME, [[0.5, 1, 3], [1.5, 0, 4], [2.5, 1, 5]]),
        (FRAME.convert_dtypes(), [[0.5, 1, 3], [1.5, 0, 4], [2.5, 1, 5]]),
        (FRAME[["b"]], [[True], [False], [True]]),
        (FRAME["c"].astype("Int64"), [3, 4, 5]),
        (pandas.Series([1, None, 3], dtype="Int64"), [1, np.nan, 3]),
        (pandas.Series([True, None, False], dtype="boolean"), [1, np.nan, 0]),
        (FRAME["b"].astype("boolean"), [True, False, True]),
    ],
    ids=["mixed", "nullable", "bool", "Int64", "Int64 with NA", "boolean with NA", "boolean"],
)
def test_frames_of_several_numeric_types_are_numbers(value, expected):
    array = as_data_array("X", value)
    np.testing.assert_array_equal(array, np.asarray(expected))
    assert array.dtype.kind == np.asarray(expected).dtype.kind


def test_columns_of_text_are_refused():
    with pytest.raises(ValueError, match=r"'X' has dtype object; numbers are needed\. Encode categories"):
        as_data_array("X", FRAME.assign(d=["1", "2", "3"]))


@pytest.mark.parametrize("dtype, advice", [(complex, ""), ("datetime64[s]", " Convert times to numbers, .*")])
def test_what_is_no_category_is_refused_without_advice_on_categories(dtype, advice):
    with pytest.raises(ValueError, match=rf"'x' has dtype .*; numbers are needed\.{advice}$"):
        as_data_array("x", np.arange(3).astype(dtype))


@pytest.mark.parametrize("method", [RVGA, BONG, FixedPointVI])
def test_values_that_single_precision_does_not_hold_are_named(method):
    rows = data()
    rows["x"] = np.where(np.arange(NUM_ROWS) == 7, 1e39, rows["x"] / 100)
    with jax.enable_x64(False), pytest.raises(ValueError, match=r"'x' holds .* 1e\+39 in row 7, too large for float32"):
        method(regression).run(rows, progress_bar=False)


def test_values_that_single_precision_does_not_hold_are_missing_rows():
    rows = data()
    rows["x"] = np.where(np.isin(np.arange(NUM_ROWS), [7, 150]), -1e39, rows["x"] / 100)
    with jax.enable_x64(False):
        for blocks in (rows, iter([rows])):
            posterior = RVGA(regression).run(blocks, on_bad_row="skip", progress_bar=False)
            np.testing.assert_array_equal(posterior.info["skipped_rows"], [7, 150])


@pytest.mark.parametrize(
    "value, other",
    [
        (dist.HalfCauchy(100.0), dist.HalfCauchy(10.0)),
        (dist.Normal(np.zeros(3), 1.0).to_event(1), dist.Normal(np.zeros(4), 1.0).to_event(1)),
        (dist.TransformedDistribution(dist.Normal(0, 1), dist.transforms.ExpTransform()), dist.Normal(0, 1)),
        ({"priors": [dist.Gamma(2.0, 1.0)]}, {"priors": [dist.Gamma(1.0, 1.0)]}),
    ],
    ids=["distribution", "event", "transformed", "nested"],
)
def test_keywords_that_are_distributions_are_known_again(value, other):
    """Else each run would compile anew."""
    kept = snapshot({"keyword": value})["keyword"]
    assert equal(value, kept)
    assert not equal(value, other)
