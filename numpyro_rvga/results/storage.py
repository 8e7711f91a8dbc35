"""Posteriors in files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import files
from ..core.gaussians import FAMILIES
from ..core.gaussians.mixture import GaussianMixture
from ..core.recursion import Quadratic, State
from ..model import Program
from ..model.arguments import named_rows
from ..model.data_prior import PriorConstants

if TYPE_CHECKING:
    from .posterior import Posterior

STORED_FAMILIES = FAMILIES | {"mixture": GaussianMixture}


def save(posterior: Posterior, path: str | os.PathLike) -> None:
    """See :meth:`Posterior.save`."""
    arrays: dict[str, np.ndarray] = {}
    program = posterior.program
    keywords = {name: value for name, value in program.model_kwargs.items() if files.is_plain(value)}
    contents = {
        "family": next(name for name, kind in STORED_FAMILIES.items() if isinstance(posterior.gaussian, kind)),
        "gaussian": dataclasses.asdict(posterior.gaussian),
        "state": _stored_state(posterior.state),
        "elbo": None if posterior.elbo is None else float(posterior.elbo),
        "num_rows": int(posterior.num_rows),
        "info": posterior.info,
        "example_rows": program.example_rows,
        "model_kwargs": keywords,
        "improper_prior_scale": program.improper_prior_scale,
        "whole": program.whole,
        "params": program.params.values,
        "prior_constants": None if program.constants is None else _stored_constants(program.constants),
    }
    metadata = {
        "layout": _layout(program),
        "withheld_keywords": sorted(set(program.model_kwargs) - set(keywords)),
        "contents": {name: files.encode(value, name, arrays) for name, value in contents.items()},
    }
    files.write(path, "posterior", metadata, arrays)


def load(path: str | os.PathLike, model: Callable, **model_kwargs: Any) -> dict[str, Any]:
    """The fields of a posterior from a file; see :meth:`Posterior.load`."""
    metadata, arrays = files.read(path, "posterior")
    contents = {name: files.decode(value, arrays) for name, value in metadata["contents"].items()}
    missing = sorted(set(metadata["withheld_keywords"]) - set(model_kwargs))
    if missing:
        raise ValueError(f"{path} could not hold the model keywords {missing}: pass them to load as keywords.")
    keywords = contents.pop("model_kwargs") | model_kwargs
    try:
        rows = named_rows(model, contents.pop("example_rows"), keywords)
    except ValueError as error:
        raise ValueError(f"{path} belongs to a model with other arguments: {error}") from error
    options = [contents.pop(name) for name in ("improper_prior_scale", "whole", "params")]
    constants = _constants(contents.pop("prior_constants", None))
    program = Program.restore(model, rows, keywords, *options, constants)
    if _layout(program) != metadata["layout"]:
        raise ValueError(
            f"{path} belongs to another model: its latent sites are {_describe(metadata['layout'])}, "
            f"those of the given model {_describe(_layout(program))}."
        )
    gaussian = STORED_FAMILIES[contents.pop("family")](**contents.pop("gaussian"))
    return {"program": program, "gaussian": gaussian, "state": _state(contents.pop("state")), **contents}


def _stored_state(state: Any) -> dict | None:
    """What the Gaussian does not tell of a state: it is stored only if there is more to it."""
    if not isinstance(state, State) or state.prior_site is None:
        return None
    return state._asdict() | {"prior_site": state.prior_site._asdict()}


def _state(stored: Mapping[str, Any] | None) -> State | None:
    if stored is None:
        return None
    return jax.tree.map(jnp.asarray, State(**{**stored, "prior_site": Quadratic(**stored["prior_site"])}))


def _stored_constants(constants: PriorConstants) -> dict:
    return {"num_rows": constants.num_rows, "arrays": [list(arrays) for arrays in constants.arrays]}


def _constants(stored: Mapping[str, Any] | None) -> PriorConstants | None:
    if stored is None:
        return None
    return PriorConstants(stored["num_rows"], tuple(tuple(map(jnp.asarray, arrays)) for arrays in stored["arrays"]))


def _layout(program: Program) -> list[list]:
    return [[name, [int(length) for length in program.layout.shapes[name]]] for name in program.layout.site_names]


def _describe(layout: list[list]) -> str:
    return ", ".join(f"{name}{tuple(shape)}" for name, shape in layout)
