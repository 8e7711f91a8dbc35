"""RVGA by the family of q: what each has to do, and how each does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from ..model.data.rows import Arrays
from ..results.posterior import Posterior


class OfFamily(Protocol):
    """What :class:`RVGA` does with one family of q. States are those of the family, pytrees."""

    @property
    def state(self) -> Any:
        """Of the last run."""

    @property
    def run(self) -> Callable[..., Posterior]:
        """As :meth:`RVGA.run`."""
        ...

    @property
    def init(self) -> Callable[..., Any]:
        """As :meth:`RVGA.init`."""
        ...

    def update(self, state: Any, data: Arrays) -> Any:
        """As :meth:`RVGA.update`."""

    def posterior(self, state: Any) -> Posterior:
        """As :meth:`RVGA.posterior`."""
        ...
