"""A Gaussian over some entries of theta, beside independent members of exponential families over the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.stats import norm

from ..exponential import Entries
from .full import FullGaussian


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class MeanField:
    """The product of N(mean, root root^T) over entries ``others`` and of each entry of ``places`` by itself.

    :ivar gaussian: of theta[others]. :ivar natural: of theta[places], (H, 2). :ivar entries: their families.
    """

    gaussian: FullGaussian
    natural: Array
    entries: Entries
    places: Array
    others: Array

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> MeanField:
        """From plain dicts and lists in place of its parts."""
        arrays = {name: fields[name] for name in ("natural", "places", "others")}
        return cls(gaussian=FullGaussian(**fields["gaussian"]), entries=Entries(*fields["entries"]), **arrays)

    @property
    def mean(self) -> Array:
        return self._joined(self.gaussian.mean, self.entries.mean(self.natural))

    @property
    def noise_size(self) -> int:
        return len(self.places) + len(self.others)

    def is_valid(self) -> Array:
        return self.gaussian.is_valid() & jnp.all(jnp.isfinite(self.natural) & (self.natural > 0))

    def transform(self, standard: Array) -> Array:
        """Draws of theta (..., P) from draws of the standard normal (..., P)."""
        own = self.entries.quantile(self.natural, standard[..., self.places])
        return self._joined(self.gaussian.transform(standard[..., self.others]), own)

    def covariance(self) -> Array:
        return self.as_full().covariance()

    def scale_tril(self) -> Array:
        return self.as_full().scale_tril()

    def deviation(self) -> Array:
        """Standard deviations of the marginals, (P,)."""
        return self._joined(self.gaussian.deviation(), jnp.sqrt(self.entries.variance(self.natural)))

    def as_full(self) -> FullGaussian:
        """The Gaussian with the same mean and covariance."""
        return FullGaussian(self.mean, self._root())

    def predictor_root(self, jacobian: Array) -> Array:
        """Z (..., C, P) with Z Z^T = J Sigma J^T for Jacobians J (..., C, P) and the covariance Sigma."""
        return jacobian @ self._root()

    def log_prob(self, theta: Array) -> Array:
        own = jnp.sum(self.entries.log_prob(self.natural, theta[..., self.places]), axis=-1)
        return self.gaussian.log_prob(theta[..., self.others]) + own

    def marginal_quantiles(self, probabilities: Array) -> Array:
        """Quantiles of the marginals, (..., P), at probabilities (..., 1)."""
        return self.marginals_at(norm.ppf(probabilities))

    def marginals_at(self, score: Array) -> Array:
        """The same, (..., P), at probabilities that the standard normal distribution has below scores (..., 1)."""
        own = self.entries.quantile(self.natural, score * jnp.ones(len(self.places), score.dtype))
        return self._joined(self.gaussian.mean + score * self.gaussian.deviation(), own)

    def _joined(self, of_others: Array, of_places: Array) -> Array:
        """(..., P) from (..., P - H) and (..., H)."""
        theta = jnp.zeros((*of_places.shape[:-1], self.noise_size), of_places.dtype)
        return theta.at[..., self.others].set(of_others).at[..., self.places].set(of_places)

    def _root(self) -> Array:
        """A square root of the covariance, (P, P)."""
        deviation = jnp.sqrt(self.entries.variance(self.natural))
        root = jnp.zeros((self.noise_size, self.noise_size), deviation.dtype)
        root = root.at[self.places, self.places].set(deviation)
        return root.at[self.others[:, None], self.others].set(self.gaussian.root)
