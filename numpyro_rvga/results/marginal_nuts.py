"""The integral of exp L(h) over many parameters h: draws by NUTS, which takes L and its gradient."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from jax import Array
from numpyro.diagnostics import effective_sample_size, gelman_rubin

from ..engines.integration.design import narrow_design, thinned
from ..engines.integration.hamiltonian import Draw, Evaluate, NutsChain, Position
from ..engines.integration.nested import Integral, Marginal, Mode, Moments, Point
from ..options import Info, key_numbers
from .arviz import smoothed

NUM_CHAINS = 2
NUM_WARMUP, MOST_DRAWS = 150, 1000  # of each chain; it starts in the coordinates of the mode's Gaussian
FIRST_DRAWS, MORE_DRAWS = 200, 50  # of each chain, before it is asked whether these are enough
ENOUGH, ENOUGH_R_HAT = 400, 1.02  # effective draws, and R-hat, at which they are
MOST_R_HAT = 1.05
LEAST_DRAWS = 100  # effective


def has_mixed(info: Info) -> bool:
    """Whether the chains agree, and their draws are enough; of an integral's ``info``."""
    return info.get("r_hat", 1.0) <= MOST_R_HAT and info["effective_sample_size"] >= LEAST_DRAWS


def integrate_by_nuts(marginal: Marginal, mode: Mode, moments: Moments, rng_key: Array) -> Integral:
    """Draws of two chains, in the coordinates of the mode's Gaussian, until there are enough. They are points of equal
    weight; where log p(y, h) is estimated, of importance weights."""
    size, center, axes = len(mode.point.h), mode.point.h, mode.axes
    num_evaluations = 0

    def evaluate(z: np.ndarray, near: Point) -> Position:
        nonlocal num_evaluations
        num_evaluations += 1
        point = marginal.evaluate_uncached(center + axes @ z, near)
        slope = np.zeros(size) if point.gradient is None or not np.isfinite(point.bound) else axes.T @ point.gradient
        return Position(z, point.bound, slope, point)

    rng = np.random.default_rng(key_numbers(rng_key))
    chains = [NutsChain(evaluate, _start(evaluate, mode, rng), rng).draws(NUM_WARMUP) for _ in range(NUM_CHAINS)]
    draws, effective, r_hat = _until_enough(chains)
    h = center + np.array([draw.position.z for draw in draws]) @ axes.T
    points = marginal.estimated([draw.position.point for draw in draws])
    log_weights, khat = smoothed(np.array([point.evidence - point.bound for point in points]))
    mass = np.exp(log_weights)
    mean, covariance = mass @ h, np.atleast_2d(np.cov(h.T, aweights=mass))
    points, mass = thinned(points, mass, moments)
    design = narrow_design(points, mass, moments, mean, covariance)
    info = {
        "method": "nuts",
        "evaluations": len(marginal.points) + num_evaluations,
        "points": np.array([point.h for point in points]),
        "mass": mass,
        "bounds": np.array([point.evidence for point in points]),
        "effective_sample_size": effective,
        "r_hat": r_hat,
        "divergences": sum(draw.diverges for draw in draws),
        "khat": float(khat),
        "relative_sample_size": float(1 / (len(mass) * np.sum(mass**2))),
    }
    return Integral.over(points, mass, design, None, info)


def _until_enough(chains: list[Iterator[Draw]]) -> tuple[list[Draw], float, float]:
    """Draws of all chains, with the least effective sample size and the largest R-hat of an entry."""
    drawn = [[next(chain) for _ in range(FIRST_DRAWS)] for chain in chains]
    while True:
        z = np.array([[draw.position.z for draw in draws] for draws in drawn])
        effective, r_hat = float(np.min(effective_sample_size(z))), float(np.max(gelman_rubin(z)))
        if (effective >= ENOUGH and r_hat <= ENOUGH_R_HAT) or z.shape[1] >= MOST_DRAWS:
            return [draw for draws in drawn for draw in draws], effective, r_hat
        for chain, draws in zip(chains, drawn):
            draws += [next(chain) for _ in range(MORE_DRAWS)]


def _start(evaluate: Evaluate, mode: Mode, rng: np.random.Generator) -> Position:
    """A draw of the mode's Gaussian, or nearer to the mode, where L is finite."""
    z = rng.normal(size=len(mode.point.h))
    while True:
        position = evaluate(z, mode.point)
        if np.isfinite(position.log_density):
            return position
        z = 0.5 * z
