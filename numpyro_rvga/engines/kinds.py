"""How the expectations of a site's terms are computed, as the options ask.

For each term phi(u) = log p(y | u) of a site, with predictors u ~ N(m, S) under q (m (C,), S (C, C)), a rule gives

    E[phi],    g = E[grad phi] (C,),    G = E[hess phi] (C, C),

and each algorithm is one of these rules and one way to use g and G (see :mod:`~numpyro_rvga.core.updates.maximize`):

=====================  ================================================================================================
``"exact"``            closed forms: :mod:`~numpyro_rvga.core.expectations.closed_forms`, ``tilted``
``"ladder"``           few nodes first, and more where they do not suffice: ``ladder``. What ``"auto"`` mostly is
``"quadrature"``       adaptive panels for one predictor, Gauss-Hermite for two or three: ``by_nodes``
``"sigma_points"``     2 C nodes; ``"monte_carlo"``: Sobol nodes; ``"draws"``: nodes for theta itself, without structure
``"linearized"``       phi, grad phi and hess phi at m: Laplace, and the extended Kalman filter with the Fisher
                       information in place of - hess phi
``"probit"``           the inverse-probit approximation of a logistic term
``"quadratic_bound"``  Jaakkola and Jordan's bound of one: the quadratic Kalman filter
=====================  ================================================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.expectations import by_nodes as ex
from ..core.expectations import closed_forms as cf
from ..core.expectations.draws import by_draws
from ..core.expectations.ladder import expectations, values_by_many_nodes
from ..core.expectations.quadrature import CUBE_NODES
from ..core.expectations.tilted import TiltedForm, tilted
from ..core.matrices.linalg import semidefinite_factor
from ..core.pytrees import PyTree
from ..core.updates.factors import Expect, Kind, Moments, without_errors
from ..model.terms.site_terms import MAX_PREDICTORS
from ..model.terms.terms import Terms
from ..options import Options, key_numbers

NUM_HELD_OUT = 8  # sets of nodes that no search uses, to estimate errors


def make_kind(terms: Terms, options: Options, rng_key: Array, *, effort: str = "usual") -> Kind:
    """The expectations of one site's terms, as the options ask.

    :param effort: ``"direct"``, ``"usual"`` or ``"thorough"``, see
        :func:`~numpyro_rvga.core.expectations.ladder.expectations`.
    :raises ValueError: naming the site, if the expectation asked for does not exist for its distribution.
    """
    rule = _rule(_resolve(terms, options), terms, options, rng_key, effort)
    site = _SiteExpectations(terms, rule.finest)
    has_information = terms.information is not None and not terms.num_local
    expect = _of_factors(jax.vmap(rule.finest), is_exact=True) if rule.of_many is None else _of_factors(rule.of_many)
    return Kind(
        without_errors(site.filtered) if options.scheme == "ekf" and has_information else expect,
        site.plugin,
        site.finest,
        concave=terms.closed_form in cf.CONCAVE or is_constant(terms),
        quadratic=rule.finest is cf.EXACT[cf.Gaussian] or is_constant(terms),
        conservative=rule.conservative,
        information=site.information if has_information else None,
        has_errors=rule.has_errors,
        few=None if rule.few is None else _of_factors(rule.few),
        values=None if rule.values is None else _of_factors(rule.values),
        has_few_draws=rule.has_few_draws,
        held_out=None if rule.held_out is None else _of_factors(rule.held_out),
    )


def _of_factors(of_densities: Callable, *, is_exact: bool = False) -> Callable:
    """A function of n densities as one of n factors. ``is_exact``: with errors of zero beside its results.

    The constants of a factor are its weight, what its density takes, and the Jacobian (C, K) of its predictors in K
    latent variables of its row, standard normal and integrated out: they add ``local @ local.T`` to the covariance.
    """

    def of_factors(means: Array, covariances: Array, constants: tuple, **flags: Array) -> PyTree:
        weight, values, local = constants
        covariances = covariances + jnp.einsum("nck,ndk->ncd", local, local)
        results = of_densities(means, covariances, values, **flags)
        results = jax.tree.map(lambda x: weight.reshape(-1, *[1] * (x.ndim - 1)) * x, results)
        return (results, jnp.zeros(len(means), means.dtype)) if is_exact else results

    return of_factors


class _SiteExpectations:
    """The functions of one factor that a site's :class:`Kind` has. ``finest``: of its density."""

    def __init__(self, terms: Terms, finest: Callable[..., Moments]):
        self._terms, self._finest = terms, finest

    def filtered(self, means: Array, covariances: Array, constants: tuple) -> Moments:
        """The moments of n factors by the extended Kalman filter (R-VGA paper, Theorem 3), whose curvature is the
        Fisher information."""
        value, gradient, _ = jax.vmap(self.plugin)(means, covariances, constants)
        return value, gradient, -jax.vmap(self.information)(means, constants)

    def finest(self, mean: Array, covariance: Array, constants: tuple) -> Moments:
        weight, values, local = constants
        value, gradient, hessian = self._finest(mean, covariance + local @ local.T, values)
        return weight * value, weight * gradient, weight * hessian

    def plugin(self, mean: Array, covariance: Array, constants: tuple) -> Moments:
        """Value and derivatives at the mean."""
        weight, values, _ = constants
        if self._terms.num_local:
            return self.finest(mean, jnp.zeros_like(covariance), constants)
        density = lambda u: density_of(self._terms)(u, values)  # noqa: E731
        if self._terms.by_draws:  # where a search starts from, which takes no curvature
            value, gradient = jax.value_and_grad(density)(mean)
            return weight * value, weight * gradient, jnp.zeros_like(covariance)
        value, gradient, hessian = ex.linearized(density, mean, covariance)
        return weight * value, weight * gradient, weight * hessian

    def information(self, mean: Array, constants: tuple) -> Array:
        weight, values, _ = constants
        assert self._terms.information is not None
        return weight * self._terms.information(mean, values)


def is_constant(terms: Terms) -> bool:
    """Whether theta does not enter, as where all that a site depends on is given."""
    return terms.num_predictors == 0 and not terms.num_local


class _Rule(NamedTuple):
    """How expectations are computed: of one factor, of n factors, and what is true of the results.

    :ivar finest: of one factor, as exactly as may be.
    :ivar of_many: ``expect`` of :class:`Kind`, if it is not ``finest`` of each factor. The other fields are as there.
    """

    finest: Callable[..., Moments]
    conservative: bool
    of_many: Expect | None = None
    has_errors: bool = False
    few: Expect | None = None
    values: Callable | None = None
    has_few_draws: bool = False
    held_out: Callable | None = None


def _resolve(terms: Terms, options: Options) -> str | ex.Expectation:
    """The name of the rule that a site's terms take, or the user's own.

    :raises ValueError: naming the site, if it does not exist for its distribution.
    """
    if options.scheme == "qkf":
        _need_closed_form(terms, "the quadratic Kalman filter", cf.Logistic)
        return "quadratic_bound"
    if options.scheme in ("ekf", "laplace"):
        return "linearized"
    if terms.by_draws or (options.expectation == "auto" and terms.num_predictors > MAX_PREDICTORS):
        return "draws"
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
    if name == "auto" and terms.closed_form is not None and options.order in ("auto", 2):
        return "exact"
    if name in ("auto", "quadrature") and options.order in ("auto", 1):
        return "ladder"
    if name == "auto":
        return "quadrature" if terms.num_predictors <= 3 else "monte_carlo"
    return name


def _need_closed_form(terms: Terms, what: str, *forms: type) -> None:
    if terms.closed_form not in forms:
        raise ValueError(
            f"{what} needs {' or '.join(f.__name__ for f in forms)} terms, and site {terms.site!r} is none of these "
            "with predictors affine in the latents. Use expectation='auto'."
        )


def _rule(name: str | ex.Expectation, terms: Terms, options: Options, rng_key: Array, effort: str) -> _Rule:
    """The rule of this name.

    Over fixed nodes the first-order form derives from the value: it is the derivative of the weighted sum itself.
    """
    if name == "linearized" and terms.num_local:
        raise ValueError(
            f"site {terms.site!r} depends on a latent variable of each row, whose variance linearized expectations "
            "would pass over. Use expectation='auto' and scheme='implicit' or 'explicit'; in BONG, hessian='auto'."
        )

    if name == "exact":
        form = terms.closed_form
        return _Rule(partial(tilted, form) if isinstance(form, TiltedForm) else cf.EXACT[form], True)
    if name == "probit":
        return _Rule(cf.logistic_probit, False)
    if name == "quadratic_bound":
        return _Rule(cf.logistic_quadratic_bound, True)

    if name == "draws":
        return _rule_by_draws(terms, rng_key, more=effort == "thorough")

    def at_density(moments: Callable) -> Callable:
        return lambda m, s, values: moments(lambda u: terms.density(u, values), m, s)

    if name == "linearized" or is_constant(terms):
        return _Rule(at_density(ex.linearized), name != "linearized" or is_constant(terms))
    if not isinstance(name, str):
        return _rule_of(name, terms)
    order = 1 if isinstance(options.order, str) else options.order
    if name == "quadrature":
        return _Rule(at_density(partial(ex.quadrature, order)), order == 2 and terms.num_predictors == 1)
    nodes = _nodes_of(name, terms, options, rng_key)

    def over_nodes(density: Callable, mean: Array, covariance: Array) -> ex.Moments:
        assert nodes is not None
        return ex.from_nodes(density, mean, covariance, *nodes, order)

    is_sampled = name == "monte_carlo" or (name == "ladder" and nodes is not None)
    held_out = _held_out(terms, options, rng_key) if is_sampled else None
    if name != "ladder":
        return _Rule(at_density(over_nodes), order == 1, held_out=held_out)
    expect, few = (
        expectations(terms.density, terms.num_predictors, nodes, effort=each, cost=terms.num_nodes)
        for each in (effort, "few")
    )
    finest = at_density(partial(ex.quadrature, 1) if nodes is None else over_nodes)
    if options.expectation != "auto":
        return _Rule(finest, True, expect, has_errors=True, held_out=held_out)
    values = values_by_many_nodes(terms.density, terms.num_nodes) if terms.num_predictors in CUBE_NODES else None
    return _Rule(finest, True, expect, has_errors=True, few=few, values=values, held_out=held_out)


def _nodes_of(name: str, terms: Terms, options: Options, rng_key: Array) -> tuple[np.ndarray, np.ndarray] | None:
    """The nodes that all factors take: positions (K, C) and weights (K,). None where each has its own."""
    if name == "sigma_points":
        return ex.sigma_points(terms.num_predictors)
    if name == "monte_carlo" or terms.num_predictors > 3:
        return ex.monte_carlo_points(key_numbers(rng_key), options.num_samples, terms.num_predictors)
    return None


def _held_out(terms: Terms, options: Options, rng_key: Array) -> Callable[[Array, Array, PyTree], Array]:
    """E[phi] over sets of nodes that no search uses, (n, NUM_HELD_OUT)."""
    count, seed = options.num_samples, key_numbers(rng_key)
    if terms.num_nodes > 1:  # each value is an integral itself: all sets take no more than a search does
        count = max(count // NUM_HELD_OUT, 2)

    def held_out(means: Array, covariances: Array, values: PyTree) -> Array:
        size = terms.num_predictors
        sets = [ex.monte_carlo_points([number, *seed], count, size) for number in range(1, NUM_HELD_OUT + 1)]
        z, weights = (np.stack(parts) for parts in zip(*sets))

        def of_each(mean, covariance, values):
            root, _ = semidefinite_factor(covariance)
            points = mean + jnp.asarray(z, mean.dtype) @ root.T
            densities = jax.vmap(jax.vmap(lambda u: terms.density(u, values)))(points)
            return jnp.sum(jnp.asarray(weights, mean.dtype) * densities, axis=1)

        return jax.vmap(of_each)(means, covariances, values)

    return held_out


def _rule_of(expectation: ex.Expectation, terms: Terms) -> _Rule:
    """An expectation of the user's own. Its errors are its differences from quadrature, for up to three predictors."""

    def of_one(mean: Array, covariance: Array, values: tuple) -> ex.Moments:
        return ex.differentiated(expectation, lambda u: terms.density(u, values), mean, covariance)

    def expect(means: Array, covariances: Array, values: tuple) -> tuple[ex.Moments, Array]:
        moments = jax.vmap(of_one)(means, covariances, values)
        exact = jax.vmap(lambda m, s, v: ex.quadrature(1, lambda u: terms.density(u, v), m, s)[0])
        return moments, jnp.abs(moments[0] - exact(means, covariances, values))

    has_errors = terms.num_predictors <= 3
    return _Rule(of_one, True, expect if has_errors else None, has_errors)


def density_of(terms: Terms) -> Callable:
    """The log density of a factor; where all rows are one factor, the weighted sum of theirs."""
    if not terms.by_draws:
        return terms.density

    def of_rows(u, constants):
        weights, rows = constants
        return weights @ jax.vmap(lambda row: terms.density(u, row))(rows)

    return of_rows


def _rule_by_draws(terms: Terms, rng_key: Array, *, more: bool) -> _Rule:
    """Expectations over nodes for theta itself."""
    seed = key_numbers(rng_key)

    @functools.cache
    def nodes_of(number: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        return ex.monte_carlo_points([number, *seed], count, terms.num_predictors)

    moments, held_out = by_draws(density_of(terms), nodes_of, NUM_HELD_OUT, more=more)

    def of_one(*factor):
        return tuple(x[0] for x in moments(*jax.tree.map(lambda x: x[None], factor)))

    def expect(means, covariances, constants, is_coarse=None):
        return moments(means, covariances, constants, is_coarse), jnp.zeros(len(means), means.dtype)

    return _Rule(of_one, True, expect, has_few_draws=True, held_out=held_out)
