"""Natural-gradient steps of q(s) prod_g q(z_g | s), with the groups eliminated: s (k,) is shared, z_g (d,) a group's.

Given s, the groups are independent: q(z_g | s) = N(mean_g - A_g^-1 C_g (s - m), A_g^-1), with m the mean of s. A step
of length t takes the joint precision to Lambda(t) = (1 - t) Lambda + t Lambda_new and moves the joint mean by
t Lambda(t)^-1 gradient, as in :mod:`~.maximize`. The groups' share of that system is a Schur complement. So parts of
the data need to know nothing of each other's groups but sums, of k^2 + k numbers. In double precision, on the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

SHORTER = 0.25  # of a group's step that has lowered its bound
LITTLE = 1e-4  # nats: where a step of all groups has gained no more, the next one would gain nothing
NOTHING = 1e-9  # nats: where full steps of all groups would gain no more, the groups are at their maximum


class Groups(NamedTuple):
    """q(z_g | s) of n groups.

    :ivar mean: of z_g at the mean of s, (n, d). :ivar precision: A_g, (n, d, d). :ivar coupling: C_g, (n, d, k).
    """

    mean: np.ndarray
    precision: np.ndarray
    coupling: np.ndarray


class Conditionals(NamedTuple):
    """q(z_g | s) by slopes, roots and entropies.

    :ivar slope: of z_g's mean in s, (n, d, k). :ivar root: root root^T is its covariance given s, (n, d, d).
    :ivar entropy: (n,), -inf where there is no such Gaussian.
    """

    slope: np.ndarray
    root: np.ndarray
    entropy: np.ndarray


class GroupSums(NamedTuple):
    """Sums over terms, at q: of the terms of each group, and of all.

    :ivar values: E[log p] by group, (n,). :ivar gradient: in z_g, (n, d).
    :ivar precision: minus the Hessian, (n, d, d).
    :ivar coupling: minus the Hessian in z_g and s, (n, d, k).
    :ivar shared_value: of the terms of no group. :ivar shared_gradient: (k,). :ivar shared_precision: (k, k).
    :ivar error: by how much expectations may be off, in nats.
    """

    values: np.ndarray
    gradient: np.ndarray
    precision: np.ndarray
    coupling: np.ndarray
    shared_value: np.ndarray
    shared_gradient: np.ndarray
    shared_precision: np.ndarray
    error: np.ndarray


class Message(NamedTuple):
    """A part's share of a step of q(s), of length t.

    :ivar value: E[log p] and the entropies of q(z_g | s). :ivar error: by how much that may be off.
    :ivar precision: (k, k). The precision of s after the step is (1 - t) times the old one, plus the sum over parts.
    :ivar gradient: in s, with the groups eliminated, (k,).
    """

    value: float
    error: float
    precision: np.ndarray
    gradient: np.ndarray


def conditionals(groups: Groups) -> Conditionals:
    """Where a precision is not positive definite, NaN."""
    inverse = _inverse_factors(groups.precision)
    size = groups.mean.shape[1]
    halves = inverse @ groups.coupling
    diagonal = np.diagonal(inverse, axis1=1, axis2=2)
    with np.errstate(invalid="ignore"):
        entropy = 0.5 * size * (1 + math.log(2 * math.pi)) + np.sum(np.log(diagonal), axis=1)
    entropy = np.where(np.isfinite(entropy), entropy, -np.inf)
    transposed = np.swapaxes(inverse, 1, 2)
    return Conditionals(-transposed @ halves, transposed, entropy)


def covariances(groups: Groups, root: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Covariances of z_g (n, d, d), and of z_g and s (n, d, k). ``root``: of the covariance of s, (k, k)."""
    given = conditionals(groups)
    across = given.slope @ root
    return given.root @ given.root.swapaxes(1, 2) + across @ across.swapaxes(1, 2), across @ root.T


def mixed(groups: Groups, target: GroupSums, step: float | np.ndarray) -> Groups:
    """The groups with the precisions and couplings after a step of this length; the means stay:

    A_g(t) = (1 - t) A_g + t H_g,     C_g(t) = (1 - t) C_g + t H_gs, with H the sums' ``precision`` and ``coupling``.

    :param step: one for all, or of each group (n, 1, 1).
    """
    precision = (1 - step) * groups.precision + step * target.precision
    return Groups(groups.mean, precision, (1 - step) * groups.coupling + step * target.coupling)


def message(groups: Groups, sums: GroupSums, step: float) -> Message:
    """The share of a step of this length t. With A_g(t) and C_g(t) of :func:`mixed`, and the sums' gradients g and h_g,

    precision = t H_s - sum_g C_g(t)^T A_g(t)^-1 C_g(t) + (1 - t) sum_g C_g^T A_g^-1 C_g,
    gradient = g - sum_g C_g(t)^T A_g(t)^-1 h_g.

    NaN if it leaves a group no Gaussian.

    :param sums: sums at the groups' q: H_s is their ``shared_precision``.
    """
    ahead = mixed(groups, sums, step)
    inverse = _inverse_factors(ahead.precision)
    halves = _stacked(inverse @ ahead.coupling)
    precision = step * sums.shared_precision - halves.T @ halves
    if step < 1:
        before = _stacked(_inverse_factors(groups.precision) @ groups.coupling)
        precision = precision + (1 - step) * before.T @ before
    gradient = sums.shared_gradient - halves.T @ np.ravel(inverse @ sums.gradient[..., None])
    value = sums.values.sum() + sums.shared_value + conditionals(groups).entropy.sum()
    return Message(float(value), float(sums.error), precision, gradient)


def take_step(groups: Groups, sums: GroupSums, step: float, shift: np.ndarray) -> Groups:
    """The groups after a step of this length t that moves the mean of s by ``shift`` (k,):

    mean_g + A_g(t)^-1 (t h_g - C_g(t) shift), with A_g(t) and C_g(t) of :func:`mixed`.
    """
    ahead = mixed(groups, sums, step)
    force = step * sums.gradient - ahead.coupling @ shift
    return ahead._replace(mean=groups.mean + _solved(ahead.precision, force))


def maximize_groups(
    evaluate: Callable[[Groups], GroupSums], groups: Groups, max_steps: int, rounding: float
) -> tuple[Groups, GroupSums]:
    """The groups of the highest bound for a fixed q(s), by natural-gradient steps. Each has a step length of its own,
    and no group's share of the bound falls.

    :param evaluate: groups -> sums at q. :param rounding: relative, of these.
    :return: the groups, and the sums at their q.
    """
    sums = evaluate(groups)
    bounds, steps = sums.values + conditionals(groups).entropy, np.ones(len(groups.mean))
    for _ in range(max_steps):
        lost = rounding * (1 + np.abs(bounds))
        unresolved = lost.sum()
        if _to_gain(groups, sums) <= NOTHING + unresolved:
            break
        ahead = mixed(groups, sums, steps[:, None, None])
        ahead = ahead._replace(mean=groups.mean + _solved(ahead.precision, steps[:, None] * sums.gradient))
        is_gaussian = np.isfinite(conditionals(ahead).entropy) & np.all(np.isfinite(ahead.mean), axis=1)
        ahead = _chosen(is_gaussian, ahead, groups)
        after = evaluate(ahead)
        reached = after.values + conditionals(ahead).entropy
        better = is_gaussian & (reached >= bounds - lost)
        rise = np.sum(np.abs(reached - bounds), where=better)
        groups, bounds = _chosen(better, ahead, groups), np.where(better, reached, bounds)
        steps = np.where(better, 1.0, SHORTER * steps)
        sums = after if better.all() else evaluate(groups)
        if better.all() and rise <= LITTLE + unresolved:
            break
    return groups, sums


def _to_gain(groups: Groups, sums: GroupSums) -> float:
    """Nats by which full steps of all groups raise the bound, to second order; NaN where there are no Gaussians."""
    inverse = _inverse_factors(groups.precision)
    with np.errstate(invalid="ignore", over="ignore"):
        halves = inverse @ sums.gradient[..., None]
        changes = inverse @ (sums.precision - groups.precision) @ np.swapaxes(inverse, 1, 2)
    return 0.5 * float(np.sum(halves**2)) + 0.25 * float(np.sum(changes**2))


def _chosen(choice: np.ndarray, first: Groups, second: Groups) -> Groups:
    """For each group, one of two, by ``choice`` (n,)."""
    return Groups(*[np.where(choice.reshape(-1, *[1] * (a.ndim - 1)), a, b) for a, b in zip(first, second)])


def _inverse_factors(precision: np.ndarray) -> np.ndarray:
    """Inverses of the lower Cholesky factors (n, d, d); NaN where there are none. Of all matrices at once, by columns:
    a call of LAPACK for each small matrix takes many times as long."""
    size = precision.shape[-1]
    factor, inverse = np.zeros_like(precision), np.zeros_like(precision)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        for i in range(size):
            row = factor[:, i, :i]
            pivot = precision[:, i, i] - np.sum(row**2, axis=1)
            root = np.sqrt(np.where(pivot > 0, pivot, np.nan))
            below = precision[:, i + 1 :, i] - (factor[:, i + 1 :, :i] @ row[..., None])[..., 0]
            factor[:, i, i], factor[:, i + 1 :, i] = root, below / root[:, None]
            inverse[:, i, i] = 1 / root
            inverse[:, i, :i] = -(row[:, None] @ inverse[:, :i, :i])[:, 0] / root[:, None]
    return inverse


def _solved(precision: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """A_g^-1 v_g, (n, d)."""
    inverse = _inverse_factors(precision)
    return (np.swapaxes(inverse, 1, 2) @ (inverse @ vectors[..., None]))[..., 0]


def _stacked(blocks: np.ndarray) -> np.ndarray:
    return blocks.reshape(-1, blocks.shape[-1])
