"""The Gaussian families, and how each takes a step: full, (block-)diagonal, and diagonal plus low-rank precision.

:class:`Family` says what each can do. There are two kinds of steps towards a maximum of E_q[log p(y | theta)] -
KL(q || prior): ``natural_step``, which each family has, and :func:`gradient_step`, which is the same for all.

The diagonal and the low-rank family make no (P, P) array, except for dynamics that are given as one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ..matrices.linalg import column_sums, inverse
from .block_diagonal import BlockDiagonalGaussian
from .diagonal import DiagonalGaussian
from .full import Family, FullGaussian
from .low_rank import LowRankGaussian, leading_part, projected
from .steps import PARAMETERIZATIONS, ExpectedDerivatives, Movement, Transition, nan_if_invalid

__all__ = [
    "FAMILIES",
    "PARAMETERIZATIONS",
    "BlockDiagonalGaussian",
    "DiagonalGaussian",
    "ExpectedDerivatives",
    "Family",
    "FullGaussian",
    "LowRankGaussian",
    "Movement",
    "Transition",
    "converted",
    "gradient_step",
    "has_diverged",
]

FARTHEST = 1e4  # standard deviations by which a plain gradient step may move a mean

FAMILIES = {
    "full": FullGaussian,
    "diagonal": DiagonalGaussian,
    "block-diagonal": BlockDiagonalGaussian,
    "low-rank": LowRankGaussian,
}


def converted(q: Family, family: str, rank: int, sizes: tuple[int, ...] = ()) -> Family:
    """q in another family, with the diagonal of its precision, and ``rank`` directions of the rest if low-rank.

    :param sizes: of the blocks of a block-diagonal Gaussian, which has the blocks of the precision.
    """
    if isinstance(q, FAMILIES[family]) and not (isinstance(q, LowRankGaussian) and len(q.factor) != rank):
        return q
    if family == "full":
        return q.as_full()
    if family == "block-diagonal":
        whole = q.as_full()
        dual = FullGaussian(q.mean, jnp.linalg.inv(whole.root).T)  # of which the covariance is q's precision
        marginals = BlockDiagonalGaussian.blocks_of(dual, sizes)
        return BlockDiagonalGaussian(q.mean, tuple(jnp.linalg.inv(root).T for root in marginals.roots))
    if isinstance(q, DiagonalGaussian):
        return LowRankGaussian(q.mean, 1 / q.variance, jnp.zeros((rank, len(q.mean)), q.mean.dtype))
    if isinstance(q, LowRankGaussian):
        if family == "low-rank":
            rows = jnp.zeros((max(rank - len(q.factor), 0), len(q.mean)), q.mean.dtype)
            return projected(q.mean, jnp.zeros_like(q.mean), q.diagonal, [rows, q.factor], rank)
        return DiagonalGaussian(q.mean, 1 / (q.diagonal + column_sums(q.factor**2)))
    precision = inverse(q.covariance())
    return (
        leading_part(q.mean, precision, rank)
        if family == "low-rank"
        else DiagonalGaussian(q.mean, 1 / jnp.diagonal(precision))
    )


def gradient_step(
    q: Family, derivatives: ExpectedDerivatives, rate: Array | float, parameterization: str, prior: Family | None = None
) -> Family:
    """A step along the plain gradient of E_q[log p(y | theta)] - KL(q || prior) in q's parameters (BOG, BBB).

    E_q[log p(y | theta)] has the gradient g in the mean and -H / 2 in the covariance (Bonnet's and Price's theorems).
    So has the function g . mu - trace(H Sigma) / 2, which is differentiated in its place.

    :param derivatives: g and H at q.
    :param rate: the learning rate.
    :param parameterization: the parameters: ``"natural"`` or ``"moment"``; the low-rank family has its arrays.
    :param prior: None to leave out the KL divergence (BOG), which has no gradient where q is the prior.
    """

    def objective(coordinates):
        new = type(q).from_coordinates(coordinates, parameterization)
        value = derivatives.gradient @ new.mean - 0.5 * new.expected_quadratic(derivatives)
        return value if prior is None else value - new.kl_divergence(prior)

    start = q.coordinates(parameterization)
    slopes = jax.grad(objective)(start)
    moved = jax.tree.map(lambda x, slope: x + rate * slope, start, slopes)
    return nan_if_invalid(type(q).from_coordinates(moved, parameterization))


def has_diverged(q: Family, before: Family) -> Array:
    """Whether an entry of the mean is NaN or has moved by more than ``FARTHEST`` standard deviations."""
    deviation = 1 / jnp.sqrt(before.diagonal) if isinstance(before, LowRankGaussian) else before.deviation()
    return ~jnp.all(jnp.abs(q.mean - before.mean) <= FARTHEST * deviation)
