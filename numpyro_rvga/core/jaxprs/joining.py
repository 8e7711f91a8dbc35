"""Programs without vectors that are joined and taken apart again.

A derivative passes through a vector as a whole, and so through all that is computed of any part of it. Of parts that
were never joined it passes through those alone that vary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend.core import JaxprEqn

from ..pytrees import PyTree
from .interpret import interpret, is_inlined
from .primitives import form_of, results


class _Joined(NamedTuple):
    """A vector as its parts, one after the other."""

    parts: tuple[Array, ...]

    def whole(self) -> Array:
        return jnp.concatenate(self.parts)

    def between(self, start: int, stop: int) -> _Joined | Array:
        """The entries from ``start`` on, to the one before ``stop``."""
        ends = list(itertools.accumulate(len(part) for part in self.parts))
        taken = [
            part[max(start - (end - len(part)), 0) : stop - (end - len(part))]
            for part, end in zip(self.parts, ends)
            if end > start and end - len(part) < stop
        ]
        return _Joined(tuple(taken)) if len(taken) > 1 else [*taken, self.parts[0][:0]][0]


def without_joining(function: Callable[..., Array], *args: PyTree) -> Callable[..., Array]:
    """The same function, with a derivative in some arguments that does no more than it must.

    :param args: arrays or shapes of the arguments.
    """
    closed = jax.make_jaxpr(function)(*args)

    def evaluated(*args: PyTree) -> Array:
        (result,) = interpret(closed.jaxpr, closed.consts, jax.tree.leaves(args), _evaluated)
        return _whole(result)

    return evaluated


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, _Joined) else value


def _evaluated(eqn: JaxprEqn, inputs: list) -> list | None:
    """An equation's outputs; None if it calls a program."""
    if is_inlined(eqn):
        return None
    name, params = eqn.primitive.name, eqn.params
    if name == "concatenate" and len(form_of(eqn.outvars[0]).shape) == 1:
        return [_Joined(tuple(part for x in inputs for part in _parts(x)))]
    if inputs and isinstance(inputs[0], _Joined):
        if name == "slice" and params["strides"] in (None, (1,)):
            return [inputs[0].between(*params["start_indices"], *params["limit_indices"])]
        if name == "split":
            return _split(inputs[0], params["sizes"])
    return results(eqn, [_whole(x) for x in inputs])


def _parts(vector: _Joined | Array) -> tuple[Array, ...]:
    return vector.parts if isinstance(vector, _Joined) else (jnp.asarray(vector),)


def _split(vector: _Joined, sizes: Sequence[int]) -> list:
    ends = list(itertools.accumulate(map(int, sizes)))
    return [vector.between(end - int(size), end) for size, end in zip(sizes, ends)]
