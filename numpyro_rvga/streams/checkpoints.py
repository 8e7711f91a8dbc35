"""Checkpoints: a run that was stopped goes on as if it had not been."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .. import files

KIND = "checkpoint"
EVERY = 100_000  # rows
SIMILAR = 1e-4  # relative difference of densities that another version of XLA may make


class Checkpoint:
    """The file of one run, and which run that is.

    :param path: the file. The checkpoint before the last stays beside it, under the name ``<path>.previous``.
    :param every: rows between checkpoints.
    :param resume: whether to go on from a checkpoint that is there.
    :raises ValueError: for a folder that is not there, and a file at ``path`` that would be lost.
    """

    def __init__(self, path: str | os.PathLike, every: int, *, resume: bool):
        self._path = Path(path)
        self._previous = self._path.with_name(f"{self._path.name}.previous")
        if not self._path.absolute().parent.is_dir():
            raise ValueError(f"checkpoint={str(path)!r}: the folder {self._path.absolute().parent} does not exist.")
        if not resume and self._path.exists():
            raise ValueError(
                f"checkpoint={str(path)!r} exists: pass resume=True to go on from it, or delete it, or choose another "
                "name."
            )
        self.every, self._resume = every, resume
        self._run: dict[str, Any] = {}

    def read(self, run: Mapping[str, Any]) -> dict[str, Any] | None:
        """The contents of the last checkpoint; None if there is none to go on from.

        :param run: plain facts that tell this run from others; floating-point arrays may differ a little.
        :raises ValueError: if the file is damaged, newer than this version, no checkpoint, or that of another run.
        """
        self._run = dict(run)
        path = next((p for p in (self._path, self._previous) if p.exists()), None)
        if not self._resume or path is None:
            return None
        try:
            metadata, arrays = files.read(path, KIND)
        except ValueError as error:
            another = path == self._path and self._previous.exists()
            advice = (
                f" The checkpoint before it is {self._previous}: rename that to go on from there." if another else ""
            )
            raise ValueError(f"no run can go on from this checkpoint: {error}{advice}") from error
        contents = {name: files.decode(value, arrays) for name, value in metadata["contents"].items()}
        self._check_run(contents.pop("run"), path)
        return contents

    def write(self, contents: Mapping[str, Any]) -> None:
        """Replace the last checkpoint, atomically."""
        arrays: dict[str, np.ndarray] = {}
        encoded = {n: files.encode(v, n, arrays) for n, v in {**contents, "run": self._run}.items()}
        files.write(self._path, KIND, {"contents": encoded}, arrays, self._previous)

    def _check_run(self, found: Mapping[str, Any], path: Path) -> None:
        for name in {**found, **self._run}:
            theirs, ours = found.get(name), self._run.get(name)
            if isinstance(ours, np.ndarray) and isinstance(theirs, np.ndarray):
                same = ours.shape == theirs.shape and np.allclose(
                    ours, theirs, rtol=SIMILAR, atol=SIMILAR, equal_nan=True
                )
                difference = "differs"
            else:
                same, difference = theirs == ours, f"was {theirs!r} and is {ours!r}"
            if not same:
                raise ValueError(
                    f"{path} is the checkpoint of another run: {name} {difference}. Give what that run was given, or "
                    "choose another name."
                )
