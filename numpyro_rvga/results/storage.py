"""Posteriors in files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np

from .. import files
from ..core.gaussians import FAMILIES
from ..core.gaussians.mean_field import MeanField
from ..core.gaussians.mixture import GaussianMixture
from ..core.gaussians.packed_roots import PackedRoots
from ..core.matrices.chains import ChainPacking
from ..core.matrices.packing import BorderPattern, Packing
from ..core.pytrees import in_precision
from ..core.updates.state import CanonicalGaussian, Count, State
from ..model import Program
from ..model.data.arguments import named_rows, whole_data
from ..model.data.row_set import RowSet
from ..model.half_lines import read_on_positive_half
from ..model.handlers.data_prior import PriorConstants
from ..model.identity import ModelIdentity
from ..model.terms.local_sites import RowFacts
from ..options import Info
from .fitted import Fitted

P = TypeVar("P", bound=Fitted)
# Stored as they are.
PLAIN = "model_kwargs example_rows improper_prior_scale whole evaluates params elbo num_rows info".split()
STORED_FAMILIES = FAMILIES | {"mixture": GaussianMixture, "by site": MeanField}


def save(posterior: Fitted, path: str | os.PathLike) -> None:
    """Write to one file, atomically: an interrupted or failed call leaves what was at ``path`` as it was.

    The file holds plain arrays and a JSON text, and nothing executable. A model keyword whose value is not plain
    (an array, None, bool, number, string, or a list, tuple or dict of these) is stored by name alone, and
    :meth:`load` will ask for it. The method that made the posterior is not stored.

    **Example**

    With the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from pathlib import Path
        >>> posterior.save("posterior.npz")
        >>> Path("posterior.npz").exists()
        True

    :param path: the file to write, under exactly this name.
    :raises ValueError: if ``posterior.info`` holds a value that is not plain.
    """
    arrays: dict[str, np.ndarray] = {}
    program, gaussian = posterior.program, cast(Any, posterior.gaussian)
    keywords = {name: value for name, value in program.model_kwargs.items() if files.is_plain(value)}
    contents = {
        "family": next(name for name, kind in STORED_FAMILIES.items() if isinstance(posterior.gaussian, kind)),
        "gaussian": dataclasses.asdict(gaussian),
        "state": _stored_state(posterior.state),
        "elbo": None if posterior.elbo is None else float(posterior.elbo),
        "num_rows": int(posterior.num_rows),
        "info": posterior.info,
        "example_rows": program.example_rows,
        "model_kwargs": keywords,
        "improper_prior_scale": program.improper_prior_scale,
        "whole": program.whole,
        "evaluates": program.evaluates,
        "params": program.params.values,
        "row_sets": [[run.num_rows, f"{run.digest:016x}"] for run in posterior.row_sets],
        "model": program.identity._asdict(),
        "prior_constants": None if program.constants is None else program.constants._asdict(),
        "row_facts": None if program.row_facts is None else program.row_facts._asdict(),
    }
    metadata = {
        "layout": _layout(program),
        "withheld_keywords": sorted(set(program.model_kwargs) - set(keywords)),
        "contents": {name: files.encode(value, name, arrays) for name, value in contents.items()},
    }
    files.write(path, "posterior", metadata, arrays)


def load(cls: type[P], path: str | os.PathLike, model: Callable, **model_kwargs: Any) -> P:
    """Read what :meth:`save` wrote.

    **Example**

    With the model and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import Posterior
        >>> posterior.save("posterior.npz")
        >>> again = Posterior.load("posterior.npz", model)
        >>> bool((again.mean == posterior.mean).all()), again.num_rows
        (True, 200)

    :param path: the file.
    :param model: the model that the posterior was made for.
    :param model_kwargs: model keywords that the file could not hold; others replace those in the file.
    :return: the posterior, which takes in more rows as the ``init`` of a method's ``run``.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if the file is damaged, no posterior of this package, written by a newer version, lacks a
        model keyword, or belongs to another model: with other arguments, latent sites, priors or likelihoods.
    """
    stored = _read(path)
    missing = sorted(set(stored["withheld_keywords"]) - set(model_kwargs))
    if missing:
        raise ValueError(f"{path} could not hold the model keywords {missing}: pass them to load as keywords.")
    keywords, whole, layout = {**stored["model_kwargs"], **model_kwargs}, stored["whole"], stored["layout"]
    try:
        rows = (
            whole_data(model, stored["example_rows"], keywords)[0]
            if whole
            else named_rows(model, stored["example_rows"], keywords)
        )
    except ValueError as error:
        raise ValueError(f"{path} belongs to a model with other arguments: {error}") from error
    options = {name: stored[name] for name in ("improper_prior_scale", "whole", "evaluates", "params", "row_facts")}
    options |= {"constants": stored["prior_constants"], "local": "prior" if stored["row_facts"] is None else "marginal"}
    if not whole:  # whole models take NumPy's arrays or JAX's, as they did in their run
        rows = {name: np.asarray(array) for name, array in rows.items()}
    program, _ = read_on_positive_half(model, lambda model: Program(model, rows, keywords, **options))
    if _layout(program) != layout:
        raise ValueError(
            f"{path} belongs to another model: its latent sites are {_describe(layout)}, "
            f"those of the given model {_describe(_layout(program))}."
        )
    if not set(model_kwargs) & set(stored["model_kwargs"]):  # who replaces a keyword asks for another model
        difference = stored["model"].difference(program.identity)
        if difference is not None:
            raise ValueError(f"{path} belongs to another model than the given one: {difference}.")
    fields = {name: stored[name] for name in ("elbo", "num_rows", "info", "row_sets")}
    moments = {name: in_precision(stored[name], program.dtype) for name in ("gaussian", "state")}
    return cls(program=program, **moments, **fields)


def _read(path: str | os.PathLike) -> Info:
    """The contents of a file that :func:`save` wrote, by name.

    :raises ValueError: if the file is no posterior's.
    """
    metadata, arrays = files.read(path, "posterior")
    try:
        stored: Info = {name: files.decode(value, arrays) for name, value in metadata["contents"].items()}
        row_facts = stored["row_facts"]
        return {name: stored[name] for name in PLAIN} | {
            "layout": metadata["layout"],
            "withheld_keywords": metadata["withheld_keywords"],
            "prior_constants": _constants(stored["prior_constants"]),
            "row_facts": None if row_facts is None else RowFacts(**row_facts),
            "model": ModelIdentity(**stored["model"]),
            "gaussian": _gaussian(stored["family"], stored["gaussian"]),
            "state": _state(stored["state"]),
            "row_sets": tuple(RowSet(count, int(digest, 16)) for count, digest in stored["row_sets"]),
        }
    except files.MALFORMED as error:
        raise ValueError(f"{path} is damaged, or not a posterior that numpyro_rvga wrote: {error!r}.") from error


def _gaussian(family: str, fields: Info) -> Any:
    """A Gaussian of a family by its name."""
    kind, roots = STORED_FAMILIES[family], fields.get("roots")
    if kind is MeanField:
        return MeanField.from_fields(fields)
    if isinstance(roots, dict):  # of a mixture, packed
        fields = fields | {"roots": PackedRoots(**roots | {"packing": _packing(roots["packing"])})}
    return kind(**fields)


def _packing(fields: Info) -> Packing | ChainPacking:
    if "block" in fields:
        return ChainPacking(**fields)
    made: Info = {"pattern": None if fields["pattern"] is None else BorderPattern(*fields["pattern"])}
    return Packing(**fields | made)


def _stored_state(state: Any) -> dict | None:
    """A state, if there is more to it than its Gaussian."""
    if not isinstance(state, State) or state.prior_factor is None:
        return None
    return state._asdict() | {"prior_factor": state.prior_factor._asdict(), "num_rows": int(state.num_rows)}


def _state(stored: Info | None) -> State | None:
    if stored is None:
        return None
    made: Info = {"prior_factor": CanonicalGaussian(**stored["prior_factor"]), "num_rows": Count.of(stored["num_rows"])}
    return jax.tree.map(jnp.asarray, State(**stored | made))


def _constants(stored: Info | None) -> PriorConstants | None:
    if stored is None:
        return None
    first, second = (tuple(map(jnp.asarray, arrays)) for arrays in stored["arrays"])
    return PriorConstants(stored["num_rows"], (first, second))


def _layout(program: Program) -> list[list]:
    return [[name, [int(length) for length in program.layout.shapes[name]]] for name in program.layout.site_names]


def _describe(layout: list[list]) -> str:
    return ", ".join(f"{name}{tuple(shape)}" for name, shape in layout)
