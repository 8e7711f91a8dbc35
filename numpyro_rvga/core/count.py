"""Counts beyond the 2^31 that a 32-bit integer holds, which is the longest that JAX has by default."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

BASE = 2**30


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Count:
    """The number ``high * 2^30 + low``, within compiled functions too; ``int(count)`` is it.

    :ivar high: (), 32-bit. :ivar low: (), 32-bit, less than 2^30.
    """

    high: Array
    low: Array

    @classmethod
    def of(cls, number: int) -> Count:
        return cls(jnp.asarray(number // BASE, jnp.int32), jnp.asarray(number % BASE, jnp.int32))

    def __add__(self, number: ArrayLike) -> Count:
        """``number``: at most 2^30, and not negative."""
        low = self.low + jnp.asarray(number, jnp.int32)
        return Count(self.high + low // BASE, low % BASE)

    def __int__(self) -> int:
        return int(self.high) * BASE + int(self.low)
