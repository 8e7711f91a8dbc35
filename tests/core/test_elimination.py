"""Sums over the states of discrete variables by elimination, against sums over all joint states."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.expectations.elimination import by_elimination, over_all_states

CASES = {
    "one": ([(0,), (0,), ()], [4]),
    "chain": ([(i, i + 1) for i in range(6)] + [(i,) for i in range(7)], [3] * 7),
    "star": ([(0, i) for i in range(1, 7)] + [(i,) for i in range(7)], [4, *[2] * 6]),
    "loop with a tail": ([(0, 1), (1, 2), (2, 3), (0, 3), (3, 4)], [2, 3, 4, 2, 3]),
    "second order": ([(i, i + 1, i + 2) for i in range(5)], [2, 3, 2, 2, 3, 2, 2]),
    "two chains": ([(0, 1), (1, 2), (3, 4), (4, 5), ()], [3] * 6),
}


@pytest.fixture(params=CASES)
def case(request):
    scopes, sizes = CASES[request.param]
    rng = np.random.default_rng(0)
    factors = [2 * rng.normal(size=[sizes[v] for v in scope]) for scope in scopes]
    found = by_elimination(scopes, sizes)
    states = np.array(list(itertools.product(*map(range, sizes))))
    table, everything = (
        np.array([[factor[tuple(s[list(scope)])] for scope, factor in zip(scopes, factors)] for s in rows])
        for rows in (found.assignments, states)
    )
    return found, jnp.asarray(table), states, everything.sum(axis=1)


def test_the_sum_is_that_over_all_joint_states(case):
    found, table, _, log_weights = case
    np.testing.assert_allclose(found.log_sum(table), jax.nn.logsumexp(log_weights), rtol=1e-5)


def test_slopes_are_expected_terms(case):
    """d log sum exp(f) / df are probabilities: those of the states that an entry of the table stands for."""
    found, table, states, log_weights = case
    slopes = np.asarray(jax.grad(found.log_sum)(table))
    np.testing.assert_allclose(slopes.sum(axis=0), 1, rtol=1e-4)
    if len(found.assignments) == len(states):
        np.testing.assert_allclose(slopes[:, 0], jax.nn.softmax(log_weights), atol=1e-5)


def test_draws_follow_the_probabilities(case):
    found, table, states, log_weights = case
    drawn = jax.vmap(found.draw, (0, None))(jax.random.split(jax.random.key(0), 20_000), table)
    frequencies = np.array([(np.asarray(drawn) == s).all(axis=1).mean() for s in states])
    expected = np.asarray(jax.nn.softmax(log_weights))
    assert np.max(np.abs(frequencies - expected) / np.sqrt((expected + 1e-4) / 20_000)) < 5


def test_the_probability_of_joint_states(case):
    found, table, states, log_weights = case
    log_probs = jax.vmap(lambda own: found.log_prob(table, own))(jnp.asarray(states))
    np.testing.assert_allclose(log_probs, jax.nn.log_softmax(log_weights), atol=1e-4)


def test_a_long_chain_takes_few_assignments_and_rounds():
    length = 1000
    found = by_elimination([(i, i + 1) for i in range(length - 1)], [3] * length)
    assert len(found.assignments) == 9 and len(found.rounds) <= 11


def test_impossible_states_have_slopes():
    found = by_elimination([(0, 1), (1, 2), (0,)], [2, 2, 2])
    table = jnp.where(jnp.arange(4)[:, None] == 0, 0.0, -jnp.inf) * jnp.ones((4, 3))
    slopes = jax.grad(lambda shift: found.log_sum(jnp.where(jnp.isinf(table), table, table + shift)))(0.0)
    assert np.isfinite(slopes)


@pytest.mark.parametrize("scopes", [[(0,)], [(0, 1), (1, 2), (0,)]], ids=["one", "chain"])
def test_the_sum_is_zero_where_all_states_are_impossible(scopes):
    found = by_elimination(scopes, [2] * (max(map(max, scopes)) + 1))
    table = jnp.zeros((len(found.assignments), len(scopes))).at[:, 0].set(-jnp.inf)
    assert found.log_sum(table) == -jnp.inf


@pytest.mark.parametrize(
    "scopes, sizes",
    [
        ([tuple(range(12))], [2] * 12),  # all in one term
        ([(i, j) for i in range(12) for j in range(i)], [2] * 12),  # each with each
    ],
)
def test_none_where_too_many_would_be_evaluated(scopes, sizes):
    assert by_elimination(scopes, sizes) is None
    assert over_all_states(sizes) is None
