"""A random order in which rows are read that lie in memory or in files, without a second copy of all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from jax import Array

from ..model.data.rows import Rows, joined, num_rows, selected
from ..options import key_numbers

SLICE = 2**13  # rows that are selected at a time: while they are copied, they stay in the processor's cache
BUFFER_NUMBERS = 2**25  # in the rows that are read to be mixed with each other
FEWEST_PIECES, MOST_PIECES = 8, 256  # from places all over the data that are read by turns
OPEN_NUMBERS = 2**27  # in pieces that are read by turns, if they are more than the fewest


class RandomOrder:
    """Rows in an order that the key and the sizes determine.

    :param reader_at: row -> a function that reads so many of the rows that follow it.
    :param rounds: the parts of the data that are read together and handed out in random order, one round after the
        other, (K, 2) each: a part's first row in the data and its number of rows.
    """

    def __init__(
        self, reader_at: Callable[[int], Callable[[int], Rows | None]], rounds: Sequence[np.ndarray], rng_key: Array
    ):
        self._reader_at, self._rounds = reader_at, rounds
        self._ends = np.cumsum([parts[:, 1].sum() for parts in rounds])
        self._seed = key_numbers(rng_key)
        self._last: tuple[int, np.ndarray] | None = None

    def blocks(self) -> Iterator[Rows]:
        """All rows, in blocks."""
        readers: dict[int, Callable[[int], Rows | None]] = {}
        for number, parts in enumerate(self._rounds):
            readers = {int(row): readers.get(int(row)) or self._reader_at(int(row)) for row in parts[:, 0]}
            rows = joined([_all_of(readers[int(row)], int(row), int(length)) for row, length in parts])
            readers = {int(row + length): readers[int(row)] for row, length in parts}
            order = self._order_of(number)
            for start in range(0, len(order), SLICE):
                yield selected(rows, order[start : start + SLICE])

    def number(self, position: int) -> int:
        """The number in the data of the row at a position in the order."""
        index = int(np.searchsorted(self._ends, position, side="right"))
        order = self._order_of(index)
        row = int(order[position - self._ends[index] + len(order)])
        for first, length in self._rounds[index]:
            if row < length:
                return int(first) + row
            row -= int(length)
        raise IndexError(f"there is no row at position {position}.")

    def _order_of(self, number: int) -> np.ndarray:
        if self._last is None or self._last[0] != number:
            rng = np.random.default_rng([*self._seed, number])
            self._last = number, rng.permutation(int(self._rounds[number][:, 1].sum()))
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


def one_round(total: int) -> list[np.ndarray]:
    """For rows in memory: all at once."""
    return [np.array([[0, total]])]


def rounds_of(pieces: Sequence[int], numbers_per_row: int, rng_key: Array) -> list[np.ndarray]:
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
    rounds = []
    for together in _waves(lengths, order, max(capacity, OPEN_NUMBERS // numbers_per_row)):
        count = -(-int(lengths[together].sum()) // capacity)
        shares = np.stack([_even(length, count) for length in lengths[together]])
        firsts = starts[together][:, None] + np.cumsum(shares, axis=1) - shares
        for first, share in zip(firsts.T, shares.T):
            taken = share > 0
            rounds.append(np.stack([first[taken], share[taken]], axis=1))
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
