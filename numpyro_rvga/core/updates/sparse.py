"""Joint solves of factors that depend on a few entries of theta each, as rows of crossed and nested effects do."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..count import Count
from ..matrices.chains import ChainPacking, packed_form
from ..matrices.packing import Packing
from ..matrices.precisions import Bordered
from . import maximize
from .factors import Expected, evaluate
from .joint import Start
from .objective import Coordinates, FactorSet, JointObjective
from .search import Base, Search, Solution
from .state import Absorbed, CanonicalGaussian, State, StepInfo


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

    mean: Array | np.ndarray
    variance: Array | np.ndarray


@dataclass(frozen=True)
class SparseJoint:
    """Rows and the whole prior together, over theta itself, its entries reordered. The base is flat.

    :ivar prior: its terms that are not Gaussian. :ivar gaussian: those that are. The Jacobians of all three are
        :class:`~.jacobians.SparseJacobian`, and all take theta in ``order``.
    :ivar marginals: where the search begins. :ivar packing: of precisions, in ``order``.
    :ivar init: mean and packed precision of a q to start from, in ``order``; default: of ``marginals``.
    """

    search: Search
    rows: FactorSet
    prior: FactorSet
    gaussian: FactorSet
    order: EliminationOrder
    marginals: Marginals
    packing: Packing | ChainPacking
    init: tuple[Array, Array] | None = None

    @property
    def objective(self) -> JointObjective:
        return JointObjective((self.gaussian, self.prior, self.rows), Coordinates(), self.search.staged)

    @property
    def form(self) -> Bordered:
        """Of precisions."""
        return packed_form((1 / self.marginals.variance)[self.order.places], self.packing)

    def start(self) -> Start:
        mean, form = self.marginals.mean, self.form
        flat = Base(None, None, jnp.asarray(0.5 * mean.size * math.log(2 * math.pi), mean.dtype))  # of the entropy
        mean, precision = (mean[self.order.places], None) if self.init is None else self.init
        return Start(flat, form, maximize.init(self.search, form, mean, precision))

    def absorb(self, solution: Solution, num_rows: Array, expected: Expected | None) -> tuple[State, StepInfo]:
        form, back, prior = self.form, self.order.back, self.prior
        mean, root = solution.mean[back], form.dense_root(solution.root).T[back]
        site = None
        if prior.kinds:
            covariance = form.covariance_root(solution.root)
            sums = evaluate(prior.kinds, prior.linearize(prior.first, solution.mean), covariance)
            trace = self.packing.inner(covariance.array, sums.curvature)
            precision = self.packing.whole(sums.curvature)[back][:, back]
            site = CanonicalGaussian(precision, sums.gradient[back], sums.value + 0.5 * trace, mean)
        ok = jnp.isfinite(solution.bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = State(mean, jnp.zeros_like(mean), root, solution.bound, site, Count.of(0) + num_rows)
        return after, StepInfo(solution.bound, solution.decrement, solution.iterations, solution.converged, ok)

    def absorbed(self, solution: Solution) -> tuple[Absorbed, ...]:
        return ()
