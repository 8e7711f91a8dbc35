"""Whether a model has been read rightly: the bound against NumPyro's own log density at draws from q."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from jax import Array, lax

from ..core.compilation import jit_once
from ..core.updates.state import State
from ..engines.certificate import Certificate
from ..engines.engine import Engine
from ..model.data.rows import Rows, num_rows
from ..model.own_density import BATCH, OwnDensity

NUM_PAIRS, FEWEST_PAIRS = 32, 8  # of draws and their mirror images
MOST_ROWS = 10_000  # at all pairs of draws,
MOST_CONFIRMED = MOST_ROWS * NUM_PAIRS // FEWEST_PAIRS  # and of a bound that the fewest confirm
STANDARD_ERRORS = 5.0  # that the draws' mean and the bound's term may differ by,
MOST_UNCERTAIN = 1.0  # nats, of expectations that are not exact
SLACK = 0.05  # besides so many nats
SAME = 1e-3  # nats, of densities that are the same but for rounding


class Difference(NamedTuple):
    """Between the bound's term and its mean over draws, in nats.

    :ivar site: of the rows. :ivar term: of the bound. :ivar mean: over draws, with its standard ``error``.
    :ivar misread: whether the density itself was read wrongly, and not only its expectation taken approximately.
    """

    site: str
    term: float
    mean: float
    error: float
    misread: bool


def agrees(claimed: float, mean: float, error: float, *, exact: bool, rounding: float = 0.0) -> bool:
    """Whether draws confirm an expectation.

    :param claimed: its value, in nats. :param mean: over draws, with its standard ``error``.
    :param exact: whether it is one of the model's own density, not of its tangent. A tangent may be so far off that the
        draws scatter as widely: then they must show that it is not.
    """
    allowed = STANDARD_ERRORS * error if exact else min(STANDARD_ERRORS * error, MOST_UNCERTAIN)
    return bool(abs(claimed - mean) <= allowed + SLACK + rounding)


class ModelCheck:
    """Comparisons for one engine."""

    def __init__(self, engine: Engine):
        self._engine, self._certificate = engine, Certificate.of(engine)
        self._own = OwnDensity(engine.program)
        self._read = jit_once(self._densities)
        all_terms = engine.program.terms
        self._is_exact = all(terms.is_affine and isinstance(terms.closed_form, type) for terms in all_terms)
        self._has_passed = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to find out: other data are read alike, and expectations in closed form are exact."""
        return self._is_exact and self._has_passed

    def confirms(self, state: State, rows: Rows, bound: float, rng: np.random.Generator) -> bool:
        """Whether draws agree with a bound on the evidence of all rows.

        :param rows: all, at most MOST_CONFIRMED.
        """
        num_pairs = min(NUM_PAIRS, max(FEWEST_PAIRS, MOST_ROWS * NUM_PAIRS // max(num_rows(rows), 1)))
        standard, points = self._draws(state, num_pairs, rng)
        joint = self._own(rows, points)[1]
        average = _averaged(np.asarray(joint) - _log_density(standard, np.asarray(state.root, np.float64)))
        exact = all(terms.is_affine for terms in self._engine.program.terms)
        agree = agrees(bound, *average, exact=exact, rounding=self._rounding(bound))
        self._has_passed |= agree
        return agree

    def differences(self, state: State, rows: Rows, rng: np.random.Generator) -> list[Difference]:
        """The sites of some rows, or all, whose expected log-likelihood under q is not what the model says."""
        standard, points = self._draws(state, NUM_PAIRS, rng)
        root, by_site = np.asarray(state.root, np.float64), self._own(rows, points)[0]
        differences, read = [], None
        terms = self._certificate.terms_at(state, rows)
        for terms_of, term, gradient, curvature, _ in zip(self._engine.program.terms, *terms):
            own = np.asarray(by_site[terms_of.site], np.float64)
            slope, precision = root.T @ gradient, root.T @ curvature @ root
            quadratic = standard @ slope + 0.5 * (
                np.trace(precision) - np.sum(standard * (standard @ precision), axis=1)
            )
            average = _averaged(own - quadratic)
            if not agrees(term, *average, exact=terms_of.is_affine, rounding=self._rounding(term)):
                read = self._read(rows, points) if read is None else read
                misread = not self._is_same(np.asarray(read[terms_of.site], np.float64), own)
                differences.append(Difference(terms_of.site, float(term), *average, misread))
        self._has_passed = not differences
        return differences

    def _draws(self, state: State, num_pairs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Draws from q and their mirror images, (2 n, P): in standard coordinates, and theta."""
        mean, root = (np.asarray(x, np.float64) for x in (state.mean, state.root))
        half = rng.normal(size=(num_pairs, len(mean)))
        standard = np.concatenate([half, -half])
        return standard, (mean + standard @ root.T).astype(self._engine.program.dtype)

    def _is_same(self, read: np.ndarray, own: np.ndarray) -> bool:
        """Where one is not finite, the other is not either: both say that the point is impossible."""
        finite = np.isfinite(own)
        same = np.abs(read - own)[finite] <= SAME + self._rounding(own[finite])
        return bool(np.array_equal(finite, np.isfinite(read)) and same.all())

    def _rounding(self, nats: Any) -> Any:
        return 64 * float(np.finfo(self._engine.program.dtype).eps) * np.abs(nats)

    def _densities(self, rows: dict, points: Array) -> dict[str, Array]:
        """Log-likelihoods of all rows by site (K,), as they were read."""
        inputs = self._engine.program.inputs(rows) | self._engine.program.shared

        def at(theta: Array) -> dict[str, Array]:
            return {terms.site: terms.log_probs(theta, inputs).sum() for terms in self._engine.program.terms}

        return lax.map(at, points, batch_size=BATCH)


def _averaged(values: np.ndarray) -> tuple[float, float]:
    """Mean and standard error over draws and their mirror images (2 n,)."""
    pairs = values.reshape(2, -1).mean(axis=0)
    return float(np.mean(pairs)), float(np.std(pairs, ddof=1) / math.sqrt(len(pairs)))


def _log_density(standard: np.ndarray, root: np.ndarray) -> np.ndarray:
    """log q at draws, from their standard coordinates (K, P)."""
    half_log_det = np.linalg.slogdet(root)[1]
    return -0.5 * np.sum(standard**2, axis=1) - half_log_det - 0.5 * root.shape[0] * math.log(2 * math.pi)
