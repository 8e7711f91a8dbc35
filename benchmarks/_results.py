"""Results as JSON, with what is needed to read them later; pictures are drawn from the file alone."""

from __future__ import annotations

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
