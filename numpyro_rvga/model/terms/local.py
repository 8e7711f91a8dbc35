"""Latent variables of single rows: which rows' terms they tie together, and these terms with them integrated out.

A row's sites are sums of independent terms ("elements"). Terms that depend on the same latent variable of the row's own
are one term once it is integrated out: log sum over states, integral over z of exp(log p(states, z | theta) +
log p(outcomes | states, z, theta)). As a function of theta and z, the exponent is split as any other term is, into
predictors affine in both and a density of these; the predictors' parts in theta are then the new term's predictors, and
the integral is its density.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.distributions import Distribution, constraints

from ...core.compilation import at_once
from ..data.rows import Arrays
from ..handlers.failures import FORWARD, UnboundedStates
from ..handlers.tracing import SiteRecord, elements
from ..layout import Layout

MAX_STATES = 1024  # of a row's discrete latents together
PROBES = 3  # places at which dependence is looked for
Records = Callable[[Array, Arrays, Mapping[str, Array]], dict[str, SiteRecord]]


class LocalSites(NamedTuple):
    """The latent variables of one row.

    :ivar continuous: layout of z (K,), in unconstrained space.
    :ivar shapes: of the discrete sites' values in one row.
    :ivar states: the values that each of these may take, (M,).
    """

    continuous: Layout
    shapes: dict[str, tuple[int, ...]]
    states: dict[str, Array]

    @property
    def site_names(self) -> tuple[str, ...]:
        return (*self.continuous.site_names, *self.states)

    @property
    def entries(self) -> list[tuple[str, int]]:
        """Site and place of each discrete variable."""
        return [(name, i) for name, shape in self.shapes.items() for i in range(math.prod(shape))]

    def first_states(self) -> dict[str, Array]:
        return {name: jnp.broadcast_to(self.states[name][0], shape) for name, shape in self.shapes.items()}


class RowFacts(NamedTuple):
    """Facts of the rows with which a program was read, which must hold for later rows.

    :ivar states: discrete site -> the values that it may take, (M,).
    :ivar quadratic: by component: whether its joint log density is quadratic in z.
    """

    states: dict[str, np.ndarray]
    quadratic: tuple[bool, ...]


class Component(NamedTuple):
    """Terms of a row that depend on the same latent variables; E of the same form.

    :ivar name: of its observed sites.
    :ivar continuous: places in z, (E, K). :ivar discrete: places among ``LocalSites.entries``, (E, D).
    :ivar outcomes: observed site -> places among its elements, (E, n). :ivar latents: local site -> likewise.
    :ivar states: of the discrete variables together, (M, D).
    """

    name: str
    continuous: np.ndarray
    discrete: np.ndarray
    outcomes: dict[str, np.ndarray]
    latents: dict[str, np.ndarray]
    states: np.ndarray

    @property
    def size(self) -> int:
        return len(self.continuous)


# ---------------------------------------------------------------------- what the model says
def bounds_of(site: str, fn: Distribution) -> tuple[Array, Array]:
    """The smallest and the largest value that a discrete latent may take.

    :raises UnboundedStates: naming the site, if its states are not the integers between two.
    """
    support = fn.support
    if support is constraints.boolean:
        return jnp.asarray(0), jnp.asarray(1)
    low, high = getattr(support, "lower_bound", None), getattr(support, "upper_bound", None)
    if fn.event_shape or low is None or high is None or not fn.is_discrete:
        raise UnboundedStates(
            f"site {site!r} is a discrete latent variable of each row without a largest value ({type(fn).__name__}), "
            "and only sums over finitely many states are taken. Cut it off where the rest does not matter: "
            f"numpyro.sample({site!r}, dist.Categorical(logits=dist.Poisson(rate).log_prob(jnp.arange(50)))), with the "
            "site's own distribution in place of dist.Poisson(rate)."
        )
    return jnp.min(jnp.asarray(low)), jnp.max(jnp.asarray(high))


def states_between(site: str, low: int, high: int) -> np.ndarray:
    """The values (M,) that a discrete latent may take.

    :raises UnboundedStates: naming the site, if they are too many.
    """
    values = np.arange(low, high + 1)
    if len(values) > MAX_STATES:
        raise UnboundedStates(
            f"site {site!r} is a discrete latent variable of each row with {len(values)} states, and sums are taken "
            f"over up to {MAX_STATES}. Let a continuous variable stand for it, or bound it by what the data allow."
        )
    return values


def components_of(
    records: Records, local: LocalSites, size: int, dtype: jnp.dtype, row: Arrays, observed: tuple[str, ...]
) -> tuple[Component, ...]:
    """Which terms of a row belong together.

    :param records: (theta and z (P + K,), row, values of the discrete sites) -> the records of a run on the row.
    :param size: P.
    """
    names = (*observed, *local.site_names)
    depends, counts = _dependence(records, local, size, dtype, row, names)
    site_of = np.concatenate([np.full(n, i) for i, n in enumerate(counts)])
    index_in_site = np.concatenate([np.arange(n) for n in counts])
    num_continuous = local.continuous.size
    for number, (name, i) in enumerate(local.entries):  # where all states are equally likely too
        depends[np.cumsum([0, *counts])[names.index(name)] + i, num_continuous + number] = True
    groups: dict[tuple, list] = {}
    tied = {names[i] for i in site_of[depends.any(axis=1)]}
    for terms, variables in _connected(depends):
        sites = [names[site_of[t]] for t in terms]
        if not variables and not tied.intersection(sites):
            continue  # a site that depends on no such variable: it is a term as any other
        continuous = [v for v in variables if v < num_continuous]
        discrete = [v - num_continuous for v in variables if v >= num_continuous]
        owners = tuple(local.entries[d][0] for d in discrete)
        form = (len(continuous), owners, tuple(sorted(sites)))
        indices = {name: [index_in_site[t] for t, s in zip(terms, sites) if s == name] for name in dict.fromkeys(sites)}
        groups.setdefault(form, []).append((continuous, discrete, indices))
    components = []
    for (_, owners, _), members in groups.items():
        continuous, discrete, indices = zip(*members)
        sites = {name: np.array([p[name] for p in indices]) for name in indices[0]}
        outcomes = {name: x for name, x in sites.items() if name in observed}
        if not outcomes:
            continue  # what nothing is observed of integrates to one
        _check_number(owners, math.prod([len(local.states[name]) for name in owners]))
        states = np.array(list(itertools.product(*[np.asarray(local.states[name]) for name in owners])))
        components.append(
            Component(
                "+".join(outcomes),
                np.array(continuous, int).reshape(len(members), -1),
                np.array(discrete, int).reshape(len(members), -1),
                outcomes,
                {name: x for name, x in sites.items() if name not in observed},
                states.reshape(len(states), len(owners)),
            )
        )
    names = [component.name for component in components]
    return tuple(
        c if names.count(c.name) == 1 else c._replace(name=f"{c.name} ({i})") for i, c in enumerate(components)
    )


def _check_number(owners: tuple[str, ...], number: int) -> None:
    """:raises UnboundedStates: naming the sites, if their joint states are too many."""
    if number > MAX_STATES:
        names = ", ".join(map(repr, dict.fromkeys(owners)))
        raise UnboundedStates(
            f"site {names}: {len(owners)} discrete latent variables enter the same terms, and have {number:.3g} states "
            f"together; sums are taken over up to {MAX_STATES}. {FORWARD}"
        )


def _dependence(records, local, size, dtype, row, names) -> tuple[np.ndarray, list[int]]:
    """Which terms change with which variables (terms, K + D), by trying, and the number of terms of each site."""
    rng, entries = np.random.default_rng(0), local.entries

    def terms(theta, states):
        of_sites = records(theta, row, states)
        return [elements(of_sites[name]) for name in names]

    def flat(theta, states):
        return jnp.concatenate(terms(theta, states))

    def of_one(theta, states, name, i):
        """With each of the variable's states."""

        def at(value):
            changed = states[name].ravel().at[i].set(value).reshape(states[name].shape)
            return flat(theta, states | {name: changed})

        return jax.vmap(at)(local.states[name])

    def dependence_at(theta, states):
        slopes = jax.jacfwd(lambda z: flat(theta.at[size:].set(z), states))(theta[size:]) != 0
        changes = []
        for name, shape in local.shapes.items():

            def is_changed(i, name=name):
                values = of_one(theta, states, name, i)
                return jnp.any(values != values[:1], axis=0)  # NaN differs from all

            changes.append(lax.map(is_changed, jnp.arange(math.prod(shape), dtype=jnp.int32)).T)
        return jnp.concatenate([slopes, *changes], axis=1)

    counts = [
        x.size for x in jax.eval_shape(terms, jnp.zeros(size + local.continuous.size, dtype), local.first_states())
    ]
    total = np.zeros((sum(counts), local.continuous.size + len(entries)), bool)
    probes = []
    for _ in range(PROBES):
        theta = jnp.asarray(0.5 * rng.normal(size=size + local.continuous.size), dtype)
        states = {
            name: jnp.asarray(rng.choice(np.asarray(local.states[name]), size=shape))
            for name, shape in local.shapes.items()
        }
        probes.append((theta, states))
    stacked_probes = jax.tree.map(lambda *x: jnp.stack(x), *probes)
    of_sites = at_once(lambda: jax.vmap(dependence_at)(*stacked_probes))
    return total | np.any(of_sites, axis=0), counts


def _connected(depends: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """Terms, and the variables that they share, in groups that share none."""
    terms, variables = depends.shape
    label = np.arange(terms + variables)
    for t, v in np.argwhere(depends):
        label[label == label[terms + v]] = label[t]
    groups = []
    for value in dict.fromkeys(label[:terms].tolist()):
        members = np.flatnonzero(label == value)
        groups.append(([int(m) for m in members if m < terms], [int(m) - terms for m in members if m >= terms]))
    return groups


# ---------------------------------------------------------------------- the joint density of a row
def joint_by_state(
    records: Records, local: LocalSites, component: Component, theta: Array, row: Arrays, element: Array | int
) -> Array:
    """log p(outcomes, z, states | theta) for each of the states, (M,).

    :param theta: theta and z, (P + K,).
    """
    entries = local.entries

    def at(values: Array) -> Array:
        states = local.first_states()
        for column, (name, _) in enumerate([entries[d] for d in component.discrete[0]]):
            indices = np.array([entries[d][1] for d in component.discrete[:, column]])
            flat = states[name].ravel().at[jnp.asarray(indices)[element]].set(values[column])
            states[name] = flat.reshape(states[name].shape)
        of_sites = records(theta, row, states)
        sites = component.outcomes | component.latents
        each = [jnp.sum(elements(of_sites[name])[jnp.asarray(indices)[element]]) for name, indices in sites.items()]
        return jnp.sum(jnp.stack(each))

    if len(component.states) == 1:
        return at(jnp.asarray(component.states[0]))[None]
    return jax.vmap(at)(jnp.asarray(component.states))


# ---------------------------------------------------------------------- terms
