"""A model's log density as NumPyro itself finds it, for comparison with what this package has read from the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
from jax import Array, lax
from numpyro import handlers
from numpyro.infer.util import potential_energy
from numpyro.primitives import Messenger

from ..core.compilation import jit_once
from .data.rows import Arrays, common_length, num_rows
from .handlers.tracing import scale_of_plates
from .program import Program

BATCH = 4  # points at which the model runs at once


class OwnDensity:
    """The log density of a program's model at points, compiled once for each number of rows."""

    def __init__(self, program: Program):
        self._program = program
        self._at_points = jit_once(
            lambda rows, points: lax.map(lambda theta: self._at(theta, rows), points, batch_size=BATCH)
        )

    def __call__(self, rows: Arrays, points: Array | np.ndarray) -> tuple[dict[str, Array], Array]:
        """Log likelihoods of all rows by observed site, and the log joint density in unconstrained space, each (K,).

        :param rows: data arrays by argument name. :param points: theta, (K, P).
        """
        return jax.device_get(self._at_points(dict(rows), points))

    def _at(self, theta: Array, rows: dict[str, Array]) -> tuple[dict[str, Array], Array]:
        program = self._program
        args, kwargs = program.call_arguments(rows)
        trace: dict[str, Any] = {}

        def model(*args, **kwargs):
            whole = _AllRows(program.model, program.row_plates, num_rows(rows))
            trace.update(handlers.trace(handlers.seed(whole, rng_seed=0)).get_trace(*args, **kwargs))

        with handlers.block(), numpyro.validation_enabled(False):
            joint = _log_density(model, args, kwargs, program.layout.unravel(theta))
            sites = [trace[terms.site] for terms in program.terms]
            return {site["name"]: _log_prob(site) for site in sites}, joint


def log_joint(program: Program, theta: Array, states: Mapping[str, Array]) -> Array:
    """The log joint density of theta (P,), in unconstrained space, and of states of a whole program's discrete sites.
    Other discrete sites count nothing."""
    hidden = [name for name in program.row_latents.states if name not in states]
    given = {**program.params.constrained(program.params.values), **states}
    args, kwargs = program.call_arguments(program.example_row)
    model = _AllRows(program.model, program.row_plates, common_length(program.example_row))
    model = handlers.substitute(handlers.block(handlers.seed(model, rng_seed=0), hide=hidden), data=given)
    with program.evaluating(), handlers.block(), numpyro.validation_enabled(False):
        return _log_density(model, args, kwargs, program.layout.unravel(theta))


def _log_density(model: Callable, args: tuple, kwargs: dict, unconstrained: dict[str, Array]) -> Array:
    """NumPyro's log joint density in unconstrained space."""
    return -potential_energy(_WholeJacobians(model), args, kwargs, unconstrained)


def _log_prob(site: dict[str, Any]) -> Array:
    """The site's part of NumPyro's log density."""
    intermediates = [site["intermediates"]] if site["intermediates"] else []
    log_prob = jnp.sum(site["fn"].log_prob(site["value"], *intermediates))
    return log_prob if site["scale"] is None else site["scale"] * log_prob


class _WholeJacobians(Messenger):
    """Keeps the Jacobians of transforms as they are: NumPyro takes ``handlers.scale`` around a site for its Jacobian
    too, which makes the density depend on the transform."""

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and msg["name"].startswith("_") and msg["name"].endswith("_log_det"):
            msg["scale"] = None


class _AllRows(Messenger):
    """Gives row plates the number of rows that there are, if any. What plates that subsample scale up is scaled back:
    what is at hand counts once."""

    def __init__(self, fn: Callable, row_plates: frozenset[str], num_rows: int | None):
        super().__init__(fn)
        self._row_plates, self._num_rows = row_plates, num_rows
        self._ratios: dict[str, float] = {}

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "plate":
            size, taken = msg["args"]
            if msg["name"] in self._row_plates:
                taken = self._num_rows
                msg["args"], msg["value"] = (size, taken), jnp.arange(taken)
            self._ratios[msg["name"]] = size / (taken or size)
        elif msg["type"] == "subsample" and self._row_plates:
            msg["kwargs"]["event_dim"] = None
        elif msg["type"] == "sample" and msg["scale"] is not None:
            msg["scale"] = msg["scale"] / scale_of_plates(msg, self._ratios)
