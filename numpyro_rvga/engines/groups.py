"""A part's rows and its members' prior at q(s) prod_g q(z_g | s); see :mod:`~numpyro_rvga.core.groups`."""

from __future__ import annotations

from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.factors import Kind
from ..core.groups import Conditionals, Groups, GroupSums, conditionals
from ..model.members import NOBODY, Members, member_of_prior, member_of_rows
from ..model.rows import num_rows, pad, selected
from ..model.terms import Terms, constants, linearize_along, merged
from .engine import Engine
from .kinds import make_kind

CHUNK_NUMBERS = 2**23  # in the Jacobians of the terms that are evaluated together


class _Place(NamedTuple):
    """q, in the terms' type.

    :ivar theta: its mean, (P,). :ivar root: of the covariance of s, (k, k).
    :ivar slope: times that root, (n + 1, d, k).
    :ivar own_root: of the covariances given s, (n + 1, d, d). The last member is nobody.
    """

    theta: Array
    root: Array
    slope: Array
    own_root: Array


class GroupEvaluations:
    """Of one part's rows, compiled for it.

    :param index: the member of each row, (n,). :param with_shared_prior: whether the prior of the shared sites counts:
        in one part only.
    :raises ValueError: for terms that depend on several members, and :raises NotImplementedError: for terms without
        structure.
    """

    def __init__(
        self, engine: Engine, members: Members, rows: dict[str, Any], index: np.ndarray, *, with_shared_prior: bool
    ):
        program = engine.program
        _check(engine)
        self._members, self._dtype, self._with_shared_prior = members, program.dtype, with_shared_prior
        self._blocks, self._inputs = program.prior.blocks, program.prior_inputs
        theta = jnp.asarray(0.5 * np.random.default_rng(1).normal(size=program.layout.size), program.dtype)
        total = num_rows(rows)
        of_rows = [member_of_rows(terms, members, theta, rows, index).reshape(total, -1) for terms in program.terms]
        options = engine.options._replace(expectation="auto", scheme="implicit")
        kinds = [*(make_kind(terms, options, engine.rng_key) for terms in program.prior.gaussian), *engine.prior_kinds]
        prior_terms, weights, of_prior = (*program.prior.gaussian, *program.prior.terms), [], []
        for terms in prior_terms:
            of_prior.append(member_of_prior(terms, members, theta, self._inputs)[None])
            is_shared = (of_prior[-1] == NOBODY) & (members.plate not in program.plates.get(terms.site, ()))
            weights.append(np.where(is_shared, float(with_shared_prior), 1.0).astype(np.float32))
        self._prior = tuple(weights), tuple(of_prior)
        numbers = sum(t.num_elements * max(t.num_predictors, 1) for t in program.terms) * len(members.directions)
        count = -(-total // max(1, min(total, CHUNK_NUMBERS // numbers)))
        size = -(-total // count)
        (rows, of_rows), row_weights = pad((rows, of_rows), count * size)
        of_each = rows, (row_weights[:, None],) * len(of_rows), tuple(of_rows)
        starts = range(0, count * size, size)
        self._chunks = [jax.device_put(selected(of_each, slice(start, start + size))) for start in starts]
        self._directions = jax.device_put(members.directions.astype(program.dtype))
        self._compiled = engine.compiled(partial(self._sums, [*zip(program.terms, engine.kinds)]))
        self._compiled_prior = engine.compiled(partial(self._sums, [*zip(prior_terms, kinds)]))

    def __call__(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """Sums at q. ``mean`` (k,) and ``root`` (k, k): of q(s)."""
        place = self._place(mean, root, groups, conditionals(groups))
        pieces = [self._compiled_prior(place, self._directions, self._inputs, *self._prior)]
        for rows, weights, member in self._chunks:
            pieces.append(self._compiled(place, self._directions, rows, weights, member))
        sums = GroupSums(*[reduce(np.add, [np.asarray(x, np.float64) for x in of_all]) for of_all in zip(*pieces)])
        of_groups = [x[:-1] for x in (sums.values, sums.gradient, sums.precision, sums.coupling)]
        sums = GroupSums(*of_groups, sums.shared_value + sums.values[-1], *sums[5:])
        return self._with_blocks(sums, mean, root)

    def _place(self, mean: np.ndarray, root: np.ndarray, groups: Groups, given: Conditionals) -> _Place:
        def put(array):
            return jnp.asarray(array, self._dtype)

        def and_nobody(array):
            return put(np.concatenate([array, np.zeros((1, *array.shape[1:]))]))

        theta = self._members.theta(put(mean), put(groups.mean))
        return _Place(theta, put(root), and_nobody(given.slope @ root), and_nobody(given.root))

    def _with_blocks(self, sums: GroupSums, mean: np.ndarray, root: np.ndarray) -> GroupSums:
        """With multivariate normal priors of shared sites, which are no terms."""
        if not self._with_shared_prior:
            return sums
        value, gradient, precision = sums.shared_value, sums.shared_gradient, sums.shared_precision
        for block in self._blocks:
            loc, scale_tril = (np.asarray(x, np.float64) for x in block.moments(self._inputs))
            inverse = np.linalg.inv(scale_tril)
            places = np.flatnonzero(np.isin(self._members.shared, np.arange(block.start, block.stop)))
            shift, spread = inverse @ (mean[places] - loc), inverse @ root[places]
            value = value - 0.5 * (shift @ shift + np.sum(spread**2) + len(loc) * np.log(2 * np.pi))
            value = value + np.linalg.slogdet(inverse)[1]
            gradient, precision = gradient.copy(), precision.copy()
            gradient[places] -= inverse.T @ shift
            precision[np.ix_(places, places)] += inverse.T @ inverse
        return sums._replace(shared_value=value, shared_gradient=gradient, shared_precision=precision)

    def _sums(
        self,
        sites: list[tuple[Terms, Kind]],
        place: _Place,
        directions: Array,
        rows: dict,
        weights: tuple[Array, ...],
        members: tuple[Array, ...],
    ) -> tuple[Array, ...]:
        """The fields of :class:`GroupSums`, with those of nobody as the last group's.

        :param weights: of each site's terms, (n, E) or (n, 1). :param members: that they depend on, (n, E).
        """
        size, count = self._members.columns.shape[0], self._members.number + 1
        zeros, k = partial(jnp.zeros, dtype=place.theta.dtype), self._members.shared.size
        by_group = zeros(count), zeros((count, size)), zeros((count, size, size)), zeros((count, size, k))
        gradient, precision, error = zeros(k), zeros((k, k)), zeros(())
        for (terms, kind), weight, of in zip(sites, weights, members):
            weight, of = jnp.broadcast_to(weight, of.shape).ravel().astype(place.theta.dtype), of.ravel()
            predictors, jacobian = linearize_along(terms, place.theta, directions, rows)
            own, shared = jacobian[..., :size], jacobian[..., size:]
            by_shared = shared @ place.root + own @ place.slope[of]
            alone = own @ place.own_root[of]
            covariance = by_shared @ jnp.swapaxes(by_shared, 1, 2) + alone @ jnp.swapaxes(alone, 1, 2)
            values = merged(constants(terms, rows))
            nothing = zeros((len(weight), terms.num_predictors, 0))
            (e, g, h), errors = kind.expect_with_errors(predictors, covariance, (weight, values, nothing))
            by_own, by_all = jnp.swapaxes(own, 1, 2), jnp.swapaxes(shared, 1, 2).reshape(-1, k, g.shape[1])
            weighted = -h @ shared
            found = e, (by_own @ g[..., None])[..., 0], by_own @ (-h @ own), by_own @ weighted
            by_group = tuple(total.at[of].add(new) for total, new in zip(by_group, found))
            gradient = gradient + jnp.einsum("nkc,nc->k", by_all, g)
            precision = precision + jnp.einsum("nkc,ncl->kl", by_all, weighted)
            error = error + jnp.sum(errors)
        return *by_group, zeros(()), gradient, precision, error


def _check(engine: Engine) -> None:
    program = engine.program
    for terms in program.terms:
        if terms.by_draws or terms.num_local:
            reason = "has latent variables of single rows" if terms.num_local else "has no structure to go by"
            raise NotImplementedError(f"groups cannot be kept apart: site {terms.site!r} {reason}.")
    if program.params.layout.size:
        names = ", ".join(program.params.layout.site_names)
        raise NotImplementedError(f"the model has numpyro.param sites ({names}): give them priors.")
    if program.data_prior is not None:
        raise NotImplementedError(f"{program.prior_reads}: parts know only their own rows.")
