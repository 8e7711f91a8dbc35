"""Predictions of rows of groups: those that the posterior knows, and new ones, drawn from their conditional prior."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jax import Array, random
from numpyro import handlers
from numpyro.infer import Predictive

from ...model.data.arguments import split_call
from ...model.data.rows import Data, Keywords
from .parts import gathered
from .reading import numbered

if TYPE_CHECKING:
    from .posterior import GroupPosterior


def predict(posterior: GroupPosterior, rng_key: Array, data: Data | Iterable, num_samples: int) -> dict[str, Array]:
    """See :meth:`~numpyro_rvga.results.groups.GroupPosterior.predictive`."""
    program, plate = posterior.program, posterior.plate
    rows, number, labels = _numbered(posterior, data)
    is_known = posterior.groups.knows(labels)
    order = np.argsort(~is_known, kind="stable")  # those that are known come first
    draw_key, model_key = random.split(rng_key)
    draws = posterior.sample_posterior(
        draw_key, (num_samples,), groups=labels[is_known] if is_known.any() else None, new_groups=int((~is_known).sum())
    )
    sites = {name: draws[name] for name in posterior.site_names}
    for name in posterior.group_site_names:
        sites[name] = jnp.moveaxis(draws[name][:, np.argsort(order)], 1, 1 + posterior.members.axes[name])
    rows = {name: jnp.asarray(array) for name, array in (rows | {plate.index: number}).items()}
    arguments, keywords = split_call(program.model, rows, {**program.model_kwargs, plate.size: len(labels)})
    names = sorted({*program.observed_sites, *program.of_rows})
    model = handlers.uncondition(program.runner(len(number)))
    return Predictive(model, sites, return_sites=names)(model_key, *arguments, **keywords)


def _numbered(posterior: GroupPosterior, data: Data | Iterable) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
    """Rows, checked; the number of the group of each; and the groups' labels."""
    program, plate = posterior.program, posterior.plate
    keywords: Keywords = {**program.model_kwargs, plate.size: 1}
    rows, _ = gathered(program.model, data, plate.index, keywords)
    labels, rows = numbered(rows, plate.index)
    number = rows[plate.index]
    return program.rows(rows | {plate.index: np.zeros_like(number)}, predicted=True), number, np.asarray(labels)
