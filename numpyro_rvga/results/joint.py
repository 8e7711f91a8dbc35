"""The posterior of a solve of all rows."""

from __future__ import annotations

from jax import Array

from ..core.gaussians import FullGaussian
from ..engines.batch import Fit, rows_info
from ..model.data.row_set import row_set
from ..model.data.rows import Rows
from ..options import Info
from .linearized import confirmed
from .posterior import Posterior
from .rounding import warn_of_lost_digits


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
        info | rows_info(reason) | fit.facts,
        state=state,
        num_rows=int(state.num_rows),
        row_sets=(row_set(rows),) if reason is None else (),
    )
    warn_of_lost_digits(posterior)
    return confirmed(posterior, rows, rng_key)
