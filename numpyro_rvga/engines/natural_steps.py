"""The bound and its natural gradient from sums over all rows, and natural-gradient steps of all rows."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.updates.state import CanonicalGaussian, State

SHORTEST, LONGEST = 1e-3, 2.0  # steps
SHORTER = 0.5
FAST = 0.05  # of the squared natural gradient is left by a step of the right length
FLAT = 0.5  # of q's precision: where a full step takes more than this,
WIDENED = 1 / 3  # steps are shortened to take this much


class SiteSums(NamedTuple):
    """Sums over the terms of each of S sites, at q.

    :ivar values: E[phi], (S,). :ivar gradients: its gradient in the mean, (S, P).
    :ivar curvatures: minus its Hessian, (S, P, P). :ivar errors: estimated errors of the values, (S,).
    """

    values: Array | np.ndarray
    gradients: Array | np.ndarray
    curvatures: Array | np.ndarray
    errors: Array | np.ndarray


class Noise(NamedTuple):
    """Sampling errors of estimates from some of the rows.

    :ivar bound: standard error. :ivar squared: the expectation of what they add to the squared natural gradient.
    """

    bound: float
    squared: float


class BoundEvaluation(NamedTuple):
    """The bound at q and its natural gradient.

    :ivar bound: in nats. :ivar prior: sums over prior terms that are not Gaussian.
    :ivar gradient: of the bound in the mean, (P,), in coordinates in which q is standard normal.
    :ivar precision: minus the expected Hessian of the log joint density, (P, P), in these; the identity at the best q.
    :ivar error: estimated error of the expectations in the bound, in nats.
    :ivar noise: of estimates from some of the rows; None for sums over all rows.
    """

    bound: float
    prior: SiteSums
    gradient: np.ndarray
    precision: np.ndarray
    error: float
    noise: Noise | None = None

    @property
    def squared_natural_gradient(self) -> float:
        """||gradient||^2 + ||precision - I||^2 / 2, in nats; unbiased for estimates.

        About twice the Kullback-Leibler divergence from the best Gaussian.
        """
        off = self.precision - np.eye(len(self.gradient))
        squared = float(self.gradient @ self.gradient + 0.5 * np.sum(off * off))
        return squared if self.noise is None else squared - self.noise.squared


def joint_density(state: State, origin: np.ndarray) -> CanonicalGaussian:
    """log q + log evidence, in double precision. ``origin``: of the result, (P,)."""
    q = in_double(state)
    inverse = np.linalg.inv(q.root)
    shift = inverse @ (q.mean + q.mean_error - origin)
    constant = float(q.log_evidence) - 0.5 * shift @ shift - _half_log_det(q.root)
    constant -= 0.5 * len(shift) * math.log(2 * math.pi)
    return CanonicalGaussian(inverse.T @ inverse, inverse.T @ shift, constant, origin)


def with_prior_factor(density: CanonicalGaussian, state: State, times: float = 1.0) -> CanonicalGaussian:
    """A density with a state's approximation of prior terms that are not Gaussian, so many times."""
    if state.prior_factor is None:
        return density
    return density.plus(in_double(state.prior_factor).about(density.center), times)


def without_prior_factor(state: State, origin: np.ndarray | None = None) -> CanonicalGaussian:
    """log q + log evidence, less the approximation of prior terms that are not Gaussian. ``origin`` None: the mean."""
    origin = np.asarray(state.mean, np.float64) if origin is None else origin
    return with_prior_factor(joint_density(state, origin), state, -1.0)


def evaluate_bound(state: State, base: CanonicalGaussian, rows: SiteSums, prior: SiteSums) -> BoundEvaluation:
    """The bound at q, its natural gradient and the precision of a full step, from sums over rows and prior terms:

    L = log prior + sum E_q[log p_i] + entropy,     b = Lambda_0 (mu_0 - mu) + sum J_i^T g_i,
    Lambda* = Lambda_0 - sum J_i^T G_i J_i,

    the last two in coordinates in which q is standard normal.

    :param base: the log density that the run starts from, without its approximation of the prior terms.
    """
    q, precision = in_double(state), base.precision
    value, linear = base.at(q.mean)
    value = value - 0.5 * np.sum(q.root * (precision @ q.root))
    size = len(q.mean)
    entropy = _half_log_det(q.root) + 0.5 * size * (1 + math.log(2 * math.pi))
    bound = float(value + entropy + rows.values.sum() + prior.values.sum())
    gradient = linear + rows.gradients.sum(axis=0) + prior.gradients.sum(axis=0)
    target = precision + rows.curvatures.sum(axis=0) + prior.curvatures.sum(axis=0)
    target = q.root.T @ target @ q.root
    error = float(rows.errors.sum() + prior.errors.sum())
    return BoundEvaluation(bound, prior, q.root.T @ gradient, 0.5 * (target + target.T), error)


class NaturalStep(NamedTuple):
    """A step from one q to another.

    :ivar step: its length. :ivar slope: of the bound along it, where it begins.
    :ivar shift: of the mean, (P,), and ``change`` of the precision, (P, P), in the other q's standard coordinates.
    """

    state: State
    step: float
    slope: float
    shift: np.ndarray
    change: np.ndarray


def natural_step(state: State, evaluation: BoundEvaluation, step: float) -> NaturalStep | None:
    """A natural-gradient step of length t; None if it leaves no Gaussian.

    Lambda' = (1 - t) Lambda + t E_q[-hess],     mean' = mean + t Sigma' gradient,

    in coordinates in which q is standard normal, so that Lambda = I.

    :param step: its length at most: it is halved until Lambda' is positive definite.
    """
    if not (np.isfinite(evaluation.precision).all() and np.isfinite(evaluation.gradient).all()):
        return None
    old, identity = in_double(state), np.eye(len(evaluation.gradient))
    off = evaluation.precision - identity
    smallest = float(np.linalg.eigvalsh(off)[0])
    if smallest < -FLAT:  # the curvatures of a much wider q are different ones
        step = min(step, -WIDENED / smallest)
    while step >= SHORTEST:
        try:
            factor = np.linalg.cholesky(identity + step * off)
        except np.linalg.LinAlgError:
            step *= SHORTER
            continue
        inverse = np.linalg.inv(factor)
        shift = step * (inverse @ evaluation.gradient)
        whitened_shift = inverse.T @ shift
        slope = float(evaluation.gradient @ whitened_shift + 0.5 * step * np.sum(off * off))
        mean, dtype = old.mean + old.root @ whitened_shift, state.mean.dtype
        error, root = (mean - mean.astype(dtype)).astype(dtype), (old.root @ inverse.T).astype(dtype)
        arrays: dict[str, Any] = {"mean": mean.astype(dtype), "mean_error": error, "root": root}
        return NaturalStep(state._replace(**arrays), step, slope, shift, step * (inverse @ off @ inverse.T))
    return None


def best_step(move: NaturalStep, before: BoundEvaluation, after: BoundEvaluation) -> float:
    """The next step's length: that at which the bound's slope along this one would have vanished, by the secant."""
    slope = after.gradient @ move.shift + 0.5 * np.sum((after.precision - np.eye(len(move.shift))) * move.change)
    if after.squared_natural_gradient < FAST * before.squared_natural_gradient:
        return 1.0
    if not slope < move.slope:
        return LONGEST
    return float(np.clip(move.step * move.slope / (move.slope - slope), SHORTEST, LONGEST))


def stored(state: State, evaluation: BoundEvaluation, start: State) -> State:
    """The state with the new bound, and with the approximation of the prior terms at the new q."""
    dtype = state.mean.dtype
    site: Any = None
    if start.prior_factor is not None:
        old = in_double(state)
        value, gradient = evaluation.prior.values.sum(), evaluation.prior.gradients.sum(axis=0)
        site = CanonicalGaussian.expected(value, gradient, evaluation.prior.curvatures.sum(axis=0), old.mean, old.root)
        site = jax.tree.map(lambda x: np.asarray(x, dtype), site)
    return jax.device_put(state._replace(log_evidence=jnp.asarray(evaluation.bound, dtype), prior_factor=site))


def _half_log_det(root: np.ndarray) -> float:
    return float(np.linalg.slogdet(root)[1])


def in_double(state: Any) -> Any:
    return jax.tree.map(lambda x: np.asarray(x, np.float64), state)
