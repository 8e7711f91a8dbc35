"""How hyperparameters are integrated out: with which nodes, and over which points."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from jax import Array

from ..core.groups.importance import Estimate
from ..core.updates.factors import Nodes
from ..engines.integration.bounds import (
    Bound,
    LogDensity,
    from_other_starts,
    marginal_of,
    moments_of,
    nodes_called_for,
)
from ..engines.integration.importance import integrate_by_importance
from ..engines.integration.lattice import integrate_lattice
from ..engines.integration.nested import ABOVE, NUM_TRIALS, Integral, Marginal, Mode, find_mode
from ..options import Info
from .arviz import smoothed
from .marginal_nuts import integrate_by_nuts

MOST_ON_LATTICE = 2  # parameters
MOST_BY_IMPORTANCE = 40
LEAST_POINTS = 256  # where each takes little: few of them miss what long tails add to standard deviations
FEW_TRIALS = 2  # of the prior for each parameter, where each point takes long, or the mode is known about
LEAST_SHARE = 0.02  # effective sample size over the number of points, below which NUTS takes over
MOST_KHAT = 0.7
FAR_OFF = 0.2  # standard deviations: errors of moments, above which it does
CONVERGED = 0.999  # of the mass, at points where the bound is maximized


@dataclass(frozen=True)
class Integrator:
    """The integral of exp L(h) over the hyperparameters h.

    :ivar bound_of: nodes of expectations, or None for those to begin with -> L, and the rows as it takes them.
    :ivar estimate_of: L -> the estimate of log p(y, h) in its place; None: there is none.
    :ivar mean: of h under the prior, (d,), and its standard ``deviation``, (d,).
    :ivar is_long: whether the Gaussians given h are kept packed. :ivar on_solve: called with each solve.
    :ivar may_run_nuts: whether NUTS takes h where other points are too few.
    """

    bound_of: Callable[[Nodes | None], tuple[Bound, Any]]
    estimate_of: Callable[[Bound], Callable[..., Estimate] | None]
    mean: np.ndarray
    deviation: np.ndarray
    is_long: bool
    rng_key: Array
    on_solve: Callable[[], object]
    may_run_nuts: bool = True

    def __call__(self, start: np.ndarray | None) -> tuple[Bound, Integral] | None:
        """The integral, and the bound of whose solves it is; None if only NUTS finds it, which may not run.

        :param start: where the search for the mode begins.
        """
        if len(self.mean) > MOST_BY_IMPORTANCE and not self.may_run_nuts:
            return None
        bound, chunks, marginal, mode = self._mode(None, start, FEW_TRIALS if self.is_long else NUM_TRIALS)
        nodes = nodes_called_for(bound, chunks, mode.point)
        if nodes == "corrected":
            integral = self._by_corrected_nodes(mode)
            if integral is not None:
                return integral
            nodes = "usual"
        if nodes != bound.nodes:
            bound, _, marginal, mode = self._mode(nodes, mode.point.h, FEW_TRIALS)
        integral = self._integral(bound, marginal, mode)
        return None if integral is None else (bound, integral)

    def _by_corrected_nodes(self, mode: Mode) -> tuple[Bound, Integral] | None:
        """The integral around a mode by few nodes; None if searches by corrected ones do not come to rest, or lower."""
        bound, _, marginal = self._marginal("corrected")
        point = marginal.with_gradient(mode.point.h, mode.point)
        if not point.converged or point.bound < mode.point.bound - ABOVE:
            return None
        integral = self._integral(bound, marginal, mode._replace(point=point))
        return (bound, integral) if integral is not None and integral.converged > CONVERGED else None

    def _marginal(self, nodes: Nodes | None) -> tuple[Bound, Any, Marginal]:
        bound, chunks = self.bound_of(nodes)
        return bound, chunks, marginal_of(bound, self.estimate_of(bound), chunks, self.on_solve)

    def _mode(
        self, nodes: Nodes | None, start: np.ndarray | None, num_trials: int
    ) -> tuple[Bound, Any, Marginal, Mode]:
        bound, chunks, marginal = self._marginal(nodes)
        mode = find_mode(marginal, self.mean, self.deviation, start, num_trials)
        higher = from_other_starts(bound, marginal, mode.point, chunks)
        if higher is not None:
            marginal = marginal.begun_again(higher)
            mode = find_mode(marginal, self.mean, self.deviation, higher.h, FEW_TRIALS)
        return bound, chunks, marginal, mode

    def _integral(self, bound: Bound, marginal: Marginal, mode: Mode) -> Integral | None:
        moments, integral = partial(moments_of, bound, is_packed=self.is_long), None
        if len(self.mean) <= MOST_ON_LATTICE:
            integral = integrate_lattice(marginal, mode, moments)
        elif len(self.mean) <= MOST_BY_IMPORTANCE:
            least = LEAST_POINTS if isinstance(bound, LogDensity) else 0
            integral = integrate_by_importance(
                marginal, mode, moments, smoothed, few_points=self.is_long, least_points=least
            )
        if integral is None or (_is_too_rough(integral.info) and not self.is_long):
            return integrate_by_nuts(marginal, mode, moments, self.rng_key) if self.may_run_nuts else None
        return integral


def few_count(info: Info) -> bool:
    """Whether few of an integral's points have most of the mass; of its ``info``."""
    return info["method"] != "lattice" and (info["relative_sample_size"] < LEAST_SHARE or info["khat"] > MOST_KHAT)


def _is_too_rough(info: Info) -> bool:
    """Whether few of the points count, or moments by these may be far off."""
    return few_count(info) or info.get("error", 0.0) > FAR_OFF
