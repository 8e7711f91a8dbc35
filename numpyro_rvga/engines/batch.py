"""All rows and the whole prior in one solve: what FixedPointVI does, and RVGA with rows that cannot stand alone."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.gaussians import DiagonalGaussian, FullGaussian
from ..core.updates.state import State, StepInfo
from ..model.bad_rows import NotFinite, describe_bad_rows, possible_point
from ..model.data.rows import Rows
from ..model.handlers.tracing import REACH
from ..model.program import Program
from ..options import Info, Options
from ..progress import Bar, progress
from ..user_warnings import warn
from .effort import BUDGET
from .engine import Engine
from .expectation_errors import expectation_errors, has_finite_bound, warn_of
from .gradient_ascent import GradientAscent, Record
from .joint_solver import JointProblem, whitened
from .maximized_bound import Learned, MaximizedBound, learn
from .rounding_errors import is_worth_more
from .row_chunks import distinct_chunks_of
from .sparse import SparseEngine, sparse_engine
from .starts import modes_info, warn_of_modes

LEARNING_TOLERANCE = 1e-5  # nats
FLAT = 1e3  # times the scale where a site of improper prior starts: where q is as wide, the data say nothing of it
ROUNDINGS = 8  # units in the last place, for each entry


class Fit(NamedTuple):
    """:ivar program: with the ``numpyro.param`` sites that were learned. :ivar bound: on the log evidence, or None.
    :ivar info: for the posterior's ``info``."""

    program: Program
    state: State
    bound: float | None
    info: Info


_Solved = tuple[Program, State, StepInfo, Array | np.ndarray, Learned | None]
"""The program with its learned parameters, the solution, its report, where the search began, and what was learned."""


class BatchSolver:
    """Solves of all rows, compiled once for each engine.

    :param schedule: as for :class:`FixedPointVI`.
    :param name: of the method, on the progress bar.
    """

    def __init__(self, options: Options, schedule: str, name: str):
        self._options, self._schedule, self._name = options, schedule, name

    def __call__(
        self, engine: Engine, rows: Rows, init: FullGaussian | None = None, *, progress_bar: bool, started: float
    ) -> Fit:
        """The best Gaussian.

        :param rows: all of them. :param init: where the search starts; None: at the prior.
        :param started: when the user's call was.
        :raises NotFinite: naming the row, if the bound is not finite.
        :raises ValueError: naming the site, if the posterior is improper.
        """
        if not engine.program.terms and not engine.program.prior.terms:
            return _prior_itself(engine.program)
        in_parts = self._schedule == "incremental" and self._options.scheme == "implicit"
        sparse = sparse_engine(engine, rows) if in_parts else None
        with progress(progress_bar, None, self._name, "it") as bar:
            record = Record(bar, started)
            if sparse is not None:
                solved = _solved_sparsely(sparse, rows, init, record)
            else:
                solved = self._solved_densely(engine, rows, init, record, bar)
        program, after, info, origin, learned = solved
        if not bool(info.ok):
            reason = describe_bad_rows(program, jnp.asarray(origin), rows) or "are the priors proper?"
            error = NotFinite(f"the bound is not finite: {reason}.")
            if sparse is not None or learned is not None:
                raise error
            return self.of_mode(error, engine, rows, progress_bar=progress_bar, started=started)
        _check_proper(program, after, converged=bool(info.converged))
        report, bound, error = {}, float(after.log_evidence), 0.0
        if self._options.has_bound and learned is None:
            error, excess, mendable = expectation_errors(engine, after, rows, info.error_estimates)
            report["elbo_error"], bound = error, bound - excess
            if is_worth_more(engine, after, rows, mendable, bound):
                options = {"progress_bar": progress_bar, "started": started}
                nearby = init if sparse is not None else FullGaussian(after.mean, after.root)
                modes = modes_info(info.modes)
                warn_of_modes(modes)
                fit = self(engine.with_effort("thorough"), rows, nearby, **options)
                return fit._replace(info=modes | fit.info)
            warn_of(error)
        refinement = None if info.error_estimates is None else info.error_estimates.refinement
        report |= {
            "converged": is_maximized(info, error),
            "iterations": int(info.iterations),
            "largest_decrement": float(info.decrement),
            "bounds": np.asarray(record.bounds) + float(refinement or 0.0),  # all by as much as the last
            "seconds": np.asarray(record.seconds),
        }
        has_bound = self._options.has_bound
        if not has_finite_bound(error):
            has_bound, report["log_evidence_estimate"] = False, bound
        if self._schedule != "gradient":
            report |= {"clamped_iterations": record.clamped, "cycling_iterations": record.cycling}
        report |= modes_info(info.modes)
        warn_of_modes(report)
        if learned is not None:
            report |= {"learned": learned.converged, "learning_bounds": np.asarray(learned.bounds)}
        self._warn(program, report, learned)
        return Fit(program, after, bound if has_bound else None, report)

    def of_mode(self, error: NotFinite, engine: Engine, rows: Rows, *, progress_bar: bool, started: float) -> Fit:
        """Laplace's approximation, where no Gaussian has a finite bound.

        :param error: which says so. :raises NotFinite: the same, if another scheme is asked for, or there is no mode.
        """
        if self._options.scheme != "implicit":
            raise error
        solver = BatchSolver(self._options._replace(scheme="laplace"), self._schedule, self._name)
        start, program = possible_point(engine.program, rows), engine.program
        if start is None:
            raise error
        init = FullGaussian(jnp.asarray(start), program.initial_state.root)
        try:
            fit = solver(engine.with_effort("usual", "laplace"), rows, init, progress_bar=progress_bar, started=started)
        except NotFinite:
            raise error from None
        warn(
            "no Gaussian has a finite bound, as where parameters decide which outcomes are possible. This is Laplace's "
            "approximation at the mode, as by RVGA(model, scheme='laplace'). khat(data) says how good it is, and "
            "resample(data) or NUTS mend it."
        )
        return fit._replace(info=fit.info | {"scheme": "laplace", "no_bound": str(error)})

    # ------------------------------------------------------------------ inside
    def _solved_densely(
        self, engine: Engine, rows: Rows, init: FullGaussian | None, record: Record, bar: Bar
    ) -> _Solved:
        """The solution with dense precisions."""
        program, learned = engine.program, None
        chunks, before = distinct_chunks_of(engine, rows), program.initial_state
        start = None
        if init is not None:
            nearby = [jnp.asarray(x, program.dtype) for x in (init.mean, init.root)]
            start = whitened(before.mean, before.root, *nearby)
        if program.params.layout.size:
            tolerance = self._options.tolerance or LEARNING_TOLERANCE
            learned = learn(MaximizedBound.of(engine), chunks, start, tolerance, bar)
            program, start = program.with_params(learned.params), learned.start
            before = program.initial_state
        inputs = engine.devices.put((before, start, program.prior_inputs))
        problem = JointProblem(inputs[0], chunks, inputs[2], init=inputs[1])
        count = np.int32(program.count_rows(rows))
        if self._schedule == "gradient":
            ascent = engine.once(GradientAscent, lambda: GradientAscent(engine))
            after, info = ascent(problem, count, record)
        else:
            alternating = self._schedule == "batch"
            after, info = engine.solve_all(problem, count, alternating=alternating, on_step=record.step)
        return program, *engine.devices.fetch((after, info)), before.mean, learned

    def _warn(self, program: Program, report: dict, learned: Learned | None) -> None:
        if not report["converged"]:
            spent = report["iterations"] >= self._options.max_iterations
            reason = (
                f"all {self._options.max_iterations} iterations were spent" if spent else "no step raises it by much"
            )
            remedy = "Raise max_iterations or tolerance, use float64, or check the scales of the priors"
            if program.prior.terms:
                remedy += "; or integrate the hyperparameters out: FixedPointVI(model, integrate='auto')"
            warn(
                f"the bound is not maximized: {reason}, and the squared natural gradient is "
                f"{report['largest_decrement']:.2g} nats. {remedy}."
            )
        if learned is not None and not learned.converged:
            warn(
                f"the numpyro.param sites were still rising after {len(learned.bounds) - 1} steps: start them nearer, "
                "or raise tolerance."
            )


def _solved_sparsely(sparse: SparseEngine, rows: Rows, init: FullGaussian | None, record: Record) -> _Solved:
    """The solution with sparse precisions, of which one site is eliminated."""
    marginals = None
    if init is not None:
        variance: Any = np.sum(np.asarray(init.root) ** 2, axis=1)
        marginals = DiagonalGaussian(init.mean, variance)
    engine, problem = sparse.engine, sparse.problem(rows, marginals)
    after, info = engine.devices.fetch(sparse.solve(problem, record.step))
    return engine.program, after, info, problem.marginals.mean, None


def is_maximized(info: StepInfo, error: float) -> bool:
    """Whether the bound is, or what is left is less than its expectations are off, so that no step shows a rise.

    :param error: by how many nats these may be off, all together.
    """
    return bool(info.converged) or float(info.decrement) <= min(error, BUDGET)


def rows_info(reason: str | None) -> dict[str, str]:
    """For the posterior's ``info``. ``reason``: why rows are no independent terms, if they are not."""
    return {"rows": "independent"} if reason is None else {"rows": "joint", "reason": reason}


def _prior_itself(program: Program) -> Fit:
    """The posterior of a model of Gaussian priors alone."""
    report = {"converged": True, "iterations": 0, "largest_decrement": 0.0, "elbo_error": 0.0}
    return Fit(program, program.initial_state, 0.0, report)


def _check_proper(program: Program, state: State, *, converged: bool) -> None:
    """:raises ValueError: naming a site of improper prior that the data leave improper."""
    deviation = np.linalg.norm(np.asarray(state.root, np.float64), axis=1)
    of_site = program.layout.unravel(deviation)
    wide = sorted(name for name in program.flat_sites if not np.max(of_site[name]) < FLAT * REACH)
    for name in wide:
        if not converged or _has_no_digits(state.root):
            raise ValueError(
                f"the posterior is improper: site {name!r} has an improper prior, and the data leave it as wide as "
                f"it may be. Give it a proper prior, such as numpyro.sample({name!r}, dist.Normal(0, 10))."
            )


def _has_no_digits(root: Array) -> bool:
    """Whether a covariance root root^T is so near to singular, but for the scales of its entries, that rounding alone
    has kept it from being wider still: a search in an improper direction may come to rest there."""
    scaled = np.asarray(root, np.float64)
    scaled = scaled / np.linalg.norm(scaled, axis=1, keepdims=True)
    smallest = np.linalg.svd(scaled, compute_uv=False)[-1] ** 2
    return bool(smallest < ROUNDINGS * len(scaled) * jnp.finfo(root.dtype).eps)
