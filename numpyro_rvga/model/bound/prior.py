"""The prior: its exactly Gaussian part, its other terms as factors, and a Gaussian to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array

from ...core.compilation import abstractly, at_once
from ...core.expectations.closed_forms import Gaussian
from ...core.jaxprs.interpret import depends_on
from ...core.jaxprs.symbolic import factorize
from ..data.rows import Arrays
from ..handlers.tracing import base_distribution
from ..terms.recognition import (
    in_closed_form,
    in_gaussian_form,
    in_tilted_form,
    is_quadratic,
    may_be_probed,
    probe_terms,
)
from ..terms.site_terms import RunSite
from ..terms.terms import Terms, predictors_of


class MultivariateNormalSite(NamedTuple):
    """A multivariate normal site that nothing else in the prior depends on: kept by location and scale.

    :ivar start: and ``stop``: its first entry of theta, and the one after its last.
    :ivar moments: ``program.prior_inputs`` -> loc (K,), scale_tril (K, K).
    """

    name: str
    start: int
    stop: int
    moments: Callable[[Arrays], tuple[Array, Array]]


class Prior(NamedTuple):
    """log p(theta) = sum of ``normal_sites`` + sum of ``gaussian`` + sum of ``terms``.

    :ivar gaussian: the other terms with a constant Hessian; proper by themselves if there are no ``terms``.
    :ivar terms: all others.
    :ivar theta: shape (P,) and dtype of theta.
    """

    normal_sites: tuple[MultivariateNormalSite, ...]
    gaussian: tuple[Terms, ...]
    terms: tuple[Terms, ...]
    theta: jax.ShapeDtypeStruct

    @property
    def size(self) -> int:
        """P."""
        return self.theta.shape[0]

    @property
    def other_indices(self) -> np.ndarray:
        """The indices of the entries of theta outside the multivariate normal sites."""
        inside = [np.arange(site.start, site.stop) for site in self.normal_sites]
        return np.setdiff1d(np.arange(self.size), np.concatenate([np.zeros(0, int), *inside]))


def split_prior(
    all_terms: list[Terms],
    normal_sites: list[MultivariateNormalSite],
    theta: jax.ShapeDtypeStruct,
    shared: Arrays,
) -> Prior:
    """Collect terms whose Hessian is constant; correlated and linear-Gaussian priors are exact.

    :param normal_sites: multivariate normal ones; those that other terms touch are treated as these.
    :param shared: what the terms depend on besides theta: ``program.prior_inputs``.
    """
    size, dtype = theta.shape[0], theta.dtype
    if normal_sites:
        names = {site.name for site in normal_sites}
        others = [t for t in all_terms if t.site not in names]
        is_shared = depends_on_entries(others, size, dtype, shared)
        normal_sites = [site for site in normal_sites if not is_shared[site.start : site.stop].any()]
    names = {site.name for site in normal_sites}
    all_terms = [t for t in all_terms if t.site not in names]
    gaussian = [t for t in all_terms if t.closed_form is Gaussian]
    undecided: list[Terms] = []
    others: list[Terms] = []
    for terms in (t for t in all_terms if t.closed_form is not Gaussian):
        may_have_form = terms.is_affine and terms.closed_form is None and may_be_probed(terms, dtype, shared)
        (undecided if may_have_form else others).append(terms)
    probes = at_once(lambda: [probe_terms(t, dtype, shared) for t in undecided]) if undecided else []
    fixed = _of_fixed_density(undecided, dtype, shared)
    for terms, probe in zip(undecided, probes):
        if is_quadratic(probe):
            gaussian.append(in_gaussian_form(terms, probe))
        else:
            others.append(in_tilted_form(in_closed_form(terms, probe) if terms.site in fixed else terms, dtype, shared))
    return Prior(tuple(normal_sites), tuple(gaussian), tuple(others), theta)


def _of_fixed_density(all_terms: list[Terms], dtype, shared: Arrays) -> set[str]:
    """Sites whose densities depend on nothing but their predictors."""
    if not shared:
        return {terms.site for terms in all_terms}

    def densities(shared):
        def of(terms):
            element = jnp.zeros((), jnp.int32)
            return terms.density(jnp.zeros(terms.num_predictors, dtype), terms.constants(shared, element))

        return {terms.site: of(terms) for terms in all_terms}

    return {site for site, names in depends_on(densities, dict(shared)).items() if not names}


def normal_site(
    run_site: RunSite, name: str, start: int, stop: int, theta: jax.ShapeDtypeStruct, shared: Arrays
) -> MultivariateNormalSite | None:
    """A latent site, if it is one multivariate normal vector without a weight that does not depend on other latents."""

    def moments_at(t, shared):
        fn = base_distribution(run_site(t, shared).fn)[0]
        loc = jnp.broadcast_to(fn.loc, (*fn.batch_shape, *fn.event_shape))  # of a batch of one, if of any
        return jnp.reshape(loc, fn.event_shape), jnp.reshape(fn.scale_tril, fn.event_shape * 2)

    record = abstractly(lambda t: run_site(t, shared), theta)
    fn, mask = base_distribution(record.fn)
    if not isinstance(fn, dist.MultivariateNormal) or fn.event_shape != (stop - start,):
        return None
    if mask is not True or record.is_weighted:
        return None
    split = factorize(lambda t, r: jnp.asarray(sum(jnp.sum(x) for x in moments_at(t, r)), theta.dtype), theta, shared)
    origin = jnp.zeros(theta.shape, theta.dtype)
    return (
        None
        if split.num_predictors
        else MultivariateNormalSite(name, start, stop, lambda shared: moments_at(origin, shared))
    )


def depends_on_entries(all_terms: list[Terms], size: int, dtype, shared: Arrays) -> np.ndarray:
    """Which entries of theta terms depend on, (P,): those in which a random combination of predictors has a slope."""
    rng = np.random.default_rng(0)
    theta = jnp.asarray(rng.normal(size=size), dtype)

    def depends(terms):
        everything = jnp.concatenate([theta, jnp.zeros(terms.num_local, dtype)])
        values, vjp = jax.vjp(lambda t: predictors_of(terms, t, shared), everything)
        return vjp(jnp.asarray(rng.normal(size=values.shape), dtype))[0][:size] != 0

    return np.any([np.zeros(size, bool), *at_once(lambda: [depends(t) for t in all_terms])], axis=0)
