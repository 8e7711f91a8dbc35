"""The bound of the mixture for outliers, written out, and its maximum by L-BFGS from several starts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from _expectation_cases import mixture_for_outliers
from jax import Array
from scipy.optimize import minimize

from numpyro_rvga.core.expectations.by_nodes import hermite_rule

SIZE = 4  # a, b, log scale, logit of the share
FEW_NODES = 5  # along each axis: enough to tell which start ends highest
LOWER = np.tril_indices(SIZE)


def bound(x: Array, y: Array, num_nodes: int, mean: Array, root: Array) -> Array:
    """E_q[log p(y, theta)] + entropy of q = N(mean, root root^T), by so many nodes along each axis of each row."""
    z, weights = hermite_rule(3, num_nodes)
    line, weights_of_line = hermite_rule(1, 80)
    covariance = root @ root.T

    def of_row(x, y):
        design = jnp.array([[1.0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]).at[0, 1].set(x)
        points = design @ mean + z @ jnp.linalg.cholesky(design @ covariance @ design.T).T
        return weights @ jax.vmap(lambda u: mixture_for_outliers(u, y))(points)

    def along(k, log_prob):
        return weights_of_line @ log_prob(mean[k] + jnp.sqrt(covariance[k, k]) * line[:, 0])

    prior = jnp.sum(-0.5 * (mean[:2] ** 2 + jnp.diag(covariance)[:2]) / 25 - 0.5 * jnp.log(2 * jnp.pi * 25))
    prior += along(2, lambda t: dist.HalfNormal(1).log_prob(jnp.exp(t)) + t)
    prior += along(3, lambda s: jnp.log(9.0) + jax.nn.log_sigmoid(s) + 9 * jax.nn.log_sigmoid(-s))
    entropy = 0.5 * SIZE * (1 + jnp.log(2 * jnp.pi)) + jnp.sum(jnp.log(jnp.abs(jnp.diag(root))))
    return jnp.sum(jax.vmap(of_row)(x, y)) + prior + entropy


def best_of_starts(data: dict[str, np.ndarray], num_starts: int, num_nodes: int) -> tuple[Array, Array]:
    """Mean and root of the highest of L-BFGS's ends, which goes on with all nodes."""
    x, y = jnp.asarray(data["x"]), jnp.asarray(data["y"])

    def unpacked(vector):
        root = jnp.zeros((SIZE, SIZE)).at[LOWER].set(vector[SIZE:])
        return vector[:SIZE], root.at[jnp.diag_indices(SIZE)].set(jnp.exp(jnp.diag(root)))

    def climbed(start, num_nodes: int, ftol: float):
        loss = losses[num_nodes]
        return minimize(loss, start, jac=True, method="L-BFGS-B", options={"ftol": ftol, "maxiter": 500})

    losses = {
        count: jax.jit(jax.value_and_grad(lambda vector, count=count: -bound(x, y, count, *unpacked(vector))))
        for count in (FEW_NODES, num_nodes)
    }
    rng, ends = np.random.default_rng(0), []
    for _ in range(num_starts):
        start = np.zeros(SIZE + len(LOWER[0]))
        start[:SIZE] = rng.normal(size=SIZE) * [2.0, 2.0, 1.0, 1.0] + [0, 0, 0, -2]
        start[SIZE:][LOWER[0] == LOWER[1]] = np.log(0.2)
        ends.append(climbed(start, FEW_NODES, 1e-10))
    best = min(ends, key=lambda end: end.fun)
    return unpacked(jnp.asarray(climbed(best.x, num_nodes, 1e-13).x))


def bound_of(data: dict[str, np.ndarray], num_nodes: int) -> Callable[[Array, Array], Array]:
    """(mean, root) -> the bound."""
    return jax.jit(partial(bound, jnp.asarray(data["x"]), jnp.asarray(data["y"]), num_nodes))
