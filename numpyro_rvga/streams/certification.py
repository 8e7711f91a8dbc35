"""What is known of q after a pass: whether it is the best Gaussian, and what the bound is there."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax import Array

from ..core.recursion import State
from ..engines.certificate import Certificate
from ..engines.engine import Engine
from ..model.rows import Rows, joined, num_rows, selected
from ..options import check_choice, is_count
from .model_check import MOST_ROWS, NUM_PAIRS, Difference, ModelCheck
from .order import seed_of
from .passes import usable_chunks
from .recursive_pass import RecursivePass
from .source import RowSource

APPROXIMATE = ("probit", "sigma_points")  # expectations that whoever asks for them knows to be so
LEVEL = 4  # of the user's call, for warnings


class _Compiled(NamedTuple):
    certificate: Certificate
    check: ModelCheck


class Certification:
    """Looks at all rows after a pass, if they can be read again; see :class:`RVGA`.

    :raises ValueError: for options of no use.
    """

    def __init__(self, certify: bool, max_looks: int, tolerance: float):
        check_choice("certify", certify, (True, False))
        if not is_count(max_looks, 1):
            raise ValueError(f"max_looks must be a positive integer, not {max_looks!r}.")
        if not tolerance > 0:
            raise ValueError(f"certificate_tolerance must be positive, not {tolerance}.")
        self._certify, self._max_looks, self._tolerance = certify, max_looks, tolerance
        self._known: dict[Engine, _Compiled] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Without what is compiled, for other processes."""
        return self.__dict__ | {"_known": {}}

    def __call__(
        self, engine: Engine, start: State, state: State, source: RowSource, taken: RecursivePass, rng_key: Array
    ) -> tuple[State, float | None, dict[str, Any]]:
        """The state after looks and steps on all rows, the bound there, and what else is known of it.

        :param start: before the first row. :param state: after the last.
        :param source: of all rows, in their own order. :param taken: the pass.
        :param rng_key: for draws of theta.
        :raises ValueError: naming a site whose density is not what was read.
        """
        bound, info, rows = None, {}, taken.only_rows
        rng = np.random.default_rng(seed_of(rng_key))
        if taken.is_one_solve:
            bound = float(state.log_evidence)
            info = _described(0, taken.largest_decrement, bound, bound)
        if not self._certify or not engine.options.has_bound or engine.is_moving:
            return state, bound, info
        known = self._compiled_for(engine)
        if not taken.is_one_solve:
            if not source.seekable:
                return state, None, {}
            sample = _Sample(taken, rng)
            state, bound, info = self._looked_at(engine, known.certificate, start, state, source, taken, sample)
            rows = sample.rows
        elif num_rows(rows) > MOST_ROWS:
            rows = selected(rows, np.sort(rng.choice(num_rows(rows), MOST_ROWS, replace=False)))
        everything = num_rows(rows) == int(state.num_rows) and engine.program.is_proper
        if rows and not engine.program.local.size and not known.check.is_done:
            differences = known.check(state, rows, bound if everything else None, rng)
            if differences:
                _report(differences, silent=engine.options.expectation in APPROXIMATE)
                bound = None
        return state, bound, info

    def _compiled_for(self, engine: Engine) -> _Compiled:
        if engine not in self._known:
            certificate = Certificate(engine)
            self._known[engine] = _Compiled(certificate, ModelCheck(engine, certificate))
        return self._known[engine]

    def _looked_at(
        self,
        engine: Engine,
        certificate: Certificate,
        start: State,
        state: State,
        source: RowSource,
        taken: RecursivePass,
        sample: _Sample,
    ) -> tuple[State, float, dict[str, Any]]:
        implicit = engine.options.scheme == "implicit"
        found = certificate(
            start,
            state,
            lambda size: sample.watched(usable_chunks(source, taken.left_out, size)),
            prior_inputs=engine.program.prior_inputs,
            total=taken.done,
            tolerance=self._tolerance,
            max_looks=self._max_looks if implicit else 1,
        )
        off = found.after.squared_natural_gradient
        if implicit and not off <= self._tolerance:
            warnings.warn(
                f"q is not the best Gaussian: after {found.looks} looks at all rows its squared natural gradient is "
                f"{off:.2g} nats, more than certificate_tolerance={self._tolerance:g}. Raise max_looks, or go on with "
                "FixedPointVI(model).run(data, init=posterior).",
                stacklevel=LEVEL,
            )
        info = _described(found.looks, off, found.before.bound, found.after.bound)
        return found.state, found.after.bound, info | {"converged": off <= self._tolerance}


class _Sample:
    """Usable rows, drawn at random, that are picked up while chunks of all rows go by for the first time."""

    def __init__(self, taken: RecursivePass, rng: np.random.Generator):
        drawn = rng.choice(taken.done, min(taken.done, MOST_ROWS), replace=False)
        self._numbers = np.setdiff1d(drawn, taken.left_out)
        self._pieces: list[Rows] | None = []
        self.rows: Rows = {}

    def watched(self, chunks: Iterable[tuple[int, Rows, np.ndarray]]) -> Iterator[tuple[Rows, np.ndarray]]:
        for place, rows, weights in chunks:
            if self._pieces is not None:
                first, stop = np.searchsorted(self._numbers, [place, place + len(weights)])
                if stop > first:
                    self._pieces.append(selected(rows, self._numbers[first:stop] - place))
            yield rows, weights
        if self._pieces is not None:
            self.rows, self._pieces = joined(self._pieces) if self._pieces else {}, None


def _report(differences: list[Difference], *, silent: bool) -> None:
    """:raises ValueError: for a density that was read wrongly."""
    for found in differences:
        facts = (
            f"under q its log-likelihood is {found.term:.6g} nats by what was read from the model, and "
            f"{found.mean:.6g} (standard error {found.error:.2g}) by NumPyro's own density at {2 * NUM_PAIRS} draws"
        )
        if found.misread:
            raise ValueError(
                f"site {found.site!r} was read wrongly: {facts}. Please report this model; NUTS runs it, and "
                "certify=False passes over this check."
            )
        if not silent:
            warnings.warn(
                f"site {found.site!r}: {facts}. Its expectation is approximate here, so there is no bound, and q may "
                "be off: compare with NUTS, or start NUTS from this posterior.",
                stacklevel=LEVEL,
            )


def _described(looks: int, squared_natural_gradient: float, before: float, after: float) -> dict[str, Any]:
    """For the posterior's ``info``: see :meth:`RVGA.run`."""
    return {
        "looks": looks,
        "squared_natural_gradient": squared_natural_gradient,
        "bound_before": before,
        "bound_after": after,
    }
