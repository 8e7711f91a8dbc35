"""The factors' part of the bound, in the parts that a search asks for one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .factors import Factors, Kind, Sums, add_curves, covariances, curve, expect


class Objective(NamedTuple):
    """What the factors add to the bound at N(m, Lambda^-1), m (r,), and its derivatives.

    :ivar covariances: m, and what a form of precisions calls the covariance's root -> what ``expect`` needs to know of
        Lambda. None: that is the root itself.
    :ivar expect: m and that (None: a point mass, derivatives at m) -> sum E[log p], its gradient in m (r,), and what
        ``curvature`` needs to know.
    :ivar curvature: m, that, and whether to clamp -> the sum of :func:`~numpyro_rvga.core.factors.curve`.
    """

    covariances: Callable[[Array, Any], Any] | None
    expect: Callable[[Array, Any], tuple[Array, Array, Any]]
    curvature: Callable[[Array, Any, bool], Array]

    def seen(self, mean: Array, covariance_root: Any) -> Any:
        """What ``expect`` needs to know of Lambda."""
        return covariance_root if self.covariances is None else self.covariances(mean, covariance_root)

    def sums(self, mean: Array, covariance_root: Any) -> Sums:
        value, gradient, known = self.expect(mean, self.seen(mean, covariance_root))
        return Sums(value, gradient, self.curvature(mean, known, False))


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
    def num_chunks(self) -> int:
        """The number of chunks."""
        return max((x.shape[0] for x in jax.tree.leaves(self.chunks)), default=1)

    @property
    def first(self) -> Any:
        return jax.tree.map(lambda x: x[0], self.chunks)

    def visit(self, function: Callable, *known: Any) -> tuple[Any, Any]:
        """The sum over chunks of what ``function(chunk, *known)`` finds first, and what it finds second by chunk."""
        first = (self.first, *jax.tree.map(lambda x: x[0], known))
        if self.num_chunks == 1:
            found = function(*first)
            return found[0], jax.tree.map(lambda x: x[None], found[1])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *first)[0])

        def body(total, chunk):
            found, rest = function(*chunk)
            return jax.tree.map(jnp.add, total, found), rest

        return lax.scan(body, nothing, (self.chunks, *known))


def is_log_concave(kinds: Sequence[Kind]) -> bool:
    """Whether all factors are known to be."""
    return all(kind.concave for kind in kinds)


def is_conservative(kinds: Sequence[Kind]) -> bool:
    """Whether all gradients and curvatures derive from their values."""
    return all(kind.conservative for kind in kinds)


def objective_of(kinds: tuple[Kind, ...], factors_at: Callable[[Array], tuple[Factors, ...]]) -> Objective:
    """Of factors that are affine in e. ``factors_at``: e (r,) -> the factors seen from there."""
    return Objective(
        lambda e, covariance_root: covariances(factors_at(e), covariance_root),
        lambda e, known: expect(kinds, factors_at(e), known),
        lambda e, hessians, clamped: curve(kinds, factors_at(e), hessians, clamped=clamped),
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


def in_stages(
    row_kinds: Sequence[Kind],
    prior_kinds: Sequence[Kind],
    shapes: Sequence[tuple[int, int]],
    size: int,
    num_chunks: int,
) -> bool:
    """Whether the parts of an objective of affine factors are worth computing one after the other, so that the mean can
    be solved for at covariances that stay: where these are cheap to keep, and expectations of rows are closed forms.
    (Others are as dear as products of matrices, and twice as many of them take longer.)

    :param shapes: for each site, elements of a row, predictors of an element. :param size: of theta.
    """
    if any(kind.sampled for kind in (*row_kinds, *prior_kinds)) or any(kind.measured is not None for kind in row_kinds):
        return False
    # The predictors' covariances of all chunks are fewer numbers than the Jacobians of one, or there is but one.
    return num_chunks == 1 or num_chunks * sum(e * c * c for e, c in shapes) <= sum(e * c for e, c in shapes) * size


def joint_objective(groups: tuple[Group, ...], frame: Frame, *, staged: bool) -> Objective:
    """Of groups of factors, whose designs are in coordinates of theta.

    :param staged: whether each part is computed when it is asked for. Otherwise ``expect`` computes the curvatures too:
        factors that are not affine are linearized once, and what is large is not kept.
    """
    all_kinds = tuple(kind for group in groups for kind in group.kinds)
    ways = [False] if is_log_concave(all_kinds) else [False, True]

    def visit(function, e, *known):
        """Every group's sums and what else is found, by ``function(kinds, factors, *known)``; ``known`` by group."""
        theta = frame.theta(e)

        def of_group(group, *known):
            return group.visit(lambda chunk, *rest: function(group.kinds, group.linearise(chunk, theta), *rest), *known)

        return zip(*map(of_group, groups, *known))

    def covariances_staged(e, known):
        known = frame.spread(known)
        return tuple(visit(lambda kinds, factors: ((), covariances(factors, known)), e))[1]

    def expect_staged(e, known):
        def one(kinds, factors, known=None):
            value, gradient, hessians = expect(kinds, factors, known)
            return (value, gradient), hessians

        sums, hessians = visit(one, e, *() if known is None else (known,))
        value, gradient = (reduce(jnp.add, parts) for parts in zip(*sums))
        return value, frame.pull(gradient), hessians

    def curvature_staged(e, hessians, clamped):
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

    if staged:
        return Objective(covariances_staged, expect_staged, curvature_staged)
    return Objective(None, expect_at_once, lambda e, curves, clamped: frame.curve(curves[clamped]))
