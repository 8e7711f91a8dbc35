"""A NumPyro model bound to the form of its data: what every method asks of a model."""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.jaxprs.interpret import depends_on, indexes
from .bound.bound_likelihood import BoundLikelihood
from .bound.model_runs import ReadingOptions
from .bound.row_checks import RowCheck, check_whole_indices, check_whole_support, index_check, support_check
from .data.arguments import (
    by_name,
    check_lengths,
    check_row_shapes,
    checked_rows,
    finite_rows,
    row_shapes,
    whole_data_again,
)
from .data.arrays import as_dtype, as_jax_array
from .data.rows import Arrays, Data, Keywords, Rows, num_rows, selected
from .handlers.data_prior import DeterministicSites, PriorConstants, data_dependence
from .handlers.tracing import base_distribution, deterministic_sites, numbers_of, sample_sites
from .identity import ModelIdentity, model_identity
from .terms.local_sites import RowFacts
from .terms.reads import Reader


class Program(BoundLikelihood):
    """A model, its data's form and its keyword arguments, read once.

    :param all_rows: all rows, which priors and deterministic sites may read, if they are at hand.
    :param constants: what all rows determine of such a prior, from an earlier reading.
    :param options: the fields of :class:`~.bound.model_runs.ReadingOptions`.
    :param model: and all others: see :class:`BoundModel`.
    :ivar reason: why a whole program is one.
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
        rows: Arrays,
        model_kwargs: Keywords,
        *,
        params: Array | np.ndarray | None = None,
        all_rows: Rows | None = None,
        constants: PriorConstants | None = None,
        row_facts: RowFacts | None = None,
        row_plates: frozenset[str] | None = None,
        **options: Any,
    ):
        super().__init__(model, rows, model_kwargs, ReadingOptions(**options), params, row_plates, row_facts)
        self.reason: str | None = None
        self._row_checks = self._read_likelihood(rows)
        self._index_checks = [] if self.whole else self._find_index_checks()
        self._whole_checks, self._checks = self._find_checks()
        self._read_prior(rows, lambda: self.usable(all_rows), constants)
        of_prior = (*self.prior.gaussian, *self.prior.terms)
        size, dtype = self.layout.size, self.dtype
        self._readers = Reader(self.terms, size, dtype), Reader(of_prior, size, dtype)
        self.deterministic = self._find_deterministic()
        self.data_rows = self._rows_to_keep(all_rows)

    def _find_checks(self) -> tuple[list[Callable], list[RowCheck]]:
        """The checks of all data at once, and those of single rows."""
        if self.whole:
            given = [site for site in self._row_sites if not self.sites[site].is_auxiliary]
            of_support = [partial(check_whole_support, self, site) for site in given]
            return [*of_support, partial(check_whole_indices, self._observed_parameters)], []
        of_support = [support_check(self, site) for site in self.observed_sites]
        return [], [*of_support, *self._index_checks, *self._row_checks]

    # ------------------------------------------------------------------ the same for other data, or elsewhere
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
            **self.options._asdict(),
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
        """The program itself: programs do not change, and keep what they have compiled."""
        return self

    def with_params(self, values: Array | np.ndarray) -> Program:
        """The program at other values (K,) of the ``numpyro.param`` sites, in unconstrained space."""
        other = self._copied()
        other.params = self.params._replace(values=jnp.asarray(values, self.dtype))
        return other

    def bind(self, rows: Rows, all_rows: Rows | None) -> Program | None:
        """The program for other data of this form; None if these data make it another program.

        :param rows: as for the constructor, and ``all_rows`` too.
        :raises ValueError: for a prior that reads all rows, if these are not at hand.
        """
        if self.whole:
            return self if self.holds(rows) else None
        if self.data_prior is None and not self.deterministic.of_data and not self.integrates_row_latents:
            return self
        other = copy.copy(self) if self.data_prior is None else self._copied()  # a prior that reads no data is the same
        other.data_rows = self._rows_to_keep(all_rows)
        if self.data_prior is not None:
            data_prior, other.constants = self._read_data_prior(self.usable(all_rows))
            if not data_prior.is_same(self.data_prior):
                return None
        return other

    def _copied(self) -> Program:
        """A copy without the cached properties that depend on parameters or data."""
        other = copy.copy(self)
        for name in ("identity", "_moments_of_draws", "initial_state", "marginals", "coupled_prior"):
            other.__dict__.pop(name, None)
        return other

    # ------------------------------------------------------------------ data
    def rows(self, data: Data, *, predicted: bool = False) -> Rows:
        """The data as arrays by argument name, checked for names, lengths, finite values, shapes and indices.

        :param predicted: whether the rows are to be predicted: then what predictions do not depend on may be left out.
        :raises ValueError: naming arrays that are left out although the run had them, or given though it had not.
        """
        if self.whole:
            rows = self.as_taken(whole_data_again(self.model, data, self.model_kwargs))
        else:
            rows = self._with_integers(checked_rows(self.model, data, self.model_kwargs))
        needed = self._prediction_arrays if predicted else set(self.example_row) - self._outcome_arrays
        self.check_given(rows, needed)
        if not (self.whole or predicted):
            self._check_known(rows)
        if not self.whole:
            check_row_shapes(rows, row_shapes(self.example_row), "that the posterior has absorbed")
        for check in self._index_checks if predicted else [*self._index_checks, *self._row_checks]:
            check(rows, 0)
        return rows

    def _with_integers(self, rows: Rows) -> Rows:
        """Whole numbers as integers, where the run had integers."""
        like = self.example_row
        return {name: as_dtype(array, like[name].dtype) if name in like else array for name, array in rows.items()}

    def as_taken(self, rows: Arrays) -> dict[str, Any]:
        """Arrays of NumPy's or of JAX's, as a whole model took them in its run."""
        are_jax = {name for name, array in self.example_rows.items() if isinstance(array, jax.Array)}
        return {name: jnp.asarray(array) if name in are_jax else np.asarray(array) for name, array in rows.items()}

    def check_given(self, rows: Collection[str], needed: Collection[str]) -> None:
        """:raises ValueError: for arrays that are left out: the model would take their default values."""
        missing = sorted(set(needed) - set(rows))
        if missing:
            raise ValueError(
                f"the data lack {missing[0]!r}, which the posterior was fitted with: the model would take the default "
                "of that argument. Give it again."
            )

    def check_same_sites(self, earlier: Program) -> None:
        """:raises ValueError: if a posterior's program has other latent sites, naming an array with other columns."""
        own, others = self.layout, earlier.layout
        if others.site_names != own.site_names or others.size != own.size:
            check_row_shapes(self.example_row, row_shapes(earlier.example_row), "that the posterior has absorbed")
            theirs, ours = (
                ", ".join(f"{name}{layout.shapes[name]}" for name in layout.site_names) for layout in (others, own)
            )
            raise ValueError(f"the posterior has latent sites {theirs}, the model {ours}: they must be the same.")

    def check_continues(self, earlier: Program) -> None:
        """:raises ValueError: if no run of this program can go on from a posterior of an earlier one: for other latent
        sites, or arrays that were given to it and now are not."""
        self.check_same_sites(earlier)
        earlier.check_given(self.example_row, earlier.example_row)

    def rows_to_absorb(self, data: Data) -> dict[str, Array]:
        """Data arrays of the same form as JAX's, which may be traced, without reading their values.

        :raises ValueError: for arrays that are left out, that the model was not read with, or that differ in length.
        """
        named = by_name(self.model, data)
        rows = {name: as_jax_array(name, array) for name, array in named.items() if array is not None}
        self.check_given(rows, self.example_row)
        self._check_known(rows)
        check_lengths(rows)
        return rows

    def _check_known(self, rows: Collection[str]) -> None:
        others = sorted(set(rows) - set(self.example_row))
        if others:
            raise ValueError(
                f"the posterior was fitted without data array {others[0]!r}: leave it out, or run() again with it."
            )

    def check_rows(self, rows: Mapping[str, np.ndarray], first_row: int = 0) -> None:
        """:raises ValueError: naming array and row of an observed value outside its distribution's support, or of an
        index of nothing."""
        for check in (*self._whole_checks, *self._checks):
            check(rows, first_row)

    @functools.cached_property
    def index_arrays(self) -> frozenset[str]:
        """The data arrays of integers that the model indexes by."""
        return frozenset(
            n for check in self._index_checks for n in check.arrays if self.example_row[n].dtype.kind in "iu"
        )

    def begin_check(self, rows: Mapping[str, np.ndarray]) -> Callable[[], np.ndarray]:
        """Start to check rows; what is returned waits for the answer: which of them :meth:`check_rows` lets pass."""
        begun = [check.begin(rows) for check in self._checks]
        return lambda: np.all([np.ones(num_rows(rows), bool), *[finish() for finish in begun]], axis=0)

    def usable(self, rows: Rows | None) -> Rows | None:
        """The rows that are finite, with outcomes in their support, if they are at hand."""
        if rows is None:
            return None
        finite = finite_rows(rows)
        rows = self._with_integers(dict(rows) if finite.all() else selected(dict(rows), finite))
        usable = self.begin_check(rows)()
        return rows if usable.all() else selected(rows, usable)

    def _find_index_checks(self) -> list[RowCheck]:
        """Empty, if the model indexes nothing by a row."""
        parameters = self._observed_parameters
        return [index_check(self, parameters)] if indexes(parameters, self.example_row) else []

    def _observed_parameters(self, rows: Arrays | None = None) -> list:
        """The parameters of the observed sites' distributions, at one theta. ``rows``: default: all that are part of a
        whole program."""
        theta = jnp.zeros(self.layout.size + self.local.size, self.dtype)
        records = self._records(self._unravel(theta), {**(rows or {}), **self.shared})
        return [numbers_of(records[site].fn) for site in self._row_sites]

    # ------------------------------------------------------------------ which arrays matter, and for what
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
            return {"all": ([base_distribution(records[name].fn)[0] for name in names], values)}

        return depends_on(predictions, self.example_row)["all"]

    @property
    def of_rows(self) -> frozenset[str]:
        """Deterministic sites with a value for each row, or inside a plate over the rows."""
        inside = {name for name, plates in self.plates.items() if self.row_plates.intersection(plates)}
        return self.deterministic.of_rows | (inside & (self.deterministic.of_latents | self.deterministic.of_data))

    def _find_deterministic(self) -> DeterministicSites:
        names = self._deterministic_names
        if not names:
            return DeterministicSites()
        if self.whole:
            return DeterministicSites(of_latents=frozenset(names))
        of_rows = [name for name in names if self._row_axes[name] is not None]
        others = [name for name in names if name not in of_rows]
        theta = jax.device_put(np.zeros(self.layout.size, self.dtype))

        def values(rows, theta):
            of_sites = deterministic_sites(self._run(rows, self.layout.unravel(theta))[0])
            return {name: of_sites[name] for name in others}

        of_data = data_dependence(values, self.example_row, self.example_rows, theta) if others else {}
        return DeterministicSites(frozenset(others).difference(of_data), frozenset(of_data), frozenset(of_rows))

    def _rows_to_keep(self, all_rows: Rows | None) -> Rows | None:
        """All rows, if deterministic sites read them and they are at hand."""
        return self.usable(all_rows) if self.deterministic.of_data else None

    def constrain(self, theta: Array) -> dict[str, Array]:
        """Constrained latents and the deterministic sites that are functions of them. theta: (P,)."""
        trace, runner = self._run(self.example_row, self.layout.unravel(theta))
        sites = sample_sites(trace, runner) | self._data_records(theta, self.prior_inputs)
        values = {name: sites[name].value for name in self.layout.site_names}
        return values | {n: v for n, v in deterministic_sites(trace).items() if n in self.deterministic.of_latents}

    def deterministic_of_data(self, theta: Array, rows: Arrays) -> dict[str, Array]:
        """Deterministic sites that read the data, given all rows. theta: (P,)."""
        trace, _ = self._run(rows, self.layout.unravel(theta))
        return {n: v for n, v in deterministic_sites(trace).items() if n in self.deterministic.of_data}

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """Which model this is, by its own example rows."""
        return model_identity(self)


def _read_again(
    model: Callable,
    rows: Rows,
    model_kwargs: Keywords,
    options: dict[str, Any],
    data_rows: Rows | None,
    reason: str | None,
) -> Program:
    """The program that :meth:`Program.__reduce__` describes."""
    program = Program(model, rows, model_kwargs, **options)
    program.data_rows, program.reason = data_rows, reason
    return program


def check_picklable(what: str, value: object) -> None:
    """:raises PicklingError: saying what to do with a posterior that holds what cannot be pickled."""
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:  # what pickle raises differs among versions
        raise pickle.PicklingError(
            f"{what} cannot be pickled ({error}). Write the posterior to a file, posterior.save(path), and read it "
            "where the model is known, Posterior.load(path, model); or define the model at the top level of a module."
        ) from error
