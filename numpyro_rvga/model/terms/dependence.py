"""Which terms of a row depend on which of the latent variables that are to be integrated out, by trying."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from ...core.compilation import jit_once
from .local_sites import LocalSites

POINTS = 3  # at which each variable's states are tried
SLOPES = 8  # points at which slopes in continuous variables are taken
PAIRS = 128  # of joint states that differ in half of the variables
ROUNDING = 64.0  # units in the last place, by which two runs of one computation may differ
Terms = Callable[[Array, Mapping[str, Array]], Array]


def dependence(terms: Terms, local: LocalSites, size: int, dtype: jnp.dtype) -> np.ndarray:
    """Which terms change with which variables (terms, K + D).

    Each discrete variable is set to all its states, at a few points. A term may depend on it at few other points only:
    the correct answer to a question does not matter where it is guessed. So half of the variables are changed at once,
    at many points. A term that changes, though none of its own variables did, depends on another one. Each variable is
    then tried at that point.

    :param terms: (theta and z (P + K,), discrete variables) -> terms.
    :param size: P.
    """
    trials = _Trials(terms, local, size, dtype)
    slopes = trials.slopes()
    changes = np.any([trials.changes(*trials.point()) for _ in range(POINTS)], axis=0)
    while len(local.entries) > 1 and (missed := trials.missed(changes)) is not None:
        term, changed, point = missed
        changes |= np.asarray(trials.changes(*point))
        if not (changes[term] & changed).any():  # several together
            changes[term] |= changed
    return np.concatenate([slopes, changes], axis=1)


def connected(depends: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Terms, and the variables that they share, in groups that share none.

    :param depends: which terms depend on which variables, (terms, variables).
    """
    terms, variables = depends.shape
    rows, columns = np.nonzero(depends)
    links = csr_array((np.ones(len(rows)), (rows, terms + columns)), shape=(terms + variables, terms + variables))
    _, labels = connected_components(links, directed=False)
    order = np.argsort(labels, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    for members in sorted(groups, key=lambda members: members[0]):
        if members[0] < terms:
            yield members[members < terms], members[members >= terms] - terms


class _Trials:
    """Terms at random values of theta, z and the discrete variables. States are counted from zero, (D,)."""

    def __init__(self, terms: Terms, local: LocalSites, size: int, dtype: jnp.dtype):
        self._local, self._size, self._dtype = local, size, dtype
        self._rng = np.random.default_rng(0)
        self._terms = terms
        self.changes, self._differ = jit_once(self._changes), jit_once(self._differences)
        self.num_continuous = local.continuous.size
        self._num_states = np.array([len(local.states[name]) for name, _ in local.entries], int)

    def point(self) -> tuple[np.ndarray, np.ndarray]:
        """A random point: theta and z (P + K,), and states (D,)."""
        theta = 0.5 * self._rng.normal(size=self._size + self.num_continuous)
        return theta.astype(self._dtype), self._rng.integers(self._num_states)

    def slopes(self) -> np.ndarray:
        """Which terms have slopes in z at some of the points, (terms, K)."""

        def of_point(theta: Array, states: Array) -> Array:
            def terms(z: Array) -> Array:
                return self._terms(theta.at[self._size :].set(z), self._values(states))

            return jax.jacfwd(terms)(theta[self._size :]) != 0

        thetas, states = map(np.stack, zip(*[self.point() for _ in range(SLOPES)]))
        of_points = jit_once(lambda: lax.map(lambda at: of_point(*at), (jnp.asarray(thetas), jnp.asarray(states))))()
        return np.any(np.asarray(of_points), axis=0)

    def missed(self, variables: np.ndarray) -> tuple[int, np.ndarray, tuple[np.ndarray, np.ndarray]] | None:
        """A term that changes with others than its variables, which others were changed (D,), and where; or None.

        :param variables: of each term, (terms, D).
        """
        thetas, before = map(np.stack, zip(*[self.point() for _ in range(PAIRS)]))
        changed = self._rng.random(before.shape) < 0.5
        after = np.where(changed, self._rng.integers(self._num_states, size=before.shape), before)
        expected = changed.astype(np.float32) @ variables.T.astype(np.float32) > 0  # floats, whose products are fast
        unlike = np.asarray(self._differ(thetas, before, after)) & ~expected
        if not unlike.any():
            return None
        pair, term = np.argwhere(unlike)[0]
        return int(term), changed[pair], (thetas[pair], before[pair])

    def _values(self, states: Array) -> dict[str, Array]:
        return {name: self._local.states[name][own] for name, own in self._local.split(states).items()}

    def _changes(self, theta: Array, states: Array) -> Array:
        """Which terms change with which variable, set to each of its states, (terms, D)."""
        most = max(self._num_states, default=0)

        def is_changed(variable: Array) -> Array:
            tried = jnp.minimum(jnp.arange(most), jnp.asarray(self._num_states)[variable] - 1)
            values = jax.vmap(lambda state: self._terms(theta, self._values(states.at[variable].set(state))))(tried)
            return jnp.any(_unlike(values, values[:1]), axis=0)

        if not most:
            return jnp.zeros((jax.eval_shape(self._terms, theta, {}).size, 0), bool)
        return lax.map(is_changed, jnp.arange(len(self._num_states))).T

    def _differences(self, thetas: Array, before: Array, after: Array) -> Array:
        """Which terms differ between two joint states, (pairs, terms)."""

        def of_pair(pair: tuple[Array, Array, Array]) -> Array:
            theta, *states = pair
            one, two = (self._terms(theta, self._values(own)) for own in states)
            return _unlike(one, two)

        return lax.map(of_pair, (thetas, before, after), batch_size=16)


def _unlike(a: Array, b: Array) -> Array:
    """Where values differ by more than rounding. NaN differs from all, and minus infinity from all other numbers."""
    allowed = ROUNDING * jnp.finfo(a.dtype).eps * (1.0 + jnp.where(jnp.isfinite(b), jnp.abs(b), 0.0))
    return ~((a == b) | (jnp.abs(a - b) <= allowed))
