"""A Gaussian of independent entries."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from ..linalg import column_sums
from .full import FullGaussian
from .steps import Site, Transition, log_normal, refused_if_invalid


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiagonalGaussian:
    """N(mean, diag(variance)): (P,), (P,)."""

    mean: Array
    variance: Array

    @property
    def noise_size(self) -> int:
        return len(self.mean)

    def is_valid(self) -> Array:
        return jnp.all(jnp.isfinite(self.mean)) & jnp.all(jnp.isfinite(self.variance) & (self.variance > 0))

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

    def log_density(self, theta: Array) -> Array:
        lengths = jnp.sum((theta - self.mean) ** 2 / self.variance, axis=-1)
        return log_normal(lengths, jnp.sum(jnp.log(self.variance)), len(self.mean))

    def spread(self, design: Array) -> Array:
        return design * jnp.sqrt(self.variance)

    def natural_step(
        self, site: Site, step: Array | float, chart: str, prior: DiagonalGaussian | None = None
    ) -> DiagonalGaussian:
        excess, pull = site.curvature_diagonal(), site.gradient
        if prior is not None:
            excess = excess + 1 / prior.variance - 1 / self.variance
            pull = pull + (prior.mean - self.mean) / prior.variance
        if chart == "natural":
            variance = gain = self.variance / (1 + step * excess * self.variance)
        else:
            variance, gain = self.variance * (1 - step * excess * self.variance), self.variance
        return refused_if_invalid(DiagonalGaussian(self.mean + step * gain * pull, variance))

    def projected_step(self, site: Site, projection: str) -> DiagonalGaussian:
        """The exact update's mean, and the diagonal of its precision ("exclusive": of all diagonal Gaussians the
        minimiser of KL(q || exact); diagonal EKF paper, equation 13) or covariance ("inclusive": KL(exact || q); 12).
        """
        wide = site.factor * self.variance
        weighted = site.factor if site.weight is None else site.weight @ site.factor
        inner = jnp.eye(len(wide), dtype=wide.dtype) + weighted @ wide.T
        raw = self.variance * site.gradient
        mean = self.mean + raw - wide.T @ jnp.linalg.solve(inner, weighted @ raw)
        if projection == "exclusive":
            variance = self.variance / (1 + site.curvature_diagonal() * self.variance)
        else:
            variance = self.variance - column_sums(wide * jnp.linalg.solve(inner, weighted * self.variance))
        return refused_if_invalid(DiagonalGaussian(mean, variance))

    def coordinates(self, chart: str) -> tuple[Array, Array]:
        if chart == "moment":
            return self.mean, self.variance
        return self.mean / self.variance, -0.5 / self.variance

    @classmethod
    def from_coordinates(cls, coordinates: tuple[Array, Array], chart: str) -> DiagonalGaussian:
        first, second = coordinates
        return cls(first, second) if chart == "moment" else cls(-0.5 * first / second, -0.5 / second)

    def mean_curvature(self, site: Site) -> Array:
        return self.variance @ site.curvature_diagonal()

    def divergence(self, other: DiagonalGaussian) -> Array:
        ratio = self.variance / other.variance
        return 0.5 * jnp.sum(ratio + (self.mean - other.mean) ** 2 / other.variance - 1 - jnp.log(ratio))

    def moved(self, transition: Transition) -> DiagonalGaussian:
        if transition.matrix.ndim == 2:
            variance = transition.matrix**2 @ self.variance
        else:
            variance = transition.matrix**2 * self.variance
        return DiagonalGaussian(transition.mean(self.mean), variance + transition.noise_variance)
