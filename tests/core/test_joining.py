"""Vectors that are joined and taken apart again: the same values, and derivatives of their parts alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from numpyro_rvga.core.jaxprs.interpret import of_outputs
from numpyro_rvga.core.jaxprs.joining import without_joining


def of_slices(x, y):
    joined = jnp.concatenate([x, y, 2.0 * y])
    return jnp.sum(jnp.exp(joined[3:6])) + joined[1] * joined[8] + jnp.sum(joined[2:7:2] ** 2)


def of_split(x, y):
    first, middle, last = jnp.split(jnp.concatenate([x, y]), [2, 4])
    return jnp.sum(jnp.sin(first)) + jnp.sum(middle**3) + jnp.sum(jnp.concatenate([last, x])[1:4])


def of_nothing(x, y):
    first, none, last = jnp.split(jnp.concatenate([x, y]), [4, 4])
    return jnp.sum(first**2) + jnp.sum(none) * last[0] + jnp.sum(jnp.concatenate([y, x])[2:2])


def of_inner_program(x, y):
    return jax.jit(lambda z: jnp.sum(z[:2] * z[3:5]))(jnp.concatenate([y, x]))


@pytest.mark.parametrize("function", [of_slices, of_split, of_nothing, of_inner_program])
def test_values_and_derivatives_are_the_same(function):
    x, y = jnp.array([0.3, -1.2, 0.7]), jnp.array([1.5, 0.2, -0.4])
    evaluated = without_joining(function, x, y)
    np.testing.assert_allclose(evaluated(x, y), function(x, y), rtol=1e-12)
    for argument in (0, 1):
        expected = jax.grad(function, argument)(x, y)
        np.testing.assert_allclose(jax.grad(evaluated, argument)(x, y), expected, rtol=1e-12)


def test_what_is_computed_of_one_part_does_not_depend_on_the_others():
    def function(x, y):
        joined = jnp.concatenate([x, y])
        return jnp.sum(jnp.exp(joined[:3])) + jnp.sum(joined[3:] ** 2)

    def needs_exponential(fun):
        slope = jax.make_jaxpr(jax.grad(fun, 1))(jnp.ones(3), jnp.ones(3))
        return any(eqn.primitive.name == "exp" for eqn in of_outputs(slope, [0]).jaxpr.eqns)

    assert needs_exponential(function)
    assert not needs_exponential(without_joining(function, jnp.ones(3), jnp.ones(3)))
