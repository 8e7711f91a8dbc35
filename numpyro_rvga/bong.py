"""BONG: Bayesian online natural gradient, and the methods of its family."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from jax import Array

from .core.expectations.by_nodes import Expectation
from .core.gaussians import FAMILIES, PARAMETERIZATIONS
from .core.gaussians.mean_field import MeanField
from .core.gaussians.mixture import GaussianMixture
from .core.pytrees import in_precision
from .core.updates.rules import RULES, Rule, UpdateRule
from .dynamics import Dynamics, check_dynamics, dynamics_info
from .engines.combinations import DIAGONALS, HESSIANS, PAPER_HESSIANS, PROJECTIONS, check_combination, check_rate
from .engines.engine import Engine
from .engines.online import OnlineOptions, OnlineState, OnlineUpdates, online_of
from .engines.registry import Engines
from .initialization import warn_of_rest
from .model.data.arguments import checked_rows
from .model.data.row_set import RowSet, row_set
from .model.data.rows import Data, num_rows, pad
from .model.program import Program
from .options import Info, Options, check_choice, check_choice_or_own, check_count, checked_key, described, key_numbers
from .presets import PRESETS
from .progress import progress
from .results.fitted import check_init
from .results.posterior import Posterior
from .results.rounding import warn_of_lost_digits
from .streams.checkpoints import EVERY
from .streams.online_pass import CallBack, OnlinePass, run_epochs
from .streams.opening import SHUFFLES, PassOptions, open_source, ordered, usable_source

PREDICTIONS = (None, "plugin", "linearized")


class BONG:
    """Gaussian posterior of a NumPyro model by one Bayesian online natural-gradient step for each row.

    A method is a rule, a Hessian, a family and its parameterization. Any goes with any other, except for combinations
    that make no sense, which are refused. The diagonal and low-rank families make no (P, P) array, so networks of a
    million weights fit.

    **Example**

    With the model and the data of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import BONG
        >>> diagonal = BONG(model, family="diagonal").run(data, progress_bar=False)
        >>> print(np.asarray(diagonal.mean).round(0), diagonal.num_rows)
        [ 1. -2.] 200

    :param model: a NumPyro model whose rows are conditionally independent given global, continuous latents.
    :param str rule: ``"bong"`` takes one natural-gradient step on the expected log-likelihood, ``"bog"`` one plain
        gradient step on it; ``"blr"`` (Bayesian learning rule) and ``"bbb"`` (Bayes by backprop) take ``num_iters``
        natural or plain gradient steps on the bound, which has the KL divergence (equations 30-34). ``"implicit"``
        takes the expectations under the q that the step leads to, as :class:`RVGA` does, with an expectation for
        ``hessian``; the result is projected to the family. Or your own
        :class:`~numpyro_rvga.core.updates.rules.UpdateRule`: a function of the prior, q and the expected derivatives.
    :param str hessian: how the expected gradient and Hessian of the log-likelihood are computed.

        - ``"lin-hess"``: at q's mean, with the model's outputs linearized and minus the Fisher information for the
          Hessian. This is the extended Kalman filter. It holds for Bernoulli, binomial, Poisson and softmax rows under
          any link, for Normal, multivariate Normal, gamma, beta and Dirichlet rows whatever depends on the latent
          sites, for exponential, geometric and negative binomial rows of known concentration, and for Laplace rows
          whose location (and log scale) is affine in the latent sites. Other rows have the observed Hessian without
          its positive part, which may be far off: take ``"auto"`` or ``"mc-fisher"`` for these.
        - ``"lin-ef"``: at q's mean, with the outer product of the gradient for minus the Hessian, without a Jacobian.
        - ``"mc-hess"``, ``"mc-ef"``: the Hessian, or outer products of gradients, averaged over draws of theta. (The
          diagonal family takes one of Hutchinson's probes for each draw.)
        - ``"mc-fisher"``: the Fisher information, by outer products of gradients at outcomes that are drawn from each
          row's own distribution, one for each draw of theta (section 4.5). It is positive semi-definite and unbiased
          for every distribution that can be drawn from.
        - ``"delta-hess"``: the Hessian itself at q's mean, as Newton's method has it.
        - RVGA's expectations: ``"auto"``, ``"exact"``, ``"probit"``, ``"quadrature"``, ``"sigma_points"``,
          ``"monte_carlo"`` or your own.
    :param str family: ``"full"``; ``"diagonal"``; ``"block-diagonal"``, a block for each latent site; or
        ``"low-rank"``, a precision of diagonal plus low rank.
    :param int rank: of the low-rank family. Its factor starts at zero. With ``"bog"`` and ``"bbb"`` one percent of the
        prior's precision starts as a random factor, since plain gradients vanish at zero.
    :param str parameterization: the parameters in which the full and diagonal families take a step: ``"natural"`` or
        ``"moment"``; or, for ``"bog"`` and ``"bbb"`` with the diagonal family, ``"softplus"``: the mean and rho, for
        standard deviations of log(1 + exp(rho)), which no step makes negative.
    :param float learning_rate: of ``"bog"``, ``"blr"`` and ``"bbb"``.
    :param int num_iters: steps for each row of ``"blr"`` and ``"bbb"``.
    :param int num_samples: draws of ``"mc-hess"``, ``"mc-ef"`` and ``"mc-fisher"``, and nodes of Monte Carlo
        expectations.
    :param projection: for ``rule="bong"`` with the (block-)diagonal family: project the full update. ``"exclusive"``
        keeps the diagonal (blocks) of its precision, the minimizer of KL(q || full) (VD-EKF). ``"inclusive"`` keeps the
        diagonal of its covariance, the minimizer of KL(full || q) (FD-EKF). None (default) takes the family's own
        natural gradient, whose mean overshoots where many parameters explain the same row. The low-rank family keeps
        leading directions. For ``"bong"`` and ``"implicit"``, ``"exclusive"`` takes two steps from there towards the
        least KL(q || full) (L-RVGA). For ``"bong"`` and ``"blr"``, ``"first"`` projects before the mean moves (SLANG).
    :param dynamics: how parameters move before each block (:class:`RandomWalk`, :class:`OrnsteinUhlenbeck`,
        :class:`LinearDynamics`).
    :param int block_size: rows in one update. One row is the most accurate; larger blocks are faster.
    :param num_epochs: batch mode of ``"blr"`` and ``"bbb"`` (appendix E.6): the number of passes over rows in memory.
        Each block then represents all rows, and q approaches the posterior of all rows. Callbacks come after each
        epoch. None (default): one pass in which each row counts once.
    :param init_loc_fn: where q's mean starts: one of NumPyro's initialization strategies, or :func:`init_to_module` for
        the weights that a network's layers would start from. None (default): at the prior's mean.
    :param shuffle: as for :class:`RVGA`; each epoch has a new order. Each row is used once, at the q of that moment: a
        network that sees digits sorted by class knows the last class best. ``"auto"`` keeps the rows' own order with
        ``dynamics`` and ``prequential``, which depend on that order.
    :param float improper_prior_scale: as for :class:`RVGA`.
    :raises ValueError: for options that do not exist or exclude each other.

    :ivar state: of the last run, after its last update, also if it was stopped; for :meth:`posterior`.

    **References**

    1. *Bayesian online natural gradient (BONG)*, M. Jones, P. Chang, K. Murphy (2024)
    2. *Diagonal extended Kalman filters for online learning*, P. Chang, K. Murphy, M. Jones (2022)
    3. *Limited-memory recursive variational Gaussian approximation*, M. Lambert, S. Bonnabel, F. Bach (2023)
    """

    def __init__(
        self,
        model: Callable,
        *,
        rule: str | UpdateRule = "bong",
        hessian: str | Expectation = "lin-hess",
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
        shuffle: bool | str = "auto",
        improper_prior_scale: float | None = None,
    ):
        check_choice_or_own("rule", rule, RULES, "(prior, q, derivatives) -> q")
        check_choice_or_own("hessian", hessian, HESSIANS, "(log_prob, mean, covariance) -> E[log_prob]")
        check_choice("family", family, tuple(FAMILIES))
        check_choice("parameterization", parameterization, PARAMETERIZATIONS)
        check_choice("projection", projection, PROJECTIONS)
        check_choice("shuffle", shuffle, SHUFFLES)
        counts = {"rank": rank, "num_iters": num_iters, "num_samples": num_samples, "block_size": block_size}
        for name, value in (counts if num_epochs is None else counts | {"num_epochs": num_epochs}).items():
            check_count(name, value)
        check_combination(rule, hessian, family, parameterization, learning_rate, num_iters, projection)
        if rule == "implicit" and family in DIAGONALS:
            projection = projection or "exclusive"
        check_dynamics(dynamics)
        if num_epochs is not None and (rule not in ("blr", "bbb") or num_iters != 1 or dynamics is not None):
            raise ValueError("num_epochs is for rule='blr' or 'bbb', with num_iters=1 and no dynamics.")
        self.model, self.dynamics, self.init_loc_fn = model, dynamics, init_loc_fn
        self.block_size, self.num_epochs, self.shuffle = block_size, num_epochs, shuffle
        self.rule = Rule(rule, parameterization, learning_rate, num_iters, projection)
        named = hessian if isinstance(hessian, str) and hessian in PAPER_HESSIANS else "expected"
        self.options = OnlineOptions(family, rank, named, num_samples)
        self._described = {
            "rule": described(rule),
            "hessian": described(hessian),
            "family": family,
            "parameterization": parameterization,
        }
        expectation = "linearized" if hessian in PAPER_HESSIANS else hessian
        options = Options("explicit", expectation, "auto", None, 200, max(num_samples, 2))
        self._engines = Engines(model, options, improper_prior_scale)
        self.state: OnlineState | None = None

    @classmethod
    def preset(cls, name: str, model: Callable, **options: Any) -> BONG:
        """A method by its name in the literature; see :data:`numpyro_rvga.presets.PRESETS`.

        **Example**

        With the model and the data of :class:`RVGA`'s example:

        .. doctest::

            >>> from numpyro_rvga import BONG
            >>> lo_fi = BONG.preset("lo-fi", model, rank=1).run(data, progress_bar=False)
            >>> print(np.asarray(lo_fi.mean).round(0))
            [ 1. -2.]

        :param options: options that the preset leaves open, such as ``rank``.
        :raises ValueError: for unknown names, and options that the preset fixes.
        """
        check_choice("preset", name, tuple(PRESETS))
        fixed = PRESETS[name].options
        again = sorted(set(fixed) & set(options))
        if again:
            raise ValueError(f"preset {name!r} fixes {again[0]}={fixed[again[0]]!r}; use BONG(...) to choose it.")
        return cls(model, **fixed, **{**PRESETS[name].defaults, **options})

    def with_learning_rate(self, learning_rate: float) -> BONG:
        """The same method at another learning rate, without compiling again.

        **Example**

        With the model and the data of :class:`RVGA`'s example:

        .. doctest::

            >>> from numpyro_rvga import BONG, metrics
            >>> method, scores = BONG(model, rule="blr"), {}
            >>> for rate in (0.01, 0.1, 1.0):
            ...     posterior = method.with_learning_rate(rate).run(data, progress_bar=False)
            ...     scores[rate] = metrics.nlpd(posterior, data)
            >>> min(scores, key=scores.get)
            1.0

        :raises ValueError: for a rate that the rule does not take.
        """
        rule = self.rule._replace(learning_rate=learning_rate)
        check_rate(rule.name, learning_rate)
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, rule=rule, state=None)
        return other

    # ------------------------------------------------------------------ one call
    def run(
        self,
        data: Data | Iterable,
        *,
        rng_key: Array | None = None,
        init: Posterior | OnlineState | None = None,
        progress_bar: bool = True,
        callback: Callable[[Posterior], Any] | None = None,
        callback_every: int | None = None,
        prequential: str | None = None,
        checkpoint: str | os.PathLike | None = None,
        every: int = EVERY,
        resume: bool = False,
        on_bad_row: str = "raise",
        **model_kwargs: Any,
    ) -> Posterior:
        """Update by all rows, block by block.

        **Example**

        With the model and the data of :class:`RVGA`'s example:

        .. doctest::

            >>> from numpyro_rvga import BONG
            >>> width = lambda q: float(q.covariance.trace()) ** 0.5
            >>> seen = BONG(model).run(data, progress_bar=False, callback=width, callback_every=100).info["callback"]
            >>> len(seen), seen[0] > seen[1]  # after 100 and 200 rows
            (2, True)

        :param data: as for :meth:`RVGA.run`.
        :param rng_key: for draws of theta, ``shuffle`` and ``init_loc_fn``. Default: ``jax.random.key(0)``.
        :param init: a posterior (or state) to continue from; None: the prior.
        :param progress_bar: show rows done.
        :param callback: called with the posterior so far after every ``callback_every`` rows, and at the end. What it
            returns, if not None, is collected in ``info["callback"]``.
        :param prequential: ``"plugin"`` or ``"linearized"``: compute the log predictive density of each row under q
            before its update, at q's mean or averaged over linearized predictors. ``info["log_predictive"]`` (n,) has
            them, and NaN for rows that are left out.
        :param checkpoint: a file for the state of the run; with ``every`` and ``resume`` as for :meth:`RVGA.run`. After
            a restart, ``info["callback"]`` begins there.
        :param on_bad_row: ``"raise"`` or ``"skip"``, as for :meth:`RVGA.run`.
        :param model_kwargs: go to every call of the model unchanged.
        :return: the posterior. ``info["clipped"]`` counts blocks whose Hessian lost its positive part.
        :raises ValueError: for unusable data, naming the array and the row; and where an update leaves no Gaussian,
            naming the row and what to change. The last good state is then in :attr:`state`.
        """
        check_init(init, goes_on=True)
        check_choice("prequential", prequential, PREDICTIONS)
        if callback_every is not None:
            check_count("callback_every", callback_every)
        options = PassOptions(checkpoint, every, resume, on_bad_row)
        if self.num_epochs is not None and (checkpoint is not None or options.skips):
            raise ValueError("num_epochs goes without checkpoint and on_bad_row='skip': those are for a single pass.")
        rng_key = checked_key(rng_key)
        source, head, all_rows = open_source(data, self.model, model_kwargs, options, self.shuffle)
        if self.num_epochs is not None and all_rows is None:
            raise ValueError("num_epochs needs the data in memory: it passes over them again.")
        rows_for_prior = all_rows if init is None else None
        engine = self._engines.get_for_stream(head, model_kwargs, rng_key, rows_for_prior)
        online = self._of_engine(engine, rng_key)
        source, head = usable_source(online.engine.program, source, head, all_rows, options)
        if self.num_epochs is None:
            useful = source.is_longer_than(self.block_size) and self.dynamics is None and prequential is None
            source = ordered(source, self.shuffle, rng_key, useful=useful)
        state = self.state = self._start(online, init, rng_key)
        call_back = CallBack(partial(self._posterior, online, info={}), callback)
        on_state = partial(setattr, self, "state")
        total = None if source.total is None else source.total * (self.num_epochs or 1)
        with progress(progress_bar, total, "BONG", "row") as bar:
            if self.num_epochs is None:
                how = {"every": callback_every, "block_size": self.block_size, "predict": prequential}
                of_pass = {"source": source, "options": options, "bar": bar, "on_state": on_state}
                row_pass = OnlinePass(online, self.rule, call_back, **how, **of_pass, checked=all_rows is not None)
                state = row_pass(state, self._run_options(rng_key, shuffled=source.order is not None))
                info, absorbed = row_pass.info(), row_pass.absorbed
            else:
                how = {"block_size": self.block_size, "num_epochs": self.num_epochs, "shuffle": bool(self.shuffle)}
                state, info = run_epochs(online, self.rule, state, head, bar, on_state, call_back, **how)
                absorbed = row_set(head)
        row_sets = (*getattr(init, "row_sets", ()), absorbed)
        posterior = self._posterior(online, state, info, row_sets)
        warn_of_lost_digits(posterior)
        return posterior

    # ------------------------------------------------------------------ functional form
    def init(self, data: Data, *, rng_key: Array | None = None, **model_kwargs: Any) -> OnlineState:
        """The state before any row, for data of this form.

        :param data: a block of data, as for :meth:`run`; used for its form only, and not absorbed.
        :return: the state, a pytree.
        """
        rows = checked_rows(self.model, data, model_kwargs)
        rng_key = checked_key(rng_key)
        engine = self._engines.get_for_stream(rows, model_kwargs, rng_key)
        return self._start(self._of_engine(engine, rng_key), None, rng_key)

    def update(self, state: OnlineState, data: Data) -> OnlineState:
        """Update by rows, in blocks of ``block_size``.

        A pure function, also under ``jax.jit``. Rows are not checked. From a block that leaves no Gaussian on, the
        state does not change.

        :param state: from :meth:`init` or an earlier update.
        :param data: a mapping from argument names to arrays, or a tuple of arrays, of the form that :meth:`init` saw.
        :raises RuntimeError: before :meth:`init`.
        :raises ValueError: for arrays that are left out or differ in length.
        """
        online = self.online
        arrays = online.engine.program.rows_to_absorb(data)
        if not num_rows(arrays):
            return state
        rows, weights = pad(arrays, -(-num_rows(arrays) // self.block_size) * self.block_size)
        return online.stream(state, rows, weights, online.rate(self.rule), block_size=self.block_size)[0]

    def posterior(self, state: OnlineState) -> Posterior:
        """The posterior of a state, with the exact prior."""
        online = self.online
        posterior = self._posterior(online, state, {})
        warn_of_lost_digits(posterior)
        return posterior

    # ------------------------------------------------------------------ inside
    def __getstate__(self) -> dict[str, object]:
        """The state without compiled functions, for other processes."""
        return self.__dict__ | {"state": None}

    @property
    def online(self) -> OnlineUpdates:
        """The compiled updates for the form of the last data.

        :raises RuntimeError: before :meth:`init`.
        """
        return self._of_engine(self._engines.last_engine, checked_key(None))

    def online_of(self, program: Program, rng_key: Array) -> OnlineUpdates:
        """The updates for a program of this model."""
        return self._of_engine(self._engines.of(program, rng_key), rng_key)

    def _of_engine(self, engine: Engine, rng_key: Array) -> OnlineUpdates:
        return online_of(engine, self.options, self.rule, self.dynamics, self.init_loc_fn, rng_key)

    def _start(self, online: OnlineUpdates, init: Posterior | OnlineState | None, rng_key: Array) -> OnlineState:
        if init is None:
            if self.init_loc_fn is None:
                warn_of_rest(online.engine.program, online.start.mean)
            return online.first_state(rng_key)
        program = online.engine.program
        if not isinstance(init, Posterior):
            online.check_holds(init)
            return in_precision(init, program.dtype)
        program.check_continues(init.program)
        if isinstance(init.state, OnlineState) and online.holds(init.state):
            state = in_precision(init.state, program.dtype)
        else:
            q = init.gaussian
            q = q.as_full() if isinstance(q, GaussianMixture | MeanField) else q
            state = online.state_of(q, init.num_rows, rng_key)
        return online.at_time(state, init.info.get("time"))

    def _posterior(
        self, online: OnlineUpdates, state: OnlineState, info: Info, row_sets: tuple[RowSet, ...] = ()
    ) -> Posterior:
        """:param row_sets: what was taken in, if that is recorded."""
        info = self._described | info | dynamics_info(self.dynamics, state)
        gaussian, program = online.with_exact_prior(state), online.engine.program
        count = int(state.num_rows)
        return Posterior(program, gaussian, None, info, self, state, num_rows=count, row_sets=row_sets)

    def _run_options(self, rng_key: Array, *, shuffled: bool) -> Info:
        """The options that determine the result, which a checkpoint stores."""
        method = {"method": "BONG", "dynamics": repr(self.dynamics), "shuffle": shuffled, "block": self.block_size}
        method["rng_key"] = key_numbers(rng_key)
        return method | self.rule._asdict() | {"name": described(self.rule.name)} | self.options._asdict()
