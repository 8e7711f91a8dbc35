"""The marginal of parameters beside which nothing is latent: the log joint density itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.compilation import jit
from ...core.pytrees import PyTree
from ...model import Program
from ...model.data.row_set import once_each
from ...model.data.rows import Rows, num_rows
from ..maximized_bound import Maximum, Start


def weighted_rows(program: Program, rows: Rows) -> tuple[Rows, np.ndarray]:
    """The log-likelihood's inputs of the distinct rows, and their multiplicities: of a whole program, one."""
    inputs = program.inputs(rows)
    if program.whole:
        return inputs, np.ones(1, program.dtype)
    return once_each(inputs, np.ones(num_rows(inputs), program.dtype))


class LogDensity:
    """L(h) = log p(y, h) with h all latent sites, as :class:`~.maximized_bound.MaximizedBound` has it: of an x without
    entries, for which there is nothing to maximize. Its chunks of rows are :func:`weighted_rows`."""

    is_log_concave = True  # in the entries that are none
    nodes = "usual"  # there are no expectations

    def __init__(self, program: Program):
        self.program = program
        self._nothing = jnp.zeros(0, program.dtype), jnp.zeros((0, 0), program.dtype)

        def log_joint(h: Array, rows: dict[str, Array], weights: Array) -> Array:
            terms = program.log_likelihood(h, rows).values()
            return program.log_prior(h) + sum(weights @ jnp.sum(x.reshape(len(weights), -1), axis=1) for x in terms)

        self._evaluate = jit(jax.value_and_grad(log_joint))

    def begin(self, params: Array | np.ndarray, chunks: PyTree, mean: np.ndarray | None = None) -> Start:
        """There is nothing to start from."""
        return self._nothing

    def solve(self, params: Array | np.ndarray, chunks: PyTree, start: Start) -> Maximum:
        value, gradient = self._evaluate(params, *chunks)
        return Maximum(value, gradient, start, jnp.asarray(True))

    def moments(self, params: Array | np.ndarray, start: Start) -> Start:
        """The moments of no entries."""
        return start
