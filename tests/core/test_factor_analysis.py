"""The exclusive projection to a precision of diagonal plus low rank, against dense matrices and SciPy's L-BFGS."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.optimize import minimize

from numpyro_rvga.core.gaussians import ExpectedDerivatives, LowRankGaussian
from numpyro_rvga.core.gaussians.low_rank import nearer, projected

RANK = 2


def parts(seed, count=4, size=8, spread=0.5):
    """A diagonal (size,), and rows (count, size) along two directions and others, in columns of unequal scales."""
    rng = np.random.default_rng(seed)
    columns = np.exp(spread * rng.normal(size=size))
    rows = rng.normal(size=(count, 2)) @ rng.normal(size=(2, size)) + 0.7 * rng.normal(size=(count, size))
    return rng.uniform(0.5, 2.0, size), rows * columns


def precision(diagonal, rows):
    return np.diag(np.asarray(diagonal, float)) + np.asarray(rows, float).T @ np.asarray(rows, float)


def divergence(q, target):
    """KL(q || N(q.mean, target^-1)), by dense matrices."""
    own = precision(q.diagonal, q.factor)
    log_ratio = np.linalg.slogdet(own)[1] - np.linalg.slogdet(target)[1]
    return 0.5 * (np.trace(np.linalg.solve(own, target)) - len(own) + log_ratio)


def path(diagonal, rows, num_steps, dtype=jnp.float64):
    """The leading directions, and what each step from there leads to."""
    zeros, diagonal = jnp.zeros(len(diagonal), dtype), jnp.asarray(diagonal, dtype)
    rows = [jnp.asarray(rows[:2], dtype), jnp.asarray(rows[2:], dtype)]
    found = [projected(zeros, zeros, diagonal, rows, RANK)]
    step = jax.jit(nearer)
    for _ in range(num_steps):
        found.append(step(found[-1], diagonal, rows))
    return found


def least_divergence(target, starts=6):
    """By L-BFGS in all entries of the factor and the log diagonal, from several starts."""
    size = len(target)

    @jax.jit
    @jax.value_and_grad
    def objective(x):
        factor = x[size:].reshape(RANK, size)
        own = jnp.diag(jnp.exp(x[:size])) + factor.T @ factor
        return 0.5 * (jnp.trace(jnp.linalg.solve(own, target)) + jnp.linalg.slogdet(own)[1])

    rng = np.random.default_rng(10)
    ends = [
        minimize(
            lambda x: [np.asarray(part, float) for part in objective(x)],
            rng.normal(size=size + RANK * size),
            jac=True,
            method="L-BFGS-B",
            options={"maxiter": 5000, "maxfun": 10_000, "ftol": 1e-15, "gtol": 1e-9},
        ).fun
        for _ in range(starts)
    ]
    return min(ends) - 0.5 * (size + np.linalg.slogdet(target)[1])


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_steps_end_at_the_least_divergence_that_a_general_search_finds(seed):
    diagonal, rows = parts(seed)
    target = precision(diagonal, rows)
    found = path(diagonal, rows, 2000)
    least = least_divergence(target)
    np.testing.assert_allclose(divergence(found[-1], target), least, rtol=1e-7)
    assert divergence(found[0], target) > 1.1 * least


@pytest.mark.parametrize("dtype, slack", [(jnp.float64, 1e-12), (jnp.float32, 1e-5)])
@pytest.mark.parametrize("size, count, spread", [(8, 4, 1.0), (40, 5, 0.0), (40, 5, 2.0), (40, 60, 1.0)])
def test_no_step_raises_the_divergence_and_the_diagonal_of_the_precision_stays(size, count, spread, dtype, slack):
    for seed in range(3):
        diagonal, rows = parts(seed, count, size, spread)
        target = precision(diagonal, rows)
        found = path(diagonal, rows, 30, dtype)
        divergences = [divergence(q, target) for q in found]
        assert np.all(np.diff(divergences) < slack * divergences[0])
        assert divergences[2] < 0.999 * divergences[0]
        for q in found[1:]:
            np.testing.assert_allclose(np.diag(precision(q.diagonal, q.factor)), np.diag(target), rtol=10 * slack)


def test_a_small_diagonal_beside_a_large_factor_is_kept_in_single_precision():
    """Squares of the factor are up to 6 * 10^5 times the diagonal. As a difference of the two it would be off by six
    percent, and is by two where the steps begin."""
    diagonal, rows = parts(0, count=RANK, size=40)
    found = path(diagonal, 100 * rows, 3, jnp.float32)
    np.testing.assert_allclose(found[-1].diagonal, diagonal, rtol=2e-3)
    assert np.max(np.abs(found[0].diagonal / diagonal - 1)) > 0.01


@pytest.mark.parametrize("count", [1, 3, 30])
def test_the_familys_exclusive_step_is_nearer_to_the_full_update_and_has_its_mean(count):
    diagonal, rows = parts(4, RANK + count)
    prior = LowRankGaussian(jnp.ones(8), jnp.asarray(diagonal), jnp.asarray(rows[:RANK]))
    gradient = np.linspace(-1, 1, 8)
    take = partial(prior.natural_step, ExpectedDerivatives(jnp.asarray(gradient), jnp.asarray(rows[RANK:])), 1.0)
    leading, exclusive = take("natural"), take("natural", projection="exclusive")
    target = precision(diagonal, rows)
    assert divergence(exclusive, target) < 0.99 * divergence(leading, target)
    np.testing.assert_allclose(exclusive.mean, 1 + np.linalg.solve(target, gradient), rtol=1e-10)
