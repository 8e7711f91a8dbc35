"""Files of plain arrays and a JSON text: one .npz, written atomically and checked when read."""

from __future__ import annotations

import glob
import hashlib
import json
import math
import os
import uuid
import zipfile
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .options import Info

try:
    import fcntl
except ImportError:  # not on Windows
    fcntl = None

FORMAT_VERSION = 1
METADATA = "metadata"
DIGEST = "digest"
MALFORMED = (KeyError, TypeError, AttributeError, IndexError)  # what contents of another form than expected raise
RANDOM_NAME = 32  # hexadecimal digits at the end of a temporary file's name


@contextmanager
def locked(path: Path) -> Generator[None]:
    """While it lasts, no other run, of this process or another, holds the lock of ``path``, a file beside it. A process
    that is killed frees it. Where the operating system knows no such locks, as Windows does not, nothing is checked.

    :raises ValueError: if another holds it.
    """
    lock = path.with_name(f".{path.name}.lock")
    with open(lock, "a+b") as file:
        file.seek(0)
        owner = file.read().decode(errors="replace")
        if owner and not owner.isdigit():
            raise ValueError(f"{lock} is another program's: move it, or choose another name than {path}.")
        if not _try_lock(file) or not lock.exists() or not os.path.samestat(os.fstat(file.fileno()), lock.stat()):
            raise ValueError(
                f"{path} is being written by another run (process {owner or 'unknown'}): wait for it, stop it, or "
                "choose another name."
            )
        try:
            file.truncate(0)
            file.write(str(os.getpid()).encode())
            file.flush()
            yield
        finally:
            lock.unlink(missing_ok=True)


def _try_lock(file: Any) -> bool:
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def write(
    path: str | os.PathLike,
    kind: str,
    metadata: Info,
    arrays: Mapping[str, np.ndarray],
    previous: Path | None = None,
) -> None:
    """Write arrays and JSON metadata to one .npz file: to a temporary file first, which then takes the name ``path``.
    A symbolic link stays one. Temporary files that killed processes have left are removed.

    :param path: the file to write, under exactly this name.
    :param kind: what the file holds; :func:`read` asks for it.
    :param metadata: what ``json.dumps`` takes.
    :param arrays: arrays by name, none of dtype object.
    :param previous: the name that a file already at ``path`` is given; None: it is replaced.
    """
    target = Path(os.path.realpath(path))
    _remove_abandoned(target)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    text = json.dumps({"kind": f"numpyro_rvga {kind}", "format_version": FORMAT_VERSION, **metadata})
    members: dict[str, Any] = {METADATA: np.array(text), **arrays}
    members[DIGEST] = np.array(digest(members))
    try:
        with open(temporary, "xb") as file:
            _try_lock(file)  # a sign of life
            np.savez(file, **members)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and target.exists():
            os.replace(target, previous)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def _remove_abandoned(target: Path) -> None:
    """Temporary files of the same target that nobody is writing any more."""
    for path in target.parent.glob(f".{glob.escape(target.name)}.{'[0-9a-f]' * RANDOM_NAME}"):
        try:
            with open(path, "rb") as file:
                if fcntl is not None and _try_lock(file):
                    path.unlink(missing_ok=True)
        except FileNotFoundError:  # it has got its name just now
            continue


def read(path: str | os.PathLike, kind: str) -> tuple[Info, dict[str, np.ndarray]]:
    """Read what :func:`write` wrote.

    :param path: the file.
    :param kind: the kind that was given to :func:`write`.
    :return: metadata and arrays.
    :raises FileNotFoundError: if there is no such file.
    :raises ValueError: if the file is damaged, of another kind, or written by a newer version.
    """
    with open(path, "rb") as file:
        try:
            _check_sizes(file)
            with np.load(file, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
            intact = str(arrays.pop(DIGEST)) == digest(arrays)
            metadata = json.loads(str(arrays.pop(METADATA)))
            stored_kind, version = metadata.pop("kind"), metadata.pop("format_version")
        except Exception as error:  # A damaged archive can raise nearly anything.
            raise ValueError(f"{path} is damaged, or not a file that numpyro_rvga wrote.") from error
    if not intact:
        raise ValueError(f"{path} is damaged: its contents are not those that were written.")
    if stored_kind != f"numpyro_rvga {kind}":
        raise ValueError(f"{path} holds a {stored_kind}, not a numpyro_rvga {kind}.")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"{path} has format version {version}; this one reads up to {FORMAT_VERSION}: update numpyro_rvga."
        )
    return metadata, arrays


def _check_sizes(file: Any) -> None:
    """Arrays are read only if they are as large as the file says, and stored as they are.

    :raises ValueError: for others, which may be small in the file and huge in memory.
    """
    length = file.seek(0, os.SEEK_END)
    file.seek(0)
    with zipfile.ZipFile(file) as archive:
        if sum(info.file_size for info in archive.infolist()) > length:
            raise ValueError("the archive is compressed, or its parts overlap.")
        for info in archive.infolist():
            with archive.open(info) as member:
                version = np.lib.format.read_magic(member)
                header = getattr(np.lib.format, f"read_array_header_{version[0]}_0")
                shape, _, dtype = header(member)
                if dtype.hasobject or math.prod(shape) * dtype.itemsize != info.file_size - member.tell():
                    raise ValueError(f"{info.filename} is not as large as its header says.")
    file.seek(0)


def encode(value: object, name: str, arrays: dict[str, np.ndarray]) -> Any:
    """A JSON value that stands for ``value``, whose arrays go to ``arrays`` under names that begin with ``name``."""
    if isinstance(value, np.generic) and value.dtype.kind in "biufcUS":
        arrays[name] = np.asarray(value)
        return {"number": name}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"scalar": value}
    if isinstance(value, (np.ndarray, jax.Array)) and np.asarray(value).dtype.kind in "biufcUS":
        arrays[name] = np.asarray(value)
        return {"jax" if isinstance(value, jax.Array) else "array": name}
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item, f"{name}/{key}", arrays) for key, item in value.items()}}
    if isinstance(value, (list, tuple)):
        items = [encode(item, f"{name}/{index}", arrays) for index, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    raise ValueError(f"{name} of type {type(value).__name__} cannot be stored in a file of plain arrays.")


def decode(encoded: Info, arrays: Mapping[str, np.ndarray]) -> Any:
    ((kind, value),) = encoded.items()
    if kind == "array":
        return arrays[value]
    if kind == "number":
        return arrays[value][()]
    if kind == "jax":
        return jnp.asarray(arrays[value])
    if kind == "dict":
        return {key: decode(item, arrays) for key, item in value.items()}
    if kind in ("list", "tuple"):
        items = [decode(item, arrays) for item in value]
        return tuple(items) if kind == "tuple" else items
    return value


def is_plain(value: object) -> bool:
    try:
        encode(value, "", {})
    except ValueError:
        return False
    return True


def digest(members: Mapping[str, np.ndarray]) -> str:
    """SHA-256 of arrays and their names and forms: the archive's own checksums leave the latter out."""
    hasher = hashlib.sha256()
    for name in sorted(members):
        array = np.ascontiguousarray(members[name])
        hasher.update(repr((name, array.dtype.str, members[name].shape)).encode())
        hasher.update(array.view(np.uint8).data if array.size and array.dtype.kind != "U" else array.tobytes())
    return hasher.hexdigest()
