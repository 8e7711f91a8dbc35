"""Joint solves: many rows together with the true prior, or the Gaussian summary of a stream with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from . import maximize
from .designs import times_root
from .drivers import solve_traced
from .factors import Factors, Sums, evaluate
from .linalg import solve_lower
from .maximize import Base, Search, Solution, SolverState, standard_base
from .objective import Group, Objective, joint_objective, standard_frame
from .precisions import Dense, PrecisionForm, Weighted
from .recursion import Absorbed, Quadratic, Sites, State, StepInfo, quadratic_at, spreads, summarise


class Start(NamedTuple):
    """Where a solve begins, and in what terms.

    :ivar base: the bound's part that is not the factors'. :ivar form: of precisions. :ivar state: not yet evaluated.
    """

    base: Base
    form: PrecisionForm
    state: SolverState


class Joint(NamedTuple):
    """A joint solve, in the standard coordinates of the Gaussian before it. Nothing is computed until a part is called.

    :ivar objective: the factors' part of the bound. :ivar start: where it begins.
    :ivar absorb: solution, number of rows -> the state after it.
    :ivar absorbed: solution -> how q sees the rows there.
    """

    objective: Objective
    start: Callable[[], Start]
    absorb: Callable[[Solution, Array], tuple[State, StepInfo]]
    absorbed: Callable[[Solution], tuple[Absorbed, ...]] = lambda found: ()


def solve_joint_traced(search: Search, joint: Joint) -> Solution:
    """The solution, found inside a compiled function."""
    base, form, state = joint.start()
    return solve_traced(search, joint.objective, base, form, state)


def bound_at(joint: Joint, base: Base, mean: Array, root: Array) -> tuple[Array, Sums]:
    """The bound at N(mean, root root^T), with root lower triangular or its transpose, and the sums over factors."""
    precision, linear = base_terms(base, mean)
    sums = joint.objective.sums(mean, root.T)
    entropy = jnp.sum(jnp.log(jnp.diagonal(root))) + 0.5 * mean.size
    trace = jnp.sum(root * (precision @ root))
    bound = sums.value + linear @ mean - 0.5 * mean @ precision @ mean + base.constant
    return bound - 0.5 * trace + entropy, sums


def base_terms(base: Base, mean: Array) -> tuple[Array, Array]:
    """Precision and linear term, written out."""
    precision = jnp.eye(mean.size, dtype=mean.dtype) if base.precision is None else base.precision
    return precision, jnp.zeros_like(mean) if base.linear is None else base.linear


def joint_solve(
    search: Search,
    rows: Group,
    prior: Group,
    state: State,
    *,
    sites: tuple[Sites, ...] | None = None,
    starts: Array | None = None,
    init: tuple[Array, Array] | None = None,
    selecting: bool = False,
) -> Joint:
    """Rows and the true prior terms together.

    The state's Gaussian stand-in for the prior terms is divided out and the terms themselves take its place. With
    ``sites`` the rows are known to the state by these: they are divided out too and the rows taken in afresh. So a
    last solve is "Gaussian summary of the data x true prior x the rows that were kept".

    :param starts: (k, P) points, in the state's standard coordinates, of which the most probable is where the search
        begins; default: the state's mean.
    :param init: mean and precision of a q to start from, in the state's standard coordinates.
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
    weighted = selecting and not prior.kinds and not sites and not search.mode and init is None
    frame = standard_frame(state.mean, state.root, weighted=weighted)
    objective = joint_objective((prior, rows), frame, staged=search.staged)

    def start():
        known = factors_at(jnp.zeros(size, dtype)) if sites else ()
        base = _divide(state, known, sites)
        mean, precision = (jnp.zeros(size, dtype), None) if init is None else init
        if starts is not None:
            mean = _most_probable(objective, base, starts)
        form = Weighted(jnp.eye(size, dtype=dtype), state.root) if weighted else Dense(base.precision)
        return Start(base, form, maximize.init(search, form, mean, precision))

    def absorb(found, num_rows):
        bound = found.bound - jnp.sum(jnp.log(jnp.diagonal(found.root))) if search.mode else found.bound
        mean = state.mean + state.root @ found.mean
        root = solve_lower(found.root, state.root.T).T
        prior_site = None
        if state.prior_site is not None:
            prior_site = _prior_site(prior, mean, None if search.mode else root)
        moved = State(mean, jnp.zeros_like(mean), root, bound, prior_site, state.num_rows + num_rows)
        ok = jnp.isfinite(bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, state)
        gain = bound - state.log_evidence
        return after, StepInfo(gain, found.decrement, found.iterations, found.converged, ok)

    def absorbed_at(found):
        factors = factors_at(found.mean)
        return summarise(rows.kinds, factors, spreads(factors, found.root))

    return Joint(objective, start, absorb, absorbed_at)


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
