"""By how much the integrals over latent variables of single rows are off: the same by more nodes, at draws from q."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.compilation import jit
from ..model.data.rows import Arrays, linspace_indices, num_rows, selected
from .fitted import Fitted

NUM_DRAWS = 8
MOST_ROWS = 256


def integral_error(posterior: Fitted, rows: Arrays) -> float:
    """The standard deviation among draws from q of the error of the log likelihood, in nats: by so much q may be off.

    Importance ratios do not see it, since they are of the same integrals. Zero for models without such integrals.
    """
    program = posterior.program
    pairs = [(terms._replace(density=terms.finer), terms) for terms in program.terms if terms.finer is not None]
    if not pairs:
        return 0.0
    inputs, scale = program.inputs(rows), 1.0
    if not program.whole:
        count, inputs = num_rows(inputs), selected(inputs, linspace_indices(num_rows(inputs), MOST_ROWS))
        scale = count / num_rows(inputs)

    @jit
    def errors(theta: Array, inputs: Arrays) -> Array:
        def at(theta: Array) -> Array:
            differences = [
                jnp.sum(finer.log_probs(theta, inputs) - usual.log_probs(theta, inputs)) for finer, usual in pairs
            ]
            return jnp.sum(jnp.stack(differences))

        return lax.map(at, theta)

    theta = posterior.sample_unconstrained(jax.random.key(1), (NUM_DRAWS,))
    found = scale * np.asarray(errors(theta, {**inputs, **program.shared}), np.float64)
    return float(np.std(found[np.isfinite(found)], ddof=1)) if np.isfinite(found).sum() > 1 else np.inf
