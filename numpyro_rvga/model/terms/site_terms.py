"""Reading one site of a model as terms: functions of a few predictors each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from jax import Array
from numpyro.distributions import Distribution
from numpyro.distributions.transforms import IdentityTransform, biject_to

from ...core.compilation import abstractly
from ...core.expectations import closed_forms as cf
from ...core.jaxprs.addends import addends_of
from ...core.jaxprs.primitives import numbers_in
from ...core.jaxprs.symbolic import Factorization, Reading, factorize
from ..data.rows import Arrays
from ..handlers.tracing import SiteRecord, base_distribution, elements, numbers_of, site_transform
from .distributions import patterns_of
from .information import Information, information_of
from .terms import Terms

MAX_PREDICTORS = 16  # of an affine split; beyond, the distribution's own parameters are linearized in theta

MIN_PREDICTORS = 4  # that call for as many nodes as draws of theta would be
MUCH = 2**18  # numbers that rows compute: of fewer, there is no time to be won
REPEATED = 8.0  # times what the model computes: loops that run again for each of a site's terms
ELEMENT = jax.ShapeDtypeStruct((), jnp.int32)
DRAWS_PER_PARAMETER = 1 / 64  # beyond those that any model takes, relative to them

RunSite = Callable[[Array, Arrays], SiteRecord]


class _Example(NamedTuple):
    """The static properties of a site's terms.

    :ivar kind: the distribution's type.
    :ivar supports: its parameters' constraints, None if they cannot be named.
    :ivar has_jacobian: whether it is a latent site of another support than the real line.
    """

    num_elements: int
    kind: type
    supports: list | None
    has_jacobian: bool


def site_terms(
    run_site: RunSite,
    site: str,
    theta: jax.ShapeDtypeStruct,
    row: Arrays,
    *,
    prefer_parameters: bool,
    by_draws: bool = False,
    rows: Arrays | None = None,
) -> Terms:
    """Split one site's terms.

    :param run_site: (theta, row) -> the site's record.
    :param row: an example row: arrays with a leading axis of one (empty for prior terms).
    :param prefer_parameters: use the distribution's own parameters as predictors, linearized in theta if need be
        (what the extended Kalman filter does), even if an affine split is at hand.
    :param by_draws: where a split names too many predictors, take expectations over draws of theta. Default: the
        distribution's parameters are linearized, if they are fewer. Where each term runs most of the model again, all
        are one term, of few predictors or of theta.
    :param rows: with ``by_draws``, the arrays of all rows in one solve, without what they share.
    """
    example = _example_of(run_site, theta, row)
    count = example.num_elements
    if not count:
        return constant_terms(site, 0, theta.dtype)
    if not example.has_jacobian:  # a transformed latent's log-Jacobian is no part of the closed form
        closed = closed_form_terms(run_site, site, theta, row, count, example.kind)
        if closed is not None:
            return closed
    split = None
    total = lambda u, r: jnp.sum(elements(run_site(u, r)))  # noqa: E731
    if not prefer_parameters:
        split = factorize(lambda t, r, e: elements(run_site(t, r))[e], theta, row, ELEMENT)
        num_predictors = min(split.num_predictors, theta.shape[0])
        if by_draws and rows and num_predictors >= MIN_PREDICTORS:
            if _repeats_the_model(run_site, split, theta, row, count, rows):
                return theta_terms(site, theta.shape[0], total)
        elif by_draws and _repeats_the_model(run_site, split, theta, row, count, {}):
            of_all = factorize(lambda t, r, _: total(t, r), theta, row, ELEMENT)
            if min(of_all.num_predictors, theta.shape[0]) < MIN_PREDICTORS:
                return affine_terms(site, 1, of_all.at_most(theta.shape[0]))
            if num_predictors >= MIN_PREDICTORS:
                return theta_terms(site, theta.shape[0], total)
        if num_predictors >= MIN_PREDICTORS and count == 1 and not example.has_jacobian:
            addends = _addend_terms(total, site, theta, row, min(num_predictors - 1, MAX_PREDICTORS))
            if addends is not None:
                return addends
        if num_predictors <= MAX_PREDICTORS:
            return affine_terms(site, count, split.at_most(theta.shape[0]))
        if by_draws:
            return theta_terms(site, theta.shape[0], total)
    parameters = _parameter_terms(run_site, site, theta, row, example, informed=prefer_parameters)
    if parameters is None or (split is not None and split.num_predictors <= parameters.num_predictors):
        split = split or factorize(lambda t, r, e: elements(run_site(t, r))[e], theta, row, ELEMENT)
        information = information_of(run_site, split, theta, row, example.kind) if prefer_parameters else None
        return _informed(affine_terms(site, count, split), information)
    return parameters


def _addend_terms(
    total: Callable[[Array, Arrays], Array], site: str, theta: jax.ShapeDtypeStruct, row: Arrays, most: int
) -> Terms | None:
    """The terms of a site whose log density is a sum over an array, as ``numpyro.factor`` takes it; None if it is none,
    or the terms have more predictors than ``most``."""
    addends = addends_of(total, theta, row)
    if addends is None:
        return None
    count = jax.eval_shape(addends, theta, row).shape[0]
    split = factorize(lambda t, r, e: addends(t, r)[e], theta, row, ELEMENT)
    return affine_terms(site, count, split) if split.num_predictors <= most else None


def _repeats_the_model(
    run_site: RunSite, split: Factorization, theta: jax.ShapeDtypeStruct, row: Arrays, num_elements: int, rows: Arrays
) -> bool:
    """Whether a site's terms one by one compute far more than all at once, as where each is the end of a loop, or takes
    what is the same in all rows.

    :param rows: the arrays of all rows; none: there is one.
    """

    def of_rows(t, r, several):
        if not several:
            return elements(run_site(t, r))
        return jax.vmap(lambda own: elements(run_site(t, {**r, **own})))(several)

    num_terms = num_elements * max(map(len, rows.values()), default=1)
    of_one = numbers_of_one(split, theta, row)
    if rows and num_terms * of_one < MUCH:
        return False
    several = {name: jax.ShapeDtypeStruct((len(x), 1, *x.shape[1:]), row[name].dtype) for name, x in rows.items()}
    of_all = numbers_in(jax.make_jaxpr(of_rows)(theta, row, several).jaxpr)
    return num_terms * of_one > REPEATED * max(1.0, DRAWS_PER_PARAMETER * theta.shape[0]) * of_all


def numbers_of_one(split: Factorization, theta: jax.ShapeDtypeStruct, row: Arrays) -> int:
    """How many numbers one term computes of its predictors."""
    predictors = jax.ShapeDtypeStruct((split.num_predictors,), theta.dtype)
    constants = jax.eval_shape(lambda r, e: split.constants((r, e)), row, ELEMENT)
    return numbers_in(jax.make_jaxpr(split.density)(predictors, constants).jaxpr)


def _example_of(run_site: RunSite, theta: jax.ShapeDtypeStruct, row: Arrays) -> _Example:
    def example(t, r):
        record = run_site(t, r)
        fn, terms = base_distribution(record.fn)[0], elements(record)
        supports = _leaf_constraints(fn)
        named = supports is not None and len(supports) == len(numbers_of(fn))
        transformed = record.log_abs_det is not None
        has_jacobian = transformed and not isinstance(site_transform(record.fn), IdentityTransform)
        return _Example(terms.shape[0], type(fn), supports if named else None, has_jacobian)

    return abstractly(example, theta, row)


def constant_terms(site: str, count: int, dtype: Any) -> Terms:
    """The terms of so many elements, each of which is zero at any theta."""
    return Terms(
        site, count, 0, True, lambda *_: jnp.zeros(0, dtype), lambda *_: (), lambda *_: jnp.zeros((), dtype), None
    )


def theta_terms(site: str, size: int, density: Callable[[Array, Arrays], Array]) -> Terms:
    """One term of all of theta (P,), which takes a row as it is. ``size``: P."""
    return Terms(site, 1, size, True, lambda theta, *_: theta, lambda row, _: row, density, None, by_draws=True)


def of_theta(terms: Terms, size: int) -> Terms:
    """The terms of a row as one of all of theta (P,): rows of many predictors are then one factor together."""

    def density_by(terms: Terms) -> Callable[[Array, Arrays], Array]:
        def density(theta, row):
            elements = jnp.arange(terms.num_elements, dtype=jnp.int32)
            return jnp.sum(jax.vmap(lambda element: terms.log_prob(theta, row, element))(elements))

        return density

    finer = density_by(terms._replace(density=terms.finer)) if terms.finer else None
    return theta_terms(terms.site, size, density_by(terms))._replace(num_nodes=terms.num_nodes, finer=finer)


def affine_terms(site: str, count: int, split: Factorization) -> Terms:
    """The terms of so many elements, from a split of one, whose constants are those of (row, element)."""

    def predictors(theta, row, element):
        return split.predictors(theta, (row, element))

    def constants(row, element):
        return split.constants((row, element))

    return Terms(site, count, split.num_predictors, True, predictors, constants, split.density, None)


def _informed(terms: Terms, information: Information | None) -> Terms:
    """The terms with their Fisher information, and its constants."""
    if information is None:
        return terms

    def constants(row, element):
        return terms.constants(row, element), information.constants(row, element)

    return terms._replace(
        constants=constants,
        density=lambda u, values: terms.density(u, values[0]),
        information=lambda u, values: information.of(u, values[1]),
    )


# ---------------------------------------------------------------------- closed-form expectations
def closed_form_terms(
    run_site: RunSite, site: str, theta: jax.ShapeDtypeStruct, row: Arrays, num_elements: int, kind_of_site: type
) -> Terms | None:
    """A site's terms with expectations in closed form; None if there are none.

    :param kind_of_site: the distribution's type.
    """
    patterns = patterns_of(kind_of_site)
    if not patterns:
        return None
    names = {name for pattern in patterns for name in (*pattern.fixed, *(n for n, _ in pattern.parameters))}

    def attributes(t, r, e):
        record = run_site(t, r)

        def element(array):
            return jnp.ravel(jnp.broadcast_to(jnp.asarray(array, theta.dtype), jnp.shape(record.value)))[e]

        return {name: element(_attribute(record, name)) for name in names}

    reading = Reading(attributes, theta, row, ELEMENT)
    for pattern in patterns:
        fixed = [reading.split(name) for name in pattern.fixed]
        if any(f.num_predictors for f in fixed):
            continue
        splits = [reading.split(name, link) for name, link in pattern.parameters]
        free = [f for f in splits if f is not None and f.is_affine]
        if len(free) < len(splits):
            continue
        kind = type(jax.eval_shape(pattern.coefficients, *[jax.ShapeDtypeStruct((), theta.dtype)] * len(fixed)))

        def predictors(t, r, e, free=free):
            return jnp.concatenate([f.predictors(t, (r, e)) for f in free])

        def constants(r, e, fixed=fixed, pattern=pattern):
            nothing = jnp.zeros(0, theta.dtype)
            return pattern.coefficients(*[f.density(nothing, f.constants((r, e))) for f in fixed])

        terms = Terms(site, num_elements, len(free), True, predictors, constants, cf.DENSITIES[kind], kind)
        return terms._replace(information=cf.INFORMATION.get(kind))
    return None


def _attribute(record: SiteRecord, name: str) -> Any:
    fn, mask = base_distribution(record.fn)
    if name == "weight":
        return record.weight_of(fn) * mask
    if name == "value":
        return _observed(record, fn, mask)
    return fn.loc - _observed(record, fn, mask) if name == "loc - value" else getattr(fn, name)


def _observed(record: SiteRecord, fn: Any, mask: Any) -> Any:
    """A site's value, with another from the support where it is masked: it may be NaN there."""
    if isinstance(mask, bool) or not record.is_observed:
        return record.value
    return jnp.where(mask, record.value, fn.support.feasible_like(jnp.asarray(record.value)))


# ---------------------------------------------------------------------- the distribution's parameters as predictors
def _parameter_terms(
    run_site: RunSite, site: str, theta: jax.ShapeDtypeStruct, row: Arrays, example: _Example, *, informed: bool
) -> Terms | None:
    """The distribution's theta-dependent, unconstrained parameters as predictors; None if they cannot be named.

    :param informed: whether to give the Fisher information too.
    """
    supports = example.supports
    value = lambda t, r: run_site(t, r).value  # noqa: E731
    if supports is None or _moves(value, theta, row):  # latent sites have no parameters apart from their value
        return None

    def leaves(t, r):
        return jax.tree.leaves(base_distribution(run_site(t, r).fn)[0])

    moving = [i for i in range(len(supports)) if _moves(lambda t, r, i=i: leaves(t, r)[i], theta, row)]
    transforms = {i: biject_to(supports[i]) for i in moving}  # numbers, as of trials, have none
    shapes = [jax.eval_shape(lambda t, r, i=i: transforms[i].inv(leaves(t, r)[i]), theta, row).shape for i in moving]
    sizes = [int(np.prod(s)) for s in shapes]

    def unconstrained(t, r):
        values, nothing = leaves(t, r), jnp.zeros(0, theta.dtype)
        return jnp.concatenate(
            [nothing, *[jnp.ravel(transforms[i].inv(values[i])).astype(theta.dtype) for i in moving]]
        )

    zero = jnp.zeros(theta.shape, theta.dtype)  # parameters that do not move are the same at any theta

    def moved(u, r):
        record = run_site(zero, r)
        base, mask = base_distribution(record.fn)
        values, structure = jax.tree.flatten(base)
        pieces = jnp.split(u, list(np.cumsum(sizes))[:-1])
        for i, piece, shape in zip(moving, pieces, shapes):  # of nothing, there is one piece too many
            values[i] = transforms[i](jnp.reshape(piece, shape))
        return jax.tree.unflatten(structure, values), mask, record

    def term(u, r, e):
        fn, mask, record = moved(u, r)
        return jnp.ravel(jnp.where(mask, fn.log_prob(record.value), 0.0) * record.weight_of(fn))[e]

    u = jax.ShapeDtypeStruct((sum(sizes),), theta.dtype)
    inner = factorize(term, u, row, ELEMENT)

    def predictors(t, r, e):
        return inner.predictors(unconstrained(t, r), (r, e))

    terms = affine_terms(site, example.num_elements, inner)._replace(is_affine=False, predictors=predictors)

    def of_parameters(u, r):
        fn, mask, record = moved(u, r)
        return replace(record, fn=fn, weight=mask * record.weight_of(fn))

    return _informed(terms, information_of(of_parameters, inner, u, row, example.kind)) if informed else terms


def unconstrained_parameters(site: str, fn: Distribution) -> tuple[list[Array], Callable[[list[Array]], Any]]:
    """A distribution's parameters in unconstrained space, and the way back to the distribution.

    :raises NotImplementedError: naming the site, if the parameters' constraints are not known.
    """
    values, structure = jax.tree.flatten(fn)
    supports = _leaf_constraints(base_distribution(fn)[0])
    if supports is None or len(supports) != len(values):
        raise NotImplementedError(
            f"the parameters of site {site!r} ({type(base_distribution(fn)[0]).__name__}) cannot be linearized: use "
            "method='monte_carlo'."
        )
    transforms = [
        None if jnp.issubdtype(jnp.result_type(v), jnp.integer) else biject_to(s) for v, s in zip(values, supports)
    ]

    def build(moved):
        return jax.tree.unflatten(structure, [m if t is None else t(m) for m, t in zip(moved, transforms)])

    return [v if t is None else t.inv(v) for v, t in zip(values, transforms)], build


def _moves(function, theta, row) -> bool:
    total = factorize(lambda t, r: jnp.sum(function(t, r)).astype(theta.dtype), theta, row)
    return total.num_predictors > 0


def _leaf_constraints(fn: Distribution) -> list | None:
    constraints: list = []
    for field in type(fn).gather_pytree_data_fields():
        value = fn.__dict__.get(field)
        if isinstance(value, dist.Distribution):
            inner = _leaf_constraints(value)
            if inner is None:
                return None
            constraints += inner
        elif value is not None:
            leaves = numbers_of(value)
            support = fn.arg_constraints.get(field)
            if support is None or len(leaves) != 1:
                return None
            constraints.append(support)
    return constraints
