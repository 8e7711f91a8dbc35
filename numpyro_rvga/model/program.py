"""A NumPyro model bound to the form of its data: what every method asks of a model."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array
from jax.scipy.special import logsumexp
from numpyro import distributions as dist
from numpyro.distributions.transforms import IdentityTransform

from ..core.closed_forms import Gaussian, Logistic
from ..core.compilation import at_once, jit_once
from ..core.expectations import normal_rule
from ..core.gaussians import Family
from ..core.indices import indexes
from ..core.interpret import depends_on
from ..core.primitives import equations
from ..core.recursion import State
from . import validation
from .arguments import (
    CONSTANTS,
    PARAMS,
    ROW,
    SHARED,
    absent_arguments,
    check_row_shapes,
    checked_rows,
    finite_rows,
    row_shapes,
    split_call,
    whole_data,
)
from .arrays import as_jax_array
from .bad_indices import WholeIndexCheck
from .data_prior import DataPrior, PriorConstants, SiteArrays, data_dependence, data_prior, described, of_site
from .deterministic import DeterministicSites, classify_deterministic
from .identity import ModelIdentity, model_identity
from .layout import Layout, layout_of
from .local import Component, LocalSites, RowFacts, bounds_of, components_of, local_terms, states_between
from .parameters import Parameters, parameters_of
from .pickling import check_picklable
from .prior import (
    IndependentStart,
    Marginals,
    Prior,
    Start,
    fitted_start,
    gaussian_parts,
    independent_start,
    initial_state,
    is_flat,
    marginals,
    normal_block,
    split_prior,
    state_at,
)
from .recognition import in_tilted_form
from .rows import Rows, common_length, evenly_spread, num_rows, selected
from .sparsity import Sparsity, find_sparsity, is_selection
from .terms import Terms, by_piece, linearise, site_terms
from .tracing import (
    REACH,
    RowRunner,
    SiteInfo,
    SiteRecord,
    deterministic_sites,
    elements,
    peel,
    plates_of,
    run_model,
    sample_sites,
    site_info,
    site_transform,
)

MOST_CHECKED = 1000  # parameters of which the prior's whole precision matrix is looked at


class ImproperPrior(ValueError):
    """A prior that a recursion cannot start from."""


MOST_LOOKED_AT = 256  # rows, to find out on which predictors theta has a say
MOST_PARAMETERS_DRAWN = 100  # of rows without structure, as networks are: more take minutes


class Program:
    """A model, its data's form and its keyword arguments, read once.

    :param model: a NumPyro model.
    :param rows: data arrays by argument name, checked (see :func:`checked_rows`).
    :param model_kwargs: passed to every call of the model unchanged.
    :param improper_prior_scale: standard deviation, in unconstrained space, of the normal that stands for improper
        priors; None refuses them.
    :param prefer_parameters: see :func:`site_terms`. :param by_draws: likewise, for terms of rows.
    :param whole: run the model on all data at once, always: for rows that are coupled, or data that are not rows. The
        data are then part of the program, and have their values when the model is read.
    :param evaluates: whether what a model of all data computes of them in JAX is computed when the model is read, for
        Python to have the numbers.
    :param params: values of the ``numpyro.param`` sites, in unconstrained space; default: where the model starts them.
    :param all_rows: all rows, which priors and deterministic sites may read, if they are at hand.
    :param constants: what all rows determine of such a prior, if that is known already.
    :param row_plates: plates over the rows, if they are known already and ``rows`` are a few.
    :ivar reason: why a whole program is one.
    :param row_facts: what rows told of such latent variables, if that is known already.
    :ivar row_facts: likewise; None if nothing is integrated out.
    :param local: ``"marginal"`` integrates latent variables of single rows out of these rows' densities; ``"prior"``
        takes Normal ones of known scale from their conditional prior, which is then part of q.
    :ivar local: the latter's layout. :ivar row_latents: the former; None if there are none.
    :ivar deterministic: names of the deterministic sites.
    :ivar data_rows: all rows, if they are at hand and deterministic sites read them.
    :raises CoupledRows: for a model that cannot be run on single rows, if not ``whole``, and ImproperPrior for one with
        an improper prior.
    :raises NotImplementedError: for discrete latents, and local ones that are not normal.
    :raises ValueError: for models without data terms, improper priors, values outside an observation's support, and
        priors that read rows of which there are more to come.
    """

    def __init__(
        self,
        model: Callable,
        rows: Mapping[str, Array],
        model_kwargs: Mapping[str, Any],
        *,
        improper_prior_scale: float | None = None,
        prefer_parameters: bool = False,
        by_draws: bool = False,
        whole: bool = False,
        evaluates: bool = False,
        params: Array | None = None,
        all_rows: Rows | None = None,
        constants: PriorConstants | None = None,
        local: str = "prior",
        row_facts: RowFacts | None = None,
        row_plates: frozenset[str] | None = None,
    ):
        self.model, self.model_kwargs, self.whole = model, dict(model_kwargs), whole
        self._options = {"prefer_parameters": prefer_parameters, "by_draws": by_draws, "local": local}
        self.reason: str | None = None
        self.evaluates = evaluates
        self.improper_prior_scale = improper_prior_scale
        self._prior_arrays: dict[str, frozenset[str]] = {}
        self.data_prior: DataPrior | None = None
        self.constants: PriorConstants | None = None
        self.dtype = jnp.result_type(float)
        observed: list[str] = []
        given = [*rows, *self.model_kwargs]
        if row_plates is None:
            self.row_plates, observed = validation.find_row_plates(
                model, rows, self.model_kwargs, concrete=whole, evaluates=evaluates
            )
            if not whole or rows or absent_arguments(model, given):
                validation.check_has_outcome(observed, model, given)
        else:
            self.row_plates = row_plates
        self._choose_examples(rows)
        self.local, self.params = layout_of({}), parameters_of({}, self.dtype)
        self.row_latents: LocalSites | None = None
        self.sites, self.plates = validation.describe_few(self._describe, self.example_row, "one row", observed)
        local_names = frozenset()
        if not whole:
            of_two, _ = validation.describe_few(self._describe, self.example_rows, "two rows", observed)
            local_names = validation.local_latents(self.sites, of_two, self.row_plates, marginal=local == "marginal")
        validation.check_continuous(self.sites, local_names, local)
        latents = {n: s.unconstrained_shape for n, s in self.sites.items() if not (s.is_observed or s.is_discrete)}
        self.layout = layout_of({name: shape for name, shape in latents.items() if name not in local_names})
        validation.check_shared(self.layout, local_names)
        own = layout_of({name: shape for name, shape in latents.items() if name in local_names})
        if local == "marginal" and local_names:
            self.row_latents = self._find_row_latents(own, rows, row_facts)
        else:
            self.local = own
        self._row_sites, self._prior_sites = self._classify()
        self.observed_sites = tuple(s for s in self._row_sites if not self.sites[s].is_auxiliary)
        if not whole:
            validation.check_has_terms({name: self.sites[name] for name in self._row_sites})
            validation.check_has_outcome(self._row_sites, model, given)
        self._improper = frozenset(s for s in self.layout.site_names if self.sites[s].is_improper)
        if self._improper and improper_prior_scale is None and not whole:
            raise ImproperPrior(
                f"site {sorted(self._improper)[0]!r} has an improper prior, from which no recursion can start. Give it "
                "a proper prior, or set improper_prior_scale: the scale of a normal, in unconstrained space, instead."
            )
        self.params = self._find_params()
        if params is not None:
            self.params = self.params._replace(values=jnp.asarray(params, self.dtype))
        self._components = self._find_components()
        self._row_checks: list[validation.RowCheck] = []
        integrated = self._integrated_terms(rows, row_facts)
        self.terms = (*self._all_terms(prefer_parameters, by_draws), *[terms for terms, _ in integrated])
        self.row_facts: RowFacts | None = None
        if self.row_latents is not None:
            states = {name: np.asarray(values) for name, values in self.row_latents.states.items()}
            self.row_facts = RowFacts(states, tuple(quadratic for _, quadratic in integrated))
            self._row_checks += [validation.StatesCheck(self, name, self._bounds_of_states) for name in states]
        validation.check_local_terms(self)
        self.selections = self._find_selections()
        support_check = validation.WholeSupportCheck if whole else validation.SupportCheck
        self._checks = [support_check(self, site) for site in self.observed_sites]
        self._index_check = None if whole else self._find_index_check()
        if self._index_check is not None:
            self._checks.append(self._index_check)
        if whole:
            self._checks.append(WholeIndexCheck(self._observed_parameters))
        self._checks += self._row_checks
        self._prior_arrays = self._find_prior_arrays()
        if self._prior_arrays:
            self.data_prior, self.constants = self._read_prior(all_rows, constants)
        self.deterministic = self._find_deterministic()
        self.data_rows = self._rows_to_keep(all_rows)
        self.prior = self._find_prior()
        self._gaussian_parts = jit_once(lambda inputs: gaussian_parts(self.prior, self.layout.size, self.dtype, inputs))
        self._prior_draws = jit_once(jax.vmap(self._draw_prior, (0, None)))

    def _choose_examples(self, rows: Mapping[str, Array]) -> None:
        """Two rows and one of them, to find things out; all of them, twice, if the model takes no fewer."""
        if self.whole:
            self.example_rows = self.example_row = dict(rows)
            return
        taken = np.arange(2) % num_rows(rows)
        two = {name: array[taken] for name, array in rows.items()}
        one = {name: array[:1] for name, array in rows.items()}
        self.example_rows, self.example_row = jax.device_put((two, one), may_alias=False)

    def _all_terms(self, prefer_parameters: bool, by_draws: bool) -> tuple[Terms, ...]:
        """Those of row sites. Of a whole program they are cut into as many equal pieces as go into all of them."""
        theta = jax.ShapeDtypeStruct((self.layout.size + self.local.size,), self.dtype)
        row = self.shared if self.whole else {**self.example_row, **self.shared}
        few = self.whole or self.layout.size <= MOST_PARAMETERS_DRAWN
        options = {"prefer_parameters": prefer_parameters, "by_draws": by_draws and not self.local.size and few}
        found = []
        for site in [name for name in self._row_sites if name not in self._tied]:
            terms = site_terms(self._site_runner(site), site, theta, row, **options)
            if not terms.by_draws:
                terms = in_tilted_form(terms, self.dtype, row)._replace(num_local=self.local.size)
            found.append(terms)
        if not self.whole:
            return tuple(found)
        found = [terms for terms in found if terms.num_elements]
        self._num_pieces = math.gcd(*[terms.num_elements for terms in found if not terms.by_draws]) or 1
        return tuple(by_piece(terms, self._num_pieces) for terms in found)

    def _find_row_latents(self, continuous: Layout, rows: Mapping[str, Array], facts: RowFacts | None) -> LocalSites:
        """The latent variables of single rows, with the states of the discrete ones in all rows at hand."""
        sites = {n: s for n, s in self.sites.items() if s.is_discrete and not s.is_observed}
        states: dict[str, Array] = {}
        for name in sites:
            if facts is None:
                found = at_once(lambda: self._bounds_of_states(name, rows, states))  # noqa: B023
                values = states_between(name, int(found[:, 0].min()), int(found[:, 1].max()))
            else:
                values = facts.states[name]
            states[name] = jnp.asarray(values)
        return LocalSites(continuous, {name: sites[name].value_shape for name in sites}, states)

    def _bounds_of_states(self, name: str, rows: Mapping[str, Array], known: Mapping[str, Array]) -> Array:
        """Smallest and largest state of a discrete latent in some rows, (M, 2): with the first state of all others that
        are known, with the second, and so on."""

        def at(place):
            values = {n: states[jnp.minimum(place, len(states) - 1)] for n, states in known.items()}
            arrays = {n: jnp.asarray(array) for n, array in rows.items()}
            records = sample_sites(*self._run(arrays, {}, states=values))
            return jnp.stack(bounds_of(name, peel(records[name].fn)[0]))

        return jax.vmap(at)(jnp.arange(max([1, *map(len, known.values())])))

    def _find_components(self) -> tuple[Component, ...]:
        if self.row_latents is None:
            return ()
        row = {**self.example_row, **self.shared}
        return components_of(self._row_records, self.row_latents, self.layout.size, self.dtype, row, self._row_sites)

    def _integrated_terms(self, rows: Mapping[str, Array], facts: RowFacts | None) -> list[tuple[Terms, bool]]:
        """With whether the integrand is a Gaussian, which is checked of all rows."""
        if not self._components:
            return []
        theta = jax.ShapeDtypeStruct((self.layout.size,), self.dtype)
        row = {**self.example_row, **self.shared}
        some = selected(dict(rows), evenly_spread(num_rows(rows), MOST_LOOKED_AT)) | self.shared
        found = []
        for i, component in enumerate(self._components):

            def is_quadratic(question, i=i, component=component):
                check = validation.QuadraticCheck(self, component.name, question)
                holds = facts.quadratic[i] if facts is not None else bool(check.begin(rows)().all())
                self._row_checks += [check] if holds else []
                return holds

            found.append(local_terms(self._row_records, self.row_latents, component, theta, row, some, is_quadratic))
        return found

    def _row_records(
        self, theta: Array, row: Mapping[str, Array], states: Mapping[str, Array]
    ) -> dict[str, SiteRecord]:
        """Of a run on one row. theta: (P + K,), with the row's own continuous variables."""
        size = self.layout.size
        sites = self.layout.unravel(theta[:size]) | self.row_latents.continuous.unravel(theta[size:])
        return sample_sites(*self._run(row, sites, states=states))

    def row_latents_of(self, rows: Mapping[str, Array], rng: np.random.Generator) -> tuple[tuple, tuple]:
        """Values for the latent variables of some rows, to try things with: for :meth:`site_elements` of all rows, and
        of each row by itself, with a leading axis."""
        total, nothing = num_rows(rows), ({}, {})
        if self.row_latents is None:
            return nothing, nothing
        local, infos = self.row_latents, self._describe(rows)[0]

        def of_each(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
            axis = next((i for i, n in enumerate(shape) if n != values.shape[i]), None)
            return values[None] if axis is None else np.stack([values.take([i], axis) for i in range(total)])

        shapes = {name: infos[name].unconstrained_shape for name in local.continuous.site_names}
        z = {name: rng.normal(0.0, 0.5, shape).astype(self.dtype) for name, shape in shapes.items()}
        states = {n: rng.choice(np.asarray(v), infos[n].value_shape) for n, v in local.states.items()}
        alone = {name: of_each(x, local.continuous.shapes[name]) for name, x in z.items()}
        return (z, states), (alone, {name: of_each(x, local.shapes[name]) for name, x in states.items()})

    @property
    def local_names(self) -> tuple[str, ...]:
        """Latent sites with a value for each row that are no part of theta."""
        return self.local.site_names if self.row_latents is None else self.row_latents.site_names

    def _find_index_check(self) -> validation.IndexCheck | None:
        """None if the model indexes nothing by a row."""
        parameters = self._observed_parameters
        return validation.IndexCheck(self, parameters) if indexes(parameters, self.example_row) else None

    def _observed_parameters(self, rows: Mapping[str, Array] | None = None) -> list:
        """What the model makes of rows, at one theta. ``rows``: default: all that are part of a whole program."""
        theta = jnp.zeros(self.layout.size + self.local.size, self.dtype)
        records = self._records(self._unravel(theta), {**(self.example_row if rows is None else rows), **self.shared})
        return [jax.tree.leaves(records[site].fn) for site in self._row_sites]

    def _find_selections(self) -> frozenset[str]:
        """Sites each of whose terms looks at one entry of theta."""
        if not self.whole:
            return frozenset()
        rows = {**self.inputs(self.example_rows), **self.shared}
        size, dtype = self.layout.size, self.dtype
        return frozenset(terms.site for terms in self.terms if is_selection(terms, size, dtype, rows))

    def _prior_records_of(self, rows, theta, params) -> dict[str, SiteArrays]:
        found = self._records(self.layout.unravel(theta), {**rows, PARAMS: params})
        return {name: of_site(found[name]) for name in self.layout.site_names}

    @property
    def prior_reads(self) -> str:
        """The first latent site whose prior reads the data, and what it reads, for messages."""
        return described(self._prior_arrays)

    def _find_prior_arrays(self) -> dict[str, frozenset[str]]:
        """The latent sites whose prior reads the data, with what it reads; see :func:`data_dependence`."""
        if self.whole:  # the rows are part of the program
            return {}
        theta = jax.device_put(np.zeros(self.layout.size, self.dtype))
        return data_dependence(self._prior_records_of, self.example_row, self.example_rows, theta, self.params.values)

    def _read_prior(
        self, all_rows: Rows | None, constants: PriorConstants | None = None
    ) -> tuple[DataPrior, PriorConstants]:
        """The prior of sites that read the data, and what all rows determine of it.

        :param constants: the latter, if it is known already.
        :raises ValueError: if rows are needed and not at hand.
        """
        if constants is None and all_rows is None:
            raise ValueError(
                f"{self.prior_reads}, and not all rows are at hand: in a stream, or in a run that goes on "
                "from another. Compute what it needs beforehand, and pass it as a keyword argument of run()."
            )
        usable = None if constants is not None else self._usable(all_rows)
        total = num_rows(usable) if constants is None else constants.num_rows
        theta, params = jax.device_put(np.zeros(self.layout.size, self.dtype)), self.params.values

        def records(rows, theta, params):
            found = self._prior_records_of(rows, theta, params)
            return {name: found[name] for name in self._prior_arrays}

        def draw(rows, rng_key, params):
            return self._draw(rng_key, {**rows, PARAMS: params})

        found = data_prior(records, draw, self.example_row, total, theta, params)
        return found, found.constants(usable) if constants is None else constants

    def _rows_to_keep(self, all_rows: Rows | None) -> Rows | None:
        """All rows, if deterministic sites read them and they are at hand."""
        return None if all_rows is None or not self.deterministic.of_data else self._usable(all_rows)

    def _usable(self, rows: Mapping[str, Array]) -> Rows:
        """The rows that are finite, with outcomes in their support."""
        usable = finite_rows(rows)
        usable &= self.begin_check(rows)()
        return dict(rows) if usable.all() else selected(dict(rows), usable)

    def _find_prior(self) -> Prior:
        theta = jax.ShapeDtypeStruct((self.layout.size,), self.dtype)
        names = [*self.layout.site_names, *self._prior_sites]
        terms = [site_terms(self._site_runner(s), s, theta, self.prior_inputs, prefer_parameters=False) for s in names]
        blocks, start = [], 0
        for name in self.layout.site_names:
            stop = start + math.prod(self.layout.shapes[name])
            blocks.append(normal_block(self._site_runner(name), name, start, stop, theta, self.prior_inputs))
            start = stop
        return split_prior(terms, [b for b in blocks if b is not None], theta, self.prior_inputs)

    @classmethod
    def restore(
        cls,
        model: Callable,
        example_rows: Mapping[str, Array],
        model_kwargs: Mapping[str, Any],
        improper_prior_scale: float | None,
        whole: bool,
        params: np.ndarray,
        constants: PriorConstants | None,
        row_facts: RowFacts | None,
    ) -> Program:
        """A program from stored example rows, without data."""
        rows = {name: np.asarray(array) for name, array in example_rows.items()}
        options = {"improper_prior_scale": improper_prior_scale, "whole": whole, "params": params}
        local = "prior" if row_facts is None else "marginal"
        return cls(model, rows, model_kwargs, constants=constants, local=local, row_facts=row_facts, **options)

    def __reduce__(self) -> tuple[Callable, tuple]:
        """For other processes: what the model is read from again, and nothing compiled.

        :raises PicklingError: for models, and keyword arguments, that cannot be pickled.
        """
        check_picklable("the model", self.model)
        for name, value in self.model_kwargs.items():
            check_picklable(f"the model's argument {name!r}", value)
        rows = self.example_rows
        if not self.whole:
            rows = {name: np.asarray(array) for name, array in rows.items()}
        options = {
            **self._options,
            "improper_prior_scale": self.improper_prior_scale,
            "whole": self.whole,
            "evaluates": self.evaluates,
            "params": self.params.values,
            "constants": self.constants,
            "row_facts": self.row_facts,
            "row_plates": self.row_plates,
        }
        return _read_again, (self.model, rows, self.model_kwargs, options, self.data_rows, self.reason)

    def __copy__(self) -> Program:
        other = object.__new__(Program)
        other.__dict__.update(self.__dict__)
        return other

    def __deepcopy__(self, memo: dict) -> Program:
        """The same: no program changes, and what it has compiled stays."""
        return self

    def with_params(self, values: Array) -> Program:
        """The same at other values (K,) of the ``numpyro.param`` sites, in unconstrained space."""
        other = self._copied()
        other.params = self.params._replace(values=jnp.asarray(values, self.dtype))
        return other

    def bind(self, rows: Rows, all_rows: Rows | None) -> Program | None:
        """The same for other data of this form; None if these data make it another program.

        :param rows: as for the constructor, and ``all_rows`` too.
        :raises ValueError: for a prior that reads all rows, if these are not at hand.
        """
        if self.whole:
            return self if self.holds(rows) else None
        if self.data_prior is None and not self.deterministic.of_data and self.row_latents is None:
            return self
        other = self._copied()
        other.data_rows = self._rows_to_keep(all_rows)
        if self.data_prior is not None:
            found, other.constants = self._read_prior(all_rows)
            if not found.is_same(self.data_prior):
                return None
        return other

    def _copied(self) -> Program:
        """Without what depends on parameters or data."""
        other = copy.copy(self)
        for name in ("identity", "_start", "_initial_state", "_independent_start", "marginals"):
            other.__dict__.pop(name, None)
        return other

    # ------------------------------------------------------------------ data
    def rows(self, data: Mapping[str, Any] | tuple, *, predicted: bool = False) -> Rows:
        """The data as arrays by argument name, checked for names, lengths, finite values, shapes and indices.

        :param predicted: whether the rows are to be predicted: then what predictions do not depend on may be left out.
        :raises ValueError: naming arrays that are left out although the run had them.
        """
        if self.whole:
            rows, _ = whole_data(self.model, data, self.model_kwargs)
        else:
            rows = checked_rows(self.model, data, 0, self.model_kwargs)
        needed = self._prediction_arrays if predicted else set(self.example_row) - self._outcome_arrays
        self.check_given(rows, needed)
        if not self.whole:
            check_row_shapes(rows, row_shapes(self.example_row), "that the posterior has absorbed")
        if self._index_check is not None:
            self._index_check(rows, 0)
        for check in () if predicted else self._row_checks:
            check(rows, 0)
        return rows

    def check_given(self, rows: Collection[str], needed: Collection[str]) -> None:
        """:raises ValueError: for arrays that are left out: the model would take their default values."""
        missing = sorted(set(needed) - set(rows))
        if missing:
            raise ValueError(
                f"the data lack {missing[0]!r}, which the posterior was fitted with: the model would take the default "
                "of that argument. Give it again."
            )

    def rows_to_absorb(self, data: Mapping[str, Any]) -> dict[str, Array]:
        """Data arrays of the same form as JAX's, which may be traced, without a look at their values.

        :raises ValueError: for arrays that are left out.
        """
        rows = {name: as_jax_array(name, array) for name, array in data.items() if array is not None}
        self.check_given(rows, self.example_row)
        return rows

    @functools.cached_property
    def _outcome_arrays(self) -> frozenset[str]:
        """The data arrays that are nothing but outcomes."""
        taken = frozenset().union(*(self.outcome_arrays(site) for site in self.observed_sites))
        return taken - self._prediction_arrays

    @functools.cached_property
    def _prediction_arrays(self) -> frozenset[str]:
        """The data arrays that predictions depend on: by distributions or deterministic sites."""
        if self.whole:  # the model may need their values
            return frozenset()
        theta = jnp.zeros(self.layout.size + self.local.size, self.dtype)

        def predictions(rows):
            trace, runner = self._run(rows, self._unravel(theta))
            records = sample_sites(trace, runner)
            names = (*self.observed_sites, *self.local_names)
            values = {name: value for name, value in deterministic_sites(trace).items() if name in self.of_rows}
            return {"all": ([peel(records[name].fn)[0] for name in names], values)}

        return depends_on(predictions, self.example_row)["all"]

    @property
    def of_rows(self) -> frozenset[str]:
        """Deterministic sites with a value for each row, or inside a plate over the rows."""
        inside = {name for name, plates in self.plates.items() if self.row_plates.intersection(plates)}
        return self.deterministic.of_rows | (inside & (self.deterministic.of_latents | self.deterministic.of_data))

    def call_arguments(self, rows: Mapping[str, Array]) -> tuple[tuple, dict]:
        """(args, kwargs) of a call of the model on these rows."""
        return split_call(self.model, rows, self.model_kwargs)

    def inputs(self, rows: Mapping[str, Array]) -> dict[str, Any]:
        """What the terms take for these rows.

        :raises ValueError: for rows other than the program's own, if the model always runs on all of these.
        """
        if not self.whole or ROW in rows:
            return dict(rows)
        if not self.holds(rows):
            raise ValueError(
                "the latent sites of this posterior belong to the rows that it was fitted to: give these, all of them. "
                "(Other rows can be predicted with method='monte_carlo'.)"
            )
        return {ROW: np.arange(self._num_pieces, dtype=np.int32)}

    @property
    def shared(self) -> dict[str, Array]:
        """What the terms take besides rows: the ``numpyro.param`` sites, if there are any."""
        return {PARAMS: self.params.values} if self.params.layout.size else {}

    @property
    def prior_inputs(self) -> dict[str, Any]:
        """What the prior's terms take: the ``numpyro.param`` sites, and what the data determine of the prior."""
        return self.shared if self.constants is None else self.shared | {CONSTANTS: self.constants.arrays[0]}

    def holds(self, rows: Mapping[str, Array]) -> bool:
        """Whether these are the rows that are part of the program, or some of their arrays."""
        own = self.example_rows
        return own.keys() >= rows.keys() and all(_is_equal(own[name], rows[name]) for name in rows)

    @property
    def flat_sites(self) -> frozenset[str]:
        """Those whose prior is improper, and stays so."""
        return self._improper if self.improper_prior_scale is None else frozenset()

    @functools.cached_property
    def _is_flat_somewhere(self) -> bool:
        """Whether all of the prior is Gaussian, and says nothing in some direction."""
        return not self.prior.terms and is_flat(self._gaussian_parts(self.prior_inputs)[0][0], self.prior)

    def check_prior(self) -> None:
        """:raises ImproperPrior: for one that only data can make proper."""
        if not self.whole and self.layout.size <= MOST_CHECKED and self._is_flat_somewhere:
            raise ImproperPrior("in some direction the latent sites have no prior, and no recursion can start there.")

    def count_rows(self, rows: Mapping[str, Array]) -> int:
        """How many rows there are. Where arrays of a whole program share no length: its number of terms."""
        length = common_length(rows)
        if length is None and self.whole:
            return sum(terms.num_elements for terms in self.terms) * self._num_pieces
        return length

    def row_axis(self, site: str) -> int:
        """The axis of an observed site's values along which rows lie."""
        return next((axis for axis, plate in enumerate(self.plates.get(site, ())) if plate in self.row_plates), 0)

    def check_rows(self, rows: Mapping[str, np.ndarray], first_row: int = 0) -> None:
        """:raises ValueError: naming array and row of an observed value outside its distribution's support, or of an
        index of nothing."""
        for check in self._checks:
            check(rows, first_row)

    def begin_check(self, rows: Mapping[str, np.ndarray]) -> Callable[[], np.ndarray]:
        """Start to check rows; what is returned waits for the answer: which of them :meth:`check_rows` lets pass."""
        begun = [check.begin(rows) for check in self._checks]
        return lambda: np.all([np.ones(num_rows(rows), bool), *[finish() for finish in begun]], axis=0)

    def check_independence(self, rows: Mapping[str, np.ndarray]) -> None:
        """:raises CoupledRows: if the terms of a few rows change when the rows are taken one by one."""
        validation.check_independence(self, rows)

    # ------------------------------------------------------------------ latents
    @functools.cached_property
    def _start(self) -> Start | None:
        if not self.prior.terms and not (self.whole and self._is_flat_somewhere):
            return None
        return fitted_start(self.prior, self.layout.size, lambda keys: self._prior_draws(keys, self._draw_constants))

    @functools.cached_property
    def _initial_state(self) -> State:
        parts = self._gaussian_parts(self.prior_inputs)
        return initial_state(self.prior, self.layout.size, self.dtype, self._start, parts)

    def initial_state(self) -> State:
        """The prior, or a Gaussian fitted to it, as the state before the first row."""
        return self._initial_state

    def _draw_one(self, rng_key: Array) -> Array:
        return self._draw_prior(rng_key, self._draw_constants)

    @functools.cached_property
    def _independent_start(self) -> IndependentStart:
        return independent_start(self.prior, self.layout.size, self.dtype, self._draw_one, self.prior_inputs)

    def independent_start(self) -> IndependentStart:
        """A Gaussian of independent entries that stands for the prior before the first row."""
        return self._independent_start

    @functools.cached_property
    def marginals(self) -> Marginals:
        """The entries of theta under the prior, each for itself."""
        return marginals(self.prior, self.layout.size, self.dtype, self._draw_one, self.prior_inputs)

    def find_sparsity(self, rows: Mapping[str, Array]) -> Sparsity | None:
        """How all terms look at a few entries of theta each, given all rows; None if they do not, or gain nothing."""
        exact = all(terms.closed_form is Gaussian for terms in self.prior.gaussian)
        if self.whole or self.prior.blocks or self.params.layout.size or not exact:
            return None
        prior_terms = (*self.prior.gaussian, *self.prior.terms)
        return find_sparsity(self.layout, self.dtype, self.terms, prior_terms, rows, self.prior_inputs)

    def initial_state_at(self, params: Array) -> State:
        """The same as a differentiable function of the ``numpyro.param`` sites (K,), in unconstrained space."""
        return state_at(self.prior, self.layout.size, self.dtype, self._start, self.prior_inputs | {PARAMS: params})

    def constrain(self, theta: Array) -> dict[str, Array]:
        """Constrained latents and the deterministic sites that are functions of them. theta: (P,)."""
        trace, runner = self._run(self.example_row, self.layout.unravel(theta))
        sites = sample_sites(trace, runner) | self._data_records(theta, self.prior_inputs)
        values = {name: sites[name].value for name in self.layout.site_names}
        return values | {n: v for n, v in deterministic_sites(trace).items() if n in self.deterministic.of_latents}

    def deterministic_of_data(self, theta: Array, rows: Mapping[str, Array]) -> dict[str, Array]:
        """Deterministic sites that read the data, given all rows. theta: (P,)."""
        trace, _ = self._run(rows, self.layout.unravel(theta))
        return {n: v for n, v in deterministic_sites(trace).items() if n in self.deterministic.of_data}

    def unconstrain(self, sites: Mapping[str, Array]) -> Array:
        """theta (P,) of constrained latents."""
        values: dict[str, Array] = {}
        for name in self.layout.site_names:  # supports may depend on the sites before
            fn = self._prior_records(values)[name].fn
            values[name] = site_transform(fn).inv(jnp.asarray(sites[name]))
        return self.layout.ravel(values)

    # ------------------------------------------------------------------ densities
    def log_prior(self, theta: Array) -> Array:
        """log p(theta) in unconstrained space, prior-level factors included. theta: (P,)."""
        return sum(self.log_priors(theta).values())

    def log_priors(self, theta: Array) -> dict[str, Array]:
        """The terms of :meth:`log_prior` by site."""
        records = self._prior_records(self.layout.unravel(theta))
        names = [*self.layout.site_names, *self._prior_sites]
        return {name: jnp.sum(elements(self._proper(records[name]))) for name in names}

    def log_likelihood(self, theta: Array, rows: Mapping[str, Array], site: str | None = None) -> dict[str, Array]:
        """Log-likelihood of each row by observed site, (n, *elements); auxiliary factors under their own names.

        Variables of the row's own are integrated out; what they enter is then summed over its elements. Sites that
        they tie together have one log-likelihood, under the names of them all ("x+y").

        :param rows: as :meth:`inputs` gives them.
        """
        if self.whole:
            names = self._row_sites if site is None else (site,)
            terms = self._log_probs(theta, self.example_row, names)
            return {name: self._rows_first(name, jnp.atleast_1d(terms[name])) for name in names}
        integrated = {terms.site: terms for terms in self.terms if terms.site in self._integrated}
        outside = [name for name in self._row_sites if name not in self._tied]
        names = [name for name in (*outside, *integrated) if site in (None, name)]
        axes = self._row_axes

        def one(row):
            row = {k: v[None] for k, v in row.items()}
            found = {name: self._log_integral(integrated[name], theta, row) for name in names if name in integrated}
            others = [name for name in names if name not in integrated]
            if not self.local.size:
                terms = self._log_probs(theta, row, others) if others else {}
                return found | {name: _drop_axis(terms[name], axes[name]) for name in others}
            points, weights = normal_rule(self.local.size)

            def at(z):
                everything = jnp.concatenate([theta, z])
                return {name: jnp.sum(x) for name, x in self._log_probs(everything, row, others).items()}

            densities = jax.vmap(at)(jnp.asarray(points, self.dtype))
            return {name: logsumexp(x, b=jnp.asarray(weights, self.dtype)) for name, x in densities.items()}

        return jax.vmap(one)({name: jnp.asarray(value) for name, value in rows.items()})

    def _rows_first(self, site: str, terms: Array) -> Array:
        return jnp.moveaxis(terms, min(self.row_axis(site), terms.ndim - 1), 0)

    def _log_integral(self, terms: Terms, theta: Array, row: Mapping[str, Array]) -> Array:
        """Of one row's terms, in the shape of the outcomes if these are what remains, and else in all."""

        def one(element):
            return terms.density(terms.predictors(theta, row, element), terms.constants(row, element))

        row = {**row, **self.shared}
        values = jax.vmap(one)(jnp.arange(terms.num_elements, dtype=jnp.int32))
        component = self._integrated[terms.site]
        if terms.site not in self._row_sites:
            return jnp.sum(values)
        shape = self.sites[terms.site].value_shape
        places = component.outcomes[terms.site].ravel()
        if math.prod(shape) == len(values) and np.array_equal(places, np.arange(len(values))):
            return _drop_axis(jnp.reshape(values, shape), self._row_axes[terms.site])
        return jnp.sum(values)

    @functools.cached_property
    def _integrated(self) -> dict[str, Component]:
        return {component.name: component for component in self._components}

    @functools.cached_property
    def _tied(self) -> frozenset[str]:
        """Observed sites that look at latent variables of the row's own."""
        return frozenset(name for component in self._components for name in component.outcomes)

    @property
    def likelihood_sites(self) -> tuple[str, ...]:
        """What :meth:`log_likelihood` gives of observed sites: those that latent variables tie together are one."""
        outside = [name for name in self.observed_sites if name not in self._tied]
        return (*outside, *self._integrated)

    def records(self, theta: Array, rows: Mapping[str, Array]) -> dict[str, SiteRecord]:
        """Every sample site of the model at theta."""
        return self._records(self._unravel(theta), rows)

    def _log_probs(self, theta, rows, names):
        records = self.records(theta, rows)
        return {name: _log_prob(records[name]) for name in names}

    def predictors(self, gaussian: Family, rows: Mapping[str, Array], site: str) -> tuple[Array, Array]:
        """Mean (n, E, C) and covariance (n, E, C, C) of a site's predictors under a Gaussian.

        :param rows: as :meth:`inputs` gives them.
        """
        terms = next(t for t in self.terms if t.site == site)
        offset, design, local = linearise(terms, gaussian.mean, jax.tree.map(jnp.asarray, {**rows, **self.shared}))
        spread = jnp.concatenate([gaussian.predictor_root(design), local], axis=-1)
        return offset, jnp.einsum("necp,nedp->necd", spread, spread)

    def link(self, site: str) -> str | None:
        """``"logistic"`` if the site's predictor is the logit of a success probability."""
        terms = next(t for t in self.terms if t.site == site)
        return "logistic" if terms.closed_form is Logistic else None

    @functools.cached_property
    def convolves(self) -> bool:
        """Whether the rows' predictors are found by convolutions, which XLA's CPU code does best one row at a time."""
        return any(eqn.primitive.name == "conv_general_dilated" for eqn in self._equations(1, 1))

    @functools.cached_property
    def largest_array(self) -> int:
        """Numbers for each row and each theta in the largest array that leads to log-likelihoods: a network's layer."""
        sizes = {
            (n, m): np.array([sum(v.aval.size for v in eqn.outvars) for eqn in self._equations(n, m)])
            for n in (2, 3)
            for m in (2, 3)
        }
        return int(np.max(sizes[3, 3] - sizes[3, 2] - sizes[2, 3] + sizes[2, 2]))

    def _equations(self, num_rows: int, num_thetas: int) -> list:
        """Those of the log-likelihoods of rows at each theta."""
        theta = jax.ShapeDtypeStruct((num_thetas, self.layout.size), self.dtype)
        inputs = self.inputs(self.example_rows)
        rows = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in inputs.items()}
        return list(equations(jax.make_jaxpr(jax.vmap(self.log_likelihood, (0, None)))(theta, rows).jaxpr))

    # ------------------------------------------------------------------ inside
    def site_elements(
        self, theta: Array, rows: Mapping[str, Array], latents: tuple[Mapping[str, Array], Mapping[str, Array]]
    ) -> dict[str, Array]:
        """The terms of every row site, flattened, with the model run on all the rows at once.

        :param latents: the rows' own: unconstrained values by site, and states by site.
        """
        unconstrained, states = latents
        records = sample_sites(*self._run(rows, self.layout.unravel(theta) | unconstrained, states=states))
        own = () if self.row_latents is None else self.row_latents.site_names
        return {name: elements(records[name]) for name in (*self._row_sites, *own)}

    def site_record(self, name: str, rows: Mapping[str, Array]) -> SiteRecord:
        return self._records({}, rows)[name]

    @functools.cached_property
    def real_sites(self) -> frozenset[str]:
        """The latent sites whose support is the whole real line."""
        found: list = []
        jax.eval_shape(lambda rows: found.append(sample_sites(*self._run(rows, {}))) or 0, self.example_row)
        return frozenset(
            name for name in self.layout.site_names if isinstance(site_transform(found[0][name].fn), IdentityTransform)
        )

    def site_given(self, site: str, given: Mapping[str, Array]) -> tuple[Callable, Layout, dict[str, Any]]:
        """The record of a site as a function of the other latent sites, as :func:`site_terms` takes it.

        :param given: values of some latent sites, in unconstrained space.
        :return: theta and an example of what is returned last -> the record; the layout of theta, with the variables of
            one row; an example of rows, or of what the prior's terms take.
        """
        everything = self.layout.shapes | (self.local.shapes if site in self._row_sites else {})
        others = layout_of({name: shape for name, shape in everything.items() if name not in given})
        if site not in self._row_sites:
            example = self.prior_inputs
        else:
            example = self.shared if self.whole else {**self.example_row, **self.shared}

        def run_site(theta, row):
            sites = dict(given) | others.unravel(theta)
            if site in self._prior_arrays:
                return self._proper(self._data_records(self.layout.ravel(sites), row)[site])
            own = any(key not in SHARED for key in row)
            return self._proper(self._records(sites, row if own else {**self.example_row, **row})[site])

        return run_site, others, example

    def outcome_arrays(self, site: str) -> set[str]:
        """The data arrays from which an observed site's values are taken. Of a whole program: those that are them."""
        if self.whole:
            value = self._observed_value(site)
            return {name for name, array in self.example_row.items() if _is_equal(array, value)}
        return set(depends_on(lambda row: {site: self.site_record(site, row).value}, self.example_row)[site])

    def _observed_value(self, site: str) -> np.ndarray:
        return np.asarray(self.jitted(lambda rows: self.site_record(site, rows).value, self.example_row))

    def is_value_of_latents(self, site: str) -> bool:
        """Whether what is observed at a site depends on latent sites: an error that is computed, not a datum."""

        def value(inputs):
            return {site: self._records(self._unravel(inputs["theta"]), self.example_row)[site].value}

        return bool(depends_on(value, {"theta": jnp.zeros(self.layout.size + self.local.size, self.dtype)})[site])

    def runner(self, num_rows: int) -> RowRunner:
        """The model with latents that are drawn, its parameters and its plates at this number of rows."""
        params = self.params.constrained(self.params.values)
        return RowRunner(self.model, self.row_plates, num_rows, {}, params=params)

    def _run(self, rows, unconstrained, rng_key=None, params=None, states=None):
        """``params`` are the ``numpyro.param`` sites by name; default: as in ``rows``, or else where they stand."""
        arrays = {name: value for name, value in rows.items() if name not in SHARED}
        if params is None:
            params = self.params.constrained(rows.get(PARAMS, self.params.values))
        evaluating = jax.ensure_compile_time_eval() if self.evaluates else contextlib.nullcontext()
        with (
            evaluating,
            numpyro.validation_enabled(False),
        ):  # parameters that a few rows give need not be those of all rows
            return run_model(
                self.model,
                arrays,
                self.model_kwargs,
                row_plates=self.row_plates,
                unconstrained=unconstrained,
                rng_key=rng_key,
                local=frozenset(self.local.site_names),
                params=params,
                states=states,
            )

    def _run_abstractly(self, rows) -> dict:
        """A trace without values."""
        found: list = []
        self.abstractly(lambda rows: found.append(self._run(rows, {})[0]) or 0, rows)
        return found[0]

    def jitted(self, function: Callable[[Mapping[str, Array]], Any], rows: Mapping[str, Array]) -> Any:
        """What a function of rows returns, compiled. A whole program's data have their values there."""
        return jit_once(lambda: function(rows))() if self.whole else jax.jit(function)(rows)

    def abstractly(self, function: Callable[[Mapping[str, Array]], Any], rows: Mapping[str, Array]) -> Any:
        """Shapes of what a function of rows returns. A whole program's data have their values there."""
        return jax.eval_shape(lambda: function(rows)) if self.whole else jax.eval_shape(function, rows)

    def _records(self, unconstrained, rows) -> dict[str, SiteRecord]:
        states = None if self.row_latents is None else self.row_latents.first_states()
        return sample_sites(*self._run(rows, unconstrained, states=states))

    def _prior_records(self, unconstrained: Mapping[str, Array]) -> dict[str, SiteRecord]:
        """Records of latent sites, and of observed ones that no row enters. Sites not given are drawn, or zero."""
        records = self._records(unconstrained, self.example_row)
        zeros = {name: jnp.zeros(shape, self.dtype) for name, shape in self.layout.shapes.items()}
        return records | self._data_records(self.layout.ravel(zeros | dict(unconstrained)), self.prior_inputs)

    def _data_records(self, theta: Array, inputs: Mapping[str, Any]) -> dict[str, SiteRecord]:
        """Records of the latent sites whose prior reads the data. ``inputs``: as :attr:`prior_inputs`."""
        if self.data_prior is None:
            return {}
        found = self.data_prior.records.finish(inputs[CONSTANTS], theta, inputs.get(PARAMS, self.params.values))
        unconstrained = self.layout.unravel(theta)
        return {
            name: SiteRecord(
                name,
                arrays.fn,
                arrays.value,
                unconstrained[name],
                arrays.log_abs_det,
                arrays.weight,
                self.plates[name],
                is_observed=False,
                is_auxiliary=False,
            )
            for name, arrays in found.items()
        }

    def _unravel(self, theta: Array) -> dict[str, Array]:
        """Sites of (P,), or of (P + K,) with the variables of one row."""
        size = self.layout.size
        sites = self.layout.unravel(theta[:size])
        return sites | self.local.unravel(theta[size:]) if theta.shape[0] > size else sites

    def _site_runner(self, name):
        def run_site(theta, row):
            if name in self._prior_arrays:
                return self._proper(self._data_records(theta, row)[name])
            own = any(key not in SHARED for key in row)
            record = self._records(self._unravel(theta), row if own else {**self.example_row, **row})[name]
            return self._proper(record)

        return run_site

    def _find_params(self) -> Parameters:
        """The ``numpyro.param`` sites that matter: layers of a network whose weights are sampled do not.

        :raises NotImplementedError: for sites that hold more than an array.
        """
        theta = jax.device_put(np.zeros(self.layout.size + self.local.size, self.dtype))
        if not any(site["type"] == "param" for site in self._run_abstractly(self.example_row).values()):
            return self.params
        trace, _ = self._run(self.example_row, self._unravel(theta))
        sites = {name: site for name, site in trace.items() if site["type"] == "param"}

        def log_joint(values):
            records = sample_sites(*self._run(self.example_row, self._unravel(theta), params=values))
            return {"total": sum(jnp.sum(elements(record)) for record in records.values())}

        used = depends_on(log_joint, {name: site["value"] for name, site in sites.items()})["total"]
        for name in used:
            if not isinstance(sites[name]["value"], (jax.Array, np.ndarray, float)):
                raise NotImplementedError(f"numpyro.param site {name!r} must hold one array, for it is to be learned.")
        return parameters_of({name: site for name, site in sites.items() if name in used}, self.dtype)

    def _proper(self, record: SiteRecord) -> SiteRecord:
        if record.name not in self._improper or self.improper_prior_scale is None:
            return record
        z = record.unconstrained
        wide = dist.Normal(jnp.zeros(jnp.shape(z), self.dtype), self.improper_prior_scale)
        return record._replace(fn=wide, value=z, log_abs_det=None)

    def _draw_prior(self, rng_key: Array, constants: tuple[Array, ...] | None) -> Array:
        """theta (P,) from the prior. ``constants``: what the data determine of it, if it reads them."""
        if self.data_prior is None:
            return self._draw(rng_key, self.example_row)
        return self.data_prior.draw.finish(constants, rng_key, self.params.values)

    @property
    def _draw_constants(self) -> tuple[Array, ...] | None:
        return None if self.constants is None else self.constants.arrays[1]

    def _draw(self, rng_key: Array, rows: Mapping[str, Array]) -> Array:
        wide = {}
        for name in sorted(self._improper):
            rng_key, key = jax.random.split(rng_key)
            scale = REACH if self.improper_prior_scale is None else self.improper_prior_scale
            wide[name] = scale * jax.random.normal(key, self.layout.shapes[name], self.dtype)
        records = sample_sites(*self._run(rows, wide, rng_key))
        return self.layout.ravel(
            {n: site_transform(records[n].fn).inv(records[n].value) for n in self.layout.site_names}
        )

    def _describe(self, rows) -> tuple[dict[str, SiteInfo], dict[str, tuple[str, ...]]]:
        """Static facts of all sites on these rows, without running the model."""
        found: list = []

        def abstract(rows):
            trace, runner = self._run(rows, {})
            found.append({name: site_info(record) for name, record in sample_sites(trace, runner).items()})
            found.append(plates_of(trace))
            return 0

        self.abstractly(abstract, rows)
        return found[0], found[1]

    def _find_deterministic(self) -> DeterministicSites:
        found = self._run_abstractly(self.example_row)
        names = [name for name, site in found.items() if site["type"] == "deterministic" and _is_numeric(site["value"])]
        if not names:
            return DeterministicSites()
        if self.whole:
            return DeterministicSites(of_latents=frozenset(names))
        of_rows = [name for name in names if self._row_axes[name] is not None]
        theta = jax.device_put(np.zeros(self.layout.size, self.dtype))
        return classify_deterministic(
            lambda rows, theta: deterministic_sites(self._run(rows, self.layout.unravel(theta))[0]),
            of_rows,
            self.example_row,
            self.example_rows,
            theta,
        )

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """Which model this is, as far as its own example rows tell."""
        return model_identity(self)

    @property
    def is_proper(self) -> bool:
        """Whether the prior is the model's own: no normal stands for an improper one."""
        return not self._improper

    @property
    def is_conjugate(self) -> bool:
        """Whether all terms are Gaussian: then q is the posterior, and the bound the evidence."""
        gaussian = all(terms.is_affine and terms.closed_form is Gaussian for terms in self.terms)
        return gaussian and not self.prior.terms

    @functools.cached_property
    def _row_axes(self) -> dict[str, int | None]:
        """The axis along which an observed site's terms, or a deterministic site, grow with the rows; None if none."""
        if self.whole:
            return {}
        one, two = (self._shapes(rows) for rows in (self.example_row, self.example_rows))
        return {name: next((i for i, n in enumerate(one[name]) if n != two[name][i]), None) for name in one}

    def _shapes(self, rows) -> dict[str, tuple[int, ...]]:
        def abstract(rows):
            trace, runner = self._run(rows, {})
            records = sample_sites(trace, runner)
            terms = {n: _log_prob(records[n]) for n in self._row_sites}
            return terms | {n: jnp.asarray(value) for n, value in deterministic_sites(trace).items()}

        return {name: found.shape for name, found in jax.eval_shape(abstract, rows).items()}

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


def _read_again(
    model: Callable,
    rows: Rows,
    model_kwargs: Mapping[str, Any],
    options: dict[str, Any],
    data_rows: Rows | None,
    reason: str | None,
) -> Program:
    """What :meth:`Program.__reduce__` took apart."""
    program = Program(model, rows, model_kwargs, **options)
    program.data_rows, program.reason = data_rows, reason
    return program


def _is_numeric(value: Any) -> bool:
    return isinstance(value, (jax.Array, np.ndarray, np.generic, bool, int, float))


def _is_equal(a: Any, b: Any) -> bool:
    """Whether two arrays hold the same, NaN in the same places too."""
    a, b = np.asarray(a), np.asarray(b)
    return np.array_equal(a, b, equal_nan=a.dtype.kind == "f" and b.dtype.kind == "f")


def _log_prob(record: SiteRecord) -> Array:
    with numpyro.validation_enabled(False):
        return record.fn.log_prob(record.value) * record.weight


def _drop_axis(array: Array, axis: int | None) -> Array:
    return array if axis is None else jnp.squeeze(array, axis)
