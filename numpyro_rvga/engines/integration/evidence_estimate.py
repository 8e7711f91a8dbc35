"""log p(y, h) by importance sampling of x from the q that maximizes the bound."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.groups.importance import Estimate, Partition, Summands, independent_groups, log_integral
from ...core.matrices.jacobians import SparseJacobian, times_root
from ...core.updates.factors import Factors, Kind
from ...core.updates.joint import base_terms
from ...core.updates.state import CanonicalGaussian
from ...model.data.arguments import PARAMS
from ..joint_solver import JointProblem, RowChunks
from ..maximized_bound import MaximizedBound, Start

COUPLED = 1e-5  # share of a precision's diagonal, above which an entry is no rounding error; with float64
COUPLED_DOUBLE = 1e-10


class EvidenceEstimate:
    """The importance sampling estimate, as a function of the result of a :class:`MaximizedBound`.

    :raises NotImplementedError: naming the site, if given h a term is no function of a few affine predictors.
    """

    @classmethod
    def of(cls, bound: MaximizedBound) -> EvidenceEstimate:
        """The one of a bound."""
        return bound.engine.once((cls, bound), lambda: cls(bound))

    def __init__(self, bound: MaximizedBound):
        program = bound.engine.program
        for terms in (*program.terms, *program.prior.terms):
            if terms.by_draws or not terms.is_affine:
                raise NotImplementedError(
                    f"marginal='importance' needs affine predictors, and given the integrated sites those of site "
                    f"{terms.site!r} are not: integrate more sites, or use marginal='bound'."
                )
        self._bound, self._estimate = bound, None

    def __call__(self, params: Array, chunks: RowChunks, start: Start) -> Estimate:
        if self._estimate is None:
            engine = self._bound.engine
            coupled = np.asarray(engine.compiled(self._coupled)(params, chunks))
            self._estimate = engine.compiled(partial(self._estimated, independent_groups(coupled)))
        return self._estimate(params, chunks, start)

    def _estimated(self, groups: Partition, params: Array, chunks: RowChunks, start: Start) -> Estimate:
        state = self._bound.engine.program.initial_state_at(params)
        mean = state.mean + state.root @ start[0]
        inverse = jnp.linalg.inv(state.root)
        precision = inverse.T @ start[1] @ inverse
        base, summands = self._density(params, chunks, mean)
        return log_integral(base, summands, precision, groups)

    def _density(self, params: Array, chunks: RowChunks, mean: Array) -> tuple[CanonicalGaussian, list[list[Summands]]]:
        """The log joint density times (2 pi)^(P / 2): its Gaussian part, and the other factors, about ``mean``."""
        engine = self._bound.engine
        program = engine.program
        state, inputs = program.initial_state_at(params), program.prior_inputs | {PARAMS: params}
        problem = JointProblem(state, chunks, inputs, init=(jnp.zeros_like(mean), jnp.eye(mean.size)))
        base = engine.joint_parts(engine.search_all(problem), problem).start().base
        inverse = jnp.linalg.inv(state.root)
        precision, linear = base_terms(base, mean)
        at = inverse @ (mean - state.mean)
        constant = base.constant + linear @ at - 0.5 * at @ precision @ at
        quadratic = CanonicalGaussian(
            inverse.T @ precision @ inverse,
            inverse.T @ (linear - precision @ at),
            constant - jnp.linalg.slogdet(state.root)[1],
            mean,
        )
        prior = engine.prior_set(inputs)
        summands = [_summands(prior.kinds, prior.linearize(prior.first, mean))]
        for i, weights in enumerate(chunks.weights):
            rows = {name: array[i] for name, array in chunks.rows.items()}
            prepared = engine.prepare(rows | {PARAMS: params}, weights)
            summands.append(_summands(engine.kinds, engine.linearize(prepared, mean)))
        return quadratic, summands

    def _coupled(self, params: Array, chunks: RowChunks) -> Array:
        """Whether a factor depends on both of two entries, (P, P)."""
        size, dtype = self._bound.engine.program.layout.size, self._bound.engine.program.dtype
        base, chunked = self._density(params, chunks, jnp.zeros(size, dtype))
        tolerance = COUPLED_DOUBLE if dtype == jnp.float64 else COUPLED
        diagonal = jnp.sqrt(jnp.abs(jnp.diagonal(base.precision)))
        coupled = jnp.abs(base.precision) > tolerance * diagonal[:, None] * diagonal
        for summand in (summand for chunk in chunked for summand in chunk):
            depends = jnp.any(summand.jacobian != 0, axis=1).astype(dtype)
            coupled = coupled | (depends.T @ depends > 0)
        return coupled


def _summands(kinds: tuple[Kind, ...], factors: tuple[Factors, ...]) -> list[Summands]:
    def density(kind: Kind, predictors: Array, constants: tuple) -> Array:
        return kind.at(predictors, constants)[0]

    def dense(jacobian: Array | SparseJacobian) -> Array:
        if isinstance(jacobian, SparseJacobian):
            return times_root(jacobian, jnp.eye(jacobian.size, dtype=jacobian.values.dtype))
        return jacobian

    return [
        Summands(partial(density, kind), f.predictors, dense(f.jacobian), f.constants)
        for kind, f in zip(kinds, factors)
    ]
