"""One solve of a stream of groups: q of the shared sites and of some groups, from what was there and the rows at hand.

The rows of a group that are kept are a sample of all that it has had. Each stands for several, and what looking at it
again changes is taken to change for those too. Rows that are not kept are thus never seen again, and follow the sample.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import numpy as np

from ..core.group_factors import Factors, KnownGroups, factors, known, nothing, rest, sampling_variance
from ..core.groups import Groups
from ..engines.groups import GroupEvaluations
from ..user_warnings import warn
from .group_blocks import Block, Bound, Seen, Solve, cut
from .group_parts import GroupPlace, rounding
from .group_rounds import GroupResult, Shared, in_group_rounds
from .group_rows import GroupRows
from .summaries import TOLERANCE

BLOCK_TOLERANCE = 1e-3  # standard deviations: what blocks leave adds up


class Moments(NamedTuple):
    """q(s), the factor in it that stands for the prior of s, and the log evidence of all rows so far."""

    shared: Shared
    prior: Factors
    evidence: float


class Solved(NamedTuple):
    """What a solve has found.

    :ivar groups: what is kept of them. :ivar rows: their rows that are kept. :ivar error: of the solve, in standard
        deviations of s. :ivar expectation_error: of the evidence, in nats.
    :ivar variance: of the gradient in s, since some rows stand for others, (k, k). :ivar stood_alone: whether that was
        given up.
    """

    moments: Moments
    groups: KnownGroups
    rows: GroupRows
    error: float
    expectation_error: float
    variance: np.ndarray
    stood_alone: bool


def solved(
    bound: Bound, before: Moments | None, start: Shared, groups: Groups, seen: Seen, new: GroupRows | None
) -> Solved:
    """q of the shared sites and of groups.

    :param before: None in the first block. :param start: q(s) that the search begins with, and ``groups``.
    :param seen: those of the groups that were seen before. :param new: rows.
    :raises ValueError: if the bound is not finite where the search begins.
    """
    attempts = [seen.rows, seen.rows.alone()] if (seen.rows.stands_for > 1).any() else [seen.rows]
    for rows in attempts:
        weights = rows.weights(len(seen.places))
        solve = Solve(_block(bound, before, seen, rows, weights, new, len(groups.mean)), GroupPlace(groups, None))
        try:
            result = in_group_rounds(start, solve.parts, None, rounding(), BLOCK_TOLERANCE)
        except ValueError:
            if rows is attempts[-1]:
                raise
            continue
        if result.errors[-1] < TOLERANCE:
            break
    else:
        warn(
            f"after {len(result.errors)} rounds of a block, the shared sites may still be {result.errors[-1]:.2g} "
            "standard deviations from the best Gaussian."
        )
    return _of(bound, result, solve.place.groups, seen, weights, new)._replace(stood_alone=rows is not attempts[0])


def _block(
    bound: Bound, before: Moments | None, seen: Seen, rows: GroupRows, weights: np.ndarray, new: GroupRows | None,
    count: int,
) -> Block:  # fmt: skip
    """:param rows: kept of the groups seen before, with these ``weights``, by group."""
    others = nothing(count, len(bound.members.columns), bound.members.shared.size)
    if before is not None:
        (mean, precision), prior, evidence = before
        others = rest(evidence, mean, precision, prior, seen.groups, weights, seen.places, count)
    return Block(bound, rows.at(seen.places).and_then(new), others)


def _of(
    bound: Bound, result: GroupResult, groups: Groups, seen: Seen, weights: np.ndarray, new: GroupRows | None
) -> Solved:
    """What a solve has ended in."""
    (mean, _), root, count = result.shared, result.shared.root, len(groups.mean)
    of_all = GroupEvaluations(bound.terms, [], 0, with_shared_prior=True)(mean, root, cut(groups, slice(0, 0)))
    prior = factors(
        np.array([of_all.shared_value]), of_all.shared_gradient[None], of_all.shared_precision[None], mean[None],
        (root @ root.T)[None],
    )  # fmt: skip
    rows = seen.rows.at(seen.places).and_then(new).sampled(bound.form.most, count)
    variance = np.zeros_like(root)
    if (weights > 1).any():
        again = Groups(*[x[seen.places] for x in groups])
        now = _known(bound, again, mean, root, seen.rows).rows
        variance = sampling_variance(seen.groups.rows, now, weights, seen.rows.counts(len(weights)), again, mean)
    kept, errors = _known(bound, groups, mean, root, rows), (result.errors[-1], result.expectation_error)
    return Solved(Moments(result.shared, prior, result.bound), kept, rows, *errors, variance, False)


def _known(bound: Bound, groups: Groups, mean: np.ndarray, root: np.ndarray, rows: GroupRows) -> KnownGroups:
    """What is kept of groups, with their rows, which count once each."""
    pieces, rows = [], rows.alone()
    for some in bound.pieces(len(groups.mean)):
        piece = cut(groups, some)
        pieces.append(known(piece, mean, root, *bound.terms.open_sums(mean, root, piece, bound.chunks(rows, some))))
    return jax.tree.map(lambda *parts: np.concatenate(parts), *pieces)
