"""How q moves to what a block of rows says: the four rules, which differ in two choices (BONG paper, table 2).

A rule takes natural or plain gradients, and one step from the prior, where its KL divergence has no gradient, or
several, which have to count it. So BONG is BLR with one step of rate 1, and BOG is BBB with one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .gaussians import DiagonalGaussian, Family, Site, gradient_step, is_near

RULES = ("bong", "bog", "blr", "bbb")
NATURAL = ("bong", "blr")


class Rule(NamedTuple):
    """What a step of one block is (static).

    :ivar name: one of :data:`RULES`. :ivar chart: "natural" or "moment". :ivar num_iters: steps for each block.
    :ivar projection: for the diagonal family, how the exact update is projected instead: see ``projected_step``.
    """

    name: str
    chart: str = "natural"
    learning_rate: float | Array = 1.0
    num_iters: int = 1
    projection: str | None = None

    def at(self, learning_rate: Array | None) -> Rule:
        """With a learning rate that is known when the step is taken only; None: as it is."""
        return self if learning_rate is None else self._replace(learning_rate=learning_rate)


class Updated(NamedTuple):
    """:ivar clipped: whether curvatures lost their negative part, without which q would have been no Gaussian.
    :ivar ok: whether the result is a Gaussian, not absurdly far away."""

    q: Any
    clipped: Array
    ok: Array


def update(
    rule: Rule, prior: Family, estimate: Callable[[Array, Family], Site], rng_key: Array, *, unroll: bool = False
) -> Updated:
    """q after a block of rows, from the prior that holds all rows before it.

    :param estimate: (rng_key, q) -> what the block says at q.
    :param unroll: write the steps out one after the other.
    """
    first_key, rng_key = jax.random.split(rng_key)
    q, clipped = _step(rule, prior, estimate(first_key, prior), None)
    if rule.num_iters > 1:

        def body(iteration, carry):
            q, clipped = carry
            key = jax.random.fold_in(rng_key, iteration)
            q, again = _step(rule, q, estimate(key, q), prior)
            return q, clipped | again

        q, clipped = lax.fori_loop(1, rule.num_iters, body, (q, clipped), unroll=unroll or None)
    return Updated(q, clipped, _is_ok(rule, q, prior))


def iterate(rule: Rule, prior: Family, q: Family, estimate: Callable[[Array, Family], Site], rng_key: Array) -> Updated:
    """One step from q towards the posterior given all data, of which the block speaks for (batch BLR, E.6)."""
    after, clipped = _step(rule, q, estimate(rng_key, q), prior)
    return Updated(after, clipped, _is_ok(rule, after, q))


def _is_ok(rule: Rule, after: Family, before: Family) -> Array:
    """A plain rule at too large a rate may diverge for long before its numbers overflow."""
    return _left_a_gaussian(after) if rule.name in NATURAL else is_near(after, before)


def _left_a_gaussian(after: Family) -> Array:
    return jnp.all(jnp.isfinite(after.mean))


def _step(rule: Rule, q: Family, site: Site, prior: Family | None) -> tuple[Family, Array]:
    take = _natural if rule.name in NATURAL else _plain
    after = take(rule, q, site, prior)
    if not site.may_be_indefinite:
        return after, jnp.asarray(False)
    fine = _left_a_gaussian(after)
    return lax.cond(fine, lambda: after, lambda: take(rule, q, site.clipped(), prior)), ~fine


def _natural(rule: Rule, q: Family, site: Site, prior: Family | None) -> Family:
    if rule.projection is not None and isinstance(q, DiagonalGaussian):
        return q.projected_step(site, rule.projection)
    return q.natural_step(site, rule.learning_rate, rule.chart, prior)


def _plain(rule: Rule, q: Family, site: Site, prior: Family | None) -> Family:
    return gradient_step(q, site, rule.learning_rate, rule.chart, prior if rule.name == "bbb" else None)
