"""BONG: Bayesian online natural gradient, and its whole family."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .core.gaussians import CHARTS, FAMILIES
from .core.rules import NATURAL, RULES, Rule
from .dynamics import Dynamics, check_dynamics
from .engine import Engines, describe_bad_rows
from .initialization import initial_location
from .kinds import Options
from .model.arguments import checked_rows
from .online import Online, OnlineOptions, OnlineState
from .options import EXPECTATIONS, check_choice, default_key
from .posterior import Posterior
from .presets import PRESETS
from .stream import RowSource, checked_blocks, pad, permuted, progress

PAPER_HESSIANS = ("lin-hess", "lin-ef", "mc-hess", "mc-ef")
HESSIANS = (*PAPER_HESSIANS, *(name for name in EXPECTATIONS if name != "linearized"))
PROJECTIONS = (None, "exclusive", "inclusive")
PREDICTIONS = (None, "plugin", "linearized")
CHUNK_BLOCKS = 1024
CHUNK_NUMBERS = 2**24  # in the Jacobians of the rows that are worked on between looks at the progress bar


class BONG:
    """Gaussian posterior of a NumPyro model by Bayesian online natural gradient steps, one for each row.

    A method is a rule, a curvature (``hessian``), a family and its parameterisation: any of them with any other, but
    for those that are refused because they make no sense. Networks of a million weights are welcome with the diagonal
    and low-rank families, which make no (P, P) array.

    **Example**

    .. code-block:: python

        posterior = BONG(model, family="low-rank", rank=10).run({"X": X, "y": y})
        posterior = BONG.preset("lo-fi", model, rank=10).run({"X": X, "y": y})

    :param model: a NumPyro model whose rows are conditionally independent given global, continuous latents.
    :param str rule: ``"bong"`` takes one natural-gradient step on the expected log-likelihood, ``"bog"`` one plain
        gradient step; ``"blr"`` (Bayesian learning rule) and ``"bbb"`` (Bayes by backprop) take ``num_iters`` such
        steps on the bound, KL divergence included (equations 30-34).
    :param str hessian: how expected gradient and curvature are found. ``"lin-hess"``: at q's mean, with the model's
        outputs linearised: the Kalman filter with the row's own mean and covariance for Bernoulli, binomial, Poisson
        and softmax rows (whose covariance is singular) under any link, and for Normal rows of known scale. Other rows,
        Normal ones of unknown scale among them, have the curvature that is observed, less its negative part, which may
        be far off: take ``"auto"`` for these. ``"lin-ef"``: at q's mean, with the gradient's square
        for the curvature, and no Jacobian. ``"mc-hess"``, ``"mc-ef"``: both averaged over draws of theta (the diagonal
        family takes one of Hutchinson's probes a draw). And RVGA's expectations in predictor space: ``"auto"``,
        ``"exact"``, ``"probit"``, ``"quadrature"``, ``"sigma_points"``, ``"monte_carlo"``.
    :param str family: ``"full"``; ``"diagonal"``; or ``"low-rank"``, a precision of diagonal plus low rank.
    :param int rank: of the low-rank family.
    :param str parameterization: of the full and diagonal families' steps: ``"natural"`` or ``"moment"``.
    :param float learning_rate: of ``"bog"``, ``"blr"`` and ``"bbb"``.
    :param int num_iters: steps for each row of ``"blr"`` and ``"bbb"``.
    :param int num_samples: draws of ``"mc-hess"`` and ``"mc-ef"``, and nodes of Monte Carlo expectations.
    :param projection: for ``rule="bong"`` with the diagonal family: take the mean of the full update, with the diagonal
        of its precision (``"exclusive"``, the minimiser of KL(q || full); VD-EKF) or of its covariance
        (``"inclusive"``, KL(full || q); FD-EKF). None (default) takes the family's own natural gradient, whose mean
        overshoots where many parameters explain the same row.
    :param dynamics: how parameters move before each block (:class:`RandomWalk`, :class:`OrnsteinUhlenbeck`,
        :class:`LinearDynamics`).
    :param int block_size: rows taken in together. One row at a time is the most accurate, larger blocks are faster.
    :param num_epochs: batch mode of ``"blr"`` and ``"bbb"`` (appendix E.6): pass so often over rows in memory, in
        blocks that each speak for all rows, towards the posterior of all of them. None (default): each row counts once.
        Callbacks then come after each epoch.
    :param init_loc_fn: where q's mean starts, if not at the prior's mean: one of NumPyro's initialisation strategies,
        or :func:`init_to_module` for the weights that a network's layers would start from.
    :param bool shuffle: visit in-memory rows in random order (afresh in each epoch).
    :param float improper_prior_scale: as for :class:`RVGA`.
    :raises ValueError: for options that do not exist or exclude each other.

    **References**

    1. *Bayesian online natural gradient (BONG)*, M. Jones, P. Chang, K. Murphy (2024)
    2. *Diagonal extended Kalman filters for online learning*, P. Chang, K. Murphy, M. Jones (2022)
    """

    def __init__(
        self,
        model: Callable,
        *,
        rule: str = "bong",
        hessian: str = "lin-hess",
        family: str = "full",
        rank: int = 10,
        parameterization: str = "natural",
        learning_rate: float = 1.0,
        num_iters: int = 1,
        num_samples: int = 100,
        projection: str | None = None,
        dynamics: Dynamics | None = None,
        block_size: int = 1,
        num_epochs: int | None = None,
        init_loc_fn: Callable | None = None,
        shuffle: bool = False,
        improper_prior_scale: float | None = None,
    ):
        check_choice("rule", rule, RULES)
        check_choice("hessian", hessian, HESSIANS)
        check_choice("family", family, tuple(FAMILIES))
        check_choice("parameterization", parameterization, CHARTS)
        check_choice("projection", projection, PROJECTIONS)
        counts = {"rank": rank, "num_iters": num_iters, "num_samples": num_samples, "block_size": block_size}
        for name, value in (counts if num_epochs is None else counts | {"num_epochs": num_epochs}).items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, not {value!r}.")
        _check_combination(rule, hessian, family, parameterization, learning_rate, num_iters, projection)
        check_dynamics(dynamics)
        if num_epochs is not None and (rule not in ("blr", "bbb") or num_iters != 1 or dynamics is not None):
            raise ValueError("num_epochs is for rule='blr' or 'bbb', with num_iters=1 and no dynamics.")
        self.model, self.dynamics, self.init_loc_fn = model, dynamics, init_loc_fn
        self.block_size, self.num_epochs, self.shuffle = block_size, num_epochs, shuffle
        self.rule = Rule(rule, parameterization, learning_rate, num_iters, projection)
        self.options = OnlineOptions(family, rank, hessian if hessian in PAPER_HESSIANS else "expected", num_samples)
        self._described = {"rule": rule, "hessian": hessian, "family": family, "parameterization": parameterization}
        expectation = "linearized" if hessian in PAPER_HESSIANS else hessian
        options = Options("explicit", expectation, "auto", None, 200, max(num_samples, 2))
        self._engines = Engines(model, options, improper_prior_scale)
        self._online: dict[Any, Online] = {}
        self.state: OnlineState | None = None

    @classmethod
    def preset(cls, name: str, model: Callable, **options: Any) -> BONG:
        """A method by the name that the literature gives it; see :data:`numpyro_rvga.presets.PRESETS`.

        :param options: others than the preset fixes, and those that it leaves open, such as ``rank``.
        :raises ValueError: for unknown names, and options that the preset fixes.
        """
        check_choice("preset", name, tuple(PRESETS))
        fixed = PRESETS[name].options
        again = sorted(set(fixed) & set(options))
        if again:
            raise ValueError(f"preset {name!r} fixes {again[0]}={fixed[again[0]]!r}; use BONG(...) to choose it.")
        return cls(model, **fixed, **options)

    # ------------------------------------------------------------------ one call
    def run(
        self,
        data: Mapping[str, Any] | tuple | Iterable,
        *,
        rng_key: Array | None = None,
        init: Posterior | OnlineState | None = None,
        progress_bar: bool = True,
        callback: Callable[[Posterior], Any] | None = None,
        callback_every: int | None = None,
        prequential: str | None = None,
        **model_kwargs: Any,
    ) -> Posterior:
        """Take in the data, block by block.

        :param data: as for :meth:`RVGA.run`.
        :param rng_key: for draws of theta, ``shuffle`` and ``init_loc_fn``. Default: ``jax.random.key(0)``.
        :param init: a posterior (or state) to go on from, in place of the prior.
        :param progress_bar: show rows done.
        :param callback: called with the posterior so far after every ``callback_every`` rows, and at the end. What it
            returns, if not None, is collected in ``info["callback"]``.
        :param prequential: ``"plugin"`` or ``"linearized"``: before each block, compute its rows' log predictive
            densities under the q of that moment, linearised predictors averaged over; they come as
            ``info["log_predictive"]``, (n,).
        :param model_kwargs: go to every call of the model unchanged.
        :return: the posterior. ``info`` says how many blocks lost negative curvature (``clipped``).
        :raises ValueError: for unusable data, naming the array and the row; and where an update leaves no Gaussian,
            naming the row and what to change. The last good state is then in :attr:`state`.
        """
        check_choice("prequential", prequential, PREDICTIONS)
        if callback_every is not None and callback_every < 1:
            raise ValueError(f"callback_every must be a positive number of rows, not {callback_every}.")
        rng_key = default_key() if rng_key is None else rng_key
        in_memory = isinstance(data, (Mapping, tuple))
        if in_memory:
            rows = checked_rows(self.model, data, 0, model_kwargs)
            online = self._get(rows, model_kwargs, rng_key)
            online.engine.program.check_rows(rows)
        elif self.shuffle or self.num_epochs is not None:
            raise ValueError("shuffle=True and num_epochs need the data in memory.")
        else:
            blocks = checked_blocks(iter(data), lambda block, row: checked_rows(self.model, block, row, model_kwargs))
            rows = next(blocks)
            online = self._get(rows, model_kwargs, rng_key)
        self.state = self._start(online, init, rng_key)
        run = _Run(self, online, model_kwargs, callback, callback_every, prequential)
        total = _length(rows) if in_memory else None
        if self.num_epochs is not None:
            with progress(progress_bar, self.num_epochs * total, "BONG", "row") as bar:
                return run.epochs(rows, bar)
        if self.shuffle:
            rows = permuted(rows, np.asarray(jax.random.permutation(rng_key, total)))
        source = RowSource(iter([rows]) if in_memory else _chain(rows, blocks))
        with progress(progress_bar, total, "BONG", "row") as bar:
            return run.stream(source, bar, check=not in_memory)

    # ------------------------------------------------------------------ functional form
    def init(
        self, data: Mapping[str, Any] | tuple, *, rng_key: Array | None = None, **model_kwargs: Any
    ) -> OnlineState:
        """The state before any row, for data of this form.

        :param data: a block of data, as for :meth:`run`; used for its form only, and not absorbed.
        :return: the state, a pytree.
        """
        rows = checked_rows(self.model, data, 0, model_kwargs)
        rng_key = default_key() if rng_key is None else rng_key
        return self._get(rows, model_kwargs, rng_key).initial_state(rng_key)

    def update(self, state: OnlineState, data: Mapping[str, Any]) -> OnlineState:
        """Take in rows, in blocks of ``block_size``.

        Pure: works under ``jax.jit``. Rows are not checked; from a block on that leaves no Gaussian, nothing changes.

        :param state: from :meth:`init` or an earlier update.
        :param data: a mapping from argument names to arrays, of the form that :meth:`init` saw.
        :raises RuntimeError: before :meth:`init`.
        """
        online = self.online
        arrays = {name: jnp.asarray(array) for name, array in data.items() if array is not None}
        length = _length(arrays)
        size = -(-length // self.block_size) * self.block_size
        taken = jnp.minimum(jnp.arange(size), length - 1)
        weights = (jnp.arange(size) < length).astype(jnp.float32)
        rows = {name: array[taken] for name, array in arrays.items()}
        return online.stream(state, rows, weights, block_size=self.block_size)[0]

    def posterior(self, state: OnlineState) -> Posterior:
        """The posterior that a state stands for (prior terms that are not Gaussian solved for)."""
        online = self.online
        return self._posterior(online, state, online.engine.program.model_kwargs, {})

    # ------------------------------------------------------------------ inside
    @property
    def online(self) -> Online:
        """The compiled updates for the data that were seen last.

        :raises RuntimeError: before :meth:`init`.
        """
        if self._engines.last is None:
            raise RuntimeError("call init(data) first: it compiles the updates for data of that form.")
        return self._online[self._engines.last]

    def _get(self, rows: dict, model_kwargs: dict, rng_key: Array) -> Online:
        engine = self._engines.get(rows, model_kwargs, rng_key)
        if engine not in self._online:
            location = None
            if self.init_loc_fn is not None:
                location = initial_location(engine.program, self.init_loc_fn, rng_key)
            self._online[engine] = Online(engine, self.options, self.rule, self.dynamics, location)
        return self._online[engine]

    def _start(self, online: Online, init: Posterior | OnlineState | None, rng_key: Array) -> OnlineState:
        if init is None:
            return online.initial_state(rng_key)
        if isinstance(init, OnlineState):
            return init
        online.engine.check_start(init)
        if isinstance(init.continuation, Continuation) and online.holds(init.continuation.state):
            return init.continuation.state
        return online.state_of(init.gaussian, init.num_rows, rng_key)

    def _posterior(self, online: Online, state: OnlineState, model_kwargs: dict, info: dict) -> Posterior:
        facts = self._described | info
        if self.dynamics is not None:
            facts["dynamics"] = type(self.dynamics).__name__
        continuation = Continuation(self, state, dict(model_kwargs))
        gaussian, program = online.settled(state), online.engine.program
        return Posterior(program, gaussian, None, facts, continuation, num_rows=int(state.num_rows))


@dataclass(frozen=True)
class Continuation:
    """What a posterior needs to take in more rows."""

    bong: BONG
    state: OnlineState
    model_kwargs: dict

    def update(self, posterior: Posterior, data: Any, **kwargs: Any) -> Posterior:
        """The posterior after more rows; ``posterior`` is unchanged."""
        return self.bong.run(data, init=self.state, **{**self.model_kwargs, **kwargs})


class _Run:
    """One call of :meth:`BONG.run`: pieces of data through the compiled steps, and what they have to tell."""

    def __init__(
        self,
        bong: BONG,
        online: Online,
        model_kwargs: dict,
        callback: Callable | None,
        every: int | None,
        prequential: str | None,
    ):
        self._bong, self._online, self._model_kwargs = bong, online, model_kwargs
        self._callback, self._every, self._prequential = callback, every, prequential
        self._clipped, self._predictive, self._returned = 0, [], []

    def stream(self, source: RowSource, bar: Any, *, check: bool) -> Posterior:
        block = self._bong.block_size
        chunk = max(1, min(CHUNK_BLOCKS, CHUNK_NUMBERS // (block * self._online.engine.numbers_per_row))) * block
        every = None if self._every is None else -(-self._every // block) * block
        done, last_call = 0, 0
        while True:
            size = chunk if every is None else min(chunk, last_call + every - done)
            piece = source.take(size)
            if piece is None:
                break
            if check:
                self._online.engine.program.check_rows(piece, done)
            self._absorb(piece, chunk, done)
            done += _length(piece)
            bar.update(_length(piece))
            if every is not None and done - last_call == every:
                self._call_back()
                last_call = done
        if done > last_call:
            self._call_back()
        return self._finished()

    def _absorb(self, piece: dict, size: int, first_row: int) -> None:
        block, length = self._bong.block_size, _length(piece)
        rows, weights = pad(piece, size)
        if self._online.one_by_one:
            count = -(-length // block)
            infos = []
            for start in range(0, count * block, block):
                part = {name: array[start : start + block] for name, array in rows.items()}
                taken, present = weights[start : start + block], min(block, length - start)
                self._bong.state, info = self._online.one_block(
                    self._bong.state, part, taken, present, predict=self._prequential
                )
                infos.append(info)
            info = jax.tree.map(lambda *x: np.stack(x), *jax.device_get(infos))
        else:
            arguments = jax.device_put((rows, weights))
            self._bong.state, info = self._online.stream(
                self._bong.state, *arguments, block_size=block, predict=self._prequential
            )
            info = jax.device_get(info)
        if not info.ok.all():
            start = int(np.argmin(info.ok)) * block
            rows = {name: array[start : min(start + block, length)] for name, array in piece.items()}
            self._refuse(rows, first_row + start)
        self._clipped += int(info.clipped.sum())
        if self._prequential is not None:
            self._predictive.append(info.log_predictive.reshape(-1)[:length])

    def epochs(self, rows: dict, bar: Any) -> Posterior:
        bong, online, total = self._bong, self._online, _length(rows)
        prior, all_rows = bong.state.gaussian, bong.state.num_rows + total
        key = jax.random.key_data(bong.state.rng_key)
        order, rng = np.arange(total), np.random.default_rng(np.asarray(key).tolist())
        for _ in range(bong.num_epochs):
            if bong.shuffle:
                order = rng.permutation(total)
            for start in range(0, total, bong.block_size):
                taken = order[start : start + bong.block_size]
                part, weights = pad(permuted(rows, taken), min(bong.block_size, total))
                weights = (total / len(taken) * weights).astype(online.engine.program.dtype)
                bong.state, info = online.one_iteration(prior, bong.state, part, weights)
                if not bool(info.ok):
                    self._refuse(permuted(rows, taken), int(taken[0]))
                self._clipped += int(info.clipped)
                bar.update(len(taken))
            bong.state = bong.state._replace(num_rows=all_rows)
            self._call_back()
        return self._finished()

    def _call_back(self) -> None:
        if self._callback is not None:
            returned = self._callback(self._bong._posterior(self._online, self._bong.state, self._model_kwargs, {}))
            if returned is not None:
                self._returned.append(returned)

    def _finished(self) -> Posterior:
        info: dict[str, Any] = {"clipped": self._clipped}
        if self._predictive:
            info["log_predictive"] = np.concatenate(self._predictive)
        if self._returned:
            info["callback"] = self._returned
        return self._bong._posterior(self._online, self._bong.state, self._model_kwargs, info)

    def _refuse(self, rows: dict, first_row: int) -> None:
        bong = self._bong
        reason = describe_bad_rows(self._online.engine.program, bong.state.gaussian.mean, rows, first_row)
        if reason is not None:
            advice = "check these rows, or mask them in the model"
        elif bong.rule.name != "bong":
            advice = f"the learning rate {bong.rule.learning_rate:g} is too large here: lower learning_rate"
        elif bong.rule.chart == "moment":
            advice = "moment steps may leave the positive definite matrices: use parameterization='natural'"
        else:
            advice = (
                "standardise the data, give the prior a smaller scale, or use hessian='auto', which looks at all of q"
            )
        where = f"row {first_row}" if _length(rows) == 1 else f"rows {first_row} to {first_row + _length(rows) - 1}"
        raise ValueError(
            f"the update on {where} (after {int(bong.state.num_blocks)} updates) leaves no finite Gaussian"
            f"{'' if reason is None else ': ' + reason}; {advice}. The last good state is kept as .state."
        )


def _check_combination(
    rule: str,
    hessian: str,
    family: str,
    parameterization: str,
    learning_rate: float,
    num_iters: int,
    projection: str | None,
) -> None:
    """:raises ValueError: with the reason why options exclude each other."""
    if not learning_rate > 0:
        raise ValueError(f"learning_rate must be positive, not {learning_rate!r}.")
    if rule == "bong" and learning_rate != 1.0:
        raise ValueError(
            "rule='bong' takes no learning rate: its step of one is exact for conjugate models. Use rule='blr'."
        )
    if rule in ("bong", "bog") and num_iters != 1:
        several = "blr" if rule in NATURAL else "bbb"
        raise ValueError(
            f"rule={rule!r} takes one step for each row, from the prior: more would count the row more than once. Use "
            f"rule={several!r}, whose KL divergence prevents that."
        )
    if rule == "blr" and learning_rate > 1.0:
        raise ValueError(f"rule='blr' interpolates: its learning_rate is at most 1, not {learning_rate}.")
    if family == "low-rank" and hessian == "mc-hess":
        raise ValueError(
            "family='low-rank' needs a positive semi-definite curvature, and sampled Hessians may have any sign: use "
            "hessian='mc-ef', 'lin-ef' or 'lin-hess'."
        )
    if family == "low-rank" and parameterization != "natural":
        raise ValueError("family='low-rank' has one parameterization: leave it at 'natural'.")
    if projection is not None and (family != "diagonal" or rule != "bong" or parameterization != "natural"):
        raise ValueError("projection is for rule='bong' with family='diagonal' and natural parameters.")
    if projection is not None and hessian == "mc-hess":
        raise ValueError("projection needs a curvature of low rank: use another hessian than 'mc-hess'.")


def _chain(head, rest):
    yield head
    yield from rest


def _length(rows: Mapping[str, Any]) -> int:
    return len(next(iter(rows.values())))
