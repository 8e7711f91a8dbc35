"""Results as JSON, with what is needed to read them later; pictures are drawn from the file alone."""

from __future__ import annotations

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import jax
import numpyro

import numpyro_rvga


def about() -> dict[str, Any]:
    """Versions and machine."""
    versions = {m.__name__: m.__version__ for m in (jax, numpyro, numpyro_rvga)}
    machine = {"processor": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    return {"versions": versions, "python": platform.python_version(), "device": jax.default_backend()} | machine


def write(cases: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """Save the cases so far; what was saved."""
    results = about() | {"cases": cases}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1))
    return results


def parser(description: str, *, drawn: bool = False) -> argparse.ArgumentParser:
    """With the options that all benchmarks share.

    :param drawn: whether there is a picture, which ``--draw`` makes anew.
    """
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--output", type=Path, default=Path("figures"), help="folder for results, as JSON, and pictures")
    if drawn:
        made.add_argument("--draw", type=Path, help="draw the picture of this file and do no more")
    return made


class Report:
    """Lines of results, printed as they come and kept as JSON.

    :param path: of the file.
    """

    def __init__(self, path: Path):
        self._path, self._lines = path, []

    def __call__(self, **values: Any) -> None:
        def shown(value):
            if isinstance(value, bool) or value is None:
                return str(value)
            return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value

        print("  ".join(f"{name} {shown(value)}" for name, value in values.items()), flush=True)
        self._lines.append(values)
        write(self._lines, self._path)
