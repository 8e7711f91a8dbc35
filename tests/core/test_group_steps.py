"""Steps with groups eliminated are the steps of the whole matrix, and groups settle where their bound is highest."""

import numpy as np
from scipy.optimize import minimize

from numpyro_rvga.core.groups.steps import Groups, GroupSums, conditionals, maximize_groups, message, mixed, take_step


def made(n=4, d=2, k=3, seed=0):
    """q of groups, and sums at q whose precisions are positive definite together."""
    rng = np.random.default_rng(seed)

    def blocks():
        roots = rng.normal(size=(n, d + k, 2 * (d + k)))
        return roots @ roots.swapaxes(1, 2)

    own, new = blocks(), blocks()
    groups = Groups(rng.normal(size=(n, d)), own[:, :d, :d], own[:, :d, d:])
    sums = GroupSums(
        np.zeros(n), rng.normal(size=(n, d)), new[:, :d, :d], new[:, :d, d:], 0.0, rng.normal(size=k),
        new[:, d:, d:].sum(axis=0), 0.0,
    )  # fmt: skip
    return groups, sums, own[:, d:, d:].sum(axis=0)


def dense(precision, coupling, corner):
    n, d, k = coupling.shape
    whole = np.zeros((n * d + k, n * d + k))
    whole[-k:, -k:] = corner
    for g in range(n):
        at = slice(g * d, (g + 1) * d)
        whole[at, at], whole[at, -k:], whole[-k:, at] = precision[g], coupling[g], coupling[g].T
    return whole


def test_a_step_is_that_of_the_whole_matrix():
    groups, sums, corner = made()
    n, d, k = groups.coupling.shape
    before = dense(groups.precision, groups.coupling, corner)
    target = dense(sums.precision, sums.coupling, sums.shared_precision)
    gradient = np.concatenate([sums.gradient.ravel(), sums.shared_gradient])
    marginal = np.linalg.inv(np.linalg.inv(before)[-k:, -k:])
    for step in (1.0, 0.3):
        whole = (1 - step) * before + step * target
        move = step * np.linalg.solve(whole, gradient)
        told = message(groups, sums, step)
        precision = (1 - step) * marginal + told.precision
        np.testing.assert_allclose(precision, np.linalg.inv(np.linalg.inv(whole)[-k:, -k:]), rtol=1e-9)
        shift = step * np.linalg.solve(precision, told.gradient)
        np.testing.assert_allclose(shift, move[-k:], rtol=1e-9)
        after = take_step(groups, sums, step, shift)
        np.testing.assert_allclose(after.mean - groups.mean, move[:-k].reshape(n, d), rtol=1e-9)
        covariance, given = np.linalg.inv(whole), conditionals(after)
        spread = given.root @ given.root.swapaxes(1, 2) + given.slope @ covariance[-k:, -k:] @ given.slope.swapaxes(
            1, 2
        )
        for g in range(n):
            at = slice(g * d, (g + 1) * d)
            np.testing.assert_allclose(spread[g], covariance[at, at], rtol=1e-8)
            np.testing.assert_allclose(given.slope[g] @ covariance[-k:, -k:], covariance[at, -k:], rtol=1e-8)
    entropies = conditionals(groups).entropy.sum()
    expected = 0.5 * n * d * np.log(2 * np.pi * np.e) - 0.5 * np.linalg.slogdet(groups.precision)[1].sum()
    np.testing.assert_allclose(entropies, expected)


def test_groups_settle_where_their_bound_is_highest_from_afar():
    counts = np.array([0.0, 3.0, 40.0, 7.0])

    def evaluate(groups):
        """Counts whose log rates have standard normal priors, each for itself."""
        mean, variance = groups.mean[:, 0], 1 / groups.precision[:, 0, 0]
        with np.errstate(over="ignore", invalid="ignore"):
            rate = np.exp(mean + variance / 2)
            values = counts * mean - rate - 0.5 * (mean**2 + variance)
        zeros = np.zeros((len(mean), 1, 1))
        gradient = (counts - rate - mean)[:, None]
        return GroupSums(values, gradient, (rate + 1)[:, None, None], zeros, 0.0, np.zeros(1), np.zeros((1, 1)), 0.0)

    start = Groups(np.full((4, 1), -6.0), np.full((4, 1, 1), 0.3), np.zeros((4, 1, 1)))
    groups, at = maximize_groups(evaluate, start, 40, 1e-14)
    for g, count in enumerate(counts):

        def loss(x, count=count):
            mean, log_variance = x
            return -(count * mean - np.exp(mean + np.exp(log_variance) / 2) - 0.5 * (mean**2 + np.exp(log_variance))
                     + 0.5 * log_variance)  # fmt: skip

        best = minimize(loss, [0.0, 0.0], tol=1e-12)
        np.testing.assert_allclose(groups.mean[g, 0], best.x[0], atol=3e-3)
        np.testing.assert_allclose(groups.precision[g, 0, 0], np.exp(-best.x[1]), rtol=3e-3)
        bound = at.values[g] + conditionals(groups).entropy[g] - 0.5 * np.log(2 * np.pi * np.e)
        np.testing.assert_allclose(bound, -best.fun, atol=1e-4)


def test_groups_without_a_gaussian_are_told_apart():
    groups, sums, _ = made()
    sums.precision[2] = -np.eye(2)
    ahead = conditionals(mixed(groups, sums, 1.0))
    assert np.isneginf(ahead.entropy[2]) and np.isfinite(np.delete(ahead.entropy, 2)).all()
    assert (
        np.isnan(message(groups, sums, 1.0).precision).all()
        and np.isfinite(message(groups, sums, 0.01).precision).all()
    )
