"""Parts of the data on a Dask cluster, merged."""

import os
import signal
import threading
import time
from types import SimpleNamespace

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from clusters import QUIET

from numpyro_rvga import BONG, RVGA, FixedPointVI, ParquetRows, Posterior, RandomWalk

dask_distributed = pytest.importorskip("distributed")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from numpyro_rvga import clusters, distributed  # noqa: E402

pytestmark = QUIET
COLUMNS = {"X": ["a", "b"], "y": "y"}


def model(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, scale), obs=y)


class SlowRows(ParquetRows):
    """Rows that leave the time to kill who reads them, who leaves a note."""

    def from_row(self, row):
        path = os.environ["RVGA_TEST_NOTES"]
        with open(os.path.join(path, f"{os.getpid()}-{time.time_ns()}"), "w"):
            pass
        time.sleep(0.1)
        yield from super().from_row(row)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 3000))
    path = tmp_path_factory.mktemp("rows")
    pq.write_table(
        pa.table({"a": a, "b": b, "y": a - b + rng.normal(size=3000)}), path / "0.parquet", row_group_size=500
    )
    return path


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    notes = tmp_path_factory.mktemp("notes")
    os.environ["RVGA_TEST_NOTES"] = str(notes)
    with (
        dask_distributed.LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0") as cluster,
        dask_distributed.Client(cluster) as client,
    ):
        client.notes = notes
        yield client


def assert_same(found, expected):
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-9)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=1e-8)
    assert found.num_rows == expected.num_rows == 3000


def kill_who_works_next(notes, left):
    """The process that leaves the next note, but this one, which looks at the first rows too."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        new = set(os.listdir(notes)) - left
        pids = {int(note.split("-")[0]) for note in new} - {os.getpid()}
        if pids:
            os.kill(pids.pop(), signal.SIGKILL)
            return
        time.sleep(0.02)


def test_a_worker_that_is_killed_in_every_round_changes_nothing(client, folder, monkeypatch):
    parts = ParquetRows(folder, COLUMNS).split(3)
    method = RVGA(model)
    slow = SlowRows(folder, COLUMNS).split(3)
    asked, threads = clusters.RunCluster._asked, []

    def ask_and_kill(self, *task):
        threads.append(threading.Thread(target=kill_who_works_next, args=(client.notes, set(os.listdir(client.notes)))))
        threads[-1].start()
        return asked(self, *task)

    monkeypatch.setattr(clusters.RunCluster, "_asked", ask_and_kill)
    found = distributed.run(method, slow, rounds=2, client=client, progress_bar=False)
    for thread in threads:
        thread.join()
    assert len(threads) == 3 and found.info["rounds"] == 2 and found.info["merge_error"] < 0.01
    expected = Posterior.merge([method.run(part, progress_bar=False) for part in parts], data=parts, rounds=2)
    assert_same(found, expected)
    table = pq.read_table(folder / "0.parquet")
    data = {"X": np.stack([table["a"], table["b"]], axis=1), "y": np.asarray(table["y"])}
    best = FixedPointVI(model).run(data, progress_bar=False)
    assert (abs(found.mean - best.mean) / best.gaussian.deviation()).max() < 0.01
    assert abs(found.elbo - best.elbo) < 0.01
    assert found.info["merged"] == 3 and [info["num_rows"] for info in found.info["parts"]] == [
        p.num_rows for p in parts
    ]
    assert found.update(next(iter(parts[0])), progress_bar=False).num_rows > 3000


def levels(user, num_users, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    with numpyro.plate("users", num_users):
        level = numpyro.sample("level", dist.Normal(mean, 0.7))
    with numpyro.plate("rows", len(user)):
        numpyro.sample("y", dist.Normal(level[user], 0.5), obs=y)


def test_a_worker_that_is_killed_with_groups_of_its_own_changes_nothing(client, tmp_path, monkeypatch):
    rng = np.random.default_rng(3)
    user = np.concatenate([np.arange(40), rng.integers(0, 40, 80)])
    y = rng.normal(1, 0.7, 40)[user] + 0.5 * rng.normal(size=120)
    parts, asked, killed = [{"user": user[user % 2 == k], "y": y[user % 2 == k]} for k in (0, 1)], [], []
    told = clusters.GroupCluster.messages

    def tell_and_kill(self, places, step):
        asked.append(step)
        if len(asked) in (2, 3):
            (address, *_) = self._client.who_has(self._parts)[self._parts[0].key]
            killed.append(self._client.run(os.getpid, workers=[address])[address])
            os.kill(killed[-1], signal.SIGKILL)
        return told(self, places, step)

    monkeypatch.setattr(clusters.GroupCluster, "messages", tell_and_kill)
    options = {"plate": "users", "index": "user", "size": "num_users", "folder": tmp_path, "client": client}
    found = distributed.run_groups(RVGA(levels), parts, progress_bar=False, **options)
    assert len(set(killed)) == 2 and len(asked) >= 4

    count, average = np.bincount(user), np.bincount(user, y) / np.bincount(user)
    weight = 1 / (0.49 + 0.25 / count)
    precision = 0.25 + weight.sum()
    np.testing.assert_allclose(found.mean[0], weight @ average / precision, atol=1e-6)
    np.testing.assert_allclose(found.covariance[0, 0], 1 / precision, rtol=1e-6)
    table = pq.read_table(tmp_path)
    own = np.argsort(table["user"].to_numpy())
    given = 1 / (1 / 0.49 + count / 0.25)
    expected = given * (found.mean[0] / 0.49 + count * average / 0.25)
    np.testing.assert_allclose(table["level.mean"].to_numpy()[own], expected, atol=1e-6)
    deviation = np.sqrt(given + (given / 0.49) ** 2 / precision)
    np.testing.assert_allclose(table["level.sd"].to_numpy()[own], deviation, rtol=1e-6)


def test_parts_that_are_sorted_by_outcome_begin_at_a_sample_that_workers_draw(client):
    rng = np.random.default_rng(4)
    X = rng.normal(size=(3000, 2))
    y = np.where(rng.random(3000) < 0.01, np.nan, X @ [1.0, -1.0] + rng.normal(size=3000))
    order = np.argsort(y, kind="stable")
    parts = [{"X": X[i], "y": y[i]} for i in np.array_split(order, 4)]
    options = {"on_bad_row": "skip", "progress_bar": False}
    found = distributed.run(RVGA(model), parts, client=client, **options)
    method = RVGA(model)
    expected = Posterior.merge([method.run(part, **options) for part in parts], data=parts)
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-9)
    np.testing.assert_allclose(found.info["merge_errors"], expected.info["merge_errors"], rtol=1e-3)
    assert found.info["rounds"] <= 4 and found.num_rows == np.isfinite(y).sum()


def test_bong_and_arrays_run_on_clusters_too(client):
    rng = np.random.default_rng(1)
    X = rng.normal(size=(300, 2))
    y = X @ [1.0, -1.0] + rng.normal(size=300)
    parts = [{"X": X[i : i + 100], "y": y[i : i + 100]} for i in (0, 100, 200)]
    parts[1]["y"][5] = np.nan
    method = BONG(model, family="diagonal", hessian="auto")
    with client.as_current(), pytest.warns(UserWarning, match="merged once, .* use fewer and larger parts, or RVGA"):
        found = distributed.run(method, parts, on_bad_row="skip", progress_bar=False)
    with pytest.warns(UserWarning, match="merged once"):
        expected = Posterior.merge([method.run(part, progress_bar=False, on_bad_row="skip") for part in parts])
    np.testing.assert_allclose(found.mean, expected.mean, rtol=1e-9)
    assert found.num_rows == 299
    assert [info["num_skipped"] for info in found.info["parts"]] == [0, 1, 0]


def test_unusable_parts_are_refused(client):
    with pytest.raises(ValueError, match="several rounds are for RVGA"):
        distributed.run(BONG(model), [{}], rounds=2, client=client)
    with pytest.raises(ValueError, match="there are no parts"):
        distributed.run(RVGA(model), [], client=client)
    with pytest.raises(ValueError, match="dynamics cannot be merged"):
        distributed.run(RVGA(model, dynamics=RandomWalk(0.1)), [{}], client=client)


class Counted:
    """Blocks of which one cannot be used, or not be read; each reading leaves a note."""

    def __init__(self, notes, error):
        self._notes, self._error = str(notes), error

    def __iter__(self):
        with open(os.path.join(self._notes, f"{time.time_ns()}"), "w"):
            pass
        yield {"X": np.ones((100, 2)), "y": np.zeros(100)}
        if self._error is not None:
            raise self._error
        yield {"X": np.ones((3, 2)), "y": np.array([0, np.nan, 0])}


def test_errors_name_part_and_row_and_only_what_may_succeed_is_tried_again(client, tmp_path):
    rng = np.random.default_rng(2)
    good = {"X": rng.normal(size=(50, 2)), "y": rng.normal(size=50)}
    (tmp_path / "rows").mkdir()
    with pytest.raises(ValueError, match=r"^part 1: data array 'y' holds NaN in row 101"):
        distributed.run(RVGA(model), [good, Counted(tmp_path / "rows", None)], client=client)
    assert len(os.listdir(tmp_path / "rows")) == 1
    (tmp_path / "disk").mkdir()
    with pytest.raises(RuntimeError, match=r"^part 1: OSError: the disk is gone"):
        distributed.run(RVGA(model), [good, Counted(tmp_path / "disk", OSError("the disk is gone"))], client=client)
    assert len(os.listdir(tmp_path / "disk")) == 1 + distributed.RETRIES
    with pytest.raises(ValueError, match=r"^part 0: the model needs 'X'"):
        distributed.run(RVGA(model), [{}, good], client=client)
    with pytest.raises(ValueError, match="part 1 and part 0 have taken in the same 50 rows"):
        distributed.run(RVGA(model), [good, good], client=client)


def test_results_that_come_late_or_twice_count_once_and_in_order(monkeypatch):
    tasks = [SimpleNamespace(key=f"part-{number}") for number in range(4)]
    batches = [[3, 1, 3], [2, 1, 0]]  # by number, as they come; the first batch ends before all have come
    bar = SimpleNamespace(count=0)
    bar.update = lambda: setattr(bar, "count", bar.count + 1)

    def as_completed(left, with_results, timeout):
        yield from [(tasks[number], number) for number in batches.pop(0)]
        if batches:
            raise TimeoutError

    monkeypatch.setattr(dask_distributed, "as_completed", as_completed)
    assert clusters.Cluster(SimpleNamespace(), 0, bar).results_of(tasks) == [0, 1, 2, 3]
    assert bar.count == 4


def test_a_cluster_without_workers_is_waited_for_with_a_warning(monkeypatch):
    monkeypatch.setattr(clusters, "PATIENCE", 0.2)
    rng, solve = np.random.default_rng(3), clusters.RunCluster.solve
    part = {"X": rng.normal(size=(50, 2)), "y": rng.normal(size=50)}
    with (
        dask_distributed.LocalCluster(n_workers=0, processes=False, dashboard_address=":0") as cluster,
        dask_distributed.Client(cluster) as client,
    ):
        later = threading.Timer(1.0, cluster.scale, [1])

        def solve_after_a_while(self):
            later.start()
            return solve(self)

        monkeypatch.setattr(clusters.RunCluster, "solve", solve_after_a_while)
        with pytest.warns(UserWarning, match="the cluster has no workers left"):
            found = distributed.run(RVGA(model), [part], rounds=1, client=client, progress_bar=False)
        later.join()
    assert found.num_rows == 50
