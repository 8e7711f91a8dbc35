"""Terms of single rows with their latent variables integrated out: densities of the predictors, and draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import logsumexp

from ...core.compilation import at_once, jit
from ...core.expectations.by_nodes import linearized
from ...core.expectations.local_integrals import (
    MAX_DIMENSIONS,
    finer_log_integral,
    log_integral,
    num_nodes,
    place_nodes,
)
from ...core.jaxprs.degrees import is_quadratic
from ...core.jaxprs.symbolic import Factorization, factorize
from ...core.matrices.linalg import cholesky, solve_lower
from ..data.rows import Arrays
from .local import Component, Records, places_of, terms_by_state
from .local_sites import LocalSites
from .site_terms import ELEMENT, affine_terms
from .terms import Terms, over_rows

Draw = Callable[[Array, Array, Arrays, Array], tuple[Array, Array, Array]]  # states, their log probability, and z


def local_terms(
    records: Records,
    local: LocalSites,
    component: Component,
    theta: jax.ShapeDtypeStruct,
    sites: Mapping[str, jax.ShapeDtypeStruct],
    row: Arrays,
    rows: Arrays,
) -> tuple[Terms | None, Draw]:
    """The terms of a component, integrated over its variables (None, if nothing is observed of it), and draws of these.

    :param theta: the shape of theta, (P,). :param sites: those of the sites that theta and z are made of.
    :param row: an example row. :param rows: some rows, with what they share.
    :raises NotImplementedError: naming the sites, if there are more dimensions than can be integrated over.
    """
    table = partial(terms_by_state, records, local, component)
    if not component.continuous.shape[1]:
        return _summed_terms(component, table, local.continuous.size, theta, row)
    count = component.num_assignments
    both = jax.ShapeDtypeStruct((theta.shape[0] + local.continuous.size,), theta.dtype)
    nothing = jax.ShapeDtypeStruct((count,), theta.dtype)

    def term(t, r, element, log_weights):
        by_state = jnp.sum(table(t, r, element), axis=1)
        return by_state[0] if count == 1 else logsumexp(by_state + log_weights)

    of_all = factorize(term, both, row, ELEMENT, nothing).at_most(both.shape[0])
    split = _Split(of_all, component, local, theta, rows)
    dimensions, quadratic = component.continuous.shape[1], _is_quadratic(table, component, local, sites, row)
    if dimensions > MAX_DIMENSIONS and not quadratic:
        names = ", ".join(repr(name) for name in component.latents if name in local.continuous.site_names)
        raise NotImplementedError(
            f"site {names}: {dimensions} latent variables of each row enter the same terms of {component.name!r}, "
            f"and integrals over more than {MAX_DIMENSIONS} dimensions are not taken, unless all is Normal. If "
            "they are Normal additions of known scale, RVGA(model, local='prior') takes them."
        )
    integral = _gaussian_integral if quadratic else _integral
    functions = split.predictors, split.constants, jit(partial(split.integrated, integral))
    terms = Terms(component.name, component.size, len(split.kept), True, *functions, None)
    if not quadratic:
        finer = jit(partial(split.integrated, lambda log_joint, _, *form: finer_log_integral(log_joint, *form)))
        terms = terms._replace(num_nodes=count * num_nodes(dimensions), finer=finer)
    return terms, partial(split.drawn, quadratic)


def _summed_terms(
    component: Component, table: Callable, num_continuous: int, theta: jax.ShapeDtypeStruct, row: Arrays
) -> tuple[Terms | None, Draw]:
    """The terms of a component that is only summed over states.

    :param table: (theta and z, row, element) -> terms by assignment, (A, n).
    """

    def table_at(theta: Array, row: Arrays, element: Array) -> Array:
        return table(jnp.concatenate([theta, jnp.zeros(num_continuous, theta.dtype)]), row, element)

    def term(theta, row, element):
        return component.state_sum.log_sum(table_at(theta, row, element))

    def drawn(rng_key, theta, row, element):
        terms = table_at(theta, row, element)
        states = component.state_sum.draw(rng_key, terms)
        log_prob = component.state_sum.log_prob(terms, states)
        return component.lowest + states, log_prob, jnp.zeros(0, theta.dtype)

    if not component.outcomes:
        return None, drawn
    split = factorize(term, theta, row, ELEMENT).at_most(theta.shape[0])
    return affine_terms(component.name, component.size, split), drawn


def _is_quadratic(
    table: Callable, component: Component, local: LocalSites, sites: Mapping[str, jax.ShapeDtypeStruct], row: Arrays
) -> bool:
    """Whether a component's log density is quadratic in its variables in each state, whatever the row.

    :param table: (the sites' values, row, element) -> terms by assignment, (A, n). :param sites: see
        :func:`local_terms`.
    """
    own = {name for name, places in local.continuous.indices.items() if np.isin(places, component.continuous).any()}
    closed = jax.make_jaxpr(table)(dict(sites), row, ELEMENT)
    varies = [name in own for name in sorted(sites)]
    return is_quadratic(closed, varies + [False] * (len(closed.in_avals) - len(varies)))


class _Split:
    """The joint density of a component, split into predictors affine in theta and z, and a density of these.

    :param split: of (theta and z, (row, element, logarithms of the states' weights)).
    :param rows: some rows, with what they share.
    :ivar kept: the predictors that theta enters. The others are constants, and NaN in a row where that is not so.
    """

    def __init__(
        self, split: Factorization, component: Component, local: LocalSites, theta: jax.ShapeDtypeStruct, rows: Arrays
    ):
        dtype = theta.dtype
        self._split, self._component, self._dtype = split, component, dtype
        self._size, self._num_continuous = theta.shape[0], local.continuous.size
        count = component.num_assignments
        self._even, self._each = jnp.zeros(count, dtype), jnp.log(jnp.eye(count, dtype=dtype))
        fixed = at_once(lambda: over_rows(lambda r, e: self.constants(r, e)[1], component.size, rows))
        kept = np.flatnonzero(np.isnan(fixed).any(axis=(0, 1)))
        self.kept = kept.astype(np.int32)  # JAX fails with 64 bits where it traces in double precision after single

    def _all_predictors(self, theta: Array, z: Array, row: Arrays, element: Array) -> Array:
        return self._split.predictors(jnp.concatenate([theta, z]), (row, element, self._even))

    def predictors(self, theta: Array, row: Arrays, element: Array) -> Array:
        return self._all_predictors(theta, jnp.zeros(self._num_continuous, self._dtype), row, element)[self.kept]

    def constants(self, row: Arrays, element: Array) -> tuple:
        """What the density takes by state, the predictors that theta does not enter (NaN for others), and all
        predictors' slopes in the component's z, (C, K)."""
        by_state = jax.vmap(lambda weights: self._split.constants((row, element, weights)))(self._each)
        unknown = jnp.full(self._size, jnp.nan, self._dtype)
        zero = jnp.zeros(self._num_continuous, self._dtype)
        slopes = jax.jacfwd(lambda z: self._all_predictors(jnp.zeros_like(unknown), z, row, element))(zero)
        indices = places_of(self._component.continuous, element)
        return by_state, self._all_predictors(unknown, zero, row, element), slopes[:, indices]

    def log_joint(self, u: Array, of_state: Any, fixed: Array, slopes: Array) -> Callable:
        """z (K,) -> log p(outcomes, z, state). What does not depend on z is computed once."""
        arguments = u, of_state, fixed, slopes
        z = jax.ShapeDtypeStruct((slopes.shape[1],), self._dtype)
        inner = factorize(self._joint, z, *arguments)
        values = inner.constants(arguments)
        return lambda z: inner.value(z, arguments, values)

    def _joint(self, z: Array, u: Array, of_state: Any, fixed: Array, slopes: Array) -> Array:
        is_kept = np.isin(np.arange(self._split.num_predictors), self.kept)
        starts = np.flatnonzero(np.diff(is_kept, prepend=~is_kept[:1]))
        runs = zip(starts, [*starts[1:], len(is_kept)])
        parts = [
            (u[is_kept[:a].sum() : is_kept[:b].sum()] if is_kept[a] else fixed[a:b]) + slopes[a:b] @ z for a, b in runs
        ]
        return self._split.density(jnp.concatenate(parts), of_state)

    def integrated(self, integral: Callable, u: Array, constants: tuple) -> Array:
        by_state, fixed, slopes = constants

        def one(of_state):
            log_joint = self.log_joint(u, of_state, fixed, slopes)
            still = self.log_joint(*jax.tree.map(lax.stop_gradient, (u, of_state, fixed, slopes)))
            return integral(log_joint, still, slopes.shape[1], self._dtype)

        return logsumexp(jax.vmap(one)(by_state))

    def drawn(
        self, quadratic: bool, rng_key: Array, theta: Array, row: Arrays, element: Array
    ) -> tuple[Array, Array, Array]:
        """From the conditional distribution given theta (P,) and the row: the values of the states (D,), the logarithm
        of their probability, and z (K,)."""
        u = self.predictors(theta, row, element)
        state_key, key = jax.random.split(rng_key)
        by_state, fixed, slopes = self.constants(row, element)

        def one(key, of_state):
            log_joint = self.log_joint(u, of_state, fixed, slopes)
            draw = _drawn_gaussian if quadratic else _drawn
            return draw(log_joint, key, slopes.shape[1], self._dtype)

        log_probs, z = jax.vmap(one)(jax.random.split(key, len(self._each)), by_state)
        state = jax.random.categorical(state_key, log_probs)
        return jnp.asarray(self._component.states)[state], jax.nn.log_softmax(log_probs)[state], z[state]


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
    value, slope, hessian = linearized(log_joint, z, None)
    factor = cholesky(-hessian)
    left = solve_lower(factor, slope)
    half_log_det = jnp.sum(jnp.log(jnp.diagonal(factor)))
    return value + 0.5 * left @ left - half_log_det + 0.5 * z.size * math.log(2 * math.pi)


def gaussian_conditional(log_joint: Callable, size: int, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Mean (K,) and lower Cholesky factor of the precision, of a quadratic log density."""
    _, slope, hessian = linearized(log_joint, jnp.zeros(size, dtype), None)
    factor = cholesky(-hessian)  # the same at all z

    def newton_step(slope: Array) -> Array:
        return solve_lower(factor, solve_lower(factor, slope), transpose=True)

    mean = newton_step(slope)
    return mean + newton_step(jax.grad(log_joint)(mean)), factor  # which mends the first one's rounding
