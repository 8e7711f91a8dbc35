"""A program and options, compiled: state and rows in, state out.

Row i has the factors phi(F_i(theta)), with predictors F_i(theta) (C,) and their Jacobian J_i (C, P). What of a row does
not depend on theta is prepared once (:meth:`Engine.prepare`), the rest at each theta (:meth:`Engine.linearize`). Then

- :attr:`Engine.stream` moves q = N(mean, root root^T) block after block of rows (``core/updates/recursion.py``);
- :meth:`Engine.joint` and :meth:`Engine.solve_all` solve for many rows and the prior's terms at once
  (``core/updates/joint.py``), driven from the host by :class:`~.joint_solver.JointSolver`;
- :meth:`Engine.with_exact_prior` puts the prior's own terms in the place of the Gaussian that stood for them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Sequence
from functools import partial, reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from ..core.compilation import Compiled, jit
from ..core.gaussians import FullGaussian, Movement
from ..core.matrices.jacobians import times_root
from ..core.updates.drivers import Progress
from ..core.updates.factors import Kind
from ..core.updates.joint import DenseJoint
from ..core.updates.objective import FactorSet, in_stages
from ..core.updates.recursion import explicit_step, implicit_step, scan_blocks
from ..core.updates.row_factors import row_factors_and_residuals
from ..core.updates.search import Search, Settings
from ..core.updates.state import Absorbed, QuadraticFactors, State, StepInfo
from ..model.data.arguments import PARAMS
from ..model.program import Program
from ..model.terms.sparsity import selecting_pattern
from ..model.terms.terms import Terms, merged
from ..options import Info, Options, key_numbers
from .devices import Devices
from .effort import Effort
from .joint_solver import Coarse, JointProblem, JointSolver, PriorProblem, RowChunks, search_for, whitened
from .kinds import make_kind
from .linearized import at_indices, by_row, factors_of, flat_row_factors, merged_by_form, prepare, sites_by_form
from .starts import MOST_NUMBERS, MOST_PARAMETERS, other_means

SYMMETRIC_PREDICTORS = 8  # with more, as in neural networks, the prior's mean is often a saddle
NUM_STARTS = 8
NUM_LINEARIZATIONS = 3  # of predictors that are not affine, in a small block
Made = TypeVar("Made")


class Engine:
    """Updates of a program's :class:`~.state.State`, compiled once for all rows of a form.

    :param rng_key: draws the nodes of Monte Carlo expectations.
    :param movement: how parameters move before each block of a stream.
    :param devices: among which rows are shared out.
    :param effort: of the rows' expectations; see :func:`~numpyro_rvga.core.expectations.ladder.expectations`.
    """

    def __init__(
        self,
        program: Program,
        options: Options,
        rng_key: Array,
        movement: Movement | None = None,
        devices: Devices | None = None,
        *,
        effort: str = "usual",
    ):
        self.program, self.options, self.movement, self.rng_key = program, options, movement, rng_key
        self.made: dict[Hashable, Any] = {}  # see once()
        self.effort = self._effort(effort)
        self.kinds, self.prior_kinds = self.effort.rows, self.effort.prior
        pattern = selecting_pattern(program.layout.size)
        self._row_terms = [(terms, pattern if terms.site in program.selections else None) for terms in program.terms]
        self._prior_terms = [(terms, None) for terms in program.prior.terms]
        self._prior_forms = sites_by_form(self._prior_terms, program.prior_inputs)
        self.is_affine = all(t.is_affine for t in program.terms)
        wide = any(t.num_predictors > SYMMETRIC_PREDICTORS or not t.is_affine for t in program.terms)
        kinds = *self.kinds, *self.effort.joint_rows, *self.prior_kinds
        self._draws_nodes = wide or any(kind.held_out is not None for kind in kinds)
        rng = np.random.default_rng(key_numbers(rng_key))  # JAX's own takes a quarter of a second to compile
        self._starts = jnp.asarray(rng.normal(size=(NUM_STARTS, program.layout.size)), program.dtype) if wide else None
        self.devices = Devices(None) if devices is None else devices
        # Within other compiled functions: a model's predictors are then traced once for each of these, not each time.
        # By site: predictors at theta (n E, C), their Jacobians (n E, C, P), and constants.
        self.prepare = jit(self._prepare, static_argnames="once")
        self.linearize = jit(partial(factors_of, self._row_terms))
        of_forms = [self._prior_terms[same[0]] for same in self._prior_forms]
        self._prepare_prior = jit(self._prior_prepared)
        self._linearize_prior = jit(partial(factors_of, of_forms))
        self._prepare_block = Compiled(self._prepared_block, level=0)
        self._flat_row_factors = Compiled(flat_row_factors)
        size = program.layout.size
        self.joint_solver = JointSolver(self.joint_parts, self.devices, size, self._is_little_work)
        self._prior_solver = JointSolver(self._prior_parts, self.devices, size, self._is_little_work)
        self.residuals = self.compiled(self._residuals)
        self.stream = self.compiled(self._stream, ("with_absorbed",), routines=True)

    def bind(self, program: Program, rng_key: Array | None = None) -> Engine:
        """The engine for a program that differs in what the data determine: nothing is compiled anew.

        :param program: what :meth:`Program.bind` made of this engine's. :param rng_key: one that it :meth:`takes`.
        """
        if program is self.program and (rng_key is None or key_numbers(rng_key) == key_numbers(self.rng_key)):
            return self
        other = copy.copy(self)
        other.program, other.rng_key = program, self.rng_key if rng_key is None else rng_key
        return other

    def takes(self, rng_key: Array) -> bool:
        """Whether what is compiled serves a key: no nodes have been drawn by another one."""
        return not self._draws_nodes or key_numbers(rng_key) == key_numbers(self.rng_key)

    def _effort(self, level: str) -> Effort:
        """The expectations at a level of effort."""
        program, options, key = self.program, self.options, self.rng_key
        of_prior = options._replace(expectation="auto", scheme="implicit")

        def kinds(all_terms: Sequence[Terms], options: Options, effort: str) -> tuple[Kind, ...]:
            return tuple(make_kind(terms, options, key, effort=effort) for terms in all_terms)

        return Effort(
            level,
            options,
            program.dtype == jnp.float64,
            rows=kinds(program.terms, options, level),
            joint_rows=kinds(program.terms, options, "direct" if level == "usual" else level),
            prior=kinds(program.prior.terms, of_prior, "thorough" if level == "thorough" else "direct"),
            row_terms=program.terms,
            prior_terms=program.prior.terms,
        )

    def with_effort(self, effort: str, scheme: str | None = None) -> Engine:
        """The engine with other rules for its expectations, and another scheme, if one is given."""
        options = self.options if scheme is None else self.options._replace(scheme=scheme)
        parts = self.program, options, self.rng_key, self.movement, self.devices
        return self.once((effort, scheme), lambda: Engine(*parts, effort=effort)).bind(self.program, self.rng_key)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """An object with compiled functions of its own, made once for all engines that run the same compiled functions.

        :param key: of what is made: its type, say.
        """
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def __eq__(self, other: object) -> bool:
        """Whether two engines run the same compiled functions."""
        return isinstance(other, Engine) and self.made is other.made

    def __hash__(self) -> int:
        return id(self.made)

    def with_exact_prior(self, state: State) -> tuple[State, StepInfo]:
        """The state with the prior's true terms in place of their Gaussian approximation.

        :raises ValueError: if there is no such state.
        """
        after, info = self.solve_with_exact_prior(self.program.prior_inputs, state)
        if not bool(info.ok):
            raise ValueError("the final solve against the true prior has no finite result: is the prior proper?")
        return after, info

    def compiled(
        self, function: Callable, static_argnames: tuple[str, ...] = (), *, routines: bool = False, level: int = 1
    ) -> Compiled:
        """A function as :class:`Compiled` has it, whose results every device has."""
        return Compiled(function, static_argnames, self.devices.everywhere, routines=routines, level=level)

    def _is_little_work(self, search: Search, problem: JointProblem | PriorProblem) -> bool:
        return self.effort.is_little_work(problem.num_rows, by_few_nodes=search.nodes != "usual")

    @property
    def is_moving(self) -> bool:
        """Whether parameters move between blocks."""
        return self.movement is not None

    @property
    def numbers_per_row(self) -> int:
        """Size of a row's Jacobians."""
        terms = [t for t in self.program.terms if not t.by_draws]
        return max(1, sum(t.num_elements * max(t.num_predictors, 1) for t in terms)) * self.program.layout.size

    # ------------------------------------------------------------------ joint solves
    def joint(
        self,
        state: State,
        rows: dict,
        weights: Array,
        row_factors: tuple[QuadraticFactors, ...] | None = None,
        *,
        num_new: np.ndarray | None = None,
        nearby: FullGaussian | None = None,
        with_absorbed: bool = False,
    ) -> tuple[State, StepInfo]:
        """The state after rows, solved for together with the prior's own terms.

        :param rows: (n, ...) arrays. :param weights: (n,).
        :param row_factors: Gaussian approximations (n, E, ...) of the rows, which are divided out of the state; None:
            there are none. :param num_new: how many rows are new to the state; None: all of them.
        :param nearby: where the search starts; None: at the state.
        :param with_absorbed: report the moments of the rows' predictors under q, for later solves.
        """
        prepared, count = self._prepare_block(rows, weights)
        row_factors = None if row_factors is None else self._flat_row_factors(row_factors, weights)
        init = None if nearby is None else whitened(state.mean, state.root, nearby.mean, nearby.root)
        settings = self.effort.settings() if row_factors is None else self.effort.settings_around_a_stream()
        search = self._search(settings, 1, has_start=init is not None)
        problem = JointProblem(state, prepared, self.program.prior_inputs, row_factors, init)
        others = self._other_means(search, problem, len(weights))
        problem, options = self._solver_options(search, problem)
        new = count if num_new is None else num_new
        return self.joint_solver(search, problem, new, other_means=others, with_absorbed=with_absorbed, **options)

    def solve_all(
        self,
        problem: JointProblem,
        num_rows: ArrayLike,
        *,
        alternating: bool,
        on_step: Callable[[Progress], None],
    ) -> tuple[State, StepInfo]:
        """The best Gaussian for all rows of a problem and the prior's own terms: FixedPointVI's solve.

        :param num_rows: how many are new to the state. :param alternating: mean and covariance in turn.
        """
        search = self.search_all(problem, alternating=alternating)
        others = self._other_means(search, problem, problem.num_rows)
        problem, options = self._solver_options(search, self.prepared_once(problem))
        return self.joint_solver(search, problem, num_rows, other_means=others, on_step=on_step, **options)

    def _solver_options(self, search: Search, problem: JointProblem) -> tuple[JointProblem, Info]:
        """The problem, changed if it begins with coarse expectations, and options of :class:`JointSolver`."""
        has_errors = self.effort.has_estimated_errors and problem.row_factors is None and not search.mode
        problem, coarse = self._coarse(search, problem)
        return problem, {"coarse": coarse, "with_error_estimates": has_errors}

    def prepared_once(self, problem: JointProblem) -> JointProblem:
        """The problem with its rows prepared, where they are one chunk, and not at each step."""
        if problem.num_chunks > 1 or not isinstance(problem.chunks, RowChunks):
            return problem
        rows = {name: array[0] for name, array in problem.chunks.rows.items()} | self._params_of(problem)
        return problem._replace(chunks=self._prepare_block(rows, problem.chunks.weights[0])[0])

    def _coarse(self, search: Search, problem: JointProblem) -> tuple[JointProblem, Coarse | None]:
        """The problem, and what a search for its solution begins with, where it is far off."""
        if search.mode or not problem.is_far:
            return problem, None
        if self.effort.has_few_draws:
            few, many = (problem._replace(is_coarse=np.asarray(flag)) for flag in (True, False))
            return many, Coarse(search, few)
        if not self.effort.can_do_with_few or self.effort.takes_one_rule(problem.num_rows):
            return problem, None
        suffices = partial(self.effort.few_nodes_suffice, problem.num_rows)
        may_end = problem.row_factors is None and self.effort.may_end_by_few_nodes(problem.num_rows)
        few = problem._replace(is_corrected=np.asarray(False)) if may_end else problem
        return problem, Coarse(search._replace(nodes="few"), few, suffices, self.effort.few_nodes_tolerance)

    def _other_means(self, search: Search, problem: JointProblem, num_rows: int) -> Callable | None:
        """Where a search from the prior begins again, see :mod:`~.starts`; None where that is not worth its time."""
        is_concave = search.log_concave and self.is_affine and self._prior_is_affine
        is_informed = problem.row_factors is not None or not problem.is_far
        if is_concave or search.mode or is_informed or self.devices.count > 1 or int(problem.state.num_rows):
            return None
        is_dear = self.effort.takes_draws or self.program.integrates_row_latents or self.effort.is_thorough
        if is_dear or self.program.layout.size > MOST_PARAMETERS or num_rows * self.numbers_per_row > MOST_NUMBERS:
            return None
        return lambda optimum, number: other_means(problem.state, optimum, self.rng_key, number)

    def search_all(self, problem: JointProblem, *, alternating: bool = False) -> Search:
        """The search of :meth:`solve_all`."""
        has_start = problem.init is not None
        options = {"has_start": has_start, "alternating": alternating}
        return self._search(self.effort.settings_of_all(has_start=has_start), problem.num_chunks, **options)

    def _search(self, settings: Settings, num_chunks: int, **choices: bool) -> Search:
        """``choices``: see :func:`search_for`."""
        kinds, mode = (*self.prior_kinds, *self.kinds), self.options.scheme == "laplace"
        return search_for(kinds, settings, staged=self._is_staged(num_chunks), mode=mode, **choices)

    @property
    def _prior_is_affine(self) -> bool:
        return all(terms.is_affine for terms in self.program.prior.terms)

    def _is_staged(self, num_chunks: int) -> bool:
        affine = self.is_affine and self._prior_is_affine
        if self.effort.is_thorough and any(kind.has_errors for kind in self.prior_kinds):
            return False  # all that is dear are evaluations
        shapes = [(t.num_elements, t.num_predictors) for t in self.program.terms]
        return affine and in_stages(self.kinds, self.prior_kinds, shapes, self.program.layout.size, num_chunks)

    def joint_parts(self, search: Search, problem: JointProblem) -> DenseJoint:
        """A problem as a search takes it: its objective, where it begins, and what becomes of its solution."""
        params = self._params_of(problem)

        def linearize(chunk, theta):
            if isinstance(chunk, RowChunks):
                chunk = self.prepare(chunk.rows | params, chunk.weights)
            return self.linearize(chunk, theta)

        rows, prior = FactorSet(self.effort.joint_rows, linearize, problem.chunks), self.prior_set(problem.prior_inputs)
        return DenseJoint(
            search,
            rows.with_kinds(partial(problem.kind_of_row, search)),
            prior.with_kinds(partial(problem.kind_of_prior, search)),
            problem.state,
            row_factors=problem.row_factors,
            starts=self._starts if problem.row_factors is None and problem.init is None else None,
            init=problem.init,
            selecting=len(self.program.selections) == len(self.program.terms),
            by_row=partial(by_row, all_terms=self.program.terms),
        )

    @staticmethod
    def _params_of(problem: JointProblem) -> dict[str, Array]:
        """Learned parameters, as rows take them."""
        return {name: value for name, value in problem.prior_inputs.items() if name == PARAMS}

    def solve_with_exact_prior(
        self, prior_inputs: dict, state: State, rest: Array | None = None, indices: Array | None = None
    ) -> tuple[State, StepInfo]:
        """The best Gaussian for the summary of the data (the state over the prior's Gaussian) times the prior itself.

        :param prior_inputs: as ``program.prior_inputs``.
        :param indices: entries of theta (S,) that the state is of, if not of all: those that prior terms depend on. The
            others stay as in ``rest`` (P,).
        """
        search = search_for(
            self.prior_kinds,
            self.effort.settings(),
            staged=self._prior_is_affine and in_stages((), self.prior_kinds, (), self.program.layout.size, 1),
            mode=self.options.scheme == "laplace",
        )
        problem = PriorProblem(state, prior_inputs, None if indices is None else (rest, indices))
        return self._prior_solver(search, problem, jnp.zeros((), jnp.int32))

    def _prior_parts(self, search: Search, problem: PriorProblem) -> DenseJoint:
        prior = self.prior_set(problem.prior_inputs)
        if problem.among is not None:
            prior = prior._replace(linearize=partial(at_indices, prior.linearize, *problem.among))
        return DenseJoint(search, FactorSet((), lambda chunk, theta: ()), prior, problem.state)

    def _prepared_block(self, rows: dict, weights: Array) -> tuple[tuple, Array]:
        """Rows as a problem's only chunk, and how many they are."""
        prepared = jax.tree.map(lambda x: x[None], self.prepare(rows, weights))
        return prepared, jnp.sum(weights).astype(jnp.int32)

    # ------------------------------------------------------------------ compiled
    def _residuals(
        self, state: State, rows: dict, weights: Array, absorbed: tuple[Absorbed, ...]
    ) -> tuple[Array, tuple[QuadraticFactors, ...]]:
        """The residuals (n,) of the rows' Gaussian approximations in the state, in standard deviations of q, and the
        approximations; see :func:`row_factors_and_residuals`.

        :param absorbed: the moments of their predictors when they became part of the state, (n, E, ...) arrays.
        """
        factors = self.linearize(self.prepare(rows, weights), state.mean)
        whitened = tuple(times_root(f.jacobian, state.root) for f in factors)
        row_factors, residuals = row_factors_and_residuals(self.kinds, factors, whitened, merged(absorbed))
        row_factors = jax.tree.map(lambda x: x.reshape(len(weights), -1, *x.shape[1:]), row_factors)
        return reduce(jnp.add, [jnp.sum(x.reshape(len(weights), -1), axis=1) for x in residuals]), row_factors

    def _stream(
        self, state: State, rows: dict, weights: Array, *, with_absorbed: bool = False
    ) -> tuple[State, StepInfo]:
        """The state after blocks of rows, one after the other: (blocks, B, ...) arrays, weights (blocks, B)."""
        blocks = jax.vmap(self.prepare)(rows, weights)
        counts = jnp.sum(weights, axis=1).astype(jnp.int32)
        step = partial(self._step, with_absorbed, weights.shape[1])
        state, info = scan_blocks(step, state, blocks, counts, self.movement, rows if self.is_moving else None)
        return state, info._replace(absorbed=by_row(info.absorbed, self.program.terms))

    def _step(self, with_absorbed, block_size, block):
        linearize_block = partial(self.linearize, block)
        if self.options.scheme == "implicit":
            linearizations = 1 if self.is_affine else NUM_LINEARIZATIONS
            settings = self.effort.settings(block_size)
            return implicit_step(self.kinds, linearize_block, settings, linearizations, with_absorbed)
        return explicit_step(self.kinds, linearize_block)

    # ------------------------------------------------------------------ rows as factors
    def _prepare(self, rows: dict, weights: Array, *, once: bool = False) -> tuple:
        """What of rows (n, ...) with weights (n,) does not depend on theta; see :func:`~.linearized.prepare`."""
        origin = jnp.zeros(self.program.layout.size, self.program.dtype)
        return prepare(self._row_terms, origin, rows, weights, once=once)

    def prior_set(self, inputs: dict) -> FactorSet:
        """The prior's terms. ``inputs``: as ``program.prior_inputs``."""
        prepared = self._prepare_prior(inputs)
        kinds = tuple(self.prior_kinds[same[0]] for same in self._prior_forms)
        return FactorSet(kinds, lambda chunk, theta: self._linearize_prior(prepared, theta))

    def _prior_prepared(self, inputs: dict) -> tuple:
        origin, ones = (jnp.full(n, x, self.program.dtype) for n, x in ((self.program.layout.size, 0), (1, 1)))
        return merged_by_form(self._prior_forms, prepare(self._prior_terms, origin, inputs, ones))
