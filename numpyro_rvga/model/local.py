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
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import logsumexp
from numpyro.distributions import constraints

from ..core.compilation import at_once
from ..core.linalg import cholesky, solve_lower
from ..core.local_integrals import MAX_DIMENSIONS, log_integral, num_nodes, place_nodes
from ..core.symbolic import Factorization, factorize
from .failures import FORWARD, UnboundedStates
from .layout import Layout
from .terms import Arrays, Terms, over_rows
from .tracing import SiteRecord, elements

MAX_STATES = 1024  # of a row's discrete latents together
PROBES = 3  # places at which dependence is looked for
QUADRATIC = {32: 1e-3, 64: 1e-8}  # by how much second derivatives may differ, relative to their size
Records = Callable[[Array, Arrays, Mapping[str, Array]], dict[str, SiteRecord]]
Draw = Callable[[Array, Array, Arrays, Array], tuple[Array, Array]]


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
def bounds_of(site: str, fn: Any) -> tuple[Array, Array]:
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
    owner = np.concatenate([np.full(n, i) for i, n in enumerate(counts)])
    place = np.concatenate([np.arange(n) for n in counts])
    num_continuous = local.continuous.size
    for number, (name, i) in enumerate(local.entries):  # where all states are equally likely too
        depends[np.cumsum([0, *counts])[names.index(name)] + i, num_continuous + number] = True
    groups: dict[tuple, list] = {}
    tied = {names[i] for i in owner[depends.any(axis=1)]}
    for terms, variables in _connected(depends):
        sites = [names[owner[t]] for t in terms]
        if not variables and not tied.intersection(sites):
            continue  # a site that depends on no such variable: it is a term as any other
        continuous = [v for v in variables if v < num_continuous]
        discrete = [v - num_continuous for v in variables if v >= num_continuous]
        owners = tuple(local.entries[d][0] for d in discrete)
        form = (len(continuous), owners, tuple(sorted(sites)))
        places = {name: [place[t] for t, s in zip(terms, sites) if s == name] for name in dict.fromkeys(sites)}
        groups.setdefault(form, []).append((continuous, discrete, places))
    components = []
    for (_, owners, _), members in groups.items():
        continuous, discrete, places = zip(*members)
        sites = {name: np.array([p[name] for p in places]) for name in places[0]}
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

    def look(theta, states):
        slopes = jax.jacfwd(lambda z: flat(theta.at[size:].set(z), states))(theta[size:]) != 0
        moves = []
        for name, shape in local.shapes.items():

            def is_moved(i, name=name):
                values = of_one(theta, states, name, i)
                return jnp.any(values != values[:1], axis=0)  # NaN differs from all

            moves.append(lax.map(is_moved, jnp.arange(math.prod(shape), dtype=jnp.int32)).T)
        return jnp.concatenate([slopes, *moves], axis=1)

    counts = [
        x.size for x in jax.eval_shape(terms, jnp.zeros(size + local.continuous.size, dtype), local.first_states())
    ]
    total = np.zeros((sum(counts), local.continuous.size + len(entries)), bool)
    looked = []
    for _ in range(PROBES):
        theta = jnp.asarray(0.5 * rng.normal(size=size + local.continuous.size), dtype)
        states = {
            name: jnp.asarray(rng.choice(np.asarray(local.states[name]), size=shape))
            for name, shape in local.shapes.items()
        }
        looked.append((theta, states))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *looked)
    of_sites = at_once(lambda: jax.vmap(look)(*stacked))
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
            places = np.array([entries[d][1] for d in component.discrete[:, column]])
            flat = states[name].ravel().at[jnp.asarray(places)[element]].set(values[column])
            states[name] = flat.reshape(states[name].shape)
        of_sites = records(theta, row, states)
        sites = component.outcomes | component.latents
        each = [jnp.sum(elements(of_sites[name])[jnp.asarray(places)[element]]) for name, places in sites.items()]
        return jnp.sum(jnp.stack(each))

    if len(component.states) == 1:
        return at(jnp.asarray(component.states[0]))[None]
    return jax.vmap(at)(jnp.asarray(component.states))


# ---------------------------------------------------------------------- terms
def local_terms(
    records: Records,
    local: LocalSites,
    component: Component,
    theta: jax.ShapeDtypeStruct,
    row: Arrays,
    rows: Arrays,
    is_quadratic: Callable[[Callable[[Arrays], Array]], bool],
) -> tuple[Terms, bool, Draw]:
    """The terms of a component, integrated over its variables; whether its log density is quadratic in these; and draws
    of them.

    :param theta: the shape of theta, (P,). :param row: an example row. :param rows: some rows, with what they share.
    :param is_quadratic: whether the answer to a question, row -> bool (E,), is yes for all rows.
    :raises NotImplementedError: naming the sites, if there are more dimensions than can be integrated over.
    """
    size, count = theta.shape[0], len(component.states)
    both = jax.ShapeDtypeStruct((size + local.continuous.size,), theta.dtype)
    nothing = jax.ShapeDtypeStruct((count,), theta.dtype)

    def term(t, r, element, log_weights):
        by_state = joint_by_state(records, local, component, t, r, element)
        return by_state[0] if count == 1 else logsumexp(by_state + log_weights)

    split = factorize(term, both, row, jax.ShapeDtypeStruct((), jnp.int32), nothing)
    if split.num_predictors > both.shape[0]:
        split = _of_everything(split, both.shape[0])
    split = _Split(split, component, size, local.continuous.size, theta.dtype)
    quadratic = False
    kept = None
    if not component.continuous.shape[1]:
        width, predictors, constants, density = (
            split.num_predictors,
            split.summed,
            split.summed_constants,
            split.density,
        )
    else:
        kept = _moving(split, component, rows)
        dimensions, quadratic = component.continuous.shape[1], is_quadratic(partial(_quadratic, split, component, kept))
        if dimensions > MAX_DIMENSIONS and not quadratic:
            names = ", ".join(repr(name) for name in component.latents if name in local.continuous.site_names)
            raise NotImplementedError(
                f"site {names}: {dimensions} latent variables of each row enter the same terms of {component.name!r}, "
                f"and integrals over more than {MAX_DIMENSIONS} dimensions are not taken, unless all is Normal. If "
                "they are Normal additions of known scale, RVGA(model, local='prior') takes them."
            )
        width, predictors = len(kept), partial(split.kept_predictors, kept)
        constants, density = split.constants, jax.jit(partial(split.integrated, kept, quadratic))
    terms = Terms(component.name, component.size, width, True, predictors, constants, density, None)
    if kept is not None and not quadratic:
        terms = terms._replace(num_nodes=count * num_nodes(component.continuous.shape[1]))
    return terms, quadratic, partial(split.drawn, kept, quadratic)


def _of_everything(split: Factorization, size: int) -> Factorization:
    """All of theta and z as predictors: where a split names more numbers than there are."""

    def density(u, constants):
        return split.density(split.predictors(u, constants), split.constants(constants))

    return Factorization(size, False, lambda t, constants: t, lambda constants: constants, density)


class _Split:
    """The joint density of a component, split into predictors affine in theta and z, and a density of these.

    :param split: of (theta and z, (row, element, logarithms of the states' weights)).
    """

    def __init__(self, split: Factorization, component: Component, size: int, num_continuous: int, dtype: jnp.dtype):
        self._split, self._component, self._dtype = split, component, dtype
        self._size, self._num_continuous = size, num_continuous
        self.num_predictors, self.density = split.num_predictors, split.density
        count = len(component.states)
        self._even, self._each = jnp.zeros(count, dtype), jnp.log(jnp.eye(count, dtype=dtype))

    def _predictors(self, theta: Array, z: Array, row: Arrays, element: Array) -> Array:
        return self._split.predictors(jnp.concatenate([theta, z]), (row, element, self._even))

    # ------------------------------------------------------------------ without an integral
    def summed(self, theta: Array, row: Arrays, element: Array) -> Array:
        return self._predictors(theta, jnp.zeros(self._num_continuous, self._dtype), row, element)

    def summed_constants(self, row: Arrays, element: Array) -> Any:
        return self._split.constants((row, element, self._even))

    # ------------------------------------------------------------------ with one
    def kept_predictors(self, kept: np.ndarray, theta: Array, row: Arrays, element: Array) -> Array:
        return self.summed(theta, row, element)[kept]

    def constants(self, row: Arrays, element: Array) -> tuple:
        """What the density takes by state, the predictors that theta does not enter (NaN for others), and all
        predictors' slopes in the component's z, (C, K)."""
        by_state = jax.vmap(lambda weights: self._split.constants((row, element, weights)))(self._each)
        unknown = jnp.full(self._size, jnp.nan, self._dtype)
        zero = jnp.zeros(self._num_continuous, self._dtype)
        slopes = jax.jacfwd(lambda z: self._predictors(jnp.zeros_like(unknown), z, row, element))(zero)
        places = jnp.asarray(self._component.continuous)[element]
        return by_state, self._predictors(unknown, zero, row, element), slopes[:, places]

    def log_joint(self, kept: np.ndarray, u: Array, of_state: Any, fixed: Array, slopes: Array) -> Callable:
        """z (K,) -> log p(outcomes, z, state). What does not depend on z is computed once."""
        arguments = u, of_state, fixed, slopes
        z = jax.ShapeDtypeStruct((slopes.shape[1],), self._dtype)
        inner = factorize(partial(self._joint, kept), z, *arguments)
        values = inner.constants(arguments)
        return lambda z: inner.density(inner.predictors(z, arguments), values)

    def _joint(self, kept: np.ndarray, z: Array, u: Array, of_state: Any, fixed: Array, slopes: Array) -> Array:
        return self.density(fixed.at[kept].set(u) + slopes @ z, of_state)

    def integrated(self, kept: np.ndarray, quadratic: bool, u: Array, constants: tuple) -> Array:
        by_state, fixed, slopes = constants
        integral = _gaussian_integral if quadratic else _integral

        def one(of_state):
            log_joint = self.log_joint(kept, u, of_state, fixed, slopes)
            still = self.log_joint(kept, *jax.tree.map(lax.stop_gradient, (u, of_state, fixed, slopes)))
            return integral(log_joint, still, slopes.shape[1], self._dtype)

        return logsumexp(jax.vmap(one)(by_state))

    # ------------------------------------------------------------------ given the row
    def drawn(
        self, kept: np.ndarray | None, quadratic: bool, rng_key: Array, theta: Array, row: Arrays, element: Array
    ) -> tuple[Array, Array]:
        """From the conditional distribution given theta (P,) and the row: the place of a state, and z (K,).

        :param kept: None, if there is no z.
        """
        u = self.summed(theta, row, element)
        state_key, key = jax.random.split(rng_key)
        if kept is None:
            by_state = jax.vmap(lambda weights: self._split.constants((row, element, weights)))(self._each)
            log_probs = jax.vmap(partial(self.density, u))(by_state)
            return jax.random.categorical(state_key, log_probs), jnp.zeros(0, self._dtype)
        by_state, fixed, slopes = self.constants(row, element)

        def one(key, of_state):
            log_joint = self.log_joint(kept, u[kept], of_state, fixed, slopes)
            draw = _drawn_gaussian if quadratic else _drawn
            return draw(log_joint, key, slopes.shape[1], self._dtype)

        log_probs, z = jax.vmap(one)(jax.random.split(key, len(self._each)), by_state)
        state = jax.random.categorical(state_key, log_probs)
        return state, z[state]


def _drawn_gaussian(log_joint: Callable, rng_key: Array, size: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The log of the integral, and z (K,) from the normal distribution that the integrand is of."""
    mean, factor = gaussian_conditional(log_joint, size, dtype)
    z = mean + solve_lower(factor, jax.random.normal(rng_key, (size,), dtype), transpose=True)
    return _integral_around(log_joint, mean), z


def _drawn(log_joint: Callable, rng_key: Array, size: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """The log of the integral, and z (K,): a node by its weight, and a place in its cell."""
    nodes = place_nodes(log_joint, size, dtype)
    log_weights = jax.vmap(log_joint)(nodes.points) + nodes.log_weights
    node_key, cell_key = jax.random.split(rng_key)
    node = jax.random.categorical(node_key, log_weights)
    within = jax.random.uniform(cell_key, (size,), dtype, -0.5, 0.5)
    return logsumexp(log_weights), nodes.points[node] + nodes.axes @ (within * nodes.steps[node])


def _integral(log_joint: Callable, still: Callable, size: int, dtype: jnp.dtype) -> Array:
    """:param still: the same, not to be differentiated."""
    return log_integral(log_joint, place_nodes(still, size, dtype))


def _gaussian_integral(log_joint: Callable, still: Callable, size: int, dtype: jnp.dtype) -> Array:
    mean, _ = gaussian_conditional(still, size, dtype)
    return _integral_around(log_joint, lax.stop_gradient(mean))


def _integral_around(log_joint: Callable, z: Array) -> Array:
    """The log of the integral of a normal density, from its expansion at z (K,)."""
    value, slope, hessian = _expansion(log_joint, z)
    factor = cholesky(-hessian)
    left = solve_lower(factor, slope)
    half_log_det = jnp.sum(jnp.log(jnp.diagonal(factor)))
    return value + 0.5 * left @ left - half_log_det + 0.5 * z.size * math.log(2 * math.pi)


def gaussian_conditional(log_joint: Callable, size: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Mean (K,) and lower Cholesky factor of the precision, of a quadratic log density."""
    _, slope, hessian = _expansion(log_joint, jnp.zeros(size, dtype))
    factor = cholesky(-hessian)  # the same at all z

    def newton_step(slope: Array) -> Array:
        return solve_lower(factor, solve_lower(factor, slope), transpose=True)

    mean = newton_step(slope)
    return mean + newton_step(jax.grad(log_joint)(mean)), factor  # which mends the first one's rounding


def _expansion(log_joint: Callable, z: Array) -> tuple[Array, Array, Array]:
    """Value, gradient (K,) and Hessian (K, K) at z."""

    def slope(z: Array) -> tuple[Array, tuple[Array, Array]]:
        value, gradient = jax.value_and_grad(log_joint)(z)
        return gradient, (value, gradient)

    hessian, (value, gradient) = jax.jacfwd(slope, has_aux=True)(z)
    return value, gradient, hessian


def _moving(split: _Split, component: Component, rows: Arrays) -> np.ndarray:
    """The predictors that theta enters. The others are constants, and NaN in a row where that is not so."""
    fixed = at_once(lambda: over_rows(lambda r, e: split.constants(r, e)[1], component.size, rows))
    return np.flatnonzero(np.isnan(fixed).any(axis=(0, 1)))


def _quadratic(split: _Split, component: Component, kept: np.ndarray, row: Arrays) -> Array:
    """Whether the joint log densities (E,) of a row are quadratic in z, in each state, at all theta that are tried."""
    rng, size = np.random.default_rng(0), component.continuous.shape[1]
    dtype = split._dtype
    some = jnp.asarray(rng.normal(size=(PROBES, len(kept))), dtype)
    places = jnp.asarray(rng.normal(size=(4, size)) * [[0.0], [0.3], [1.0], [3.0]], dtype)

    def of_element(element):
        by_state, fixed, slopes = split.constants(row, element)

        def hessians(u, of_state):
            return jax.vmap(jax.hessian(split.log_joint(kept, u, of_state, fixed, slopes)))(places)

        of_probes = jax.vmap(lambda u: jax.vmap(lambda s: hessians(u, s))(by_state))(some)  # (probes, M, places, K, K)
        scale = jnp.abs(of_probes).max(axis=(-3, -2, -1), keepdims=True)
        apart = jnp.abs(of_probes - of_probes[..., :1, :, :])
        return jnp.all(apart <= QUADRATIC[jnp.finfo(dtype).bits] * scale)

    return lax.map(of_element, jnp.arange(component.size, dtype=jnp.int32))
