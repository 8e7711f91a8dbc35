"""Runs of a NumPyro model at a given theta: on some rows, or on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.core import Tracer
from jax.extend import core as jex_core
from numpyro import distributions as dist
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from ...core.compilation import abstractly, full_precision, jit, jit_once
from ...core.jaxprs.interpret import of_outputs
from ..data.arguments import PARAMS, SHARED, split_call
from ..data.rows import Arrays, Keywords
from ..handlers.tracing import (
    RowRunner,
    SiteInfo,
    SiteRecord,
    deterministic_sites,
    is_numpyros,
    log_prob_shape,
    plates_of,
    run_model,
    sample_sites,
    site_info,
)
from ..layout import Layout
from ..terms.local_sites import LocalSites

Tree = TypeVar("Tree")
Shapes = dict[str, tuple[int, ...]]
Description = tuple[dict[str, SiteInfo], dict[str, tuple[str, ...]], Shapes]
"""What is static about each sample site, the plates of sites, and the shapes of observed sites' log densities and of
deterministic sites."""


class _Trace(NamedTuple):
    """:ivar jaxpr: inputs -> the outputs that depend on them, or are computed. :ivar structure: of all outputs.
    :ivar static: outputs that are no tracers, by position; None for the others."""

    jaxpr: jex_core.ClosedJaxpr
    structure: Any
    static: list[Any]


class Replay:
    """``function``, traced once for each form of its inputs.

    :param function: of pytrees of arrays; its outputs are a pytree, of which what is no array is the same each time.
    """

    def __init__(self, function: Callable[..., Any]):
        self._function = function
        self._traces: dict[tuple, _Trace] = {}

    def __call__(self, *inputs: Any, entry: str | None = None) -> Any:
        """``entry``: of the mapping that the function returns, the one to evaluate; default: all."""
        trace, arrays = self._traced_at(inputs, entry)
        computed = iter(jex_core.jaxpr_as_fun(trace.jaxpr)(*arrays))
        leaves = [next(computed) if x is None else x for x in trace.static]
        return jax.tree.unflatten(trace.structure, leaves)

    def trace(self, *inputs: Any) -> None:
        """Trace the function for inputs of this form, if it has not been."""
        self._traced_at(inputs)

    def _traced_at(self, inputs: tuple, name: str | None = None) -> tuple[_Trace, list[Array]]:
        leaves, structure = jax.tree.flatten(inputs)
        arrays = [jnp.asarray(leaf) for leaf in leaves]
        form = structure, tuple((a.shape, a.dtype, a.weak_type) for a in arrays)
        if (None, form) not in self._traces:
            self._traces[None, form] = self._traced(structure, arrays)
        if (name, form) not in self._traces:
            self._traces[name, form] = _entry_of(self._traces[None, form], name)
        return self._traces[name, form], arrays

    def _traced(self, structure: Any, arrays: list[Array]) -> _Trace:
        outputs: list[Any] = []

        def flat(*arrays: Array) -> list[Array]:
            leaves, of_outputs = jax.tree.flatten(self._function(*jax.tree.unflatten(structure, arrays)))
            outputs[:] = of_outputs, [None if isinstance(leaf, Tracer) else leaf for leaf in leaves]
            return [leaf for leaf in leaves if isinstance(leaf, Tracer)]

        return _Trace(jax.make_jaxpr(full_precision()(flat))(*arrays), *outputs)


def _entry_of(trace: _Trace, name: str | None) -> _Trace:
    """The trace of one entry of the mapping, with the equations that the entry depends on."""
    numbers = jax.tree.unflatten(trace.structure, list(range(len(trace.static))))[name]
    kept, structure = jax.tree.flatten(numbers)
    place = np.cumsum([x is None for x in trace.static]) - 1  # among the jaxpr's outputs
    shorter = of_outputs(trace.jaxpr, [place[number] for number in kept if trace.static[number] is None])
    return _Trace(shorter, structure, [trace.static[number] for number in kept])


class Parameters(NamedTuple):
    """Deterministic parameters.

    :ivar layout: order and unconstrained shapes.
    :ivar transforms: to the constraint's set, by name.
    :ivar values: (K,), in unconstrained space.
    """

    layout: Layout
    transforms: dict[str, Any]
    values: Array

    def constrained(self, values: Array) -> dict[str, Array]:
        """The constrained parameters by name, from (K,)."""
        return {name: self.transforms[name](value) for name, value in self.layout.unravel(values).items()}


def parameters_of(trace: Mapping[str, dict], dtype) -> Parameters:
    """The parameters at the values that a run of the model gave them.

    :raises ValueError: naming the site, if its initial value is outside its constraint.
    """
    transforms, initial = {}, {}
    for name, site in trace.items():
        if site["type"] != "param":
            continue
        transforms[name] = biject_to(site["kwargs"].get("constraint", constraints.real))
        initial[name] = transforms[name].inv(jnp.asarray(site["value"], dtype))
        if not jnp.all(jnp.isfinite(initial[name])):
            raise ValueError(f"numpyro.param site {name!r} starts at {site['value']}, outside its constraint.")
    layout = Layout({name: value.shape for name, value in initial.items()})
    return Parameters(layout, transforms, layout.ravel(initial) if initial else jax.device_put(np.zeros(0, dtype)))


class ReadingOptions(NamedTuple):
    """How a model is read.

    :ivar improper_prior_scale: standard deviation, in unconstrained space, of the normal that replaces improper
        priors; None refuses them.
    :ivar whole: run the model on all data at once, always: for rows that are coupled, or data that are not rows. The
        data are then part of the program, and have their values when the model is read.
    :ivar evaluates: whether what a model of all data computes of them in JAX is computed when the model is read, for
        Python to have the numbers.
    :ivar local: ``"marginal"`` integrates latent variables of single rows out of these rows' densities; ``"prior"``
        takes Normal ones of known scale from their conditional prior, which is then part of q.
    :ivar prefer_parameters: see :func:`site_terms`. :ivar by_draws: likewise, for terms of rows.
    """

    improper_prior_scale: float | None = None
    whole: bool = False
    evaluates: bool = False
    local: str = "prior"
    prefer_parameters: bool = False
    by_draws: bool = False


class ModelRuns:
    """A model and its keyword arguments, run with latent sites at given values.

    The model's own code runs once for each form of the arguments: other runs replay what it did then, see
    :class:`Replay`. Parameters are as for :class:`~.bound_model.BoundModel`, which sets what follows.

    :ivar sites: what is static about each sample site.
    :ivar layout: of theta (P,).
    :ivar local: the layout of Normal latent variables of single rows, of which the conditional prior is part of q.
    :ivar row_latents: latent variables of single rows that are integrated out.
    :ivar params: the ``numpyro.param`` sites. :ivar row_plates: plates over the rows.
    :ivar example_row: one row. :ivar example_rows: several. Of a whole program: all of them, both times.
    """

    row_plates: frozenset[str]
    sites: dict[str, SiteInfo]
    example_row: dict[str, Any]  # NumPy's arrays or JAX's
    example_rows: dict[str, Any]
    _improper: frozenset[str]

    def __init__(self, model: Callable, model_kwargs: Keywords, options: ReadingOptions):
        self.model, self.model_kwargs, self.options = model, dict(model_kwargs), options
        self.improper_prior_scale, self.whole, self.evaluates, *_ = options
        self.dtype = jnp.result_type(float)
        self.layout, self.local = Layout({}), Layout({})
        self.params = parameters_of({}, self.dtype)
        self.row_latents = LocalSites(Layout({}), {}, {})
        self._replay, self._can_replay = Replay(self._replayable), True
        self._param_names: list[str] = []
        self._deterministic_names: list[str] = []  # of sites that are numbers
        self._description: Description | None = None  # of the last run
        key = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
        self._any_key = np.zeros(key.shape, key.dtype)  # where any draws will do

    def evaluating(self) -> contextlib.AbstractContextManager:
        """A context to run the model in: what it computes from data in JAX has a value there, if it needs one."""
        return jax.ensure_compile_time_eval() if self.evaluates else contextlib.nullcontext()

    def call_arguments(self, rows: Arrays) -> tuple[tuple, dict]:
        """(args, kwargs) of a call of the model on these rows."""
        return split_call(self.model, rows, self.model_kwargs)

    def runner(self, num_rows: int) -> RowRunner:
        """The model with latents that are drawn, its parameters and its plates at this number of rows."""
        params = self.params.constrained(self.params.values)
        return RowRunner(self.model, self.row_plates, num_rows, params=params)

    def _run(self, rows, unconstrained, rng_key=None, params=None, states=None):
        """NumPyro's trace of one run, and the handler that substituted its sites.

        :param unconstrained: values of latent sites by name, in unconstrained space; others are drawn, see
            :class:`~.tracing.RowRunner`.
        :param params: the ``numpyro.param`` sites by name; default: as in ``rows``, or else where they stand.
        :param states: values of discrete latent sites.
        """
        if params is None:
            params = self.params.constrained(rows.get(PARAMS, self.params.values))
        with (
            self.evaluating(),
            numpyro.validation_enabled(False),
        ):  # parameters that a few rows give need not be those of all rows
            return run_model(
                self.model,
                self._arrays_of(rows),
                self.model_kwargs,
                row_plates=self.row_plates,
                unconstrained=unconstrained,
                rng_key=rng_key,
                local=frozenset(self.local.site_names),
                params=params,
                states=states,
            )

    def _arrays_of(self, rows: Arrays) -> Arrays:
        """The data arrays among what terms take; the example row's, if there are none: all data of a whole program."""
        return {name: value for name, value in rows.items() if name not in SHARED} or self.example_row

    def jitted(self, function: Callable[[Arrays], Tree], rows: Arrays) -> Tree:
        """The result of a function of rows, compiled. A whole program's data have their values there."""
        return jit_once(lambda: function(rows))() if self.whole else jit(function)(rows)

    def abstractly(self, function: Callable[[Arrays], Tree], rows: Arrays) -> Tree:
        """A function's result for rows of these shapes, without computing values. A whole program's data have their
        values there."""
        return abstractly(lambda: function(rows)) if self.whole else abstractly(function, rows)

    def _record(self, name: str, unconstrained, rows, key=None) -> SiteRecord:
        """One sample site; of the others, what it depends on is computed alone."""
        return self._records(unconstrained, rows, key, name)

    def _records(self, unconstrained, rows, key=None, name: str | None = None) -> Any:
        """Every sample site by name, or the one of a ``name``, with latents drawn that are not given. The model's code
        runs once for each form of the arguments."""
        arrays, params = self._arrays_of(rows), rows.get(PARAMS, self.params.values)
        is_own = self.whole and all(arrays[name] is self.example_row[name] for name in arrays)
        if self._can_replay and (is_own or not self.whole):
            traced = dict(unconstrained), None if is_own else arrays, params, key
            self._replay.trace(*traced)
            if self._can_replay:  # still, of these arguments too
                return self._replay(*traced, entry=name)
        records = self._records_of(unconstrained, arrays, params, key)
        return records if name is None else records[name]

    def _records_of(self, unconstrained, arrays, params, key=None) -> dict[str, SiteRecord]:
        """:param arrays: rows; None: the program's own, which have values. :param key: of draws, its data: states are
        drawn too, and the first ones otherwise."""
        states = self.row_latents.first_states() if key is None else None
        rows = {**(self.example_row if arrays is None else arrays), PARAMS: params}
        rng_key = None if key is None else jax.random.wrap_key_data(key)
        trace, runner = self._run(rows, unconstrained, rng_key, states=states)
        records = sample_sites(trace, runner)
        numbers = {name: value for name, value in deterministic_sites(trace).items() if _is_numeric(value)}
        shapes = {name: log_prob_shape(record) for name, record in records.items() if record.is_observed}
        shapes |= {name: jnp.shape(value) for name, value in numbers.items()}
        self._description = {name: site_info(record) for name, record in records.items()}, plates_of(trace), shapes
        self._param_names = [name for name, site in trace.items() if site["type"] == "param"]
        self._deterministic_names = list(numbers)
        # A trace of what cannot be replayed is kept empty: once is for all, also where values are no tracers.
        self._can_replay &= not self.evaluates and all(is_numpyros(record.fn) for record in records.values())
        return records

    def _replayable(self, *arguments: Any) -> dict[str, SiteRecord]:
        records = self._records_of(*arguments)
        return records if self._can_replay else {}

    def _describe(self, rows, unconstrained: Mapping[str, Array] | None = None) -> Description:
        """The static description of all sites on these rows, and their plates; see :data:`Description`.

        :param unconstrained: values of some latent sites, as they will be given again; default: all are drawn.
        """
        given, key = ({}, self._any_key) if unconstrained is None else (unconstrained, None)
        self._description = None
        if not self.whole:
            self._replay.trace(dict(given), dict(rows), self.params.values, key)
        if self._description is None:  # a whole model, or it has been traced before
            self.abstractly(lambda rows: self._records_of(given, rows, self.params.values, key), rows)
        assert self._description is not None
        return self._description

    def records(self, theta: Array, rows: Arrays) -> dict[str, SiteRecord]:
        """Every sample site of the model at theta."""
        return self._records(self._unravel(theta), rows)

    def site_record(self, name: str, rows: Arrays) -> SiteRecord:
        """One site, with latents drawn."""
        return self._record(name, {}, rows, self._any_key)

    def _unravel(self, theta: Array) -> dict[str, Array]:
        """Sites of (P,), or of (P + K,) with the variables of one row."""
        size = self.layout.size
        sites = self.layout.unravel(theta[:size])
        return sites | self.local.unravel(theta[size:]) if theta.shape[0] > size else sites

    def _proper(self, record: SiteRecord) -> SiteRecord:
        if record.name not in self._improper or self.improper_prior_scale is None:
            return record
        z = jnp.asarray(record.unconstrained)
        wide = dist.Normal(jnp.zeros(jnp.shape(z), self.dtype), self.improper_prior_scale)
        return replace(record, fn=wide, value=z, log_abs_det=None)


def _is_numeric(value: object) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float))
