"""The prior of a bound model: its terms, Gaussian approximations, draws and densities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ...core.compilation import jit_once
from ...core.gaussians import FullGaussian
from ...core.jaxprs.given_bits import of_given_bits
from ...core.jaxprs.interpret import partial_evaluation
from ...core.updates.state import State
from ..data.arguments import CONSTANTS, PARAMS
from ..data.rows import Arrays, Rows, num_rows
from ..handlers.data_prior import DataPrior, PriorConstants, data_dependence
from ..handlers.tracing import REACH, SiteRecord, elements, site_transform
from ..layout import Layout
from ..terms.site_terms import site_terms
from ..terms.terms import Terms
from .bound_model import BoundModel, ImproperPrior
from .prior import Prior, normal_site, split_prior
from .prior_start import (
    NUM_DRAWS,
    CoupledPrior,
    PriorMarginals,
    coupled_prior,
    gaussian_parts,
    initial_state,
    is_flat,
    marginals,
    moments_of_draws,
    state_at,
)
from .unread_entries import NAME, record_of_unread, unread_entries

MOST_CHECKED = 1000  # parameters of which the prior's whole precision matrix is checked


class BoundPrior(BoundModel):
    """A bound model with its prior.

    :ivar prior: its terms. :ivar data_prior: those of its sites that read the data; None if none do.
    :ivar constants: what all rows determine of that.
    :ivar mixed_sites: latent sites whose prior depends on states that are summed over; see :class:`BoundLikelihood`.
    :ivar mixed_priors: terms of these, with the states summed out, that no outcome enters.
    :ivar unread: by site, the indices of entries on which the log density does not depend.
    """

    data_prior: DataPrior | None = None
    constants: PriorConstants | None = None
    mixed_sites: frozenset[str] = frozenset()
    mixed_priors: tuple[Terms, ...] = ()
    unread: Mapping[str, np.ndarray] = MappingProxyType({})
    _arrays_read: Mapping[str, frozenset[str]] = MappingProxyType({})

    # ------------------------------------------------------------------ reading it
    def _find_prior_arrays(self, rows: Arrays) -> dict[str, frozenset[str]]:
        """The sites of the prior that read the data, with what they read; see :func:`data_dependence`."""
        if self.whole:  # the rows are part of the program
            return {}
        theta = jax.device_put(np.zeros(self.layout.size, self.dtype))
        several = self.several(rows)
        return data_dependence(self._prior_records_of, self.example_row, several, theta, self.params.values)

    def _prior_records_of(self, rows, theta, params) -> dict[str, SiteRecord]:
        records = self._records(self.layout.unravel(theta), {**rows, PARAMS: params})
        return {name: records[name] for name in (*self.layout.site_names, *self._prior_sites)}

    @property
    def prior_reads(self) -> str:
        """The first site of the prior that reads the data, and what it reads, for messages."""
        site, names = next(iter(self._arrays_read.items()))
        read = f"the data array {sorted(names)[0]!r}" if names else "the number of rows"
        return f"the prior of site {site!r} reads {read}"

    def _read_data_prior(
        self, usable: Rows | None, constants: PriorConstants | None = None
    ) -> tuple[DataPrior, PriorConstants]:
        """The prior of sites that read the data, and what all rows determine of it.

        :param usable: all rows that are fine, if they are at hand.
        :param constants: what they determine, from an earlier reading.
        :raises ValueError: if rows are needed and not at hand.
        """
        if constants is None and usable is None:
            raise ValueError(
                f"{self.prior_reads}, and not all rows are at hand: in a stream, or in a run that goes on "
                "from another. Compute what it needs beforehand, and pass it as a keyword argument of run()."
            )
        total = num_rows(usable or {}) if constants is None else constants.num_rows
        theta, params = jax.device_put(np.zeros(self.layout.size, self.dtype)), self.params.values
        form = {n: jax.ShapeDtypeStruct((total, *x.shape[1:]), x.dtype) for n, x in sorted(self.example_row.items())}

        def records(rows, theta, params):
            of_sites = self._prior_records_of(rows, theta, params)
            return {name: of_sites[name] for name in self._arrays_read}

        def draw(rows, rng_key, params):
            return self._draw(rng_key, {**rows, PARAMS: params})

        prior = DataPrior(
            partial_evaluation(records, form, theta, params),
            partial_evaluation(draw, form, jax.random.key(0), params),
        )
        return prior, constants or prior.constants(usable or {})

    def _read_prior(self, rows: Arrays, usable: Callable[[], Rows | None], constants: PriorConstants | None) -> None:
        """Set the prior and what depends on it. ``usable``: as :meth:`_read_data_prior` takes it, when it is needed."""
        self._arrays_read = self._find_prior_arrays(rows)
        if self._arrays_read:
            self.data_prior, self.constants = self._read_data_prior(None if constants else usable(), constants)
        if self.whole and not self.integrates_row_latents:
            records = lambda sites: self._records(sites, self.example_row)  # noqa: E731
            self.unread = unread_entries(records, self.layout, self.dtype)
        self.prior = self._find_prior()
        self._gaussian_parts = jit_once(partial(gaussian_parts, self.prior))

    def _find_prior(self) -> Prior:
        theta = jax.ShapeDtypeStruct((self.layout.size,), self.dtype)
        terms = [
            site_terms(self._site_runner(s), s, theta, self.prior_inputs, prefer_parameters=False)
            for s in self._own_prior_sites
        ]
        terms = [of_site for of_site in terms if of_site.num_elements]
        ends = np.cumsum([0, *self.layout.sizes.values()]).tolist()
        normal_sites = [
            normal_site(self._site_runner(name), name, start, stop, theta, self.prior_inputs)
            for name, start, stop in zip(self.layout.site_names, ends, ends[1:])
            if name not in self.mixed_sites
        ]
        return split_prior(
            [*terms, *self.mixed_priors], [site for site in normal_sites if site is not None], theta, self.prior_inputs
        )

    @property
    def _own_prior_sites(self) -> list[str]:
        """Sites of the prior each of which is a sum of terms by itself."""
        names = [name for name in (*self.layout.site_names, *self._prior_sites) if name not in self.mixed_sites]
        return [*names, *(NAME + name for name in self.unread)]

    def _site_runner(self, name: str) -> Callable[[Array, Arrays], SiteRecord]:
        """theta, and rows or what the prior's terms take -> a site's record."""
        return lambda theta, row: self._proper_record(name, self._unravel(theta), row)

    def _proper_record(self, name: str, sites: Mapping[str, Array], row: Arrays) -> SiteRecord:
        """:param sites: values of latent sites, in unconstrained space."""
        if name.startswith(NAME):
            of_site = name.removeprefix(NAME)
            return record_of_unread(of_site, self.unread[of_site], sites[of_site])
        if name in self._arrays_read:
            return self._proper(self._data_records(self.layout.ravel(sites), row)[name])
        return self._proper(self._record(name, sites, row))

    def site_given(self, site: str, given: Mapping[str, Array]) -> tuple[Callable, Layout, dict[str, Any]]:
        """The record of a site as a function of the other latent sites, as :func:`site_terms` takes it.

        :param given: values of some latent sites, in unconstrained space.
        :return: theta and an example of what is returned last -> the record; the layout of theta, with the variables of
            one row; an example of rows, or of what the prior's terms take.
        """
        everything = self.layout.shapes | (self.local.shapes if site in self._row_sites else {})
        others = Layout({name: shape for name, shape in everything.items() if name not in given})
        example = self.example_inputs if site in self._row_sites else self.prior_inputs

        def run_site(theta: Array, row: Arrays) -> SiteRecord:
            return self._proper_record(site, dict(given) | others.unravel(theta), row)

        return run_site, others, example

    # ------------------------------------------------------------------ Gaussian approximations
    @property
    def prior_inputs(self) -> dict[str, Any]:
        """The prior terms' inputs: the ``numpyro.param`` sites, and the arrays that the data determine."""
        return self.shared if self.constants is None else self.shared | {CONSTANTS: self.constants.arrays[0]}

    @property
    def _is_gaussian(self) -> bool:
        """Whether the prior is Gaussian: for the joint solves that models with ``numpyro.param`` sites are, up to a
        constant, which is one of the terms that such a solve takes."""
        return all(self.params.layout.size and not terms.num_predictors for terms in self.prior.terms)

    @functools.cached_property
    def _is_flat_somewhere(self) -> bool:
        """Whether all of the prior is Gaussian, and says nothing in some direction."""
        return self._is_gaussian and is_flat(self._gaussian_parts(self.prior_inputs)[0].precision, self.prior)

    def check_prior(self) -> None:
        """:raises ImproperPrior: for one that only data can make proper."""
        if not self.whole and self.layout.size <= MOST_CHECKED and self._is_flat_somewhere:
            raise ImproperPrior("in some direction the latent sites have no prior, and no recursion can start there.")

    @functools.cached_property
    def _moments_of_draws(self) -> FullGaussian | None:
        """The moments of the Gaussian that approximates the prior; None if the prior is Gaussian itself."""
        if self._is_gaussian and not (self.whole and self._is_flat_somewhere):
            return None
        draws = self._draws_of_prior(NUM_DRAWS, NUM_DRAWS)
        return moments_of_draws(self.prior, draws, self._is_real)

    @property
    def _is_real(self) -> np.ndarray:
        """Whether the site of each entry of theta has no constraint, (P,)."""
        return np.concatenate([np.full(size, self.sites[name].is_real) for name, size in self.layout.sizes.items()])

    @functools.cached_property
    def initial_state(self) -> State:
        """The prior, or a Gaussian fitted to it, as the state before the first row."""
        parts = self._gaussian_parts(self.prior_inputs)
        return initial_state(self.prior, self._moments_of_draws, parts)

    def initial_state_at(self, params: Array | np.ndarray) -> State:
        """:attr:`initial_state` as a differentiable function of the ``numpyro.param`` sites (K,), in unconstrained
        space."""
        return state_at(self.prior, self._moments_of_draws, self.prior_inputs | {PARAMS: params})

    def _draws_of_prior(self, count: int, batch: int, indices: np.ndarray | None = None) -> Array:
        """Entries of draws from the prior, (count, P), made so many at a time. ``indices``: of the entries, all by
        default."""
        key = jax.eval_shape(lambda: jax.random.key(0))
        draw = of_given_bits(self._draw_prior, key, self._draw_constants)

        def draws(words: Array, constants: tuple[Array, ...] | None) -> Array:
            def drawn(each: tuple[Array, Array]) -> Array:
                theta = draw.function(*each, constants)
                return theta if indices is None else theta[indices]

            each = words, jax.random.split(jax.random.key(0), count)
            return jax.vmap(drawn)(each) if batch >= count else lax.map(drawn, each, batch_size=batch)

        return jit_once(draws)(draw.words(count), self._draw_constants)

    @functools.cached_property
    def marginals(self) -> PriorMarginals:
        """The entries of theta under the prior, each for itself."""
        return marginals(self.prior, self._draws_of_prior, self.prior_inputs, self._is_real)

    @functools.cached_property
    def coupled_prior(self) -> CoupledPrior | None:
        """See :func:`~.prior_start.coupled_prior`."""
        return coupled_prior(self.prior, self.marginals, self.prior_inputs)

    # ------------------------------------------------------------------ draws and densities
    def prior_records(self, unconstrained: Mapping[str, Array]) -> dict[str, SiteRecord]:
        """Records of latent sites, and of observed ones that no row enters. Sites not given are drawn, or zero."""
        records = self._records(unconstrained, self.example_row)
        zeros = {name: jnp.zeros(shape, self.dtype) for name, shape in self.layout.shapes.items()}
        return records | self._data_records(self.layout.ravel(zeros | dict(unconstrained)), self.prior_inputs)

    def _data_records(self, theta: Array, inputs: Mapping[str, Any]) -> dict[str, SiteRecord]:
        """Records of the sites of the prior that read the data. ``inputs``: as :attr:`prior_inputs`."""
        if self.data_prior is None:
            return {}
        return self.data_prior.records.finish(inputs[CONSTANTS], theta, inputs.get(PARAMS, self.params.values))

    def _draw_prior(self, rng_key: Array, constants: tuple[Array, ...] | None) -> Array:
        """theta (P,) from the prior. ``constants``: what the data determine of it, if it reads them."""
        if self.data_prior is None:
            return self._draw(rng_key, self.example_row)
        return self.data_prior.draw.finish(constants, rng_key, self.params.values)

    @property
    def _draw_constants(self) -> tuple[Array, ...] | None:
        return None if self.constants is None else self.constants.arrays[1]

    def _draw(self, rng_key: Array, rows: Arrays) -> Array:
        wide = {}
        for name in sorted(self._improper):
            rng_key, key = jax.random.split(rng_key)
            scale = REACH if self.improper_prior_scale is None else self.improper_prior_scale
            wide[name] = scale * jax.random.normal(key, self.layout.shapes[name], self.dtype)
        records = self._records(wide, rows, jax.random.key_data(rng_key))
        return self.layout.ravel(
            {n: site_transform(records[n].fn).inv(records[n].value) for n in self.layout.site_names}
        )

    def points_of_prior(self, count: int, scale: float = 1.0) -> np.ndarray:
        """The mean of :attr:`initial_state` and ``count`` draws around it, (1 + count, P), to try things at.

        :param scale: of the draws, in standard deviations.
        """
        state = self.initial_state
        draws = np.random.default_rng(0).normal(scale=scale, size=(count, self.layout.size))
        around = np.concatenate([np.zeros((1, self.layout.size)), draws @ np.asarray(state.root).T])
        return np.asarray(state.mean + around, self.dtype)

    def log_prior(self, theta: Array) -> Array:
        """log p(theta) in unconstrained space, prior-level factors included. theta: (P,). Of sites that outcomes share
        states with, the prior is part of the likelihood."""
        return sum(self.log_priors(theta).values(), jnp.zeros((), self.dtype))

    def log_priors(self, theta: Array) -> dict[str, Array]:
        """The terms of :meth:`log_prior` by site."""
        sites = self.layout.unravel(theta)
        records = {name: self._proper(record) for name, record in self.prior_records(sites).items()}
        records |= {NAME + name: record_of_unread(name, at, sites[name]) for name, at in self.unread.items()}
        own = {name: jnp.sum(elements(records[name])) for name in self._own_prior_sites}
        return own | {terms.site: jnp.sum(terms.log_probs(theta, self.prior_inputs)) for terms in self.mixed_priors}

    def unconstrain(self, sites: Mapping[str, Array]) -> Array:
        """theta (P,) of constrained latents."""
        values: dict[str, Array] = {}
        for name in self.layout.site_names:  # supports may depend on the sites before
            fn = self.prior_records(values)[name].fn
            values[name] = site_transform(fn).inv(jnp.asarray(sites[name]))
        return self.layout.ravel(values)
