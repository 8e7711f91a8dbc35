"""Sums as the arrays that they add up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro.distributions import Normal

from numpyro_rvga.core.jaxprs.addends import addends_of

X, Y = jnp.linspace(-1.0, 2.0, 5), jnp.array([0.3, -0.2, 1.0, 0.5, -1.4])
EDGES = np.array([[0, 1], [1, 2], [2, 3], [0, 3]]).T


def neighbors(x, y):
    return -0.5 * jnp.sum((x[EDGES[0]] - x[EDGES[1]]) ** 2)


def quadratic_form(x, y):
    return -0.5 * x @ jnp.diag(jnp.arange(1.0, 6.0)) @ x


def with_normalizer(x, y):
    precision = jnp.exp(y[0])
    return 2.5 * jnp.log(precision) - jnp.sum(x**2) * precision / 2


def of_two_sums(x, y):
    return (jnp.abs(x).sum() - jnp.square(y[:3]).sum()).reshape(1)


def of_a_program(x, y):
    return jax.jit(lambda x: jnp.mean(Normal(x, 1.0).log_prob(y)))(x)


def of_counts(x, y):
    return jnp.sum(jnp.asarray(x > 0, jnp.int32)) * 2 - x.sum()


def with_made_numbers(x, y):
    return -jnp.sum(jnp.arange(1.0, 6.0) * x) + jax.lax.iota(jnp.float32, 1)[0]


@pytest.mark.parametrize(
    "function, count",
    [
        (neighbors, 4),
        (quadratic_form, 5),
        (with_normalizer, 5),
        (of_two_sums, 8),
        (of_a_program, 5),
        (with_made_numbers, 5),
        (of_counts, 10),
    ],
)
def test_addends_add_up_to_the_number(function, count):
    addends = addends_of(function, X, Y)
    assert addends(X, Y).shape == (count,)
    for scale in (1.0, -0.7):
        np.testing.assert_allclose(addends(scale * X, Y).sum(), np.squeeze(function(scale * X, Y)), rtol=1e-5)


def test_the_addends_of_a_multiple_depend_on_what_each_is_of():
    jacobian = jax.jacobian(addends_of(neighbors, X, Y))(X, Y)
    assert np.all(np.count_nonzero(jacobian, axis=1) <= 2)
    jacobian = jax.jacobian(addends_of(with_normalizer, X, Y), argnums=1)(X, Y)
    np.testing.assert_allclose(jacobian[:, 0], 0.5 - 0.5 * X**2 * jnp.exp(Y[0]), rtol=1e-5)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x[0],
        lambda x, y: jnp.log(jnp.sum(x**2)),
        lambda x, y: jnp.sum(x) * jnp.sum(y),
        lambda x, y: jnp.tensordot(jnp.outer(x, y), jnp.outer(x, x), axes=((0, 1), (1, 0))),
    ],
)
def test_what_is_no_sum_has_no_addends(function):
    assert addends_of(function, X, Y) is None
