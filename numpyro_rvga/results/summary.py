"""The table of a posterior's latent sites: means, standard deviations, medians and central intervals."""

from __future__ import annotations

from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.compilation import jit
from ..core.gaussians import Family
from ..core.gaussians.mean_field import MeanField
from ..core.gaussians.mixture import GaussianMixture
from ..core.gaussians.packed_roots import variances_of
from .fitted import DRAWN_NUMBERS, Fitted

SCORES = np.linspace(-8.0, 8.0, 129)  # of a standard normal variable, at which functions of one are integrated


def print_summary(posterior: Fitted, prob: float = 0.9) -> None:
    """Print mean, standard deviation, median and central interval of every scalar of the latent sites under q.

    The figures are those of constrained values, and the same at every call. They are exact where each number of a site
    is a function of one entry of theta, as of positive sites. Those of a simplex, an ordered vector, a Cholesky factor
    or a site whose bound is another site come from 10,000 draws in mirrored pairs.

    **Example**

    With the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> posterior.print_summary()
        <BLANKLINE>
                        mean       std    median      5.0%     95.0%
         slopes[0]      1.28 ...
         slopes[1]     -2.03 ...
        <BLANKLINE>

    :param prob: the probability of the interval.
    :raises ValueError: if ``prob`` is not between 0 and 1.
    """
    if not 0 < prob < 1:
        raise ValueError(f"prob must lie between 0 and 1, not {prob}.")
    tails = [(1 - prob) / 2, (1 + prob) / 2]
    columns, quantiles = {}, posterior.pushed_quantiles(np.array([0.5, *tails]))
    moments = _moments(posterior, quantiles)
    drawn = posterior.drawn_sites([name for name in posterior.site_names if name not in moments], mirrored=True)
    for name in posterior.site_names:
        draws = drawn.get(name)
        if draws is None:
            columns[name] = [*moments[name], *quantiles[name]]
        else:
            columns[name] = [draws.mean(0), draws.std(0), *np.quantile(draws, [0.5, *tails], axis=0)]
    print(_table(["mean", "std", "median", *(f"{100 * tail:.1f}%" for tail in tails)], columns))


def _moments(posterior: Fitted, quantiles: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Means and standard deviations of the latent sites whose numbers are functions of one entry of theta each.

    :param quantiles: of all sites, the median in front.
    """
    q, program = posterior.gaussian, posterior.program
    mean, deviation = (program.layout.unravel(np.asarray(x, np.float64)) for x in (q.mean, q.deviation()))
    by_entry = [name for name in posterior.site_names if name in posterior.transformed_by_entry]
    moments = {n: (np.asarray(mean[n]), np.asarray(deviation[n])) for n in by_entry if program.sites[n].is_real}
    integrated = [name for name in by_entry if name not in moments]
    return moments | (_integrals(posterior, {name: quantiles[name][0] for name in integrated}) if integrated else {})


def _integrals(posterior: Fitted, centers: Mapping[str, np.ndarray]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """The same by the trapezoidal rule, which is exact to many digits for smooth functions of a normal variable.

    :param centers: by name, numbers near the means: squares are of what differs from them.
    """
    q = posterior.gaussian
    weights = np.asarray(q.weights if isinstance(q, GaussianMixture) else np.ones(1), np.float64)
    weights = np.outer(weights, np.exp(-0.5 * SCORES**2))
    component, score = np.repeat(np.arange(len(weights)), len(SCORES)), np.tile(SCORES, len(weights))
    weights = weights.ravel() / weights.sum()
    size = max(1, min(len(weights), DRAWN_NUMBERS // posterior.numbers_per_draw))
    component, score, weights = (np.pad(x, (0, -len(x) % size)) for x in (component, score, weights))
    first = {name: np.zeros(np.shape(center)) for name, center in centers.items()}
    second = {name: np.zeros(np.shape(center)) for name, center in centers.items()}
    for start in range(0, len(weights), size):
        part = slice(start, start + size)
        theta = _marginals_at(q, component[part], score[part].astype(q.mean.dtype))
        sites = posterior.constrain_latents(theta)
        for name, center in centers.items():
            off = np.asarray(sites[name], np.float64) - center
            first[name] += np.tensordot(weights[part], off, 1)
            second[name] += np.tensordot(weights[part], off**2, 1)
    return {n: (c + first[n], np.sqrt(np.maximum(second[n] - first[n] ** 2, 0.0))) for n, c in centers.items()}


@jit
def _marginals_at(q: Family | GaussianMixture | MeanField, component: Array, score: Array) -> Array:
    """theta (n, P), each entry where the distribution function of its marginal is that of a normal variable at a score
    (n,). ``component``: of a mixture, whose marginals these are, (n,)."""
    if isinstance(q, MeanField):
        return q.marginals_at(score[:, None])
    if isinstance(q, GaussianMixture):
        return q.means[component] + score[:, None] * jnp.sqrt(variances_of(q.roots)[component])
    return q.mean + score[:, None] * q.deviation()


def _table(header: list[str], columns: Mapping[str, list[np.ndarray]]) -> str:
    """That of :func:`numpyro.diagnostics.print_summary` without the columns that concern Markov chains."""
    rows: list[tuple[str, list[float]]] = []
    for name, arrays in columns.items():
        indices = np.ndindex(np.shape(arrays[0]))
        labels = (f"{name}[{','.join(map(str, index))}]" if index else name for index in indices)
        rows.extend(zip(labels, np.stack([np.ravel(array) for array in arrays], axis=1).tolist()))
    width = max(10, *(len(label) for label, _ in rows))
    lines = [" " * width + "".join(f" {title:>9}" for title in header)]
    lines += [f"{label:>{width}}" + "".join(f" {value:>9.2f}" for value in values) for label, values in rows]
    return "\n" + "\n".join(lines) + "\n"
