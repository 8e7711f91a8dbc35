"""A Gaussian with a covariance of any form."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from ..linalg import cholesky, inverse, lower_from_root, row_space, solve_lower
from .steps import Site, Transition, log_normal, refused_if_invalid


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullGaussian:
    """N(mean, root root^T).

    :ivar mean: (P,). :ivar root: (P, P), of any form.
    """

    mean: Array
    root: Array

    @property
    def noise_size(self) -> int:
        """Length of the standard normal vectors that :meth:`transform` takes."""
        return self.root.shape[1]

    def is_valid(self) -> Array:
        return jnp.all(jnp.isfinite(self.mean)) & jnp.all(jnp.isfinite(self.root))

    def transform(self, standard: Array) -> Array:
        """Draws of theta (..., P) from draws of the standard normal (..., noise_size)."""
        return self.mean + jnp.matmul(standard, self.root.T, precision="highest")

    def covariance(self) -> Array:
        return jnp.matmul(self.root, self.root.T, precision="highest")

    def scale_tril(self) -> Array:
        """The Cholesky factor of the covariance."""
        return lower_from_root(self.root)

    def deviation(self) -> Array:
        """Standard deviations of the marginals, (P,)."""
        return jnp.linalg.norm(self.root, axis=1)

    def as_full(self) -> FullGaussian:
        return self

    def log_density(self, theta: Array) -> Array:
        """At theta (..., P)."""
        lower = self.scale_tril()
        flat = (theta - self.mean).reshape(-1, len(self.mean))
        lengths = jnp.sum(solve_lower(lower, flat.T) ** 2, axis=0).reshape(theta.shape[:-1])
        return log_normal(lengths, 2 * jnp.sum(jnp.log(jnp.diagonal(lower))), len(self.mean))

    def spread(self, design: Array) -> Array:
        """Z (..., C, K) with Z Z^T = design Sigma design^T for designs (..., C, P)."""
        return design @ self.root

    def natural_step(
        self, site: Site, step: Array | float, chart: str, prior: FullGaussian | None = None
    ) -> FullGaussian:
        """:param prior: None if this Gaussian is the prior itself: then the cost is O(K P^2)."""
        natural = chart == "natural"
        if prior is None and site.diagonal is None and len(site.factor) < len(self.mean):
            return self._narrow_step(site, step, natural)
        ratio_excess, pull = 0.0, site.gradient
        if prior is not None:
            ratio = jnp.linalg.solve(prior.root, self.root)
            ratio_excess = ratio.T @ ratio - jnp.eye(len(self.mean), dtype=ratio.dtype)
            pull = pull + _apply_precision(prior.root, prior.mean - self.mean)
        root = self.root @ _change(site.gram(self.root) + ratio_excess, step, natural)
        gain = root if natural else self.root
        return refused_if_invalid(FullGaussian(self.mean + step * gain @ (gain.T @ pull), root))

    def _narrow_step(self, site: Site, step: Array | float, natural: bool) -> FullGaussian:
        """The step from the prior itself, by a factor of few rows: the root is read twice and written once."""
        rows = jnp.concatenate([site.factor, site.gradient[None]]) @ self.root
        reduced, basis = row_space(rows[:-1])
        change = _change(reduced.T @ (reduced if site.weight is None else site.weight @ reduced), step, natural)
        turn, slope = change - jnp.eye(len(change), dtype=change.dtype), rows[-1]
        if natural:  # the new root, transposed, times the gradient
            slope = slope + ((basis @ slope) @ turn) @ basis
        spread = self.root @ jnp.concatenate([basis, slope[None]]).T
        columns, move = spread[:, :-1] @ turn, spread[:, -1]
        if natural:
            move = move + columns @ (basis @ slope)
        # Not looked at entry by entry, as each pass over a root costs: this bounds all of them.
        fine = jnp.isfinite(jnp.sum(jnp.max(jnp.abs(columns), axis=0) * jnp.max(jnp.abs(basis), axis=1)))
        return FullGaussian(jnp.where(fine, self.mean + step * move, jnp.nan), self.root + columns @ basis)

    def coordinates(self, chart: str) -> tuple[Array, Array]:
        covariance = self.root @ self.root.T
        if chart == "moment":
            return self.mean, covariance
        precision = inverse(covariance)
        return precision @ self.mean, -0.5 * precision

    @classmethod
    def from_coordinates(cls, coordinates: tuple[Array, Array], chart: str) -> FullGaussian:
        """NaN where the coordinates are those of no Gaussian."""
        first, second = coordinates
        if chart == "moment":
            return cls(first, cholesky(0.5 * (second + second.T)))
        factor = cholesky(-(second + second.T))
        root = solve_lower(factor, jnp.eye(len(first), dtype=first.dtype)).T
        return cls(root @ (root.T @ first), root)

    def mean_curvature(self, site: Site) -> Array:
        """trace(H Sigma)."""
        rows = site.factor @ self.root
        found = jnp.sum(rows * (rows if site.weight is None else site.weight @ rows))
        return found if site.diagonal is None else found + site.diagonal @ jnp.sum(self.root**2, axis=1)

    def divergence(self, other: FullGaussian) -> Array:
        """KL(self || other)."""
        ratio = jnp.linalg.solve(other.root, self.root)
        shift = jnp.linalg.solve(other.root, self.mean - other.mean)
        trace = jnp.sum(ratio * ratio) + shift @ shift - len(shift)
        return 0.5 * trace - jnp.linalg.slogdet(ratio)[1]

    def moved(self, transition: Transition) -> FullGaussian:
        noise = transition.noise_root
        columns = [transition.applied(self.root), jnp.diag(noise) if noise.ndim == 1 else noise]
        return FullGaussian(transition.mean(self.mean), lower_from_root(jnp.concatenate(columns, axis=1)))


def _change(excess: Array, step: Array | float, natural: bool) -> Array:
    """What a root is multiplied by. In its coordinates q is standard normal, and excess is added to the precision, or
    taken from the covariance."""
    identity = jnp.eye(len(excess), dtype=excess.dtype)
    if natural:
        return solve_lower(cholesky(identity + step * excess), identity).T
    return cholesky(identity - step * excess)


def _apply_precision(root: Array, vector: Array) -> Array:
    return jnp.linalg.solve(root.T, jnp.linalg.solve(root, vector))
