"""Priors that read the data: what the data determine of them is computed once a run, from all rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import Array

from ...core.compilation import jit_once
from ...core.jaxprs.interpret import PartialEvaluation, depends_on, partial_evaluation
from ..data.rows import Arrays, num_rows


class PriorConstants(NamedTuple):
    """The arrays of a prior that data determine.

    :ivar num_rows: of the data. :ivar arrays: residuals of :class:`DataPrior`'s ``records`` and ``draw``.
    """

    num_rows: int
    arrays: tuple[tuple[Array, ...], tuple[Array, ...]]


class DataPrior(NamedTuple):
    """The sites of a prior that read the data, evaluated in two stages: the data's part, and the rest.

    :ivar records: data; theta (P,), parameters (K,) -> the sites' records by name.
    :ivar draw: data; random key, parameters (K,) -> theta (P,), a draw from the prior.
    """

    records: PartialEvaluation
    draw: PartialEvaluation

    def constants(self, rows: Arrays) -> PriorConstants:
        rows = {name: rows[name] for name in sorted(rows)}
        arrays = jit_once(lambda rows: (self.records.residuals(rows), self.draw.residuals(rows)))(rows)
        return PriorConstants(num_rows(rows), arrays)

    def is_same(self, other: DataPrior) -> bool:
        """Whether both are one function of their constants."""
        return self.records.is_same(other.records) and self.draw.is_same(other.draw)


def data_dependence(
    outputs: Callable[..., dict[str, Any]], one_row: Arrays, two_rows: Arrays, *parameters: Any
) -> dict[str, frozenset[str]]:
    """The named outputs that read data arrays, with these; or the number of rows alone, with none.

    :param outputs: (rows, *parameters) -> a pytree by name.
    """
    reads = depends_on(lambda rows: outputs(rows, *parameters), dict(one_row))
    dependent = {name: arrays for name, arrays in reads.items() if arrays}
    others = [name for name in reads if name not in dependent]

    def differ(names: list[str]) -> bool:
        def chosen(rows, *parameters):
            values = outputs(rows, *parameters)
            return {name: values[name] for name in names}

        one, two = (partial_evaluation(chosen, rows, *parameters) for rows in (one_row, two_rows))
        return not one.is_same(two)

    if others and differ(others):
        dependent |= {name: frozenset() for name in others if differ([name])}
    return dependent


class DeterministicSites(NamedTuple):
    """Names of a model's deterministic sites.

    :ivar of_latents: functions of the latent sites.
    :ivar of_data: functions of the latent sites and of all rows, such as a mean over them.
    :ivar of_rows: those with values for each row, in a plate or not.
    """

    of_latents: frozenset[str] = frozenset()
    of_data: frozenset[str] = frozenset()
    of_rows: frozenset[str] = frozenset()
