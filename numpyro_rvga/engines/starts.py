"""Other starts of a search: what has not converged is sought again, and modes that lie apart are counted.

A bound that need not be concave may have several maxima. So a search of few numbers begins again where q's mean
is mirrored at the prior's, and within two of zero in unconstrained space, as NumPyro starts NUTS.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jax import Array
from scipy.special import softmax

from ..core.updates.state import State, StepInfo
from ..model.handlers.tracing import REACH
from ..options import Info, key_numbers
from ..user_warnings import warn

MOST_NUMBERS = 2**18  # in the Jacobians, of searches that are worth repeating
MOST_PARAMETERS = 200
NUM_CHECKS = 2  # starts besides the first, for a search that has come close,
NUM_RETRIES = 4  # and for one that has not come close
BETTER = 1e-3  # nats: a bound that is higher
FAR = 2.0  # standard deviations: other modes
CLOSE = 1e-3  # nats: the squared natural gradient of a search that has come as close as one can tell
NEAR = 0.01  # nats: one at which q is a tenth of a standard deviation from its mode: the search need not begin again
LOWEST = 7.0  # nats: modes of lower bounds have less than a thousandth of the posterior
NOTICEABLE = 0.01  # of the posterior in other modes

Solved = tuple[State, StepInfo]


def other_means(state: State, optimum: State, rng_key: Array, number: int) -> np.ndarray:
    """A mean to start from, in the standard coordinates of the Gaussian before the search.

    :param state: that Gaussian. :param optimum: where the first search has ended. :param number: of the start, from 0.
    """
    before, mean, root = (np.asarray(x, np.float64) for x in (state.mean, optimum.mean, state.root))
    rng = np.random.default_rng([number, *key_numbers(rng_key)])
    if number == 0:
        theta = 2 * before - mean
    elif number % 2:
        theta = rng.uniform(-REACH, REACH, before.shape)
    else:
        return rng.normal(size=before.shape).astype(state.mean.dtype)
    return np.linalg.solve(root, theta - before).astype(state.mean.dtype)


def best_of(solutions: Sequence[Solved]) -> Solved:
    """The first, or one of a higher bound. Its ``modes`` are the bounds of all that lie apart, if there are several: a
    search that has come nowhere near the end is at no mode."""
    usable = [each for each in solutions if bool(each[1].ok)] or list(solutions)
    bounds = np.array([float(state.log_evidence) for state, _ in usable])
    converged = np.array([bool(info.converged) for _, info in usable])
    close = np.array([float(info.decrement) <= CLOSE for _, info in usable])
    candidates, at_modes = (converged, converged) if converged.any() else (np.ones(len(usable), bool), close)
    highest = int(np.argmax(np.where(candidates, bounds, -np.inf)))
    best = 0 if candidates[0] and bounds[0] >= bounds[highest] - BETTER else highest
    state, info = usable[best]
    if not at_modes[best]:
        return state, info
    apart = [best]
    for i in np.argsort(-bounds, kind="stable"):
        if at_modes[i] and bounds[i] > bounds[best] - LOWEST and all(are_apart(usable[i], usable[j]) for j in apart):
            apart.append(int(i))
    return state, info._replace(modes=tuple(bounds[apart].tolist()) if len(apart) > 1 else ())


def are_apart(one: Solved, other: Solved) -> bool:
    """Whether some mean differs by more than the standard deviations of both."""
    a, b = one[0], other[0]
    deviations = [np.sqrt(np.sum(np.asarray(state.root, np.float64) ** 2, axis=1)) for state in (a, b)]
    return bool(np.max(np.abs(np.asarray(a.mean) - np.asarray(b.mean)) / np.maximum(*deviations)) > FAR)


def modes_info(modes: Sequence[float]) -> Info:
    """For the posterior's ``info``."""
    return {"modes": np.array(modes)} if len(modes) else {}


def share_of_others(info: Info) -> float:
    """The share of the posterior outside q's mode, by the modes' bounds."""
    return float(1 - softmax(np.asarray(info["modes"], np.float64))[0]) if "modes" in info else 0.0


def warn_of_modes(info: Info) -> None:
    """If much of the posterior may be at other modes."""
    share = share_of_others(info)
    if share > NOTICEABLE:
        warn(
            f"q is at one of {len(info['modes'])} modes, which searches from other starts found: their bounds are in "
            f"info['modes']. By these, about {share:.0%} of the posterior is elsewhere. If the modes are the same but "
            "for a sign or an order, fix that in the model, as by HalfNormal or OrderedTransform. Else run several "
            "chains of NUTS."
        )
