"""Deterministic sites: functions of the latent sites alone, functions of the data too, and those with values by row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array

from ..data.rows import Arrays
from .data_prior import data_dependence


class DeterministicSites(NamedTuple):
    """Names of a model's deterministic sites.

    :ivar of_latents: functions of the latent sites.
    :ivar of_data: functions of the latent sites and of all rows, such as a mean over them.
    :ivar of_rows: those with values for each row, in a plate or not.
    """

    of_latents: frozenset[str] = frozenset()
    of_data: frozenset[str] = frozenset()
    of_rows: frozenset[str] = frozenset()


def classify_deterministic(
    values: Callable[[Arrays, Array], dict[str, Array]],
    of_rows: Collection[str],
    one_row: Mapping[str, Any],
    two_rows: Arrays,
    theta: Array,
) -> DeterministicSites:
    """Sort the deterministic sites by what they depend on.

    :param values: (rows, theta) -> the values of all deterministic sites.
    :param of_rows: the names of those with values for each row.
    """

    def others(rows, theta):
        return {name: value for name, value in values(rows, theta).items() if name not in of_rows}

    names = set(jax.eval_shape(lambda theta: others(one_row, theta), theta))
    of_data = frozenset(data_dependence(others, one_row, two_rows, theta)) if names else frozenset()
    return DeterministicSites(frozenset(names) - of_data, of_data, frozenset(of_rows))
