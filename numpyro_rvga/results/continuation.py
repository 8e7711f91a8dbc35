"""What a posterior needs to take in more rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jax import Array

from ..engines.online import Online
from ..model.data.rows import Data, Keywords
from ..model.program import Program

if TYPE_CHECKING:
    from .posterior import Posterior


@dataclass(frozen=True)
class Continuation:
    """The method that made a posterior, and the keywords that its model was given.

    :ivar method: has ``run(data, init=posterior, **model_kwargs)``.
    """

    method: Any
    model_kwargs: Keywords

    def update(self, posterior: Posterior, data: Data | Iterable, **kwargs: Any) -> Posterior:
        """The posterior after more rows; ``posterior`` is unchanged."""
        return self.method.run(data, init=posterior, **{**self.model_kwargs, **kwargs})


@dataclass(frozen=True)
class OnlineContinuation(Continuation):
    """:ivar online: the compiled updates that the posterior is from, which are ``method.updates``'."""

    online: Online

    def __reduce__(self) -> tuple[Callable, tuple]:
        """Without what is compiled, for other processes."""
        engine = self.online.engine
        return _compiled_again, (self.method, self.model_kwargs, engine.program, engine.rng_key)


def _compiled_again(method: Any, model_kwargs: Keywords, program: Program, rng_key: Array) -> OnlineContinuation:
    """What :meth:`OnlineContinuation.__reduce__` took apart."""
    return OnlineContinuation(method, model_kwargs, method.updates.of(program, rng_key))
