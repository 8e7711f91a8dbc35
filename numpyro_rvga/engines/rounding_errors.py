"""By how much log likelihoods in single precision are off: the same in double precision, at draws from q."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ..core.compilation import jit
from ..core.updates.state import State
from ..model.data.rows import Rows, linspace_indices, num_rows, selected
from ..user_warnings import warn
from .engine import Engine

NUM_DRAWS = 8
MOST_ROWS = 4096
EXPLAINED = 0.3  # of the errors of expectations: if rounding is so much of them, finer rules find no more
NOTICEABLE = 0.1  # nats: an error that changes by so much within q moves a mean by as many standard deviations


class Rounding(NamedTuple):
    """The rounding errors of the log likelihood, in nats.

    :ivar of_rows: the sum of all rows' absolute errors, on average over q.
    :ivar of_sum: the standard deviation over q of the error of their sum.
    """

    of_rows: float
    of_sum: float


def is_worth_more(engine: Engine, state: State, rows: Rows, error: float, bound: float | None) -> bool:
    """Whether the expectations of a thorough engine are worth their time. They are not where rounding is what is left,
    and a warning says so if that may move q.

    :param rows: all, or a sample. :param error: by how many nats those expectations may be off that it finds better.
    :param bound: of which they are a part.
    """
    if not engine.effort.calls_for_more(error, bound, int(state.num_rows)):
        return False
    rounding = rounding_errors(engine, state, rows)
    if rounding is None or rounding.of_rows < EXPLAINED * error:
        return True
    if rounding.of_sum > NOTICEABLE:
        warn(
            "32-bit numbers have too few digits for this model: the log likelihood changes by "
            f"{rounding.of_sum:.2g} nats among draws from q, by rounding alone, so that q may be off. Call "
            "numpyro.enable_x64() first."
        )
    return False


def rounding_errors(engine: Engine, state: State, rows: Rows) -> Rounding | None:
    """The rounding errors at draws from q; zero in double precision. ``rows``: all, or a sample.

    None, if the model cannot be run in double precision: arrays that it holds may have been used in single.
    """
    if state.mean.dtype == np.float64:
        return Rounding(0.0, 0.0)
    program, inputs, scale = engine.program, engine.program.inputs(rows), 1.0
    if not program.whole:
        if num_rows(inputs) > MOST_ROWS:
            inputs = selected(inputs, linspace_indices(num_rows(inputs), MOST_ROWS))
        scale = int(state.num_rows) / num_rows(inputs)
    mean, root = np.asarray(state.mean), np.asarray(state.root)
    noise = np.random.default_rng(0).normal(size=(NUM_DRAWS, root.shape[1])).astype(mean.dtype)

    def log_likelihoods(theta: np.ndarray) -> list[np.ndarray]:
        at_all = jit(lambda theta, rows: jax.lax.map(lambda one: program.log_likelihood(one, rows), theta))
        terms = jax.tree.leaves(jax.device_get(at_all(jnp.asarray(theta), inputs)))
        return [np.reshape(x, (NUM_DRAWS, -1)).astype(np.float64) for x in terms]

    theta = mean + noise @ root.T
    single = log_likelihoods(theta)
    try:
        with jax.enable_x64(True):
            double = log_likelihoods(theta.astype(np.float64))
    except (TypeError, ValueError):  # JAX's, of numbers that are of 32 bits here and of 64 there
        return None
    errors = scale * np.nan_to_num(np.concatenate(single, axis=1) - np.concatenate(double, axis=1))
    return Rounding(float(np.abs(errors).sum(axis=1).mean()), float(np.std(errors.sum(axis=1), ddof=1)))
