"""Densities read as sums of products and exponentials, against brute-force quadrature of the densities themselves."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest

from numpyro_rvga.core.expectations.tilted import MOST_SUMMANDS, read_tilted, tilted, tilted_density


def effect(u, y):
    """An observation whose mean has an effect written as scale * z, the noise's scale unknown."""
    return dist.Normal(u[0] + jnp.exp(u[1]) * u[2], jnp.exp(u[3])).log_prob(y)


def two_effects(u, y):
    loc = u[0] + jnp.exp(u[1]) * u[2] - 0.3 * jnp.sqrt(jnp.exp(u[3])) * u[4]
    return 2.0 * dist.Normal(loc, 1.5).log_prob(y)


def masked(u, y):
    return jnp.where(y > 0, effect(u, y), 0.5 * u[1]) * jnp.where(y > 0, 1.0, 3.0)


def exponentials(u, y):
    return y * jnp.log(jnp.exp(u[0] - 1.0) * 0.4) - jnp.exp(u[0]) - y / jnp.exp(2 * u[1]) + jnp.square(u[1])


def in_arrays(u, y):
    """With slices, reversals, sums and array constants."""
    effects = jnp.stack([u[1], u[2]])[::-1] * jnp.exp(jnp.concatenate([u[3:4], u[:1]]))
    return -jnp.sum((y * jnp.array([1.0, -0.5]) - effects.reshape(1, 2)) ** 2) + jnp.sum(u[0] * u[1:3])


DENSITIES = {
    "an effect": (effect, 4),
    "two effects": (two_effects, 5),
    "masked": (masked, 4),
    "exponentials": (exponentials, 2),
    "arrays": (in_arrays, 4),
}


def read_case(name, seed):
    """The density, its form, what it is of the outcome 0.7, and a Gaussian."""
    density, size = DENSITIES[name]
    rng = np.random.default_rng(seed)
    root = 0.25 * rng.normal(size=(size, size))
    mean, covariance = 0.5 * rng.normal(size=size), root @ root.T + 0.01 * np.eye(size)
    form, read = read_tilted(density, size, jnp.result_type(float), jax.ShapeDtypeStruct((), float))
    return density, form, read, jnp.asarray(mean), jnp.asarray(covariance)


@pytest.mark.parametrize("name", DENSITIES)
def test_values_equal_brute_force_quadrature(name):
    density, form, read, mean, covariance = read_case(name, seed=0)
    nodes, weights = np.polynomial.hermite_e.hermegauss(11)
    grid = np.stack([g.ravel() for g in np.meshgrid(*[nodes] * len(mean), indexing="ij")], -1)
    mass = np.prod([g.ravel() for g in np.meshgrid(*[weights / weights.sum()] * len(mean), indexing="ij")], axis=0)
    values = jax.jit(jax.vmap(lambda u: density(u, 0.7)))(mean + grid @ np.linalg.cholesky(covariance).T)
    found = jax.jit(lambda y: tilted(form, mean, covariance, read(y))[0])(0.7)
    np.testing.assert_allclose(found, mass @ values, rtol=1e-7)


@pytest.mark.parametrize("name", DENSITIES)
def test_gradient_and_curvature_derive_from_the_value(name):
    """Bonnet and Price: dE/dm = E[grad], 2 dE/dS = E[hess]."""
    _, form, read, mean, covariance = read_case(name, seed=2)

    @jax.jit
    def both(y):
        known = read(y)
        slopes = jax.grad(lambda m, s: tilted(form, m, s, known)[0], (0, 1))(mean, covariance)
        return slopes, tilted(form, mean, covariance, known)

    slopes, (_, gradient, hessian) = both(0.7)
    np.testing.assert_allclose(slopes[0], gradient, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(slopes[1] + slopes[1].T, hessian, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", DENSITIES)
def test_what_is_read_is_the_density(name):
    density, form, read, mean, _ = read_case(name, seed=1)
    outcomes = jnp.array([0.7, -1.2, 30.0])
    found = jax.jit(jax.vmap(lambda y: (tilted_density(form, mean, read(y)), density(mean, y))))(outcomes)
    np.testing.assert_allclose(*found, rtol=1e-10)


@pytest.mark.parametrize("outcome", [1e4, -3e4])
def test_in_single_precision_outcomes_far_from_zero_lose_nothing(outcome):
    u = np.array([outcome - 0.8, 0.2, 1.3, -0.4])
    y = jnp.asarray(outcome, jnp.float32)
    form, read = read_tilted(effect, 4, jnp.float32, jax.ShapeDtypeStruct((), jnp.float32))
    found = tilted_density(form, jnp.asarray(u, jnp.float32), read(y))
    # Both round the first predictor, so the double has the rounded one.
    expected = effect(jnp.asarray(u.astype(np.float32), jnp.float64), outcome)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-5)


OTHERS = {
    "three factors": lambda u, y: u[0] * u[1] * u[2],
    "an exponential of a product": lambda u, y: jnp.exp(u[0] * u[1]),
    "an exponential of an exponential": lambda u, y: jnp.exp(-jnp.exp(u[0])),
    "data in an exponent": lambda u, y: jnp.exp(y * u[0]),
    "a logarithm of a sum": lambda u, y: jnp.log(jnp.exp(u[0]) + 1.0),
    "a root of a sum": lambda u, y: jnp.sqrt(jnp.exp(u[0]) + u[1]),
    "a division by a predictor": lambda u, y: y / u[0],
    "a kink": lambda u, y: jnp.abs(u[0] - y),
    "a choice by a predictor": lambda u, y: jnp.where(u[0] > 0, u[1], y),
    "a power of data": lambda u, y: y ** jnp.exp(u[0]),
    "heavy tails": lambda u, y: dist.StudentT(4.0, u[0], jnp.exp(u[1])).log_prob(y),
    "a number that overflows": lambda u, y: jnp.exp(u[0] + 1000.0),
    "too many summands": lambda u, y: jnp.sum(jnp.exp(jnp.arange(1.0, MOST_SUMMANDS + 2) * u[0])),
    "too large arrays": lambda u, y: jnp.sum(jnp.ones(1000) * u[0]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_densities_are_left_alone(name):
    assert read_tilted(OTHERS[name], 3, jnp.result_type(float), jax.ShapeDtypeStruct((), float)) is None
