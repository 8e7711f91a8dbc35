"""The prior of online methods: where q starts, and the exact prior in the place of what q approximates."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.gaussians import FAMILIES, BlockDiagonalGaussian, Family, FullGaussian, LowRankGaussian
from ..core.updates.state import CanonicalGaussian, new_state
from ..model.bound.prior_start import CoupledPrior, factor_of_moments, part_of
from ..model.program import Program
from ..user_warnings import warn
from .engine import Engine

SAME = 1e-8  # of covariances, in standard deviations
LEAST_SHARE = 0.8  # of a standard deviation that a family may leave of another without a warning


class Start(NamedTuple):
    """q before any row.

    :ivar indices: the entries of which q approximates the prior, (S,); None: all.
    :ivar factor: what q approximates of the prior, a function of these; None if q is the prior.
    :ivar prior: the prior of the entries that are not normal and independent; None if there are none.
    :ivar covariance: of these, under q.
    """

    gaussian: Any
    indices: np.ndarray | None
    factor: CanonicalGaussian | None
    prior: CoupledPrior | None = None
    covariance: Any = None

    @property
    def noise_root(self) -> Array:
        """A root of q's covariance, (P, P); or its standard deviations (P,), if the family holds no other noise."""
        q = self.gaussian
        if isinstance(q, FullGaussian):
            return q.root
        holds = isinstance(q, BlockDiagonalGaussian) or (
            isinstance(q, LowRankGaussian) and len(q.factor) == len(q.mean)
        )
        return q.as_full().root if holds and self.prior is not None else q.deviation()


def start_of(program: Program, family: str, rank: int, *, holds_all: bool) -> Start:
    """The member of a family with the moments of the prior that it can hold: all means, and the covariance of each
    entry or block. It is the prior, where the family holds that.

    :param rank: of the low-rank family. :param holds_all: whether its factor, of full rank, has the prior's
        correlations.
    """
    if family == "full":
        state = program.initial_state
        return Start(FullGaussian(state.mean, state.root), None, state.prior_factor)
    mean, variance = (np.array(x, np.float64) for x in program.marginals[:2])
    prior, indices, covariance = program.coupled_prior, np.zeros(0, int), np.zeros((0, 0))
    if prior is not None:
        indices, covariance = prior.indices, prior.root @ prior.root.T
        mean[indices], variance[indices] = prior.mean, np.diagonal(covariance)
    held = np.diag(np.diagonal(covariance))
    arrays: tuple[Any, ...] = mean, variance
    if family == "block-diagonal":
        sizes = [size for size in program.layout.sizes.values() if size]
        roots, held = _blocks(variance, indices, covariance, sizes)
        arrays = mean, roots
    elif family == "low-rank":
        diagonal, factor = 1 / variance, np.zeros((rank, len(mean)))
        if prior is not None and holds_all and prior.is_gaussian.any():
            known = np.flatnonzero(prior.is_gaussian)
            inside, entries = np.ix_(known, known), indices[known]
            diagonal[entries], factor[: len(known), entries] = _of_full_rank(covariance[inside])
            held[inside] = covariance[inside]
        arrays = mean, diagonal, factor
    q = FAMILIES[family](*jax.tree.map(lambda x: jnp.asarray(x, program.dtype), arrays))
    if prior is None:
        return Start(q, None, None)
    scale = np.sqrt(np.diagonal(covariance))
    is_exact = prior.is_gaussian & (np.abs(held - covariance) <= SAME * np.outer(scale, scale)).all(axis=1)
    left = np.isin(prior.parts, prior.parts[~is_exact])
    if not left.any():
        return Start(q, None, None, prior, held)
    exact = part_of(prior.exact, np.flatnonzero(left))
    approximated = factor_of_moments(prior.mean[left], held[np.ix_(left, left)], exact, program.dtype)
    return Start(q, indices[left], approximated, prior, held)


def _blocks(
    variance: np.ndarray, indices: np.ndarray, covariance: np.ndarray, sizes: list[int]
) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """Roots of the covariances of all blocks, and the covariance of the entries at ``indices`` under them."""
    ends = np.cumsum(sizes)
    of_entry = np.searchsorted(ends, indices, side="right")
    roots = []
    for number, (size, end) in enumerate(zip(sizes, ends)):
        inside = np.flatnonzero(of_entry == number)
        root = np.diag(np.sqrt(variance[end - size : end]))
        if len(inside):
            places = indices[inside] - (end - size)
            root[np.ix_(places, places)] = np.linalg.cholesky(covariance[np.ix_(inside, inside)])
        roots.append(root)
    return tuple(roots), covariance * (of_entry[:, None] == of_entry)


def _of_full_rank(covariance: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """d (P,) and W (P, P) with diag(d) + W^T W the inverse of the covariance, in units of the standard deviations."""
    deviation = np.sqrt(np.diagonal(covariance))
    values, vectors = np.linalg.eigh(covariance / np.outer(deviation, deviation))
    least = 1 / values[-1]
    return least / deviation**2, np.sqrt(1 / values - least)[:, None] * vectors.T / deviation


# ---------------------------------------------------------------------- the exact prior
def with_exact_prior(
    engine: Engine, prior_inputs: dict, q: Family, factor: CanonicalGaussian, indices: Array | None
) -> tuple[Family, Array | None]:
    """Solve with the exact prior over the entries that its terms depend on, with a full Gaussian.

    Other families than the full one then keep what they hold of the change of the precision.

    :param factor: what q approximates of the prior. :param indices: the entries (S,) that this depends on; None: all.
    :return: q, and its standard deviations of these entries (S,) in units of the full Gaussian's.
    """
    some = q.as_full() if indices is None else _marginal(q, indices)
    if engine.program.prior.terms:
        state = new_state(some.mean, some.root, factor)
        state, info = engine.solve_with_exact_prior(prior_inputs, state, q.mean, indices)
        after = FullGaussian(state.mean, jnp.where(info.ok, state.root, jnp.nan))
    else:
        after = _divided(some, factor)
    if indices is None:
        return after, None
    before = _precision(some.root)
    change = _precision(after.root) - before
    kept = q.with_information(indices, before @ (after.mean - some.mean), 0.5 * (change + change.T))
    return kept, kept.deviation()[indices] / after.deviation()


def _marginal(q: Family, indices: Array) -> FullGaussian:
    """The marginal of q over some entries."""
    selected = jnp.zeros((len(indices), len(q.mean)), q.mean.dtype).at[jnp.arange(len(indices)), indices].set(1.0)
    root = q.predictor_root(selected)
    return FullGaussian(q.mean[indices], jnp.linalg.cholesky(root @ root.T))


def _divided(q: FullGaussian, site: CanonicalGaussian) -> FullGaussian:
    """q divided by ``site``."""
    root = jnp.linalg.inv(jnp.linalg.cholesky(_precision(q.root) - site.precision)).T
    _, slope = site.at(q.mean)
    return FullGaussian(q.mean - root @ (root.T @ slope), root)


def _precision(root: Array) -> Array:
    inverse = jnp.linalg.inv(root)
    return inverse.T @ inverse


# ---------------------------------------------------------------------- what a family does not hold
def warn_of_start(program: Program, family: str, start: Start) -> None:
    """Warn if the prior couples entries, and a q that no exact prior follows begins without that."""
    if start.prior is None or start.indices is None:
        return
    prior, held = start.prior, start.covariance
    known = np.flatnonzero(prior.is_gaussian & np.isin(prior.indices, start.indices))
    entries = prior.indices[known]
    given_others = [np.diagonal(np.linalg.inv(c[np.ix_(known, known)])) for c in (held, prior.root @ prior.root.T)]
    shares = np.sqrt(given_others[0] / given_others[1])
    if (shares < LEAST_SHARE).any():
        warn(
            f"the prior couples entries of {_site_of(program, entries[np.argmin(shares)])}, and with dynamics "
            f"family={family!r} begins without that: of each entry given the others, standard deviations are up to "
            f"{1 / shares.min():.2g} times those of the prior. {_advice(family)}"
        )


def warn_of_dropped(program: Program, family: str, indices: np.ndarray, shares: np.ndarray) -> None:
    """Warn if the prior couples entries, and q is much narrower without that.

    :param shares: standard deviations of q (S,), in units of those with all of the prior.
    """
    if len(shares) and shares.min() < LEAST_SHARE:
        site = _site_of(program, indices[np.argmin(shares)])
        warn(
            f"the prior couples entries of {site}, and family={family!r} drops that: "
            f"standard deviations are down to {shares.min():.2g} of those with it. {_advice(family)}"
        )


def _site_of(program: Program, entry: int) -> str:
    ends = np.cumsum(list(program.layout.sizes.values()))
    return f"site {list(program.layout.sizes)[int(np.searchsorted(ends, entry, side='right'))]!r}"


def _advice(family: str) -> str:
    return "family='full' holds it" + (", and so does a rank of all parameters." if family == "low-rank" else ".")
