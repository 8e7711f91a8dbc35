"""Entries of masked latent sites on which the log density does not depend.

``numpyro.sample(..., obs_mask=mask)`` makes a latent site for the missing outcomes that has an entry for each observed
one too, with its prior masked out. Nothing reads these entries, and no data can make their posterior proper. A standard
normal stands for them: the posterior of all else stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro import distributions as dist

from ...core.compilation import abstractly, jit_once
from ..handlers.tracing import REACH, SiteRecord, elements, nested
from ..layout import Layout

NAME = "unread entries of "
NUM_TRIALS = 16  # places at which none of their derivatives may differ from zero


def unread_entries(
    records: Callable[[Mapping[str, Array]], Mapping[str, SiteRecord]], layout: Layout, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """By site, the indices of entries that nothing reads, in order. Sites without a mask are not asked.

    :param records: latent sites in unconstrained space -> all sample sites.
    """
    thetas = REACH * np.random.default_rng(0).uniform(-1, 1, size=(NUM_TRIALS, layout.size)).astype(dtype)

    def masked_sites(theta: Array) -> list[str]:
        return [name for name, record in records(layout.unravel(theta)).items() if _is_masked(record.fn)]

    masked = [name for name in abstractly(masked_sites, thetas[0]) if name in layout.shapes]
    if not masked:
        return {}

    def log_density(theta: Array) -> Array:
        return reduce(jnp.add, [jnp.sum(elements(record)) for record in records(layout.unravel(theta)).values()])

    def slopes(thetas: Array) -> dict[str, Array]:
        return jax.vmap(lambda theta: layout.unravel(jax.grad(log_density)(theta)))(thetas)

    by_site = jit_once(slopes)(thetas)
    unread = {n: np.flatnonzero(np.all(np.asarray(by_site[n]).reshape(NUM_TRIALS, -1) == 0, axis=0)) for n in masked}
    return {name: indices for name, indices in unread.items() if len(indices)}


def record_of_unread(name: str, indices: np.ndarray, unconstrained: Array) -> SiteRecord:
    """The standard normal of a site's entries, as a site of its own.

    :param unconstrained: all values of the site ``name``.
    """
    z = jnp.ravel(unconstrained)[indices]
    normal = dist.Normal(jnp.zeros_like(z), 1)
    return SiteRecord(NAME + name, normal, z, None, None, 1.0, (), is_observed=True, is_auxiliary=True)


def _is_masked(fn: Any) -> bool:
    """Whether entries may be masked out, one by one."""
    return any(isinstance(part, dist.MaskedDistribution) and not isinstance(part._mask, bool) for part in nested(fn))
