"""Rows of a joint solve that may be part of the state already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..core.pytrees import PyTree
from ..core.updates.state import Absorbed, RowFactors
from ..model.terms.terms import Terms, merged


class AbsorbedRows(NamedTuple):
    """What a state knows of n rows.

    :ivar row_factors: their Gaussian approximations in it, (n, E, ...) arrays.
    :ivar is_part: one if they are part of it, else zero.
    :ivar num_new: how many rows are new to it.
    """

    row_factors: tuple[RowFactors, ...]
    is_part: Array | np.ndarray
    num_new: Array | np.ndarray

    @classmethod
    def new(cls, all_terms: Sequence[Terms], weights: np.ndarray, dtype: DTypeLike) -> AbsorbedRows:
        """Rows that no state knows, of these weights."""

        def nothing(terms: Terms) -> RowFactors:
            e, c = terms.num_elements, terms.num_predictors
            arrays: PyTree = [np.zeros((len(weights), *shape), dtype) for shape in ((e, c, c), (e, c), (e,))]
            return RowFactors(*arrays)

        count = np.asarray(np.count_nonzero(weights), np.int32)
        return cls(tuple(map(nothing, all_terms)), np.zeros((), np.int32), count)

    @classmethod
    def known(cls, row_factors: tuple[RowFactors, ...]) -> AbsorbedRows:
        """Rows that are all part of the state."""
        return cls(row_factors, np.ones((), np.int32), np.zeros((), np.int32))


def absorbed_row_factors(absorbed_rows: AbsorbedRows, weights: Array) -> tuple[RowFactors, ...]:
    """Those of rows that are part of the state, (n E, ...); zero for others, and for rows that pad."""
    part = absorbed_rows.is_part * (weights > 0)
    return merged(
        jax.tree.map(lambda x: part.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype) * x, absorbed_rows.row_factors)
    )


def _shapes(terms: Terms) -> tuple[tuple[int, ...], ...]:
    """Of the moments of one row's predictors: mean, covariance and error."""
    elements, c = terms.num_elements, terms.num_predictors
    return (elements, c), (elements, c, c), (elements,)


def num_absorbed(all_terms: Sequence[Terms]) -> int:
    """How many numbers the moments of one row's predictors are."""
    return sum(int(np.prod(shape)) for terms in all_terms for shape in _shapes(terms))


def by_row(absorbed: tuple[Absorbed, ...], all_terms: Sequence[Terms]) -> tuple[Absorbed, ...]:
    """(n E, ...) and (blocks, B E, ...) arrays as (n, E, ...)."""

    def fold(moments: Absorbed, terms: Terms) -> Absorbed:
        return Absorbed(*[x.reshape(-1, *shape) for x, shape in zip(moments, _shapes(terms))])

    return tuple(fold(moments, terms) for moments, terms in zip(absorbed, all_terms))
