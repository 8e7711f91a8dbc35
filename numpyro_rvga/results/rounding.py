"""Whether the digits that a solve works with are enough for the Gaussian that it results in."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import numpy as np
from scipy.linalg import solve_triangular

from ..core.gaussians import FullGaussian, LowRankGaussian
from ..user_warnings import warn
from .fitted import Fitted

LOST = 5e-3  # relative error of a variance, from one rounding of the precision: sums of many rows round often
MAX_NUMBERS = 2**26  # in the arrays of a Gaussian that is checked
MAX_EXACT = 1000  # entries whose conditional variances are computed; beyond, they are estimated
NUM_PROBES = 64  # for such an estimate: a standard error of a sixth
MAX_FACTORIZED = 4000  # entries, if the root is not triangular
NUM_ITERATIONS = 60
STILL, NUM_STILL = 1e-3, 5  # relative change of an eigenvalue that has come to rest, in so many iterations
NAMED, SHARE = 4, 0.3  # entries in a message, and the least share in the direction of one that is named
UNNAMED = 0.1  # of the direction's square, in entries that are not named


def warn_of_lost_digits(posterior: Fitted) -> None:
    """If rounding may have changed a standard deviation: where a combination of parameters is known far less well than
    each of them would be, given the others. Diagonal precisions are sums of positive numbers, and lose none.
    """
    gaussian = posterior.gaussian
    widest = None
    if sum(x.size for x in jax.tree.leaves(gaussian)) <= MAX_NUMBERS:
        if isinstance(gaussian, FullGaussian):
            widest = widest_direction(np.asarray(gaussian.root, np.float64))
        elif isinstance(gaussian, LowRankGaussian):
            widest = _widest_of_low_rank(*[np.asarray(x, np.float64) for x in (gaussian.diagonal, gaussian.factor)])
    digits = np.finfo(gaussian.mean.dtype)
    if widest is None or not widest[0] * digits.eps / 2 > LOST:
        return
    share = np.abs(widest[1]) / np.abs(widest[1]).max()
    chosen = [i for i in np.argsort(-share, kind="stable")[:NAMED] if share[i] > SHARE]
    names = posterior.program.layout.entry_names
    unnamed = np.sum(share**2) - np.sum(share[chosen] ** 2)
    more = " and others" if unnamed > UNNAMED * np.sum(share**2) else ""
    remedy = "jax.config.update('jax_enable_x64', True), or " if digits.bits == 32 else ""
    warn(
        f"{digits.bits}-bit numbers have too few digits here: the data hardly tell a combination of "
        f"{', '.join(names[i] for i in sorted(chosen))}{more} from others, and the prior is wide, so that its standard "
        f"deviation may be wrong. Use {remedy}standardize the columns, leave one of them out (as of the indicators of "
        "all groups beside an intercept), or give them narrower priors.",
    )


def widest_direction(root: np.ndarray) -> tuple[float, np.ndarray] | None:
    """By how much a variance exceeds what it would be given all other entries, at most, and in which direction: the
    largest eigenvalue of the covariance in units of the conditional standard deviations, and its eigenvector.

    :param root: (P, P), a square root of the covariance.
    :return: None for matrices that take too long to factorize.
    """
    size = len(root)
    root = root / np.linalg.norm(root, axis=1, keepdims=True)
    first = np.argmax(root != 0, axis=1)
    order = np.argsort(first, kind="stable")
    upper, triangular = root[order], bool(np.all(first[order] >= np.arange(size)))
    if not triangular and size > MAX_FACTORIZED:
        return None
    if size > MAX_EXACT:
        probes = np.random.default_rng(1).normal(size=(size, NUM_PROBES)) / math.sqrt(NUM_PROBES)
    else:
        probes = np.eye(size)
    try:
        inverse = solve_triangular(upper, probes, trans=1) if triangular else np.linalg.solve(upper.T, probes)
    except np.linalg.LinAlgError:
        return math.inf, np.linalg.svd(root)[0][:, -1]
    precisions = np.empty(size)
    precisions[order] = np.sum(inverse**2, axis=1)
    return _leading(precisions, lambda vector: root @ (root.T @ vector))


def _widest_of_low_rank(diagonal: np.ndarray, factor: np.ndarray) -> tuple[float, np.ndarray]:
    """:func:`widest_direction` for the precision diag(diagonal) + factor^T factor, with factor (R, P)."""
    narrow = factor / diagonal
    inner = np.eye(len(factor)) + narrow @ factor.T

    def times_covariance(vector: np.ndarray) -> np.ndarray:
        return vector / diagonal - np.linalg.solve(inner, narrow @ vector) @ narrow

    return _leading(diagonal + np.sum(factor**2, axis=0), times_covariance)


def _leading(precisions: np.ndarray, times_covariance: Callable[[np.ndarray], np.ndarray]) -> tuple[float, np.ndarray]:
    """The largest eigenvalue of D^1/2 Sigma D^1/2 and its eigenvector, by the power method.

    :param precisions: the diagonal D of Sigma^-1, (P,).
    """
    scale = np.sqrt(precisions)
    direction, value, num_still = np.random.default_rng(0).normal(size=len(scale)), 0.0, 0
    for _ in range(NUM_ITERATIONS):
        direction, before = scale * times_covariance(scale * direction), value
        value = float(np.linalg.norm(direction))
        direction = direction / value
        num_still = num_still + 1 if abs(value - before) <= STILL * value else 0
        if num_still == NUM_STILL:
            break
    return value, direction
