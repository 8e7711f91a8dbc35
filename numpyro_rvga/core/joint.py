"""Joint solves: many rows together with the true prior, or the Gaussian summary of a stream with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .block import Base, Search, Settings, Solution, block_search, run_search, standard_base
from .designs import times_root
from .factors import Factors, Sums, evaluate
from .linalg import solve_lower
from .objective import Group, Objective, joint_objective, standard_frame
from .precisions import Weighted
from .recursion import Absorbed, Quadratic, Sites, State, StepInfo, quadratic_at, spreads, summarise


class Joint(NamedTuple):
    """A joint solve as a search in the state's standard coordinates.

    :ivar objective: the factors' part of the bound. :ivar base: the rest of it.
    :ivar absorb: solution, number of rows -> the state after it.
    :ivar absorbed: solution -> how q sees the rows there.
    """

    search: Search
    objective: Objective
    base: Base
    absorb: Callable[[Solution, Array], tuple[State, StepInfo]]
    absorbed: Callable[[Solution], tuple[Absorbed, ...]]


def bound_at(joint: Joint, mean: Array, root: Array) -> tuple[Array, Sums]:
    """The bound at N(mean, root root^T), with root lower triangular or its transpose, and the sums over factors."""
    precision, linear = base_terms(joint.base, mean)
    sums = joint.objective.sums(mean, root.T)
    entropy = jnp.sum(jnp.log(jnp.diagonal(root))) + 0.5 * mean.size
    trace = jnp.sum(root * (precision @ root))
    bound = sums.value + linear @ mean - 0.5 * mean @ precision @ mean + joint.base.constant
    return bound - 0.5 * trace + entropy, sums


def base_terms(base: Base, mean: Array) -> tuple[Array, Array]:
    """Precision and linear term, written out."""
    precision = jnp.eye(mean.size, dtype=mean.dtype) if base.precision is None else base.precision
    return precision, jnp.zeros_like(mean) if base.linear is None else base.linear


def joint_solve(joint: Joint, num_rows: Array, *, with_absorbed: bool = False) -> tuple[State, StepInfo]:
    """The state after ``num_rows`` new rows.

    :param with_absorbed: report how q sees the rows.
    """
    found = run_search(joint.search)
    after, info = joint.absorb(found, num_rows)
    return after, info._replace(absorbed=joint.absorbed(found)) if with_absorbed else info


def joint_search(
    rows: Group,
    prior: Group,
    state: State,
    settings: Settings,
    *,
    sites: tuple[Sites, ...] | None = None,
    laplace: bool = False,
    is_affine: bool = False,
    starts: Array | None = None,
    init: tuple[Array, Array] | None = None,
    alternating: bool = False,
    selecting: bool = False,
) -> Joint:
    """Rows and the true prior terms together.

    The state's Gaussian stand-in for the prior terms is divided out and the terms themselves take its place. With
    ``sites`` the rows are known to the state by these: they are divided out too and the rows taken in afresh. So a
    last solve is "Gaussian summary of the data x true prior x the rows that were kept".

    :param laplace: stop at the mode, with the negative Hessian there as precision.
    :param is_affine: whether all predictors are affine in theta.
    :param starts: (k, P) points, in the state's standard coordinates, of which the most probable is where the search
        begins; default: the state's mean.
    :param init: mean and precision of a q to start from, in the state's standard coordinates.
    :param alternating: see :func:`block_search`.
    :param selecting: whether the designs of all rows are selections.
    """
    dtype, size = state.mean.dtype, state.mean.shape[0]

    def factors_at(e):
        def whitened(chunk):
            factors = rows.linearise(chunk, state.mean + state.root @ e)
            return tuple(f._replace(design=times_root(f.design, state.root)) for f in factors)

        found = lax.map(whitened, rows.chunks)
        return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), found)

    # A precision to start from may be of any form.
    weighted = selecting and not prior.kinds and not sites and not laplace and init is None

    def seen_from(weighted):
        frame = standard_frame(state.mean, state.root, weighted=weighted)
        return joint_objective((prior, rows), frame, size, dtype, is_affine=is_affine)

    objective = seen_from(False)
    known = factors_at(jnp.zeros(size, dtype)) if sites else ()
    base = _divide(state, known, sites)
    start = start_precision = None
    if init is not None:
        start, start_precision = init
    else:
        start = jnp.zeros(size, dtype) if starts is None else _most_probable(objective, base, starts)
    search = block_search(
        seen_from(True) if weighted else objective,
        base,
        size,
        dtype,
        settings,
        start=start,
        start_precision=start_precision,
        point=laplace,
        alternating=alternating,
        form=Weighted(jnp.eye(size, dtype=dtype), state.root) if weighted else None,
    )

    def absorb(found, num_rows):
        bound = found.bound - jnp.sum(jnp.log(jnp.diagonal(found.root))) if laplace else found.bound
        mean = state.mean + state.root @ found.mean
        root = solve_lower(found.root, state.root.T).T
        prior_site = None
        if state.prior_site is not None:
            prior_site = _prior_site(prior, mean, None if laplace else root)
        moved = State(mean, jnp.zeros_like(mean), root, bound, prior_site, state.num_rows + num_rows)
        ok = jnp.isfinite(bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, state)
        gain = bound - state.log_evidence
        return after, StepInfo(gain, found.decrement, found.iterations, found.converged, ok)

    def absorbed_at(found):
        factors = factors_at(found.mean)
        return summarise(rows.kinds, factors, spreads(factors, found.root))

    return Joint(search, objective, base, absorb, absorbed_at)


def _most_probable(objective: Objective, base: Base, starts: Array) -> Array:
    def log_density(e):
        precision = e if base.precision is None else base.precision @ e
        linear = 0.0 if base.linear is None else base.linear @ e
        return objective.expect(e, None)[0] + linear - 0.5 * e @ precision

    values = lax.map(log_density, starts)
    return starts[jnp.argmax(jnp.where(jnp.isfinite(values), values, -jnp.inf))]


def _divide(state: State, factors: tuple[Factors, ...], sites: tuple[Sites, ...] | None) -> Base:
    """The state without its prior site and the rows' sites, in coordinates where the state is standard normal."""
    base = standard_base(state.mean.dtype)._replace(constant=state.log_evidence)
    if state.prior_site is None and sites is None:
        return base
    size = state.mean.shape[0]
    precision, linear, constant = jnp.eye(size, dtype=state.mean.dtype), jnp.zeros_like(state.mean), base.constant
    if state.prior_site is not None:
        value, slope = quadratic_at(state.prior_site, state.mean)
        precision = precision - state.root.T @ state.prior_site.precision @ state.root
        linear, constant = linear - state.root.T @ slope, constant - value
    for block, site in zip(factors, sites or ()):
        pull = jnp.einsum("ncd,nd->nc", site.precision, block.offset)
        weighted = jnp.einsum("ncd,ndr->ncr", site.precision, block.design)
        precision = precision - jnp.einsum("ncr,ncs->rs", block.design, weighted)
        linear = linear - jnp.einsum("nc,ncr->r", site.linear - pull, block.design)
        values = site.constant + jnp.sum((site.linear - 0.5 * pull) * block.offset, axis=1)
        constant = constant - jnp.sum(values)
    return Base(0.5 * (precision + precision.T), linear, constant)


def _prior_site(prior: Group, mean: Array, root: Array | None) -> Quadratic:
    """What stands for the prior terms in N(mean, root root^T), or at a mode (root None)."""
    sums = evaluate(prior.kinds, prior.linearise(prior.first, mean), None if root is None else root.T)
    trace = 0.0 if root is None else jnp.sum((root @ root.T) * sums.curvature)
    return Quadratic(sums.curvature, sums.gradient, sums.value + 0.5 * trace, mean)
