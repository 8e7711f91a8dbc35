"""How exactly expectations are computed and solves are ended."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..core.expectations.quadrature import CUBE_NODES, TENSOR_NODES, fifth_degree_nodes, num_cube_nodes
from ..core.updates.factors import ErrorEstimates, Kind, Nodes
from ..core.updates.search import Settings
from ..model.terms.terms import Terms
from ..options import Options

ROW_ITERATIONS = 2  # at least, of rows one by one: in a routine, the second costs little and leaves much less
ONE_PASS_TOLERANCE = 1e-6  # nats: of joint solves around a stream, which itself leaves a thousand times more
MANY_SOLVES_TOLERANCE = 1e-4  # nats: of solves of near problems, whose bounds are compared
BUDGET = 1e-3  # nats, in all: expectations that may be off by more call for finer rules,
ROUNDING = 8.0  # units in the bound's last place, of two rules that are compared row by row
ENOUGH_DRAWS = 0.5  # and those over draws of theta for more draws
FEW_POINTS = 2**24  # of all rows at the nodes of the last rule
FEW_INTEGRANDS = 2**19  # of rows' own integrals at all nodes, for which the budget is that of other expectations
RULES_TOLERANCE, AVERAGES_TOLERANCE = 1e-3, 1e-2  # nats: the squared natural gradient, at most
CORRECTED_TOLERANCE, CORRECTED_SHARE = 0.1, 1e-4  # nats: up to which corrections suffice, in all, and by parameter
LITTLE_WORK = 2**18  # numbers: entries of the Hessians at the nodes of all factors together
LITTLE_WORK_OF_MANY = 2**14  # the same, of each of many evaluations
NUMBERS_OF_CLOSED_FORMS = 128  # as which an expectation without nodes counts


class Effort(NamedTuple):
    """The expectations of an engine, and when it ends a solve.

    :ivar level: see :func:`~numpyro_rvga.core.expectations.ladder.expectations`.
    :ivar rows: the expectations of rows' terms in the blocks of a stream. :ivar joint_rows: the same in joint solves.
    :ivar prior: those of prior terms. :ivar row_terms: the rows' terms. :ivar prior_terms: the prior's.
    """

    level: str
    options: Options
    is_double: bool
    rows: tuple[Kind, ...]
    joint_rows: tuple[Kind, ...]
    prior: tuple[Kind, ...]
    row_terms: Sequence[Terms]
    prior_terms: Sequence[Terms]

    def calls_for_more(self, error: float, bound: float | None, num_rows: int) -> bool:
        """Whether a thorough engine is worth its time: it leaves the rounding errors of the values that are added up.

        :param error: by how many nats those expectations may be off that it finds better.
        :param bound: of which they are a part.
        """
        allowed = ENOUGH_DRAWS if self.takes_draws else self.allowed_error(bound, num_rows)
        return self.can_be_thorough and error > allowed

    def few_nodes_suffice(self, num_rows: int, error_estimates: ErrorEstimates, bound: float) -> bool:
        """Whether expectations by few nodes need no finer rules.

        :param error_estimates: of all factors by these nodes. :param bound: of which they are a part.
        """
        return float(np.sum(np.asarray(error_estimates.errors))) <= self.allowed_error(bound, num_rows)

    def allowed_error(self, bound: float | None, num_rows: int) -> float:
        """The error of all expectations together, in nats, that is of no consequence, or of rounding."""
        epsilon = float(np.finfo(np.float64 if self.is_double else np.float32).eps)
        rounding = 0.0 if bound is None or not np.isfinite(bound) else ROUNDING * epsilon * abs(bound)
        # Integrals of a row's own, one for each node, take seconds for what nobody would see.
        integrals = num_rows * sum(t.num_elements * self._num_nodes(t) for t in self.row_terms if t.num_nodes > 1)
        return max(min(BUDGET * max(1.0, integrals / FEW_INTEGRANDS), ENOUGH_DRAWS), rounding)

    @property
    def is_thorough(self) -> bool:
        return self.level == "thorough"

    @property
    def takes_draws(self) -> bool:
        """Whether there are terms of rows without structure."""
        return any(terms.by_draws for terms in self.row_terms)

    @property
    def can_be_thorough(self) -> bool:
        """Whether there are expectations that a thorough engine finds better. Those of tangents to a model are off by
        what it leaves as it is."""
        are_exact = all(terms.is_affine for terms in self.row_terms)
        return are_exact and not self.is_thorough and (self.prior_is_mended or any(self.rows_mended))

    @property
    def rows_mended(self) -> tuple[bool, ...]:
        """By kind: whether a thorough engine finds the expectations better. Where factors have more predictors, nothing
        is gained."""
        pairs = zip(self.rows, self.row_terms)
        return tuple(self.takes_draws or self._has_finer_rule(*each) for each in pairs)

    @property
    def prior_is_mended(self) -> bool:
        """Whether a thorough engine finds expectations over the prior better."""
        pairs = zip(self.prior, self.prior_terms)
        return not self.is_sampled and any(self._has_finer_rule(*each) for each in pairs)

    def _has_finer_rule(self, kind: Kind, terms: Terms) -> bool:
        return kind.has_errors and terms.num_predictors in CUBE_NODES

    @property
    def has_estimated_errors(self) -> bool:
        """Whether there are expectations that estimate their errors, and none that has to be compared with others."""
        kinds = (*self.rows, *self.prior)
        has_errors = [kind.has_errors for kind in kinds]
        return any(has_errors) and all(has or kind.held_out is None for has, kind in zip(has_errors, kinds))

    @property
    def is_sampled(self) -> bool:
        """Whether expectations over rows are averages over many nodes."""
        return any(kind.sampled for kind in self.rows)

    @property
    def can_do_with_few(self) -> bool:
        """Whether a search may begin with expectations by few nodes, and end there."""
        return self.rows_can_do_with_few or (self._may_take_few_nodes and any(kind.sampled for kind in self.prior))

    @property
    def rows_can_do_with_few(self) -> bool:
        """Whether a search may begin with expectations over rows by few nodes, and end there."""
        return self._may_take_few_nodes and any(kind.few is not None for kind in self.joint_rows)

    @property
    def _may_take_few_nodes(self) -> bool:
        return self.level in ("usual", "thorough") and not self.has_few_draws

    @property
    def has_few_draws(self) -> bool:
        """Whether a search may begin with few draws."""
        return any(kind.has_few_draws for kind in (*self.joint_rows, *self.prior))

    def takes_few_points(self, num_rows: int) -> bool:
        """Whether averages over many nodes are so few that all rows are worth one solve: it begins with few nodes, and
        its one evaluation is all that is compiled of the rows."""
        pairs = [(kind, terms) for kind, terms in zip(self.joint_rows, self.row_terms) if kind.sampled]
        points = num_rows * sum(terms.num_elements * self._num_nodes(terms) for _, terms in pairs)
        return all(kind.few is not None or kind.has_few_draws for kind, _ in pairs) and 0 < points <= FEW_POINTS

    def takes_one_rule(self, num_rows: int) -> bool:
        """Whether each row's expectation is by one rule of many nodes, which is compiled as fast as few nodes are.
        Random nodes do not count: their averages are not smooth enough to begin with."""
        return self.level == "usual" and not self.is_sampled and self.is_little_work(num_rows)

    def may_end_by_few_nodes(self, num_rows: int) -> bool:
        """Whether a search may end by few nodes, and the bound be evaluated by many at its end alone. Not over one
        predictor: the finer rule is compiled as soon."""
        of_several = all(t.num_predictors in TENSOR_NODES or kind.held_out is not None for kind, t in self._with_few)
        return of_several and self._have_values(num_rows)

    def nodes_of_many_solves(self, num_rows: int) -> Nodes:
        """Those with which many solves of near problems begin: few, where that is worth it and many can evaluate the
        bound at the end."""
        is_possible = self.rows_can_do_with_few and self._have_values(num_rows)
        return "few" if is_possible and not self.is_little_work(num_rows, most=LITTLE_WORK_OF_MANY) else "usual"

    @property
    def _with_few(self) -> list[tuple[Kind, Terms]]:
        """The rows' kinds that have expectations by few nodes."""
        return [pair for pair in zip(self.joint_rows, self.row_terms) if pair[0].few is not None]

    def _have_values(self, num_rows: int) -> bool:
        """Whether the bound can be evaluated by many nodes, where expectations are by few."""
        points = num_rows * sum(terms.num_elements * self._num_nodes(terms) for _, terms in self._with_few)
        have_values = all(kind.values is not None or kind.held_out is not None for kind, _ in self._with_few)
        return have_values and self.level == "usual" and points <= FEW_POINTS

    @property
    def few_nodes_tolerance(self) -> float:
        """The squared natural gradient, in nats, that a search by few nodes may leave of others. Averages over many
        nodes leave more."""
        is_sampled = self.is_sampled or any(kind.sampled for kind in self.prior)
        return AVERAGES_TOLERANCE if is_sampled else RULES_TOLERANCE

    def nodes_called_for(self, left: float, size: int) -> Nodes:
        """Which nodes are needed where a search by few nodes has left so much of the squared natural gradient by
        corrected ones, in nats. These in turn leave a part of it, which is spread over ``size`` parameters."""
        if left <= self.few_nodes_tolerance:
            return "few"
        # Corrections of more predictors are along the axes alone, and no others evaluate the bound.
        can_be_corrected = all(kind.values is not None for kind, _ in self._with_few)
        is_little = left <= min(CORRECTED_TOLERANCE, CORRECTED_SHARE * size)
        return "corrected" if can_be_corrected and is_little else "usual"

    def is_little_work(self, num_rows: int, *, by_few_nodes: bool = False, most: int = LITTLE_WORK) -> bool:
        """Whether an evaluation takes so little time that it is not worth being compiled well.

        :param most: numbers that are little work.
        """
        if any(terms.by_draws for terms in self.row_terms) or num_rows == 1:  # one row may be all data
            return False
        of_row = sum(self._num_numbers(*each, by_few_nodes) for each in zip(self.joint_rows, self.row_terms))
        of_prior = sum(self._num_numbers(*each, False) for each in zip(self.prior, self.prior_terms))
        return num_rows * of_row + of_prior <= most

    def _num_numbers(self, kind: Kind, terms: Terms, by_few_nodes: bool) -> int:
        """Entries of the Hessians at the nodes of a row's elements."""
        size = terms.num_predictors
        if not (kind.has_errors or kind.sampled):
            return terms.num_elements * NUMBERS_OF_CLOSED_FORMS
        by_few_nodes = by_few_nodes and kind.few is not None
        count = terms.num_nodes * len(fifth_degree_nodes(size)[0]) if by_few_nodes else self._num_nodes(terms)
        return terms.num_elements * count * size**2

    def _num_nodes(self, terms: Terms) -> int:
        """The number of nodes of the last rule for one element of a row, times that of the element's own integral."""
        size = terms.num_predictors
        return terms.num_nodes * (num_cube_nodes(size) if size in CUBE_NODES else self.options.num_samples)

    # ------------------------------------------------------------------ when to stop
    def settings(self, block_size: int | None = None) -> Settings:
        """When a solve of a block of a stream, or a joint solve, stops. What is left of each block adds up over a
        stream: a row's share of the natural gradient must be small even after a million."""
        exact = self.is_double and not self.is_sampled  # where two averages are mixed, a bound is no better than that
        tolerance, limit = 1e-8 if exact else 1e-6, self.options.max_iterations
        if block_size is not None:
            tolerance = min(tolerance, block_size**2 * (1e-12 if self.is_double else 1e-9))
        if self.options.tolerance is not None:
            tolerance = self.options.tolerance
        if block_size is None and self.is_thorough:  # each step is dear, and begins near the best q
            return Settings(self.options.tolerance or 0.01 * BUDGET, limit, rtol=1.0)
        if block_size is None:
            return Settings(tolerance, limit)
        return Settings(tolerance, limit, ROW_ITERATIONS if block_size == 1 else 0)

    def settings_around_a_stream(self) -> Settings:
        """When a joint solve of the first rows of a stream, or of its kept rows, stops."""
        settings = self.settings()
        if self.options.tolerance is None:
            settings = settings._replace(tolerance=ONE_PASS_TOLERANCE, rtol=1.0)
        return settings

    def settings_of_many(self) -> Settings:
        """When each of many joint solves of near problems stops. The bound is off by half of what is left."""
        settings = self.settings()
        if self.options.tolerance is None:
            settings = settings._replace(tolerance=MANY_SOLVES_TOLERANCE)
        return settings._replace(rtol=None)

    def settings_of_all(self, *, has_start: bool) -> Settings:
        """When a joint solve of all rows stops."""
        settings = self.settings()
        if self.is_thorough and has_start:  # by other rules it is the best one already
            settings = settings._replace(tolerance=self.options.tolerance or BUDGET)
        return settings
