"""Progress bars."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol


class Bar(Protocol):
    """The part of tqdm's progress bar that is used."""

    def update(self, n: float = 1, /) -> Any: ...

    def set_postfix(self, *, refresh: bool, **shown: str) -> None: ...


def progress(enabled: bool, total: int | None, name: str, unit: str) -> AbstractContextManager[Bar]:
    """A progress bar."""
    from tqdm.auto import tqdm

    return tqdm(total=total, unit=unit, unit_scale=True, disable=not enabled, desc=name)
