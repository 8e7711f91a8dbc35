"""The prior: its exactly Gaussian part, its other terms as factors, and a Gaussian to start from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array, lax

from ..core.closed_forms import Gaussian, gaussian
from ..core.compilation import at_once, jit_once
from ..core.count import Count
from ..core.expectations import linearized
from ..core.interpret import depends_on
from ..core.jacobians import gram, vjp
from ..core.recursion import CanonicalGaussian, State
from ..core.symbolic import factorize
from .recognition import in_closed_form, in_tilted_form, is_quadratic, probe_terms
from .site_terms import RunSite
from .sparsity import is_selection, selecting_pattern, sparse_jacobian
from .terms import Arrays, Terms, constants, linearize, merged, predictors_of
from .tracing import peel

NUM_DRAWS = 2000
BATCH_NUMBERS = 2**20  # in the draws that are made together
WINSOR = 4.0  # robust standard deviations at which prior draws are cut before their moments are taken


class Block(NamedTuple):
    """A multivariate normal site that nothing else in the prior depends on: kept by location and scale.

    :ivar moments: ``program.prior_inputs`` -> loc (K,), scale_tril (K, K).
    """

    site: str
    start: int
    stop: int
    moments: Callable[[Arrays], tuple[Array, Array]]


class Prior(NamedTuple):
    """log p(theta) = sum of ``blocks`` + sum of ``gaussian`` + sum of ``terms``.

    :ivar gaussian: the other terms with a constant Hessian; proper by themselves if there are no ``terms``.
    :ivar terms: all others.
    """

    blocks: tuple[Block, ...]
    gaussian: tuple[Terms, ...]
    terms: tuple[Terms, ...]


def split_prior(
    all_terms: list[Terms],
    blocks: list[Block],
    theta: jax.ShapeDtypeStruct,
    shared: Arrays,
) -> Prior:
    """Collect terms whose Hessian is constant; correlated and linear-Gaussian priors are exact.

    :param blocks: multivariate normal sites; those that other terms touch are treated as these.
    :param shared: what the terms depend on besides theta: ``program.prior_inputs``.
    """
    size, dtype = theta.shape[0], theta.dtype
    names = {block.site for block in blocks}
    if blocks:
        touched = _touched([t for t in all_terms if t.site not in names], size, dtype, shared)
        blocks = [block for block in blocks if not touched[block.start : block.stop].any()]
    names = {block.site for block in blocks}
    all_terms = [t for t in all_terms if t.site not in names]
    undecided = [t for t in all_terms if t.is_affine and t.closed_form is None]
    probes = at_once(lambda: [probe_terms(t, dtype, shared) for t in undecided]) if undecided else []
    fixed = _reading_nothing(undecided, dtype, shared)
    gaussian = [t for t in all_terms if t.closed_form is Gaussian]
    others = [t for t in all_terms if not t.is_affine or t.closed_form not in (None, Gaussian)]
    for terms, probe in zip(undecided, probes):
        if is_quadratic(probe):
            gaussian.append(terms)
        else:
            others.append(in_tilted_form(in_closed_form(terms, probe) if terms.site in fixed else terms, dtype, shared))
    return Prior(tuple(blocks), tuple(gaussian), tuple(others))


def _reading_nothing(all_terms: list[Terms], dtype, shared: Arrays) -> set[str]:
    """Sites whose densities depend on nothing but their predictors."""
    if not shared:
        return {terms.site for terms in all_terms}

    def densities(shared):
        def of(terms):
            element = jnp.zeros((), jnp.int32)
            return terms.density(jnp.zeros(terms.num_predictors, dtype), terms.constants(shared, element))

        return {terms.site: of(terms) for terms in all_terms}

    return {site for site, names in depends_on(densities, dict(shared)).items() if not names}


def normal_block(
    run_site: RunSite, site: str, start: int, stop: int, theta: jax.ShapeDtypeStruct, shared: Arrays
) -> Block | None:
    """A latent site as a block, if it is one multivariate normal vector that does not depend on other latents."""

    def moments_at(t, shared):
        fn = peel(run_site(t, shared).fn)[0]
        return jnp.broadcast_to(fn.loc, fn.event_shape), fn.scale_tril

    distributions: list = []
    jax.eval_shape(lambda t: distributions.append(peel(run_site(t, shared).fn)[0]) or 0, theta)
    if not isinstance(distributions[0], dist.MultivariateNormal) or distributions[0].event_shape != (stop - start,):
        return None
    split = factorize(lambda t, r: jnp.asarray(sum(jnp.sum(x) for x in moments_at(t, r)), theta.dtype), theta, shared)
    origin = jnp.zeros(theta.shape, theta.dtype)
    return None if split.num_predictors else Block(site, start, stop, lambda shared: moments_at(origin, shared))


class Start(NamedTuple):
    """Moments of a Gaussian that approximates prior terms that are none, for :func:`state_at`."""

    mean: np.ndarray | Array
    root: np.ndarray | Array


class IndependentStart(NamedTuple):
    """A Gaussian of independent entries that approximates the prior.

    :ivar mean: (P,). :ivar variance: (P,).
    :ivar places: (S,), the entries where it is not the prior itself: those of terms that are not Gaussian, or that
        couple entries.
    :ivar site: over these, the part of the start's log density that approximates such terms; None if there are none.
    """

    mean: Array
    variance: Array
    places: np.ndarray
    site: CanonicalGaussian | None


class Marginals(NamedTuple):
    """The entries of theta under the prior, each for itself: exact where they are normal and independent of the
    others, by moments of draws at the other ``places`` (S,).

    :ivar mean: (P,). :ivar variance: (P,). :ivar coupling: Gaussian terms that depend on several entries.
    :ivar alone: precision (P,), slope (P,) and value at theta = 0 of all other Gaussian terms.
    """

    mean: np.ndarray
    variance: np.ndarray
    places: np.ndarray
    coupling: list[Terms]
    alone: tuple[np.ndarray, np.ndarray, np.ndarray]


def marginals(prior: Prior, size: int, dtype, draw: Callable[[Array], Array], shared: Arrays) -> Marginals:
    """Takes no (P, P) array.

    :param draw: rng_key -> theta (P,), a draw from the prior.
    :param shared: what the terms depend on besides theta.
    :raises ValueError: for a prior that is not proper.
    """
    alone = [is_selection(terms, size, dtype, shared) for terms in prior.gaussian]
    single = [terms for terms, is_alone in zip(prior.gaussian, alone) if is_alone]
    coupling = [terms for terms, is_alone in zip(prior.gaussian, alone) if not is_alone]
    precision, linear, constant = (
        np.array(x, np.float64) for x in at_once(lambda: _diagonal_part(single, size, dtype, shared))
    )
    touched = _touched([*coupling, *prior.terms], size, dtype, shared)
    for block in prior.blocks:
        touched[block.start : block.stop] = True
    places, others = np.flatnonzero(touched), ~touched
    if np.any(precision[others] <= 0):
        raise ValueError("the prior's precision is not positive: some direction has no prior.")
    safe = np.where(others, precision, 1.0)
    mean, variance = linear / safe, 1 / safe
    if len(places):
        batch = max(1, min(NUM_DRAWS, BATCH_NUMBERS // size))
        drawn = jit_once(
            lambda key: lax.map(lambda k: draw(k)[places], jax.random.split(key, NUM_DRAWS), batch_size=batch)
        )
        cut = _winsorised(np.asarray(drawn(jax.random.key(0)), np.float64))
        mean[places], variance[places] = cut.mean(axis=0), cut.var(axis=0, ddof=1)
    return Marginals(mean, variance, places, coupling, (precision, linear, constant))


def independent_start(
    prior: Prior, size: int, dtype, draw: Callable[[Array], Array], shared: Arrays
) -> IndependentStart:
    """:func:`marginals`, and what they approximate. Takes no (P, P) array where there are few ``places``.

    :param draw: as for :func:`marginals`, and ``shared`` too.
    :raises ValueError: for a prior that is not proper.
    """
    mean, variance, places, coupling, (precision, linear, constant) = marginals(prior, size, dtype, draw, shared)
    site = None
    if len(places):
        inner, slope = np.diag(precision[places]), linear[places]
        expanded = at_once(
            lambda: (
                [_expand(t, size, dtype, shared) for t in coupling]
                + [_block_terms(b, size, dtype, shared) for b in prior.blocks]
            )
        )
        for matrix, vector, value in expanded:
            inner, slope = inner + matrix[places][:, places], slope + vector[places]
            constant = constant + value
        start = Start(mean[places], np.diag(np.sqrt(variance[places])))
        site = jax.tree.map(lambda x: jnp.asarray(x, dtype), _stand_in(np, start, inner, slope, constant))
    return IndependentStart(jnp.asarray(mean, dtype), jnp.asarray(variance, dtype), places, site)


def _diagonal_part(all_terms: list[Terms], size: int, dtype, shared: Arrays) -> tuple[Array, Array, Array]:
    """Precision (P,), slope (P,) and value at theta = 0 of Gaussian terms that depend on one entry each."""
    precision, linear, constant = jnp.zeros(size, dtype), jnp.zeros(size, dtype), jnp.zeros((), dtype)
    for terms in all_terms:
        predictors, jacobian = sparse_jacobian(terms, selecting_pattern(size), jnp.zeros(size, dtype), shared)
        value, slope, curvature = _quadratics(terms, predictors, merged(constants(terms, shared)))
        precision, linear = precision + gram(jacobian, -curvature), linear + vjp(jacobian, slope)
        constant = constant + jnp.sum(value)
    return precision, linear, constant


def _block_terms(block: Block, size: int, dtype, shared: Arrays) -> tuple[Array, Array, Array]:
    """Precision (P, P), slope and value at theta = 0."""
    loc, scale_tril = block.moments(shared)
    inverse = jax.scipy.linalg.solve_triangular(scale_tril, jnp.eye(len(loc), dtype=dtype), lower=True)
    whitened = inverse @ loc
    value = (
        -0.5 * whitened @ whitened - jnp.sum(jnp.log(jnp.diagonal(scale_tril))) - 0.5 * len(loc) * math.log(2 * math.pi)
    )
    inside = slice(block.start, block.stop)
    precision = jnp.zeros((size, size), dtype).at[inside, inside].set(inverse.T @ inverse)
    return precision, jnp.zeros(size, dtype).at[inside].set(inverse.T @ whitened), value


def _touched(all_terms: list[Terms], size: int, dtype, shared: Arrays) -> np.ndarray:
    """Which entries of theta terms depend on, (P,), by pulling random slopes back from a random place."""
    rng = np.random.default_rng(0)
    theta = jnp.asarray(rng.normal(size=size), dtype)

    def touches(terms):
        values, vjp = jax.vjp(lambda t: predictors_of(terms, t, shared), theta)
        return vjp(jnp.asarray(rng.normal(size=values.shape), dtype))[0] != 0

    return np.any([np.zeros(size, bool), *at_once(lambda: [touches(t) for t in all_terms])], axis=0)


def is_flat(precision: Array, prior: Prior) -> bool:
    """Whether the Gaussian part of a prior says nothing in some direction. ``precision``: its own (P, P)."""
    free = _free(prior, len(precision))
    inner = np.asarray(precision, np.float64)[free][:, free]
    diagonal = np.diagonal(inner)
    if np.any(diagonal <= 0):
        return True
    scaled = inner / np.sqrt(np.outer(diagonal, diagonal))
    return bool(len(scaled)) and np.linalg.eigvalsh(scaled)[0] < len(scaled) * np.finfo(precision.dtype).eps


def fitted_start(prior: Prior, size: int, draws: Callable[[], Array]) -> Start:
    """Moments of draws of the prior.

    :param draws: gives theta (n, P), draws from the prior.
    """
    drawn = np.asarray(draws(), np.float64)
    return Start(*_robust_moments(drawn[:, _free(prior, size)]))


def initial_state(prior: Prior, size: int, dtype, start: Start | None, parts: tuple[tuple, list]) -> State:
    """The Gaussian prior itself, or ``start`` with the part of it that approximates prior terms recorded.

    :param parts: what :func:`gaussian_parts` gives.
    :raises ValueError: for a prior that is not proper.
    """
    part, moments = jax.device_get(parts)
    for block, (_, scale_tril) in zip(prior.blocks, moments):
        if not np.isfinite(scale_tril).all():
            raise ValueError(
                f"the covariance matrix of site {block.site!r} is not positive definite in {np.dtype(dtype).name}. Add "
                "a jitter to its diagonal (1e-6 times its size in float64, 1e-4 in float32)."
            )
    exact = jax.tree.map(lambda x: np.asarray(x, np.float64), (part, moments))
    state_of_arrays = _assembled(np, prior, size, start, *exact)
    state = jax.tree.map(lambda x: np.asarray(x, dtype), state_of_arrays)
    return jax.device_put(state._replace(num_rows=Count.of(0)))


def state_at(prior: Prior, size: int, dtype, start: Start | None, shared: Arrays) -> State:
    """The same as a differentiable function of the ``numpyro.param`` sites."""
    part, moments = gaussian_parts(prior, size, dtype, shared)
    start = None if start is None else Start(*[jnp.asarray(x, dtype) for x in start])
    return _assembled(jnp, prior, size, start, part, moments)._replace(num_rows=Count.of(0))


def gaussian_parts(prior: Prior, size: int, dtype, shared: Arrays) -> tuple[tuple, list]:
    """:func:`gaussian_part` and the blocks' moments."""
    return gaussian_part(prior, size, dtype, shared), [block.moments(shared) for block in prior.blocks]


def _assembled(xp, prior: Prior, size: int, start: Start | None, part: tuple, moments: list) -> State:
    """The state, in NumPy or JAX (``xp``), from :func:`gaussian_parts`."""
    free = _free(prior, size)
    precision, linear, constant = part
    inner = precision[free][:, free], linear[free], constant
    site = None
    if start is None:
        mean, root, evidence = _from_quadratic(xp, *inner)
    else:
        mean, root, evidence = start.mean, start.root, xp.zeros(())
        site = _stand_in(xp, start, *inner)
    order = np.concatenate([free, *[np.arange(block.start, block.stop) for block in prior.blocks]]).astype(int)
    back = np.argsort(order)
    mean = xp.concatenate([mean, *[loc for loc, _ in moments]])[back]
    root = _block_diagonal(xp, [root, *[scale_tril for _, scale_tril in moments]])[back]
    if site is not None:
        blocks = [xp.zeros((block.stop - block.start,) * 2) for block in prior.blocks]
        wide = _block_diagonal(xp, [site.precision, *blocks])[back][:, back]
        slope = xp.concatenate([site.linear, xp.zeros(size - len(free))])[back]
        site = CanonicalGaussian(wide, slope, site.constant, mean)
    return State(mean, xp.zeros(size), root, evidence, site, Count.of(0))


def _free(prior: Prior, size: int) -> np.ndarray:
    """The places of theta outside the blocks."""
    inside = np.zeros(size, bool)
    for block in prior.blocks:
        inside[block.start : block.stop] = True
    return np.flatnonzero(~inside)


def _stand_in(xp: Any, start: Start, precision, linear, constant) -> CanonicalGaussian:
    """What the Gaussian terms leave of the start's normalized log density."""
    mean: Any = start.mean
    root: Any = start.root
    product = precision @ mean
    normal = -0.5 * len(mean) * math.log(2 * math.pi) - xp.sum(xp.log(xp.diagonal(root)))
    value = constant + linear @ mean - 0.5 * mean @ product
    inverse = xp.linalg.inv(root)
    return CanonicalGaussian(inverse.T @ inverse - precision, product - linear, normal - value, mean)


def _block_diagonal(xp, blocks: list) -> Array:
    rows = []
    for i, block in enumerate(blocks):
        rows.append([block if i == j else xp.zeros((len(block), len(other))) for j, other in enumerate(blocks)])
    return xp.block(rows)


def gaussian_part(prior: Prior, size: int, dtype, shared: Arrays) -> tuple[Array, Array, Array]:
    """Precision, slope and value at theta = 0 of the Gaussian terms outside the blocks, added up."""
    precision, linear, constant = jnp.zeros((size, size), dtype), jnp.zeros(size, dtype), jnp.zeros((), dtype)
    for terms in prior.gaussian:
        p, b, c = _expand(terms, size, dtype, shared)
        precision, linear, constant = precision + p, linear + b, constant + c
    return precision, linear, constant


def _expand(terms: Terms, size: int, dtype, shared: Arrays) -> tuple[Array, Array, Array]:
    """Precision, slope and value of the terms at theta = 0."""
    predictors, jacobian, _ = linearize(terms, jnp.zeros(size, dtype), shared)
    predictors, jacobian, values = merged((predictors, jacobian, constants(terms, shared)))
    value, slope, curvature = _quadratics(terms, predictors, values)
    flat = jacobian.reshape(-1, size)
    weighted = jnp.einsum("ncd,ndp->ncp", curvature, jacobian).reshape(flat.shape)
    return -flat.T @ weighted, slope.reshape(-1) @ flat, jnp.sum(value)


def _quadratics(terms: Terms, predictors: Array, values: Any) -> tuple[Array, Array, Array]:
    """Value, gradient and Hessian of Gaussian terms at their predictors."""
    if terms.closed_form is Gaussian:
        return jax.vmap(lambda u, c: gaussian(u, jnp.zeros((1, 1), predictors.dtype), c))(predictors, values)
    return jax.vmap(lambda u, c: linearized(lambda a: terms.density(a, c), u, None))(predictors, values)


def _from_quadratic(xp, precision, linear, constant) -> tuple[Array, Array, Array]:
    """Mean, root of the covariance and log normalizer of a Gaussian given by its log density around zero."""
    scale = 1 / xp.sqrt(xp.diagonal(precision))
    try:
        factor = xp.linalg.cholesky(scale[:, None] * precision * scale)
    except np.linalg.LinAlgError as error:
        raise ValueError(
            "the prior's precision matrix is not positive definite: some direction has no prior."
        ) from error
    root = scale[:, None] * xp.linalg.inv(factor).T
    mean = root @ (root.T @ linear)
    half_log_det = xp.sum(xp.log(xp.diagonal(factor)) - xp.log(scale))
    quadratic_term = 0.5 * xp.sum((root.T @ linear) ** 2)
    log_normalizer = constant + quadratic_term + 0.5 * len(mean) * math.log(2 * math.pi) - half_log_det
    return mean, root, log_normalizer


def _robust_moments(draws: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and lower root of the covariance of draws (n, P), as :func:`_winsorised`."""
    cut = _winsorised(draws)
    covariance = np.atleast_2d(np.cov(cut.T))
    scale = np.sqrt(np.diagonal(covariance))
    correlation = covariance / np.outer(scale, scale)
    shrunk = 0.95 * correlation + 0.05 * np.eye(len(scale))  # more coordinates than draws can support stay regular
    return cut.mean(axis=0), scale[:, None] * np.linalg.cholesky(shrunk)


def _winsorised(draws: np.ndarray) -> np.ndarray:
    """The finite draws, each coordinate cut far out: heavy tails must not rule moments."""
    finite = draws[np.isfinite(draws).all(axis=1)]
    low, center, high = np.quantile(finite, [0.25, 0.5, 0.75], axis=0)
    deviation = np.maximum((high - low) / 1.349, 1e-6)
    return np.clip(finite, center - WINSOR * deviation, center + WINSOR * deviation)
