"""The integral of exp L(h) over many parameters h: draws of NumPyro's NUTS, which takes L and its gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.diagnostics import effective_sample_size, gelman_rubin
from numpyro.infer import MCMC, NUTS

from ..engines.maximized_bound import Maximum
from ..engines.nested import Design, Integral, Marginal, Mode, Moments

NUM_CHAINS = 2
NUM_WARMUP, NUM_DRAWS = 300, 500  # of each chain
MOST_NUMBERS = 2**25  # in the roots of all points
MOST_R_HAT = 1.05
LEAST_DRAWS = 100  # effective
BANDWIDTH = 0.02  # of the Gaussians in h, in standard deviations of h: with so many parameters they give no density


def has_mixed(info: Mapping[str, Any]) -> bool:
    """Whether the chains agree, and their draws are enough; of an integral's ``info``."""
    return info["r_hat"] <= MOST_R_HAT and info["effective_sample_size"] >= LEAST_DRAWS


def integrate_by_nuts(
    solve: Callable[[Array], Maximum], marginal: Marginal, mode: Mode, moments: Moments, rng_key: Array
) -> Integral:
    """Two chains, in the coordinates of the mode's Gaussian. Their draws are the points, of equal weight.

    :param solve: h (d,) -> L and its gradient, inside compiled functions.
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
    kept = h[:: -(-len(h) * len(moments(mode.point)[0]) ** 2 // MOST_NUMBERS)]
    points = [marginal(one, mode.point) for one in kept]
    means, roots = map(np.array, zip(*[moments(point) for point in points]))
    mass = np.full(len(points), 1 / len(points))
    mean, covariance = np.mean(h, axis=0), np.atleast_2d(np.cov(h.T))
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
        "evaluations": len(marginal.points),
        "points": kept,
        "mass": mass,
        "bounds": np.array([point.bound for point in points]),
        "effective_sample_size": float(np.min(effective_sample_size(by_chain))),
        "r_hat": float(np.max(gelman_rubin(by_chain))),
        "divergences": int(np.sum(np.asarray(chains.get_extra_fields()["diverging"]))),
    }
    converged, error = (float(np.mean(values)) for values in ([p.converged for p in points], [p.error for p in points]))
    return Integral(design, None, converged, info, error)
