"""Draws of latent variables of single rows that are integrated out, given theta and their rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..data.rows import Arrays, num_rows
from .bound_likelihood import BoundLikelihood


def draw_row_latents(program: BoundLikelihood, rng_key: Array, theta: Array, rows: Arrays) -> dict[str, Array]:
    """Values of the rows' own latent sites, from their conditional distribution.

    Those that nothing is observed of come from their conditional prior. Discrete and Normal ones are exact. Others come
    from the nodes of their integral: a node by its weight, and a place in its cell.

    :param theta: (P,). :param rows: n of them.
    """

    def of_row(rng_key: Array, row: Arrays) -> dict[str, Array]:
        row = {name: value[None] for name, value in row.items()} | program.shared  # none of a whole program
        key, rest_key = jax.random.split(rng_key)
        states, _, z = drawn_of_row(program, key, theta, row)
        return program.row_latents_at(rest_key, theta, row, z, states)

    if program.whole:
        return of_row(rng_key, {})
    draws = jax.vmap(of_row)(jax.random.split(rng_key, num_rows(rows)), dict(rows))
    axes = program.row_latent_axes
    return {name: jnp.moveaxis(jnp.squeeze(x, axes[name] + 1), 0, axes[name]) for name, x in draws.items()}


def drawn_of_row(
    program: BoundLikelihood, rng_key: Array, theta: Array, row: Arrays
) -> tuple[dict[str, Array], Array, dict[str, Array]]:
    """Draws of the sites that outcomes depend on, given theta (P,): states, their log probability, and unconstrained
    values. ``row``: with what rows share; of a whole program that alone."""
    latents = program.row_latents
    observed, log_prob = _observed_of(program), jnp.zeros((), program.dtype)
    z = jnp.zeros(latents.continuous.size, program.dtype)
    states = jnp.zeros(len(latents.entries), int)
    for key, (component, draw) in zip(jax.random.split(rng_key, len(program.row_parts)), program.row_parts):
        elements = jnp.arange(component.size, dtype=jnp.int32)
        of_each = jax.vmap(lambda key, element: draw(key, theta, row, element))  # noqa: B023
        state, log_probs, values = of_each(jax.random.split(key, component.size), elements)
        z = z.at[component.continuous].set(values)
        states = states.at[component.discrete].set(state)
        log_prob = log_prob + jnp.sum(log_probs)
    given = {name: x for name, x in latents.continuous.unravel(z).items() if name in observed}
    return {name: value for name, value in latents.split(states).items() if name in observed}, log_prob, given


def partly_observed(program: BoundLikelihood) -> str | None:
    """A site of which outcomes depend on some entries only, if there is one."""
    return next((name for name, drawn in _entries_drawn(program).items() if any(drawn) and not all(drawn)), None)


def _observed_of(program: BoundLikelihood) -> set[str]:
    """The sites that outcomes depend on.

    :raises NotImplementedError: for a site of which that is so for some entries only.
    """
    if (name := partly_observed(program)) is not None:
        raise NotImplementedError(
            f"site {name!r}: outcomes depend on some of its entries only, and its draws given a row are not made. "
            "Make it two sites."
        )
    return {name for name, drawn in _entries_drawn(program).items() if any(drawn)}


def _entries_drawn(program: BoundLikelihood) -> dict[str, list[bool]]:
    """Which entries of each local site are drawn with the terms that they share."""
    latents = program.row_latents
    components = [component for component, _ in program.row_parts]
    continuous = {int(i) for component in components for i in component.continuous.ravel()}
    discrete = {latents.entries[i] for component in components for i in component.discrete.ravel()}
    drawn = {name: [int(i) in continuous for i in np.ravel(own)] for name, own in latents.continuous.indices.items()}
    return drawn | {
        name: [(name, i) in discrete for i in range(int(np.prod(shape)))] for name, shape in latents.shapes.items()
    }
