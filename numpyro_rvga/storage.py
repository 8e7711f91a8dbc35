"""Posteriors in files: one .npz of plain arrays and a JSON text, written atomically and checked when read."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from .core.gaussians import FAMILIES
from .core.recursion import Quadratic, State
from .model import Program
from .model.arguments import named_rows

if TYPE_CHECKING:
    from .posterior import Posterior

FORMAT_VERSION = 1
METADATA = "metadata"
DIGEST = "digest"


def save(posterior: Posterior, path: str | os.PathLike) -> None:
    """Write a posterior to one file, atomically: an interrupted or failed call leaves what was at ``path`` as it was.

    The file holds plain arrays and a JSON text, and nothing executable. A model keyword whose value is not plain (an
    array, None, bool, number, string, or a list, tuple or dict of these) is stored by name alone, and :func:`load` will
    ask for it. The method that made the posterior is not stored.

    :param posterior: the posterior.
    :param path: the file to write, under exactly this name.
    :raises ValueError: if ``posterior.info`` holds a value that is not plain.
    """
    arrays: dict[str, np.ndarray] = {}
    program = posterior.program
    keywords = {name: value for name, value in program.model_kwargs.items() if _is_plain(value)}
    contents = {
        "family": next(name for name, kind in FAMILIES.items() if isinstance(posterior.gaussian, kind)),
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
    }
    metadata = {
        "layout": _layout(program),
        "withheld_keywords": sorted(set(program.model_kwargs) - set(keywords)),
        "contents": {name: encode(value, name, arrays) for name, value in contents.items()},
    }
    write(path, "posterior", metadata, arrays)


def load(path: str | os.PathLike, model: Callable, **model_kwargs: Any) -> dict[str, Any]:
    """Read what :func:`save` wrote.

    :param path: the file.
    :param model: the model that the posterior was made for.
    :param model_kwargs: model keywords that the file could not hold; others replace those in the file.
    :return: the fields of a posterior.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if the file is damaged, no posterior of this package, written by a newer version, lacks a model
        keyword, or belongs to a model with other arguments or other latent sites.
    """
    metadata, arrays = read(path, "posterior")
    contents = {name: decode(value, arrays) for name, value in metadata["contents"].items()}
    missing = sorted(set(metadata["withheld_keywords"]) - set(model_kwargs))
    if missing:
        raise ValueError(f"{path} could not hold the model keywords {missing}: pass them to load as keywords.")
    keywords = contents.pop("model_kwargs") | model_kwargs
    try:
        rows = named_rows(model, contents.pop("example_rows"), keywords)
    except ValueError as error:
        raise ValueError(f"{path} belongs to a model with other arguments: {error}") from error
    options = [contents.pop(name) for name in ("improper_prior_scale", "whole", "params")]
    program = Program.restore(model, rows, keywords, *options)
    if _layout(program) != metadata["layout"]:
        raise ValueError(
            f"{path} belongs to another model: its latent sites are {_describe(metadata['layout'])}, "
            f"those of the given model {_describe(_layout(program))}."
        )
    gaussian = FAMILIES[contents.pop("family")](**contents.pop("gaussian"))
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


def write(
    path: str | os.PathLike,
    kind: str,
    metadata: Mapping[str, Any],
    arrays: Mapping[str, np.ndarray],
    previous: Path | None = None,
) -> None:
    """Write arrays and JSON metadata to one .npz file: to a temporary file first, which then takes the name ``path``.

    :param path: the file to write, under exactly this name.
    :param kind: what the file holds; :func:`read` asks for it.
    :param metadata: what ``json.dumps`` takes.
    :param arrays: arrays by name, none of dtype object.
    :param previous: the name that a file already at ``path`` is given; None: it is replaced.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    text = json.dumps({"kind": f"numpyro_rvga {kind}", "format_version": FORMAT_VERSION, **metadata})
    members = {METADATA: np.array(text), **arrays}
    try:
        with open(temporary, "xb") as file:
            np.savez(file, **{DIGEST: np.array(digest(members))}, **members)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and target.exists():
            os.replace(target, previous)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def read(path: str | os.PathLike, kind: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Read what :func:`write` wrote.

    :param path: the file.
    :param kind: the kind that was given to :func:`write`.
    :return: metadata and arrays.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if the file is damaged, of another kind, or written by a newer version.
    """
    with open(path, "rb") as file:
        try:
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            intact = str(arrays.pop(DIGEST)) == digest(arrays)
            metadata = json.loads(str(arrays.pop(METADATA)))
            found = metadata.pop("kind"), metadata.pop("format_version")
        except Exception as error:  # A damaged archive can raise nearly anything.
            raise ValueError(f"{path} is damaged, or not a file that numpyro_rvga wrote.") from error
    if not intact:
        raise ValueError(f"{path} is damaged: its contents are not those that were written.")
    if found[0] != f"numpyro_rvga {kind}":
        raise ValueError(f"{path} holds a {found[0]}, not a numpyro_rvga {kind}.")
    if found[1] > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {found[1]}; this one reads up to {FORMAT_VERSION}: update numpyro_rvga."
        )
    return metadata, arrays


def digest(members: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of arrays and their names and forms: the archive's own checksums leave the latter out."""
    found = hashlib.sha256()
    for name in sorted(members):
        array = np.ascontiguousarray(members[name])
        found.update(repr((name, array.dtype.str, members[name].shape)).encode())
        found.update(array.view(np.uint8) if array.size and array.dtype.kind != "U" else array.tobytes())
    return found.hexdigest()


def _layout(program: Program) -> list[list]:
    return [[name, [int(length) for length in program.layout.shapes[name]]] for name in program.layout.site_names]


def _describe(layout: list[list]) -> str:
    return ", ".join(f"{name}{tuple(shape)}" for name, shape in layout)


def encode(value: Any, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """A JSON value that stands for ``value``, whose arrays go to ``arrays`` under names that begin with ``name``."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"scalar": value}
    if isinstance(value, (np.ndarray, jax.Array)) and np.asarray(value).dtype.kind in "biufcUS":
        arrays[name] = np.asarray(value)
        return {"array": name}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, f"{name}/{key}", arrays) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}/{index}", arrays) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise ValueError(f"{name} of type {type(value).__name__} cannot be stored in a file of plain arrays.")


def decode(encoded: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Any:
    ((kind, value),) = encoded.items()
    if kind == "array":
        return arrays[value]
    if kind == "dict":
        return {key: decode(item, arrays) for key, item in value.items()}
    if kind in ("list", "tuple"):
        items = [decode(item, arrays) for item in value]
        return tuple(items) if kind == "tuple" else items
    return value


def _is_plain(value: Any) -> bool:
    try:
        encode(value, "", {})
    except ValueError:
        return False
    return True
