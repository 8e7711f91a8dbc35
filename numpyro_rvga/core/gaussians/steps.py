"""Inputs of a Gaussian's updates: expected derivatives of a log-likelihood, and linear Gaussian dynamics."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import ArrayLike, DTypeLike

from ..matrices.linalg import column_sums, positive_part

Q = TypeVar("Q", bound=Any)  # a Gaussian of any family
PARAMETERIZATIONS = ("natural", "moment", "softplus")


class ExpectedDerivatives(NamedTuple):
    """g = E_q[grad log p(y | theta)] and H = -E_q[hess log p(y | theta)] of a block of rows.

    H = factor^T weight factor + diag(diagonal) is not formed.

    :ivar gradient: g, (P,). :ivar factor: (K, P). :ivar weight: (K, K), symmetric; None: the identity.
    :ivar diagonal: (P,), or None.
    """

    gradient: Array
    factor: Array
    weight: Array | None = None
    diagonal: Array | None = None

    @property
    def may_be_indefinite(self) -> bool:
        """Whether H may have negative eigenvalues."""
        return self.weight is not None or self.diagonal is not None

    def clipped(self) -> ExpectedDerivatives:
        """The derivatives without the negative parts of ``weight`` and ``diagonal``: H is positive semi-definite."""
        weight = None if self.weight is None else positive_part(self.weight)
        diagonal = None if self.diagonal is None else jnp.maximum(self.diagonal, 0.0)
        return self._replace(weight=weight, diagonal=diagonal)

    def curvature_diagonal(self) -> Array:
        """The diagonal of H, (P,)."""
        weighted = self.factor if self.weight is None else self.weight @ self.factor
        diagonal = column_sums(self.factor * weighted)
        return diagonal if self.diagonal is None else diagonal + self.diagonal

    def gram(self, columns: Array) -> Array:
        """A^T H A for A = ``columns`` (P, N): (N, N)."""
        rows = self.factor @ columns
        product = rows.T @ (rows if self.weight is None else self.weight @ rows)
        return product if self.diagonal is None else product + columns.T @ (self.diagonal[:, None] * columns)


class Transition(NamedTuple):
    """One step of linear Gaussian dynamics: theta' = matrix theta + offset + noise.

    :ivar matrix: (P, P), or its diagonal (P,). :ivar offset: (P,).
    :ivar noise_root: R (P, K), for noise of covariance R R^T, or the standard deviations (P,) of independent noise.
    """

    matrix: Array
    offset: Array
    noise_root: Array

    def mean(self, mean: Array) -> Array:
        return self.apply(mean) + self.offset

    def apply(self, columns: Array) -> Array:
        """matrix columns, (P,) or (P, N)."""
        if self.matrix.ndim == 2:
            return self.matrix @ columns
        return self.matrix * columns if columns.ndim == 1 else self.matrix[:, None] * columns

    @property
    def noise_variance(self) -> Array:
        return self.noise_root**2 if self.noise_root.ndim == 1 else jnp.sum(self.noise_root**2, axis=1)


class Movement(NamedTuple):
    """How parameters move before each block of rows: by one step, or by the time that has passed.

    :ivar transition: elapsed time -> :class:`Transition`.
    :ivar time: the array of the rows' time stamps; None: each block is one unit of time after the one before.
    """

    transition: Callable[[ArrayLike], Transition]
    time: str | None

    def start(self, last: ArrayLike | None, dtype: DTypeLike) -> Array | None:
        """The time of the last row so far, (): NaN where ``last`` is None. None without time stamps."""
        return None if self.time is None else jnp.asarray(jnp.nan if last is None else last, dtype)

    def before(self, q: Q, last: Array | None, rows: dict) -> tuple[Q, Array | None]:
        """q before a block of rows, and the time of its last row, which is that of the whole block. q is of NaN where
        time goes back. The prior is of the time of the first block.

        :param last: the time of the last row so far.
        """
        if self.time is None or last is None:
            return q.predict(self.transition(1.0)), None
        times = rows[self.time].astype(last.dtype)
        goes_back = (times[0] < last) | jnp.any(times[1:] < times[:-1])
        elapsed = jnp.where(jnp.isnan(last), 0.0, times[-1] - last)
        elapsed = jnp.where(goes_back, jnp.nan, elapsed)
        return lax.cond(elapsed != 0, lambda: q.predict(self.transition(elapsed)), lambda: q), times[-1]


def joined_in_natural_parameters(prior: Q, parts: list[Q]) -> Q:
    """A prior times the ratio of each part to it, of a family whose natural parameters add up."""
    natural = [q.coordinates("natural") for q in (prior, *parts)]
    total = jax.tree.map(lambda first, *others: first + sum(x - first for x in others), *natural)
    return prior.from_coordinates(total, "natural")


def shifted(q: Q, shift: Array) -> Q:
    """N(mu + shift, Sigma) for q = N(mu, Sigma)."""
    return dataclasses.replace(q, mean=q.mean + shift)


def nan_if_invalid(q: Q) -> Q:
    """q with a mean of NaN where its arrays are not those of a Gaussian."""
    return dataclasses.replace(q, mean=jnp.where(q.is_valid(), q.mean, jnp.nan))


def log_normal(lengths: Array, log_det: Array, size: int) -> Array:
    return -0.5 * (lengths + log_det + size * math.log(2 * math.pi))
