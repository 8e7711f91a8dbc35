"""Log predictive densities of rows under a Gaussian over theta, in the space of their predictors."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax import Array, lax
from jax.scipy.special import logsumexp
from numpyro.primitives import Messenger

from ..core.expectations.by_nodes import DENSITY_NODES, normal_rule
from ..core.gaussians import Family
from ..core.matrices.linalg import cholesky, positive_part, semidefinite_root, solve_lower
from .data.rows import Arrays, num_rows
from .handlers.tracing import SiteRecord, can_be_drawn, nested, scale_of_plates
from .program import Program
from .terms.terms import linearize, predictors_of

METHODS = ("plugin", "linearized", "monte_carlo")
MODE_STEPS = 25
LONGEST_MOVE = 3.0  # standard deviations

Row = Mapping[str, Array]


class Unweighted(Messenger):
    """A model whose outcomes have their own densities: without the user's masks and scales."""

    def __init__(self, model: Callable):
        super().__init__(model)
        self._ratios: dict[str, float] = {}

    def process_message(self, msg: dict) -> None:
        if msg["type"] == "sample" and msg["is_observed"] and not msg["infer"].get("is_auxiliary", False):
            msg["fn"] = _unmasked(msg["fn"])
            msg["scale"] = scale_of_plates(msg, self._ratios)

    def postprocess_message(self, msg: dict) -> None:
        if msg["type"] == "plate":  # which scales its sites by its share of the rows
            size, subsample_size = msg["args"]
            self._ratios[msg["name"]] = size / (subsample_size or size)


def _unmasked(fn: dist.Distribution) -> dist.Distribution:
    if isinstance(fn, dist.MaskedDistribution):
        return _unmasked(fn.base_dist)
    if not isinstance(fn, dist.Independent | dist.ExpandedDistribution):
        return fn
    bare = copy.copy(fn)
    bare.base_dist = _unmasked(fn.base_dist)
    return bare


def unweighted(program: Program) -> Program:
    """The program of the model whose outcomes have their own densities."""
    options: Any = program.options._asdict()
    return Program(
        Unweighted(program.model),
        {name: np.asarray(array) for name, array in program.example_rows.items()},
        program.model_kwargs,
        params=program.params.values,
        constants=program.constants,
        row_facts=program.row_facts,
        row_plates=program.row_plates,
        **options,
    )


def weights(program: Program, rows: Row) -> tuple[Array, Array]:
    """Which rows have an outcome that no mask leaves out, (n,), and whether any outcome has a weight or a mask, ()."""
    total, is_weighted = num_rows(rows), jnp.zeros((), bool)
    counts = jnp.zeros(total, bool)
    for site in program.observed_sites:
        record, axis, own = program.site_record(site, rows), program.row_axis(site), jnp.ones(total, bool)
        for part in nested(record.fn):
            if isinstance(part, dist.MaskedDistribution):
                mask = jnp.asarray(part._mask)
                mask = jnp.moveaxis(mask, axis, 0).reshape(total, -1).any(axis=1) if mask.ndim > axis else mask.any()
                own &= mask
                is_weighted |= ~jnp.all(jnp.asarray(part._mask))
        counts |= own
        is_weighted |= jnp.any(jnp.asarray(record.weight) != 1)
    return counts, is_weighted


def log_predictive(
    program: Program, gaussian: Family, row: Row, rng_key: Array, num_samples: int, *, plugin: bool
) -> Callable[[Row], Array]:
    """The log predictive density of a row under q, with its predictors linearized in theta at q's mean.

    The average is over all T predictors of its sites and elements together: by quadrature if there are up to three.

    :param row: without a leading axis. :param plugin: put theta at its mean.
    :return: (the row, perhaps with another outcome) -> its log density.
    """
    rows = {name: value[None] for name, value in row.items()}
    centers, scales = [], []
    for terms in program.terms:
        predictors, jacobian, local = linearize(terms, gaussian.mean, rows)
        parts = [local] if plugin else [gaussian.predictor_root(jacobian), local]
        centers.append(predictors.reshape(-1))
        scales.append(jnp.concatenate(parts, axis=-1).reshape(predictors.size, -1))
    center, scale = jnp.concatenate(centers), jnp.concatenate(scales)
    if not scale.shape[1]:
        return lambda row: log_density(program, center, row)
    root = semidefinite_root((scale @ scale.T)[None])[0]
    if len(center) in DENSITY_NODES:
        return lambda row: _by_quadrature(lambda z: log_density(program, center + root @ z, row), len(center))
    standard = jax.random.normal(rng_key, (num_samples, len(center)), center.dtype)
    return partial(average, program, center + standard @ root.T)


def sampled_predictors(program: Program, theta: Array, row: Row, rng_key: Array) -> Array:
    """The predictors (S, T) of a row at draws of theta (S, P), with draws of the row's local variables."""
    rows = {name: value[None] for name, value in row.items()}
    local = jax.random.normal(rng_key, (len(theta), program.local.size), theta.dtype)

    def at(everything):
        return jnp.concatenate([predictors_of(terms, everything, rows).reshape(-1) for terms in program.terms])

    return jax.vmap(at)(jnp.concatenate([theta, local], axis=1))


def average(program: Program, predictors: Array, row: Row) -> Array:
    """The logarithm of a row's density averaged over draws of its predictors (S, T)."""
    log_densities = jax.vmap(lambda u: log_density(program, u, row))(predictors)
    return logsumexp(log_densities) - math.log(len(predictors))


def log_density(program: Program, predictors: Array, row: Row) -> Array:
    """The log density of a row at its predictors (T,)."""
    rows, total, start = {name: value[None] for name, value in row.items()}, jnp.zeros((), predictors.dtype), 0
    for terms in program.terms:
        shape = terms.num_elements, terms.num_predictors
        own = predictors[start : start + math.prod(shape)].reshape(shape)
        start += math.prod(shape)
        values = jax.vmap(partial(terms.constants, rows))(jnp.arange(shape[0], dtype=jnp.int32))
        total = total + jnp.sum(jax.vmap(terms.density)(own, values))
    return total


def _by_quadrature(log_density: Callable[[Array], Array], size: int) -> Array:
    """log E[exp(log_density(z))] over the standard normal, by Hermite nodes around the mode of the integrand.

    The density may be much narrower than the normal.
    """
    integrand = lambda z: log_density(z) - 0.5 * z @ z  # noqa: E731
    identity = jnp.eye(size)

    def precision(z):  # at least the normal's own
        return identity + positive_part(-jax.hessian(log_density)(z))

    def newton_step(_, z):
        move = jnp.linalg.solve(precision(z), jax.grad(integrand)(z))
        return z + move / jnp.maximum(1.0, jnp.linalg.norm(move) / LONGEST_MOVE)

    mode = lax.fori_loop(0, MODE_STEPS, newton_step, jnp.zeros(size))
    factor = cholesky(precision(mode))
    points, weights = normal_rule(size)
    points = jnp.asarray(points, mode.dtype)
    nodes = mode + jax.vmap(lambda x: solve_lower(factor, x, transpose=True))(points)
    spacing = jnp.asarray(np.log(weights), mode.dtype) + 0.5 * jnp.sum(points**2, axis=1)
    return logsumexp(jax.vmap(integrand)(nodes) + spacing) - jnp.sum(jnp.log(jnp.diagonal(factor)))


def check_can_be_drawn(program: Program) -> None:
    """:raises NotImplementedError: naming an observed site that has no distribution of outcomes."""
    origin = jnp.zeros(program.layout.size + program.local.size, program.dtype)
    records = program.abstractly(lambda rows: program.records(origin, rows), program.example_row)
    for terms in program.terms:
        reason = _why_not(program, terms.site, records.get(terms.site))
        if reason is not None:
            raise NotImplementedError(
                f"hessian='mc-fisher' draws outcomes from each row's own distribution, and site {terms.site!r} "
                f"{reason}: use hessian='lin-hess' or 'mc-ef'."
            )


def _why_not(program: Program, site: str, record: SiteRecord | None) -> str | None:
    if record is None or program.local_names:
        return "depends on a latent variable of each row"
    if record.is_auxiliary:
        return "is a factor, which has no outcomes"
    if program.is_value_of_latents(site):
        return "observes a value that is computed of latent sites"
    return None if can_be_drawn(record.fn, ()) else "has a distribution that cannot be drawn from"


def drawn_log_likelihood(program: Program, theta: Array, row: Arrays, rng_key: Array) -> Array:
    """log p(y | theta) of outcomes y ~ p(. | theta) of one row; its gradient's square is the information on average.

    The outcomes are constants where this is differentiated. A term that counts w times has w times the information, so
    it enters with the root of w.

    :param row: without a leading axis.
    """
    records = program.records(theta, {name: value[None] for name, value in row.items()})
    total = jnp.zeros((), theta.dtype)
    with numpyro.validation_enabled(False):
        for number, terms in enumerate(program.terms):
            record = records[terms.site]
            fixed = jax.tree.map(lax.stop_gradient, record.fn)
            outcome = fixed.sample(jax.random.fold_in(rng_key, number))
            total = total + jnp.sum(record.fn.log_prob(outcome) * jnp.sqrt(record.weight))
    return total
