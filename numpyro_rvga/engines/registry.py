"""The engines of a model, by the form of its data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh

from ..dynamics import Dynamics, movement_of
from ..model.bad_rows import check_reading, check_start, check_states
from ..model.bound.validation import check_affordable, check_independence, explained_error
from ..model.data.arguments import BadData, NotRows, checked_rows, has_frames, whole_data
from ..model.data.rows import Data, Keywords, Rows, num_rows, same, snapshot
from ..model.half_lines import read_on_positive_half
from ..model.handlers.failures import (
    CoupledRows,
    LocalLatents,
    LocalStates,
    UnboundedStates,
    is_fault,
    of_stream,
    readable,
    why_not_rows,
)
from ..model.program import Program
from ..options import Info, Options
from ..user_warnings import warn
from .devices import Devices
from .engine import Engine

WHOLE = "all data at once"
MOST_KEPT = 32  # engines: a model in a loop over other keyword arguments or shapes compiles others again and again


class Engines:
    """The engines of a model, compiled once for each form of the data.

    :param dynamics: what has a ``transition(layout, mean, root, elapsed)`` and the name of a ``time``, or None.
    :param mesh: devices that share the rows.
    :param batch: whether all rows are always at hand: then ``numpyro.param`` sites can be learned.
    :param whole: whether to run the model on all rows at once, always; see :class:`Program`. :param evaluates: and to
        compute what it makes of them when it is read.
    :param joint_rows: as many rows are in one solve, if they are at hand.

    :ivar last: the engine that was asked for last.
    """

    def __init__(
        self,
        model: Callable,
        options: Options,
        improper_prior_scale: float | None = None,
        dynamics: Dynamics | None = None,
        *,
        batch: bool = False,
        whole: bool = False,
        evaluates: bool = False,
        joint_rows: float = 0,
        mesh: Mesh | None = None,
        local: str = "prior",
    ):
        self.model, self._options, self._scale, self._dynamics = model, options, improper_prior_scale, dynamics
        self._batch, self._whole, self._joint_rows, self.devices = batch, whole, joint_rows, Devices(mesh)
        self._evaluates, self._local = evaluates, local
        self._cached: list[tuple[tuple, dict, Engine]] = []
        self.last: Engine | None = None

    def __getstate__(self) -> dict[str, object]:
        """Without what is compiled, for other processes."""
        return self.__dict__ | {"_cached": [], "last": None}

    def get(self, rows: Rows, model_kwargs: Keywords, rng_key: Array, all_rows: Rows | None = None) -> Engine:
        """The engine for checked rows; see :func:`checked_rows`.

        :param all_rows: all rows, of which ``rows`` may be some, if they are at hand.
        :raises ValueError, NotImplementedError: for models that do not fit, as :class:`Program` says.
        """
        shapes = tuple(sorted((n, a.shape[1:], str(a.dtype)) for n, a in rows.items()))
        form = (shapes, str(jnp.result_type(float)), self._takes_draws(all_rows))
        for cached_form, kwargs, engine in self._cached:
            if cached_form == form and engine.takes(rng_key) and same(kwargs, model_kwargs):
                program = engine.program.bind(rows, all_rows)
                if program is not None:
                    self.last = engine.bind(program, rng_key)
                    return self.last
        options, model_kwargs = self._options, snapshot(model_kwargs)
        try:
            program = self._program(rows, model_kwargs, all_rows)
        except (TypeError, ValueError) as error:
            explained = explained_error(self.model, rows, model_kwargs, error)
            if explained is None:
                raise
            raise explained from error
        movement = None
        if self._dynamics is not None:
            if program.data_prior is not None:
                raise ValueError(
                    f"{program.prior_reads}, which parameters that move know only in part. Compute what it "
                    "needs beforehand, and pass it as a keyword argument of run()."
                )
            prior = program.initial_state
            movement = movement_of(self._dynamics, program, prior.mean, prior.root)
        engine = Engine(program, options, rng_key, movement, self.devices)
        self._keep(form, model_kwargs, engine)
        return engine

    def _keep(self, form: tuple, model_kwargs: dict, engine: Engine) -> None:
        """An engine for later runs, and for what is asked of the last run."""
        self._cached = [*self._cached, (form, model_kwargs, engine)][-MOST_KEPT:]
        self.last = engine

    def get_for_stream(
        self, rows: Rows, model_kwargs: Keywords, rng_key: Array, all_rows: Rows | None = None
    ) -> Engine:
        """As :meth:`get`. Errors say what a stream cannot do."""
        try:
            return self.get(rows, model_kwargs, rng_key, all_rows)
        except Exception as error:
            raise of_stream(error) from error

    def of(self, program: Program, rng_key: Array) -> Engine:
        """The last engine, if it is of a program of this model; else a new one, in which parameters do not move."""
        if self.last is not None and self.last.program is program:
            return self.last
        return Engine(program, self._options, rng_key, None, self.devices)

    def make_thorough(self, engine: Engine, *, replaces: bool) -> Engine:
        """An engine with thorough rules, which is the last one now.

        :param replaces: whether later runs begin with it, too.
        """
        thorough = self.last = engine.with_effort("thorough")
        if replaces:
            self._cached = [(form, kwargs, thorough if e == engine else e) for form, kwargs, e in self._cached]
        return thorough

    @property
    def last_engine(self) -> Engine:
        """The engine that was asked for last.

        :raises RuntimeError: if none was.
        """
        if self.last is None:
            raise RuntimeError("call init(data) first: it compiles what update and posterior take.")
        return self.last

    def together(self, data: Data, model_kwargs: Keywords, rng_key: Array) -> tuple[Engine, Rows, str | None]:
        """The engine for a solve of all data, the data, and, if they are no independent rows, why.

        :raises ValueError, NotImplementedError: for data of no use, and models that do not fit.
        """
        whole = self.cached_whole(data, model_kwargs, rng_key)
        if whole is not None:
            return whole
        try:
            rows = checked_rows(self.model, data, model_kwargs)
            engine = self.get(rows, model_kwargs, rng_key, rows)
            engine.program.check_prior()
        except BadData:
            raise
        except Exception as error:  # whatever a model cannot do row by row, it may do with all rows
            return self.whole(data, model_kwargs, rng_key, error)
        engine.program.check_rows(rows)
        return engine, rows, None

    def whole(self, data: Data, model_kwargs: Keywords, rng_key: Array, reason: Exception) -> tuple[Engine, Rows, str]:
        """As :meth:`together`, for a model that takes all data at once, with their values, when it is read. For data of
        which :meth:`cached_whole` has none.

        :param reason: why it cannot take single rows.
        :raises ValueError, NotImplementedError: as :meth:`together`.
        """
        arrays, keywords = whole_data(self.model, data, model_kwargs)
        try:
            program = self._whole_program(arrays, snapshot(keywords), reason)
        except Exception:
            if not has_frames(self.model, data):
                raise
            arrays, keywords = whole_data(self.model, data, model_kwargs, keeps_frames=True)
            program = self._whole_program(arrays, snapshot(keywords), reason)
        engine = Engine(program, self._options, rng_key, None, self.devices)
        form = _whole_form()
        self._cached = [entry for entry in self._cached if entry[0] != form]
        self._keep(form, program.model_kwargs, engine)
        return engine, program.as_taken(arrays), program.reason or ""

    def cached_whole(self, data: Data, model_kwargs: Keywords, rng_key: Array) -> tuple[Engine, Rows, str] | None:
        """The result of :meth:`whole` for these data, if it was called before; else None."""
        form = _whole_form()
        candidates = [(kwargs, engine) for of, kwargs, engine in self._cached if of == form and engine.takes(rng_key)]
        if not candidates:
            return None
        for keeps_frames in (False, True) if has_frames(self.model, data) else (False,):
            arrays, keywords = whole_data(self.model, data, model_kwargs, keeps_frames=keeps_frames)
            for kwargs, engine in candidates:
                if engine.program.holds(arrays) and same(kwargs, keywords):
                    program = engine.program
                    self.last = engine.bind(program, rng_key)
                    return self.last, program.as_taken(arrays), program.reason or ""
        return None

    def _whole_program(self, arrays: Rows, model_kwargs: dict, reason: Exception) -> Program:
        """The model, bound to all data at once, in the first form of the arrays that it takes."""
        failures = []
        for variant, evaluates in _as_models_take_them(arrays):
            options: Info = {"whole": True, "evaluates": evaluates, "by_draws": self._is_plain, **self._program_options}
            options["local"] = "marginal"  # continuous sites are of all data; only states are summed over
            try:
                program = self._read(variant, model_kwargs, **options)
                check_start(program)
                check_reading(program)
                check_states(program)
                program.check_rows(variant)
            except BadData:
                raise
            except Exception as error:
                failures.append(error)
                continue
            program.reason = why_not_rows(reason)
            if is_fault(reason):
                warn(
                    f"{program.reason}. This is a fault of numpyro_rvga: please report it. All rows are solved jointly."
                )
            return program
        if isinstance(reason, (NotRows, UnboundedStates)):
            raise reason from failures[0]
        raise readable(failures[0]) from reason

    @property
    def _program_options(self) -> Info:
        prefer_parameters = self._options.scheme == "ekf" or self._options.expectation == "linearized"
        local = "marginal" if self._local == "auto" else self._local  # if that is possible
        return {"improper_prior_scale": self._scale, "prefer_parameters": prefer_parameters, "local": local}

    @property
    def _is_plain(self) -> bool:
        """Whether expectations may be computed in any way."""
        options = self._options
        return options.scheme == "implicit" and options.expectation == "auto" and options.order in ("auto", 1)

    def _takes_draws(self, all_rows: Rows | None) -> bool:
        """Whether terms of rows without structure may be one factor: all rows are in one solve."""
        return self._is_plain and all_rows is not None and num_rows(all_rows) <= self._joint_rows

    def _program(self, rows: Rows, model_kwargs: dict, all_rows: Rows | None) -> Program:
        """The model, bound to rows."""
        options: Info = {
            "all_rows": all_rows,
            "whole": self._whole,
            "evaluates": self._evaluates,
            "by_draws": self._takes_draws(all_rows),
            **self._program_options,
        }
        try:
            program = self._read(rows, model_kwargs, **options)
            if options["by_draws"] and self._local == "auto":
                check_affordable(program, num_rows(rows))
        except LocalStates:
            if not self._batch:
                raise
            program = self._read(rows, model_kwargs, **options | {"local": "marginal"})
        except NotImplementedError as error:
            if self._local != "auto" or options["by_draws"] or isinstance(error, CoupledRows):
                raise
            try:
                program = self._read(rows, model_kwargs, **options | {"local": "prior"})
            except LocalLatents:
                raise error from None
        if not self._whole:
            check_independence(program, rows)
        if program.params.layout.size and not self._batch:
            raise NotImplementedError(
                f"the model has numpyro.param sites ({', '.join(program.params.layout.site_names)}), which a recursion "
                "cannot learn. Give them priors, or learn them with FixedPointVI."
            )
        return program

    def _read(self, rows: Rows, model_kwargs: dict, **options: Any) -> Program:
        """The model read with its data. From now on, sites that may not be negative are positive."""
        program, sites = read_on_positive_half(self.model, lambda model: Program(model, rows, model_kwargs, **options))
        if sites:
            named = ", ".join(map(repr, sites))
            warn(
                f"the model's density is NaN where {named} is negative, though the prior is on the whole line. It is "
                "taken as positive, where NUTS stays too. Say so in the model: HalfNormal in place of Normal(0, 1)."
            )
            self.model = program.model
        return program


def _whole_form() -> tuple[str, str]:
    return WHOLE, str(jnp.result_type(float))


def _as_models_take_them(arrays: Rows) -> list[tuple[dict, bool]]:
    """As they are; as NumPy's, whose values models can read; as JAX's, which latent indices can index; and with all
    that a model computes of them in JAX computed when it is read, which takes long."""
    numpy, jax_arrays = ({n: convert(x) for n, x in arrays.items()} for convert in (np.asarray, jnp.asarray))
    variants: list[tuple[dict, bool]] = [(arrays, False)]
    if any(isinstance(array, jax.Array) for array in arrays.values()):
        variants.append((numpy, False))
    return [*variants, (jax_arrays, False), (jax_arrays, True)] if arrays else variants
