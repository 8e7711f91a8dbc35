"""Joint solves for models whose terms depend on a few entries of theta each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..core.gaussians import DiagonalGaussian
from ..core.matrices.borders import border_pattern
from ..core.matrices.chains import ChainPacking
from ..core.matrices.packing import Packing
from ..core.updates.drivers import Progress
from ..core.updates.factors import Factors, Kind
from ..core.updates.joint import SparseJoint
from ..core.updates.objective import FactorSet, in_stages
from ..core.updates.search import Search
from ..core.updates.state import Count, State, StepInfo
from ..model.data.arguments import PARAMS
from ..model.data.rows import Rows, num_rows
from ..model.terms.sparsity import Sparsity
from ..model.terms.terms import Terms
from ..options import Options
from .engine import Engine
from .joint_solver import JointSolver, search_for
from .kinds import make_kind
from .linearized import Seen, factors_of, prepare
from .row_chunks import chunks_of

DENSE = "dense"
SHORT = 600  # parameters of chains and whole models: a single solve by whole matrices ends sooner


class SparseProblem(NamedTuple):
    """What a solve takes.

    :ivar marginals: where it begins. :ivar chunks: what :attr:`SparseEngine.prepare` returns.
    :ivar packing: of precisions. :ivar borders: as of :class:`~.jacobians.SparseJacobian`, for the
        terms of each site in ``chunks``, (chunks, n, K - 1).
    :ivar init: mean and packed precision to start from, in the order of elimination, or None.
    """

    marginals: DiagonalGaussian
    chunks: tuple
    num_rows: ArrayLike
    packing: Packing | ChainPacking
    borders: tuple[tuple[Array | np.ndarray, ...], ...]
    init: tuple[Array, Array] | None = None


class SparseEngine:
    """Joint solves of all rows and the whole prior.

    :ivar prepare: ``program.prior_inputs``, rows and weights, (chunks, n, ...) arrays -> the terms of rows, of the
        prior, and of its Gaussian part, as far as they do not depend on theta.
    """

    def __init__(self, engine: Engine, sparsity: Sparsity):
        self.sparsity, self.engine = sparsity, engine
        self._identity = object()
        program, prior = engine.program, engine.program.prior
        gaussian_kinds = tuple(_gaussian_kind(terms, engine.options) for terms in prior.gaussian)
        self._kinds = engine.kinds, engine.prior_kinds, gaussian_kinds
        sides = ((False, program.terms), (True, prior.terms), (True, prior.gaussian))
        self._patterns = [[sparsity.patterns[in_prior, t.site] for t in all_terms] for in_prior, all_terms in sides]
        self._seen: list[list[Seen]] = [list(zip(terms, p)) for (_, terms), p in zip(sides, self._patterns)]
        self._is_affine = engine.is_affine and all(terms.is_affine for terms in prior.terms)
        self.prepare, self._indices = engine.compiled(self.prepared), engine.compiled(self._indices_of)
        self._solver = JointSolver(self.parts, engine.devices, engine.program.layout.size)

    def bind(self, engine: Engine) -> SparseEngine:
        """The same for a program that differs in what the data determine; see :meth:`Engine.bind`."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SparseEngine) and self._identity is other._identity

    def __hash__(self) -> int:
        return id(self._identity)

    def problem(
        self, rows: Rows, marginals: DiagonalGaussian | None = None, weights: np.ndarray | None = None
    ) -> SparseProblem:
        """For all rows. ``marginals``: where to begin; default: at the prior's."""
        program, prior = self.engine.program, self.engine.program.marginals
        marginals = DiagonalGaussian(prior.mean, prior.variance) if marginals is None else marginals
        marginals = jax.tree.map(lambda x: np.asarray(x, program.dtype), marginals)
        chunks = chunks_of(self.engine, rows, self.sparsity.numbers_per_row, weights)
        prepared = self.prepare(program.prior_inputs, *chunks)
        total = num_rows(rows) if weights is None else np.count_nonzero(weights)
        packing, borders = self._packing(prepared)
        return SparseProblem(self.engine.devices.put(marginals), prepared, np.int32(total), packing, borders)

    def _packing(self, prepared: tuple) -> tuple[Packing | ChainPacking, tuple[tuple[Array | np.ndarray, ...], ...]]:
        """How precisions are packed, and where they have the products that are not in the corner."""
        num_diagonal, size = self.sparsity.order.num_diagonal, self.sparsity.order.places.size
        by_group = [
            [(pattern.num_leading, index) for pattern, index in zip(patterns, indices)]
            for patterns, indices in zip(self._patterns, jax.device_get(self._indices(prepared)))
        ]
        if self.sparsity.block is not None:
            packing: Packing | ChainPacking = ChainPacking(num_diagonal, size - num_diagonal, self.sparsity.block)
        else:
            bordered = [x.reshape(-1, x.shape[-1]) for group in by_group for num_leading, x in group if num_leading]
            columns = np.concatenate([np.repeat(index[:, 0], index.shape[1] - 1) for index in bordered])
            rows = np.concatenate([index[:, 1:].reshape(-1) for index in bordered]) - num_diagonal
            packing = Packing(
                num_diagonal, size - num_diagonal, border_pattern(columns, rows, num_diagonal, size - num_diagonal)
            )

        def places(num_leading: int, index: np.ndarray) -> np.ndarray:
            if num_leading and isinstance(packing, Packing):
                return packing.border_places(index)
            return np.zeros((*index.shape[:2], 0), np.int32)

        of_rows, *others = (tuple(places(*each) for each in group) for group in by_group)
        return packing, (self.engine.devices.put_rows(of_rows, axis=1), *self.engine.devices.put(tuple(others)))

    def _indices_of(self, prepared: tuple) -> tuple[tuple[Array, ...], ...]:
        """The entries that the terms of each site depend on, (chunks, n, K)."""
        size, dtype = self.sparsity.order.places.size, self.engine.program.dtype
        theta = jnp.asarray(np.random.default_rng(0).normal(size=size), dtype)  # anywhere but where slopes vanish

        def indices(seen: list[Seen], chunks: tuple) -> tuple[Array, ...]:
            factors = jax.vmap(partial(self._factors, seen, ordered=theta))(chunks) if seen else ()
            return tuple(factor.jacobian.index for factor in factors)

        return tuple(map(indices, self._seen, prepared))

    def initial_state(self) -> State:
        """The prior's marginals, as the state before the first row."""
        mean, variance = (jnp.asarray(x, self.engine.program.dtype) for x in self.engine.program.marginals[:2])
        zero = jnp.zeros((), mean.dtype)
        return State(mean, jnp.zeros_like(mean), jnp.diag(jnp.sqrt(variance)), zero, None, Count.of(0))

    def solve(
        self, problem: SparseProblem, on_step: Callable[[Progress], None] | None = None
    ) -> tuple[State, StepInfo]:
        """The state after all rows."""
        search = self.search(jax.tree.leaves(problem.chunks[0])[0].shape[0])
        return self._solver(search, problem, problem.num_rows, on_step=on_step)

    @property
    def all_kinds(self) -> tuple[Kind, ...]:
        """Of rows, the prior, and its Gaussian part."""
        return tuple(kind for kinds in self._kinds for kind in kinds)

    def search(self, num_chunks: int, *, has_start: bool = False) -> Search:
        """What a solve seeks."""
        all_kinds, program = self.all_kinds, self.engine.program
        shapes = [(terms.num_elements, terms.num_predictors) for terms in program.terms]
        staged = (
            self.sparsity.block is None
            and self._is_affine
            and in_stages(self._kinds[0], all_kinds, shapes, program.layout.size, num_chunks)
        )
        return search_for(all_kinds, self.engine.effort.settings(), staged=staged, has_start=has_start)

    def parts(self, search: Search, problem: SparseProblem) -> SparseJoint:
        """A problem's parts."""
        groups = [
            FactorSet(kinds, partial(self._linearize, seen, problem.packing), (chunks, borders))
            for kinds, seen, chunks, borders in zip(self._kinds, self._seen, problem.chunks, problem.borders)
        ]
        return SparseJoint(search, *groups, self.sparsity.order, problem.marginals, problem.packing, problem.init)

    def prepared(self, prior_inputs: dict, rows: dict, weights: Array) -> tuple:
        origin = jnp.zeros(self.sparsity.order.places.size, self.engine.program.dtype)
        prior = jax.tree.map(lambda x: x[None], prior_inputs), jnp.ones((1, 1), weights.dtype)  # one chunk
        shared = {name: array for name, array in prior_inputs.items() if name == PARAMS}
        of_rows = jax.vmap(lambda rows, weights: prepare(self._seen[0], origin, rows | shared, weights))(rows, weights)
        return of_rows, *(jax.vmap(partial(prepare, seen, origin))(*prior) for seen in self._seen[1:])

    def _linearize(
        self, seen: list[Seen], packing: Packing | ChainPacking, chunk: tuple[tuple, tuple[Array, ...]], ordered: Array
    ) -> tuple[Factors, ...]:
        """Factors at theta (P,), in the sparsity's order.

        :param chunk: what was prepared, and the borders.
        """
        prepared, borders = chunk
        factors = self._factors(seen, prepared, ordered)
        return tuple(f._replace(jacobian=packing.placed(f.jacobian, at)) for f, at in zip(factors, borders))

    def _factors(self, seen: list[Seen], prepared: tuple, ordered: Array) -> tuple[Factors, ...]:
        return factors_of(seen, prepared, ordered, lambda ordered: ordered[self.sparsity.order.back])


def _gaussian_kind(terms: Terms, options: Options) -> Kind:
    """Of a prior's Gaussian terms, and of constants."""
    expectation = "exact" if terms.num_predictors else "linearized"
    return make_kind(terms, options._replace(expectation=expectation, scheme="implicit"), jax.random.key(0))


def sparse_engine(engine: Engine, rows: Rows, *, given_params: bool = False) -> SparseEngine | None:
    """For all rows there are; None if terms read more than a few entries of theta, or theta is short.

    :param given_params: whether there may be ``numpyro.param`` sites, which stand still, and many solves.
    """
    if engine.program.params.layout.size and not given_params:
        return None
    if DENSE in engine.made:  # not asked again: whole matrices are never wrong
        return None
    program, sparsity = engine.program, None
    is_short = program.layout.size < SHORT and not given_params
    if not (is_short and program.whole):
        sparsity = program.find_sparsity(program.inputs(rows), engine.made)
    if sparsity is None or (is_short and sparsity.block is not None):
        engine.made[DENSE] = True
        return None
    return engine.once(sparsity.key, lambda: SparseEngine(engine, sparsity)).bind(engine)
