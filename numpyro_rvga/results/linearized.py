"""Bounds of models whose predictors were linearized: whether draws from q confirm them."""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np
from jax import Array

from ..model.data.rows import Arrays
from ..streams.model_check import agrees
from ..user_warnings import warn
from .log_joint import log_joint

if TYPE_CHECKING:
    from .posterior import Posterior

NUM_DRAWS = 200


def confirmed(posterior: Posterior, rows: Arrays, rng_key: Array) -> Posterior:
    """The posterior, without its bound if that is one of a tangent to the model, and draws do not confirm it.

    The bound is the mean of log p - log q over draws from q.

    :param rows: all that the posterior has absorbed. :param rng_key: of the draws.
    """
    program, bound = posterior.program, posterior.elbo
    if bound is None or all(terms.is_affine for terms in (*program.terms, *program.prior.terms)):
        return posterior
    theta = posterior.sample_unconstrained(rng_key, (NUM_DRAWS,))
    log_q = np.asarray(posterior.log_prob_unconstrained(theta), np.float64)
    log_ratios = log_joint(program, theta, rows) - log_q
    mean, error = float(np.mean(log_ratios)), float(np.std(log_ratios, ddof=1)) / math.sqrt(NUM_DRAWS)
    if agrees(bound, mean, error, exact=False):
        return posterior
    warn(
        f"the bound is {bound:.6g} nats with linearized predictors, and {mean:.6g} (standard error {error:.2g}) by "
        f"{NUM_DRAWS} draws from q. So there is no bound, and q may be off: compare with NUTS, or start NUTS from this "
        "posterior."
    )
    return dataclasses.replace(posterior, elbo=None, info={**posterior.info, "log_evidence_estimate": bound})
