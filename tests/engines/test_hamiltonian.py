"""Draws by the No-U-Turn Sampler of the host: moments in closed form, and how densities without a bound are left."""

import numpy as np
from numpyro.diagnostics import effective_sample_size
from scipy.special import digamma, polygamma

from numpyro_rvga.engines.integration.hamiltonian import NutsChain, Position

NUM_DRAWS = 3000


def draws_of(log_density, slope, size, num_draws=NUM_DRAWS):
    visits = []

    def evaluate(z, near):
        visits.append(near)
        return Position(z, log_density(z), slope(z), len(visits))

    chain = NutsChain(evaluate, evaluate(np.zeros(size), None), np.random.default_rng(0)).draws(150)
    draws = [next(chain) for _ in range(num_draws)]
    return np.array([draw.position.z for draw in draws]), draws, visits


def test_moments_of_a_coupled_gaussian_and_of_a_skewed_density():
    covariance = np.array([[0.1, 0.25, 0], [0.25, 1.0, 0.3], [0, 0.3, 2.0]])
    precision = np.linalg.inv(covariance)

    def log_density(z):  # the last is the log of a gamma variable of shape 2
        return -0.5 * z[:3] @ precision @ z[:3] + 2 * z[3] - np.exp(z[3])

    z, draws, visits = draws_of(log_density, lambda z: np.append(-precision @ z[:3], 2 - np.exp(z[3])), 4)
    deviation = np.append(np.sqrt(np.diag(covariance)), np.sqrt(polygamma(1, 2)))
    np.testing.assert_allclose(z.mean(0) / deviation, np.append(np.zeros(3), digamma(2)) / deviation, atol=0.08)
    np.testing.assert_allclose(z.std(0) / deviation, 1, atol=0.08)
    np.testing.assert_allclose(np.corrcoef(z[:, 0], z[:, 1])[0, 1], 0.25 / np.sqrt(0.1), atol=0.05)
    assert np.min(effective_sample_size(z[None])) > NUM_DRAWS / 4 and len(visits) < 20 * NUM_DRAWS
    assert not any(draw.diverges for draw in draws)
    assert all(number is None or number <= len(visits) for number in visits)  # each starts from a place before


def test_a_trajectory_that_leaves_the_support_is_given_up():
    def log_density(z):
        return -float(z[0]) if z[0] > -1 else -np.inf  # an exponential variable less one

    z, draws, _ = draws_of(log_density, lambda z: -np.ones(1) if z[0] > -1 else np.zeros(1), 1)
    assert np.min(z) > -1 and any(draw.diverges for draw in draws)
    np.testing.assert_allclose([z.mean() + 1, z.std()], 1, atol=0.15)
