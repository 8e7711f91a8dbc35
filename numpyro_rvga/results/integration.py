"""Integrating hyperparameters out: from a model and its data to a mixture of Gaussians."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh
from jax.typing import ArrayLike

from ..core.groups.importance import Estimate
from ..core.updates.factors import Nodes
from ..engines.engine import Engine
from ..engines.integration.bounds import Bound, LogDensity, weighted_rows
from ..engines.integration.design import mixture_of
from ..engines.integration.evidence_estimate import EvidenceEstimate
from ..engines.integration.importance import LARGE_ERROR, MOST_WITH_DENSITY
from ..engines.integration.nested import Integral
from ..engines.maximized_bound import MaximizedBound, SparseMaximizedBound
from ..engines.registry import Engines
from ..engines.row_chunks import chunks_of, distinct_chunks_of
from ..engines.sparse import sparse_engine
from ..model import Program
from ..model.bad_rows import NotFinite
from ..model.data.row_set import row_set, total
from ..model.data.rows import Data, Rows
from ..model.handlers.conditional import conditional_model
from ..model.hyperparameters import Choice, choose_sites
from ..options import MARGINALS, Info, Options, check_choice, checked_key, default_key
from ..progress import progress
from ..user_warnings import warn
from .fitted import Fitted
from .integrator import CONVERGED, MOST_BY_IMPORTANCE, MOST_ON_LATTICE, Integrator, few_count
from .log_joint import check_all_rows
from .marginal_nuts import has_mixed

DEFAULTS = Options("implicit", "auto", "auto", None, 500, 256)

MOST_INTEGRATED = 200
MOST_PARAMETERS = 500
TOO_LONG = (
    "the model has {} parameters, of which each component of a mixture would have a full covariance: that is possible "
    "for at most {}, unless each row depends on a few given what is integrated out"
)


class Integration:
    """Compiled once for each form of the data, and set of sites.

    :param mesh: devices that share the rows. :param marginal: one of ``MARGINALS``.
    """

    def __init__(
        self, options: Options, improper_prior_scale: float | None, mesh: Mesh | None = None, marginal: str = "bound"
    ):
        self._options, self._scale, self._mesh, self._marginal = options, improper_prior_scale, mesh, marginal
        self._engines: dict[tuple, Engines] = {}
        self._choices: dict[tuple, Choice] = {}
        self._log_density: LogDensity | None = None

    def __getstate__(self) -> dict[str, object]:
        """Without what is compiled, for other processes."""
        return self.__dict__ | {"_engines": {}, "_choices": {}, "_log_density": None}

    def choose(self, program: Program, sites: str | Sequence[str], rows: Rows) -> Choice:
        """The sites to integrate out, from what the user has said.

        :param rows: all that there are.
        :raises ValueError: for names that are no latent sites, or all of them.
        """
        is_long = program.layout.size > MOST_PARAMETERS
        most = MOST_BY_IMPORTANCE if is_long else MOST_INTEGRATED
        if program.params.layout.size:
            return Choice((), "the model has numpyro.param sites, which are learned instead")
        if sites == "auto":
            key = (id(program.model), program.layout.site_names, program.row_plates)
            if key not in self._choices:
                self._choices[key] = choose_sites(
                    program, lambda given: self._conditional(program, given, rows, default_key()).program
                )
            choice = self._choices[key]
            size = sum(program.layout.sizes[name] for name in choice.sites)
            is_one_term = any(terms.by_draws for terms in program.terms)
            if (is_one_term or not 0 < size <= MOST_ON_LATTICE) and _may_be_integrated_whole(program):
                return Choice(program.layout.site_names)
            if size > most:
                names = ", ".join(choice.sites)
                return Choice((), f"{names}: {size} entries, and at most {most} can be integrated out")
            if is_long and choice.sites and not self._is_sparse_given(program, choice.sites, rows):
                return Choice((), TOO_LONG.format(program.layout.size, MOST_PARAMETERS))
            return choice._replace(fewer=()) if is_long else choice  # of more parameters, fewer sites may be dense
        unknown = [name for name in sites if name not in program.layout.site_names]
        if unknown or not sites:
            raise ValueError(
                f"integrate must name latent sites of the model ({', '.join(program.layout.site_names)}), not "
                f"{unknown[0] if unknown else 'none'!r}."
            )
        if all(name in sites for name, size in program.layout.sizes.items() if size):
            sites = program.layout.site_names  # with those that have no entries
            most = MOST_WITH_DENSITY  # no Gaussian is left, so that no mixture of a few is the posterior
            if program.integrates_row_latents:
                raise ValueError(f"integrate={list(sites)!r} leaves no site that is Gaussian given these: name fewer.")
        size = sum(program.layout.sizes[name] for name in sites)
        if size > most:
            raise ValueError(
                f"the sites {', '.join(sites)} have {size} entries, and at most {most} can be integrated "
                "out: name fewer sites, or run NUTS."
            )
        if is_long and not self._is_sparse_given(program, tuple(sites), rows):
            raise ValueError(f"{TOO_LONG.format(program.layout.size, MOST_PARAMETERS)}. Leave integrate at False.")
        return Choice(tuple(name for name in program.layout.site_names if name in sites))

    def __call__(
        self,
        program: Program,
        sites: str | Sequence[str],
        rows: Rows,
        rng_key: Array,
        progress_bar: bool,
        start: ArrayLike | None = None,
    ) -> tuple[Info | None, str]:
        """The fields of a posterior; None if nothing is integrated out, and why nothing is.

        :param program: of the whole model. :param sites: which are integrated out, as the user has said.
        :param start: theta (P,), where the search starts.
        :raises NotFinite: if sites that were named leave a bound without a value.
        """
        choice = self.choose(program, sites, rows)
        if not choice.sites:
            return None, choice.reason
        options = rng_key, progress_bar, start
        try:
            fields = self._integrated(program, choice.sites, rows, *options, may_run_nuts=not choice.fewer)
            return fields or self._integrated(program, choice.fewer, rows, *options), ""
        except NotFinite as error:
            if sites != "auto":
                raise
            return None, f"{', '.join(choice.sites)}: {error}"

    def _integrated(
        self,
        program: Program,
        sites: tuple[str, ...],
        rows: Rows,
        rng_key: Array,
        progress_bar: bool,
        start: ArrayLike | None,
        *,
        may_run_nuts: bool = True,
    ) -> Info | None:
        indices = program.layout.indices_of(sites)
        others = np.setdiff1d(np.arange(program.layout.size), indices)
        is_long = program.layout.size > MOST_PARAMETERS
        mean, deviation = (x[indices] for x in _prior_moments(program))
        with progress(progress_bar, None, "L(h)", "it") as bar:
            integrator = Integrator(
                self._bounds(program, sites, rows, rng_key),
                self._estimate_of,
                mean,
                deviation,
                is_long,
                rng_key,
                lambda: bar.update(1),
                may_run_nuts,
            )
            integrated = integrator(None if start is None else np.asarray(start)[indices])
        if integrated is None:
            return None
        bound, integral = integrated
        _warn(integral, sites)
        solved = bound if is_long and isinstance(bound, SparseMaximizedBound) else None
        return {
            "program": program,
            "gaussian": mixture_of(integral.design, indices, others, program.dtype, solved),
            "elbo": integral.log_evidence,
            "info": {
                "integrated": list(sites),
                "integration": integral.info,
                "converged": integral.converged > CONVERGED,
                "marginal": "exact" if isinstance(bound, LogDensity) or bound.is_exact else self._marginal,
            }
            | ({"elbo_error": integral.error} if self._marginal == "importance" else {}),
            "continuation": None,
            "state": None,
            "num_rows": program.count_rows(rows),
        }

    def _estimate_of(self, bound: Bound) -> Callable[..., Estimate] | None:
        """The estimate of log p(y, h) in place of the bound; None: the bound.

        :raises NotImplementedError: for models of crossed effects.
        """
        if isinstance(bound, LogDensity) or bound.is_exact:
            return None
        if self._marginal == "bound":
            if bound.nodes == "usual":
                return None
            return lambda *at: Estimate(bound.by_many_nodes(*at), jnp.zeros(()))
        if isinstance(bound, SparseMaximizedBound):
            raise NotImplementedError(
                f"marginal='importance' takes whole matrices, of at most {MOST_PARAMETERS} parameters: use "
                "marginal='bound'."
            )
        return EvidenceEstimate.of(bound)

    def _conditional(self, program: Program, sites: tuple[str, ...], rows: Rows, rng_key: Array) -> Engine:
        """The model given these sites."""
        key = frozenset(sites), program.whole, program.evaluates, program.integrates_row_latents
        if key not in self._engines:
            means, _ = _prior_moments(program)
            starts = {name: np.asarray(x) for name, x in program.layout.unravel(means).items() if name in sites}
            self._engines[key] = Engines(
                conditional_model(program.model, starts),
                self._options,
                self._scale,
                batch=True,
                whole=program.whole,
                evaluates=program.evaluates,
                mesh=self._mesh,
                local="marginal" if program.integrates_row_latents else "prior",
            )
        return self._engines[key].get(rows, program.model_kwargs, rng_key, rows)

    def _is_sparse_given(self, program: Program, sites: tuple[str, ...], rows: Rows) -> bool:
        """Whether terms depend on few of the other parameters, given these sites."""
        engine = self._conditional(program, sites, rows, default_key())
        return sparse_engine(engine, rows, given_params=True) is not None

    def _bounds(
        self, program: Program, sites: tuple[str, ...], rows: Rows, rng_key: Array
    ) -> Callable[[Nodes | None], tuple[Bound, Any]]:
        """Nodes of expectations, or None for few, if that is worth it -> the maximized bound as a function of the
        sites, and the rows in the form that it takes."""
        if len(sites) == len(program.layout.site_names):
            if self._log_density is None or self._log_density.program is not program:
                self._log_density = LogDensity(program)
            log_density = self._log_density, weighted_rows(program, rows)
            return lambda nodes: log_density
        engine = self._conditional(program, sites, rows, rng_key)
        left = [name for name in program.layout.site_names if name not in sites]
        if list(engine.program.layout.site_names) != left:
            raise NotImplementedError(
                f"given {', '.join(sites)}, the model has the latent sites {list(engine.program.layout.site_names)} "
                f"outside the rows, and not {left}: integrate other sites."
            )
        effort, sparse = engine.effort, None
        if program.layout.size > MOST_PARAMETERS or self._marginal == "bound":
            sparse = sparse_engine(engine, rows, given_params=True)
        if sparse is not None:
            problem, chunks = sparse.problem(rows), chunks_of(engine, rows, sparse.sparsity.numbers_per_row)
            make = partial(SparseMaximizedBound.of, sparse, problem, chunks)
        else:
            chunks = distinct_chunks_of(engine, rows)
            make = partial(MaximizedBound.of, engine, effort.settings_of_many())
        begin = effort.nodes_of_many_solves(chunks.weights.size)
        return lambda nodes: (make(nodes or begin), chunks)


def check_sites(argument: str, sites: object, choices: str) -> None:
    """:raises ValueError: for what is neither "auto" nor several names. ``choices``: what else may be given."""
    if sites != "auto" and (isinstance(sites, str) or not isinstance(sites, Sequence)):
        raise ValueError(f"{argument} must be {choices} or a list of site names, not {sites!r}.")


def integrate(
    posterior: Fitted,
    data: Data,
    sites: str | Sequence[str],
    rng_key: Array | None,
    progress_bar: bool,
    marginal: str,
) -> Info:
    """See :meth:`Posterior.integrate`."""
    check_choice("marginal", marginal, MARGINALS)
    check_sites("sites", sites, "'auto'")
    program = posterior.program
    rows = program.rows(data)
    program.check_rows(rows)
    check_all_rows(posterior, rows)
    if posterior.row_sets and row_set(rows) != total(posterior.row_sets):
        warn(
            "data holds other numbers than the rows that the posterior has absorbed, or numbers of other types: the "
            "mixture is the posterior of these data alone."
        )
    integration = Integration(DEFAULTS, program.improper_prior_scale, marginal=marginal)
    key = checked_key(rng_key)
    fields, reason = integration(program, sites, rows, key, progress_bar, posterior.mean)
    return {"info": dict(posterior.info) | {"not_integrated": reason}} if fields is None else fields


def _prior_moments(program: Program) -> tuple[np.ndarray, np.ndarray]:
    """Means and standard deviations of theta, (P,)."""
    if program.layout.size > MOST_PARAMETERS:
        return program.marginals.mean, np.sqrt(program.marginals.variance)
    prior = program.initial_state
    return np.asarray(prior.mean), np.linalg.norm(np.asarray(prior.root), axis=1)


def _may_be_integrated_whole(program: Program) -> bool:
    """Whether quadrature over all sites finds more than one Gaussian does, and takes less than bounds given many."""
    return program.layout.size <= MOST_WITH_DENSITY and not program.integrates_row_latents and not program.is_conjugate


def _warn(integral: Integral, sites: tuple[str, ...]) -> None:
    names, info, problems = ", ".join(sites), integral.info, []
    if not info.get("is_complete", True):
        problems.append(
            f"the marginal of {names} is so wide that {len(info['points'])} points did not reach its ends: is the "
            "prior of these sites proper?"
        )
    elif info.get("change_at_doubled_spacing", 0.0) > LARGE_ERROR:
        problems.append(
            f"the moments of {names} still change by {info['change_at_doubled_spacing']:.2f} standard deviations as "
            "the lattice of points is refined."
        )
    if info["method"] == "nuts" and not has_mixed(info):
        problems.append(
            f"the chains of {names} have not mixed: R-hat = {info['r_hat']:.2f}, and "
            f"{info['effective_sample_size']:.0f} effective draws. Compare with NUTS, started from posterior.nuts()."
        )
    if few_count(info):
        problems.append(
            f"few of the {len(info['points'])} points of {names} count (Pareto k = {info['khat']:.2f}): compare with "
            "NUTS, started from posterior.nuts()."
        )
    elif info.get("error", 0.0) > LARGE_ERROR:
        problems.append(
            f"{len(info['points'])} points of {names} leave an error of {info['error']:.2f} standard deviations: "
            "compare with NUTS, started from posterior.nuts()."
        )
    if integral.converged <= CONVERGED:
        problems.append(
            f"the bound given {names} is not maximized at points that have {1 - integral.converged:.2g} of the mass: "
            "raise max_iterations or tolerance, or use float64."
        )
    for problem in problems:
        warn(problem)
