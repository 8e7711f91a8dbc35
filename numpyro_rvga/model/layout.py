"""The flat parameter theta: which latent site stands where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


@dataclass(frozen=True, eq=False)
class Layout:
    """Latent sites in the order of their entries of theta. ``shapes``: site -> unconstrained shape, in that order."""

    shapes: dict[str, tuple[int, ...]]

    @property
    def site_names(self) -> tuple[str, ...]:
        return tuple(self.shapes)

    @property
    def sizes(self) -> dict[str, int]:
        """How many entries of theta each site takes."""
        return {name: math.prod(shape) for name, shape in self.shapes.items()}

    @property
    def size(self) -> int:
        """P, the number of unconstrained parameters."""
        return sum(self.sizes.values())

    @property
    def indices(self) -> dict[str, np.ndarray]:
        """Site -> the entries of theta that it takes, in its shape."""
        return {name: np.asarray(entries) for name, entries in self.unravel(np.arange(self.size)).items()}

    def indices_of(self, names: Sequence[str]) -> np.ndarray:
        """The entries of theta that some sites take, site after site, (n,)."""
        indices = self.indices
        return np.concatenate([np.zeros(0, int), *[np.ravel(indices[name]) for name in names]])

    @property
    def entry_names(self) -> list[str]:
        """The names of the entries of theta: ``a[0, 2]``, or ``a`` for a site of one number."""
        return [
            f"{name}[{', '.join(map(str, index))}]" if index else name
            for name, shape in self.shapes.items()
            for index in np.ndindex(*shape)
        ]

    def unravel(self, theta: Array | np.ndarray) -> dict[str, Array]:
        """theta (..., P) -> site -> (..., *shape)."""
        if not self.shapes:  # XLA has no split into nothing
            return {}
        sizes, axis = list(self.sizes.values()), np.ndim(theta) - 1
        if isinstance(theta, np.ndarray):  # a constant also where a function is traced
            pieces = np.split(theta, np.cumsum(sizes)[:-1], axis=axis)
        else:
            pieces = lax.split(theta, sizes, axis=axis)  # gradients are joined, not added up
        batch = jnp.shape(theta)[:-1]
        return {n: jnp.reshape(piece, (*batch, *shape)) for (n, shape), piece in zip(self.shapes.items(), pieces)}

    def ravel(self, sites: Mapping[str, Array]) -> Array:
        """The inverse of :meth:`unravel`."""
        pieces = []
        for name, shape in self.shapes.items():
            value = jnp.asarray(sites[name])
            batch = value.shape[: value.ndim - len(shape)]
            pieces.append(jnp.reshape(value, (*batch, -1)))
        return jnp.concatenate(pieces, -1)
