"""What a family of Gaussians over theta in R^P can do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from jax import Array

from .steps import ExpectedDerivatives, Transition

if TYPE_CHECKING:
    from typing import Self

    import numpy as np

    from .full import FullGaussian


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
        ...

    @property
    def noise_size(self) -> int:
        """K, the length of the standard normal vectors that :meth:`transform` takes."""
        ...

    def is_valid(self) -> Array:
        """Whether the arrays are those of a Gaussian: a scalar bool."""
        ...

    def transform(self, standard: Array) -> Array:
        """Draws of theta (..., P) from draws of the standard normal (..., K)."""
        ...

    def covariance(self) -> Array:
        """Sigma, (P, P)."""
        ...

    def scale_tril(self) -> Array:
        """The lower Cholesky factor of Sigma, (P, P)."""
        ...

    def deviation(self) -> Array:
        """Standard deviations of the marginals, (P,)."""
        ...

    def as_full(self) -> FullGaussian:
        """The same Gaussian, with a (P, P) root of its covariance."""
        ...

    def log_prob(self, theta: Array) -> Array:
        """log q at theta (..., P)."""
        ...

    def predictor_root(self, jacobian: Array) -> Array:
        """Z (..., C, K) with Z Z^T = F Sigma F^T, for Jacobians F (..., C, P)."""
        ...

    def covariance_times(self, vector: Array) -> Array:
        """Sigma vector, (P,)."""
        ...

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
        ...

    def coordinates(self, parameterization: str) -> tuple[Any, ...]:
        """The parameters in which plain gradients are taken."""
        ...

    @classmethod
    def from_coordinates(cls, coordinates: Any, parameterization: str) -> Self:
        """The inverse of :meth:`coordinates`; NaN where these are of no Gaussian."""
        ...

    def expected_quadratic(self, derivatives: ExpectedDerivatives) -> Array:
        """trace(H Sigma)."""
        ...

    def kl_divergence(self, other: Self) -> Array:
        """KL(self || other)."""
        ...

    def with_information(self, indices: Array | np.ndarray, information: Array, diagonal: Array) -> Self:
        """Mean moved by Sigma ``information``, then ``diagonal`` added to the precision; both at some entries.

        :param indices: (K,), the entries. :param information: (K,). :param diagonal: (K,).
        """
        ...

    def predict(self, transition: Transition) -> Self:
        """The distribution of A theta + b + noise."""
        ...
