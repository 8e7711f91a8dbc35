"""Which latent sites to integrate out, so that the others are a latent Gaussian model given these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..core.compilation import jit_once
from ..core.expectations.closed_forms import Gaussian
from .bound.prior import depends_on_entries
from .program import Program
from .terms.site_terms import site_terms
from .terms.terms import Terms, split_rows

NUM_PROBES = 16  # points at which a log density's Hessian is evaluated
MOST_ADDED = 6  # entries of a site that is linear and would be integrated out nevertheless
MOST_SITES = 2  # of such sites together
MOST_PREDICTORS = 8  # of terms that are not log-concave: networks have more, and more than one mode


class Choice(NamedTuple):
    """Sites to integrate out.

    :ivar sites: none, if the model is a latent Gaussian model as it is, or no choice makes it one.
    :ivar reason: why no site is chosen; empty if some are.
    :ivar fewer: without long sites that need not be given for affine predictors: the terms may then not be log-concave.
        Empty, if there are none.
    """

    sites: tuple[str, ...]
    reason: str = ""
    fewer: tuple[str, ...] = ()


class SiteTerms(NamedTuple):
    """A site's terms.

    :ivar rows: what they take. :ivar size: P, of the theta that they are functions of.
    """

    terms: Terms
    rows: dict[str, Any]
    size: int


def choose_sites(program: Program, conditional: Callable[[tuple[str, ...]], Program]) -> Choice:
    """The smallest set of sites given which every term of the log joint density depends on the others by affine
    predictors, and is Gaussian, log-concave, or of one predictor.

    Sites with values that are not linear in unconstrained ones are taken where another term depends on them; then
    linear sites, where such terms are left: few, and small ones.

    :param conditional: sites -> the model given these, as ``numpyro.param`` sites; for terms that variables of single
        rows are integrated out of.
    """

    def terms_given(site: str, given: Sequence[str]) -> SiteTerms:
        if not program.integrates_row_latents:
            return _terms_given(program, site, given)
        return next(each for each in _all_terms(conditional(tuple(given))) if each.terms.site == site)

    def is_simple_given(site: str, given: Sequence[str]) -> bool:
        """Whether a site's terms are simple given some latent sites, at any value of these."""
        if len(given) == len(program.layout.site_names):
            return True
        of_site = terms_given(site, given)
        if _is_of_one_predictor(of_site.terms):
            return True
        if not of_site.terms.is_affine:
            return False
        if site not in whole:
            return _Curvature(of_site, program.dtype).is_negative()
        return whole[site].is_negative(program.layout.indices_of(given))

    sizes = program.layout.sizes
    constrained = [name for name in program.layout.site_names if name not in program.linear_sites]
    coupled, whole = {}, {}
    for each in _all_terms(program):
        if _is_of_one_predictor(each.terms):
            continue
        if each.terms.is_affine:
            curvature = _Curvature(each, program.dtype)
            if curvature.is_negative():
                continue
            if len(each.terms.sites) == 1:
                whole[each.terms.site] = curvature
        coupled |= dict.fromkeys(each.terms.sites, _sites_read(program, each))
    chosen = [name for name in constrained if any(name in sites_read for sites_read in coupled.values())]
    left = {site: sites_read for site, sites_read in coupled.items() if not is_simple_given(site, chosen)}
    if left:
        linear = sorted({name for sites_read in left.values() for name in sites_read} & program.linear_sites)
        small = sorted((name for name in linear if sizes[name] <= MOST_ADDED), key=lambda name: sizes[name])
        added = next(
            (
                names
                for count in range(1, MOST_SITES + 1)
                for names in itertools.combinations(small, count)
                if all(is_simple_given(site, [*chosen, *names]) for site in left)
            ),
            None,
        )
        if added is None and not (chosen and all(_is_affine_in_few(terms_given(site, chosen).terms) for site in left)):
            return Choice(
                (), f"the terms of site {next(iter(left))!r} are not log-concave in the others, whichever few are given"
            )
        chosen += added or ()
    chosen = _without_needless(chosen, sizes, coupled, terms_given, _is_of_one_predictor)
    if not chosen:
        return Choice((), "the model is a latent Gaussian model as it is")
    if len(chosen) == len(program.layout.site_names):
        return Choice((), "no site would be left that is Gaussian given the others")
    long = [name for name in chosen if sizes[name] > MOST_ADDED]
    fewer = _without_needless(chosen, {name: sizes[name] for name in long}, coupled, terms_given, _is_affine_in_few)
    in_order = [tuple(name for name in program.layout.site_names if name in names) for names in (chosen, fewer)]
    return Choice(in_order[0], fewer=in_order[1] if len(fewer) < len(chosen) else ())


def _without_needless(
    chosen: list[str],
    sizes: dict[str, int],
    coupled: dict[str, frozenset[str]],
    terms_given: Callable,
    suffices: Callable,
) -> list[str]:
    """The sites without those that no term needs as given, the largest first.

    :param sizes: of the sites that may be left out, by name. :param suffices: whether terms can do without.
    """
    for name in sorted([name for name in chosen if name in sizes], key=lambda name: -sizes[name]):
        others = [other for other in chosen if other != name]
        readers = [site for site, sites_read in coupled.items() if name in sites_read]
        if others and all(suffices(terms_given(site, others).terms) for site in readers):
            chosen = others
    return chosen


def _all_terms(program: Program) -> Iterator[SiteTerms]:
    """The terms of rows, and those of the prior that are not Gaussian."""
    rows = program.inputs(program.example_rows) | program.shared_elsewhere
    yield from (SiteTerms(terms, rows, program.layout.size) for terms in program.terms)
    prior_rows = program.prior_inputs | program.shared_elsewhere
    yield from (SiteTerms(terms, prior_rows, program.layout.size) for terms in program.prior.terms)


def _is_affine_in_few(terms: Terms) -> bool:
    """Whether terms see the latent sites by a few affine predictors."""
    return terms.is_affine and not terms.by_draws and terms.num_predictors <= MOST_PREDICTORS


def _is_of_one_predictor(terms: Terms) -> bool:
    """Whether terms see the latent sites by one affine predictor, or are Gaussian: in any row."""
    return terms.is_affine and (terms.num_predictors <= 1 or terms.closed_form is Gaussian)


class _Curvature:
    """Hessians of a site's log density at some probes of its affine predictors. They are compiled once, whatever is
    given."""

    def __init__(self, of_site: SiteTerms, dtype: DTypeLike):
        self._terms, self._dtype, self._size = of_site.terms, dtype, of_site.size + of_site.terms.num_local
        self._shared, self._own = split_rows(of_site.rows)
        self._all = jit_once(jax.vmap(self._at, (0, 0, 0, None, None)))

    def _at(self, probe: Array, number: Array, element: Array, theta: Array, is_free: Array) -> tuple[Array, Array]:
        """The Hessian (C, C) and the Jacobian (C, P) of one element's predictors, both zero but for free entries of
        theta. Predictors without any have their value at theta."""
        terms, own = self._terms, {name: jnp.asarray(array)[number][None] for name, array in self._own.items()}
        row = self._shared | own
        jacobian = jax.jacrev(lambda theta: terms.predictors(theta, row, element))(theta) * is_free
        depends = jnp.any(jacobian != 0, axis=1)
        predictors = jnp.where(depends, probe, terms.predictors(theta, row, element))
        hessian = jax.jacrev(jax.grad(terms.density))  # some functions, as of differential equations, have no other
        curvature = hessian(predictors, terms.constants(row, element))
        return jnp.where(depends[:, None] & depends, curvature, 0.0), jacobian

    def is_negative(self, given: Sequence[int] | np.ndarray = ()) -> bool:
        """Whether the Hessians are finite, and negative semidefinite along the changes of the predictors with theta: of
        predictors that depend on each other, as x and A x, not all changes are possible.

        :param given: entries of theta that do not change.
        """
        theta, is_free, fixed = np.zeros(self._size), np.ones(self._size), np.asarray(given, int)
        theta[fixed], is_free[fixed] = np.random.default_rng(1).normal(size=len(fixed)), 0.0
        num_rows = min((len(array) for array in self._own.values()), default=1)
        numbers = np.arange(NUM_PROBES) % (num_rows * self._terms.num_elements)
        row_numbers, elements = (np.asarray(x, np.int32) for x in np.divmod(numbers, self._terms.num_elements))
        probes = np.random.default_rng(0).normal(size=(NUM_PROBES, self._terms.num_predictors))
        probes, theta, is_free = (np.asarray(x, self._dtype) for x in (probes, theta, is_free))
        evaluated = jax.device_get(self._all(probes, row_numbers, elements, theta, is_free))
        hessians, jacobians = (np.asarray(x, np.float64) for x in evaluated)
        if not (np.isfinite(hessians).all() and np.isfinite(jacobians).all()):
            return False
        lengths = np.linalg.norm(jacobians, axis=2, keepdims=True)
        directions = np.linalg.svd(jacobians / np.where(lengths > 0, lengths, 1), full_matrices=False)
        scales = directions.S[:, None, :]
        along = directions.U * scales
        curvatures = np.linalg.eigvalsh(np.swapaxes(along, 1, 2) @ hessians @ along)
        sizes = np.abs(np.linalg.eigvalsh(hessians)).max(axis=1) * scales.max(axis=(1, 2)) ** 2
        return bool(np.all(curvatures.max(axis=1) <= 100 * float(jnp.finfo(self._dtype).eps) * sizes))


def _sites_read(program: Program, of_site: SiteTerms) -> frozenset[str]:
    """The latent sites that a term's predictors depend on."""
    depends = depends_on_entries([of_site.terms], of_site.size, program.dtype, of_site.rows)
    by_site = program.layout.unravel(depends)
    return frozenset(name for name, depends in by_site.items() if np.any(depends))


def _terms_given(program: Program, site: str, given: Sequence[str]) -> SiteTerms:
    """A site's terms as functions of the other latent sites."""
    rng = np.random.default_rng(1)
    values = {name: jnp.asarray(rng.normal(size=program.layout.shapes[name]), program.dtype) for name in given}
    run_site, layout, row = program.site_given(site, values)
    theta = jax.ShapeDtypeStruct((layout.size,), program.dtype)
    return SiteTerms(site_terms(run_site, site, theta, row, prefer_parameters=False), row, layout.size)
