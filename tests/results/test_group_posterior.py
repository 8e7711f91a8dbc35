"""Posteriors of groups that are read from a stream and from files: what they refuse, and which of them are pickled."""

import pickle

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA

KEY = jax.random.key(0)


def levels(user, num_users, y=None):
    mean = numpyro.sample("mean", dist.Normal(0.0, 2.0))
    with numpyro.plate("users", num_users):
        level = numpyro.sample("level", dist.Normal(mean, 1.0))
    with numpyro.plate("rows", len(user)):
        numpyro.sample("y", dist.Normal(level[user], 0.5), obs=y)


@pytest.fixture(scope="module")
def posteriors(tmp_path_factory):
    stream = RVGA(levels).stream_groups(plate="users", index="user", size="num_users")
    user = np.arange(30) % 5
    stream.update({"user": user, "y": user + np.random.default_rng(0).normal(size=30)})
    return {"stream": stream.posterior(), "files": stream.posterior(tmp_path_factory.mktemp("groups"))}


@pytest.mark.parametrize("groups", ["stream", "files"])
def test_labels_of_another_kind_are_refused(posteriors, groups):
    posterior = posteriors[groups]
    with pytest.raises(ValueError, match=r"labels of groups are int.*, and <U1 here: convert them"):
        posterior.sample_posterior(KEY, (5,), groups=["1"])
    with pytest.raises(ValueError, match=r"labels of groups are int.*, and <U1 here: convert them"):
        posterior.predictive(KEY, {"user": np.array(["1"])}, num_samples=2)
    assert posterior.sample_posterior(KEY, (5,), groups=[3, 1])["level"].shape == (5, 2)


def test_numbers_of_draws_that_are_none_are_refused(posteriors):
    with pytest.raises(ValueError, match=r"must be a tuple, not 5: for one axis, \(5,\)"):
        posteriors["stream"].sample_posterior(KEY, 5)
    with pytest.raises(ValueError, match="num_samples must be a positive integer, not 0"):
        posteriors["stream"].predictive(KEY, {"user": np.array([1])}, num_samples=0)


def test_a_posterior_with_files_is_pickled_and_one_of_a_stream_says_so(posteriors):
    again = pickle.loads(pickle.dumps(posteriors["files"]))
    drawn = [posterior.sample_posterior(KEY, (5,), groups=[3, 1]) for posterior in (again, posteriors["files"])]
    jax.tree.map(np.testing.assert_array_equal, *drawn)
    with pytest.raises(pickle.PicklingError, match=r"from a stream.*stream\.posterior\(folder=\.\.\.\)"):
        pickle.dumps(posteriors["stream"])
