"""Gaussian summaries of parts of the data: what a part has made of the q that it began with, in double precision.

All are canonical Gaussians about one origin. The states of parts are divided by what they began with, and multiplied,
in natural parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ...core.updates.state import CanonicalGaussian, Count, State
from ...engines.certificate import SiteSums
from ...engines.natural_steps import joint_density, without_prior_factor

TOLERANCE = 0.01  # standard deviations that rounds may leave q off by


def summary(after: State, before: State, origin: np.ndarray) -> CanonicalGaussian:
    """The Gaussian factor of a run's rows: its q over its prior. Each state has its own approximation of prior terms
    that are not Gaussian.

    :param after: that it ended in. :param before: that it began with.
    """
    return without_prior_factor(after, origin).plus(without_prior_factor(before, origin), -1.0)


def row_factor(state: State, sums: SiteSums, origin: np.ndarray) -> CanonicalGaussian:
    """The Gaussian factor with the value, gradient and curvature of the rows' expected log-likelihood at q.

    :param sums: over the rows, at the state.
    """
    mean = np.asarray(state.mean, np.float64) + np.asarray(state.mean_error, np.float64)
    value, gradient, curvature = sums.values.sum(), sums.gradients.sum(axis=0), sums.curvatures.sum(axis=0)
    root = np.asarray(state.root, np.float64)
    return CanonicalGaussian.expected(value, gradient, curvature, mean, root).about(origin)


def added(first: CanonicalGaussian, others: Iterable[CanonicalGaussian]) -> CanonicalGaussian:
    for other in others:
        first = first.plus(other)
    return first


def state_of(density: CanonicalGaussian, like: State, num_rows: int) -> State | None:
    """The state whose joint density this is; None if there is no such Gaussian.

    :param like: has the approximation of prior terms, and the types of arrays.
    """
    try:
        lower = np.linalg.cholesky(density.precision)
    except np.linalg.LinAlgError:
        return None
    inverse = np.linalg.inv(lower)
    shift = inverse.T @ (inverse @ density.linear)
    evidence = density.constant + 0.5 * density.linear @ shift + 0.5 * len(shift) * np.log(2 * np.pi)
    evidence -= np.sum(np.log(np.diagonal(lower)))
    return State(
        jnp.asarray(density.center + shift, like.mean.dtype),
        jnp.zeros_like(like.mean),
        jnp.asarray(inverse.T, like.root.dtype),
        jnp.asarray(evidence, like.log_evidence.dtype),
        like.prior_factor,
        Count.of(num_rows),
    )


def distance(one: Any, other: Any) -> float:
    """The most by which a mean differs in the other's standard deviations, or a standard deviation in its logarithm.
    Of Gaussians with a ``mean`` (P,) and a ``root`` (P, P) of the covariance."""
    deviation, other_deviation = (np.linalg.norm(np.asarray(q.root, np.float64), axis=1) for q in (one, other))
    shift = (np.asarray(one.mean, np.float64) - np.asarray(other.mean, np.float64)) / other_deviation
    return float(max(np.abs(shift).max(), np.abs(np.log(deviation / other_deviation)).max()))


def merged_state(start: State, states: Sequence[State]) -> State | None:
    """The state of all rows, from those that runs from ``start`` on parts of them ended in; None if there is none."""
    origin = np.asarray(states[0].mean, np.float64)
    total = added(joint_density(start, origin), (summary(state, start, origin) for state in states))
    return state_of(total, start, sum(int(state.num_rows) for state in states))
