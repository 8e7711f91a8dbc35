"""Latent sites whose posterior is to be of their own family: which entries of theta they are, and their prior there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpyro.distributions import transforms

from ..core.compilation import abstractly, at_once
from ..core.exponential import Entries
from ..core.jaxprs.interpret import depends_on
from .handlers.tracing import site_transform
from .program import Program

NUM_POINTS = 6  # at which a prior is compared with its family
TOLERANCE = {64: 1e-7, 32: 1e-3}  # of slopes, relative


class Form(NamedTuple):
    """:ivar is_gamma: or else beta. :ivar transform: of a site of this family. :ivar support: in words."""

    is_gamma: bool
    sign: float
    transform: type
    support: str


FORMS = {
    "gamma": Form(True, 1.0, transforms.ExpTransform, "positive"),
    "inverse-gamma": Form(True, -1.0, transforms.ExpTransform, "positive"),
    "beta": Form(False, 1.0, transforms.SigmoidTransform, "between two bounds"),
    "dirichlet": Form(False, 1.0, transforms.StickBreakingTransform, "shares that sum to one"),
}


class SiteEntries(NamedTuple):
    """Entries of theta of exponential families.

    :ivar sites: by name, their unconstrained shapes. :ivar places: (H,), in theta. :ivar prior: natural parameters
        (H, 2).
    """

    sites: dict[str, tuple[int, ...]]
    places: np.ndarray
    entries: Entries
    prior: Array


def site_entries(program: Program, families: Mapping[str, str]) -> SiteEntries:
    """The entries of theta of some sites, with their prior.

    :param families: one of ``FORMS`` by site.
    :raises ValueError: naming the site, if there is none of this name, or it, or its prior, is not of the family.
    """
    layout = program.layout
    for name in families:
        if name not in layout.site_names:
            raise ValueError(
                f"family names the site {name!r}, and the latent sites of this model that rows share are "
                f"{', '.join(layout.site_names)}."
            )
    names = [name for name in layout.site_names if name in families]
    transforms_of, parts = site_transforms(program, names), []
    for name in names:
        form, shape = FORMS[families[name]], layout.shapes[name]
        if not math.prod(shape):
            raise ValueError(f"family names the site {name!r}, which has no entries: leave it out of family.")
        if not _has(transforms_of[name], form.transform):
            raise ValueError(
                f"family={families[name]!r} is for sites whose values are {form.support}, and those of {name!r} are "
                "not."
            )
        offset = np.zeros(shape)
        if form.transform is transforms.StickBreakingTransform:  # theta = logit(stick) + log(number of sticks left)
            offset = offset + np.log(shape[-1] - np.arange(shape[-1]))
        size = math.prod(shape)
        parts.append((np.full(size, form.is_gamma), np.full(size, form.sign), np.ravel(offset)))
    is_gamma, sign, offset = (np.concatenate(x) for x in zip(*parts))
    places = layout.indices_of(names)
    entries = Entries(*map(jnp.asarray, (is_gamma, sign.astype(program.dtype), offset.astype(program.dtype))))
    of_entries = [name for name in names for _ in range(math.prod(layout.shapes[name]))]
    prior = _prior_parameters(program, entries, places, of_entries)
    return SiteEntries({name: layout.shapes[name] for name in names}, places, entries, prior)


def own_families(program: Program) -> dict[str, str]:
    """The family of each site whose prior is of one, with known parameters, and on which no other prior depends."""
    families: dict[str, str] = {}
    for name, transform in site_transforms(program, list(program.layout.site_names)).items():
        for family in [family for family, form in FORMS.items() if _has(transform, form.transform)]:
            try:
                site_entries(program, {name: family})
            except ValueError:
                continue
            families[name] = family
    return families


def site_transforms(program: Program, names: list[str]) -> dict[str, Any]:
    """To the sites' supports. They may hold traced arrays."""

    def read() -> dict[str, Any]:
        records = program.prior_records({})
        return {name: site_transform(records[name].fn) for name in names}

    return abstractly(read)


def sites_by_entry(program: Program) -> frozenset[str]:
    """Latent sites of which each number is a function of one entry of theta: no bound is another site."""
    layout, names = program.layout, list(program.layout.site_names)
    transforms_of = site_transforms(program, names)

    def bounds(unconstrained: dict[str, Array]) -> dict[str, list[Array]]:
        records = program.prior_records(unconstrained)
        return {name: jax.tree.leaves(site_transform(records[name].fn)) for name in names}

    moves = depends_on(bounds, {name: jnp.zeros(shape, program.dtype) for name, shape in layout.shapes.items()})
    return frozenset(name for name in names if not transforms_of[name].domain.event_dim and not moves[name])


def _has(transform: Any, kind: type) -> bool:
    """Whether a transform, or a part of it, is of a kind."""
    return isinstance(transform, kind) or any(_has(part, kind) for part in getattr(transform, "parts", ()))


def _prior_parameters(program: Program, entries: Entries, places: np.ndarray, names: list[str]) -> Array:
    """The natural parameters (H, 2) with which the prior's slopes are those of the families, whatever else there is.

    :param names: of each entry's site.
    :raises ValueError: naming a site for which there are none.
    """
    points = np.random.default_rng(0).normal(size=(NUM_POINTS, program.layout.size)).astype(program.dtype)

    def slopes():
        of_prior = jax.vmap(jax.grad(program.log_prior))(jnp.asarray(points))[:, places]
        own = jnp.asarray(points[:, places])
        return of_prior, jax.jvp(entries.statistics, (own,), (jnp.ones_like(own),))[1]

    of_prior, of_statistics = (np.asarray(x, np.float64) for x in at_once(slopes))
    natural = np.zeros((len(places), 2))
    for j, name in enumerate(names):
        natural[j], *_ = np.linalg.lstsq(of_statistics[:, j], of_prior[:, j], rcond=None)
        off = np.abs(of_statistics[:, j] @ natural[j] - of_prior[:, j]).max()
        if not (off <= TOLERANCE[jnp.finfo(program.dtype).bits] * (1 + np.abs(of_prior[:, j]).max())):
            raise ValueError(
                f"the prior of site {name!r} is not of the family that is asked for, with known parameters, or the "
                "prior of another site depends on it. Give it such a prior (Gamma and Exponential for 'gamma', Beta "
                "and Uniform for 'beta'), or leave it out of family: it is then part of the Gaussian."
            )
        if not (natural[j] > 0).all():
            raise ValueError(f"the prior of site {name!r} is improper: give it a proper one.")
    return jnp.asarray(natural, program.dtype)
