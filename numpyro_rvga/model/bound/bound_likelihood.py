"""The likelihood of a bound model: its terms, what is integrated out of them, and densities."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax
from jax.scipy.special import logsumexp

from ...core.compilation import at_once
from ...core.expectations.by_nodes import normal_rule
from ...core.expectations.closed_forms import Gaussian, Logistic
from ...core.gaussians import Family
from ...core.jaxprs.primitives import equations
from ..data.arguments import ROW
from ..data.rows import Arrays, common_length, linspace_indices, num_rows, selected
from ..handlers.tracing import SiteRecord, elements, sample_sites
from ..terms.local import Component, components_of
from ..terms.local_sites import RowFacts, most_states, states_at
from ..terms.local_terms import Draw, local_terms
from ..terms.reads import Reader
from ..terms.recognition import in_tilted_form
from ..terms.site_terms import MAX_PREDICTORS, of_theta, site_terms
from ..terms.sparsity import Sparsity, are_selections, find_sparsity
from ..terms.sums_of_sites import sums_of_sites
from ..terms.terms import Terms, by_piece, linearize
from . import validation
from .bound_prior import BoundPrior
from .row_checks import RowCheck, states_check

EXAMPLE_ROWS = 256  # by which it is determined which predictors depend on theta
MOST_PARAMETERS_DRAWN = 100  # of rows without structure, as networks are: more take minutes


class BoundLikelihood(BoundPrior):
    """A bound model with its prior and the terms of its rows.

    :ivar terms: of each observed site, and of what is integrated out of rows.
    :ivar row_facts: facts of latent variables of single rows; None if nothing is integrated out.
    :ivar selections: sites each of whose terms reads one entry of theta.
    """

    row_facts: RowFacts | None = None
    _readers: tuple[Reader, Reader]  # of the terms of rows and of the prior, which copies of the program share

    # ------------------------------------------------------------------ reading it
    def _read_likelihood(self, rows: Arrays) -> list[RowCheck]:
        """Set the terms, and which priors they are part of. What is returned checks that later rows are like these."""
        self._components, checks = self._find_components(rows), []
        integrated = self._integrated_terms(rows)
        self.mixed_sites = frozenset(self._tied.intersection(self.layout.site_names))
        all_terms = [terms for terms, _ in integrated if terms is not None]
        self.mixed_priors = tuple(terms for terms in all_terms if terms.site not in self._integrated)
        self.terms = self._all_terms([terms for terms in all_terms if terms.site in self._integrated], rows)
        self.row_parts = tuple(zip(self._components, [draw for _, draw in integrated]))
        if self.integrates_row_latents:
            states = {name: np.asarray(values) for name, values in self.row_latents.states.items()}
            self.row_facts = RowFacts(states)
            if self.whole:
                self._check_supports()
            else:
                checks += [states_check(self, name, self._bounds_of_states) for name in states]
        validation.check_local_terms(self)
        self.selections = self._find_selections()
        return checks

    def _all_terms(self, integrated: list[Terms], rows: Arrays) -> tuple[Terms, ...]:
        """The terms of row sites. Those of a whole program are cut into as many equal pieces as divide all of them.

        :param integrated: of sites that latent variables are integrated out of. :param rows: all that are at hand."""
        theta = jax.ShapeDtypeStruct((self.layout.size + self.local.size,), self.dtype)
        row, by_draws, prefer = self.example_inputs, self._takes_draws, self.options.prefer_parameters
        every = None if self.whole else {name: rows[name] for name in self.example_row}
        sites = [name for name in self._row_sites if name not in self._tied]
        all_terms = []
        if self.whole and not prefer:
            all_terms = sums_of_sites(self.records, sites, theta, row, by_draws=by_draws)
            sites = [name for name in sites if not any(name in terms.summed for terms in all_terms)]
        for site in sites:
            run_site = self._site_runner(site)
            terms = site_terms(run_site, site, theta, row, prefer_parameters=prefer, by_draws=by_draws, rows=every)
            if not terms.by_draws:
                terms = in_tilted_form(terms, self.dtype, row)._replace(num_local=self.local.size)
            all_terms.append(terms)
        all_terms += integrated
        all_terms = [terms for terms in all_terms if terms.num_elements]
        if not self.whole:
            return tuple(all_terms)
        self._num_pieces = math.gcd(*[terms.num_elements for terms in all_terms if not terms.by_draws]) or 1
        return tuple(by_piece(terms, self._num_pieces) for terms in all_terms)

    def _find_components(self, rows: Arrays) -> tuple[Component, ...]:
        if not self.integrates_row_latents:
            return ()
        row, size = {**self.example_row, **self.shared_elsewhere}, self.layout.size
        # A latent site's prior may depend on states of all data too: given theta, it is observed as any outcome is.
        latents = [name for name in self.layout.site_names if name not in self._improper] if self.whole else []
        observed, some = (*self._row_sites, *latents), self._some_of(rows)
        return components_of(self._row_records, self.row_latents, size, self.dtype, row, observed, some)

    def _some_of(self, rows: Arrays) -> dict[str, Any] | None:
        """A few of the rows; None for a whole program, which has all of them."""
        return None if self.whole else selected(dict(rows), linspace_indices(num_rows(rows), EXAMPLE_ROWS))

    def _integrated_terms(self, rows: Arrays) -> list[tuple[Terms | None, Draw]]:
        """The terms of each component, and draws of its variables."""
        if not self._components:
            return []
        theta = jax.ShapeDtypeStruct((self.layout.size,), self.dtype)
        shapes = {**self.layout.shapes, **self.row_latents.continuous.shapes}
        sites = {name: jax.ShapeDtypeStruct(shape, self.dtype) for name, shape in shapes.items()}
        row, some = self.example_inputs, {**(self._some_of(rows) or {}), **self.shared}
        result = []
        for component in self._components:
            terms, draw = local_terms(self._row_records, self.row_latents, component, theta, sites, row, some)
            if terms is not None and self._takes_draws and terms.num_predictors > MAX_PREDICTORS:
                terms = of_theta(terms, self.layout.size)
            result.append((terms, draw))
        return result

    @property
    def _takes_draws(self) -> bool:
        """Whether expectations of what has no structure are taken over draws of theta."""
        few = self.whole or self.layout.size <= MOST_PARAMETERS_DRAWN
        return self.options.by_draws and not self.local.size and few

    def _row_records(
        self, theta: Array | Mapping[str, Array], row: Arrays, states: Mapping[str, Array]
    ) -> dict[str, SiteRecord]:
        """The records of a run on one row. theta: (P + K,), with the row's own variables, or the sites' values."""
        size = self.layout.size
        if isinstance(theta, Mapping):
            sites = dict(theta)
        else:
            sites = self.layout.unravel(theta[:size]) | self.row_latents.continuous.unravel(theta[size:])
        return sample_sites(*self._run(row, sites, states=states))

    def _check_supports(self) -> None:
        """:raises NotImplementedError: naming a latent site of a whole program whose support depends on states that are
        summed over."""
        states, shapes = self.row_latents.states, self.row_latents.shapes
        theta = jnp.asarray(np.random.default_rng(0).normal(size=self.layout.size), self.dtype)

        def with_states(place: Array) -> dict[str, Array]:
            """The latent sites' values with one state of each discrete site."""
            chosen = {name: jnp.broadcast_to(one, shapes[name]) for name, one in states_at(states, place).items()}
            records = self._row_records(theta, self.shared, chosen)
            return {name: records[name].value for name in self.layout.site_names}

        by_state = at_once(lambda: lax.map(with_states, jnp.arange(most_states(states))))
        for name, values in by_state.items():
            if not np.array_equal(values, np.broadcast_to(values[0], values.shape), equal_nan=True):
                raise NotImplementedError(
                    f"site {name!r}: its support depends on discrete latent sites, over whose states the density of "
                    "one value is summed. Sample it on a support of its own, such as (0, 1), and scale it: "
                    f"numpyro.deterministic({name!r}, high[state] * share)."
                )

    def row_latents_at(
        self,
        rng_key: Array,
        theta: Array,
        row: Arrays,
        given: Mapping[str, Array],
        states: Mapping[str, Array],
    ) -> dict[str, Array]:
        """Values of the latent sites of one row.

        :param given: unconstrained values of some, and ``states`` of discrete ones; others are drawn.
        """
        sites = self.layout.unravel(theta) | dict(given)
        records = sample_sites(*self._run(row, sites, rng_key, states=states))
        return {name: records[name].value for name in self.row_latents.site_names}

    @functools.cached_property
    def row_latent_axes(self) -> dict[str, int]:
        """The axis of a latent site of single rows along which rows lie."""
        several = self._describe(self.example_rows)[0]
        shapes = {name: (self.sites[name].value_shape, several[name].value_shape) for name in self.local_names}
        return {name: next(i for i, n in enumerate(one) if n != two[i]) for name, (one, two) in shapes.items()}

    def _find_selections(self) -> frozenset[str]:
        """Sites each of whose terms depends on one entry of theta."""
        if not self.whole:
            return frozenset()
        rows = {**self.inputs(self.example_rows), **self.shared_elsewhere}
        size, dtype = self.layout.size, self.dtype
        answers = are_selections(self.terms, size, dtype, rows)
        return frozenset(terms.site for terms, is_selection in zip(self.terms, answers) if is_selection)

    # ------------------------------------------------------------------ densities
    def inputs(self, rows: Arrays) -> dict[str, Any]:
        """The terms' inputs for these rows.

        :raises ValueError: for rows other than the program's own, if the model always runs on all of these.
        """
        if not self.whole or ROW in rows:
            return dict(rows)
        if not self.holds(rows):
            raise ValueError(
                "the rows of this posterior are one joint solve: give the rows that it was fitted to, all of them, in "
                "their order. (Other rows can be predicted with method='monte_carlo'.)"
            )
        return {ROW: np.arange(self._num_pieces, dtype=np.int32)}

    def count_rows(self, rows: Arrays) -> int:
        """How many rows there are. Where arrays of a whole program share no length: its number of terms."""
        length = common_length(rows)
        if length is not None:
            return length
        return sum(max(terms.num_elements * self._num_pieces, len(terms.sites)) for terms in self.terms)

    def log_likelihood(self, theta: Array, rows: Arrays) -> dict[str, Array]:
        """Log-likelihood of each row by observed site, (n, *elements); auxiliary factors under their own names.

        Variables of the row's own are integrated out; what they enter is then summed over its elements. Sites that
        they tie together have one log-likelihood, under the names of them all ("x+y").

        :param rows: as :meth:`inputs` gives them.
        """
        integrated = {terms.site: terms for terms in self.terms if terms.site in self._integrated}
        outside = [name for name in self._row_sites if name not in self._tied]
        if self.whole:
            arrays = {n: jnp.atleast_1d(x) for n, x in self._log_probs(theta, self.example_row, outside).items()}
            axes = {name: min(self.row_axis(name), array.ndim - 1) for name, array in arrays.items()}
            of_outside = {name: jnp.moveaxis(array, axes[name], 0) for name, array in arrays.items()}
            inputs = {**rows, **self.shared}
            return of_outside | {name: terms.log_probs(theta, inputs).ravel() for name, terms in integrated.items()}
        axes = self._row_axes

        def one(row):
            row = {k: v[None] for k, v in row.items()}
            integrals = {name: self._log_integral(terms, theta, row) for name, terms in integrated.items()}
            if not self.local.size:
                terms = self._log_probs(theta, row, outside)
                return integrals | {name: _drop_axis(x, axes[name]) for name, x in terms.items()}
            points, weights = normal_rule(self.local.size)

            def at(z):
                everything = jnp.concatenate([theta, z])
                return {name: jnp.sum(x) for name, x in self._log_probs(everything, row, outside).items()}

            densities = jax.vmap(at)(jnp.asarray(points, self.dtype))
            return {name: logsumexp(x, b=jnp.asarray(weights, self.dtype)) for name, x in densities.items()}

        return jax.vmap(one)({name: jnp.asarray(value) for name, value in rows.items()})

    def _log_integral(self, terms: Terms, theta: Array, row: Arrays) -> Array:
        """The log-likelihood of one row's terms: in the shape of the outcomes where each has a term, else their sum."""
        (values,) = terms.log_probs(theta, {**row, **self.shared})
        component = self._integrated[terms.site]
        if terms.site not in self._row_sites:
            return jnp.sum(values)
        shape = self.sites[terms.site].value_shape
        indices = component.outcomes[terms.site].ravel()
        if math.prod(shape) == len(values) and np.array_equal(indices, np.arange(len(values))):
            return _drop_axis(jnp.reshape(values, shape), self._row_axes[terms.site])
        return jnp.sum(values)

    @functools.cached_property
    def _integrated(self) -> dict[str, Component]:
        """The components that latent variables are integrated out of, by the names of their observed sites."""
        row_sites = set(self._row_sites)
        return {c.name: c for c in self._components if row_sites.intersection(c.outcomes)}

    @functools.cached_property
    def _tied(self) -> frozenset[str]:
        """Sites that depend on latent variables of the row's own: observed ones, and latent ones of all data."""
        return frozenset(name for component in self._components for name in component.outcomes)

    @property
    def likelihood_sites(self) -> tuple[str, ...]:
        """The names of :meth:`log_likelihood`'s results: observed sites that latent variables tie together are one."""
        outside = [name for name in self.observed_sites if name not in self._tied]
        return (*outside, *self._integrated)

    @property
    def factors_of_rows(self) -> tuple[str, ...]:
        """Factors with a value for each row, which are no penalty or prior."""
        factors = [name for name in self._row_sites if name not in (*self.observed_sites, *self._tied)]
        if not self.whole:
            return tuple(name for name in factors if self._row_axes[name] is not None)
        return tuple(name for name in factors if self.row_plates.intersection(self.plates.get(name, ())))

    def _log_probs(self, theta: Array, rows: Arrays, names: list[str]) -> dict[str, Array]:
        records = self.records(theta, rows) if names else {}
        with numpyro.validation_enabled(False):
            return {n: jnp.asarray(records[n].fn.log_prob(records[n].value)) * records[n].weight for n in names}

    def predictors(self, gaussian: Family, rows: Arrays, site: str) -> tuple[Array, Array]:
        """Mean (n, E, C) and covariance (n, E, C, C) of a site's predictors under a Gaussian.

        :param rows: as :meth:`inputs` gives them.
        """
        terms = next(t for t in self.terms if t.site == site)
        predictors, jacobian, local = linearize(
            terms, gaussian.mean, jax.tree.map(jnp.asarray, {**rows, **self.shared})
        )
        scale = jnp.concatenate([gaussian.predictor_root(jacobian), local], axis=-1)
        return predictors, jnp.einsum("necp,nedp->necd", scale, scale)

    def link(self, site: str) -> str | None:
        """``"logistic"`` if the site's predictor is the logit of a success probability."""
        return "logistic" if any(t.site == site and t.closed_form is Logistic for t in self.terms) else None

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
        """The equations of the traced log-likelihoods of rows at each theta."""
        theta = jax.ShapeDtypeStruct((num_thetas, self.layout.size), self.dtype)
        inputs = self.inputs(self.example_rows)
        rows = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in inputs.items()}
        return list(equations(jax.make_jaxpr(jax.vmap(self.log_likelihood, (0, None)))(theta, rows).jaxpr))

    def site_elements(
        self, theta: Array, rows: Arrays, latents: tuple[Mapping[str, Array], Mapping[str, Array]]
    ) -> dict[str, Array]:
        """The terms of every row site, flattened, with the model run on all the rows at once.

        :param latents: the rows' own: unconstrained values by site, and states by site.
        """
        unconstrained, states = latents
        given = self.layout.unravel(theta) | dict(unconstrained)
        records = sample_sites(*self._run(rows, given, states=states)) if states else self._records(given, rows)
        return {name: elements(records[name]) for name in (*self._row_sites, *self.row_latents.site_names)}

    def elements_of_each(
        self, theta: Array, rows: Arrays, latents: tuple[Mapping[str, Array], Mapping[str, Array]]
    ) -> dict[str, Array]:
        """The same with the model run on each row by itself, if it can be: (n, ...). ``latents``: likewise."""
        if self.whole:
            return self.site_elements(theta, rows, latents)
        singles = {name: array[:, None] for name, array in rows.items()}
        return jax.vmap(lambda row, own: self.site_elements(theta, row, own))(singles, latents)

    def find_sparsity(self, rows: Arrays) -> Sparsity | None:
        """The few entries of theta that each term depends on in any row; None if they are many, or theta is short.

        :param rows: as :meth:`inputs` gives them.
        """
        exact = all(t.closed_form is Gaussian or not t.num_predictors for t in self.prior.gaussian)
        of_rows, of_prior = self._readers
        is_masked = any(t.site in self.layout.shapes and not t.num_predictors for t in of_prior.all_terms)
        if self.prior.normal_sites or is_masked or not exact:
            return None
        elsewhere = self.shared_elsewhere
        return find_sparsity(self.layout, of_rows, of_prior, dict(rows) | elsewhere, self.prior_inputs | elsewhere)

    @property
    def is_conjugate(self) -> bool:
        """Whether all terms are Gaussian: then q is the posterior, and the bound the evidence."""
        return self.has_gaussian_rows and not self.prior.terms

    @property
    def has_gaussian_rows(self) -> bool:
        """Whether rows are linear and Gaussian: then summaries of them are exact."""
        return all(terms.is_affine and terms.closed_form is Gaussian for terms in self.terms)


def _drop_axis(array: Array, axis: int | None) -> Array:
    return array if axis is None else jnp.squeeze(array, axis)
