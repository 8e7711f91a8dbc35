"""The Gaussian families, and how each takes a step: full, diagonal, and diagonal plus low-rank precision.

A family knows neither likelihoods nor keys nor learning schedules. It can be sampled, projected on predictors, moved by
dynamics, and take two kinds of steps towards a maximum of E_q[log lik] - KL(q || prior):

- ``natural_step``, along the natural gradient, in the natural parameters ("natural") or in mean and covariance
  ("moment"). With H = -E_q[hess log lik], g = E_q[grad log lik] and the prior's Lambda_0 and mu_0, natural:

      Lambda' = (1 - t) Lambda + t (Lambda_0 + H),          mu' = mu + t Sigma' (Lambda_0 (mu_0 - mu) + g),

  moment:

      Sigma' = Sigma - t Sigma (Lambda_0 + H - Lambda) Sigma,   mu' = mu + t Sigma (Lambda_0 (mu_0 - mu) + g)

  (BONG paper, E.1.3 and E.2.3). At the prior itself its own terms cancel: with t = 1 that is BONG.
- ``gradient_step``, along the plain gradient in the same parameters, or in (mean, diagonal, factor).

A step that leaves no Gaussian leaves a mean of NaN.

No (P, P) array is ever made by the last two families, save for dynamics that are given as one.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .linalg import (
    cholesky,
    column_sums,
    lower_from_root,
    positive_part,
    row_space,
    solve_lower,
    sums_over_columns,
)

CHARTS = ("natural", "moment")
FARTHEST = 1e4  # standard deviations that plain gradients may move a mean by: beyond, they diverge


class Site(NamedTuple):
    """What a block of rows says at q: g and H = factor^T weight factor + diag(diagonal).

    :ivar gradient: g, (P,). :ivar factor: (K, P). :ivar weight: (K, K), symmetric; None: the identity.
    :ivar diagonal: (P,), or None.
    """

    gradient: Array
    factor: Array
    weight: Array | None = None
    diagonal: Array | None = None

    @property
    def may_be_indefinite(self) -> bool:
        return self.weight is not None or self.diagonal is not None

    def clipped(self) -> Site:
        """With H's negative part left out."""
        weight = None if self.weight is None else positive_part(self.weight)
        diagonal = None if self.diagonal is None else jnp.maximum(self.diagonal, 0.0)
        return self._replace(weight=weight, diagonal=diagonal)

    def curvature_diagonal(self) -> Array:
        """The diagonal of H, (P,)."""
        weighted = self.factor if self.weight is None else self.weight @ self.factor
        found = column_sums(self.factor * weighted)
        return found if self.diagonal is None else found + self.diagonal

    def gram(self, spread: Array) -> Array:
        """spread^T H spread for spread (P, N)."""
        rows = self.factor @ spread
        found = rows.T @ (rows if self.weight is None else self.weight @ rows)
        return found if self.diagonal is None else found + spread.T @ (self.diagonal[:, None] * spread)


class Transition(NamedTuple):
    """theta' = matrix theta + offset + noise.

    :ivar matrix: (P, P), or its diagonal (P,). :ivar offset: (P,).
    :ivar noise_root: R (P, K), for noise of covariance R R^T, or the standard deviations (P,) of independent noise.
    """

    matrix: Array
    offset: Array
    noise_root: Array

    def mean(self, mean: Array) -> Array:
        return self.applied(mean) + self.offset

    def applied(self, columns: Array) -> Array:
        """matrix columns, (P,) or (P, N)."""
        if self.matrix.ndim == 2:
            return self.matrix @ columns
        return self.matrix * columns if columns.ndim == 1 else self.matrix[:, None] * columns

    @property
    def noise_variance(self) -> Array:
        return self.noise_root**2 if self.noise_root.ndim == 1 else jnp.sum(self.noise_root**2, axis=1)


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
        return _log_normal(lengths, 2 * jnp.sum(jnp.log(jnp.diagonal(lower))), len(self.mean))

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
        return _refused_if_invalid(FullGaussian(self.mean + step * gain @ (gain.T @ pull), root))

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
        precision = _inverse(covariance)
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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DiagonalGaussian:
    """N(mean, diag(variance)): (P,), (P,)."""

    mean: Array
    variance: Array

    @property
    def noise_size(self) -> int:
        return len(self.mean)

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
        return _log_normal(lengths, jnp.sum(jnp.log(self.variance)), len(self.mean))

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
        return _refused_if_invalid(DiagonalGaussian(self.mean + step * gain * pull, variance))

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
        return _refused_if_invalid(DiagonalGaussian(mean, variance))

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
        return _log_normal(lengths, -self._log_det_precision(), len(self.mean))

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
        return _low_rank(self.mean, step * pull, diagonal, rows, len(self.factor))

    def coordinates(self, chart: str) -> tuple[Array, Array, Array]:
        return self.mean, self.diagonal, self.factor

    @classmethod
    def from_coordinates(cls, coordinates: tuple[Array, Array, Array], chart: str) -> LowRankGaussian:
        return cls(*coordinates)

    def mean_curvature(self, site: Site) -> Array:
        return jnp.sum(self._solve(site.factor) * site.factor)

    def divergence(self, other: LowRankGaussian) -> Array:
        shift = self.mean - other.mean
        narrowing = self._narrowing()
        trace = jnp.sum(other.diagonal / self.diagonal) - jnp.sum(narrowing**2 * other.diagonal)
        trace = trace + jnp.sum(self._solve(other.factor) * other.factor)
        length = shift @ other._times_precision(shift)
        return 0.5 * (trace + length - len(shift) + self._log_det_precision() - other._log_det_precision())

    def moved(self, transition: Transition) -> LowRankGaussian:
        """Exact where matrix and noise are diagonal; else projected, by way of (P, P) matrices."""
        mean, rank = transition.mean(self.mean), len(self.factor)
        if transition.matrix.ndim == 2 or transition.noise_root.ndim == 2:
            spread = transition.applied(self.as_full().root)
            noise = transition.noise_root
            noise = jnp.diag(noise**2) if noise.ndim == 1 else noise @ noise.T
            return _leading_part(mean, _inverse(spread @ spread.T + noise), rank)
        scale, noise = jnp.broadcast_to(transition.matrix, mean.shape), transition.noise_variance
        variance = scale**2 / self.diagonal + noise
        inner = jnp.eye(rank, dtype=mean.dtype) + (self.factor * (noise / (self.diagonal * variance))) @ self.factor.T
        factor = solve_lower(jnp.linalg.cholesky(inner), self.factor * (scale / (self.diagonal * variance)))
        return LowRankGaussian(mean, 1 / variance, factor)

    def raised(self, places: Array, pull: Array, diagonal: Array) -> LowRankGaussian:
        """The mean pulled at some places, as the covariance has it, and then ``diagonal`` added to the precision."""
        mean = self.mean + self._solve(jnp.zeros_like(self.mean).at[places].set(pull))
        return LowRankGaussian(mean, self.diagonal.at[places].add(diagonal), self.factor)

    def joined(self, parts: list[LowRankGaussian]) -> LowRankGaussian:
        """This prior, of zero factor, times the ratio of each part to it, projected back."""
        diagonal = self.diagonal + sum(q.diagonal - self.diagonal for q in parts)
        linear = self.diagonal * self.mean
        linear = linear + sum(q._times_precision(q.mean) - self.diagonal * self.mean for q in parts)
        return _low_rank(jnp.zeros_like(linear), linear, diagonal, [q.factor for q in parts], len(self.factor))

    def _times_precision(self, vector: Array) -> Array:
        return self.diagonal * vector + (self.factor @ vector) @ self.factor

    def _inner_root(self) -> Array:
        """Cholesky factor of I + W D^-1 W^T, (R, R)."""
        identity = jnp.eye(len(self.factor), dtype=self.factor.dtype)
        return jnp.linalg.cholesky(identity + (self.factor / self.diagonal) @ self.factor.T)

    def _narrowing(self) -> Array:
        """N (R, P) with Sigma = D^-1 - N^T N."""
        return solve_lower(self._inner_root(), self.factor / self.diagonal)

    def _solve(self, rows: Array) -> Array:
        """Sigma x for each x of (..., P)."""
        narrow = self.factor / self.diagonal  # also in the inner root: written once, as each pass over it costs
        inner = rows @ narrow.T
        flat = jax.scipy.linalg.cho_solve((self._inner_root(), True), inner.reshape(-1, inner.shape[-1]).T).T
        return rows / self.diagonal - flat.reshape(inner.shape) @ narrow

    def _log_det_precision(self) -> Array:
        return jnp.sum(jnp.log(self.diagonal)) + 2 * jnp.sum(jnp.log(jnp.diagonal(self._inner_root())))


Family = FullGaussian | DiagonalGaussian | LowRankGaussian
FAMILIES = {"full": FullGaussian, "diagonal": DiagonalGaussian, "low-rank": LowRankGaussian}


def converted(q: Family, family: str, rank: int) -> Family:
    """The member of a family nearest to q: precisions keep their diagonal, and ``rank`` directions of the rest."""
    if isinstance(q, FAMILIES[family]) and (family != "low-rank" or len(q.factor) == rank):
        return q
    if family == "full":
        return q.as_full()
    if isinstance(q, DiagonalGaussian):
        return LowRankGaussian(q.mean, 1 / q.variance, jnp.zeros((rank, len(q.mean)), q.mean.dtype))
    if isinstance(q, LowRankGaussian):
        if family == "low-rank":
            rows = jnp.zeros((max(rank - len(q.factor), 0), len(q.mean)), q.mean.dtype)
            return _low_rank(q.mean, jnp.zeros_like(q.mean), q.diagonal, [rows, q.factor], rank)
        return DiagonalGaussian(q.mean, 1 / (q.diagonal + column_sums(q.factor**2)))
    precision = _inverse(q.covariance())
    return (
        _leading_part(q.mean, precision, rank)
        if family == "low-rank"
        else DiagonalGaussian(q.mean, 1 / jnp.diagonal(precision))
    )


def gradient_step(q: Family, site: Site, rate: Array | float, chart: str, prior: Family | None = None) -> Family:
    """A step along the plain gradient of E_q[log lik] - KL(q || prior) in q's coordinates.

    The gradient in the mean is g and that in the covariance -H / 2 (Bonnet's and Price's theorems), so the objective
    has the gradient of a function that is linear in both.

    :param prior: None if its KL divergence is left out (BOG), or q is the prior itself.
    """

    def objective(coordinates):
        new = type(q).from_coordinates(coordinates, chart)
        value = site.gradient @ new.mean - 0.5 * new.mean_curvature(site)
        return value if prior is None else value - new.divergence(prior)

    start = q.coordinates(chart)
    slopes = jax.grad(objective)(start)
    moved = jax.tree.map(lambda x, slope: x + rate * slope, start, slopes)
    return _refused_if_invalid(type(q).from_coordinates(moved, chart))


def is_valid(q: Family) -> Array:
    """Whether q is finite and a Gaussian."""
    finite = jnp.all(jnp.isfinite(q.mean))
    if isinstance(q, FullGaussian):
        return finite & jnp.all(jnp.isfinite(q.root))
    if isinstance(q, DiagonalGaussian):
        return finite & jnp.all(jnp.isfinite(q.variance) & (q.variance > 0))
    return finite & jnp.all(jnp.isfinite(q.diagonal) & (q.diagonal > 0)) & jnp.all(jnp.isfinite(q.factor))


def _refused_if_invalid(q: Family) -> Family:
    return dataclasses.replace(q, mean=jnp.where(is_valid(q), q.mean, jnp.nan))


def is_near(q: Family, before: Family) -> Array:
    """Whether no entry of the mean has moved by more than ``FARTHEST`` standard deviations."""
    deviation = 1 / jnp.sqrt(before.diagonal) if isinstance(before, LowRankGaussian) else before.deviation()
    return jnp.all(jnp.abs(q.mean - before.mean) <= FARTHEST * deviation)


def _inverse(matrix: Array) -> Array:
    """Of a positive definite matrix."""
    inverse_root = solve_lower(cholesky(matrix), jnp.eye(len(matrix), dtype=matrix.dtype))
    return inverse_root.T @ inverse_root


def _change(excess: Array, step: Array | float, natural: bool) -> Array:
    """What a root is multiplied by. In its coordinates q is standard normal, and excess is added to the precision, or
    taken from the covariance."""
    identity = jnp.eye(len(excess), dtype=excess.dtype)
    if natural:
        return solve_lower(cholesky(identity + step * excess), identity).T
    return cholesky(identity - step * excess)


def _apply_precision(root: Array, vector: Array) -> Array:
    return jnp.linalg.solve(root.T, jnp.linalg.solve(root, vector))


def _log_normal(lengths: Array, log_det: Array, size: int) -> Array:
    return -0.5 * (lengths + log_det + size * math.log(2 * math.pi))


def _low_rank(mean: Array, pull: Array, diagonal: Array, rows: list[Array], rank: int) -> LowRankGaussian:
    """Of precision Lambda = diag(diagonal) + sum of rows^T rows, at mean + Lambda^-1 pull, the member of the family.

    Each pass over the rows (K_i, P) costs, so all products are made in one, and all combinations in another.
    """

    def products(pull, diagonal, *rows):
        wide = jnp.concatenate(rows)
        narrow = wide / diagonal
        return narrow @ wide.T, narrow @ pull, wide @ wide.T

    inner, pulled, gram = sums_over_columns(products, pull, diagonal, *rows)
    identity = jnp.eye(len(gram), dtype=gram.dtype)
    share = jax.scipy.linalg.cho_solve((jnp.linalg.cholesky(identity + inner), True), pulled)
    leading = jnp.linalg.eigh(gram)[1][:, len(gram) - rank :].T
    ends = np.cumsum([len(r) for r in rows])[:-1]
    kept = sum(part @ r for part, r in zip(jnp.split(leading, ends, axis=1), rows))
    mean = mean + (pull - sum(part @ r for part, r in zip(jnp.split(share, ends), rows))) / diagonal
    dropped = sum(column_sums(r**2) for r in rows) - column_sums(kept**2)
    diagonal = diagonal + jnp.maximum(dropped, 0.0)
    fine = jnp.all(jnp.isfinite(diagonal) & (diagonal > 0))  # which the squares of all that is kept are part of
    return LowRankGaussian(jnp.where(fine, mean, jnp.nan), diagonal, kept)


def _leading_part(mean: Array, precision: Array, rank: int) -> LowRankGaussian:
    """The leading directions of a precision matrix beyond its least eigenvalue, and the diagonal of the rest."""
    values, vectors = jnp.linalg.eigh(precision)
    start = len(values) - rank
    factor = jnp.sqrt(values[start:] - values[0])[:, None] * vectors[:, start:].T
    return LowRankGaussian(mean, jnp.diagonal(precision) - column_sums(factor**2), factor)
