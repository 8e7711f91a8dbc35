"""What a stream keeps of its groups between blocks: Gaussian factors of s and z_g.

Of each group with rows, q(z_g | s) is kept, and the Gaussian factor in it that approximates the group's open terms: its
prior p(z_g | s), and its last rows. A later block with rows of the group divides that factor out of q, and the terms
themselves take its place: their approximation depends on q. In double precision, on the host.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ..updates.state import QuadraticFactors
from .steps import Groups, GroupSums, conditionals, covariances

LOG_TWO_PI = math.log(2 * math.pi)


class OpenSums(NamedTuple):
    """Sums over the open terms of each of n groups, at q.

    :ivar values: E[log p], (n,). :ivar gradient: in z_g, (n, d). :ivar precision: minus the Hessian, (n, d, d).
    :ivar coupling: minus the Hessian in z_g and s, (n, d, k). :ivar shared_gradient: (n, k).
    :ivar shared_precision: (n, k, k).
    """

    values: np.ndarray
    gradient: np.ndarray
    precision: np.ndarray
    coupling: np.ndarray
    shared_gradient: np.ndarray
    shared_precision: np.ndarray


class GroupSummaries(NamedTuple):
    """n groups.

    :ivar precision: A_g, (n, d, d), :ivar coupling: C_g, (n, d, k), and :ivar linear: h_g, (n, d): q(z_g | s) is
        N(A_g^-1 (h_g - C_g s), A_g^-1).
    :ivar prior: factors of z_g and s that approximate p(z_g | s). :ivar rows: those of the rows that are kept.
    """

    precision: np.ndarray
    coupling: np.ndarray
    linear: np.ndarray
    prior: QuadraticFactors
    rows: QuadraticFactors

    def at(self, shared_mean: np.ndarray) -> Groups:
        """q(z_g | s) with the means of z_g at a mean of s, (k,)."""
        root = conditionals(Groups(self.linear, self.precision, self.coupling)).root
        mean = root @ (root.swapaxes(1, 2) @ (self.linear - self.coupling @ shared_mean)[..., None])
        return Groups(mean[..., 0], self.precision, self.coupling)

    def packed(self) -> np.ndarray:
        """A vector for each group. Of symmetric matrices it has one half."""
        parts = [_half(self.precision), self.coupling, self.linear]
        for constant, linear, precision in (self.prior, self.rows):
            parts += [constant, linear, _half(precision)]
        return np.concatenate([x.reshape(len(x), -1) for x in parts], axis=1)

    @classmethod
    def unpacked(cls, vectors: np.ndarray, size: int, k: int) -> GroupSummaries:
        """From such vectors. ``size``: entries of a group, and ``k``: of s."""
        pieces = np.split(vectors, np.cumsum(_sizes(size, k))[:-1], axis=1)
        coupling, both = pieces[1].copy().reshape(-1, size, k), size + k  # not all of the vectors lives on
        prior, rows = (
            QuadraticFactors(x[:, 0], linear, _square(half, both)) for x, linear, half in (pieces[3:6], pieces[6:])
        )
        return cls(_square(pieces[0], size), coupling, pieces[2], prior, rows)


def packed_width(size: int, k: int) -> int:
    """The length of the vector of a group with ``size`` entries. ``k``: entries of s."""
    return sum(_sizes(size, k))


def _sizes(size: int, k: int) -> list[int]:
    of_factor = [1, size + k, (size + k) * (size + k + 1) // 2]
    return [size * (size + 1) // 2, size * k, size, *of_factor, *of_factor]


def summarize(groups: Groups, mean: np.ndarray, root: np.ndarray, prior: OpenSums, rows: OpenSums) -> GroupSummaries:
    """The summaries of groups. ``mean`` (k,) and ``root`` (k, k): of q(s).

    :param prior: sums at q over the groups' priors, and ``rows``: over the rows that are kept.
    """
    (own, across), count = covariances(groups, root), len(groups.mean)
    covariance = _joined(own, across, np.broadcast_to(root @ root.T, (count, *root.shape)))
    means = np.concatenate([groups.mean, np.tile(mean, (count, 1))], axis=1)
    of_both = [
        QuadraticFactors.expected(
            at.values,
            np.concatenate([at.gradient, at.shared_gradient], axis=1),
            _joined(at.precision, at.coupling, at.shared_precision),
            means,
            covariance,
        )
        for at in (prior, rows)
    ]
    linear = (groups.precision @ groups.mean[..., None])[..., 0] + groups.coupling @ mean
    return GroupSummaries(groups.precision, groups.coupling, linear, *of_both)


class Rest(NamedTuple):
    """A Gaussian factor of s and of the groups of a block: all but the priors and the rows that are evaluated.

    :ivar precision: of z_g, (n, d, d). :ivar coupling: (n, d, k). :ivar linear: (n, d). Zero for new groups.
    :ivar shared: of s alone, with one entry.
    """

    precision: np.ndarray
    coupling: np.ndarray
    linear: np.ndarray
    shared: QuadraticFactors

    def added_to(self, sums: GroupSums, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """Sums at q. ``mean`` (k,) and ``root`` (k, k): of q(s)."""
        own, across = covariances(groups, root)
        curved = (self.precision @ groups.mean[..., None])[..., 0]
        crossed = self.coupling @ mean
        values = np.sum(groups.mean * (self.linear - 0.5 * curved - crossed), axis=1)
        values -= 0.5 * np.sum(self.precision * own, axis=(1, 2)) + np.sum(self.coupling * across, axis=(1, 2))
        (constant,), (linear,), (precision,) = self.shared
        value = constant + linear @ mean - 0.5 * mean @ precision @ mean - 0.5 * np.sum((precision @ root) * root)
        towards = linear - precision @ mean - np.einsum("gdk,gd->k", self.coupling, groups.mean)
        return GroupSums(
            sums.values + values,
            sums.gradient + self.linear - curved - crossed,
            sums.precision + self.precision,
            sums.coupling + self.coupling,
            sums.shared_value + value,
            sums.shared_gradient + towards,
            sums.shared_precision + precision,
            sums.error,
        )


def nothing(count: int, size: int, k: int) -> Rest:
    """Before the first block."""
    shared = QuadraticFactors(np.zeros(1), np.zeros((1, k)), np.zeros((1, k, k)))
    return Rest(np.zeros((count, size, size)), np.zeros((count, size, k)), np.zeros((count, size)), shared)


def rest_of_shared(
    evidence: float, mean: np.ndarray, precision: np.ndarray, prior: QuadraticFactors
) -> QuadraticFactors:
    """The factor q(s) times the evidence, over the approximation of the prior of s.

    :param mean: of q(s), and ``precision``. :param prior: the factor in q(s) that approximates p(s).
    """
    constant = 0.5 * (np.linalg.slogdet(precision)[1] - len(mean) * LOG_TWO_PI - mean @ precision @ mean)
    both = QuadraticFactors(np.array([evidence + constant]), (precision @ mean)[None], precision[None])
    return both.and_powers(prior, np.array([-1.0]))


def rest_of_groups(old: GroupSummaries, weights: np.ndarray, indices: np.ndarray, count: int) -> Rest:
    """The factor q(z_g | s) of some groups, over the approximation of their open terms.

    :param old: the groups that had rows before. :param weights: the multiplicity of their rows, by group.
    :param indices: theirs among ``count``.
    """
    size, k = old.coupling.shape[1:]
    rest, terms = nothing(count, size, k), old.prior.and_powers(old.rows, weights)
    rest.precision[indices] = old.precision - terms.precision[:, :size, :size]
    rest.linear[indices] = old.linear - terms.linear[:, :size]
    rest.coupling[indices] = old.coupling - terms.precision[:, :size, size:]
    given = conditionals(Groups(np.zeros_like(old.linear), old.precision, old.coupling))
    halves = (given.root.swapaxes(1, 2) @ old.linear[..., None])[..., 0]
    centers = (given.root @ halves[..., None])[..., 0]
    precision = -np.einsum("gdk,gdl->kl", old.coupling, given.slope) - terms.precision[:, size:, size:].sum(axis=0)
    linear = np.einsum("gdk,gd->k", old.coupling, centers) - terms.linear[:, size:].sum(axis=0)
    constant = len(indices) * 0.5 * size - given.entropy.sum() - 0.5 * np.sum(halves**2) - terms.constant.sum()
    return rest._replace(shared=QuadraticFactors(np.array([constant]), linear[None], precision[None]))


def sampling_variance(
    before: QuadraticFactors,
    now: QuadraticFactors,
    weights: np.ndarray,
    counts: np.ndarray,
    groups: Groups,
    mean: np.ndarray,
) -> np.ndarray:
    """Of the gradient in s, with the groups eliminated, if the rows of a sample each stand for several: what looking at
    them again has changed for the others is an estimate. Within a group, changes are taken to vary as much as they are
    large. (k, k).

    :param before: the factors of the samples, and ``now``. :param weights: how many rows each row stands for, by group.
    :param counts: rows of each sample. :param groups: as they are now. :param mean: of s.
    """
    size = groups.mean.shape[1]
    place = np.concatenate([groups.mean, np.tile(mean, (len(counts), 1))], axis=1)
    curved = ((now.precision - before.precision) @ place[..., None])[..., 0]
    change = now.linear - before.linear - curved
    given = np.linalg.solve(groups.precision, change[:, :size, None])[..., 0]
    of_shared = change[:, size:] - np.einsum("gdk,gd->gk", groups.coupling, given)
    each = weights * (weights - 1) / np.maximum(counts, 1)
    return np.einsum("g,gk,gl->kl", each, of_shared, of_shared)


def _joined(own: np.ndarray, mixed: np.ndarray, shared: np.ndarray) -> np.ndarray:
    """Matrices of z_g and s from their blocks."""
    upper = np.concatenate([own, mixed], axis=2)
    lower = np.concatenate([mixed.swapaxes(1, 2), shared], axis=2)
    return np.concatenate([upper, lower], axis=1)


def _half(matrices: np.ndarray) -> np.ndarray:
    """The lower triangles of symmetric matrices: (n, e, e) -> (n, e (e + 1) / 2)."""
    rows, columns = np.tril_indices(matrices.shape[-1])
    return matrices[:, rows, columns]


def _square(halves: np.ndarray, size: int) -> np.ndarray:
    rows, columns = np.tril_indices(size)
    matrices = np.empty((len(halves), size, size))
    matrices[:, rows, columns] = matrices[:, columns, rows] = halves
    return matrices
