"""The certificate of q after a pass: whether it is the best Gaussian, and what the bound is there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jax import Array

from ..core.updates.factors import ErrorEstimates
from ..core.updates.state import State
from ..engines.certificate import Certificate, SiteSums
from ..engines.engine import Engine
from ..model.data.row_set import RowSet, row_digests
from ..model.data.rows import Rows, joined, num_rows, selected
from ..options import Info, check_choice, check_count, check_positive, key_numbers
from ..user_warnings import warn
from .model_check import MOST_CONFIRMED, MOST_ROWS, NUM_PAIRS, Difference, ModelCheck
from .recursive_pass import RecursivePass
from .sampled import estimated, stepped
from .source import SLICE, RowSource, chunks, rows_in_memory

FEWEST_ROWS, MOST_NUMBERS = 500, 2**23  # of a check without a bound: rows, and numbers in their Jacobians
APPROXIMATE = ("probit", "sigma_points")  # expectations without error control, by the user's choice


class CertifiedState(NamedTuple):
    """A state after a pass, and what evaluations of all rows say of it.

    :ivar bound: at the state, if there is one. :ivar info: for the posterior's ``info``.
    :ivar rows: some or all of the rows that the bound was evaluated on; none if it was not.
    :ivar error_estimates: of all factors at the state, or None."""

    state: State
    bound: float | None
    info: Info
    rows: Rows
    error_estimates: ErrorEstimates | None = None

    def lowered(self, excess: float) -> CertifiedState:
        """The bound less ``excess`` nats."""
        return self if self.bound is None else self._replace(bound=self.bound - excess)


class Certification:
    """Evaluations of the bound on all rows after a pass, if they can be read again; see :class:`RVGA`.

    :raises ValueError: for options of no use.
    """

    def __init__(self, certify: bool, max_looks: int, tolerance: float):
        check_choice("certify", certify, (True, False))
        check_count("max_looks", max_looks)
        check_positive("certificate_tolerance", tolerance)
        self.certify, self._max_looks, self._tolerance = certify, max_looks, tolerance

    def certifies(self, engine: Engine) -> bool:
        """Whether the bound is to be evaluated."""
        return self.certify and engine.options.has_bound and not engine.is_moving

    def __call__(
        self,
        engine: Engine,
        start: State,
        state: State,
        source: RowSource,
        row_pass: RecursivePass,
        rng_key: Array,
    ) -> CertifiedState:
        """The result of evaluations of all rows, and of steps on them.

        :param start: before the first row. :param state: after the last.
        :param source: of all rows, in their own order. :param row_pass: the pass.
        :param rng_key: of the sample of rows, for streams of which one is kept.
        """
        result = CertifiedState(state, None, {}, {})
        if row_pass.is_one_solve:
            bound, summary = float(state.log_evidence), row_pass.summary.info()
            off = summary["largest_decrement"]
            info = _described(0, off, bound, bound) | {"converged": summary["converged"] or off <= self._tolerance}
            result = CertifiedState(state, bound, info, row_pass.only_rows, row_pass.error_estimates)
        if not self.certifies(engine) or result.rows:
            return result
        certificate, rng = Certificate.of(engine), np.random.default_rng(key_numbers(rng_key))
        if source.seekable:
            state = stepped(certificate, state, row_pass)
            source = source.without(row_pass.left_out)
            return self._evaluated(engine, start, state, source, row_pass.num_taken, rng)
        sample = row_pass.sample.items()
        if sample is None:
            return result
        if row_pass.sample.holds_all:
            source = rows_in_memory(sample.rows, {})
            return self._evaluated(engine, start, state, source, row_pass.num_taken, rng)
        state, info = estimated(certificate, state, row_pass, self._max_looks)
        return CertifiedState(state, None, info, sample.rows)

    def checked(self, engine: Engine, result: CertifiedState, rng_key: Array) -> float | None:
        """The bound, if the model itself agrees.

        :param rng_key: for draws of theta.
        :raises ValueError: naming a site whose density is not what was read.
        """
        if not result.rows or not self.certifies(engine):
            return result.bound
        check = engine.once(ModelCheck, lambda: ModelCheck(engine))
        if engine.program.local_names or check.is_done:
            return result.bound
        rng = np.random.default_rng(key_numbers(rng_key))
        state, bound, count = result.state, result.bound, num_rows(result.rows)
        are_all = count == int(state.num_rows) and engine.program.is_proper
        has_bound = are_all and bound is not None and count <= MOST_CONFIRMED
        if has_bound and check.confirms(state, result.rows, bound, rng):
            return bound
        most = min(MOST_ROWS, max(FEWEST_ROWS, MOST_NUMBERS // engine.numbers_per_row))
        some = result.rows if are_all and count <= MOST_ROWS else _some(result.rows, most, rng)
        differences = check.differences(state, some, rng)
        if not differences:
            return bound
        _report(differences, silent=engine.options.expectation in APPROXIMATE)
        return None

    def _evaluated(
        self,
        engine: Engine,
        start: State,
        state: State,
        source: RowSource,
        total: int,
        rng: np.random.Generator,
    ) -> CertifiedState:
        """The bound and its natural gradient on all rows, which are read again, after natural-gradient steps."""
        implicit, sample = engine.options.scheme == "implicit", _SampledRows(total, rng)
        certified = Certificate.of(engine)(
            start,
            state,
            lambda size: sample.recorded(chunks(source, size)),
            prior_inputs=engine.program.prior_inputs,
            total=total,
            tolerance=self._tolerance,
            max_looks=self._max_looks if implicit else 1,
        )
        off = certified.after.squared_natural_gradient
        info = _described(certified.num_evaluations, off, certified.before.bound, certified.after.bound)
        info |= {"converged": off <= self._tolerance if implicit else None, "elbo_error": certified.after.error}
        return CertifiedState(certified.state, certified.after.bound, info, sample.rows)


def sums_at(engine: Engine, state: State, source: RowSource) -> tuple[SiteSums, RowSet]:
    """Sums over all rows of a source, and which rows these are."""
    row_set = RowSet()

    def recorded(size: int) -> Iterator[tuple[Rows, np.ndarray]]:
        nonlocal row_set
        for _, rows in chunks(source, size):
            rows = source.as_declared(rows)
            row_set = row_set.with_rows(row_digests(rows))
            yield rows, np.ones(num_rows(rows), np.float32)

    return Certificate.of(engine).sums(state, recorded, source.total), row_set


def warn_unless_converged(info: Info) -> None:
    """If solves have ended before q was the best Gaussian.

    :param info: of the posterior.
    """
    if info["converged"] in (True, None) or "bound_estimate" in info:  # of an estimate, a sample has warned
        return
    off, looks = info.get("squared_natural_gradient", info["largest_decrement"]), info.get("looks")
    what, remedy = "q is not the best Gaussian", "Raise max_iterations, use float64, or check the scales of the priors"
    if looks is None:
        what, how = "q may not be the best Gaussian", "a solve ended where no step raised its bound by much, with"
    elif looks == 0:
        how = "all rows were solved for together, and in the end no step raised the bound by much, with"
    else:
        how = f"after {looks} looks at all rows it has, by more than certificate_tolerance,"
        remedy = "Raise max_looks, or go on with FixedPointVI(model).run(data, init=posterior)"
    warn(f"{what}: {how} a squared natural gradient of {off:.2g} nats. {remedy}.")


def sample_of(source: RowSource, total: int, count: int) -> Rows:
    """A random sample of a source's ``total`` rows, the same each time."""
    sample = _SampledRows(total, np.random.default_rng(0), count)
    for _ in sample.recorded((position, source.as_declared(rows)) for position, rows in chunks(source, SLICE)):
        pass
    return sample.rows


class _SampledRows:
    """A random sample of ``most`` of a source's ``total`` rows, taken from the chunks of the first reading."""

    def __init__(self, total: int, rng: np.random.Generator, most: int = MOST_ROWS):
        self._numbers = np.sort(rng.choice(total, min(total, most), replace=False))
        self._pieces: list[Rows] | None = []
        self.rows: Rows = {}

    def recorded(self, chunks: Iterable[tuple[int, Rows]]) -> Iterator[tuple[Rows, np.ndarray]]:
        """The chunks with their rows' weights. After the first reading, :attr:`rows` has the sample."""
        for offset, rows in chunks:
            weights = np.ones(num_rows(rows), np.float32)
            if self._pieces is not None:
                first, stop = np.searchsorted(self._numbers, [offset, offset + len(weights)])
                if stop > first:
                    self._pieces.append(selected(rows, self._numbers[first:stop] - offset))
            yield rows, weights
        if self._pieces is not None:
            self.rows, self._pieces = joined(self._pieces) if self._pieces else {}, None


def _some(rows: Rows, most: int, rng: np.random.Generator) -> Rows:
    """At most ``most`` of the rows, at random."""
    if num_rows(rows) <= most:
        return rows
    return selected(rows, np.sort(rng.choice(num_rows(rows), most, replace=False)))


def _report(differences: list[Difference], *, silent: bool) -> None:
    """:raises ValueError: for a density that was read wrongly."""
    for each in differences:
        comparison = (
            f"under q its log-likelihood is {each.term:.6g} nats by what was read from the model, and "
            f"{each.mean:.6g} (standard error {each.error:.2g}) by NumPyro's own density at {2 * NUM_PAIRS} draws"
        )
        if each.misread:
            raise ValueError(
                f"site {each.site!r} was read wrongly: {comparison}. Please report this model; NUTS runs it, and "
                "certify=False passes over this check."
            )
        if not silent:
            warn(
                f"site {each.site!r}: {comparison}. Its expectation is approximate here, so there is no bound, and q "
                "may be off: compare with NUTS, or start NUTS from this posterior."
            )


def _described(num_evaluations: int, squared_natural_gradient: float, before: float, after: float) -> Info:
    """For the posterior's ``info``: see :meth:`RVGA.run`."""
    return {
        "looks": num_evaluations,
        "squared_natural_gradient": squared_natural_gradient,
        "bound_before": before,
        "bound_after": after,
    }
