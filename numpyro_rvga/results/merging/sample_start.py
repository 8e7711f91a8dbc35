"""Where rounds begin if parts contradict each other, as those sorted by outcome do: at a sample of all parts' rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ...core.count import Count
from ...core.updates.state import State
from ...engines.engine import Engine
from ...model.data.rows import Rows, joined, pad
from ...streams.block_plan import FIRST_BLOCK_NUMBERS

FEWEST_ROWS, ROWS_PER_PARAMETER = 2000, 100  # of a sample

SampleOf = Callable[[Sequence[int], Sequence[int]], Sequence[Rows]]


def state_of_sample(engine: Engine, start: State, counts: Sequence[int], sample_of: SampleOf) -> State | None:
    """The best Gaussian of a sample, each of whose rows counts as often as there are rows that it stands for.

    :param start: the prior. :param counts: rows of each part.
    :param sample_of: counts, and numbers of rows -> so many rows of each part, drawn at random.
    :return: None if there is none, and for models with so many parameters that one solve cannot take enough rows.
    """
    total = sum(counts)
    size = min(total, max(FEWEST_ROWS, ROWS_PER_PARAMETER * engine.program.layout.size))
    if size * engine.numbers_per_row > FIRST_BLOCK_NUMBERS:
        return None
    shares = [-(-size * count // total) for count in counts]
    rows = joined([rows for rows, share in zip(sample_of(counts, shares), shares) if share])
    weights = np.concatenate(
        [np.full(share, count / max(share, 1), np.float32) for share, count in zip(shares, counts)]
    )
    rows, weights = engine.devices.put_rows(pad(rows, engine.devices.rounded_up(len(weights)), weights))
    state, info = engine.joint(engine.program.prior_inputs, engine.devices.put(start), rows, weights)
    return engine.devices.fetch(state)._replace(num_rows=Count.of(total)) if bool(info.ok) else None
