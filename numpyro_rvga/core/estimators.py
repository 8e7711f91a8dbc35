"""What a block of rows says at q: the gradient and curvature of its expected log-likelihood, estimated.

In predictor space, where the model's Jacobian is taken at q's mean, or in parameter space, by draws of theta, which is
unbiased for any model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.scipy.linalg import block_diag

from .factors import Factors, Kind
from .gaussians import DiagonalGaussian, Family, Site
from .linalg import positive_part, semidefinite_root

PARAMETER_SPACE = ("mc-hess", "mc-ef")


class Observation(NamedTuple):
    """A block of n rows.

    :ivar kinds: of its factors. :ivar linearise: theta (P,) -> factors with offset F_i(theta) and design the Jacobians.
    :ivar rows: pytree of (n, ...) arrays. :ivar log_lik: (theta, one of the rows) -> its log-likelihood.
    :ivar weights: (n,), how many rows each stands for; the factors hold them already.
    """

    kinds: tuple[Kind, ...]
    linearise: Callable[[Array], tuple[Factors, ...]]
    rows: Any
    log_lik: Callable[[Array, Any], Array]
    weights: Array

    def gradients(self, theta: Array) -> Array:
        """Of each row's log-likelihood, (n, P)."""
        return jax.vmap(jax.grad(self.log_lik), (None, 0))(theta, self.rows)

    def total(self, theta: Array) -> Array:
        return self.weights @ jax.vmap(self.log_lik, (None, 0))(theta, self.rows)


Estimator = Callable[[Array, Family, Observation], Site]


def make_estimator(hessian: str, num_samples: int) -> Estimator:
    """The estimator of this name: (rng_key, q, observation) -> site.

    :param hessian: ``"lin-hess"``, ``"lin-ef"``, ``"mc-hess"`` or ``"mc-ef"`` (BONG paper, table 1), or
        ``"expected"``: each kind's own expectation in predictor space.
    :param num_samples: draws of theta.
    """
    if hessian == "mc-hess":
        return partial(_sampled_hessian, num_samples)
    if hessian == "mc-ef":
        return partial(_sampled_fisher, num_samples)
    if hessian == "lin-ef":
        return lambda rng_key, q, observation: _empirical_fisher(observation, q.mean[None])
    return lambda rng_key, q, observation: _in_predictor_space(q, observation, expected=hessian == "expected")


def _in_predictor_space(q: Family, observation: Observation, *, expected: bool) -> Site:
    """E[grad phi] and E[hess phi] under q; or the gradient at its mean and the Hessian there without its positive part,
    for which the kind's Fisher information stands if it has one."""
    gradient, rows, weights = jnp.zeros_like(q.mean), [], []
    for kind, factors in zip(observation.kinds, observation.linearise(q.mean)):
        n, c, size = factors.design.shape
        if expected:
            spread = q.spread(factors.design)
            covariance = jnp.einsum("ncr,ndr->ncd", spread, spread)
        else:
            covariance = jnp.zeros((n, c, c), q.mean.dtype)
        moments = kind.expect if expected else jax.vmap(kind.plugin)
        _, slopes, curvatures = moments(factors.offset, covariance, factors.constants)
        semidefinite = kind.concave
        if not expected and kind.information is not None:
            curvatures, semidefinite = -jax.vmap(kind.information)(factors.offset, factors.constants), True
        gradient = gradient + slopes.reshape(-1) @ factors.design.reshape(-1, size)
        if expected and not kind.concave:
            rows.append(factors.design.reshape(-1, size))
            weights.append(block_diag(*-curvatures))
        else:
            root = semidefinite_root(-curvatures if semidefinite else positive_part(-curvatures))
            rows.append(jnp.einsum("ncd,ncp->ndp", root, factors.design).reshape(-1, size))
            weights.append(None)
    factor = jnp.concatenate(rows)
    if all(weight is None for weight in weights):
        return Site(gradient, factor)
    filled = [jnp.eye(len(r), dtype=r.dtype) if w is None else w for r, w in zip(rows, weights)]
    return Site(gradient, factor, block_diag(*filled))


def _sampled_fisher(num_samples: int, rng_key: Array, q: Family, observation: Observation) -> Site:
    return _empirical_fisher(observation, _draws(rng_key, q, num_samples))


def _empirical_fisher(observation: Observation, thetas: Array) -> Site:
    """Outer products of the rows' gradients for minus their Hessians, averaged over theta (M, P)."""
    gradients = jax.vmap(observation.gradients)(thetas).reshape(-1, thetas.shape[1])
    weights = jnp.tile(observation.weights / len(thetas), len(thetas))
    return Site(weights @ gradients, jnp.sqrt(weights)[:, None] * gradients)


def _sampled_hessian(num_samples: int, rng_key: Array, q: Family, observation: Observation) -> Site:
    """All of it; for a diagonal q its diagonal, by one of Hutchinson's probes for each draw."""
    draw_key, probe_key = jax.random.split(rng_key)
    draws, size = _draws(draw_key, q, num_samples), len(q.mean)
    slope = jax.grad(observation.total)
    if isinstance(q, DiagonalGaussian):
        probes = jax.random.rademacher(probe_key, draws.shape, q.mean.dtype)
        gradients, products = jax.vmap(lambda theta, z: jax.jvp(slope, (theta,), (z,)))(draws, probes)
        nothing = jnp.zeros((0, size), q.mean.dtype)
        return Site(jnp.mean(gradients, axis=0), nothing, diagonal=-jnp.mean(probes * products, axis=0))
    average = lambda shift: jnp.mean(jax.vmap(lambda theta: slope(theta + shift))(draws), axis=0)  # noqa: E731
    origin, identity = jnp.zeros_like(q.mean), jnp.eye(size, dtype=q.mean.dtype)
    hessian = jax.jacfwd(average)(origin)
    return Site(average(origin), identity, -0.5 * (hessian + hessian.T))


def _draws(rng_key: Array, q: Family, num_samples: int) -> Array:
    return q.transform(jax.random.normal(rng_key, (num_samples, q.noise_size), q.mean.dtype))
