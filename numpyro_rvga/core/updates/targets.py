"""The precision that a full step takes: of the exact curvature, or of a clamped one that is positive definite."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax

from ..matrices.precisions import PrecisionForm
from ..pytrees import PyTree
from .objective import Objective
from .search import Proposal, Search, Target

STEEP = 0.1  # of the bound's slope towards the exact target, that one towards the clamped target must have


def choose_target(
    search: Search, form: PrecisionForm, objective: Objective, proposal: Proposal, mean: Array, hessians: PyTree
) -> tuple[Array, Target]:
    """The precision of the factors' exact curvature at the proposal, and the one that a full step takes."""
    exact = _exact(search, form, objective.curvature(mean, hessians, False))
    if search.log_concave:
        return exact.precision, exact

    def clamped() -> Target:
        return _clamped(search, form, proposal, exact, objective.curvature(mean, hessians, True))

    return exact.precision, lax.cond(jnp.all(jnp.isfinite(exact.factor)), lambda: exact, clamped)


def _exact(search: Search, form: PrecisionForm, curvature: Array) -> Target:
    """Of the factors' exact curvature."""
    precision = form.target(curvature)
    return Target(precision, form.factor(precision) if search.keeps_factor else None, jnp.asarray(False))


def _clamped(
    search: Search, form: PrecisionForm, proposal: Proposal, exact: Target, clamped_curvature: Array
) -> Target:
    """In place of an exact target that is not positive definite: the one without the factors' positive curvatures, if
    the bound rises towards it."""
    precision = form.target(clamped_curvature)
    factor = form.factor(precision)
    if search.mode or search.alternating:
        return Target(precision, factor, jnp.asarray(True))
    ahead = exact.precision - proposal.precision
    steepest, slope = form.products(proposal.factor, proposal.covariance_root, ahead, precision - proposal.precision)
    rises = slope >= STEEP * steepest
    return Target(jnp.where(rises, precision, exact.precision), jnp.where(rises, factor, exact.factor), rises)
