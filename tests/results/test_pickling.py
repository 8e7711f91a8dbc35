"""Posteriors go to other processes, whatever made them."""

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior

RNG = np.random.default_rng(8)
DATA = {"x": RNG.normal(size=(40, 2)), "y": RNG.integers(0, 2, 40)}
REAL = {"x": DATA["x"], "y": RNG.normal(size=40)}
KEY = jax.random.key(1)


def logistic(x, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


def centered(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.deterministic("level", jnp.mean(y) + b[0])
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal((x - jnp.mean(x, 0)) @ b, 1.0), obs=y)


def learned(x, y):
    scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, scale), obs=y)


def scaled_by_data(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, jnp.std(y)).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)


def mixture(x, y):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        state = numpyro.sample("state", dist.Bernoulli(0.3))
        numpyro.sample("y", dist.Normal(x @ b + state, 1.0), obs=y)


def hierarchical(x, y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    b = numpyro.sample("b", dist.Normal(0.0, tau).expand([2]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ b, 1.0), obs=y)


def of_fixed_size(x, y=None):
    b = numpyro.sample("b", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    with numpyro.plate("rows", 40):
        numpyro.sample("y", dist.Bernoulli(logits=x @ b), obs=y)


CASES = {
    "RVGA": (RVGA, logistic, DATA, {}),
    "FixedPointVI": (FixedPointVI, logistic, DATA, {}),
    "BONG": (BONG, logistic, DATA, {}),
    "fixed size": (RVGA, of_fixed_size, DATA, {}),
    "joint": (RVGA, centered, REAL, {}),
    "learned": (FixedPointVI, learned, REAL, {}),
    "prior of the data": (RVGA, scaled_by_data, REAL, {}),
    "latents of rows": (RVGA, mixture, REAL, {"local": "marginal"}),
    "integrated": (FixedPointVI, hierarchical, REAL, {"integrate": "auto"}),
}


@pytest.mark.parametrize("case", CASES)
def test_pickled_posteriors_are_the_same(case):
    method, model, data, options = CASES[case]
    before = method(model, **options).run(data, progress_bar=False)
    before.sample_posterior(KEY)  # compiles what is not to be pickled
    after = pickle.loads(pickle.dumps(before))
    assert repr(after) == repr(before) and after.info.keys() == before.info.keys()
    for one, other in zip(*(jax.tree.leaves(p.sample_posterior(KEY, (3,))) for p in (before, after))):
        np.testing.assert_allclose(one, other, atol=1e-6)
    assert [p.params for p in (before, after)] == [before.params] * 2
    np.testing.assert_allclose(*(float(p.khat(data, num_samples=200).khat) for p in (before, after)), atol=1e-3)


@pytest.mark.filterwarnings("ignore:the posteriors of the parts are merged once")
@pytest.mark.parametrize("method", [RVGA, BONG])
def test_pickled_posteriors_take_in_more_rows_and_are_merged(method):
    halves = [{name: array[half] for name, array in DATA.items()} for half in (slice(0, 20), slice(20, 40))]
    parts = [method(logistic).run(half, progress_bar=False) for half in halves]
    pickled = [pickle.loads(pickle.dumps(part)) for part in parts]
    for make in (lambda p: p[0].update(halves[1], progress_bar=False), Posterior.merge):
        expected, found = make(parts), make(pickled)
        np.testing.assert_allclose(found.mean, expected.mean, atol=1e-6)
        np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-6)


def test_another_process_reads_them(tmp_path):
    posterior = RVGA(logistic).run(DATA, progress_bar=False)
    (tmp_path / "posterior").write_bytes(pickle.dumps(posterior))
    code = f"import pickle; print(float(pickle.load(open({str(tmp_path / 'posterior')!r}, 'rb')).mean[0]))"
    paths = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": paths}, capture_output=True)
    np.testing.assert_allclose(float(done.stdout), posterior.mean[0], rtol=1e-6)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI, BONG])
def test_local_models_are_refused_and_copied(method):
    def local(x, y):
        logistic(x, y)

    posterior = method(local).run(DATA, progress_bar=False)
    with pytest.raises(pickle.PicklingError, match=r"the model cannot be pickled.*posterior\.save\(path\)"):
        pickle.dumps(posterior)
    np.testing.assert_array_equal(copy.deepcopy(posterior).mean, posterior.mean)
    np.testing.assert_array_equal(copy.copy(posterior).mean, posterior.mean)
