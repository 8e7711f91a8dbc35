"""The latent sites of a plate whose members each live in one part, and which member each term depends on."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.compilation import jit_once
from ..core.expectations.by_nodes import power_of_two
from .data.rows import Arrays, num_rows, pad, selected
from .layout import Layout, layout_of
from .program import Program
from .terms.reads import directions_along
from .terms.terms import Terms, linearize_along, split_rows

NOBODY = -1
CHUNK = 2**16  # rows that are evaluated together


class Members(NamedTuple):
    """Which entries of theta belong to which member of a plate.

    :ivar plate: its name. :ivar columns: (d, n), the entries of each member. :ivar shared: (k,), those of none.
    :ivar of_members: unconstrained shapes of a member's sites, by name. :ivar of_all: of the others.
    :ivar axes: of a member's sites, along which the members lie.
    """

    plate: str
    columns: np.ndarray
    shared: np.ndarray
    of_members: Layout
    of_all: Layout
    axes: dict[str, int]

    @property
    def number(self) -> int:
        """n."""
        return self.columns.shape[1]

    def theta(self, shared: Array, members: Array) -> Array:
        """All entries, of those shared (k,) and of members (n, d)."""
        theta = jnp.zeros(self.columns.size + self.shared.size, shared.dtype)
        return theta.at[self.shared].set(shared).at[self.columns].set(members.T)

    @property
    def directions(self) -> np.ndarray:
        """(d + k, P): along all members' entries of one kind together, and along each shared entry. A term that depends
        on one member alone has its derivatives along them."""
        directions = np.zeros((len(self.columns) + self.shared.size, self.columns.size + self.shared.size))
        directions[np.arange(len(self.columns))[:, None], self.columns] = 1
        directions[len(self.columns) + np.arange(self.shared.size), self.shared] = 1
        return directions


def members_of(program: Program, plate: str, count: int) -> Members:
    """The members of a plate that has ``count`` of them.

    :raises ValueError: if no latent site is in the plate, or all are.
    """
    layout, indices = program.layout, program.layout.indices
    local = [name for name in layout.site_names if plate in program.plates[name]]
    if not local:
        plates = sorted({p for name in layout.site_names for p in program.plates[name]})
        raise ValueError(f"no latent site is in a plate {plate!r}: the model's plates of latent sites are {plates}.")
    shared = [name for name in layout.site_names if name not in local]
    if not shared:
        raise ValueError(f"all latent sites are in plate {plate!r}: its members have nothing to learn from each other.")
    axes = {name: program.plates[name].index(plate) for name in local}
    for name, axis in axes.items():
        if layout.shapes[name][axis] != count:
            raise ValueError(
                f"site {name!r} has shape {layout.shapes[name]}, in which {count} members of plate {plate!r} were "
                f"expected along axis {axis}: is the plate's size the argument that was named?"
            )
    entries = [np.moveaxis(indices[name], axes[name], -1).reshape(-1, count) for name in local]
    shapes = {name: tuple(np.delete(layout.shapes[name], axes[name]).tolist()) for name in local}
    of_all = layout_of({name: layout.shapes[name] for name in shared})
    return Members(plate, np.concatenate(entries), layout.indices_of(shared), layout_of(shapes), of_all, axes)


def member_of_rows(
    changes: Callable, terms: Terms, members: Members, theta: Array, rows: Arrays, index: np.ndarray
) -> np.ndarray:
    """The member that each term of rows may depend on, (n E,).

    :param changes: :func:`changes_of` the terms. :param index: of each row, (n,).
    :raises ValueError: naming a row that depends on others.
    """
    expected = np.repeat(index, terms.num_elements)
    strange = _strange(_pushed(changes, members, theta, rows), members, expected, theta.dtype)
    if strange is not None:
        raise ValueError(
            f"site {terms.site!r} of row {strange // terms.num_elements} depends on other members of the plate "
            "than its own: groups stay in their part only where each row depends on one of them."
        )
    return expected


def member_of_prior(terms: Terms, members: Members, theta: Array, inputs: Arrays) -> np.ndarray:
    """The member that each prior term depends on, (E,); ``NOBODY``: on none.

    :raises ValueError: for a term that depends on several.
    """
    pushed = _pushed(changes_of(terms), members, theta, inputs)
    ones, indices, _ = _by_direction(pushed, len(members.columns))
    if not ones.shape[1]:
        return np.full(len(ones), NOBODY)
    ones, indices = (x.reshape(len(ones), -1) for x in (ones, indices))
    largest = np.argmax(np.abs(ones), axis=1)[:, None]
    slope, index = (np.take_along_axis(x, largest, axis=1)[:, 0] for x in (ones, indices))
    reads = np.any(indices != 0, axis=1) | np.any(ones != 0, axis=1)
    member = np.where(reads, np.round(index / np.where(slope == 0, 1, slope)), NOBODY).astype(int)
    outside = reads & ((slope == 0) | (member < 0) | (member >= members.number))
    if outside.any() or _strange(pushed, members, member, theta.dtype) is not None:
        raise ValueError(
            f"the prior term of site {terms.site!r} depends on several members of the plate: groups stay in their part "
            "only where they are independent given the shared sites."
        )
    return member


def _strange(pushed: np.ndarray, members: Members, expected: np.ndarray, dtype) -> int | None:
    """The first term that depends on another member."""
    ones, _, actual = _by_direction(pushed, len(members.columns))
    probe = _probe(members)[:, np.maximum(expected, 0)].T[:, None]
    off = np.abs(ones * probe - actual) > 1e3 * np.finfo(dtype).eps * np.abs(actual)
    off = np.any(off, axis=(1, 2))
    return int(np.argmax(off)) if off.any() else None


def _probe(members: Members) -> np.ndarray:
    return np.random.default_rng(0).normal(size=members.columns.shape)


def _by_direction(pushed: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Changes (n E, C, d) along ones, indices and the probe."""
    return pushed[..., :size], pushed[..., size : 2 * size], pushed[..., 2 * size :]


def whose(terms: Terms, members: Members, of: np.ndarray, axis: int | None) -> np.ndarray:
    """The member that each prior term belongs to, (E,), also if it depends on none; ``NOBODY``: to none.

    :param of: of :func:`member_of_prior`. :param axis: along which the site's plate has the members; None: it has none.
    :raises ValueError: for terms in the plate whose member cannot be determined.
    """
    if axis is None or (of != NOBODY).all():
        return of
    if axis > 0 or terms.num_elements % members.number:
        raise ValueError(
            f"the prior terms of site {terms.site!r} depend on no member of plate {members.plate!r}, which is not the "
            "first of the site's plates: make it the first (dim=-2 where there are two)."
        )
    return np.arange(terms.num_elements) // (terms.num_elements // members.number)


def changes_of(terms: Terms) -> Callable[[Arrays, Array, Array], Array]:
    """A compiled function: the derivatives of predictors along directions, at theta."""

    @jit_once
    def changes(rows, theta, directions):
        return linearize_along(terms, theta, directions, rows)[1]

    return changes


def _pushed(changes: Callable, members: Members, theta: Array, rows: Arrays) -> np.ndarray:
    """Changes of predictors along ones, numbers of members, and random numbers: (n E, C, 3 d)."""
    probe = np.zeros((len(members.columns), theta.size), theta.dtype)
    np.put_along_axis(probe, members.columns, _probe(members), axis=1)
    directions = np.concatenate([directions_along(members.columns, theta.size, theta.dtype), probe])
    shared, own = split_rows(rows)
    if not own:
        return np.asarray(changes(shared, theta, directions), np.float64)
    total, pieces = num_rows(own), []
    size = min(CHUNK, power_of_two(total))
    for start in range(0, total, size):
        some, _ = pad(selected(own, slice(start, start + size)), size)
        pieces.append(np.asarray(changes(shared | some, theta, directions), np.float64))
    every = np.concatenate(pieces)
    return every[: total * (len(every) // (size * len(pieces)))]
