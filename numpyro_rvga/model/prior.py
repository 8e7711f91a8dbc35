"""The prior: its exactly Gaussian part, its other terms as factors, and a Gaussian to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.closed_forms import DENSITIES, Exponential, Gaussian, Logistic, gaussian
from ..core.compilation import jit_once
from ..core.expectations import linearized
from ..core.recursion import Quadratic, State, new_state
from .terms import Terms, constants, flatten, linearise

CHECKED_ELEMENTS = 32  # of a site, when asking whether its terms are quadratic
NUM_DRAWS = 2000
ONE_PREDICTOR = (-1.0, 0.0, 1.0, 2.0, -12.0, -6.0, 6.0, 12.0)  # where terms of one predictor are looked at
NEAR, ORIGIN = slice(0, 4), 1
WINSOR = 4.0  # robust standard deviations at which prior draws are cut before their moments are taken


class Prior(NamedTuple):
    """log p(theta) = gaussian(theta) + sum of ``terms``.

    :ivar gaussian: the exactly Gaussian terms; proper by itself if there are no others.
    :ivar terms: the others.
    """

    gaussian: Quadratic
    terms: tuple[Terms, ...]


def split_prior(all_terms: list[Terms], theta: jax.ShapeDtypeStruct) -> Prior:
    """Collect terms whose Hessian is constant into one Gaussian; correlated and linear-Gaussian priors are exact."""
    size, dtype = theta.shape[0], theta.dtype
    undecided = [t for t in all_terms if t.is_affine and t.closed_form is None]
    probes = _once(lambda: [_probe(t, dtype) for t in undecided])
    gaussian = [t for t in all_terms if t.closed_form is Gaussian]
    others = [t for t in all_terms if not t.is_affine or t.closed_form not in (None, Gaussian)]
    for terms, probe in zip(undecided, probes):
        if _is_quadratic(probe):
            gaussian.append(terms)
        else:
            others.append(_in_closed_form(terms, probe))
    parts = _once(lambda: [_expand(t, size, dtype) for t in gaussian])
    zeros = np.zeros((size, size), dtype), np.zeros(size, dtype), np.zeros((), dtype)
    summed = [sum((part[i] for part in parts), start=zero) for i, zero in enumerate(zeros)]
    return Prior(Quadratic(*[jnp.asarray(x) for x in (*summed, np.zeros(size, dtype))]), tuple(others))


def initial_state(prior: Prior, draw: Callable[[Array], Array]) -> State:
    """The Gaussian prior itself, or a Gaussian fitted to draws of the prior with its stand-in part recorded.

    :param draw: rng_key -> theta (P,), a draw from the prior.
    """
    size, dtype = prior.gaussian.linear.shape[0], prior.gaussian.linear.dtype
    if not prior.terms:
        mean, root, log_normalizer = _from_quadratic(prior.gaussian)
        state = new_state(mean, root, None)
        return state._replace(log_evidence=log_normalizer)
    many = jit_once(lambda key: jax.vmap(draw)(jax.random.split(key, NUM_DRAWS)))
    draws = np.asarray(many(jax.random.key(0)), np.float64)
    mean, root = _robust_moments(draws)
    gaussian = Quadratic(*[np.asarray(x, np.float64) for x in prior.gaussian])
    shift = mean - gaussian.centre
    pull = gaussian.precision @ shift
    normal = -0.5 * size * np.log(2 * np.pi) - np.sum(np.log(np.diagonal(root)))
    value = gaussian.constant + gaussian.linear @ shift - 0.5 * shift @ pull
    inverse = np.linalg.inv(root)
    site = (inverse.T @ inverse - gaussian.precision, pull - gaussian.linear, normal - value, mean)
    mean, root, *site = [jnp.asarray(x, dtype) for x in (mean, root, *site)]
    return new_state(mean, root, Quadratic(*site))


def _once(function: Callable[[], list]) -> list:
    return jax.device_get(jit_once(function)())


class _Probe(NamedTuple):
    """A site's terms at a few points u: (E, K), (E, K, C), (E, K, C, C)."""

    points: Array
    values: Array
    gradients: Array
    hessians: Array


def _probe(terms: Terms, dtype) -> _Probe:
    """All elements of terms of one predictor, whose form may be known; a choice of elements of others."""
    single = terms.num_predictors == 1
    rng = np.random.default_rng(0)
    elements = np.arange(terms.num_elements) if single else rng.permutation(terms.num_elements)[:CHECKED_ELEMENTS]
    points = np.array(ONE_PREDICTOR)[:, None] if single else rng.normal(size=(3, terms.num_predictors))
    points = jnp.asarray(points, dtype)

    def derivatives(element):
        density = lambda u: terms.density(u, terms.constants({}, element))  # noqa: E731
        return [jax.vmap(f)(points) for f in (density, jax.grad(density), jax.hessian(density))]

    return _Probe(points, *jax.vmap(derivatives)(jnp.asarray(elements, jnp.int32)))


def _is_quadratic(probe: _Probe) -> bool:
    found = probe.hessians[:, NEAR]
    spread = np.max(np.abs(found - found[:, :1]), initial=0.0)
    return bool(spread <= 100 * np.finfo(found.dtype).eps * np.max(np.abs(found), initial=0.0))


class _Form(NamedTuple):
    """phi(u) = slope w - amount h(w) + constant with w = growth u + shift, for each element of a site: (E,) arrays."""

    kind: type
    growth: np.ndarray
    shift: np.ndarray
    slope: np.ndarray
    amount: np.ndarray
    constant: np.ndarray


def _in_closed_form(terms: Terms, probe: _Probe) -> Terms:
    """Terms of one predictor as an exponential (half-normal, exponential, gamma, inverse gamma, Weibull priors on the
    log scale) or a logistic form (half-Cauchy, half-t, beta, uniform), if they are found to be one."""
    if terms.num_predictors != 1 or not np.all(probe.hessians[:, NEAR] < 0):
        return terms
    for form in (_exponential_form(probe), *[_logistic_form(probe, growth) for growth in (1.0, 2.0)]):
        if form is not None and _holds(form, probe):
            return _with_form(terms, form)
    return terms


def _exponential_form(probe: _Probe) -> _Form | None:
    """log(-phi'') is a line."""
    points, logs = probe.points[NEAR, 0], np.log(-probe.hessians[:, NEAR, 0, 0])
    growth = (logs[:, -1] - logs[:, 0]) / (points[-1] - points[0])
    if np.any(growth == 0):
        return None
    line = logs[:, :1] + growth[:, None] * (points - points[0])
    if np.any(np.abs(logs - line) > _tolerance(logs) * (1 + np.abs(logs))):
        return None
    amount = np.exp(logs[:, ORIGIN]) / growth**2
    return _anchored(Exponential, growth, np.zeros_like(growth), amount, probe)


def _logistic_form(probe: _Probe, growth: float) -> _Form | None:
    """(-phi'')^(-1/2) is a multiple of cosh(w / 2)."""
    points, inverse = probe.points[NEAR, 0], (-probe.hessians[:, NEAR, 0, 0]) ** -0.5
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


def _anchored(kind: type, growth, shift, amount, probe: _Probe) -> _Form:
    """With the slope and constant that value and gradient at the origin ask for."""
    curved, derivative = _curved(kind, shift)
    slope = probe.gradients[:, ORIGIN, 0] / growth + amount * derivative
    constant = probe.values[:, ORIGIN] - slope * shift + amount * curved
    return _Form(kind, growth, shift, slope, amount, constant)


def _curved(kind: type, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """h and h'."""
    if kind is Exponential:
        return np.exp(w), np.exp(w)
    return np.logaddexp(0, w), np.exp(-np.logaddexp(0, -w))


def _holds(form: _Form, probe: _Probe) -> bool:
    """Whether values agree, far out too."""
    w = form.growth[:, None] * probe.points[:, 0] + form.shift[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        pieces = form.slope[:, None] * w, -form.amount[:, None] * _curved(form.kind, w)[0], form.constant[:, None]
        size = 1 + sum(np.abs(piece) for piece in pieces)
        return bool(np.all(np.abs(sum(pieces) - probe.values) <= _tolerance(probe.values) * size))


def _tolerance(array: np.ndarray) -> float:
    return float(np.finfo(array.dtype).eps) ** 0.6


def _with_form(terms: Terms, form: _Form) -> Terms:
    growth, shift, slope, amount, constant = (jnp.asarray(x) for x in form[1:])

    def predictors(theta, row, element):
        return growth[element] * terms.predictors(theta, row, element) + shift[element]

    def coefficients(row, element):
        return form.kind(slope[element], amount[element], constant[element], jnp.ones((), amount.dtype))

    density = DENSITIES[form.kind]
    return Terms(terms.site, terms.num_elements, 1, True, predictors, coefficients, density, form.kind)


def _expand(terms: Terms, size: int, dtype) -> tuple[Array, Array, Array]:
    """Precision, slope and value of the terms at theta = 0."""
    offset, design, values = flatten(*linearise(terms, jnp.zeros(size, dtype), {}), constants(terms, {}))
    if terms.closed_form is Gaussian:
        value, slope, curvature = jax.vmap(lambda u, c: gaussian(u, jnp.zeros((1, 1), dtype), c))(offset, values)
    else:
        derivatives = jax.vmap(lambda u, c: linearized(lambda a: terms.density(a, c), u, None))
        value, slope, curvature = derivatives(offset, values)
    flat = design.reshape(-1, size)
    weighted = jnp.einsum("ncd,ndp->ncp", curvature, design).reshape(flat.shape)
    return -flat.T @ weighted, slope.reshape(-1) @ flat, jnp.sum(value)


def _from_quadratic(quadratic: Quadratic) -> tuple[Array, Array, Array]:
    """Mean, root of the covariance and log normaliser of a Gaussian given by its log density up to a constant."""
    precision = np.asarray(quadratic.precision, np.float64)
    scale = 1 / np.sqrt(np.diagonal(precision))
    try:
        factor = np.linalg.cholesky(scale[:, None] * precision * scale)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the prior's precision matrix is not positive definite: some direction has no prior."
        ) from error
    root = scale[:, None] * np.linalg.inv(factor).T
    linear = np.asarray(quadratic.linear, np.float64)
    mean = np.asarray(quadratic.centre, np.float64) + root @ (root.T @ linear)
    half_log_det = np.sum(np.log(np.diagonal(factor)) - np.log(scale))
    quadratic_term = 0.5 * np.sum((root.T @ linear) ** 2)
    log_normalizer = float(quadratic.constant) + quadratic_term + 0.5 * len(mean) * np.log(2 * np.pi) - half_log_det
    dtype = quadratic.linear.dtype
    return jnp.asarray(mean, dtype), jnp.asarray(root, dtype), jnp.asarray(log_normalizer, dtype)


def _robust_moments(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and lower root of the covariance of draws (n, P), each coordinate winsorised: heavy tails must not rule."""
    finite = draws[np.isfinite(draws).all(axis=1)]
    low, centre, high = np.quantile(finite, [0.25, 0.5, 0.75], axis=0)
    deviation = np.maximum((high - low) / 1.349, 1e-6)
    cut = np.clip(finite, centre - WINSOR * deviation, centre + WINSOR * deviation)
    covariance = np.atleast_2d(np.cov(cut.T))
    scale = np.sqrt(np.diagonal(covariance))
    correlation = covariance / np.outer(scale, scale)
    shrunk = 0.95 * correlation + 0.05 * np.eye(len(scale))  # more coordinates than draws can support stay regular
    return cut.mean(axis=0), scale[:, None] * np.linalg.cholesky(shrunk)
