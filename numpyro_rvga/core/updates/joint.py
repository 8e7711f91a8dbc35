"""Joint solves: many rows together with the true prior, or the Gaussian summary of a stream with it.

Precisions are whole matrices (:class:`DenseJoint`), or packed (:class:`SparseJoint`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..gaussians import DiagonalGaussian
from ..matrices.chains import ChainPacking, packed_form
from ..matrices.jacobians import times_root
from ..matrices.linalg import solve_lower
from ..matrices.packing import Packing
from ..matrices.precisions import Bordered, Dense, PrecisionForm, Weighted
from ..pytrees import PyTree
from . import maximize
from .drivers import solve_traced
from .factors import Expected, Factors, evaluate
from .normal_rows import NormalRows
from .objective import Coordinates, FactorSet, Objective
from .row_factors import absorbed_moments, predictor_scales, quadratic_sums
from .search import Base, Search, Solution, SolverState, standard_base
from .state import Absorbed, CanonicalGaussian, Count, QuadraticFactors, State, StepInfo


class SolveStart(NamedTuple):
    """Where a solve begins, and in what terms.

    :ivar base: the bound's part that is not the factors'. :ivar form: of precisions. :ivar state: not yet evaluated.
    """

    base: Base
    form: PrecisionForm
    state: SolverState


def solve_joint_traced(search: Search, joint: Joint) -> Solution:
    """The solution, inside a compiled function."""
    base, form, state = joint.start()
    return solve_traced(search, joint.objective, base, form, state)


def solve_quadratic(search: Search, joint: Joint, mean: Array) -> Solution:
    """The solution where all factors are quadratic: one linear solve, from any mean, and a second step by the same
    factor for what rounding has left."""
    base, form, _ = joint.start()

    def slope_at(mean):
        return maximize.with_base(base, form, mean, joint.objective.expect(mean, None))

    first = slope_at(mean)
    root = form.factor(form.target(joint.objective.curvature(mean, first.hessians, False)))
    solver = form.solver(root)
    mean = mean + solver(first.gradient)
    last = slope_at(mean)
    move = solver(last.gradient)
    decrement = last.gradient @ move
    bound = last.value + 0.5 * decrement - form.half_log_determinant(root)
    tolerance = jnp.maximum(search.settings.tolerance, maximize.rounding(search, mean, bound))
    converged = jnp.isfinite(bound) & (decrement <= tolerance)
    return Solution(mean + move, root, bound, decrement, jnp.ones((), jnp.int32), converged)


def curvature_at(search: Search, objective: Objective, mean: Array) -> Array:
    """Minus the Hessian of the factors' log density at a point, as ``search`` would take it for a precision: without
    positive parts, unless there are none."""
    return objective.curvature(mean, objective.expect(mean, None).hessians, not search.log_concave)


def bound_of(joint: Joint, mean: Array, factor: Array) -> Array:
    """The bound at a q.

    :param joint: with precisions that are no weights of rows. :param factor: the Cholesky factor of the precision.
    """
    base, form, _ = joint.start()
    root: Any = form.covariance_root(factor)
    value = joint.objective.value(mean, root) + maximize.slope_of_base(base, form, mean)[0]
    return maximize.bound_by(form, value, factor, factor, root, mean.size)  # of weights, a trace takes the precision


def change_of_natural_gradient(joint_at: Callable[[Array], Joint], mean: Array, factor: Array) -> Array:
    """The squared length, in nats, of what a traced flag changes of the natural gradient at a q; of packed precisions,
    an estimate.

    :param factor: the Cholesky factor of the precision.
    """

    def slopes(flag: Array) -> tuple[Array, Array]:
        joint = joint_at(flag)
        expected = expected_at(joint, mean, root)
        return expected.gradient, joint.objective.curvature(mean, expected.hessians, False)

    form: Any = joint_at(jnp.asarray(False)).start().form
    root = form.covariance_root(factor)
    gradients, curvatures = lax.map(slopes, jnp.array([False, True]))
    of_mean, of_precision = gradients[1] - gradients[0], curvatures[1] - curvatures[0]
    square, _ = form.products(factor, root, of_precision, of_precision)
    return of_mean @ form.solver(factor)(of_mean) + 0.5 * square


def expected_at(joint: Joint, mean: Array, covariance_root: PyTree) -> Expected:
    """Expectations over the factors. ``covariance_root``: as a form of precisions has it."""
    return joint.objective.expect(mean, joint.objective.predictor_covariances(mean, covariance_root))


def base_terms(base: Base, mean: Array) -> tuple[Array, Array]:
    """Precision and linear term, written out."""
    precision = jnp.eye(mean.size, dtype=mean.dtype) if base.precision is None else base.precision
    return precision, jnp.zeros_like(mean) if base.linear is None else base.linear


@dataclass(frozen=True)
class DenseJoint:
    """Rows and the true prior terms together, in the standard coordinates e of the Gaussian before: theta = mean +
    root e. Precisions are whole matrices.

    The Gaussian factor that approximates the prior terms is divided out of the state, and the terms themselves take its
    place. Rows that are already part of the state by ``row_factors`` are divided out too. So a last solve is of the
    Gaussian summary of the data, the true prior and the rows that were kept.

    :ivar starts: (k, P) points, in the state's standard coordinates, of which the most probable is where the search
        begins; default, and where none is possible: the state's mean.
    :ivar init: mean and precision of a q to start from, in the state's standard coordinates.
    :ivar selecting: whether each row depends on single entries of theta.
    :ivar by_row: arranges what :meth:`absorbed` knows of factors, by the rows that they belong to.
    """

    search: Search
    rows: FactorSet
    prior: FactorSet
    state: State
    row_factors: tuple[QuadraticFactors, ...] | None = None
    starts: Array | None = None
    init: tuple[Array, Array] | None = None
    selecting: bool = False
    by_row: Callable[[tuple[Absorbed, ...]], tuple[Absorbed, ...]] = tuple

    @property
    def _is_weighted(self) -> bool:
        """Whether precisions are kept as weights of rows. A precision to start from may be of any form."""
        has_gaussian_prior = not self.prior.kinds and self.state.prior_factor is None
        rows_alone = has_gaussian_prior and not self.row_factors and self.init is None
        return self.selecting and rows_alone and not self.search.mode

    @property
    def objective(self) -> Objective:
        """The factors' part of the bound."""
        coordinates = Coordinates(self.state.mean, self.state.root, self._is_weighted)
        return Objective((self.prior, self.rows), coordinates, self.search.staged)

    def start(self) -> SolveStart:
        """Where the search begins."""
        state, size, dtype = self.state, self.state.mean.size, self.state.mean.dtype
        factors = self._factors_at(jnp.zeros(size, dtype)) if self.row_factors else ()
        base = _divide(state, factors, self.row_factors)
        mean, precision = (jnp.zeros(size, dtype), None) if self.init is None else self.init
        form = Weighted(jnp.eye(size, dtype=dtype), state.root) if self._is_weighted else Dense(base.precision)
        if self.starts is not None:
            mean = _most_probable(self.objective, base, form, self.starts)
        return SolveStart(base, form, maximize.init(self.search, form, mean, precision))

    def absorb(self, solution: Solution, num_rows: Array, expected: Expected | None) -> tuple[State, StepInfo]:
        """The state after the solution.

        :param num_rows: how many are new to the state. :param expected: over the factors there, if computed.
        """
        state, mode = self.state, self.search.mode
        bound = solution.bound - jnp.sum(jnp.log(jnp.diagonal(solution.root))) if mode else solution.bound
        mean = state.mean + state.root @ solution.mean
        root = solve_lower(solution.root, state.root.T).T
        prior_factor = None
        if state.prior_factor is not None:
            if expected is None:
                factors = self.prior.linearize(self.prior.first, mean)
                sums = evaluate(self.prior.kinds, factors, None if mode else root.T)
            else:
                sums = self.objective.sums_of_first_set(solution.mean, expected)
            prior_factor = CanonicalGaussian.expected(*sums, mean, None if mode else root)
        moved = State(mean, jnp.zeros_like(mean), root, bound, prior_factor, state.num_rows + num_rows)
        ok = jnp.isfinite(bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, state)
        gain = bound - state.log_evidence
        return after, StepInfo(gain, solution.decrement, solution.iterations, solution.converged, ok)

    def absorbed(self, solution: Solution) -> tuple[Absorbed, ...]:
        """How the solution sees the rows: moments of their predictors, by kind."""
        factors = self._factors_at(solution.mean)
        return self.by_row(absorbed_moments(self.rows.kinds, factors, predictor_scales(factors, solution.root)))

    def _factors_at(self, e: Array) -> tuple[Factors, ...]:
        """The rows of all chunks, with Jacobians in e."""

        def whitened(chunk: PyTree) -> tuple[Factors, ...]:
            factors = self.rows.linearize(chunk, self.state.mean + self.state.root @ e)
            return tuple(f._replace(jacobian=times_root(f.jacobian, self.state.root)) for f in factors)

        chunked = lax.map(whitened, self.rows.chunks)
        return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), chunked)


def _most_probable(objective: Objective, base: Base, form: PrecisionForm, starts: Array) -> Array:
    def log_density(e):
        return objective.expect(e, None).value + maximize.slope_of_base(base, form, e)[0]

    values = lax.map(log_density, starts)
    usable = jnp.isfinite(values)  # none, where a prior is so wide that all of them overflow
    best = starts[jnp.argmax(jnp.where(usable, values, -jnp.inf))]
    return jnp.where(jnp.any(usable), best, jnp.zeros_like(best))


def _divide(state: State, factors: tuple[Factors, ...], row_factors: tuple[QuadraticFactors, ...] | None) -> Base:
    """The state without its prior site and the rows' sites, in coordinates where the state is standard normal."""
    base = standard_base(state.mean.dtype)._replace(constant=state.log_evidence)
    if state.prior_factor is None and row_factors is None:
        return base
    size = state.mean.shape[0]
    precision, linear, constant = jnp.eye(size, dtype=state.mean.dtype), jnp.zeros_like(state.mean), base.constant
    if state.prior_factor is not None:
        value, slope = state.prior_factor.at(state.mean)
        precision = precision - state.root.T @ state.prior_factor.precision @ state.root
        linear, constant = linear - state.root.T @ slope, constant - value
    for block, site in zip(factors, row_factors or ()):
        value, gradient, curvature = quadratic_sums(block, site)
        precision, linear, constant = precision - curvature, linear - gradient, constant - value
    return Base(0.5 * (precision + precision.T), linear, constant)


class EliminationOrder(NamedTuple):
    """The order of the entries of theta: first those that are eliminated, of which no factor depends on two, or on none
    that lie far apart.

    :ivar indices: (P,), the entry of theta that comes first, second, ...
    :ivar num_diagonal: how many of them are eliminated.
    """

    indices: np.ndarray
    num_diagonal: int

    @property
    def back(self) -> np.ndarray:
        """Where each entry of theta went."""
        return np.argsort(self.indices)


@dataclass(frozen=True)
class SparseJoint:
    """Rows and the whole prior together, over theta itself, its entries reordered. The base is flat.

    :ivar prior: its terms that are not Gaussian. :ivar gaussian: those that are. The Jacobians of all three are
        :class:`~.jacobians.SparseJacobian`, and all take theta in ``order``.
    :ivar marginals: where the search begins. :ivar packing: of precisions, in ``order``.
    :ivar init: mean and packed precision of a q to start from, in ``order``; default: of ``marginals``.
    """

    search: Search
    rows: FactorSet | NormalRows
    prior: FactorSet
    gaussian: FactorSet
    order: EliminationOrder
    marginals: DiagonalGaussian
    packing: Packing | ChainPacking
    init: tuple[Array, Array] | None = None

    @property
    def objective(self) -> Objective:
        return Objective((self.gaussian, self.prior, self.rows), Coordinates(), self.search.staged)

    @property
    def form(self) -> Bordered:
        """How precisions are packed."""
        return packed_form((1 / self.marginals.variance)[self.order.indices], self.packing)

    def start(self) -> SolveStart:
        mean, form = self.marginals.mean, self.form
        flat = Base(None, None, jnp.asarray(0.5 * mean.size * math.log(2 * math.pi), mean.dtype))  # of the entropy
        mean, precision = (mean[self.order.indices], None) if self.init is None else self.init
        return SolveStart(flat, form, maximize.init(self.search, form, mean, precision))

    def absorb(self, solution: Solution, num_rows: Array, expected: Expected | None) -> tuple[State, StepInfo]:
        form, back, prior = self.form, self.order.back, self.prior
        mean, root = solution.mean[back], form.dense_root(solution.root).T[back]
        site = None
        if prior.kinds:
            covariance = form.covariance_root(solution.root)
            sums = evaluate(prior.kinds, prior.linearize(prior.first, solution.mean), covariance)
            trace = self.packing.inner(covariance, sums.curvature)
            precision = self.packing.whole(sums.curvature)[back][:, back]
            site = CanonicalGaussian(precision, sums.gradient[back], sums.value + 0.5 * trace, mean)
        ok = jnp.isfinite(solution.bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = State(mean, jnp.zeros_like(mean), root, solution.bound, site, Count.of(0) + num_rows)
        return after, StepInfo(solution.bound, solution.decrement, solution.iterations, solution.converged, ok)

    def absorbed(self, solution: Solution) -> tuple[Absorbed, ...]:
        return ()


Joint = DenseJoint | SparseJoint
"""What is sought, where the search begins, and what becomes of its solution."""
