"""The posterior of a solve of all rows."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from jax import Array

from ..core.gaussians import FullGaussian
from ..engines.batch import Fit, rows_info
from ..model.data.row_set import row_set
from ..model.data.rows import Arrays, Rows
from ..options import Info
from ..streams.model_check import agrees
from ..user_warnings import warn
from .log_joint import draws_with_density
from .posterior import Posterior
from .rounding import warn_of_lost_digits

NUM_DRAWS = 200


def joint_posterior(fit: Fit, rows: Rows, reason: str | None, info: Info, rng_key: Array) -> Posterior:
    """The posterior, with warnings of lost digits and of a bound that draws from it do not confirm.

    :param rows: all of them. :param reason: why they are no independent terms; None: they are.
    :param info: the method's options, for the posterior's. :param rng_key: of the draws.
    """
    state = fit.state
    posterior = Posterior(
        fit.program,
        FullGaussian(state.mean, state.root),
        fit.bound,
        info | rows_info(reason) | fit.info,
        state=state,
        num_rows=int(state.num_rows),
        row_sets=(row_set(rows),) if reason is None else (),
    )
    warn_of_lost_digits(posterior)
    return confirmed(posterior, rows, rng_key)


def confirmed(posterior: Posterior, rows: Arrays, rng_key: Array) -> Posterior:
    """The posterior, without its bound if that is one of a tangent to the model, and draws do not confirm it.

    The bound is the mean of log p - log q over draws from q.

    :param rows: all that the posterior has absorbed. :param rng_key: of the draws.
    """
    program, bound = posterior.program, posterior.elbo
    if bound is None or all(terms.is_affine for terms in (*program.terms, *program.prior.terms)):
        return posterior
    theta, log_q = draws_with_density(posterior, rng_key, NUM_DRAWS)
    log_ratios = posterior.log_densities.joint(theta, rows) - log_q
    mean, error = float(np.mean(log_ratios)), float(np.std(log_ratios, ddof=1)) / math.sqrt(NUM_DRAWS)
    if agrees(bound, mean, error, exact=False):
        return posterior
    warn(
        f"the bound is {bound:.6g} nats with linearized predictors, and {mean:.6g} (standard error {error:.2g}) by "
        f"{NUM_DRAWS} draws from q. So there is no bound, and q may be off: compare with NUTS, or start NUTS from this "
        "posterior."
    )
    return dataclasses.replace(posterior, elbo=None, info={**posterior.info, "log_evidence_estimate": bound})
