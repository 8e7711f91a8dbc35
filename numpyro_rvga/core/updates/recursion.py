"""How the Gaussian state moves, one small block of rows at a time.

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
import numpy as np
from jax import Array, lax

from ..compilation import single_kernel
from ..count import Count
from ..gaussians import FullGaussian, Movement
from ..matrices.linalg import cholesky, row_space, semidefinite_factor, solve_lower
from ..matrices.precisions import Dense
from .drivers import solve_traced
from .factors import Accounts, Factors, Kind, Moments, covariances, curvature_of, evaluate, expect
from .maximize import Search, Settings, Solution, init, standard_base
from .objective import BlockObjective, is_conservative, is_log_concave

ROUTINE_NUMBERS = 16  # in the Jacobians of a block whose solve is one routine: XLA cannot fuse those of many rows


class CanonicalGaussian(NamedTuple):
    """A Gaussian factor of theta, by its logarithm at theta = center + d: constant + linear . d - d' precision d / 2.

    :ivar precision: (P, P). :ivar linear: (P,). :ivar constant: (). :ivar center: (P,).
    """

    precision: Array | np.ndarray
    linear: Array | np.ndarray
    constant: Array | np.ndarray
    center: Array | np.ndarray

    @classmethod
    def expected(cls, value: Any, gradient: Any, curvature: Any, mean: Any, root: Any = None) -> CanonicalGaussian:
        """The factor f with E[log f] = ``value``, E[grad log f] = ``gradient`` and -E[hess log f] = ``curvature`` under
        N(mean, root root^T). ``root`` None: at the mean. A curvature that is zero may be one number."""
        trace = 0.0 if root is None else ((root @ root.T) * curvature).sum()
        return cls(curvature, gradient, value + 0.5 * trace, mean)

    def at(self, theta: Array | np.ndarray) -> tuple[Any, Any]:
        """Logarithm and gradient."""
        change = theta - self.center
        product = self.precision @ change
        return self.constant + self.linear @ change - 0.5 * change @ product, self.linear - product

    def about(self, center: Array | np.ndarray) -> CanonicalGaussian:
        """The same factor about another center."""
        value, gradient = self.at(center)
        return CanonicalGaussian(self.precision, gradient, value, center)

    def plus(self, other: CanonicalGaussian, times: float = 1.0) -> CanonicalGaussian:
        """The product with a power of a factor of the same center."""
        return CanonicalGaussian(*[a + times * b for a, b in zip(self[:3], other[:3])], self.center)


class State(NamedTuple):
    """q = N(mean, root root^T) after ``num_rows`` rows.

    :ivar mean: (P,), with ``mean_error`` the rounding error that the last updates left (compensated summation).
    :ivar root: (P, P).
    :ivar log_evidence: accumulated bound; log q + log_evidence approximates the log joint density.
    :ivar prior_factor: the Gaussian that approximates prior terms that are not Gaussian; None if there are none.
    :ivar time: of the last row, if parameters move by the rows' time stamps; NaN before the first.
    """

    mean: Array
    mean_error: Array
    root: Array
    log_evidence: Array
    prior_factor: CanonicalGaussian | None
    num_rows: Count
    time: Array | None = None


class RowFactors(NamedTuple):
    """Gaussian approximations of n factors of one kind: constant + linear . u - u' precision u / 2 in predictors u.

    :ivar precision: (n, C, C). :ivar linear: (n, C). :ivar constant: (n,).
    """

    precision: Array
    linear: Array
    constant: Array


class Absorbed(NamedTuple):
    """Moments under q of the predictors of n factors of one kind, when they became part of q: what
    :func:`row_factors_of` takes.

    :ivar mean: (n, C). :ivar covariance: (n, C, C).
    :ivar error: (n,), how many nats the approximation may be off where q has mass: the change of the factor's
        curvature one standard deviation away, times the variance. Zero for Gaussian factors.
    """

    mean: Array
    covariance: Array
    error: Array


class StepInfo(NamedTuple):
    """Diagnostics of a step.

    :ivar bound: E_q[log lik] - KL(q || before).
    :ivar ok: whether the result is finite; else nothing changed.
    :ivar absorbed: moments of the factors' predictors, by kind; empty unless asked for.
    :ivar modes: bounds of the modes that several starts led to, that of q first; empty for one mode.
    :ivar accounts: of the factors at q, those of the prior first; None where they are not estimated.
    """

    bound: Array
    decrement: Array
    iterations: Array
    converged: Array
    ok: Array
    absorbed: tuple[Absorbed, ...] = ()
    modes: tuple[float, ...] = ()
    accounts: Accounts | None = None


def new_state(mean: Array, root: Array, prior_factor: CanonicalGaussian | None) -> State:
    zero = jnp.zeros((), mean.dtype)
    return State(mean, jnp.zeros_like(mean), root, zero, prior_factor, Count.of(0))


def absorbed_moments(
    kinds: tuple[Kind, ...], factors: tuple[Factors, ...], predictor_scales: tuple[Array, ...]
) -> tuple[Absorbed, ...]:
    """Moments of the factors' predictors: means ``predictors`` and covariances scale_i scale_i^T."""

    def one(kind, mean, scale, constants):
        covariance = scale @ scale.T
        steps = semidefinite_factor(covariance)[0].T
        points = jnp.concatenate([mean[None], mean + steps, mean - steps])
        curvatures = jax.vmap(lambda u: kind.plugin(u, covariance, constants)[2])(points)
        changes = (curvatures[1:] - curvatures[0]).reshape(2, *covariance.shape, len(mean))
        along = jnp.abs(jnp.einsum("ki,skij,kj->sk", steps, changes, steps))
        return Absorbed(mean, covariance, jnp.sum(jnp.max(along, axis=0)))

    return tuple(
        jax.vmap(partial(one, kind))(block.predictors, scale, block.constants)
        for kind, block, scale in zip(kinds, factors, predictor_scales)
    )


def row_factors_of(
    kinds: tuple[Kind, ...], factors: tuple[Factors, ...], absorbed: tuple[Absorbed, ...]
) -> tuple[RowFactors, ...]:
    """The sites of factors that q took in when it saw them so: of their expected value and derivatives then."""
    return tuple(
        _row_factors(seen, kind.expect(seen.mean, seen.covariance, block.constants)[0])
        for kind, block, seen in zip(kinds, factors, absorbed)
    )


def _row_factors(seen: Absorbed, moments: Moments) -> RowFactors:
    """Of n factors of one kind."""

    def one(mean, covariance, moments):
        value, gradient, hessian = moments
        linear = gradient - hessian @ mean
        constant = value - linear @ mean - 0.5 * (mean @ hessian @ mean + jnp.sum(hessian * covariance))
        return RowFactors(-hessian, linear, constant)

    return jax.vmap(one)(seen.mean, seen.covariance, moments)


def row_factors_and_residuals(
    kinds: tuple[Kind, ...],
    factors: tuple[Factors, ...],
    predictor_scales: tuple[Array, ...],
    absorbed: tuple[Absorbed, ...],
) -> tuple[tuple[RowFactors, ...], tuple[Array, ...]]:
    """The sites of factors (see :func:`row_factors_of`), and by how much they are not those that this q would make (see
    :func:`absorbed_moments`), (n,) by kind: the length of what q's natural gradient lacks for each factor, in standard
    deviations of q."""

    def one(mean, covariance, moments, site):
        _, gradient, hessian = moments
        slope = gradient - (site.linear - site.precision @ mean)
        change = covariance @ (hessian + site.precision)
        return jnp.sqrt(jnp.maximum(slope @ covariance @ slope + 0.5 * jnp.sum(change * change.T), 0.0))

    def of_kind(kind, block, scale, seen):
        covariance = jnp.einsum("ncr,ndr->ncd", scale, scale)
        then, now = (seen.mean, seen.covariance, block.constants), (block.predictors, covariance, block.constants)
        both, _ = kind.expect(*jax.tree.map(lambda *x: jnp.concatenate(x), then, now))  # at once: compiled once
        count = len(block.predictors)
        row_factors = _row_factors(seen, tuple(x[:count] for x in both))
        return row_factors, jax.vmap(one)(block.predictors, covariance, tuple(x[count:] for x in both), row_factors)

    pairs = list(map(of_kind, kinds, factors, predictor_scales, absorbed))
    return tuple(row_factors for row_factors, _ in pairs), tuple(residuals for _, residuals in pairs)


def predict(movement: Movement, state: State, rows: dict) -> State:
    """The state after the parameters have moved, before a block of rows; see :meth:`Movement.before`."""
    q, time = movement.before(FullGaussian(state.mean, state.root), state.time, rows)
    error = jnp.where(q.mean == state.mean, state.mean_error, 0.0)
    return state._replace(mean=q.mean, mean_error=error, root=q.root, time=time)


# ---------------------------------------------------------------------- small blocks
def implicit_step(
    kinds: tuple[Kind, ...],
    linearize: Callable[[Array], tuple[Factors, ...]],
    settings: Settings,
    num_linearizations: int,
    with_absorbed: bool,
) -> Callable[[State, Array], tuple[State, StepInfo]]:
    """The exact minimizer N(mu', Lambda'^-1) of KL(q' || p(rows | theta) q), as in R-VGA paper, 28-29:

    Lambda' = Lambda - F^T G F, mu' = mu + Sigma F^T g, with g and G taken under q' itself.

    :param num_linearizations: how many times the predictors are linearized: once, if they are affine.
    :param linearize: theta (P,) -> factors with ``predictors`` = F_i(theta) and ``jacobian`` the Jacobians (n, C, P).
    :param with_absorbed: report the moments of the factors' predictors.
    """

    def step(state: State, num_rows: Array) -> tuple[State, StepInfo]:
        def solve(factors):
            jacobians, basis = _subspace(state.root, factors)
            blocks = tuple(f._replace(jacobian=z) for f, z in zip(factors, jacobians))
            solver = partial(solve_block, kinds, settings)
            if jacobians[0].shape[-1] == 1 and sum(z.size for z in jacobians) <= ROUTINE_NUMBERS:
                solver = single_kernel(solver)
            solution = solver(blocks)
            return solution, basis, _shifted(blocks, solution.mean)

        solution, basis, factors = solve(linearize(state.mean))
        for _ in range(num_linearizations - 1):
            shift = state.root @ _lift(basis, solution.mean)
            solution, basis, factors = solve(_shifted(linearize(state.mean + shift), -shift))
        info = (solution.bound, solution.decrement, solution.iterations, solution.converged)
        after, report = _move(state, basis, solution.mean, solution.root, num_rows, *info)
        if with_absorbed:
            report = report._replace(
                absorbed=absorbed_moments(kinds, factors, predictor_scales(factors, solution.root))
            )
        return after, report

    return step


def solve_block(kinds: tuple[Kind, ...], settings: Settings, blocks: tuple[Factors, ...]) -> Solution:
    """The Gaussian over e that solves for the rows, from the standard normal."""
    search = Search(settings, is_log_concave(kinds), by_decrement=not is_conservative(kinds))
    mean, form = jnp.zeros(blocks[0].jacobian.shape[-1], blocks[0].predictors.dtype), Dense(None)
    objective = BlockObjective(kinds, partial(_shifted, blocks))
    return solve_traced(search, objective, standard_base(mean.dtype), form, init(search, form, mean))


def _shifted(blocks: tuple[Factors, ...], e: Array) -> tuple[Factors, ...]:
    """The linearized factors about e: their predictors F + J e are those at the new origin."""
    return tuple(b._replace(predictors=b.predictors + b.jacobian @ e) for b in blocks)


def explicit_step(
    kinds: tuple[Kind, ...], linearize: Callable[[Array], tuple[Factors, ...]]
) -> Callable[[State, Array], tuple[State, StepInfo]]:
    """Lambda' = Lambda - F^T G F, mu' = mu + Sigma' F^T g, with g and G taken under q (R-VGA paper, 30-31).

    A curvature that would make Lambda' indefinite loses its negative part.
    """

    def step(state: State, num_rows: Array) -> tuple[State, StepInfo]:
        factors = linearize(state.mean)
        jacobians, basis = _subspace(state.root, factors)
        blocks = tuple(Factors(f.predictors, z, f.constants) for f, z in zip(factors, jacobians))
        identity = jnp.eye(jacobians[0].shape[-1], dtype=state.mean.dtype)
        expected = expect(kinds, blocks, covariances(blocks, identity))

        def rooted(*, clamped):
            return cholesky(identity + curvature_of(kinds, blocks, expected.hessians, clamped=clamped))

        root = rooted(clamped=False)
        if not all(kind.concave for kind in kinds):
            root = jnp.where(jnp.all(jnp.isfinite(root)), root, rooted(clamped=True))
        move = solve_lower(root, solve_lower(root, expected.gradient), transpose=True)
        inverse = solve_lower(root, identity)
        value = evaluate(kinds, _shifted(blocks, move), inverse).value
        divergence = 0.5 * (jnp.sum(inverse * inverse) - identity.shape[0] + move @ move)
        divergence = divergence + jnp.sum(jnp.log(jnp.diagonal(root)))
        zero = jnp.zeros((), move.dtype)
        return _move(state, basis, move, root, num_rows, value - divergence, zero, jnp.asarray(1), jnp.asarray(True))

    return step


def scan_blocks(
    make_step: Callable, state: State, blocks, counts: Array, movement: Movement | None = None, rows: dict | None = None
) -> tuple[State, StepInfo]:
    """One step a block: ``make_step(block) -> step``; blocks is a pytree with a leading axis, counts its rows.

    :param movement: how parameters move before each block.
    :param rows: of the blocks, (blocks, B, ...) arrays, where parameters move.
    """

    def body(carry, xs):
        block, count, rows = xs
        if movement is None:
            return make_step(block)(carry, count)
        after, info = make_step(block)(predict(movement, carry, rows), count)
        keep = info.ok & (count > 0)
        return jax.tree.map(lambda new, old: jnp.where(keep, new, old), after, carry), info

    return lax.scan(body, state, (blocks, counts, rows))


def _subspace(root: Array, factors: tuple[Factors, ...]) -> tuple[list[Array], Array | None]:
    """Jacobians F S in coordinates of the span of S^T F^T, (n, C, r), and its orthonormal basis (r, P), or None: all of
    R^P."""
    whitened = [f.jacobian @ root for f in factors]
    sizes = [z.shape[0] * z.shape[1] for z in whitened]
    total, size = sum(sizes), root.shape[0]
    if total >= size:
        return whitened, None
    stacked = jnp.concatenate([z.reshape(-1, size) for z in whitened])
    reduced, basis = row_space(stacked)
    pieces = jnp.split(reduced, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)])
    return [p.reshape(*z.shape[:2], total) for p, z in zip(pieces, whitened)], basis


def predictor_scales(factors: tuple[Factors, ...], precision_root: Array) -> tuple[Array, ...]:
    """Z_i Lambda^(-1/2) for each factor, (n, C, r)."""

    def scale(jacobian):
        n, c, r = jacobian.shape
        return solve_lower(precision_root, jacobian.reshape(n * c, r).T).T.reshape(n, c, r)

    return tuple(scale(f.jacobian) for f in factors)


def _lift(basis: Array | None, e: Array) -> Array:
    return e if basis is None else e @ basis


def _move(
    state: State,
    basis: Array | None,
    move: Array,
    precision_root: Array,
    num_rows: Array,
    bound: Array,
    decrement: Array,
    iterations: Array,
    converged: Array,
) -> tuple[State, StepInfo]:
    """The state with e ~ N(move, (L L^T)^-1) in the subspace of ``basis`` B, unchanged outside it: the mean moves by
    S B^T move, and the covariance root becomes S - S B^T (I - L^-T) B.

    :param precision_root: L, lower triangular.
    """
    ok = jnp.isfinite(bound) & jnp.all(jnp.isfinite(move)) & jnp.all(jnp.isfinite(jnp.diagonal(precision_root)))
    move = jnp.where(ok, move, 0.0)  # the small quantities are made harmless, so that no (P, P) array is copied
    identity = jnp.eye(move.shape[0], dtype=move.dtype)
    precision_root = jnp.where(ok, precision_root, identity)
    if basis is None:
        root = solve_lower(precision_root, state.root.T).T
        change = state.root @ move
    else:
        scale = state.root @ basis.T
        change = scale @ move
        shrink = identity - solve_lower(precision_root, identity).T
        root = state.root - (scale @ shrink) @ basis
    mean, error = _compensated_add(state.mean, state.mean_error, change)
    evidence = state.log_evidence + jnp.where(ok, bound, 0.0)
    count = state.num_rows + jnp.where(ok, num_rows, 0)
    after = State(mean, error, root, evidence, state.prior_factor, count, state.time)
    return after, StepInfo(bound, decrement, iterations, converged, ok)


def _compensated_add(total: Array, error: Array, change: Array) -> tuple[Array, Array]:
    change = change + error
    after = total + change
    return after, change - (after - total)
