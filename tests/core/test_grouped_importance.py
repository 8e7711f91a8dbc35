"""Importance sampling from a Gaussian, one independent group at a time: against closed forms and dense quadrature."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp

from numpyro_rvga.core.groups.importance import Summands, independent_groups, log_integral
from numpyro_rvga.core.updates.state import CanonicalGaussian


def coupling(size, pairs):
    coupled = np.eye(size, dtype=bool)
    for i, j in pairs:
        coupled[i, j] = coupled[j, i] = True
    return coupled


def test_groups_are_what_the_most_coupled_entries_leave():
    star = independent_groups(coupling(6, [(0, j) for j in range(1, 6)]))
    assert star.shared.tolist() == [0] and sorted(star.members.ravel()) == [1, 2, 3, 4, 5]
    pairs = [(2, 3), (4, 5)] + [(i, j) for i in (0, 1) for j in range(2, 7)] + [(0, 1)]
    grouped = independent_groups(coupling(7, pairs))
    assert grouped.shared.tolist() == [0, 1]
    assert sorted(map(tuple, grouped.members.tolist())) == [(2, 3), (4, 5), (6, 7)]  # 7 pads
    assert independent_groups(np.ones((5, 5), bool)).shared.size == 5
    assert independent_groups(np.eye(5, dtype=bool)).shared.size == 0


@pytest.mark.parametrize("pairs", [[(0, j) for j in range(1, 6)], [(0, 1), (0, 3), (1, 2), (0, 4)], [], None])
def test_gaussian_integrals_are_exact(pairs):
    rng = np.random.default_rng(0)
    coupled = np.ones((6, 6), bool) if pairs is None else coupling(6, pairs)
    precision = np.where(coupled, rng.normal(size=(6, 6)), 0)
    precision = precision + precision.T + 12 * np.eye(6)
    linear = rng.normal(size=6)
    base = CanonicalGaussian(jnp.asarray(precision), jnp.asarray(linear), jnp.asarray(0.3), jnp.zeros(len(linear)))
    # A q that is the integrand itself, but for its mean: then only the shared entries' draws have an error.
    found = log_integral(base, [], jnp.asarray(precision), independent_groups(coupled))
    exact = 0.3 + 0.5 * linear @ np.linalg.solve(precision, linear) - 0.5 * np.linalg.slogdet(precision)[1]
    np.testing.assert_allclose(found.value, exact, atol=5 * float(found.error) + 1e-9)
    assert found.error < 0.03


def logistic_groups(shared_effect):
    """A shared entry and four of their own, with three binary rows each: of x - mode."""
    y = np.repeat([0.0, 1.0, 1.0, 3.0], 1)
    jacobian = np.zeros((4, 1, 5))
    jacobian[:, 0, 0] = shared_effect
    jacobian[np.arange(4), 0, 1 + np.arange(4)] = 1
    prior = np.array([1.0, *np.full(4, 1 / 2.5**2)])

    def density(u, constants):
        return constants[0] * u[:, 0] - 3 * jnp.logaddexp(0.0, u[:, 0])

    return CanonicalGaussian(jnp.diag(jnp.asarray(prior)), jnp.zeros(5), jnp.zeros(()), jnp.zeros(5)), Summands(
        density, jnp.zeros((4, 1)), jnp.asarray(jacobian), (jnp.asarray(y),)
    )


def test_groups_of_binary_rows_are_integrated_as_by_dense_quadrature():
    base, rows = logistic_groups(1.0)
    x = np.linspace(-25, 25, 2001)
    s = np.linspace(-7, 7, 281)
    total = -0.5 * s**2
    for y in np.asarray(rows.constants[0]):
        u = s[:, None] + x
        log_density = y * u - 3 * np.logaddexp(0, u) - 0.5 * x**2 / 2.5**2
        total = total + logsumexp(log_density, axis=1) + np.log(x[1] - x[0])
    exact = logsumexp(total) + np.log(s[1] - s[0]) - 2.5 * np.log(2 * np.pi)

    # The Gaussian at the mode, and its precision made less to be as wide as the integrand.
    def log_density(t):
        return -0.5 * t @ base.precision @ t + jnp.sum(rows.density(rows.jacobian @ t, rows.constants))

    t = jnp.zeros(5)
    for _ in range(30):
        t = t - jnp.linalg.solve(jax.hessian(log_density)(t), jax.grad(log_density)(t))
    precision = -0.8 * jax.hessian(log_density)(t)
    moved = CanonicalGaussian(base.precision, -base.precision @ t, -0.5 * t @ base.precision @ t, t)
    there = rows._replace(predictors=rows.jacobian @ t)
    groups = independent_groups(np.asarray(precision) != 0)
    found = log_integral(moved, [[there]], precision, groups)
    assert groups.shared.tolist() == [0] and found.error < 5e-3
    np.testing.assert_allclose(found.value, exact, atol=4 * float(found.error) + 1e-3)
