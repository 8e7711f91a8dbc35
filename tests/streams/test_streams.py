"""Streams: however the rows come, whatever interrupts them, the posterior is the same."""

import functools
import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA, ParquetRows, Posterior, RandomWalk, files
from numpyro_rvga.core.updates.state import Absorbed, Count
from numpyro_rvga.streams import block_plan, opening, recursive_pass
from numpyro_rvga.streams import order as order_module
from numpyro_rvga.streams import passes as passes_module
from numpyro_rvga.streams import source as source_module
from numpyro_rvga.streams.memory import RowMemory, inexactness, unranked

NUM_ROWS = 1500
STEPS = ("jit(_joint)", "jit(_stream)", "jit(_one_block)")


def logistic(X, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def linear(X, y=None, t=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)


def log_rates(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jax.numpy.exp(X @ w)), obs=y)


def truncated(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.factor("window", jax.numpy.where(X[:, 0] > 99.0, -jax.numpy.inf, -0.5 * (y - X @ w) ** 2))


def make(kind="binary", n=NUM_ROWS, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X, w = rng.normal(size=(n, d)), rng.normal(size=d)
    if kind == "binary":
        return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-X @ w))).astype(float)}
    if kind == "counts":
        return {"X": X, "y": rng.poisson(np.exp(0.5 * X @ w)).astype(float)}
    return {"X": X, "y": X @ w + rng.normal(size=n)}


ROWS = make()
# Every part of a pass: the joint first block, several pieces of several blocks, kept rows, the prior's true terms.
DEFAULT = lambda **options: RVGA(logistic, first_block=150, memory=40, **options)  # noqa: E731
IN_ORDER = {"shuffle": False, "certify": False}  # rows at hand as if they came in a stream
METHODS = {
    "truncated": lambda: RVGA(truncated, block_size=8, **IN_ORDER),
    "default": lambda: DEFAULT(**IN_ORDER),
    "shuffled": DEFAULT,
    "explicit": lambda: RVGA(log_rates, scheme="explicit", **IN_ORDER),
    "drift": lambda: RVGA(linear, block_size=3, dynamics=RandomWalk(0.01, time="t")),
    "low-rank": lambda: BONG(logistic, family="low-rank", rank=2, shuffle=False),
    "sampled": lambda: BONG(logistic, family="diagonal", hessian="mc-ef", num_samples=20, shuffle=False),
}


@functools.cache
def method_of(name):
    """One for all tests: they share what is compiled."""
    return METHODS[name]()


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(block_plan, "MAX_CHUNK", 256)
    monkeypatch.setattr(block_plan, "DEFAULT_BLOCK", 64)
    monkeypatch.setattr("numpyro_rvga.streams.online_pass.CHUNK_BLOCKS", 64)


def rows_of(name):
    kinds = {"explicit": "counts", "drift": "continuous", "truncated": "continuous"}
    rows = make(kinds.get(name, "binary"))
    return rows | {"t": np.cumsum(np.resize([0.0, 0.0, 3.5, 1.0], NUM_ROWS))} if name == "drift" else rows


def run(method, rows, **kwargs):
    return method.run(rows, progress_bar=False, **kwargs)


def cut(rows, sizes):
    """Blocks of these sizes, again and again."""
    start, turn = 0, 0
    while start < len(rows["y"]):
        stop = start + sizes[turn % len(sizes)]
        yield {name: array[start:stop] for name, array in rows.items()}
        start, turn = stop, turn + 1


def assert_same(one, other, tolerance=1e-12):
    leaves = [jax.tree.leaves(p.gaussian) for p in (one, other)]
    for a, b in zip(*leaves):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)
    assert one.num_rows == other.num_rows
    assert (one.elbo is None) == (other.elbo is None)
    assert one.elbo is None or abs(one.elbo - other.elbo) < 1e-9 * abs(one.elbo)


def assert_identical(one, other):
    for a, b in zip(*[jax.tree.leaves(p.gaussian) for p in (one, other)]):
        np.testing.assert_array_equal(a, b)
    assert one.elbo == other.elbo
    assert {k: v for k, v in one.info.items() if np.ndim(v) == 0} == {
        k: v for k, v in other.info.items() if np.ndim(v) == 0
    }


# ---------------------------------------------------------------------- how the rows come
@pytest.mark.parametrize("name", ["default", "explicit", "low-rank"])
def test_the_posterior_does_not_depend_on_how_the_data_are_cut_and_one_run_is_one_compilation(name, count_compilations):
    rows, method = rows_of(name), method_of.__wrapped__(name)  # one that nothing has been compiled for

    def every_cut():
        whole = run(method, rows)
        for sizes in ([1], [7], [1000], np.random.default_rng(1).integers(1, 400, 50).tolist()):
            assert_same(run(method, cut(rows, sizes)), whole)

    compiled, _ = count_compilations(every_cut)
    steps = {step: count for step, count in compiled.items() if step in STEPS}
    assert steps and max(steps.values()) <= 2, steps  # arrays of known length have pieces of their own size


@pytest.mark.parametrize("num_rows", [140, 150, 151, 301])
def test_streams_and_arrays_around_the_size_of_the_first_block_agree(num_rows, monkeypatch):
    method = RVGA(logistic, memory=150, **IN_ORDER)
    method_rows = make(n=num_rows)
    monkeypatch.setattr(block_plan, "FIRST_BLOCK_ROWS", 150)
    monkeypatch.setattr(block_plan, "FIRST_BLOCK_ROWS_PER_PARAMETER", 1)
    assert_same(run(method, cut(method_rows, [40])), run(method, method_rows))


class Promising:
    """Blocks of a source that knows, or does not know, how many rows it has."""

    def __init__(self, rows, num_rows):
        self._rows, self.num_rows = rows, num_rows

    def __iter__(self):
        return self.from_row(0)

    def from_row(self, row):
        yield from cut({name: array[row:] for name, array in self._rows.items()}, [100])


@pytest.mark.parametrize(
    ("name", "num_rows"),  # in random order, no source is asked for more rows than it says it has
    [(name, NUM_ROWS + 200) for name in ("default", "shuffled", "low-rank")]
    + [(name, NUM_ROWS - 200) for name in ("default", "low-rank")],
)
def test_sources_that_do_not_hold_what_they_promise_are_refused(name, num_rows):
    with pytest.raises(ValueError, match=rf"end after {NUM_ROWS} rows.* rows|num_rows={num_rows}, and end after"):
        run(method_of(name), Promising(ROWS, num_rows))


def test_blocks_without_rows_are_passed_over():
    nothing = {"X": np.zeros((0, 3)), "y": np.zeros(0)}
    blocks = [nothing, *cut(ROWS, [100]), nothing]
    for data in (blocks, iter(blocks)):
        assert_same(run(method_of("default"), data), run(method_of("default"), ROWS))
    with pytest.raises(ValueError, match="must share their leading axis"):
        run(method_of("default"), [{"X": np.zeros((0, 3)), "y": np.zeros(5)}])


@pytest.mark.filterwarnings("ignore:the posteriors of the parts are merged once")
@pytest.mark.parametrize("name", ["default", "low-rank"])
def test_rows_are_counted_beyond_what_32_bits_hold(name):
    method = method_of(name)
    posterior = run(method, ROWS)
    many = 2**31 - 100
    before = posterior.state._replace(num_rows=Count.of(many))
    later = method.run(ROWS, init=before, progress_bar=False)
    assert later.num_rows == many + NUM_ROWS
    updated = method.update(before, {name: array[:64] for name, array in ROWS.items()})
    assert int(updated.num_rows) == many + 64
    other = method.run(make(seed=1), init=before, progress_bar=False)
    assert Posterior.merge([later, other]).num_rows == 2 * (many + NUM_ROWS)


def test_lists_as_loaders_give_them_are_positional():
    loader = [[block["X"], block["y"]] for block in cut(ROWS, [100])]
    assert_same(run(method_of("default"), loader), run(method_of("default"), ROWS))


def test_data_that_are_no_data_are_named():
    with pytest.raises(ValueError, match="an iterable of such blocks, not int"):
        run(method_of("default"), 3)


# ---------------------------------------------------------------------- checkpoints
class Stop(Exception):
    pass


def stopping(rows, after, size=50):
    for start, block in enumerate(cut(rows, [size])):
        if start * size >= after:
            raise Stop
        yield block


@pytest.mark.parametrize("name", METHODS)
def test_a_stopped_run_goes_on_to_the_bit(name, tmp_path):
    rows, method = rows_of(name), method_of(name)
    in_memory = name == "shuffled"
    whole, streamed = run(method, rows), None if in_memory else run(method, cut(rows, [50]))
    path = tmp_path / "run.ckpt"
    for moment, after in enumerate(np.random.default_rng(2).integers(50, 1200, 3)):
        file = path.with_suffix(f".{moment}")
        if in_memory:
            stopped_at = interrupt_after(method, rows, file, int(after))
        else:
            with pytest.raises(Stop):
                run(method, stopping(rows, after), checkpoint=file, every=100)
            stopped_at = int(method.state.num_rows)
        assert stopped_at < NUM_ROWS
        again = run(method, rows if in_memory else cut(rows, [17]), checkpoint=file, every=100, resume=True)
        assert_identical(again, whole if in_memory else streamed)
        assert_same(again, whole)


def interrupt_after(method, rows, file, after):
    """As Ctrl-C does, at some place of a run."""
    on_result = recursive_pass.RecursivePass.on_result

    def interrupted(self, state, rows, *rest):
        on_result(self, state, rows, *rest)
        if int(state.num_rows) >= after:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(recursive_pass.RecursivePass, "on_result", interrupted)
        run(method, rows, checkpoint=file, every=100)
    assert int(method.state.num_rows) >= after  # a usable state
    assert np.isfinite(method.posterior(method.state).mean).all()
    return int(method.state.num_rows)


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    method = method_of("default")
    first = run(method, ROWS, checkpoint=tmp_path / "run")
    assert_identical(run(method, ROWS, checkpoint=tmp_path / "run", resume=True), first)
    more = {name: np.concatenate([array, array[:100]]) for name, array in ROWS.items()}
    longer = run(method, cut(more, [90]), checkpoint=tmp_path / "run", resume=True)
    assert longer.num_rows == NUM_ROWS + 100  # the log of a service has grown


def test_prequential_densities_survive(tmp_path):
    method = method_of("low-rank")
    whole = run(method, ROWS, prequential="plugin")
    with pytest.raises(Stop):
        run(method, stopping(ROWS, 700), checkpoint=tmp_path / "run", every=100, prequential="plugin")
    again = run(method, ROWS, checkpoint=tmp_path / "run", resume=True, prequential="plugin")
    np.testing.assert_allclose(again.info["log_predictive"], whole.info["log_predictive"], rtol=1e-12)


SCRIPT = """
import sys, time
import numpy as np
sys.path.insert(0, {tests!r})
import test_streams as t

def slow(rows):
    for block in t.cut(rows, [50]):
        time.sleep(0.02)
        yield block

posterior = t.run(t.METHODS["drift"](), slow(t.rows_of("drift")), checkpoint={path!r}, every=50, resume=True)
np.savez({result!r}, mean=posterior.mean, root=posterior.gaussian.root)
"""


def test_a_killed_process_goes_on_to_the_bit(tmp_path):
    path, result = tmp_path / "run", tmp_path / "result.npz"
    script = SCRIPT.format(tests=str(Path(__file__).parent), path=str(path), result=str(result))
    process = subprocess.Popen([sys.executable, "-c", script])
    while not path.exists() and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL and not result.exists()
    subprocess.run([sys.executable, "-c", script], check=True)
    expected = run(method_of("drift"), rows_of("drift"))
    with np.load(result) as found:
        np.testing.assert_array_equal(found["mean"], expected.mean)
        np.testing.assert_array_equal(found["root"], expected.gaussian.root)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A checkpoint of a linear model in the middle of its data."""
    path = tmp_path_factory.mktemp("stopped") / "run"
    method, rows = RVGA(linear, block_size=5, **IN_ORDER), make("continuous")
    with pytest.raises(Stop):
        run(method, stopping(rows, 600), checkpoint=path, every=100)
    return method, rows, path


def test_checkpoints_are_not_overwritten_by_other_runs(stopped):
    method, rows, path = stopped
    before = path.read_bytes()
    with pytest.raises(ValueError, match="exists: pass resume=True"):
        run(method, rows, checkpoint=path)
    others = {
        "block was 5 and is 4": (RVGA(linear, block_size=4, **IN_ORDER), rows),
        "the beginning of the data": (method, {"X": rows["X"] + 1, "y": rows["y"]}),
        "the start differs": (RVGA(with_scale(2.0), block_size=5, **IN_ORDER), rows),
        "the likelihood of 'y' differs": (RVGA(with_scale(1.0, noise=3.0), block_size=5, **IN_ORDER), rows),
        "sites was": (RVGA(logistic, block_size=5, **IN_ORDER), ROWS),
        "certify was False and is True": (RVGA(linear, block_size=5, shuffle=False), rows),
        "method was 'RVGA' and is 'BONG'": (BONG(linear), rows),
    }
    for message, (other, data) in others.items():
        with pytest.raises(ValueError, match=f"(?s)checkpoint of another run.*{message}"):
            run(other, cut(data, [100]), checkpoint=path, resume=True)
    assert path.read_bytes() == before


def test_what_a_run_was_given_besides_the_data_tells_it_from_others(stopped):
    method, rows, path = stopped
    others = {"rng_key was": {"rng_key": jax.random.key(1)}, "on_bad_row was 'raise'": {"on_bad_row": "skip"}}
    for message, options in others.items():
        with pytest.raises(ValueError, match=f"checkpoint of another run: {message}"):
            run(method, cut(rows, [100]), checkpoint=path, resume=True, **options)


def links(link):
    """Likelihoods that are the same where w is zero."""

    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", link(X @ w), obs=y)

    return model


FIRST = {"first_block": 150, "memory": 0, **IN_ORDER}
LINKS = {
    "logit": links(lambda u: dist.Bernoulli(logits=u)),
    "probit": links(lambda u: dist.Bernoulli(probs=jax.scipy.special.ndtr(u))),
    "reversed": links(lambda u: dist.Bernoulli(logits=-u)),
    "far away": links(lambda u: dist.Bernoulli(logits=jax.numpy.where(u > 1e3, 2 * u, u))),
}


def test_models_that_agree_where_theta_is_zero_are_other_models(tmp_path):
    with pytest.raises(Stop):
        run(RVGA(LINKS["logit"], **FIRST), stopping(ROWS, 600), checkpoint=tmp_path / "run", every=100)
    for name in ("probit", "reversed", "far away"):
        with pytest.raises(ValueError, match="checkpoint of another run: the likelihood of 'y' differs"):
            run(RVGA(LINKS[name], **FIRST), cut(ROWS, [50]), checkpoint=tmp_path / "run", every=100, resume=True)
    again = links(lambda u: dist.Bernoulli(logits=u))  # written anew, as after a restart
    resumed = run(RVGA(again, **FIRST), cut(ROWS, [50]), checkpoint=tmp_path / "run", every=100, resume=True)
    assert resumed.num_rows == NUM_ROWS


@pytest.mark.parametrize("change", ["last digits", "rows are missing", "columns", "order"])
@pytest.mark.parametrize("name", ["default", "shuffled"])
def test_rows_that_were_not_taken_in_are_other_data(name, change, tmp_path):
    rows, method = rows_of(name), method_of(name)
    if name == "shuffled":
        interrupt_after(method, rows, tmp_path / "run", 400)
    else:
        with pytest.raises(Stop):
            run(method, stopping(rows, 600), checkpoint=tmp_path / "run", every=100)
    first, later = np.arange(32), np.arange(32, NUM_ROWS)
    other = {name: array.copy() for name, array in rows.items()}
    if change == "last digits":
        other["X"][32:, 1] *= 1 + 1e-15
    elif change == "rows are missing":
        other = {name: np.concatenate([array[first], array[132:]]) for name, array in other.items()}
    elif change == "columns":
        other["X"][32:] = other["X"][32:, ::-1]
    else:
        other = {name: np.concatenate([array[first], array[later[::-1]]]) for name, array in other.items()}
    message = "the beginning of the data differs" if name == "shuffled" else "rows that are not the first of these data"
    with pytest.raises(ValueError, match=f"checkpoint of another run: .*{message}"):
        run(method, other, checkpoint=tmp_path / "run", every=100, resume=True)


def with_scale(prior, noise=1.0):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, prior).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(X @ w, noise), obs=y)

    return model


def test_data_that_end_before_the_checkpoint_are_refused(stopped):
    method, rows, path = stopped
    with pytest.raises(ValueError, match="the data end after 100 rows"):
        run(method, cut({n: a[:100] for n, a in rows.items()}, [10]), checkpoint=path, resume=True)


def test_no_damaged_file_is_read_as_another(tmp_path):
    file = tmp_path / "run"
    intact = {"mean": np.arange(3.0), "place": np.arange(4)}
    files.write(file, "checkpoint", {"contents": {}}, intact)
    contents = file.read_bytes()
    rng = np.random.default_rng(3)
    damaged = [contents[:length] for length in range(len(contents))]
    damaged += [rng.bytes(length) for length in (1, 10, 1000)]
    for place in rng.integers(0, len(contents), 600):
        flipped = bytearray(contents)
        flipped[place] ^= 1 << int(rng.integers(8))
        damaged.append(bytes(flipped))
    num_harmless = 0
    for case in damaged:
        file.write_bytes(case)
        try:
            _, found = files.read(file, "checkpoint")
        except ValueError as error:
            assert "run is damaged" in str(error)
        else:  # a byte that means nothing, such as the time in the archive's table
            num_harmless += 1
            assert all(np.array_equal(found[name], intact[name]) for name in intact)
    assert num_harmless < 300


def test_damaged_checkpoints_are_refused_kept_and_name_the_one_before(stopped, tmp_path):
    method, rows, path = stopped
    file, contents = tmp_path / "run", path.read_bytes()
    file.with_name("run.previous").write_bytes(contents)
    newer = tmp_path / "newer"
    files.write(newer, "checkpoint", {"format_version": 99, "contents": {}}, {})
    for case, message in [(contents[:-30], "is damaged"), (newer.read_bytes(), "update numpyro_rvga")]:
        file.write_bytes(case)
        with pytest.raises(ValueError, match=rf"(?s){message}.*run\.previous"):
            run(method, cut(rows, [100]), checkpoint=file, resume=True)
        assert file.read_bytes() == case


def test_posteriors_are_no_checkpoints(stopped, tmp_path):
    method, rows, _ = stopped
    run(method, rows).save(tmp_path / "posterior")
    with pytest.raises(ValueError, match="holds a numpyro_rvga posterior, not a numpyro_rvga checkpoint"):
        run(method, rows, checkpoint=tmp_path / "posterior", resume=True)


def test_a_run_stopped_between_two_checkpoints_names_goes_on_from_the_one_before(stopped, tmp_path):
    method, rows, path = stopped
    (tmp_path / "run.previous").write_bytes(path.read_bytes())
    assert_same(run(method, cut(rows, [100]), checkpoint=tmp_path / "run", resume=True), run(method, rows))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"every": 0}, "every must be a positive number of rows"),
        ({"resume": True}, "resume=True needs checkpoint="),
        ({"checkpoint": "/no/such/folder/x"}, "folder /no/such/folder does not exist"),
        ({"on_bad_row": "drop"}, "on_bad_row must be one of 'raise', 'skip'"),
    ],
)
def test_unusable_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run(method_of("default"), ROWS, **options)


def test_a_checkpoint_in_the_way_is_refused_before_a_row_is_read(tmp_path):
    def blocks():
        raise AssertionError("a row was asked for")
        yield

    (tmp_path / "run").touch()
    with pytest.raises(ValueError, match="exists: pass resume=True"):
        run(method_of("default"), blocks(), checkpoint=tmp_path / "run")


# ---------------------------------------------------------------------- files beside the checkpoint
def test_files_that_are_in_the_way_are_kept(stopped, tmp_path):
    method, rows, path = stopped
    for content, resume in ((b"my notes", True), (b"my notes", False), (path.read_bytes(), False)):
        (tmp_path / "run.previous").write_bytes(content)
        (tmp_path / "run").unlink(missing_ok=True)
        with pytest.raises(ValueError, match=r"run\.previous"):
            run(method, rows, checkpoint=tmp_path / "run", resume=resume)
        assert (tmp_path / "run.previous").read_bytes() == content
    (tmp_path / "run").write_bytes(path.read_bytes())
    (tmp_path / "run.previous").write_bytes(b"my notes")
    with pytest.raises(ValueError, match=r"run\.previous would be overwritten"):
        run(method, rows, checkpoint=tmp_path / "run", resume=True)
    (tmp_path / "run.previous").unlink()
    (tmp_path / ".run.lock").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"\.run\.lock is another program's"):
        run(method, rows, checkpoint=tmp_path / "run", resume=True)


def test_two_runs_that_write_to_one_checkpoint_are_noticed(stopped, tmp_path):
    method, rows, _ = stopped

    def blocks():
        for number, block in enumerate(cut(rows, [100])):
            if number == 5:
                with pytest.raises(ValueError, match=r"is being written by another run \(process \d+\)"):
                    run(method, rows, checkpoint=tmp_path / "run", resume=True)
            yield block

    run(method, blocks(), checkpoint=tmp_path / "run", every=100)
    assert sorted(os.listdir(tmp_path)) == ["run", "run.previous"]
    run(method, rows, checkpoint=tmp_path / "run", resume=True)


def test_a_lock_that_a_killed_process_left_is_no_lock(stopped, tmp_path):
    method, rows, _ = stopped
    (tmp_path / ".run.lock").write_text("12345")
    (tmp_path / f".run.{'a' * 32}").write_bytes(b"half a checkpoint")
    run(method, rows, checkpoint=tmp_path / "run")
    assert sorted(os.listdir(tmp_path)) == ["run"]


def test_links_to_checkpoints_stay_links(stopped, tmp_path):
    method, rows, _ = stopped
    (tmp_path / "disk").mkdir()
    (tmp_path / "run").symlink_to(tmp_path / "disk" / "data")
    run(method, cut(rows, [100]), checkpoint=tmp_path / "run", every=300)
    assert (tmp_path / "run").is_symlink()
    assert sorted(os.listdir(tmp_path / "disk")) == ["data", "data.previous"]


def test_folders_that_cannot_be_written_to_are_found_out_before_a_row_is_read(tmp_path, monkeypatch):
    def blocks():
        raise AssertionError("a row was asked for")
        yield

    def read_only(*args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(files, "open", read_only, raising=False)
    with pytest.raises(ValueError, match=r"cannot be written: .*Permission denied"):
        run(method_of("default"), blocks(), checkpoint=tmp_path / "run")


def test_forged_checkpoints_are_refused(stopped, tmp_path):
    method, rows, path = stopped
    metadata, arrays = files.read(path, "checkpoint")
    for name in metadata["contents"]:
        for contents in (
            {key: value for key, value in metadata["contents"].items() if key != name},
            metadata["contents"] | {name: {"scalar": 3.5}},
        ):
            files.write(tmp_path / "run", "checkpoint", {"contents": contents}, arrays)
            with pytest.raises(ValueError, match=r"no run can go on from this|rows that are not the first"):
                run(method, cut(rows, [100]), checkpoint=tmp_path / "run", resume=True)


# ---------------------------------------------------------------------- bad rows
SPOILING = {
    "explicit": [("X", np.nan), ("y", np.inf), ("y", -3.0), ("X", 1e200)],
    "truncated": [("X", np.nan), ("X", 100.0)],
    "drift": [("X", np.nan), ("y", np.inf)],
}


def spoilt(rows, places, name="default"):
    """Values that are not finite, or outside the support, or of likelihood zero, or beyond computation."""
    rows = {name: array.copy() for name, array in rows.items()}
    spoil = SPOILING.get(name, [("X", np.nan), ("y", np.inf), ("y", -3.0)])
    for turn, place in enumerate(places):
        name, value = spoil[turn % len(spoil)]
        rows[name][place] = value
    return rows


BAD = [0, 1, 30, 31, 149, 150, 700, 701, 702, 703, 1499]


@pytest.mark.parametrize("source", ["array", "blocks"])
@pytest.mark.parametrize("name", ["default", "explicit", "low-rank", "truncated"])
def test_bad_rows_are_left_out_and_listed(name, source):
    method = method_of(name)
    rows = spoilt(rows_of(name), BAD, name)
    found = run(method, rows if source == "array" else cut(rows, [90]), on_bad_row="skip")
    assert found.info["num_skipped"] == len(BAD)
    assert found.info["skipped_rows"].tolist() == BAD
    assert found.num_rows == NUM_ROWS - len(BAD)
    others = {n: np.delete(a, BAD, axis=0) for n, a in rows.items()}
    assert_identical_gaussians(found, run(method, others if source == "array" else cut(others, [77])))


def assert_identical_gaussians(one, other):
    for a, b in zip(*[jax.tree.leaves(p.gaussian) for p in (one, other)]):
        np.testing.assert_array_equal(a, b)
    assert one.elbo == other.elbo


@pytest.mark.parametrize("name", ["shuffled", "drift", "looked at", "epochs of updates"])
def test_skipped_rows_might_as_well_never_have_been_there(name):
    """To the bit: in random order, with dynamics, with looks at all rows, and after a posterior."""
    rows = spoilt(rows_of(name), BAD, name)
    others = {n: np.delete(a, BAD, axis=0) for n, a in rows.items()}
    method = {
        "looked at": lambda: DEFAULT(shuffle=False),
        "epochs of updates": lambda: BONG(logistic, hessian="auto"),
    }.get(name, functools.partial(method_of, name))()
    assert_identical_gaussians(run(method, rows, on_bad_row="skip"), run(method, others))


@pytest.mark.parametrize("kind", ["list", "files"])
def test_skipped_rows_of_files_and_lists_in_random_order_leave_no_trace_either(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(source_module, "PIECE", 150)
    monkeypatch.setattr(order_module, "BUFFER_NUMBERS", 400)  # several rounds, whose lengths depend on all rows
    monkeypatch.setattr(order_module, "OPEN_NUMBERS", 400)
    for module in (opening, passes_module):
        monkeypatch.setattr(module, "SLICE", 64)
    rows, kept = spoilt(ROWS, BAD), np.setdiff1d(np.arange(NUM_ROWS), BAD)
    others = {name: array[kept] for name, array in rows.items()}
    if kind == "list":
        sources = list(cut(rows, [90])), list(cut(others, [70]))
    else:
        groups = np.arange(NUM_ROWS) // 100  # of rows, less the bad ones in the second file
        sources = [in_files(tmp_path / "all", rows, groups), in_files(tmp_path / "others", others, groups[kept])]
    found, expected = (run(RVGA(logistic, first_block=150), source, on_bad_row="skip") for source in sources)
    assert found.info["skipped_rows"].tolist() == BAD and expected.info["num_skipped"] == 0
    assert_identical_gaussians(found, expected)


def in_files(path, rows, groups):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table(dict(zip("abc", rows["X"].T)) | {"y": rows["y"]})
    with parquet.ParquetWriter(path, table.schema) as writer:
        for start, stop in itertools.pairwise([*np.flatnonzero(np.diff(groups, prepend=-1)), len(groups)]):
            writer.write_table(table.slice(start, stop - start))
    return ParquetRows(path, {"X": ["a", "b", "c"], "y": "y"})


def test_skipped_rows_are_numbered_as_in_the_data_when_shuffled():
    found = run(method_of("shuffled"), spoilt(ROWS, BAD), on_bad_row="skip")
    assert sorted(found.info["skipped_rows"].tolist()) == BAD


@pytest.mark.parametrize(
    "method",
    [
        RVGA(linear, block_size=1, shuffle=True),
        RVGA(linear, block_size=50, shuffle=True),
        BONG(linear, hessian="auto", block_size=50, shuffle=True),
        BONG(linear, hessian="auto", rule="blr", learning_rate=0.1, num_epochs=1, block_size=50, shuffle=True),
    ],
    ids=["row by row", "blocks", "online", "epochs"],
)
def test_rows_that_are_refused_are_numbered_as_in_the_data_when_shuffled(method):
    rows = make("continuous")
    for array in rows.values():
        array[7] *= 1e200
    with pytest.raises(ValueError, match="gives row 7 a log-likelihood of -inf"):
        run(method, rows)


def test_only_so_many_skipped_rows_are_listed(monkeypatch):
    monkeypatch.setattr(passes_module, "MAX_LISTED", 4)
    found = run(method_of("explicit"), spoilt(rows_of("explicit"), BAD, "explicit"), on_bad_row="skip")
    assert found.info["num_skipped"] == len(BAD) and found.info["skipped_rows"].tolist() == BAD[:4]


def test_skipped_rows_survive_a_checkpoint(tmp_path):
    method, rows = method_of("default"), spoilt(ROWS, BAD)
    with pytest.raises(Stop):
        run(method, stopping(rows, 800), checkpoint=tmp_path / "run", every=100, on_bad_row="skip")
    again = run(method, cut(rows, [50]), checkpoint=tmp_path / "run", resume=True, on_bad_row="skip")
    assert again.info["skipped_rows"].tolist() == BAD


def test_a_stream_may_begin_with_bad_rows():
    rows = spoilt(ROWS, [])
    rows["X"][:100] = np.nan
    found = run(method_of("default"), cut(rows, [50]), on_bad_row="skip")
    assert found.info["skipped_rows"].tolist() == list(range(100)) and found.num_rows == NUM_ROWS - 100


def test_bad_rows_may_be_all_that_is_read_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(passes_module, "SLICE", 64)
    rows = {name: np.resize(array, (5000, *array.shape[1:])) for name, array in ROWS.items()}
    rows["X"][1000:4500] = np.nan
    method, path = BONG(logistic, hessian="auto", block_size=1), tmp_path / "run"
    with pytest.raises(Stop):
        run(method, stopping(rows, 4600), checkpoint=path, every=100, on_bad_row="skip")
    found = run(method, cut(rows, [50]), checkpoint=path, resume=True, on_bad_row="skip")
    assert found.num_rows == 1500 and found.info["num_skipped"] == 3500


def test_data_of_bad_rows_alone_are_refused():
    rows = {"X": np.full((60, 3), np.nan), "y": np.zeros(60)}
    with pytest.raises(ValueError, match="rows all hold NaN"):
        run(method_of("default"), rows, on_bad_row="skip")
    with pytest.raises(ValueError, match="none of the 60 rows can be used"):
        run(method_of("default"), {"X": np.ones((60, 3)), "y": np.full(60, -1.0)}, on_bad_row="skip")


@pytest.mark.parametrize("piece", [1, 7, 50, 200])
def test_a_memory_holds_the_rows_of_the_largest_errors(piece):
    error = np.random.default_rng(0).gamma(0.5, size=(200, 1))
    memory = RowMemory(20)
    for start in range(0, 200, piece):
        part = error[start : start + piece]
        seen = Absorbed(np.zeros((len(part), 1, 1)), np.zeros((len(part), 1, 1, 1)), part)
        offered = unranked({"row": np.arange(start, start + len(part))}, (seen,), start)
        memory.add(offered._replace(priority=inexactness(offered.absorbed)))
    kept = memory.items()
    expected = np.argsort(-error[:, 0])[:20]
    np.testing.assert_array_equal(kept.rows["row"], expected)
    np.testing.assert_array_equal(kept.positions, expected)
    np.testing.assert_array_equal(kept.absorbed[0].error, error[expected])
    assert memory.num_seen == 200 and not memory.holds_all
