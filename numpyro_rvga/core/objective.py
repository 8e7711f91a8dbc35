"""The factors' part of the bound, in the parts that a search asks for one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .factors import Factors, Kind, Sums, add_curves, covariances, curve, evaluate, expect

Curves = tuple[Array, Array | None]


class Objective(NamedTuple):
    """What the factors add to the bound at N(m, Lambda^-1), m (r,), and its derivatives.

    :ivar kinds: of all factors.
    :ivar spread: m and any A with A^T A = Lambda^-1 -> what ``expect`` needs to know of Lambda.
    :ivar expect: m and that (None: a point mass, derivatives at m) -> sum E[phi], its gradient in m (r,), and what
        ``curve`` needs to know.
    :ivar curve: m and that -> the sums of :func:`~numpyro_rvga.core.factors.curve`.
    :ivar staged: whether ``spread`` does not depend on m, and ``expect`` is cheap: takes no product of matrices.
    """

    kinds: tuple[Kind, ...]
    spread: Callable[[Array, Array], Any]
    expect: Callable[[Array, Any], tuple[Array, Array, Any]]
    curve: Callable[[Array, Any], Curves]
    staged: bool

    def sums(self, mean: Array, covariance_root: Array) -> Sums:
        value, gradient, known = self.expect(mean, self.spread(mean, covariance_root))
        return Sums(value, gradient, *self.curve(mean, known))


class JointRows(NamedTuple):
    """Rows for a joint solve, which need not be in memory as factors all at once.

    :ivar linearise: (chunk, theta (P,)) -> factors with ``offset`` = F_i(theta) and ``design`` the Jacobians.
    :ivar chunks: a pytree with the chunks along the leading axis; () if there are no rows.
    """

    linearise: Callable[[Any, Array], tuple[Factors, ...]]
    chunks: Any

    @property
    def first(self) -> Any:
        return jax.tree.map(lambda x: x[0], self.chunks)

    def visit(self, function: Callable, *known: Any) -> tuple[Any, Any]:
        """The sum over chunks of what ``function(chunk, *known)`` finds first, and what it finds second by chunk."""
        chunks = (self.chunks, *known)
        first = jax.tree.map(lambda x: x[0], chunks)
        if all(x.shape[0] == 1 for x in jax.tree.leaves(self.chunks)):
            found = function(*first)
            return found[0], jax.tree.map(lambda x: x[None], found[1])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *first)[0])

        def body(total, chunk):
            found, rest = function(*chunk)
            return jax.tree.map(jnp.add, total, found), rest

        return lax.scan(body, nothing, chunks)


def objective_of(kinds: tuple[Kind, ...], factors_at: Callable[[Array], tuple[Factors, ...]]) -> Objective:
    """Of factors that are affine in e. ``factors_at``: e (r,) -> the factors seen from there."""
    return Objective(
        kinds,
        lambda e, covariance_root: covariances(factors_at(e), covariance_root),
        lambda e, spread: expect(kinds, factors_at(e), spread),
        lambda e, hessians: curve(kinds, factors_at(e), hessians),
        True,
    )


def joint_objective(
    kinds: tuple[Kind, ...],
    rows: JointRows,
    prior_kinds: tuple[Kind, ...],
    prior_linearise: Callable[[Array], tuple[Factors, ...]],
    mean: Array,
    root: Array,
    *,
    is_affine: bool,
    in_frame: bool,
) -> Objective:
    """Of rows and prior terms, at theta = mean + root e.

    Designs stay in the coordinates of theta: per row, that saves one product with a (P, P) matrix.

    :param is_affine: whether all predictors are affine in theta.
    :param in_frame: whether covariances come in the coordinates of theta, and curvatures are wanted there.
    """

    def theta_at(e):
        return mean + root @ e

    def in_theta(covariance_root):
        return covariance_root if in_frame else covariance_root @ root.T

    def turned(curvature):
        if curvature is None or in_frame:
            return curvature
        if jnp.ndim(curvature) < 2:
            return (root.T * curvature) @ root
        return root.T @ curvature @ root

    def spread(e, covariance_root):
        theta, covariance_root = theta_at(e), in_theta(covariance_root)
        of_rows = rows.visit(lambda chunk: ((), covariances(rows.linearise(chunk, theta), covariance_root)))[1]
        return covariances(prior_linearise(theta), covariance_root), of_rows

    def expect_staged(e, known):
        theta = theta_at(e)

        def one(chunk, *known):
            *sums, hessians = expect(kinds, rows.linearise(chunk, theta), *known or (None,))
            return tuple(sums), hessians

        of_prior, of_rows = (None, ()) if known is None else (known[0], (known[1],))
        value, gradient, of_prior = expect(prior_kinds, prior_linearise(theta), of_prior)
        (more, pull), of_rows = rows.visit(one, *of_rows)
        return value + more, root.T @ (gradient + pull), (of_prior, of_rows)

    def curve_staged(e, hessians):
        theta = theta_at(e)
        of_prior, of_rows = hessians
        found, _ = rows.visit(lambda chunk, h: (curve(kinds, rows.linearise(chunk, theta), h), ()), of_rows)
        sums = add_curves(curve(prior_kinds, prior_linearise(theta), of_prior), found)
        return turned(sums[0]), turned(sums[1])

    def expect_at_once(e, covariance_root):
        theta = theta_at(e)
        covariance_root = None if covariance_root is None else in_theta(covariance_root)
        of_prior = evaluate(prior_kinds, prior_linearise(theta), covariance_root)
        one = lambda chunk: (evaluate(kinds, rows.linearise(chunk, theta), covariance_root), ())  # noqa: E731
        of_rows, _ = rows.visit(one)
        curves = add_curves(of_prior[2:], of_rows[2:])
        return of_prior.value + of_rows.value, root.T @ (of_prior.gradient + of_rows.gradient), curves

    all_kinds = kinds + prior_kinds
    if is_affine and _keeps_covariances(rows, mean) and not any(kind.sampled for kind in all_kinds):
        return Objective(all_kinds, spread, expect_staged, curve_staged, True)
    return Objective(
        all_kinds,
        lambda e, covariance_root: covariance_root,
        expect_at_once,
        lambda e, curves: tuple(map(turned, curves)),
        False,
    )


def _keeps_covariances(rows: JointRows, theta: Array) -> bool:
    """Whether the predictors' covariances of all rows are fewer numbers than the Jacobians of a chunk, or are of one
    chunk."""
    count = max((x.shape[0] for x in jax.tree.leaves(rows.chunks)), default=1)
    factors = jax.eval_shape(rows.linearise, rows.first, theta)
    shapes = [factor.design.shape for factor in factors]
    return count == 1 or count * sum(n * c * c for n, c, _ in shapes) <= sum(n * c * p for n, c, p in shapes)
