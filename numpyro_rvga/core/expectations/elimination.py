"""Sums over the joint states of discrete variables: log sum_s exp(f_1(s) + ... + f_n(s)).

A term depends on few of the variables. They are summed over one after the other ("variable elimination", the
sum-product algorithm): the terms of a variable become one table over its neighbors. Variables that share no term go in
one round. So a chain of T variables takes log2(T) rounds, and its sum is that of the forward algorithm. Tables of the
terms come from few assignments of states to all variables: those that share no term are set together, as in coloring
a graph.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..special import maximum

MAX_STATES = 1024  # assignments that are evaluated
MAX_TABLE = 2**15  # entries of one variable's table with its neighbors
IMPOSSIBLE = -1e30  # stands for log(0), of which sums have no slopes
Factors = dict[tuple[int, ...], list[np.ndarray]]


class Step(NamedTuple):
    """Variables that are eliminated at once: v of them with M states, each with a table over L states of neighbors.

    :ivar variables: (v,). :ivar terms: places in the vector of values, which are added up, (v, L, M, F).
    :ivar neighbors: variables, (v, D). :ivar strides: of these in L, (v, D), zero for places that are left over.
    """

    variables: np.ndarray
    terms: np.ndarray
    neighbors: np.ndarray
    strides: np.ndarray


class StateSum(NamedTuple):
    """A sum over the states of D variables.

    :ivar assignments: the index of each variable's state, by assignment, (A, D). Without ``rounds`` these are all joint
        states.
    :ivar rounds: of the elimination. The vector of values starts with zero and the table of terms, (A * n,), and each
        round appends the tables that it makes.
    :ivar last: places of what remains, which is added up.
    """

    assignments: np.ndarray
    rounds: tuple[tuple[Step, ...], ...] = ()
    last: np.ndarray = np.zeros(0, int)

    def log_sum(self, table: Array) -> Array:
        """log sum_s exp(sum of the terms).

        :param table: the terms by assignment, (A, n).
        """
        if not self.rounds:
            by_state = jnp.sum(table, axis=1)
            return by_state[0] if len(by_state) == 1 else jax.nn.logsumexp(by_state)

        def by_rounds(table: Array) -> Array:
            total = jnp.sum(self._all_values(table)[self.last])
            return jnp.where(total > 0.5 * IMPOSSIBLE, total, -jnp.inf)

        # As one primitive, which readers of traced programs do not open: its tables need all entries anyway.
        as_one_step = jax.custom_jvp(by_rounds)
        as_one_step.defjvp(lambda primals, tangents: jax.jvp(by_rounds, primals, tangents))
        return as_one_step(table)

    def draw(self, rng_key: Array, table: Array) -> Array:
        """Indices of the variables' states (D,), drawn with the probabilities exp(sum of the terms)."""
        if not self.rounds:
            return jnp.asarray(self.assignments)[jax.random.categorical(rng_key, jnp.sum(table, axis=1))]
        values = self._all_values(table)
        states = jnp.zeros(self.assignments.shape[1], jnp.int32)
        for steps in reversed(self.rounds):
            for step in steps:
                rng_key, key = jax.random.split(rng_key)
                drawn = jax.random.categorical(key, _given_neighbors(step, values, states))
                states = states.at[step.variables].set(drawn.astype(states.dtype))
        return states

    def log_prob(self, table: Array, states: Array) -> Array:
        """The log of the probability with which :meth:`draw` draws these states, indices (D,)."""
        if not self.rounds:
            is_this = jnp.all(jnp.asarray(self.assignments) == states, axis=1)
            return jax.nn.log_softmax(jnp.sum(table, axis=1))[jnp.argmax(is_this)]
        values, total = self._all_values(table), jnp.zeros((), table.dtype)
        for step in (step for steps in self.rounds for step in steps):
            by_state = jax.nn.log_softmax(_given_neighbors(step, values, states))
            total += jnp.sum(jnp.take_along_axis(by_state, states[step.variables][:, None], axis=1))
        return total

    def _all_values(self, table: Array) -> Array:
        values = jnp.concatenate([jnp.zeros(1, table.dtype), maximum(table, IMPOSSIBLE).ravel()])
        for steps in self.rounds:
            tables = [maximum(jnp.sum(values[step.terms], axis=-1), IMPOSSIBLE) for step in steps]  # zero slopes below
            values = jnp.concatenate([values, *[jax.nn.logsumexp(table, axis=-1).ravel() for table in tables]])
        return values


def _given_neighbors(step: Step, values: Array, states: Array) -> Array:
    """The logarithms of the weights of each variable's states, given those of its neighbors, (v, M)."""
    at = jnp.sum(states[step.neighbors] * step.strides, axis=1)
    terms = jnp.take_along_axis(jnp.asarray(step.terms), at[:, None, None, None], axis=1)[:, 0]
    return jnp.sum(values[terms], axis=-1)


def over_all_states(sizes: Sequence[int]) -> StateSum | None:
    """A sum over the joint states of variables, one by one; None if they are too many.

    :param sizes: how many states each variable has, (D,).
    """
    if math.prod(sizes) > MAX_STATES:
        return None
    return StateSum(np.indices(tuple(sizes)).reshape(len(sizes), math.prod(sizes)).T)


def by_elimination(scopes: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> StateSum | None:
    """The sum over the states of D variables by eliminating them; None if tables or assignments are too large.

    :param scopes: the variables that each term depends on, in ascending order, n of them.
    :param sizes: how many states each variable has, (D,).
    """
    colors = _colors(scopes, len(sizes))
    of_color = [max(n for n, own in zip(sizes, colors) if own == color) for color in range(max(colors, default=-1) + 1)]
    if math.prod(of_color) >= min(math.prod(sizes), MAX_STATES + 1):
        return over_all_states(sizes)
    choices = np.indices(tuple(of_color)).reshape(len(of_color), -1).T  # (A, colors)
    assignments = np.minimum(choices[:, colors], np.asarray(sizes) - 1)
    factors = _factors_of_terms(scopes, sizes, colors, of_color)
    rounds, last = [], list(factors.pop((), []))
    offset = 1 + len(choices) * len(scopes)
    remaining = set(range(len(sizes)))
    while remaining:
        chosen = _independent(factors, remaining, sizes)
        if not chosen:
            return None
        remaining -= set(chosen)
        steps, made, offset = _eliminate(factors, chosen, sizes, offset)
        rounds.append(steps)
        last += made
    return StateSum(assignments, tuple(rounds), np.array([int(place) for place in last]))


def _colors(scopes: Iterable[tuple[int, ...]], number: int) -> list[int]:
    """A color for each variable, such that no two of one term have the same."""
    neighbors = _neighbors(scopes, range(number))
    colors = [-1] * number
    for variable in range(number):
        taken = {colors[other] for other in neighbors[variable]}
        colors[variable] = next(color for color in itertools.count() if color not in taken)
    return colors


def _neighbors(scopes: Iterable[tuple[int, ...]], variables: Iterable[int]) -> dict[int, set[int]]:
    """Each variable's, with itself: those that it shares a scope with."""
    neighbors: dict[int, set[int]] = {variable: {variable} for variable in variables}
    for scope in set(scopes):
        for variable in scope:
            neighbors[variable].update(scope)
    return neighbors


def _strides(sizes: Sequence[int]) -> np.ndarray:
    """The strides of a flat table along each axis."""
    return np.cumprod([1, *sizes[::-1]])[::-1][1:]


def _factors_of_terms(scopes, sizes, colors, of_color) -> Factors:
    """Scope -> for each of its terms, the places of its table in the vector of values, (sizes of the scope)."""
    factors: Factors = {}
    strides = _strides(of_color)  # of the colors in the assignments
    for term, scope in enumerate(scopes):
        states = np.indices(tuple(sizes[variable] for variable in scope))
        assignment = sum((own * strides[colors[v]] for v, own in zip(scope, states)), np.zeros(states.shape[1:], int))
        factors.setdefault(scope, []).append(1 + assignment * len(scopes) + term)
    return factors


def _independent(factors: Factors, remaining: set[int], sizes: Sequence[int]) -> list[int]:
    """Variables of which no two share a factor, with small tables; none, if all tables are too large."""
    neighbors = _neighbors(factors, remaining)
    entries = {v: math.prod(sizes[u] for u in around) for v, around in neighbors.items()}
    small = min(MAX_TABLE, max(min(entries.values()), max(sizes[v] for v in remaining) ** 3))
    chosen: list[int] = []
    blocked: set[int] = set()
    for variable in sorted(remaining, key=lambda v: (entries[v], v)):
        if entries[variable] <= small and variable not in blocked:
            chosen.append(variable)
            blocked |= neighbors[variable]
    return chosen


def _eliminate(
    factors: Factors, chosen: Sequence[int], sizes: Sequence[int], offset: int
) -> tuple[tuple[Step, ...], list[np.ndarray], int]:
    """Takes the factors of some variables, and puts in those over their neighbors.

    :param offset: length of the vector of values so far.
    :return: the steps, the places of sums without neighbors, and the new length.
    """
    alike: dict[tuple[int, ...], list[tuple]] = {}
    scopes_of: dict[int, list[tuple[int, ...]]] = {variable: [] for variable in chosen}
    for scope in factors:
        for variable in scopes_of.keys() & set(scope):
            scopes_of[variable].append(scope)
    for variable, scopes in scopes_of.items():
        around = tuple(sorted({u for scope in scopes for u in scope} - {variable}))
        terms = [_spread(table, scope, (*around, variable), sizes) for scope in scopes for table in factors.pop(scope)]
        stacked = np.stack(terms, axis=-1).reshape(-1, sizes[variable], len(terms))
        width = 1 << (len(terms) - 1).bit_length()
        padded = np.pad(stacked, [(0, 0), (0, 0), (0, width - len(terms))])  # the first value is zero
        alike.setdefault(padded.shape, []).append((variable, around, padded))
    steps, last = [], []
    for shape, members in alike.items():
        depth = max(len(around) for _, around, _ in members)
        neighbors, strides = np.zeros((2, len(members), depth), int)
        for i, (_, around, _) in enumerate(members):
            own = [sizes[u] for u in around]
            neighbors[i, : len(own)], strides[i, : len(own)] = around, _strides(own)
            places = np.arange(offset, offset + shape[0]).reshape(own)
            offset += shape[0]
            if around:
                factors.setdefault(around, []).append(places)
            else:
                last.append(places)
        variables = np.array([variable for variable, _, _ in members])
        steps.append(Step(variables, np.stack([terms for *_, terms in members]), neighbors, strides))
    return tuple(steps), last, offset


def _spread(table: np.ndarray, scope: tuple[int, ...], axes: tuple[int, ...], sizes: Sequence[int]) -> np.ndarray:
    """A table over some variables as one over more."""
    order = [scope.index(variable) for variable in axes if variable in scope]
    shape = [sizes[variable] if variable in scope else 1 for variable in axes]
    return np.broadcast_to(np.transpose(table, order).reshape(shape), [sizes[variable] for variable in axes])
