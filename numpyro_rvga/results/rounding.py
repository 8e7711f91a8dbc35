"""Whether the digits that a solve works with are enough for the Gaussian that it has found."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np

from ..core.gaussians import FullGaussian

if TYPE_CHECKING:
    from .posterior import Posterior

LOST = 5e-3  # relative error of a variance, from one rounding of the precision: sums of many rows round often
MOST_PARAMETERS = 1000
NUM_ITERATIONS = 60
NAMED, SHARE = 4, 0.3  # entries in a message, and the least share in the direction of one that is named


def warn_of_lost_digits(posterior: Posterior, stacklevel: int) -> None:
    """If rounding may have changed a standard deviation: where a combination of parameters is known far less well than
    each of them would be, given the others. Full Gaussians of up to a thousand parameters are looked at.

    :param stacklevel: of the user's call.
    """
    gaussian = posterior.gaussian
    if not isinstance(gaussian, FullGaussian) or gaussian.mean.size > MOST_PARAMETERS:
        return
    largest, direction = widest_direction(np.asarray(gaussian.root, np.float64))
    digits = np.finfo(gaussian.mean.dtype)
    if not largest * digits.eps / 2 > LOST:
        return
    share = np.abs(direction) / np.abs(direction).max()
    chosen = [i for i in np.argsort(-share, kind="stable")[:NAMED] if share[i] > SHARE]
    names = _entries(posterior)
    more = " and others" if np.count_nonzero(share > SHARE) > len(chosen) else ""
    remedy = "jax.config.update('jax_enable_x64', True), or " if digits.bits == 32 else ""
    warnings.warn(
        f"{digits.bits}-bit numbers have too few digits here: the data hardly tell a combination of "
        f"{', '.join(names[i] for i in sorted(chosen))}{more} from others, and the prior is wide, so that its standard "
        f"deviation may be wrong. Use {remedy}standardise the columns, leave one of them out (as of the indicators of "
        "all groups beside an intercept), or give them narrower priors.",
        stacklevel=stacklevel,
    )


def widest_direction(root: np.ndarray) -> tuple[float, np.ndarray]:
    """By how much a variance exceeds what it would be given all other entries, at most, and in which direction: the
    largest eigenvalue of the covariance in units of the conditional standard deviations, and its eigenvector.

    :param root: (P, P), a square root of the covariance.
    """
    root = root / np.linalg.norm(root, axis=1, keepdims=True)
    try:
        inverse = np.linalg.inv(root)
    except np.linalg.LinAlgError:
        return np.inf, np.linalg.svd(root)[0][:, -1]
    scaled = np.sqrt(np.sum(inverse**2, axis=0))[:, None] * root
    direction = np.random.default_rng(0).normal(size=len(root))
    value = 0.0
    for _ in range(NUM_ITERATIONS):
        direction = scaled @ (scaled.T @ direction)
        value = float(np.linalg.norm(direction))
        direction = direction / value
    return value, direction


def _entries(posterior: Posterior) -> list[str]:
    """The entries of theta, by site and place."""
    layout = posterior.program.layout
    names = []
    for site in layout.site_names:
        shape = layout.shapes[site]
        places = np.ndindex(*shape) if math.prod(shape) else []
        names += [f"{site}[{', '.join(map(str, place))}]" if place else site for place in places]
    return names
