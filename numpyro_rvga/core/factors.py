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
        return self.index.shape[0], 1, self.size


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
    :ivar sampled: whether expectations are averages over many nodes, dearer than a product of matrices.
    :ivar information: (mean, constants) -> the Fisher information (C, C), which stands for minus the Hessian where
        that is no curvature to go by.
    """

    expect: Callable[[Array, Array, tuple], Moments]
    plugin: Callable[[Array, Array, tuple], Moments]
    concave: bool
    conservative: bool = True
    sampled: bool = False
    information: Callable[[Array, tuple], Array] | None = None


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


def covariances(blocks: tuple[Factors, ...], covariance_root: Array) -> tuple[Array, ...]:
    """Z_i Lambda^-1 Z_i^T by kind, (n, C, C). ``covariance_root``: any A with A^T A = Lambda^-1."""

    def of_design(design):
        if isinstance(design, Selection):
            lengths = jnp.sum(covariance_root**2, axis=0)
            return (design.scale**2 * lengths[design.index])[:, None, None]
        n, c, r = design.shape
        spread = (covariance_root @ design.reshape(n * c, r).T).reshape(-1, n, c)
        return jnp.einsum("rnc,rnd->ncd", spread, spread)

    return tuple(of_design(block.design) for block in blocks)


def expect(
    kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], covariances: tuple[Array, ...] | None
) -> tuple[Array, Array, tuple[Array, ...]]:
    """sum E[phi], sum Z_i^T g_i, and E[hess phi] by kind, (n, C, C).

    :param covariances: None for a point mass, with derivatives at the mean.
    """
    value, gradient, hessians = 0.0, 0.0, []
    for i, (kind, block) in enumerate(zip(kinds, blocks)):
        if covariances is None:
            n, c, _ = block.design.shape
            moments, covariance = kind.plugin, jnp.zeros((n, c, c), block.offset.dtype)
        else:
            moments, covariance = kind.expect, covariances[i]
        e, g, h = jax.vmap(moments)(block.offset, covariance, block.constants)
        value, gradient = value + jnp.sum(e), gradient + _pull_back(block.design, g)
        hessians.append(h)
    return value, gradient, tuple(hessians)


def curve(
    kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], hessians: tuple[Array, ...]
) -> tuple[Array, Array | None]:
    """-Z' G Z, and the same with each G's negative part only (None: no difference)."""
    curvature, correction = 0.0, 0.0
    for kind, block, h in zip(kinds, blocks, hessians):
        curvature = _plus(curvature, _gram(block.design, -h))
        if not kind.concave:
            correction = _plus(correction, _gram(block.design, positive_part(h)))
    fallback = None if all(kind.concave for kind in kinds) else _plus(curvature, correction)
    return curvature, fallback


def evaluate(kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], covariance_root: Array | None) -> Sums:
    """All sums. ``covariance_root``: as :func:`covariances` takes it; None for a point mass."""
    spread = None if covariance_root is None else covariances(blocks, covariance_root)
    value, gradient, hessians = expect(kinds, blocks, spread)
    return Sums(value, gradient, *curve(kinds, blocks, hessians))


def add_curves(a: tuple[Array, Array | None], b: tuple[Array, Array | None]) -> tuple[Array, Array | None]:
    """Sums of :func:`curve`'s."""
    fallback = None
    if a[1] is not None or b[1] is not None:
        fallback = _plus(*[x[0] if x[1] is None else x[1] for x in (a, b)])
    return _plus(a[0], b[0]), fallback
