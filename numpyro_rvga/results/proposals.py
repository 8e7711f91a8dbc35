"""Draws of a posterior with the log density that they follow, to be weighted by p over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.gaussians.mixture import GaussianMixture

if TYPE_CHECKING:
    from .posterior import Posterior


def is_of_points(posterior: Posterior) -> bool:
    """Whether the posterior's components are at draws of NUTS, which give no density of the integrated sites."""
    return posterior.info.get("integration", {}).get("method") == "nuts"


def draws_with_density(posterior: Posterior, rng_key: Array, count: int) -> tuple[Array, np.ndarray]:
    """theta (n, P) and log q (n,). Of points that NUTS has drawn by exp L(h), with the weights that make it the
    evidence, it is the log evidence of h plus log q(x | h), up to a constant, at these very points."""
    gaussian = posterior.gaussian
    if not (isinstance(gaussian, GaussianMixture) and is_of_points(posterior)):
        theta = posterior.sample_unconstrained(rng_key, (count,))
        return theta, np.asarray(posterior.log_prob_unconstrained(theta), np.float64)
    integration, size = posterior.info["integration"], gaussian.means.shape[1]
    indices = posterior.program.layout.indices_of(posterior.info["integrated"])
    others = np.setdiff1d(np.arange(size), indices)
    point_key, noise_key = jax.random.split(rng_key)
    chosen = np.asarray(jax.random.choice(point_key, len(gaussian.means), (count,), p=gaussian.weights))
    noise = jax.random.normal(noise_key, (count, len(others)), gaussian.means.dtype)

    @jax.jit
    def at_points(gaussian, chosen, noise):
        def one(draw):
            k, z = draw
            root = gaussian.roots[k][np.ix_(others, others)]
            return gaussian.means[k][others] + root @ z, -0.5 * z @ z - jnp.sum(jnp.log(root.diagonal()))

        return jax.lax.map(one, (chosen, noise), batch_size=64)

    x, log_density = at_points(gaussian, chosen, noise)
    theta = np.empty((count, size), x.dtype)
    theta[:, others], theta[:, indices] = x, np.asarray(integration["points"])[chosen]
    return jnp.asarray(theta), np.asarray(integration["bounds"])[chosen] + np.asarray(log_density, np.float64)
