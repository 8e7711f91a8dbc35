"""Gaussian expectations in closed form: E[phi(a)], E[phi'(a)], E[phi''(a)] for a ~ N(m, S).

Each function takes ``mean`` (C,), ``covariance`` (C, C) and the term's coefficients, and returns ``value`` (),
``gradient`` (C,) and ``hessian`` (C, C).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

# Weights and scales of eight probits whose mixture is the logistic function to 2e-9, its derivative to 1.3e-8
# (J. F. Monahan and L. A. Stefanski, Normal scale mixture approximations to F*(z), 1992).
MIXTURE_WEIGHTS = (0.003246343272134, 0.051517477033972, 0.195077912673858, 0.315569823632818,
                   0.274149576158423, 0.131076880695470, 0.027912418727972, 0.001449567805354)  # fmt: skip
MIXTURE_SCALES = (1.365340806296348, 1.059523971016916, 0.830791313765644, 0.650732166639391,
                  0.508135425366489, 0.396313345166341, 0.308904252267995, 0.238212616409306)  # fmt: skip
PROBIT_BETA_SQUARED = 8 / jnp.pi
RARE = 6.0  # of -log E[exp(-|u|)], with room for the variance: a series of three terms is exact to 1e-8 of its value


class Logistic(NamedTuple):
    """phi(u) = weight * (successes * u - trials * log(1 + exp(u)) + constant)."""

    successes: Array
    trials: Array
    constant: Array
    weight: Array


class Exponential(NamedTuple):
    """phi(u) = weight * (slope * u - rate * exp(u) + constant): Poisson."""

    slope: Array
    rate: Array
    constant: Array
    weight: Array


class Gamma(Exponential):
    """The same, where the outcome is ``rate`` and not ``slope``: exponential, gamma with a known shape. u is their log
    rate."""


class Gaussian(NamedTuple):
    """phi(u) = log N(target; u, scale^2) * weight + constant."""

    target: Array
    scale: Array
    constant: Array
    weight: Array


class GaussianLogScale(NamedTuple):
    """phi(u) = log N(target; u[0], exp(u[1])^2) * weight + constant."""

    target: Array
    constant: Array
    weight: Array


class Laplace(NamedTuple):
    """phi(u) = weight * (-abs(target - u) / scale - log(2 scale)) + constant."""

    target: Array
    scale: Array
    constant: Array
    weight: Array


class LaplaceLogScale(NamedTuple):
    """phi(u) = weight * (-abs(target - u[0]) exp(-u[1]) - u[1] - log(2)) + constant."""

    target: Array
    constant: Array
    weight: Array


@jax.custom_jvp
def _softplus(u: Array) -> Array:
    return jax.nn.softplus(u)


_softplus.defjvps(lambda slope, _, u: jax.nn.sigmoid(u) * slope)  # JAX's own is a long way to the same


def logistic_density(u: Array, c: Logistic) -> Array:
    return c.weight * (c.successes * u[0] - c.trials * _softplus(u[0]) + c.constant)


def exponential_density(u: Array, c: Exponential) -> Array:
    return c.weight * (c.slope * u[0] - c.rate * jnp.exp(u[0]) + c.constant)


def gaussian_density(u: Array, c: Gaussian) -> Array:
    z = (c.target - u[0]) / c.scale
    return c.weight * (-0.5 * z * z - jnp.log(c.scale) - 0.5 * jnp.log(2 * jnp.pi)) + c.constant


def gaussian_log_scale_density(u: Array, c: GaussianLogScale) -> Array:
    z = (c.target - u[0]) * jnp.exp(-u[1])
    return c.weight * (-0.5 * z * z - u[1] - 0.5 * jnp.log(2 * jnp.pi)) + c.constant


def laplace_density(u: Array, c: Laplace) -> Array:
    return c.weight * (-jnp.abs(c.target - u[0]) / c.scale - jnp.log(2 * c.scale)) + c.constant


def laplace_log_scale_density(u: Array, c: LaplaceLogScale) -> Array:
    return c.weight * (-jnp.abs(c.target - u[0]) * jnp.exp(-u[1]) - u[1] - jnp.log(2.0)) + c.constant


def logistic_mixture(mean: Array, covariance: Array, c: Logistic) -> tuple[Array, Array, Array]:
    """Scale mixture of probits: an error of about 1e-8 of each trial, in value, gradient and curvature. Of many trials
    with a rare outcome, whose log odds have a standard deviation below 0.5, it is 1e-5 of the outcome's share."""
    m, v = mean[0], covariance[0, 0]
    p, s = (jnp.asarray(x, mean.dtype) for x in (MIXTURE_WEIGHTS, MIXTURE_SCALES))
    root = jnp.sqrt(1 + s * s * v)
    u = s * m / root
    cdf = 0.5 * jax.lax.erfc(-u * jnp.asarray(0.5**0.5, mean.dtype))
    pdf = jnp.exp(-0.5 * u * u) * jnp.asarray((2 * jnp.pi) ** -0.5, mean.dtype)
    sigmoid, slope = jnp.sum(p * cdf), jnp.sum(p * s / root * pdf)
    softplus = jnp.sum(p * (m * cdf + root / s * pdf))
    is_rare, series = _rare_softplus(m, v)
    softplus, sigmoid, slope = (jnp.where(is_rare, a, b) for a, b in zip(series, (softplus, sigmoid, slope)))
    value = c.weight * (c.successes * m - c.trials * softplus + c.constant)
    gradient = c.weight * (c.successes - c.trials * sigmoid)
    return value, gradient[None], (-c.weight * c.trials * slope)[None, None]


def _rare_softplus(m: Array, v: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    """E[log(1 + exp(u))] for u ~ N(m, v), its slope in m and the slope of that, by the series in exp(-|u|); and whether
    that is the better way."""
    is_rare = jnp.abs(m) - 2.5 * v > RARE
    e, q = jnp.exp(-jnp.abs(m)), jnp.exp(0.5 * jnp.where(is_rare, v, 0.0))
    first, second, third = e * q, e**2 * q**4, e**3 * q**9
    value, slope = first - second / 2 + third / 3, first - second + third
    is_high = m > 0
    series = value + jnp.where(is_high, m, 0.0), jnp.where(is_high, 1 - slope, slope), first - 2 * second + 3 * third
    return is_rare, series


def logistic_probit(mean: Array, covariance: Array, c: Logistic) -> tuple[Array, Array, Array]:
    """Inverse-probit approximation (R-VGA paper, equations 58-61). Gradient and curvature have no common potential:
    ``value`` is that of the scale mixture, for reporting only."""
    m, v = mean[0], covariance[0, 0]
    k = jnp.sqrt(PROBIT_BETA_SQUARED / (PROBIT_BETA_SQUARED + v)).astype(mean.dtype)
    sigmoid = jax.nn.sigmoid(k * m)
    gradient = c.weight * (c.successes - c.trials * sigmoid)
    hessian = -c.weight * c.trials * k * sigmoid * jax.nn.sigmoid(-k * m)
    return logistic_mixture(mean, covariance, c)[0], gradient[None], hessian[None, None]


def logistic_quadratic_bound(mean: Array, covariance: Array, c: Logistic) -> tuple[Array, Array, Array]:
    """Jaakkola and Jordan's quadratic lower bound, tangent at xi^2 = E[u^2] (R-VGA paper, equations 82-90)."""
    m, v = mean[0], covariance[0, 0]
    xi = jnp.sqrt(m * m + v)
    curvature = jnp.where(xi > 1e-3, 0.5 * jnp.tanh(0.5 * xi) / jnp.where(xi > 1e-3, xi, 1.0), 0.25 - xi * xi / 48)
    value = c.successes * m + c.trials * (jax.nn.log_sigmoid(xi) - 0.5 * (m + xi)) + c.constant
    gradient = c.successes - 0.5 * c.trials - c.trials * curvature * m
    return c.weight * value, (c.weight * gradient)[None], (-c.weight * c.trials * curvature)[None, None]


def exponential(mean: Array, covariance: Array, c: Exponential) -> tuple[Array, Array, Array]:
    m, v = mean[0], covariance[0, 0]
    rate = c.rate * jnp.exp(m + 0.5 * v)
    value = c.weight * (c.slope * m - rate + c.constant)
    return value, (c.weight * (c.slope - rate))[None], (-c.weight * rate)[None, None]


def gaussian(mean: Array, covariance: Array, c: Gaussian) -> tuple[Array, Array, Array]:
    precision = c.weight / (c.scale * c.scale)
    residual = c.target - mean[0]
    value = gaussian_density(mean, c) - 0.5 * precision * covariance[0, 0]
    return value, (precision * residual)[None], (-precision)[None, None]


def gaussian_log_scale(mean: Array, covariance: Array, c: GaussianLogScale) -> tuple[Array, Array, Array]:
    """exp(-2 u[1]) tilts the Gaussian of u[0]: its mean moves by -2 cov(u[0], u[1]), its variance stays."""
    k = c.weight * jnp.exp(-2 * mean[1] + 2 * covariance[1, 1])
    residual = c.target - mean[0] + 2 * covariance[0, 1]
    squares = k * (residual * residual + covariance[0, 0])
    value = -0.5 * squares - c.weight * (mean[1] + 0.5 * jnp.log(2 * jnp.pi)) + c.constant
    gradient = jnp.stack([k * residual, squares - c.weight])
    cross = -2 * k * residual
    return value, gradient, jnp.stack([jnp.stack([-k, cross]), jnp.stack([cross, -2 * squares])])


def laplace(mean: Array, covariance: Array, c: Laplace) -> tuple[Array, Array, Array]:
    distance, slope, second_derivative = _folded_normal(c.target - mean[0], covariance[0, 0])
    k = c.weight / c.scale
    value = -k * distance - c.weight * jnp.log(2 * c.scale) + c.constant
    return value, (k * slope)[None], (-k * second_derivative)[None, None]


def laplace_log_scale(mean: Array, covariance: Array, c: LaplaceLogScale) -> tuple[Array, Array, Array]:
    """exp(-u[1]) tilts the Gaussian of u[0]: its mean moves by -cov(u[0], u[1]), its variance stays."""
    k = c.weight * jnp.exp(-mean[1] + 0.5 * covariance[1, 1])
    distance, slope, second_derivative = _folded_normal(c.target - mean[0] + covariance[0, 1], covariance[0, 0])
    value = -k * distance - c.weight * (mean[1] + jnp.log(2.0)) + c.constant
    gradient = jnp.stack([k * slope, k * distance - c.weight])
    cross = -k * slope
    return value, gradient, jnp.stack([jnp.stack([-k * second_derivative, cross]), jnp.stack([cross, -k * distance])])


def _folded_normal(mean: Array, variance: Array) -> tuple[Array, Array, Array]:
    """E[abs(a)] for a ~ N(mean, variance), and its first two derivatives in the mean."""
    alive = variance > 0
    deviation = jnp.sqrt(jnp.where(alive, variance, 1.0))
    z = mean / deviation
    density = jnp.where(alive, jnp.exp(-0.5 * z * z) * jnp.asarray((2 * jnp.pi) ** -0.5, mean.dtype), 0.0)
    slope = jnp.where(alive, jax.lax.erf(z * jnp.asarray(0.5**0.5, mean.dtype)), jnp.sign(mean))
    return mean * slope + 2 * deviation * density, slope, 2 * density / deviation


# ---------------------------------------------------------------------- Fisher information
# minus the Hessian, averaged over outcomes drawn at the mean: of forms whose Hessian depends on the outcome,
# or has kinks.
def gaussian_log_scale_information(mean: Array, c: GaussianLogScale) -> Array:
    return c.weight * jnp.diag(jnp.stack([jnp.exp(-2 * mean[1]), jnp.full_like(mean[1], 2.0)]))


def gamma_information(mean: Array, c: Gamma) -> Array:
    return (c.weight * c.slope)[None, None]


def laplace_information(mean: Array, c: Laplace) -> Array:
    return (c.weight / c.scale**2)[None, None]


def laplace_log_scale_information(mean: Array, c: LaplaceLogScale) -> Array:
    return c.weight * jnp.diag(jnp.stack([jnp.exp(-2 * mean[1]), jnp.ones_like(mean[1])]))


INFORMATION: dict[Any, Callable] = {
    Gamma: gamma_information,
    GaussianLogScale: gaussian_log_scale_information,
    Laplace: laplace_information,
    LaplaceLogScale: laplace_log_scale_information,
}

DENSITIES: dict[Any, Callable] = {
    Logistic: logistic_density,
    Exponential: exponential_density,
    Gamma: exponential_density,
    Gaussian: gaussian_density,
    GaussianLogScale: gaussian_log_scale_density,
    Laplace: laplace_density,
    LaplaceLogScale: laplace_log_scale_density,
}
EXACT: dict[Any, Callable] = {
    Logistic: logistic_mixture,
    Exponential: exponential,
    Gamma: exponential,
    Gaussian: gaussian,
    GaussianLogScale: gaussian_log_scale,
    Laplace: laplace,
    LaplaceLogScale: laplace_log_scale,
}
CONCAVE = frozenset({Logistic, Exponential, Gamma, Gaussian, Laplace})
