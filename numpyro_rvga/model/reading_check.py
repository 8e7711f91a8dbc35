"""Whether a model of all data at once was read rightly: its terms against NumPyro's own log densities."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.compilation import at_once
from .program import Program
from .terms.terms import Terms, over_rows

NUM_DRAWS = 2  # of the prior's Gaussian
SAME = 1e-3  # of the sum of absolute densities: what rounding may change


def check_reading(program: Program) -> None:
    """:raises ValueError: naming a site of a whole program whose terms are another density than the model's."""
    if all(terms.by_draws for terms in program.terms):  # these are the model's own density
        return
    inputs = {**program.inputs(program.example_rows), **program.shared}

    def read(theta: Array) -> dict[str, Array]:
        def of(terms: Terms) -> Array:
            return jnp.sum(over_rows(partial(terms.log_prob, theta), terms.num_elements, inputs))

        return {terms.site: of(terms) for terms in program.terms if not terms.by_draws}

    def both(theta: Array) -> tuple[dict, dict, dict]:
        own = program.log_likelihood(theta, program.inputs(program.example_rows))
        total = {name: jnp.sum(values) for name, values in own.items()}
        return read(theta), total, {name: jnp.sum(jnp.abs(values)) for name, values in own.items()}

    points = program.points_of_prior(NUM_DRAWS, spread=0.5)
    terms, own, size = jax.device_get(at_once(lambda: jax.lax.map(both, points)))
    for name, values in terms.items():
        apart = np.abs(values - own[name])
        if np.any(np.isfinite(own[name]) & ~(apart <= SAME * np.maximum(size[name], 1.0))):
            worst = int(np.nanargmax(apart))
            raise ValueError(
                f"site {name!r} was read wrongly: at a draw its log density is {own[name][worst]:.6g} nats, and "
                f"{values[worst]:.6g} by what was read from the model. Please report this model; NUTS runs it."
            )
