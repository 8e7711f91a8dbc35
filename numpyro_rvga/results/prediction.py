"""Predictions of new rows: draws through the model or its linearization, and closed forms for logistic sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpyro.distributions as dist
from jax import Array
from numpyro import handlers

from ..core.compilation import jit
from ..core.gaussians.mixture import GaussianMixture
from ..model import Program
from ..model.bound.local_draws import draw_row_latents
from ..model.data.rows import Arrays, Data, num_rows
from ..model.terms.site_terms import unconstrained_parameters
from ..options import check_choice, check_count
from .fitted import Fitted
from .joined_rows import JoinedRows
from .log_joint import rows_with_outcome

PROBIT_SCALE = math.sqrt(8 / math.pi)


def predictive(
    posterior: Fitted,
    rng_key: Array | None,
    data: Data,
    num_samples: int = 1000,
    method: str = "monte_carlo",
) -> dict[str, Any]:
    """Predict the observed sites of new rows.

    **Example**

    With the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> import jax
        >>> new = {"X": np.array([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])}
        >>> posterior.predictive(jax.random.key(0), new, num_samples=500)["y"].shape
        (500, 3)
        >>> print(np.asarray(posterior.predictive(None, new, method="closed_form")["y"]["mean"]).round(1))
        [0.8 0.1 0.5]

    :param rng_key: random key; ``closed_form`` needs none.
    :param data: rows as :meth:`RVGA.run` takes them, with or without the outcome. They may be new even where the
        model has a latent value for each row, as in Gaussian processes: those of new rows are drawn given the rest.
        Numbers that the model computes of all rows, as a mean, must not change with them.
    :param num_samples: the number of draws.
    :param method: ``"monte_carlo"`` draws parameters from q and runs the model forward with every observed site
        drawn anew. ``"linearized"`` does so with the observed distributions' parameters linearized at the mean of
        q, which for networks is closer to the data; ``"plugin"`` with theta at the mean. ``"closed_form"`` is the
        R-VGA paper's approximate probability of a logistic site and its variance under q (equations 62 and 63),
        with no sampling.
    :return: for draws the observed sites and the deterministic sites inside the row plate, of shape
        ``(num_samples, *site_shape)``; for ``closed_form`` a dict ``{"mean": ..., "variance": ...}`` of arrays of
        shape ``(num_rows, *element_shape)`` for each observed site.
    :raises ValueError: if ``method`` is unknown or needs ``rng_key``, ``data`` are invalid, or new rows change what the
        model computes of those that it was fitted to.
    :raises NotImplementedError: if ``method`` is ``"closed_form"`` and an observed site is not logistic.
    """
    check_choice("method", method, (*DRAWN, "closed_form"))
    if method == "closed_form":
        return closed_form(posterior, data)
    if rng_key is None:
        raise ValueError(f"method={method!r} draws: pass rng_key=jax.random.key(0).")
    check_count("num_samples", num_samples)
    return DRAWN[method](posterior, rng_key, data, num_samples)


def monte_carlo(posterior: Fitted, rng_key: Array, data: Data, num_samples: int) -> dict[str, Array]:
    """Run the model forward at posterior draws, with every observed site drawn anew; see :func:`predictive`."""
    draw_key, model_key = jax.random.split(rng_key)
    theta = posterior.sample_unconstrained(draw_key, (num_samples,))
    return at_draws(posterior, model_key, posterior.program.rows(data, predicted=True), theta)


def plugin(posterior: Fitted, rng_key: Array, data: Data, num_samples: int) -> dict[str, Array]:
    """Predictions at the mean of q.

    :raises NotImplementedError: if the rows are one joint solve, or have latent values of their own.
    """
    program = posterior.program
    _refuse_coupled_rows(program, "plugin")
    rows = program.rows(data, predicted=True)
    return at_draws(posterior, rng_key, rows, jnp.tile(posterior.mean, (num_samples, 1)))


def linearized(posterior: Fitted, rng_key: Array, data: Data, num_samples: int) -> dict[str, Array]:
    """The same with the parameters of the observed distributions, in unconstrained space, linearized in theta at the
    mean of q.

    :raises NotImplementedError: as :func:`plugin`, and if the parameters of an observed distribution cannot be named.
    """
    program = posterior.program
    _refuse_coupled_rows(program, "linearized")
    rows = {name: jnp.asarray(values) for name, values in program.rows(data, predicted=True).items()}
    arguments, keywords = program.call_arguments(rows)
    predicted, built = sorted(_predicted(program)), {}

    def outputs(theta):
        sites = program.constrain(theta)
        model = handlers.substitute(program.runner(num_rows(rows)), data=sites)
        with handlers.block():
            trace = handlers.trace(handlers.seed(model, jax.random.key(0))).get_trace(*arguments, **keywords)
        values = {}
        for name in predicted:
            if name not in program.observed_sites:
                values[name] = trace[name]["value"]
                continue
            fn = trace[name]["fn"]
            while isinstance(fn, dist.MaskedDistribution):
                fn = fn.base_dist
            values[name], built[name] = unconstrained_parameters(name, fn)
        return values

    @jit
    def drawn(theta_key, site_key):
        center, push = jax.linearize(outputs, posterior.mean)

        def one(theta, key):
            moved = jax.tree.map(_shifted, center, push(theta - posterior.mean))
            keys = dict(zip(predicted, jax.random.split(key, len(predicted))))
            return {n: built[n](v).sample(keys[n]) if n in built else v for n, v in moved.items()}

        theta = posterior.sample_unconstrained(theta_key, (num_samples,))
        return jax.vmap(one)(theta, jax.random.split(site_key, num_samples))

    return drawn(*jax.random.split(rng_key))


def _shifted(center: Array, change: Array) -> Array:
    return center if change.dtype == jax.dtypes.float0 else center + change  # integers do not move


def _refuse_coupled_rows(program: Program, method: str) -> None:
    if program.whole:
        raise NotImplementedError(
            f"the rows of this posterior are one joint solve, which method={method!r} cannot do: use "
            "method='monte_carlo'."
        )
    if program.local_names:
        raise NotImplementedError(
            f"the model has a latent value for each row, which method={method!r} would pass over: use "
            "method='monte_carlo'."
        )


def _predicted(program: Program) -> set[str]:
    """Observed sites, deterministic ones of the rows, and the rows' own latent variables."""
    return {*program.of_rows, *program.observed_sites, *program.local_names}


def at_draws(posterior: Fitted, rng_key: Array, rows: Arrays, theta: Array) -> dict[str, Array]:
    """Predict rows, as ``program.rows`` returns them, at unconstrained parameters (num_samples, P)."""
    program = posterior.program
    predicted = _predicted(program)
    if program.whole and not program.holds(rows):
        return JoinedRows(program, rows)(rng_key, theta, predicted)
    return _forward(posterior, rng_key, rows, theta, predicted)


def given_local_latents(
    posterior: Fitted, rng_key: Array, rows: Arrays, theta: Array, names: Collection[str]
) -> dict[str, Array]:
    """The rows' own latent variables, and sites of the rows given these, at unconstrained parameters. Nothing where
    rows have none.

    :param names: of the sites.
    """
    program = posterior.program
    if not program.local_names:
        return {}
    local_key, site_key = jax.random.split(rng_key)
    if program.integrates_row_latents:
        given = {name: jnp.asarray(array) for name, array in rows_with_outcome(program, rows).items()}
        keys = jax.random.split(local_key, len(theta))
        local = jit(partial(jax.lax.map, lambda at: draw_row_latents(program, *at, given)))((keys, theta))
    else:
        local = _forward(posterior, local_key, rows, theta, set(program.local_names))
    return local | _forward(posterior, site_key, rows, theta, set(names), local)


def _forward(
    posterior: Fitted,
    rng_key: Array,
    rows: Arrays,
    theta: Array,
    names: set[str],
    local: Mapping[str, Array] | None = None,
) -> dict[str, Array]:
    """:param local: values of the rows' own latent variables; default: they are drawn as well."""
    sites = posterior.constrain_latents(theta)
    latents = {name: sites[name] for name in posterior.site_names}
    return posterior.forward_runs(rng_key, {**latents, **(local or {})}, rows, names) if names else {}


DRAWN = {"monte_carlo": monte_carlo, "linearized": linearized, "plugin": plugin}


def closed_form(posterior: Fitted, data: Data) -> dict[str, dict[str, Array]]:
    """The probability of success of logistic sites, averaged over q, and its variance under q.

    Equations (62) and (63) of the R-VGA paper: with ``m`` and ``v`` the mean and the variance of the logit under q and
    ``k = beta / sqrt(v + beta^2)``, ``beta = sqrt(8 / pi)``, the mean is ``sigmoid(k m)`` and the variance
    ``mean (1 - mean) (1 - k)``. Both are approximations: they replace the logistic function by a probit.

    :raises NotImplementedError: if an observed site is not logistic.
    """
    program = posterior.program
    for site in program.observed_sites:
        if program.link(site) != "logistic":
            raise NotImplementedError(
                f"Site '{site}' has no closed form: that needs a Bernoulli or Binomial site whose logit is affine in "
                "the latent sites. Use method='monte_carlo'."
            )
    rows = program.rows(data, predicted=True)
    predictions = {}
    for site in program.observed_sites:
        complete = program.inputs(rows) if program.whole else _with_stand_ins(posterior, rows)
        element_shape = list(program.sites[site].value_shape)
        element_shape.pop(program.row_axis(site))
        shape = (num_rows(rows), *element_shape)

        def of_gaussian(gaussian, site=site, complete=complete, shape=shape):
            mean, covariance = program.predictors(gaussian, complete, site)
            return _probit_moments(mean.reshape(shape), covariance.reshape(shape))

        predictions[site] = _averaged(of_gaussian, posterior.gaussian)
    return predictions


def _averaged(moments: Callable[[Any], dict[str, Array]], q: Any) -> dict[str, Array]:
    """Mean and variance under a Gaussian, or under a mixture from those of its components."""
    if not isinstance(q, GaussianMixture):
        return moments(q)
    components = jax.lax.map(lambda k: moments(q.component(k)), jnp.arange(len(q.means)))
    mean = jnp.tensordot(q.weights, components["mean"], 1)
    return {
        "mean": mean,
        "variance": jnp.tensordot(q.weights, components["variance"] + (components["mean"] - mean) ** 2, 1),
    }


def _with_stand_ins(posterior: Fitted, rows: Arrays) -> dict[str, Any]:
    """Rows with any value for the arrays that are missing: those that predictions do not depend on."""
    program = posterior.program
    missing = {name: values for name, values in program.example_rows.items() if name not in rows}
    total = num_rows(rows)
    return {**rows, **{name: jnp.broadcast_to(v[:1], (total, *v.shape[1:])) for name, v in missing.items()}}


def _probit_moments(mean: Array, variance: Array) -> dict[str, Array]:
    log_shrinkage = -0.5 * jnp.log1p(variance / PROBIT_SCALE**2)
    probability = jax.nn.sigmoid(jnp.exp(log_shrinkage) * mean)
    return {"mean": probability, "variance": probability * (1 - probability) * -jnp.expm1(log_shrinkage)}
