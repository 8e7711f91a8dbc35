"""A scalar function of theta is split exactly into a density of affine predictors, and into as few as there are."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
from jax.scipy.linalg import solve_triangular
from jax.scipy.special import logsumexp, xlog1py, xlogy

from numpyro_rvga.core.jaxprs.interpret import of_outputs
from numpyro_rvga.core.jaxprs.primitives import equations
from numpyro_rvga.core.jaxprs.symbolic import Reading, factorize

SIZE = 6
THETA = jax.ShapeDtypeStruct((SIZE,), jnp.float64)
X = np.array([0.5, -1.2, 0.7])
G, B = np.int32(2), np.int32(1)
COVARIANCE = np.array([[1.0, 0.3], [0.3, 2.0]])
MATRIX = np.arange(12.0).reshape(4, 3) / 7 - 0.6


class Example(NamedTuple):
    """``fun(theta, *row)`` with theta of SIZE numbers, and the C that it needs."""

    fun: Any
    num_predictors: int
    row: tuple = ()


def regression_log_density(t, x, g):
    loc = t[0] + t[1:3][jnp.minimum(g, 1)] + x @ t[3:6]
    return dist.Normal(loc, 0.7).log_prob(1.3)


def heteroscedastic_log_density(t, x):
    return dist.Normal(x @ t[:3], jnp.exp(x @ t[3:])).log_prob(0.4)


def non_centered(t, g):
    return jnp.cos((jnp.exp(t[0]) * t[1:])[g])


def correlated_effects(t, g):
    factor = jnp.array([[1.0, 0.0], [0.6, 0.8]])
    effects = ((jnp.exp(t[:2])[:, None] * factor) @ t[2:].reshape(2, 2).T).T
    return jnp.sin(effects[g, 0]) + effects[g, 1]


def column_of_correlated_effects(t, g):
    factor = jnp.array([[1.0, 0.0], [0.6, 0.8]])
    effects = t[2:].reshape(2, 2) @ (jnp.exp(t[:2])[:, None] * factor).T
    return jnp.sin(1.0 + effects[:, 0])[g] * effects[:, 0][g]


def effects_of_two_kinds(t, num_groups):
    """(2, groups), with loadings that depend on a parameter."""
    return jnp.stack([jnp.cosh(t[0]), jnp.sinh(t[0])])[:, None] @ t[None, 1 : 1 + num_groups]


def centered_effects(t, g):
    effects = effects_of_two_kinds(t, 4).T
    effects = effects - effects.mean(0)
    return jnp.sin(effects[g, 0]) * effects[g, 1]


def designed_effects(t, x):
    first, second = x @ effects_of_two_kinds(t, 3).T
    return jnp.sin(first) * second


def two_walks(t, g):
    steps = jnp.cosh(t[0]) * t[1:5]
    late, early = jnp.concatenate([jnp.zeros(1), steps[:2]]), jnp.concatenate([steps[2:], jnp.zeros(1)])
    return jnp.sin(jnp.stack([jnp.cumsum(late), jnp.cumsum(early)])[g, 1])


def horseshoe_line(t, g):
    return jnp.cos(jnp.exp(t[0]) * jnp.exp(t[1:])[g])


def cumulative_product(t):
    return jax.lax.scan(lambda carry, v: (carry * v, carry), 1.0, t[:3])[0]


def no_steps(t, g):
    """A sum over the steps of a loop that takes none."""
    _, steps = jax.lax.scan(lambda carry, i: (carry, jnp.sin(t[1] * i)), 0.0, jnp.arange(0))
    return jnp.cos(t[g]) + jnp.sum(dist.Normal(steps, jnp.exp(t[2])).log_prob(0.0))


def scan_and_more(t):
    return cumulative_product(t) * jnp.cos(t[4] + t[5])


def power_by_loop(t, g):
    return jax.lax.while_loop(lambda c: c[0] < g, lambda c: (c[0] + 1, c[1] * jnp.sin(c[1])), (0, t[3]))[1]


def branch_on_theta(t):
    return jax.lax.cond(t[0] > 0, lambda a: jnp.sin(a), lambda a: a * a, t[1])


@jax.jit
def inner(a):
    return jnp.sin(a + 1.0)


@jax.custom_jvp
def cube(x):
    return x**3


cube.defjvp(lambda primals, tangents: (cube(primals[0]), 3 * primals[0] ** 2 * tangents[0]))


EXAMPLES = {
    # sums and multiples are one predictor
    "constant": Example(lambda t, x: jnp.sum(x**2), 0, (X,)),
    "affine": Example(lambda t, x: 2.0 - x @ t[:3] / 4, 1, (X,)),
    "line": Example(regression_log_density, 1, (X, G)),
    "two lines": Example(heteroscedastic_log_density, 2, (X,)),
    "sum of single numbers": Example(lambda t: jnp.sin((t[0] + 3.0) + (2.0 * t[1] - t[2])), 1),
    "affine part around a nonlinear one": Example(lambda t: jnp.sin(t[0] + jnp.cos(t[1]) + t[2]), 2),
    "multiples of one number": Example(lambda t: jnp.sin(t[0]) * jnp.cos(2.0 * t[0] + 1.0), 1),
    "a sum of two others": Example(lambda t: jnp.sin(t[0]) + jnp.cos(t[1]) * jnp.tanh(t[0] - t[1]), 2),
    "product of two numbers": Example(lambda t: t[0] * t[1], 2),
    "a line at several places": Example(lambda t, x: jnp.sum(jnp.exp(t[0] + t[1] * x) * t[2]), 3, (X,)),
    "the same, one by one": Example(
        lambda t, x: sum(jnp.exp(x @ t[:3] + jnp.sin(s * t[4]) + (t[5] - t[3]) * s) for s in (1.0, 2.0, 4.0)), 3, (X,)
    ),
    "a sum that is the same along an axis": Example(
        lambda t, g: jnp.sum(jnp.sin((t[0] + t[1:4])[:, None] * X)[g]) * jnp.exp((t[0] + t[1:4])[:, None] + X)[g, 1],
        1,
        (G,),
    ),
    "square": Example(lambda t, x: (x @ t[:3]) ** 2, 1, (X,)),
    "choice made by the row": Example(lambda t, g: jnp.sin(jnp.where(g > 1, t[0], t[1])), 1, (G,)),
    "choice made by theta": Example(lambda t: jnp.where(t[0] > 0, jnp.sin(t[1]), jnp.cos(t[1])), 2),
    # linear algebra on whole arrays
    "matrix-vector product": Example(lambda t, m: jnp.sum(jnp.tanh(m @ t[:3])), 4, (MATRIX,)),
    "element of a matrix-vector product": Example(lambda t, m, g: jnp.tanh(m @ t[:3])[g], 1, (MATRIX, G)),
    "triangular solve": Example(
        lambda t, m: jnp.sin(jnp.sum(solve_triangular(m[:3], t[:3], lower=True))), 1, (MATRIX,)
    ),
    "cumulative sum": Example(lambda t, g: jnp.sin(jnp.cumsum(t)[g]), 1, (G,)),
    "concatenation": Example(lambda t: jnp.sin(jnp.concatenate([t[:2], jnp.zeros(1)])[1]), 1),
    "scatter": Example(lambda t, g: jnp.sin(jnp.zeros(SIZE).at[g].add(t[1])[g] + t[0]), 1, (G,)),
    "padding": Example(lambda t: jnp.sin(jnp.pad(t, 1)[1]), 1),
    "softmax with a pinned class": Example(
        lambda t, g: jax.nn.log_softmax(jnp.concatenate([t[:2], jnp.zeros(1)]))[g], 2, (G,)
    ),
    # indexing moves through elementwise steps
    "indexed after a nonlinear step": Example(lambda t, g: jnp.tanh(t)[g], 1, (G,)),
    "indexed twice": Example(lambda t, g: jnp.tanh(jnp.exp(t)[::-1])[g], 1, (G,)),
    "reshaped and transposed": Example(lambda t, g: jnp.tanh(t.reshape(2, 3)).T[g, 1], 1, (G,)),
    "broadcast": Example(lambda t, x, g: (jnp.exp(t[0]) * x + jnp.ones((4, 3)))[1, g], 1, (X, G)),
    "elementwise call on arrays of two ranks": Example(
        lambda t: jnp.sum(xlogy(jnp.array([2.0, 1.0, 3.0]), jnp.where(jnp.tri(3) > 0, jnp.exp(t[0]), jnp.exp(t[1])))), 2
    ),
    "nothing": Example(lambda t, g: jnp.cos(t[g]) + jnp.sum(jnp.exp(t[:0]) * t[1]), 1, (G,)),
    "no steps": Example(no_steps, 1, (G,)),
    "joined with nothing": Example(lambda t, g: jnp.concatenate([jnp.tanh(t), jnp.sin(t[:0])])[g], 1, (G,)),
    "squeezed": Example(lambda t: jnp.squeeze(jnp.sin(t[None, 2:3])), 1),
    "non-centered group effect": Example(non_centered, 2, (G,)),
    # indexing moves through products, solves and joins
    "entry of a product": Example(
        lambda t, g: jnp.sin((jnp.exp(t[:2]) * jnp.eye(2) @ t[2:].reshape(2, 2))[0, g]), 4, (B,)
    ),
    "entry of a product of correlated effects": Example(correlated_effects, 4, (B,)),
    "entry of a column of a product": Example(column_of_correlated_effects, 3, (B,)),
    "row of a batch of products": Example(
        lambda t, g: jnp.sum(jnp.sin(jnp.exp(t[:4]).reshape(2, 2, 1) @ t[4:].reshape(2, 1, 1)).ravel()[g]), 2, (G,)
    ),
    "right-hand side of a solve": Example(
        lambda t, g: jnp.sum(solve_triangular(jnp.eye(2) + jnp.exp(t[0]), t[2:].reshape(2, 2), lower=True)[:, g] ** 2),
        3,
        (B,),
    ),
    "multivariate normals by row": Example(
        lambda t, g: dist.MultivariateNormal(0.0, scale_tril=jnp.diag(jnp.exp(t[:2]))).log_prob(t[2:].reshape(2, 2))[g],
        4,
        (B,),
    ),
    "covariance of a few scales": Example(
        lambda t: jnp.sin(jnp.linalg.cholesky(jnp.outer(jnp.exp(t[:2]), jnp.exp(t[:2])) * COVARIANCE)[1, 0]), 2
    ),
    "one of several Cholesky factors": Example(
        lambda t, g: jnp.linalg.cholesky(jnp.exp(t[:2])[:, None, None] * COVARIANCE)[g, 1, 0], 1, (B,)
    ),
    "cumulative sum of a column": Example(
        lambda t, g: jnp.sin(jnp.cumsum(jnp.exp(t).reshape(3, 2), axis=0)[2, g]), 3, (B,)
    ),
    "largest of a row": Example(lambda t, g: jnp.max(jnp.exp(t).reshape(2, 3), axis=1)[g], 3, (B,)),
    "joined, one part known": Example(
        lambda t, g: jnp.sin(jnp.stack([jnp.exp(t[:3]), jnp.cosh(t[3:])], -1)[g, 1]), 1, (B,)
    ),
    "joined, the part not known": Example(
        lambda t, g: jnp.sin(jnp.concatenate([jnp.exp(t[:3]), jnp.cosh(t[3:])])[g]), 2, (G,)
    ),
    "one class and all of them": Example(lambda t, g: jax.nn.log_softmax(t.reshape(2, 3)[1])[g], 3, (G,)),
    "one class and all of them, in a row": Example(
        lambda t, g: jnp.ravel(jax.nn.log_softmax(jnp.cosh(t).reshape(2, 3), axis=-1)[g[None], 1]).sum(), 3, (B,)
    ),
    "unpacked": Example(lambda t: (lambda a, b, c: jnp.sin(a[1]) * b[0])(*jnp.exp(t).reshape(3, 2)), 2),
    "split": Example(lambda t: jnp.sin(jnp.split(jnp.cosh(t), 3)[1][0]), 1),
    "unstack to numbers": Example(lambda t: jnp.sin(jnp.unstack(jnp.cosh(t))[1]), 1),
    "unstack to rows": Example(lambda t: jnp.sin(jnp.unstack(jnp.cosh(t).reshape(2, 3), axis=1)[2][1]), 1),
    "log-sum-exp of one of few rows": Example(lambda t, g: logsumexp(jnp.cosh(t).reshape(2, 3), axis=1)[g], 3, (B,)),
    "a group's logits": Example(
        lambda t, g, y: dist.Categorical(logits=t.reshape(2, 3)[g]).log_prob(y), 3, (B, np.int32(2))
    ),
    "beyond the end": Example(lambda t, g: jnp.nan_to_num(jnp.take(jnp.cosh(t), g + 9)), 1, (G,)),
    "taken": Example(lambda t, g: jnp.sin(jnp.take(jnp.cosh(t), g)), 1, (G,)),
    "taken along an axis": Example(
        lambda t, g: jnp.take_along_axis(jnp.cosh(t).reshape(2, 3), g[None, None], axis=1)[1, 0], 1, (G,)
    ),
    "written into zeros": Example(lambda t, g: jnp.zeros(SIZE).at[1:].set(jnp.cosh(t[0]) * jnp.sin(t[1:]))[g], 2, (G,)),
    "a written column": Example(
        lambda t, g: jnp.ones((3, 2)).at[:, 1].set(jnp.cosh(t[:3])).at[:, 0].set(jnp.cosh(t[3:]))[g, 1], 1, (G,)
    ),
    "a written window": Example(
        lambda t, g: jnp.sin(jax.lax.dynamic_update_slice(jnp.cosh(t), jnp.exp(t[:2]), (3,))[g]), 2, (G,)
    ),
    "padded after a nonlinear step": Example(lambda t, g: jnp.pad(jnp.cosh(t[:3]), (1, 2))[g], 1, (G,)),
    "tiled": Example(lambda t, g: jnp.tile(jnp.cosh(t[:3]), 2)[g], 1, (G,)),
    "a window": Example(lambda t, g: jnp.prod(jax.lax.dynamic_slice(jnp.cosh(t), (g,), (2,))), 2, (G,)),
    "every other, turned round": Example(lambda t: jnp.prod(jnp.cosh(t)[::-2][1:]), 2),
    # exponentials multiply by adding exponents
    "product of exponentials": Example(lambda t: jnp.cos(jnp.exp(t[0]) * jnp.exp(t[1])), 1),
    "quotient of exponentials": Example(lambda t: jnp.cos(jnp.exp(t[0]) / jnp.exp(t[1])), 1),
    "powers and roots of exponentials": Example(
        lambda t: jnp.cos(jnp.exp(t[0]) ** 2 * jnp.sqrt(jnp.exp(t[1])) * jax.lax.rsqrt(jnp.exp(t[2]))), 1
    ),
    "log of an exponential": Example(lambda t, x: jnp.log(jnp.exp(x @ t[:3])), 1, (X,)),
    "horseshoe scale": Example(horseshoe_line, 1, (G,)),
    "exponential times a number": Example(lambda t: jnp.cos(jnp.exp(t[0]) * jnp.exp(t[1]) * t[2]), 2),
    # one number is taken out of what is linear
    "sum of multiples": Example(lambda t: jnp.sin(jnp.sum(jnp.exp(t[0]) * t[1:])), 2),
    "mean of fractions": Example(lambda t: jnp.sin(jnp.mean(t[1:] / jnp.exp(t[0]))), 2),
    "coefficients of a common scale": Example(lambda t, x: jnp.sin(x @ (jnp.exp(t[0]) * t[1:4])), 2, (X,)),
    "the same, summed": Example(lambda t, x: jnp.sin(jnp.sum(x * (t[1:4] * jnp.exp(t[0])))), 2, (X,)),
    "around a common mean": Example(lambda t, x: jnp.sin(x @ (t[4] + jnp.exp(t[0]) * t[1:4])), 3, (X,)),
    "a line through a walk": Example(lambda t, x: jnp.sin(x @ jnp.cumsum(jnp.exp(t[0]) * t[1:4])), 2, (X,)),
    "entry of a product with a scale": Example(
        lambda t, m, g: jnp.sin((m @ (jnp.exp(t[0]) * t[1:4]))[g]), 2, (MATRIX, G)
    ),
    "a walk with a drift": Example(lambda t, x: jnp.sin(x @ jnp.cumsum(t[1] + jnp.cosh(t[0]) * (x * t[2:5]))), 3, (X,)),
    "a walk of the group's own scale": Example(
        lambda t, g: jnp.sin(jnp.cumsum(jnp.cosh(t[:2])[:, None] * t[2:].reshape(2, 2), axis=1)[g, 1]), 2, (B,)
    ),
    "coefficients of the group's own scale": Example(
        lambda t, x, g: jnp.sin(jnp.sum(x[:2] * (jnp.cosh(t[:2])[:, None] * t[2:].reshape(2, 2))[g])), 2, (X, B)
    ),
    "curves of groups on a grid": Example(
        lambda t, m, g: jnp.sin(((t[2:4] + jnp.cosh(t[:2])[:, None] * t[2:].reshape(2, 2)) @ m[:, :2].T)[g, 3]),
        3,
        (MATRIX, B),
    ),
    "walks of series with scales of their own": Example(
        lambda t, x, g: jnp.sin(x[:2] @ jnp.cumsum(jnp.cosh(t[:2]) * t[2:].reshape(2, 2), axis=0)[g]), 4, (X, B)
    ),
    "sums of rows with scales of their own": Example(
        lambda t, g: jnp.sin(jnp.sum(jnp.cosh(t[:2])[:, None] * t[2:].reshape(2, 2), axis=1))[g], 2, (B,)
    ),
    "sums along an axis that scales vary along": Example(
        lambda t, g: jnp.sin(jnp.cumsum(jnp.cosh(t[:2]) * t[2:].reshape(2, 2), axis=1))[g, 1], 4, (B,)
    ),
    "walks that begin at different places": Example(two_walks, 3, (B,)),
    "a walk from its start": Example(
        lambda t, g: jnp.sin(jnp.cumsum(jnp.concatenate([t[:1], jnp.cosh(t[1]) * t[2:5]]))[g]), 3, (G,)
    ),
    "a walk whose steps walk": Example(
        lambda t, g: jnp.sin(jnp.cumsum(jnp.cumsum(jnp.cosh(t[0]) * t[2:4]) - jnp.cosh(t[1]) * t[4:] / 2)[g]), 4, (B,)
    ),
    "effects around their mean": Example(centered_effects, 3, (G,)),
    "effects by a design matrix": Example(designed_effects, 2, (X,)),
    "curves of two kinds on a grid": Example(
        lambda t, m, b, g: jnp.sin((effects_of_two_kinds(t, 3) @ m.T)[b, g]), 2, (MATRIX, B, G)
    ),
    "walks with common steps": Example(
        lambda t, b, g: jnp.sin(jnp.cumsum(effects_of_two_kinds(t, 5), axis=1)[b, 3]) + g, 2, (B, G)
    ),
    "sums over both axes of a product": Example(lambda t: jnp.sin(jnp.sum(effects_of_two_kinds(t, 2))), 3),
    "entry of a sorted line": Example(lambda t, b: jnp.sort(t.reshape(2, 3), axis=1)[b, 1] ** 2, 3, (B,)),
    "sum over a segment": Example(
        lambda t, g: jnp.sin(jax.ops.segment_sum(jnp.cosh(t), jnp.array([0, 2, 2, 1, 1, 1]), 3)[g]), 3, (G,)
    ),
    "sum over a segment of a common scale": Example(
        lambda t, g: jnp.sin(jax.ops.segment_sum(jnp.cosh(t[0]) * t[1:], jnp.array([0, 2, 2, 1, 1]), 3)[g]), 2, (G,)
    ),
    "sum at one place": Example(lambda t, g: jnp.sin(jnp.cosh(t[:3]).at[1].add(jnp.cosh(t[4]))[g]), 2, (B,)),
    "sums over segments that lack some": Example(
        lambda t: jnp.sin(jnp.ones(4).at[jnp.array([1, 1, 9])].add(jnp.cosh(t[:3]), mode="drop")[1]), 2
    ),
    # custom derivatives at shapes other than those that they were traced for
    "softplus of an element": Example(lambda t, g: jax.nn.softplus(t)[g], 1, (G,)),
    "softplus of a matrix's element": Example(
        lambda t, x, g: jax.nn.softplus(t[None, :] * x[:, None])[1, g], 1, (X, G)
    ),
    "relu": Example(lambda t, g: jax.nn.relu(t)[g], 1, (G,)),
    "xlogy": Example(lambda t, g: xlogy(jnp.arange(6.0), jnp.exp(t) + 1.0)[g], 1, (G,)),
    "xlog1py": Example(lambda t, g: xlog1py(jnp.arange(6.0), jnp.exp(t))[g], 1, (G,)),
    "own custom_jvp": Example(lambda t, g: cube(t)[g], 1, (G,)),
    "log-sum-exp": Example(lambda t, x: logsumexp(t[:3] + x), 3, (X,)),
    "bernoulli log density": Example(lambda t, x: dist.Bernoulli(logits=x @ t[:3]).log_prob(1), 1, (X,)),
    "negative binomial log density": Example(
        lambda t, x: dist.NegativeBinomial2(jnp.exp(x @ t[:3]), jnp.exp(t[3])).log_prob(4), 2, (X,)
    ),
    # control flow is taken as it stands
    "scan": Example(cumulative_product, 3),
    "scan and a line": Example(scan_and_more, 4),
    "while loop": Example(power_by_loop, 1, (G,)),
    "cond": Example(branch_on_theta, 2),
    "cond chosen by the row": Example(lambda t, g: jax.lax.cond(g > 1, jnp.sin, jnp.cos, t[2]), 1, (G,)),
    "sort": Example(lambda t: jnp.sort(t[:3])[1] ** 2, 3),
    "cholesky": Example(lambda t: jnp.linalg.cholesky(jnp.eye(2) * jnp.exp(t[0]))[1, 1], 1),
    # wrappers are looked through
    "jitted inner function": Example(lambda t, x: inner(x @ t[:3]) * inner(t[3]), 2, (X,)),
    "jitted inner function of a sum": Example(lambda t: inner(t[0] + t[1]), 1),
    "checkpointed inner function": Example(lambda t, x: jax.checkpoint(jnp.sin)(x @ t[:3]), 1, (X,)),
    "vmapped inner function": Example(lambda t, g: jax.vmap(lambda a: jnp.sin(a) * a)(t)[g], 1, (G,)),
    "structured row": Example(lambda t, row: jnp.sin(row["x"] @ t[:3] + row["g"][0]), 1, ({"x": X, "g": (G,)},)),
}

by_example = pytest.mark.parametrize("name", EXAMPLES)


def split_of(name):
    fun, num_predictors, row = EXAMPLES[name]
    return fun, row, factorize(fun, THETA, *row), num_predictors


def points(count=4):
    return np.random.default_rng(1).normal(size=(count, SIZE))


@by_example
def test_density_of_the_predictors_is_the_function_and_so_are_its_derivatives(name):
    fun, row, split, _ = split_of(name)

    def rebuilt(t):
        return split.density(split.predictors(t, row), split.constants(row))

    def direct(t):
        return jnp.asarray(fun(t, *row), float)

    derivative = jax.jacfwd if name == "while loop" else jax.grad  # a while loop has no reverse mode

    def unjoined(t):
        return split.value(t, row, split.constants(row))

    both = rebuilt, unjoined
    everything = direct, *both, derivative(direct), *map(derivative, both)
    expected, *found, expected_slope, one, other = jax.jit(jax.vmap(lambda t: [f(t) for f in everything]))(points())
    np.testing.assert_allclose(found, [expected] * 2, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose([one, other], [expected_slope] * 2, rtol=1e-9, atol=1e-10)


def test_slopes_of_predictors_that_are_not_joined_pass_through_none_of_the_others():
    def fun(t, x):
        return jnp.sum(jnp.exp(t[:3])) + (x @ t[3:5]) ** 2

    x = jnp.ones(2)
    split = factorize(fun, THETA, x)
    theta, constants = jnp.ones(SIZE), split.constants((x,))

    def needs_exponential(value):
        program = jax.make_jaxpr(jax.grad(value))(x)
        return any(eqn.primitive.name == "exp" for eqn in equations(of_outputs(program, [0]).jaxpr))

    assert needs_exponential(lambda x: split.density(split.predictors(theta, (x,)), constants))
    assert not needs_exponential(lambda x: split.value(theta, (x,), constants))


@by_example
def test_number_of_predictors_is_the_smallest(name):
    _, row, split, expected = split_of(name)
    assert split.num_predictors == expected
    assert split.predictors(points(1)[0], row).shape == (expected,)


@by_example
def test_predictors_are_affine(name):
    _, row, split, _ = split_of(name)
    here, step = points(2)
    middle, ahead, behind = (split.predictors(t, row) for t in (here, here + step, here - step))
    np.testing.assert_allclose(ahead + behind - 2 * middle, 0.0, atol=1e-12)


@by_example
def test_density_and_constants_do_not_see_theta_and_rows_map(name):
    fun, row, split, _ = split_of(name)
    if not row:
        return
    doubled = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), row)
    theta = points(1)[0]
    predictors = jax.vmap(split.predictors, in_axes=(None, 0))(theta, doubled)
    values = jax.jit(jax.vmap(split.density))(predictors, jax.vmap(split.constants)(doubled))
    np.testing.assert_allclose(values, np.full(2, float(fun(theta, *row))), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name, affine", [("affine", True), ("log of an exponential", True), ("line", False)])
def test_affine_functions_are_known_as_such(name, affine):
    assert split_of(name)[2].is_affine is affine


@pytest.mark.parametrize(
    "fun, through, inverse",
    [
        (lambda t, x: 3.0 * jnp.exp(x @ t[:3]), "log", np.log),
        (lambda t, x: jnp.exp(x @ t[:3]) / 3.0, "log", np.log),
        (lambda t, x: 3.0 / jnp.exp(x @ t[:3]), "log", np.log),
        (lambda t, x: jnp.exp(t[0]) * x[0] ** 2 * jnp.exp(x @ t[:3]), "log", np.log),
        (lambda t, x: x[0] ** 2 + 0.0 * x[1], "log", np.log),
        (lambda t, x: jax.nn.sigmoid(x @ t[:3] + 1.0), "logit", lambda p: np.log(p) - np.log1p(-p)),
    ],
)
def test_links_are_read_off_exactly(fun, through, inverse):
    split = Reading(lambda *a: {"value": fun(*a)}, THETA, X).split("value", through)
    assert split is not None and split.num_predictors <= 1
    for theta in points():
        value = split.density(split.predictors(theta, (X,)), split.constants((X,)))
        np.testing.assert_allclose(value, inverse(fun(theta, X)), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "fun, through",
    [
        (lambda t: 1.0 + jnp.exp(t[0]), "log"),
        (lambda t: jnp.exp(t[0]) * t[1], "log"),
        (lambda t: jnp.exp(jnp.sin(t[0])), "log"),
        (lambda t: 0.5 * jax.nn.sigmoid(t[0]), "logit"),
        (lambda t: jnp.exp(t[0]), "logit"),
    ],
)
def test_links_that_are_not_there_are_not_read_off(fun, through):
    assert Reading(lambda w: {"value": fun(w)}, THETA).split("value", through) is None


def test_outputs_of_one_reading_split_as_each_does_alone():
    def both(t, x, g):
        mean = x @ t[:3] + t[3]
        return {"mean": mean - 0.4, "scale": jnp.exp(t[4]), "density": dist.Normal(mean, jnp.exp(t[4])).log_prob(t[g])}

    reading = Reading(both, THETA, X, G)
    cases = {("mean", None): 1, ("scale", "log"): 1, ("scale", None): 1, ("density", None): 2}
    for (name, through), num_predictors in cases.items():
        split = reading.split(name, through)
        alone = Reading(lambda t, x, g, n=name: {n: both(t, x, g)[n]}, THETA, X, G).split(name, through)
        assert split.num_predictors == alone.num_predictors == num_predictors
        for theta in points():
            found, expected = (s.density(s.predictors(theta, (X, G)), s.constants((X, G))) for s in (split, alone))
            value = both(theta, X, G)[name]
            np.testing.assert_allclose([found, expected], jnp.log(value) if through else value, rtol=1e-12)


def test_a_row_of_a_softmax_with_known_outcomes_depends_on_its_own_logits():
    """Outcomes that are numbers, as in a model of all data: the logits are 80 numbers, a row's are two and a zero."""
    rng = np.random.default_rng(0)
    x, y = jnp.asarray(rng.normal(size=(40, 2))), rng.integers(0, 3, 40)

    def of_row(theta, row, e):
        logits = jnp.concatenate([jnp.zeros((40, 1)), theta[:2] + x @ theta[2:].reshape(2, 2)], axis=1)
        return dist.Categorical(logits=logits).log_prob(y)[e]

    split = factorize(of_row, jax.ShapeDtypeStruct((6,), x.dtype), {}, jax.ShapeDtypeStruct((), jnp.int32))
    theta = jnp.asarray(rng.normal(size=6))
    of_split = lambda e: split.density(split.predictors(theta, ({}, e)), split.constants(({}, e)))  # noqa: E731
    every = jnp.arange(40, dtype=jnp.int32)
    np.testing.assert_allclose(jax.vmap(of_split)(every), of_row(theta, {}, every), rtol=1e-6)
    assert split.num_predictors <= 7


def test_a_row_of_logits_masked_by_groups_takes_its_own_logits_alone():
    """As of a nested logit: sums over the members of each group, and each alternative's own of these."""
    rng = np.random.default_rng(0)
    x, y, group = jnp.asarray(rng.normal(size=(40, 4))), rng.integers(0, 4, 40), np.array([0, 0, 1, 1])

    def of_row(theta, row, e):
        scaled = (theta[:4] + theta[4] * x + theta[5] * x**2) / jnp.array([0.5, 0.5, 0.8, 0.8])
        sums = jnp.stack([logsumexp(jnp.where(group == k, scaled, -jnp.inf), axis=-1) for k in range(2)], -1)
        logits = jax.nn.log_softmax(jnp.array([0.5, 0.8]) * sums, axis=-1)[:, group] + scaled - sums[:, group]
        return dist.Categorical(logits=logits).log_prob(y)[e]

    split = factorize(of_row, jax.ShapeDtypeStruct((6,), x.dtype), {}, jax.ShapeDtypeStruct((), jnp.int32))
    theta = jnp.asarray(rng.normal(size=6))
    constants = lambda e: split.constants(({}, e))  # noqa: E731
    of_split = lambda e: split.density(split.predictors(theta, ({}, e)), constants(e))  # noqa: E731
    every = jnp.arange(40, dtype=jnp.int32)
    np.testing.assert_allclose(jax.vmap(of_split)(every), of_row(theta, {}, every), rtol=1e-6)
    assert split.num_predictors == 4
    program = jax.make_jaxpr(split.density)(jnp.zeros(4), constants(every[0]))
    assert max(v.aval.size for eqn in program.eqns for v in eqn.outvars) <= 16


def test_entries_of_masked_affine_functions_count_once():
    mask, repeated = np.array([True, False, True, True]), np.array([0, 0, 1, 1])
    weights = jnp.array([1.0, -2.0, 0.5, 3.0])

    def fun(theta):
        return jnp.sin(jnp.where(mask, theta[:4], theta[4:8])[repeated]) @ weights

    split = factorize(fun, jax.ShapeDtypeStruct((8,), float))
    theta = jnp.asarray(np.random.default_rng(0).normal(size=8))
    assert split.num_predictors == 2
    np.testing.assert_allclose(split.density(split.predictors(theta, ()), split.constants(())), fun(theta), rtol=1e-10)


def test_a_mask_on_an_affine_function_leaves_a_sum_one_predictor():
    seen = np.array([True, False, True, True])

    def of_row(theta, row, e):
        return jnp.sin(theta[0] + theta[1] * jnp.where(seen, 0.5, 0.0) + jnp.where(seen, 0.0, theta[2:6]))[e]

    split = factorize(of_row, jax.ShapeDtypeStruct((6,), float), {}, jax.ShapeDtypeStruct((), jnp.int32))
    theta = jnp.asarray(np.random.default_rng(0).normal(size=6))
    assert split.num_predictors == 1
    for e in jnp.arange(4, dtype=jnp.int32):
        found = split.density(split.predictors(theta, ({}, e)), split.constants(({}, e)))
        np.testing.assert_allclose(found, of_row(theta, {}, e), rtol=1e-10)
