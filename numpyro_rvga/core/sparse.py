"""Joint solves of factors that look at a few entries of theta each, as rows of crossed and nested effects do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from .block import Base, Search, Settings, Solution, block_search
from .designs import packed_inner, unpacked
from .factors import evaluate
from .objective import Frame, Group, joint_objective
from .precisions import Arrow
from .recursion import Quadratic, State, StepInfo


class SparseJoint(NamedTuple):
    """A search over theta itself, its entries reordered.

    :ivar absorb: solution, number of rows -> the state after it.
    """

    search: Search
    absorb: Callable[[Solution, Array], tuple[State, StepInfo]]


class Order(NamedTuple):
    """In which the entries of theta are taken: heads first, of which no factor looks at two.

    :ivar places: (P,), the entry of theta that comes first, second, ... :ivar heads: how many of them are heads.
    """

    places: np.ndarray
    heads: int

    @property
    def back(self) -> np.ndarray:
        """Where each entry of theta went."""
        return np.argsort(self.places)


class Start(NamedTuple):
    """A Gaussian of independent entries to start from: (P,) arrays."""

    mean: Array
    variance: Array


def sparse_search(
    rows: Group,
    prior: Group,
    gaussian: Group,
    order: Order,
    start: Start,
    settings: Settings,
    *,
    is_affine: bool,
) -> SparseJoint:
    """Rows and the whole prior together. Nothing stands for any of it: the base is flat.

    :param prior: its terms that are not Gaussian. :param gaussian: those that are. The designs of all three are
        :class:`~.designs.Sparse`, and all take theta in ``order``.
    :param is_affine: whether all predictors are affine in theta.
    """
    size, dtype = start.mean.size, start.mean.dtype
    back = order.back
    same = lambda x: x  # noqa: E731
    frame = Frame(same, same, same, same)
    objective = joint_objective((gaussian, prior, rows), frame, size, dtype, is_affine=is_affine)
    form = Arrow((1 / start.variance)[order.places], order.heads)
    flat = Base(None, None, jnp.asarray(0.5 * size * math.log(2 * math.pi), dtype))  # of the entropy
    search = block_search(objective, flat, size, dtype, settings, start=start.mean[order.places], form=form)

    def absorb(found, num_rows):
        mean, root = found.mean[back], form.covariance_root(found.root).T[back]
        site = None
        if prior.kinds:
            covariance = form.spread(found.root)
            sums = evaluate(prior.kinds, prior.linearise(prior.first, found.mean), covariance)
            trace = packed_inner(covariance.array, sums.curvature)
            precision = unpacked(sums.curvature)[back][:, back]
            site = Quadratic(precision, sums.gradient[back], sums.value + 0.5 * trace, mean)
        ok = jnp.isfinite(found.bound) & jnp.all(jnp.isfinite(mean)) & jnp.all(jnp.isfinite(root))
        after = State(mean, jnp.zeros_like(mean), root, found.bound, site, num_rows)
        return after, StepInfo(found.bound, found.decrement, found.iterations, found.converged, ok)

    return SparseJoint(search, absorb)
