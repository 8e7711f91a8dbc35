"""Deterministic and constrained sites as further coordinates of draws.

A posterior may have right latent sites and a wrong sum of them. Each number of a deterministic site is replaced by its
normal score, so that under q it is standard normal whatever it is a function of: what is judged is its place among
draws of q, and no tail of q is too long for that. And it may have right logarithms, and not the tail of what these are
of: constrained sites are taken as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from scipy.special import ndtri

from ..core.compilation import jit
from ..model.program import Program

MOST_NUMBERS = 300  # of a site that is judged, and of all such sites together


def judged_sites(program: Program) -> Callable[[Array], tuple[dict[str, Array], dict[str, Array]]]:
    """theta (n, P) -> deterministic sites that are functions of the latent sites alone, and latent sites that have a
    constraint, compiled as one.

    Sites with a value for each row are left out, and so are large ones.
    """
    theta = jax.ShapeDtypeStruct((program.layout.size,), program.dtype)
    deterministic = sorted(program.deterministic.of_latents - program.of_rows)
    constrained = [name for name in program.layout.site_names if not program.sites[name].is_real]
    shapes = jax.eval_shape(program.constrain, theta) if deterministic or constrained else {}
    groups = [_small({name: shapes[name].size for name in names}) for names in (deterministic, constrained)]

    def of_one(theta: Array) -> tuple[dict[str, Array], dict[str, Array]]:
        values = program.constrain(theta)
        of_latents, latents = ({name: values[name] for name in names} for names in groups)
        return of_latents, latents

    return jit(jax.vmap(of_one)) if any(groups) else lambda theta: ({}, {})


def _small(sizes: dict[str, int]) -> list[str]:
    """Of sites of these sizes, those that are judged."""
    chosen, count = [], 0
    for name, size in sizes.items():
        if count + size <= MOST_NUMBERS:
            chosen.append(name)
            count += size
    return chosen


def scored(
    sites: dict[Any, Array], weights_of_q: np.ndarray, scores_of: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[np.ndarray, dict[Any, np.ndarray]]:
    """Scores (n, D) of sites at draws, and each site's columns. Sites that are not finite somewhere are left out.

    :param sites: by name, (n, ...). :param weights_of_q: with which these are draws of q, (n,), of sum one.
    :param scores_of: :func:`normal_scores` or :func:`in_deviations`.
    """
    columns, indices, count = [np.zeros((len(weights_of_q), 0))], {}, 0
    for name, values in jax.device_get(sites).items():
        numbers = np.reshape(values, (len(weights_of_q), -1)).astype(np.float64)
        if not numbers.size or not np.isfinite(numbers).all():
            continue
        columns.append(scores_of(numbers, weights_of_q))
        indices[name] = np.arange(count, count + numbers.shape[1])
        count += numbers.shape[1]
    return np.concatenate(columns, axis=1), indices


def in_deviations(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Values (n, D) in standard deviations of q from its mean, with the tails that they have."""
    off = values - weights @ values
    deviation = np.sqrt(weights @ off**2)
    return np.where(deviation > 0, off / np.where(deviation > 0, deviation, 1.0), 0.0)


def normal_scores(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Phi^-1 of the distribution function at values (n, D), in the middle of each one's own weight; zero for what does
    not vary."""
    order = np.argsort(values, axis=0, kind="stable")
    own = weights[order]
    below, above = (np.cumsum(w, axis=0) - 0.5 * w for w in (own, own[::-1]))
    smaller = np.minimum(below, above[::-1])  # the other one is so near to one that it may have been rounded to it
    scores = np.empty_like(values)
    sign = np.where(below <= above[::-1], 1.0, -1.0)
    np.put_along_axis(scores, order, sign * ndtri(np.maximum(smaller, np.finfo(float).tiny)), axis=0)
    return np.where(np.ptp(values, axis=0) > 0, scores, 0.0)
