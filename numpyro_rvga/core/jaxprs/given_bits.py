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
from jax.scipy.special import ndtri

from ..pytrees import PyTree
from .interpret import inlined_results, interpret, is_inlined
from .primitives import form_of

WORD = 32  # bits
PROPOSALS = 4  # of a gamma variable, of which one in twenty is rejected: all are in one draw of 100,000
OF_GAMMA = 2 * PROPOSALS + 1  # words


class GivenBits(NamedTuple):
    """A function of random bits.

    :ivar num_words: how many words of 32 bits it takes.
    :ivar function: (words (num_words,), rng_key, *args) -> what the function returned. The key is for the numbers that
        are drawn in loops and branches.
    """

    num_words: int
    function: Callable[..., PyTree]

    def words(self, count: int) -> np.ndarray:
        """Random words for ``count`` draws, (count, num_words): the same at each call. Each is spread evenly among the
        draws, a Latin hypercube: moments of what one word determines are then nearly exact."""
        rng = np.random.default_rng(0)
        strata = rng.permuted(np.tile(np.arange(count)[:, None], self.num_words), axis=0)
        return ((strata + rng.random(strata.shape)) * (2**WORD / count)).astype(np.uint32)


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
                return inlined_results(eqn, inputs)
            own = words[first : first + taken]
            first += taken
            if eqn.primitive.name == "random_bits":
                return [_joined(own, form_of(eqn.outvars[0]))]
            log_value = log_gamma_variable(own, inputs[1])
            return [log_value if eqn.params["log_space"] else jnp.exp(log_value)]

        leaves = interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), evaluated)
        return jax.tree.unflatten(jax.tree.structure(shape), leaves)

    return GivenBits(num_words, of_words)


def _num_words(eqn: JaxprEqn) -> int:
    """How many words an equation takes; zero for all that draw nothing, or integers of other sizes."""
    size = math.prod(form_of(eqn.outvars[0]).shape) if eqn.outvars else 0
    if eqn.primitive.name == "random_gamma":
        return size * OF_GAMMA
    if eqn.primitive.name != "random_bits" or eqn.params["bit_width"] not in (WORD, 2 * WORD):
        return 0
    return size * eqn.params["bit_width"] // WORD


def _joined(words: Array, form: jax.ShapeDtypeStruct) -> Array:
    """Words as integers of this form, each of one or two."""
    if form.dtype == np.uint32:
        return words.reshape(form.shape)
    low, high = words.astype(form.dtype).reshape(2, -1)
    return (low | jnp.left_shift(high, WORD)).reshape(form.shape)


def log_gamma_variable(words: Array, shape_parameter: Array) -> Array:
    """Logarithms of gamma variables of rate one: the first of few proposals that is accepted (Marsaglia and Tsang, A
    simple method for generating gamma variables, 2000), without the loop that takes long to compile.

    :param words: (n,), OF_GAMMA for each entry. :param shape_parameter: an array.
    """
    a, dtype = jnp.asarray(shape_parameter), jnp.result_type(shape_parameter)
    uniform = (jnp.right_shift(words, 9).astype(dtype) + 0.5) * 2.0**-23  # below one in single precision
    uniform = uniform.reshape(OF_GAMMA, *a.shape)
    normal, accepting, last = ndtri(uniform[:PROPOSALS]), uniform[PROPOSALS:-1], uniform[-1]
    d = jnp.where(a < 1, a + 1, a) - 1 / 3
    cube_root = 1 + normal / jnp.sqrt(9 * d)
    log_v = 3 * jnp.log(jnp.where(cube_root > 0, cube_root, 1.0))
    log_ratio = 0.5 * normal**2 + d * (1 - jnp.exp(log_v) + log_v)
    is_accepted = (cube_root > 0) & (jnp.log(accepting) < log_ratio)
    chosen = jnp.take_along_axis(log_v, jnp.argmax(is_accepted, axis=0)[None], axis=0)[0]
    return jnp.log(d) + chosen + jnp.where(a < 1, jnp.log(last) / a, 0.0)
