"""Terms of the log joint density as functions of a few predictors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ...core.expectations.tilted import TiltedForm
from ...core.pytrees import PyTree
from ..data.arguments import ROW, SHARED
from ..data.rows import Arrays, Tree


class Terms(NamedTuple):
    """The terms of one site: ``density(predictors(theta, row, element), constants(row, element))`` each.

    :ivar site: its name.
    :ivar num_elements: E, independent terms per row (per site, for prior terms).
    :ivar num_predictors: C.
    :ivar is_affine: whether the predictors are affine in theta.
    :ivar closed_form: a coefficient type of ``core.closed_forms``, which ``constants`` then returns; or a form of
        ``core.tilted``; or None.
    :ivar information: (predictors (C,), constants) -> the Fisher information about them (C, C), where minus the Hessian
        depends on the outcome; None if it is not known.
    :ivar num_local: how many of theta's last entries are standard normal variables of the row's own.
    :ivar of_all_rows: whether one run of the model serves the predictors of all elements.
    :ivar by_draws: whether the predictors are all of theta, for lack of structure. The rows of a solve are then one
        factor, whose expectation is taken over draws of theta.
    :ivar num_nodes: where each density is a numerical integral: of how many nodes. Elsewhere one.
    :ivar finer: such a density by more nodes, for comparison.
    :ivar summed: the names of the sites whose terms they are, or whose sum, if these are several.
    """

    site: str
    num_elements: int
    num_predictors: int
    is_affine: bool
    predictors: Callable[[Array, Arrays, Array], Array]
    constants: Callable[[Arrays, Array], Any]
    density: Callable[[Array, PyTree], Array]
    closed_form: type | TiltedForm | None
    num_local: int = 0
    information: Callable[[Array, PyTree], Array] | None = None
    of_all_rows: bool = False
    by_draws: bool = False
    num_nodes: int = 1
    finer: Callable[[Array, PyTree], Array] | None = None
    summed: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[str, ...]:
        return self.summed or (self.site,)

    def log_prob(self, theta: Array, row: Arrays, element: Array) -> Array:
        """One term, ()."""
        return self.density(self.predictors(theta, row, element), self.constants(row, element))

    def log_probs(self, theta: Array, rows: Arrays) -> Array:
        """All terms of rows, (n, E)."""
        return over_rows(partial(self.log_prob, theta), self.num_elements, rows)


def linearize(terms: Terms, theta: Array, rows: Arrays) -> tuple[Array, Array, Array]:
    """Predictors at theta (n, E, C), and their Jacobians in theta (n, E, C, P) and in the row's own variables (n, E, C,
    K), these at zero."""
    everything = jnp.concatenate([theta, jnp.zeros(terms.num_local, theta.dtype)])

    jacobian = jax.jacfwd if terms.of_all_rows else jax.jacrev  # forward: the model's run stays one for all elements

    def one(row, element):
        function = lambda t: terms.predictors(t, row, element)  # noqa: E731
        return function(everything), jacobian(function)(everything)

    predictors, jacobian = over_rows(one, terms.num_elements, rows)
    return predictors, jacobian[..., : theta.shape[0]], jacobian[..., theta.shape[0] :]


def linearize_along(terms: Terms, theta: Array, directions: Array | np.ndarray, rows: Arrays) -> tuple[Array, Array]:
    """Predictors (n E, C) at theta (P,), and their changes along directions (D, P): (n E, C, D)."""
    directions = jax.lax.optimization_barrier(jnp.asarray(directions))  # XLA would fold constants for seconds

    def one(row, element):
        predictors, push = jax.linearize(lambda t: terms.predictors(t, row, element), theta)
        return predictors, jax.vmap(push, out_axes=1)(directions)

    return merged(over_rows(one, terms.num_elements, rows))


def predictors_of(terms: Terms, theta: Array, rows: Arrays) -> Array:
    """Predictors at theta (n, E, C)."""
    return over_rows(lambda row, element: terms.predictors(theta, row, element), terms.num_elements, rows)


def constants(terms: Terms, rows: Arrays) -> Any:
    """The densities' constants of the rows: a pytree of (n, E, ...) arrays."""

    return over_rows(terms.constants, terms.num_elements, rows)


def merged(arrays: Tree) -> Tree:
    """A pytree of (n, E, ...) arrays as (n E, ...) arrays."""
    return jax.tree.map(lambda x: x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]), arrays)


def over_rows(function, num_elements, rows):
    """``function(row, element)`` for all; each array of a row keeps a leading axis of one."""
    shared, own = split_rows(rows)
    indices = jnp.arange(num_elements, dtype=jnp.int32)

    def every_element(row):
        row = shared | {name: value[None] for name, value in row.items()}
        return jax.vmap(lambda element: function(row, element))(indices)

    if not own:
        return jax.tree.map(lambda x: x[None], every_element({}))
    return jax.vmap(every_element)(own)


def split_rows(rows: Arrays) -> tuple[dict[str, np.ndarray | Array], dict[str, np.ndarray | Array]]:
    """The arrays that all rows share, and those of single rows."""
    shared = {name: rows[name] for name in rows if name in SHARED}
    return shared, {name: rows[name] for name in rows if name not in SHARED}


def by_piece(terms: Terms, num_pieces: int) -> Terms:
    """The terms of a site with the model run on all data at once, in pieces that are known by number.

    What is summed over all data already is shared out in equal parts.
    """
    if terms.by_draws:
        shared_out = lambda u, row: terms.density(u, split_rows(row)[0]) / num_pieces  # noqa: E731
        return terms._replace(density=shared_out)
    count = terms.num_elements // num_pieces

    def split(row, element):
        return split_rows(row)[0], row[ROW][0] * count + element

    def predictors(theta, row, element):
        return terms.predictors(theta, *split(row, element))

    def constants(row, element):
        return terms.constants(*split(row, element))

    return terms._replace(num_elements=count, predictors=predictors, constants=constants, of_all_rows=True)
