"""Learning ``numpyro.param`` sites: the bound, maximized over q, as a function of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..progress import Bar
from .joint_solver import RowChunks
from .maximized_bound import MaximizedBound, Maximum, Start

MAX_STEPS = 200
ROUNDING = 8.0  # of the bound, in its last digits
WALL = 1e3  # nats, by which the bound seems to fall where it is not finite


class Learned(NamedTuple):
    """Where learning ended.

    :ivar params: (K,), in unconstrained space.
    :ivar start: mean and precision of q there, in the initial state's standard coordinates.
    :ivar bounds: the bound after each step.
    """

    params: np.ndarray
    start: Start
    bounds: list[float]
    converged: bool


def learn(surface: MaximizedBound, chunks: RowChunks, start: Start | None, tolerance: float, bar: Bar) -> Learned:
    """Climb by L-BFGS in the parameters, from where the model starts them, with q solved for at each place.

    :param start: mean and precision of a q to start from, in the initial state's standard coordinates, or None.
    :param tolerance: rise of the bound, in nats, in the last step.
    :raises ValueError: if the bound or its slope is not finite where the parameters start.
    """
    import scipy.optimize  # here: it takes long to import, and models without parameters do without

    initial = surface.engine.program.params
    origin = np.asarray(initial.values)
    maximum = surface.solve(origin, chunks, surface.begin(origin, chunks) if start is None else start)
    if not _is_finite(maximum):
        shown = ", ".join(f"{name} = {np.asarray(x)}" for name, x in initial.constrained(initial.values).items())
        raise ValueError(
            f"the bound or its slope is not finite where the numpyro.param sites start ({shown}): give them other "
            "initial values, or a covariance matrix of the model more jitter."
        )
    learned, bounds = Learned(origin, maximum.start, [float(maximum.bound)], False), [float(maximum.bound)]

    def negative(params: np.ndarray) -> tuple[float, np.ndarray]:
        nonlocal maximum
        maximum = surface.solve(params.astype(origin.dtype), chunks, learned.start)
        if not _is_finite(maximum):
            away = params - learned.params
            return WALL - bounds[-1], WALL * away / np.linalg.norm(away)
        return -float(maximum.bound), -np.asarray(maximum.gradient, np.float64)

    def step(intermediate_result: Any) -> None:
        nonlocal learned
        learned = learned._replace(params=intermediate_result.x.astype(origin.dtype), start=maximum.start)
        bounds.append(-float(intermediate_result.fun))
        bar.update(1)
        bar.set_postfix(bound=f"{bounds[-1]:.6g}", refresh=False)

    options = {"maxiter": MAX_STEPS, "ftol": tolerance / max(abs(bounds[0]), 1.0), "gtol": 0.0}
    ended = scipy.optimize.minimize(negative, origin, jac=True, method="L-BFGS-B", callback=step, options=options)
    promised = float(ended.jac @ ended.hess_inv.dot(ended.jac))  # by the next step, were there one
    rounding = ROUNDING * float(np.finfo(origin.dtype).eps) * max(abs(bounds[-1]), 1.0)
    return learned._replace(bounds=bounds, converged=bool(ended.success) or promised <= tolerance + rounding)


def _is_finite(maximum: Maximum) -> bool:
    return bool(np.isfinite(maximum.bound)) and bool(np.isfinite(np.asarray(maximum.gradient)).all())
