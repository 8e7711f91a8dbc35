"""Loops as operations on arrays: equal to the loops, where no step takes a result of the step before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from numpyro_rvga.core.jaxprs.parallel_loops import constant_outputs, in_parallel
from numpyro_rvga.core.jaxprs.symbolic import factorize

X = jnp.asarray(np.random.default_rng(0).normal(size=(7, 3)))


def states(carry, x):
    """The state is what is given; a term takes two of them and a constant of all steps."""
    return x, jnp.sum(jnp.sin(x - 0.5 * carry))


def two_lags(carry, x):
    before, twice_before = carry
    return (x, before), x - 0.6 * before + 0.3 * twice_before


def counted(carry, x):
    number, state, since = carry
    return (number + 1, X[number] * x, jnp.where(number < 2, 0.0, since + 1.0)), (number, state + x, since)


SHIFT = jnp.asarray(np.eye(3, k=-1) - np.eye(3)[:, [0]] @ np.ones((1, 3)))


def seasonal(carry, x):
    """A season's effects, the last of which is minus their sum, and a level that is added up of a trend."""
    season, level, trend = carry
    season = (SHIFT @ season).at[0].add(x[0])
    return (season, level + trend + x[1], trend + x[2]), jnp.exp(level) * season[0]


def rotated(carry, x):
    """Two values that take each other, by angles that are constants of the steps."""
    number, a, b = carry
    angle = jnp.cos(0.3 * number)
    return (number + 1, angle * a - 0.5 * b + x, 0.5 * a + b), a + b


def without_carry(carry, x):
    return carry, jnp.cos(x)


LOOPS = [
    (states, X[0]),
    (two_lags, (X[0], X[1])),
    (counted, (jnp.asarray(0), X[0], jnp.asarray(0.0))),
    (seasonal, (X[0], X[1, 0], X[2, 0])),
    (rotated, (jnp.asarray(0), X[0], X[1])),
    (without_carry, ()),
]


def evaluated(program, closed, equation, *inputs):
    """A program in place of an equation of another, whose inputs these are."""
    known = dict(zip([*closed.jaxpr.constvars, *closed.jaxpr.invars], [*closed.consts, *inputs]))
    at = [v.val if hasattr(v, "val") else known[v] for v in equation.invars]
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *at)


def product_and_constants(carry, x):
    """A product of all steps, which stays a loop; a counter, twice the counter, and a constant."""
    number, key, product = carry
    next_key, _ = jax.random.split(key)
    return (number + 1, next_key, product * x), (2 * number, product, 0.5, jax.random.key_data(key))


@pytest.mark.parametrize("reverse", [False, True])
def test_what_a_loop_returns_of_constants_alone_is_known(reverse):
    start = jnp.asarray(3), jax.random.key(0), X[0]
    loop = lambda xs: lax.scan(product_and_constants, start, xs, reverse=reverse)  # noqa: E731
    closed = jax.make_jaxpr(loop)(X)
    equation = next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    is_constant = [v is not closed.jaxpr.invars[0] for v in equation.invars]
    assert in_parallel(equation, is_constant) is None
    numbers, program = constant_outputs(equation, is_constant)
    found = dict(zip(numbers, evaluated(program, closed, equation, jnp.full_like(X, jnp.nan)), strict=True))
    returned = jax.tree.leaves(loop(X))
    assert len(returned) - len(found) == 2  # the product, and what it was
    for number, value in found.items():
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, returned[number] = jax.random.key_data(value), jax.random.key_data(returned[number])
        np.testing.assert_array_equal(value, returned[number])


def test_terms_do_not_depend_on_what_a_loop_returns_of_constants():
    """As where a scan draws its own noise: the noise's location and scale are results of the loop."""

    def term(theta, number):
        def step(state, noise):
            state = jnp.tanh(theta[0]) * state + noise
            return state, (state, 0.0, 2.0)

        _, location, scale = lax.scan(step, 0.0, theta[1:])[1]
        return -0.5 * ((theta[1 + number] - location[number]) / scale[number]) ** 2 - jnp.log(scale[number])

    split = factorize(term, jax.ShapeDtypeStruct((51,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    assert split.num_predictors == 1
    theta = jnp.asarray(np.random.default_rng(1).normal(size=51), jnp.float32)
    row = (jnp.int32(7),)
    found = split.density(split.predictors(theta, row), split.constants(row))
    np.testing.assert_allclose(found, term(theta, 7), rtol=1e-5)


def scan_in(function, *arguments):
    return next(e for e in jax.make_jaxpr(function)(*arguments).jaxpr.eqns if e.primitive.name == "scan")


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("step, start", LOOPS)
def test_all_steps_at_once_are_the_loop(step, start, reverse):
    loop = lambda xs: lax.scan(step, start, xs, reverse=reverse)  # noqa: E731
    closed = jax.make_jaxpr(loop)(X)
    equation = next(e for e in closed.jaxpr.eqns if e.primitive.name == "scan")
    program = in_parallel(equation, [v is not closed.jaxpr.invars[0] for v in equation.invars])
    assert program is not None
    for a, b in zip(evaluated(program, closed, equation, X), jax.tree.leaves(loop(X)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_a_loop_that_takes_its_own_results_stays_one():
    equation = scan_in(lambda xs: lax.scan(lambda c, x: (x * c + 1, c), X[0], xs), X)
    assert in_parallel(equation, [True, False]) is None
    assert in_parallel(equation, [True, True]) is not None
    long = jnp.zeros((3000, 1))
    equation = scan_in(lambda xs: lax.scan(lambda c, x: (0.5 * c + x, c), X[0, :1], xs), long)
    assert in_parallel(equation, [True, False]) is None


@pytest.mark.parametrize(
    "after",
    [
        lambda c, x: jnp.sin(c) + x,
        lambda c, x: jnp.floor(c) + x,
        lambda c, x: jnp.sign(c) * x,
        lambda c, x: jnp.where(c > 0, x, -x),
        lambda c, x: c.astype(jnp.int32).astype(c.dtype) + x,
        lambda c, x: X[0][jnp.clip(c[:1], 0, 2).astype(jnp.int32)] + x,
        lambda c, x: jnp.maximum(c, x),
    ],
)
def test_a_loop_that_is_not_linear_in_its_results_stays_one(after):
    """Steps, signs and comparisons have slopes that are constants, zero, and are not linear."""
    equation = scan_in(lambda xs: lax.scan(lambda c, x: (after(c, x), c), X[0], xs), X)
    constant = [v.aval.shape != X.shape for v in equation.invars]
    assert in_parallel(equation, constant) is None


def test_a_term_of_a_state_space_model_takes_the_states_that_it_names():
    def term(theta, number):
        scale = jnp.exp(theta[0])
        residuals = lax.scan(lambda before, now: (now, (now - before) / scale), 0.0, theta[1:])[1]
        return -0.5 * residuals[number] ** 2 - theta[0]

    split = factorize(term, jax.ShapeDtypeStruct((51,), jnp.float32), jax.ShapeDtypeStruct((), jnp.int32))
    assert split.num_predictors == 2
    theta = jnp.asarray(np.random.default_rng(1).normal(size=51), jnp.float32)
    for number in (0, 1, 49):
        row = (jnp.int32(number),)
        found = split.density(split.predictors(theta, row), split.constants(row))
        np.testing.assert_allclose(found, term(theta, number), rtol=1e-5)
