"""RVGA with sites whose posterior is of their own family: gamma, inverse gamma, beta or Dirichlet."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.gaussians.mean_field import MeanField
from ..core.pytrees import in_precision
from ..engines.mean_field import MOST_IN_GRID, MeanFieldState, MeanFieldUpdates
from ..engines.registry import Engines
from ..model.data.arguments import checked_rows
from ..model.data.row_set import RowSet
from ..model.data.rows import Data, Keywords, Rows, linspace_indices, num_rows, selected
from ..model.handlers.conditional import conditional_model
from ..model.handlers.failures import of_stream
from ..model.program import Program
from ..model.site_families import FORMS, SiteEntries, site_entries
from ..options import Info, check_choice, check_state, checked_key, key_numbers
from ..progress import progress
from ..results.merging.merge import state_of_gaussian
from ..results.posterior import Posterior
from ..streams.mean_field_pass import MeanFieldPass
from ..streams.opening import PassOptions, open_source, ordered, usable_source
from ..user_warnings import warn

BLOCK_NUMBERS = 2**22  # in the Jacobians of a block's rows at all nodes
EXAMPLE_ROWS = 1024  # by which it is determined how many entries one depends on
STREAM_ROWS = 2048  # of a block, if the number of rows is unknown


class SiteFamilies:
    """:class:`RVGA` where ``family`` names sites: it has the same methods.

    :param method: that, with which posteriors go on. :param block_size: rows in one update; "auto": as many as fit.
    :param families: one of ``FORMS`` by site.
    :raises ValueError: naming a family that there is not.
    """

    def __init__(self, method: Any, block_size: int | str, families: Mapping[str, str]):
        if not families:
            raise ValueError("family names no site: leave it at 'full'.")
        for name, family in families.items():
            check_choice(f"family of {name!r}", family, tuple(FORMS))
        self.model, self.options, self.shuffle, self._method = method.model, method.options, method.shuffle, method
        self.families, self.block_size = dict(families), block_size
        self._engines = Engines(self.model, self.options, method.improper_prior_scale)
        self._conditional: dict[tuple, Engines] = {}
        self._given: tuple[Program, SiteEntries] | None = None
        self._last: tuple[Program, MeanFieldUpdates] | None = None
        self.state: MeanFieldState | None = None

    def __getstate__(self) -> dict[str, object]:
        """Without what is compiled, for other processes."""
        return self.__dict__ | {"_conditional": {}, "_given": None, "_last": None, "state": None}

    def run(
        self,
        data: Data | Iterable,
        *,
        rng_key: Array,
        init: Posterior | MeanFieldState | None,
        progress_bar: bool,
        checkpoint: str | os.PathLike | None,
        every: int,
        resume: bool,
        on_bad_row: str,
        **model_kwargs: Any,
    ) -> Posterior:
        """As :meth:`RVGA.run`."""
        options = PassOptions(checkpoint, every, resume, on_bad_row)
        source, head, all_rows = open_source(data, self.model, model_kwargs, options, self.shuffle)
        program, updates = self._updates_for(head, model_kwargs, rng_key, all_rows if init is None else None)
        source, head = usable_source(program, source, head, all_rows, options)
        block = self._block_size(updates, source.total, options.most_rows)
        is_longer = source.is_longer_than(block)
        visited = ordered(source, self.shuffle, rng_key, useful=is_longer)
        start = self.state = updates.start if init is None else self._state_of(init, program, updates)
        run_options = {
            "method": "RVGA",
            "families": self.families,
            "block": block,
            "shuffle": visited.order is not None,
        }
        run_options = run_options | self.options.as_info | {"rng_key": key_numbers(rng_key)}
        on_state = partial(setattr, self, "state")
        with progress(progress_bar, source.total, "RVGA", "row") as bar:
            of_pass = {"program": program, "source": visited, "options": options, "bar": bar, "on_state": on_state}
            row_pass = MeanFieldPass(updates, block, checked=all_rows is not None, **of_pass)
            state, info = row_pass(start, run_options), row_pass.info()
        if not info["converged"]:
            warn("a block of rows was not solved: raise max_iterations, or take smaller blocks (block_size).")
        row_sets = (*getattr(init, "row_sets", ()), row_pass.absorbed)
        return self._posterior(program, updates, state, info, row_sets, one_solve=init is None and not is_longer)

    def init(self, data: Data, *, rng_key: Array | None = None, **model_kwargs: Any) -> MeanFieldState:
        """As :meth:`RVGA.init`."""
        rows = checked_rows(self.model, data, model_kwargs)
        return self._updates_for(rows, model_kwargs, checked_key(rng_key), None)[1].start

    def update(self, state: MeanFieldState, data: Data) -> MeanFieldState:
        """As :meth:`RVGA.update`: all rows in one block."""
        program, updates = self.last
        rows = program.rows_to_absorb(data)
        return updates.block(state, rows, jnp.ones(num_rows(rows)))[0]

    def posterior(self, state: MeanFieldState) -> Posterior:
        """As :meth:`RVGA.posterior`."""
        program, updates = self.last
        return self._posterior(program, updates, state, {}, (), one_solve=False)

    @property
    def last(self) -> tuple[Program, MeanFieldUpdates]:
        """The program and the updates for the last data.

        :raises RuntimeError: before :meth:`init`.
        """
        if self._last is None:
            raise RuntimeError("call init(data) first.")
        return self._last

    @property
    def has_exact_bound(self) -> bool:
        """Whether the rows of the last data take nodes of a grid, not random ones."""
        return self.last[1].width <= MOST_IN_GRID

    # ------------------------------------------------------------------ inside
    def _block_size(self, updates: MeanFieldUpdates, total: int | None, most_rows: int) -> int:
        """:param most_rows: of a block whose size the user leaves open."""
        if self.block_size != "auto":
            return int(self.block_size)
        total = STREAM_ROWS if total is None else total
        return min(total, max(1, BLOCK_NUMBERS // updates.numbers_per_row), most_rows)

    def _updates_for(
        self, rows: Rows, model_kwargs: Keywords, rng_key: Array, all_rows: Rows | None
    ) -> tuple[Program, MeanFieldUpdates]:
        """The program of the whole model, and the updates, for checked rows."""
        try:
            program = self._engines.get(rows, dict(model_kwargs), rng_key, all_rows).program
            program.check_prior()
            given = self._given_of(program)
            key = tuple(given.sites.items())
            if key not in self._conditional:
                starts = {name: np.zeros(shape) for name, shape in given.sites.items()}
                model = conditional_model(self.model, starts, has_prior=False)
                self._conditional[key] = Engines(model, self.options, self._method.improper_prior_scale, batch=True)
            engine = self._conditional[key].get(rows, dict(model_kwargs), rng_key, all_rows)
        except Exception as error:
            raise of_stream(error) from error
        left = [name for name in program.layout.site_names if name not in self.families]
        if list(engine.program.layout.site_names) != left or engine.program.params.layout.size != len(given.places):
            raise NotImplementedError(
                f"rows do not depend on all of the sites that family names ({', '.join(self.families)}), or on latent "
                "sites of their own: leave such sites out of family."
            )

        def make() -> MeanFieldUpdates:
            others = np.setdiff1d(np.arange(program.layout.size), given.places)
            some = selected(rows, linspace_indices(num_rows(rows), EXAMPLE_ROWS))
            return MeanFieldUpdates(engine, given, others, some)

        of_key = MeanFieldUpdates, *key_numbers(rng_key)  # it may draw nodes
        self._last = program, engine.once(of_key, make).bind(engine, given)
        return self._last

    def _given_of(self, program: Program) -> SiteEntries:
        if self._given is None or self._given[0] is not program:
            self._given = program, site_entries(program, self.families)
        return self._given[1]

    def _state_of(
        self, init: Posterior | MeanFieldState, program: Program, updates: MeanFieldUpdates
    ) -> MeanFieldState:
        """:raises ValueError: for posteriors with other families, and for states of another method or model."""
        if not isinstance(init, Posterior):
            check_state(init, updates.start, lambda state: (state.gaussian.mean, state.natural))
            return in_precision(init, program.dtype)
        program.check_continues(init.program)
        q = init.gaussian
        if not isinstance(q, MeanField) or not np.array_equal(q.places, updates.given.places):
            raise ValueError("init must be a posterior whose sites have the same families.")
        if isinstance(init.state, MeanFieldState):
            return in_precision(init.state, program.dtype)
        exact = jnp.asarray(bool(init.info.get("exact", False)))
        state = MeanFieldState(state_of_gaussian(init, q.gaussian), q.natural, exact)
        return in_precision(state, program.dtype)

    def _posterior(
        self,
        program: Program,
        updates: MeanFieldUpdates,
        state: MeanFieldState,
        info: Info,
        row_sets: tuple[RowSet, ...],
        *,
        one_solve: bool,
    ) -> Posterior:
        """:param one_solve: whether all rows were in one block, whose bound is that of q."""
        evidence, is_exact = float(state.gaussian.log_evidence), bool(state.is_exact)
        has_bound = self.options.has_bound and (is_exact or one_solve)
        info = {"families": self.families, "exact": is_exact} | info
        if not has_bound:
            info["log_evidence_estimate"] = evidence
        return Posterior(
            program,
            updates.gaussian(state),
            evidence if has_bound else None,
            info,
            self._method,
            state,
            num_rows=int(state.num_rows),
            row_sets=row_sets,
        )
