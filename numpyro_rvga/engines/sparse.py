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
from ..core.matrices.chains import ChainPacking, packed_form
from ..core.matrices.packing import Packing, border_pattern
from ..core.matrices.precisions import Arrow
from ..core.updates.drivers import Progress
from ..core.updates.factors import Factors, Kind
from ..core.updates.joint import SparseJoint
from ..core.updates.normal_rows import (
    FORMS,
    NormalRows,
    NormalSums,
    differ_in_scale,
    have_one_scale,
    log_scale_of,
    start_of,
    sums_of,
)
from ..core.updates.objective import FactorSet, in_stages
from ..core.updates.search import Search
from ..core.updates.state import State, StepInfo, new_state
from ..model.data.arguments import PARAMS
from ..model.data.rows import Rows, num_rows
from ..model.terms.sparsity import Sparsity
from ..model.terms.terms import Terms, merged
from ..options import Options
from .engine import Engine
from .joint_solver import JointSolver, RowChunks, search_for
from .kinds import make_kind
from .linearized import PatternedTerms, factors_of, prepare
from .row_chunks import chunks_of

DENSE = "dense"
SCATTER_COST = 8  # of a number that is added to a place of its own, over one of two arrays that are added
SHORT = 600  # parameters of chains and whole models: a single solve by whole matrices ends sooner


class SparseProblem(NamedTuple):
    """The input of a solve.

    :ivar marginals: where it begins. :ivar chunks: what :attr:`SparseEngine.prepare` returns.
    :ivar packing: of precisions. :ivar borders: as of :class:`~.jacobians.SparseJacobian`, for the
        terms of each site in ``chunks``, (chunks, n, K - 1).
    :ivar init: mean and packed precision to start from, in the order of elimination, or None.
    :ivar sums: over the rows, by site, in their place; None: they take part one by one.
    :ivar is_corrected: as of :class:`~.joint_solver.JointProblem`.
    """

    marginals: DiagonalGaussian
    chunks: tuple
    num_rows: ArrayLike
    packing: Packing | ChainPacking
    borders: tuple[tuple[Array | np.ndarray, ...], ...]
    init: tuple[Array, Array] | None = None
    sums: tuple[NormalSums, ...] | None = None
    is_corrected: Array | None = None


class SparseEngine:
    """Joint solves of all rows and the whole prior.

    :ivar prepare: ``program.prior_inputs``, rows and weights, (chunks, n, ...) arrays -> the terms of rows, of the
        prior, and of its Gaussian part, as far as they do not depend on theta.
    """

    def __init__(self, engine: Engine, sparsity: Sparsity):
        self.sparsity, self.engine = sparsity, engine
        program, prior = engine.program, engine.program.prior
        gaussian_kinds = tuple(_gaussian_kind(terms, engine.options) for terms in prior.gaussian)
        self._kinds = engine.kinds, engine.prior_kinds, gaussian_kinds
        sides = ((False, program.terms), (True, prior.terms), (True, prior.gaussian))
        self._patterns = [[sparsity.patterns[in_prior, t.site] for t in all_terms] for in_prior, all_terms in sides]
        self._terms: list[list[PatternedTerms]] = [list(zip(terms, p)) for (_, terms), p in zip(sides, self._patterns)]
        self._is_affine = engine.is_affine and all(terms.is_affine for terms in prior.terms)
        self.prepare, self._indices = engine.compiled(self.prepared), engine.compiled(self._indices_of)
        self._summed = engine.compiled(self._sums_of)
        self._solver = JointSolver(self.parts, engine.devices, engine.program.layout.size)

    def bind(self, engine: Engine) -> SparseEngine:
        """The engine for a program that differs in what the data determine; see :meth:`Engine.bind`."""
        other = copy.copy(self)
        other.engine = engine
        return other

    def problem(
        self, rows: Rows, marginals: DiagonalGaussian | None = None, weights: np.ndarray | None = None
    ) -> SparseProblem:
        """The problem of all rows. ``marginals``: where to begin; default: at the prior's."""
        program, prior = self.engine.program, self.engine.program.marginals
        is_nearby = marginals is not None
        marginals = DiagonalGaussian(prior.mean, prior.variance) if marginals is None else marginals
        marginals = jax.tree.map(lambda x: np.asarray(x, program.dtype), marginals)
        chunks = chunks_of(self.engine, rows, self.sparsity.numbers_per_row, weights)
        prepared = self.prepare(program.prior_inputs, *chunks)
        total = num_rows(rows) if weights is None else np.count_nonzero(weights)
        packing, borders = self._packing(prepared)
        problem = SparseProblem(self.engine.devices.put(marginals), prepared, np.int32(total), packing, borders)
        if not self._may_be_summed(problem):
            return problem
        is_one_scale, sums, start = self._summed(problem)
        if not bool(is_one_scale):
            return problem
        return problem._replace(sums=sums, init=None if is_nearby else start)

    def _may_be_summed(self, problem: SparseProblem) -> bool:
        """Whether rows may be Normal terms of one scale, and are so many that their sums take less time."""
        is_normal = all(terms.closed_form in FORMS and not terms.num_local for terms in self.engine.program.terms)
        if not (is_normal and isinstance(problem.packing, Packing)):
            return False
        widths = [len(pattern.columns) for pattern in self._patterns[0]]
        counts = [borders.shape[0] * borders.shape[1] for borders in problem.borders[0]]
        return SCATTER_COST * sum(n * k**2 for n, k in zip(counts, widths)) > problem.packing.size

    def _form(self, problem: SparseProblem) -> Arrow:
        form = packed_form(problem.marginals.variance[self.sparsity.order.indices] ** -1.0, problem.packing)
        assert isinstance(form, Arrow)
        return form

    def _normal_rows(self, problem: SparseProblem) -> list[tuple[object, Factors]]:
        """Form and factors of each site, of all chunks, at theta = 0."""
        form, by_site = self._form(problem), []
        for terms, prepared, at in zip(self.engine.program.terms, problem.chunks[0], problem.borders[0]):
            factors, at = merged((prepared, at))
            jacobian = form.packing.placed(factors.jacobian, jnp.asarray(at))
            by_site.append((terms.closed_form, factors._replace(jacobian=jacobian)))
        return by_site

    def _sums_of(self, problem: SparseProblem) -> tuple[Array, tuple[NormalSums, ...], tuple[Array, Array]]:
        """Whether each site has one scale; the sums if so, and where they say that a search starts."""
        form, rows = self._form(problem), self._normal_rows(problem)
        have = jnp.all(jnp.stack([have_one_scale(*of_site) for of_site in rows]))
        sums = tuple(sums_of(*of_site, form) for of_site in rows)
        return have, sums, start_of(sums, problem.marginals.mean[self.sparsity.order.indices], form)

    def _packing(self, prepared: tuple) -> tuple[Packing | ChainPacking, tuple[tuple[Array | np.ndarray, ...], ...]]:
        """How precisions are packed, and where they have the products that are not in the corner."""
        num_diagonal, size = self.sparsity.order.num_diagonal, self.sparsity.order.indices.size
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

        def indices(num_leading: int, index: np.ndarray) -> np.ndarray:
            if num_leading and isinstance(packing, Packing):
                return packing.border_places(index)
            return np.zeros((*index.shape[:2], 0), np.int32)

        of_rows, *others = (tuple(indices(*each) for each in group) for group in by_group)
        return packing, (self.engine.devices.put_rows(of_rows, axis=1), *self.engine.devices.put(tuple(others)))

    def _indices_of(self, prepared: tuple) -> tuple[tuple[Array, ...], ...]:
        """The entries that the terms of each site depend on, (chunks, n, K)."""
        size, dtype = self.sparsity.order.indices.size, self.engine.program.dtype
        theta = jnp.asarray(np.random.default_rng(0).normal(size=size), dtype)  # anywhere but where slopes vanish

        def indices(pairs: list[PatternedTerms], chunks: tuple) -> tuple[Array, ...]:
            factors = jax.vmap(partial(self._factors, pairs, ordered=theta))(chunks) if pairs else ()
            return tuple(factor.jacobian.index for factor in factors)

        return tuple(map(indices, self._terms, prepared))

    def initial_state(self) -> State:
        """The prior's marginals, as the state before the first row."""
        mean, variance = (jnp.asarray(x, self.engine.program.dtype) for x in self.engine.program.marginals[:2])
        return new_state(mean, jnp.diag(jnp.sqrt(variance)), None)

    def solve(
        self, problem: SparseProblem, on_step: Callable[[Progress], None] | None = None
    ) -> tuple[State, StepInfo]:
        """The state after all rows."""
        num_chunks = jax.tree.leaves(problem.chunks[0])[0].shape[0] if problem.sums is None else 1
        search = self.search(num_chunks, has_start=problem.init is not None)
        return self._solver(search, problem, problem.num_rows, on_step=on_step)

    @property
    def all_kinds(self) -> tuple[Kind, ...]:
        """The kinds of rows, of the prior, and of its Gaussian part."""
        return tuple(kind for kinds in self._kinds for kind in kinds)

    def search(self, num_chunks: int, *, has_start: bool = False) -> Search:
        """The search of a solve."""
        all_kinds, program = self.all_kinds, self.engine.program
        shapes = [(terms.num_elements, terms.num_predictors) for terms in program.terms]
        staged = self._is_affine and in_stages(self._kinds[0], all_kinds, shapes, program.layout.size, num_chunks)
        return search_for(all_kinds, self.engine.effort.settings(), staged=staged, has_start=has_start)

    def parts(self, search: Search, problem: SparseProblem) -> SparseJoint:
        """A problem's parts."""
        rows, *of_prior = [
            FactorSet(kinds, partial(self._linearize, pairs, problem.packing), (chunks, borders))
            for kinds, pairs, chunks, borders in zip(self._kinds, self._terms, problem.chunks, problem.borders)
        ]
        rows = rows.with_kinds(lambda kind: kind.by_nodes(search.nodes, problem.is_corrected))
        if problem.sums is not None:
            rows = NormalRows(self._kinds[0], problem.sums, self._form(problem))
        return SparseJoint(
            search, rows, *of_prior, self.sparsity.order, problem.marginals, problem.packing, problem.init
        )

    def given_params(self, problem: SparseProblem, prior_inputs: dict, chunks: RowChunks) -> SparseProblem:
        """The problem at other values of the ``numpyro.param`` sites, which are among ``prior_inputs``. Of rows that it
        has the sums of, these move the scales alone: one row says how far. See :meth:`keeps_sums`."""
        if problem.sums is None:
            return problem._replace(chunks=self.prepared(prior_inputs, *chunks))
        first = jax.tree.map(lambda x: x[:1, :1], chunks)
        problem = problem._replace(chunks=self.prepared(prior_inputs, *first))
        sums = zip(problem.sums or (), self.engine.program.terms, problem.chunks[0])
        scales = [log_scale_of(terms.closed_form, merged(factors)) for _, terms, factors in sums]
        return problem._replace(sums=tuple(x._replace(log_scale=a) for x, a in zip(problem.sums or (), scales)))

    def keeps_sums(self, problem: SparseProblem, chunks: RowChunks) -> SparseProblem:
        """The problem, without the sums of rows if ``numpyro.param`` sites move more of rows than one scale."""
        if problem.sums is None:
            return problem
        values = np.asarray(self.engine.program.params.values)
        values = values + np.random.default_rng(0).normal(size=values.shape).astype(values.dtype)
        other = self.prepare(self.engine.program.prior_inputs | {PARAMS: values}, *chunks)
        forms = [terms.closed_form for terms in self.engine.program.terms]
        of_rows = [merged((a, b)) for a, b in zip(problem.chunks[0], other[0])]
        keeps = all(bool(differ_in_scale(form, *pair)) for form, pair in zip(forms, of_rows))
        return problem if keeps else problem._replace(sums=None)

    def prepared(self, prior_inputs: dict, rows: dict, weights: Array) -> tuple:
        origin = jnp.zeros(self.sparsity.order.indices.size, self.engine.program.dtype)
        prior = jax.tree.map(lambda x: x[None], prior_inputs), jnp.ones((1, 1), weights.dtype)  # one chunk
        shared = {name: array for name, array in prior_inputs.items() if name == PARAMS}
        of_rows = jax.vmap(lambda rows, weights: prepare(self._terms[0], origin, rows | shared, weights))(rows, weights)
        return of_rows, *(jax.vmap(partial(prepare, pairs, origin))(*prior) for pairs in self._terms[1:])

    def _linearize(
        self,
        pairs: list[PatternedTerms],
        packing: Packing | ChainPacking,
        chunk: tuple[tuple, tuple[Array, ...]],
        ordered: Array,
    ) -> tuple[Factors, ...]:
        """Factors at theta (P,), in the sparsity's order.

        :param chunk: what was prepared, and the borders.
        """
        prepared, borders = chunk
        factors = self._factors(pairs, prepared, ordered)
        return tuple(f._replace(jacobian=packing.placed(f.jacobian, at)) for f, at in zip(factors, borders))

    def _factors(self, pairs: list[PatternedTerms], prepared: tuple, ordered: Array) -> tuple[Factors, ...]:
        return factors_of(pairs, prepared, ordered, lambda ordered: ordered[self.sparsity.order.back])


def _gaussian_kind(terms: Terms, options: Options) -> Kind:
    """The kind of a prior's Gaussian terms, and of constants."""
    expectation = "exact" if terms.num_predictors else "linearized"
    return make_kind(terms, options._replace(expectation=expectation, scheme="implicit"), jax.random.key(0))


def sparse_engine(engine: Engine, rows: Rows, *, given_params: bool = False) -> SparseEngine | None:
    """The engine for all rows there are; None if terms depend on more than a few entries of theta, or theta is short.

    :param given_params: whether there may be ``numpyro.param`` sites, which stand still, and many solves.
    """
    if engine.program.params.layout.size and not given_params:
        return None
    if DENSE in engine.made:  # not asked again: whole matrices are never wrong
        return None
    program, sparsity = engine.program, None
    is_short = program.layout.size < SHORT and not given_params
    if not (is_short and program.whole):
        sparsity = program.find_sparsity(program.inputs(rows))
    if sparsity is None or (is_short and sparsity.block is not None):
        engine.made[DENSE] = True
        return None
    return engine.once(sparsity.key, lambda: SparseEngine(engine, sparsity)).bind(engine)
