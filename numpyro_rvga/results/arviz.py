"""Posteriors for ArviZ 0.x and 1.x."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from scipy.special import logsumexp

from ..model import Program
from ..model.data.arrays import is_equal
from ..model.data.rows import Arrays, Data
from ..options import check_count
from ..user_warnings import warn
from . import prediction
from .fitted import Fitted
from .log_joint import are_equal, observed_values, rows_with_outcome


def to_arviz(
    posterior: Fitted,
    data: Data | None = None,
    *,
    rng_key: Array | None = None,
    num_samples: int = 1000,
    coords: Mapping[str, Any] | None = None,
    dims: Mapping[str, list[str]] | None = None,
) -> Any:
    """Convert to an ``arviz.InferenceData`` (ArviZ 0.x) or an ``xarray.DataTree`` (ArviZ 1.x).

    Draws from q are independent, so there is one chain: every variable has the leading shape ``(1, num_samples)``.
    The groups are ``posterior`` (latent sites and deterministic sites outside the row plate) and ``sample_stats``
    with ``log_q``, the log density of q in unconstrained space. With ``data`` also the rows' own latent sites in
    ``posterior``, where q sums over or integrates them out, ``log_p`` in ``sample_stats``
    (the log joint in unconstrained space, so that ``arviz.loo_approximate_posterior`` can be called with the two),
    ``log_likelihood``, ``posterior_predictive``, ``observed_data`` and ``constant_data``. Dimensions are named
    after the model's plates.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> result = posterior.to_arviz(data, num_samples=500)
        >>> dict(result["posterior"]["slopes"].sizes)
        {'chain': 1, 'draw': 500, 'slopes_dim_0': 2}
        >>> sorted(result["sample_stats"].data_vars)
        ['log_p', 'log_q']

    :param data: rows with their outcome, as :meth:`RVGA.run` takes them.
    :param rng_key: random key; ``jax.random.key(0)`` by default.
    :param num_samples: the number of draws.
    :param coords: coordinate values by dimension name.
    :param dims: dimension names by variable; these win over the names of the plates.
    :raises ImportError: if ArviZ is not installed.
    :raises ValueError: if ``data`` lack the outcome, and for names of ``coords`` and ``dims`` that do not exist.
    """
    _import_arviz()
    check_count("num_samples", num_samples)
    draw_key, predictive_key = jax.random.split(jax.random.key(0) if rng_key is None else rng_key)
    theta = posterior.sample_unconstrained(draw_key, (num_samples,))
    rows = None if data is None else rows_with_outcome(posterior.program, data)
    return converted(posterior, theta, rows, predictive_key, coords, dims)


def converted(
    posterior: Fitted,
    theta: Array,
    rows: Arrays | None,
    predictive_key: Array,
    coords: Mapping[str, Any] | None,
    dims: Mapping[str, list[str]] | None,
) -> Any:
    """Draws (n, P) as ArviZ has them."""
    from .. import __version__

    arviz, major = _import_arviz()
    program = posterior.program
    _check_names("dims", dims or {}, _variables(program))
    stats: dict[str, ArrayLike] = {"log_q": posterior.log_prob_unconstrained(theta)}
    sampled: dict[str, Mapping[str, ArrayLike]] = {
        "posterior": posterior.constrain(theta, rows),
        "sample_stats": stats,
    }
    fixed: dict[str, Mapping[str, ArrayLike]] = {}
    if rows is not None:
        chunks = list(posterior.log_densities.chunks(theta, rows))
        stats["log_p"] = posterior.log_densities.summed(theta, chunks)
        if program.likelihood_sites and program.factors_of_rows:
            named = ", ".join(map(repr, program.factors_of_rows))
            warn(
                f"log_likelihood has the observed sites. What numpyro.factor adds for each row ({named}) is left out: "
                "az.loo scores a part of the model. numpyro.infer.log_likelihood has these terms too."
            )
        sampled["log_likelihood"] = {site: _in_model_order(program, site, chunks) for site in program.likelihood_sites}
        names = {*program.observed_sites, *program.of_rows}
        of_rows = prediction.given_local_latents(posterior, predictive_key, rows, theta, names)
        outcomes = {name: of_rows.pop(name) for name in program.observed_sites if name in of_rows}
        sampled["posterior"] = {**sampled["posterior"], **of_rows}
        sampled["posterior_predictive"] = outcomes or prediction.at_draws(posterior, predictive_key, rows, theta)
        fixed["observed_data"] = jax.device_get(program.jitted(partial(observed_values, program), rows))
        fixed["constant_data"] = _other_arrays(program, rows, fixed["observed_data"])
    groups = {group: {name: np.asarray(v)[None] for name, v in values.items()} for group, values in sampled.items()}
    groups |= {group: {name: np.asarray(v) for name, v in values.items()} for group, values in fixed.items() if values}
    labels = {"coords": coords, "dims": {**_plate_dims(program, groups), **(dims or {})}}
    _check_names("coords", coords or {}, _dimensions(program, groups, labels["dims"]))
    attributes = {"inference_library": "numpyro_rvga", "inference_library_version": __version__}
    if major == 0:
        return arviz.from_dict(**groups, attrs=attributes, posterior_attrs=attributes, **labels)
    return arviz.from_dict(groups, attrs={"/": attributes, "posterior": attributes}, **labels)


def _check_names(argument: str, given: Mapping[str, Any], names: set[str]) -> None:
    """:raises ValueError: naming a key that ArviZ would ignore."""
    others = [name for name in given if name not in names]
    if others:
        what = "variable" if argument == "dims" else "dimension"
        raise ValueError(
            f"{argument} has a key {others[0]!r}, and there is no {what} of that name: the {what}s are "
            f"{', '.join(sorted(names))}."
        )


def _variables(program: Program) -> set[str]:
    """Names that variables may have, with data or without."""
    computed = program.deterministic.of_latents | program.deterministic.of_data | program.deterministic.of_rows
    return {*program.sites, *computed, *program.likelihood_sites, *program.example_rows, "log_p", "log_q"}


def _dimensions(
    program: Program, groups: Mapping[str, Mapping[str, np.ndarray]], dims: Mapping[str, list[str]]
) -> set[str]:
    """Names that dimensions may have: given, of plates, and those that ArviZ gives to the others."""
    named = {"chain", "draw"}.union(*program.plates.values(), *dims.values())
    for group, values in groups.items():
        lead = 0 if group in ("observed_data", "constant_data") else 2
        for name, array in values.items():
            named |= {f"{name}_dim_{axis}" for axis in range(len(dims.get(name, ())), array.ndim - lead)}
    return named


def smoothed(log_ratios: np.ndarray) -> tuple[np.ndarray, float]:
    """Normalized log weights of importance ratios, their tail smoothed, and the Pareto k (Vehtari et al. 2024)."""
    arviz, major = _import_arviz()
    if are_equal(log_ratios):
        return log_ratios - logsumexp(log_ratios), 0.0
    if major == 0:
        log_weights, shape = arviz.psislw(log_ratios)
    else:
        from arviz_stats.base import array_stats

        log_weights, shape = array_stats.psislw(-log_ratios)
    return np.asarray(log_weights) - logsumexp(log_weights), float(shape)


def _in_model_order(program: Program, site: str, chunks: list[dict[str, np.ndarray]]) -> np.ndarray:
    """All rows of a site, with the row axis where the model's plates have it and not in front of the elements."""
    terms = np.concatenate([chunk[site] for chunk in chunks], axis=1)
    return np.moveaxis(terms, 1, min(1 + program.row_axis(site), terms.ndim - 1))


def _other_arrays(program: Program, rows: Arrays, observed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The data arrays that no observed site took as its value, as they are or with the row axis elsewhere."""
    forms = list(observed.values())
    forms += [np.moveaxis(value, program.row_axis(site), 0) for site, value in observed.items() if np.ndim(value)]
    arrays = {name: np.asarray(values) for name, values in rows.items()}
    return {name: values for name, values in arrays.items() if not any(is_equal(values, form) for form in forms)}


def _plate_dims(program: Program, groups: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Dimension names by variable, after the model's plates. To ArviZ, a data array and a site of one name are one
    variable: they have these names only if they agree."""
    dims = {name: list(plates) for name, plates in program.plates.items()}
    of_arrays = list(program.row_plates) if len(program.row_plates) == 1 else []
    for name in groups.get("constant_data", {}):
        dims[name] = of_arrays if dims.get(name, of_arrays) == of_arrays else []
    # A variable that bears the name of its own dimension would become that dimension's coordinate.
    return {name: names for name, names in dims.items() if names and name not in names}


def _import_arviz() -> tuple[ModuleType, int]:
    try:
        import arviz
    except ImportError as error:
        raise ImportError("This needs ArviZ. Install it with: pip install arviz") from error
    return arviz, int(importlib.metadata.version("arviz").split(".")[0])
