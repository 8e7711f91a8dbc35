"""Terms as factors: what does not depend on theta is computed once, the rest at each theta. Rows that are part of q."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import DTypeLike

from ..core.jaxprs.fingerprint import output_digests
from ..core.matrices.jacobians import times_vector
from ..core.pytrees import PyTree
from ..core.updates.factors import Factors
from ..core.updates.state import Absorbed, QuadraticFactors
from ..model.terms.sparsity import Pattern, sparse_jacobian
from ..model.terms.terms import Terms, constants, linearize, merged

PatternedTerms = tuple[Terms, Pattern | None]
"""A site's terms, and the few entries of theta that each depends on; None: any entries, by dense Jacobians."""


def factors_at(
    terms: Terms, pattern: Pattern | None, theta: Array, rows: dict, weight: Array, values: PyTree
) -> Factors:
    """The factors of one site's terms at theta (P,): predictors (n E, C), Jacobians (n E, C, P) and constants."""
    if terms.by_draws:
        return _one_factor(theta, weight, values)
    if pattern is None:
        predictors, jacobian, local = linearize(terms, theta, rows)
        return Factors(*merged((predictors, jacobian, (weight, values, local))))
    local = jnp.zeros((*weight.shape, terms.num_predictors, 0), theta.dtype)
    return Factors(*sparse_jacobian(terms, pattern, theta, rows), merged((weight, values, local)))


def _one_factor(theta: Array, weight: Array, values: PyTree) -> Factors:
    """All rows as one factor, whose predictors are theta: a Jacobian of (1, P, P), the identity."""
    size, dtype = theta.size, theta.dtype
    rows = jax.tree.map(lambda x: x[None, :, 0], (weight, values))
    return Factors(
        theta[None], jnp.eye(size, dtype=dtype)[None], (jnp.ones(1, dtype), rows, jnp.zeros((1, size, 0), dtype))
    )


def prepare(
    terms_and_patterns: Iterable[PatternedTerms], origin: Array, rows: dict, weights: Array, *, once: bool = False
) -> tuple:
    """Everything about rows that does not depend on theta: (n E, ...) arrays by site.

    :param origin: theta = 0.
    :param once: whether factors are needed at a single theta: affine predictors wait for it too.
    """
    prepared = []
    for terms, pattern in terms_and_patterns:
        values = constants(terms, rows)
        weight = jnp.broadcast_to(weights[:, None].astype(origin.dtype), (len(weights), terms.num_elements))
        if terms.is_affine and not once:
            prepared.append(factors_at(terms, pattern, origin, rows, weight, values))
        else:
            prepared.append((rows, weight, values))
    return tuple(prepared)


def factors_of(
    terms_and_patterns: Iterable[PatternedTerms],
    prepared: tuple,
    entries: Array,
    theta_of: Callable[[Array], Array] = lambda theta: theta,
) -> tuple[Factors, ...]:
    """The factors at theta, from what was prepared.

    :param entries: theta (P,), in the order in which designs count its entries. :param theta_of: puts it in its own.
    """
    factors = []
    for (terms, pattern), affine_part in zip(terms_and_patterns, prepared):
        if isinstance(affine_part, Factors):
            factors.append(
                affine_part._replace(predictors=affine_part.predictors + times_vector(affine_part.jacobian, entries))
            )
        else:
            factors.append(factors_at(terms, pattern, theta_of(entries), *affine_part))
    return tuple(factors)


def at_indices(linearize: Callable, rest: Array, indices: Array, chunk: PyTree, some: Array) -> tuple[Factors, ...]:
    """Factors as functions of some entries of theta.

    :param rest: theta (P,), whose entries at ``indices`` (S,) are ``some`` instead.
    """
    factors = linearize(chunk, rest.at[indices].set(some))
    return tuple(f._replace(jacobian=f.jacobian[..., indices]) for f in factors)


def sites_by_form(terms_and_patterns: Sequence[PatternedTerms], rows: dict) -> list[list[int]]:
    """The indices of sites of the same closed form, or of the same density; each of the others by itself.

    :param rows: what the terms take besides theta, or the shapes of these.
    """
    without = Counter(terms.num_predictors for terms, _ in terms_and_patterns if terms.closed_form is None)
    indices: dict[Any, list[int]] = {}
    for index, (terms, _) in enumerate(terms_and_patterns):
        form: Any = index
        if terms.is_affine and terms.closed_form is not None:
            form = terms.closed_form
        elif terms.is_affine and without[terms.num_predictors] > 1:
            form = _density_of(terms, rows)
        indices.setdefault(form, []).append(index)
    return list(indices.values())


def _density_of(terms: Terms, rows: dict) -> tuple:
    """Equal for the same densities, which take the same arrays."""
    shapes = jax.eval_shape(partial(constants, terms), rows)
    of_one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[2:], x.dtype), shapes)
    predictors = jax.ShapeDtypeStruct((terms.num_predictors,), jax.dtypes.canonicalize_dtype(float))
    digests = output_digests(lambda u, c: {"density": terms.density(u, c)}, predictors, of_one)
    leaves, structure = jax.tree.flatten(of_one)
    return digests["density"], terms.num_predictors, terms.num_nodes, structure, *((x.shape, x.dtype) for x in leaves)


def merged_by_form(forms: list[list[int]], prepared: tuple) -> tuple:
    """Prepared terms, those of all sites of a form merged into its first site: there is less to compile. For Jacobians
    that are whole matrices."""
    return tuple(jax.tree.map(lambda *x: jnp.concatenate(x), *[prepared[i] for i in same]) for same in forms)


def no_row_factors(all_terms: Sequence[Terms], num_rows: int, dtype: DTypeLike) -> tuple[QuadraticFactors, ...]:
    """Gaussian approximations (n, E, ...) of rows that are part of no state: zero."""

    def nothing(terms: Terms) -> QuadraticFactors:
        e, c = terms.num_elements, terms.num_predictors
        return QuadraticFactors(*[np.zeros((num_rows, *shape), dtype) for shape in ((e,), (e, c), (e, c, c))])

    return tuple(map(nothing, all_terms))


def flat_row_factors(row_factors: tuple[QuadraticFactors, ...], weights: Array) -> tuple[QuadraticFactors, ...]:
    """Gaussian approximations (n, E, ...) of rows as (n E, ...) arrays; those of rows without weight are zero."""
    kept = weights > 0
    return merged(jax.tree.map(lambda x: kept.reshape(-1, *[1] * (x.ndim - 1)).astype(x.dtype) * x, row_factors))


def _shapes(terms: Terms) -> tuple[tuple[int, ...], ...]:
    """The shapes of the moments of one row's predictors: mean, covariance and error."""
    elements, c = terms.num_elements, terms.num_predictors
    return (elements, c), (elements, c, c), (elements,)


def num_absorbed(all_terms: Sequence[Terms]) -> int:
    """How many numbers the moments of one row's predictors are."""
    return sum(int(np.prod(shape)) for terms in all_terms for shape in _shapes(terms))


def by_row(absorbed: tuple[Absorbed, ...], all_terms: Sequence[Terms]) -> tuple[Absorbed, ...]:
    """(n E, ...) and (blocks, B E, ...) arrays as (n, E, ...)."""

    def fold(moments: Absorbed, terms: Terms) -> Absorbed:
        return Absorbed(*[x.reshape(-1, *shape) for x, shape in zip(moments, _shapes(terms))])

    return tuple(fold(moments, terms) for moments, terms in zip(absorbed, all_terms))
