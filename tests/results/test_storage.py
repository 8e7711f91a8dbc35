"""Posteriors in files: what comes back, and which files are refused."""

import json
import os
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gaussian_posteriors import constrained, constrained_posterior, posterior_of, regression

from numpyro_rvga import BONG, RVGA, Posterior, files

KEY = jax.random.key(1)


@pytest.fixture(scope="module")
def posterior():
    return constrained_posterior()


@pytest.fixture
def saved(posterior, tmp_path):
    path = tmp_path / "posterior.npz"
    posterior.save(path)
    return path


def with_keywords(x, y=None, *, center, transform=None, labels=()):
    slope = numpyro.sample("slope", dist.Normal(center["at"], 1.0))
    with numpyro.plate("rows", x.shape[0]):
        location = slope * (x if transform is None else transform(x)) + len(labels)
        numpyro.sample("y", dist.Normal(location, 1.0), obs=y)


def keyword_posterior(**model_kwargs):
    data = {"x": np.arange(3.0), "y": np.ones(3)}
    return posterior_of(with_keywords, data, np.array([0.3]), np.array([[0.1]]), **model_kwargs)


# ---------------------------------------------------------------------- what comes back
def test_everything_comes_back_exactly(posterior, tmp_path):
    info = {"scheme": "implicit", "converged": True, "sizes": [1, 2.5], "trace": np.arange(3), "nested": {"k": (None,)}}
    full = Posterior(posterior.program, posterior.gaussian, -1 / 3, info, num_rows=7)
    full.save(tmp_path / "q")
    loaded = Posterior.load(tmp_path / "q", constrained)
    assert loaded.mean.dtype == posterior.mean.dtype
    np.testing.assert_array_equal(loaded.mean, posterior.mean)
    np.testing.assert_array_equal(loaded.scale, posterior.scale)
    assert (loaded.elbo, loaded.num_rows, loaded.site_names) == (-1 / 3, 7, posterior.site_names)
    np.testing.assert_array_equal(loaded.info["trace"], np.arange(3))
    plain = {name: value for name, value in info.items() if name != "trace"}
    assert {name: value for name, value in loaded.info.items() if name != "trace"} == plain


def test_loaded_posteriors_sample_and_predict_alike(saved, posterior):
    loaded = Posterior.load(saved, constrained)
    data = {"y": np.array([0.3, 0.1, 2.0, 1.0])}
    for before, after in (
        (posterior.sample_posterior(KEY, (3,)), loaded.sample_posterior(KEY, (3,))),
        (posterior.predictive(KEY, data, 3), loaded.predictive(KEY, data, 3)),
    ):
        assert before.keys() == after.keys()
        for name, value in before.items():
            np.testing.assert_array_equal(after[name], value)


def straight(X, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    precision = numpyro.sample("precision", dist.Gamma(3.0, 2.0))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ b, precision**-0.5), obs=y)


METHODS = {
    "RVGA": (lambda: RVGA(straight), 1e-4),
    "by site": (lambda: RVGA(straight, family={"precision": "gamma"}), 1e-4),
    "BONG": (lambda: BONG(straight, family="diagonal", block_size=10), 0.1),  # which draws
}


@pytest.mark.skipif(not hasattr(jax, "enable_x64"), reason="the precision is one for the whole process")
@pytest.mark.parametrize("make, tolerance", METHODS.values(), ids=METHODS)
def test_posteriors_in_single_precision_go_on_in_double(make, tolerance, tmp_path):
    rng, method = np.random.default_rng(0), make()
    X = rng.normal(size=(60, 2))
    data = {"X": X, "y": X @ [0.5, -0.2] + 0.3 * rng.normal(size=60)}
    first, second = ({n: x[half] for n, x in data.items()} for half in (slice(30), slice(30, None)))
    with jax.enable_x64(False):
        single = method.run(first, progress_bar=False)
        single.save(tmp_path / "q")
    assert single.mean.dtype == jnp.float32
    loaded = Posterior.load(tmp_path / "q", straight)
    assert loaded.mean.dtype == jnp.float64
    np.testing.assert_allclose(loaded.mean, single.mean, rtol=1e-6)
    double = method.run(first, progress_bar=False).update(second, progress_bar=False)
    for later in (single.update(second, progress_bar=False), method.run(second, init=loaded, progress_bar=False)):
        assert later.mean.dtype == jnp.float64
        deviation = np.sqrt(np.diagonal(double.covariance))
        np.testing.assert_allclose((later.mean - double.mean) / deviation, 0, atol=tolerance)
        np.testing.assert_allclose(later.gaussian.deviation() / deviation, 1, atol=tolerance)
    double.save(tmp_path / "q")
    with jax.enable_x64(False):
        again = method.run(first, init=Posterior.load(tmp_path / "q", straight), progress_bar=False)
        assert again.mean.dtype == jnp.float32 and again.num_rows == 90


def test_model_keywords_come_back(tmp_path):
    posterior = keyword_posterior(center={"at": jnp.float32(2.0)}, labels=("a", "b"))
    posterior.save(tmp_path / "q")
    loaded = Posterior.load(tmp_path / "q", with_keywords)
    assert loaded.program.model_kwargs == {"center": {"at": 2.0}, "labels": ("a", "b")}
    np.testing.assert_allclose(loaded.program.log_prior(jnp.zeros(1)), posterior.program.log_prior(jnp.zeros(1)))


def test_the_stand_in_for_an_improper_prior_comes_back(tmp_path):
    def flat(y):
        location = numpyro.sample("location", dist.ImproperUniform(dist.constraints.real, (), ()))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(location, 1.0), obs=y)

    posterior = RVGA(flat, improper_prior_scale=30.0).run({"y": np.arange(4.0)}, progress_bar=False)
    posterior.save(tmp_path / "q")
    loaded = Posterior.load(tmp_path / "q", flat)
    theta = jnp.array([2.0])
    np.testing.assert_allclose(loaded.program.log_prior(theta), dist.Normal(0.0, 30.0).log_prob(2.0), rtol=1e-12)


def sizes_in_jax(group, y):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0).expand([int(jnp.max(jnp.asarray(group))) + 1]))
    numpyro.sample("y", dist.Normal(level[group], 0.3), obs=y)


def steps_that_index_data(group, y):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    _, changes = jax.lax.scan(lambda carry, t: (carry, y[t + 1] - slope * y[t]), 0.0, jnp.arange(len(y) - 1))
    numpyro.factor("changes", dist.Normal(0.0, 1.0).log_prob(changes).sum())


@pytest.mark.parametrize("model", [sizes_in_jax, steps_that_index_data])
def test_models_that_read_their_data_in_jax_come_back(model, tmp_path):
    posterior = RVGA(model).run({"group": np.arange(12) % 3, "y": np.linspace(0.0, 1.0, 12)}, progress_bar=False)
    posterior.save(tmp_path / "posterior.npz")
    again = Posterior.load(tmp_path / "posterior.npz", model)
    for name, values in posterior.sample_posterior(KEY, (3,)).items():
        np.testing.assert_array_equal(again.sample_posterior(KEY, (3,))[name], values)


def test_keywords_that_are_not_plain_are_asked_for(tmp_path):
    posterior = keyword_posterior(center={"at": 1.0}, transform=jnp.exp)
    posterior.save(tmp_path / "q")
    with pytest.raises(ValueError, match="'transform'"):
        Posterior.load(tmp_path / "q", with_keywords)
    loaded = Posterior.load(tmp_path / "q", with_keywords, transform=jnp.exp)
    theta, rows = jnp.ones(1), {"x": np.ones(2), "y": np.ones(2)}
    expected = posterior.program.log_likelihood(theta, rows)["y"]
    np.testing.assert_allclose(loaded.program.log_likelihood(theta, rows)["y"], expected)


def test_info_that_is_not_plain_is_refused_by_name(posterior, tmp_path):
    odd = Posterior(posterior.program, posterior.gaussian, None, {"key": object()}, num_rows=1)
    with pytest.raises(ValueError, match="info/key"):
        odd.save(tmp_path / "q")
    assert os.listdir(tmp_path) == []


def test_files_hold_plain_arrays_and_json_alone(saved):
    with np.load(saved, allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    assert json.loads(str(arrays.pop("metadata")))["format_version"] == 1
    assert len(str(arrays.pop("digest"))) == 64
    assert all(array.dtype.kind in "biuf" for array in arrays.values())


# ---------------------------------------------------------------------- writing
def test_failed_writes_leave_the_old_file(saved, posterior, monkeypatch):
    before = saved.read_bytes()

    def half_written(file, **arrays):
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez", half_written)
    with pytest.raises(OSError, match="no space left"):
        posterior.save(saved)
    assert saved.read_bytes() == before
    assert os.listdir(saved.parent) == [saved.name]


def test_files_are_complete_before_they_take_their_name(posterior, tmp_path, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda descriptor: (events.append("fsync"), fsync(descriptor))[1])
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b))[1])
    posterior.save(tmp_path / "q")
    assert events == ["fsync", "replace"]


# ---------------------------------------------------------------------- refusals
@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.9, 0.99])
def test_truncated_files_are_refused(saved, share):
    contents = saved.read_bytes()
    saved.write_bytes(contents[: int(share * len(contents))])
    with pytest.raises(ValueError, match="damaged"):
        Posterior.load(saved, constrained)


@pytest.mark.parametrize("seed", range(20))
def test_no_damaged_byte_changes_an_array(saved, seed):
    arrays = files.read(saved, "posterior")[1]
    contents = bytearray(saved.read_bytes())
    contents[np.random.default_rng(seed).integers(len(contents))] ^= 0xFF
    saved.write_bytes(contents)
    try:
        found = files.read(saved, "posterior")[1]
    except ValueError:
        return
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)


def foreign_archive(path):
    np.savez(path, mean=np.zeros(3))


def foreign_array(path):
    with open(path, "wb") as file:
        np.save(file, np.zeros(3))


def pickled_objects(path):
    np.savez(path, metadata=np.array([{"kind": "numpyro_rvga posterior"}], dtype=object))


@pytest.mark.parametrize("make", [foreign_archive, foreign_array, pickled_objects, lambda path: path.write_text("{}")])
def test_foreign_files_are_refused(tmp_path, make):
    path = tmp_path / "foreign.npz"
    make(path)
    with pytest.raises(ValueError, match="not a file that numpyro_rvga wrote"):
        Posterior.load(path, constrained)


def test_files_of_another_kind_are_refused(tmp_path):
    files.write(tmp_path / "q", "checkpoint", {}, {})
    with pytest.raises(ValueError, match="holds a numpyro_rvga checkpoint"):
        Posterior.load(tmp_path / "q", constrained)


def test_files_of_a_newer_version_are_refused(posterior, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "FORMAT_VERSION", 2)
    posterior.save(tmp_path / "q")
    monkeypatch.undo()
    with pytest.raises(ValueError, match="format version 2"):
        Posterior.load(tmp_path / "q", constrained)


def other_shape(y=None):
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(shift.sum() + share, deviation), obs=y)


def other_order(y=None):
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(shift.sum() + share, deviation), obs=y)


@pytest.mark.parametrize("model", [other_shape, other_order])
def test_models_with_other_sites_are_refused(saved, model):
    with pytest.raises(ValueError, match="shift\\(2,\\), share\\(\\), deviation\\(\\)"):
        Posterior.load(saved, model)


def test_models_with_other_arguments_are_refused(saved):
    with pytest.raises(ValueError, match="other arguments"):
        Posterior.load(saved, regression)


def other_likelihood(y=None):
    """The same latent sites, in the same order."""
    shift = numpyro.sample("shift", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    share = numpyro.sample("share", dist.Beta(2.0, 2.0))
    deviation = numpyro.sample("deviation", dist.HalfNormal(1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.StudentT(5.0, shift.sum() + share, deviation), obs=y)


def test_models_with_other_densities_are_refused_unless_a_keyword_is_replaced(saved, tmp_path):
    with pytest.raises(ValueError, match="belongs to another model than the given one"):
        Posterior.load(saved, other_likelihood)
    keyword_posterior(center={"at": 1.0}, transform=jnp.exp).save(tmp_path / "q")
    with pytest.raises(ValueError, match="the likelihood of 'y' differs"):
        Posterior.load(tmp_path / "q", with_keywords, transform=jnp.sin)
    moved = Posterior.load(tmp_path / "q", with_keywords, transform=jnp.exp, center={"at": 2.0})
    assert moved.program.model_kwargs["center"] == {"at": 2.0}


def test_forged_files_are_refused_without_a_trace_of_how_they_are_read(saved):
    metadata, arrays = files.read(saved, "posterior")
    for name in metadata["contents"]:
        others = {key: value for key, value in metadata["contents"].items() if key != name}
        files.write(saved, "posterior", {"layout": metadata["layout"], "contents": others}, arrays)
        with pytest.raises(ValueError, match="not a posterior that numpyro_rvga wrote"):
            Posterior.load(saved, constrained)


def test_archives_that_would_grow_in_memory_are_refused_at_once(tmp_path):
    np.savez_compressed(tmp_path / "bomb.npz", digest=np.array("0"), metadata=np.array("{}"), x=np.zeros(2**24))
    assert (tmp_path / "bomb.npz").stat().st_size < 2**18
    tracemalloc.start()
    with pytest.raises(ValueError, match="not a file that numpyro_rvga wrote"):
        files.read(tmp_path / "bomb.npz", "posterior")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


def test_links_stay_links_and_temporary_files_of_killed_writers_go(posterior, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "q").symlink_to(tmp_path / "elsewhere" / "q")
    left = tmp_path / "elsewhere" / f".q.{'0' * 32}"
    foreign = tmp_path / "elsewhere" / ".q.notes"
    for file in (left, foreign):
        file.write_bytes(b"half of it")
    posterior.save(tmp_path / "q")
    posterior.save(tmp_path / "q")
    assert (tmp_path / "q").is_symlink() and sorted(os.listdir(tmp_path / "elsewhere")) == [".q.notes", "q"]
    np.testing.assert_array_equal(Posterior.load(tmp_path / "q", constrained).mean, posterior.mean)


def test_missing_files_are_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        Posterior.load(tmp_path / "nowhere", constrained)
