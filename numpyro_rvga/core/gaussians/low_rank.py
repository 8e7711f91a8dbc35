"""A Gaussian whose precision is diagonal plus low rank."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import cho_solve

from ..linalg import cholesky, column_sums, inverse, scaled_columns, solve_lower, sums_over_columns
from .full import FullGaussian
from .steps import Site, Transition, log_normal


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankGaussian:
    """N(mean, (diag(diagonal) + factor^T factor)^-1): (P,), (P,), (R, P).

    Every step returns a member of the family: of what a step adds, the R leading directions are kept and the diagonal
    of the rest. The mean moves before that, with everything.
    """

    mean: Array
    diagonal: Array
    factor: Array

    @property
    def noise_size(self) -> int:
        return sum(self.factor.shape)

    def is_valid(self) -> Array:
        fine = jnp.all(jnp.isfinite(self.diagonal) & (self.diagonal > 0)) & jnp.all(jnp.isfinite(self.factor))
        return fine & jnp.all(jnp.isfinite(self.mean))

    def transform(self, standard: Array) -> Array:
        rank = len(self.factor)
        return self.mean + self._solve(
            standard[..., :rank] @ self.factor + standard[..., rank:] * jnp.sqrt(self.diagonal)
        )

    def covariance(self) -> Array:
        root = self.as_full().root
        return jnp.matmul(root, root.T, precision="highest")

    def scale_tril(self) -> Array:
        return self.as_full().scale_tril()

    def deviation(self) -> Array:
        return jnp.sqrt(1 / self.diagonal - column_sums(self._narrowing() ** 2))

    def as_full(self) -> FullGaussian:
        precision = jnp.diag(self.diagonal) + self.factor.T @ self.factor
        return FullGaussian(
            self.mean, solve_lower(cholesky(precision), jnp.eye(len(self.mean), dtype=self.mean.dtype)).T
        )

    def log_density(self, theta: Array) -> Array:
        shift = theta - self.mean
        lengths = jnp.sum(shift**2 * self.diagonal, axis=-1) + jnp.sum((shift @ self.factor.T) ** 2, axis=-1)
        return log_normal(lengths, -self._log_det_precision(), len(self.mean))

    def spread(self, design: Array) -> Array:
        # Sigma = Sigma Lambda Sigma, and Lambda = [sqrt(diagonal), factor^T] [sqrt(diagonal), factor^T]^T.
        solved = self._solve(design)
        return jnp.concatenate([solved * jnp.sqrt(self.diagonal), solved @ self.factor.T], axis=-1)

    def natural_step(
        self, site: Site, step: Array | float, chart: str, prior: LowRankGaussian | None = None
    ) -> LowRankGaussian:
        """H must be positive semi-definite, in the form of a factor alone; ``chart`` is "natural"."""
        added = jnp.sqrt(step) * site.factor
        if prior is None:
            rows, diagonal, pull = [self.factor, added], self.diagonal, site.gradient
        else:
            rows = [jnp.sqrt(1 - step) * self.factor, jnp.sqrt(step) * prior.factor, added]
            diagonal = (1 - step) * self.diagonal + step * prior.diagonal
            pull = site.gradient + prior._times_precision(prior.mean - self.mean)
        return projected(self.mean, step * pull, diagonal, rows, len(self.factor))

    def coordinates(self, chart: str) -> tuple[Array, Array, Array]:
        return self.mean, self.diagonal, self.factor

    @classmethod
    def from_coordinates(cls, coordinates: tuple[Array, Array, Array], chart: str) -> LowRankGaussian:
        return cls(*coordinates)

    def mean_curvature(self, site: Site) -> Array:
        return self._variance_along(site.factor, *self._inner())

    def divergence(self, other: LowRankGaussian) -> Array:
        shift = self.mean - other.mean
        narrow, root = self._inner()
        within = cho_solve((root, True), (narrow * other.diagonal) @ narrow.T)
        trace = jnp.sum(other.diagonal / self.diagonal) - jnp.trace(within)
        trace = trace + self._variance_along(other.factor, narrow, root)
        length = shift @ other._times_precision(shift)
        return 0.5 * (trace + length - len(shift) + self._log_det_precision(root) - other._log_det_precision())

    def moved(self, transition: Transition) -> LowRankGaussian:
        """Exact where matrix and noise are diagonal; else projected, by way of (P, P) matrices."""
        mean, rank = transition.mean(self.mean), len(self.factor)
        if transition.matrix.ndim == 2 or transition.noise_root.ndim == 2:
            spread = transition.applied(self.as_full().root)
            noise = transition.noise_root
            noise = jnp.diag(noise**2) if noise.ndim == 1 else noise @ noise.T
            return leading_part(mean, inverse(spread @ spread.T + noise), rank)
        scale, noise = jnp.broadcast_to(transition.matrix, mean.shape), transition.noise_variance
        variance = scale**2 / self.diagonal + noise
        inner = jnp.eye(rank, dtype=mean.dtype) + (self.factor * (noise / (self.diagonal * variance))) @ self.factor.T
        factor = solve_lower(jnp.linalg.cholesky(inner), self.factor * (scale / (self.diagonal * variance)))
        return LowRankGaussian(mean, 1 / variance, factor)

    def raised(self, places: Array | np.ndarray, pull: Array, diagonal: Array) -> LowRankGaussian:
        """The mean pulled at some places, as the covariance has it, and then ``diagonal`` added to the precision."""
        mean = self.mean + self._solve(jnp.zeros_like(self.mean).at[places].set(pull))
        return LowRankGaussian(mean, self.diagonal.at[places].add(diagonal), self.factor)

    def joined(self, parts: list[LowRankGaussian]) -> LowRankGaussian:
        """This prior, of zero factor, times the ratio of each part to it, projected back."""
        diagonal = self.diagonal + sum(q.diagonal - self.diagonal for q in parts)
        linear = self.diagonal * self.mean
        linear = linear + sum(q._times_precision(q.mean) - self.diagonal * self.mean for q in parts)
        return projected(jnp.zeros_like(linear), linear, diagonal, [q.factor for q in parts], len(self.factor))

    def _times_precision(self, vector: Array) -> Array:
        return self.diagonal * vector + (self.factor @ vector) @ self.factor

    def _inner(self) -> tuple[Array, Array]:
        """W D^-1 (R, P), and the Cholesky factor of I + W D^-1 W^T (R, R). Who needs them more often finds them
        once: each pass over the former costs, and autodiff makes two more."""
        narrow = scaled_columns(self.factor, 1 / self.diagonal)
        identity = jnp.eye(len(self.factor), dtype=self.factor.dtype)
        return narrow, jnp.linalg.cholesky(identity + narrow @ self.factor.T)

    def _variance_along(self, rows: Array, narrow: Array, root: Array) -> Array:
        """The sum of x Sigma x^T over rows x (N, P), by what :meth:`_inner` finds."""
        inner = narrow @ rows.T
        return column_sums(rows**2) @ (1 / self.diagonal) - jnp.sum(inner * cho_solve((root, True), inner))

    def _narrowing(self) -> Array:
        """N (R, P) with Sigma = D^-1 - N^T N."""
        narrow, root = self._inner()
        return solve_lower(root, narrow)

    def _solve(self, rows: Array) -> Array:
        """Sigma x for each x of (..., P)."""
        narrow, root = self._inner()
        inner = rows @ narrow.T
        flat = cho_solve((root, True), inner.reshape(-1, inner.shape[-1]).T).T
        return rows / self.diagonal - flat.reshape(inner.shape) @ narrow

    def _log_det_precision(self, root: Array | None = None) -> Array:
        """:param root: the second that :meth:`_inner` finds, if it is known."""
        root = self._inner()[1] if root is None else root
        return jnp.sum(jnp.log(self.diagonal)) + 2 * jnp.sum(jnp.log(jnp.diagonal(root)))


def projected(mean: Array, pull: Array, diagonal: Array, rows: list[Array], rank: int) -> LowRankGaussian:
    """Of precision Lambda = diag(diagonal) + sum of rows^T rows, at mean + Lambda^-1 pull, the member of the family.

    Each pass over the rows (K_i, P) costs, so all products are made in one, and all combinations in another.
    """

    def products(pull, diagonal, *rows):
        wide = jnp.concatenate(rows)
        narrow = wide / diagonal
        return narrow @ wide.T, narrow @ pull, wide @ wide.T

    inner, pulled, gram = sums_over_columns(products, pull, diagonal, *rows)
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    share = cho_solve((jnp.linalg.cholesky(identity + inner), True), pulled)
    leading = jnp.linalg.eigh(gram)[1][:, len(gram) - rank :].T
    ends = np.cumsum([len(r) for r in rows])[:-1]
    parts = jnp.split(leading, ends, axis=1)
    kept = sum((part @ r for part, r in zip(parts[1:], rows[1:])), start=parts[0] @ rows[0])
    mean = mean + (pull - sum(part @ r for part, r in zip(jnp.split(share, ends), rows))) / diagonal
    dropped = sum(column_sums(r**2) for r in rows) - column_sums(kept**2)
    diagonal = diagonal + jnp.maximum(dropped, 0.0)
    fine = jnp.all(jnp.isfinite(diagonal) & (diagonal > 0))  # which the squares of all that is kept are part of
    return LowRankGaussian(jnp.where(fine, mean, jnp.nan), diagonal, kept)


def leading_part(mean: Array, precision: Array, rank: int) -> LowRankGaussian:
    """The leading directions of a precision matrix beyond its least eigenvalue, and the diagonal of the rest."""
    values, vectors = jnp.linalg.eigh(precision)
    start = len(values) - rank
    factor = jnp.sqrt(values[start:] - values[0])[:, None] * vectors[:, start:].T
    return LowRankGaussian(mean, jnp.diagonal(precision) - column_sums(factor**2), factor)
