"""Normal terms of one scale, by their sums: a search then takes no pass over rows.

Of terms w_i log N(0; p_i + x_i . theta, s_i exp(a + j . theta)^2), the expectation over theta ~ N(mu, Sigma) is

    - W m - e Q / 2 + constant,    W = sum w_i,  m = a + j . mu,  e = exp(-2 m + 2 j . Sigma j),
    Q = sum v_i ((p_i + x_i . nu)^2 + x_i . Sigma x_i),    v_i = w_i / s_i^2,  nu = mu - 2 Sigma j,

which depends on rows by sum v_i x_i x_i^T, sum v_i x_i p_i and sum v_i p_i^2 alone. The last two are those at a
reference, about which nothing cancels: the theta of about the least Q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..expectations.closed_forms import Gaussian, GaussianLogScale
from ..matrices.jacobians import SparseJacobian, times_vector, vjp
from ..matrices.precisions import Arrow
from ..pytrees import PyTree
from .factors import ErrorEstimates, Expected, Factors, Kind

FORMS = (Gaussian, GaussianLogScale)
REFERENCE_STEPS = 20  # of conjugate gradients
FURTHEST = 10.0  # of a logarithm of a scale from the prior's, where a search starts


class NormalSums(NamedTuple):
    """The sums of one site's terms.

    :ivar gram: sum v_i x_i x_i^T, packed. :ivar linear: sum v_i x_i p_i (r,), at the reference. :ivar squares:
        sum v_i p_i^2, likewise. :ivar weight: W. :ivar constant: what does not depend on theta or ``log_scale``.
    :ivar reference: (r,). :ivar log_scale: a. :ivar slope: j (r,).
    """

    gram: Array
    linear: Array
    squares: Array
    weight: Array
    constant: Array
    reference: Array
    log_scale: Array
    slope: Array


class _Terms(NamedTuple):
    """Predictors p_i, their sparse Jacobian, weights w_i, and log(s_i) + a; the Jacobian of log scales, or None."""

    location: Array
    jacobian: SparseJacobian
    weight: Array
    log_scale: Array
    constant: Array
    of_scale: Array | None


def _read(form: object, factors: Factors[SparseJacobian]) -> _Terms:
    weight, values, _ = factors.constants
    jacobian = factors.jacobian
    of_location = replace(jacobian, values=jacobian.values[:, :1])
    if form is Gaussian:
        log_scale, of_scale = jnp.log(values.scale), None
    else:
        log_scale, of_scale = factors.predictors[:, 1], jacobian.values[:, 1]
    location = factors.predictors[:, 0] - values.target
    return _Terms(location, of_location, weight * values.weight, log_scale, weight * values.constant, of_scale)


def have_one_scale(form: object, factors: Factors[SparseJacobian]) -> Array:
    """Whether all terms' log scales depend on theta alike, by entries of the corner: they then differ by constants."""
    terms = _read(form, factors)
    if terms.of_scale is None:
        return jnp.asarray(True)
    index = terms.jacobian.index
    is_read = (terms.of_scale[0] != 0) & (index[0] >= terms.jacobian.num_diagonal)
    alike = (terms.of_scale == terms.of_scale[0]) & ((index == index[0]) | (terms.of_scale == 0))
    alike = alike & (is_read | (terms.of_scale == 0))
    return jnp.all(alike | (terms.weight == 0)[:, None])


def log_scale_of(form: object, factors: Factors[SparseJacobian]) -> Array:
    """a: of the first term, at theta = 0."""
    return _read(form, factors).log_scale[0]


def sums_of(form: object, factors: Factors[SparseJacobian], precisions: Arrow) -> NormalSums:
    """The sums, of terms at theta = 0 that have one scale.

    :param precisions: how matrices are packed.
    """
    terms = _read(form, factors)
    log_scale = terms.log_scale[0]
    relative = terms.log_scale - log_scale
    weights = terms.weight * jnp.exp(-2 * relative)
    gram = terms.jacobian.gram(weights[:, None, None])

    def slope_at(location: Array) -> Array:
        return vjp(terms.jacobian, (weights * location)[:, None])

    reference = _least_squares(precisions, gram, slope_at(terms.location))
    location = terms.location + times_vector(terms.jacobian, reference)[:, 0]
    slope = jnp.zeros_like(reference)
    if terms.of_scale is not None:
        slope = slope.at[terms.jacobian.index[0]].add(terms.of_scale[0])
    constant = jnp.sum(terms.constant - terms.weight * (relative + 0.5 * jnp.log(2 * jnp.pi)))
    squares = jnp.sum(weights * location**2)
    return NormalSums(gram, slope_at(location), squares, jnp.sum(terms.weight), constant, reference, log_scale, slope)


def _least_squares(precisions: Arrow, gram: Array, linear: Array) -> Array:
    """x (r,) near the minimum of x . gram x / 2 + linear . x, by conjugate gradients preconditioned by the diagonal."""
    parts, diagonal = precisions.packing.parts(gram), precisions.packing.diagonal(gram)
    scale = jnp.where(diagonal > 0, 1 / jnp.where(diagonal > 0, diagonal, 1.0), 0.0)

    def ratio(a: Array, b: Array) -> Array:
        return jnp.where(b > 0, a / jnp.where(b > 0, b, 1.0), 0.0)

    def step(_: Array, carry: tuple) -> tuple:
        x, residual, direction, length = carry
        product = precisions.times(parts, direction[:, None])[:, 0]
        t = ratio(length, direction @ product)
        residual = residual - t * product
        new = residual @ (scale * residual)
        return x + t * direction, residual, scale * residual + ratio(new, length) * direction, new

    start = jnp.zeros_like(linear), -linear, -scale * linear, linear @ (scale * linear)
    return lax.fori_loop(0, REFERENCE_STEPS, step, start)[0]


def start_of(all_sums: Sequence[NormalSums], mean: Array, precisions: Arrow) -> tuple[Array, Array]:
    """Mean and precision where a search may start: those of the rows alone, in the entries that rows depend on.

    :param mean: of the prior. :param precisions: whose start has the prior's.
    """
    precision = precisions.begin(mean)
    for one in all_sums:
        mean = jnp.where(precisions.packing.diagonal(one.gram) > 0, one.reference, mean)
    for one in all_sums:
        log_scale, length = one.log_scale + one.slope @ mean, one.slope @ one.slope
        rise = 0.5 * jnp.log(one.squares / one.weight) - log_scale
        rise = jnp.where(jnp.abs(rise) < FURTHEST, rise, 0.0)  # rows that fit exactly determine no scale
        mean = mean + one.slope * jnp.where(length > 0, rise / jnp.where(length > 0, length, 1.0), 0.0)
        precision = precision + one.gram * jnp.exp(-2 * (log_scale + rise))
        precision = precision + one.weight * precisions.packing.outer(one.slope, one.slope)
    return mean, precision


class NormalRows(NamedTuple):
    """The terms of some sites by their sums, in place of a :class:`~.objective.FactorSet`.

    :ivar kinds: of the sites. :ivar sums: likewise. :ivar precisions: how matrices are packed.
    """

    kinds: tuple[Kind, ...]
    sums: tuple[NormalSums, ...]
    precisions: Arrow

    def covariances(self, theta: Array, sigma: Array | None) -> PyTree:
        """For each site: sum v_i x_i . Sigma x_i, Sigma j (r,) and j . Sigma j."""
        if sigma is None:
            return None
        packing = self.precisions.packing
        parts, by_site = packing.parts(sigma), []
        for one in self.sums:
            product = self.precisions.times(parts, one.slope[:, None])[:, 0]
            by_site.append((packing.inner(one.gram, sigma), product, one.slope @ product))
        return tuple(by_site)

    def expected(self, theta: Array, covariances: PyTree) -> tuple[Expected, PyTree]:
        """Their sums, and what :meth:`curvature` takes. ``covariances`` None: q is a point mass."""
        total, gradient, values, curvatures = jnp.zeros((), theta.dtype), jnp.zeros_like(theta), [], []
        for number, one in enumerate(self.sums):
            zero = jnp.zeros((), theta.dtype)
            trace, sigma_slope, variance = (zero, 0.0, zero) if covariances is None else covariances[number]
            away = theta - 2 * sigma_slope - one.reference
            product = self.precisions.times(self.precisions.packing.parts(one.gram), away[:, None])[:, 0]
            squares = one.squares + 2 * one.linear @ away + away @ product + trace
            log_scale = one.log_scale + one.slope @ theta
            precision = jnp.exp(-2 * log_scale + 2 * variance)
            slope = -precision * (one.linear + product)
            values.append(one.constant - one.weight * log_scale - 0.5 * precision * squares)
            total = total + values[-1]
            gradient = gradient + slope + (precision * squares - one.weight) * one.slope
            curvatures.append((precision, precision * squares, slope))
        error_estimates = ErrorEstimates(jnp.stack(values), jnp.zeros(len(values), theta.dtype))
        return Expected(total, gradient, error_estimates), tuple(curvatures)

    def curvature(self, theta: Array, hessians: PyTree, clamped: bool) -> Array:
        """Minus the expected Hessian, packed; ``clamped``: without the products of locations and log scales, which
        leaves the Fisher information, averaged over q."""
        packing, total = self.precisions.packing, jnp.zeros((), theta.dtype)
        for kind, one, (precision, squares, slope) in zip(self.kinds, self.sums, hessians):
            total = total + precision * one.gram
            if not kind.quadratic:
                beside = squares * one.slope + (0 if clamped else 2) * slope
                total = total + packing.outer(beside, one.slope)
        return total

    def with_curvatures(self, theta: Array, sigma: Array | None, ways: Sequence[bool]) -> tuple[Expected, list[Array]]:
        """Their sums, and the curvature for each of ``ways``, clamped or not."""
        totals, hessians = self.expected(theta, self.covariances(theta, sigma))
        return totals, [self.curvature(theta, hessians, clamped) for clamped in ways]


def differ_in_scale(form: object, a: Factors[SparseJacobian], b: Factors[SparseJacobian]) -> Array:
    """Whether two forms of the same terms differ in one factor of all scales at most."""
    first, second = _read(form, a), _read(form, b)
    others = [jax.tree.leaves(terms._replace(log_scale=terms.weight)) for terms in (first, second)]
    same = [jnp.all(x == y) for x, y in zip(*others)]
    ratio = second.log_scale - first.log_scale
    close = jnp.abs(ratio - ratio[0]) <= 1e2 * jnp.finfo(ratio.dtype).eps * (1 + jnp.abs(ratio))
    return jnp.all(jnp.stack(same)) & jnp.all(close)
