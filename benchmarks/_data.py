"""Data files, read by the load.py beside them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType


def load_module(folder: str) -> ModuleType:
    """A folder's load.py."""
    spec = importlib.util.spec_from_file_location("load", Path(folder) / "load.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
