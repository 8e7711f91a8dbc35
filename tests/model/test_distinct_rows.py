"""Rows that occur several times: solves, bounds and log densities count each as often as it occurs."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density
from scipy.special import gammaln

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.model.data.row_set import num_distinct, once_each

NUM_ROWS = 9000
COUNTS = np.array([[2500, 1500], [1000, 4000]])  # x by y


def bernoulli(x, y=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 2))
    numpyro.sample("y", dist.Bernoulli(logits=a + b * x), obs=y)


def binomial(x, n, y=None):
    a = numpyro.sample("a", dist.Normal(0, 2))
    b = numpyro.sample("b", dist.Normal(0, 2))
    numpyro.sample("y", dist.Binomial(n, logits=a + b * x), obs=y)


@pytest.fixture(scope="module")
def data():
    cells = np.repeat(np.arange(4), COUNTS.reshape(-1))
    cells = np.random.default_rng(0).permutation(cells)
    return {"x": (cells // 2).astype(np.float32), "y": cells % 2}


@pytest.fixture(scope="module")
def counted():
    """Of the four cells' counts, which are sufficient: the posterior, and what the rows' bound is."""
    cells = {"x": np.array([0.0, 1.0], np.float32), "n": COUNTS.sum(axis=1), "y": COUNTS[:, 1]}
    posterior = FixedPointVI(binomial).run(cells, progress_bar=False)
    log_choose = gammaln(cells["n"] + 1) - gammaln(cells["y"] + 1) - gammaln(cells["n"] - cells["y"] + 1)
    return posterior, posterior.elbo - log_choose.sum()


def check_same(posterior, counted):
    other, bound = counted
    assert posterior.num_rows == NUM_ROWS
    deviations = np.sqrt(np.diag(other.covariance))
    assert np.abs(posterior.mean - other.mean).max() < 2e-3 * deviations.min()
    np.testing.assert_allclose(posterior.covariance, other.covariance, rtol=2e-3)
    assert posterior.elbo == pytest.approx(bound, abs=0.02)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_bernoulli_rows_of_four_kinds_are_their_counts(method, data, counted):
    check_same(method(bernoulli).run(data, progress_bar=False), counted)


def test_rows_of_few_kinds_are_one_solve_however_many(data):
    posterior = RVGA(bernoulli).run(data, progress_bar=False)
    assert posterior.info["looks"] == 0 and posterior.info["first_block"] == NUM_ROWS


def test_rows_left_out_do_not_count(data, counted):
    bad = {name: np.concatenate([array, array[:3]]) for name, array in data.items()}
    bad["x"][-3:] = np.nan
    posterior = RVGA(bernoulli).run(bad, on_bad_row="skip", progress_bar=False)
    check_same(posterior, counted)


def test_log_joint_is_that_of_the_model_on_all_rows(data):
    posterior = RVGA(bernoulli).run(data, progress_bar=False)
    theta = jnp.array([[-0.5, 1.8], [0.3, 0.1]])
    found = posterior.log_densities.joint(theta, data)
    expected = [log_density(bernoulli, (), data, {"a": a, "b": b})[0] for a, b in theta]
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_each_row_once_with_its_weight():
    rng = np.random.default_rng(1)
    rows = {"u": rng.integers(0, 3, (200, 2)), "v": rng.integers(0, 2, 200).astype(float)}
    rows["v"][rows["v"] > 0] = np.nan
    weights = rng.integers(0, 2, 200).astype(np.float32)
    once, sums = once_each(rows, weights)
    keys = [(*u, np.isnan(v)) for u, v in zip(rows["u"].tolist(), rows["v"])]
    expected = {key: sum(w for k, w in zip(keys, weights) if k == key) for key in keys}
    found = {(*u, np.isnan(v)): w for u, v, w in zip(once["u"].tolist(), once["v"], sums)}
    assert found == expected and len(sums) == len(expected) and sums.dtype == np.float32


def test_rows_of_which_most_are_distinct_stay():
    rows = {"u": np.concatenate([np.arange(60), np.arange(40)])}
    once, weights = once_each(rows, np.ones(100))
    assert once is rows and len(weights) == 100


@pytest.mark.parametrize("most, expected", [(5, 1000), (9, 1000), (10, 10), (600, 10)])
def test_distinct_rows_are_counted_up_to_a_limit(most, expected):
    assert num_distinct({"u": np.arange(1000) // 100}, most) == expected
