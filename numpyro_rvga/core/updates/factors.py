"""Factors that see q through few predictors, and the sums over them that every solver takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..matrices.jacobians import SparseJacobian, covariance, gram, vjp
from ..matrices.linalg import positive_part_in_units
from ..pytrees import PyTree

Moments = tuple[Array, Array, Array]
Jacobian = TypeVar("Jacobian", Array, SparseJacobian)


class Factors(NamedTuple, Generic[Jacobian]):
    """n factors of the same kind, linearized: predictors_i + jacobian_i e.

    :ivar predictors: (n, C).
    :ivar jacobian: (n, C, r).
    :ivar constants: pytree of (n, ...) arrays that the factors' densities take.
    """

    predictors: Array
    jacobian: Jacobian
    constants: tuple


Expect = Callable[..., tuple[Moments, Array]]
Nodes = Literal["usual", "few", "corrected", "values"]
"""Which expectations a search takes: the usual ones; those by few nodes where there are such rules, or these corrected,
see :class:`Kind`; or values alone, by many, where they would be by few."""


class Kind(NamedTuple):
    """Factors of one kind (static): their log-likelihood phi as a function of the predictors, and its expectations.

    :ivar expect: of n factors with predictors u ~ N(mean, covariance): means (n, C), covariances (n, C, C) and
        constants (n, ...) -> E[phi] (n,), E[grad phi] (n, C), E[hess phi] (n, C, C); and by how many nats E[phi] may be
        off, (n,).
    :ivar plugin: of one factor, the moments at the mean, covariance ignored.
    :ivar finest: of one factor, the moments as exactly as may be.
    :ivar concave: whether phi is log-concave. :ivar quadratic: whether it is a polynomial of the second degree.
    :ivar conservative: whether ``expect``'s gradient and curvature derive from its value. If not (inverse probit),
        the fixed-point equations are solved as a root instead.
    :ivar information: (mean, constants) -> the Fisher information (C, C), which replaces minus the Hessian where
        that is no curvature to go by.
    :ivar has_errors: whether ``expect`` estimates its errors. Else they are zero.
    :ivar few: the same by few nodes; None: there is no such rule. With ``is_corrected``, a traced flag, gradient and
        curvature are those by few other nodes, or corrected for derivatives that few nodes miss: how far they are off.
    :ivar values: E[phi] (n,) and its errors (n,) alone, by many nodes; None: there is no such rule.
    :ivar has_few_draws: whether ``expect`` takes ``is_coarse`` too, a traced flag or None: whether few draws will do.
    :ivar held_out: of n factors, E[phi] over R sets of nodes that no search uses, (n, R); None but for samples.
    """

    expect: Expect
    plugin: Callable[[Array, Array, tuple], Moments]
    finest: Callable[[Array, Array, tuple], Moments]
    concave: bool
    quadratic: bool = False
    conservative: bool = True
    information: Callable[[Array, tuple], Array] | None = None
    has_errors: bool = False
    few: Expect | None = None
    values: Callable[[Array, Array, tuple], tuple[Array, Array]] | None = None
    has_few_draws: bool = False
    held_out: Callable[[Array, Array, tuple], Array] | None = None

    @property
    def sampled(self) -> bool:
        """Whether expectations are averages over many nodes, dearer than a product of matrices."""
        return self.held_out is not None

    def at(self, predictors: Array, constants: tuple) -> Moments:
        """phi (n,), its gradient (n, C) and its Hessian (n, C, C) at predictors (n, C), which have no variance."""
        nothing = jnp.zeros((*predictors.shape, predictors.shape[1]), predictors.dtype)
        return jax.vmap(self.plugin)(predictors, nothing, constants)

    def by_nodes(self, nodes: Nodes, is_corrected: Array | np.ndarray | None = None) -> Kind:
        """The kind with the expectations that a search asks for, as far as there are such rules.

        :param is_corrected: a traced flag, of expectations by few nodes.
        """
        if nodes == "values" and self.values is not None:
            return self._replace(expect=partial(_values_alone, self.values))
        if nodes == "usual" or self.few is None:
            return self
        flag = {"few": is_corrected, "corrected": np.asarray(True)}.get(nodes)
        return self._replace(expect=self.few if flag is None else partial(self.few, is_corrected=flag))

    def by_few_draws(self, is_coarse: Array | np.ndarray | None) -> Kind:
        """The kind with expectations by few draws where a traced flag says so; None: unchanged."""
        return self._replace(expect=partial(self.expect, is_coarse=is_coarse)) if self.has_few_draws else self


def without_errors(moments: Callable[[Array, Array, PyTree], Moments]) -> Expect:
    """``expect`` of a :class:`Kind`, from a function of n factors that is exact, or does not estimate its errors."""

    def expect(means: Array, covariances: Array, constants: PyTree) -> tuple[Moments, Array]:
        return moments(means, covariances, constants), jnp.zeros(len(means), means.dtype)

    return expect


def _values_alone(values: Callable, means: Array, covariances: Array, constants: PyTree) -> tuple[Moments, Array]:
    """``expect`` of a :class:`Kind` from its ``values``, with derivatives of zero."""
    value, errors = values(means, covariances, constants)
    return (value, jnp.zeros_like(means), jnp.zeros_like(covariances)), errors


class ErrorEstimates(NamedTuple):
    """The factors' expected values and the estimated errors of these, summed by kind: (kinds,) each.

    :ivar refinement: what finer rules have added to the values, where a search has ended by few nodes; else None.
    """

    values: Array
    errors: Array
    refinement: Array | np.ndarray | None = None


class Expected(NamedTuple):
    """Over all factors: sum E[phi] () and sum J_i^T g_i (r,). Of an objective also what the curvature takes, and the
    gradients by set of factors, in the coordinates of theta.

    :ivar hessians: G_i = E[hess phi] (n, C, C) by kind, or the curvatures themselves.
    """

    value: Array
    gradient: Array
    error_estimates: ErrorEstimates
    hessians: PyTree = ()
    gradients: tuple[Array, ...] = ()


class Sums(NamedTuple):
    """Over all factors: sum E[phi] (), sum J_i^T g_i (r,) and -sum J_i^T G_i J_i as of :func:`~.jacobians.gram`."""

    value: Array
    gradient: Array
    curvature: Array


def add_curvatures(a: Array, b: Array) -> Array:
    """The sum of two matrices of one form; or of (r, r), for which their diagonals (r,) may stand."""
    if {jnp.ndim(a), jnp.ndim(b)} == {1, 2}:
        a, b = (jnp.diag(x) if x.ndim == 1 else x for x in (a, b))
    return a + b


def covariances(blocks: tuple[Factors, ...], sigma: Array | None) -> Any:
    """J_i Sigma J_i^T by kind, (n, C, C). ``sigma``: as :func:`~.jacobians.covariance` takes it; None for a point mass,
    which has none."""
    return None if sigma is None else tuple(covariance(block.jacobian, sigma) for block in blocks)


def expect(
    kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], covariances: tuple[Array, ...] | None = None
) -> tuple[Expected, tuple[Array, ...]]:
    """Sums over factors of E[phi] and J_i^T g_i, without Hessians; and these apart, G_i = E[hess phi] by kind.

    :param covariances: None for a point mass, with derivatives at the mean.
    """
    value = gradient = jnp.asarray(0.0)  # of weak type: the factors' type prevails
    hessians, values, errors = [], [], []
    for i, (kind, block) in enumerate(zip(kinds, blocks)):
        if covariances is None:
            e, g, h = kind.at(block.predictors, block.constants)
            error = jnp.zeros_like(e)
        else:
            (e, g, h), error = kind.expect(block.predictors, covariances[i], block.constants)
        values.append(jnp.sum(e))
        errors.append(jnp.sum(error))
        value, gradient = value + values[-1], gradient + vjp(block.jacobian, g)
        hessians.append(h)
    by_kind = [jnp.stack(x) if x else jnp.zeros(0) for x in (values, errors)]
    error_estimates = ErrorEstimates(by_kind[0], by_kind[1])
    return Expected(value, gradient, error_estimates), tuple(hessians)


def curvature_of(
    kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], hessians: tuple[Array, ...], *, clamped: bool = False
) -> Array:
    """-sum J_i^T G_i J_i. ``clamped``: with each G_i's negative part only."""
    curvature = jnp.asarray(0.0)
    for kind, block, h in zip(kinds, blocks, hessians):
        if clamped and not kind.concave:
            h = h - positive_part_in_units(h)
        curvature = add_curvatures(curvature, gram(block.jacobian, -h))
    return curvature


def expected_values(
    kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], sigma: Array, shape: tuple[int, ...]
) -> Array:
    """E[phi] in this shape, of factors in its order: what several kinds have at the same index is summed."""
    total: Any = 0.0
    for kind, block, of_predictors in zip(kinds, blocks, covariances(blocks, sigma)):
        (values, _, _), _ = kind.expect(block.predictors, of_predictors, block.constants)
        total = total + jnp.sum(values.reshape(*shape, -1), axis=-1)
    return total


def evaluate(kinds: tuple[Kind, ...], blocks: tuple[Factors, ...], sigma: Array | None) -> Sums:
    """The sums of :class:`Sums`. ``sigma``: as :func:`covariances` takes it; None for a point mass."""
    totals, hessians = expect(kinds, blocks, covariances(blocks, sigma))
    return Sums(totals.value, totals.gradient, curvature_of(kinds, blocks, hessians))
