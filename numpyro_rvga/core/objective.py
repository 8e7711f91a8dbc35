"""The factors' part of the bound, in the parts that a search asks for one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
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


class Group(NamedTuple):
    """Factors that need not be in memory all at once: rows, or the terms of a prior.

    :ivar kinds: of a chunk's factors; () if there are none.
    :ivar linearise: (chunk, theta (P,)) -> factors with ``offset`` = F_i(theta) and ``design`` the Jacobians.
    :ivar chunks: a pytree with the chunks along the leading axis; () for one that needs no arrays.
    """

    kinds: tuple[Kind, ...]
    linearise: Callable[[Any, Array], tuple[Factors, ...]]
    chunks: Any = ()

    @property
    def count(self) -> int:
        """The number of chunks."""
        return max((x.shape[0] for x in jax.tree.leaves(self.chunks)), default=1)

    @property
    def first(self) -> Any:
        return jax.tree.map(lambda x: x[0], self.chunks)

    def visit(self, function: Callable, *known: Any) -> tuple[Any, Any]:
        """The sum over chunks of what ``function(chunk, *known)`` finds first, and what it finds second by chunk."""
        first = (self.first, *jax.tree.map(lambda x: x[0], known))
        if self.count == 1:
            found = function(*first)
            return found[0], jax.tree.map(lambda x: x[None], found[1])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *first)[0])

        def body(total, chunk):
            found, rest = function(*chunk)
            return jax.tree.map(jnp.add, total, found), rest

        return lax.scan(body, nothing, (self.chunks, *known))


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
    groups: tuple[Group, ...], mean: Array, root: Array, *, is_affine: bool, in_frame: bool
) -> Objective:
    """Of groups of factors, at theta = mean + root e.

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

    def visit(function, e, *known):
        """Every group's sums and what else is found, by ``function(kinds, factors, *known)``; ``known`` by group."""
        theta = theta_at(e)

        def of_group(group, *known):
            return group.visit(lambda chunk, *rest: function(group.kinds, group.linearise(chunk, theta), *rest), *known)

        return zip(*map(of_group, groups, *known))

    def spread(e, covariance_root):
        covariance_root = in_theta(covariance_root)
        return tuple(visit(lambda kinds, factors: ((), covariances(factors, covariance_root)), e))[1]

    def expect_staged(e, known):
        def one(kinds, factors, known=None):
            value, gradient, hessians = expect(kinds, factors, known)
            return (value, gradient), hessians

        sums, hessians = visit(one, e, *() if known is None else (known,))
        value, gradient = map(sum, zip(*sums))
        return value, root.T @ gradient, hessians

    def curve_staged(e, hessians):
        curves, _ = visit(lambda kinds, factors, h: (curve(kinds, factors, h), ()), e, hessians)
        return tuple(map(turned, reduce(add_curves, curves)))

    def expect_at_once(e, covariance_root):
        covariance_root = None if covariance_root is None else in_theta(covariance_root)
        sums, _ = visit(lambda kinds, factors: (evaluate(kinds, factors, covariance_root), ()), e)
        value, gradient = sum(s.value for s in sums), sum(s.gradient for s in sums)
        return value, root.T @ gradient, reduce(add_curves, [(s.curvature, s.fallback) for s in sums])

    all_kinds = tuple(kind for group in groups for kind in group.kinds)
    if is_affine and not any(kind.sampled for kind in all_kinds) and all(_keeps_covariances(g, mean) for g in groups):
        return Objective(all_kinds, spread, expect_staged, curve_staged, True)
    return Objective(
        all_kinds,
        lambda e, covariance_root: covariance_root,
        expect_at_once,
        lambda e, curves: tuple(map(turned, curves)),
        False,
    )


def _keeps_covariances(group: Group, theta: Array) -> bool:
    """Whether the predictors' covariances of all chunks are fewer numbers than the Jacobians of one, or there is but
    one."""
    if group.count == 1:
        return True
    shapes = [factor.design.shape for factor in jax.eval_shape(group.linearise, group.first, theta)]
    return group.count * sum(n * c * c for n, c, _ in shapes) <= sum(n * c * p for n, c, p in shapes)
