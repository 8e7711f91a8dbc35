"""A random order in which rows are read that lie in memory or in files, without a second copy of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jax import Array

from ..model.data.rows import Rows, joined, num_rows, selected
from ..options import key_numbers

SLICE = 2**13  # rows that are selected at a time: while they are copied, they stay in the processor's cache
BUFFER_NUMBERS = 2**25  # in the rows that are read to be mixed with each other
FEWEST_PIECES, MOST_PIECES = 8, 256  # from places all over the data that are read by turns
OPEN_NUMBERS = 2**27  # in pieces that are read by turns, if they are more than the fewest


class Round(NamedTuple):
    """Rows that are read together and handed out in random order.

    :ivar position: how many rows are handed out before them. :ivar parts: (K, 2), first row in the data and length.
    """

    position: int
    parts: np.ndarray

    @property
    def length(self) -> int:
        return int(self.parts[:, 1].sum())


class RandomOrder:
    """Rows in an order that the key and the sizes determine, from any position on.

    :param reader_at: row -> a function that reads so many of the rows that follow it.
    """

    def __init__(
        self, reader_at: Callable[[int], Callable[[int], Rows | None]], rounds: Sequence[Round], rng_key: Array
    ):
        self._reader_at, self._rounds = reader_at, rounds
        self._seed = key_numbers(rng_key)
        self._last: tuple[int, np.ndarray] | None = None

    def open_at(self, position: int) -> Iterator[Rows]:
        """The rows from a position in the order on, in blocks."""
        readers: dict[int, Callable[[int], Rows | None]] = {}
        for number, each in enumerate(self._rounds):
            if each.position + each.length <= position:
                continue
            readers = {int(row): readers.get(int(row)) or self._reader_at(int(row)) for row in each.parts[:, 0]}
            rows = joined([_all_of(readers[int(row)], int(row), int(length)) for row, length in each.parts])
            readers = {int(row + length): readers[int(row)] for row, length in each.parts}
            order = self._order_of(number)
            for start in range(max(position - each.position, 0), len(order), SLICE):
                yield selected(rows, order[start : start + SLICE])

    def number(self, position: int) -> int:
        """The number in the data of the row at a position in the order."""
        ends = np.cumsum([each.length for each in self._rounds])
        index = int(np.searchsorted(ends, position, side="right"))
        row = int(self._order_of(index)[position - self._rounds[index].position])
        for first, length in self._rounds[index].parts:
            if row < length:
                return int(first) + row
            row -= int(length)
        raise IndexError(f"there is no row at position {position}.")

    def _order_of(self, number: int) -> np.ndarray:
        if self._last is None or self._last[0] != number:
            rng = np.random.default_rng([*self._seed, number])
            self._last = number, rng.permutation(self._rounds[number].length)
        return self._last[1]


def _all_of(reader: Callable[[int], Rows | None], row: int, length: int) -> Rows:
    """:raises ValueError: if there are fewer rows than were promised."""
    rows = reader(length)
    length_read = 0 if rows is None else num_rows(rows)
    if rows is None or length_read < length:
        raise ValueError(
            f"the data end after {row + length_read} rows, and their num_rows and piece_sizes say that rows {row} to "
            f"{row + length - 1} are there."
        )
    return rows


def one_round(total: int) -> list[Round]:
    """For rows in memory: all at once."""
    return [Round(0, np.array([[0, total]]))]


def rounds_of(pieces: Sequence[int], numbers_per_row: int, rng_key: Array) -> list[Round]:
    """For rows in files: pieces from all over the data are taken together, and each round has a share of each.

    :param pieces: the data's pieces, as numbers of rows that are fast to read one after the other.
    """
    capacity = max(BUFFER_NUMBERS // numbers_per_row, 1)
    lengths = np.asarray([length for length in pieces if length])
    if lengths.sum() <= capacity:
        return one_round(int(lengths.sum()))
    cuts = -(-FEWEST_PIECES // len(lengths))
    lengths = np.concatenate([_even(length, cuts) for length in lengths])
    starts = np.cumsum(lengths) - lengths
    order = np.random.default_rng(key_numbers(rng_key)).permutation(len(lengths))
    rounds, position = [], 0
    for together in _waves(lengths, order, max(capacity, OPEN_NUMBERS // numbers_per_row)):
        count = -(-int(lengths[together].sum()) // capacity)
        shares = np.stack([_even(length, count) for length in lengths[together]])
        firsts = starts[together][:, None] + np.cumsum(shares, axis=1) - shares
        for first, share in zip(firsts.T, shares.T):
            taken = share > 0
            rounds.append(Round(position, np.stack([first[taken], share[taken]], axis=1)))
            position += int(share.sum())
    return rounds


def _waves(lengths: np.ndarray, order: np.ndarray, most_rows: int) -> list[np.ndarray]:
    """Pieces that are read by turns: as many as may be open at once, and about equally many each."""
    open_rows, count, waves = 0, 0, 1
    for length in lengths[order]:
        open_rows, count = open_rows + length, count + 1
        if count > FEWEST_PIECES and (open_rows > most_rows or count > MOST_PIECES):
            open_rows, count, waves = length, 1, waves + 1
    return np.array_split(order, max(min(waves, len(order) // FEWEST_PIECES), 1))


def _even(length: int, count: int) -> np.ndarray:
    """Rows in parts whose sizes differ by one at most."""
    ends = length * np.arange(count + 1) // count
    return np.diff(ends)
