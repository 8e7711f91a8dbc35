"""How the expectations of a site's terms are computed, as the options ask."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core import closed_forms as cf
from ..core import expectations as ex
from ..core.compilation import at_once
from ..core.factors import Kind
from ..core.tilted import TiltedForm, tilted
from ..model.terms import Terms, constants
from ..options import Options


def make_kind(terms: Terms, options: Options, rng_key: Array, rows: dict) -> Kind:
    """The expectations of one site's terms, as the options ask.

    :raises ValueError: naming the site, if the expectation asked for does not exist for its distribution.
    """
    name = _resolve(terms, options)
    expect, conservative = _expectation(name, terms, options, rng_key, rows)

    def moments(mean, covariance, known):
        weight, values, local = known
        return tuple(weight * x for x in expect(mean, covariance + local @ local.T, values))

    def plugin(mean, covariance, known):
        weight, values, _ = known
        if terms.num_local:
            return moments(mean, jnp.zeros_like(covariance), known)
        return tuple(weight * x for x in ex.linearized(lambda u: terms.density(u, values), mean, covariance))

    def information(mean, known):
        weight, values, _ = known
        return weight * cf.INFORMATION[terms.closed_form](mean, values)

    return Kind(
        moments,
        plugin,
        concave=terms.closed_form in cf.CONCAVE,
        conservative=conservative,
        sampled=name == "monte_carlo",
        information=information if terms.closed_form in cf.INFORMATION and not terms.num_local else None,
    )


def _resolve(terms: Terms, options: Options) -> str:
    if options.scheme == "qkf":
        _need_closed_form(terms, "the quadratic Kalman filter", cf.Logistic)
        return "quadratic_bound"
    if options.scheme in ("ekf", "laplace"):
        return "linearized"
    name = options.expectation
    if name == "probit":
        _need_closed_form(terms, "expectation='probit'", cf.Logistic)
    if name == "exact" and not isinstance(terms.closed_form, TiltedForm):
        _need_closed_form(terms, "expectation='exact'", *cf.EXACT)
    if name == "quadrature" and terms.num_predictors > 3:
        raise ValueError(
            f"site {terms.site!r} has {terms.num_predictors} predictors; expectation='quadrature' takes at most 3. "
            "Use 'auto', 'monte_carlo' or 'sigma_points'."
        )
    if name == "auto":
        if terms.closed_form is not None and options.order in ("auto", 2):
            return "exact"
        return "quadrature" if terms.num_predictors <= 3 else "monte_carlo"
    return name


def _need_closed_form(terms: Terms, what: str, *forms: type) -> None:
    if terms.closed_form not in forms:
        raise ValueError(
            f"{what} needs {' or '.join(f.__name__ for f in forms)} terms, and site {terms.site!r} is none of these "
            "with predictors affine in the latents. Use expectation='auto'."
        )


def _expectation(name: str, terms: Terms, options: Options, rng_key: Array, rows: dict) -> tuple[Callable, bool]:
    """(mean, covariance, constants) -> moments, and whether gradient and curvature derive from the value.

    Over fixed nodes the first-order form does: it is the derivative of the weighted sum itself.
    """
    if name == "linearized" and terms.num_local:
        raise ValueError(
            f"site {terms.site!r} depends on a latent variable of each row, whose spread linearised expectations "
            "would pass over. Use expectation='auto' and scheme='implicit' or 'explicit'; in BONG, hessian='auto'."
        )
    if name == "exact":
        form = terms.closed_form
        return partial(tilted, form) if isinstance(form, TiltedForm) else cf.EXACT[form], True
    if name == "probit":
        return cf.logistic_probit, False
    if name == "quadratic_bound":
        return cf.logistic_quadratic_bound, True
    if name == "linearized" or terms.num_predictors == 0:
        return lambda m, s, values: ex.linearized(lambda u: terms.density(u, values), m, s), name != "linearized"
    adaptive = name == "quadrature" and terms.num_predictors == 1
    if name == "quadrature":
        place = ex.quadrature_nodes
    else:
        if name == "sigma_points":
            points, weights = ex.sigma_points(terms.num_predictors)
        else:
            points, weights = ex.monte_carlo_points(rng_key, options.num_samples, terms.num_predictors)
        place = lambda density, m, s, order: ex.fixed_nodes(m, s, points, weights)  # noqa: E731

    def moments(order, mean, covariance, values):
        density = lambda u: terms.density(u, values)  # noqa: E731
        return ex.from_nodes(density, place(density, mean, covariance, order), order)

    order = options.order
    if order == "auto":
        order = 2 if adaptive and _is_smooth(moments, terms, rows) else 1
    return partial(moments, order), order == (2 if adaptive else 1)


def _is_smooth(moments: Callable, terms: Terms, rows: dict) -> bool:
    """Whether E[hess phi] equals the derivative of E[grad phi]; it does not where phi has kinks (Laplace)."""

    def both():
        values = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), constants(terms, rows))
        count = jax.tree.leaves(values)[0].shape[0] if jax.tree.leaves(values) else 1
        dtype = jnp.result_type(float)
        rng = np.random.default_rng(0)
        means = jnp.asarray(rng.normal(size=(count, terms.num_predictors)), dtype)
        covariance = jnp.eye(terms.num_predictors, dtype=dtype)
        found = [jax.vmap(lambda m, v, o=o: moments(o, m, covariance, v)[2])(means, values) for o in (1, 2)]
        return jnp.max(jnp.abs(found[0] - found[1]), axis=(1, 2)), jnp.max(jnp.abs(found[0]), axis=(1, 2))

    difference, size = at_once(both)
    usable = np.isfinite(difference) & np.isfinite(size)
    return not np.any(difference[usable] > 0.05 * size[usable] + 1e-6)
