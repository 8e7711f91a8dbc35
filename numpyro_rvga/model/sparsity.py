"""Which few entries of theta each term depends on, by the derivatives of its predictors along directions.

theta is cut into columns: the sites, or their columns. Rows with crossed or nested effects depend on one entry of each
column. Two directions along the column give its derivative and its position.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.compilation import jit_once
from ..core.jacobians import SparseJacobian
from ..core.sparse import EliminationOrder
from .layout import Layout
from .terms import Arrays, Terms, merged, over_rows, split_rows

FEWEST_PARAMETERS = 200  # below, whole matrices are small
MOST_SPLIT = 64  # entries of a column of which terms read several
MOST_SLOTS = 64  # columns that a term reads
FEW = 64  # rows that are probed first
CHUNK = 2**16  # rows that are probed together


class Pattern(NamedTuple):
    """The entries of theta that a term depends on: one of each column.

    :ivar columns: arrays of entries of theta. :ivar place: (P,), the position of each entry in the elimination order.
    :ivar num_diagonal: d: no term depends on two of the first d positions.
    :ivar has_diagonal: whether the first column is one of these.
    """

    columns: tuple[np.ndarray, ...]
    place: np.ndarray
    num_diagonal: int
    has_diagonal: bool


class Sparsity(NamedTuple):
    """Which entries of theta each term of a model depends on.

    :ivar order: of elimination. :ivar patterns: by whether a term is one of the prior, and its site.
    :ivar numbers_per_row: size of the Jacobians of a row.
    """

    order: EliminationOrder
    patterns: dict[tuple[bool, str], Pattern]
    numbers_per_row: int

    @property
    def key(self) -> tuple:
        """Equal if two say the same of a model."""
        return (
            self.order.num_diagonal,
            self.order.places.tobytes(),
            tuple((name, len(pattern.columns)) for name, pattern in self.patterns.items()),
        )


# ---------------------------------------------------------------------- Jacobians
def sparse_jacobian(terms: Terms, pattern: Pattern, theta: Array, rows: Arrays) -> tuple[Array, SparseJacobian]:
    """Predictors at theta (n E, C), and their Jacobians."""
    if not terms.num_predictors:
        return _without_predictors(terms, pattern, theta, rows)
    directions = _along(pattern.columns, theta.size, theta.dtype)
    predictors, pushed = merged(_pushed(terms, theta, directions, rows))
    values, place = _read(pushed, len(pattern.columns))
    starts = np.cumsum([0, *[len(column) for column in pattern.columns]])[:-1]
    numbers = jnp.asarray(pattern.place[np.concatenate(pattern.columns)], jnp.int32)
    lengths = np.array([len(column) for column in pattern.columns])
    index = numbers[jnp.clip(place, 0, lengths - 1) + starts]
    sizes = theta.size, pattern.num_diagonal, pattern.has_diagonal
    return predictors, SparseJacobian(index, jnp.swapaxes(values, 1, 2), *sizes)


def _without_predictors(terms: Terms, pattern: Pattern, theta: Array, rows: Arrays) -> tuple[Array, SparseJacobian]:
    """Of terms that theta does not enter."""
    predictors = merged(over_rows(lambda row, element: terms.predictors(theta, row, element), terms.num_elements, rows))
    index = jnp.full((len(predictors), 1), pattern.place[pattern.columns[0][0]], jnp.int32)
    values = jnp.zeros((len(predictors), 0, 1), theta.dtype)
    return predictors, SparseJacobian(index, values, theta.size, pattern.num_diagonal, pattern.has_diagonal)


def selecting_pattern(size: int) -> Pattern:
    """Of terms that depend on one entry of theta."""
    return Pattern((np.arange(size),), np.arange(size), size, True)


def are_selections(all_terms: Sequence[Terms], size: int, dtype, rows: Arrays) -> list[bool]:
    """Whether each term's one predictor is an affine function of one entry of theta."""
    possible = [terms.is_affine and terms.num_predictors == 1 and not terms.num_local for terms in all_terms]
    asked = [terms for terms, is_possible in zip(all_terms, possible) if is_possible]
    found = iter(_reads_of(asked, selecting_pattern(size).columns, jnp.zeros(size, dtype), rows))
    return [is_possible and bool(next(found).reads_one[0]) for is_possible in possible]


def _along(columns: tuple[np.ndarray, ...], size: int, dtype) -> np.ndarray:
    """Two directions along each column: all ones, and the position in it: (2 S, P)."""
    count = len(columns)
    directions = np.zeros((2 * count, size), dtype)
    for i, column in enumerate(columns):
        directions[i, column], directions[count + i, column] = 1, np.arange(len(column))
    return directions


def _pushed(terms: Terms, theta: Array, directions: np.ndarray, rows: Arrays) -> tuple[Array, Array]:
    """Predictors (n, E, C), and their changes along directions (n, E, D, C)."""

    def one(row, element):
        predictors, push = jax.linearize(lambda t: terms.predictors(t, row, element), theta)
        return predictors, jax.vmap(push)(directions)

    directions = lax.optimization_barrier(jnp.asarray(directions))  # XLA would fold constants for seconds
    return over_rows(one, terms.num_elements, rows)


def _read(pushed: Array, count: int) -> tuple[Array, Array]:
    """The one entry of each column that is not zero (n, S, C), and its position there (n, S)."""
    values, numbers = pushed[:, :count], pushed[:, count : 2 * count]
    largest = jnp.argmax(jnp.abs(values), axis=2, keepdims=True)
    value, number = (jnp.take_along_axis(x, largest, axis=2)[..., 0] for x in (values, numbers))
    return values, jnp.round(number / jnp.where(value == 0, 1.0, value)).astype(jnp.int32)


# ---------------------------------------------------------------------- which entries terms depend on
class _Reads(NamedTuple):
    """Of columns, (S,): whether any term depends on them, and whether no term depends on two of their entries."""

    is_read: np.ndarray | Array
    reads_one: np.ndarray | Array


def _reads_of(all_terms: Sequence[Terms], columns: tuple[np.ndarray, ...], theta: Array, rows: Arrays) -> list[_Reads]:
    """Of the terms of each site, by changes along a random direction: one function, which compiles sooner than many."""
    count, eps = len(columns), np.finfo(theta.dtype).eps
    if not any(terms.num_predictors for terms in all_terms):
        return [_Reads(np.zeros(count, bool), np.ones(count, bool)) for _ in all_terms]
    probe = np.random.default_rng(0).normal(size=theta.size).astype(theta.dtype)
    one_column = np.zeros((count, theta.size), theta.dtype)
    for i, column in enumerate(columns):
        one_column[i, column] = probe[column]
    directions = np.concatenate([_along(columns, theta.size, theta.dtype), one_column])
    longest = max(map(len, columns))
    table = jnp.asarray(np.stack([np.resize(probe[column], longest) for column in columns]))

    def both(terms, rows):
        if not terms.num_predictors:
            return _Reads(jnp.zeros(count, bool), jnp.ones(count, bool))
        pushed = merged(_pushed(terms, theta, directions, rows)[1])
        values, place = _read(pushed, count)
        predicted = values * table[jnp.arange(count), jnp.clip(place, 0, longest - 1)][..., None]
        actual = pushed[:, 2 * count :]
        close = jnp.abs(predicted - actual) <= 1e3 * eps * jnp.abs(actual)
        return _Reads(jnp.any(actual != 0, axis=(0, 2)), jnp.all(close, axis=(0, 2)))

    of_part = jit_once(lambda rows: [both(terms, rows) for terms in all_terms])
    by_part = [jax.device_get(of_part(part)) for part in _parts(rows)]
    return [
        _Reads(np.any([f.is_read for f in parts], axis=0), np.all([f.reads_one for f in parts], axis=0))
        for parts in zip(*by_part)
    ]


def _parts(rows: Arrays) -> Iterator[Arrays]:
    """Rows in parts of equal length, the first ones once more in the last."""
    shared, own = split_rows(rows)
    count = len(next(iter(own.values()))) if own else 0
    for start in range(0, max(count, 1), CHUNK):
        taken = np.arange(start, start + min(count, CHUNK)) % max(count, 1)
        yield shared | {name: array[taken] for name, array in own.items()}


def find_sparsity(
    layout: Layout, dtype, row_terms: tuple[Terms, ...], prior_terms: tuple[Terms, ...], rows: Arrays, shared: Arrays
) -> Sparsity | None:
    """The entries that terms depend on, if these are few for each term; None if not, or if theta is short.

    :param rows: all that there are, and what they share.
    :param shared: what prior terms depend on besides theta.
    """
    if layout.size < FEWEST_PARAMETERS or any(terms.num_local for terms in row_terms):
        return None
    theta = jnp.asarray(0.5 * np.random.default_rng(1).normal(size=layout.size), dtype)
    columns = _columns(layout)

    given, own = split_rows(rows)
    few = _reads_of(row_terms, columns, theta, given | {name: array[:FEW] for name, array in own.items()})
    if _read_too_many(few, columns):
        return None
    all_reads = _reads_of(row_terms, columns, theta, rows) + _reads_of(prior_terms, columns, theta, shared)
    if _read_too_many(all_reads, columns):
        return None
    reads_one = _reads_one(all_reads)
    whole, split = [np.flatnonzero(chosen) for chosen in (reads_one, ~reads_one)]
    if not len(whole):
        return None
    eliminated = max(whole, key=lambda i: len(columns[i]))
    ranked = [eliminated, *whole[whole != eliminated], *split]
    order, patterns = EliminationOrder(np.concatenate([columns[i] for i in ranked]), len(columns[eliminated])), {}
    sides = [(False, terms) for terms in row_terms] + [(True, terms) for terms in prior_terms]
    for (in_prior, terms), reads in zip(sides, all_reads):
        seen = []
        for i in (i for i in ranked if reads.is_read[i]):
            seen += [columns[i]] if reads_one[i] else list(columns[i][:, None])
        if not terms.num_predictors:
            seen = [order.places[-1:]]
        if not seen or len(seen) > MOST_SLOTS:
            return None
        patterns[in_prior, terms.site] = Pattern(
            tuple(seen), order.back, order.num_diagonal, bool(reads.is_read[eliminated])
        )
    counts = [(t.num_elements, t.num_predictors, len(patterns[False, t.site].columns)) for t in row_terms]
    return Sparsity(order, patterns, sum(e * k * (c + 2 * k) for e, c, k in counts))


def _reads_one(all_reads: list[_Reads]) -> np.ndarray:
    """(S,): of which columns no term depends on two entries."""
    return np.all([reads.reads_one for reads in all_reads], axis=0)


def _read_too_many(all_reads: list[_Reads], columns: tuple[np.ndarray, ...]) -> bool:
    return any(len(column) > MOST_SPLIT for column, one_column in zip(columns, _reads_one(all_reads)) if not one_column)


def _columns(layout: Layout) -> tuple[np.ndarray, ...]:
    """The entries of each site along its longest axis, one column for each position on the others."""
    columns, start = [], 0
    for name in layout.site_names:
        shape = layout.shapes[name] or (1,)
        entries = start + np.arange(math.prod(shape)).reshape(shape)
        start += entries.size
        if entries.size:
            columns += list(np.moveaxis(entries, int(np.argmax(shape)), -1).reshape(-1, max(shape)))
    return tuple(columns)
