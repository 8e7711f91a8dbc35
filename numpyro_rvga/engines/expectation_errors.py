"""The errors of the expectations in a bound."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.updates.factors import ErrorEstimates, Kind, covariances
from ..core.updates.state import State
from ..model.data.row_set import num_distinct, once_each
from ..model.data.rows import Rows, linspace_indices, num_rows, selected
from ..user_warnings import warn
from .engine import Engine
from .kinds import NUM_HELD_OUT
from .row_chunks import chunks_of

WORTH_A_WARNING = 1.0  # nats, in all
MOST_ROWS = 4096
MOST_NODES = 2**20  # that no search has used
DEVIATIONS = 2.0  # of a standard error


class Accuracy(NamedTuple):
    """The accuracy of the expectations in a bound, in nats.

    :ivar error: by how much they may be off, all together. Infinite: nodes far out meet a density that is zero or NaN.
    :ivar excess: the estimated excess of the bound: a search fits the nodes that it uses.
    :ivar mendable: the part of the error that a thorough engine finds better.
    """

    error: float
    excess: float
    mendable: float = 0.0


def expectation_errors(engine: Engine, state: State, rows: Rows, error_estimates: ErrorEstimates | None) -> Accuracy:
    """The accuracy of expectations at q, over the prior and all rows of a state, estimated from some of the rows.

    Rules of few nodes estimate their errors. Of samples, the standard error is that of several sets of held-out nodes,
    which no search has used.

    :param rows: all, or a sample. No more than MOST_ROWS are used.
    :param error_estimates: of all factors at q, or None. They suffice where their errors are small.
    """
    kinds = (*engine.kinds, *engine.prior_kinds)
    rows = engine.program.inputs(rows)
    if not num_rows(rows) or all(not kind.has_errors and kind.held_out is None for kind in kinds):
        return Accuracy(0.0, 0.0)
    if error_estimates is not None:
        of_kinds = [Accuracy(float(error), 0.0) for error in np.asarray(error_estimates.errors)]
        allowed = engine.effort.allowed_error(float(state.log_evidence), int(state.num_rows))
        accuracy = _together(engine, of_kinds)
        if accuracy.error <= allowed or all(kind.held_out is None for kind in kinds):
            return accuracy
    most = MOST_ROWS
    if any(kind.held_out is not None and not t.by_draws for kind, t in zip(engine.kinds, engine.program.terms)):
        most = min(most, MOST_NODES // (NUM_HELD_OUT * engine.options.num_samples))
    total = num_rows(rows) if engine.program.whole else int(state.num_rows)
    some, weights = rows, np.ones(num_rows(rows), np.float32)
    if num_distinct(rows, most) <= most:
        some, weights = once_each(rows, weights)
    if num_rows(some) > most:
        some = selected(rows, linspace_indices(num_rows(rows), max(most, 2)))
        weights = np.ones(num_rows(some), np.float32)
    chunks = chunks_of(engine, some, engine.numbers_per_row, weights)
    place = engine.devices.put((state.mean, state.root))
    arguments, count = (engine.program.prior_inputs, *place, chunks), int(weights.sum())
    level = 0 if engine.effort.is_little_work(count) else 1
    if error_estimates is not None and count == total:  # only the held-out nodes are to be compiled then
        held_out = engine.once(("held-out values", level), lambda: _compiled(engine, _held_out_values, level))
        of_rows, of_prior = jax.device_get(held_out(*arguments))
        sums = [
            _Sums(error, None if values is None else value - values, np.zeros(()))
            for value, error, values in zip(
                error_estimates.values, error_estimates.errors, [*of_prior, *of_rows]
            )  # prior first
        ]
        return _together(engine, [_accuracy(x, 1, 1) for x in sums])
    few = error_estimates is not None and error_estimates.refinement is not None
    key = "expectation errors", level, few
    summed = engine.once(key, lambda: _compiled(engine, _summed, level, by_few_nodes=few))
    of_some, of_prior = jax.device_get(summed(*arguments))
    of_prior = [_accuracy(x, 1, 1) for x in of_prior]
    return _together(engine, of_prior + [_accuracy(x, total, count) for x in of_some])


def has_finite_bound(error: float) -> bool:
    """Whether an error of expectations is finite. Otherwise the bound is minus infinity or undefined, whatever its
    value over the nodes."""
    return math.isfinite(error)


def warn_of(error: float) -> None:
    """If the expectations are so inexact that the user should know."""
    if not has_finite_bound(error):
        warn(
            "q reaches places where the model's density is zero or NaN, which the nodes of the search have not met: "
            "elbo is None. khat(data) says how far off q is; NUTS stays where the density is positive."
        )
    elif not error <= WORTH_A_WARNING:
        warn(
            f"the expectations at q have an error of up to {error:.2g} nats, and so does elbo. Compare with NUTS, or "
            "start NUTS from this posterior; where rows have more than three predictors, raise num_samples."
        )


class _Sums(NamedTuple):
    """Sums over the factors of one kind.

    :ivar errors: as the rule estimates them; infinite if it does not.
    :ivar excess: the rule's values less those of each set of held-out nodes, (NUM_HELD_OUT,); None but for samples.
    :ivar squares: of the excess of each factor, averaged over sets, (); zero but for samples.
    """

    errors: Array | np.ndarray
    excess: Array | np.ndarray | None = None
    squares: Array | np.ndarray | float = 0.0


def _accuracy(sums: _Sums, total: int, count: int) -> Accuracy:
    """The accuracy over ``total`` rows, estimated from ``count``. The rule's own error is kept where it is below a
    standard error."""
    scale = total / count
    errors = scale * float(sums.errors)
    if sums.excess is None:
        return Accuracy(errors, 0.0)
    excess = scale * np.asarray(sums.excess, np.float64)
    if not np.all(np.isfinite(excess)):
        return Accuracy(math.inf, 0.0)
    of_sets = np.var(excess, ddof=1) / NUM_HELD_OUT
    of_rows = scale**2 * float(sums.squares) if total > count else 0.0
    standard_error = DEVIATIONS * math.sqrt(of_sets + of_rows)
    return Accuracy(errors, 0.0) if errors <= standard_error else Accuracy(standard_error, float(np.mean(excess)))


def _together(engine: Engine, of_kinds: list[Accuracy]) -> Accuracy:
    """The accuracy of all kinds, of which the rows' are the last."""
    of_rows = engine.effort.rows_mended
    is_mended = [engine.effort.prior_is_mended] * (len(of_kinds) - len(of_rows)) + [*of_rows]
    return Accuracy(
        sum(each.error for each in of_kinds),
        sum(each.excess for each in of_kinds),
        sum(each.error for each, is_one in zip(of_kinds, is_mended) if is_one),
    )


def _compiled(
    engine: Engine, summed: Callable[[tuple, tuple, Array], list], level: int, *, by_few_nodes: bool = False
) -> Callable:
    """A compiled function: ``program.prior_inputs``, mean, root and chunks of rows -> sums of rows and of the prior, by
    kind.

    :param summed: kinds, factors and root -> sums by kind. :param level: LLVM's, see :class:`Compiled`.
    :param by_few_nodes: whether averages over many nodes are replaced by expectations by few.
    """

    def taken(kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
        return tuple(kind.by_nodes("few") if by_few_nodes and kind.sampled else kind for kind in kinds)

    def of_all(prior_inputs: dict, mean: Array, root: Array, chunks: tuple) -> tuple[list, list]:
        def of_chunk(chunk):
            return summed(taken(engine.kinds), engine.linearize(engine.prepare(*chunk), mean), root)

        prior = engine.prior_set(prior_inputs)
        of_prior = summed(taken(prior.kinds), prior.linearize(prior.first, mean), root)
        return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(of_chunk, chunks)), of_prior

    return engine.compiled(of_all, level=level)


def _held_out_values(kinds: tuple[Kind, ...], factors: tuple, root: Array) -> list[Array | None]:
    """E[phi] over each set of held-out nodes, (NUM_HELD_OUT,); None for kinds that take no samples."""
    return [
        None if kind.held_out is None else jnp.sum(kind.held_out(f.predictors, covariance, f.constants), axis=0)
        for kind, f, covariance in zip(kinds, factors, covariances(factors, root.T))
    ]


def _summed(kinds: tuple[Kind, ...], factors: tuple, root: Array) -> list[_Sums]:
    """By kind: the errors of its expectations, and the excess of their values over those of held-out nodes."""
    result = []
    for kind, block, covariance in zip(kinds, factors, covariances(factors, root.T)):
        arguments = block.predictors, covariance, block.constants
        moments, errors = kind.expect(*arguments)
        sums = _Sums(jnp.sum(errors))
        if kind.held_out is not None:
            if not kind.has_errors:
                sums = sums._replace(errors=jnp.full((), jnp.inf, root.dtype))
            excess = moments[0][:, None] - kind.held_out(*arguments)
            sums = sums._replace(excess=jnp.sum(excess, axis=0), squares=jnp.sum(jnp.mean(excess, axis=1) ** 2))
        result.append(sums)
    return result
