"""The update equations of the BONG paper's appendix E, written out densely in NumPy.

``G`` is the expected Hessian of the log-likelihood, ``g`` its expected gradient. Gradients in a matrix are symmetrized,
which the paper leaves to the reader (equations 142 and 148). Factors of low-rank precisions are (P, R), as there.
"""

from typing import NamedTuple

import numpy as np
from numpy.linalg import inv
from scipy.linalg import block_diag


class Full(NamedTuple):
    mean: np.ndarray
    covariance: np.ndarray


class Diagonal(NamedTuple):
    mean: np.ndarray
    variance: np.ndarray

    @property
    def covariance(self):
        return np.diag(self.variance)


class LowRank(NamedTuple):
    mean: np.ndarray
    diagonal: np.ndarray
    factor: np.ndarray

    @property
    def precision(self):
        return np.diag(self.diagonal) + self.factor @ self.factor.T

    @property
    def covariance(self):
        return inv(self.precision)


def symmetric(matrix):
    return 0.5 * (matrix + matrix.T)


# ---------------------------------------------------------------------- full covariance
def bong_full_natural(q, g, G, rate, prior):
    """Equations 120-121."""
    covariance = inv(inv(q.covariance) - G)
    return Full(q.mean + covariance @ g, covariance)


def blr_full_natural(q, g, G, rate, prior):
    """Equations 135-136."""
    kept = inv(prior.covariance)
    covariance = inv((1 - rate) * inv(q.covariance) + rate * kept - rate * G)
    return Full(q.mean + rate * covariance @ (kept @ (prior.mean - q.mean) + g), covariance)


def bog_full_natural(q, g, G, rate, prior):
    """Equations 141-142."""
    S = q.covariance
    covariance = inv(inv(S) - symmetric(4 * rate * S @ np.outer(g, q.mean)) - 2 * rate * S @ G @ S)
    return Full(covariance @ (inv(S) @ q.mean + rate * S @ g), covariance)


def bbb_full_natural(q, g, G, rate, prior):
    """Equations 147-148."""
    S, kept, identity = q.covariance, inv(prior.covariance), np.eye(len(g))
    inside = 2 * kept @ np.outer(prior.mean - q.mean, q.mean) + identity + 2 * np.outer(g, q.mean) + (G - kept) @ S
    covariance = inv(inv(S) - 2 * rate * symmetric(S @ inside))
    mean = covariance @ inv(S) @ q.mean + rate * covariance @ S @ (g + kept @ (prior.mean - q.mean))
    return Full(mean, covariance)


def bong_full_moment(q, g, G, rate, prior):
    """Equations 169-170."""
    S = q.covariance
    return Full(q.mean + S @ g, S + S @ G @ S)


def blr_full_moment(q, g, G, rate, prior):
    """Equations 173-174."""
    S, kept = q.covariance, inv(prior.covariance)
    mean = q.mean + rate * S @ kept @ (prior.mean - q.mean) + rate * S @ g
    return Full(mean, (1 + rate) * S + rate * S @ (G - kept) @ S)


def bog_full_moment(q, g, G, rate, prior):
    """Equations 177-178."""
    return Full(q.mean + rate * g, q.covariance + rate / 2 * G)


def bbb_full_moment(q, g, G, rate, prior):
    """Equations 181-182."""
    kept = inv(prior.covariance)
    mean = q.mean + rate * kept @ (prior.mean - q.mean) + rate * g
    return Full(mean, q.covariance + rate / 2 * (inv(q.covariance) - kept + G))


# ---------------------------------------------------------------------- diagonal
def bong_diagonal_natural(q, g, G, rate, prior):
    """Equations 212-213."""
    variance = 1 / (1 / q.variance - np.diag(G))
    return Diagonal(q.mean + variance * g, variance)


def blr_diagonal_natural(q, g, G, rate, prior):
    """Equations 218-219."""
    variance = 1 / ((1 - rate) / q.variance + rate / prior.variance - rate * np.diag(G))
    mean = q.mean + rate * variance / prior.variance * (prior.mean - q.mean) + rate * variance * g
    return Diagonal(mean, variance)


def bog_diagonal_natural(q, g, G, rate, prior):
    """Equations 224-225."""
    v = q.variance
    variance = 1 / (1 / v - 4 * rate * v * q.mean * g - 2 * rate * v**2 * np.diag(G))
    return Diagonal(variance / v * q.mean + rate * variance * v * g, variance)


def bbb_diagonal_natural(q, g, G, rate, prior):
    """Equations 230-231."""
    v, kept, shift = q.variance, 1 / prior.variance, q.mean - prior.mean
    precision = 1 / v - 4 * rate * v * q.mean * g - 2 * rate * v**2 * np.diag(G)
    variance = 1 / (precision + 4 * rate * v * kept * q.mean * shift + 2 * rate * v**2 * (kept - 1 / v))
    return Diagonal(variance / v * q.mean + rate * variance * v * (g - kept * shift), variance)


def bong_diagonal_moment(q, g, G, rate, prior):
    """Equations 248-249."""
    return Diagonal(q.mean + q.variance * g, q.variance + q.variance**2 * np.diag(G))


def blr_diagonal_moment(q, g, G, rate, prior):
    """Equations 252-253."""
    v, kept = q.variance, 1 / prior.variance
    mean = q.mean + rate * v * kept * (prior.mean - q.mean) + rate * v * g
    return Diagonal(mean, v + rate * v**2 * (1 / v - kept) + rate * v**2 * np.diag(G))


def bog_diagonal_moment(q, g, G, rate, prior):
    """Equations 256-257."""
    return Diagonal(q.mean + rate * g, q.variance + rate / 2 * np.diag(G))


def bbb_diagonal_moment(q, g, G, rate, prior):
    """Equations 260-261."""
    kept = 1 / prior.variance
    mean = q.mean + rate * kept * (prior.mean - q.mean) + rate * g
    return Diagonal(mean, q.variance + rate / 2 * (1 / q.variance - kept) + rate / 2 * np.diag(G))


# ---------------------------------------------------------------------- diagonal plus low rank
def projected(mean, diagonal, factor, rank):
    """Equations 276-277: the leading singular vectors of a wide factor, and the diagonal of the rest."""
    vectors, values, _ = np.linalg.svd(factor, full_matrices=False)
    kept = vectors[:, :rank] * values[:rank]
    return LowRank(mean, diagonal + np.sum(factor**2, axis=1) - np.sum(kept**2, axis=1), kept)


def _root(G):
    """A (P, P) with A A^T = -G."""
    values, vectors = np.linalg.eigh(-G)
    return vectors * np.sqrt(np.maximum(values, 0))


def bong_low_rank(q, g, G, rate, prior):
    """Equations 278-286."""
    wide = np.hstack([q.factor, _root(G)])
    mean = q.mean + np.linalg.solve(np.diag(q.diagonal) + wide @ wide.T, g)
    return projected(mean, q.diagonal, wide, q.factor.shape[1])


def blr_low_rank(q, g, G, rate, prior):
    """Equations 293-301."""
    diagonal = (1 - rate) * q.diagonal + rate * prior.diagonal
    wide = np.hstack([np.sqrt(1 - rate) * q.factor, np.sqrt(rate) * prior.factor, np.sqrt(rate) * _root(G)])
    pull = prior.precision @ (prior.mean - q.mean) + g
    mean = q.mean + rate * np.linalg.solve(np.diag(diagonal) + wide @ wide.T, pull)
    return projected(mean, diagonal, wide, q.factor.shape[1])


def bog_low_rank(q, g, G, rate, prior):
    """Equations 309-311."""
    move = q.covariance @ G @ q.covariance
    return LowRank(q.mean + rate * g, q.diagonal - rate / 2 * np.diag(move), q.factor - rate * move @ q.factor)


def bbb_low_rank(q, g, G, rate, prior):
    """Equations 319-321."""
    move = q.covariance @ (prior.precision - q.precision - G) @ q.covariance
    mean = q.mean + rate * prior.precision @ (prior.mean - q.mean) + rate * g
    return LowRank(mean, q.diagonal + rate / 2 * np.diag(move), q.factor + rate * move @ q.factor)


STEPS = {
    ("bong", "full", "natural"): bong_full_natural,
    ("blr", "full", "natural"): blr_full_natural,
    ("bog", "full", "natural"): bog_full_natural,
    ("bbb", "full", "natural"): bbb_full_natural,
    ("bong", "full", "moment"): bong_full_moment,
    ("blr", "full", "moment"): blr_full_moment,
    ("bog", "full", "moment"): bog_full_moment,
    ("bbb", "full", "moment"): bbb_full_moment,
    ("bong", "diagonal", "natural"): bong_diagonal_natural,
    ("blr", "diagonal", "natural"): blr_diagonal_natural,
    ("bog", "diagonal", "natural"): bog_diagonal_natural,
    ("bbb", "diagonal", "natural"): bbb_diagonal_natural,
    ("bong", "diagonal", "moment"): bong_diagonal_moment,
    ("blr", "diagonal", "moment"): blr_diagonal_moment,
    ("bog", "diagonal", "moment"): bog_diagonal_moment,
    ("bbb", "diagonal", "moment"): bbb_diagonal_moment,
    ("bong", "low-rank", "natural"): bong_low_rank,
    ("blr", "low-rank", "natural"): blr_low_rank,
    ("bog", "low-rank", "natural"): bog_low_rank,
    ("bbb", "low-rank", "natural"): bbb_low_rank,
}


def updated(rule, family, chart, prior, describe, rate, num_iters=1):
    """q after a block: ``num_iters`` steps from the prior.

    :param describe: mean and covariance -> g and G.
    """
    q = prior
    for _ in range(num_iters):
        q = STEPS[rule, family, chart](q, *describe(q.mean, q.covariance), rate, prior)
    return q


def as_dense(q):
    """One of the package's Gaussians as one of these."""
    if hasattr(q, "roots"):
        return Full(np.asarray(q.mean), block_diag(*[np.asarray(root) @ np.asarray(root).T for root in q.roots]))
    arrays = {name: np.asarray(value) for name, value in vars(q).items()}
    if "root" in arrays:
        return Full(arrays["mean"], arrays["root"] @ arrays["root"].T)
    if "variance" in arrays:
        return Diagonal(**arrays)
    return LowRank(arrays["mean"], arrays["diagonal"], arrays["factor"].T)
