"""The Gaussian families, and how each takes a step: full, diagonal, and diagonal plus low-rank precision.

:class:`Family` says what each can do. There are two kinds of steps towards a maximum of E_q[log p(y | theta)] -
KL(q || prior): ``natural_step``, which each family has, and :func:`gradient_step`, which is the same for all.

The diagonal and the low-rank family make no (P, P) array, except for dynamics that are given as one.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from ..linalg import column_sums, inverse
from .diagonal import DiagonalGaussian
from .family import Family
from .full import FullGaussian
from .low_rank import LowRankGaussian, leading_part, projected
from .steps import CHARTS, Site, Transition, refused_if_invalid

__all__ = [
    "CHARTS",
    "FAMILIES",
    "DiagonalGaussian",
    "Family",
    "FullGaussian",
    "LowRankGaussian",
    "Site",
    "Transition",
    "converted",
    "gradient_step",
    "is_near",
]

FARTHEST = 1e4  # standard deviations that plain gradients may move a mean by: beyond, they diverge

FAMILIES = {"full": FullGaussian, "diagonal": DiagonalGaussian, "low-rank": LowRankGaussian}


def converted(q: Family, family: str, rank: int) -> Family:
    """The member of a family nearest to q: precisions keep their diagonal, and ``rank`` directions of the rest."""
    if isinstance(q, FAMILIES[family]) and not (isinstance(q, LowRankGaussian) and len(q.factor) != rank):
        return q
    if family == "full":
        return q.as_full()
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


def gradient_step(q: Family, site: Site, rate: Array | float, chart: str, prior: Family | None = None) -> Family:
    """A step along the plain gradient of E_q[log lik] - KL(q || prior) in q's coordinates.

    The gradient in the mean is g and that in the covariance -H / 2 (Bonnet's and Price's theorems), so the objective
    has the gradient of a function that is linear in both.

    :param prior: None if its KL divergence is left out (BOG), or q is the prior itself.
    """

    def objective(coordinates):
        new = type(q).from_coordinates(coordinates, chart)
        value = site.gradient @ new.mean - 0.5 * new.mean_curvature(site)
        return value if prior is None else value - new.divergence(prior)

    start = q.coordinates(chart)
    slopes = jax.grad(objective)(start)
    moved = jax.tree.map(lambda x, slope: x + rate * slope, start, slopes)
    return refused_if_invalid(type(q).from_coordinates(moved, chart))


def is_near(q: Family, before: Family) -> Array:
    """Whether no entry of the mean has moved by more than ``FARTHEST`` standard deviations."""
    deviation = 1 / jnp.sqrt(before.diagonal) if isinstance(before, LowRankGaussian) else before.deviation()
    return jnp.all(jnp.abs(q.mean - before.mean) <= FARTHEST * deviation)
