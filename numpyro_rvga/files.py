"""Files of plain arrays and a JSON text: one .npz, written atomically and checked when read."""

from __future__ import annotations

import hashlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

FORMAT_VERSION = 1
METADATA = "metadata"
DIGEST = "digest"


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
    members: dict[str, Any] = {METADATA: np.array(text), **arrays}
    members[DIGEST] = np.array(digest(members))
    try:
        with open(temporary, "xb") as file:
            np.savez(file, **members)
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


def is_plain(value: Any) -> bool:
    try:
        encode(value, "", {})
    except ValueError:
        return False
    return True


def digest(members: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of arrays and their names and forms: the archive's own checksums leave the latter out."""
    found = hashlib.sha256()
    for name in sorted(members):
        array = np.ascontiguousarray(members[name])
        found.update(repr((name, array.dtype.str, members[name].shape)).encode())
        found.update(array.view(np.uint8).data if array.size and array.dtype.kind != "U" else array.tobytes())
    return found.hexdigest()
