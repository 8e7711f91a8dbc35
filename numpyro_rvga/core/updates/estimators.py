"""Estimators of g = E_q[grad log p(y | theta)] and H = -E_q[hess log p(y | theta)] of a block of rows.

In predictor space, with the model's Jacobian at q's mean (lin-hess, lin-ef, and the expectations of RVGA); or in
parameter space, averaged over draws of theta, which is unbiased for any model (mc-hess, mc-ef, mc-fisher). Or in
predictor space, under the q that an implicit step leads to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.linalg import block_diag

from ..gaussians import DiagonalGaussian, ExpectedDerivatives, Family
from ..matrices.linalg import positive_part, product, semidefinite_factor, semidefinite_root
from ..pytrees import PyTree
from .factors import Factors, Kind
from .recursion import solve_block
from .row_factors import predictor_scales
from .search import Settings


class Observation(NamedTuple):
    """A block of n rows.

    :ivar kinds: the kinds of its factors.
    :ivar linearize: theta (P,) -> factors: predictors F_i(theta) (``predictors``) and Jacobians J_i (``jacobian``).
    :ivar rows: pytree of (n, ...) arrays.
    :ivar log_lik: (theta, one row) -> log p(y_i | theta).
    :ivar drawn_log_lik: (theta, one row, rng_key) -> log p(y | theta) of an outcome y that is drawn from the row's own
        distribution at theta, and fixed where this is differentiated; None if it is not asked for.
    :ivar weights: (n,), the number of rows that each represents; the factors are weighted already.
    """

    kinds: tuple[Kind, ...]
    linearize: Callable[[Array], tuple[Factors, ...]]
    rows: PyTree
    log_lik: Callable[[Array, PyTree], Array]
    weights: Array
    drawn_log_lik: Callable[[Array, PyTree, Array], Array] | None = None

    def gradients(self, theta: Array) -> Array:
        """grad log p(y_i | theta) of each row, (n, P)."""
        return jax.vmap(jax.grad(self.log_lik), (None, 0))(theta, self.rows)

    def scores(self, theta: Array, rng_key: Array) -> Array:
        """grad log p(y | theta) of an outcome y ~ p(. | theta) of each row, (n, P)."""
        assert self.drawn_log_lik is not None
        keys = jax.random.split(rng_key, len(self.weights))
        return jax.vmap(jax.grad(self.drawn_log_lik), (None, 0, 0))(theta, self.rows, keys)

    def total(self, theta: Array) -> Array:
        """The weighted sum of log p(y_i | theta)."""
        return self.weights @ jax.vmap(self.log_lik, (None, 0))(theta, self.rows)


Estimator = Callable[[Array, Family, Observation], ExpectedDerivatives]


def make_estimator(hessian: str, num_samples: int) -> Estimator:
    """The estimator of this name: (rng_key, q, observation) -> expected derivatives.

    :param hessian: ``"lin-hess"``, ``"lin-ef"``, ``"mc-hess"`` or ``"mc-ef"`` (BONG paper, table 1), ``"mc-fisher"``
        (section 4.5), ``"delta-hess"``: the Hessian at q's mean (delta method), or ``"expected"``: each kind's own
        expectation in predictor space.
    :param num_samples: draws of theta.
    """
    if hessian == "mc-hess":
        return lambda rng_key, q, observation: _hessian_over(*_split_draws(rng_key, q, num_samples), q, observation)
    if hessian == "delta-hess":
        count = lambda q: num_samples if isinstance(q, DiagonalGaussian) else 1  # noqa: E731
        return lambda rng_key, q, observation: _hessian_over(
            jnp.broadcast_to(q.mean, (count(q), *q.mean.shape)), rng_key, q, observation
        )
    if hessian == "mc-ef":
        return lambda rng_key, q, observation: _empirical_fisher(observation, _draws(rng_key, q, num_samples))
    if hessian == "mc-fisher":
        return partial(_sampled_fisher, num_samples)
    if hessian == "lin-ef":
        return lambda rng_key, q, observation: _empirical_fisher(observation, q.mean[None])
    return lambda rng_key, q, observation: _in_predictor_space(q, observation, expected=hessian == "expected")


def _in_predictor_space(q: Family, observation: Observation, *, expected: bool) -> ExpectedDerivatives:
    """g = sum J_i^T g_i and H = -sum J_i^T G_i J_i, with J_i the predictors' Jacobians at q's mean.

    :param expected: g_i and G_i are expectations under q. Else they are taken at the mean: G_i is minus the Fisher
        information, or for kinds without one the Hessian without its positive part.
    """
    parts = []
    for kind, factors in zip(observation.kinds, observation.linearize(q.mean)):
        n, c, _ = factors.jacobian.shape
        semidefinite = kind.concave
        if expected:
            root = q.predictor_root(factors.jacobian)
            covariance = jnp.einsum("ncr,ndr->ncd", root, root)
            (_, slopes, curvatures), _ = kind.expect(factors.predictors, covariance, factors.constants)
        else:
            covariance = jnp.zeros((n, c, c), q.mean.dtype)
            _, slopes, curvatures = jax.vmap(kind.plugin)(factors.predictors, covariance, factors.constants)
            if kind.information is not None:
                curvatures = -jax.vmap(kind.information)(factors.predictors, factors.constants)
            elif not kind.concave:
                curvatures = -positive_part(-curvatures)
            semidefinite = True
        parts.append(_Part(factors.jacobian, slopes, curvatures, semidefinite))
    return _pulled_back(parts)


class _Part(NamedTuple):
    """Factors of one kind: Jacobians (n, C, P), g_i (n, C), G_i (n, C, C), and whether no G_i has a positive part."""

    jacobian: Array
    gradients: Array
    hessians: Array
    semidefinite: bool


def _pulled_back(parts: list[_Part]) -> ExpectedDerivatives:
    """g = sum J_i^T g_i and H = -sum J_i^T G_i J_i."""
    flat = [part.jacobian.reshape(-1, part.jacobian.shape[-1]) for part in parts]
    slopes = jnp.concatenate([part.gradients.reshape(-1) for part in parts])
    gradient = slopes @ jnp.concatenate(flat)

    def rooted(part: _Part) -> Array:
        return product(jnp.swapaxes(semidefinite_root(-part.hessians), 1, 2), part.jacobian)

    factor = jnp.concatenate(
        [rooted(part).reshape(rows.shape) if part.semidefinite else rows for part, rows in zip(parts, flat)]
    )
    if all(part.semidefinite for part in parts):
        return ExpectedDerivatives(gradient, factor)
    weights = [
        jnp.eye(len(rows), dtype=rows.dtype) if part.semidefinite else block_diag(*-part.hessians)
        for part, rows in zip(parts, flat)
    ]
    return ExpectedDerivatives(gradient, factor, block_diag(*weights))


def implicit(
    settings_of: Callable[[int], Settings], rng_key: Array, q: Family, observation: Observation
) -> ExpectedDerivatives:
    """g and H under the q' that minimizes KL(q' || p(y | theta) q), with predictors linearized at q's mean.

    The predictors of the block have the covariance S_0 = J Sigma J^T under q. With S_0 = L L^T they are offset + L e,
    and q' comes as a Gaussian over e (R-VGA paper, section 4.3). Then mu' = mu + Sigma g and Lambda' = Lambda + H.

    :param settings_of: the number of rows -> when that search stops.
    """
    factors = observation.linearize(q.mean)
    rows = jnp.concatenate([f.jacobian.reshape(-1, f.jacobian.shape[-1]) for f in factors])
    predictor_root = q.predictor_root(rows)
    root, inverse = semidefinite_factor(predictor_root @ predictor_root.T)
    ends = list(np.cumsum([f.predictors.size for f in factors])[:-1])
    blocks = tuple(
        f._replace(jacobian=part.reshape(*f.predictors.shape, len(root)))
        for f, part in zip(factors, jnp.split(root, ends))
    )
    solution = solve_block(observation.kinds, settings_of(len(observation.weights)), blocks)
    parts = []
    for kind, block, f, z in zip(observation.kinds, blocks, factors, predictor_scales(blocks, solution.root)):
        mean, covariance = block.predictors + block.jacobian @ solution.mean, jnp.einsum("ncr,ndr->ncd", z, z)
        (_, slopes, curvatures), _ = kind.expect(mean, covariance, block.constants)
        parts.append(_Part(f.jacobian, slopes, curvatures, kind.concave))
    # The search's e is nearer to the solution than L^T g is, which a wide prior multiplies.
    return _pulled_back(parts)._replace(gradient=(solution.mean @ inverse) @ rows)


def _empirical_fisher(observation: Observation, thetas: Array) -> ExpectedDerivatives:
    """g, and H by the outer products of the rows' gradients; both averaged over ``thetas`` (M, P)."""
    gradients = jax.vmap(observation.gradients)(thetas)
    gradient = observation.weights @ jnp.mean(gradients, axis=0)
    return ExpectedDerivatives(gradient, _averaged_squares(observation, gradients))


def _averaged_squares(observation: Observation, gradients: Array) -> Array:
    """The factor of the outer products of gradients (M, n, P), averaged over the first axis, weighted over rows."""
    weights = observation.weights / len(gradients)
    return (jnp.sqrt(weights)[:, None] * gradients).reshape(-1, gradients.shape[-1])


def _sampled_fisher(num_samples: int, rng_key: Array, q: Family, observation: Observation) -> ExpectedDerivatives:
    """g, and H by the outer products of the gradients at outcomes of each row's own distribution (section 4.5).

    The expectation of H is E_q of the Fisher information: positive semi-definite for every likelihood, and unbiased
    where squares of the gradients at the observed outcomes are not.
    """
    draws, outcome_key = _split_draws(rng_key, q, num_samples)
    gradient = jnp.mean(jax.vmap(jax.grad(observation.total))(draws), axis=0)
    scores = jax.vmap(observation.scores)(draws, jax.random.split(outcome_key, num_samples))
    return ExpectedDerivatives(gradient, _averaged_squares(observation, scores))


def _split_draws(rng_key: Array, q: Family, num_samples: int) -> tuple[Array, Array]:
    """Draws of theta (M, P), and a key for what comes after them."""
    draw_key, other_key = jax.random.split(rng_key)
    return _draws(draw_key, q, num_samples), other_key


def _hessian_over(draws: Array, probe_key: Array, q: Family, observation: Observation) -> ExpectedDerivatives:
    """g and H averaged over draws (M, P); for a diagonal q the diagonal of H, by one of Hutchinson's probes each."""
    size = len(q.mean)
    slope = jax.grad(observation.total)
    if isinstance(q, DiagonalGaussian):
        probes = jax.random.rademacher(probe_key, draws.shape, q.mean.dtype)
        gradients, products = jax.vmap(lambda theta, z: jax.jvp(slope, (theta,), (z,)))(draws, probes)
        nothing = jnp.zeros((0, size), q.mean.dtype)
        return ExpectedDerivatives(jnp.mean(gradients, axis=0), nothing, diagonal=-jnp.mean(probes * products, axis=0))
    average = lambda shift: jnp.mean(jax.vmap(lambda theta: slope(theta + shift))(draws), axis=0)  # noqa: E731
    origin, identity = jnp.zeros_like(q.mean), jnp.eye(size, dtype=q.mean.dtype)
    hessian = jax.jacfwd(average)(origin)
    return ExpectedDerivatives(average(origin), identity, -0.5 * (hessian + hessian.T))


def _draws(rng_key: Array, q: Family, num_samples: int) -> Array:
    return q.transform(jax.random.normal(rng_key, (num_samples, q.noise_size), q.mean.dtype))
