"""A pass over rows of a Gaussian beside members of exponential families."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from ..engines.mean_field import SETTLED, MeanFieldInfo, MeanFieldState, MeanFieldUpdates
from ..model.bad_rows import describe_bad_rows
from ..model.data.rows import Rows, pad
from ..options import Info
from .passes import Pass, rows_named


class MeanFieldPass(Pass[MeanFieldState, MeanFieldInfo]):
    """One call of :meth:`RVGA.run` with families by site.

    :param block_size: rows in one update. :param of_pass: as :class:`~.passes.Pass` takes it.
    """

    def __init__(self, updates: MeanFieldUpdates, block_size: int, **of_pass: Any):
        super().__init__(block_size=block_size, **of_pass)
        self._updates = updates
        self.notes |= {"blocks": 0, "largest": 0.0}

    def size(self, offset: int) -> int:
        return self._block

    def step(
        self, state: MeanFieldState, rows: Rows, weights: np.ndarray, offset: int
    ) -> tuple[MeanFieldState, MeanFieldInfo]:
        return self._updates.block(state, *jax.device_put(pad(rows, self._block, weights)))

    def on_result(self, state: MeanFieldState, rows: Rows, report: MeanFieldInfo, offset: int) -> None:
        self.notes["blocks"] += 1
        self.notes["largest"] = max(self.notes["largest"], float(report.decrement))

    def raise_bad_rows(self, before: MeanFieldState, after: MeanFieldState, rows: Rows, numbers: np.ndarray) -> None:
        """:raises ValueError: about these rows."""
        theta = self._updates.gaussian(before).mean
        reason = describe_bad_rows(self._program, theta, rows, numbers)
        if reason is None and self._updates.dependence(rows).max() > self._updates.width:
            reason = "one depends on more entries of the sites that family names than the rows before: shuffle the rows"
        raise ValueError(
            f"the update on {rows_named(numbers)} has no finite result{'' if reason is None else ': ' + reason}. The "
            "last good state is kept as .state."
        )

    def info(self) -> Info:
        """For the posterior's ``info``."""
        return {"num_blocks": self.notes["blocks"], "converged": self.notes["largest"] < SETTLED} | self.skipped()
