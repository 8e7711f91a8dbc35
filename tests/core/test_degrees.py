"""Polynomials are known from the program: kinks, steps and distant bends do not pass for what they are near zero."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_rvga.core.jaxprs.degrees import is_affine, is_quadratic

Z, GIVEN = jax.ShapeDtypeStruct((2,), float), jax.ShapeDtypeStruct((), float)

FUNCTIONS = {  # and the degree in z, given the rest; three for what is none
    "affine": (lambda z, g: g * z[0] - z[1] / jnp.exp(g), 1),
    "a step by what is given": (lambda z, g: jnp.where(g > 0, z[0], -z[1]), 1),
    "a product": (lambda z, g: z[0] * z[1], 2),
    "squares": (lambda z, g: jnp.sum(z**2) + jnp.square(g * z[0]), 2),
    "a normal density": (lambda z, g: dist.Normal(z[0], jnp.exp(g)).log_prob(z[1]), 2),
    "a matrix product": (lambda z, g: z @ (jnp.array([[2.0, 1.0], [1.0, 3.0]]) @ z), 2),
    "a multivariate normal density": (
        lambda z, g: dist.MultivariateNormal(z, jnp.eye(2) + g**2 * jnp.ones((2, 2))).log_prob(jnp.ones(2)),
        2,
    ),
    "a loop": (lambda z, g: jax.lax.scan(lambda total, x: (total + g * x, None), 0.0, z)[0] ** 2, 2),
    "a cube": (lambda z, g: z[0] ** 3, 3),
    "a growing loop": (lambda z, g: jax.lax.scan(lambda total, x: (total * x, None), 1.0, z)[0], 3),
    "a kink": (lambda z, g: -jnp.abs(z[0] - g), 3),
    "a penalty far out": (lambda z, g: -0.5 * z[0] ** 2 - jnp.maximum(z[0] - 1e6, 0.0), 3),
    "a step": (lambda z, g: jnp.where(z[0] > g, 1.0, 0.0), 3),
    "a ratio": (lambda z, g: g / z[0], 3),
    "heavy tails": (lambda z, g: dist.StudentT(3.0, z[0], 1e9).log_prob(g), 3),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_degree_is_that_of_the_program(name):
    function, degree = FUNCTIONS[name]
    closed = jax.make_jaxpr(function)(Z, GIVEN)
    varies = [True, False]
    assert is_affine(closed, varies) == (degree <= 1)
    assert is_quadratic(closed, varies) == (degree <= 2)


@pytest.mark.parametrize("name", [name for name, (_, degree) in FUNCTIONS.items() if degree <= 2])
def test_what_is_quadratic_has_the_differences_of_a_quadratic_function(name):
    function, rng = FUNCTIONS[name][0], np.random.default_rng(0)
    origin, step = rng.normal(size=2), rng.normal(size=2)
    values = [function(jnp.asarray(origin + k * step), jnp.asarray(0.3)) for k in range(4)]
    np.testing.assert_allclose(values[3] - 3 * values[2] + 3 * values[1] - values[0], 0.0, atol=1e-9)
