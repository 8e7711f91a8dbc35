"""Estimates from a sample of a pass's rows: the natural gradient at q, and whether the rows' order has done harm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from ..core.updates.state import State
from ..engines.certificate import BoundEvaluation, Certificate, Stratum
from ..model.data.rows import Rows, selected
from ..options import Info
from ..user_warnings import warn
from .memory import KeptRows
from .recursive_pass import RecursivePass

NUM_BATCHES = 16  # of the sample, for standard errors
LEARNED = 0.25  # of the blocks: after so many, q hardly changes what it expects
MOST_ROWS = 10_000  # from which the variance of the rows' log densities is estimated
DEVIATIONS = 3.0  # by which blocks may be more unlike each other than rows in random order make them
WORTH_A_STEP = 8  # times as many rows as the sample
HARM = 0.1  # standard deviations that q was off by, below which there is no warning,
LEFT = 0.02  # nor below so many nats of squared natural gradient, with twice their noise, that are left


def estimated(certificate: Certificate, state: State, row_pass: RecursivePass, max_looks: int) -> tuple[State, Info]:
    """The state after steps where the natural gradient is estimated well enough, and the estimates."""
    sample = row_pass.sample.items()
    assert sample is not None
    kept, batches = _strata(sample, row_pass.kept, row_pass.sample.num_seen)
    if not len(batches[0].weights):  # nearly all rows are kept, and the sample has no others
        return state, {}
    certified = certificate.estimated(state, kept, batches, max_looks)
    before, after, noise = certified.before, certified.after, certified.after.noise
    assert noise is not None
    unlike = _unlikeness(row_pass.predicted, _variance(certificate, state, sample.rows))
    off, left = _furthest(before), after.squared_natural_gradient + 2 * noise.squared
    disordered = unlike > DEVIATIONS and not (off < HARM or left < LEFT)
    if disordered:
        warn(
            f"the rows come in an order that one pass cannot undo: blocks are unlike each other (by {unlike:.1f} "
            f"standard deviations more than rows in random order), and q was off by {off:.2g} of its standard "
            f"deviations. A sample of the rows leaves {_furthest(after):.2g} of these. Read the rows again (arrays, "
            "a list of blocks, ParquetRows), or use dynamics if the parameters drift."
        )
    elif left >= LEFT:
        warn(
            "q may not be the best Gaussian: a sample of the rows leaves a squared natural gradient of "
            f"{after.squared_natural_gradient:.2g} nats, with noise of {noise.squared:.2g}. Rows that can be "
            "read again (arrays, a list of blocks, ParquetRows) are evaluated at the end."
        )
    info = {
        "looks": certified.num_evaluations,
        "squared_natural_gradient": after.squared_natural_gradient,
        "squared_natural_gradient_noise": noise.squared,
        "bound_estimate": after.bound,
        "bound_error": noise.bound,
    }
    evidence = jnp.asarray(after.bound, state.mean.dtype)
    return certified.state._replace(log_evidence=evidence), info | {"converged": left < LEFT}


def stepped(certificate: Certificate, state: State, row_pass: RecursivePass) -> State:
    """The state after a natural-gradient step estimated from the sample alone, if the rows are many and the estimate is
    good enough. Kept rows have no part in it: q was solved for with them."""
    sample = row_pass.sample.items()
    if sample is None or not WORTH_A_STEP * row_pass.sample.capacity <= row_pass.sample.num_seen:
        return state
    _, batches = _strata(sample, row_pass.kept, row_pass.sample.num_seen)
    return certificate.estimated(state, None, batches, max_looks=2).state if len(batches[0].weights) else state


def _strata(sample: KeptRows, kept: KeptRows | None, num_rows: int) -> tuple[Stratum | None, list[Stratum]]:
    """The kept rows, of weight one, and the sample of the other rows in batches, weighted to represent all of these."""
    positions = np.zeros(0, int) if kept is None else kept.positions
    others = np.flatnonzero(~np.isin(sample.positions, positions))
    kept_rows = None if kept is None else Stratum(kept.rows, kept.absorbed, np.ones(len(positions), np.float32))
    size = len(others) // NUM_BATCHES
    weight = (num_rows - len(positions)) / max(size * NUM_BATCHES, 1)
    batches = []
    for number in range(NUM_BATCHES):
        rows, absorbed = selected((sample.rows, sample.absorbed), others[number * size : (number + 1) * size])
        batches.append(Stratum(rows, absorbed, np.full(size, weight)))
    return kept_rows, batches


def _variance(certificate: Certificate, state: State, rows: Rows) -> float:
    """The variance of the rows' expected log-likelihoods under q."""
    return float(np.var(certificate.values_at(state, selected(rows, slice(MOST_ROWS))), ddof=1))


def _unlikeness(predicted: Sequence[tuple[float, int]], variance: float) -> float:
    """By how many standard deviations the log densities of blocks, as q predicted them, vary more than those of rows
    in random order would: together, by chi squared as a normal variable (Wilson and Hilferty), or the worst of them."""
    bounds, counts = np.array(predicted[int(LEARNED * len(predicted)) :], np.float64).reshape(-1, 2).T
    freedom = len(bounds) - 1
    if freedom < 1 or not variance > 0:
        return 0.0
    squares = (bounds - counts * bounds.sum() / counts.sum()) ** 2 / counts / variance
    of_cube_root = 2 / (9 * freedom)
    together = ((squares.sum() / freedom) ** (1 / 3) - (1 - of_cube_root)) / math.sqrt(of_cube_root)
    worst = math.sqrt(max(squares.max() - 2 * math.log(2 * len(bounds)), 0.0))
    return float(max(together, worst))


def _furthest(at: BoundEvaluation) -> float:
    """How far q is from where its natural gradient leads, in standard deviations of the worst of its standard
    coordinates."""
    return float(np.abs(at.gradient).max())
