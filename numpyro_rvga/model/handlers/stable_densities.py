"""Log densities that do not underflow, in place of NumPyro's that do: a Gaussian has mass everywhere."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike


class StableOrderedLogistic(dist.OrderedLogistic):
    """With sigma the logistic function, c the cutpoints and x the predictor, category k has the probability

        sigma(c_k - x) - sigma(c_{k-1} - x) = sigma(c_k - x) sigma(x - c_{k-1}) (1 - exp(c_{k-1} - c_k)).

    The difference, which NumPyro takes, is zero from c_{k-1} = x + 37 on in double precision, and from 17 in single.
    """

    def log_prob(self, value: ArrayLike, intermediates: list[Any] | None = None) -> Array:
        cutpoints, count = self.cutpoints, jnp.shape(self.cutpoints)[-1]
        shape = jnp.broadcast_shapes(jnp.shape(value), self.batch_shape)
        category = jnp.broadcast_to(jnp.asarray(value, jnp.int32), shape)
        cutpoints = jnp.broadcast_to(cutpoints, (*shape, count))
        has_lower, has_upper = category > 0, category < count
        lower, upper = (
            jnp.take_along_axis(cutpoints, jnp.clip(place, 0, count - 1)[..., None], axis=-1, mode="clip")[..., 0]
            for place in (category - 1, category)
        )
        above, below = upper - self.predictor, self.predictor - lower
        apart = above + below  # and not upper - lower: a third function of theta, which expectations would be over
        of_both = jnp.where(apart > 0, jnp.log(-jnp.expm1(-jnp.where(apart > 0, apart, 1.0))), -jnp.inf)
        total = jnp.where(has_upper, jax.nn.log_sigmoid(above), 0.0)
        total = total + jnp.where(has_lower, jax.nn.log_sigmoid(below), 0.0)
        return total + jnp.where(has_lower & has_upper, of_both, 0.0)


STABLE: dict[type, type] = {dist.OrderedLogistic: StableOrderedLogistic}


def with_base(fn: dist.Distribution, change: Callable[[dist.Distribution], dist.Distribution]) -> dist.Distribution:
    """A distribution with what is inside its masks, expansions and events changed."""
    if not isinstance(fn, (dist.Independent, dist.ExpandedDistribution, dist.MaskedDistribution)):
        return change(fn)
    base = with_base(fn.base_dist, change)
    if base is not fn.base_dist:
        fn = copy.copy(fn)
        fn.base_dist = base
    return fn


def with_stable_density(fn: dist.Distribution) -> dist.Distribution:
    """The same distribution, with a log density that does not underflow; also inside masks, expansions and events."""

    def stable(base: dist.Distribution) -> dist.Distribution:
        if type(base) in STABLE:
            base = copy.copy(base)
            base.__class__ = STABLE[type(base)]
        return base

    return with_base(fn, stable)
