"""Draws from q, corrected by importance resampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..model.data.rows import Data
from ..options import check_count, key_numbers
from .arviz import converted, smoothed
from .fitted import Fitted
from .khat import NEARLY_EQUAL, RESAMPLED, integration_left, remedy
from .log_joint import all_rows, draws_with_density, impossible_if_undefined, is_density

OVERSAMPLING = 4  # draws for each that is kept
LEAST_DRAWS = 400


def resample(
    posterior: Fitted,
    data: Data,
    num_samples: int = 1000,
    *,
    rng_key: Array | None = None,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, list[str]] | None = None,
) -> Any:
    """Draws of the model's posterior, where q is near it: Pareto-smoothed importance resampling (Vehtari et al.
    2024) of four draws from q for each that is kept.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> dict(posterior.resample(data, 500)["posterior"]["slopes"].sizes)
        {'chain': 1, 'draw': 500, 'slopes_dim_0': 2}

    :param data: all rows that the posterior has absorbed, with their outcome.
    :param num_samples: the number of draws. Some may be the same.
    :param rng_key: random key; ``jax.random.key(0)`` by default.
    :param coords: coordinate values by dimension name.
    :param dims: dimension names by variable.
    :return: what :meth:`to_arviz` returns with ``data``.
    :raises ValueError: if the Pareto k is above 0.7 and the weights are far from equal, and if ``data`` lack the
        outcome.
    :raises NotImplementedError: after a run with dynamics.
    """
    check_count("num_samples", num_samples)
    rows = all_rows(posterior, data)
    draw_key, place_key, predictive_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key, 3)
    theta, log_q = draws_with_density(posterior, draw_key, max(LEAST_DRAWS, OVERSAMPLING * num_samples))
    log_p = posterior.log_densities.joint(theta, rows)
    if not is_density(log_p):
        raise ValueError("the draws cannot be resampled: the log joint is not a finite number at some of them.")
    log_weights, shape = smoothed(impossible_if_undefined(log_p - log_q))
    relative_size = 1 / (len(log_weights) * np.sum(np.exp(2 * log_weights)))
    if shape > RESAMPLED and relative_size < NEARLY_EQUAL:
        raise ValueError(
            f"the draws cannot be resampled: Pareto k = {shape:.2f}, above {RESAMPLED}, so a few of them would have "
            f"all the weight. {remedy(shape, integration_left(posterior))}"
        )
    bounds = np.cumsum(np.exp(log_weights))
    rng = np.random.default_rng(key_numbers(place_key))
    places = (np.arange(num_samples) + rng.uniform(size=num_samples)) / num_samples
    chosen = np.minimum(np.searchsorted(bounds / bounds[-1], places), len(bounds) - 1)
    return converted(
        posterior, jnp.asarray(np.asarray(theta)[rng.permutation(chosen)]), rows, predictive_key, coords, dims
    )
