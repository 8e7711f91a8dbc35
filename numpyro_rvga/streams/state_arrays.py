"""A state as plain arrays, for checkpoints."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def plain_arrays(state: Any) -> list[np.ndarray]:
    """The arrays of a state, keys of random numbers as their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in map(jnp.asarray, jax.tree.leaves(state))]


def fingerprint(array: np.ndarray) -> list[float]:
    """Numbers that change if the array does, and hardly by rounding."""
    flat = np.ravel(array).astype(np.float64)
    return [float(x) for x in (flat.sum(), np.abs(flat).sum(), np.dot(flat, np.cos(np.arange(len(flat)))))]


def state_from_arrays(arrays: list[np.ndarray], like: Any) -> Any:
    """A state from its arrays.

    :raises ValueError: for arrays of another form.
    """
    leaves, structure = jax.tree.flatten(like)
    forms = [(x.shape, x.dtype) for x in plain_arrays(like)]
    if [(x.shape, x.dtype) for x in arrays] != forms:
        raise ValueError("the checkpoint holds a state of another form than this run's.")

    def restored(array, leaf):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        return jnp.asarray(array)

    return jax.tree.unflatten(structure, [restored(a, leaf) for a, leaf in zip(arrays, leaves)])
