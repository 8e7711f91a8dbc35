"""Whether a model's density is finite, and read as it is: checks before the first solve, and error messages."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.compilation import at_once, jit_once
from .bound.local_draws import drawn_of_row, partly_observed
from .data.arguments import finite_rows
from .data.arrays import BadData
from .data.rows import Arrays
from .own_density import log_joint
from .program import Program

NUM_STARTS = 4
NUM_TRIED = 256
NUM_DRAWS = 2  # of the prior's Gaussian
NUM_STATES = 8  # joint ones, at each of these
SAME = 1e-3  # of the sum of absolute densities: what rounding may change


class NotFinite(ValueError):
    """Rows, or a model, whose density has no finite value where it is needed."""


def check_start(program: Program) -> None:
    """:raises ValueError: naming the site, for data with NaN that the model does not handle."""
    arrays = [np.asarray(array) for array in program.example_row.values()]
    if not any(array.dtype.kind == "f" and not np.isfinite(array).all() for array in arrays):
        return
    inputs = program.inputs(program.example_rows)

    def at(theta):
        terms = program.log_likelihood(theta, inputs)
        return sum(jnp.sum(values) for values in terms.values()), terms

    points = program.points_of_prior(NUM_STARTS)
    gradients, terms = at_once(lambda: jax.lax.map(jax.grad(at, has_aux=True), points))
    if np.isnan(gradients).any(axis=1).all():
        bad = {
            name: np.isnan(values.reshape(*values.shape[:2], -1)).any(axis=2).all(axis=0)
            for name, values in terms.items()
        }
        site = next((name for name, rows in bad.items() if rows.any()), next(iter(terms)))
        raise BadData(_not_finite_message(program, site, int(np.argmax(bad[site])) if bad[site].any() else None))


def _not_finite_message(program: Program, site: str, row: int | None) -> str:
    """:param row: where the log-likelihood is NaN; None if only its gradient is known to be."""
    arrays = {name: np.asarray(values) for name, values in program.example_row.items()}
    bad = {name: ~finite_rows({name: array}) for name, array in arrays.items() if not np.isfinite(array).all()}
    name = next((name for name, rows in bad.items() if row is not None and row < len(rows) and rows[row]), None)
    if name is None:
        name = min(bad, key=lambda name: name not in program.outcome_arrays(site))
        row = int(np.argmax(bad[name]))
    array = arrays[name]
    kind = "NaN" if np.isnan(array[row]).any() else "an infinite value"
    finite = f"jnp.isfinite({name})" + {1: "", 2: ".all(axis=1)"}.get(
        array.ndim, f".all(axis={tuple(range(1, array.ndim))})"
    )
    return (
        f"data array {name!r} holds {kind} in row {row}, and the log-likelihood of site {site!r} or its gradient is "
        f"NaN there. Drop such rows (keep = {finite.replace('jnp', 'np')}; {name}[keep], and so the "
        f"others); or, in the model, replace what is missing and mask the rows: finite = {finite}; "
        f"{name} = jnp.where(jnp.isfinite({name}), {name}, 0.0); with numpyro.handlers.mask(mask=finite): "
        f"numpyro.sample({site!r}, ...)."
    )


def describe_bad_rows(
    program: Program, theta: Array, rows: Arrays, numbers: Sequence[int] | np.ndarray | None = None
) -> str | None:
    """Which row's likelihood is not finite at theta (P,), if one is not.

    :param numbers: of the rows in the data; default: from 0 on.
    """
    terms = jax.device_get(jit_once(program.log_likelihood)(theta, program.inputs(rows)))
    for name, values in terms.items():
        bad = ~np.isfinite(values.reshape(len(values), -1)).all(axis=1)
        if bad.any():
            row = int(np.argmax(bad))
            number = row if numbers is None else numbers[row]
            return f"site {name!r} gives row {number} a log-likelihood of {values[row]}{_advice(values[row])}"
    return None


def possible_point(program: Program, rows: Arrays) -> np.ndarray | None:
    """The point of largest density (P,) among some of the prior; None if the density is zero or NaN at all of them."""
    inputs = program.inputs(rows)

    def log_joint(theta: Array) -> Array:
        terms = program.log_likelihood(theta, inputs)
        return program.log_prior(theta) + sum(jnp.sum(values) for values in terms.values())

    points = program.points_of_prior(NUM_TRIED)
    values = at_once(lambda: jax.lax.map(log_joint, points))
    values = np.where(np.isfinite(values), values, -np.inf)
    best = int(np.argmax(values))
    return None if np.isinf(values[best]) else np.asarray(points[best])


def _advice(values: np.ndarray) -> str:
    """For what has no value at all."""
    if not np.isnan(values).any():
        return ""
    return (
        " (a scale or another positive number with a prior on the whole line, as Normal(0, 1)? Give it one on the "
        "positive half, as HalfNormal(1))"
    )


def check_reading(program: Program) -> None:
    """:raises ValueError: naming a site of a whole program whose terms are another density than the model's."""
    summed = {component.name for component, _ in program.row_parts}  # of these see check_states
    compared = [terms for terms in program.terms if not terms.by_draws and terms.site not in summed]
    if not compared:  # draws take the model's own density
        return
    inputs = {**program.inputs(program.example_rows), **program.shared}

    def read(theta: Array) -> dict[str, Array]:
        return {t.site: jnp.sum(t.log_probs(theta, inputs)) for t in compared}

    def both(theta: Array) -> tuple[dict, dict, dict]:
        own = program.log_likelihood(theta, program.inputs(program.example_rows))
        values = {t.site: jnp.concatenate([jnp.ravel(own[name]) for name in t.sites]) for t in compared}
        total = {name: jnp.sum(array) for name, array in values.items()}
        return read(theta), total, {name: jnp.sum(jnp.abs(array)) for name, array in values.items()}

    points = program.points_of_prior(NUM_DRAWS, scale=0.5)
    terms, own, size = jax.device_get(at_once(lambda: jax.lax.map(both, points)))
    for name, values in terms.items():
        is_finite = np.isfinite(own[name])
        apart = np.where(is_finite, np.abs(values - np.where(is_finite, own[name], 0.0)), 0.0)
        if np.any(~(apart <= SAME * np.maximum(size[name], 1.0)) & is_finite):
            worst = int(np.argmax(np.nan_to_num(apart, nan=np.inf)))
            raise ValueError(
                f"site {name!r} was read wrongly: at a draw its log density is {own[name][worst]:.6g} nats, and "
                f"{values[worst]:.6g} by what was read from the model. Please report this model; NUTS runs it."
            )


def check_states(program: Program) -> None:
    """By log p(theta) = log p(theta, states) - log p(states | theta), with states as they are drawn.

    :raises ValueError: if what a whole program sums over states is another density than the model's.
    """
    if not program.row_latents.states or partly_observed(program) is not None:
        return
    if not program.is_proper and not program.flat_sites:  # the prior is not the model's own
        return
    inputs = program.inputs(program.example_rows)

    def both(at: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        theta, rng_key = at
        states, log_prob, _ = drawn_of_row(program, rng_key, theta, program.shared)
        terms = [program.log_prior(theta), *map(jnp.sum, program.log_likelihood(theta, inputs).values())]
        read = sum(terms, log_prob)
        return read, log_joint(program, theta, states), sum(map(jnp.abs, terms), jnp.abs(log_prob))

    points = np.repeat(program.points_of_prior(NUM_DRAWS, scale=0.5), NUM_STATES, axis=0)
    keys = jax.random.split(jax.random.key(0), len(points))
    read, own, size = at_once(lambda: jax.lax.map(both, (points, keys)))
    apart = np.where(np.isfinite(own), np.nan_to_num(np.abs(read - own), nan=np.inf), 0.0)
    if np.any(apart > SAME * np.nan_to_num(np.maximum(size, 1.0), nan=1.0)):
        worst = int(np.argmax(apart))
        names = ", ".join(map(repr, program.row_latents.states))
        raise ValueError(
            f"sites {names}: the sum over their states was read wrongly. At a draw of all sites, the log density "
            f"is {own[worst]:.6g} nats, and {read[worst]:.6g} by what was read. Please report this model; NUTS runs it."
        )
