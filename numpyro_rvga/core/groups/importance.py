"""The log of the integral of p(x) by importance sampling from a Gaussian q, for p a product of factors.

Entries of x that share no factor are independent given all others. Given a draw of the shared entries s,
the integral is a product over groups of such entries,

    int p(x) dx = E_q(s)[ p(s) / q(s) prod_c E_q(x_c | s)[ p(x_c | s) / q(x_c | s) ] ],

with Gauss-Hermite nodes for the few entries of a group, and randomized quasi-random draws of s. So the variance is that
of the shared entries alone. Over these draws, the logarithm's expectation is a lower bound (Jensen's inequality).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.special import logsumexp

from ..expectations.by_nodes import hermite_rule
from ..matrices.linalg import cholesky, solve_lower
from ..updates.state import CanonicalGaussian

LARGEST_GROUP = 3  # entries
NODES = {1: 21, 2: 11, 3: 7}  # of Gauss and Hermite, along each axis
REPETITIONS = 8  # of the quasi-random points, whose differences estimate the error
NUM_DRAWS = 16  # of each, for one shared entry; as many times more as there are of these, up to
MOST_DRAWS = 256
EVALUATIONS = 2**18  # of factors at once
MOST_ROUNDING = 0.02  # nats: what sums of large numbers that cancel may leave


class Partition(NamedTuple):
    """A partition of the entries of x.

    :ivar shared: (S,), those that are in no group. :ivar members: (G, D), padded with P where a group has fewer than D.
    :ivar group_of: (P,), the group of each entry, or -1.
    """

    shared: np.ndarray
    members: np.ndarray
    group_of: np.ndarray


class Summands(NamedTuple):
    """Factors' logarithms, density(predictors + jacobian x, constants).

    :ivar density: of n factors, predictors (n, C) and constants -> (n,).
    :ivar predictors: at x = 0, (n, C). :ivar jacobian: (n, C, P).
    """

    density: Callable[[Array, tuple], Array]
    predictors: Array
    jacobian: Array
    constants: tuple


class Estimate(NamedTuple):
    """:ivar value: of the log of the integral. :ivar error: its standard error over repetitions."""

    value: Array
    error: Array


def independent_groups(coupled: np.ndarray) -> Partition:
    """The smallest set of shared entries, by how many others each is coupled with, that leaves small groups.

    :param coupled: (P, P), whether a factor depends on both.
    """
    from scipy.sparse.csgraph import connected_components  # here and below: slow to import, and seldom needed

    size = len(coupled)
    degree = np.sum(coupled, axis=1)
    for limit in (*np.unique(degree)[::-1], -1):
        kept = np.flatnonzero(degree <= limit)
        _, label = connected_components(coupled[np.ix_(kept, kept)], directed=False)
        if np.max(np.bincount(label), initial=0) <= LARGEST_GROUP:
            break
    group_of = np.full(size, -1)
    group_of[kept] = label
    largest = np.max(np.bincount(label), initial=1)
    members = np.full((max(np.max(label, initial=-1) + 1, 1), largest), size)  # at least one, which may be empty
    for group, row in enumerate(members):
        entries = kept[label == group]
        row[: len(entries)] = entries
    return Partition(np.flatnonzero(group_of < 0), members, group_of)


def standard_nodes(groups: Partition) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Draws of the shared entries (R, M, S), and nodes (L, D) of a group with their log weights (L,), all standard."""
    import scipy.stats

    size, largest = len(groups.shared), groups.members.shape[1]
    draws = min(MOST_DRAWS, NUM_DRAWS * 2 ** int(np.ceil(np.log2(max(size, 1)))))
    sobol = [scipy.stats.qmc.Sobol(size, rng=seed).random(draws) for seed in range(REPETITIONS)] if size else None
    shared = np.zeros((1, 1, 0)) if sobol is None else scipy.stats.norm.ppf(np.clip(sobol, 1e-12, 1 - 1e-12))
    nodes, weights = hermite_rule(largest, NODES[largest])
    return shared, nodes, np.log(weights)


def log_integral(
    base: CanonicalGaussian,
    chunks: Sequence[Sequence[Summands]],
    precision: Array,
    groups: Partition,
) -> Estimate:
    """The log of the integral of exp(base + sum of the summands), over (2 pi)^(P / 2). NaN where rounding leaves none.

    :param base: about q's mean, as are the summands. :param precision: of q, (P, P).
    """
    shared, members = groups.shared, groups.members
    dtype, (count, largest) = precision.dtype, members.shape
    draws, nodes, log_weights = (jnp.asarray(x, dtype) for x in standard_nodes(groups))
    padded, padded_base = (jnp.pad(x, (0, 1)).at[-1, -1].set(1) for x in (precision, base.precision))
    linear = jnp.pad(base.linear, (0, 1))
    flat, is_entry = members.ravel(), members.ravel() < len(precision)
    pairs = jnp.asarray(is_entry & is_entry[:, None]) | jnp.eye(flat.size, dtype=bool)
    pad = jnp.asarray(members[:, :, None] != members[:, None, :]) | jnp.eye(largest, dtype=bool)

    within_base = jnp.where(pad, padded_base[members[:, :, None], members[:, None, :]], 0)  # of each group, (G, D, D)

    # q itself may couple groups a little: a search for another h has left it so.
    root_of_all = cholesky(jnp.where(pairs, padded[np.ix_(flat, flat)], 0))
    solved = solve_lower(root_of_all, padded[np.ix_(flat, shared)])
    regression = -solve_lower(root_of_all, solved, transpose=True).reshape(count, largest, -1)  # E[x_c | s] = . s
    inverse = solve_lower(root_of_all, jnp.eye(flat.size, dtype=dtype)).reshape(-1, count, largest)
    root = jax.vmap(cholesky)(jnp.linalg.inv(jnp.einsum("kgd,kge->gde", inverse, inverse)))  # of q(x_c | s)
    across_base = padded_base[members][:, :, shared]  # (G, D, S)
    steps = jax.vmap(lambda r: solve_lower(r, nodes.T, transpose=True).T)(root)  # (G, L, D)
    between = precision[np.ix_(shared, shared)] - solved.T @ solved
    shared_root = cholesky(between) if len(shared) else between
    log_determinants = jnp.sum(jnp.log(jnp.diagonal(root, axis1=1, axis2=2)), axis=1)
    grouped = [[_grouped(summand, groups) for summand in chunk] for chunk in chunks]

    def log_ratio(z):
        s = solve_lower(shared_root, z, transpose=True) if len(shared) else z
        x = (regression @ s)[:, None] + steps  # (G, L, D)
        quadratic = jnp.einsum("gld,gde,gle->gl", x, within_base, x)
        h = linear[members] - across_base @ s
        linear_part = jnp.einsum("gd,gld->gl", h, x)
        of_groups = linear_part - 0.5 * quadratic + 0.5 * jnp.sum(nodes**2, axis=1) + log_weights
        by_group = [_by_group(summand, s, x) for chunk in grouped for summand in chunk]
        values = sum(by_group, jnp.zeros((count + 1, len(nodes)), dtype))
        groups_total = logsumexp(of_groups + values[:count], axis=1) - log_determinants
        base_shared = base.linear[shared] @ s - 0.5 * s @ base.precision[np.ix_(shared, shared)] @ s
        of_shared = base_shared + values[count, 0] + 0.5 * z @ z - jnp.sum(jnp.log(jnp.diagonal(shared_root)))
        largest_parts = jnp.max(jnp.abs(linear_part) + jnp.abs(quadratic), axis=1)
        return of_shared + jnp.sum(groups_total), jnp.sum(largest_parts)

    size = len(nodes) * max(1, sum(len(summand.predictors) for chunk in chunks for summand in chunk))
    all_draws = draws.reshape(draws.shape[0] * draws.shape[1], len(shared))
    log_ratios, sizes = lax.map(log_ratio, all_draws, batch_size=int(np.clip(EVALUATIONS // size, 1, len(all_draws))))
    by_repetition = logsumexp(log_ratios.reshape(draws.shape[:2]), axis=1) - jnp.log(draws.shape[1])
    total = logsumexp(by_repetition) - jnp.log(len(by_repetition))
    error = jnp.std(jnp.exp(by_repetition - total)) / np.sqrt(max(len(by_repetition) - 1, 1))
    is_rounding = jnp.max(sizes) * jnp.finfo(dtype).eps > MOST_ROUNDING
    return Estimate(jnp.where(is_rounding, jnp.nan, jnp.asarray(base.constant) + total), error)


class _Grouped(NamedTuple):
    """A summand's Jacobians in the shared entries (n, C, S) and at those of its group (n, C, D)."""

    summand: Summands
    group: Array
    of_shared: Array
    of_group: Array


def _grouped(summand: Summands, groups: Partition) -> _Grouped:
    jacobian, count = summand.jacobian, len(groups.members)
    depends = jnp.any(lax.stop_gradient(jacobian) != 0, axis=1)
    group = jnp.max(jnp.where(depends, jnp.asarray(groups.group_of), -1), axis=1, initial=-1)
    group = jnp.where(group < 0, count, group)  # the last: of shared entries alone
    members = jnp.concatenate([jnp.asarray(groups.members), jnp.full((1, groups.members.shape[1]), jacobian.shape[2])])
    padded = jnp.pad(jacobian, ((0, 0), (0, 0), (0, 1)))
    of_group = jnp.take_along_axis(padded, members[group][:, None], axis=2)
    return _Grouped(summand, group, jacobian[:, :, groups.shared], of_group)


def _by_group(grouped: _Grouped, s: Array, x: Array) -> Array:
    """Sums of a summand's values over each group's factors, and over those of no group: (G + 1, L)."""
    num_nodes = x.shape[1] if len(x) else 1
    x = jnp.concatenate([x, jnp.zeros((1, num_nodes, grouped.of_group.shape[2]), x.dtype)])
    at = grouped.summand.predictors + grouped.of_shared @ s
    predictors = at[:, None] + jnp.einsum("ncd,nld->nlc", grouped.of_group, x[grouped.group])
    density = grouped.summand.density
    values = jax.vmap(lambda u: density(u, grouped.summand.constants), 1, 1)(predictors)
    return jax.ops.segment_sum(values, grouped.group, len(x))
