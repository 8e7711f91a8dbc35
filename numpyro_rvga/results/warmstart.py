"""Starting other inference from a posterior: a NUTS kernel, initial values of chains, a NumPyro guide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import NUTS, init_to_value
from numpyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoMultivariateNormal

from ..core.gaussians import DiagonalGaussian
from ..core.linalg import lower_from_root
from ..model.rows import num_rows

if TYPE_CHECKING:
    from .posterior import Posterior

OVERDISPERSION = 1.5
MOST_DENSE = 1000  # parameters: of more, a product with a whole matrix takes longer than most models' gradients


def nuts(posterior: Posterior, **nuts_kwargs: Any) -> NUTS:
    """See :meth:`Posterior.nuts`."""
    _refuse_local(posterior, "NUTS")
    dense = not isinstance(posterior.gaussian, DiagonalGaussian) and posterior.mean.size <= MOST_DENSE
    blocks = nuts_kwargs.pop("dense_mass", dense)
    if isinstance(blocks, bool):
        blocks = [posterior.site_names] if blocks else []
    options = {
        "dense_mass": blocks,
        "inverse_mass_matrix": _mass_blocks(posterior, blocks),
        "adapt_mass_matrix": False,
        "step_size": posterior.mean.size**-0.25,
    }
    model = posterior.program.model
    if posterior.params:
        model = handlers.substitute(model, data=posterior.params)
    return NUTS(model, **(options | nuts_kwargs))


def init_params(posterior: Posterior, rng_key: Array, num_chains: int = 1) -> dict[str, Array]:
    """See :meth:`Posterior.init_params`."""
    theta = posterior.sample_unconstrained(rng_key, (num_chains,) if num_chains > 1 else ())
    return posterior.program.layout.unravel(posterior.mean + OVERDISPERSION * (theta - posterior.mean))


def as_guide(posterior: Posterior) -> tuple[AutoContinuous, dict[str, Array]]:
    """See :meth:`Posterior.as_guide`."""
    _refuse_local(posterior, "a guide")
    program = posterior.program
    model = program.runner(num_rows(program.example_rows))
    diagonal = isinstance(posterior.gaussian, DiagonalGaussian)
    guide = (AutoDiagonalNormal if diagonal else AutoMultivariateNormal)(
        model, init_loc_fn=init_to_value(values=posterior.median())
    )
    arguments, keywords = program.call_arguments(program.example_rows)
    with handlers.block(), handlers.seed(rng_seed=0):
        guide(*arguments, **keywords)
    order = _guide_order(posterior, guide)
    params = {f"{guide.prefix}_loc": posterior.mean[order]}
    if diagonal:
        params[f"{guide.prefix}_scale"] = posterior.gaussian.deviation()[order]
    else:
        params[f"{guide.prefix}_scale_tril"] = lower_from_root(posterior.scale[order])
    return guide, params


def _refuse_local(posterior: Posterior, what: str) -> None:
    names = posterior.program.local_names
    if names:
        raise NotImplementedError(
            f"site {names[0]!r} is a latent variable of each row, which q integrates out and {what} would need. If "
            "it is continuous and no Normal addition of known scale, RVGA(model, local='prior') makes it part of q. Or "
            "write the model without it, or with one vector outside the row plate."
        )


def _guide_order(posterior: Posterior, guide: AutoContinuous) -> np.ndarray:
    """For each place in the guide's flat vector, the place in the posterior's: NumPyro orders as it traces."""
    places = np.arange(posterior.mean.size)
    ours, theirs = posterior.program.layout.unravel(places), guide._unpack_latent(places)
    order = np.empty_like(places)
    for name in posterior.site_names:
        order[np.ravel(theirs[name])] = np.ravel(ours[name])
    return order


def _mass_blocks(posterior: Posterior, blocks: list[tuple[str, ...]]) -> dict[tuple[str, ...], Array]:
    """q's covariance within each block of sites, and its variances for all other sites.

    Keyed by site names, since NumPyro reads a plain array in alphabetical order. NUTS writes to the dict, so each
    kernel needs its own.
    """
    of_sites = posterior.program.layout.indices_of
    masses = {names: posterior.covariance[np.ix_(of_sites(names), of_sites(names))] for names in blocks}
    others = tuple(name for name in posterior.site_names if not any(name in names for names in blocks))
    if others:
        masses[others] = posterior.gaussian.deviation()[of_sites(others)] ** 2
    return masses
