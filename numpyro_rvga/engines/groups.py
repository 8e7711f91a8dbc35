"""A part's rows and its members' prior at q(s) prod_g q(z_g | s); see :mod:`~numpyro_rvga.core.groups.steps`."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..core.groups.factors import OpenSums
from ..core.groups.steps import Groups, GroupSums, conditionals
from ..core.pytrees import PyTree, summed
from ..core.updates.factors import Kind
from ..model.data.rows import Arrays, num_rows, pad, selected
from ..model.members import NOBODY, Finder, Members, whose
from ..model.terms.terms import Terms, constants, linearize_along, merged
from .engine import Engine
from .kinds import make_kind
from .natural_steps import in_double

CHUNK_NUMBERS = 2**23  # in the Jacobians of the terms that are evaluated together


class _ArraysOfQ(NamedTuple):
    """q as arrays of the compiled functions, in the terms' floating-point type.

    :ivar theta: its mean, (P,). :ivar root: of the covariance of s, (k, k).
    :ivar slope: times that root, (n + 1, d, k).
    :ivar own_root: of the covariances given s, (n + 1, d, d). The last member is nobody.
    """

    theta: Array
    root: Array
    slope: Array
    own_root: Array


class _PriorSite(NamedTuple):
    """:ivar of: the member that each element depends on, (E,). :ivar whose: the member that it belongs to."""

    terms: Terms
    kind: Kind
    of: np.ndarray
    whose: np.ndarray


class GroupTerms:
    """The terms of a model that is bound to some members, compiled: of rows, and of the prior.

    :raises ValueError: for prior terms that depend on several members, and :raises NotImplementedError: for terms
        without structure.
    """

    def __init__(self, engine: Engine, members: Members):
        program = engine.program
        _check(engine)
        self.members, self._dtype = members, program.dtype
        self._blocks, self._inputs, self._terms = program.prior.normal_sites, program.prior_inputs, program.terms
        options = engine.options._replace(expectation="auto", scheme="implicit")
        kinds = [*(make_kind(terms, options, engine.rng_key) for terms in program.prior.gaussian), *engine.prior_kinds]
        self._prior = []
        for terms, kind in zip((*program.prior.gaussian, *program.prior.terms), kinds):
            of = Finder(terms, members, self._dtype).of_prior(self._inputs)
            plates = program.plates.get(terms.site, ())
            axis = plates.index(members.plate) if members.plate in plates else None
            self._prior.append(_PriorSite(terms, kind, of, whose(terms, members, of, axis)))
        of_other_form = self._prior[len(program.prior.gaussian) :]
        self.has_gaussian_groups = all((site.whose == NOBODY).all() for site in of_other_form)
        self._finders = [Finder(terms, members, self._dtype) for terms in program.terms]
        numbers = sum(t.num_elements * max(t.num_predictors, 1) for t in program.terms) * len(members.directions)
        self._most_rows = max(1, CHUNK_NUMBERS // numbers)
        self._devices = engine.devices
        self._directions, self._inputs = self._put((members.directions.astype(program.dtype), self._inputs))
        of_rows, of_prior = [*zip(program.terms, engine.kinds)], [(x.terms, x.kind) for x in self._prior]
        self._of_rows, self._of_prior = (engine.compiled(partial(self._sums, x)) for x in (of_rows, of_prior))

    def chunks(
        self, rows: Arrays, index: np.ndarray, padded: int = 0, weights: np.ndarray | None = None
    ) -> list[PyTree]:
        """Rows on the device, for :meth:`row_sums`.

        :param index: the member of each row, (n,). :param padded: the least number of rows, with copies of weight zero.
        :param weights: of rows, (n,); None: one each.
        :raises ValueError: for a row that depends on several members.
        """
        total = num_rows(rows)
        of_rows = [finder.of_rows(rows, index).reshape(total, -1) for finder in self._finders]
        least = max(total, padded)
        count = -(-least // self._most_rows)
        size = self._devices.rounded_up(-(-least // count))
        given = np.ones(total) if weights is None else weights
        (rows, of_rows), weights = pad((rows, of_rows), count * size, given.astype(self._dtype))
        of_each = rows, (weights[:, None],) * len(of_rows), tuple(of_rows)
        starts = range(0, count * size, size)
        return [self._devices.put_rows(selected(of_each, slice(start, start + size))) for start in starts]

    def _put(self, tree: PyTree) -> Any:
        """On every device."""
        return self._devices.put(jax.device_put(tree))

    def q(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> _ArraysOfQ:
        """q, where groups may be fewer than the members."""

        (count, size), k, members = groups.mean.shape, len(mean), self.members
        given = conditionals(groups)
        theta = np.zeros(members.columns.size + k, self._dtype)
        theta[members.shared], theta[members.columns[:, :count]] = mean, groups.mean.T
        slope = np.zeros((members.number + 1, size, k), self._dtype)
        own_root = np.zeros((members.number + 1, size, size), self._dtype)
        slope[:count], own_root[:count], own_root[count:-1] = given.slope @ root, given.root, np.eye(size)
        return _ArraysOfQ(*self._put((theta, root.astype(self._dtype), slope, own_root)))

    def prior_weights(self, count: int, *, with_shared: bool) -> list[np.ndarray]:
        """Weights of prior terms: one for those of the first ``count`` members, else zero."""
        return [
            np.where(x.whose == NOBODY, float(with_shared), x.whose < count).astype(np.float32)[None]
            for x in self._prior
        ]

    def row_sums(self, q: _ArraysOfQ, chunk: PyTree, *, of_each: bool = False) -> tuple[Any, ...]:
        """The sums of :meth:`_sums` over a chunk of rows. ``of_each``: whether those in the shared entries are of each
        member."""
        return self._of_rows(q, self._directions, *chunk, chunk[2] if of_each else None)

    def prior_sums(self, q: _ArraysOfQ, weights: list[np.ndarray], *, of_each: bool = False) -> tuple[Any, ...]:
        """As :meth:`row_sums`, over prior terms with weights (1, E) or (1, 1)."""
        of = tuple(x.of[None] for x in self._prior)
        belongs = tuple(x.whose[None] for x in self._prior) if of_each else None
        return self._of_prior(q, self._directions, self._inputs, tuple(weights), of, belongs)

    def open_sums(
        self, mean: np.ndarray, root: np.ndarray, groups: Groups, chunks: list[PyTree]
    ) -> tuple[OpenSums, OpenSums]:
        """Sums for groups that are the first members: over their priors, and over rows."""
        q = self.q(mean, root, groups)
        of_prior = self.prior_sums(q, [np.ones((1, 1), np.float32)] * len(self._prior), of_each=True)
        no_rows = jax.tree.map(lambda x: np.zeros(x.shape), of_prior)
        of_rows = [no_rows, *(self.row_sums(q, chunk, of_each=True) for chunk in chunks)]
        return self._open([of_prior], len(groups.mean)), self._open(of_rows, len(groups.mean))

    @staticmethod
    def _open(pieces: list[tuple[Any, ...]], count: int) -> OpenSums:
        of_groups, of_shared, _ = summed(map(in_double, pieces))
        return OpenSums(*[x[:count] for x in (*of_groups, *of_shared)])

    def with_blocks(self, sums: GroupSums, mean: np.ndarray, root: np.ndarray) -> GroupSums:
        """The sums with multivariate normal priors of shared sites, which are no terms."""
        value, gradient, precision = sums.shared_value, sums.shared_gradient, sums.shared_precision
        for block in self._blocks:
            loc, scale_tril = (np.asarray(x, np.float64) for x in block.moments(self._inputs))
            inverse = np.linalg.inv(scale_tril)
            indices = np.flatnonzero(np.isin(self.members.shared, np.arange(block.start, block.stop)))
            shift, scale = inverse @ (mean[indices] - loc), inverse @ root[indices]
            value = value - 0.5 * (shift @ shift + np.sum(scale**2) + len(loc) * np.log(2 * np.pi))
            value = value + np.linalg.slogdet(inverse)[1]
            gradient, precision = gradient.copy(), precision.copy()
            gradient[indices] -= inverse.T @ shift
            precision[np.ix_(indices, indices)] += inverse.T @ inverse
        return sums._replace(shared_value=value, shared_gradient=gradient, shared_precision=precision)

    def _shares(
        self, terms: Terms, kind: Kind, q: _ArraysOfQ, directions: Array, rows: dict, weight: Array, of: Array
    ) -> tuple[tuple[Array, ...], tuple[Array, ...], Array]:
        """Each term's share of what :meth:`_sums` adds up: value, gradient, and minus the Hessian, own and
        mixed; gradient and minus the Hessian in the shared entries; and the error.

        :param weight: (n, E) or (n, 1). :param of: the members that the terms depend on, (n, E).
        """
        size = self.members.columns.shape[0]
        weight, of = jnp.broadcast_to(weight, of.shape).ravel().astype(q.theta.dtype), of.ravel()
        predictors, jacobian = linearize_along(terms, q.theta, directions, rows)
        own, shared = jacobian[..., :size], jacobian[..., size:]
        by_shared = shared @ q.root + own @ q.slope[of]
        alone = own @ q.own_root[of]
        covariance = by_shared @ jnp.swapaxes(by_shared, 1, 2) + alone @ jnp.swapaxes(alone, 1, 2)
        values = merged(constants(terms, rows))
        nothing = jnp.zeros((len(weight), terms.num_predictors, 0), q.theta.dtype)
        (value, gradient, hessian), errors = kind.expect(predictors, covariance, (weight, values, nothing))
        weighted = -hessian @ shared
        by_own, by_all = (jnp.swapaxes(x, 1, 2) for x in (own, shared))
        of_own, of_shared = ((by @ gradient[..., None])[..., 0] for by in (by_own, by_all))
        of_groups = value, of_own, by_own @ (-hessian @ own), by_own @ weighted
        return of_groups, (of_shared, by_all @ weighted), errors

    def _sums(
        self,
        sites: list[tuple[Terms, Kind]],
        q: _ArraysOfQ,
        directions: Array,
        rows: dict,
        weights: tuple[Array, ...],
        members: tuple[Array, ...],
        whose: tuple[Array, ...] | None,
    ) -> tuple[tuple[Array, ...], tuple[Array, ...], Array]:
        """Sums over the terms of each member, the last of which is nobody: values, gradients and curvatures in its own
        entries; those in the shared entries; and errors.

        :param weights: of each site's terms, (n, E) or (n, 1). :param members: that they depend on, (n, E).
        :param whose: the members that they belong to, (n, E), of each of which there is a sum then. None: each belongs
            to the one that it depends on, and the sums in the shared entries are over all.
        """
        size, count, k = self.members.columns.shape[0], self.members.number + 1, self.members.shared.size
        zeros = partial(jnp.zeros, dtype=q.theta.dtype)
        of_groups = zeros(count), zeros((count, size)), zeros((count, size, size)), zeros((count, size, k))
        each = () if whose is None else (count,)
        of_shared, error = (zeros((*each, k)), zeros((*each, k, k))), zeros(())
        for (terms, kind), weight, of, at in zip(sites, weights, members, members if whose is None else whose):
            own, shared, errors = self._shares(terms, kind, q, directions, rows, weight, of)
            at = at.ravel()
            of_groups = tuple(total.at[at].add(x) for total, x in zip(of_groups, own))
            if whose is None:
                of_shared = tuple(total + x.sum(axis=0) for total, x in zip(of_shared, shared))
            else:
                of_shared = tuple(total.at[at].add(x) for total, x in zip(of_shared, shared))
            error = error + jnp.sum(errors)
        return of_groups, of_shared, error


class GroupEvaluations:
    """Sums over rows and prior terms of groups, at q.

    :param chunks: of :meth:`GroupTerms.chunks`; empty: no rows. :param count: of groups: those in the places of the
        first members. :param with_shared_prior: whether the prior of the shared sites counts: in one part only.
    """

    def __init__(self, terms: GroupTerms, chunks: list[PyTree], count: int, *, with_shared_prior: bool):
        self._terms, self._chunks, self._count, self._with_shared_prior = terms, chunks, count, with_shared_prior
        self._weights = terms.prior_weights(count, with_shared=with_shared_prior)

    def __call__(self, mean: np.ndarray, root: np.ndarray, groups: Groups) -> GroupSums:
        """Sums at q. ``mean`` (k,) and ``root`` (k, k): of q(s)."""
        terms = self._terms
        q = terms.q(mean, root, groups)
        pieces = [terms.prior_sums(q, self._weights), *(terms.row_sums(q, chunk) for chunk in self._chunks)]
        of_groups, of_shared, error = summed(map(in_double, pieces))
        sums = GroupSums(*[x[: self._count] for x in of_groups], of_groups[0][-1], *of_shared, error)
        return terms.with_blocks(sums, mean, root) if self._with_shared_prior else sums


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
