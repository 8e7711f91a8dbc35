"""Predictions of new rows: by Monte Carlo through the model, or in closed form for logistic sites."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike
from numpyro import handlers
from numpyro.infer import Predictive

from .core.symbolic import depends_on
from .model.tracing import RowRunner

if TYPE_CHECKING:
    from .model import Program
    from .posterior import Posterior

PROBIT_SCALE = math.sqrt(8 / math.pi)


def monte_carlo(
    posterior: Posterior, rng_key: Array, data: Mapping[str, ArrayLike] | tuple, num_samples: int
) -> dict[str, Array]:
    """Run the model forward at posterior draws, with every observed site drawn anew.

    :param posterior: the posterior.
    :param rng_key: random key.
    :param data: rows, with or without the outcome.
    :param num_samples: the number of posterior draws.
    :return: observed sites and deterministic sites inside the row plate, of shape ``(num_samples, *site_shape)``.
    """
    draw_key, model_key = jax.random.split(rng_key)
    theta = posterior.sample_unconstrained(draw_key, (num_samples,))
    return at_draws(posterior, model_key, posterior.program.rows(data), theta)


def at_draws(posterior: Posterior, rng_key: Array, rows: Mapping[str, Any], theta: Array) -> dict[str, Array]:
    """Predict rows at given parameters.

    :param posterior: the posterior.
    :param rng_key: random key.
    :param rows: rows as ``program.rows`` returns them.
    :param theta: unconstrained parameters, shape ``(num_samples, P)``.
    :return: observed sites and deterministic sites inside the row plate, of shape ``(num_samples, *site_shape)``.
    """
    program = posterior.program
    sites = posterior.constrain(theta)
    latents = {name: sites[name] for name in posterior.site_names}
    model = RowRunner(program.model, program.row_plates, program.num_rows(rows), {})
    local = {name for name, plates in program.plates.items() if program.row_plates.intersection(plates)}
    predicted = sorted(local - set(program.sites) | set(program.observed_sites))
    predict = Predictive(handlers.uncondition(model), latents, return_sites=predicted)
    arguments, keywords = program.call_arguments({name: jnp.asarray(values) for name, values in rows.items()})
    return predict(rng_key, *arguments, **keywords)


def closed_form(posterior: Posterior, data: Mapping[str, ArrayLike] | tuple) -> dict[str, dict[str, Array]]:
    """The probability of success of logistic sites, averaged over q, and its variance under q.

    Equations (62) and (63) of the R-VGA paper: with ``m`` and ``v`` the mean and the variance of the logit under q and
    ``k = beta / sqrt(v + beta^2)``, ``beta = sqrt(8 / pi)``, the mean is ``sigmoid(k m)`` and the variance
    ``mean (1 - mean) (1 - k)``. Both are approximations: they replace the logistic function by a probit.

    :param posterior: the posterior.
    :param data: rows, with or without the outcome.
    :return: for each observed site ``{"mean": ..., "variance": ...}``, of shape ``(num_rows, *element_shape)``.
    :raises NotImplementedError: if an observed site is not logistic.
    """
    program = posterior.program
    for site in program.observed_sites:
        if program.link(site) != "logistic":
            raise NotImplementedError(
                f"Site '{site}' has no closed form: that needs a Bernoulli or Binomial site whose logit is affine in "
                "the latent sites. Use method='monte_carlo'."
            )
    rows = program.rows(data)
    predictions = {}
    for site in program.observed_sites:
        complete = _with_stand_ins(posterior, rows, site)
        mean, covariance = program.predictors(posterior.mean, posterior.scale, complete, site)
        element_shape = list(program.sites[site].value_shape)
        element_shape.pop(row_axis(program, site))
        shape = (program.num_rows(rows), *element_shape)
        predictions[site] = _probit_moments(mean.reshape(shape), covariance.reshape(shape))
    return predictions


def row_axis(program: Program, site: str) -> int:
    """The axis of an observed site's values along which rows lie."""
    return next((axis for axis, plate in enumerate(program.plates[site]) if plate in program.row_plates), 0)


def _with_stand_ins(posterior: Posterior, rows: Mapping[str, Any], site: str) -> dict[str, Any]:
    """Rows with any value for the arrays that are missing: outcomes, on which a site's predictors do not depend.

    :raises ValueError: if the predictors do depend on a missing array.
    """
    program = posterior.program
    missing = {name: values for name, values in program.example_rows.items() if name not in rows}
    if not missing:
        return dict(rows)

    def predictors(arrays: Mapping[str, Array]) -> dict[str, Array]:
        return {site: program.predictors(posterior.mean, posterior.scale, arrays, site)[0]}

    needed = sorted(depends_on(predictors, program.example_rows)[site] & set(missing))
    if needed:
        raise ValueError(f"the prediction of site '{site}' needs the data arrays {needed} too.")
    num_rows = program.num_rows(rows)
    return {**rows, **{name: jnp.broadcast_to(v[:1], (num_rows, *v.shape[1:])) for name, v in missing.items()}}


def _probit_moments(mean: Array, variance: Array) -> dict[str, Array]:
    log_shrinkage = -0.5 * jnp.log1p(variance / PROBIT_SCALE**2)
    probability = jax.nn.sigmoid(jnp.exp(log_shrinkage) * mean)
    return {"mean": probability, "variance": probability * (1 - probability) * -jnp.expm1(log_shrinkage)}
