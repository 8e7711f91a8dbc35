"""Terms that are quadratic or have a closed form, recognized by their derivatives at a few points or by their jaxpr."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.expectations.by_nodes import linearized
from ...core.expectations.closed_forms import DENSITIES, Exponential, Gaussian, Logistic
from ...core.expectations.tilted import may_be_tilted, read_tilted, tilted_density
from ..data.rows import Arrays
from .terms import Terms

CHECKED_ELEMENTS = 32  # of a site, when asking whether its terms are quadratic
NEAR_ZERO, FAR = (-1.0, 0.0, 1.0, 2.0), (-12.0, -6.0, 6.0, 12.0)  # where terms of one predictor are read,
EACH_SIDE = np.logspace(-1, 15, 129)  # and where they are compared with a quadratic function
ONE_PREDICTOR = (*NEAR_ZERO, *FAR, *-EACH_SIDE, *EACH_SIDE)
NEAR, ORIGIN, READ = slice(0, len(NEAR_ZERO)), NEAR_ZERO.index(0.0), slice(0, len(NEAR_ZERO + FAR))
COMPARED = 0.75  # of the exponent of the largest number: squares of larger ones may overflow


class Probe(NamedTuple):
    """Values (E, K) of a site's terms at K points u, and gradients (E, N, C) and Hessians (E, N, C, C) at the first."""

    points: Array
    values: Array
    gradients: Array
    hessians: Array


def probe_terms(terms: Terms, dtype, shared: Arrays) -> Probe:
    """Derivatives of all elements of terms of one predictor, which may have a form; of some elements of other terms."""
    single = terms.num_predictors == 1
    rng = np.random.default_rng(0)
    elements = np.arange(terms.num_elements) if single else rng.permutation(terms.num_elements)[:CHECKED_ELEMENTS]
    points = np.array(ONE_PREDICTOR)[:, None] if single else rng.normal(size=(3, terms.num_predictors))
    points = jnp.asarray(points, dtype)

    def derivatives(element):
        density = lambda u: terms.density(u, terms.constants(shared, element))  # noqa: E731
        slopes = [jax.vmap(f)(points[NEAR]) for f in (jax.grad(density), jax.hessian(density))]
        return jax.vmap(density)(points), *slopes

    return Probe(points, *jax.vmap(derivatives)(jnp.asarray(elements, jnp.int32)))


def may_be_probed(terms: Terms, dtype, shared: Arrays) -> bool:
    """Whether terms are worth probing: what several predictors go through says so, without derivatives."""
    if terms.num_predictors == 1:
        return True
    predictors, element = jax.ShapeDtypeStruct((terms.num_predictors,), dtype), jax.ShapeDtypeStruct((), jnp.int32)
    closed = jax.make_jaxpr(lambda u, shared, e: terms.density(u, terms.constants(shared, e)))
    return may_be_tilted(closed(predictors, shared, element))


def is_quadratic(probe: Probe) -> bool:
    """Whether the Hessians are the same at all points, and terms of one predictor have the values of a quadratic
    function far and wide: a prior may be wide, or far from zero, and a penalty may have a kink."""
    hessians = probe.hessians
    range_of = np.max(np.abs(hessians - hessians[:, :1]), axis=(1, 2, 3), initial=0.0)
    size = np.max(np.abs(hessians), axis=(1, 2, 3), initial=0.0)
    if np.any(range_of > 100 * np.finfo(hessians.dtype).eps * size):
        return False
    if probe.points.shape[1] > 1:
        return True
    u, value = probe.points[:, 0], probe.values[:, ORIGIN, None]
    slope, curvature = probe.gradients[:, ORIGIN], probe.hessians[:, ORIGIN, 0]
    with np.errstate(over="ignore", invalid="ignore"):
        agrees, size = _compared((value, slope * u, 0.5 * curvature * u**2), probe.values)
        overflows = size >= float(np.finfo(probe.values.dtype).max) ** COMPARED
        return bool(np.all(overflows | agrees))


def in_tilted_form(terms: Terms, dtype, row: Arrays) -> Terms:
    """Terms as sums of squares and products of predictors times exponentials, if their program says that they are.

    :param row: an example row: arrays with a leading axis of one (empty for prior terms).
    """
    if terms.closed_form is not None or not terms.is_affine:
        return terms
    shapes = jax.eval_shape(terms.constants, row, jax.ShapeDtypeStruct((), jnp.int32))
    form_and_coefficients = read_tilted(terms.density, terms.num_predictors, dtype, shapes)
    if form_and_coefficients is None:
        return terms
    form, coefficients = form_and_coefficients
    return terms._replace(
        constants=lambda row, element: coefficients(terms.constants(row, element)),
        density=partial(tilted_density, form),
        closed_form=form,
    )


class _Form(NamedTuple):
    """phi(u) = slope w - amount h(w) + constant with w = growth u + shift, for each element of a site: (E,) arrays."""

    kind: type
    growth: np.ndarray
    shift: np.ndarray
    slope: np.ndarray
    amount: np.ndarray
    constant: np.ndarray


def in_closed_form(terms: Terms, probe: Probe) -> Terms:
    """Terms of one predictor in a closed form, if they have one; else unchanged.

    Exponential: half-normal, exponential, gamma, inverse gamma and Weibull priors on the log scale. Logistic:
    half-Cauchy, half-t, beta and uniform priors.
    """
    if terms.num_predictors != 1 or not np.all(probe.hessians < 0):
        return terms
    for form in (_exponential_form(probe), *[_logistic_form(probe, growth) for growth in (1.0, 2.0)]):
        if form is not None and _holds(form, probe):
            return _with_form(terms, form)
    return terms


def in_gaussian_form(terms: Terms, probe: Probe) -> Terms:
    """Quadratic terms of one predictor as log densities of a normal distribution, if they are concave."""
    if terms.num_predictors != 1 or not np.all(probe.hessians < 0):
        return terms

    def coefficients(row, element):
        values, zero = terms.constants(row, element), jnp.zeros(1, probe.points.dtype)
        value, slope, hessian = linearized(lambda u: terms.density(u, values), zero, None)
        target, precision, one = -slope[0] / hessian[0, 0], -hessian[0, 0], jnp.ones((), zero.dtype)
        form = Gaussian(target, 1 / jnp.sqrt(precision), jnp.zeros_like(one), one)
        return form._replace(constant=value - DENSITIES[Gaussian](zero, form))

    return terms._replace(constants=coefficients, density=DENSITIES[Gaussian], closed_form=Gaussian)


def _exponential_form(probe: Probe) -> _Form | None:
    """The exponential form: log(-phi'') is a line."""
    points, logs = probe.points[NEAR, 0], np.log(-probe.hessians[:, :, 0, 0])
    growth = (logs[:, -1] - logs[:, 0]) / (points[-1] - points[0])
    if np.any(growth == 0):
        return None
    line = logs[:, :1] + growth[:, None] * (points - points[0])
    if np.any(np.abs(logs - line) > _tolerance(logs) * (1 + np.abs(logs))):
        return None
    amount = np.exp(logs[:, ORIGIN]) / growth**2
    return _anchored(Exponential, growth, np.zeros_like(growth), amount, probe)


def _logistic_form(probe: Probe, growth: float) -> _Form | None:
    """The logistic form: (-phi'')^(-1/2) is a multiple of cosh(w / 2)."""
    points, inverse = probe.points[NEAR, 0], (-probe.hessians[:, :, 0, 0]) ** -0.5
    basis = np.exp(np.outer(points, [0.5 * growth, -0.5 * growth]))
    weight = 1 / inverse  # relative errors
    sides = [np.linalg.lstsq(basis * w[:, None], np.ones_like(w), rcond=None)[0] for w in weight]
    rising, falling = np.array(sides, inverse.dtype).T
    if np.any(rising <= 0) or np.any(falling <= 0):
        return None
    if np.any(np.abs((basis @ np.stack([rising, falling])).T * weight - 1) > _tolerance(inverse)):
        return None
    amount = 1 / (growth**2 * rising * falling)
    return _anchored(Logistic, np.full_like(rising, growth), np.log(rising / falling), amount, probe)


def _anchored(kind: type, growth, shift, amount, probe: Probe) -> _Form:
    """The form with the slope and constant that the value and gradient at the origin determine."""
    curved, derivative = _curved(kind, shift)
    slope = probe.gradients[:, ORIGIN, 0] / growth + amount * derivative
    constant = probe.values[:, ORIGIN] - slope * shift + amount * curved
    return _Form(kind, growth, shift, slope, amount, constant)


def _curved(kind: type, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """h(w) and h'(w)."""
    if kind is Exponential:
        return np.exp(w), np.exp(w)
    return np.logaddexp(0, w), np.exp(-np.logaddexp(0, -w))


def _holds(form: _Form, probe: Probe) -> bool:
    """Whether the form has the probed values, also far from the origin, and bends where they are: elsewhere another
    function may look like it."""
    w = form.growth[:, None] * probe.points[READ, 0] + form.shift[:, None]
    bend = (np.log(form.amount) if form.kind is Exponential else form.shift) / -form.growth
    if not np.all(np.abs(bend) <= FAR[-1]):
        return False
    with np.errstate(over="ignore", invalid="ignore"):
        pieces = form.slope[:, None] * w, -form.amount[:, None] * _curved(form.kind, w)[0], form.constant[:, None]
        return bool(np.all(_compared(pieces, probe.values[:, READ])[0]))


def _compared(pieces: tuple[np.ndarray | Array, ...], values: np.ndarray | Array) -> tuple[np.ndarray, np.ndarray]:
    """Whether values are the sums of these pieces, beside the size of the pieces; and that size."""
    size = np.sum([np.abs(piece) for piece in np.broadcast_arrays(*pieces)], axis=0) + 1
    return np.abs(sum(pieces) - values) <= _tolerance(values) * size, size


def _tolerance(array: np.ndarray | Array) -> float:
    return float(np.finfo(array.dtype).eps) ** 0.6


def _with_form(terms: Terms, form: _Form) -> Terms:
    growth, shift, slope, amount, constant = (jnp.asarray(x) for x in form[1:])

    def predictors(theta, row, element):
        return growth[element] * terms.predictors(theta, row, element) + shift[element]

    def coefficients(row, element):
        return form.kind(slope[element], amount[element], constant[element], jnp.ones((), amount.dtype))

    density = DENSITIES[form.kind]
    return Terms(terms.site, terms.num_elements, 1, True, predictors, coefficients, density, form.kind)
