"""The bound, maximized over q, as one compiled function of the ``numpyro.param`` sites."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.compilation import Compiled
from ..core.matrices.chains import ChainPacking, packed_form
from ..core.matrices.linalg import lower_from_root, solve_lower
from ..core.matrices.packing import Packing
from ..core.updates.factors import Nodes
from ..core.updates.joint import (
    DenseJoint,
    SparseJoint,
    bound_of,
    change_of_natural_gradient,
    curvature_at,
    solve_joint_traced,
    solve_quadratic,
)
from ..core.updates.objective import is_log_concave, is_quadratic
from ..core.updates.search import Search, Settings, Solution
from ..model.data.arguments import PARAMS
from ..progress import Bar
from .engine import Engine
from .joint_solver import JointProblem, RowChunks
from .sparse import SparseEngine, SparseProblem

MOST_LEFT = 100.0  # nats: the squared natural gradient of a search that has come near a maximum

Start = tuple[Array, Any]
"""Mean and precision of a q, in the standard coordinates of the prior (which the parameters move)."""
MAX_STEPS = 200
ROUNDING = 8.0  # of the bound, in its last digits
WALL = 1e3  # nats, by which the bound seems to fall where it is not finite


class Maximum(NamedTuple):
    """The bound's maximum over q at some values of the parameters.

    :ivar bound: in nats. :ivar gradient: of the maximum in the parameters (K,), in unconstrained space; None where
        that is asked for apart.
    :ivar start: the maximizing q, from which a solve at near values starts. :ivar converged: whether it is one.
    """

    bound: Array
    gradient: Array | None
    start: Start
    converged: Array


class MaximizedBound:
    """L(h) = max_q E_q[log p(y, x, h)] + entropy of q, with h the ``numpyro.param`` sites.

    At the best q the bound does not change with q, so its gradient in h is the partial one with q held fixed
    (the envelope theorem), q in the standard coordinates of the prior. (A whitened q stays a good start when a
    kernel's length scale changes; the same q over function values would not.)

    :param settings: when a solve stops; default: as the only one of all rows.
    :ivar engine: of which it is, and its ``program``.
    :ivar is_exact: whether L(h) is log p(y, h): all terms are quadratic given h.
    :ivar nodes: of expectations. Where they are few, :meth:`by_many_nodes` has the bound.
    :ivar is_log_concave: whether no q but the best one is a maximum, whatever the parameters.
    :ivar begin: params (K,), chunks of rows, as :func:`~.row_chunks.chunks_of` makes them, and a mean (P,), default the
        prior's -> a start.
    :ivar solve: params, chunks and a start -> :class:`Maximum`.
    :ivar moments: params and a start -> mean (P,) and Cholesky factor (P, P) of the covariance of theta.
    """

    @classmethod
    def of(cls, engine: Engine, settings: Settings | None = None, nodes: Nodes = "usual") -> MaximizedBound:
        """The one of an engine, made for what its data determine of the prior."""
        return engine.once((cls, engine.program, settings, nodes), lambda: cls(engine, settings, nodes))

    def __init__(self, engine: Engine, settings: Settings | None = None, nodes: Nodes = "usual"):
        self.engine, self.program, self.nodes, self._settings = engine, engine.program, nodes, settings
        self.is_exact = is_quadratic((*engine.kinds, *engine.prior_kinds))
        self.is_log_concave = is_log_concave((*engine.kinds, *engine.prior_kinds))
        _ = engine.program.initial_state  # what is drawn from the prior is drawn here, outside of compiled functions
        self._begun = engine.compiled(self._begin, level=0)  # seldom called
        self.solve, self.moments = engine.compiled(self._solve), engine.compiled(self._moments)
        self._left = engine.compiled(self._left_by_few_nodes, level=0)  # called once
        self.by_many_nodes = engine.compiled(self._by_many_nodes)

    def nodes_called_for(self, params: Array | np.ndarray, chunks: RowChunks, start: Start) -> Nodes:
        """The fewest nodes that find q, if few ones have found one: others would hardly move it."""
        left = float(self._left(params, chunks, start))
        return self.engine.effort.nodes_called_for(left, self.program.layout.size)

    def _parts(
        self,
        params: Array | np.ndarray,
        chunks: RowChunks,
        start: Start,
        *,
        nodes: Nodes | None = None,
        is_corrected: Array | None = None,
    ) -> tuple[Search, DenseJoint]:
        """What is sought at these parameters.

        :param nodes: default: those of this bound.
        :param is_corrected: see :class:`~numpyro_rvga.core.updates.factors.Kind`.
        """
        program = self.program
        state = program.initial_state_at(params)
        inputs = program.prior_inputs | {PARAMS: params}
        problem = JointProblem(state, chunks, inputs, init=start, is_corrected=is_corrected)
        search = _with_nodes(self.engine.search_all(problem), nodes or self.nodes)
        if self._settings is not None:
            search = search._replace(settings=self._settings)
        problem = self.engine.prepared_once(problem)
        return search, self.engine.joint_parts(search, problem)

    def begin(self, params: Array | np.ndarray, chunks: RowChunks, mean: Array | np.ndarray | None = None) -> Start:
        program = self.program
        mean = jnp.zeros(program.layout.size, program.dtype) if mean is None else jnp.asarray(mean, program.dtype)
        return (mean, jnp.eye(mean.size, dtype=mean.dtype)) if self.is_exact else self._begun(params, chunks, mean)

    def _begin(self, params: Array | np.ndarray, chunks: RowChunks, mean: Array) -> Start:
        precision = jnp.eye(mean.size, dtype=mean.dtype)
        search, joint = self._parts(params, chunks, (mean, precision))
        curvature = curvature_at(search, joint.objective, mean)
        return mean, precision + jnp.where(jnp.isfinite(curvature), curvature, 0.0)

    def _solve(self, params: Array, chunks: RowChunks, start: Start) -> Maximum:
        search, joint = self._parts(params, chunks, start)
        exactly = self.is_exact
        solution = solve_quadratic(search, joint, start[0]) if exactly else solve_joint_traced(search, joint)
        mean, root = solution.mean, solution.root

        def bound(params: Array) -> Array:
            return bound_of(self._parts(params, chunks, start)[1], mean, root)

        gradient = _gradient_of(bound, params, chunks)
        return Maximum(_bound_of(solution), gradient, (mean, root @ root.T), solution.converged)

    def _left_by_few_nodes(self, params: Array, chunks: RowChunks, start: Start) -> Array:
        """The squared natural gradient at q by corrected expectations, which few nodes have taken for zero."""

        def joint_at(is_corrected: Array) -> DenseJoint:
            return self._parts(params, chunks, start, is_corrected=is_corrected)[1]

        return change_of_natural_gradient(joint_at, start[0], jnp.linalg.cholesky(start[1]))

    def _by_many_nodes(self, params: Array, chunks: RowChunks, start: Start) -> Array:
        """The bound at a q, by many nodes."""
        (mean, precision), (_, joint) = start, self._parts(params, chunks, start, nodes="values")
        return bound_of(joint, mean, jnp.linalg.cholesky(precision))

    def _moments(self, params: Array, start: Start) -> tuple[Array, Array]:
        state, (mean, precision) = self.program.initial_state_at(params), start
        root = solve_lower(jnp.linalg.cholesky(precision), state.root.T).T
        return state.mean + state.root @ mean, lower_from_root(root)


class SparseMaximizedBound:
    """:class:`MaximizedBound` of a :class:`~.sparse.SparseEngine`, with packed precisions.

    A start is the mean of q and its precision's packed Cholesky factor, in the order of elimination. The solve begins
    with the precision that the log joint density has at this mean. The gradient is a function of its own: it takes the
    covariances of predictors, and with them as long as the solve itself.

    :ivar is_exact: as of :class:`MaximizedBound`, and ``nodes``, ``by_many_nodes``, ``is_log_concave``.
    :ivar begin: params (K,) and chunks of rows -> a start. :ivar solve: params, chunks and a start -> :class:`Maximum`,
        without the gradient. :ivar gradient: params, chunks and the start that was found -> (K,), and the variances of
        x, (P,), which it takes. :ivar variances: that start -> these alone. :ivar root: that start -> the Cholesky
        factor (P, P) of the covariance of x. :ivar packing: of precisions.
    """

    packing: Packing | ChainPacking
    _problem: SparseProblem

    @classmethod
    def of(
        cls, sparse: SparseEngine, problem: SparseProblem, chunks: RowChunks, nodes: Nodes = "usual"
    ) -> SparseMaximizedBound:
        """The one of an engine, made for what its data determine of the prior."""
        problem = sparse.keeps_sums(problem, chunks)._replace(init=None)
        num_chunks = chunks.weights.shape[0] if problem.sums is None else 1
        key = cls, sparse.sparsity.key, sparse.engine.program, num_chunks, nodes
        bound = copy.copy(sparse.engine.once(key, lambda: cls(sparse, num_chunks, nodes)))
        bound._problem, bound.packing = problem, problem.packing
        return bound

    def __init__(self, sparse: SparseEngine, num_chunks: int, nodes: Nodes):
        self.engine, self._sparse, self._order = sparse.engine, sparse, sparse.sparsity.order
        self.program = sparse.engine.program
        self.nodes, search = nodes, sparse.search(num_chunks, has_start=True)
        self._search = _with_nodes(search._replace(settings=sparse.engine.effort.settings_of_many()), nodes)
        self.is_exact, self.is_log_concave = is_quadratic(sparse.all_kinds), is_log_concave(sparse.all_kinds)
        everywhere = sparse.engine.devices.everywhere
        self._solve = Compiled(self._solved, out_shardings=everywhere, long_arrays=True)  # called a hundred times
        self._gradient = sparse.engine.compiled(self._gradient_at)
        self._variances = sparse.engine.compiled(self._variances_of)
        self._root = sparse.engine.compiled(self._root_of)
        self._left = sparse.engine.compiled(self._left_by_few_nodes, level=0)  # called once
        self._by_many = sparse.engine.compiled(self._by_many_nodes)

    @property
    def indices(self) -> np.ndarray:
        """(P,), the entry of x that comes first, second, ... in the order of elimination."""
        return self._order.indices

    def begin(self, params: Array | np.ndarray, chunks: RowChunks, mean: np.ndarray | None = None) -> Start:
        """A start, from nothing. ``mean``: (P,), in standard deviations of the prior from its mean."""
        prior, dtype = self.program.marginals, self.program.dtype
        mean = prior.mean if mean is None else prior.mean + np.sqrt(prior.variance) * mean
        return jnp.asarray(mean[self.indices], dtype), ()

    def solve(self, params: Array | np.ndarray, chunks: RowChunks, start: Start) -> Maximum:
        return self._solve(self._problem, params, chunks, start[0])

    def gradient(self, params: Array | np.ndarray, chunks: RowChunks, start: Start) -> tuple[Array, Array]:
        return self._gradient(self._problem, params, chunks, start)

    def variances(self, start: Start) -> Array:
        return self._variances(self._problem, start[1])

    def nodes_called_for(self, params: Array | np.ndarray, chunks: RowChunks, start: Start) -> Nodes:
        """As of :class:`MaximizedBound`."""
        left = float(self._left(self._problem, params, chunks, start))
        return self.engine.effort.nodes_called_for(left, self.program.layout.size)

    def by_many_nodes(self, params: Array | np.ndarray, chunks: RowChunks, start: Start) -> Array:
        return self._by_many(self._problem, params, chunks, start)

    def root(self, start: Start) -> Array:
        return self._root(self._problem, start[1])

    def mean(self, start: Start) -> Array:
        """The mean of x, (P,)."""
        return start[0][self._order.back]

    # ------------------------------------------------------------------ compiled
    def _parts(
        self,
        problem: SparseProblem,
        params: Array,
        chunks: RowChunks,
        init: Start | None = None,
        *,
        nodes: Nodes | None = None,
        is_corrected: Array | None = None,
    ) -> SparseJoint:
        """As of :class:`MaximizedBound`. ``init``: where a search starts."""
        inputs = self.program.prior_inputs | {PARAMS: params}
        problem = self._sparse.given_params(problem, inputs, chunks)._replace(init=init, is_corrected=is_corrected)
        return self._sparse.parts(_with_nodes(self._search, nodes or self.nodes), problem)

    def _solved(self, problem: SparseProblem, params: Array, chunks: RowChunks, mean: Array) -> Maximum:
        search, joint = self._search, self._parts(problem, params, chunks)
        if self.is_exact:
            return _maximum_of(solve_quadratic(search, joint, mean))
        curvature = curvature_at(search, joint.objective, mean)
        return _maximum_of(solve_joint_traced(search, self._parts(problem, params, chunks, (mean, curvature))))

    def _gradient_at(
        self, problem: SparseProblem, params: Array, chunks: RowChunks, start: Start
    ) -> tuple[Array, Array]:
        mean, root = start
        covariance = self._parts(problem, params, chunks).form.covariance_root(root)

        def expected(params: Array) -> Array:
            return self._parts(problem, params, chunks).objective.value(mean, covariance)

        gradient = _gradient_of(expected, params, chunks)
        return gradient, problem.packing.diagonal(covariance)[self._order.back]

    def _left_by_few_nodes(self, problem: SparseProblem, params: Array, chunks: RowChunks, start: Start) -> Array:
        def joint_at(is_corrected: Array) -> SparseJoint:
            return self._parts(problem, params, chunks, is_corrected=is_corrected)

        return change_of_natural_gradient(joint_at, *start)

    def _by_many_nodes(self, problem: SparseProblem, params: Array, chunks: RowChunks, start: Start) -> Array:
        return bound_of(self._parts(problem, params, chunks, nodes="values"), *start)

    def _root_of(self, problem: SparseProblem, factor: Array) -> Array:
        form = packed_form(jnp.ones(self._order.indices.size, factor.dtype), problem.packing)
        return lower_from_root(form.dense_root(factor).T[self._order.back])

    def _variances_of(self, problem: SparseProblem, root: Array) -> Array:
        form = packed_form(jnp.ones(self._order.indices.size, root.dtype), problem.packing)
        return form.variances(root)[self._order.back]


def _gradient_of(bound: Callable[[Array], Array], params: Array, chunks: RowChunks) -> Array:
    """Of a bound in nats, by that of nats a row.

    The slope of a log probability that NumPyro keeps away from zero is nearly the largest number there is before it is
    multiplied by zero. Times the weight of equal rows it would be infinite, and then not a number.
    """
    num_rows = jnp.maximum(jnp.sum(chunks.weights), 1)
    return num_rows * jax.grad(lambda params: bound(params) / num_rows)(params)


def _with_nodes(search: Search, nodes: Nodes) -> Search:
    return search._replace(nodes=nodes, by_decrement=search.by_decrement or nodes == "corrected")


def _maximum_of(solution: Solution) -> Maximum:
    return Maximum(_bound_of(solution), None, (solution.mean, solution.root), solution.converged)


def _bound_of(solution: Solution) -> Array:
    """None (minus infinity) where the search has come to nothing: what is left then is rounding, of any size."""
    return jnp.where(solution.decrement <= MOST_LEFT, solution.bound, -jnp.inf)


class Learned(NamedTuple):
    """Where learning ended.

    :ivar params: (K,), in unconstrained space.
    :ivar start: mean and precision of q there, in the initial state's standard coordinates.
    :ivar bounds: the bound after each step.
    """

    params: np.ndarray
    start: Start
    bounds: list[float]
    converged: bool


def learn(surface: MaximizedBound, chunks: RowChunks, start: Start | None, tolerance: float, bar: Bar) -> Learned:
    """Climb by L-BFGS in the parameters, from where the model starts them, with q solved for at each place.

    :param start: mean and precision of a q to start from, in the initial state's standard coordinates, or None.
    :param tolerance: rise of the bound, in nats, in the last step.
    :raises ValueError: if the bound or its slope is not finite where the parameters start.
    """
    import scipy.optimize  # here: it takes long to import, and models without parameters do without

    initial = surface.engine.program.params
    origin = np.asarray(initial.values)
    maximum = surface.solve(origin, chunks, surface.begin(origin, chunks) if start is None else start)
    if not _is_finite(maximum):
        shown = ", ".join(f"{name} = {np.asarray(x)}" for name, x in initial.constrained(initial.values).items())
        raise ValueError(
            f"the bound or its slope is not finite where the numpyro.param sites start ({shown}): give them other "
            "initial values, or a covariance matrix of the model more jitter."
        )
    learned, bounds = Learned(origin, maximum.start, [float(maximum.bound)], False), [float(maximum.bound)]

    def negative(params: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal maximum
        maximum = surface.solve(params.astype(origin.dtype), chunks, learned.start)
        if not _is_finite(maximum):
            away = params - learned.params
            return WALL - bounds[-1], WALL * away / np.linalg.norm(away)
        return -float(maximum.bound), -np.asarray(maximum.gradient, np.float64)

    def step(intermediate_result: Any) -> None:
        nonlocal learned
        learned = learned._replace(params=intermediate_result.x.astype(origin.dtype), start=maximum.start)
        bounds.append(-float(intermediate_result.fun))
        bar.update(1)
        bar.set_postfix(bound=f"{bounds[-1]:.6g}", refresh=False)

    options = {"maxiter": MAX_STEPS, "ftol": tolerance / max(abs(bounds[0]), 1.0), "gtol": 0.0}
    ended = scipy.optimize.minimize(negative, origin, jac=True, method="L-BFGS-B", callback=step, options=options)
    promised = float(ended.jac @ ended.hess_inv.dot(ended.jac))  # by the next step, were there one
    rounding = ROUNDING * float(np.finfo(origin.dtype).eps) * max(abs(bounds[-1]), 1.0)
    return learned._replace(bounds=bounds, converged=bool(ended.success) or promised <= tolerance + rounding)


def _is_finite(maximum: Maximum) -> bool:
    return bool(np.isfinite(maximum.bound)) and bool(np.isfinite(np.asarray(maximum.gradient)).all())
