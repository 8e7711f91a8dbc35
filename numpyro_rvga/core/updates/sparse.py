"""Joint solves of factors that depend on a few entries of theta each, as rows of crossed and nested effects do."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..count import Count
from ..matrices.chains import ChainPacking, packed_form
from ..matrices.packing import Packing
from . import maximize
from .factors import evaluate
from .joint import Joint, Start
from .maximize import Base, Search
from .objective import Coordinates, FactorSet, JointObjective
from .recursion import CanonicalGaussian, State, StepInfo


class EliminationOrder(NamedTuple):
    """The order of the entries of theta: first those that are eliminated, of which no factor depends on two, or on none
    that lie far apart.

    :ivar places: (P,), the entry of theta that comes first, second, ...
    :ivar num_diagonal: how many of them are eliminated.
    """

    places: np.ndarray
    num_diagonal: int

    @property
    def back(self) -> np.ndarray:
        """Where each entry of theta went."""
        return np.argsort(self.places)


class Marginals(NamedTuple):
    """A Gaussian of independent entries to start from: (P,) arrays."""

    mean: Array
    variance: Array


def sparse_solve(
    search: Search,
    rows: FactorSet,
    prior: FactorSet,
    gaussian: FactorSet,
    order: EliminationOrder,
    marginals: Marginals,
    packing: Packing | ChainPacking,
    init: tuple[Array, Array] | None = None,
) -> Joint:
    """Rows and the whole prior together, over theta itself, its entries reordered. The base is flat.

    :param prior: its terms that are not Gaussian. :param gaussian: those that are. The Jacobians of all three are
        :class:`~.jacobians.SparseJacobian`, and all take theta in ``order``.
    :param marginals: where the search begins. :param packing: of precisions, in ``order``.
    :param init: mean and packed precision of a q to start from, in ``order``; default: of ``marginals``.
    """
    size, dtype = marginals.mean.size, marginals.mean.dtype
    back = order.back
    objective = JointObjective((gaussian, prior, rows), Coordinates(), search.staged)
    form = packed_form((1 / marginals.variance)[order.places], packing)

    def start():
        flat = Base(None, None, jnp.asarray(0.5 * size * math.log(2 * math.pi), dtype))  # of the entropy
        mean, precision = (marginals.mean[order.places], None) if init is None else init
        return Start(flat, form, maximize.init(search, form, mean, precision))

    def absorb(solution, num_rows, expected):
        mean, root = solution.mean[back], form.dense_root(solution.root).T[back]
        site = None
        if prior.kinds:
            covariance = form.covariance_root(solution.root)
            sums = evaluate(prior.kinds, prior.linearize(prior.first, solution.mean), covariance)
            trace = packing.inner(covariance.array, sums.curvature)
            precision = packing.whole(sums.curvature)[back][:, back]
            site = CanonicalGaussian(precision, sums.gradient[back], sums.value + 0.5 * trace, mean)
        ok = jnp.isfinite(solution.bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = State(mean, jnp.zeros_like(mean), root, solution.bound, site, Count.of(0) + num_rows)
        return after, StepInfo(solution.bound, solution.decrement, solution.iterations, solution.converged, ok)

    return Joint(objective, start, absorb)
