"""Merging: what several runs learned from their own rows, with the prior counted once.

In natural parameters, q = prior + sum over parts of (q_k - prior): streaming variational Bayes. For linear-Gaussian
rows that is the posterior of all data; else each part's summary is as good as its own run could make it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ...core.gaussians import BlockDiagonalGaussian, DiagonalGaussian, Family, FullGaussian, LowRankGaussian
from ...core.gaussians.mean_field import MeanField
from ...core.gaussians.mixture import GaussianMixture
from ...core.pytrees import summed
from ...core.updates.state import Count, State, new_state
from ...engines.certificate import SiteSums
from ...engines.engine import Engine
from ...model.data.row_set import RowSet, total
from ...model.data.rows import Rows, equal
from ...model.identity import model_identity
from ...options import Info, Options, default_key
from ..fitted import Fitted
from .rounds import (
    NO_GAUSSIAN,
    Result,
    checked_rounds,
    evaluations_of,
    in_rounds,
    merged_state,
    rounds_info,
    warn_of_one_exchange,
)

P = TypeVar("P", bound=Fitted)
OF_LAST_SOLVE = Options("implicit", "auto", "auto", None, 200, 256)


def merge(cls: type[P], parts: Sequence[Fitted], data: Sequence[Any] | None = None, rounds: int | str = "auto") -> P:
    """What runs on different rows have learned together, with the prior counted once.

    The parts are posteriors of the same model given different rows, each made from the model's prior. They may have
    been made anywhere, and come from files. The result is that of all rows where these are linear and Gaussian.
    Elsewhere a part's summary is as good as its own run, and a warning says so. With ``data`` the result is that of
    all rows everywhere: they are evaluated at the merged Gaussian, and it moves, until it does not any more.

    **Example**

    With the model, the data and the posterior of :class:`RVGA`'s example:

    .. doctest::

        >>> from numpyro_rvga import Posterior
        >>> rows = [{n: a[half] for n, a in data.items()} for half in (slice(0, 100), slice(100, 200))]
        >>> parts = [RVGA(model).run(half, progress_bar=False) for half in rows]
        >>> whole = Posterior.merge(parts, data=rows)
        >>> whole.info["merge_error"] < 0.01, bool(np.allclose(whole.mean, posterior.mean, atol=0.01))
        (True, True)

    :param parts: posteriors of one method and family. For priors that are not Gaussian, one more solve follows.
    :param data: the rows of each part, in the order of ``parts``, as their runs took them; for posteriors of RVGA.
    :param rounds: with ``data``: how many times all rows are evaluated, the first time where ``parts`` are merged; if
        parts contradict each other, as those sorted by outcome may, at the posterior of a sample of all rows.
        ``"auto"``: until all moves to come would together change no mean by more than 0.01 standard deviations,
        and no standard deviation by more than 1%; at most 20.
    :return: a posterior that takes in more rows with :meth:`update` if the first part does. With ``data`` it has
        the bound, and ``info`` holds ``merge_error``, by how many standard deviations it may still be off, which
        that was after each round (``merge_errors``), and ``rounds``. A warning says so if that is above 0.01.
    :raises ValueError: naming the part: if its model, with its keyword arguments and learned parameters, or its
        family is not that of the others, if it has taken in rows that another part has, or cannot be merged.
    """
    limit = checked_rounds(rounds)
    if not isinstance(parts, Sequence) or not all(isinstance(part, Fitted) for part in parts):
        raise ValueError("merge takes a list of posteriors: Posterior.merge([first, second]), or of loaded ones.")
    parts = list(parts)
    if data is None and limit not in (None, 1):
        raise ValueError(f"rounds={rounds!r} solves for the parts again, and needs their rows: pass data=.")
    if not parts:
        raise ValueError("there are no posteriors to merge.")
    first = parts[0]
    for number, part in enumerate(parts):
        _check_alike(first, part, number)
    _check_different(parts)
    states: list[Any] = [_state_of(part, n) if part.state is None else part.state for n, part in enumerate(parts)]
    info: Info = {"merged": len(parts)}
    if len(parts) == 1 and data is None:
        kept: Info = {**first.__getstate__(), "info": first.info | info}
        return cls(**kept)
    row_sets = tuple(run for part in parts for run in part.row_sets)
    common: Info = {"program": first.program, "continuation": first.continuation, "info": info, "row_sets": row_sets}
    if isinstance(states[0], State):
        if data is not None and not (first.program.is_conjugate and limit is None):
            result = _in_rounds(parts, states, list(data), limit)
            info |= rounds_info(result, limit)
            state = result.state
            return cls(**common | _fields(FullGaussian(state.mean, state.root), state, result.evaluation.bound))
        state = merged(first.program.initial_state, states)
        warn_of_one_exchange(first.program, [part.num_rows for part in parts], "pass data=, the rows of each part")
        if state.prior_factor is not None:
            state = Engine(first.program, OF_LAST_SOLVE, default_key()).with_exact_prior(state)[0]
        has_bound = first.program.is_conjugate and all(part.elbo is not None for part in parts)
        bound = float(state.log_evidence) if has_bound else None
        if bound is None:
            info["log_evidence_estimate"] = float(state.log_evidence)
        return cls(**common | _fields(FullGaussian(state.mean, state.root), state, bound))
    if data is not None:
        raise ValueError("rounds are for posteriors of RVGA with full Gaussians: leave data out.")
    online = first.continuation.online_of(first.program, states[0].rng_key)
    state = merged(online.initial_state(states[0].rng_key), states)
    warn_of_one_exchange(first.program, [part.num_rows for part in parts], "use fewer and larger parts, or RVGA")
    return cls(**common | _fields(online.with_exact_prior(state), state, None))


def _in_rounds(parts: list[Fitted], states: list[State], blocks: list[Any], limit: int | None) -> Result:
    """Moved to the best Gaussian of all rows.

    :raises ValueError: for blocks that are not the parts' rows, and parts that do not know their method.
    """
    if len(blocks) != len(parts):
        raise ValueError(f"data must hold the rows of each of the {len(parts)} parts, and holds {len(blocks)} blocks.")
    for number, part in enumerate(parts):
        if not getattr(part.continuation, "takes_rounds", False):
            raise ValueError(
                f"part {number} cannot go into rounds: these need posteriors that RVGA(model).run(data) returns, "
                "with the implicit scheme, and not from files."
            )
    options = [
        {"on_bad_row": "skip" if "num_skipped" in part.info else "raise", **part.program.model_kwargs} for part in parts
    ]

    def sums(state: State) -> SiteSums:
        of_parts = []
        for number, (part, block) in enumerate(zip(parts, blocks)):
            of_part, rows = part.continuation.sums_at(state, block, **options[number])
            if part.row_sets and rows != total(part.row_sets):
                raise ValueError(f"block {number} of data does not hold the rows that part {number} has taken in.")
            of_parts.append(of_part)
        return summed(of_parts)

    def sample_of(*numbers: Sequence[int]) -> list[Rows]:
        of_parts = zip(parts, blocks, options, *numbers)
        return [part.continuation.sample_of(block, *n, **option) for part, block, option, *n in of_parts]

    program = parts[0].program
    start, engine = program.initial_state, parts[0].continuation.engine_of(program)
    return in_rounds(start, states, evaluations_of(engine, start, sums, sample_of), limit)


def merged(start: Any, states: Sequence[Any]) -> Any:
    """The state of all rows, from the states that runs from ``start`` on parts of them ended in, which are all of
    RVGA's (``State``) or all of BONG's (``OnlineState``).

    :raises ValueError: if there is no such Gaussian.
    """
    if isinstance(start, State):
        return merged_state(start, states)
    if all(bool(state.has_exact_prior) and not bool(start.has_exact_prior) for state in states):
        raise ValueError("these states hold the prior's true terms already: merge those that runs return.")
    gaussian = _merged_family(start.gaussian, [state.gaussian for state in states])
    if not bool(gaussian.is_valid()):
        raise ValueError(NO_GAUSSIAN)
    num_rows = Count.of(sum(int(state.num_rows) for state in states))
    num_blocks = sum(int(state.num_blocks) for state in states) % 2**31  # it makes keys of random numbers
    return start._replace(gaussian=gaussian, num_rows=num_rows, num_blocks=jnp.asarray(num_blocks, jnp.int32))


# ---------------------------------------------------------------------- Gaussians of any family
def _merged_family(start: Family, parts: Sequence[Any]) -> Family:
    if isinstance(start, BlockDiagonalGaussian | DiagonalGaussian | LowRankGaussian):
        return start.joined(list(parts))
    whole = lambda q: new_state(q.mean, q.root, None)  # noqa: E731
    state = merged_state(whole(start), [whole(q) for q in parts])
    return FullGaussian(state.mean, state.root)


# ---------------------------------------------------------------------- posteriors
def state_of_gaussian(posterior: Fitted, q: Any) -> State:
    """The state that is q and the posterior's bound alone."""
    dtype = posterior.program.dtype
    state = new_state(jnp.asarray(q.mean, dtype), jnp.asarray(q.as_full().root, dtype), None)
    value = posterior.elbo if posterior.elbo is not None else posterior.info.get("log_evidence_estimate", 0.0)
    evidence = jnp.asarray(value, dtype)
    return state._replace(log_evidence=evidence, num_rows=Count.of(posterior.num_rows))


def _check_alike(first: Fitted, part: Fitted, number: int) -> None:
    """:raises ValueError: naming a part that is of another model or method than the first, and how they differ."""
    layouts = [[(name, p.program.layout.shapes[name]) for name in p.site_names] for p in (first, part)]
    if layouts[0] != layouts[1]:
        raise ValueError(
            f"part {number} has latent sites {layouts[1]}, part 0 has {layouts[0]}: they must be the same."
        )
    if isinstance(part.gaussian, MeanField):
        raise ValueError(
            f"part {number} has families by site, which are not merged: go on from one part with the rows of the next, "
            "RVGA(model, family=...).run(rows, init=posterior), or leave family out."
        )
    if part.program.whole:
        raise ValueError(f"part {number} has latent sites of single rows, which other parts know nothing of.")
    if "dynamics" in part.info:
        raise ValueError(f"part {number} was made with dynamics: its rows are not of the same parameters as others.")
    if type(part.state) is not type(first.state) and None not in (part.state, first.state):
        raise ValueError(f"part {number} was made by another kind of method than part 0.")
    if type(part.gaussian) is not type(first.gaussian):
        raise ValueError(f"part {number} is of another family of Gaussians than part 0.")
    if part.program is not first.program:
        _check_same_model(first, part, number)


def _check_same_model(first: Fitted, part: Fitted, number: int) -> None:
    """:raises ValueError: naming the term in which the models differ, and keywords or parameters that may be why."""
    learned = [{name: np.asarray(value) for name, value in p.params.items()} for p in (first, part)]
    for name in learned[0]:
        if name not in learned[1] or not np.array_equal(learned[0][name], learned[1][name]):
            raise ValueError(
                f"part {number} has learned another value of the numpyro.param site {name!r} than part 0 "
                f"({learned[1].get(name)} and {learned[0][name]}): their latent sites do not mean the same. Learn it "
                "on all rows, or give it a prior."
            )
    rows = first.program.example_rows
    missing = sorted(set(rows) ^ set(part.program.example_rows))
    if missing:
        raise ValueError(f"part {number} and part 0 were not given the same arrays: {missing[0]!r} is in one only.")
    difference = first.program.identity.difference(model_identity(part.program, rows))
    if difference is not None:
        keywords = [p.program.model_kwargs for p in (first, part)]
        others = [name for name in keywords[1] if not equal(keywords[0].get(name), keywords[1][name])]
        reason = f" (they were given different values of {others[0]!r})" if others else ""
        raise ValueError(
            f"part {number} is of another model than part 0: {difference}{reason}. Parts must differ in their rows "
            "alone."
        )


def check_disjoint(row_sets: Sequence[Sequence[RowSet]]) -> None:
    """:raises ValueError: naming two parts that have taken in the same rows.

    :param row_sets: of each part, those of its runs.
    """
    runs = [{run for run in part if run.num_rows} for part in row_sets]
    for number, part in enumerate(runs):
        for earlier, other in enumerate(runs[:number]):
            if part & other or (part and total(part) == total(other)):
                same = sum(run.num_rows for run in part & other) or total(part).num_rows
                raise ValueError(
                    f"part {number} and part {earlier} have taken in the same {same} rows, which would count twice: "
                    "merge posteriors of different rows. (If these are other observations that happen to be equal, "
                    "go on with part.update(data) instead.)"
                )


def _check_different(parts: Sequence[Fitted]) -> None:
    """:raises ValueError: naming two parts that are one, or have taken in the same rows."""
    check_disjoint([part.row_sets for part in parts])
    seen: dict[tuple, int] = {}
    for number, part in enumerate(parts):
        key = tuple(np.asarray(x).tobytes() for x in jax.tree.leaves(part.gaussian))
        if part.num_rows and seen.setdefault(key, number) != number:
            raise ValueError(
                f"part {number} and part {seen[key]} are the same Gaussian to the last digit: the same rows would "
                "count twice. Merge posteriors of different rows."
            )


def _state_of(part: Fitted, number: int) -> State:
    """The state of a posterior that has none."""
    prior = part.program.initial_state
    if isinstance(part.gaussian, GaussianMixture):
        raise ValueError(f"part {number} is a mixture: merge Gaussian posteriors, then integrate hyperparameters out.")
    if not isinstance(part.gaussian, FullGaussian) or prior.prior_factor is not None:
        raise ValueError(f"part {number} was stored without what it takes to merge it: merge posteriors, then save.")
    return state_of_gaussian(part, part.gaussian)


def _fields(gaussian: Family, state: Any, bound: float | None) -> Info:
    return {"gaussian": gaussian, "state": state, "elbo": bound, "num_rows": int(state.num_rows)}
