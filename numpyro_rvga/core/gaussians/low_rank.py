"""Gaussians whose precision is diagonal plus low rank (LO-FI, SLANG)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.linalg import cho_solve

from ..matrices.linalg import cholesky, column_sums, inverse, scaled_columns, solve_lower, sums_over_columns
from .full import FullGaussian
from .steps import ExpectedDerivatives, Transition, log_normal, shifted

EXCLUSIVE_STEPS = 2  # in a stream more hardly change the end: the next row's projection begins where these have come


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LowRankGaussian:
    """N(mean, (diag(diagonal) + factor^T factor)^-1).

    A step adds rows to the factor. The mean takes the full step. Of the precision, the R leading directions and the
    diagonal of the rest are kept, so that the result is a member of the family. With ``projection="first"`` the mean
    takes its step with the precision that is kept (SLANG, algorithm 1). With ``projection="exclusive"`` steps of
    :func:`nearer` follow, towards the member of the family with the least KL(q || full) (limited-memory R-VGA).

    :ivar mean: (P,). :ivar diagonal: (P,), positive. :ivar factor: (R, P).
    """

    mean: Array
    diagonal: Array
    factor: Array
    projections: ClassVar[tuple[str, ...]] = ("first", "exclusive")

    @property
    def noise_size(self) -> int:
        return sum(self.factor.shape)

    def is_valid(self) -> Array:
        fine = jnp.all(jnp.isfinite(self.diagonal) & (self.diagonal > 0)) & jnp.all(jnp.isfinite(self.factor))
        return fine & jnp.all(jnp.isfinite(self.mean))

    def transform(self, standard: Array) -> Array:
        rank = len(self.factor)
        return self.mean + self.covariance_times(
            standard[..., :rank] @ self.factor + standard[..., rank:] * jnp.sqrt(self.diagonal)
        )

    def covariance(self) -> Array:
        return self.as_full().covariance()

    def scale_tril(self) -> Array:
        return self.as_full().scale_tril()

    def deviation(self) -> Array:
        return jnp.sqrt(1 / self.diagonal - column_sums(self._narrowing() ** 2))

    def as_full(self) -> FullGaussian:
        identity = jnp.eye(len(self.mean), dtype=self.mean.dtype)
        return FullGaussian(self.mean, solve_lower(cholesky(self._precision()), identity).T)

    def log_prob(self, theta: Array) -> Array:
        shift = theta - self.mean
        lengths = jnp.sum(shift**2 * self.diagonal, axis=-1) + jnp.sum((shift @ self.factor.T) ** 2, axis=-1)
        return log_normal(lengths, -self._log_det_precision(), len(self.mean))

    def predictor_root(self, jacobian: Array) -> Array:
        # Sigma = Sigma Lambda Sigma, and Lambda = [sqrt(diagonal), factor^T] [sqrt(diagonal), factor^T]^T.
        solved = self.covariance_times(jacobian)
        return jnp.concatenate([solved * jnp.sqrt(self.diagonal), solved @ self.factor.T], axis=-1)

    def covariance_times(self, vector: Array) -> Array:
        """Sigma x for each x of (..., P)."""
        narrow, root = self._inner()
        inner = vector @ narrow.T
        flat = cho_solve((root, True), inner.reshape(-1, inner.shape[-1]).T).T
        return vector / self.diagonal - flat.reshape(inner.shape) @ narrow

    def natural_step(
        self,
        derivatives: ExpectedDerivatives,
        step: Array | float,
        parameterization: str,
        prior: LowRankGaussian | None = None,
        projection: str | None = None,
    ) -> LowRankGaussian:
        """The natural step of :class:`~.full.Family` for Lambda = diag(d) + W^T W and H = F^T F:

            d' = (1 - t) d + t d_0,     W'^T W' = (1 - t) W^T W + t (W_0^T W_0 + F^T F),
            mu' = mu + t Lambda'^-1 (Lambda_0 (mu_0 - mu) + g),

        of which :func:`projected` keeps R directions. From the prior itself (BONG, LO-FI): d' = d, and the rows of W'
        are those of W and sqrt(t) F. H must be positive semi-definite, in the form of a factor alone, and
        ``parameterization`` is "natural".
        """
        added = jnp.sqrt(step) * derivatives.factor
        if prior is None:
            rows, diagonal, gradient = [self.factor, added], self.diagonal, derivatives.gradient
        else:
            rows = [jnp.sqrt(1 - step) * self.factor, jnp.sqrt(step) * prior.factor, added]
            diagonal = (1 - step) * self.diagonal + step * prior.diagonal
            gradient = derivatives.gradient + prior._precision_times(prior.mean - self.mean)
        if projection != "first":
            steps = EXCLUSIVE_STEPS if projection == "exclusive" else 0
            return projected(self.mean, step * gradient, diagonal, rows, len(self.factor), steps)
        after = projected(self.mean, jnp.zeros_like(self.mean), diagonal, rows, len(self.factor))
        return shifted(after, step * after.covariance_times(gradient))

    def with_random_factor(self, rng_key: Array, share: float) -> LowRankGaussian:
        """The same diagonal of the precision, this share of it by a random factor: at no factor at all, plain gradients
        in the factor vanish."""
        rows = jax.random.normal(rng_key, self.factor.shape, self.mean.dtype)
        rows = rows * jnp.sqrt(share * self.diagonal / column_sums(rows**2))
        return replace(self, diagonal=(1 - share) * self.diagonal, factor=rows)

    def coordinates(self, parameterization: str) -> tuple[Array, Array, Array]:
        return self.mean, self.diagonal, self.factor

    @classmethod
    def from_coordinates(cls, coordinates: tuple[Array, Array, Array], parameterization: str) -> LowRankGaussian:
        return cls(*coordinates)

    def expected_quadratic(self, derivatives: ExpectedDerivatives) -> Array:
        return self._variance_along(derivatives.factor, *self._inner())

    def kl_divergence(self, other: LowRankGaussian) -> Array:
        shift = self.mean - other.mean
        narrow, root = self._inner()
        within = cho_solve((root, True), (narrow * other.diagonal) @ narrow.T)
        trace = jnp.sum(other.diagonal / self.diagonal) - jnp.trace(within)
        trace = trace + self._variance_along(other.factor, narrow, root)
        length = shift @ other._precision_times(shift)
        return 0.5 * (trace + length - len(shift) + self._log_det_precision(root) - other._log_det_precision())

    def predict(self, transition: Transition) -> LowRankGaussian:
        """Exact where matrix and noise are diagonal; else projected, by way of (P, P) matrices."""
        mean, rank = transition.mean(self.mean), len(self.factor)
        if transition.matrix.ndim == 2 or transition.noise_root.ndim == 2:
            root = transition.apply(self.as_full().root)
            noise = transition.noise_root
            noise = jnp.diag(noise**2) if noise.ndim == 1 else noise @ noise.T
            return leading_part(mean, inverse(root @ root.T + noise), rank)
        scale, noise = jnp.broadcast_to(transition.matrix, mean.shape), transition.noise_variance
        variance = scale**2 / self.diagonal + noise
        inner = jnp.eye(rank, dtype=mean.dtype) + (self.factor * (noise / (self.diagonal * variance))) @ self.factor.T
        factor = solve_lower(jnp.linalg.cholesky(inner), self.factor * (scale / (self.diagonal * variance)))
        return LowRankGaussian(mean, 1 / variance, factor)

    def with_information(self, indices: Array | np.ndarray, information: Array, precision: Array) -> LowRankGaussian:
        """As :meth:`~.full.Family.with_information`. Of a small rank, negative directions are part of the diagonal."""
        zeros, rank = jnp.zeros_like(self.mean), len(self.factor)
        mean = self.mean + self.covariance_times(zeros.at[indices].set(information))
        if self._is_dense:
            return leading_part(mean, self._precision().at[jnp.asarray(indices)[:, None], indices].add(precision), rank)
        own = jnp.diagonal(precision)
        values, vectors = jnp.linalg.eigh(precision - jnp.diag(own))
        own = own + vectors**2 @ jnp.minimum(values, 0.0)
        leading = jnp.sqrt(jnp.maximum(values, 0.0))[:, None] * vectors.T
        added = jnp.zeros((len(values), len(zeros)), zeros.dtype).at[:, indices].set(leading)
        return projected(mean, zeros, self.diagonal.at[indices].add(own), [self.factor, added], rank)

    def joined(self, parts: list[LowRankGaussian]) -> LowRankGaussian:
        """This prior times the ratio of each part to it, projected to the family.

        Of a small rank, a prior's factor is random (:meth:`with_random_factor`) or zero: its diagonal alone is divided
        out.
        """
        linear = self._precision_times(self.mean)
        linear = linear + sum(q._precision_times(q.mean) - self._precision_times(self.mean) for q in parts)
        if self._is_dense:
            own = self._precision()
            precision = own + sum(q._precision() - own for q in parts)
            return leading_part(jnp.linalg.solve(precision, linear), precision, len(self.factor))
        prior = self.diagonal + column_sums(self.factor**2)
        diagonal = prior + sum(q.diagonal - prior for q in parts)
        return projected(jnp.zeros_like(linear), linear, diagonal, [q.factor for q in parts], len(self.factor))

    @property
    def _is_dense(self) -> bool:
        """Whether the rank is that of any matrix: the factor takes as much memory as the precision."""
        return len(self.factor) >= len(self.mean) - 1

    def _precision(self) -> Array:
        return jnp.diag(self.diagonal) + self.factor.T @ self.factor

    def _precision_times(self, vector: Array) -> Array:
        return self.diagonal * vector + (self.factor @ vector) @ self.factor

    def _inner(self) -> tuple[Array, Array]:
        """W D^-1 (R, P), and the Cholesky factor of I + W D^-1 W^T (R, R), for the factor W and the diagonal D.

        To be computed once: each pass over (R, P) costs, and differentiation makes two more.
        """
        narrow = scaled_columns(self.factor, 1 / self.diagonal)
        identity = jnp.eye(len(self.factor), dtype=self.factor.dtype)
        return narrow, jnp.linalg.cholesky(identity + narrow @ self.factor.T)

    def _variance_along(self, rows: Array, narrow: Array, root: Array) -> Array:
        """The sum of x Sigma x^T over the rows x of (N, P).

        :param narrow: and ``root``: from :meth:`_inner`.
        """
        inner = narrow @ rows.T
        return column_sums(rows**2) @ (1 / self.diagonal) - jnp.sum(inner * cho_solve((root, True), inner))

    def _narrowing(self) -> Array:
        """N (R, P) with Sigma = D^-1 - N^T N."""
        narrow, root = self._inner()
        return solve_lower(root, narrow)

    def _log_det_precision(self, root: Array | None = None) -> Array:
        """:param root: the second result of :meth:`_inner`; None: it is computed."""
        root = self._inner()[1] if root is None else root
        return jnp.sum(jnp.log(self.diagonal)) + 2 * jnp.sum(jnp.log(jnp.diagonal(root)))


def projected(
    mean: Array, information: Array, diagonal: Array, rows: list[Array], rank: int, num_steps: int = 0
) -> LowRankGaussian:
    """N(mean + Lambda^-1 information, Lambda^-1), projected to the family.

    Lambda is diag(diagonal) plus the sum of rows_i^T rows_i. Of the sum, ``rank`` leading directions are kept, and the
    diagonal of the rest. The rows (K_i, P) are read twice: once for all products, and once for all linear combinations.
    Of more rows than parameters, (P, P) rows with the same sum are taken instead: the cost is K P min(K, P).

    :param information: (P,). :param num_steps: of :func:`nearer`, which follow.
    """
    if sum(map(len, rows)) > len(mean):
        rows = [jnp.linalg.qr(jnp.concatenate(rows), mode="r")]

    def products(information, diagonal, *rows):
        wide = jnp.concatenate(rows)
        narrow = wide / diagonal
        return narrow @ wide.T, narrow @ information, wide @ wide.T

    inner, projection, gram = sums_over_columns(products, information, diagonal, *rows)
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    weights = cho_solve((jnp.linalg.cholesky(identity + inner), True), projection)
    leading = jnp.linalg.eigh(gram)[1][:, len(gram) - rank :].T
    ends = np.cumsum([len(r) for r in rows])[:-1]
    parts = jnp.split(leading, ends, axis=1)
    kept = sum((part @ r for part, r in zip(parts[1:], rows[1:])), start=parts[0] @ rows[0])
    mean = mean + (information - sum(part @ r for part, r in zip(jnp.split(weights, ends), rows))) / diagonal
    dropped = sum(column_sums(r**2) for r in rows) - column_sums(kept**2)
    q = LowRankGaussian(mean, diagonal + jnp.maximum(dropped, 0.0), kept)
    if num_steps:
        q = lax.fori_loop(0, num_steps, lambda _, q: nearer(q, diagonal, rows), q)
    # Finite squares of the rows are part of the diagonal, so the factor needs no test of its own.
    fine = jnp.all(jnp.isfinite(q.diagonal) & (q.diagonal > 0))
    return replace(q, mean=jnp.where(fine, q.mean, jnp.nan))


def nearer(q: LowRankGaussian, diagonal: Array, rows: list[Array]) -> LowRankGaussian:
    """q with a factor and a diagonal for which KL(q || N(mean, S^-1)) is smaller.

    S is diag(diagonal) plus the sum of rows_i^T rows_i. The divergence is, with precisions in the place of covariances,
    minus the log-likelihood of factor analysis: S is the covariance of data x, and x given R standard normal factors z
    is N(W^T z, diag(psi)). This is a step of its EM algorithm, with the factors' covariance among its parameters
    (PX-EM). In suitable units z given x is N(N x, I), with the N of :meth:`LowRankGaussian._narrowing`. So, over x with
    the covariance S, z has the covariance G = I + N S N^T, and its covariance with x is N S. The M step regresses x on
    z, in units in which G is the identity:

        W' = L^-1 N S, with L L^T = G,        psi' = diag(S) - diag(W'^T W').

    S is not formed: the cost is P R (R + K) for K rows. The fixed points are the stationary points of the divergence.
    psi' is computed as the variance of the residual x - W'^T L^-1 z, a sum of squares: in the difference what is small
    beside a large factor is lost.
    """

    def products(psi, factor, diagonal, *rows):
        narrow = factor / psi
        return narrow @ factor.T, (narrow * diagonal) @ narrow.T, tuple(narrow @ r.T for r in rows)

    inner, own, along = sums_over_columns(products, q.diagonal, q.factor, diagonal, *rows)
    identity = jnp.eye(len(inner), dtype=inner.dtype)
    inner = jnp.linalg.cholesky(identity + inner)  # the units: N = inner^-1 W diag(psi)^-1
    along = [solve_lower(inner, a) for a in along]
    own = identity + solve_lower(inner, solve_lower(inner, own).T)
    root = jnp.linalg.cholesky(own + sum(a @ a.T for a in along))
    own, along = solve_lower(root, jnp.linalg.cholesky(own)), [solve_lower(root, a) for a in along]
    narrow = solve_lower(root, solve_lower(inner, identity)) @ (q.factor / q.diagonal)
    factor = narrow * diagonal + sum(a @ r for a, r in zip(along, rows))
    rest = diagonal * (1 - 2 * column_sums(factor * narrow)) + column_sums((own.T @ factor) ** 2)
    rest = rest + sum(column_sums((r - a.T @ factor) ** 2) for a, r in zip(along, rows))
    return replace(q, diagonal=rest, factor=factor)


def leading_part(mean: Array, precision: Array, rank: int) -> LowRankGaussian:
    """N(mean, precision^-1) projected to the family.

    The factor has the ``rank`` leading eigenvectors, less the smallest eigenvalue; the diagonal is that of the rest.
    """
    values, vectors = jnp.linalg.eigh(precision)
    start = len(values) - rank
    factor = jnp.sqrt(values[start:] - values[0])[:, None] * vectors[:, start:].T
    return LowRankGaussian(mean, jnp.diagonal(precision) - column_sums(factor**2), factor)
