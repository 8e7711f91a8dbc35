"""Sites of a whole program that are worth one term for all of them, as a loop in Python makes them."""

from __future__ import annotations

from collections.abc import Callable

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
    numbers_of_one,
    theta_terms,
)
from .terms import Terms

REPEATED_SITES = 2.0  # times what all compute together: sites that go on from each other; each is also compiled
FEWEST_SUMMED = 4  # sites of one term each
EXACT_PREDICTORS = 3  # rules for which are as exact as for fewer
TOTAL = "the sum of all"

RunAll = Callable[[Array, Arrays], dict[str, SiteRecord]]


def sums_of_sites(
    run_all: RunAll, sites: list[str], theta: jax.ShapeDtypeStruct, row: Arrays, *, by_draws: bool
) -> list[Terms]:
    """Terms each of which is the sum of several sites, whose names it has.

    :param run_all: (theta, row) -> the records of all sites. :param by_draws: see :func:`~.site_terms.site_terms`.
    """
    sums, left = [], sites
    if by_draws and (together := _ends_of_one_computation(run_all, sites, theta, row)):
        sums.append(_by_draws(run_all, together, theta))
        left = [name for name in sites if name not in together]
    few = _sum_of_few_predictors(run_all, left, theta, row, by_draws=by_draws)
    return sums if few is None else [*sums, few]


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
    compiled once, and computes once what they share. Sites that may have a closed form stay apart."""
    if len(sites) < FEWEST_SUMMED:
        return None

    def singles(t, r):
        records = run_all(t, r)
        may_be_closed = {name: patterns_of(type(base_distribution(records[name].fn)[0])) for name in sites}
        return [name for name in sites if elements(records[name]).shape == (1,) and not may_be_closed[name]]

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


def _by_draws(run_all: RunAll, sites: list[str], theta: jax.ShapeDtypeStruct) -> Terms:
    def density(u, row):
        records = run_all(u, row)
        return jnp.sum(jnp.stack([jnp.sum(elements(records[name])) for name in sites]))

    return theta_terms(_range_of(sites), theta.shape[0], density)._replace(summed=tuple(sites))


def _range_of(sites: list[str]) -> str:
    return f"{sites[0]}, ..., {sites[-1]}"
