"""The latent sites of a plate whose members each live in one part, and which member each term depends on."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..core.compilation import jit_once
from .data.rows import Arrays, num_rows
from .layout import Layout
from .program import Program
from .terms.reads import Cut, Probes, derivatives_and_positions, generic_theta, parts_of
from .terms.terms import Terms, linearize_along, split_rows

NOBODY = -1


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
    of_all = Layout({name: layout.shapes[name] for name in shared})
    return Members(plate, np.concatenate(entries), layout.indices_of(shared), Layout(shapes), of_all, axes)


class Finder:
    """Finds the member of a plate that each term of a site depends on: rows' terms on one at most, which is given."""

    def __init__(self, terms: Terms, members: Members, dtype: DTypeLike):
        self._terms, self._columns, self._dtype = terms, members.columns, dtype
        self._size = members.columns.size + members.shared.size
        self._found = jit_once(self._of_part)

    def of_rows(self, rows: Arrays, index: np.ndarray) -> np.ndarray:
        """The member that each term of rows may depend on, (n E,). ``index``: of each row, (n,).

        :raises ValueError: naming a row that depends on others.
        """
        member, is_strange = self._of_all(rows, index)
        if is_strange.any():
            row = np.argmax(is_strange) // self._terms.num_elements
            raise ValueError(
                f"site {self._terms.site!r} of row {row} depends on other members of the plate than its own: groups "
                "stay in their part only where each row depends on one of them."
            )
        return member

    def of_prior(self, inputs: Arrays) -> np.ndarray:
        """The member that each prior term depends on, (E,); ``NOBODY``: on none.

        :raises ValueError: for a term that depends on several.
        """
        member, is_strange = self._of_all(inputs, None)
        if is_strange.any():
            raise ValueError(
                f"the prior term of site {self._terms.site!r} depends on several members of the plate: groups stay in "
                "their part only where they are independent given the shared sites."
            )
        return member

    def _of_all(self, rows: Arrays, index: np.ndarray | None) -> list[np.ndarray]:
        """The member of each term, and whether it depends on others, (n E,)."""
        probes = Probes.of(Cut.without_chain(tuple(self._columns)), self._size, self._dtype)
        theta = generic_theta(self._size, self._dtype)
        found = [
            self._found(probes, theta, part, None if index is None else index[taken])
            for taken, part in parts_of(rows, rounded=True)
        ]
        count = max(num_rows(split_rows(rows)[1]), 1) * self._terms.num_elements
        return [np.concatenate(arrays)[:count] for arrays in zip(*found)]

    def _of_part(self, probes: Probes, theta: Array, rows: Arrays, index: Array | None) -> tuple[Array, Array]:
        d = len(self._columns)
        changes = linearize_along(self._terms, theta, probes.directions[: 3 * d], rows)[1]
        if not self._terms.num_predictors:  # a constant: a site that is held fixed
            nobody = jnp.full(len(changes), NOBODY)
            return nobody if index is None else jnp.repeat(index, self._terms.num_elements), nobody != NOBODY
        if index is not None:
            member = jnp.repeat(index, self._terms.num_elements)
        else:
            _, place = derivatives_and_positions(changes, d)
            is_read = jnp.any(changes[..., 2 * d :] != 0, axis=1)
            member = jnp.max(place, axis=1, where=is_read, initial=NOBODY)
        error, rounding = probes.off(changes, jnp.tile(member[:, None], d))
        is_off = ~(error <= rounding) if index is None else error > rounding  # where slopes are NaN, rows are believed
        return member, jnp.any(is_off, axis=(1, 2))


def whose(terms: Terms, members: Members, of: np.ndarray, axis: int | None) -> np.ndarray:
    """The member that each prior term belongs to, (E,), also if it depends on none; ``NOBODY``: to none.

    :param of: of :meth:`Finder.of_prior`. :param axis: along which the site's plate has the members; None: it has none.
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
