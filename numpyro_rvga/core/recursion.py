"""How the Gaussian state moves: one block of rows at a time, or jointly with a prior that is not Gaussian.

The state's covariance is kept as a square root S (Sigma = S S^T, S of any form): positive definite by construction.
In the coordinates e of theta = mean + S e the state is the standard normal, and a block of n C < P predictors moves
it in the n C-dimensional span of S^T F^T only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .block import (
    Base,
    CovarianceRoot,
    Factors,
    Kind,
    Search,
    Settings,
    Solution,
    Sums,
    add,
    block_search,
    evaluate,
    solve_block,
    standard_base,
)
from .linalg import cholesky, lower_from_root, semidefinite_factor, solve_lower


class Quadratic(NamedTuple):
    """constant + linear . (theta - centre) - (theta - centre)' precision (theta - centre) / 2."""

    precision: Array
    linear: Array
    constant: Array
    centre: Array


class State(NamedTuple):
    """q = N(mean, root root^T) after ``num_rows`` rows.

    :ivar mean: (P,), with ``mean_error`` the rounding error that the last updates left (compensated summation).
    :ivar root: (P, P).
    :ivar log_evidence: accumulated bound; log q + log_evidence stands for the log joint density.
    :ivar prior_site: the part of log q that stands for prior terms that are not Gaussian; None if there are none.
    """

    mean: Array
    mean_error: Array
    root: Array
    log_evidence: Array
    prior_site: Quadratic | None
    num_rows: Array


class Transition(NamedTuple):
    """theta' = matrix theta + offset + noise_root z, with z standard normal: (P, P), (P,), (P, K)."""

    matrix: Array
    offset: Array
    noise_root: Array


class Sites(NamedTuple):
    """The quadratics that stand for n factors of one kind in q: constant + linear . u - u' precision u / 2.

    :ivar precision: (n, C, C). :ivar linear: (n, C). :ivar constant: (n,).
    :ivar error: (n,), how many nats the quadratic may be off where q has mass: the change of the factor's curvature
        one standard deviation away, times the variance. Zero for Gaussian factors.
    """

    precision: Array
    linear: Array
    constant: Array
    error: Array


class StepInfo(NamedTuple):
    """What a step has to tell.

    :ivar bound: E_q[log lik] - KL(q || before).
    :ivar ok: whether the result is finite; else nothing changed.
    :ivar sites: what now stands for the factors, by kind; empty unless asked for.
    """

    bound: Array
    decrement: Array
    iterations: Array
    converged: Array
    ok: Array
    sites: tuple[Sites, ...] = ()


def new_state(mean: Array, root: Array, prior_site: Quadratic | None) -> State:
    zero = jnp.zeros((), mean.dtype)
    return State(mean, jnp.zeros_like(mean), root, zero, prior_site, jnp.zeros((), jnp.int32))


def quadratic_at(site: Quadratic, theta: Array) -> tuple[Array, Array]:
    """Value and gradient at theta."""
    delta = theta - site.centre
    pull = site.precision @ delta
    return site.constant + site.linear @ delta - 0.5 * delta @ pull, site.linear - pull


def summarise(kinds: tuple[Kind, ...], factors: tuple[Factors, ...], spreads: tuple[Array, ...]) -> tuple[Sites, ...]:
    """The factors' sites at a q under which predictor i has mean ``offset`` and covariance spread_i spread_i^T."""

    def one(kind, mean, spread, constants):
        covariance = spread @ spread.T
        value, gradient, hessian = kind.expect(mean, covariance, constants)
        linear = gradient - hessian @ mean
        constant = value - linear @ mean - 0.5 * (mean @ hessian @ mean + jnp.sum(hessian * covariance))
        curvature = lambda u: kind.plugin(u, covariance, constants)[2]  # noqa: E731
        root, _ = semidefinite_factor(covariance)
        here = curvature(mean)
        error = jnp.zeros((), mean.dtype)
        for step in root.T:
            ahead, behind = curvature(mean + step) - here, curvature(mean - step) - here
            error = error + jnp.maximum(jnp.abs(step @ ahead @ step), jnp.abs(step @ behind @ step))
        return Sites(-hessian, linear, constant, error)

    return tuple(
        jax.vmap(partial(one, kind))(block.offset, spread, block.constants)
        for kind, block, spread in zip(kinds, factors, spreads)
    )


def predict(transition: Transition, state: State) -> State:
    """The state after the parameters have moved. What stood for the prior terms is now part of the Gaussian."""
    mean = transition.matrix @ state.mean + transition.offset
    root = lower_from_root(jnp.concatenate([transition.matrix @ state.root, transition.noise_root], axis=1))
    return state._replace(mean=mean, mean_error=jnp.zeros_like(mean), root=root, prior_site=None)


# ---------------------------------------------------------------------- small blocks
def implicit_step(
    kinds: tuple[Kind, ...],
    linearise: Callable[[Array], tuple[Factors, ...]],
    settings: Settings,
    num_linearizations: int,
    with_sites: bool,
) -> Callable[[State, Array], tuple[State, StepInfo]]:
    """The exact minimiser of KL(q' || p(rows | theta) q), f linearised ``num_linearizations`` times (once if affine).

    :param linearise: theta (P,) -> factors with ``offset`` = F_i(theta) and ``design`` the Jacobians (n, C, P).
    :param with_sites: report the factors' sites.
    """

    def step(state: State, num_rows: Array) -> tuple[State, StepInfo]:
        def solve(mean):
            factors = linearise(mean)
            shift = state.mean - mean
            centred = tuple(f._replace(offset=f.offset + f.design @ shift) for f in factors)
            designs, basis = _subspace(state.root, centred)
            dimension = designs[0].shape[-1]

            def predict(e):
                return tuple(Factors(f.offset + z @ e, z, f.constants) for f, z in zip(centred, designs))

            dtype = state.mean.dtype
            reduce = lambda e, covariance_root: evaluate(kinds, predict(e), covariance_root)  # noqa: E731
            found = solve_block(kinds, reduce, standard_base(dtype), dimension, dtype, settings)
            return found, basis, predict(found.mean)

        found, basis, factors = solve(state.mean)
        for _ in range(num_linearizations - 1):
            found, basis, factors = solve(state.mean + state.root @ _lift(basis, found.mean))
        info = (found.bound, found.decrement, found.iterations, found.converged)
        after, report = _move(state, basis, found.mean, found.root, num_rows, *info)
        if with_sites:
            report = report._replace(sites=summarise(kinds, factors, _spreads(factors, found.root)))
        return after, report

    return step


def explicit_step(
    kinds: tuple[Kind, ...], linearise: Callable[[Array], tuple[Factors, ...]]
) -> Callable[[State, Array], tuple[State, StepInfo]]:
    """Lambda' = Lambda - F^T G F, mu' = mu + Sigma' F^T g, with g and G taken under q (R-VGA paper, 30-31).

    A curvature that would make Lambda' indefinite loses its negative part.
    """

    def step(state: State, num_rows: Array) -> tuple[State, StepInfo]:
        factors = linearise(state.mean)
        designs, basis = _subspace(state.root, factors)
        blocks = tuple(Factors(f.offset, z, f.constants) for f, z in zip(factors, designs))
        _, gradient, curvature, fallback = evaluate(kinds, blocks, lambda z: z)
        identity = jnp.eye(gradient.shape[0], dtype=gradient.dtype)
        root = cholesky(identity + curvature)
        if fallback is not None:
            root = jnp.where(jnp.all(jnp.isfinite(root)), root, cholesky(identity + fallback))
        move = solve_lower(root, solve_lower(root, gradient), transpose=True)
        inverse = solve_lower(root, identity)
        moved = tuple(b._replace(offset=b.offset + b.design @ move) for b in blocks)
        value = evaluate(kinds, moved, partial(solve_lower, root)).value
        divergence = 0.5 * (jnp.sum(inverse * inverse) - identity.shape[0] + move @ move)
        divergence = divergence + jnp.sum(jnp.log(jnp.diagonal(root)))
        zero = jnp.zeros((), gradient.dtype)
        return _move(state, basis, move, root, num_rows, value - divergence, zero, jnp.asarray(1), jnp.asarray(True))

    return step


def scan_blocks(
    make_step: Callable, state: State, blocks, counts: Array, transition: Transition | None = None
) -> tuple[State, StepInfo]:
    """One step a block: ``make_step(block) -> step``; blocks is a pytree with a leading axis, counts its rows.

    :param transition: how parameters move before each block that has rows.
    """

    def body(carry, xs):
        block, count = xs
        if transition is not None:
            moved = predict(transition, carry)
            carry = jax.tree.map(lambda new, old: jnp.where(count > 0, new, old), moved, carry)
        return make_step(block)(carry, count)

    return lax.scan(body, state, (blocks, counts))


def _subspace(root: Array, factors: tuple[Factors, ...]):
    """Designs in coordinates of the span of S^T F^T, and its orthonormal basis (None: all of R^P)."""
    whitened = [f.design @ root for f in factors]
    sizes = [z.shape[0] * z.shape[1] for z in whitened]
    total, size = sum(sizes), root.shape[0]
    if total >= size:
        return whitened, None
    stacked = jnp.concatenate([z.reshape(-1, size) for z in whitened])
    if total == 1:
        length = jnp.sqrt(jnp.sum(stacked * stacked))
        basis = stacked / jnp.where(length > 0, length, 1.0)
        reduced = length[None, None]
    else:
        # Equal rows would leave columns that shrink from step to step until they underflow, and LAPACK fails on these.
        # A multiple of the identity below keeps every column alive; q feels it at the level of rounding errors only.
        floor = jnp.finfo(stacked.dtype).eps ** 0.5 * jnp.max(jnp.abs(stacked))
        columns = jnp.concatenate([stacked.T, floor * jnp.eye(total, dtype=stacked.dtype)])
        orthogonal, upper = jnp.linalg.qr(columns)
        basis, reduced = orthogonal[:size].T, upper.T
    pieces = jnp.split(reduced, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)])
    return [p.reshape(*z.shape[:2], total) for p, z in zip(pieces, whitened)], basis


def _spreads(factors: tuple[Factors, ...], precision_root: Array) -> tuple[Array, ...]:
    """Z_i Lambda^(-1/2) for each factor, (n, C, r)."""

    def spread(design):
        n, c, r = design.shape
        return solve_lower(precision_root, design.reshape(n * c, r).T).T.reshape(n, c, r)

    return tuple(spread(f.design) for f in factors)


def _lift(basis: Array | None, e: Array) -> Array:
    return e if basis is None else e @ basis


def _move(state, basis, move, precision_root, num_rows, bound, decrement, iterations, converged):
    """The state with e ~ N(move, (precision_root precision_root^T)^-1) in the subspace, unchanged outside it."""
    ok = jnp.isfinite(bound) & jnp.all(jnp.isfinite(move)) & jnp.all(jnp.isfinite(jnp.diagonal(precision_root)))
    move = jnp.where(ok, move, 0.0)  # the small quantities are made harmless, so that no (P, P) array is copied
    identity = jnp.eye(move.shape[0], dtype=move.dtype)
    precision_root = jnp.where(ok, precision_root, identity)
    if basis is None:
        root = solve_lower(precision_root, state.root.T).T
        change = state.root @ move
    else:
        spread = state.root @ basis.T
        change = spread @ move
        shrink = identity - solve_lower(precision_root, identity).T
        root = state.root - (spread @ shrink) @ basis
    mean, error = _compensated_add(state.mean, state.mean_error, change)
    evidence = state.log_evidence + jnp.where(ok, bound, 0.0)
    count = state.num_rows + jnp.where(ok, num_rows, 0)
    after = State(mean, error, root, evidence, state.prior_site, count)
    return after, StepInfo(bound, decrement, iterations, converged, ok)


def _compensated_add(total: Array, error: Array, change: Array) -> tuple[Array, Array]:
    change = change + error
    after = total + change
    return after, change - (after - total)


# ---------------------------------------------------------------------- joint solves
def joint_solve(
    kinds: tuple[Kind, ...],
    rows: JointRows,
    prior_kinds: tuple[Kind, ...],
    prior_linearise: Callable[[Array], tuple[Factors, ...]],
    state: State,
    num_rows: Array,
    settings: Settings,
    *,
    sites: tuple[Sites, ...] | None = None,
    laplace: bool = False,
    with_sites: bool = False,
    starts: Array | None = None,
) -> tuple[State, StepInfo]:
    """Rows and the true prior terms together.

    The state's Gaussian stand-in for the prior terms is divided out and the terms themselves take its place. With
    ``sites`` the rows are known to the state by these: they are divided out too and the rows taken in afresh. So a
    last solve is "Gaussian summary of the data x true prior x the rows that were kept".

    :param laplace: stop at the mode, with the negative Hessian there as precision.
    :param with_sites: report the rows' sites.
    :param starts: (k, P) points, in the state's standard coordinates, of which the most probable is where the search
        begins; default: the state's mean.
    """
    joint = joint_search(
        kinds, rows, prior_kinds, prior_linearise, state, settings, sites=sites, laplace=laplace, starts=starts
    )
    found = joint.search.solution(lax.while_loop(joint.search.unfinished, joint.search.try_once, joint.search.begin))
    after, info = joint.absorb(found, num_rows)
    if with_sites:
        factors = joint.factors(found.mean)
        info = info._replace(sites=summarise(kinds, factors, _spreads(factors, found.root)))
    return after, info


class JointRows(NamedTuple):
    """Rows for a joint solve, which need not be in memory as factors all at once.

    :ivar linearise: (chunk, theta (P,)) -> factors with ``offset`` = F_i(theta) and ``design`` the Jacobians.
    :ivar chunks: a pytree with the chunks along the leading axis.
    """

    linearise: Callable[[Any, Array], tuple[Factors, ...]]
    chunks: Any


class Joint(NamedTuple):
    """A joint solve as a search in the state's standard coordinates.

    :ivar reduce: the sums over all factors, as :func:`block_search` takes them. :ivar base: the rest of the bound.
    :ivar absorb: solution, number of rows -> the state after it.
    :ivar factors: e -> the rows' factors there, in these coordinates.
    """

    search: Search
    reduce: Callable[[Array, CovarianceRoot | None], Sums]
    base: Base
    absorb: Callable[[Solution, Array], tuple[State, StepInfo]]
    factors: Callable[[Array], tuple[Factors, ...]]


def joint_search(
    kinds: tuple[Kind, ...],
    rows: JointRows,
    prior_kinds: tuple[Kind, ...],
    prior_linearise: Callable[[Array], tuple[Factors, ...]],
    state: State,
    settings: Settings,
    *,
    sites: tuple[Sites, ...] | None = None,
    laplace: bool = False,
    starts: Array | None = None,
    init: tuple[Array, Array] | None = None,
    alternating: bool = False,
) -> Joint:
    """What :func:`joint_solve` solves; see :func:`block_search` for ``alternating``.

    :param init: mean (P,) and root of the covariance (P, P) of a q to start from.
    """
    dtype, size = state.mean.dtype, state.mean.shape[0]

    def factors_at(e):
        def whitened(chunk):
            factors = rows.linearise(chunk, state.mean + state.root @ e)
            return tuple(f._replace(design=f.design @ state.root) for f in factors)

        found = lax.map(whitened, rows.chunks)
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found)

    def reduce(e, covariance_root):
        # Designs stay in the coordinates of theta: per row, that saves one product with a (P, P) matrix.
        theta = state.mean + state.root @ e
        to_spread = None if covariance_root is None else partial(jnp.matmul, covariance_root(state.root.T))
        sums = evaluate(prior_kinds, prior_linearise(theta), to_spread)
        if kinds:
            sums = add(sums, over_chunks(lambda chunk: evaluate(kinds, rows.linearise(chunk, theta), to_spread)))
        turned = lambda matrix: None if matrix is None else state.root.T @ matrix @ state.root  # noqa: E731
        return Sums(sums.value, state.root.T @ sums.gradient, turned(sums.curvature), turned(sums.fallback))

    def over_chunks(function):
        first = jax.tree.map(lambda x: x[0], rows.chunks)
        if jax.tree.leaves(rows.chunks)[0].shape[0] == 1:
            return function(first)
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, first))
        return lax.scan(lambda sums, chunk: (add(sums, function(chunk)), None), nothing, rows.chunks)[0]

    known = factors_at(jnp.zeros(size, dtype)) if sites else ()
    base = _divide(state, known, sites)
    start = start_precision = None
    if init is not None:
        start = jnp.linalg.solve(state.root, init[0] - state.mean)
        inverse = jnp.linalg.solve(init[1], state.root)
        start_precision = inverse.T @ inverse
    elif sites is None:
        start = jnp.zeros(size, dtype) if starts is None else _most_probable(reduce, base, starts)
    all_kinds = kinds + prior_kinds
    search = block_search(
        all_kinds,
        reduce,
        base,
        size,
        dtype,
        settings,
        start=start,
        start_precision=start_precision,
        point=laplace,
        alternating=alternating,
    )

    def absorb(found, num_rows):
        bound = found.bound - jnp.sum(jnp.log(jnp.diagonal(found.root))) if laplace else found.bound
        mean = state.mean + state.root @ found.mean
        root = solve_lower(found.root, state.root.T).T
        prior_site = None
        if state.prior_site is not None:
            prior_site = _prior_site(prior_kinds, prior_linearise(mean), mean, None if laplace else root)
        moved = State(mean, jnp.zeros_like(mean), root, bound, prior_site, state.num_rows + num_rows)
        ok = jnp.isfinite(bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = jax.tree.map(lambda new, old: jnp.where(ok, new, old), moved, state)
        gain = bound - state.log_evidence
        return after, StepInfo(gain, found.decrement, found.iterations, found.converged, ok)

    return Joint(search, reduce, base, absorb, factors_at)


def _most_probable(reduce, base: Base, starts: Array) -> Array:
    def log_density(e):
        precision = e if base.precision is None else base.precision @ e
        linear = 0.0 if base.linear is None else base.linear @ e
        return reduce(e, None).value + linear - 0.5 * e @ precision

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


def _prior_site(kinds, factors, mean, root) -> Quadratic:
    """What stands for the prior terms in N(mean, root root^T), or at a mode (root None)."""
    sums = evaluate(kinds, factors, None if root is None else lambda z: root.T @ z)
    trace = 0.0 if root is None else jnp.sum((root @ root.T) * sums.curvature)
    return Quadratic(sums.curvature, sums.gradient, sums.value + 0.5 * trace, mean)
