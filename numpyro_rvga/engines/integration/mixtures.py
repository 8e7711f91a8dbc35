"""From points of the hyperparameters to a mixture of Gaussians over all parameters."""

from __future__ import annotations

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
from .design import NEGLIGIBLE
from .nested import Design

DECONVOLUTIONS = 200
KERNEL_REACH = 8.0  # standard deviations, beyond which a kernel is nothing in double precision


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
    weights = design.mass if design.is_weighted else kernel_weights(design.h, design.mass, design.kernel)
    size, kept = len(indices) + len(others), np.flatnonzero(weights > NEGLIGIBLE)
    weights = weights[kept] / weights[kept].sum()
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
