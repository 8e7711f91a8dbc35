"""Latent variables of single rows, and the states that discrete ones may take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import Distribution, constraints

from ...core.expectations.elimination import MAX_STATES
from ..handlers.failures import UnboundedStates
from ..layout import Layout


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

    def split(self, values: Array | np.ndarray) -> dict[str, Array]:
        """Values of the discrete variables (..., D), by site."""
        return Layout(self.shapes).unravel(values)

    def first_states(self) -> dict[str, Array]:
        return {name: jnp.broadcast_to(self.states[name][0], shape) for name, shape in self.shapes.items()}


def states_at(states: Mapping[str, Array], place: Array) -> dict[str, Array]:
    """One of the values that each discrete site may take: that at a place, or the last one."""
    return {name: own[jnp.minimum(place, len(own) - 1)] for name, own in states.items()}


def most_states(states: Mapping[str, Array]) -> int:
    """How many values a discrete site may take, at most; one, if there are none."""
    return max([1, *map(len, states.values())])


class RowFacts(NamedTuple):
    """Facts of the rows with which a program was read, which must hold for later rows.

    :ivar states: discrete site -> the values that it may take, (M,).
    """

    states: dict[str, np.ndarray]


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
