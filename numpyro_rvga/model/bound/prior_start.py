"""The Gaussian that a run starts from: the prior itself, or one that approximates it by the moments of its draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax import Array
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from ...core.compilation import at_once
from ...core.expectations.by_nodes import linearized
from ...core.expectations.closed_forms import Gaussian, gaussian
from ...core.gaussians import FullGaussian
from ...core.matrices.jacobians import gram, vjp
from ...core.updates.state import CanonicalGaussian, Count, State
from ..data.rows import Arrays
from ..terms.sparsity import Pattern, are_selections, selecting_pattern, sparse_jacobian
from ..terms.terms import Terms, constants, linearize, merged
from .prior import MultivariateNormalSite, Prior, depends_on_entries

NUM_DRAWS = 2000
MOST_NUMBERS = 2**21  # in the draws of which moments are taken: with many entries, each has fewer draws
LEAST_DRAWS = 500
BATCH_NUMBERS = 2**20  # in the draws that are made together
WINSOR = 4.0  # robust standard deviations at which prior draws are cut before their moments are taken
WIDEST = 1e3  # such a deviation, at most
VAGUE = 10.0  # a standard deviation of a constrained site that says nothing of where to start,
WITHIN = 2.0  # if zero is within so many of them
FEWEST_FINITE = 20  # draws of a coordinate; if fewer are finite, they say nothing of where to start
SHRINKAGE = 0.05  # of correlations: more coordinates than draws can support stay regular
NO_PRIOR = "the prior's precision matrix is not positive definite: some direction has no prior."


class PriorMarginals(NamedTuple):
    """The entries of theta under the prior, each for itself: exact where they are normal and independent of the
    others, by moments of draws elsewhere.

    :ivar mean: (P,). :ivar variance: (P,).
    :ivar indices: of the entries whose moments are those of draws, (S,): of terms that are not Gaussian, or that couple
        entries.
    :ivar is_gaussian: of these entries, whether no term that is not Gaussian depends on them, (S,).
    :ivar coupling: Gaussian terms that depend on several entries.
    :ivar separate: the sum of all other Gaussian terms about zero, its precision a diagonal (P,).
    """

    mean: Any  # NumPy's arrays, in double precision
    variance: Any
    indices: np.ndarray
    is_gaussian: np.ndarray
    coupling: list[Terms]
    separate: CanonicalGaussian


class CoupledPrior(NamedTuple):
    """The prior over some entries of theta, which are independent of all others. Arrays are NumPy's, in double
    precision.

    :ivar indices: of the entries, (S,).
    :ivar parts: the number of the part that an entry is in, (S,): parts are independent of each other.
    :ivar is_gaussian: whether an entry's part is Gaussian, (S,).
    :ivar mean: (S,). :ivar root: (S, S), of the covariance. Both are exact in Gaussian parts; elsewhere they are the
        moments of draws, without correlations.
    :ivar exact: the sum of the Gaussian terms about zero.
    """

    indices: np.ndarray
    parts: np.ndarray
    is_gaussian: np.ndarray
    mean: np.ndarray
    root: np.ndarray
    exact: CanonicalGaussian


# ---------------------------------------------------------------------- a Gaussian of independent entries
def marginals(prior: Prior, draws: Callable[..., Array], shared: Arrays, is_real: np.ndarray) -> PriorMarginals:
    """The moments of each entry. Takes no (P, P) array.

    :param draws: (number, how many are made at a time, indices (S,) of entries) -> these of draws from the prior,
        (number, S).
    :param shared: what the terms depend on besides theta.
    :param is_real: of each entry, whether its site has no constraint, (P,).
    :raises ValueError: for a prior that is not proper.
    """
    size, dtype = prior.size, prior.theta.dtype
    are_separate = are_selections(prior.gaussian, size, dtype, shared)
    of_one = [terms for terms, is_separate in zip(prior.gaussian, are_separate) if is_separate]
    coupling = [terms for terms, is_separate in zip(prior.gaussian, are_separate) if not is_separate]
    separate = _in_float64(at_once(lambda: _sum_of(of_one, prior.theta, shared, selecting_pattern(size))))
    is_gaussian = ~depends_on_entries(list(prior.terms), size, dtype, shared)
    is_coupled = ~is_gaussian | depends_on_entries(coupling, size, dtype, shared)
    for site in prior.normal_sites:
        is_coupled[site.start : site.stop] = True
    indices = np.flatnonzero(is_coupled)
    if np.any(separate.precision[~is_coupled] <= 0):
        raise ValueError("the prior's precision is not positive: some direction has no prior.")
    precision = np.where(is_coupled, 1.0, separate.precision)
    mean, variance = separate.linear / precision, 1 / precision
    if len(indices):
        count = int(np.clip(MOST_NUMBERS // size, LEAST_DRAWS, NUM_DRAWS))
        batch = max(1, min(count, BATCH_NUMBERS // size))
        *_, mean[indices], deviation = _robust_moments(np.asarray(draws(count, batch, indices)), is_real[indices])
        variance[indices] = deviation**2
    return PriorMarginals(mean, variance, indices, is_gaussian[indices], coupling, separate)


def coupled_prior(prior: Prior, marginals: PriorMarginals, shared: Arrays) -> CoupledPrior | None:
    """The prior over the entries that are not normal and independent of the others, a part of :func:`marginals`; None
    if there are none. Takes no (P, P) array where these are few.

    :raises ValueError: for a prior that is not proper.
    """
    mean, variance, indices, is_gaussian, coupling, separate = marginals
    if not len(indices):
        return None
    others, normals = at_once(
        lambda: (
            [_sum_of([terms], prior.theta, shared) for terms in coupling]
            + [_normal_log_density(site, prior.theta, shared) for site in prior.normal_sites],
            [site.moments(shared) for site in prior.normal_sites],
        )
    )
    exact = CanonicalGaussian(
        np.diag(separate.precision[indices]), separate.linear[indices], separate.constant, np.zeros(len(indices))
    )
    for other in map(_in_float64, others):
        exact = exact.plus(part_of(other, indices))
    parts = connected_components(csr_array(exact.precision != 0), directed=False)[1]
    is_gaussian = ~np.isin(parts, parts[~is_gaussian])
    mean, root = mean[indices], np.diag(np.sqrt(variance[indices]))
    known = np.flatnonzero(is_gaussian & np.isin(indices, prior.other_indices))
    if len(known):
        of_terms = _normalized(np, part_of(exact, known))
        mean[known], root[np.ix_(known, known)] = of_terms.mean, of_terms.root
    for site, (loc, scale_tril) in zip(prior.normal_sites, _in_float64(normals)):
        inside = np.searchsorted(indices, np.arange(site.start, site.stop))
        mean[inside], root[np.ix_(inside, inside)] = loc, scale_tril
    return CoupledPrior(indices, parts, is_gaussian, mean, root, exact)


def factor_of_moments(mean: Any, covariance: np.ndarray, exact: CanonicalGaussian, dtype: Any) -> CanonicalGaussian:
    """What N(mean, covariance) approximates of a prior: all but its ``exact`` Gaussian terms about zero."""
    root: Any = np.linalg.cholesky(covariance)
    factor = _approximating_factor(np, FullGaussian(mean, root), exact)
    return jax.tree.map(lambda x: jnp.asarray(x, dtype), factor)


# ---------------------------------------------------------------------- a Gaussian with a full covariance
def is_flat(precision: Array, prior: Prior) -> bool:
    """Whether the Gaussian part of a prior says nothing in some direction. ``precision``: its own (P, P)."""
    others = prior.other_indices
    inner = np.asarray(precision, np.float64)[others][:, others]
    diagonal = np.diagonal(inner)
    if np.any(diagonal <= 0):
        return True
    scaled = inner / np.sqrt(np.outer(diagonal, diagonal))
    return bool(len(scaled)) and np.linalg.eigvalsh(scaled)[0] < len(scaled) * np.finfo(precision.dtype).eps


def moments_of_draws(prior: Prior, draws: Array, is_real: np.ndarray) -> FullGaussian:
    """Robust moments of draws theta (n, P) from the prior, far-out ones cut: the Gaussian that approximates it outside
    its multivariate normal sites."""
    others = prior.other_indices
    cut, center, mean, deviation = _robust_moments(np.asarray(draws)[:, others], is_real[others])
    standard = np.nan_to_num((cut - center) / deviation)  # of entries that are not known together, as far as they are
    standard = standard / np.maximum(np.linalg.norm(standard, axis=0), np.finfo(float).tiny)
    shrunk = (1 - SHRINKAGE) * (standard.T @ standard)
    np.fill_diagonal(shrunk, 1.0)
    root: Any = deviation[:, None] * np.linalg.cholesky(shrunk)
    return FullGaussian(mean, root)


def initial_state(prior: Prior, moments: FullGaussian | None, parts: tuple[CanonicalGaussian, list]) -> State:
    """The state before the first row: the Gaussian prior itself, or the Gaussian of some ``moments``. The part of that
    which approximates prior terms is then its ``prior_factor``.

    :param parts: as :func:`gaussian_parts` returns them.
    :raises ValueError: for a prior that is not proper.
    """
    dtype = prior.theta.dtype
    gaussian, normals = jax.device_get(parts)
    for site, (_, scale_tril) in zip(prior.normal_sites, normals):
        if not np.isfinite(scale_tril).all():
            raise ValueError(
                f"the covariance matrix of site {site.name!r} is not positive definite in {np.dtype(dtype).name}. Add "
                "a jitter to its diagonal (1e-6 times its size in float64, 1e-4 in float32)."
            )
    gaussian, normals = _in_float64((gaussian, normals))
    start = _start_from(np, moments, part_of(gaussian, prior.other_indices))
    state = _assembled(np, prior, start, normals)
    state = jax.tree.map(lambda x: np.asarray(x, dtype), state)
    return jax.device_put(state._replace(num_rows=Count.of(0)))


def state_at(prior: Prior, moments: FullGaussian | None, shared: Arrays) -> State:
    """:func:`initial_state` as a differentiable function of the ``numpyro.param`` sites."""
    terms, others = prior.gaussian, prior.other_indices
    are_normal = bool(terms) and all(t.closed_form is Gaussian and t.num_predictors == 1 for t in terms)
    if moments is None and are_normal and sum(t.num_elements for t in terms) >= len(others):
        start = _normalized_terms(prior, shared)
    else:
        moments = jax.tree.map(lambda x: jnp.asarray(x, prior.theta.dtype), moments)
        start = _start_from(jnp, moments, part_of(_sum_of(terms, prior.theta, shared), others))
    return _assembled(jnp, prior, start, [site.moments(shared) for site in prior.normal_sites])


def gaussian_parts(prior: Prior, shared: Arrays) -> tuple[CanonicalGaussian, list]:
    """The sum of the Gaussian terms, and location and scale of each multivariate normal site, which is none of them."""
    return _sum_of(prior.gaussian, prior.theta, shared), [site.moments(shared) for site in prior.normal_sites]


def _start_from(xp: Any, moments: FullGaussian | None, exact: CanonicalGaussian) -> State:
    """A state of the entries of theta outside the multivariate normal sites: the Gaussian terms alone, or of these
    moments."""
    if moments is None:
        return _normalized(xp, exact)
    return _state(xp, moments.mean, moments.root, xp.zeros(()), _approximating_factor(xp, moments, exact))


def _state(xp: Any, mean: Array, root: Array, log_evidence: Array, factor: CanonicalGaussian | None = None) -> State:
    return State(mean, xp.zeros_like(mean), root, log_evidence, factor, Count.of(0))


def _assembled(xp: Any, prior: Prior, start: State, normals: list) -> State:
    """The state of all of theta, in NumPy or JAX (``xp``).

    :param start: of the entries outside the multivariate normal sites. :param normals: location and scale of these.
    """
    factor = start.prior_factor
    order = np.concatenate([prior.other_indices, *[np.arange(site.start, site.stop) for site in prior.normal_sites]])
    back = np.argsort(order)
    mean = xp.concatenate([start.mean, *[loc for loc, _ in normals]])[back]
    block_diagonal = jax.scipy.linalg.block_diag if xp is jnp else scipy.linalg.block_diag
    root = block_diagonal(start.root, *[scale_tril for _, scale_tril in normals])[back]
    if factor is not None:
        nothing = [xp.zeros((site.stop - site.start,) * 2) for site in prior.normal_sites]
        precision = block_diagonal(factor.precision, *nothing)[back][:, back]
        linear = xp.concatenate([factor.linear, xp.zeros(len(order) - len(start.mean))])[back]
        factor = CanonicalGaussian(precision, linear, factor.constant, mean)
    return _state(xp, mean, root, start.log_evidence, factor)


def _approximating_factor(xp: Any, moments: FullGaussian, exact: CanonicalGaussian) -> CanonicalGaussian:
    """The approximation of the terms that are not Gaussian: N(mean, root root^T), divided by the exact Gaussian
    terms."""
    mean, root = moments.mean, moments.root
    log_density = -0.5 * len(mean) * math.log(2 * math.pi) - xp.sum(xp.log(xp.diagonal(root)))
    inverse = xp.linalg.inv(root)
    approximation = CanonicalGaussian(inverse.T @ inverse, xp.zeros_like(mean), log_density, mean)
    return approximation.plus(exact.about(mean), -1.0)


def _normalized(xp: Any, factor: CanonicalGaussian) -> State:
    """The Gaussian that is proportional to a factor about zero.

    :raises ValueError: if it is not proper.
    """
    precision, linear = factor.precision, factor.linear
    scale = 1 / xp.sqrt(xp.diagonal(precision))
    try:
        cholesky = xp.linalg.cholesky(scale[:, None] * precision * scale)
    except np.linalg.LinAlgError as error:
        raise ValueError(NO_PRIOR) from error
    root = scale[:, None] * xp.linalg.inv(cholesky).T
    whitened = root.T @ linear
    half_log_det = xp.sum(xp.log(xp.diagonal(cholesky)) - xp.log(scale))
    log_normalizer = 0.5 * xp.sum(whitened**2) + 0.5 * len(linear) * math.log(2 * math.pi) - half_log_det
    return _state(xp, root @ whitened, root, factor.constant + log_normalizer)


def _normalized_terms(prior: Prior, shared: Arrays) -> State:
    """:func:`_normalized` of log densities of Normal distributions, at least as many as entries of theta.

    With W the terms' Jacobian in units of their standard deviations, W = QR gives the precision W^T W = R^T R. Formed
    itself, it would lose twice as many digits: of effects around a mean, for instance, that nearly agree.
    """
    indices, dtype = prior.other_indices, prior.theta.dtype
    rows, targets, constant, zero = [], [], jnp.zeros((), dtype), jnp.zeros(prior.size, dtype)
    for terms in prior.gaussian:
        jacobian, (value, gradient, hessian) = _expanded(terms, zero, shared)
        counts = hessian[:, 0, 0] < 0  # others are masked
        weight = jnp.sqrt(jnp.where(counts, -hessian[:, 0, 0], 1.0))
        rows.append(jnp.where(counts, weight, 0.0)[:, None] * jacobian[:, 0, indices])
        targets.append(jnp.where(counts, gradient[:, 0] / weight, 0.0))
        constant = constant + jnp.sum(value)
    q, r = jnp.linalg.qr(jnp.concatenate(rows))
    sign = jnp.where(jnp.diagonal(r) < 0, -1.0, 1.0).astype(dtype)
    whitened = sign * (q.T @ jnp.concatenate(targets))
    root = jax.scipy.linalg.solve_triangular(sign[:, None] * r, jnp.eye(len(indices), dtype=dtype))
    log_normalizer = 0.5 * jnp.sum(whitened**2) + 0.5 * len(indices) * math.log(2 * math.pi)
    return _state(jnp, root @ whitened, root, constant + log_normalizer + jnp.sum(jnp.log(jnp.diagonal(root))))


# ---------------------------------------------------------------------- Gaussian terms, about theta = 0
def _sum_of(
    all_terms: Sequence[Terms], theta: jax.ShapeDtypeStruct, shared: Arrays, pattern: Pattern | None = None
) -> CanonicalGaussian:
    """The sum of Gaussian terms. With the :func:`selecting_pattern`, its precision is a diagonal (P,)."""
    zero, constant = jnp.zeros(theta.shape, theta.dtype), jnp.zeros((), theta.dtype)
    precision, linear = zero if pattern else jnp.zeros(theta.shape * 2, theta.dtype), zero
    for terms in all_terms:
        jacobian, (value, gradient, hessian) = _expanded(terms, zero, shared, pattern)
        precision, linear = precision + gram(jacobian, -hessian), linear + vjp(jacobian, gradient)
        constant = constant + jnp.sum(value)
    return CanonicalGaussian(precision, linear, constant, zero)


def _expanded(
    terms: Terms, theta: Array, shared: Arrays, pattern: Pattern | None = None
) -> tuple[Any, tuple[Array, Array, Array]]:
    """The predictors' Jacobian at theta, by ``pattern`` if there is one, and the terms' derivatives in them."""
    if pattern:
        predictors, jacobian = sparse_jacobian(terms, pattern, theta, shared)
    else:
        predictors, jacobian, _ = merged(linearize(terms, theta, shared))
    return jacobian, _derivatives(terms, predictors, merged(constants(terms, shared)))


def _normal_log_density(site: MultivariateNormalSite, theta: jax.ShapeDtypeStruct, shared: Arrays) -> CanonicalGaussian:
    """The log density of a multivariate normal site."""
    loc, scale_tril = site.moments(shared)
    inverse = jax.scipy.linalg.solve_triangular(scale_tril, jnp.eye(len(loc), dtype=theta.dtype), lower=True)
    whitened = inverse @ loc
    log_det, log_two_pi = jnp.sum(jnp.log(jnp.diagonal(scale_tril))), len(loc) * math.log(2 * math.pi)
    inside, zero = slice(site.start, site.stop), jnp.zeros(theta.shape, theta.dtype)
    precision = jnp.zeros(theta.shape * 2, theta.dtype).at[inside, inside].set(inverse.T @ inverse)
    linear = zero.at[inside].set(inverse.T @ whitened)
    return CanonicalGaussian(precision, linear, -0.5 * (whitened @ whitened + log_two_pi) - log_det, zero)


def _derivatives(terms: Terms, predictors: Array, values: Any) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of Gaussian terms at their predictors."""
    if terms.closed_form is Gaussian:
        return jax.vmap(lambda u, c: gaussian(u, jnp.zeros((1, 1), predictors.dtype), c))(predictors, values)
    return jax.vmap(lambda u, c: linearized(lambda a: terms.density(a, c), u, None))(predictors, values)


def part_of(factor: CanonicalGaussian, indices: np.ndarray) -> CanonicalGaussian:
    """A factor of some entries of theta alone."""
    return CanonicalGaussian(
        factor.precision[indices][:, indices], factor.linear[indices], factor.constant, factor.center[indices]
    )


def _in_float64(tree: Any) -> Any:
    return jax.tree.map(lambda x: np.array(x, np.float64), tree)


def _robust_moments(draws: np.ndarray, is_real: np.ndarray) -> tuple[np.ndarray, np.ndarray, Any, np.ndarray]:
    """Moments of draws (n, P) without what lies far out, which must not rule them.

    :param is_real: of the coordinates, whether their site has no constraint.
    :return: the draws, each coordinate cut far out, and NaN where one is not finite (as the logarithm of a number that
        has underflowed); their means; means to start from, zero as in NumPyro where the draws of a constrained site are
        all over the place; and standard deviations, one without two different numbers.
    """
    draws = draws.astype(np.float64)
    finite = np.where(np.isfinite(draws), draws, np.nan)
    finite[:, np.isfinite(finite).sum(axis=0) < FEWEST_FINITE] = 0.0
    low, center, high = np.nanquantile(finite, [0.25, 0.5, 0.75], axis=0)
    robust_scale = np.maximum((high - low) / 1.349, 1e-6)
    center = np.where((robust_scale > WIDEST) & (np.abs(center) < WITHIN * robust_scale), 0.0, center)
    robust_scale = np.minimum(robust_scale, WIDEST)
    cut = np.clip(finite, center - WINSOR * robust_scale, center + WINSOR * robust_scale)
    mean, deviation = np.nanmean(cut, axis=0), np.nanstd(cut, axis=0, ddof=1)
    deviation = np.where(deviation > 0, deviation, 1.0)
    says_nothing = ~is_real & (deviation > VAGUE) & (np.abs(mean) < WITHIN * deviation)
    return cut, mean, np.where(says_nothing, 0.0, mean), deviation
