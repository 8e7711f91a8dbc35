"""A NumPyro model bound to the form of its data: its sites, and how it is run."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.core import Tracer
from numpyro.distributions.transforms import IdentityTransform, ZeroSumTransform

from ...core.compilation import abstractly, at_once
from ...core.jaxprs.interpret import depends_on
from ...core.pytrees import PyTree
from ..data.arguments import PARAMS, absent_arguments
from ..data.arrays import is_equal
from ..data.rows import Arrays, Keywords, common_length, linspace_indices, num_rows
from ..handlers.conditional import PREFIX
from ..handlers.tracing import (
    base_distribution,
    elements,
    run_model,
    sample_sites,
    site_transform,
)
from ..layout import Layout
from ..terms.local_sites import LocalSites, RowFacts, bounds_of, most_states, states_at, states_between
from . import validation
from .model_runs import ModelRuns, Parameters, ReadingOptions, Replay, parameters_of
from .row_plates import Outcome, along_rows, may_be_of_others, outcome_of, plates_of_length

LINEAR = (IdentityTransform, ZeroSumTransform)  # transforms from unconstrained space


class ImproperPrior(ValueError):
    """A prior that a recursion cannot start from."""


class BoundModel(ModelRuns):
    """A model read for the form of its data: its sites, their plates, and the layout of theta.

    :param model: a NumPyro model.
    :param rows: data arrays by argument name, checked (see :func:`checked_rows`).
    :param model_kwargs: passed to every call of the model unchanged.
    :param params: values of the ``numpyro.param`` sites, in unconstrained space; default: where the model starts them.
    :param row_plates: plates over the rows, from an earlier reading, if ``rows`` are a few.
    :param row_facts: facts of latent variables of single rows, from an earlier reading.
    :ivar plates: names of the plates around each site.
    :ivar observed_sites: those with outcomes: no auxiliary factors, and no latent sites that the user holds fixed.
    """

    def __init__(
        self,
        model: Callable,
        rows: Arrays,
        model_kwargs: Keywords,
        options: ReadingOptions,
        params: Array | np.ndarray | None,
        row_plates: frozenset[str] | None,
        row_facts: RowFacts | None,
    ):
        super().__init__(model, model_kwargs, options)
        self.row_plates, observed = self._find_row_plates(rows) if row_plates is None else (row_plates, [])
        self._choose_examples(rows)
        self._read_sites(rows, observed, row_facts, marginal=options.local == "marginal")
        self._row_sites, self._prior_sites = self._classify()
        self.observed_sites = self._find_observed()
        if not self.whole:
            validation.check_has_terms({name: self.sites[name] for name in self._row_sites})
            validation.check_has_outcome(self._row_sites, model, [*rows, *self.model_kwargs])
        self._improper = frozenset(s for s in self.layout.site_names if self.sites[s].is_improper)
        if self._improper and options.improper_prior_scale is None and not self.whole:
            raise ImproperPrior(
                f"site {sorted(self._improper)[0]!r} has an improper prior, from which no recursion can start. Give it "
                "a proper prior, or set improper_prior_scale: the scale of a normal, in unconstrained space, instead."
            )
        self.params = self._find_params()
        if params is not None:
            self.params = self.params._replace(values=jnp.asarray(params, self.dtype))

    # ------------------------------------------------------------------ reading the model
    def _find_row_plates(self, rows: Arrays) -> tuple[frozenset[str], list[str]]:
        """Plates around observed sites whose size is the number of rows, or that are subsampled to it, or that
        subsample them; and these sites, of which there must be one."""

        def run(rows: Arrays) -> tuple[dict[str, Outcome], dict[str, tuple[int, int]]]:
            with self.evaluating():
                trace, runner = run_model(self.model, rows, self.model_kwargs)
            observed = {name: site for name, site in sample_sites(trace, runner).items() if site.is_observed}
            validation.check_outcomes_shape(observed)
            return {name: outcome_of(trace[name]) for name in observed}, runner.plate_sizes

        given, length = [*rows, *self.model_kwargs], common_length(rows)
        outcomes, sizes = self.abstractly(run, rows)
        observed = list(outcomes)
        if not self.whole or rows or absent_arguments(self.model, given):
            validation.check_has_outcome(observed, self.model, given)
        if length is None:
            return frozenset(), observed
        plates = plates_of_length(sizes, length, outcomes)
        if not self.whole and may_be_of_others(outcomes, plates, length):
            number, taken = ("one row", [0]) if length > 1 else ("two rows", [0, 0])
            others = {name: array[np.array(taken)] for name, array in rows.items()}
            read = partial(self.abstractly, run)
            plates = along_rows(outcomes, validation.describe_few(read, others, number, observed)[0], plates)
        return frozenset(plates), observed

    def _read_sites(self, rows: Arrays, observed: list[str], row_facts: RowFacts | None, *, marginal: bool) -> None:
        """Set the sites, and which latent ones are global (``layout``), and which of single rows."""
        described = validation.describe_few(self._describe, self.example_row, "one row", observed)
        self.sites, self.plates, self._shapes_of_one = described
        of_rows = frozenset()
        if not self.whole:
            # Sites that rows share have the shapes that they have with one row: this run will be replayed.
            shared = [n for n, site in self.sites.items() if not self.row_plates.intersection(site.plates)]
            shapes = {n: self.sites[n].unconstrained_shape for n in shared}
            given: PyTree = {n: np.zeros(x, self.dtype) for n, x in shapes.items() if x is not None}
            describe = partial(self._describe, unconstrained=given)
            several = self.several(rows)
            described = validation.describe_few(describe, several, f"{num_rows(several)} rows", observed)
            of_many, _, self._shapes_of_several = described
            of_rows = validation.local_latents(self.sites, of_many, self.row_plates, marginal=marginal)
        elif marginal:
            of_rows = self._discrete_sites()
        latents = {n: s.unconstrained_shape for n, s in self.sites.items() if not (s.is_observed or s.is_discrete)}
        given = [name for name in self._param_names if name.startswith(PREFIX)]  # of a conditional model
        validation.check_has_latents([*latents, *given], self._discrete_sites())
        validation.check_continuous(self.sites, of_rows, marginal=marginal)
        self.layout = Layout({name: shape for name, shape in latents.items() if name not in of_rows})
        validation.check_shared(self.layout, of_rows)
        own = Layout({name: shape for name, shape in latents.items() if name in of_rows})
        if not of_rows:
            return
        if marginal:
            self.row_latents = self._find_row_latents(own, rows, row_facts)
        else:
            self.local = own
        self._replay = Replay(self._replayable)  # their values are others now

    def _discrete_sites(self) -> frozenset[str]:
        """The discrete latent sites."""
        return frozenset(name for name, site in self.sites.items() if site.is_discrete and not site.is_observed)

    def _choose_examples(self, rows: Arrays) -> None:
        """Set example rows: some and one of them, to read the model with; all of them, twice, for a whole program. Some
        are from all over: the first may be alike, sorted by an outcome or a group."""
        if self.whole:
            self.example_rows = self.example_row = dict(rows)
            return
        count = validation.CHECKED_ROWS
        taken = np.resize(linspace_indices(num_rows(rows), count), count)
        some = {name: array[taken] for name, array in rows.items()}
        one = {name: array[:1] for name, array in rows.items()}
        self.example_rows, self.example_row = jax.device_put((some, one), may_alias=False)

    def several(self, rows: Arrays) -> Arrays:
        """The first of some rows, as many as are read together; several times, if they are few."""
        if num_rows(rows) < validation.CHECKED_ROWS:
            taken = np.resize(np.arange(num_rows(rows)), validation.CHECKED_ROWS)
            return {name: array[taken] for name, array in rows.items()}
        return {name: array[: validation.MOST_TOGETHER] for name, array in rows.items()}

    def _classify(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Observed sites that are terms of rows, and those that are terms of the prior. Of a whole program: all are
        the former."""
        observed = [n for n, s in self.sites.items() if s.is_observed]
        if self.whole:
            return tuple(observed), ()
        theta = jax.device_put(np.zeros(self.layout.size, self.dtype))

        def observed_elements(row):
            records = self._records(self._unravel(theta), row)
            return {n: elements(r) for n, r in records.items() if r.is_observed}

        depends = depends_on(observed_elements, self.example_row)
        of_rows = [n for n in observed if depends[n] or self.row_plates & set(self.sites[n].plates)]
        return tuple(of_rows), tuple(n for n in observed if n not in of_rows)

    def _find_observed(self) -> tuple[str, ...]:
        """The sites with outcomes. In a whole program, a site of another length than the data's arrays is held fixed if
        its density does not change when rows are drawn from all with replacement, nor is its value a data array."""
        sites = tuple(name for name in self._row_sites if not self.sites[name].is_auxiliary)
        lengths = {len(array) for array in self.example_row.values() if np.ndim(array)}
        others = [name for name in sites if lengths.isdisjoint(self.sites[name].value_shape)]
        if not self.whole or len(sites) < 2 or not others:
            return sites
        own, drawn = self.example_row, dict(self.example_row)
        for name, array in own.items():
            if np.size(array) and np.ndim(array):
                drawn[name] = array[np.random.default_rng(0).integers(len(array), size=len(array))]

        def elements_of(rows: Arrays) -> dict[str, Array]:
            records = self._records({}, rows, self._any_key)
            return {name: elements(records[name]) for name in others}

        try:
            before, after = (self.jitted(elements_of, rows) for rows in (own, drawn))
        except Exception:  # the model may refuse rows that are not as it expects
            return sites
        same = {name for name in others if np.array_equal(before[name], after[name])}
        return tuple(name for name in sites if name not in same or self.outcome_arrays(name))

    def _find_row_latents(self, continuous: Layout, rows: Arrays, facts: RowFacts | None) -> LocalSites:
        """The latent variables of single rows, with the states of the discrete ones in all rows at hand."""
        shapes = {n: s.value_shape for n, s in self.sites.items() if s.is_discrete and not s.is_observed}
        states: dict[str, Array] = {}
        if facts is not None:
            states = {name: jnp.asarray(facts.states[name]) for name in shapes}
        ends: dict[str, tuple[int, int]] = {}
        while shapes and facts is None:  # states of one site may depend on those of another
            bounds = at_once(lambda: self._bounds_of_states(rows, states))  # noqa: B023
            now = {n: (int(of.min()), int(of.max()), *ends.get(n, ())) for n, of in bounds.items()}
            wider = {n: (min(values), max(values)) for n, values in now.items()}
            if wider == ends:
                break
            ends = wider
            states = {name: jnp.asarray(states_between(name, *own)) for name, own in ends.items()}
        return LocalSites(continuous, shapes, states)

    def _bounds_of_states(self, rows: Arrays, states: Mapping[str, Array]) -> dict[str, Array]:
        """Smallest and largest state of each discrete latent in some rows, (M, 2): with the first state of all others,
        with the second, and so on.

        :param states: those that are known.
        """

        def at(place: Array) -> dict[str, Array]:
            values = states_at(states, place)
            arrays = dict(rows) if self.whole else {n: jnp.asarray(array) for n, array in rows.items()}
            records = sample_sites(*self._run(arrays, {}, states=values))
            latent = {name: record for name, record in records.items() if not record.is_observed}
            fns = {name: base_distribution(record.fn)[0] for name, record in latent.items() if record.fn.is_discrete}
            return {name: jnp.stack(bounds_of(name, fn)) for name, fn in fns.items()}

        return jax.vmap(at)(jnp.arange(most_states(states)))

    def _find_params(self) -> Parameters:
        """The ``numpyro.param`` sites that matter: layers of a network whose weights are sampled do not.

        :raises NotImplementedError: for sites that hold more than an array.
        """
        if not self._param_names:
            return self.params
        theta = jax.device_put(np.zeros(self.layout.size + self.local.size, self.dtype))

        def param_sites():
            trace, _ = self._run(self.example_row, self._unravel(theta))
            return {name: site for name, site in trace.items() if site["type"] == "param"}

        sites = abstractly(param_sites)
        if any(isinstance(x, Tracer) for site in sites.values() for x in jax.tree.leaves(site["value"])):
            sites = param_sites()  # they start at what functions of the model return

        def log_joint(values):
            records = sample_sites(*self._run(self.example_row, self._unravel(theta), params=values))
            return {"total": sum(jnp.sum(elements(record)) for record in records.values())}

        used = depends_on(log_joint, {name: site["value"] for name, site in sites.items()})["total"]
        for name in used:
            if not isinstance(sites[name]["value"], (jax.Array, np.ndarray, float)):
                raise NotImplementedError(f"numpyro.param site {name!r} must hold one array, for it is to be learned.")
        return parameters_of({name: site for name, site in sites.items() if name in used}, self.dtype)

    # ------------------------------------------------------------------ questions about it
    @property
    def shared(self) -> dict[str, Array]:
        """The terms' inputs besides rows: the ``numpyro.param`` sites, if there are any."""
        return {PARAMS: self.params.values} if self.params.layout.size else {}

    @property
    def example_inputs(self) -> dict[str, Any]:
        """An example of what the terms of a row take."""
        return self.shared if self.whole else {**self.example_row, **self.shared}

    @property
    def shared_elsewhere(self) -> dict[str, Array]:
        """Such inputs with other values, to see which inputs terms depend on: where ``numpyro.param`` sites start,
        often at zero, a product may not depend on its other factor, and states may be alike."""
        noise = np.random.default_rng(0).normal(scale=0.5, size=self.params.layout.size)
        return {name: values + noise.astype(self.dtype) for name, values in self.shared.items()}

    def holds(self, rows: Arrays) -> bool:
        """Whether these are the rows that are part of the program, or some of their arrays."""
        own = self.example_rows
        return own.keys() >= rows.keys() and all(is_equal(own[name], rows[name]) for name in rows)

    def row_axis(self, site: str) -> int:
        """The axis of an observed site's values along which rows lie."""
        return next((axis for axis, plate in enumerate(self.plates.get(site, ())) if plate in self.row_plates), 0)

    @functools.cached_property
    def _row_axes(self) -> dict[str, int | None]:
        """The axis along which an observed site's terms, or a deterministic site, grow with the rows; None if none."""
        if self.whole:
            return {}
        one, several = self._shapes_of_one, self._shapes_of_several
        return {name: next((i for i, n in enumerate(one[name]) if n != several[name][i]), None) for name in one}

    @property
    def integrates_row_latents(self) -> bool:
        """Whether latent variables of single rows are integrated out."""
        return bool(self.row_latents.site_names)

    @property
    def local_names(self) -> tuple[str, ...]:
        """Latent sites with a value for each row that are no part of theta."""
        return (*self.local.site_names, *self.row_latents.site_names)

    @property
    def continuous_local_names(self) -> tuple[str, ...]:
        """The continuous ones of :attr:`local_names`; NumPyro sums over the others itself."""
        return (*self.local.site_names, *self.row_latents.continuous.site_names)

    def row_latents_of(self, rows: Arrays, rng: np.random.Generator) -> tuple[tuple, tuple]:
        """Values for the latent variables of some rows, to try things with: for :meth:`site_elements` of all rows, and
        of each row by itself, with a leading axis. A whole program has the same both times."""
        local = LocalSites(self.local, {}, {}) if self.local.size else self.row_latents
        if not local.site_names:
            return ({}, {}), ({}, {})
        total, infos = num_rows(rows), self._describe(rows)[0]

        def of_each(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
            axis = next((i for i, n in enumerate(shape) if n != values.shape[i]), None)
            return values[None] if axis is None else np.stack([values.take([i], axis) for i in range(total)])

        shapes = {name: infos[name].unconstrained_shape for name in local.continuous.site_names}
        z = {name: rng.normal(0.0, 0.5, shape).astype(self.dtype) for name, shape in shapes.items()}
        states = {n: rng.choice(np.asarray(v), infos[n].value_shape) for n, v in local.states.items()}
        if self.whole:
            return (z, states), (z, states)
        alone = {name: of_each(x, local.continuous.shapes[name]) for name, x in z.items()}
        return (z, states), (alone, {name: of_each(x, local.shapes[name]) for name, x in states.items()})

    @functools.cached_property
    def linear_sites(self) -> frozenset[str]:
        """The latent sites whose values are linear functions of unconstrained ones: numbers of the whole real line, or
        such that sum to zero."""

        def found(rows):
            records = sample_sites(*self._run(rows, {}))
            transforms = {name: site_transform(records[name].fn) for name in self.layout.site_names}
            return frozenset(name for name, own in transforms.items() if isinstance(own, LINEAR))

        return self.abstractly(found, self.example_row)

    def outcome_arrays(self, site: str) -> set[str]:
        """The data arrays from which an observed site's values are taken. Of a whole program: those that are them."""
        if self.whole:
            value = np.asarray(self.jitted(lambda rows: self.site_record(site, rows).value, self.example_row))
            return {name for name, array in self.example_row.items() if is_equal(array, value)}
        return set(depends_on(lambda row: {site: self.site_record(site, row).value}, self.example_row)[site])

    def is_value_of_latents(self, site: str) -> bool:
        """Whether what is observed at a site depends on latent sites: an error that is computed, not a datum."""

        def value(inputs):
            return {site: self._record(site, self._unravel(inputs["theta"]), self.example_row).value}

        return bool(depends_on(value, {"theta": jnp.zeros(self.layout.size + self.local.size, self.dtype)})[site])

    @property
    def is_proper(self) -> bool:
        """Whether the prior is the model's own: no normal replaces an improper one."""
        return not self._improper

    @property
    def flat_sites(self) -> frozenset[str]:
        """The latent sites whose prior is improper, and stays so."""
        return self._improper if self.improper_prior_scale is None else frozenset()
