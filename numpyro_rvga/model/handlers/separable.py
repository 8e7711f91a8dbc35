"""Distributions of vectors and matrices that in unconstrained space are products of functions of few numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import betaln
from numpyro import distributions


def separate_terms(fn: distributions.Distribution, value: Array, unconstrained: Array) -> Array | None:
    """The log density of a latent in unconstrained space, one term for each factor, (..., K); None if it has no such
    form.

    :param fn: the distribution of ``value``, which ``unconstrained`` was mapped to.
    """
    while isinstance(fn, distributions.ExpandedDistribution):
        fn = fn.base_dist
    if isinstance(fn, (distributions.LKJ, distributions.LKJCholesky)):
        return _partial_correlations(fn, unconstrained)
    if isinstance(fn, distributions.GaussianRandomWalk):
        steps = jnp.diff(value, axis=-1, prepend=0.0)
        return distributions.Normal(0.0, jnp.expand_dims(fn.scale, -1)).log_prob(steps)
    return None


def _partial_correlations(fn: Any, x: Array) -> Array:
    """Canonical partial correlations tanh(x) are independent: (1 + tanh(x_ij)) / 2 ~ Beta(b_j, b_j), with b_j =
    eta + (D - 2 - j) / 2, j from 0 (Lewandowski, Kurowicka and Joe, 2009)."""
    column = np.tril_indices(fn.dimension, -1)[1]
    b = jnp.expand_dims(fn.concentration, -1) + 0.5 * (fn.dimension - 2 - column)
    return b * (jax.nn.log_sigmoid(2 * x) + jax.nn.log_sigmoid(-2 * x)) + jnp.log(2.0) - betaln(b, b)
