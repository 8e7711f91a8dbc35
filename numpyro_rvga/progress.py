"""Progress bars."""

from __future__ import annotations

from typing import Any


def progress(enabled: bool, total: int | None, name: str, unit: str) -> Any:
    """A progress bar."""
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=unit, unit_scale=True, disable=not enabled, desc=name)
