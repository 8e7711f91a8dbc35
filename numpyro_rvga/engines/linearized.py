"""Terms as factors: what does not depend on theta is computed once, the rest at each theta."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..core.matrices.jacobians import times_vector
from ..core.pytrees import PyTree
from ..core.updates.factors import Factors
from ..model.terms.sparsity import Pattern, sparse_jacobian
from ..model.terms.terms import Terms, constants, linearize, merged

Seen = tuple[Terms, Pattern | None]  # terms, and the few entries of theta that they depend on; None: any


def factors_at(
    terms: Terms, pattern: Pattern | None, theta: Array, rows: dict, weight: Array, values: PyTree
) -> Factors:
    """Of one site, at theta (P,)."""
    if terms.by_draws:
        return _one_factor(theta, weight, values)
    if pattern is None:
        predictors, jacobian, local = linearize(terms, theta, rows)
        return Factors(*merged((predictors, jacobian, (weight, values, local))))
    local = jnp.zeros((*weight.shape, terms.num_predictors, 0), theta.dtype)
    return Factors(*sparse_jacobian(terms, pattern, theta, rows), merged((weight, values, local)))


def _one_factor(theta: Array, weight: Array, values: PyTree) -> Factors:
    """All rows, as a function of theta."""
    size, dtype = theta.size, theta.dtype
    rows = jax.tree.map(lambda x: x[None, :, 0], (weight, values))
    return Factors(
        theta[None], jnp.eye(size, dtype=dtype)[None], (jnp.ones(1, dtype), rows, jnp.zeros((1, size, 0), dtype))
    )


def prepare(seen: Iterable[Seen], origin: Array, rows: dict, weights: Array) -> tuple:
    """Everything about rows that does not depend on theta: (n E, ...) arrays by site.

    :param origin: theta = 0.
    """
    prepared = []
    for terms, pattern in seen:
        values = constants(terms, rows)
        weight = jnp.broadcast_to(weights[:, None].astype(origin.dtype), (len(weights), terms.num_elements))
        if terms.is_affine:
            prepared.append(factors_at(terms, pattern, origin, rows, weight, values))
        else:
            prepared.append((rows, weight, values))
    return tuple(prepared)


def factors_of(
    seen: Iterable[Seen], prepared: tuple, entries: Array, theta_of: Callable[[Array], Array] = lambda theta: theta
) -> tuple[Factors, ...]:
    """What was prepared, at theta.

    :param entries: theta (P,), in the order in which designs count its entries. :param theta_of: puts it in its own.
    """
    factors = []
    for (terms, pattern), affine_part in zip(seen, prepared):
        if terms.is_affine:
            factors.append(
                affine_part._replace(predictors=affine_part.predictors + times_vector(affine_part.jacobian, entries))
            )
        else:
            factors.append(factors_at(terms, pattern, theta_of(entries), *affine_part))
    return tuple(factors)


def at_places(linearize: Callable, rest: Array, places: Array, chunk: PyTree, some: Array) -> tuple[Factors, ...]:
    """Factors as functions of some entries of theta.

    :param rest: theta (P,), whose entries at ``places`` (S,) are ``some`` instead.
    """
    factors = linearize(chunk, rest.at[places].set(some))
    return tuple(f._replace(jacobian=f.jacobian[..., places]) for f in factors)


def sites_by_form(seen: Sequence[Seen]) -> list[list[int]]:
    """The indices of sites of the same closed form; each of the others by itself."""
    indices: dict[Any, list[int]] = {}
    for index, (terms, _) in enumerate(seen):
        indices.setdefault(index if terms.closed_form is None else terms.closed_form, []).append(index)
    return list(indices.values())


def merged_by_form(forms: list[list[int]], prepared: tuple) -> tuple:
    """What was prepared, for the first site of each form with the factors of all sites of the form: there is less to
    compile. For Jacobians that are whole matrices."""
    return tuple(jax.tree.map(lambda *x: jnp.concatenate(x), *[prepared[i] for i in same]) for same in forms)
