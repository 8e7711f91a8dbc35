"""Plates over the rows, and others that are as long or that are subsampled, against normal equations and sums over
states."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import logsumexp

from numpyro_rvga import BONG, RVGA, FixedPointVI

RNG = np.random.default_rng(0)
STREAM_HEAD = 32  # rows from which a stream's form is read
NUM_ROWS = 40
Y = 0.4 + RNG.normal(size=NUM_ROWS)


def items(y, K):
    """Outcomes (n, K) of K items, in a plate over these alone."""
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("items", K, dim=-1):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(mu + b, 1.0), obs=y)


def items_and_rows(y, K, num_rows=None):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("items", K, dim=-1):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0] if num_rows is None else num_rows, dim=-2):
            numpyro.sample("y", dist.Normal(mu + b, 1.0), obs=y)


def transposed(y, K):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("items", K, dim=-2):
        b = numpyro.sample("b", dist.Normal(0, 1))
        with numpyro.plate("rows", y.shape[0], dim=-1):
            numpyro.sample("y", dist.Normal(mu + b, 1.0), obs=y.T)


def rows_as_an_event(y, K):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("items", K):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal((mu + b)[:, None], 1.0).expand([K, y.shape[0]]).to_event(1), obs=y.T)


def factors_of_items(y, K):
    mu = numpyro.sample("mu", dist.Normal(0, 1))
    with numpyro.plate("items", K, dim=-1):
        b = numpyro.sample("b", dist.Normal(0, 1))
        numpyro.factor("y", dist.Normal(mu + b, 1.0).log_prob(y))


def of_items(outcomes):
    """Mean and covariance of (mu, b), by the normal equations."""
    count, size = outcomes.shape
    design = np.concatenate([np.ones((size, 1)), np.eye(size)], axis=1)
    precision = np.eye(size + 1) + count * design.T @ design
    return np.linalg.solve(precision, design.T @ outcomes.sum(0)), np.linalg.inv(precision)


def assert_is_of_items(posterior, outcomes):
    mean, covariance = of_items(outcomes)
    assert posterior.info["rows"] == "independent"
    np.testing.assert_allclose(posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, covariance, atol=1e-6)


@pytest.mark.parametrize(
    "model",
    [items, items_and_rows, transposed, rows_as_an_event, factors_of_items],
    ids=lambda model: model.__name__,
)
def test_a_plate_that_happens_to_be_as_long_as_the_data_is_none_over_rows(model):
    outcomes = RNG.normal(size=(6, 6)) + RNG.normal(size=6)
    assert_is_of_items(RVGA(model).run({"y": outcomes}, K=6, progress_bar=False), outcomes)


@pytest.mark.parametrize("model", [items, items_and_rows], ids=lambda model: model.__name__)
def test_a_plate_as_long_as_the_first_rows_of_a_stream_is_none_over_rows(model):
    outcomes = RNG.normal(size=(48, STREAM_HEAD)) + RNG.normal(size=STREAM_HEAD)
    blocks = ({"y": outcomes[start : start + 16]} for start in range(0, 48, 16))
    assert_is_of_items(RVGA(model).run(blocks, K=STREAM_HEAD, progress_bar=False), outcomes)


def test_a_plate_over_rows_may_have_a_constant_for_its_size():
    outcomes = RNG.normal(size=(6, 6)) + RNG.normal(size=6)
    posterior = RVGA(items_and_rows).run({"y": outcomes}, K=6, num_rows=6, progress_bar=False)
    assert_is_of_items(posterior, outcomes)


def test_a_plate_of_another_site_that_happens_to_be_as_long_as_the_data_is_none_over_rows():
    """An offset for each item, measured once, beside rows."""
    measured, group = RNG.normal(size=6), np.array([0, 1, 2, 3, 4, 4])
    outcomes = RNG.normal(size=6)

    def model(y, group):
        with numpyro.plate("items", 6):
            b = numpyro.sample("b", dist.Normal(0, 1))
            numpyro.sample("measured", dist.Normal(b, 1.0), obs=measured)
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(b[group], 1.0), obs=y)

    posterior = RVGA(model).run({"y": outcomes, "group": group}, progress_bar=False)
    assert posterior.info["rows"] == "independent"
    counts, sums = np.bincount(group, minlength=6), np.bincount(group, outcomes, minlength=6)
    np.testing.assert_allclose(posterior.mean, (measured + sums) / (2 + counts), atol=1e-6)


def test_one_row_of_one_item_shows_which_plate_grows():
    method = RVGA(items_and_rows)
    outcomes = RNG.normal(size=(5, 1))
    state = method.update(method.init({"y": outcomes[:1]}, K=1), {"y": outcomes})
    np.testing.assert_allclose(method.posterior(state).mean, of_items(outcomes)[0], atol=1e-6)


# ---------------------------------------------------------------------- plates of more rows than are at hand
def subsampled_to_the_data(y, N):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=y.shape[0]):
        numpyro.sample("y", dist.Normal(a, 0.5), obs=y)


def subsampled_items(y, N):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("items", N, subsample_size=y.shape[1], dim=-1), numpyro.plate("rows", y.shape[0], dim=-2):
        numpyro.sample("y", dist.Normal(a, 0.5), obs=y)


def states_of_rows(y, N):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("rows", N, subsample_size=y.shape[0]):
        state = numpyro.sample("state", dist.Bernoulli(0.4))
        numpyro.sample("y", dist.Normal(jnp.where(state == 1, a + 1.0, -a), 0.5), obs=y)


def states_of_groups(y, group, N):
    a = numpyro.sample("a", dist.Normal(0, 1))
    with numpyro.plate("groups", 4):
        state = numpyro.sample("state", dist.Bernoulli(0.4))
    with numpyro.plate("rows", N, subsample_size=y.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.where(state[group] == 1, a + 1.0, -a), 0.5), obs=y)


def evidence_of(log_likelihood):
    """log of the integral over ``a``, of which the prior is standard normal."""
    a = np.linspace(-4, 4, 4001)
    return logsumexp([stats.norm.logpdf(x) + log_likelihood(x) for x in a]) + np.log(a[1] - a[0])


@pytest.mark.parametrize("method", [RVGA, BONG, FixedPointVI])
@pytest.mark.parametrize("model, shape", [(subsampled_to_the_data, (NUM_ROWS,)), (subsampled_items, (-1, 4))])
def test_rows_in_a_plate_of_more_of_them_count_once(method, model, shape):
    options = {"family": "full"} if method is BONG else {}
    posterior = method(model, **options).run({"y": Y.reshape(shape)}, N=1000, progress_bar=False)
    precision = 1 + 4 * NUM_ROWS
    np.testing.assert_allclose(posterior.mean, 4 * Y.sum() / precision, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, 1 / precision, atol=1e-6)
    if posterior.elbo is not None:
        evidence = evidence_of(lambda a: stats.norm.logpdf(Y, a, 0.5).sum())
        np.testing.assert_allclose(posterior.elbo, evidence, atol=1e-6)


def test_states_in_a_plate_of_more_rows_are_summed_out_of_those_at_hand():
    def log_likelihood(a):
        parts = np.log(0.4) + stats.norm.logpdf(Y, a + 1, 0.5), np.log(0.6) + stats.norm.logpdf(Y, -a, 0.5)
        return np.logaddexp(*parts).sum()

    posterior = RVGA(states_of_rows).run({"y": Y}, N=1000, progress_bar=False)
    assert posterior.info["rows"] == "independent"
    evidence = evidence_of(log_likelihood)
    assert evidence - 0.2 < posterior.elbo <= evidence


def test_states_of_groups_are_summed_out_of_rows_in_a_plate_of_more():
    group = np.arange(NUM_ROWS) % 4

    def log_likelihood(a):
        parts = np.log(0.4) + stats.norm.logpdf(Y, a + 1, 0.5), np.log(0.6) + stats.norm.logpdf(Y, -a, 0.5)
        logs = [np.bincount(group, part - np.log(share)) + np.log(share) for part, share in zip(parts, (0.4, 0.6))]
        return np.logaddexp(*logs).sum()

    posterior = RVGA(states_of_groups).run({"y": Y, "group": group}, N=1000, progress_bar=False)
    evidence = evidence_of(log_likelihood)
    assert evidence - 0.5 < posterior.elbo <= evidence
