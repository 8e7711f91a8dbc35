"""A model run forward: outcomes and other sites drawn anew, given its latent sites."""

from __future__ import annotations

import copy

import numpyro.distributions as dist
from jax import Array
from numpyro import handlers
from numpyro.distributions.batch_util import promote_batch_shape
from numpyro.infer import Predictive

from ..core.compilation import Compiled
from ..model import Program
from ..model.data.rows import Arrays, num_rows


class ForwardRuns:
    """Compiled once for each number of draws and of rows."""

    def __init__(self, program: Program):
        self._program = program
        self._compiled = Compiled(self._drawn, ("names", "own_arrays"))

    def __call__(self, rng_key: Array, latents: dict[str, Array], rows: Arrays, names: set[str]) -> dict[str, Array]:
        """Draws of the sites ``names``, each of shape (n, *site_shape).

        :param latents: values of the latent sites, each of shape (n, *site_shape).
        :param rows: any; of a program of all data its own, or some of their arrays.
        """
        own = tuple(sorted(rows)) if self._program.whole else ()
        given = {} if self._program.whole else dict(rows)
        return self._compiled(rng_key, latents, given, names=tuple(sorted(names)), own_arrays=own)

    def _drawn(
        self,
        rng_key: Array,
        latents: dict[str, Array],
        rows: dict[str, Array],
        *,
        names: tuple[str, ...],
        own_arrays: tuple[str, ...],
    ) -> dict[str, Array]:
        """:param own_arrays: of the program's own rows, whose values the model may read."""
        rows = rows | {name: self._program.example_rows[name] for name in own_arrays}
        model = Unconditioned(self._program, num_rows(rows))
        arguments, keywords = self._program.call_arguments(rows)
        with self._program.evaluating():
            return Predictive(model, latents, return_sites=list(names))(rng_key, *arguments, **keywords)


class Unconditioned(handlers.uncondition):
    """A program's model on so many rows, with outcomes drawn, also those of the steps of NumPyro's scan. Latent sites
    that the user holds fixed keep their values.

    Distributions of steps are stacked: NumPyro adds the leading axis to their own batch shape, but not to those of the
    distributions that they are made of, by which they are drawn.
    """

    def __init__(self, program: Program, num_rows: int):
        self._runner = program.runner(num_rows)
        super().__init__(self._runner)
        self._outcomes = frozenset(program.observed_sites)

    def process_message(self, msg: dict) -> None:
        if msg["type"] != "sample":
            return
        if msg["name"] in self._outcomes:
            super().process_message(msg)
        if msg["name"] in self._runner.scanned:
            msg["fn"] = _stacked(msg["fn"])


def _stacked(fn: dist.Distribution) -> dist.Distribution:
    parts = {name: part for name, part in vars(fn).items() if isinstance(part, dist.Distribution)}
    stacked = copy.copy(fn)
    for name, part in parts.items():
        setattr(stacked, name, promote_batch_shape(_stacked(part)))
    return stacked
