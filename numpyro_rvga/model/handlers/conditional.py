"""A model given some of its latent sites: these become ``numpyro.param`` sites, in unconstrained space."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
from numpyro.primitives import Messenger

from .tracing import site_transform

PREFIX = "given_"
LOG_DETERMINANTS = "log_determinants_of_given_sites"


class Given(Messenger):
    """Observes latent sites at values in unconstrained space.

    :param has_prior: whether their prior stays a part of the model's density.
    :ivar log_determinants: of the transforms to constrained space, a scalar for each site.
    """

    def __init__(self, fn: Callable, unconstrained: Mapping[str, Any], *, has_prior: bool):
        super().__init__(fn)
        self.unconstrained, self.has_prior, self.log_determinants = unconstrained, has_prior, []

    def process_message(self, msg: dict) -> None:
        if msg["type"] != "sample" or msg["name"] not in self.unconstrained:
            return
        transform, value = site_transform(msg["fn"]), jnp.asarray(self.unconstrained[msg["name"]])
        msg["value"], msg["is_observed"] = transform(value), True
        self.log_determinants.append(transform.log_abs_det_jacobian(value, msg["value"]).sum())
        if not self.has_prior:
            msg["fn"] = msg["fn"].mask(False)


def conditional_model(model: Callable, sites: Mapping[str, np.ndarray], *, has_prior: bool = True) -> Callable:
    """The model with some latent sites as ``numpyro.param`` sites, named ``PREFIX + name``.

    Its log joint density is that of the model, as a density of all sites in unconstrained space.

    :param sites: where they start, in unconstrained space. :param has_prior: whether their prior is a part of the
        density.
    """

    @functools.wraps(model)
    def conditional(*args, **kwargs):
        values = {name: numpyro.param(PREFIX + name, start) for name, start in sites.items()}
        given = Given(model, values, has_prior=has_prior)
        outcome = given(*args, **kwargs)
        if has_prior:
            numpyro.factor(LOG_DETERMINANTS, sum(given.log_determinants))
        return outcome

    return conditional
