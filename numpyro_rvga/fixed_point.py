"""FixedPointVI: batch variational Gaussian inference."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from .core.expectations.by_nodes import Expectation
from .core.gaussians import FullGaussian
from .engines.batch import BatchSolver
from .engines.registry import Engines
from .model.data.rows import Data
from .options import LOCAL, MARGINALS, Options, check_choice, checked_key
from .results.conditions import Conditions, check_conditions
from .results.fitted import check_init
from .results.integration import Integration, check_sites
from .results.joint import joint_posterior
from .results.posterior import Posterior

SCHEDULES = ("incremental", "batch", "gradient")


class FixedPointVI:
    """The best Gaussian: maximizes the variational bound over all rows, with the true prior in it.

    **Example**

    With the model and the data of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import FixedPointVI
        >>> best = FixedPointVI(model).run(data, progress_bar=False)
        >>> print(np.asarray(best.mean).round(1), round(best.elbo), best.info["converged"])
        [ 1.3 -2. ] -91 True

    Models that cannot be run on some of the rows, such as those with a latent value for each row, are run on all of
    them at once. The model's ``numpyro.param`` sites are learned: L-BFGS maximizes the bound in them, with the best q
    at each step; see :attr:`Posterior.params`.

    Where each term depends on few entries of theta, as with crossed effects, ``schedule="incremental"`` eliminates the
    longest site. The work then grows with the cube of the number of all other parameters.

    :param model: a NumPyro model whose latents are continuous and whose observations are conditionally independent.
    :param str schedule: ``"incremental"`` (FPi) alternates one fixed-point step V <- T(V) of the covariance with Newton
        steps of the mean, which are cheap where predictors are affine; elsewhere one step moves both. ``"batch"`` (FPb)
        solves for the mean to its end, then for the covariance, in turn. ``"gradient"`` (GRAD) is L-BFGS in the mean
        and the covariance's Cholesky factor. The first two shorten steps that would lower the bound, so it never falls.
    :param str expectation: as for :class:`RVGA`: ``"auto"``, ``"exact"``, ``"probit"``, ``"quadrature"``,
        ``"sigma_points"``, ``"monte_carlo"``, ``"linearized"`` or your own.
    :param order: derivatives of the log-likelihood that are used: 2, 1, 0 or ``"auto"``.
    :param float improper_prior_scale: standard deviation, in unconstrained space, of the normal that replaces improper
        priors. None (default) refuses them.
    :param float tolerance: squared length of the natural gradient, in nats, at which the bound is maximized. Default:
        1e-8 in float64, 1e-6 in float32 and by L-BFGS. Also the rise of the bound in the last step of learning;
        default: 1e-5.
    :param int max_iterations: of the fixed point, or of L-BFGS.
    :param int num_samples: nodes of Monte Carlo expectations.
    :param integrate: latent sites to integrate out. The result is then a mixture of Gaussians, one at each of many
        values of these sites, weighted by the data. ``"auto"`` takes as few sites as make the rest a latent Gaussian
        model: scales, correlations, length scales. Where quadrature and importance sampling cannot integrate them, NUTS
        draws them, and ``elbo`` is then None. All sites may be named if they have at most six entries, and ``"auto"``
        takes them all where no choice helps: the posterior is then found by quadrature. False (default) integrates
        nothing.
    :param str marginal: log p(data, integrated sites) is taken to be: ``"bound"``, the bound given these sites; or
        ``"importance"``, the log of an average of p/q over quasi-random values of the other sites, one independent
        group of them at a time. This is closer, and takes longer. It is a lower bound in expectation only:
        ``info["elbo_error"]`` is its standard error.
    :param mesh: devices that share the rows; see :class:`RVGA`.
    :param str local: latent variables of single rows: ``"marginal"`` or ``"prior"``; see :class:`RVGA`. If all of them
        are discrete, each row sums over its states in either case.
    :raises ValueError: for options that do not exist or exclude each other.

    **References**

    1. *A fixed-point operator for inference in variational Bayesian latent Gaussian models*, R. Sheth and R. Khardon
       (2016)
    """

    def __init__(
        self,
        model: Callable,
        *,
        schedule: str = "incremental",
        expectation: str | Expectation = "auto",
        order: int | str = "auto",
        improper_prior_scale: float | None = None,
        tolerance: float | None = None,
        max_iterations: int = 500,
        num_samples: int = 256,
        integrate: str | bool | Sequence[str] = False,
        marginal: str = "bound",
        mesh: Mesh | None = None,
        local: str = "prior",
    ):
        check_choice("schedule", schedule, SCHEDULES)
        check_choice("marginal", marginal, MARGINALS)
        check_choice("local", local, LOCAL)
        self.options = Options("implicit", expectation, order, tolerance, max_iterations, num_samples)
        self.options.check(improper_prior_scale)
        if schedule == "gradient" and expectation in ("probit", "linearized"):
            raise ValueError(f"schedule='gradient' needs a bound to climb, and expectation={expectation!r} has none.")
        self.model, self.schedule = model, schedule
        self._engines = Engines(
            model, self.options, improper_prior_scale, batch=True, joint_rows=math.inf, local=local, mesh=mesh
        )
        self._solver = BatchSolver(self.options, schedule, "FixedPointVI")
        self.integrate = _checked_integrate(integrate, schedule, expectation)
        self._integration = Integration(self.options, improper_prior_scale, mesh, marginal)

    def run(
        self,
        data: Data,
        *,
        rng_key: Array | None = None,
        init: Posterior | None = None,
        progress_bar: bool = True,
        **model_kwargs: Any,
    ) -> Posterior:
        """Maximize the bound.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> from numpyro_rvga import FixedPointVI
            >>> best = FixedPointVI(model).run(data, init=posterior, progress_bar=False)
            >>> best.elbo >= posterior.elbo - 1e-3, bool(np.all(np.diff(best.info["bounds"]) >= -1e-3))
            (True, True)

        :param data: a mapping from the model's argument names to arrays that share their leading axis, the rows; or a
            tuple of such arrays for positional arguments. Their Jacobians are in memory one chunk of rows at a time.
        :param rng_key: for Monte Carlo expectations. Default: ``jax.random.key(0)``.
        :param init: a posterior of the same sites to start from, such as RVGA's. The rows that it has seen are not
            counted: the prior is the model's.
        :param progress_bar: show iterations and the bound.
        :param model_kwargs: go to every call of the model unchanged.
        :return: the posterior. ``info`` holds ``converged``, ``iterations``, the bound after each (``bounds``), when
            that was, in seconds since the start of this call (``seconds``; 20 iterations of L-BFGS are timed together),
            in how many of them positive curvatures of the log-likelihood were set to zero to keep the precision
            positive definite (``clamped_iterations``), and in how many the plain fixed point V <- T(V) would have gone
            to and fro without coming nearer, as in Theorem 1's cycle of two, and was damped (``cycling_iterations``).
            Steps by few nodes or draws, which only find where to begin, are not among them.
            ``elbo_error`` is as in :meth:`RVGA.run` (not with learned parameters). Where the bound is not maximized,
            as far as its expectations can tell, ``converged`` is False, and a warning says why. Where predictors were
            linearized and draws do not confirm the bound, ``elbo`` is None, and ``info`` has it as
            ``log_evidence_estimate``.
            With ``integrate``, it holds ``integrated``, the sites (or ``not_integrated``, why there are none), and
            ``integration``: the ``points`` h in unconstrained space, (K, d), the posterior's ``mass`` at each, and how
            many times the bound was maximized (``evaluations``). ``elbo`` is then the log of the integral of exp(bound
            given h).
        :raises ValueError: for unusable data, naming the array and the row.
        :raises NotImplementedError: for discrete latents that cannot be summed out.
        """
        started = time.perf_counter()
        check_init(init, goes_on=False)
        rng_key = checked_key(rng_key)
        engine, rows, reason = self._engines.together(data, model_kwargs, rng_key)
        if init is not None:
            engine.program.check_same_sites(init.program)
        not_integrated = {}
        if self.integrate:
            start = None if init is None else init.mean
            fields, why = self._integration(engine.program, self.integrate, rows, rng_key, progress_bar, start)
            if fields is not None:
                return Posterior(**fields)
            not_integrated = {"not_integrated": why}
        nearby = None if init is None else FullGaussian(init.mean, init.scale)
        fit = self._solver(engine, rows, nearby, progress_bar=progress_bar, started=started)
        info = {"schedule": self.schedule, "expectation": self.options.as_info["expectation"], **not_integrated}
        return joint_posterior(fit, rows, reason, info, rng_key)

    @classmethod
    def conditions(
        cls,
        model: Callable,
        data: Data,
        *,
        posterior: Posterior | None = None,
        means: ArrayLike | None = None,
        variances: ArrayLike | None = None,
        expectation: str | Expectation = "auto",
        order: int | str = "auto",
        num_samples: int = 256,
        rng_key: Array | None = None,
        **model_kwargs: Any,
    ) -> Conditions:
        """Whether the paper's conditions for the convergence of V <- T(V) at a fixed mean hold for a model.

        With ``u ~ N(m, v)`` the predictor of a row under q, phi its log-likelihood and ``gamma(m, v) = -E[phi''(u)]``,
        they are: ``gamma >= 0`` (condition 1); at fixed m, ``gamma`` nowhere falls (2a) or nowhere rises (2b) as v
        grows. Theorem 1: under 1 and 2b the fixed point converges to the optimum, under 1 and 2a to the optimum or
        to a cycle of two. :meth:`run` shortens steps that would lower the bound, with or without the conditions.

        A site's predictor is what the method takes expectations over: the logit of a Bernoulli, the log rate of a
        Poisson or exponential, and the mean less the observation of a normal or Laplace site. Sites with several
        predictors have a matrix for gamma: its smallest eigenvalue decides condition 1, condition 2 is not defined.

        **Example**

        With the model, the data and the posterior of :class:`RVGA`'s example:

        .. doctest::

            >>> from numpyro_rvga import FixedPointVI
            >>> conditions = FixedPointVI.conditions(model, data, posterior=posterior)
            >>> conditions.positive, conditions.increasing, conditions.decreasing
            (True, False, False)
            >>> print(conditions.sites["y"].posterior)
            condition 1 holds, condition 2a fails, condition 2b fails

        :param model: a NumPyro model, as for the constructor.
        :param data: rows with their outcome, as :meth:`run` takes them. Over the grid, at most 200 different densities
            of a site are evaluated: those of up to 200 rows, evenly spaced. At the posterior, all rows are.
        :param posterior: a posterior of the same sites: the conditions are reported also at the ``(m, v)`` that the
            rows have under it.
        :param means: the grid of m. Default: from -8 to 8, and quantiles of the posterior's m. Give it for location
            likelihoods, such as Student's t, whose outcomes lie elsewhere.
        :param variances: the grid of v. Default: from 0.01 to 100, and quantiles of the posterior's v. Sites with
            several predictors are evaluated at means drawn from the box that ``means`` spans and covariances v I.
        :param expectation: as for the constructor.
        :param order: as for the constructor.
        :param num_samples: as for the constructor.
        :param rng_key: for Monte Carlo expectations. Default: ``jax.random.key(0)``.
        :param model_kwargs: go to every call of the model unchanged.
        :return: the results, which print as a summary, and draw a map with their ``plot()``.
        :raises ValueError: for unusable data, options or grids, and for a posterior of other latent sites.
        :raises NotImplementedError: for discrete latents.
        """
        options = cls(model, expectation=expectation, order=order, num_samples=num_samples).options
        rng_key = checked_key(rng_key)
        return check_conditions(model, options, data, posterior, means, variances, rng_key, model_kwargs)


def _checked_integrate(integrate: Any, schedule: str, expectation: str | Expectation) -> str | tuple[str, ...]:
    """\"auto\", or names, or none.

    :raises ValueError: for anything else, and other options that exclude it.
    """
    if integrate is False:
        return ()
    check_sites("integrate", integrate, "'auto', False")
    if not integrate:
        raise ValueError(f"integrate={integrate!r} names no sites: name some, or leave it at False.")
    if schedule != "incremental":
        raise ValueError(f"integrate={integrate!r} needs schedule='incremental', not {schedule!r}.")
    if expectation == "linearized":
        raise ValueError("integrate weighs the bound at each value, and expectation='linearized' has none.")
    return integrate if integrate == "auto" else tuple(integrate)
