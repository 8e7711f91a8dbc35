"""Streams in which groups are new at any time: the exact posterior where all is Gaussian, else near the best one."""

import contextlib
import gc
import sqlite3
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from group_models import dense_posterior, design_of, off
from shared_methods import shared

from numpyro_rvga import BONG, RVGA, FixedPointVI

PLATE = {"plate": "users", "index": "user", "size": "num_users"}


def measured(user, X, num_users, y=None):
    """Linear and Gaussian, with a vector for each group, and a fact of each group."""
    centre = numpyro.sample("centre", dist.MultivariateNormal(jnp.ones(2), jnp.array([[2.0, 0.5], [0.5, 1.0]])))
    slope = numpyro.sample("slope", dist.Normal(0.5, 2))
    with numpyro.plate("users", num_users):
        own = numpyro.sample("own", dist.Normal(centre, 0.7).to_event(1))
        numpyro.sample("believed", dist.Normal(slope, 3.0), obs=0.8)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(jnp.sum(own[user] * X[:, :2], axis=1) + slope * X[:, 2], 0.5), obs=y)


def choices(user, x, num_users, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([2]).to_event(1))
    with numpyro.plate("users", num_users):
        above = numpyro.sample("above", dist.Normal(0, scale))
        level = numpyro.deterministic("level", slopes[1] + above)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=level[user] + slopes[0] * x), obs=y)


def counts(user, num_users, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("users", num_users):
        level = numpyro.sample("level", dist.Normal(mean, scale))
    with numpyro.plate("rows", len(user)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level[user])), obs=y)


def in_order(data, order):
    return {name: array[order] for name, array in data.items()}


@pytest.fixture(scope="module")
def linear():
    """Rows of seven groups, and the dense posterior: mean, covariance, evidence."""
    rng, n = np.random.default_rng(1), 7
    user = np.concatenate([rng.integers(0, n, 40), np.arange(n)])
    X = rng.normal(size=(len(user), 3))
    y = X @ [1.0, 0.0, -1.0] + rng.normal(size=len(user))
    believed = np.zeros((n, 3 + 2 * n))  # the fact of each group
    believed[:, 2] = 1.0
    design, noise_variance = np.concatenate([design_of(user, X, n), believed]), np.repeat([0.25, 9.0], [len(user), n])
    exact = dense_posterior(design, np.concatenate([y, np.full(n, 0.8)]), noise_variance, n)
    data = {"user": np.char.add("u", user.astype(str)), "X": X, "y": y}
    return data, *exact


def check_linear(stream, linear):
    """Of all rows."""
    data, mean, covariance, evidence = linear
    found = stream.posterior()
    assert (found.num_rows, found.num_groups) == (len(data["y"]), 7)
    np.testing.assert_allclose(found.mean, mean[:3], atol=1e-9)
    np.testing.assert_allclose(found.covariance, covariance[:3, :3], atol=1e-11)
    np.testing.assert_allclose(found.elbo, evidence, atol=1e-8)
    draws = found.sample_posterior(jax.random.key(0), (40_000,), groups=["u4", "u1"])
    every = np.concatenate([draws["centre"], draws["own"][:, 0], draws["own"][:, 1]], axis=1)
    places = [0, 1, 11, 12, 5, 6]
    np.testing.assert_allclose(every.mean(axis=0), mean[places], atol=0.02)
    np.testing.assert_allclose(np.cov(every.T), covariance[np.ix_(places, places)], atol=0.02)


@pytest.mark.parametrize("order", ["as it comes", "by group"])
def test_linear_gaussian_streams_are_exact(linear, order):
    data = linear[0]
    rows = np.arange(47) if order == "as it comes" else np.argsort(data["user"], kind="stable")
    stream = shared(RVGA, measured).stream_groups(**PLATE, block_size=10)
    stream.update(in_order(data, rows[:23]))
    stream.update([in_order(data, rows[23:25]), in_order(data, rows[25:])])
    check_linear(stream, linear)


def test_groups_that_went_to_the_file_come_back_with_their_rows(linear, tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    data, mean, covariance, _ = linear
    rows = np.argsort(data["user"], kind="stable")
    rows = np.concatenate([rows[::2], rows[1::2]])  # every group twice, apart
    options = {**PLATE, "block_size": 5, "file": tmp_path / "users.db", "groups_in_memory": 2}
    stream = shared(RVGA, measured).stream_groups(**options)
    stream.update(in_order(data, rows[:30]))
    stream.save()
    stream.update(in_order(data, rows[30:40]))
    with pytest.raises(ValueError, match=r"users.db cannot be opened .*Close that first"):
        shared(RVGA, measured).stream_groups(**options, resume=True)
    stream.close()  # what came after it was saved is lost
    again = shared(RVGA, measured).stream_groups(**options, resume=True)
    assert again.num_rows == 30
    again.update(in_order(data, rows[30:]))
    check_linear(again, linear)
    found = again.posterior(folder=tmp_path / "files")
    again.update(in_order(data, rows[:1]))
    table = parquet.read_table(tmp_path / "files").sort_by("user")
    assert table["user"].to_pylist() == [f"u{i}" for i in range(7)]
    np.testing.assert_allclose(table["own[1].mean"], mean[4::2], atol=1e-9)
    np.testing.assert_allclose(table["own[1].sd"], np.sqrt(np.diagonal(covariance))[4::2], atol=1e-9)
    assert found.sample_posterior(jax.random.key(0), (5,), groups=["u3"])["own"].shape == (5, 1, 2)


def test_a_stream_that_nobody_has_any_more_leaves_its_file(linear, tmp_path):
    """Python 3.13 and later warn of a database that is not closed, and warnings are errors here."""
    options = {**PLATE, "file": tmp_path / "users.db"}
    stream = shared(RVGA, measured).stream_groups(**options)
    stream.update(in_order(linear[0], np.arange(5)))
    stream.save()
    del stream
    gc.collect()
    assert shared(RVGA, measured).stream_groups(**options, resume=True).num_rows == 5


@pytest.fixture(scope="module")
def chosen():
    rng = np.random.default_rng(0)
    user, level = np.repeat(np.arange(60), 4), rng.normal(0.4, 0.8, 60)
    x = rng.normal(size=len(user))
    return {"user": user, "x": x, "y": (level[user] + 0.7 * x > rng.logistic(size=len(user))).astype(int)}


@pytest.fixture(scope="module")
def best(chosen):
    return shared(FixedPointVI, choices).run(chosen, num_users=60, progress_bar=False)


@pytest.mark.parametrize("order, in_memory, tolerance", [("random", None, 0.02), ("by group", 40, 0.2)])
def test_choices_meet_the_best_gaussian_of_all_rows(chosen, best, order, in_memory, tolerance, tmp_path):
    rows = np.random.default_rng(1).permutation(240) if order == "random" else np.arange(240)
    options = {**PLATE, "block_size": 60, "file": tmp_path / "users.db", "groups_in_memory": in_memory}
    stream = shared(RVGA, choices).stream_groups(**options)
    stream.update(in_order(chosen, rows[:150]))
    stream.save()
    stream.close()
    stream = shared(RVGA, choices).stream_groups(**options, resume=True)
    stream.update(in_order(chosen, rows[150:]))
    early = stream.posterior(settle=False)
    assert off(early, best) < 1 and not early.info["settled"]
    found = stream.posterior()
    assert off(found, best) < tolerance and abs(found.info["log_evidence_estimate"] - best.elbo) < tolerance
    assert found.elbo is None and found.info["settled"]
    draws, whole = (
        found.sample_posterior(jax.random.key(0), (20_000,), groups=[41, 7])["level"],
        best.sample_posterior(jax.random.key(1), (20_000,))["level"][:, [41, 7]],
    )
    np.testing.assert_allclose(draws.mean(axis=0), whole.mean(axis=0), atol=0.03)
    np.testing.assert_allclose(np.cov(draws.T), np.cov(whole.T), atol=0.03)


@pytest.mark.parametrize("order, tolerance", [("random", 0.02), ("groups with few first", 0.1)])
def test_a_sample_of_the_rows_of_a_group_stands_for_all(order, tolerance):
    rng = np.random.default_rng(2)
    user = np.repeat(np.arange(40), 12)
    data = {"user": user, "y": rng.poisson(np.exp(rng.normal(1, 0.7, 40))[user])}
    best = shared(FixedPointVI, counts).run(data, num_users=40, progress_bar=False)
    share = np.bincount(user, data["y"])[user]
    rows = rng.permutation(len(user)) if order == "random" else np.lexsort((user, share))
    with jax.enable_x64(False):
        stream = shared(RVGA, counts).stream_groups(**PLATE, block_size=100, rows_kept=3)
        stream.update(in_order(data, rows))
        found = stream.posterior()
        assert found.mean.dtype == np.float32
    assert off(found, best) < min(tolerance, 3 * found.info["sampling_error"])
    assert found.info["sampling_error"] < 0.1


def test_groups_without_rows_are_drawn_given_the_shared_sites(chosen, tmp_path):
    stream = shared(RVGA, choices).stream_groups(**PLATE)
    stream.update(chosen)
    found = stream.posterior()
    draws = found.sample_posterior(jax.random.key(0), (2000,), groups=[3], new_groups=2)
    assert draws["above"].shape == draws["level"].shape == (2000, 3)
    np.testing.assert_allclose(draws["level"], draws["slopes"][:, 1:] + draws["above"], rtol=1e-12)
    standard = draws["above"][:, 1:] / draws["scale"][:, None]
    np.testing.assert_allclose(standard.mean(axis=0), 0, atol=0.1)
    np.testing.assert_allclose(np.cov(standard.T), np.eye(2), atol=0.15)
    assert found.sample_posterior(jax.random.key(0), (4,), new_groups=70)["level"].shape == (4, 70)
    rows = {"user": np.array([-8, 3, -8, 41, 3]), "x": np.array([0.0, 1.0, 0.0, 50.0, -50.0])}
    y = np.asarray(found.predictive(jax.random.key(1), rows, 4000)["y"])
    assert y.shape == (4000, 5)
    draws = found.sample_posterior(jax.random.key(2), (4000,), groups=[3], new_groups=1)
    probability = jax.nn.sigmoid(draws["level"] + draws["slopes"][:, :1] * np.array([1.0, 0.0]))
    np.testing.assert_allclose(y.mean(axis=0)[[1, 0]], probability.mean(axis=0), atol=0.04)
    np.testing.assert_allclose((y[:, 0] * y[:, 2]).mean(), (probability[:, 1] ** 2).mean(), atol=0.04)  # one group
    np.testing.assert_allclose(y.mean(axis=0)[3:], [1, 0], atol=0.02)
    with pytest.raises(ValueError, match="labels of groups are integers in the stream, and <U1 here"):
        found.predictive(jax.random.key(1), {"user": ["3"], "x": [1.0]})
    with pytest.raises(ValueError, match="new_groups must be an integer of at least 0, not -1"):
        found.sample_posterior(jax.random.key(0), new_groups=-1)
    pytest.importorskip("pyarrow")
    again = stream.posterior(folder=tmp_path / "users").predictive(jax.random.key(1), rows, 4000)["y"]
    np.testing.assert_allclose(again.mean(axis=0), y.mean(axis=0), atol=0.04)
    with pytest.raises(ValueError, match=r"labels of groups are int64 in .*, and <U1 here"):
        stream.posterior(folder=tmp_path / "more").predictive(jax.random.key(1), {"user": ["3"], "x": [1.0]})


def test_a_sample_that_cannot_stand_for_all_is_told_of(chosen):
    stream = shared(RVGA, choices).stream_groups(**PLATE, block_size=60, rows_kept=1)
    stream.update(in_order(chosen, np.argsort(chosen["y"], kind="stable")))
    with pytest.warns(UserWarning, match="of groups with more rows than are kept|more rows than the 1 that are kept"):
        stream.posterior()


def test_bad_rows_are_skipped_as_if_they_had_never_been_there(chosen):
    rows = np.random.default_rng(1).permutation(120)
    bad = {name: array.copy() for name, array in in_order(chosen, rows).items()}
    bad["x"][[0, 50]], bad["y"][[3, 119]] = np.nan, 7
    good = in_order(bad, np.setdiff1d(np.arange(120), [0, 3, 50, 119]))
    found = []
    for data in (bad, good):
        stream = shared(RVGA, choices).stream_groups(**PLATE)
        stream.update(data, on_bad_row="skip")
        found.append(stream.posterior())
    np.testing.assert_array_equal(found[0].mean, found[1].mean)
    assert found[0].num_rows == 116 and [x.info["num_skipped"] for x in found] == [4, 0]
    with pytest.raises(ValueError, match="on_bad_row"):
        stream.update(good, on_bad_row="drop")


def test_numbers_that_the_type_of_earlier_rows_cannot_hold_are_refused(chosen):
    stream = shared(RVGA, choices).stream_groups(**PLATE)
    first = {**in_order(chosen, np.arange(40)), "x": np.arange(40) % 3}
    stream.update(first)
    stream.update({**first, "x": first["x"] * 1.0, "y": first["y"] * 1.0})
    with pytest.raises(ValueError, match=r"'x' was of type int64 in the first rows .* begin with rows of that type"):
        stream.update({**first, "x": first["x"] + 0.5})
    again = shared(RVGA, choices).stream_groups(**PLATE)
    again.update(first)
    again.update(first)
    np.testing.assert_array_equal(stream.posterior().mean, again.posterior().mean)


def test_what_no_stream_can_use_is_refused(chosen, tmp_path):
    def made(model=choices, method=RVGA, **options):
        return method(model).stream_groups(**PLATE | options)

    stream = made()
    with pytest.raises(ValueError, match="no rows yet: call update first"):
        stream.posterior()
    with pytest.raises(ValueError, match="has no file: make it with stream_groups"):
        stream.save()
    first = in_order(chosen, np.arange(40))
    stream.update(first)
    found = stream.posterior()
    with pytest.raises(ValueError, match="has had no rows of group 99"):
        found.sample_posterior(jax.random.key(0), groups=[3, 99])
    bad = {**first, "x": np.where(np.arange(40) == 7, np.nan, first["x"])}
    with pytest.raises(ValueError, match="'x' holds NaN in row 7"):
        stream.update(bad)
    with pytest.raises(ValueError, match="'user' has no label in row 42"):
        stream.update(
            [
                first | {"user": first["user"].astype(object)},
                first | {"user": [None if i == 2 else 1 for i in range(40)]},
            ]
        )
    with pytest.raises(ValueError, match="site 'y': row 9 of array 'y' holds 2"):
        stream.update({**first, "y": np.where(np.arange(40) == 9, 2, first["y"])})
    assert stream.num_rows == 40
    with pytest.raises(ValueError, match="labels that are strings from row 0 on, and integers before"):
        stream.update(first | {"user": first["user"].astype(str)})
    mixed = np.array([1, *"1" * 39], dtype=object)
    with pytest.raises(ValueError, match="'user' has labels that are integers, and '1' in row 1"):
        stream.update(first | {"user": mixed})
    with pytest.raises(ValueError, match="'user' has labels that are integers, and '1' in row 1"):
        stream.update(first | {"user": mixed.tolist()})
    with pytest.raises(ValueError, match="'user' has labels that are integers, and True in row 3"):
        stream.update(first | {"user": [1, 2, 3, True] + [4] * 36})
    with pytest.raises(ValueError, match="labels that are numbers with a point from row 0 on, and integers before"):
        stream.update(first | {"user": first["user"] + 0.5})
    with pytest.raises(ValueError, match="the data have no array 'user'"):
        made(lambda num_users, x, user=None, y=None: choices(user, x, num_users, y)).update(
            {"x": first["x"], "y": first["y"]}
        )
    stream.update(first)
    with pytest.raises(ValueError, match="taken in rows since this posterior was made"):
        found.sample_posterior(jax.random.key(0), groups=[3])
    with pytest.raises(ValueError, match="groups are for RVGA"):
        RVGA(choices, scheme="ekf").stream_groups(**PLATE)
    with pytest.raises(ValueError, match="rows_kept must be an integer of at least 1, not 0"):
        made(rows_kept=0)
    with pytest.raises(ValueError, match="need a file"):
        made(groups_in_memory=3)
    assert not hasattr(BONG, "stream_groups")


def test_files_of_other_streams_are_refused(linear, tmp_path):
    file = tmp_path / "users.db"
    data = in_order(linear[0], np.arange(12))
    stream = shared(RVGA, measured).stream_groups(**PLATE, file=file)
    stream.update(data)
    stream.save()
    stream.close()
    with pytest.raises(ValueError, match="exists: pass resume=True"):
        shared(RVGA, measured).stream_groups(**PLATE, file=file)
    with pytest.raises(ValueError, match="rows_kept=16, not 4"):
        shared(RVGA, measured).stream_groups(**PLATE, file=file, resume=True, rows_kept=4)

    def other(user, X, num_users, y=None):
        with numpyro.handlers.scale(scale=2.0):
            measured(user, X, num_users, y)

    with pytest.raises(ValueError, match="belongs to another model than the given one"):
        RVGA(other).stream_groups(**PLATE, file=file, resume=True)
    with jax.enable_x64(False), pytest.raises(ValueError, match="a stream in float64, and JAX computes in float32"):
        shared(RVGA, measured).stream_groups(**PLATE, file=file, resume=True)
    (tmp_path / "text").write_text("no database " * 100)
    with pytest.raises(ValueError, match="is no file of a stream of groups"):
        shared(RVGA, measured).stream_groups(**PLATE, file=tmp_path / "text", resume=True)
    with contextlib.closing(sqlite3.connect(file)) as database, database:
        database.execute("UPDATE vectors SET vector = x'00'")
    with pytest.raises(ValueError, match="is damaged"):
        shared(RVGA, measured).stream_groups(**PLATE, file=file, resume=True)


def test_what_is_kept_of_a_group_is_short(chosen):
    """With k = 3 shared entries and one of its own: its posterior given these, two factors of 4, and four rows of three
    numbers with their count; zeros at the end take none. A look at all groups, in pieces, takes as much again."""
    stream = shared(RVGA, choices).stream_groups(**PLATE, block_size=240)
    for first in range(0, 600, 60):
        stream.update({**chosen, "user": chosen["user"] + first})
    all_numbers = 8 * (1 + 3 + 1 + 2 * (1 + 4 + 10) + 1 + 4 * 3)
    assert 0.95 * all_numbers <= stream.num_bytes / 600 <= all_numbers
    stream.settle()
    stream.update({**chosen, "user": chosen["user"] + 540})
    tracemalloc.start()
    stream.settle()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak / 600 < 1500
