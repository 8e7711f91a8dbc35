"""Gaussians with independent entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..matrices.linalg import column_sums
from .full import FullGaussian
from .steps import (
    ExpectedDerivatives,
    Transition,
    joined_in_natural_parameters,
    log_normal,
    nan_if_invalid,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiagonalGaussian:
    """N(mean, diag(variance)): (P,), (P,)."""

    mean: Array
    variance: Array
    projections: ClassVar[tuple[str, ...]] = ("exclusive", "inclusive")

    @property
    def noise_size(self) -> int:
        return len(self.mean)

    def is_valid(self) -> Array:
        return jnp.all(jnp.isfinite(self.mean) & jnp.isfinite(self.variance) & (self.variance > 0))  # in one pass

    def transform(self, standard: Array) -> Array:
        return self.mean + standard * jnp.sqrt(self.variance)

    def covariance(self) -> Array:
        return jnp.diag(self.variance)

    def scale_tril(self) -> Array:
        return jnp.diag(self.deviation())

    def deviation(self) -> Array:
        return jnp.sqrt(self.variance)

    def as_full(self) -> FullGaussian:
        return FullGaussian(self.mean, self.scale_tril())

    def log_prob(self, theta: Array) -> Array:
        lengths = jnp.sum((theta - self.mean) ** 2 / self.variance, axis=-1)
        return log_normal(lengths, jnp.sum(jnp.log(self.variance)), len(self.mean))

    def predictor_root(self, jacobian: Array) -> Array:
        return jacobian * jnp.sqrt(self.variance)

    def covariance_times(self, vector: Array) -> Array:
        return self.variance * vector

    def natural_step(
        self,
        derivatives: ExpectedDerivatives,
        step: Array | float,
        parameterization: str,
        prior: DiagonalGaussian | None = None,
        projection: str | None = None,
    ) -> DiagonalGaussian:
        """The natural step. With a projection, that of length one from the prior itself, see :meth:`projected_step`."""
        if projection is not None:
            return self.projected_step(derivatives, projection)
        return nan_if_invalid(self._stepped(derivatives, step, parameterization, prior))

    def _stepped(
        self,
        derivatives: ExpectedDerivatives,
        step: Array | float,
        parameterization: str,
        prior: DiagonalGaussian | None,
    ) -> DiagonalGaussian:
        excess, gradient = derivatives.curvature_diagonal(), derivatives.gradient
        if prior is not None:
            excess = excess + 1 / prior.variance - 1 / self.variance
            gradient = gradient + (prior.mean - self.mean) / prior.variance
        if parameterization == "natural":
            variance = gain = self.variance / (1 + step * excess * self.variance)
        else:
            variance, gain = self.variance * (1 - step * excess * self.variance), self.variance
        return DiagonalGaussian(self.mean + step * gain * gradient, variance)

    def unchecked_step(self, derivatives: ExpectedDerivatives) -> DiagonalGaussian:
        """The natural step of one from the prior itself, without checking whether the result is a Gaussian.

        For H without a negative part. Then what makes the result no Gaussian outlives further such steps: entries that
        are not finite, and variances of zero.
        """
        return self._stepped(derivatives, 1.0, "natural", None)

    def projected_step(self, derivatives: ExpectedDerivatives, projection: str) -> DiagonalGaussian:
        """The mean of the full update, with the diagonal of its precision or covariance.

        ``"exclusive"``: of its precision, the minimizer of KL(q || full) (diagonal EKF paper, equation 13).
        ``"inclusive"``: of its covariance, the minimizer of KL(full || q) (equation 12).
        """
        wide = derivatives.factor * self.variance
        weighted = derivatives.factor if derivatives.weight is None else derivatives.weight @ derivatives.factor
        inner = jnp.eye(len(wide), dtype=wide.dtype) + weighted @ wide.T
        raw = self.variance * derivatives.gradient
        mean = self.mean + raw - wide.T @ jnp.linalg.solve(inner, weighted @ raw)
        if projection == "exclusive":
            variance = self.variance / (1 + derivatives.curvature_diagonal() * self.variance)
        else:
            variance = self.variance - column_sums(wide * jnp.linalg.solve(inner, weighted * self.variance))
        return nan_if_invalid(DiagonalGaussian(mean, variance))

    def coordinates(self, parameterization: str) -> tuple[Array, Array]:
        if parameterization == "moment":
            return self.mean, self.variance
        if parameterization == "softplus":
            deviation = self.deviation()  # rho with deviation = log(1 + exp(rho))
            return self.mean, deviation + jnp.log(-jnp.expm1(-deviation))
        return self.mean / self.variance, -0.5 / self.variance

    @classmethod
    def from_coordinates(cls, coordinates: tuple[Array, Array], parameterization: str) -> DiagonalGaussian:
        first, second = coordinates
        if parameterization == "softplus":
            return cls(first, jax.nn.softplus(second) ** 2)
        return cls(first, second) if parameterization == "moment" else cls(-0.5 * first / second, -0.5 / second)

    def expected_quadratic(self, derivatives: ExpectedDerivatives) -> Array:
        return self.variance @ derivatives.curvature_diagonal()

    def kl_divergence(self, other: DiagonalGaussian) -> Array:
        ratio = self.variance / other.variance
        return 0.5 * jnp.sum(ratio + (self.mean - other.mean) ** 2 / other.variance - 1 - jnp.log(ratio))

    def with_information(self, indices: Array | np.ndarray, information: Array, precision: Array) -> DiagonalGaussian:
        """As :meth:`~.full.Family.with_information`."""
        mean = self.mean.at[indices].add(self.variance[indices] * information)
        excess = self.variance[indices] * jnp.diagonal(precision)
        variance = self.variance.at[indices].divide(1 + excess)
        return nan_if_invalid(DiagonalGaussian(mean, variance))

    joined = joined_in_natural_parameters

    def predict(self, transition: Transition) -> DiagonalGaussian:
        if transition.matrix.ndim == 2:
            variance = transition.matrix**2 @ self.variance
        else:
            variance = transition.matrix**2 * self.variance
        return DiagonalGaussian(transition.mean(self.mean), variance + transition.noise_variance)
