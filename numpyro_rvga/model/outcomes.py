"""Outcomes drawn from a row's own distribution, for its Fisher information."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
from jax import Array, lax

from .data.rows import Arrays
from .handlers.tracing import SiteRecord, can_be_drawn
from .program import Program


def check_can_be_drawn(program: Program) -> None:
    """:raises NotImplementedError: naming an observed site that has no distribution of outcomes."""
    records: dict[str, SiteRecord] = {}
    origin = jnp.zeros(program.layout.size + program.local.size, program.dtype)
    program.abstractly(lambda rows: records.update(program.records(origin, rows)) or 0, program.example_row)
    for terms in program.terms:
        reason = _why_not(program, terms.site, records.get(terms.site))
        if reason is not None:
            raise NotImplementedError(
                f"hessian='mc-fisher' draws outcomes from each row's own distribution, and site {terms.site!r} "
                f"{reason}: use hessian='lin-hess' or 'mc-ef'."
            )


def _why_not(program: Program, site: str, record: SiteRecord | None) -> str | None:
    if record is None or program.local.size or program.row_latents is not None:
        return "depends on a latent variable of each row"
    if record.is_auxiliary:
        return "is a factor, which has no outcomes"
    if program.is_value_of_latents(site):
        return "observes a value that is computed of latent sites"
    return None if can_be_drawn(record.fn, ()) else "has a distribution that cannot be drawn from"


def drawn_log_likelihood(program: Program, theta: Array, row: Arrays, rng_key: Array) -> Array:
    """log p(y | theta) of outcomes y ~ p(. | theta) of one row; its gradient's square is the information on average.

    The outcomes are constants where this is differentiated. A term that counts w times has w times the information, so
    it enters with the root of w.

    :param row: without a leading axis.
    """
    records = program.records(theta, {name: value[None] for name, value in row.items()})
    total = jnp.zeros((), theta.dtype)
    with numpyro.validation_enabled(False):
        for number, terms in enumerate(program.terms):
            record = records[terms.site]
            fixed = jax.tree.map(lax.stop_gradient, record.fn)
            outcome = fixed.sample(jax.random.fold_in(rng_key, number))
            total = total + jnp.sum(record.fn.log_prob(outcome) * jnp.sqrt(record.weight))
    return total
