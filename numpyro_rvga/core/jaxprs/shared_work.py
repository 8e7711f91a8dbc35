"""How much of what a program computes its outputs share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex_core
from jax.extend.core import Jaxpr

from .primitives import numbers_of


def work_of_outputs(jaxpr: Jaxpr, group: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """How many numbers groups of outputs need, and how many of these no other group needs.

    :param jaxpr: an open jaxpr. :param group: of each output: the number of its group.
    :return: of each group, (G,) and (G,).
    """
    needed_by: dict[Any, int] = {}  # variables -> the groups, as bits

    def need(atoms: Sequence[Any], groups: int) -> None:
        for atom in atoms:
            if not isinstance(atom, jex_core.Literal):
                needed_by[atom] = needed_by.get(atom, 0) | groups

    for atom, number in zip(jaxpr.outvars, group):
        need([atom], 1 << number)
    needed, own = (np.zeros(max(group, default=-1) + 1) for _ in range(2))
    for eqn in reversed(jaxpr.eqns):
        groups = 0
        for variable in eqn.outvars:
            groups |= needed_by.get(variable, 0)
        need(eqn.invars, groups)
        members = [i for i in range(len(needed)) if groups >> i & 1]
        needed[members] += numbers_of(eqn)
        if len(members) == 1:
            own[members] += numbers_of(eqn)
    return needed, own
