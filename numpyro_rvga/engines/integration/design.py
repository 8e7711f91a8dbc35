"""From weighted points of h to Gaussians in h around them, and x given h there: a mixture over all parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.typing import DTypeLike
from scipy.sparse import coo_array, eye_array

from ...core.compilation import jit
from ...core.gaussians.mixture import GaussianMixture
from ...core.gaussians.packed_roots import PackedRoots
from ...core.matrices.linalg import lower_from_root
from ..maximized_bound import SparseMaximizedBound
from .nested import Design, Moments, Point, stacked, variances_of
from .profiles import Profiles

FEW = 128  # points, up to which the Gaussians are as wide as Scott's rule says: L is nearly quadratic then
BANDWIDTH = 0.2  # else, in standard deviations of h: x given h is not one Gaussian for long
REACH = 0.6  # of the regressions for the slopes of x's mean: a bandwidth, in standard deviations of h
RIDGE = 1e-9
MOST_RESCALED = 2.0  # log of how much x is widened or narrowed where points are moved
NEGLIGIBLE = 1e-6  # mass of a point that is left out
MOST_NUMBERS = 2**26  # in the roots of all points
NARROW = 0.02  # standard deviations of h: a bandwidth, where many parameters leave no point near another
LEAST_LEFT = 0.5  # of the effective sample size, by calibration,
FLOOR = 2.0  # times a negligible mass: none of the points is lost by it
DECONVOLUTIONS = 200
KERNEL_REACH = 8.0  # standard deviations, beyond which a kernel is nothing in double precision


class ProfileCoordinates(NamedTuple):
    """h = center + axes z, and of each z the coordinates of its profile."""

    center: np.ndarray
    axes: np.ndarray
    profiles: Profiles


def wide_design(
    points: Sequence[Point],
    mass: np.ndarray,
    moments: Moments,
    given: ProfileCoordinates,
    mean: np.ndarray,
    covariance: np.ndarray,
) -> Design:
    """Gaussians in h around the points, which are shrunk towards their mean, so that the mixture is as wide as the
    points were. Both in coordinates in which the marginal is nearly Gaussian, which keeps its shape.

    :param mean: of h, (d,), with ``covariance`` (d, d), which the design has too.
    """
    h, means, roots = _components(points, moments)
    scale = np.linalg.cholesky(covariance)
    is_whole = isinstance(roots, np.ndarray)
    values = np.concatenate([means, 0.5 * np.log(variances_of(roots))], axis=1) if is_whole else means
    slopes = _slopes(np.linalg.solve(scale, (h - mean).T).T, values) @ np.linalg.inv(scale)
    slopes, widths = np.split(slopes, [means.shape[1]], axis=1)
    bandwidth = len(h) ** (-1 / (h.shape[1] + 4)) if len(h) <= FEW else BANDWIDTH
    v = given.profiles.standard(np.linalg.solve(given.axes, (h - given.center).T).T)
    middle = mass @ v
    root = np.linalg.cholesky((mass[:, None] * (v - middle)).T @ (v - middle))
    z, along = given.profiles.from_standard(middle + np.sqrt(1 - bandwidth**2) * (v - middle))
    moved = given.center + z @ given.axes.T
    kernel = given.axes @ (along[:, :, None] * (bandwidth * root))
    # Mean and covariance are now about the marginal's, and become so exactly by one linear map.
    center = mass @ moved
    whole = (mass[:, None] * (moved - center)).T @ (moved - center) + np.einsum("k,kij,klj->il", mass, kernel, kernel)
    correction = scale @ np.linalg.inv(np.linalg.cholesky(whole))
    moved, kernel = mean + (moved - center) @ correction.T, correction @ kernel
    means = means + np.einsum("kpd,kd->kp", slopes, moved - h)
    if is_whole:
        roots = _rescaled(roots, mass, np.einsum("kpd,kd->kp", widths, moved - h))
    return Design(moved, mass, means, roots, slopes, kernel)


def narrow_design(
    points: Sequence[Point], mass: np.ndarray, moments: Moments, mean: np.ndarray, covariance: np.ndarray
) -> Design:
    """Gaussians in h around the points that are so narrow that x given h is the same within each.

    :param mean: of h, (d,), with ``covariance`` (d, d), of which the design has the mean and the variances, if other
        masses that are not far from these have them.
    """
    h, means, roots = _components(points, moments)
    mass = _calibrated((h - mean) / np.sqrt(np.diagonal(covariance)), mass)
    middle = mass @ h
    around = np.atleast_2d(np.cov(h.T, aweights=mass))
    slopes = np.zeros((*means.shape, h.shape[1]))
    moved, kernel = middle + np.sqrt(1 - NARROW**2) * (h - middle), NARROW * np.linalg.cholesky(around)
    return Design(moved, mass, means, roots, slopes, kernel)


def thinned(points: Sequence[Point], mass: np.ndarray, moments: Moments) -> tuple[list[Point], np.ndarray]:
    """The points that count and their masses, or of too many some."""
    kept = np.flatnonzero(mass > NEGLIGIBLE)
    numbers = sum(np.size(x) for x in jax.tree.leaves(moments(points[kept[0]])[1]))
    kept = kept[:: max(1, -(-len(kept) * numbers // MOST_NUMBERS))]
    return [points[k] for k in kept], mass[kept] / mass[kept].sum()


def _components(points: Sequence[Point], moments: Moments) -> tuple[np.ndarray, np.ndarray, Any]:
    """h (K, d), means (K, P) and roots of x."""
    means, roots = zip(*[moments(point) for point in points])
    return np.array([point.h for point in points]), np.array(means), stacked(roots)


def _calibrated(z: np.ndarray, mass: np.ndarray) -> np.ndarray:
    """Masses (K,) with which points (K, d) have means of zero and variances of one: of all such masses, those with the
    least relative entropy to the ones that are given (exponential tilting). Those, if there are none near by."""
    import scipy.optimize  # here: slow to import, and seldom needed

    features = np.concatenate([z, z**2 - 1], axis=1)

    def tilted(tilt: np.ndarray) -> tuple[float, np.ndarray]:
        exponent = features @ tilt
        weights = mass * np.exp(exponent - exponent.max())
        return float(np.log(weights.sum()) + exponent.max()), weights / weights.sum()

    def slope(tilt: np.ndarray) -> np.ndarray:
        return tilted(tilt)[1] @ features

    def curvature(tilt: np.ndarray) -> np.ndarray:
        weights = tilted(tilt)[1]
        off = features - weights @ features
        return (weights[:, None] * off).T @ off

    start = np.zeros(features.shape[1])
    found = scipy.optimize.minimize(
        lambda tilt: tilted(tilt)[0], start, jac=slope, hess=curvature, method="trust-exact", options={"maxiter": 50}
    )
    new = np.maximum(tilted(found.x)[1], FLOOR * NEGLIGIBLE)
    return new / new.sum() if np.sum(mass**2) > LEAST_LEFT * np.sum(new**2) else mass


def _rescaled(roots: np.ndarray, mass: np.ndarray, log_scale: np.ndarray) -> np.ndarray:
    """Roots (K, P, P) of components whose standard deviations (K, P) become exp(log_scale) times as large, but for a
    factor that leaves the average variance as it is: within a component they are the same on both sides."""
    variances = np.sum(roots**2, axis=2)
    scale = np.exp(np.clip(log_scale, -MOST_RESCALED, MOST_RESCALED))
    scale *= np.sqrt((mass @ variances) / (mass @ (scale**2 * variances)))
    return scale[:, :, None] * roots


def _slopes(z: np.ndarray, means: np.ndarray) -> np.ndarray:
    """Slopes (K, P, d) of means (K, P) in z (K, d), by regressions weighted towards near points, of differences from
    each point: what keeps coefficients small then draws means to its own, and not to zero."""
    count, size = z.shape
    slopes = np.empty((count, means.shape[1], size))
    for k in range(count):
        steps = z - z[k]
        regressors = np.column_stack([np.ones(count), steps])
        weighted = regressors * np.exp(-0.5 * np.sum(steps**2, axis=1, keepdims=True) / REACH**2)
        gram = weighted.T @ regressors
        gram += RIDGE * np.trace(gram) * np.eye(size + 1)
        slopes[k] = np.linalg.solve(gram, weighted.T @ (means - means[k]))[1:].T
    return slopes


def mixture_of(
    design: Design,
    indices: np.ndarray,
    others: np.ndarray,
    dtype: DTypeLike,
    solved: SparseMaximizedBound | None = None,
) -> GaussianMixture:
    """A mixture over theta: h near a point is Normal, and x given h too, its mean linear in h.

    :param indices: the entries of theta that are h. :param others: those that are x.
    :param solved: what has left the roots, if they are block-arrows.
    """
    size, kept = len(indices) + len(others), np.flatnonzero(design.mass > NEGLIGIBLE)
    weights = design.mass[kept] / design.mass[kept].sum()
    means = np.zeros((len(kept), size))
    means[:, indices], means[:, others] = design.h[kept], design.means[kept]
    log_weights, means = jnp.asarray(np.log(weights), dtype), jnp.asarray(means, dtype)
    kernels = np.broadcast_to(design.kernel, (len(design.h), len(indices), len(indices)))[kept]
    if solved is not None:
        return GaussianMixture(log_weights, means, _packed_roots(design, kernels, kept, indices, others, solved))
    roots = np.zeros((len(kept), size, size), dtype)
    roots[:, indices, : len(indices)] = kernels
    roots[:, others, : len(indices)] = design.slopes[kept] @ kernels
    roots[:, others, len(indices) :] = design.roots[kept]
    return GaussianMixture(log_weights, means, _lower_from_roots(roots))


@jit
def _lower_from_roots(roots: Array) -> Array:
    """Lower triangular roots of the same products, (K, P, P)."""
    return lax.map(lower_from_root, roots)


def _packed_roots(
    design: Design,
    kernels: np.ndarray,
    kept: np.ndarray,
    indices: np.ndarray,
    others: np.ndarray,
    bound: SparseMaximizedBound,
) -> PackedRoots:
    """The roots of a mixture's components, packed as their solves left them."""
    # All of them are not copied: they are hundreds of megabytes.
    factors, of_x = design.roots if len(kept) == len(design.h) else jax.tree.map(lambda x: x[kept], design.roots)
    kernels, slopes = np.linalg.cholesky(kernels @ np.swapaxes(kernels, 1, 2)), design.slopes[kept]
    variances = np.zeros((len(kept), len(indices) + len(others)))
    variances[:, indices] = np.sum(kernels**2, axis=2)
    variances[:, others] = of_x + np.sum((slopes @ kernels) ** 2, axis=2)
    order, dtype = bound.indices, of_x.dtype
    arrays = [jnp.asarray(x, dtype) for x in (kernels, slopes[:, order], variances)]
    ends = jnp.asarray(np.concatenate([indices, others[order]]), jnp.int32)
    return PackedRoots(jnp.asarray(factors), bound.packing, arrays[0], arrays[1], ends, arrays[2])


def kernel_weights(h: np.ndarray, mass: np.ndarray, kernel: np.ndarray) -> np.ndarray:
    """Weights (K,) of Gaussians around points (K, d), such that their sum has the marginal's mass at these points.

    Kernels widen what they are put around. By the iterations of Richardson and Lucy (those of EM for the weights of a
    mixture), the weights are as much narrower.
    """
    from scipy.spatial import KDTree  # slow to import, and seldom needed

    z = np.linalg.solve(kernel, h.T).T
    pairs = KDTree(z).query_pairs(KERNEL_REACH, output_type="ndarray")
    first, second = pairs.T
    density = np.exp(-0.5 * np.sum((z[first] - z[second]) ** 2, axis=1))
    of_pairs = coo_array((density, (first, second)), shape=(len(z), len(z)))
    densities = (of_pairs + of_pairs.T + eye_array(len(z))).tocsr()  # symmetric
    weights = mass.copy()
    for _ in range(DECONVOLUTIONS):
        weights = weights * (densities @ (mass / (densities @ weights)))
        weights /= weights.sum()
    return weights
