"""The flat parameter theta: which latent site stands where."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array, lax


class Layout(NamedTuple):
    """Order and unconstrained shapes of the latent sites, fixed once, in the model's own order.

    :ivar site_names: latent sites.
    :ivar shapes: site -> unconstrained shape.
    """

    site_names: tuple[str, ...]
    shapes: dict[str, tuple[int, ...]]

    @property
    def sizes(self) -> dict[str, int]:
        """How many entries of theta each site takes."""
        return {name: math.prod(self.shapes[name]) for name in self.site_names}

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
            for name in self.site_names
            for index in np.ndindex(*self.shapes[name])
        ]

    def unravel(self, theta: Array | np.ndarray) -> dict[str, Array]:
        """theta (..., P) -> site -> (..., *shape)."""
        if not self.site_names:  # XLA has no split into nothing
            return {}
        sizes, axis = list(self.sizes.values()), np.ndim(theta) - 1
        if isinstance(theta, np.ndarray):  # a constant also where a function is traced
            pieces = np.split(theta, np.cumsum(sizes)[:-1], axis=axis)
        else:
            pieces = lax.split(theta, sizes, axis=axis)  # gradients are joined, not added up
        batch = jnp.shape(theta)[:-1]
        return {n: jnp.reshape(piece, (*batch, *self.shapes[n])) for n, piece in zip(self.site_names, pieces)}

    def ravel(self, sites: Mapping[str, Array]) -> Array:
        """The inverse of :meth:`unravel`."""
        pieces = []
        for name in self.site_names:
            value = jnp.asarray(sites[name])
            batch = value.shape[: value.ndim - len(self.shapes[name])]
            pieces.append(jnp.reshape(value, (*batch, -1)))
        return jnp.concatenate(pieces, -1)


def layout_of(shapes: dict[str, tuple[int, ...]]) -> Layout:
    """The layout with the sites in the order of ``shapes``."""
    return Layout(tuple(shapes), shapes)
