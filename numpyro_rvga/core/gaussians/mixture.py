"""A mixture of Gaussians."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.stats import norm

from ..matrices.linalg import lower_from_root
from .full import FullGaussian
from .packed_roots import DenseRoot, Metric, PackedRoots, root_of, variances_of
from .steps import log_normal

BISECTIONS = 60
BATCH_NUMBERS = 2**22  # in the roots that draws take at once
POINTS_IN_BLOCK = 128
FEW = 3  # coordinates, by which components are passed over
TOO_LITTLE = 30.0  # nats below what a point's density is at least: a million such components are nothing beside it


class _FewCoordinates(NamedTuple):
    """Some entries of theta (c,), with the components' means and variances of these, (K, c)."""

    indices: Array
    means: Array
    variances: Array

    def least_lengths(self, points: Array, k: Array) -> Array:
        """A lower bound of the squared distances of points (..., P) from the mean of component k, in its metric."""
        return jnp.max((points[..., self.indices] - self.means[k]) ** 2 / self.variances[k], axis=-1)

    def nearest(self, points: Array) -> Array:
        """The number of a component near each of the points (n, P), (n,)."""

        def closer(best: tuple[Array, Array], k: Array) -> tuple[tuple[Array, Array], None]:
            length = self.least_lengths(points, k)
            return (jnp.minimum(best[0], length), jnp.where(length < best[0], k, best[1])), None

        nothing = jnp.full(len(points), jnp.inf, points.dtype), jnp.zeros(len(points), jnp.int32)
        return lax.scan(closer, nothing, jnp.arange(len(self.means), dtype=jnp.int32))[0][1]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GaussianMixture:
    """The sum over k of weight k times N(mean k, root k root k^T).

    :ivar log_weights: (K,), logarithms of positive weights that sum to one.
    :ivar means: (K, P). :ivar roots: (K, P, P), lower triangular, or packed.
    """

    log_weights: Array
    means: Array
    roots: Array | PackedRoots

    @property
    def weights(self) -> Array:
        return jnp.exp(self.log_weights)

    @property
    def mean(self) -> Array:
        return self.weights @ self.means

    @property
    def noise_size(self) -> int:
        """Length of the standard normal vectors that :meth:`transform` takes."""
        return self.means.shape[1] + 1

    def component(self, k: int | Array) -> FullGaussian:
        root = root_of(self.roots, k)
        return FullGaussian(
            self.means[k], root.matrix if isinstance(root, DenseRoot) else lower_from_root(root.whole())
        )

    def transform(self, standard: Array) -> Array:
        """Draws of theta (..., P) from draws of the standard normal (..., noise_size), whose first entry chooses the
        component."""
        size = self.means.shape[1]
        flat = standard.reshape(-1, size + 1)
        bounds = jnp.cumsum(self.weights)
        chosen = jnp.searchsorted(bounds / bounds[-1], norm.cdf(flat[:, 0]))
        chosen = jnp.minimum(chosen, len(bounds) - 1)

        def one(draw):
            k, noise = draw
            return self.means[k] + root_of(self.roots, k).times(noise)

        drawn = lax.map(one, (chosen, flat[:, 1:]), batch_size=max(1, min(len(flat), BATCH_NUMBERS // size**2)))
        return drawn.reshape(*standard.shape[:-1], size)

    def covariance(self) -> Array:
        deviations = self.means - self.mean

        def add(total, component):
            weight, deviation, k = component
            root = root_of(self.roots, k).whole()
            within = jnp.matmul(root, root.T, precision="highest")
            return total + weight * (within + jnp.outer(deviation, deviation)), None

        size = self.means.shape[1]
        nothing = jnp.zeros((size, size), self.means.dtype)
        return lax.scan(add, nothing, (self.weights, deviations, jnp.arange(len(deviations))))[0]

    def scale_tril(self) -> Array:
        """The Cholesky factor of the covariance."""
        if isinstance(self.roots, PackedRoots):  # one factorization, not one for each component
            return jnp.linalg.cholesky(self.covariance())
        rows = jnp.sqrt(self.weights)[:, None] * (self.means - self.mean)
        roots = jnp.sqrt(self.weights)[:, None, None] * self.roots

        def add(lower, component):
            row, root = component
            return lower_from_root(jnp.concatenate([lower, row[:, None], root], axis=1)), None

        size = self.means.shape[1]
        return lax.scan(add, jnp.zeros((size, size), self.means.dtype), (rows, roots))[0]

    def deviation(self) -> Array:
        """Standard deviations of the marginals, (P,)."""
        return jnp.sqrt(self.weights @ (variances_of(self.roots) + (self.means - self.mean) ** 2))

    def as_full(self) -> FullGaussian:
        """The Gaussian with the same mean and covariance."""
        return FullGaussian(self.mean, self.scale_tril())

    def predictor_root(self, jacobian: Array) -> Array:
        """Z (..., C, P) with Z Z^T = J Sigma J^T for Jacobians J (..., C, P) and the covariance Sigma."""
        return jacobian @ self.scale_tril()

    def log_prob(self, theta: Array) -> Array:
        """log q at theta (..., P). Components that cannot add to a point's density are passed over.

        Points are taken in blocks of those that are near one component. What this one has there is less than the
        density, and what another could have at most follows from a few coordinates.
        """
        size = self.means.shape[1]
        flat = theta.reshape(-1, size)
        peaks, few = self._peaks(), self._in_few_coordinates()
        nearest = few.nearest(flat)
        block = min(POINTS_IN_BLOCK, len(flat))
        order = jnp.argsort(nearest)
        order = jnp.concatenate([order, jnp.full(-len(flat) % block, order[-1])]).reshape(-1, block)
        blocks = flat[order]

        def log_density(k: Array, metric: Metric, points: Array) -> Array:
            return peaks[k] - 0.5 * metric(points - self.means[k])

        def of_one(x: tuple[Array, Array]) -> Array:
            return log_density(x[0], root_of(self.roots, x[0]).metric(block), x[1])

        at_least = lax.map(of_one, (nearest[order[:, block // 2]], blocks))

        def add(total: Array, k: Array) -> tuple[Array, None]:
            # A bound that is not a number passes over nothing.
            too_little = peaks[k] - 0.5 * few.least_lengths(blocks, k) < at_least - TOO_LITTLE
            metric = root_of(self.roots, k).metric(len(flat))

            def of_block(x: tuple[Array, Array, Array]) -> Array:
                is_none, total, points = x
                return lax.cond(is_none, lambda: total, lambda: jnp.logaddexp(total, log_density(k, metric, points)))

            return lax.map(of_block, (jnp.all(too_little, axis=1), total, blocks)), None

        total = lax.scan(add, jnp.full_like(at_least, -jnp.inf), jnp.arange(len(self.means)))[0]
        log_densities = jnp.zeros(len(flat), total.dtype).at[order.ravel()].set(total.ravel())
        return log_densities.reshape(theta.shape[:-1])

    def _peaks(self) -> Array:
        """The logarithms of the components' weighted densities at their means, (K,)."""

        def log_determinant(k: Array) -> Array:
            return 2 * root_of(self.roots, k).log_determinant()

        determinants = lax.map(log_determinant, jnp.arange(len(self.means)))
        return self.log_weights + log_normal(jnp.zeros(()), determinants, self.means.shape[1])

    def _in_few_coordinates(self) -> _FewCoordinates:
        """The coordinates in which the components are the farthest apart."""
        variances = variances_of(self.roots)
        apart = jnp.var(self.means, axis=0) / jnp.mean(variances, axis=0)
        indices = lax.top_k(apart, min(FEW, apart.size))[1]
        return _FewCoordinates(indices, self.means[:, indices], variances[:, indices])

    def marginal_quantiles(self, probabilities: Array) -> Array:
        """Quantiles of the marginals, (..., P), at probabilities (..., 1), by bisection."""
        deviations = jnp.sqrt(variances_of(self.roots))
        own = self.means + deviations * norm.ppf(probabilities)[..., None, :]  # the mixture's lie between these
        low, high = jnp.min(own, axis=-2), jnp.max(own, axis=-2)

        def halve(_, ends):
            low, high = ends
            middle = 0.5 * (low + high)
            below = norm.cdf((middle[..., None, :] - self.means) / deviations)
            is_low = jnp.einsum("k,...kp->...p", self.weights, below) < probabilities
            return jnp.where(is_low, middle, low), jnp.where(is_low, high, middle)

        low, high = lax.fori_loop(0, BISECTIONS, halve, (low, high))
        return 0.5 * (low + high)
