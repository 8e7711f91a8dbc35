"""Discrete latent variables of the whole model, or of groups of rows: summed out where all rows are at hand."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import logsumexp
from numpyro.contrib.control_flow import scan

from numpyro_rvga import RVGA

RNG = np.random.default_rng(0)
COUNTS = {"counts": np.concatenate([RNG.poisson(4.0, 12), RNG.poisson(1.0, 13)])}
ITEM, VOTER = np.repeat(np.arange(20), 3), np.tile(np.arange(3), 20)
TRUTH = RNG.random(20) < 0.4
VOTES = {"item": ITEM, "voter": VOTER, "vote": (TRUTH[ITEM] ^ (RNG.random(60) < 0.2)).astype(int)}


def change_point(counts):
    early, late = numpyro.sample("early", dist.Gamma(2, 0.5)), numpyro.sample("late", dist.Gamma(2, 0.5))
    change = numpyro.sample("change", dist.DiscreteUniform(0, len(counts) - 1))
    rate = jnp.where(jnp.arange(len(counts)) < change, early, late)
    numpyro.sample("y", dist.Poisson(rate), obs=counts)


def change_point_by_hand(counts):
    early, late = numpyro.sample("early", dist.Gamma(2, 0.5)), numpyro.sample("late", dist.Gamma(2, 0.5))
    n = len(counts)
    before = jnp.arange(n) < jnp.arange(n)[:, None]
    each = dist.Poisson(jnp.where(before, early, late)).log_prob(counts).sum(axis=1)
    numpyro.factor("y", logsumexp(each) - jnp.log(n))


def voters(item, voter, vote):
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("voters", 3):
        right = numpyro.sample("right", dist.Beta(6, 2))
    with numpyro.plate("items", 20):
        truth = numpyro.sample("truth", dist.Bernoulli(share), infer={"enumerate": "parallel"})
    numpyro.sample("vote", dist.Bernoulli(jnp.where(truth[item] == 1, right[voter], 1 - right[voter])), obs=vote)


def voters_by_hand(votes):
    share = numpyro.sample("share", dist.Beta(2, 2))
    with numpyro.plate("voters", 3):
        right = numpyro.sample("right", dist.Beta(6, 2))
    with numpyro.plate("items", len(votes)):
        zero, one = (dist.Bernoulli(p).log_prob(votes).sum(axis=1) for p in (1 - right, right))
        numpyro.factor("vote", jnp.logaddexp(jnp.log1p(-share) + zero, jnp.log(share) + one))


@pytest.mark.parametrize(
    "model, data, by_hand, data_by_hand",
    [
        (change_point, COUNTS, change_point_by_hand, COUNTS),
        (voters, VOTES, voters_by_hand, {"votes": VOTES["vote"].reshape(20, 3)}),
    ],
)
def test_the_posterior_is_that_of_the_sum_over_states(model, data, by_hand, data_by_hand):
    found = RVGA(model).run(data, progress_bar=False)
    expected = RVGA(by_hand).run(data_by_hand, progress_bar=False)
    assert found.info["rows"] == "joint"
    np.testing.assert_allclose(found.mean, expected.mean, atol=0.02)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=0.02)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=0.02)


def test_draws_of_a_change_point_follow_its_probabilities():
    posterior = RVGA(change_point).run(COUNTS, progress_bar=False)
    drawn = posterior.sample_posterior(jax.random.key(0), (4000,), data=COUNTS)
    counts, place = COUNTS["counts"], np.arange(25)
    rate = jnp.where(place < place[:, None], drawn["early"][:, None, None], drawn["late"][:, None, None])
    each = jax.nn.softmax(dist.Poisson(rate).log_prob(counts).sum(axis=2), axis=1)
    frequency = np.bincount(np.asarray(drawn["change"]), minlength=25) / 4000
    np.testing.assert_allclose(frequency, each.mean(axis=0), atol=0.03)


@pytest.mark.parametrize("in_plate", [False, True], ids=["one chain", "a plate of chains"])
def test_chains_are_refused_with_the_algorithm_that_sums_over_them(in_plate):
    def hidden_markov(y):
        means = numpyro.sample("means", dist.Normal(0, 1).expand([2]))

        def step(state, now):
            with numpyro.plate("chains", len(now)) if in_plate else contextlib.nullcontext():
                state = numpyro.sample("state", dist.Bernoulli(jnp.where(state == 1, 0.9, 0.1)))
                return state, numpyro.sample("y", dist.Normal(means[state], 1.0), obs=now)

        scan(step, jnp.zeros(y.shape[1:], int), y)

    outcomes = RNG.normal(size=(12, 3) if in_plate else 12)
    with pytest.raises(NotImplementedError, match=r"site 'state' is a discrete latent.*forward algorithm"):
        RVGA(hidden_markov).run({"y": outcomes}, progress_bar=False)
