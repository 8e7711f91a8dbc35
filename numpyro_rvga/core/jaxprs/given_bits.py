"""Functions that draw random numbers, of random bits that NumPy makes.

JAX compiles its generator anew at each place where a function draws, which takes ten times as long as all the rest of a
few draws.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import JaxprEqn

from ..pytrees import PyTree
from .interpret import interpret, is_inlined
from .primitives import form_of, results

WORD = 32  # bits


class GivenBits(NamedTuple):
    """A function of random bits.

    :ivar num_words: how many words of 32 bits it takes.
    :ivar function: (words (num_words,), rng_key, *args) -> what the function returned. The key is for the numbers that
        are drawn in loops and branches.
    """

    num_words: int
    function: Callable[..., PyTree]

    def words(self, count: int) -> np.ndarray:
        """Random words for ``count`` draws, (count, num_words): the same at each call."""
        return np.random.default_rng(0).integers(2**WORD, size=(count, self.num_words), dtype=np.uint32)


def of_given_bits(function: Callable[..., PyTree], rng_key: Array, *args: PyTree) -> GivenBits:
    """A function of random bits in place of a key.

    :param function: (rng_key, *args) -> arrays. :param rng_key: and ``args``: arrays or shapes of its arguments.
    """
    closed, shape = jax.make_jaxpr(function, return_shape=True)(rng_key, *args)
    num_words = 0

    def count(eqn: JaxprEqn, inputs: list) -> list | None:
        nonlocal num_words
        num_words += _num_words(eqn)
        return None if is_inlined(eqn) else [None] * len(eqn.outvars)

    interpret(closed.jaxpr, closed.consts, [None] * len(closed.in_avals), count, lambda value: None)

    def of_words(words: Array, *args: PyTree) -> PyTree:
        first = 0

        def evaluated(eqn: JaxprEqn, inputs: list) -> list | None:
            nonlocal first
            taken = _num_words(eqn)
            if not taken:
                return None if is_inlined(eqn) else results(eqn, inputs)
            first += taken
            return [_joined(words[first - taken : first], form_of(eqn.outvars[0]))]

        leaves = interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), evaluated)
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return GivenBits(num_words, of_words)


def _num_words(eqn: JaxprEqn) -> int:
    """How many words an equation takes; zero for all that draw nothing, or integers of other sizes."""
    if eqn.primitive.name != "random_bits" or eqn.params["bit_width"] not in (WORD, 2 * WORD):
        return 0
    return math.prod(form_of(eqn.outvars[0]).shape) * eqn.params["bit_width"] // WORD


def _joined(words: Array, form: jax.ShapeDtypeStruct) -> Array:
    """Words as integers of this form, each of one or two."""
    if form.dtype == np.uint32:
        return words.reshape(form.shape)
    low, high = words.astype(form.dtype).reshape(2, -1)
    return (low | jnp.left_shift(high, WORD)).reshape(form.shape)
