"""What updates move: q as a state, Gaussian factors of theta and of predictors, and reports of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .factors import ErrorEstimates

BASE = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Count:
    """The number ``high * 2^30 + low``, within compiled functions too; ``int(count)`` is it.

    :ivar high: (), 32-bit. :ivar low: (), 32-bit, less than 2^30.
    """

    high: Array
    low: Array

    @classmethod
    def of(cls, number: int) -> Count:
        return cls(jax.device_put(np.int32(number // BASE)), jax.device_put(np.int32(number % BASE)))

    def __add__(self, number: ArrayLike) -> Count:
        """``number``: at most 2^30, and not negative."""
        low = self.low + jnp.asarray(number, jnp.int32)
        return Count(self.high + low // BASE, low % BASE)

    def __int__(self) -> int:
        return int(self.high) * BASE + int(self.low)


class CanonicalGaussian(NamedTuple):
    """A Gaussian factor of theta, by its logarithm at theta = center + d: constant + linear . d - d' precision d / 2.

    :ivar precision: (P, P). :ivar linear: (P,). :ivar constant: (). :ivar center: (P,).
    """

    precision: Array | np.ndarray
    linear: Array | np.ndarray
    constant: Array | np.ndarray
    center: Array | np.ndarray

    @classmethod
    def expected(cls, value: Any, gradient: Any, curvature: Any, mean: Any, root: Any = None) -> CanonicalGaussian:
        """The factor f with E[log f] = ``value``, E[grad log f] = ``gradient`` and -E[hess log f] = ``curvature`` under
        N(mean, root root^T). ``root`` None: at the mean. A curvature that is zero may be one number."""
        trace = 0.0 if root is None else ((root @ root.T) * curvature).sum()
        return cls(curvature, gradient, value + 0.5 * trace, mean)

    def at(self, theta: Array | np.ndarray) -> tuple[Any, Any]:
        """Logarithm and gradient."""
        change = theta - self.center
        product = self.precision @ change
        return self.constant + self.linear @ change - 0.5 * change @ product, self.linear - product

    def about(self, center: Array | np.ndarray) -> CanonicalGaussian:
        """The factor about another center."""
        value, gradient = self.at(center)
        return CanonicalGaussian(self.precision, gradient, value, center)

    def plus(self, other: CanonicalGaussian, times: float = 1.0) -> CanonicalGaussian:
        """The product with a power of a factor of the same center."""
        return CanonicalGaussian(*[a + times * b for a, b in zip(self[:3], other[:3])], self.center)


class State(NamedTuple):
    """q = N(mean, root root^T) after ``num_rows`` rows.

    :ivar mean: (P,), with ``mean_error`` the rounding error that the last updates left (compensated summation).
    :ivar root: (P, P).
    :ivar log_evidence: accumulated bound; log q + log_evidence approximates the log joint density.
    :ivar prior_factor: the Gaussian that approximates prior terms that are not Gaussian; None if there are none.
    :ivar time: of the last row, if parameters move by the rows' time stamps; NaN before the first.
    """

    mean: Array
    mean_error: Array
    root: Array
    log_evidence: Array
    prior_factor: CanonicalGaussian | None
    num_rows: Count
    time: Array | None = None


class QuadraticFactors(NamedTuple):
    """n Gaussian factors, each of its own vector x, by their logarithms: constant + linear . x - x' precision x / 2.

    :ivar constant: (n,). :ivar linear: (n, e). :ivar precision: (n, e, e).
    """

    constant: Any  # NumPy's or JAX's arrays
    linear: Any
    precision: Any

    @classmethod
    def expected(cls, values: Any, gradients: Any, curvatures: Any, means: Any, covariances: Any) -> QuadraticFactors:
        """The factors f with E[log f] = ``values`` (n,), E[grad log f] = ``gradients`` (n, e) and -E[hess log f] =
        ``curvatures`` (n, e, e) under N(means, covariances)."""
        curved = (curvatures @ means[..., None])[..., 0]
        linear = gradients + curved
        half_trace = 0.5 * (curvatures * covariances).sum(axis=(1, 2))
        constant = values - (linear * means).sum(axis=1) + 0.5 * (curved * means).sum(axis=1) + half_trace
        return cls(constant, linear, curvatures)

    def and_powers(self, other: QuadraticFactors, power: np.ndarray) -> QuadraticFactors:
        """Times the others to these powers, (n,)."""
        powers = power, power[:, None], power[:, None, None]
        return QuadraticFactors(*[one + p * another for one, another, p in zip(self, other, powers)])


class Absorbed(NamedTuple):
    """Moments under q of the predictors of n factors of one kind, when they became part of q: what
    :func:`row_factors_of` takes.

    :ivar mean: (n, C). :ivar covariance: (n, C, C).
    :ivar error: (n,), how many nats the approximation may be off where q has mass: the change of the factor's
        curvature one standard deviation away, times the variance. Zero for Gaussian factors.
    """

    mean: Array
    covariance: Array
    error: Array


class StepInfo(NamedTuple):
    """Diagnostics of a step.

    :ivar bound: E_q[log lik] - KL(q || before).
    :ivar ok: whether the result is finite; else nothing changed.
    :ivar absorbed: moments of the factors' predictors, by kind; empty unless asked for.
    :ivar modes: bounds of the modes that several starts led to, that of q first; empty for one mode.
    :ivar error_estimates: of the factors' expectations at q, the prior's first; None where there are none.
    """

    bound: Array
    decrement: Array
    iterations: Array
    converged: Array
    ok: Array
    absorbed: tuple[Absorbed, ...] = ()
    modes: tuple[float, ...] = ()
    error_estimates: ErrorEstimates | None = None


def new_state(mean: Array, root: Array, prior_factor: CanonicalGaussian | None) -> State:
    zero = jnp.zeros((), mean.dtype)
    return State(mean, jnp.zeros_like(mean), root, zero, prior_factor, Count.of(0))
