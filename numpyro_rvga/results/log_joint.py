"""What a log joint density is compared with: all rows of a posterior, draws from it with their density, and finer
integrals."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..core.compilation import jit
from ..core.gaussians.mixture import GaussianMixture
from ..core.gaussians.packed_roots import PackedRoots, root_of
from ..model import Program
from ..model.data.rows import Arrays, Data, linspace_indices, num_rows, selected
from ..model.handlers.tracing import run_model
from .fitted import Fitted

MOST_UNDEFINED = 0.01  # of draws, where the log joint may be NaN: NUTS takes such points for impossible too
INTEGRAL_DRAWS, INTEGRAL_ROWS = 8, 256  # of :func:`integral_error`


def rows_with_outcome(program: Program, data: Data) -> dict[str, Any]:
    """:raises ValueError: if an observed site is not observed in ``data``, as it would be drawn at random; and for an
    outcome outside of its distribution's support."""
    rows = program.rows(data)
    few = rows if program.whole else {name: values[:2] for name, values in rows.items()}
    program.abstractly(partial(observed_values, program), few)
    if not program.whole:  # rows of a whole program are its own, which were checked when it was read
        program.check_rows(rows)
    return rows


def check_all_rows(posterior: Fitted, rows: Arrays) -> None:
    """:raises ValueError: if these are not as many rows as the posterior has absorbed."""
    count = posterior.program.count_rows(rows)
    if count != posterior.num_rows:
        raise ValueError(
            f"data has {count} rows, and the posterior has absorbed {posterior.num_rows}: give all of these, and no "
            "others."
        )


def all_rows(posterior: Fitted, data: Data) -> dict[str, Any]:
    """All rows that the posterior has absorbed, with their outcome.

    :raises NotImplementedError: after a run with dynamics. :raises ValueError: if they are not these.
    """
    if "dynamics" in posterior.info:
        raise NotImplementedError("parameters that move have no joint density with all rows to compare with.")
    rows = rows_with_outcome(posterior.program, data)
    check_all_rows(posterior, rows)
    return rows


def is_density(log_p: np.ndarray) -> bool:
    """Whether the log joint at draws (n,) is finite or minus infinity but for a few NaN, and finite somewhere."""
    undefined = np.isnan(log_p)
    return bool(undefined.mean() <= MOST_UNDEFINED and not np.isposinf(log_p).any() and np.isfinite(log_p).any())


def impossible_if_undefined(log_ratios: np.ndarray) -> np.ndarray:
    """The values with minus infinity in place of NaN and infinity: draws without a density have weight zero."""
    return np.where(np.isnan(log_ratios) | np.isposinf(log_ratios), -np.inf, log_ratios)


def are_equal(log_ratios: np.ndarray) -> bool:
    """Whether all are, but for rounding and for a few draws that are impossible: no tail can be fitted to them."""
    finite = log_ratios[np.isfinite(log_ratios)]
    return bool(len(finite) > 0.5 * len(log_ratios) and np.ptp(finite) < np.finfo(np.float32).eps)


def observed_values(program: Program, rows: Arrays) -> dict[str, Array]:
    with program.evaluating():
        trace, _ = run_model(program.model, rows, program.model_kwargs, row_plates=program.row_plates)
    for site in program.observed_sites:
        if not trace[site]["is_observed"]:
            raise ValueError(f"the data lack the outcome of site '{site}': only predictive() does without it.")
    return {site: trace[site]["value"] for site in program.observed_sites}


def is_of_points(posterior: Fitted) -> bool:
    """Whether the posterior's components are at points that are too far apart to give a density of the integrated
    sites."""
    return "bounds" in posterior.info.get("integration", {})


def draws_with_density(posterior: Fitted, rng_key: Array, count: int) -> tuple[Array, np.ndarray]:
    """theta (n, P) and log q (n,). Where there are but points of h, whose masses follow the evidence, it is the log
    evidence of h plus log q(x | h), up to a constant, at these very points."""
    gaussian = posterior.gaussian
    if not (isinstance(gaussian, GaussianMixture) and is_of_points(posterior)):
        theta = posterior.sample_unconstrained(rng_key, (count,))
        return theta, np.asarray(posterior.log_prob_unconstrained(theta), np.float64)
    integration, size = posterior.info["integration"], gaussian.means.shape[1]
    indices = posterior.program.layout.indices_of(posterior.info["integrated"])
    is_packed = isinstance(gaussian.roots, PackedRoots)  # there, the first entries of the noise are those of h
    of_h = np.isin(np.arange(size), np.arange(len(indices)) if is_packed else indices)
    point_key, noise_key = jax.random.split(rng_key)
    chosen = np.asarray(jax.random.choice(point_key, len(gaussian.means), (count,), p=gaussian.weights))
    noise = jnp.where(of_h, 0.0, jax.random.normal(noise_key, (count, size), gaussian.means.dtype))

    @jit
    def at_points(gaussian, chosen, noise):
        def one(draw):
            k, z = draw
            root = root_of(gaussian.roots, k)  # h has the same part of all determinants
            return gaussian.means[k] + root.times(z), -0.5 * z @ z - root.log_determinant()

        return lax.map(one, (chosen, noise), batch_size=64)

    at, log_density = at_points(gaussian, chosen, noise)
    theta = np.array(at)
    theta[:, indices] = np.asarray(integration["points"])[chosen]
    return jnp.asarray(theta), np.asarray(integration["bounds"])[chosen] + np.asarray(log_density, np.float64)


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
        count, inputs = num_rows(inputs), selected(inputs, linspace_indices(num_rows(inputs), INTEGRAL_ROWS))
        scale = count / num_rows(inputs)

    @jit
    def errors(theta: Array, inputs: Arrays) -> Array:
        def at(theta: Array) -> Array:
            differences = [
                jnp.sum(finer.log_probs(theta, inputs) - usual.log_probs(theta, inputs)) for finer, usual in pairs
            ]
            return jnp.sum(jnp.stack(differences))

        return lax.map(at, theta)

    theta = posterior.sample_unconstrained(jax.random.key(1), (INTEGRAL_DRAWS,))
    found = scale * np.asarray(errors(theta, {**inputs, **program.shared}), np.float64)
    return float(np.std(found[np.isfinite(found)], ddof=1)) if np.isfinite(found).sum() > 1 else np.inf
