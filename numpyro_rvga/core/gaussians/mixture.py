"""A mixture of Gaussians."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm

from ..linalg import lower_from_root
from .arrow_roots import ArrowRoots, DenseRoot, root_of, variances_of
from .full import FullGaussian
from .steps import log_normal

BISECTIONS = 60
BATCH_NUMBERS = 2**22  # in the roots that draws take at once


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GaussianMixture:
    """The sum over k of weight k times N(mean k, root k root k^T).

    :ivar log_weights: (K,), logarithms of positive weights that sum to one.
    :ivar means: (K, P). :ivar roots: (K, P, P), lower triangular, or arrows'.
    """

    log_weights: Array
    means: Array
    roots: Array | ArrowRoots

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
        if isinstance(self.roots, ArrowRoots):  # one factorization, not one for each component
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
        """Z (..., C, P) with Z Z^T = design Sigma design^T for designs (..., C, P) and the covariance Sigma."""
        return jacobian @ self.scale_tril()

    def log_prob(self, theta: Array) -> Array:
        """At theta (..., P)."""
        size = self.means.shape[1]
        flat = theta.reshape(-1, size)

        def one(component):
            log_weight, mean, k = component
            root = root_of(self.roots, k)
            return log_weight + log_normal(root.lengths(flat - mean), 2 * root.log_determinant(), size)

        numbers = jnp.arange(len(self.means))
        return logsumexp(lax.map(one, (self.log_weights, self.means, numbers)), axis=0).reshape(theta.shape[:-1])

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
