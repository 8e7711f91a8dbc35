"""Latent variables of single rows: which rows' terms they tie together, and these terms with them integrated out.

A row's sites are sums of independent terms ("elements"). Terms that depend on the same latent variable of the row's own
are one term once it is integrated out: log sum over states, integral over z of exp(log p(states, z | theta) +
log p(outcomes | states, z, theta)). As a function of theta and z, the exponent is split as any other term is, into
predictors affine in both and a density of these; the predictors' parts in theta are then the new term's predictors, and
the integral is its density.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.expectations.elimination import MAX_STATES, StateSum, by_elimination, over_all_states
from ..data.rows import Arrays, linspace_indices, num_rows, selected
from ..handlers.failures import UnboundedStates
from ..handlers.tracing import SiteRecord, elements
from .dependence import connected, dependence
from .local_sites import LocalSites

MAX_FORMS = 4  # of terms that share sites
MOST_SHOWN = 2**14  # terms with each state of each variable, in all rows that show what depends on what;
FEWEST_SHOWN = 8  # but not fewer rows than these
# How many continuous variables, the sites of the discrete ones, and sites and discrete variables of the terms.
Form = tuple[int, tuple[str, ...], tuple[tuple[str, tuple[int, ...]], ...]]
Tie = tuple[np.ndarray, np.ndarray]  # terms, and the variables that they share
# Unconstrained values of the latent sites, as theta and z (P + K,) or by site, a row, and values of the discrete sites.
Records = Callable[[Array | Mapping[str, Array], Arrays, Mapping[str, Array]], dict[str, SiteRecord]]


class Component(NamedTuple):
    """Terms of a row that depend on the same latent variables; E of the same form.

    :ivar name: of its observed sites.
    :ivar continuous: places in z, (E, K). :ivar discrete: places among ``LocalSites.entries``, (E, D).
    :ivar outcomes: observed site -> places among its elements, (E, n). :ivar latents: local site -> likewise.
    :ivar lowest: first states of the discrete variables, (D,); the others are the integers that follow.
    :ivar state_sum: how states are summed over. Its terms are those of the outcomes, then those of the latents.
    """

    name: str
    continuous: np.ndarray
    discrete: np.ndarray
    outcomes: dict[str, np.ndarray]
    latents: dict[str, np.ndarray]
    lowest: np.ndarray
    state_sum: StateSum

    @property
    def size(self) -> int:
        return len(self.continuous)

    @property
    def num_assignments(self) -> int:
        return len(self.state_sum.assignments)

    @property
    def states(self) -> np.ndarray:
        """Values of the discrete variables, by assignment, (A, D)."""
        return self.lowest + self.state_sum.assignments


def components_of(
    records: Records,
    local: LocalSites,
    size: int,
    dtype: jnp.dtype,
    row: Arrays,
    observed: tuple[str, ...],
    rows: Arrays | None,
) -> tuple[Component, ...]:
    """Which terms of a row belong together.

    :param records: the records of a run on a row.
    :param size: P. :param row: what it takes. :param rows: the arrays of some rows, (R, ...), in place of those in
        ``row``: what is missing in one row depends on nothing there, and in others it does.
    """
    names = (*observed, *local.site_names)

    def terms(theta: Array, states: Mapping[str, Array], row: Arrays = row) -> list[Array]:
        of_sites = records(theta, row, states)
        return [elements(of_sites[name]) for name in names]

    theta = jnp.zeros(size + local.continuous.size, dtype)
    counts = [x.size for x in jax.eval_shape(terms, theta, local.first_states())]
    if rows is None:
        depends = dependence(lambda *at: jnp.concatenate(terms(*at)), local, size, dtype)
    else:
        depends = _dependence_in_rows(terms, local, size, dtype, row, rows, sum(counts))
    site_of = np.repeat(np.arange(len(names)), counts)
    index_in_site = np.concatenate([np.arange(n) for n in counts])
    num_continuous = local.continuous.size
    for number, (name, i) in enumerate(local.entries):  # where all states are equally likely too
        depends[np.cumsum([0, *counts])[names.index(name)] + i, num_continuous + number] = True
    tied = set(site_of[depends.any(axis=1)])

    def form_of(members: np.ndarray, variables: np.ndarray) -> Form:
        discrete = variables[variables >= num_continuous]
        owners = tuple(local.entries[d - num_continuous][0] for d in discrete)
        scopes = tuple(tuple(np.flatnonzero(own).tolist()) for own in depends[np.ix_(members, discrete)])
        return len(variables) - len(discrete), owners, tuple(zip([names[i] for i in site_of[members]], scopes))

    # A site that depends on no such variable is a term as any other.
    ties = [(members, own) for members, own in connected(depends) if len(own) or site_of[members[0]] in tied]
    groups: dict[Form, list] = {}
    for members, variables in _of_few_forms(ties, [form_of(*tie) for tie in ties]):
        continuous, discrete = np.split(variables, [np.searchsorted(variables, num_continuous)])
        places = continuous, discrete - num_continuous, index_in_site[members]
        groups.setdefault(form_of(members, variables), []).append(places)
    has_outcomes = {form: any(site in observed for site, _ in form[2]) for form in groups}
    reaching_outcomes = {owner for form, has in has_outcomes.items() if has for owner in form[1]}
    components = [  # what nothing is observed of integrates to one, and is drawn only
        _component(local, *form, *map(np.array, zip(*members)), observed)
        for form, members in groups.items()
        if has_outcomes[form] or (not form[0] and reaching_outcomes.intersection(form[1]))
    ]
    names = [component.name for component in components]
    return tuple(
        c if names.count(c.name) == 1 else c._replace(name=f"{c.name} ({i})") for i, c in enumerate(components)
    )


def _dependence_in_rows(
    terms: Callable[..., list[Array]],
    local: LocalSites,
    size: int,
    dtype: jnp.dtype,
    row: Arrays,
    rows: Arrays,
    num_terms: int,
) -> np.ndarray:
    """Which terms of a row change with which variables in any of some rows, (terms, K + D)."""
    tried = max(num_terms * sum(len(local.states[name]) for name, _ in local.entries), 1)
    shown = selected(dict(rows), linspace_indices(num_rows(rows), max(FEWEST_SHOWN, MOST_SHOWN // tried)))

    def of_rows(theta: Array, states: Mapping[str, Array]) -> Array:
        def of_one(own: Arrays) -> Array:
            return jnp.concatenate(terms(theta, states, {**row, **{name: x[None] for name, x in own.items()}}))

        return jax.vmap(of_one)(shown).ravel()

    depends = dependence(of_rows, local, size, dtype)
    return np.any(depends.reshape(num_rows(shown), num_terms, -1), axis=0)


def _of_few_forms(ties: list[Tie], forms: list[Form]) -> list[Tie]:
    """Terms and their variables, with those of many different forms taken together, as chains of different lengths are:
    each form is compiled by itself.

    :param forms: of ``ties``.
    """
    summed = [form for form in dict.fromkeys(forms) if not form[0]]
    if len(summed) <= MAX_FORMS:
        return ties
    sites = list(dict.fromkeys(site for form in summed for site, _ in form[2]))
    has_site = np.array([[site in dict(form[2]) for site in sites] for form in summed])
    merged: list[Tie] = []
    for alike, _ in connected(has_site):
        if len(alike) > MAX_FORMS:
            among = {summed[i] for i in alike}
            together = [tie for tie, form in zip(ties, forms) if form in among]
            ties = [tie for tie, form in zip(ties, forms) if form not in among]
            forms = [form for form in forms if form not in among]
            members, variables = (np.sort(np.concatenate(own)) for own in zip(*together))
            merged.append((members, variables))
    return ties + merged


def _component(
    local: LocalSites,
    num_continuous: int,
    owners: tuple[str, ...],
    terms: tuple[tuple[str, tuple[int, ...]], ...],
    continuous: np.ndarray,
    discrete: np.ndarray,
    indices: np.ndarray,
    observed: tuple[str, ...],
) -> Component:
    """:param owners: sites of the discrete variables, (D,). :param terms: sites and discrete variables of the terms, n.
    :param indices: of the terms among the elements of their sites, (E, n).
    """
    sites = dict.fromkeys(site for site, _ in terms)
    columns = {site: [i for i, (own, _) in enumerate(terms) if own == site] for site in sites}
    order = {site: columns[site] for site in sorted(sites, key=lambda site: site not in observed)}
    sizes = [len(local.states[name]) for name in owners]
    if num_continuous:
        state_sum = over_all_states(sizes)
    else:
        state_sum = by_elimination([terms[i][1] for own in order.values() for i in own], sizes)
    if state_sum is None:
        names = ", ".join(map(repr, dict.fromkeys(owners)))
        raise UnboundedStates(
            f"site {names}: {len(owners)} discrete latent variables enter the same terms, and have "
            f"{Decimal(math.prod(sizes)):.3g} states together. They are summed over one after the other where each "
            "shares terms with few others, and here the tables of that would have more than "
            f"{MAX_STATES} assignments. Let continuous variables stand for some of them, or write the sum into the "
            "model with numpyro.factor."
        )
    places = {site: indices[:, own] for site, own in order.items()}
    return Component(
        "+".join(site for site in order if site in observed),
        continuous.astype(int),
        discrete.astype(int),
        {site: own for site, own in places.items() if site in observed},
        {site: own for site, own in places.items() if site not in observed},
        np.array([int(local.states[name][0]) for name in owners], int),
        state_sum,
    )


# ---------------------------------------------------------------------- the joint density of a row
def terms_by_state(
    records: Records,
    local: LocalSites,
    component: Component,
    theta: Array | Mapping[str, Array],
    row: Arrays,
    element: Array | int,
) -> Array:
    """The terms of log p(outcomes, z, states | theta) for each assignment of states, (A, n).

    All elements of the component have the same assignment at once: they share no term.

    :param theta: theta and z (P + K,), or the sites that they are made of.
    """
    values = np.tile([np.asarray(local.states[name])[0] for name, _ in local.entries], (component.num_assignments, 1))
    values[:, component.discrete] = component.states[:, None]
    states = local.split(values)
    sites = component.outcomes | component.latents

    def at(values: dict[str, Array]) -> Array:
        of_sites = records(theta, row, values)
        return jnp.concatenate([elements(of_sites[name])[places_of(own, element)] for name, own in sites.items()])

    if component.num_assignments == 1:
        return at({name: values[0] for name, values in states.items()})[None]
    return jax.vmap(at)(states)


def places_of(places: np.ndarray, element: Array | int) -> Array | np.ndarray:
    """Those of one element, out of a component's (E, n): known if it has no other. What they index is then no gather,
    which would take most of the time where it is differentiated."""
    return places[0] if len(places) == 1 else jnp.asarray(places)[element]
