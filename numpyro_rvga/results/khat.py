"""Is q the posterior? The Pareto k of the ratios p/q, and by how much moments move when draws are reweighted.

Ratios at draws from q say nothing of what lies outside of it. So a third as many draws come from wider Gaussians: each
follows a wide Student's t along one parameter, the others by their regression on it. All draws together are weighted by
p / mixture (the balance heuristic of Veach and Guibas, 1995), which works in any number of dimensions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.special import logsumexp
from jax.scipy.stats import norm
from jax.scipy.stats import t as student
from numpyro.infer.importance import _psis_khat

from ..core.compilation import Compiled
from ..core.gaussians.mean_field import MeanField
from ..core.gaussians.mixture import GaussianMixture
from ..engines.integration.importance import relative_sample_size
from ..engines.rounding_errors import NOTICEABLE as NOTICEABLE_ERROR
from ..engines.starts import NOTICEABLE, share_of_others
from ..model.data.rows import Arrays, Data
from ..options import is_count, key_numbers
from .derived import in_deviations, normal_scores, scored
from .fitted import Fitted
from .integration import MOST_PARAMETERS
from .log_joint import (
    all_rows,
    are_equal,
    draws_with_density,
    impossible_if_undefined,
    integral_error,
    is_density,
    is_of_points,
)
from .marginal_nuts import has_mixed

MIN_DRAWS = 100
MOST_NUMBERS = 2**26  # in the draws
NEARLY_EQUAL = 0.95  # relative sample size of weights that vary by about 20%
WIDER = 2.0  # standard deviations of q
DEGREES = 5.0  # of freedom
MOST_BATCHES = 4  # of draws, where the first leave it open whether a move is large
SHARE = 1 / 3  # of the draws are from wider Gaussians
SMALL, LARGE = 0.1, 0.5  # standard deviations: moves that do not matter, and those that make q a bad one
SMALL_ITSELF = 0.2  # of a constrained value: a long tail moves its moments where those of its logarithm stay
SURE = 2.0  # standard errors
UNSURE = 0.1  # standard error of a move above which no verdict is given
LISTED = 3  # sites that a verdict names
NOT_MIXED = (
    "doubtful. The draws of the integrated sites are too few or have not mixed, and q is no better than these. Run "
    "NUTS from here (posterior.nuts())."
)
RESAMPLED = 0.7  # Pareto k up to which draws can be resampled


@dataclass(frozen=True)
class Khat:
    """The Pareto k of the importance ratios p/q, and what moves when draws are reweighted by them.

    It unpacks as ``khat, verdict``.

    :param khat: the estimated shape of the ratios' tail; it has finite variance below 0.5, and no mean above 1.
    :param verdict: what that means, in words.
    :param moves: by site, how far the mean of a parameter in unconstrained space moves, in standard deviations of q, or
        the logarithm of its standard deviation: the larger of the two, and the largest in the site. A deterministic
        site moves among its draws from q, as normal scores.
    :param moves_error: by site, the standard error of these.
    """

    khat: float
    verdict: str
    moves: dict[str, float] = field(default_factory=dict)
    moves_error: dict[str, float] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Any]:
        return iter((self.khat, self.verdict))

    def __repr__(self) -> str:
        return f"Pareto k = {self.khat:.2f}: {self.verdict}"


class Evidence(NamedTuple):
    """The numbers that a verdict is based on.

    :ivar khat: of p/q.
    :ivar relative_size: effective number of draws from q over the number of draws.
    :ivar moves: by site, with ``errors``.
    :ivar left: a way to integrate hyperparameters out that has not been tried yet, if there is one.
    :ivar sure_of_values: lower bounds of the moves of constrained sites themselves.
    """

    khat: float
    relative_size: float
    moves: dict[str, float]
    errors: dict[str, float]
    left: str = ""
    sure_of_values: Mapping[str, float] = {}


def khat(
    posterior: Fitted,
    data: Data,
    *,
    rng_key: Array | None = None,
    num_samples: int = 10_000,
) -> Khat:
    """Judge q by the posterior's density at draws.

    The Pareto k is the shape of the tail of the importance ratios p/q at draws from q (Vehtari et al. 2024; Yao et
    al. 2018). A third as many draws are wider, along one parameter each. Reweighted by the posterior, all draws
    estimate by how much q's means and standard deviations are off: the verdict names the sites that move most. It is
    ``"good"`` only if no move is above 0.1, and none of a constrained site itself above 0.2. Modes that are far from q
    stay unseen.

    The log joint is summed over chunks of rows, so memory does not grow with the number of rows.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> print(posterior.khat(data).verdict)
        good. The importance weights are nearly equal: q is almost the posterior.

    :param data: all rows that the posterior has absorbed, with their outcome.
    :param rng_key: random key; ``jax.random.key(0)`` by default.
    :param num_samples: the number of draws from q; fewer than that for more than 6,700 parameters. If they leave it
        open whether a move is above 0.1, four times as many are taken.
    :return: the Pareto k, a verdict, and how far each site moves. Ratios that do not vary at all, as for an exact
        posterior, give a k of 0.
    :raises NotImplementedError: after a run with dynamics.
    :raises ValueError: if ``data`` lack the outcome, and for fewer than 100 draws, too few to fit a tail to.
    """
    if not is_count(num_samples, MIN_DRAWS):
        raise ValueError(f"the Pareto k needs at least {MIN_DRAWS} draws, not {num_samples!r}.")
    size = posterior.mean.size
    num_samples = max(MIN_DRAWS, min(num_samples, MOST_NUMBERS // size))
    rows = all_rows(posterior, data)
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    draws = _weighed(posterior, rng_key, num_samples, rows)
    of_q = draws.log_ratios[:num_samples]
    if not is_density(of_q):
        number = int((~np.isfinite(of_q)).sum())
        return Khat(np.inf, f"the log joint is not a finite number at {number} of {num_samples} draws.")
    evidence = _evidence(posterior, draws)
    if is_unclear(evidence):
        batches = min(MOST_BATCHES, MOST_NUMBERS // (size * num_samples))
        keys = jax.random.split(rng_key, batches + 1)[2:]  # the first two have been used
        evidence = _evidence(posterior, draws.joined([_weighed(posterior, key, num_samples, rows) for key in keys]))
    text = verdict(evidence, share_of_others(posterior.info))
    if is_of_points(posterior) and not has_mixed(posterior.info["integration"]):
        text = NOT_MIXED
    if text.startswith("good") and (error := integral_error(posterior, rows)) > NOTICEABLE_ERROR:
        text = (
            "doubtful. The integrals over latent variables of single rows are inexact: by more nodes, the log "
            f"likelihood changes by {error:.2g} nats among draws from q. Compare with NUTS."
        )
    if (number := int(np.isnan(of_q).sum())) > 0:
        text += f" The log joint is NaN at {number} of {num_samples} draws: these count as impossible, as in NUTS."
    return Khat(evidence.khat, text, evidence.moves, evidence.errors)


class Draws(NamedTuple):
    """Draws from q, then the wider ones.

    :ivar z: parameters, in standard deviations of q, deterministic sites, as normal scores, and constrained sites, in
        their own standard deviations, (n, P + D).
    :ivar log_ratios: log p / q, (n,), at some undefined. :ivar log_mixture: of mixture / q, (n,).
    :ivar num_samples: from q. :ivar indices: the columns of z, by site; of constrained values by (site,).
    """

    z: np.ndarray
    log_ratios: np.ndarray
    log_mixture: np.ndarray
    num_samples: int
    indices: dict[Any, np.ndarray]

    def joined(self, others: list[Draws]) -> Draws:
        """With other draws, of the sites that all have: those that are not finite somewhere have no scores."""
        names = [name for name in self.indices if all(name in draws.indices for draws in others)]
        every, count = [draws._of_sites(names) for draws in (self, *others)], self.num_samples
        heads = zip(*(tuple(array[:count] for array in draws[:3]) for draws in every), strict=True)
        tails = zip(*(tuple(array[count:] for array in draws[:3]) for draws in every), strict=True)
        arrays = [np.concatenate(parts) for parts in zip(map(np.concatenate, heads), map(np.concatenate, tails))]
        return Draws(*arrays, num_samples=count * len(every), indices=every[0].indices)

    def _of_sites(self, names: list[str]) -> Draws:
        """The draws of these sites alone."""
        columns = [np.ravel(self.indices[name]) for name in names]
        ends = np.cumsum([len(of_site) for of_site in columns])
        places = np.split(np.arange(ends[-1]), ends[:-1])
        return self._replace(z=self.z[:, np.concatenate(columns)], indices=dict(zip(names, places)))


def _weighed(posterior: Fitted, rng_key: Array, num_samples: int, rows: Arrays) -> Draws:
    if is_of_points(posterior):
        theta, log_q = draws_with_density(posterior, rng_key, num_samples)
        z = (np.asarray(theta, np.float64) - posterior.mean) / np.asarray(posterior.gaussian.deviation())
        log_mixture = np.zeros(num_samples)
    else:
        theta, log_q, z, log_mixture = _draws(posterior, rng_key, num_samples)
    weights_of_q, indices = _normalized(-log_mixture), dict(posterior.program.layout.indices)
    deterministic, constrained = posterior.judged_sites(theta)
    itself = {(name,): values for name, values in constrained.items()}
    for sites, scores_of in ((deterministic, normal_scores), (itself, in_deviations)):
        scores, of_scores = scored(sites, weights_of_q, scores_of)
        indices |= {name: z.shape[1] + columns for name, columns in of_scores.items()}
        z = np.concatenate([z, scores], axis=1)
    log_ratios = posterior.log_densities.joint(theta, rows) - log_q
    return Draws(z, log_ratios, log_mixture, num_samples, indices)


def _evidence(posterior: Fitted, draws: Draws) -> Evidence:
    log_ratios = impossible_if_undefined(draws.log_ratios)
    moves, errors = _moves(draws.z, log_ratios - draws.log_mixture, draws.log_mixture)
    of_q, of_values = log_ratios[: draws.num_samples], [site for site in draws.indices if isinstance(site, tuple)]
    of_moves, of_errors = _by_site(draws.indices, moves, errors)
    sure = {site[0]: of_moves.pop(site) - SURE * of_errors.pop(site) for site in of_values if site in of_moves}
    return Evidence(
        0.0 if are_equal(of_q) else _psis_khat(of_q),
        relative_sample_size(of_q),
        of_moves,
        of_errors,
        integration_left(posterior),
        sure,
    )


def integration_left(posterior: Fitted) -> str:
    """A way to integrate hyperparameters out that has not been tried yet, if there is one."""
    if not {"integrated", "not_integrated"} & set(posterior.info):
        return "integrate hyperparameters out (posterior.integrate(data))"
    if posterior.info.get("marginal") == "bound" and posterior.program.layout.size <= MOST_PARAMETERS:
        return "close the gap of the bound given the integrated sites (marginal='importance')"
    return ""


def is_unclear(evidence: Evidence) -> bool:
    """Whether more draws may find that q is not good."""
    sure, error = max(sure_moves(evidence).values()), max(evidence.errors.values())
    return sure <= SMALL and (max(evidence.moves.values()) > SMALL or error > UNSURE)


def sure_moves(evidence: Evidence) -> dict[str, float]:
    """Lower bounds of the moves by site, with their standard errors taken off."""
    return {site: move - SURE * evidence.errors[site] for site, move in evidence.moves.items()}


def _draws(posterior: Fitted, rng_key: Array, num_samples: int) -> tuple[Array, np.ndarray, np.ndarray, np.ndarray]:
    """theta (n, P), log q (n,), each parameter in standard deviations of q, (n, P), and the log of mixture / q, (n,).

    The wider draws are of the Gaussian with q's moments, which q itself is unless it is no Gaussian.
    """
    q = posterior.gaussian
    mean, is_gaussian = q.mean, not isinstance(q, GaussianMixture | MeanField)
    draw_key, wide_key = jax.random.split(rng_key)
    of_mixture = None if is_gaussian else posterior.sample_unconstrained(draw_key, (num_samples,))
    count, rng = int(num_samples * SHARE), np.random.default_rng(key_numbers(wide_key))
    noise_size = q.noise_size if is_gaussian else mean.size
    noise = rng.normal(size=(count, noise_size)).astype(mean.dtype)  # JAX's samplers take seconds to compile
    coordinates = rng.integers(0, mean.size, count)
    wide = (WIDER * rng.standard_t(DEGREES, count)).astype(mean.dtype)

    # A mixture's density is a sum over hundreds of components at each draw: that is worth being compiled well.
    compiled = _drawn(num_samples, level=1 if isinstance(q, GaussianMixture) else 0)
    theta, *rest = compiled(q, draw_key, of_mixture, noise, coordinates, wide)
    log_q, standard, log_mixture = (np.asarray(x, np.float64) for x in rest)
    return theta, log_q, standard, log_mixture


@functools.cache
def _drawn(num_samples: int, level: int) -> Callable:
    """A compiled function: so many draws of q and the wider ones, log q, and the others of :func:`_draws`.

    :param level: of optimization, see :class:`~numpyro_rvga.core.compilation.Compiled`.
    """

    def drawn(q, key, of_mixture, noise, coordinates, wide):
        gaussian = q if of_mixture is None else q.as_full()
        theta, mean, deviation, count = of_mixture, gaussian.mean, gaussian.deviation(), len(noise)
        if theta is None:
            theta = gaussian.transform(jax.random.normal(key, (num_samples, gaussian.noise_size), mean.dtype))
        rest, at = gaussian.transform(noise) - mean, jnp.arange(count)
        z = rest[at, coordinates] / deviation[coordinates]
        along = jnp.zeros_like(rest).at[at, coordinates].set(1 / deviation[coordinates])
        _, vjp = jax.vjp(gaussian.transform, jnp.zeros_like(noise))
        regression = gaussian.transform(vjp(along)[0]) - mean  # Sigma e_j / sd_j
        both = jnp.concatenate([theta, mean + rest + (wide - z)[:, None] * regression])
        standard = (both - mean) / deviation
        log_ratio = student.logpdf(standard / WIDER, DEGREES) - math.log(WIDER) - norm.logpdf(standard)
        log_wider = logsumexp(log_ratio, axis=1) - math.log(mean.size)
        log_q = q.log_prob(both)
        if of_mixture is not None:
            log_wider = log_wider + gaussian.log_prob(both) - log_q
        share = count / len(both)
        return both, log_q, standard, jnp.logaddexp(math.log1p(-share), math.log(share) + log_wider)

    return Compiled(drawn, level=level)


def _moves(z: np.ndarray, log_weights: np.ndarray, log_mixture: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each parameter, the larger of its mean's move and its log standard deviation's, with standard errors.

    Under q both moments are given: the draws' own noise is taken out by weighting them for q as well.
    """
    for_p, for_q = _normalized(log_weights), _normalized(-log_mixture)
    change = for_p - for_q
    mean = change @ z
    square = 1 + change @ z**2
    variance = np.maximum(square - mean**2, 1e-12)
    mean_error = np.sqrt(np.sum((for_p[:, None] * (z - mean) - for_q[:, None] * z) ** 2, axis=0))
    terms = for_p[:, None] * ((z - mean) ** 2 - variance) - for_q[:, None] * (z**2 - 1)
    log_error = np.sqrt(np.sum(terms**2, axis=0)) / (2 * variance)
    moves, errors = np.stack([np.abs(mean), np.abs(0.5 * np.log(variance))]), np.stack([mean_error, log_error])
    larger = np.argmax(moves, axis=0)[None]
    return np.take_along_axis(moves, larger, 0)[0], np.take_along_axis(errors, larger, 0)[0]


def _normalized(log_weights: np.ndarray) -> np.ndarray:
    weights = np.exp(log_weights - log_weights.max())
    return weights / weights.sum()


def _by_site(indices: Mapping[str, np.ndarray], moves: np.ndarray, errors: np.ndarray) -> tuple[dict, dict]:
    """The largest move of each site, and its standard error."""
    of_moves, of_errors = {}, {}
    for name, entries in indices.items():
        if entries.size:
            worst = entries.flat[np.argmax(moves[entries])]
            of_moves[name], of_errors[name] = float(moves[worst]), float(errors[worst])
    return of_moves, of_errors


def verdict(evidence: Evidence, share_elsewhere: float = 0.0) -> str:
    """A verdict in words: how far moments move, which sites most, and what to do.

    :param share_elsewhere: of the posterior, in other modes that searches have reached.
    """
    size = max(evidence.errors.values())
    sure = sure_moves(evidence)
    moved = max(sure.values())
    if moved <= SMALL and size > UNSURE:
        grade = "bad" if evidence.khat > 1 else "doubtful"
        return (
            f"{grade}. The weights of the draws are too unequal to tell by how much q's moments are off. Compare with "
            "NUTS, started from posterior.nuts()."
        )
    if moved > SMALL:
        listed = ", ".join(f"{site!r} by {evidence.moves[site]:.2f}" for site in _worst(sure) if sure[site] > SMALL)
        grade, what = ("bad", "much") if moved > LARGE else ("doubtful", "part")
        return (
            f"{grade}. q misses {what} of the posterior: reweighted, its moments move, in standard deviations: "
            f"{listed}. {remedy(evidence.khat, evidence.left)}"
        )
    of_values = evidence.sure_of_values
    if long_tailed := [repr(site) for site in _worst(of_values) if of_values[site] > SMALL_ITSELF]:
        return (
            "doubtful. In unconstrained space q is good, but a tail is too short or too long: reweighted, the mean or "
            f"the standard deviation of {', '.join(long_tailed)} itself moves by more than {SMALL_ITSELF} standard "
            f"deviations. {remedy(evidence.khat, evidence.left)}"
        )
    if share_elsewhere > NOTICEABLE:
        return (
            f"doubtful. At its own mode q is good, but about {share_elsewhere:.0%} of the posterior is at other modes, "
            "which other starts have reached: see info['modes']."
        )
    if evidence.khat > 1 and evidence.relative_size < NEARLY_EQUAL:
        return (
            "doubtful. No moment moves by more than 0.1 standard deviations, but the tails of the posterior are much "
            "heavier than q's. For tail probabilities, use NUTS, started from posterior.nuts()."
        )
    if evidence.relative_size > NEARLY_EQUAL:
        return "good. The importance weights are nearly equal: q is almost the posterior."
    return "good. Reweighted, no mean and no log standard deviation moves by more than 0.1."


def remedy(khat: float, left: str) -> str:
    """What to do where q misses part of the posterior. ``left``: as :func:`integration_left` returns it."""
    steps = [left] if left else []
    if khat <= RESAMPLED:
        steps.append("correct the draws (posterior.resample(data))")
    steps.append("run NUTS from here (posterior.nuts())")
    text = ", or ".join(steps)
    return f"{text[0].upper()}{text[1:]}."


def _worst(sure: Mapping[str, float]) -> list[str]:
    return sorted(sure, key=lambda site: -sure[site])[:LISTED]
