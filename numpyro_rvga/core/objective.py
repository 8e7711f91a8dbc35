"""The factors' part of the bound, in the parts that a search asks for one after the other."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .factors import Factors, Kind, Sums, add_curves, covariances, curve, expect


class Objective(NamedTuple):
    """What the factors add to the bound at N(m, Lambda^-1), m (r,), and its derivatives.

    :ivar kinds: of all factors.
    :ivar spread: m and any A with A^T A = Lambda^-1 -> what ``expect`` needs to know of Lambda.
    :ivar expect: m and that (None: a point mass, derivatives at m) -> sum E[phi], its gradient in m (r,), and what
        ``curve`` needs to know.
    :ivar curve: m, that, and whether to clamp -> the sum of :func:`~numpyro_rvga.core.factors.curve`.
    :ivar staged: whether ``spread`` does not depend on m, and ``expect`` is cheap: takes no product of matrices.
    """

    kinds: tuple[Kind, ...]
    spread: Callable[[Array, Array], Any]
    expect: Callable[[Array, Any], tuple[Array, Array, Any]]
    curve: Callable[[Array, Any, bool], Array]
    staged: bool

    def sums(self, mean: Array, covariance_root: Array) -> Sums:
        value, gradient, known = self.expect(mean, self.spread(mean, covariance_root))
        return Sums(value, gradient, self.curve(mean, known, False))


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
        lambda e, hessians, clamped: curve(kinds, factors_at(e), hessians, clamped=clamped),
        True,
    )


class Frame(NamedTuple):
    """How the coordinates e of a search see theta, gradients, covariances and curvatures, which factors see in theirs.

    :ivar theta: e (r,) -> theta (P,). :ivar pull: gradients. :ivar spread: what the search knows of its covariance ->
        that of the factors' coordinates, as :func:`~.designs.covariance` takes it. :ivar curve: curvatures.
    """

    theta: Callable[[Array], Array]
    pull: Callable[[Array], Array]
    spread: Callable[[Any], Any]
    curve: Callable[[Array], Array]


def standard_frame(mean: Array, root: Array, *, weighted: bool) -> Frame:
    """theta = mean + root e. Designs stay in the coordinates of theta: per row, that saves one product with a (P, P)
    matrix.

    :param weighted: whether the search does so too: its precisions are :class:`~.precisions.Weighted` by ``root``.
    """

    def turned(curvature):
        if jnp.ndim(curvature) < 2:
            return (root.T * curvature) @ root
        return root.T @ curvature @ root

    same = lambda x: x  # noqa: E731
    return Frame(
        lambda e: mean + root @ e,
        lambda gradient: root.T @ gradient,
        same if weighted else lambda covariance_root: covariance_root @ root.T,
        same if weighted else turned,
    )


def joint_objective(groups: tuple[Group, ...], frame: Frame, size: int, dtype, *, is_affine: bool) -> Objective:
    """Of groups of factors, whose designs are in coordinates of theta.

    :param is_affine: whether all predictors are affine in theta.
    """
    all_kinds = tuple(kind for group in groups for kind in group.kinds)
    ways = [False] if all(kind.concave for kind in all_kinds) else [False, True]

    def visit(function, e, *known):
        """Every group's sums and what else is found, by ``function(kinds, factors, *known)``; ``known`` by group."""
        theta = frame.theta(e)

        def of_group(group, *known):
            return group.visit(lambda chunk, *rest: function(group.kinds, group.linearise(chunk, theta), *rest), *known)

        return zip(*map(of_group, groups, *known))

    def spread(e, known):
        known = frame.spread(known)
        return tuple(visit(lambda kinds, factors: ((), covariances(factors, known)), e))[1]

    def expect_staged(e, known):
        def one(kinds, factors, known=None):
            value, gradient, hessians = expect(kinds, factors, known)
            return (value, gradient), hessians

        sums, hessians = visit(one, e, *() if known is None else (known,))
        value, gradient = map(sum, zip(*sums))
        return value, frame.pull(gradient), hessians

    def curve_staged(e, hessians, clamped):
        curves, _ = visit(lambda kinds, factors, h: (curve(kinds, factors, h, clamped=clamped), ()), e, hessians)
        return frame.curve(reduce(add_curves, curves))

    def expect_at_once(e, known):
        known = None if known is None else frame.spread(known)

        def one(kinds, factors):
            value, gradient, hessians = expect(kinds, factors, covariances(factors, known))
            curves = [curve(kinds, factors, hessians, clamped=clamped) for clamped in ways]
            return (value, gradient, curves), ()

        sums, _ = visit(one, e)
        values, gradients, curves = zip(*sums)
        return sum(values), frame.pull(sum(gradients)), [reduce(add_curves, each) for each in zip(*curves)]

    def keeps_covariances(group):
        """Whether the predictors' covariances of all chunks are fewer numbers than the Jacobians of one, or there is
        but one."""
        shapes = [f.design.shape for f in jax.eval_shape(group.linearise, group.first, jnp.zeros(size, dtype))]
        numbers, jacobians = sum(n * c * c for n, c, _ in shapes), sum(n * c * p for n, c, p in shapes)
        return group.count == 1 or group.count * numbers <= jacobians

    if is_affine and not any(kind.sampled for kind in all_kinds) and all(map(keeps_covariances, groups)):
        return Objective(all_kinds, spread, expect_staged, curve_staged, True)
    return Objective(
        all_kinds,
        lambda e, known: known,
        expect_at_once,
        lambda e, curves, clamped: frame.curve(curves[clamped]),
        False,
    )
