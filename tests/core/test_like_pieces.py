"""Arrays that a loop in Python computes alike, and then joins: an entry needs the predictors of one of them."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm

from numpyro_rvga.core.jaxprs.symbolic import factorize

PIECES, SIZE = 4, 5
THETA = np.random.default_rng(0).normal(size=31)
X = np.random.default_rng(1).normal(size=(SIZE, 3))
Y = np.arange(PIECES * SIZE).reshape(PIECES, SIZE) % 4


def cutpoints(t):
    return dist.transforms.OrderedTransform()(t[9:21].reshape(PIECES, 3))


def stacked(t, x, y):
    return jnp.stack([jnp.exp(t[j]) * t[4:9] for j in range(PIECES)])


def concatenated(t, x, y):
    return jnp.concatenate([jnp.exp(t[j]) * t[4:9] for j in range(PIECES)])


def columns(t, x, y):
    return jnp.stack([jnp.tanh(t[4 + j] * (x @ t[:3])) for j in range(PIECES)], axis=1)


def of_data(t, x, y):
    return jnp.stack([norm.logcdf(jnp.exp(t[j]) - x[:, j] * t[20]) for j in range(3)])


def sums(t, x, y):
    return jnp.stack([jnp.log(jnp.sum(jnp.exp(t[3 * j : 3 * j + 3]))) * x[:, 0] for j in range(PIECES)])


def rows_of_an_array(t, x, y):
    return jax.nn.sigmoid(jnp.stack([cutpoints(t)[j] for j in range(PIECES)]))


def graded(t, x, y):
    predictor = jnp.stack([jnp.exp(t[j]) * t[4:9] for j in range(PIECES)])
    of_items = jnp.stack([jnp.broadcast_to(cutpoints(t)[j], (SIZE, 3)) for j in range(PIECES)])
    return dist.OrderedLogistic(predictor, of_items).log_prob(Y)


def graded_one_by_one(t, x, y):
    of_items = [dist.OrderedLogistic(jnp.exp(t[j]) * t[4:9], cutpoints(t)[j]).log_prob(Y[j]) for j in range(PIECES)]
    return jnp.concatenate(of_items)


CASES = {
    stacked: 2,
    concatenated: 2,
    columns: 2,
    of_data: 2,
    sums: 3,
    rows_of_an_array: 4,
    graded: 6,
    graded_one_by_one: 6,
}


def entry(function):
    return lambda t, x, y, e: jnp.ravel(function(t, x, y))[e]


def split_of(function):
    arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (X, Y)]
    theta = jax.ShapeDtypeStruct(THETA.shape, THETA.dtype)
    return factorize(entry(function), theta, *arguments, jax.ShapeDtypeStruct((), jnp.int32))


def assert_same_entries(function, split):
    whole = np.ravel(function(jnp.asarray(THETA), X, Y))
    for e in range(len(whole)):
        row = X, Y, jnp.int32(e)
        found = split.density(split.predictors(THETA, row), split.constants(row))
        np.testing.assert_allclose(found, whole[e], rtol=1e-10, err_msg=f"entry {e}")


@pytest.mark.parametrize("function", CASES, ids=lambda f: f.__name__)
def test_an_entry_of_joined_arrays_needs_the_predictors_of_its_own(function):
    split = split_of(function)
    assert split.num_predictors <= CASES[function]
    assert_same_entries(function, split)


def other_functions(t, x, y):
    return jnp.stack([jnp.exp(t[0]) * t[4:9], jnp.exp(t[1]) * t[4:9] ** 2, jnp.sin(t[2]) * t[4:9]])


def other_signs(t, x, y):
    return jnp.stack([jnp.exp(t[0]) + jnp.exp(t[4:9]), jnp.exp(t[1]) - jnp.exp(t[4:9])])


def other_lengths(t, x, y):
    return jnp.concatenate([jnp.exp(t[0]) * t[4:9], jnp.exp(t[1]) * t[4:7], jnp.exp(t[2]) * t[4:8]])


def other_lines(t, x, y):
    return jnp.stack([jnp.cumsum(jnp.exp(t[:5])), jnp.cumsum(jnp.exp(t[5:10]))[::-1]])


def other_numbers(t, x, y):
    return jnp.stack([jnp.exp(2.0 * t[0]) * t[4:9] ** 2, jnp.exp(3.0 * t[1]) * t[4:9] ** 3])


def constants_beside(t, x, y):
    return jnp.stack([jnp.exp(t[0]) * t[4:9], x[:, 0], jnp.exp(t[1]) * t[4:9]])


OTHERS = [other_functions, other_signs, other_lengths, other_lines, other_numbers, constants_beside]


@pytest.mark.parametrize("function", OTHERS, ids=lambda f: f.__name__)
def test_arrays_that_are_not_computed_alike_keep_their_values(function):
    assert_same_entries(function, split_of(function))
