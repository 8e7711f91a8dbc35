"""What a search for the best Gaussian is: what it seeks, where it stands, and what it proposes."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from ..pytrees import PyTree
from .factors import Nodes

RTOL = 1e-6


class Base(NamedTuple):
    """log base(e) = linear . e - e' precision e / 2 + constant. ``None`` precision: the identity."""

    precision: Array | None
    linear: Array | None
    constant: Array


class Solution(NamedTuple):
    """q = N(mean, (root root^T)^-1) and the search that led to it.

    :ivar mean: (r,). :ivar root: lower Cholesky factor of the precision, (r, r).
    :ivar bound: the maximized objective; with a normalized base, sum E[log p] - KL(q || base).
    :ivar decrement: squared length of the last natural gradient, in nats: twice the distance to the optimum.
    """

    mean: Array
    root: Array
    bound: Array
    decrement: Array
    iterations: Array
    converged: Array


class Settings(NamedTuple):
    """When to stop (static).

    :ivar tolerance: for the natural gradient's squared length, in nats.
    :ivar max_iterations: and ``min_iterations``: the number of steps, at most and at least.
    :ivar rtol: of what that length was at the start, which must be reached too; None: anything will do.
    """

    tolerance: float
    max_iterations: int
    min_iterations: int = 0
    rtol: float | None = RTOL


class Search(NamedTuple):
    """The kind of optimum that a search seeks, and its method (static).

    :ivar log_concave: whether all factors are log-concave.
    :ivar by_decrement: whether steps must lower the decrement, not raise the bound: for expectations whose gradient
        and curvature do not derive from their value.
    :ivar mode: seek the mode (q a point mass, derivatives at the mean), and the precision there: Laplace's
        approximation.
    :ivar alternating: solve for the mean alone, by Newton's method, and for the covariance alone, by its fixed point,
        in turn; not for both at once.
    :ivar seek_scale: begin with the scale that has the highest bound. Far from the solution, expectations over a wide q
        say little. Log-concave factors over a wide q do lead on, and faster, but where exponentials dwarf all else.
        Otherwise the scale is narrowed until the bound is finite.
    :ivar staged: whether the objective computes its parts one after the other, as it does where predictors are affine.
        Their covariances do not depend on the mean then, and its Newton steps take no product of matrices. So the
        host solves for the mean after each step of the covariance, which takes a third as many steps as both at once.
    :ivar nodes: which expectations the objective has.
    """

    settings: Settings
    log_concave: bool
    by_decrement: bool = False
    mode: bool = False
    alternating: bool = False
    seek_scale: bool = False
    staged: bool = False
    nodes: Nodes = "usual"

    @property
    def solves_for_mean(self) -> bool:
        """Whether the mean has steps of its own after each step of the covariance."""
        return self.staged and not (self.by_decrement or self.mode or self.alternating)

    @property
    def solves_for_first_mean(self) -> bool:
        """Whether it has such steps at the start too: there is a q to start from."""
        return self.solves_for_mean and not self.seek_scale

    @property
    def keeps_factor(self) -> bool:
        """Whether the target's Cholesky factor is needed besides a full step: to know that it is positive definite."""
        return self.mode or not self.log_concave


class Target(NamedTuple):
    """The precision that a full step takes, its Cholesky factor if it is kept, and whether it leaves out positive
    curvatures of the log-likelihoods."""

    precision: Array
    factor: PyTree
    clamped: Array


class Evaluation(NamedTuple):
    """The bound at a q, and where it leads.

    :ivar target: of a full step.
    :ivar decrement: the squared natural gradient, of which ``covariance_decrement`` is the covariance's part.
    """

    bound: Array
    gradient: Array
    target: Target
    decrement: Array
    covariance_decrement: Array


class SolverState(NamedTuple):
    """Where a search stands: q = N(mean, precision^-1), evaluated, and the step to try next.

    :ivar iterations: steps taken; while the initial scale is sought, trials.
    :ivar step: t; 0 while the initial scale is sought.
    :ivar stuck: whether no step can raise the bound any more.
    :ivar updating_mean: if alternating: whether it is the mean's turn.
    """

    iterations: Array
    step: Array
    mean: Array
    precision: Array
    evaluation: Evaluation
    initial_decrement: Array
    stuck: Array
    updating_mean: Array


class Proposal(NamedTuple):
    """The q to evaluate next, N(mean, precision^-1).

    :ivar factor: the precision's Cholesky factor.
    :ivar covariance_root: what the factors need of its inverse, see :mod:`~.precisions`; None if a mode is sought.
    :ivar change: the target less the state's precision, along which slopes are compared.
    """

    mean: Array
    precision: Array
    factor: Array
    covariance_root: PyTree
    change: Array


def standard_base(dtype) -> Base:
    """The standard normal, normalized."""
    return Base(None, None, jnp.zeros((), dtype))
