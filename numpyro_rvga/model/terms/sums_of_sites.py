"""Sites of a whole program that are worth one term, or like terms, for all of them, as a loop in Python makes them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.compilation import abstractly
from ...core.jaxprs.primitives import work_of_outputs
from ...core.jaxprs.symbolic import Reading, factorize
from ..data.rows import Arrays
from ..handlers.tracing import SiteRecord, base_distribution, elements
from .distributions import patterns_of
from .site_terms import (
    DRAWS_PER_PARAMETER,
    ELEMENT,
    MAX_PREDICTORS,
    MIN_PREDICTORS,
    affine_terms,
    closed_form_terms,
    numbers_of_one,
    theta_terms,
)
from .terms import Terms

REPEATED_SITES = 2.0  # times what all compute together: sites that go on from each other; each is also compiled
FEWEST_SUMMED = 4  # sites of one term each
EXACT_PREDICTORS = 3  # rules for which are as exact as for fewer
NAMED_TWICE = 1  # a predictor of like sites, where the number of the site is in an index
TOTAL = "the sum of all"

RunAll = Callable[[Array, Arrays], dict[str, SiteRecord]]
Kinds = dict[tuple[type, int], list[str]]  # a distribution and a number of elements -> the sites that have these


def sums_of_sites(
    run_all: RunAll, sites: list[str], theta: jax.ShapeDtypeStruct, row: Arrays, *, by_draws: bool
) -> list[Terms]:
    """Terms of several sites each, whose names they have: their sum, or one term for each of them.

    :param run_all: (theta, row) -> the records of all sites. :param by_draws: see :func:`~.site_terms.site_terms`.
    """
    sums, left = [], sites
    if by_draws and (together := _ends_of_one_computation(run_all, sites, theta, row)):
        sums.append(_by_draws(run_all, together, theta))
        left = [name for name in sites if name not in together]
    kinds = _by_kind(run_all, left, theta, row)
    closed, left = _like_sites(run_all, left, kinds, theta, row)
    few = _sum_of_few_predictors(run_all, left, theta, row, by_draws=by_draws)
    if few is not None:
        sums, left = [*sums, few], [name for name in left if name not in few.summed]
    return [*sums, *closed, *_like_terms(run_all, _enough_of(kinds, left), theta, row)]


def _ends_of_one_computation(run_all: RunAll, sites: list[str], theta: jax.ShapeDtypeStruct, row: Arrays) -> list[str]:
    """The sites that share most of what they compute, if one by one they compute far more than together: those of a
    loop in Python, each of which goes on from the one before."""

    def of_sites(t, r):
        records = run_all(t, r)
        return [jnp.sum(elements(records[name])) for name in sites]

    jaxpr = jax.make_jaxpr(of_sites)(theta, row).jaxpr
    needed, own = work_of_outputs(jaxpr, range(len(sites)))
    shares = needed > 2 * own
    if not shares.any():
        return []
    last = int(np.argmax(np.where(shares, needed, 0)))
    together = work_of_outputs(jaxpr, [int(not x) for x in shares])[0][0]
    most = REPEATED_SITES * max(1.0, DRAWS_PER_PARAMETER * theta.shape[0]) * together
    if needed[shares].sum() <= most:
        return []
    split = factorize(lambda t, r, _: elements(run_all(t, r)[sites[last]])[0], theta, row, ELEMENT)
    of_last = numbers_of_one(split, theta, row) / needed[last]  # of what it needs, once split
    if min(split.num_predictors, theta.shape[0]) < MIN_PREDICTORS or of_last * needed[shares].sum() <= most:
        return []
    return [name for name, is_shared in zip(sites, shares) if is_shared]


def _sum_of_few_predictors(
    run_all: RunAll, sites: list[str], theta: jax.ShapeDtypeStruct, row: Arrays, *, by_draws: bool
) -> Terms | None:
    """One term for all sites of one term each, if it depends on no more predictors than one of them, or on few: it is
    compiled once, and computes once what they share.

    :param sites: none of one term that has a closed form.
    """
    if len(sites) < FEWEST_SUMMED:
        return None

    def singles(t, r):
        records = run_all(t, r)
        return [name for name in sites if elements(records[name]).shape == (1,)]

    summed = abstractly(singles, theta, row)
    if len(summed) < FEWEST_SUMMED:
        return None

    def values(t, r, _):
        records = run_all(t, r)
        of_sites = {name: elements(records[name])[0] for name in summed}
        return of_sites | {TOTAL: jnp.sum(jnp.stack(list(of_sites.values())))}

    reading = Reading(values, theta, row, ELEMENT)
    total = reading.split(TOTAL)
    if total.num_predictors > max(EXACT_PREDICTORS, *(reading.split(name).num_predictors for name in summed)):
        return None
    if total.num_predictors > MAX_PREDICTORS:
        return _by_draws(run_all, summed, theta) if by_draws else None
    return affine_terms(_range_of(summed), 1, total.at_most(theta.shape[0]))._replace(summed=tuple(summed))


def _like_sites(
    run_all: RunAll, sites: list[str], kinds: Kinds, theta: jax.ShapeDtypeStruct, row: Arrays
) -> tuple[list[Terms], list[str]]:
    """The terms in closed form of sites of one distribution, as if they were the elements of one site, which is
    compiled once. And the sites that have no closed form, each for itself either."""
    terms, left = [], sites
    for (kind, size), names in kinds.items():
        if not patterns_of(kind):
            continue

        def closed_form(names: list[str], kind: type = kind, size: int = size) -> Terms | None:
            def run_stacked(t, r):
                records = run_all(t, r)
                return _stacked([records[name] for name in names])

            return closed_form_terms(run_stacked, _range_of(names), theta, row, len(names) * size, kind)

        together = closed_form(names)
        if together is not None:
            terms.append(together._replace(summed=tuple(names)))
        if together is not None or closed_form(names[:1]) is not None:
            left = [name for name in left if name not in names]
    return terms, left


def _like_terms(run_all: RunAll, kinds: Kinds, theta: jax.ShapeDtypeStruct, row: Arrays) -> list[Terms]:
    """Of sites of one distribution without a closed form: their terms as those of one site, if each then has about as
    few predictors as by itself. Otherwise they are not computed alike."""
    found = []
    for (_, size), names in kinds.items():

        def values(t, r, e, names=names, size=size):
            records = run_all(t, r)
            each = [elements(records[name]) for name in names]
            return {TOTAL: jnp.ravel(jnp.stack(each))[e], names[0]: each[0][e % size]}

        reading = Reading(values, theta, row, ELEMENT)
        together = reading.split(TOTAL)
        most = reading.split(names[0]).num_predictors + NAMED_TWICE
        if together.num_predictors <= min(MAX_PREDICTORS, most):
            terms = affine_terms(_range_of(names), len(names) * size, together.at_most(theta.shape[0]))
            found.append(terms._replace(summed=tuple(names)))
    return found


def _by_kind(run_all: RunAll, sites: list[str], theta: jax.ShapeDtypeStruct, row: Arrays) -> Kinds:
    """Observed sites of independent elements by distribution and number of elements, where there are enough."""
    if len(sites) < FEWEST_SUMMED:
        return {}

    def kinds(t, r):
        records, found = run_all(t, r), {}
        for name in sites:
            record = records[name]
            size = elements(record).size
            if record.is_observed and size == jnp.size(record.value):
                found.setdefault((type(base_distribution(record.fn)[0]), size), []).append(name)
        return found

    return _enough_of(abstractly(kinds, theta, row), sites)


def _enough_of(kinds: Kinds, sites: list[str]) -> Kinds:
    """Those of the sites, where there are still enough of a kind."""
    of_sites = {kind: [name for name in names if name in sites] for kind, names in kinds.items()}
    return {kind: names for kind, names in of_sites.items() if len(names) >= FEWEST_SUMMED}


def _stacked(records: list[SiteRecord]) -> SiteRecord:
    """Sites of one distribution and one number of elements as one site."""

    def stack(numbers: list) -> Array:
        return jnp.concatenate([jnp.ravel(jnp.broadcast_to(x, jnp.shape(r.value))) for x, r in zip(numbers, records)])

    fns, masks = zip(*[base_distribution(record.fn) for record in records])
    logged = {name for pattern in patterns_of(type(fns[0])) for name, link in pattern.parameters if link == "log"}
    parameters = {}
    for name in fns[0].arg_constraints:
        values = [getattr(fn, name) for fn in fns]
        # Of exponentials it is the exponents that are stacked: their affine functions are read off them.
        parameters[name] = jnp.exp(stack([jnp.log(x) for x in values])) if name in logged else stack(values)
    fn = type(fns[0])(**parameters)
    return replace(
        records[0],
        fn=fn if all(mask is True for mask in masks) else fn.mask(stack(list(masks))),
        value=stack([record.value for record in records]),
        weight=stack([record.weight_of(fn) for record, fn in zip(records, fns)]),
        plates=(),
    )


def _by_draws(run_all: RunAll, sites: list[str], theta: jax.ShapeDtypeStruct) -> Terms:
    def density(u, row):
        records = run_all(u, row)
        return jnp.sum(jnp.stack([jnp.sum(elements(records[name])) for name in sites]))

    return theta_terms(_range_of(sites), theta.shape[0], density)._replace(summed=tuple(sites))


def _range_of(sites: list[str]) -> str:
    return f"{sites[0]}, ..., {sites[-1]}"
