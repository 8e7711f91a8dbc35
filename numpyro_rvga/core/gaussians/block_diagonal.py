"""Gaussians with independent blocks of entries."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import block_diag

from ..matrices.linalg import cholesky
from .full import FullGaussian
from .steps import ExpectedDerivatives, Transition, joined_in_natural_parameters, nan_if_invalid, shifted


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BlockDiagonalGaussian:
    """The product of N(mean_b, root_b root_b^T) over blocks b of consecutive entries.

    :ivar mean: (P,). :ivar roots: (P_b, P_b) each, any square roots of the blocks' covariances.
    """

    mean: Array
    roots: tuple[Array, ...]
    projections: ClassVar[tuple[str, ...]] = ("exclusive", "inclusive")

    @classmethod
    def of(cls, blocks: list[FullGaussian]) -> BlockDiagonalGaussian:
        return cls(jnp.concatenate([block.mean for block in blocks]), tuple(block.root for block in blocks))

    @property
    def blocks(self) -> list[FullGaussian]:
        return [FullGaussian(mean, root) for mean, root in zip(self._split(self.mean), self.roots)]

    def _split(self, array: Array) -> list[Array]:
        """Along the last axis."""
        return jnp.split(array, np.cumsum([len(root) for root in self.roots])[:-1], axis=-1)

    def _derivatives(self, derivatives: ExpectedDerivatives) -> list[ExpectedDerivatives]:
        """g and H in each block."""
        count, split = len(self.roots), self._split
        diagonals = [None] * count if derivatives.diagonal is None else split(derivatives.diagonal)
        parts = zip(split(derivatives.gradient), split(derivatives.factor), diagonals)
        return [ExpectedDerivatives(g, factor, derivatives.weight, diagonal) for g, factor, diagonal in parts]

    @property
    def noise_size(self) -> int:
        return len(self.mean)

    def is_valid(self) -> Array:
        return jnp.all(jnp.stack([block.is_valid() for block in self.blocks])) & jnp.all(self.deviation() > 0)

    def transform(self, standard: Array) -> Array:
        parts = [block.transform(z) for block, z in zip(self.blocks, self._split(standard))]
        return jnp.concatenate(parts, axis=-1)

    def covariance(self) -> Array:
        return block_diag(*[block.covariance() for block in self.blocks])

    def scale_tril(self) -> Array:
        return block_diag(*[block.scale_tril() for block in self.blocks])

    def deviation(self) -> Array:
        return jnp.concatenate([block.deviation() for block in self.blocks])

    def as_full(self) -> FullGaussian:
        return FullGaussian(self.mean, block_diag(*self.roots))

    def log_prob(self, theta: Array) -> Array:
        return sum((b.log_prob(part) for b, part in zip(self.blocks, self._split(theta))), jnp.zeros(()))

    def predictor_root(self, jacobian: Array) -> Array:
        return jnp.concatenate([part @ root for part, root in zip(self._split(jacobian), self.roots)], axis=-1)

    def covariance_times(self, vector: Array) -> Array:
        return jnp.concatenate([b.covariance_times(part) for b, part in zip(self.blocks, self._split(vector))])

    def natural_step(
        self,
        derivatives: ExpectedDerivatives,
        step: Array | float,
        parameterization: str,
        prior: BlockDiagonalGaussian | None = None,
        projection: str | None = None,
    ) -> BlockDiagonalGaussian:
        """The natural step. With a projection, that of length one from the prior itself, see :meth:`projected_step`."""
        if projection is not None:
            return self.projected_step(derivatives, projection)
        priors = [None] * len(self.roots) if prior is None else prior.blocks
        parts = zip(self.blocks, self._derivatives(derivatives), priors)
        moved = [block.natural_step(d, step, parameterization, before) for block, d, before in parts]
        return nan_if_invalid(self.of(moved))

    def projected_step(self, derivatives: ExpectedDerivatives, projection: str) -> BlockDiagonalGaussian:
        """The mean of the full update, with the blocks of its precision or covariance.

        S = R + sum_b H_b Sigma_b H_b^T couples the blocks (diagonal EKF paper, equation 10). ``"exclusive"``: the
        blocks of the precision, the minimizer of KL(q || full) (13, 14). ``"inclusive"``: of the covariance, the
        minimizer of KL(full || q) (11, 12).
        """
        whitened = self.predictor_root(jnp.concatenate([derivatives.factor, derivatives.gradient[None]]))
        rows, slope = whitened[:-1], whitened[-1]
        identity = jnp.eye(len(rows), dtype=rows.dtype)
        weight = identity if derivatives.weight is None else derivatives.weight
        gain = jnp.linalg.solve(identity + weight @ (rows @ rows.T), weight)
        move = slope - (gain @ (rows @ slope)) @ rows
        change = (weight, True) if projection == "exclusive" else (gain, False)
        parts = zip(self.blocks, self._split(rows), self._split(move))
        after = self.of([block.whitened_step(*part, *change) for block, *part in parts])
        return replace(after, mean=jnp.where(jnp.all(jnp.isfinite(after.mean)), after.mean, jnp.nan))

    def coordinates(self, parameterization: str) -> tuple[tuple[Array, Array], ...]:
        return tuple(block.coordinates(parameterization) for block in self.blocks)

    @classmethod
    def from_coordinates(cls, coordinates: Any, parameterization: str) -> BlockDiagonalGaussian:
        return cls.of([FullGaussian.from_coordinates(block, parameterization) for block in coordinates])

    def expected_quadratic(self, derivatives: ExpectedDerivatives) -> Array:
        parts = zip(self.blocks, self._derivatives(derivatives))
        return sum((block.expected_quadratic(part) for block, part in parts), jnp.zeros(()))

    def kl_divergence(self, other: BlockDiagonalGaussian) -> Array:
        return sum((a.kl_divergence(b) for a, b in zip(self.blocks, other.blocks)), jnp.zeros(()))

    def predict(self, transition: Transition) -> BlockDiagonalGaussian:
        """Exact where the matrix is diagonal and the noise is independent between blocks; else the blocks of the
        covariance."""
        sizes = [len(root) for root in self.roots]
        if transition.matrix.ndim == 2:
            return self.blocks_of(self.as_full().predict(transition), sizes)
        noise = jnp.split(transition.noise_root, np.cumsum(sizes)[:-1])
        parts = zip(self.blocks, self._split(transition.matrix), self._split(transition.offset), noise)
        return self.of([block.predict(Transition(*part)) for block, *part in parts])

    @classmethod
    def blocks_of(cls, q: FullGaussian, sizes: list[int] | tuple[int, ...]) -> BlockDiagonalGaussian:
        """The marginals of q over blocks of these sizes."""
        ends = np.cumsum(sizes)[:-1]
        covariance = q.covariance()
        rows = jnp.split(covariance, ends)
        roots = tuple(cholesky(jnp.split(part, ends, axis=1)[i]) for i, part in enumerate(rows))
        return cls(q.mean, roots)

    def with_information(
        self, indices: Array | np.ndarray, information: Array, precision: Array
    ) -> BlockDiagonalGaussian:
        """As :meth:`~.full.Family.with_information`."""
        shift = self.covariance_times(jnp.zeros_like(self.mean).at[indices].set(information))
        blocks, start = [], 0
        for block in self.blocks:
            size, zeros = len(block.mean), jnp.zeros_like(block.mean)
            place = jnp.asarray(indices) - start
            place = jnp.where((place >= 0) & (place < size), place, size)  # others are dropped
            added = jnp.zeros((size, size), zeros.dtype).at[place[:, None], place].set(precision, mode="drop")
            held = ExpectedDerivatives(zeros, jnp.eye(size, dtype=zeros.dtype), added)
            blocks.append(block.natural_step(held, 1.0, "natural"))
            start += size
        return shifted(nan_if_invalid(self.of(blocks)), shift)

    joined = joined_in_natural_parameters
