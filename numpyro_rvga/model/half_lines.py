"""Sites with a prior on the whole line that the model can only take positive values of, such as scales ~ Normal(0, 1).

NUTS stays on the positive half from its start on, for the density is NaN elsewhere. So the density is that of the model
on the positive half, whose unconstrained space is the logarithm's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from ..core.compilation import jit_once
from .program import Program

PROBE = 0.5  # the value, and minus the value, at which the density is looked at


class PositiveHalf(dist.Distribution):
    """A distribution of single numbers on its positive half, with the density that it has there: it is not normalized.

    :param base: the distribution on the whole line.
    """

    support = constraints.positive
    pytree_data_fields = ("base",)

    def __init__(self, base: dist.Distribution):
        self.base = base
        super().__init__(base.batch_shape, base.event_shape)

    def log_prob(self, value: ArrayLike, intermediates: list[Any] | None = None) -> ArrayLike:
        return self.base.log_prob(value)

    def sample(self, key: Array | None, sample_shape: tuple[int, ...] = ()) -> ArrayLike:
        below = self.base.cdf(jnp.zeros(self.batch_shape))
        assert key is not None
        uniform = jax.random.uniform(key, (*sample_shape, *self.batch_shape))
        return self.base.icdf(below + (1 - below) * uniform)


class _OnPositiveHalf(Messenger):
    """The model with some of its sites on the positive half of the line."""

    def __init__(self, fn: Callable, sites: frozenset[str]):
        super().__init__(fn)
        self._sites = sites
        functools.update_wrapper(self, fn)

    def process_message(self, msg: dict[str, Any]) -> None:
        if msg["type"] == "sample" and msg["name"] in self._sites:
            msg["fn"] = _positive_half(msg["fn"])


def _positive_half(fn: dist.Distribution) -> dist.Distribution:
    if isinstance(fn, dist.Independent):
        return _positive_half(fn.base_dist).to_event(fn.reinterpreted_batch_ndims)
    if isinstance(fn, dist.MaskedDistribution):
        return _positive_half(fn.base_dist).mask(jnp.asarray(fn._mask))
    if isinstance(fn, dist.ExpandedDistribution):
        return _positive_half(fn.base_dist).expand(fn.batch_shape)
    return PositiveHalf(fn)


def on_positive_half(model: Callable, sites: tuple[str, ...]) -> Callable:
    """The model with these sites on the positive half of the line."""
    return _OnPositiveHalf(model, frozenset(sites))


def positive_sites(program: Program) -> tuple[str, ...]:
    """Latent sites of real numbers that may not be negative: where all of them are positive, the model's density has a
    value, and it has none (NaN) if one of them is negative.

    :param program: of the model. Its example rows are looked at.
    """
    candidates = [name for name in program.layout.site_names if program.sites[name].is_real]
    if not candidates:
        return ()
    entries = program.layout.indices
    above = np.zeros(program.layout.size)
    above[program.layout.indices_of(candidates)] = PROBE
    points = np.tile(above, (1 + len(candidates), 1))
    for point, site in zip(points[1:], candidates):
        point[np.ravel(entries[site])] = -PROBE

    def has_value(theta: Array, inputs: Any) -> Array:
        terms = [*program.log_likelihood(theta, inputs).values(), program.log_prior(theta)]
        return ~jnp.any(jnp.stack([jnp.any(jnp.isnan(term)) for term in terms]))

    points = jnp.asarray(points, program.dtype)
    first, *others = jit_once(lambda points, inputs: jax.lax.map(lambda x: has_value(x, inputs), points))(
        points, program.inputs(program.example_rows)
    )
    return tuple(site for site, has in zip(candidates, others) if not has) if first else ()
