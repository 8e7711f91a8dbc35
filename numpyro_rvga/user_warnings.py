"""Warnings that point at the user's line, however deep in this package they come up."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from types import FrameType

PACKAGE = str(Path(__file__).parent)


def warn(message: str) -> None:
    """A ``UserWarning`` at the nearest line that is not one of this package."""
    level = 2  # the caller's, as warnings.warn counts
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)
