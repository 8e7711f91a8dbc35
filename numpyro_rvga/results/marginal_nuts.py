"""The integral of exp L(h) over many parameters h: draws of NumPyro's NUTS, which takes L and its gradient."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS

from ..engines.integration.nested import Design, Integral, Marginal, Mode, Point
from ..engines.maximized_bound import Maximum, Start
from ..options import Info
from .arviz import smoothed

NUM_CHAINS = 2
NUM_WARMUP, NUM_DRAWS = 300, 1000  # of each chain
MOST_NUMBERS = 2**25  # in the roots of all points
NEGLIGIBLE = 1e-6  # weight of a draw that is left out
MOST_R_HAT = 1.05
LEAST_DRAWS = 100  # effective
BANDWIDTH = 0.02  # of the Gaussians in h, in standard deviations of h: with so many parameters they give no density

Solve = Callable[[Array], Maximum]
TracedMoments = Callable[[Array, Start], tuple[Array, Array]]


def has_mixed(info: Info) -> bool:
    """Whether the chains agree, and their draws are enough; of an integral's ``info``."""
    return info["r_hat"] <= MOST_R_HAT and info["effective_sample_size"] >= LEAST_DRAWS


def integrate_by_nuts(solve: Solve, moments: TracedMoments, marginal: Marginal, mode: Mode, rng_key: Array) -> Integral:
    """Two chains, in the coordinates of the mode's Gaussian. Their draws are the points, of equal weight; or weighted,
    where L is not to stand for log p(y, h).

    :param solve: h (d,) -> L and its gradient, inside compiled functions.
    :param moments: h and the start that was found there -> mean and root of x, likewise.
    """
    size, axes = len(mode.point.h), jnp.asarray(mode.axes)
    center = jnp.asarray(mode.point.h)

    @jax.custom_vjp
    def potential(z):
        return _potential_and_slope(z)[0]

    def _potential_and_slope(z):
        solution = solve(center + axes @ z)
        slope = -axes.T @ jnp.asarray(solution.gradient)
        finite = jnp.isfinite(solution.bound) & jnp.all(jnp.isfinite(slope))
        return jnp.where(finite, -solution.bound, jnp.inf), jnp.where(finite, slope, 0.0)

    potential.defvjp(_potential_and_slope, lambda slope, factor: (factor * slope,))
    kernel = NUTS(potential_fn=potential)  # a dense mass of many entries takes more than this warm-up to learn
    chains = MCMC(
        kernel,
        num_warmup=NUM_WARMUP,
        num_samples=NUM_DRAWS,
        num_chains=NUM_CHAINS,
        chain_method="sequential",
        progress_bar=False,
    )
    start_key, chains_key = jax.random.split(rng_key)
    start = jax.random.normal(start_key, (NUM_CHAINS, size), center.dtype)
    chains.run(chains_key, init_params=start, extra_fields=("diverging",))
    by_chain = np.asarray(chains.get_samples(group_by_chain=True), np.float64)
    h = np.asarray(mode.point.h + by_chain.reshape(-1, size) @ mode.axes.T)
    kept = h[:: -(-len(h) * mode.point.start[0].size ** 2 // MOST_NUMBERS)]
    points, means, roots = _of_draws(solve, moments, marginal, jnp.asarray(kept, mode.point.start[0].dtype))
    log_weights, khat = smoothed(np.array([point.evidence - point.bound for point in points]))
    mass = np.exp(log_weights)
    some = np.flatnonzero(mass > NEGLIGIBLE)
    mass, kept, means, roots = mass[some] / mass[some].sum(), kept[some], means[some], roots[some]
    points = [points[k] for k in some]
    mean = mass @ kept if khat else np.mean(h, axis=0)
    covariance = np.atleast_2d(np.cov(kept.T, aweights=mass) if khat else np.cov(h.T))
    design = Design(
        mean + np.sqrt(1 - BANDWIDTH**2) * (kept - mean),
        mass,
        means,
        roots,
        np.zeros((*means.shape, size)),
        BANDWIDTH * np.linalg.cholesky(covariance),
        is_weighted=True,
    )
    info = {
        "method": "nuts",
        "evaluations": len(marginal.points) + len(points),
        "points": kept,
        "mass": mass,
        "bounds": np.array([point.evidence for point in points]),
        "effective_sample_size": float(np.min(effective_sample_size(by_chain))),
        "r_hat": float(np.max(gelman_rubin(by_chain))),
        "divergences": int(np.sum(np.asarray(chains.get_extra_fields()["diverging"]))),
        "khat": float(khat),
        "relative_sample_size": float(1 / (len(mass) * np.sum(mass**2))),
    }
    converged, error = (float(mass @ values) for values in ([p.converged for p in points], [p.error for p in points]))
    return Integral(design, None, converged, info, error)


def _of_draws(
    solve: Solve, moments: TracedMoments, marginal: Marginal, h: Array
) -> tuple[list[Point], np.ndarray, np.ndarray]:
    """Points with their evidence, and means and roots of x there."""

    @jax.jit
    def of_all(h):
        def one(h):
            maximum = solve(h)
            return maximum, moments(h, maximum.start)

        return lax.map(one, h)

    maximum, (means, roots) = jax.device_get(of_all(h))
    arrays = np.asarray(h, np.float64), maximum.bound, maximum.gradient, maximum.converged, *maximum.start
    points = []
    for each, bound, gradient, converged, *start in zip(*arrays):
        point = Point(each, float(bound), gradient, tuple(start), bool(converged), float(bound))
        points.append(marginal.estimated(point))
    return points, np.asarray(means, np.float64), np.asarray(roots, np.float64)
