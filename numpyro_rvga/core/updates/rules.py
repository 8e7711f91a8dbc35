"""The four update rules of the BONG paper (table 2), which differ in two choices, and the implicit step of R-VGA.

A rule takes natural gradients (BONG, BLR) or plain ones (BOG, BBB). It takes one step from the prior on
E_q[log p(y | theta)] (BONG, BOG), or several on the bound E_q[log p(y | theta)] - KL(q || prior) (BLR, BBB). At the
prior the KL divergence has no gradient. So BONG is BLR with one step of rate 1, and BOG is BBB with one step.

The implicit step takes the derivatives under the q that it leads to (:func:`~.estimators.implicit`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..gaussians import ExpectedDerivatives, Family, gradient_step, has_diverged
from ..gaussians.steps import nan_if_invalid, shifted
from ..pytrees import PyTree

RULES = ("bong", "bog", "blr", "bbb", "implicit")
NATURAL = ("bong", "blr", "implicit")


class UpdateRule(Protocol):
    """How expected derivatives move q: a step of the user's own."""

    def __call__(self, prior: Family, q: Family, derivatives: ExpectedDerivatives) -> Family:
        """
        :param prior: the Gaussian before the block of rows. :param q: where it has come to; at first, ``prior``.
        :param derivatives: of the block's log-likelihood, expected under q.
        :return: of the same family; with a mean of NaN if the step leaves no Gaussian.
        """
        ...


class Rule(NamedTuple):
    """How a block of rows updates q (static).

    :ivar name: one of :data:`RULES`, or an :class:`UpdateRule`.
    :ivar parameterization: ``"natural"`` or ``"moment"``: the parameters in which a step is taken.
    :ivar learning_rate: of a step.
    :ivar num_iters: steps for each block.
    :ivar projection: how a natural step is projected, one of the family's ``projections``; None: the family's own way.
    """

    name: str | UpdateRule
    parameterization: str = "natural"
    learning_rate: float | Array = 1.0
    num_iters: int = 1
    projection: str | None = None

    @property
    def has_rate(self) -> bool:
        """Whether the learning rate may be any."""
        return isinstance(self.name, str) and self.name not in ("bong", "implicit")

    @property
    def is_natural(self) -> bool:
        """Whether a step keeps its length in any parameters."""
        return self.name in NATURAL

    @property
    def is_plain(self) -> bool:
        """Whether a step goes along the plain gradient in the parameters."""
        return isinstance(self.name, str) and not self.is_natural

    def at(self, learning_rate: Array | None) -> Rule:
        """The rule with another learning rate, which may be traced; None: unchanged."""
        return self if learning_rate is None else self._replace(learning_rate=learning_rate)


class Updated(NamedTuple):
    """q after a block of rows.

    :ivar clipped: whether H lost its negative part, since the step would have left no Gaussian.
    :ivar ok: whether q is a Gaussian and has not diverged.
    """

    q: PyTree
    clipped: Array
    ok: Array


def update(
    rule: Rule,
    prior: Family,
    estimate: Callable[[Array, Family], ExpectedDerivatives],
    rng_key: Array,
    *,
    unroll: bool = False,
) -> Updated:
    """q after a block of rows.

    :param prior: the Gaussian before the block.
    :param estimate: (rng_key, q) -> the expected derivatives of the block's log-likelihood at q.
    :param unroll: unroll the loop over steps.
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


def iterate(
    rule: Rule, prior: Family, q: Family, estimate: Callable[[Array, Family], ExpectedDerivatives], rng_key: Array
) -> Updated:
    """One step from q towards the posterior of all rows (batch BLR, BONG paper, E.6).

    :param prior: before any row.
    :param estimate: as for :func:`update`, scaled from the block to all rows.
    """
    after, clipped = _step(rule, q, estimate(rng_key, q), prior)
    return Updated(after, clipped, _is_ok(rule, after, q))


def _is_ok(rule: Rule, after: Family, before: Family) -> Array:
    """Plain gradients at too large a rate may diverge for long before their numbers overflow."""
    return _is_gaussian(after) if rule.is_natural else ~has_diverged(after, before)


def _is_gaussian(after: Family) -> Array:
    """Steps that leave no Gaussian return a mean of NaN, in all entries."""
    return jnp.isfinite(after.mean[0])


def _step(rule: Rule, q: Family, derivatives: ExpectedDerivatives, prior: Family | None) -> tuple[Family, Array]:
    take = _own if callable(rule.name) else STEPS[rule.name]
    after = take(rule, q, derivatives, prior)
    if not derivatives.may_be_indefinite:
        return after, jnp.asarray(False)
    fine = _is_gaussian(after)
    return lax.cond(fine, lambda: after, lambda: take(rule, q, derivatives.clipped(), prior)), ~fine


def _own(rule: Rule, q: Family, derivatives: ExpectedDerivatives, prior: Family | None) -> Family:
    step = cast(UpdateRule, rule.name)
    return nan_if_invalid(step(q if prior is None else prior, q, derivatives))


def _natural(rule: Rule, q: Family, derivatives: ExpectedDerivatives, prior: Family | None) -> Family:
    return q.natural_step(derivatives, rule.learning_rate, rule.parameterization, prior, rule.projection)


def _implicit(rule: Rule, q: Family, derivatives: ExpectedDerivatives, prior: Family | None) -> Family:
    """mu' = mu + Sigma g, Lambda' = Lambda + H, projected to the family (R-VGA paper, equations 28 and 29)."""
    held = derivatives._replace(gradient=jnp.zeros_like(q.mean))
    after = q.natural_step(held, 1.0, "natural", None, rule.projection)
    return nan_if_invalid(shifted(after, q.covariance_times(derivatives.gradient)))


def _plain(rule: Rule, q: Family, derivatives: ExpectedDerivatives, prior: Family | None) -> Family:
    return gradient_step(
        q, derivatives, rule.learning_rate, rule.parameterization, prior if rule.name == "bbb" else None
    )


STEPS = {"bong": _natural, "blr": _natural, "bog": _plain, "bbb": _plain, "implicit": _implicit}
