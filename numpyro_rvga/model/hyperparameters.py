"""Which latent sites to integrate out, so that the others are a latent Gaussian model given these."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ..core.compilation import at_once
from ..core.expectations.closed_forms import Gaussian
from .bound.prior import depends_on_entries
from .data.rows import Arrays
from .program import Program
from .terms.site_terms import site_terms
from .terms.terms import Terms, constants, merged

NUM_PROBES = 16  # points at which a log density's Hessian is evaluated
MOST_ADDED = 6  # entries of a site that is real and would be integrated out nevertheless
MOST_SITES = 2  # of such sites together


class Choice(NamedTuple):
    """Sites to integrate out.

    :ivar sites: none, if the model is a latent Gaussian model as it is, or no choice makes it one.
    :ivar reason: why no site is chosen; empty if some are.
    """

    sites: tuple[str, ...]
    reason: str = ""


def choose_sites(program: Program, conditional: Callable[[tuple[str, ...]], Program]) -> Choice:
    """The smallest set of sites given which every term of the log joint density depends on the others by affine
    predictors, and is Gaussian, log-concave, or of one predictor.

    Sites whose support is not the whole real line are taken where another term depends on them; then real
    sites, where such terms are left: few, and small ones.

    :param conditional: sites -> the model given these, as ``numpyro.param`` sites; for terms that variables of single
        rows are integrated out of.
    """

    def terms_given(site: str, given: Sequence[str]) -> tuple[Terms, dict[str, Any]]:
        if program.row_latents is None:
            return _terms_given(program, site, given)
        return next((terms, rows) for terms, rows in _all_terms(conditional(tuple(given))) if terms.site == site)

    def is_simple_given(site: str, given: Sequence[str]) -> bool:
        """Whether a site's terms are simple once some latent sites stand still, at any place."""
        return len(given) == len(program.layout.site_names) or _is_simple(program, *terms_given(site, given))

    sizes = program.layout.sizes
    constrained = [name for name in program.layout.site_names if name not in program.real_sites]
    coupled = {}
    for terms, rows in _all_terms(program):
        if not _is_simple(program, terms, rows):
            coupled |= dict.fromkeys(terms.sites, _sites_seen(program, terms, rows))
    chosen = [name for name in constrained if any(name in seen for seen in coupled.values())]
    left = {site: seen for site, seen in coupled.items() if not is_simple_given(site, chosen)}
    if left:
        real = sorted({name for seen in left.values() for name in seen} & program.real_sites)
        small = sorted((name for name in real if sizes[name] <= MOST_ADDED), key=lambda name: sizes[name])
        added = next(
            (
                names
                for count in range(1, MOST_SITES + 1)
                for names in itertools.combinations(small, count)
                if all(is_simple_given(site, [*chosen, *names]) for site in left)
            ),
            None,
        )
        if added is None:
            return Choice((), f"the terms of site {next(iter(left))!r} see no few sites less by affine predictors")
        chosen += added
    chosen = _without_needless({name: sizes[name] for name in chosen}, coupled, terms_given)
    if not chosen:
        return Choice((), "the model is a latent Gaussian model as it is")
    if len(chosen) == len(program.layout.site_names):
        return Choice((), "no site would be left that is Gaussian given the others")
    return Choice(tuple(name for name in program.layout.site_names if name in chosen))


def _without_needless(sizes: dict[str, int], coupled: dict[str, frozenset[str]], terms_given: Callable) -> list[str]:
    """Without the sites that all terms do without, the largest first.

    :param sizes: of the sites, by name.
    """
    chosen = list(sizes)
    for name in sorted(chosen, key=lambda name: -sizes[name]):
        others = [other for other in chosen if other != name]
        seeing = [site for site, seen in coupled.items() if name in seen]
        if others and all(_is_of_one_predictor(terms_given(site, others)[0]) for site in seeing):
            chosen = others
    return chosen


def _all_terms(program: Program) -> Iterator[tuple[Terms, dict[str, Any]]]:
    """Those that are not Gaussian, with what they take."""
    rows = program.inputs(program.example_rows) | program.shared_elsewhere
    yield from ((terms, rows) for terms in program.terms)
    yield from ((terms, program.prior_inputs | program.shared_elsewhere) for terms in program.prior.terms)


def _is_of_one_predictor(terms: Terms) -> bool:
    """Whether terms see the latent sites by one affine predictor, or are Gaussian: in any row."""
    return terms.is_affine and (terms.num_predictors <= 1 or terms.closed_form is Gaussian)


def _is_simple(program: Program, terms: Terms, rows: Arrays) -> bool:
    if _is_of_one_predictor(terms):
        return True
    return terms.is_affine and _is_concave(terms, program.dtype, rows)


def _is_concave(terms: Terms, dtype: DTypeLike, rows: Arrays) -> bool:
    """Whether the log density's Hessian is finite and negative semidefinite at some probes."""
    probes = jnp.asarray(np.random.default_rng(0).normal(size=(NUM_PROBES, terms.num_predictors)), dtype)

    def hessians():
        values = merged(constants(terms, rows))
        values = jax.tree.map(lambda x: x[np.arange(NUM_PROBES) % len(x)], values)
        return jax.vmap(jax.hessian(terms.density))(probes, values)

    curvatures = np.asarray(at_once(hessians), np.float64)
    if not np.isfinite(curvatures).all():
        return False
    values = np.linalg.eigvalsh(curvatures)
    tolerance = 100 * float(jnp.finfo(dtype).eps) * np.abs(values).max(axis=1)
    return bool(np.all(values.max(axis=1) <= tolerance))


def _sites_seen(program: Program, terms: Terms, rows: Arrays) -> frozenset[str]:
    """The latent sites that a term's predictors depend on."""
    by_site = program.layout.unravel(depends_on_entries([terms], program.layout.size, program.dtype, rows))
    return frozenset(name for name, depends in by_site.items() if np.any(depends))


def _terms_given(program: Program, site: str, given: Sequence[str]) -> tuple[Terms, dict[str, Any]]:
    """A site's terms as functions of the other latent sites, and what they take."""
    rng = np.random.default_rng(1)
    values = {name: jnp.asarray(rng.normal(size=program.layout.shapes[name]), program.dtype) for name in given}
    run_site, layout, row = program.site_given(site, values)
    theta = jax.ShapeDtypeStruct((layout.size,), program.dtype)
    return site_terms(run_site, site, theta, row, prefer_parameters=False), row
