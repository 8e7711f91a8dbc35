"""The bound, maximized over q, as one compiled function of the ``numpyro.param`` sites."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from ..core.joint import Joint, bound_at, curvature_at, solve_joint_traced
from ..core.linalg import lower_from_root, solve_lower
from ..core.maximize import Search
from ..core.precisions import Arrow
from ..model.arguments import PARAMS
from .engine import Engine
from .joint_solver import JointProblem, RowChunks
from .sparse import SparseEngine, SparseProblem

Start = tuple[Array, Any]
"""Mean and precision of a q, in the standard coordinates of the prior (which the parameters move)."""


class Maximum(NamedTuple):
    """The bound's maximum over q at some values of the parameters.

    :ivar bound: in nats. :ivar gradient: of the maximum in the parameters (K,), in unconstrained space.
    :ivar start: the maximizing q, from which a solve at near values starts. :ivar converged: whether it is one.
    :ivar error: the standard error of what stands in the bound's place, if that is estimated.
    """

    bound: Array
    gradient: Array
    start: Start
    converged: Array
    error: Array | float = 0.0


class MaximizedBound:
    """L(h) = max_q E_q[log p(y, x, h)] + entropy of q, with h the ``numpyro.param`` sites.

    At the best q the bound does not change with q, so its gradient in h is the partial one with q held fixed
    (the envelope theorem), q in the standard coordinates of the prior. (A whitened q stays a good start when a
    kernel's length scale changes; the same q over function values would not.)

    :ivar engine: of which it is.
    :ivar begin: params (K,) and chunks of rows, as :func:`~.row_chunks.chunks_of` makes them -> a start.
    :ivar solve: params, chunks and a start -> :class:`Maximum`.
    :ivar moments: params and a start -> mean (P,) and Cholesky factor (P, P) of the covariance of theta.
    """

    def __init__(self, engine: Engine):
        self.engine, program = engine, engine.program
        program.initial_state()  # what is drawn from the prior is drawn here, outside of compiled functions

        def parts(params: Array, chunks: RowChunks, start: Start) -> tuple[Search, Joint]:
            state = program.initial_state_at(params)
            problem = JointProblem(state, chunks, program.prior_inputs | {PARAMS: params}, init=start)
            search = engine.search_all(problem)
            return search, engine.joint_parts(search, problem)

        @engine.compiled
        def begin(params, chunks):
            mean = jnp.zeros(program.layout.size, program.dtype)
            precision = jnp.eye(mean.size, dtype=mean.dtype)
            search, joint = parts(params, chunks, (mean, precision))
            curvature = curvature_at(search, joint.objective, mean)
            return mean, precision + jnp.where(jnp.isfinite(curvature), curvature, 0.0)

        @engine.compiled
        def solve(params, chunks, start):
            solution = solve_joint_traced(*parts(params, chunks, start))
            inverse = solve_lower(solution.root, jnp.eye(solution.mean.size, dtype=solution.mean.dtype))

            def bound(params, start=start):
                _, joint = parts(params, chunks, start)
                return bound_at(joint, joint.start().base, solution.mean, inverse.T)[0]

            return Maximum(
                solution.bound,
                jax.grad(bound)(params),
                (solution.mean, solution.root @ solution.root.T),
                solution.converged,
            )

        @engine.compiled
        def moments(params, start):
            state, (mean, precision) = program.initial_state_at(params), start
            root = solve_lower(jnp.linalg.cholesky(precision), state.root.T).T
            return state.mean + state.root @ mean, lower_from_root(root)

        self.begin, self.solve, self.moments = begin, solve, moments


class SparseMaximizedBound:
    """The same of a :class:`~.sparse.SparseEngine`, whose q stay as its solves leave them.

    A q to start from is its mean, in the order of elimination; what else a start holds is for :meth:`root`. The solve
    begins with the precision that the log joint density has at this mean.

    :ivar begin: params (K,) and chunks of rows -> a start. :ivar solve: params, chunks and a start -> :class:`Maximum`.
    """

    def __init__(self, sparse: SparseEngine, problem: SparseProblem, chunks: RowChunks):
        program, order = sparse.engine.program, sparse.sparsity.order
        self.engine, self.pattern, self.places = sparse.engine, problem.packing.pattern, order.places
        search = sparse.search(chunks.weights.shape[0], has_start=True)

        def parts(params: Array, chunks: RowChunks, init: tuple[Array, Array] | None = None) -> Joint:
            prepared = sparse.prepared(program.prior_inputs | {PARAMS: params}, *chunks)
            return sparse.parts(search, problem._replace(chunks=prepared, init=init))

        @sparse.engine.compiled
        def solve(params, chunks, mean):
            curvature = curvature_at(search, parts(params, chunks).objective, mean)
            joint = parts(params, chunks, (mean, curvature))
            solution = solve_joint_traced(search, joint)
            form = joint.start().form
            assert isinstance(form, Arrow)
            covariance = form.covariance_root(solution.root)

            def expected(params):
                objective = parts(params, chunks).objective
                return objective.expect(solution.mean, objective.predictor_covariances(solution.mean, covariance))[0]

            variance = form.packing.diagonal(covariance.array)
            found = solution.mean, (form.parts(solution.root), variance)
            return Maximum(solution.bound, jax.grad(expected)(params), found, solution.converged)

        self._solve = solve

    def solve(self, params: Array, chunks: RowChunks, start: Start) -> Maximum:
        return self._solve(params, chunks, start[0])

    def begin(self, params: Array, chunks: RowChunks) -> Start:
        """A start, from nothing."""
        return jnp.asarray(self.engine.program.marginals.mean[self.places], self.engine.program.dtype), ()
