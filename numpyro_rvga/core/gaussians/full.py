"""What a family of Gaussians over theta in R^P can do; and the one with a full covariance, kept as a square root."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..matrices.linalg import cholesky, few_times, inverse, lower_from_root, product, row_space, solve_lower
from .steps import ExpectedDerivatives, Transition, log_normal, nan_if_invalid, shifted


class Family(Protocol):
    """A member q = N(mu, Sigma) of a family: a pytree of arrays.

    A likelihood, a random key or a learning schedule is not its business. A step that leaves no Gaussian returns a mean
    of NaN.

    :cvar projections: what a natural step may be projected by, besides None.
    """

    projections: ClassVar[tuple[str, ...]]

    @property
    def mean(self) -> Array:
        """mu, (P,)."""

    @property
    def noise_size(self) -> int:
        """K, the length of the standard normal vectors that :meth:`transform` takes."""

    def is_valid(self) -> Array:
        """Whether the arrays are those of a Gaussian: a scalar bool."""

    def transform(self, standard: Array) -> Array:
        """Draws of theta (..., P) from draws of the standard normal (..., K)."""

    def covariance(self) -> Array:
        """Sigma, (P, P)."""

    def scale_tril(self) -> Array:
        """The lower Cholesky factor of Sigma, (P, P)."""

    def deviation(self) -> Array:
        """Standard deviations of the marginals, (P,)."""

    def as_full(self) -> FullGaussian:
        """The same Gaussian, with a (P, P) root of its covariance."""

    def log_prob(self, theta: Array) -> Array:
        """log q at theta (..., P)."""

    def predictor_root(self, jacobian: Array) -> Array:
        """Z (..., C, K) with Z Z^T = J Sigma J^T, for Jacobians J (..., C, P)."""

    def covariance_times(self, vector: Array) -> Array:
        """Sigma vector, (P,)."""

    def natural_step(
        self,
        derivatives: ExpectedDerivatives,
        step: Array | float,
        parameterization: str,
        prior: Self | None = None,
        projection: str | None = None,
    ) -> Self:
        """A step of length t along the natural gradient of E_q[log p(y | theta)] - KL(q || prior).

        With H = -E_q[hess log p(y | theta)], g = E_q[grad log p(y | theta)] and the prior N(mu_0, Lambda_0^-1), in the
        natural parameters (``parameterization="natural"``; BONG paper, E.1.3):

            Lambda' = (1 - t) Lambda + t (Lambda_0 + H),     mu' = mu + t Sigma' (Lambda_0 (mu_0 - mu) + g),

        and in mean and covariance (``parameterization="moment"``; E.2.3):

            Sigma' = Sigma - t Sigma (Lambda_0 + H - Lambda) Sigma,     mu' = mu + t Sigma (Lambda_0 (mu_0 - mu) + g).

        :param derivatives: g and H.
        :param prior: None if q is the prior itself, whose own terms cancel; with t = 1 that is BONG.
        :param projection: one of :attr:`projections`, or None.
        """

    def coordinates(self, parameterization: str) -> tuple[Any, ...]:
        """The parameters in which plain gradients are taken."""

    @classmethod
    def from_coordinates(cls, coordinates: Any, parameterization: str) -> Self:
        """The inverse of :meth:`coordinates`; NaN where these are of no Gaussian."""

    def expected_quadratic(self, derivatives: ExpectedDerivatives) -> Array:
        """trace(H Sigma)."""

    def kl_divergence(self, other: Self) -> Array:
        """KL(self || other)."""

    def with_information(self, indices: Array | np.ndarray, information: Array, precision: Array) -> Self:
        """Mean moved by Sigma ``information``, then ``precision`` added to that of q; both at some entries. The family
        keeps what it can hold of the sum, which has the exact diagonal.

        :param indices: (K,), the entries. :param information: (K,). :param precision: (K, K), symmetric, and not
            necessarily positive: the sum is.
        """

    def predict(self, transition: Transition) -> Self:
        """The distribution of A theta + b + noise."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FullGaussian:
    """N(mean, root root^T).

    :ivar mean: (P,). :ivar root: (P, P), any square root of the covariance: it need not be triangular.
    """

    mean: Array
    root: Array
    projections: ClassVar[tuple[str, ...]] = ()

    @property
    def noise_size(self) -> int:
        return self.root.shape[1]

    def is_valid(self) -> Array:
        return jnp.all(jnp.isfinite(self.mean)) & jnp.all(jnp.isfinite(self.root))

    def transform(self, standard: Array) -> Array:
        return self.mean + jnp.matmul(standard, self.root.T, precision="highest")

    def covariance(self) -> Array:
        return jnp.matmul(self.root, self.root.T, precision="highest")

    def scale_tril(self) -> Array:
        return lower_from_root(self.root)

    def deviation(self) -> Array:
        return jnp.linalg.norm(self.root, axis=1)

    def as_full(self) -> FullGaussian:
        return self

    def log_prob(self, theta: Array) -> Array:
        lower = self.scale_tril()
        flat = (theta - self.mean).reshape(math.prod(theta.shape[:-1]), len(self.mean))
        lengths = jnp.sum(solve_lower(lower, flat.T) ** 2, axis=0).reshape(theta.shape[:-1])
        return log_normal(lengths, 2 * jnp.sum(jnp.log(jnp.diagonal(lower))), len(self.mean))

    def predictor_root(self, jacobian: Array) -> Array:
        return jacobian @ self.root

    def covariance_times(self, vector: Array) -> Array:
        return self.root @ (self.root.T @ vector)

    def natural_step(
        self,
        derivatives: ExpectedDerivatives,
        step: Array | float,
        parameterization: str,
        prior: FullGaussian | None = None,
        projection: str | None = None,
    ) -> FullGaussian:
        """The natural step of :class:`Family` in the coordinates of the root S, Sigma = S S^T:

            Lambda' = S^-T (I + t (S^T H S + S^T Lambda_0 S - I)) S^-1,
            mu' = mu + t Sigma' (Lambda_0 (mu_0 - mu) + g).

        From the prior itself, with factors of K < P rows, the cost is O(K P^2).
        """
        natural = parameterization == "natural"
        if prior is None and derivatives.diagonal is None and len(derivatives.factor) < len(self.mean):
            return self._narrow_step(derivatives, step, natural)
        ratio_excess, gradient = 0.0, derivatives.gradient
        if prior is not None:
            ratio = jnp.linalg.solve(prior.root, self.root)
            ratio_excess = ratio.T @ ratio - jnp.eye(len(self.mean), dtype=ratio.dtype)
            gradient = gradient + jnp.linalg.solve(prior.root.T, jnp.linalg.solve(prior.root, prior.mean - self.mean))
        root = self.root @ _change(derivatives.gram(self.root) + ratio_excess, step, natural)
        gain = root if natural else self.root
        return nan_if_invalid(FullGaussian(self.mean + step * gain @ (gain.T @ gradient), root))

    def _narrow_step(self, derivatives: ExpectedDerivatives, step: Array | float, natural: bool) -> FullGaussian:
        """The step from the prior itself, in the row space of ``factor @ root``: two reads of the root, one write."""
        rows = few_times(jnp.concatenate([derivatives.factor, derivatives.gradient[None]]), self.root)
        reduced, basis = row_space(rows[:-1])
        excess = _weighted(reduced, derivatives.weight, step, natural)
        move = rows[-1]
        if natural:  # the new root, transposed, times the gradient; then the new root times that
            move = move + ((basis @ move) @ excess) @ basis
            move = move + (excess @ (basis @ move)) @ basis
        return self._moved(step * move, excess, basis)

    def whitened_step(self, rows: Array, move: Array, weight: Array, natural: bool) -> FullGaussian:
        """N(mean + root move, (Lambda + H)^-1) if ``natural``, or N(mean + root move, Sigma - Sigma H Sigma).

        :param rows: factor @ root, for H = factor^T weight factor.
        """
        narrow = len(rows) < len(self.mean)
        reduced, basis = row_space(rows) if narrow else (rows, jnp.eye(len(self.mean), dtype=rows.dtype))
        return self._moved(move, _weighted(reduced, weight, 1.0, natural), basis)

    def _moved(self, move: Array, excess: Array, basis: Array) -> FullGaussian:
        """N(mean + root move, .) of the root ``root @ (I + basis^T excess basis)``, in one read and one write."""
        products = few_times(jnp.concatenate([basis, move[None]]), self.root.T)
        columns, shift = product(products[:-1].T, excess), products[-1]
        # An upper bound of all entries: a pass over the root would cost as much as the step.
        fine = jnp.isfinite(jnp.sum(jnp.max(jnp.abs(columns), axis=0) * jnp.max(jnp.abs(basis), axis=1)))
        return FullGaussian(jnp.where(fine, self.mean + shift, jnp.nan), self.root + product(columns, basis))

    def coordinates(self, parameterization: str) -> tuple[Array, Array]:
        covariance = self.root @ self.root.T
        if parameterization == "moment":
            return self.mean, covariance
        precision = inverse(covariance)
        return precision @ self.mean, -0.5 * precision

    @classmethod
    def from_coordinates(cls, coordinates: tuple[Array, Array], parameterization: str) -> FullGaussian:
        """NaN where the coordinates are those of no Gaussian."""
        first, second = coordinates
        if parameterization == "moment":
            return cls(first, cholesky(0.5 * (second + second.T)))
        factor = cholesky(-(second + second.T))
        root = solve_lower(factor, jnp.eye(len(first), dtype=first.dtype)).T
        return cls(root @ (root.T @ first), root)

    def expected_quadratic(self, derivatives: ExpectedDerivatives) -> Array:
        rows = derivatives.factor @ self.root
        trace = jnp.sum(rows * (rows if derivatives.weight is None else derivatives.weight @ rows))
        return trace if derivatives.diagonal is None else trace + derivatives.diagonal @ jnp.sum(self.root**2, axis=1)

    def kl_divergence(self, other: FullGaussian) -> Array:
        ratio = jnp.linalg.solve(other.root, self.root)
        shift = jnp.linalg.solve(other.root, self.mean - other.mean)
        trace = jnp.sum(ratio * ratio) + shift @ shift - len(shift)
        return 0.5 * trace - jnp.linalg.slogdet(ratio)[1]

    def with_information(self, indices: Array | np.ndarray, information: Array, precision: Array) -> FullGaussian:
        """As :meth:`Family.with_information`."""
        size, count = len(self.mean), len(indices)
        selected = jnp.zeros((count, size), self.mean.dtype).at[jnp.arange(count), indices].set(1.0)
        held = ExpectedDerivatives(jnp.zeros_like(self.mean), selected, precision)
        return shifted(self.natural_step(held, 1.0, "natural"), self.covariance_times(information @ selected))

    def predict(self, transition: Transition) -> FullGaussian:
        noise = transition.noise_root
        columns = [transition.apply(self.root), jnp.diag(noise) if noise.ndim == 1 else noise]
        return FullGaussian(transition.mean(self.mean), lower_from_root(jnp.concatenate(columns, axis=1)))


def _weighted(reduced: Array, weight: Array | None, step: Array | float, natural: bool) -> Array:
    """C - I, with C as of :func:`_change` for the excess ``reduced^T weight reduced``."""
    weighted = reduced if weight is None else product(weight, reduced)
    change = _change(product(reduced.T, weighted), step, natural)
    return change - jnp.eye(len(change), dtype=change.dtype)


def _change(excess: Array, step: Array | float, natural: bool) -> Array:
    """C (P, P) such that ``root @ C`` is the root after the step.

    In the coordinates of the root q is standard normal. There ``step * excess`` is added to the precision (natural) or
    subtracted from the covariance (moment).
    """
    identity = jnp.eye(len(excess), dtype=excess.dtype)
    if natural:
        return solve_lower(cholesky(identity + step * excess), identity).T
    return cholesky(identity - step * excess)
