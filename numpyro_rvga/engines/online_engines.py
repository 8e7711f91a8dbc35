"""BONG's compiled updates of a model, by the form of its data."""

from __future__ import annotations

from collections.abc import Callable

from jax import Array

from ..core.updates.rules import Rule
from ..dynamics import Dynamics
from ..initialization import initial_location, is_at_rest
from ..model.data.rows import Keywords, Rows
from ..model.handlers.failures import of_stream
from ..model.program import Program
from ..user_warnings import warn
from .engine import Engine
from .online import Online, OnlineOptions, OnlineState
from .registry import Engines


class OnlineEngines:
    """The updates, compiled once for each of the engines.

    :param init_loc_fn: where q's mean starts; None: at the prior's.
    """

    def __init__(
        self,
        engines: Engines,
        options: OnlineOptions,
        rule: Rule,
        dynamics: Dynamics | None,
        init_loc_fn: Callable | None,
    ):
        self._engines, self._options, self._rule, self._dynamics = engines, options, rule, dynamics
        self._init_loc_fn = init_loc_fn
        self._cached: dict[Engine, Online] = {}

    def __getstate__(self) -> dict[str, object]:
        """Without what is compiled, for other processes."""
        return self.__dict__ | {"_cached": {}}

    def get(self, rows: Rows, model_kwargs: Keywords, rng_key: Array, all_rows: Rows | None = None) -> Online:
        """As :meth:`Engines.get`."""
        try:
            engine = self._engines.get(rows, model_kwargs, rng_key, all_rows)
        except Exception as error:
            raise of_stream(error) from error
        return self._updates_of(engine, rng_key)

    def of(self, program: Program, rng_key: Array) -> Online:
        """For a program of this model."""
        cached = [online for online in self._cached.values() if online.engine.program is program]
        return cached[0] if cached else self._updates_of(self._engines.of(program, rng_key), rng_key)

    @property
    def last(self) -> Online:
        """For the form of the last data.

        :raises RuntimeError: if there were none.
        """
        return self._cached[self._engines.last_engine]

    def initial_state(self, online: Online, rng_key: Array) -> OnlineState:
        """The state before any row, with a warning if a network cannot learn from there."""
        if self._init_loc_fn is None and is_at_rest(online.engine.program, online.start.mean):
            warn(
                "the weights of the network start at zero, where it has no slope and learns next to nothing: pass "
                "init_loc_fn=init_to_module, or give them a prior with another mean."
            )
        return online.initial_state(rng_key)

    def _updates_of(self, engine: Engine, rng_key: Array) -> Online:
        online = self._cached.get(engine)
        if online is not None and online.engine.program is engine.program:
            return online
        location = None
        if self._init_loc_fn is not None:
            location = initial_location(engine.program, self._init_loc_fn, rng_key)
        if online is None:
            online = Online(engine, self._options, self._rule, self._dynamics, location)
        else:
            online = online.bind(engine, location)
        self._cached[engine] = online
        return online
