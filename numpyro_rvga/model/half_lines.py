"""Sites with a prior on the whole line that the model can only take positive values of, such as scales ~ Normal(0, 1).

NUTS stays on the positive half from its start on, for the density is NaN elsewhere. So the density is that of the model
on the positive half, whose unconstrained space is the logarithm's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from jax.typing import ArrayLike
from numpyro.distributions import constraints
from numpyro.primitives import Messenger

from ..core.compilation import at_once
from ..core.jaxprs.interpret import interpret, is_inlined
from ..core.jaxprs.primitives import equations_of
from .handlers.stable_densities import with_base
from .program import Program

PROBE = 0.5  # the value, and minus the value, at which the density is evaluated
HAVE_NO_VALUE_BELOW_ZERO = frozenset("log sqrt rsqrt pow cholesky".split())
ARE_POSITIVE = frozenset("exp exp2 logistic abs square cosh erfc".split())


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
            msg["fn"] = with_base(msg["fn"], PositiveHalf)


def read_on_positive_half(model: Callable, read: Callable[[Callable], Program]) -> tuple[Program, tuple[str, ...]]:
    """A model's program, and the sites that may not be negative, which are positive in it.

    :param read: gives a model's program.
    """
    program = read(model)
    sites = _positive_sites(program)
    return (read(_OnPositiveHalf(model, frozenset(sites))), sites) if sites else (program, ())


def _positive_sites(program: Program) -> tuple[str, ...]:
    """Latent sites of real numbers that may not be negative: where all of them are positive, the model's density has a
    value, and it has none (NaN) if one of them is negative.

    :param program: of the model. Its example rows are evaluated.
    """
    candidates = _of_logarithms(program)
    if not candidates:
        return ()
    entries = program.layout.indices
    above = np.zeros(program.layout.size)
    above[program.layout.indices_of(candidates)] = PROBE
    points = np.tile(above, (1 + len(candidates), 1))
    for point, site in zip(points[1:], candidates):
        point[np.ravel(entries[site])] = -PROBE

    def has_value(theta: Array, rows: Mapping[str, Any]) -> Array:
        terms = _log_densities(program, theta, rows)
        return ~jnp.any(jnp.stack([jnp.any(jnp.isnan(term)) for term in terms]))

    points = jnp.asarray(points, program.dtype)
    first, *others = at_once(lambda: jax.lax.map(lambda theta: has_value(theta, program.example_rows), points))
    return tuple(site for site, has in zip(candidates, others) if not has) if first else ()


def _log_densities(program: Program, theta: Array, rows: Mapping[str, Any]) -> list[Array]:
    """Log densities of the example rows, given values of their own variables, and of the latent sites."""
    _, own = program.row_latents_of(rows, np.random.default_rng(0))
    return [*program.elements_of_each(theta, rows, own).values(), program.log_prior(theta)]


def _of_logarithms(program: Program) -> list[str]:
    """Latent sites of real numbers of which the model takes a logarithm, or something else that has no value below
    zero, unless it makes positive numbers of them first."""
    names = program.layout.site_names
    if not any(program.sites[name].is_real for name in names):
        return []
    theta = np.zeros(program.layout.size, program.dtype)
    closed = jax.make_jaxpr(lambda theta: _log_densities(program, theta, program.example_rows))(theta)
    everything, of_logarithms = frozenset(names), set()

    def sources(eqn: Any, arguments: list[frozenset]) -> list[frozenset] | None:
        """The sites that each output depends on."""
        if is_inlined(eqn):
            return None
        if eqn.primitive.name == "split" and arguments[0] is everything:
            return [frozenset([name]) for name in names]
        union = frozenset().union(*arguments)
        if any(inner.primitive.name in HAVE_NO_VALUE_BELOW_ZERO for inner in equations_of(eqn)):
            of_logarithms.update(union)
        return [frozenset() if eqn.primitive.name in ARE_POSITIVE else union] * len(eqn.outvars)

    interpret(closed.jaxpr, closed.consts, [everything], sources, lambda value: frozenset())
    return [name for name in names if name in of_logarithms and program.sites[name].is_real]
