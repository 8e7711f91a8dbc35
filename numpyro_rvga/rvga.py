"""RVGA: the recursive variational Gaussian approximation."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from jax import Array
from jax.sharding import Mesh

from .core.expectations.by_nodes import Expectation
from .core.gaussians import FAMILIES
from .core.updates.state import State
from .dynamics import Dynamics, check_dynamics
from .engines.certificate import SiteSums
from .engines.engine import Engine
from .engines.mean_field import MeanFieldState
from .engines.online import OnlineState
from .engines.registry import Engines
from .families import check_unused, online_method
from .families.best import BestFamily
from .families.by_site import SiteFamilies
from .families.full import FullFamily
from .group_streams import stream_groups
from .model.data.row_set import RowSet
from .model.data.rows import Data, Keywords, Rows
from .model.program import Program
from .options import LOCAL, Info, Options, check_choice, checked_key, default_key
from .results.fitted import check_init
from .results.posterior import Posterior
from .streams.block_plan import BlockPlan
from .streams.certification import Certification, sample_of, sums_at
from .streams.checkpoints import EVERY
from .streams.opening import SHUFFLES, PassOptions, open_source, usable_source
from .streams.source import RowSource

AnyState = State | OnlineState | MeanFieldState
SCHEMES = ("implicit", "explicit", "ekf", "qkf", "laplace")


class RVGA:
    """Gaussian posterior of a NumPyro model in one pass over the data.

    **Example**

    .. doctest::

        >>> import numpy as np
        >>> import numpyro
        >>> import numpyro.distributions as dist
        >>> from numpyro_rvga import RVGA
        >>> def model(X, y=None):
        ...     slopes = numpyro.sample("slopes", dist.Normal(0, 2).expand([2]).to_event(1))
        ...     with numpyro.plate("rows", X.shape[0]):
        ...         numpyro.sample("y", dist.Bernoulli(logits=X @ slopes), obs=y)
        >>> rng = np.random.default_rng(0)
        >>> X = rng.normal(size=(200, 2))
        >>> data = {"X": X, "y": (X @ [1, -2] > rng.logistic(size=200)).astype(int)}
        >>> posterior = RVGA(model).run(data, progress_bar=False)
        >>> print(np.asarray(posterior.mean).round(1), round(posterior.elbo))
        [ 1.3 -2. ] -91

    Where each term depends on few entries of theta, as with crossed effects, no (P, P) matrix is factorized. All rows
    are then one solve: with default options, for data in memory of up to 800 rows per parameter.

    :param model: a NumPyro model whose rows are conditionally independent given global, continuous latents.
    :param str scheme: one update of q. ``"implicit"`` minimizes KL(q_t || p(rows | theta) q_(t-1)) exactly, block by
        block (equations 28-29). ``"explicit"`` takes the expectations under q_(t-1) (30-31). ``"ekf"`` is the extended
        Kalman filter (Theorem 3), ``"qkf"`` the quadratic Kalman filter for logistic rows (90). ``"laplace"`` is the
        batch Laplace approximation, with all rows in one block.
    :param str expectation: how E_q[log likelihood] and its derivatives are computed. ``"auto"``: ``"exact"``, closed
        forms, where there are any. Else ``"quadrature"`` for up to three predictors, and ``"monte_carlo"`` over the
        predictors beyond: a few nodes for every row, and more for a row that needs more. Also ``"probit"`` (58-61),
        ``"sigma_points"``, ``"linearized"`` (derivatives at the mean), or an
        :class:`~numpyro_rvga.core.expectations.by_nodes.Expectation` of your own: a function of log_prob, mean and
        covariance.
    :param order: derivatives of the log-likelihood that are used: 2, 1 or 0 (Corollary 1.1). ``"auto"``: 1, which
        includes the curvature of kinks. Closed forms have one order.
    :param block_size: rows of one implicit update. An integer asks for the plain recursion, in blocks of that size from
        the first row on (1: the paper's). ``"auto"``: 1,024, after a large first block and with a memory. Explicit
        schemes take rows one by one.
    :param first_block: rows of a first, joint solve: much of the error of one pass is made while q is wide. ``"auto"``:
        400 per parameter (no more than ``memory``, but 2,000 and 40 per parameter at least), or all rows if they are at
        most twice as many. With a given block_size, none.
    :param memory: rows to keep, those whose Gaussian summaries are least exact: the rows that came while q was wide in
        their direction, as those of rare levels. In the end they replace their summaries in joint solves of 400 rows
        per parameter, those with the largest errors first, until the errors left would move q by less than a tenth of a
        standard deviation even if all had one sign. ``"auto"``: 2,000 rows per parameter, within 2^25 numbers. None
        with a given block_size, and if predictors are not affine.
    :param str family: of q. ``"full"``; or ``"diagonal"``, ``"block-diagonal"`` (a block for each latent site) or
        ``"low-rank"`` (a precision of diagonal plus low rank), which make no (P, P) array. These three take the plain
        implicit or explicit recursion in blocks of ``block_size`` rows (``"auto"``: one), and project each result, as
        :class:`BONG` does with ``rule="implicit"`` or ``"bong"``. They have no bound, no memory and no certificate.
        Or a mapping from some sites to a family of their own: ``"gamma"``, ``"inverse-gamma"``, ``"beta"`` or
        ``"dirichlet"``, which must be their prior's. q is then a product of these and a Gaussian of the other sites. It
        is the posterior if there are no others and rows are conjugate, in a stream too. Rows in memory are one block,
        if they fit; ``elbo`` is then the bound. Or ``"auto"``, for rows in memory: sites whose prior is of such a
        family take it, all of them, or one, if the bound is then higher than that of one Gaussian.
        ``info["families"]`` has those taken, ``info["family_bounds"]`` the bounds.
    :param int rank: of the low-rank family.
    :param dynamics: how parameters move before each update (:class:`RandomWalk`, :class:`OrnsteinUhlenbeck`,
        :class:`LinearDynamics`), for streams that drift. The posterior is then of the parameters after the last row.
        Blocks have one row unless ``block_size`` says otherwise, and no rows are kept.
    :param shuffle: visit rows in random order, which ``rng_key`` determines. One pass over rows that are sorted, by
        class or by time, is much less accurate. ``"auto"``: without ``dynamics``, if rows can be read in any order:
        arrays, lists of blocks, :class:`ParquetRows`. True: raise an error for rows that cannot. False: in their order.
    :param float improper_prior_scale: standard deviation, in unconstrained space, of the normal that replaces improper
        priors. None (default) refuses them.
    :param float tolerance: squared length of the natural gradient, in nats, at which a block is solved, if it has also
        fallen to a millionth of what it was. Default: 1e-8 (float32: 1e-6). For blocks of a stream, whose errors add
        up, at most 1e-12 (1e-9) times the square of their number of rows. The joint solves before and after a stream of
        which rows are kept stop at 1e-6.
    :param int max_iterations: of a block's solve.
    :param int num_samples: nodes of Monte Carlo expectations.
    :param bool certify: evaluate the bound and its natural gradient on all rows at the end, if they can be read again,
        and take natural-gradient steps on all rows while they are needed. Without this, ``elbo`` is None, and the sum
        of the blocks' bounds is ``info["log_evidence_estimate"]``. For the implicit, explicit and quadratic schemes
        without dynamics; only the implicit scheme takes such steps.
    :param int max_looks: evaluations of all rows at the end, at most.
    :param float certificate_tolerance: squared length of the natural gradient, in nats, at which q is the best
        Gaussian. It is about twice the Kullback-Leibler divergence from that.
    :param mesh: devices that share the rows of each block, of one process or of several. Several processes run the same
        program on the same data, and each reads what its devices take. Blocks of a few rows are faster on one device.
    :param str local: latent variables of single rows, in a plate over the rows. ``"marginal"`` integrates them out of
        their row's density: discrete ones by a sum over their states, up to three continuous ones of the same terms by
        adaptive quadrature, any number if all is Normal. The quadrature is for smooth integrands with one mode. It does
        not see others far away, nor jumps, and ``info["elbo_error"]`` does not include its error. ``"prior"`` makes
        the conditional prior of Normal ones of known scale part of q: a looser bound, and the usual one of sparse
        Gaussian processes. ``"auto"``: ``"marginal"`` where that is possible; in a stream else ``"prior"``.
    :raises ValueError: for options that do not exist or exclude each other.

    **References**

    1. *The recursive variational Gaussian approximation (R-VGA)*, M. Lambert, S. Bonnabel, F. Bach (2021)
    """

    def __init__(
        self,
        model: Callable,
        *,
        scheme: str = "implicit",
        expectation: str | Expectation = "auto",
        order: int | str = "auto",
        block_size: int | str = "auto",
        first_block: int | str = "auto",
        memory: int | str = "auto",
        family: str | Mapping[str, str] = "full",
        rank: int = 10,
        dynamics: Dynamics | None = None,
        shuffle: bool | str = "auto",
        improper_prior_scale: float | None = None,
        tolerance: float | None = None,
        max_iterations: int = 200,
        num_samples: int = 256,
        certify: bool = True,
        max_looks: int = 3,
        certificate_tolerance: float = 1e-3,
        mesh: Mesh | None = None,
        local: str = "auto",
    ):
        check_choice("scheme", scheme, SCHEMES)
        by_site = isinstance(family, Mapping)
        check_choice("family", "full" if by_site else family, (*FAMILIES, "auto"))
        check_choice("shuffle", shuffle, SHUFFLES)
        self.options = Options(scheme, expectation, order, tolerance, max_iterations, num_samples)
        self.blocks = BlockPlan(self.options, block_size, first_block, memory, dynamics is not None)
        if scheme in ("ekf", "qkf", "laplace") and expectation != "auto":
            raise ValueError(f"scheme={scheme!r} fixes the expectation: leave expectation at 'auto'.")
        check_choice("local", local, LOCAL)
        self.options.check(improper_prior_scale)
        check_dynamics(dynamics)
        if dynamics is not None and (scheme == "laplace" or shuffle is True or self.blocks.keeps_or_begins):
            raise ValueError(
                "dynamics take rows in their order, block by block: leave shuffle off, first_block and memory at "
                "'auto', and use a recursive scheme."
            )
        self.model, self.dynamics, self.shuffle, self.mesh = model, dynamics, shuffle, mesh
        self.improper_prior_scale = improper_prior_scale
        reading: Info = {"joint_rows": self.blocks.joint_rows, "local": local, "mesh": mesh}
        self._engines = Engines(model, self.options, improper_prior_scale, dynamics, **reading)
        self.blocks.check_shared(self._engines.devices)
        certification = Certification(certify, max_looks, certificate_tolerance)
        full = FullFamily(self, self._engines, certification)  # takes the options that are set above, as others do
        self._family: Any = full  # or BestFamily, SiteFamilies or BONG, which have the same calls
        given = {"local": local != "auto", "mesh": mesh is not None}
        given["first_block or memory"] = self.blocks.keeps_or_begins
        if by_site or family == "auto":
            unused = given | {"scheme": scheme != "implicit", "dynamics": dynamics is not None}
            check_unused("families by site take", unused)
            by_families = partial(SiteFamilies, self, block_size)
            self._family = by_families(family) if isinstance(family, Mapping) else BestFamily(full, by_families)
        elif family != "full":
            self._family = online_method(
                model,
                scheme,
                expectation,
                family,
                given | {"order": order != "auto", "tolerance": tolerance is not None},
                rank=rank,
                num_samples=num_samples,
                dynamics=dynamics,
                block_size=1 if block_size == "auto" else block_size,
                shuffle=shuffle,
                improper_prior_scale=improper_prior_scale,
            )

    @property
    def state(self) -> AnyState | None:
        """The last run's state after the last rows that it took in, also if it was stopped; for :meth:`posterior`."""
        return self._family.state

    # ------------------------------------------------------------------ one call
    def run(
        self,
        data: Data | Iterable,
        *,
        rng_key: Array | None = None,
        init: Posterior | AnyState | None = None,
        progress_bar: bool = True,
        checkpoint: str | os.PathLike | None = None,
        every: int = EVERY,
        resume: bool = False,
        on_bad_row: str = "raise",
        **model_kwargs: Any,
    ) -> Posterior:
        """One pass over the data.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> blocks = [{name: array[i : i + 64] for name, array in data.items()} for i in range(0, 200, 64)]
            >>> streamed = RVGA(model).run(blocks, progress_bar=False)
            >>> streamed.num_rows, bool(np.allclose(streamed.mean, posterior.mean, atol=1e-4))
            (200, True)

        :param data: a mapping from the model's argument names to arrays that share their leading axis, the rows; a
            tuple of such arrays for positional arguments; or an iterable of such blocks, of any sizes: the result does
            not depend on how it is cut. If an iterable has ``num_rows``, and ``from_row(n)``, an iterable of what
            follows n rows, it is read in random order, 2^23 numbers or a part of eight row groups at a time
            (:class:`ParquetRows` has both, and lists need neither). Of others, no more than the first block is in
            memory at once.
        :param rng_key: for ``shuffle`` and Monte Carlo expectations. Default: ``jax.random.key(0)``.
        :param init: a posterior (or state) to go on from, in place of the prior.
        :param progress_bar: show rows done.
        :param checkpoint: a file for the state of the run, so that it can go on after a crash. The checkpoint before is
            kept as ``<checkpoint>.previous``.
        :param every: rows between checkpoints. One is also written when the run ends, in any way.
        :param resume: go on from ``checkpoint`` if that exists. The result is the same, to the bit, as without a stop.
            ``data`` are those of the stopped run, from their first row on: the rows that it took in are passed over.
            Data that have grown since then need ``shuffle=False``: the rows of the stopped run must still be the first.
        :param on_bad_row: what happens to a row that has NaN or infinite values, an outcome outside its distribution's
            support, or no finite likelihood. ``"raise"``: a ValueError. ``"skip"``: it is left out;
            ``info["num_skipped"]`` and ``info["skipped_rows"]`` (the first 1,000) say which.
        :param model_kwargs: go to every call of the model unchanged.
        :return: the posterior. ``info["converged"]`` is whether q is the best Gaussian, as far as is known (None: the
            scheme does not seek it, or rows of an earlier run count too). Where it is False, a warning says so. After
            evaluations of all rows, ``looks`` is their number after the pass (0 if all rows were in one solve),
            ``squared_natural_gradient`` is that at q, and ``bound_before`` and ``bound_after`` are the bounds before
            and after steps on all rows. Of streams too long to be kept, a sample of up to 2^23 numbers estimates these:
            ``bound_estimate`` with standard error ``bound_error``, and ``squared_natural_gradient`` with the size of
            its noise, ``squared_natural_gradient_noise``. ``elbo_error`` is by how many nats the expectations at q may
            be off, all together: above a thousandth, finer rules repeat the run. It is infinite where q reaches places
            of density zero: ``elbo`` is None then, and ``log_evidence_estimate`` what was found. After an error or
            Ctrl-C, the state after the last good rows is in :attr:`state`.
        :raises ValueError: for unusable data, naming the array and the row; for checkpoints that are damaged or of
            another run; and for sites whose density NumPyro finds to be another. ``init`` is never changed.
        :raises NotImplementedError: for discrete latents that cannot be summed out, for ``numpyro.param`` sites in a
            stream, and for rows of a stream that are not independent.
        """
        check_init(init, goes_on=True)
        passed: Info = {"checkpoint": checkpoint, "every": every, "resume": resume, "on_bad_row": on_bad_row}
        passed |= {"init": init, "progress_bar": progress_bar}
        rng_key = checked_key(rng_key)
        return self._family.run(data, rng_key=rng_key, **passed, **model_kwargs)

    # ------------------------------------------------------------------ functional form
    def init(self, data: Data, *, rng_key: Array | None = None, **model_kwargs: Any) -> AnyState:
        """The state before any row, for data of this form.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> int(RVGA(model).init(data).num_rows)
            0

        :param data: a block of data, as for :meth:`run`; used for its form only, and not absorbed.
        :return: the state, a pytree.
        """
        return self._family.init(data, rng_key=rng_key, **model_kwargs)

    def update(self, state: AnyState, data: Data) -> AnyState:
        """Absorb a block of rows: jointly (implicit and Laplace), or one by one (explicit schemes). With dynamics,
        parameters move once before a joint update, and before each row of the others.

        Pure: works under ``jax.jit``. Rows are not checked; a block that has no finite result leaves the state as is.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> import jax
            >>> method = RVGA(model)
            >>> state = jax.jit(method.update)(method.init(data), data)
            >>> int(state.num_rows)
            200

        :param state: from :meth:`init` or an earlier update.
        :param data: a mapping from argument names to arrays, or a tuple of arrays, of the form that :meth:`init` saw.
        :raises RuntimeError: before :meth:`init`.
        :raises ValueError: for arrays that are left out or differ in length.
        """
        return self._family.update(state, data)

    def posterior(self, state: AnyState) -> Posterior:
        """The posterior that a state stands for (prior terms that are not Gaussian solved for once more).

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> method = RVGA(model)
            >>> state = method.update(method.init(data), data)
            >>> print(np.asarray(method.posterior(state).mean).round(1))
            [ 1.3 -2. ]
        """
        return self._family.posterior(state)

    stream_groups = stream_groups

    # ------------------------------------------------------------------ parts of the data
    @property
    def takes_rounds(self) -> bool:
        """Whether merged parts can be moved to the best Gaussian of all rows: q must seek it."""
        seeks = self.options.scheme == "implicit" and self.options.has_bound
        return seeks and self.dynamics is None and isinstance(self._family, FullFamily)

    def sums_at(
        self,
        state: State,
        data: Data | Iterable,
        *,
        rng_key: Array | None = None,
        on_bad_row: str = "raise",
        **model_kwargs: Any,
    ) -> tuple[SiteSums, RowSet]:
        """Sums over the rows of their expected log-likelihoods and derivatives at a state, and which rows these are."""
        engine, source = self._opened_again(data, rng_key, on_bad_row, model_kwargs)
        return sums_at(engine, state, source)

    def sample_of(
        self,
        data: Data | Iterable,
        total: int,
        count: int,
        *,
        rng_key: Array | None = None,
        on_bad_row: str = "raise",
        **model_kwargs: Any,
    ) -> Rows:
        """A random sample of the ``total`` usable rows."""
        _, source = self._opened_again(data, rng_key, on_bad_row, model_kwargs)
        return sample_of(source, total, count)

    def _opened_again(
        self, data: Any, rng_key: Array | None, on_bad_row: str, model_kwargs: Keywords
    ) -> tuple[Engine, RowSource]:
        """The rows that an earlier run took in, and their engine."""
        options = PassOptions(on_bad_row=on_bad_row)
        source, head, _ = open_source(data, self.model, model_kwargs, options)
        engine = self._engines.get(head, dict(model_kwargs), checked_key(rng_key))
        return engine, usable_source(engine.program, source, head, None, options)[0]

    @property
    def last_engine(self) -> Engine:
        """The engine for the form of the last data.

        :raises RuntimeError: before :meth:`init`.
        """
        return self._engines.last_engine

    def engine_of(self, program: Program) -> Engine:
        """The engine for a program of this model."""
        return self._engines.of(program, default_key())
