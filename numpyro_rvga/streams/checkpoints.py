"""Checkpoints: a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from .. import files
from ..model.identity import ModelIdentity
from ..options import Info

KIND = "checkpoint"
EVERY = 100_000  # rows
LONGEST = 60  # characters of a fact that messages show
SIMILAR = 1e-4  # relative difference of densities that another version of XLA may make


class Checkpoint:
    """The file of one run, and which run that is.

    :param path: the file, or a symbolic link to it. The checkpoint before the last stays beside it, under the name
        ``<path>.previous``.
    :param every: rows between checkpoints.
    :param resume: whether to go on from a checkpoint that is there.
    :raises ValueError: for a folder that is not there or cannot be written to, for files that would be lost, and while
        another run writes to it.
    """

    def __init__(self, path: str | os.PathLike, every: int, *, resume: bool):
        self._path = Path(os.path.realpath(path))
        self._previous = self._path.with_name(f"{self._path.name}.previous")
        if not self._path.parent.is_dir():
            raise ValueError(f"checkpoint={str(path)!r}: the folder {self._path.parent} does not exist.")
        for file in (self._path, self._previous):
            if not resume and file.exists():
                raise ValueError(
                    f"checkpoint={str(path)!r}: {file} exists: pass resume=True to go on from it, or delete it, or "
                    "choose another name."
                )
        try:
            with self.held():
                pass
        except OSError as error:
            raise ValueError(f"checkpoint={str(path)!r} cannot be written: {error}.") from error
        self.every, self._resume = every, resume
        self._run: dict[str, Any] = {}

    def held(self) -> AbstractContextManager[None]:
        """While it lasts, no other run writes to this file; see :func:`~numpyro_rvga.files.locked`."""
        return files.locked(self._path)

    def read(self, run: Info, model: ModelIdentity) -> Info | None:
        """The contents of the last checkpoint; None if there is none to go on from.

        :param run: plain facts that determine the result; floating-point arrays may differ a little.
        :param model: the run's model.
        :raises ValueError: if the file is damaged, newer than this version, no checkpoint, or that of another run; and
            if what lies at ``<path>.previous`` is, which would be lost.
        """
        self._run = {**run, "model": model._asdict()}
        present = [path for path in (self._path, self._previous) if path.exists()]
        if not self._resume or not present:
            return None
        contents = self._contents_of(present[0])
        for other in present[1:]:
            try:
                self._contents_of(other)
            except ValueError as error:
                raise ValueError(f"{other} would be overwritten: move it, or delete it. ({error})") from error
        return contents

    def write(self, contents: Info) -> None:
        """Replace the last checkpoint, atomically."""
        arrays: dict[str, np.ndarray] = {}
        encoded = {n: files.encode(v, n, arrays) for n, v in {**contents, "run": self._run}.items()}
        files.write(self._path, KIND, {"contents": encoded}, arrays, self._previous)

    def refuse(self, difference: str) -> NoReturn:
        """:raises ValueError: always: the checkpoint is that of another run."""
        raise ValueError(
            f"{self._path} is the checkpoint of another run: {difference}. Give what that run was given, or choose "
            "another name."
        )

    def _contents_of(self, path: Path) -> Info:
        """:raises ValueError: for files that are not this run's."""
        try:
            metadata, arrays = files.read(path, KIND)
            contents = {name: files.decode(value, arrays) for name, value in metadata["contents"].items()}
            run = contents.pop("run")
            model = ModelIdentity(**run.pop("model"))
            missing = {"state", "done", "left_out", "notes", "rows", "absorbed"} - set(contents)
            if missing:
                raise KeyError(*missing)
        except (ValueError, *files.MALFORMED) as error:
            reason = str(error) if isinstance(error, ValueError) else f"{path} does not hold what a checkpoint does."
            another = path == self._path and self._previous.exists()
            advice = (
                f" The checkpoint before it is {self._previous}: rename that to go on from there." if another else ""
            )
            raise ValueError(f"no run can go on from this checkpoint: {reason}{advice}") from error
        self._check_run(run, model)
        return contents

    def _check_run(self, stored: Info, model: ModelIdentity) -> None:
        options = {name: value for name, value in self._run.items() if name != "model"}
        for name in {**stored, **options}:
            theirs, ours = stored.get(name), options.get(name)
            if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
                same = ours.shape == theirs.shape and np.allclose(
                    ours, theirs, rtol=SIMILAR, atol=SIMILAR, equal_nan=True
                )
                difference = "differs"
            else:
                same, short = theirs == ours, max(len(repr(theirs)), len(repr(ours))) <= LONGEST
                difference = f"was {theirs!r} and is {ours!r}" if short else "differs"
            if not same:
                self.refuse(f"{name} {difference}")
        difference = model.difference(ModelIdentity(**self._run["model"]))
        if difference is not None:
            self.refuse(difference)


def plain_arrays(state: Any) -> list[np.ndarray]:
    """The arrays of a state, keys of random numbers as their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in map(jnp.asarray, jax.tree.leaves(state))]


def fingerprint(array: np.ndarray) -> list[float]:
    """Numbers that change if the array does, and hardly by rounding."""
    flat = np.ravel(array).astype(np.float64)
    return [float(x) for x in (flat.sum(), np.abs(flat).sum(), np.dot(flat, np.cos(np.arange(len(flat)))))]


def state_from_arrays(arrays: list[np.ndarray], like: Any) -> Any:
    """A state from its arrays.

    :raises ValueError: for arrays of another form.
    """
    leaves, structure = jax.tree.flatten(like)
    forms = [(x.shape, x.dtype) for x in plain_arrays(like)]
    if [(x.shape, x.dtype) for x in arrays] != forms:
        raise ValueError("the checkpoint holds a state of another form than this run's.")

    def restored(array, leaf):
        leaf = jnp.asarray(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(jnp.asarray(array), impl=jax.random.key_impl(leaf))
        return jnp.asarray(array)

    return jax.tree.unflatten(structure, [restored(a, leaf) for a, leaf in zip(arrays, leaves)])
