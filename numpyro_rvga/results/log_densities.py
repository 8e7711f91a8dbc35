"""A program's log densities at draws of its latent sites, over all rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax import Array, lax

from ..core.compilation import Compiled
from ..model import Program
from ..model.data.row_set import once_each
from ..model.data.rows import Arrays, num_rows, pad, selected

# Bounds the memory of a chunk of rows: draws times rows times elements of an observed site.
CHUNK_VALUES = 2**20
BATCH = 16  # draws of theta at which a model of all data runs at once

RowTerms = dict[str, np.ndarray]
"""Log-likelihoods of some rows by site, each of shape (draws, rows, *elements)."""


class LogDensities:
    """Compiled once for each number of draws and of rows."""

    def __init__(self, program: Program):
        self._program = program
        self._priors = Compiled(jax.vmap(program.log_prior))
        self._row_terms = Compiled(jax.vmap(program.log_likelihood, (0, None)))
        self._few_at_a_time = Compiled(self._in_batches)

    def joint(self, theta: Array, rows: Arrays) -> np.ndarray:
        """The log joint density in unconstrained space at theta (n, P), with all row terms, summed in float64: (n,)."""
        if self._program.whole:
            return self._joint_of_whole(theta, rows)
        rows, weights = once_each({n: np.asarray(x) for n, x in rows.items()}, np.ones(num_rows(rows)))
        return self.summed(theta, _weighted(self.chunks(theta, rows), weights))

    def summed(self, theta: Array | np.ndarray, chunks: Iterable[RowTerms]) -> np.ndarray:
        """The same from the row terms of chunks of rows."""
        total = np.asarray(self._priors(theta), np.float64)
        for terms in chunks:
            total = total + _sum_of_rows(terms, len(total))
        return total

    def chunks(self, theta: Array, rows: Arrays) -> Iterator[RowTerms]:
        """The row terms of successive chunks of rows."""
        program, inputs = self._program, self._program.inputs(rows)
        if program.whole:
            yield jax.device_get(self._few_at_a_time(theta, inputs))
            return
        examples = jax.eval_shape(program.log_likelihood, _one_of(theta), program.inputs(program.example_rows))
        elements = max(values.size // values.shape[0] for values in examples.values())
        most = max(1, CHUNK_VALUES // (len(theta) * max(elements, program.largest_array)))
        total = num_rows(inputs)
        size = -(-total // -(-total // most))  # of chunks as long as each other, which are compiled once
        for start in range(0, total, size):
            some = selected(inputs, slice(start, start + size))
            terms = jax.device_get(self._row_terms(theta, pad(some, size)[0]))
            yield {site: values[:, : num_rows(some)] for site, values in terms.items()}

    def _in_batches(self, theta: Array, inputs: Arrays) -> dict[str, Array]:
        return lax.map(lambda at: self._program.log_likelihood(at, inputs), theta, batch_size=BATCH)

    def _joint_of_whole(self, theta: Array, rows: Arrays) -> np.ndarray:
        """The log joint density of a model that is run on all rows at once, a few draws at a time."""
        inputs = self._program.inputs(rows)
        terms = jax.eval_shape(self._program.log_likelihood, _one_of(theta), inputs)
        size = max(1, CHUNK_VALUES // max(1, sum(values.size for values in terms.values())))
        draws, totals = np.asarray(theta), []
        for start in range(0, len(draws), size):
            some, weights = pad(draws[start : start + size], min(size, len(draws)))
            totals.append(self.summed(some, [jax.device_get(self._row_terms(some, inputs))])[weights > 0])
        return np.concatenate(totals)


def _one_of(theta: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(theta.shape[1:], theta.dtype)


def _sum_of_rows(terms: RowTerms, count: int) -> Any:
    """(n,), in float64."""
    return sum(values.reshape(count, -1).sum(axis=1, dtype=np.float64) for values in terms.values())


def _weighted(chunks: Iterable[RowTerms], weights: np.ndarray) -> Iterator[RowTerms]:
    """Row terms of chunks of rows, each times the weight of its row."""
    start = 0
    for terms in chunks:
        stop = start + next(iter(terms.values())).shape[1]
        some = weights[start:stop]
        yield {site: values * some.reshape(-1, *[1] * (values.ndim - 2)) for site, values in terms.items()}
        start = stop
