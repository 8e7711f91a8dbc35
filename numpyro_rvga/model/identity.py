"""Which model it is: what checkpoints, merging and stored posteriors compare."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro

from ..core.compilation import jit_once
from ..core.jaxprs.fingerprint import output_digests
from .bound.bound_likelihood import BoundLikelihood
from .data.rows import Arrays

NUM_POINTS = 2  # at which densities are compared
SIMILAR = 1e-4  # relative difference of densities that another version of XLA or another precision may make


class ModelIdentity(NamedTuple):
    """A model with its keyword arguments, by its log densities.

    :ivar digests: of the traced log density of each site, by what it is.
    :ivar traced_by: the versions and the precision that these digests depend on.
    :ivar values: of the same log densities, at random theta and on some rows: what stays comparable among versions.
    """

    digests: dict[str, str]
    traced_by: str
    values: dict[str, np.ndarray]

    def difference(self, other: ModelIdentity) -> str | None:
        """The first term in which two models differ, and None if they are the same."""
        for name in [*self.digests, *[name for name in other.digests if name not in self.digests]]:
            if name not in self.digests or name not in other.digests:
                return f"{name} is in one of them only"
            if self.traced_by == other.traced_by and self.digests[name] != other.digests[name]:
                return f"{name} differs"
            one, another = self.values[name], other.values[name]
            if one.shape != another.shape or not _are_similar(one, another):
                return f"{name} differs"
        return None


def model_identity(program: BoundLikelihood, rows: Arrays | None = None) -> ModelIdentity:
    """The identity of a program's model.

    :param rows: on which densities are compared. Default: the program's own examples.
    """
    rows = program.example_rows if rows is None else rows
    inputs = {name: jnp.asarray(array) for name, array in program.inputs(rows).items()}
    points = np.random.default_rng(0).normal(size=(NUM_POINTS, program.layout.size)).astype(program.dtype)

    def densities(theta: jax.Array, inputs: dict) -> dict[str, jax.Array]:
        priors, rows = program.log_priors(theta), program.log_likelihood(theta, inputs)
        return {f"the prior of {n!r}": x for n, x in priors.items()} | {
            f"the likelihood of {n!r}": x for n, x in rows.items()
        }

    few = inputs if program.whole else {name: array[np.arange(2) % len(array)] for name, array in inputs.items()}
    values = jit_once(lambda points: jax.lax.map(lambda theta: densities(theta, inputs), points))(points)
    return ModelIdentity(
        output_digests(densities, points[0], few),
        f"jax {jax.__version__}, numpyro {numpyro.__version__}, {program.dtype}",
        {name: np.asarray(value) for name, value in values.items()},
    )


def _are_similar(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether densities agree but for rounding, where both are finite: what overflows depends on the precision."""
    finite = np.isfinite(one) & np.isfinite(other)
    return np.allclose(one[finite], other[finite], rtol=SIMILAR, atol=SIMILAR)
