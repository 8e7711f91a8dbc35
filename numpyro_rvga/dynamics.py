"""Linear Gaussian dynamics of the parameters between updates. Scales are in unconstrained space."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from .core.gaussians import Transition
from .model.layout import Layout


@dataclass(frozen=True)
class RandomWalk:
    """theta_t = theta_(t-1) + scale * noise, before each update.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import RandomWalk
        >>> now = RVGA(model, dynamics=RandomWalk({"slopes": 0.1})).run(data, progress_bar=False)
        >>> bool((now.covariance.diagonal() > posterior.covariance.diagonal()).all())  # old rows tell less of today
        True

    :param scale: standard deviation of a step: one for all parameters, or a mapping from site names to numbers or
        arrays of the site's unconstrained shape. Sites that are not named do not move.
    :raises ValueError: for negative scales.
    """

    scale: float | Mapping[str, Any]

    def __post_init__(self):
        scales = self.scale.values() if isinstance(self.scale, Mapping) else [self.scale]
        if not all(np.all(np.asarray(s) >= 0) for s in scales):
            raise ValueError(f"the scale of a random walk must not be negative: {self.scale}.")

    def transition(self, layout: Layout, mean: Array, root: Array) -> Transition:
        """A, b and the noise of theta' = A theta + b + noise.

        :param mean: of the prior, (P,).
        :param root: of the prior's covariance, (P, P), or its standard deviations (P,).

        :raises ValueError: naming sites that the model does not have.
        """
        scale = _by_parameter(self.scale, layout) if isinstance(self.scale, Mapping) else self.scale
        noise = jnp.broadcast_to(jnp.asarray(scale, mean.dtype), mean.shape)
        return Transition(jnp.ones_like(mean), jnp.zeros_like(mean), noise)


@dataclass(frozen=True)
class OrnsteinUhlenbeck:
    """theta_t - m = decay (theta_(t-1) - m) + noise. The stationary distribution is the prior, with mean m.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import OrnsteinUhlenbeck
        >>> now = RVGA(model, dynamics=OrnsteinUhlenbeck(0.9)).run(data, progress_bar=False)
        >>> bool((abs(now.mean) < abs(posterior.mean)).all())  # drawn back to the prior's mean, zero
        True

    :param decay: from 0 (each update starts from the prior) to 1 (no movement).
    :raises ValueError: for other values of ``decay``.
    """

    decay: float

    def __post_init__(self):
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie between 0 and 1, not {self.decay}.")

    def transition(self, layout: Layout, mean: Array, root: Array) -> Transition:
        """As :meth:`RandomWalk.transition`."""
        matrix = jnp.full_like(mean, self.decay)
        return Transition(matrix, (1 - self.decay) * mean, math.sqrt(1 - self.decay**2) * root)


@dataclass(frozen=True)
class LinearDynamics:
    """theta_t = matrix theta_(t-1) + offset + noise, in the order of :attr:`Posterior.mean`.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import LinearDynamics
        >>> drift = LinearDynamics(np.eye(2), np.array([0.1, 0.0]), 0.01 * np.eye(2))  # the first slope grows
        >>> now = RVGA(model, dynamics=drift).run(data, progress_bar=False)
        >>> bool(now.mean[0] > posterior.mean[0])
        True

    :param matrix: ``(P, P)``.
    :param offset: ``(P,)``.
    :param noise_covariance: ``(P, P)``, positive semi-definite.
    """

    matrix: Any
    offset: Any
    noise_covariance: Any

    def transition(self, layout: Layout, mean: Array, root: Array) -> Transition:
        """As :meth:`RandomWalk.transition`.

        :raises ValueError: for arrays of other shapes, and a matrix that is not a covariance.
        """
        size = layout.size
        shapes = {"matrix": (size, size), "offset": (size,), "noise_covariance": (size, size)}
        arrays = {name: np.asarray(getattr(self, name), np.float64) for name in shapes}
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise ValueError(f"{name} must have shape {shape}, not {arrays[name].shape}: P is {size}.")
        matrix, offset, covariance = arrays.values()
        values, vectors = np.linalg.eigh(covariance)
        if not np.allclose(covariance, covariance.T) or values[0] < -1e-8 * max(values[-1], 0.0):
            raise ValueError("noise_covariance must be symmetric and positive semi-definite.")
        noise = vectors * np.sqrt(np.maximum(values, 0.0))
        if all(np.array_equal(x, np.diag(np.diagonal(x))) for x in (matrix, covariance)):  # entry by entry
            matrix, noise = np.diagonal(matrix), np.sqrt(np.diagonal(covariance))
        return Transition(*[jnp.asarray(x, mean.dtype) for x in (matrix, offset, noise)])


Dynamics = RandomWalk | OrnsteinUhlenbeck | LinearDynamics


def check_dynamics(dynamics: Any) -> None:
    """:raises ValueError: if ``dynamics`` is neither None nor one of :data:`Dynamics`."""
    if dynamics is not None and not isinstance(dynamics, Dynamics):
        raise ValueError(f"dynamics must be a RandomWalk, OrnsteinUhlenbeck or LinearDynamics, not {dynamics!r}.")


def _by_parameter(scales: Mapping[str, Any], layout: Layout) -> Array:
    """The scale of each parameter, (P,)."""
    unknown = sorted(set(scales) - set(layout.site_names))
    if unknown:
        raise ValueError(f"the model has no latent site {unknown[0]!r}; it has {', '.join(layout.site_names)}.")
    filled = {n: jnp.broadcast_to(jnp.asarray(scales.get(n, 0.0)), layout.shapes[n]) for n in layout.site_names}
    return layout.ravel(filled)
