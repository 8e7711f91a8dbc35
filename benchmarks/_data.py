"""Data files, read by the Python files beside them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType


def load_module(folder: str, name: str = "load") -> ModuleType:
    """A folder's load.py, or another of its files."""
    spec = importlib.util.spec_from_file_location(f"data_{name}", Path(folder) / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
