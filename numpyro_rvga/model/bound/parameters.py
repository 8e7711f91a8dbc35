"""The model's ``numpyro.param`` sites, as one vector in unconstrained space."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import constraints
from numpyro.distributions.transforms import biject_to

from ..layout import Layout, layout_of


class Parameters(NamedTuple):
    """Deterministic parameters.

    :ivar layout: order and unconstrained shapes.
    :ivar transforms: to the constraint's set, by name.
    :ivar values: (K,), in unconstrained space.
    """

    layout: Layout
    transforms: dict[str, Any]
    values: Array

    def constrained(self, values: Array) -> dict[str, Array]:
        """By name, from (K,)."""
        return {name: self.transforms[name](value) for name, value in self.layout.unravel(values).items()}


def parameters_of(trace: Mapping[str, dict], dtype) -> Parameters:
    """The parameters at the values that a run of the model gave them.

    :raises ValueError: naming the site, if its initial value is outside its constraint.
    """
    transforms, initial = {}, {}
    for name, site in trace.items():
        if site["type"] != "param":
            continue
        transforms[name] = biject_to(site["kwargs"].get("constraint", constraints.real))
        initial[name] = transforms[name].inv(jnp.asarray(site["value"], dtype))
        if not jnp.all(jnp.isfinite(initial[name])):
            raise ValueError(f"numpyro.param site {name!r} starts at {site['value']}, outside its constraint.")
    layout = layout_of({name: value.shape for name, value in initial.items()})
    return Parameters(layout, transforms, layout.ravel(initial) if initial else jax.device_put(np.zeros(0, dtype)))
