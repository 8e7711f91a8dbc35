"""Starting other inference from a posterior: a NUTS kernel, initial values of chains, a NumPyro guide."""

from __future__ import annotations

from typing import Any

import numpy as np
from jax import Array
from numpyro import handlers
from numpyro.infer import NUTS, init_to_value
from numpyro.infer.autoguide import AutoContinuous, AutoDiagonalNormal, AutoMultivariateNormal

from ..core.gaussians import DiagonalGaussian
from ..core.matrices.linalg import lower_from_root
from ..model.data.rows import num_rows
from ..options import check_count
from .fitted import Fitted

OVERDISPERSION = 1.5
MOST_DENSE = 1000  # parameters: of more, a product with a whole matrix takes longer than most models' gradients


def nuts(posterior: Fitted, **nuts_kwargs: Any) -> NUTS:
    """A NUTS kernel for the posterior's model, with q's covariance as its inverse mass matrix.

    Give it a short warm-up and dispersed starts::

        mcmc = MCMC(posterior.nuts(), num_warmup=200, num_samples=1000, num_chains=4, chain_method="vectorized")
        mcmc.run(rng_key, X, y, init_params=posterior.init_params(rng_key, 4))

    NUTS sums over the states of discrete sites, as q does (NumPyro needs funsor for that). The mass matrix stays as it
    is (``adapt_mass_matrix=False``), and the step size, which starts at ``P ** -0.25``, is adapted.

    Measured on logistic regressions with 30 coefficients, 5,000 rows and posterior covariances of
    condition number 1e3 (correlated coefficients) and 7e5 (raw scales of independent covariates), four vectorized
    chains: 200 + 1,000 iterations of 7 leapfrog steps gave minimal effective sample sizes of 7,400 and 7,200,
    default NUTS with 1,000 + 1,000 iterations 1,700 (of 79 steps) and 5,700 (of 7, after a costly warm-up). Per CPU
    second that is 22 and 3.5 times as much, the recursion included and compilation left out; R-hat was at most
    1.001. Letting NUTS adapt the mass matrix in warm-ups of up to 200 halved the effective sample size and made
    trajectories 2 to 10 times as long. A warm-up of 20 ended with step sizes that reject nearly every proposal, one
    of 50 with uneven ones, since NumPyro restarts the step size's adaptation for the last tenth of the warm-up: use
    100 or more.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> import jax
        >>> from numpyro.infer import MCMC
        >>> mcmc = MCMC(posterior.nuts(), num_warmup=100, num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), **data, init_params=posterior.init_params(jax.random.key(1)))
        >>> mcmc.get_samples()["slopes"].shape
        (100, 2)

    :param nuts_kwargs: keywords of :class:`~numpyro.infer.hmc.NUTS`; they win over the ones chosen here.
        ``dense_mass`` may be True, False (only the variances of q are used: the default for a diagonal q, and for
        more than 1,000 parameters, where each leapfrog step would mostly be a product with the whole matrix), or a
        list of tuples of site names, the blocks of a block-diagonal mass matrix.
    :return: a kernel for one :class:`~numpyro.infer.mcmc.MCMC` run, whose data are given to ``MCMC.run`` as usual.
    """
    _refuse_local(posterior.program.continuous_local_names, "NUTS")
    dense = not isinstance(posterior.gaussian, DiagonalGaussian) and posterior.mean.size <= MOST_DENSE
    blocks = nuts_kwargs.pop("dense_mass", dense)
    if isinstance(blocks, bool):
        blocks = [posterior.site_names] if blocks else []
    unknown = [name for names in blocks for name in names if name not in posterior.site_names]
    if unknown:
        raise ValueError(
            f"dense_mass names {unknown[0]!r}, which is no latent site of the model: these are "
            f"{', '.join(posterior.site_names)}."
        )
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


def init_params(posterior: Fitted, rng_key: Array, num_chains: int = 1) -> dict[str, Array]:
    """Initial values for ``MCMC.run(..., init_params=...)``: draws from q, spread out 1.5 times as far.

    **Example**

    With the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> import jax
        >>> posterior.init_params(jax.random.key(0), num_chains=4)["slopes"].shape
        (4, 2)

    :param rng_key: random key.
    :param num_chains: the number of chains.
    :return: unconstrained values by site, with a leading axis of length ``num_chains`` if that is above one.
    """
    check_count("num_chains", num_chains)
    theta = posterior.sample_unconstrained(rng_key, (num_chains,) if num_chains > 1 else ())
    return posterior.program.layout.unravel(posterior.mean + OVERDISPERSION * (theta - posterior.mean))


def as_guide(posterior: Fitted) -> tuple[AutoContinuous, dict[str, Array]]:
    """The same Gaussian as a guide: ``AutoDiagonalNormal`` for a diagonal q, else ``AutoMultivariateNormal``; for a
    mixture the Gaussian with its mean and covariance.

    Guide and parameters serve ``Predictive(model, guide=guide, params=params, num_samples=...)``,
    ``NeuTraReparam(guide, params)``, ``SVI`` (as ``init_params``) and the guide's own methods. The guide has seen
    the model on a few rows only: its own methods return deterministic sites inside the row plate for those rows.

    :return: the guide and its parameters, ``auto_loc`` and ``auto_scale_tril`` (or ``auto_scale``), in the guide's
        own flat order, and the values of the model's ``numpyro.param`` sites.
    """
    program = posterior.program
    _refuse_local(program.local_names, "a guide")
    model = program.runner(num_rows(program.example_rows))
    diagonal = isinstance(posterior.gaussian, DiagonalGaussian)
    guide = (AutoDiagonalNormal if diagonal else AutoMultivariateNormal)(
        model, init_loc_fn=init_to_value(values=posterior.median())
    )
    arguments, keywords = program.call_arguments(program.example_rows)
    with handlers.block(), handlers.seed(rng_seed=0):
        guide(*arguments, **keywords)
    order = _guide_order(posterior, guide)
    params = posterior.params | {f"{guide.prefix}_loc": posterior.mean[order]}
    if diagonal:
        params[f"{guide.prefix}_scale"] = posterior.gaussian.deviation()[order]
    else:
        params[f"{guide.prefix}_scale_tril"] = lower_from_root(posterior.scale[order])
    return guide, params


def _refuse_local(names: tuple[str, ...], what: str) -> None:
    if names:
        raise NotImplementedError(
            f"site {names[0]!r} is a latent variable that q sums over or integrates out, and that {what} would need. "
            "If it is continuous and no Normal addition of known scale, RVGA(model, local='prior') makes it part of q. "
            "Or write the model without it, or with one vector outside the row plate."
        )


def _guide_order(posterior: Fitted, guide: AutoContinuous) -> np.ndarray:
    """For each place in the guide's flat vector, the place in the posterior's: NumPyro orders as it traces."""
    indices = np.arange(posterior.mean.size)
    ours, theirs = posterior.program.layout.unravel(indices), guide._unpack_latent(indices)
    order = np.empty_like(indices)
    for name in posterior.site_names:
        order[np.ravel(theirs[name])] = np.ravel(ours[name])
    return order


def _mass_blocks(posterior: Fitted, blocks: list[tuple[str, ...]]) -> dict[tuple[str, ...], Array]:
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
