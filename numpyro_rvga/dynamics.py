"""Linear Gaussian dynamics of the parameters between updates. Scales are in unconstrained space.

With ``time`` parameters move by the time that passes between rows: not between rows of one time, and far over a gap.
The prior is of the time of the first row. A block of several rows is of the time of its last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from .core.gaussians import Movement, Transition
from .core.matrices.linalg import semidefinite_factor
from .model.data.arguments import BadData
from .model.layout import Layout
from .model.program import Program
from .options import Info, described

COEFFICIENTS = ("matrix", "offset", "noise_covariance")  # of LinearDynamics


@dataclass(frozen=True)
class RandomWalk:
    """theta_t = theta_(t-1) + scale * noise, before each update; with ``time``, of variance ``scale**2 * elapsed``.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import RandomWalk
        >>> now = RVGA(model, dynamics=RandomWalk({"slopes": 0.1})).run(data, progress_bar=False)
        >>> bool((now.covariance.diagonal() > posterior.covariance.diagonal()).all())  # old rows tell less of today
        True

    :param scale: standard deviation of a step: one for all parameters, or a mapping from site names to numbers or
        arrays of the site's unconstrained shape. Sites that are not named do not move.
    :param time: name of the array of the data with the rows' time stamps, an argument of the model, which need not use
        it. None (default): each update is one unit of time after the one before.
    :raises ValueError: for negative scales.
    """

    scale: float | Mapping[str, Any]
    time: str | None = None

    def __post_init__(self):
        scales = self.scale.values() if isinstance(self.scale, Mapping) else [self.scale]
        if not all(np.all(np.asarray(s) >= 0) for s in scales):
            raise ValueError(f"the scale of a random walk must not be negative: {self.scale}.")

    def transition(self, layout: Layout, mean: Array, root: Array, elapsed: ArrayLike) -> Transition:
        """A, b and the noise of theta' = A theta + b + noise.

        :param mean: of the prior, (P,).
        :param root: of the prior's covariance, (P, P), or its standard deviations (P,).
        :param elapsed: time since the last update, positive.

        :raises ValueError: naming sites that the model does not have, or whose scale has another shape.
        """
        if isinstance(self.scale, Mapping):
            scale = _by_parameter(self.scale, layout)
        else:
            scale = _broadcast(self.scale, mean.shape, "a random walk")
        noise = jnp.sqrt(elapsed) * scale.astype(mean.dtype)
        return Transition(jnp.ones_like(mean), jnp.zeros_like(mean), noise)


@dataclass(frozen=True)
class OrnsteinUhlenbeck:
    """theta_t - m = decay (theta_(t-1) - m) + noise. The stationary distribution is the prior, with mean m.

    With ``time``, the decay over an elapsed time is ``decay**elapsed``.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import OrnsteinUhlenbeck
        >>> now = RVGA(model, dynamics=OrnsteinUhlenbeck(0.9)).run(data, progress_bar=False)
        >>> bool((abs(now.mean) < abs(posterior.mean)).all())  # drawn back to the prior's mean, zero
        True

    :param decay: from 0 (each update starts from the prior) to 1 (no movement).
    :param time: as for :class:`RandomWalk`.
    :raises ValueError: for other values of ``decay``.
    """

    decay: float
    time: str | None = None

    def __post_init__(self):
        if not 0 <= self.decay <= 1:
            raise ValueError(f"decay must lie between 0 and 1, not {self.decay}.")

    def transition(self, layout: Layout, mean: Array, root: Array, elapsed: ArrayLike) -> Transition:
        """As :meth:`RandomWalk.transition`."""
        log_decay = elapsed * (math.log(self.decay) if self.decay > 0 else -math.inf)
        matrix = jnp.full_like(mean, jnp.exp(log_decay))
        return Transition(matrix, -jnp.expm1(log_decay) * mean, jnp.sqrt(-jnp.expm1(2 * log_decay)) * root)


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

    :param matrix: ``(P, P)``; with ``time``, a function of the elapsed time, of JAX's, that returns it.
    :param offset: ``(P,)``, likewise.
    :param noise_covariance: ``(P, P)``, positive semi-definite, likewise.
    :param time: as for :class:`RandomWalk`.
    :raises ValueError: for functions without ``time``, and arrays with it.
    """

    matrix: Any
    offset: Any
    noise_covariance: Any
    time: str | None = None

    def __post_init__(self):
        for name in COEFFICIENTS:
            if callable(getattr(self, name)) != (self.time is not None):
                raise ValueError(
                    f"{name} must be {'an array' if self.time is None else 'a function of the elapsed time'}: with "
                    "time all of matrix, offset and noise_covariance are functions, and without it none is."
                )

    def __repr__(self) -> str:
        """With functions by name, which are the same after a restart."""
        fields = [f"{name}={described(getattr(self, name))!r}" for name in (*COEFFICIENTS, "time")]
        return f"LinearDynamics({', '.join(fields)})"

    def transition(self, layout: Layout, mean: Array, root: Array, elapsed: ArrayLike) -> Transition:
        """As :meth:`RandomWalk.transition`.

        :raises ValueError: for arrays of other shapes, and a matrix that is not a covariance.
        """
        coefficients = [getattr(self, name) for name in COEFFICIENTS]
        if self.time is None:
            return Transition(*[jnp.asarray(x, mean.dtype) for x in _checked(coefficients, layout.size)])
        with jax.ensure_compile_time_eval():
            _checked([function(1.0) for function in coefficients], layout.size)
        matrix, offset, covariance = [jnp.asarray(function(elapsed), mean.dtype) for function in coefficients]
        return Transition(matrix, offset, semidefinite_factor(covariance)[0])


Dynamics = RandomWalk | OrnsteinUhlenbeck | LinearDynamics


def check_dynamics(dynamics: Any) -> None:
    """:raises ValueError: if ``dynamics`` is neither None nor one of :data:`Dynamics`."""
    if dynamics is not None and not isinstance(dynamics, Dynamics):
        raise ValueError(f"dynamics must be a RandomWalk, OrnsteinUhlenbeck or LinearDynamics, not {dynamics!r}.")


def dynamics_info(dynamics: Dynamics | None, state: Any) -> Info:
    """For the posterior's ``info``."""
    if dynamics is None:
        return {}
    info: Info = {"dynamics": type(dynamics).__name__}
    return info if dynamics.time is None else info | {"time": float(state.time)}


def _by_parameter(scales: Mapping[str, Any], layout: Layout) -> Array:
    """The scale of each parameter, (P,)."""
    unknown = sorted(set(scales) - set(layout.site_names))
    if unknown:
        raise ValueError(f"the model has no latent site {unknown[0]!r}; it has {', '.join(layout.site_names)}.")
    shapes = layout.shapes
    return layout.ravel({n: _broadcast(scales.get(n, 0.0), shapes[n], f"site {n!r}") for n in layout.site_names})


def _broadcast(scale: Any, shape: tuple[int, ...], of: str) -> Array:
    """:raises ValueError: for a scale of another shape."""
    try:
        return jnp.broadcast_to(jnp.asarray(scale), shape)
    except ValueError:
        message = f"the scale of {of} must be one number or have shape {shape}, not {np.shape(scale)}."
        raise ValueError(message) from None


def _checked(coefficients: list, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The matrix, the offset and a root of the noise of :class:`LinearDynamics`: vectors where they are diagonal.

    :raises ValueError: for arrays of other shapes, and a matrix that is not a covariance.
    """
    arrays = [np.asarray(array, np.float64) for array in coefficients]
    for name, array, shape in zip(COEFFICIENTS, arrays, [(size, size), (size,), (size, size)]):
        if array.shape != shape:
            raise ValueError(f"{name} must have shape {shape}, not {array.shape}: P is {size}.")
    matrix, offset, covariance = arrays
    values, vectors = np.linalg.eigh(covariance)
    if not np.allclose(covariance, covariance.T) or values[0] < -1e-8 * max(values[-1], 0.0):
        raise ValueError("noise_covariance must be symmetric and positive semi-definite.")
    if all(np.array_equal(x, np.diag(np.diagonal(x))) for x in (matrix, covariance)):  # entry by entry
        return np.diagonal(matrix), offset, np.sqrt(np.diagonal(covariance))
    return matrix, offset, vectors * np.sqrt(np.maximum(values, 0.0))


def movement_of(dynamics: Dynamics, program: Program, mean: Array, root: Array) -> Movement:
    """How a program's parameters move.

    :param dynamics: what has a ``transition(layout, mean, root, elapsed)`` and the name of a ``time``.
    :param mean: of the prior. :param root: of its covariance, or its standard deviations.
    :raises ValueError: if the data have no such time stamps.
    """
    times = program.example_row.get(dynamics.time)
    if dynamics.time is not None and (times is None or times.ndim != 1):
        raise BadData(
            f"the dynamics' time={dynamics.time!r} must be an array of the data with one time stamp for each row. It "
            "must be an argument of the model, which need not use it."
        )
    return Movement(partial(dynamics.transition, program.layout, mean, root), dynamics.time)
