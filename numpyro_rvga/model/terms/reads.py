"""Which entries of theta terms depend on, by the derivatives of their predictors along directions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ...core.compilation import jit_once
from ...core.expectations.by_nodes import power_of_two
from ..data.rows import Arrays, num_rows
from .terms import Terms, linearize_along, split_rows

MOST_ROUNDINGS = 64.0  # units in the last place of a factor's largest derivative in a column
CHUNK = 2**16  # rows that are probed together


def directions_along(columns: Sequence[np.ndarray] | np.ndarray, size: int, dtype) -> np.ndarray:
    """Two directions along each column: all ones, and the position in it: (2 S, P)."""
    count = len(columns)
    directions = np.zeros((2 * count, size), dtype)
    for i, column in enumerate(columns):
        directions[i, column], directions[count + i, column] = 1, np.arange(len(column))
    return directions


def derivatives_and_positions(changes: Array, count: int) -> tuple[Array, Array]:
    """The derivatives of predictors in the one entry of each column that they depend on (n, C, S), and the position of
    that entry in the column (n, S).

    :param changes: their derivatives along the directions of :func:`directions_along`, (n, C, 2 S). :param count: S.
    """
    values, numbers = changes[..., :count], changes[..., count : 2 * count]
    largest = jnp.argmax(jnp.abs(values), axis=1, keepdims=True)
    value, number = (jnp.take_along_axis(x, largest, axis=1)[:, 0] for x in (values, numbers))
    return values, jnp.round(number / jnp.where(value == 0, 1.0, value)).astype(jnp.int32)


def generic_theta(size: int, dtype: DTypeLike) -> Array:
    """A theta (P,) at which no slope vanishes by chance."""
    return jnp.asarray(0.5 * np.random.default_rng(1).normal(size=size), dtype)


class Cut(NamedTuple):
    """theta in columns.

    :ivar columns: arrays of entries of theta.
    :ivar times: of their entries, where a column is of the chain; None for other columns.
    :ivar width: the number of entries of a chain at one time.
    """

    columns: tuple[np.ndarray, ...]
    times: tuple[np.ndarray | None, ...]
    width: int

    @classmethod
    def without_chain(cls, columns: tuple[np.ndarray, ...]) -> Cut:
        return cls(columns, (None,) * len(columns), 0)

    @property
    def in_chain(self) -> np.ndarray:
        """(S,): whether a column is of the chain."""
        return np.array([times is not None for times in self.times])

    @property
    def chain(self) -> np.ndarray:
        """Its entries of theta, by time."""
        pairs = [(column, times) for column, times in zip(self.columns, self.times) if times is not None]
        entries, times = map(np.concatenate, zip(*pairs))
        return entries[np.argsort(times, kind="stable")]


class Reads(NamedTuple):
    """The entries of theta that terms depend on, by column.

    :ivar is_read: whether any term depends on a column, (S,).
    :ivar reads_one: whether no term depends on two entries of a column, (S,).
    :ivar share_crossing: the share of terms that depend on entries in both halves of a column, (S,).
    :ivar span: the most time between two entries of a chain that one term depends on, ().
    """

    is_read: np.ndarray | Array
    reads_one: np.ndarray | Array
    share_crossing: np.ndarray | Array
    span: np.ndarray | Array


class Reader:
    """Finds which entries the terms of each site depend on, at some theta: one function of all terms, which compiles
    sooner than many, and once for cuts of as many columns.

    :param size: of theta.
    """

    def __init__(self, all_terms: Sequence[Terms], size: int, dtype: DTypeLike):
        self.all_terms, self._size, self._dtype = all_terms, size, dtype

        def reads_of(terms: Terms, probes: Probes, rows: Arrays) -> Reads:
            if not terms.num_predictors:
                return jax.tree.map(jnp.asarray, _nothing(len(probes.times)))
            theta = generic_theta(size, dtype)
            return probes.reads(linearize_along(terms, theta, probes.directions, rows)[1])

        self._of_part = jit_once(lambda probes, rows: [reads_of(terms, probes, rows) for terms in all_terms])

    def __call__(self, cut: Cut, rows: Arrays) -> list[Reads]:
        if not any(terms.num_predictors for terms in self.all_terms):
            return [_nothing(len(cut.columns)) for _ in self.all_terms]
        probes = Probes.of(cut, self._size, self._dtype)
        by_part = [jax.device_get(self._of_part(probes, part)) for _, part in parts_of(rows)]
        return [
            Reads(
                np.any([reads.is_read for reads in parts], axis=0),
                np.all([reads.reads_one for reads in parts], axis=0),
                np.max([reads.share_crossing for reads in parts], axis=0),
                np.max([reads.span for reads in parts]),
            )
            for parts in zip(*by_part)
        ]


def _nothing(count: int) -> Reads:
    """Those of terms that depend on none of so many columns."""
    return Reads(np.zeros(count, bool), np.ones(count, bool), np.zeros(count), np.zeros((), int))


class Probes(NamedTuple):
    """Directions along columns, and their entries.

    :ivar directions: (4 S, P): two along each column, a random one, and its first half.
    :ivar random: the random direction's entries, by column, (S, longest). :ivar times: theirs, -1 outside of a chain.
    """

    directions: np.ndarray
    random: Array
    times: Array

    @classmethod
    def of(cls, cut: Cut, size: int, dtype: DTypeLike) -> Probes:
        columns = cut.columns
        random = np.random.default_rng(0).normal(size=size).astype(dtype)
        one_column, first_half = np.zeros((2, len(columns), size), dtype)
        for i, column in enumerate(columns):
            half = column[: len(column) // 2]
            one_column[i, column], first_half[i, half] = random[column], random[half]
        longest = max(map(len, columns))
        return cls(
            np.concatenate([directions_along(columns, size, dtype), one_column, first_half]),
            jnp.asarray(np.stack([np.resize(random[column], longest) for column in columns])),
            jnp.asarray(np.stack([np.resize(-1 if times is None else times, longest) for times in cut.times])),
        )

    def off(self, changes: Array, place: Array) -> tuple[Array, Array]:
        """By how much the derivatives of predictors along random directions are off, if they depend on one entry of
        each column, and how much of that may be rounding, (n, C, S).

        :param changes: their derivatives along the directions, at least the first 3 S. :param place: of the entry in
            each column, (n, S).
        """
        count, longest = self.random.shape
        values, actual = changes[..., :count], changes[..., 2 * count : 3 * count]
        at = jnp.arange(count), jnp.clip(place, 0, longest - 1)
        error, size = jnp.abs(values * self.random[at][:, None] - actual), jnp.abs(actual)
        largest = jnp.max(size, axis=1, keepdims=True)  # of sums that cancel, rounding is a share of the addends
        return error, jnp.finfo(changes.dtype).eps * jnp.maximum(1e3 * size, MOST_ROUNDINGS * largest)

    def reads(self, changes: Array) -> Reads:
        """The reads of terms. ``changes``: their predictors' derivatives along the directions, (n, C, 4 S)."""
        count, longest = self.random.shape
        _, place = derivatives_and_positions(changes, count)
        actual, half = changes[..., 2 * count : 3 * count], changes[..., 3 * count :]
        at = jnp.arange(count), jnp.clip(place, 0, longest - 1)
        error, rounding = self.off(changes, place)
        is_read = jnp.any(actual != 0, axis=1)
        times, in_chain = self.times[at], is_read & (self.times[:, 0] >= 0)
        latest = jnp.max(times, axis=1, where=in_chain, initial=-1)
        first = jnp.min(times, axis=1, where=in_chain, initial=jnp.iinfo(times.dtype).max)
        crosses = jnp.any((half != 0) & (half != actual), axis=1)
        return Reads(
            jnp.any(is_read, axis=0),
            jnp.all(error <= rounding, axis=(0, 1)),
            jnp.mean(crosses, axis=0),
            jnp.max(jnp.where(jnp.any(in_chain, axis=1), latest - first, 0)),
        )


def parts_of(rows: Arrays, *, rounded: bool = False) -> Iterator[tuple[np.ndarray, Arrays]]:
    """Rows in parts of equal length, the first ones once more in the last, with their numbers.

    :param rounded: whether the length is a power of two.
    """
    shared, own = split_rows(rows)
    count = max(num_rows(own), 1)
    length = min(power_of_two(count) if rounded else count, CHUNK)
    for start in range(0, count, length):
        taken = np.arange(start, start + length) % count
        yield taken, shared | {name: array[taken] for name, array in own.items()}
