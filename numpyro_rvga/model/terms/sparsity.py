"""Which few entries of theta each term depends on, by the derivatives of its predictors along directions.

theta is cut into columns: the sites, or their columns. Rows with crossed or nested effects depend on one entry of each
column. Two directions along the column give its derivative and its position.

Groups with several effects each, such as an intercept and slopes, have as many columns of one length. If each term
depends on one group, its effects are eliminated together: they are a chain whose times are not linked.

Of a chain, as of latent states that follow one another in time, terms depend on several entries that lie close. If no
two are more than ``lag`` apart, every (lag + 1)-th entry is a column of which terms depend on one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.matrices.jacobians import SparseJacobian
from ...core.updates.joint import EliminationOrder
from ..data.rows import Arrays
from ..layout import Layout
from .reads import Cut, Reader, Reads, derivatives_and_positions, directions_along
from .terms import Terms, linearize_along, merged, predictors_of, split_rows

FEWEST_PARAMETERS = 200  # below, whole matrices are small
FEWEST_IN_GROUPS = 600  # parameters that are eliminated by groups
FEWEST_IN_CHAIN = 400  # parameters: chains take longer to compile than whole matrices
MOST_LAG = 3  # of a chain
MOST_CROSSING = 0.1  # share of a chain's terms that depend on entries of both of its halves
MOST_BLOCK = 64  # entries of a chain that are eliminated together,
LEAST_BLOCK = 16  # and no fewer: products of small matrices take as long as of these
MOST_SPLIT = 64  # entries of a column of which terms read several
MOST_SLOTS = 64  # columns that a term reads
FEW, MANY = 64, 4096  # rows that are probed first, and of how many


class Pattern(NamedTuple):
    """The entries of theta that a term depends on: one of each column.

    :ivar columns: arrays of entries of theta. :ivar place: (P,), the position of each entry in the elimination order.
    :ivar num_diagonal: d: the first d positions are eliminated.
    :ivar num_leading: how many columns, which come first, have these positions: at most one, but in a chain.
    """

    columns: tuple[np.ndarray, ...]
    place: np.ndarray
    num_diagonal: int
    num_leading: int


class Sparsity(NamedTuple):
    """Which entries of theta each term of a model depends on.

    :ivar order: of elimination. :ivar patterns: by whether a term is one of the prior, and its site.
    :ivar numbers_per_row: size of the Jacobians of a row.
    :ivar block: of a chain: entries that are eliminated together, no fewer than lie between two that a term depends on.
        None: no term depends on two of the entries that are eliminated.
    """

    order: EliminationOrder
    patterns: dict[tuple[bool, str], Pattern]
    numbers_per_row: int
    block: int | None

    @property
    def key(self) -> tuple:
        """Equal if two say the same of a model."""
        return (
            self.order.num_diagonal,
            self.block,
            self.order.indices.tobytes(),
            tuple((name, len(pattern.columns)) for name, pattern in self.patterns.items()),
        )


# ---------------------------------------------------------------------- Jacobians
def sparse_jacobian(terms: Terms, pattern: Pattern, theta: Array, rows: Arrays) -> tuple[Array, SparseJacobian]:
    """Predictors at theta (n E, C), and their Jacobians."""
    if not terms.num_predictors:
        return _without_predictors(terms, pattern, theta, rows)
    directions = directions_along(pattern.columns, theta.size, theta.dtype)
    predictors, changes = linearize_along(terms, theta, directions, rows)
    values, place = derivatives_and_positions(changes, len(pattern.columns))
    starts = np.cumsum([0, *[len(column) for column in pattern.columns]])[:-1]
    numbers = jnp.asarray(pattern.place[np.concatenate(pattern.columns)], jnp.int32)
    lengths = np.array([len(column) for column in pattern.columns])
    index = numbers[jnp.clip(place, 0, lengths - 1) + starts]
    sizes = theta.size, pattern.num_diagonal, pattern.num_leading
    return predictors, SparseJacobian(index, values, *sizes)


def _without_predictors(terms: Terms, pattern: Pattern, theta: Array, rows: Arrays) -> tuple[Array, SparseJacobian]:
    """Jacobians of zeros, for terms that theta does not enter."""
    predictors = merged(predictors_of(terms, theta, rows))
    index = jnp.full((len(predictors), 1), pattern.place[pattern.columns[0][0]], jnp.int32)
    values = jnp.zeros((len(predictors), 0, 1), theta.dtype)
    return predictors, SparseJacobian(index, values, theta.size, pattern.num_diagonal, pattern.num_leading)


def selecting_pattern(size: int) -> Pattern:
    """The pattern of terms that depend on one entry of theta."""
    return Pattern((np.arange(size),), np.arange(size), size, 1)


def are_selections(all_terms: Sequence[Terms], size: int, dtype, rows: Arrays) -> list[bool]:
    """Whether each term's one predictor is an affine function of one entry of theta."""
    possible = [terms.is_affine and terms.num_predictors == 1 and not terms.num_local for terms in all_terms]
    asked = [terms for terms, is_possible in zip(all_terms, possible) if is_possible]
    reads = iter(Reader(asked, size, dtype)(Cut.without_chain(selecting_pattern(size).columns), rows))
    return [is_possible and bool(next(reads).reads_one[0]) for is_possible in possible]


def find_sparsity(layout: Layout, of_rows: Reader, of_prior: Reader, rows: Arrays, shared: Arrays) -> Sparsity | None:
    """The entries that terms depend on, if these are few for each term; None if not, or if theta is short.

    :param of_rows: of the terms of rows, and ``of_prior`` of those of the prior.
    :param rows: all that there are, and what they share.
    :param shared: what prior terms depend on besides theta.
    """
    reads_all = any(terms.num_local or terms.by_draws for terms in of_rows.all_terms)
    if layout.size < FEWEST_PARAMETERS or reads_all:
        return None
    given, own = split_rows(rows)
    few = given | {name: array[:FEW] for name, array in own.items()}
    is_large = any(len(array) > MANY for array in own.values())

    def reads_of(cut: Cut) -> list[Reads]:
        """The reads of all terms; of a few rows' terms only, if these depend on too many entries."""
        of_few = of_rows(cut, few) if is_large else []
        if is_large and _too_many(of_few, cut).any():
            return of_few
        return of_rows(cut, rows) + of_prior(cut, shared)

    columns, lag = _columns(layout), 0
    cut = Cut.without_chain(columns)
    reads = reads_of(cut)
    length = _chain_length(reads, cut)
    while _too_many(reads, cut).any():
        lag += 1
        if length is None or lag > MOST_LAG:
            return None
        cut = _with_chain(columns, length, lag)
        reads = reads_of(cut)
    if not lag and (length := _group_length(columns, reads)) is not None:
        together = _with_chain(columns, length, 0)
        of_groups = reads_of(together)
        if not max(int(each.span) for each in of_groups):
            cut, reads = together, of_groups
    return _sparsity(of_rows.all_terms, of_prior.all_terms, cut, reads)


def _sparsity(
    row_terms: Sequence[Terms], prior_terms: Sequence[Terms], cut: Cut, all_reads: list[Reads]
) -> Sparsity | None:
    """The sparsity that the reads of terms allow. The chain is eliminated, or the longest of the columns of which no
    term depends on two entries."""
    columns, reads_one = cut.columns, _reads_one(all_reads)
    whole, split = [np.flatnonzero(chosen & ~cut.in_chain) for chosen in (reads_one, ~reads_one)]
    if cut.width:
        leading, block = np.flatnonzero(cut.in_chain), cut.width * (1 + int(max(reads.span for reads in all_reads)))
        eliminated = cut.chain
        if block > MOST_BLOCK or 4 * block > len(eliminated):
            return None
        block = max(block, LEAST_BLOCK)
    elif len(whole):
        longest = max(whole, key=lambda i: len(columns[i]))
        leading, block, eliminated, whole = np.array([longest]), None, columns[longest], whole[whole != longest]
    else:
        return None
    others = [*whole, *split]
    order = EliminationOrder(np.concatenate([eliminated, *[columns[i] for i in others]]), len(eliminated))
    patterns = {}
    sides = [(False, terms) for terms in row_terms] + [(True, terms) for terms in prior_terms]
    for (in_prior, terms), reads in zip(sides, all_reads):
        slots = [columns[i] for i in leading if reads.is_read[i]]
        num_leading = len(slots)
        for i in (i for i in others if reads.is_read[i]):
            slots += [columns[i]] if reads_one[i] else list(columns[i][:, None])
        if not terms.num_predictors:
            slots = [order.indices[-1:]]
        if not slots or len(slots) > MOST_SLOTS:
            return None
        patterns[in_prior, terms.site] = Pattern(tuple(slots), order.back, order.num_diagonal, num_leading)
    counts = [(t.num_elements, t.num_predictors, len(patterns[False, t.site].columns)) for t in row_terms]
    return Sparsity(order, patterns, sum(e * k * (c + 2 * k) for e, c, k in counts), block)


def _reads_one(all_reads: list[Reads]) -> np.ndarray:
    """(S,): of which columns no term depends on two entries."""
    return np.all([reads.reads_one for reads in all_reads], axis=0)


def _too_many(all_reads: list[Reads], cut: Cut) -> np.ndarray:
    """(S,): of which columns terms depend on too many entries."""
    is_long = np.array([len(column) > MOST_SPLIT for column in cut.columns])
    return ~_reads_one(all_reads) & (is_long | cut.in_chain)


def _chain_length(all_reads: list[Reads], cut: Cut) -> int | None:
    """The length of the columns of which terms depend on too many entries, if these entries lie close to each other."""
    too_many = _too_many(all_reads, cut)
    lengths = {len(column) for column, is_one in zip(cut.columns, too_many) if is_one}
    is_short = sum(len(column) for column in cut.columns if len(column) in lengths) < FEWEST_IN_CHAIN
    crossing = max(float(np.max(reads.share_crossing, where=too_many, initial=0)) for reads in all_reads)
    return lengths.pop() if len(lengths) == 1 and not is_short and crossing <= MOST_CROSSING else None


def _group_length(columns: tuple[np.ndarray, ...], all_reads: list[Reads]) -> int | None:
    """The length of several columns, of each of which no term depends on two entries, if they hold most of theta: terms
    may depend on the same place in all of them, as those of one group do, and a group is eliminated as a whole."""
    counts = Counter(len(column) for column, is_one in zip(columns, _reads_one(all_reads)) if is_one)
    length, count = max(counts.items(), key=math.prod, default=(0, 0))
    holds_most = count * length >= max(FEWEST_IN_GROUPS, sum(map(len, columns)) / 2)
    return length if count > 1 and holds_most else None


def _with_chain(columns: tuple[np.ndarray, ...], length: int, lag: int) -> Cut:
    """A chain of all columns of this length. Entries of which one term may depend are at most ``lag`` apart."""
    cut, times = [], []
    for column in columns:
        starts = range(lag + 1) if len(column) == length else [None]
        cut += [column if start is None else column[start :: lag + 1] for start in starts]
        times += [None if start is None else np.arange(start, length, lag + 1) for start in starts]
    return Cut(tuple(cut), tuple(times), sum(len(column) == length for column in columns))


def _columns(layout: Layout) -> tuple[np.ndarray, ...]:
    """The entries of each site along its longest axis, one column for each position on the others."""
    columns, start = [], 0
    for shape in (shape or (1,) for shape in layout.shapes.values()):
        entries = start + np.arange(math.prod(shape)).reshape(shape)
        start += entries.size
        if entries.size:
            columns += list(np.moveaxis(entries, int(np.argmax(shape)), -1).reshape(-1, max(shape)))
    return tuple(columns)
