"""The scale of groups of binary rows, integrated out by the bound and by importance sampling: against quadrature."""

from typing import NamedTuple

import jax
import numpy as np
import pytest
from scipy.special import logsumexp

from numpyro_rvga import FixedPointVI

KEY = jax.random.key(0)


class Exact(NamedTuple):
    evidence: float
    mean: np.ndarray  # of log tau and mu
    deviation: np.ndarray


def exact(num_rows, ones) -> Exact:
    """Groups that have as many ones are alike, and independent given log tau and mu.

    :param ones: of each group, of its ``num_rows`` rows.
    """
    log_tau, mu, z = np.linspace(-8, 3, 111), np.linspace(-8, 8, 129), np.linspace(-6, 6, 121)
    predictor = mu[None, :, None] + np.exp(log_tau)[:, None, None] * z
    log_z = -0.5 * z**2 - 0.5 * np.log(2 * np.pi) + np.log(z[1] - z[0])
    total = np.log(2) - 0.5 * (np.exp(log_tau)[:, None] / 2) ** 2 - np.log(2 * np.sqrt(2 * np.pi)) + log_tau[:, None]
    total = total - 0.5 * (mu / 2) ** 2 - np.log(2 * np.sqrt(2 * np.pi))
    for count, number in zip(*np.unique(ones, return_counts=True), strict=True):
        of_group = logsumexp(count * predictor - num_rows * np.logaddexp(0, predictor) + log_z, axis=2)
        total = total + number * of_group
    evidence = logsumexp(total) + np.log((log_tau[1] - log_tau[0]) * (mu[1] - mu[0]))
    mass = np.exp(total - logsumexp(total))
    margins = [(mass.sum(1), log_tau), (mass.sum(0), mu)]
    mean = np.array([weights @ x for weights, x in margins])
    variance = [weights @ (x - center) ** 2 for (weights, x), center in zip(margins, mean, strict=True)]
    return Exact(evidence, mean, np.sqrt(variance))


def errors(posterior, truth):
    """Of the means, in standard deviations, and of the logarithms of these: the largest of log tau and mu."""
    draws = posterior.sample_posterior(KEY, (40_000,))
    found = np.column_stack([np.log(draws["tau"]), draws["mu"]])
    of_mean = np.abs(found.mean(axis=0) - truth.mean) / truth.deviation
    return np.max(of_mean), np.max(np.abs(np.log(found.std(axis=0) / truth.deviation)))


@pytest.mark.parametrize(("num_groups", "num_rows", "tau"), [(12, 8, 0.5), (30, 5, 1.0), (50, 3, 1.5)], ids=str)
def test_scale_of_binary_groups_is_that_of_quadrature(import_benchmark, num_groups, num_rows, tau):
    case = import_benchmark("_nested_cases").binary(num_groups, num_rows, tau)
    truth = exact(num_rows, np.bincount(case.rows["group"], case.rows["y"]).astype(int))
    bound = FixedPointVI(case.model, integrate=["tau"]).run(case.rows, progress_bar=False, **case.kwargs)
    closer = bound.integrate(case.rows, sites=["tau"], marginal="importance", progress_bar=False)
    of_bound, of_closer = errors(bound, truth), errors(closer, truth)
    assert of_bound[0] < 0.1 and of_bound[1] < 0.15
    assert of_closer[0] < 0.05 and of_closer[1] < 0.03
    assert bound.elbo < truth.evidence
    assert closer.info["marginal"] == "importance" and 0 < closer.info["elbo_error"] < 0.01
    np.testing.assert_allclose(closer.elbo, truth.evidence, atol=4 * closer.info["elbo_error"] + 3e-3)
