"""Which plates are over the rows of the data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp

Dims = dict[int, tuple[int, ...]]


class Outcome(NamedTuple):
    """The form of an observed site in one run. Dimensions are numbered as those of plates: -1 is the last one of the
    batch, and events have dimensions from 0 on.

    :ivar lengths: of its values and its distributions, by dimension.
    :ivar plates: the dimensions of the plates around it, by name.
    """

    lengths: Dims
    plates: dict[str, int]


def outcome_of(site: Mapping[str, Any]) -> Outcome:
    """The form of an observed site, from NumPyro's trace."""
    fn, lengths = site["fn"], Dims()
    for shape in (jnp.shape(site["value"]), fn.shape()):
        for axis, length in enumerate(shape):
            dim = axis - len(shape) + fn.event_dim
            lengths[dim] = (*lengths.get(dim, ()), length)
    return Outcome(lengths, {plate.name: plate.dim for plate in site["cond_indep_stack"]})


def plates_of_length(sizes: Mapping[str, tuple[int, int]], length: int, outcomes: Mapping[str, Outcome]) -> set[str]:
    """The plates around outcomes that are of the length of the data, or subsampled to it.

    :param sizes: the size and the number of its indices that are taken, by plate.
    """
    around = {plate for outcome in outcomes.values() for plate in outcome.plates}
    return {plate for plate in around if length in sizes.get(plate, ())}


def may_be_of_others(outcomes: Mapping[str, Outcome], plates: set[str], length: int) -> bool:
    """Whether plates that :func:`plates_of_length` found may be along another dimension of an outcome than its rows,
    by chance of the same length."""
    if len(plates) > 1:
        return True
    for outcome in outcomes.values():
        found = {dim for plate, dim in outcome.plates.items() if plate in plates}
        alike = {dim for dim, lengths in outcome.lengths.items() if length in lengths}
        if found and len(found | alike) > 1:
            return True
    return False


def along_rows(outcomes: Mapping[str, Outcome], fewer: Mapping[str, Outcome], plates: set[str]) -> set[str]:
    """Those of the plates that are along a dimension in which an outcome is shorter on fewer rows: a plate whose own
    size is a constant may still be one."""
    return {
        plate
        for name, outcome in outcomes.items()
        for plate, dim in outcome.plates.items()
        if plate in plates and name in fewer and outcome.lengths.get(dim) != fewer[name].lengths.get(dim)
    }
