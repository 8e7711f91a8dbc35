"""Factors that see q through few predictors, and the sums over them that every solver takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from .linalg import positive_part

Moments = tuple[Array, Array, Array]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Selection:
    """A design (n, 1, r) whose row i is ``scale_i`` at place ``index_i`` and zero elsewhere.

    :ivar index: (n,). :ivar scale: (n,). :ivar size: r.
    """

    index: Array
    scale: Array
    size: int = field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, int, int]:
        return len(self.index), 1, self.size


class Factors(NamedTuple):
    """n factors of the same kind, linearised: a_i = offset_i + design_i e.

    :ivar offset: (n, C).
    :ivar design: (n, C, r).
    :ivar constants: pytree of (n, ...) arrays that the factors' densities take.
    """

    offset: Array
    design: Array | Selection
    constants: tuple


class Kind(NamedTuple):
    """What the factors of one kind have in common (static).

    :ivar expect: (mean (C,), covariance (C, C), constants) -> E[phi], E[grad phi], E[hess phi].
    :ivar plugin: the same at the mean, covariance ignored.
    :ivar concave: whether phi is known to be log-concave.
    :ivar conservative: whether ``expect``'s gradient and curvature derive from its value. If not (inverse probit),
        the fixed-point equations are solved as a root instead.
    """

    expect: Callable[[Array, Array, tuple], Moments]
    plugin: Callable[[Array, Array, tuple], Moments]
    concave: bool
    conservative: bool = True


class Sums(NamedTuple):
    """Over all factors: E[phi], Z' g, -Z' G Z, and the last with each G's negative part only (None: the same).

    Of selections -Z' G Z is diagonal, and its diagonal (r,) stands for it.
    """

    value: Array
    gradient: Array
    curvature: Array
    fallback: Array | None


def apply_design(design: Array | Selection, e: Array) -> Array:
    """design_i e for each factor, (n, C)."""
    if isinstance(design, Selection):
        return (design.scale * e[design.index])[:, None]
    return design @ e


def times_root(design: Array | Selection, root: Array) -> Array:
    """design_i root for each factor, (n, C, r)."""
    if isinstance(design, Selection):
        return (design.scale[:, None] * root[design.index])[:, None]
    return design @ root


def _covariances(design: Array | Selection, covariance_root: Array) -> Array:
    """Z_i Lambda^-1 Z_i^T, (n, C, C)."""
    if isinstance(design, Selection):
        lengths = jnp.sum(covariance_root**2, axis=0)
        return (design.scale**2 * lengths[design.index])[:, None, None]
    n, c, r = design.shape
    spread = (covariance_root @ design.reshape(n * c, r).T).reshape(-1, n, c)
    return jnp.einsum("rnc,rnd->ncd", spread, spread)


def _pull_back(design: Array | Selection, gradients: Array) -> Array:
    """sum Z_i^T g_i, (r,)."""
    if isinstance(design, Selection):
        return jnp.zeros(design.size, gradients.dtype).at[design.index].add(design.scale * gradients[:, 0])
    return gradients.reshape(-1) @ design.reshape(-1, design.shape[-1])


def _gram(design: Array | Selection, weights: Array) -> Array:
    """sum Z_i^T W_i Z_i, (r, r), or its diagonal (r,) if it is diagonal."""
    if isinstance(design, Selection):
        return _pull_back(design, design.scale[:, None] * weights[:, 0])
    n, c, r = design.shape
    return design.reshape(n * c, r).T @ jnp.einsum("ncd,ndr->ncr", weights, design).reshape(n * c, r)


def _plus(a: Array, b: Array) -> Array:
    """The sum of two matrices (r, r), for which their diagonals (r,) may stand."""
    if {jnp.ndim(a), jnp.ndim(b)} == {1, 2}:
        a, b = (jnp.diag(x) if x.ndim == 1 else x for x in (a, b))
    return a + b


def evaluate(kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], covariance_root: Array | None) -> Sums:
    """Sums over factors.

    :param covariance_root: any A with A^T A = Lambda^-1; None for a point mass, with derivatives at the mean.
    """
    value, gradient, curvature, correction = 0.0, 0.0, 0.0, 0.0
    for kind, block in zip(kinds, blocks):
        n, c, _ = block.design.shape
        if covariance_root is None:
            covariance = jnp.zeros((n, c, c), block.offset.dtype)
        else:
            covariance = _covariances(block.design, covariance_root)
        moments = jax.vmap(kind.plugin if covariance_root is None else kind.expect)
        e, g, h = moments(block.offset, covariance, block.constants)
        value, gradient = value + jnp.sum(e), gradient + _pull_back(block.design, g)
        curvature = _plus(curvature, _gram(block.design, -h))
        if not kind.concave:
            correction = _plus(correction, _gram(block.design, positive_part(h)))
    fallback = None if all(kind.concave for kind in kinds) else _plus(curvature, correction)
    return Sums(value, gradient, curvature, fallback)


def add(a: Sums, b: Sums) -> Sums:
    fallback = None
    if a.fallback is not None or b.fallback is not None:
        fallback = _plus(*[x.curvature if x.fallback is None else x.fallback for x in (a, b)])
    return Sums(a.value + b.value, a.gradient + b.gradient, _plus(a.curvature, b.curvature), fallback)
