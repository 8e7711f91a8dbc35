"""Priors that read the data: what the data determine of them is computed once a run, from all rows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

import jax
from jax import Array
from numpyro.distributions import Distribution

from ...core.compilation import jit_once
from ...core.jaxprs.interpret import PartialEvaluation, depends_on, partial_evaluation
from ..data.rows import Arrays, num_rows
from .tracing import SiteRecord


class PriorConstants(NamedTuple):
    """The arrays of a prior that data determine.

    :ivar num_rows: of the data. :ivar arrays: residuals of :class:`DataPrior`'s ``records`` and ``draw``.
    """

    num_rows: int
    arrays: tuple[tuple[Array, ...], tuple[Array, ...]]


class SiteArrays(NamedTuple):
    """The parts of a site's record that are arrays."""

    fn: Distribution
    value: Array
    log_abs_det: Array | None
    weight: Array | float


def of_site(record: SiteRecord) -> SiteArrays:
    return SiteArrays(record.fn, record.value, record.log_abs_det, record.weight)


class DataPrior(NamedTuple):
    """The sites of a prior that read the data, evaluated in two stages: the data's part, and the rest.

    :ivar records: data; theta (P,), parameters (K,) -> the sites' :class:`SiteArrays` by name.
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


def data_prior(
    records: Callable[[Arrays, Array, Array], dict[str, SiteArrays]],
    draw: Callable[[Arrays, Array, Array], Array],
    rows: Arrays,
    count: int,
    theta: Array,
    params: Array,
) -> DataPrior:
    """Trace the prior on all rows.

    :param records: rows, theta, parameters -> the sites' arrays by name.
    :param draw: rows, random key, parameters -> theta.
    :param rows: arrays of all rows, or of some, used for their types and the shapes of a row only.
    :param count: the number of all rows.
    """
    shapes = {
        name: jax.ShapeDtypeStruct((count, *rows[name].shape[1:]), jax.dtypes.canonicalize_dtype(rows[name].dtype))
        for name in sorted(rows)
    }

    return DataPrior(
        partial_evaluation(records, shapes, theta, params),
        partial_evaluation(draw, shapes, jax.random.key(0), params),
    )


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


def described(arrays: Mapping[str, frozenset[str]]) -> str:
    """The first site and what it reads, for messages. ``arrays``: as :func:`data_dependence` gives them."""
    site, names = next(iter(arrays.items()))
    read = f"the data array {sorted(names)[0]!r}" if names else "the number of rows"
    return f"the prior of site {site!r} reads {read}"


class DeterministicSites(NamedTuple):
    """Names of a model's deterministic sites.

    :ivar of_latents: functions of the latent sites.
    :ivar of_data: functions of the latent sites and of all rows, such as a mean over them.
    :ivar of_rows: those with values for each row, in a plate or not.
    """

    of_latents: frozenset[str] = frozenset()
    of_data: frozenset[str] = frozenset()
    of_rows: frozenset[str] = frozenset()


def classify_deterministic(
    values: Callable[[Arrays, Array], dict[str, Array]],
    of_rows: Collection[str],
    one_row: Mapping[str, Any],
    two_rows: Arrays,
    theta: Array,
) -> DeterministicSites:
    """Sort the deterministic sites by what they depend on.

    :param values: (rows, theta) -> the values of all deterministic sites.
    :param of_rows: the names of those with values for each row.
    """

    def others(rows, theta):
        return {name: value for name, value in values(rows, theta).items() if name not in of_rows}

    names = set(jax.eval_shape(lambda theta: others(one_row, theta), theta))
    of_data = frozenset(data_dependence(others, one_row, two_rows, theta)) if names else frozenset()
    return DeterministicSites(frozenset(names) - of_data, of_data, frozenset(of_rows))
