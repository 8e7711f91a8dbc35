"""Rows in chunks of equal length, whose Jacobians are in memory one chunk at a time."""

from __future__ import annotations

import numpy as np

from ..model.data.row_set import once_each
from ..model.data.rows import Rows, in_blocks, num_rows, pad
from .engine import Engine
from .joint_solver import RowChunks

CHUNK_NUMBERS = 2**24  # in the Jacobians of a chunk


def chunks_of(engine: Engine, rows: Rows, numbers_per_row: int, weights: np.ndarray | None = None) -> RowChunks:
    """Rows, as the terms take them, and weights as (chunks, n, ...) arrays of equal length.

    :param numbers_per_row: size of a row's Jacobians, which are in memory a chunk at a time.
    """
    rows = engine.program.inputs(rows)
    total = num_rows(rows)
    count = max(1, -(-total * numbers_per_row // CHUNK_NUMBERS))
    size = engine.devices.rounded_up(-(-total // count))
    return RowChunks(*engine.devices.put_rows(in_blocks(pad(rows, count * size, weights), size), axis=1))


def distinct_chunks_of(engine: Engine, rows: Rows) -> RowChunks:
    """All rows as :func:`chunks_of` has them, equal ones as one row of a larger weight where many are equal."""
    rows = engine.program.inputs(rows)
    rows, weights = once_each(rows, np.ones(num_rows(rows), np.float32))
    return chunks_of(engine, rows, engine.numbers_per_row, weights)
