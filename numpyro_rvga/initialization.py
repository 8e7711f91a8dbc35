"""Initial means of q other than the prior's: NumPyro's strategies, and the initial weights of a network's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from numpyro import handlers
from numpyro.primitives import Messenger

from .model.data.rows import num_rows
from .model.program import Program
from .user_warnings import warn

PARAMS = "$params"  # how numpyro.contrib.module ends the names of a module's weights


def init_to_module(site: dict | None = None) -> Any:
    """Start the weights of ``random_flax_module`` and ``random_nnx_module`` where their layers would start.

    The prior of a network's weights is centered at zero, a saddle where the network has no gradient. Other sites start
    at their prior's mean. For ``init_loc_fn`` of :class:`BONG`.

    **Example**

    With the data of :class:`RVGA`'s example:

    .. doctest::

        >>> from flax import linen
        >>> from numpyro.contrib.module import random_flax_module
        >>> from numpyro_rvga import BONG, init_to_module
        >>> def network(X, y=None):
        ...     logits = random_flax_module("net", linen.Dense(1), dist.Normal(0, 1), input_shape=(2,))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=logits(X)[:, 0]), obs=y)
        >>> start = BONG(network, init_loc_fn=init_to_module).init(data).gaussian.mean
        >>> int((start != 0).sum()), start.size  # the layer draws its kernel, and starts its bias at zero
        (2, 3)
    """
    return init_to_module if site is None else None


def initial_location(program: Program, init_loc_fn: Callable, rng_key: Array) -> Array:
    """theta (P,) at which a strategy starts; NaN for sites that start at the prior's mean.

    :raises ValueError: if the strategy is :func:`init_to_module` and no weights of a module are found.
    """
    values: dict[str, Array] = {}

    def note(site):
        if site["type"] == "sample" and not site["is_observed"] and site["name"] in program.layout.site_names:
            value = init_loc_fn(site)
            if value is not None:
                values[site["name"]] = value
            return value
        return None

    trace, weights = _drawn(program, rng_key, note)
    if init_loc_fn is init_to_module:
        values = weights
        if not values:
            raise ValueError(
                "init_to_module found no weights of random_flax_module or random_nnx_module: use another init_loc_fn, "
                "such as init_to_value(values=...)."
            )
    drawn = {name: trace[name]["value"] for name in program.layout.site_names}
    theta = program.unconstrain(drawn | values)
    is_given = program.layout.ravel(
        {name: jnp.full(program.layout.shapes[name], name in values) for name in program.layout.site_names}
    )
    return jnp.where(is_given, theta, jnp.nan)


def warn_of_rest(program: Program, mean: Array) -> None:
    """If the layers of a module, two or more of them, all start at zero: the network has no slope there."""
    if not any("/" in name for name in program.layout.site_names):  # the names of no module's weights
        return
    _, weights = _drawn(program, jax.random.key(0), lambda site: None)
    sites = program.layout.unravel(jnp.asarray(mean))
    kernels = [name for name, value in weights.items() if jnp.ndim(value) > 1]
    if len(kernels) > 1 and not any(bool(jnp.any(sites[name])) for name in kernels):
        warn(
            "the weights of the network start at zero, where it has no slope and learns next to nothing: pass "
            "init_loc_fn=init_to_module, or give them a prior with another mean."
        )


def _drawn(program: Program, rng_key: Array, substitute_fn: Callable) -> tuple[dict, dict[str, Array]]:
    """A trace of the model, and the weights that the layers of its modules would start from, by site."""
    model = _Weights(handlers.seed(program.runner(num_rows(program.example_row)), rng_key))
    arguments, keywords = program.call_arguments(program.example_row)
    with handlers.block():
        trace = handlers.trace(handlers.substitute(model, substitute_fn=substitute_fn)).get_trace(
            *arguments, **keywords
        )
    return trace, {name: value for name, value in model.values.items() if name in program.layout.site_names}


class _Weights(Messenger):
    """Notes the weights of modules by the names of the sites that take their place."""

    def __init__(self, fn: Callable):
        super().__init__(fn)
        self.values: dict[str, Array] = {}

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "param" and msg["name"].endswith(PARAMS) and msg["value"] is not None:
            prefix = msg["name"].removesuffix(PARAMS)
            self.values |= {f"{prefix}/{path}": value for path, value in _leaves(msg["value"])}


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Array]]:
    """Paths, joined by dots, and arrays."""
    for name, item in tree.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(item, Mapping):
            yield from _leaves(item, path)
        elif hasattr(item, "dtype"):
            yield path, item
