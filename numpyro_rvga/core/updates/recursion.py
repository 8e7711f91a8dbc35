"""How the Gaussian state moves, one small block of rows at a time.

The state's covariance is kept as a square root S (Sigma = S S^T, S of any form): positive definite by construction.
In the coordinates e of theta = mean + S e the state is the standard normal, and a block of n C < P predictors moves
it in the n C-dimensional span of S^T J^T only, with J their Jacobian (n C, P).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..compilation import single_kernel
from ..gaussians import FullGaussian, Movement
from ..matrices.linalg import cholesky, few_times, product, row_space, solve_lower
from ..matrices.precisions import Dense
from .drivers import solve_traced
from .factors import Factors, Kind, covariances, curvature_of, evaluate, expect
from .maximize import init
from .objective import Coordinates, FactorSet, Objective, is_conservative, is_log_concave
from .row_factors import absorbed_moments, predictor_scales
from .search import Search, Settings, Solution, standard_base
from .state import State, StepInfo

ROUTINE_NUMBERS = 16  # in the Jacobians of a block whose solve is one routine: XLA cannot fuse those of many rows


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

    Lambda' = Lambda - sum J_i^T G_i J_i,     mu' = mu + Sigma sum J_i^T g_i,

    with g_i = E[grad phi_i] and G_i = E[hess phi_i] taken under q' itself.

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
            shift = state.root @ (solution.mean if basis is None else solution.mean @ basis)
            solution, basis, factors = solve(_shifted(linearize(state.mean + shift), -shift))
        after, report = _moved(state, basis, solution, num_rows)
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
    rows = FactorSet(kinds, lambda _, e: _shifted(blocks, e))
    objective = Objective((rows,), Coordinates(), staged=True)
    return solve_traced(search, objective, standard_base(mean.dtype), form, init(search, form, mean))


def _shifted(blocks: tuple[Factors, ...], e: Array) -> tuple[Factors, ...]:
    """The linearized factors about e: their predictors F + J e are those at the new origin."""
    return tuple(b._replace(predictors=b.predictors + b.jacobian @ e) for b in blocks)


def explicit_step(
    kinds: tuple[Kind, ...], linearize: Callable[[Array], tuple[Factors, ...]]
) -> Callable[[State, Array], tuple[State, StepInfo]]:
    """The update with expectations under q (R-VGA paper, 30-31):

    Lambda' = Lambda - sum J_i^T G_i J_i,     mu' = mu + Sigma' sum J_i^T g_i.

    A curvature that would make Lambda' indefinite loses its negative part.
    """

    def step(state: State, num_rows: Array) -> tuple[State, StepInfo]:
        factors = linearize(state.mean)
        jacobians, basis = _subspace(state.root, factors)
        blocks = tuple(Factors(f.predictors, z, f.constants) for f, z in zip(factors, jacobians))
        identity = jnp.eye(jacobians[0].shape[-1], dtype=state.mean.dtype)
        totals, hessians = expect(kinds, blocks, covariances(blocks, identity))

        def rooted(*, clamped):
            return cholesky(identity + curvature_of(kinds, blocks, hessians, clamped=clamped))

        root = rooted(clamped=False)
        if not all(kind.concave for kind in kinds):
            root = jnp.where(jnp.all(jnp.isfinite(root)), root, rooted(clamped=True))
        move = solve_lower(root, solve_lower(root, totals.gradient), transpose=True)
        inverse = solve_lower(root, identity)
        value = evaluate(kinds, _shifted(blocks, move), inverse).value
        divergence = 0.5 * (jnp.sum(inverse * inverse) - identity.shape[0] + move @ move)
        divergence = divergence + jnp.sum(jnp.log(jnp.diagonal(root)))
        zero = jnp.zeros((), move.dtype)
        solution = Solution(move, root, value - divergence, zero, jnp.asarray(1), jnp.asarray(True))
        return _moved(state, basis, solution, num_rows)

    return step


def scan_blocks(
    make_step: Callable, state: State, blocks, counts: Array, movement: Movement | None, rows: dict | None
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

    return lax.scan(single_kernel(body), state, (blocks, counts, rows))


def _subspace(root: Array, factors: tuple[Factors, ...]) -> tuple[list[Array], Array | None]:
    """Jacobians J_i S in coordinates of the span of their rows, (n, C, r), and its orthonormal basis (r, P); None: all
    of R^P."""
    whitened = [
        few_times(f.jacobian.reshape(-1, f.jacobian.shape[-1]), root).reshape(f.jacobian.shape) for f in factors
    ]
    sizes = [z.shape[0] * z.shape[1] for z in whitened]
    total, size = sum(sizes), root.shape[0]
    if total >= size:
        return whitened, None
    stacked = jnp.concatenate([z.reshape(-1, size) for z in whitened])
    reduced, basis = row_space(stacked)
    pieces = jnp.split(reduced, [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)])
    return [p.reshape(*z.shape[:2], total) for p, z in zip(pieces, whitened)], basis


def _moved(state: State, basis: Array | None, solution: Solution, num_rows: Array) -> tuple[State, StepInfo]:
    """The state with the solution N(move, (L L^T)^-1) of e in the subspace of ``basis`` B, unchanged outside it: the
    mean moves by S B^T move, and the covariance root becomes S - S B^T (I - L^-T) B."""
    move, precision_root, bound, decrement, iterations, converged = solution
    ok = jnp.isfinite(bound) & jnp.all(jnp.isfinite(move)) & jnp.all(jnp.isfinite(jnp.diagonal(precision_root)))
    move = jnp.where(ok, move, 0.0)  # the small quantities are made harmless, so that no (P, P) array is copied
    identity = jnp.eye(move.shape[0], dtype=move.dtype)
    precision_root = jnp.where(ok, precision_root, identity)
    if basis is None:
        root = solve_lower(precision_root, state.root.T).T
        change = state.root @ move
    else:
        scale = few_times(basis, state.root.T).T
        change = scale @ move
        shrink = identity - solve_lower(precision_root, identity).T
        root = state.root - product(product(scale, shrink), basis)
    change = change + state.mean_error  # compensated summation (Kahan)
    mean = state.mean + change
    error = change - (mean - state.mean)
    evidence = state.log_evidence + jnp.where(ok, bound, 0.0)
    count = state.num_rows + jnp.where(ok, num_rows, 0)
    after = State(mean, error, root, evidence, state.prior_factor, count, state.time)
    return after, StepInfo(bound, decrement, iterations, converged, ok)
