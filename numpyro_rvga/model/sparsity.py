"""Which few entries of theta each term looks at, found by pushing directions through its predictors.

theta is cut into strands, such as the columns of its sites. Rows with crossed or nested effects look at one entry of
each strand: which one, and how much it counts, is what two directions along the strand tell.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.compilation import jit_once
from ..core.designs import Sparse
from ..core.sparse import Order
from .layout import Layout
from .terms import Arrays, Terms, merged, over_rows, split_rows

FEWEST_PARAMETERS = 200  # below, whole matrices are small
MOST_SPLIT = 64  # entries of a strand of which terms look at several
MOST_SLOTS = 64  # strands that a term looks at
FEW = 64  # rows that are looked at first
CHUNK = 2**16  # rows that are looked at together


class View(NamedTuple):
    """The strands that a term looks at, and how entries of theta are counted.

    :ivar strands: arrays of entries of theta. :ivar place: (P,), the number of each entry. :ivar heads: numbers below
        are of entries of which no term looks at two. :ivar headed: whether the first strand has such numbers.
    """

    strands: tuple[np.ndarray, ...]
    place: np.ndarray
    heads: int
    headed: bool


class Sparsity(NamedTuple):
    """How the terms of a model see theta.

    :ivar order: in which its entries are numbered. :ivar views: by whether a term is one of the prior, and its site.
    :ivar numbers_per_row: in the arrays that the row terms' designs take.
    """

    order: Order
    views: dict[tuple[bool, str], View]
    numbers_per_row: int

    @property
    def key(self) -> tuple:
        """Equal if two say the same of a model."""
        return (
            self.order.heads,
            self.order.places.tobytes(),
            tuple((name, len(view.strands)) for name, view in self.views.items()),
        )


# ---------------------------------------------------------------------- designs
def sparse_design(terms: Terms, view: View, theta: Array, rows: Arrays) -> tuple[Array, Sparse]:
    """Predictors at theta (n E, C), and their Jacobians."""
    directions = _along(view.strands, theta.size, theta.dtype)
    offset, pushed = merged(_pushed(terms, theta, directions, rows))
    values, place = _read(pushed, len(view.strands))
    starts = np.cumsum([0, *[len(strand) for strand in view.strands]])[:-1]
    numbers = jnp.asarray(view.place[np.concatenate(view.strands)], jnp.int32)
    lengths = np.array([len(strand) for strand in view.strands])
    index = numbers[jnp.clip(place, 0, lengths - 1) + starts]
    return offset, Sparse(index, jnp.swapaxes(values, 1, 2), theta.size, view.heads, view.headed)


def selecting_view(size: int) -> View:
    """Of terms that look at one entry of theta."""
    return View((np.arange(size),), np.arange(size), size, True)


def is_selection(terms: Terms, size: int, dtype, rows: Arrays) -> bool:
    """Whether each term's one predictor is an affine function of one entry of theta."""
    if not (terms.is_affine and terms.num_predictors == 1 and not terms.num_local):
        return False
    return bool(_look(terms, selecting_view(size).strands, jnp.zeros(size, dtype), rows).single[0])


def _along(strands: tuple[np.ndarray, ...], size: int, dtype) -> np.ndarray:
    """Two directions along each strand: (2 S, P)."""
    count = len(strands)
    directions = np.zeros((2 * count, size), dtype)
    for i, strand in enumerate(strands):
        directions[i, strand], directions[count + i, strand] = 1, np.arange(len(strand))
    return directions


def _pushed(terms: Terms, theta: Array, directions: np.ndarray, rows: Arrays) -> tuple[Array, Array]:
    """Predictors (n, E, C), and their changes along directions (n, E, D, C)."""

    def one(row, element):
        offset, push = jax.linearize(lambda t: terms.predictors(t, row, element), theta)
        return offset, jax.vmap(push)(directions)

    directions = lax.optimization_barrier(jnp.asarray(directions))  # XLA would fold constants for seconds
    return over_rows(one, terms.num_elements, rows)


def _read(pushed: Array, count: int) -> tuple[Array, Array]:
    """The one value for each strand (n, S, C), and its place there (n, S)."""
    values, ramps = pushed[:, :count], pushed[:, count : 2 * count]
    largest = jnp.argmax(jnp.abs(values), axis=2, keepdims=True)
    value, ramp = (jnp.take_along_axis(x, largest, axis=2)[..., 0] for x in (values, ramps))
    return values, jnp.round(ramp / jnp.where(value == 0, 1.0, value)).astype(jnp.int32)


# ---------------------------------------------------------------------- what is looked at
class _Looks(NamedTuple):
    """Of strands, (S,) arrays: whether any term looks at them, and whether no term looks at two of their entries."""

    touched: np.ndarray
    single: np.ndarray


def _look(terms: Terms, strands: tuple[np.ndarray, ...], theta: Array, rows: Arrays) -> _Looks:
    """Asked along a random direction."""
    count, eps = len(strands), np.finfo(theta.dtype).eps
    probe = np.random.default_rng(0).normal(size=theta.size).astype(theta.dtype)
    alone = np.zeros((count, theta.size), theta.dtype)
    for i, strand in enumerate(strands):
        alone[i, strand] = probe[strand]
    directions = np.concatenate([_along(strands, theta.size, theta.dtype), alone])
    longest = max(map(len, strands))
    table = jnp.asarray(np.stack([np.resize(probe[strand], longest) for strand in strands]))

    @jit_once
    def both(rows):
        pushed = merged(_pushed(terms, theta, directions, rows)[1])
        values, place = _read(pushed, count)
        told = values * table[jnp.arange(count), jnp.clip(place, 0, longest - 1)][..., None]
        truth = pushed[:, 2 * count :]
        close = jnp.abs(told - truth) <= 1e3 * eps * jnp.abs(truth)
        return jnp.any(truth != 0, axis=(0, 2)), jnp.all(close, axis=(0, 2))

    found = [_Looks(*map(np.asarray, both(part))) for part in _parts(rows)]
    return _Looks(np.any([f.touched for f in found], axis=0), np.all([f.single for f in found], axis=0))


def _parts(rows: Arrays) -> Iterator[Arrays]:
    """Rows in parts of equal length, the first ones once more in the last."""
    shared, own = split_rows(rows)
    count = len(next(iter(own.values()))) if own else 0
    for start in range(0, max(count, 1), CHUNK):
        taken = np.arange(start, start + min(count, CHUNK)) % max(count, 1)
        yield shared | {name: array[taken] for name, array in own.items()}


def find_sparsity(
    layout: Layout, dtype, row_terms: tuple[Terms, ...], prior_terms: tuple[Terms, ...], rows: Arrays, shared: Arrays
) -> Sparsity | None:
    """How terms look at theta, if each looks at a few entries; None if not, or if theta is short.

    :param rows: all that there are.
    :param shared: what prior terms depend on besides theta.
    """
    if layout.size < FEWEST_PARAMETERS or any(terms.num_local for terms in row_terms):
        return None
    theta = jnp.asarray(0.5 * np.random.default_rng(1).normal(size=layout.size), dtype)
    strands = _columns(layout)

    def look(some):
        return [_look(terms, strands, theta, some) for terms in row_terms]

    few = look({name: array[:FEW] for name, array in rows.items()})
    if _looks_too_wide(few, strands):
        return None
    looks = look(rows) + [_look(terms, strands, theta, shared) for terms in prior_terms]
    if _looks_too_wide(looks, strands):
        return None
    single = _single(looks)
    whole, split = [np.flatnonzero(chosen) for chosen in (single, ~single)]
    if not len(whole):
        return None
    head = max(whole, key=lambda i: len(strands[i]))
    ranked = [head, *whole[whole != head], *split]
    order, views = Order(np.concatenate([strands[i] for i in ranked]), len(strands[head])), {}
    sides = [(False, terms) for terms in row_terms] + [(True, terms) for terms in prior_terms]
    for (in_prior, terms), look in zip(sides, looks):
        seen = []
        for i in (i for i in ranked if look.touched[i]):
            seen += [strands[i]] if single[i] else list(strands[i][:, None])
        if not seen or len(seen) > MOST_SLOTS:
            return None
        views[in_prior, terms.site] = View(tuple(seen), order.back, order.heads, bool(look.touched[head]))
    counts = [(t.num_elements, t.num_predictors, len(views[False, t.site].strands)) for t in row_terms]
    return Sparsity(order, views, sum(e * k * (c + 2 * k) for e, c, k in counts))


def _single(looks: list[_Looks]) -> np.ndarray:
    """(S,): of which strands no term looks at two entries."""
    return np.all([look.single for look in looks], axis=0)


def _looks_too_wide(looks: list[_Looks], strands: tuple[np.ndarray, ...]) -> bool:
    return any(len(strand) > MOST_SPLIT for strand, alone in zip(strands, _single(looks)) if not alone)


def _columns(layout: Layout) -> tuple[np.ndarray, ...]:
    """The entries of each site along its longest axis, one strand for each place on the others."""
    strands, start = [], 0
    for name in layout.site_names:
        shape = layout.shapes[name] or (1,)
        entries = start + np.arange(math.prod(shape)).reshape(shape)
        start += entries.size
        if entries.size:
            strands += list(np.moveaxis(entries, int(np.argmax(shape)), -1).reshape(-1, max(shape)))
    return tuple(strands)
