"""The factors' part of the bound at q = N(m, Lambda^-1): sum_i E_q[log p_i], with its derivatives.

Factor i has the predictors u_i ~ N(F_i(m), S_i) with S_i = J_i Lambda^-1 J_i^T, and phi_i = log p_i as a function of
them. With g_i = E[grad phi_i] and G_i = E[hess phi_i], a search asks for three things, one after the other:

    the S_i (n, C, C);    sum_i E[phi_i] and sum_i J_i^T g_i (r,);    - sum_i J_i^T G_i J_i (r, r).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..pytrees import PyTree
from .factors import (
    Expected,
    Factors,
    Kind,
    Sums,
    add_curvatures,
    covariances,
    curvature_of,
    expect,
)
from .normal_rows import NormalRows


def is_log_concave(kinds: Sequence[Kind]) -> bool:
    """Whether all factors are log-concave."""
    return all(kind.concave for kind in kinds)


def is_quadratic(kinds: Sequence[Kind]) -> bool:
    """Whether all factors are, so that the best Gaussian is the posterior."""
    return all(kind.quadratic for kind in kinds)


def is_conservative(kinds: Sequence[Kind]) -> bool:
    """Whether all gradients and curvatures derive from their values."""
    return all(kind.conservative for kind in kinds)


# ---------------------------------------------------------------------- coordinates of a search
class Coordinates(NamedTuple):
    """e (r,) with theta = mean + root e, or theta itself (``root`` None). Factors are given in theta, and Jacobians
    stay there: per row, that saves one product with a (P, P) matrix.

    :ivar weighted: whether the search does so too: its precisions are :class:`~.precisions.Weighted` by ``root``.
    """

    mean: Array | float = 0.0
    root: Array | None = None
    weighted: bool = False

    def theta(self, e: Array) -> Array:
        return e if self.root is None else self.mean + self.root @ e

    def gradient(self, in_theta: Array) -> Array:
        """A gradient in e, from that in theta."""
        return in_theta if self.root is None else self.root.T @ in_theta

    def covariance(self, covariance_root: PyTree) -> PyTree:
        """A covariance of theta as :func:`~.jacobians.covariance` takes it, from a root of that of e."""
        return covariance_root if self.root is None or self.weighted else covariance_root @ self.root.T

    def curvature(self, in_theta: Array) -> Array:
        """A curvature in e, from that in theta: (P, P), or a diagonal (P,)."""
        if self.root is None or self.weighted:
            return in_theta
        return self.root.T @ in_theta @ self.root if in_theta.ndim == 2 else (self.root.T * in_theta) @ self.root


# ---------------------------------------------------------------------- sets of factors
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

    def with_kinds(self, change: Callable[[Kind], Kind]) -> FactorSet:
        """The factors with other expectations."""
        return self._replace(kinds=tuple(map(change, self.kinds)))

    def map_reduce(self, function: Callable, theta: Array, *arguments: Any) -> tuple[Any, Any]:
        """``function(factors of a chunk at theta, *arguments)`` returns a pair: the sum of the first over chunks, and
        the second by chunk."""
        chunk, *others = (self.first, *jax.tree.map(lambda x: x[0], arguments))
        if self.num_chunks == 1:
            result = function(self.linearize(chunk, theta), *others)
            return result[0], jax.tree.map(lambda x: x[None], result[1])

        def of_chunk(chunk, *others):
            return function(self.linearize(chunk, theta), *others)

        nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(of_chunk, chunk, *others)[0])

        def body(total, chunk):
            result, rest = of_chunk(*chunk)
            return jax.tree.map(jnp.add, total, result), rest

        return lax.scan(body, nothing, (self.chunks, *arguments))

    def covariances(self, theta: Array, sigma: PyTree) -> PyTree:
        """The covariances of predictors, by chunk. ``sigma``: as :func:`~.jacobians.covariance` takes it."""
        return self.map_reduce(lambda factors: ((), covariances(factors, sigma)), theta)[1]

    @property
    def expected(self) -> Callable[[Array, PyTree], tuple[Expected, PyTree]]:
        """theta and covariances (None: of a point mass) -> sums over factors, and the Hessians by chunk."""
        return partial(self.map_reduce, partial(expect, self.kinds))

    def curvature(self, theta: Array, hessians: PyTree, clamped: bool) -> Array:
        """Minus the Hessian, summed. ``clamped``: with each G_i's negative part only."""

        def of_factors(factors: tuple[Factors, ...], hessians: PyTree) -> tuple[Array, tuple[()]]:
            return curvature_of(self.kinds, factors, hessians, clamped=clamped), ()

        return self.map_reduce(of_factors, theta, hessians)[0]

    def with_curvatures(self, theta: Array, sigma: PyTree, ways: Sequence[bool]) -> tuple[Expected, list[Array]]:
        """Sums over factors, with the curvature for each of ``ways``, clamped or not."""

        def of_factors(factors: tuple[Factors, ...]) -> tuple[tuple[Expected, list[Array]], tuple[()]]:
            totals, hessians = expect(self.kinds, factors, covariances(factors, sigma))
            return (totals, [curvature_of(self.kinds, factors, hessians, clamped=clamped) for clamped in ways]), ()

        return self.map_reduce(of_factors, theta)[0]


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
    if any(kind.sampled for kind in (*row_kinds, *prior_kinds)) or any(kind.has_errors for kind in row_kinds):
        return False
    # The predictors' covariances of all chunks are fewer numbers than the Jacobians of one, or there is but one.
    return num_chunks == 1 or num_chunks * sum(e * c * c for e, c in shapes) <= sum(e * c for e, c in shapes) * size


@dataclass(frozen=True)
class Objective:
    """What a search asks of sets of factors, in its own coordinates: m (r,), gradients (r,), curvatures (r, r).

    :ivar sets: their Jacobians are in the coordinates of theta.
    :ivar staged: whether each part is computed when it is asked for; see :func:`in_stages`. Otherwise :meth:`expect`
        computes the curvatures too, exact and clamped, and they are its ``hessians``: factors that are not affine are
        linearized once, and what is large is not kept.
    """

    sets: tuple[FactorSet | NormalRows, ...]
    coordinates: Coordinates
    staged: bool

    def predictor_covariances(self, mean: Array, covariance_root: PyTree) -> PyTree:
        """The S_i, which :meth:`expect` takes; or the root itself where they are not kept.

        :param covariance_root: as a form of precisions has it.
        """
        if not self.staged:
            return covariance_root
        theta, sigma = self.coordinates.theta(mean), self.coordinates.covariance(covariance_root)
        return tuple(factor_set.covariances(theta, sigma) for factor_set in self.sets)

    def expect(self, mean: Array, covariances: PyTree) -> Expected:
        """Value and gradient, and in ``hessians`` what :meth:`curvature` takes. ``covariances`` None: q is a point
        mass, and the derivatives are those at the mean."""
        theta, pairs = self.coordinates.theta(mean), []
        if self.staged:
            by_set = [None] * len(self.sets) if covariances is None else covariances
            for factor_set, of_set in zip(self.sets, by_set):
                pairs.append(factor_set.expected(theta, of_set))
        else:
            sigma = None if covariances is None else self.coordinates.covariance(covariances)
            is_concave = is_log_concave([kind for factor_set in self.sets for kind in factor_set.kinds])
            ways = [False] if is_concave else [False, True]
            for factor_set in self.sets:
                pairs.append(factor_set.with_curvatures(theta, sigma, ways))
        totals, hessians = zip(*pairs)
        gradients = tuple(each.gradient for each in totals)
        error_estimates = jax.tree.map(lambda *x: jnp.concatenate(x), *[each.error_estimates for each in totals])
        gradient = self.coordinates.gradient(reduce(jnp.add, gradients))
        value = reduce(jnp.add, [each.value for each in totals])
        return Expected(value, gradient, error_estimates, hessians, gradients)

    def value(self, mean: Array, covariance_root: PyTree) -> Array:
        """The sum of E[phi] alone, in less time than :meth:`expect` takes to trace and to compile."""
        theta, sigma = self.coordinates.theta(mean), self.coordinates.covariance(covariance_root)
        return reduce(jnp.add, [of_set.with_curvatures(theta, sigma, ())[0].value for of_set in self.sets])

    def curvature(self, mean: Array, hessians: PyTree, clamped: bool) -> Array:
        """- sum_i J_i^T G_i J_i; ``clamped``: with each G_i's negative part only."""
        curvatures = [self._curvature_of_set(mean, h, i, clamped) for i, h in enumerate(hessians)]
        return self.coordinates.curvature(reduce(add_curvatures, curvatures))

    def sums_of_first_set(self, mean: Array, expected: Expected) -> Sums:
        """Sums of the first set, in the coordinates of theta, from the expectations at ``mean``."""
        value = jnp.sum(expected.error_estimates.values[: len(self.sets[0].kinds)])
        return Sums(value, expected.gradients[0], self._curvature_of_set(mean, expected.hessians[0], 0, False))

    def _curvature_of_set(self, mean: Array, hessians: PyTree, number: int, clamped: bool) -> Array:
        """The curvature of one set in the coordinates of theta."""
        if not self.staged:
            return hessians[clamped]
        return self.sets[number].curvature(self.coordinates.theta(mean), hessians, clamped)
