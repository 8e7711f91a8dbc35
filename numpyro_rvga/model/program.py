"""A NumPyro model bound to the form of its data: what every method asks of a model."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import distributions as dist

from ..core.closed_forms import Logistic
from ..core.recursion import State
from ..core.symbolic import depends_on
from . import validation
from .arguments import checked_rows, split_call
from .layout import Layout
from .prior import Prior, initial_state, split_prior
from .terms import Terms, linearise, site_terms
from .tracing import (
    SiteInfo,
    SiteRecord,
    deterministic_sites,
    elements,
    plates_of,
    run_model,
    sample_sites,
    site_info,
    site_transform,
)


class Program:
    """A model, its data's form and its keyword arguments, read once.

    :param model: a NumPyro model.
    :param rows: data arrays by argument name, checked (see :func:`checked_rows`).
    :param model_kwargs: passed to every call of the model unchanged.
    :param improper_prior_scale: standard deviation, in unconstrained space, of the normal that stands for improper
        priors; None refuses them.
    :param prefer_parameters: see :func:`site_terms`.
    :raises NotImplementedError: for discrete or local latents, and rows that are not conditionally independent.
    :raises ValueError: for models without data terms, improper priors, and values outside an observation's support.
    """

    def __init__(
        self,
        model: Callable,
        rows: Mapping[str, Array],
        model_kwargs: Mapping[str, Any],
        *,
        improper_prior_scale: float | None = None,
        prefer_parameters: bool = False,
    ):
        self.model, self.model_kwargs = model, dict(model_kwargs)
        self.improper_prior_scale = improper_prior_scale
        self.row_plates, observed = validation.find_row_plates(model, rows, self.model_kwargs)
        taken = np.arange(2) % len(next(iter(rows.values())))
        self.example_rows = {name: jnp.asarray(array[taken]) for name, array in rows.items()}
        self.example_row = {name: jnp.asarray(array[:1]) for name, array in rows.items()}
        self.dtype = jnp.result_type(float)
        self.sites, self.plates = validation.describe_one_row(self._describe, self.example_row, observed)
        validation.check_latents(self.sites, self._describe(self.example_rows)[0], self.row_plates)
        latents = {n: s.unconstrained_shape for n, s in self.sites.items() if not s.is_observed}
        self.layout = Layout(tuple(latents), latents)
        self._row_sites, self._prior_sites = self._classify()
        self.observed_sites = tuple(s for s in self._row_sites if not self.sites[s].is_auxiliary)
        validation.check_has_terms({name: self.sites[name] for name in self._row_sites})
        if not self._row_sites:
            raise ValueError(
                "the model has no observed site that depends on the data: give sample(..., obs=...) one of its arrays."
            )
        self._improper = frozenset(s for s in self.layout.site_names if self.sites[s].is_improper)
        if self._improper and improper_prior_scale is None:
            raise ValueError(
                f"site {sorted(self._improper)[0]!r} has an improper prior, from which no recursion can start. Give it "
                "a proper prior, or set improper_prior_scale: the scale of a normal, in unconstrained space, instead."
            )
        theta = jax.ShapeDtypeStruct((self.layout.size,), self.dtype)
        self.terms: tuple[Terms, ...] = tuple(
            site_terms(self._site_runner(s), s, theta, self.example_row, prefer_parameters=prefer_parameters)
            for s in self._row_sites
        )
        prior_sites = [*self.layout.site_names, *self._prior_sites]
        self.prior: Prior = split_prior(
            [site_terms(self._site_runner(s), s, theta, {}, prefer_parameters=False) for s in prior_sites], theta
        )

        self._support_checks = [validation.SupportCheck(self, site) for site in self.observed_sites]

    @classmethod
    def restore(
        cls,
        model: Callable,
        example_rows: Mapping[str, Array],
        model_kwargs: Mapping[str, Any],
        improper_prior_scale: float | None,
    ) -> Program:
        """A program from stored example rows, without data."""
        rows = {name: np.asarray(array) for name, array in example_rows.items()}
        return cls(model, rows, model_kwargs, improper_prior_scale=improper_prior_scale)

    # ------------------------------------------------------------------ data
    def rows(self, data: Mapping[str, Any] | tuple) -> dict[str, np.ndarray]:
        """The data as arrays by argument name, checked for names, lengths and finite values."""
        return checked_rows(self.model, data, 0, self.model_kwargs)

    @staticmethod
    def num_rows(rows: Mapping[str, Array]) -> int:
        return len(next(iter(rows.values())))

    def call_arguments(self, rows: Mapping[str, Array]) -> tuple[tuple, dict]:
        """(args, kwargs) of a call of the model on these rows."""
        return split_call(self.model, rows, self.model_kwargs)

    def check_rows(self, rows: Mapping[str, np.ndarray], first_row: int = 0) -> None:
        """:raises ValueError: naming site, array and row of an observed value outside its distribution's support."""
        for check in self._support_checks:
            check(rows, first_row)

    def check_independence(self, rows: Mapping[str, np.ndarray]) -> None:
        """:raises NotImplementedError: if the terms of a few rows change when the rows are taken one by one."""
        validation.check_independence(self, rows)

    # ------------------------------------------------------------------ latents
    @functools.cached_property
    def _initial_state(self) -> State:
        return initial_state(self.prior, self._draw_prior)

    def initial_state(self) -> State:
        """The prior, or a Gaussian fitted to it, as the state before the first row."""
        return self._initial_state

    def constrain(self, theta: Array) -> dict[str, Array]:
        """Constrained latents and global deterministic sites. theta: (P,)."""
        trace, runner = self._run(self.example_row, self.layout.unravel(theta))
        sites = sample_sites(trace, runner)
        values = {name: sites[name].value for name in self.layout.site_names}
        return values | {n: v for n, v in deterministic_sites(trace).items() if self._row_axes.get(n) is None}

    def constrain_latents(self, theta: Array) -> dict[str, Array]:
        """Constrained latents only. theta: (P,)."""
        sites = self.constrain(theta)
        return {name: sites[name] for name in self.layout.site_names}

    def unconstrain(self, sites: Mapping[str, Array]) -> Array:
        """theta (P,) of constrained latents."""
        values: dict[str, Array] = {}
        for name in self.layout.site_names:  # supports may depend on the sites before
            fn = self._records(values, self.example_row)[name].fn
            values[name] = site_transform(fn).inv(jnp.asarray(sites[name]))
        return self.layout.ravel(values)

    # ------------------------------------------------------------------ densities
    def log_prior(self, theta: Array) -> Array:
        """log p(theta) in unconstrained space, prior-level factors included. theta: (P,)."""
        records = self._records(self.layout.unravel(theta), self.example_row)
        names = [*self.layout.site_names, *self._prior_sites]
        return sum(jnp.sum(elements(self._proper(records[name]))) for name in names)

    def log_likelihood(self, theta: Array, rows: Mapping[str, Array], site: str | None = None) -> dict[str, Array]:
        """Log-likelihood of each row by observed site, (n, *elements); auxiliary factors under their own names."""
        names, axes = self._row_sites if site is None else (site,), self._row_axes

        def one(row):
            records = self._records(self.layout.unravel(theta), {k: v[None] for k, v in row.items()})
            return {
                name: _drop_axis(records[name].fn.log_prob(records[name].value) * records[name].weight, axes[name])
                for name in names
            }

        return jax.vmap(one)({name: jnp.asarray(value) for name, value in rows.items()})

    def predictors(self, mean: Array, root: Array, rows: Mapping[str, Array], site: str) -> tuple[Array, Array]:
        """Mean (n, E, C) and covariance (n, E, C, C) of a site's predictors under N(mean, root root^T)."""
        terms = next(t for t in self.terms if t.site == site)
        offset, design = linearise(terms, mean, {k: jnp.asarray(v) for k, v in rows.items()})
        spread = design @ root
        return offset, jnp.einsum("necp,nedp->necd", spread, spread)

    def link(self, site: str) -> str | None:
        """``"logistic"`` if the site's predictor is the logit of a success probability."""
        terms = next(t for t in self.terms if t.site == site)
        return "logistic" if terms.closed_form is Logistic else None

    # ------------------------------------------------------------------ inside
    def site_elements(self, theta: Array, rows: Mapping[str, Array]) -> dict[str, Array]:
        """The terms of every row site, flattened, with the model run on all the rows at once."""
        records = self._records(self.layout.unravel(theta), rows)
        return {name: elements(records[name]) for name in self._row_sites}

    def site_record(self, name: str, rows: Mapping[str, Array]) -> SiteRecord:
        return self._records({}, rows)[name]

    def _run(self, rows, unconstrained, rng_key=None):
        return run_model(
            self.model,
            rows,
            self.model_kwargs,
            row_plates=self.row_plates,
            unconstrained=unconstrained,
            rng_key=rng_key,
        )

    def _records(self, unconstrained, rows) -> dict[str, SiteRecord]:
        return sample_sites(*self._run(rows, unconstrained))

    def _site_runner(self, name):
        def run_site(theta, row):
            record = self._records(self.layout.unravel(theta), row or self.example_row)[name]
            return self._proper(record)

        return run_site

    def _proper(self, record: SiteRecord) -> SiteRecord:
        if record.name not in self._improper:
            return record
        z = record.unconstrained
        wide = dist.Normal(jnp.zeros(jnp.shape(z), self.dtype), self.improper_prior_scale)
        return record._replace(fn=wide, value=z, log_abs_det=None)

    def _draw_prior(self, rng_key):
        records = sample_sites(*self._run_prior(rng_key))
        return self.layout.ravel(
            {n: site_transform(records[n].fn).inv(records[n].value) for n in self.layout.site_names}
        )

    def _run_prior(self, rng_key):
        wide = {}
        for name in sorted(self._improper):
            rng_key, key = jax.random.split(rng_key)
            wide[name] = self.improper_prior_scale * jax.random.normal(key, self.layout.shapes[name], self.dtype)
        return self._run(self.example_row, wide, rng_key)

    def _describe(self, rows) -> tuple[dict[str, SiteInfo], dict[str, tuple[str, ...]]]:
        """Static facts of all sites on these rows, without running the model."""
        found: list = []

        def abstract(rows):
            trace, runner = self._run(rows, {})
            found.append({name: site_info(record) for name, record in sample_sites(trace, runner).items()})
            found.append(plates_of(trace))
            return 0

        jax.eval_shape(abstract, rows)
        return found[0], found[1]

    @functools.cached_property
    def _row_axes(self) -> dict[str, int | None]:
        """The axis along which an observed site's terms, or a deterministic site, grow with the rows; None if none."""
        one, two = (self._shapes(rows) for rows in (self.example_row, self.example_rows))
        return {name: next((i for i, n in enumerate(one[name]) if n != two[name][i]), None) for name in one}

    def _shapes(self, rows) -> dict[str, tuple[int, ...]]:
        def abstract(rows):
            trace, runner = self._run(rows, {})
            records = sample_sites(trace, runner)
            terms = {n: records[n].fn.log_prob(records[n].value) * records[n].weight for n in self._row_sites}
            return terms | {n: jnp.asarray(value) for n, value in deterministic_sites(trace).items()}

        return {name: found.shape for name, found in jax.eval_shape(abstract, rows).items()}

    def _classify(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Observed sites that are terms of rows, and those that are terms of the prior."""
        theta = jnp.zeros(self.layout.size, self.dtype)

        def observed_elements(row):
            records = self._records(self.layout.unravel(theta), row)
            return {n: elements(r) for n, r in records.items() if r.is_observed}

        depends = depends_on(observed_elements, self.example_row)
        observed = [n for n, s in self.sites.items() if s.is_observed]
        of_rows = [n for n in observed if depends[n] or self.row_plates & set(self.sites[n].plates)]
        return tuple(of_rows), tuple(n for n in observed if n not in of_rows)


def _drop_axis(array: Array, axis: int | None) -> Array:
    return array if axis is None else jnp.squeeze(array, axis)
