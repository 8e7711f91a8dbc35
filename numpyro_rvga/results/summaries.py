"""Gaussian summaries of parts of the data: what a part has made of the q that it began with, in double precision.

A summary is t(theta) = exp(constant + linear . d - d' precision d / 2), with d = theta - origin. The states of parts
are divided by what they began with, and multiplied, in natural parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ..core.count import Count
from ..core.recursion import CanonicalGaussian, State


class Exponent(NamedTuple):
    """constant + linear . (theta - origin) - (theta - origin)' precision (theta - origin) / 2."""

    precision: np.ndarray
    linear: np.ndarray
    constant: float

    def plus(self, other: Exponent, times: float = 1.0) -> Exponent:
        return Exponent(*[a + times * b for a, b in zip(self, other)])


def joint_density(state: State, origin: np.ndarray) -> Exponent:
    """log q + log evidence."""
    inverse = np.linalg.inv(np.asarray(state.root, np.float64))
    shift = inverse @ (np.asarray(state.mean, np.float64) + np.asarray(state.mean_error, np.float64) - origin)
    constant = float(state.log_evidence) - 0.5 * shift @ shift + np.linalg.slogdet(inverse)[1]
    return Exponent(inverse.T @ inverse, inverse.T @ shift, constant - 0.5 * len(shift) * np.log(2 * np.pi))


def _of_factor(factor: CanonicalGaussian, origin: np.ndarray) -> Exponent:
    precision, linear, constant, centre = (np.asarray(x, np.float64) for x in factor)
    delta = origin - centre
    product = precision @ delta
    return Exponent(precision, linear - product, float(constant + linear @ delta - 0.5 * delta @ product))


def _without_prior_factor(state: State, origin: np.ndarray) -> Exponent:
    density = joint_density(state, origin)
    return density if state.prior_factor is None else density.plus(_of_factor(state.prior_factor, origin), -1.0)


def summary(after: State, before: State, origin: np.ndarray) -> Exponent:
    """What a run has made of its rows. Each state has its own approximation of prior terms that are not Gaussian.

    :param after: that it ended in. :param before: that it began with.
    """
    return _without_prior_factor(after, origin).plus(_without_prior_factor(before, origin), -1.0)


def added(first: Exponent, others: Iterable[Exponent]) -> Exponent:
    for other in others:
        first = first.plus(other)
    return first


def state_of(exponent: Exponent, like: State, origin: np.ndarray, num_rows: int) -> State | None:
    """The state whose joint density this is; None if there is no such Gaussian.

    :param like: has the approximation of prior terms, and the types of arrays.
    """
    try:
        lower = np.linalg.cholesky(exponent.precision)
    except np.linalg.LinAlgError:
        return None
    inverse = np.linalg.inv(lower)
    shift = inverse.T @ (inverse @ exponent.linear)
    evidence = exponent.constant + 0.5 * exponent.linear @ shift + 0.5 * len(shift) * np.log(2 * np.pi)
    evidence -= np.sum(np.log(np.diagonal(lower)))
    return State(
        jnp.asarray(origin + shift, like.mean.dtype),
        jnp.zeros_like(like.mean),
        jnp.asarray(inverse.T, like.root.dtype),
        jnp.asarray(evidence, like.log_evidence.dtype),
        like.prior_factor,
        Count.of(num_rows),
    )


def merged_state(start: State, states: Sequence[State]) -> State | None:
    """The state of all rows, from those that runs from ``start`` on parts of them ended in; None if there is none."""
    origin = np.asarray(states[0].mean, np.float64)
    total = added(joint_density(start, origin), (summary(state, start, origin) for state in states))
    return state_of(total, start, origin, sum(int(state.num_rows) for state in states))
