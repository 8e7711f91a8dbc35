"""Posteriors for ArviZ 0.x and 1.x: conversion, and the Pareto k of the importance ratios."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.special import logsumexp

from ..model.rows import num_rows, selected
from ..model.tracing import run_model
from . import prediction

if TYPE_CHECKING:
    from ..model import Program
    from .posterior import Posterior

# Bounds the memory of a chunk of rows: draws times rows times elements of an observed site.
CHUNK_VALUES = 2**20
NEARLY_EQUAL = 0.95  # relative sample size of weights that vary by about 20%
MIN_DRAWS = 100


class Khat(NamedTuple):
    """The Pareto k of the importance ratios p/q.

    :param khat: the estimated shape of the ratios' tail; it has finite variance below 0.5, and no mean above 1.
    :param verdict: what that means, in words.
    """

    khat: float
    verdict: str

    def __repr__(self) -> str:
        return f"Pareto k = {self.khat:.2f}: {self.verdict}"


def to_arviz(
    posterior: Posterior,
    data: Mapping[str, ArrayLike] | tuple | None,
    rng_key: Array | None,
    num_samples: int,
    coords: Mapping[str, Any] | None,
    dims: Mapping[str, list[str]] | None,
) -> Any:
    """See :meth:`Posterior.to_arviz`."""
    from .. import __version__

    arviz, major = _import_arviz()
    program = posterior.program
    draw_key, predictive_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    theta = posterior.sample_unconstrained(draw_key, (num_samples,))
    rows = None if data is None else _rows_with_outcome(program, data)
    sampled: dict[str, dict[str, Any]] = {
        "posterior": posterior.constrain(theta, rows),
        "sample_stats": {"log_q": posterior.log_prob_unconstrained(theta)},
    }
    fixed: dict[str, dict[str, Any]] = {}
    if rows is not None:
        chunks = list(_chunks_of_log_likelihood(program, theta, rows))
        sampled["sample_stats"]["log_p"] = _log_joint(program, theta, chunks)
        sampled["log_likelihood"] = {site: _in_model_order(program, site, chunks) for site in program.observed_sites}
        sampled["posterior_predictive"] = prediction.at_draws(posterior, predictive_key, rows, theta)
        fixed["observed_data"] = jax.device_get(jax.jit(partial(_observed_values, program))(rows))
        fixed["constant_data"] = _other_arrays(rows, fixed["observed_data"])
    groups = {group: {name: np.asarray(v)[None] for name, v in values.items()} for group, values in sampled.items()}
    groups |= {group: {name: np.asarray(v) for name, v in values.items()} for group, values in fixed.items() if values}
    labels = {"coords": coords, "dims": {**_plate_dims(program, groups), **(dims or {})}}
    attributes = {"inference_library": "numpyro_rvga", "inference_library_version": __version__}
    if major == 0:
        return arviz.from_dict(**groups, attrs=attributes, posterior_attrs=attributes, **labels)
    return arviz.from_dict(groups, attrs={"/": attributes, "posterior": attributes}, **labels)


def khat(posterior: Posterior, data: Mapping[str, ArrayLike] | tuple, rng_key: Array | None, num_samples: int) -> Khat:
    """See :meth:`Posterior.khat`."""
    _import_arviz()
    if "dynamics" in posterior.info:
        raise NotImplementedError("parameters that move have no joint density with all rows to compare with.")
    if num_samples < MIN_DRAWS:
        raise ValueError(f"the Pareto k needs at least {MIN_DRAWS} draws, not {num_samples}.")
    program = posterior.program
    rng_key = jax.random.key(0) if rng_key is None else rng_key
    theta = posterior.sample_unconstrained(rng_key, (num_samples,))
    rows = _rows_with_outcome(program, data)
    if not program.whole and num_rows(rows) != posterior.num_rows:
        raise ValueError(
            f"data has {num_rows(rows)} rows, and the posterior has absorbed {posterior.num_rows}: give all of "
            "these, and no others."
        )
    log_p = _log_joint(program, theta, _chunks_of_log_likelihood(program, theta, rows))
    log_ratios = log_p - np.asarray(posterior.log_prob_unconstrained(theta), np.float64)
    undefined = np.isnan(log_p) | np.isposinf(log_p)
    if undefined.any() or np.isneginf(log_p).all():
        number = (~np.isfinite(log_p)).sum()
        return Khat(np.inf, f"the log joint is not a finite number at {number} of {num_samples} draws.")
    shape = smoothed(log_ratios)[1]
    return Khat(shape, _verdict(shape, _relative_sample_size(log_ratios), num_samples))


def smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Normalized log weights of importance ratios, their tail smoothed, and the Pareto k (Vehtari et al. 2024)."""
    arviz, major = _import_arviz()
    if np.ptp(log_ratios) < np.finfo(np.float32).eps:
        return np.full(len(log_ratios), -np.log(len(log_ratios))), 0.0
    if major == 0:
        log_weights, shape = arviz.psislw(log_ratios)
    else:
        from arviz_stats.base import array_stats

        log_weights, shape = array_stats.psislw(-log_ratios)
    return np.asarray(log_weights) - logsumexp(log_weights), float(shape)


def _rows_with_outcome(program: Program, data: Mapping[str, ArrayLike] | tuple) -> dict[str, Any]:
    """:raises ValueError: if an observed site is not observed in ``data``; it would be drawn at random."""
    rows = program.rows(data)
    few = rows if program.whole else {name: values[:2] for name, values in rows.items()}
    jax.eval_shape(partial(_observed_values, program), few)
    return rows


def _log_joint(program: Program, theta: Array, chunks: Iterable[dict[str, np.ndarray]]) -> np.ndarray:
    """The log joint density in unconstrained space, with all row terms, summed in float64. Shape (num_samples,)."""
    total = np.asarray(jax.jit(jax.vmap(program.log_prior))(theta), np.float64)
    for terms in chunks:
        for values in terms.values():
            total = total + values.reshape(len(total), -1).sum(axis=1, dtype=np.float64)
    return total


def _chunks_of_log_likelihood(
    program: Program, theta: Array, rows: Mapping[str, Any]
) -> Iterator[dict[str, np.ndarray]]:
    """The row terms of successive chunks of rows, each of shape (num_samples, rows of the chunk, *elements)."""
    examples = jax.eval_shape(program.log_likelihood, theta[0], program.inputs(program.example_rows))
    elements = max(values.size // values.shape[0] for values in examples.values())
    chunk_size = max(1, CHUNK_VALUES // (len(theta) * max(elements, program.largest_array)))
    evaluate = jax.jit(jax.vmap(program.log_likelihood, in_axes=(0, None)))
    inputs = program.inputs(rows)
    for start in range(0, num_rows(inputs), chunk_size):
        yield jax.device_get(evaluate(theta, selected(inputs, slice(start, start + chunk_size))))


def _in_model_order(program: Program, site: str, chunks: list[dict[str, np.ndarray]]) -> np.ndarray:
    """All rows of a site, with the row axis where the model's plates have it and not in front of the elements."""
    terms = np.concatenate([chunk[site] for chunk in chunks], axis=1)
    return np.moveaxis(terms, 1, 1 + program.row_axis(site))


def _observed_values(program: Program, rows: Mapping[str, Any]) -> dict[str, Array]:
    trace, _ = run_model(program.model, rows, program.model_kwargs, row_plates=program.row_plates)
    for site in program.observed_sites:
        if not trace[site]["is_observed"]:
            raise ValueError(f"the data lack the outcome of site '{site}': only predictive() does without it.")
    return {site: trace[site]["value"] for site in program.observed_sites}


def _other_arrays(rows: Mapping[str, Any], observed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The data arrays that no observed site took as its value."""
    arrays = {name: np.asarray(values) for name, values in rows.items()}
    return {
        name: values
        for name, values in arrays.items()
        if not any(np.array_equal(values.astype(outcome.dtype), outcome) for outcome in observed.values())
    }


def _plate_dims(program: Program, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Dimension names by variable, after the model's plates."""
    dims = {name: list(plates) for name, plates in program.plates.items() if plates}
    if len(program.row_plates) == 1:
        dims |= {name: list(program.row_plates) for name in groups.get("constant_data", {}) if name not in dims}
    # A variable that bears the name of its own dimension would become that dimension's coordinate.
    return {name: names for name, names in dims.items() if name not in names}


def _relative_sample_size(log_ratios: np.ndarray) -> float:
    """Effective sample size of the importance weights over the number of draws."""
    weights = np.exp(log_ratios - log_ratios.max())
    return float(weights.sum() ** 2 / (weights**2).sum() / len(weights))


def _verdict(shape: float, relative_sample_size: float, num_samples: int) -> str:
    if relative_sample_size > NEARLY_EQUAL:  # k has no scale: it says nothing of a tail that hardly departs from one
        return "good. The importance weights are nearly equal: q is almost the posterior."
    if shape <= min(0.7, 1 - 1 / np.log10(num_samples)):
        return "good. Importance weights correct what is left of q's error."
    if shape <= 0.7:
        return f"too few draws to tell: take more than {num_samples}."
    if shape <= 1:
        return "doubtful. q misses part of the posterior; compare with NUTS, started from posterior.nuts()."
    return "bad. q misses much of the posterior; use it only to start NUTS (posterior.nuts())."


def _import_arviz() -> tuple[ModuleType, int]:
    try:
        import arviz
    except ImportError as error:
        raise ImportError("This needs ArviZ. Install it with: pip install arviz") from error
    return arviz, int(importlib.metadata.version("arviz").split(".")[0])
