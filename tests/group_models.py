"""What tests of models with groups share: the exact posterior of a linear Gaussian one, and distances from the best."""

import numpy as np


def dense_posterior(design, y, noise_variance, num_groups):
    """Mean, covariance and evidence of ``measured``: centre (2,), slope, and a vector (2,) for each group.

    :param design: of the observations y (n,), (n, 3 + 2 num_groups). :param noise_variance: of each, (n,).
    """
    prior_mean = np.concatenate([[1.0, 1.0, 0.5], np.ones(2 * num_groups)])
    prior = np.zeros((len(prior_mean),) * 2)
    prior[:2, :2], prior[2, 2] = [[2.0, 0.5], [0.5, 1.0]], 4.0
    tied = np.tile(np.eye(2), (1, num_groups))
    prior[:2, 3:] = prior[:2, :2] @ tied
    prior[3:, :2] = prior[:2, 3:].T
    prior[3:, 3:] = tied.T @ prior[:2, :2] @ tied + 0.49 * np.eye(2 * num_groups)
    marginal = design @ prior @ design.T + np.diag(noise_variance)
    gain = np.linalg.solve(marginal, design @ prior).T
    residual = y - design @ prior_mean
    evidence = -0.5 * (residual @ np.linalg.solve(marginal, residual) + np.linalg.slogdet(2 * np.pi * marginal)[1])
    return prior_mean + gain @ residual, prior - gain @ design @ prior, evidence


def design_of(user, X, num_groups):
    """Of the rows of ``measured``."""
    design = np.zeros((len(user), 3 + 2 * num_groups))
    design[:, 2] = X[:, 2]
    for row, own in enumerate(user):
        design[row, 3 + 2 * own : 5 + 2 * own] = X[row, :2]
    return design


def off(found, best):
    """Of the shared sites, in standard deviations of the best Gaussian."""
    places = best.program.layout.indices_of(found.site_names)
    mean, covariance = np.asarray(best.mean)[places], np.asarray(best.covariance)[np.ix_(places, places)]
    deviation = np.sqrt(np.diagonal(covariance))
    widening = np.log(np.sqrt(np.diagonal(found.covariance)) / deviation)
    return max(np.abs((found.mean - mean) / deviation).max(), np.abs(widening).max())
