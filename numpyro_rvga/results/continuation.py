"""What a posterior needs to take in more rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .posterior import Posterior


@dataclass(frozen=True)
class Continuation:
    """The method that made a posterior, and the keywords that its model was given.

    :ivar method: has ``run(data, init=posterior, **model_kwargs)``.
    """

    method: Any
    model_kwargs: dict[str, Any]

    def update(self, posterior: Posterior, data: Any, **kwargs: Any) -> Posterior:
        """The posterior after more rows; ``posterior`` is unchanged."""
        return self.method.run(data, init=posterior, **{**self.model_kwargs, **kwargs})
