"""The factors' part of the bound, in the parts that a search asks for one after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..pytrees import PyTree
from .factors import Expected, Factors, Kind, Sums, add_curvatures, covariances, curvature_of, expect


class Objective(NamedTuple):
    """What the factors add to the bound at N(m, Lambda^-1), m (r,), and its derivatives.

    :ivar covariances: m, and what a form of precisions calls the covariance's root -> what ``expect`` needs to know of
        Lambda. None: that is the root itself.
    :ivar expect: m and that (None: a point mass, derivatives at m) -> sum E[log p], its gradient in m (r,), and what
        ``curvature`` needs to know.
    :ivar curvature: m, the latter, and whether to clamp -> the sum of :func:`~.factors.curvature_of`.
    :ivar sums_of_set: m, and what is expected there, number of a set -> its sums, in the coordinates of theta.
    """

    covariances: Callable[[Array, PyTree], Any] | None
    expect: Callable[[Array, PyTree], Expected]
    curvature: Callable[[Array, PyTree, bool], Array]
    sums_of_set: Callable[[Array, Expected, int], Sums]

    def predictor_covariances(self, mean: Array, covariance_root: PyTree) -> PyTree:
        """What ``expect`` takes of the covariance Lambda^-1."""
        return covariance_root if self.covariances is None else self.covariances(mean, covariance_root)

    def sums(self, mean: Array, covariance_root: PyTree) -> Sums:
        expected = self.expect(mean, self.predictor_covariances(mean, covariance_root))
        return Sums(expected.value, expected.gradient, self.curvature(mean, expected.hessians, False))


class FactorSet(NamedTuple):
    """Factors that need not be in memory all at once: rows, or the terms of a prior.

    :ivar kinds: of a chunk's factors; () if there are none.
    :ivar linearize: (chunk, theta (P,)) -> factors with ``predictors`` = F_i(theta) and ``jacobian`` the Jacobians.
    :ivar chunks: a pytree with the chunks along the leading axis; () for one that needs no arrays.
    """

    kinds: tuple[Kind, ...]
    linearize: Callable[[PyTree, Array], tuple[Factors, ...]]
    chunks: PyTree = ()

    @property
    def num_chunks(self) -> int:
        """The number of chunks."""
        return max((x.shape[0] for x in jax.tree.leaves(self.chunks)), default=1)

    @property
    def first(self) -> PyTree:
        return jax.tree.map(lambda x: x[0], self.chunks)

    def map_reduce(self, function: Callable, *arguments: Any) -> tuple[Any, Any]:
        """``function(chunk, *arguments)`` returns a pair: the sum of the first over chunks, and the second by chunk."""
        first = (self.first, *jax.tree.map(lambda x: x[0], arguments))
        if self.num_chunks == 1:
            result = function(*first)
            return result[0], jax.tree.map(lambda x: x[None], result[1])
        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *first)[0])

        def body(total, chunk):
            result, rest = function(*chunk)
            return jax.tree.map(jnp.add, total, result), rest

        return lax.scan(body, nothing, (self.chunks, *arguments))


def is_log_concave(kinds: Sequence[Kind]) -> bool:
    """Whether all factors are log-concave."""
    return all(kind.concave for kind in kinds)


def is_quadratic(kinds: Sequence[Kind]) -> bool:
    """Whether all factors are, so that the best Gaussian is the posterior."""
    return all(kind.quadratic for kind in kinds)


def is_conservative(kinds: Sequence[Kind]) -> bool:
    """Whether all gradients and curvatures derive from their values."""
    return all(kind.conservative for kind in kinds)


def objective_of(kinds: tuple[Kind, ...], factors_at: Callable[[Array], tuple[Factors, ...]]) -> Objective:
    """Of factors that are affine in e. ``factors_at``: e (r,) -> the factors with e as the origin."""

    def curvature(e, hessians, clamped):
        return curvature_of(kinds, factors_at(e), hessians, clamped=clamped)

    return Objective(
        lambda e, covariance_root: covariances(factors_at(e), covariance_root),
        lambda e, covariances: expect(kinds, factors_at(e), covariances),
        curvature,
        lambda e, expected, _: Sums(expected.value, expected.gradient, curvature(e, expected.hessians, False)),
    )


class Coordinates(NamedTuple):
    """A change of variables, from the coordinates e (r,) of a search to theta (P,), in which factors are given.

    :ivar theta: e -> theta. :ivar vjp: gradients in theta -> gradients in e.
    :ivar covariance: a covariance of e -> that of theta, as :func:`~.jacobians.covariance` takes it.
    :ivar curvature_of: curvatures in theta -> curvatures in e.
    """

    theta: Callable[[Array], Array]
    vjp: Callable[[Array], Array]
    covariance: Callable[[Any], Any]
    curvature_of: Callable[[Array], Array]


def standard_coordinates(mean: Array, root: Array, *, weighted: bool) -> Coordinates:
    """theta = mean + root e. Jacobians stay in the coordinates of theta: per row, that saves one product with a (P, P)
    matrix.

    :param weighted: whether the search does so too: its precisions are :class:`~.precisions.Weighted` by ``root``.
    """

    def in_basis(curvature):
        if jnp.ndim(curvature) < 2:
            return (root.T * curvature) @ root
        return root.T @ curvature @ root

    same = lambda x: x  # noqa: E731
    return Coordinates(
        lambda e: mean + root @ e,
        lambda gradient: root.T @ gradient,
        same if weighted else lambda covariance_root: covariance_root @ root.T,
        same if weighted else in_basis,
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


def joint_objective(sets: tuple[FactorSet, ...], coordinates: Coordinates, *, staged: bool) -> Objective:
    """Of sets of factors, whose Jacobians are in coordinates of theta.

    :param staged: whether each part is computed when it is asked for. Otherwise ``expect`` computes the curvatures too:
        factors that are not affine are linearized once, and what is large is not kept.
    """
    all_kinds = tuple(kind for factor_set in sets for kind in factor_set.kinds)
    ways = [False] if is_log_concave(all_kinds) else [False, True]

    def map_reduce(function, e, *arguments):
        """By set, sums and the rest of ``function(kinds, factors, *arguments)``; ``arguments`` are by set too."""
        theta = coordinates.theta(e)

        def of_set(factor_set, *arguments):
            return factor_set.map_reduce(
                lambda chunk, *rest: function(factor_set.kinds, factor_set.linearize(chunk, theta), *rest), *arguments
            )

        return zip(*map(of_set, sets, *arguments))

    def summed(sums):
        """Over sets; accounts are by kind."""
        values, gradients, accounts = zip(*sums)
        accounts = jax.tree.map(lambda *x: jnp.concatenate(x), *accounts)
        value, gradient = reduce(jnp.add, values), reduce(jnp.add, gradients)
        return Expected(value, coordinates.vjp(gradient), None, accounts, gradients)

    def sums_of_set(e, expected, number):
        before = sum(len(factor_set.kinds) for factor_set in sets[:number])
        value = jnp.sum(expected.accounts.values[before : before + len(sets[number].kinds)])
        hessians = expected.hessians[number]
        curvature = curvature_in_theta(sets[number], coordinates.theta(e), hessians, False) if staged else hessians[0]
        return Sums(value, expected.gradients[number], curvature)

    def curvature_in_theta(factor_set, theta, hessians, clamped):
        def one(chunk, h):
            return curvature_of(factor_set.kinds, factor_set.linearize(chunk, theta), h, clamped=clamped), ()

        return factor_set.map_reduce(one, hessians)[0]

    def covariances_staged(e, root):
        sigma = coordinates.covariance(root)
        return tuple(map_reduce(lambda kinds, factors: ((), covariances(factors, sigma)), e))[1]

    def expect_staged(e, by_set):
        def one(kinds, factors, of_predictors=None):
            expected = expect(kinds, factors, of_predictors)
            return (expected.value, expected.gradient, expected.accounts), expected.hessians

        sums, hessians = map_reduce(one, e, *() if by_set is None else (by_set,))
        return summed(sums)._replace(hessians=hessians)

    def curvature_staged(e, hessians, clamped):
        theta = coordinates.theta(e)
        curves = [curvature_in_theta(factor_set, theta, h, clamped) for factor_set, h in zip(sets, hessians)]
        return coordinates.curvature_of(reduce(add_curvatures, curves))

    def expect_at_once(e, root):
        sigma = None if root is None else coordinates.covariance(root)

        def one(kinds, factors):
            expected = expect(kinds, factors, covariances(factors, sigma))
            curves = [curvature_of(kinds, factors, expected.hessians, clamped=clamped) for clamped in ways]
            return (expected.value, expected.gradient, expected.accounts, curves), ()

        sums, _ = map_reduce(one, e)
        return summed([rest for *rest, _ in sums])._replace(hessians=[curves for *_, curves in sums])

    def curvature_at_once(e, hessians, clamped):
        return coordinates.curvature_of(reduce(add_curvatures, [curves[clamped] for curves in hessians]))

    if staged:
        return Objective(covariances_staged, expect_staged, curvature_staged, sums_of_set)
    return Objective(None, expect_at_once, curvature_at_once, sums_of_set)
