"""Polynomials fitted to the marginal's values and gradients at points."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np

MOST_COEFFICIENTS = 420  # beyond, a fit takes longer than many points
EQUATIONS_PER_COEFFICIENT = 1.5  # at least: with fewer, the fit would be an interpolation
MOST_LEVERAGE = 0.99


class Coordinates(NamedTuple):
    """Points in the coordinates of a polynomial, each a function of one of theirs.

    :ivar values: (n, d). :ivar slopes: their derivatives, (n, d).
    """

    values: np.ndarray
    slopes: np.ndarray


class Polynomial(NamedTuple):
    """A sum of monomials.

    :ivar exponents: (F, d). :ivar coefficients: (F,).
    """

    exponents: np.ndarray
    coefficients: np.ndarray

    def __call__(self, values: np.ndarray) -> np.ndarray:
        """Its values (n,) at coordinates (n, d)."""
        return _monomials(values, self.exponents) @ self.coefficients


class Fit(NamedTuple):
    """A polynomial, and what it would be at each point (n,) if that point were left out of the fit."""

    polynomial: Polynomial
    without_own: np.ndarray


def fit(at: Coordinates, values: np.ndarray, gradients: np.ndarray, root: np.ndarray, degree: int) -> Fit | None:
    """The polynomial of a regression on values (n,) and gradients (n, d), both with weights root^2 (n,).

    :return: None if there are too few points for its coefficients, or too many coefficients.
    """
    exponents = _exponents(at.values.shape[1], degree)
    size, num_equations = len(exponents), np.count_nonzero(root) * (1 + at.values.shape[1])
    if size > MOST_COEFFICIENTS or num_equations < EQUATIONS_PER_COEFFICIENT * size:
        return None
    slopes = _monomial_slopes(at.values, exponents) * at.slopes[:, :, None]
    monomials = _monomials(at.values, exponents)
    features = root[:, None, None] * np.concatenate([monomials[:, None], slopes], axis=1)  # (n, 1 + d, F)
    targets = root[:, None] * np.concatenate([values[:, None], gradients], axis=1)
    basis, triangle = np.linalg.qr(features.reshape(-1, size))
    coefficients = np.linalg.lstsq(triangle, basis.T @ targets.reshape(-1), rcond=None)[0]
    residuals = targets - features @ coefficients
    own = basis.reshape(*features.shape)
    leverage = MOST_LEVERAGE * own @ np.swapaxes(own, 1, 2)  # of each point's equations together
    others = np.linalg.solve(np.eye(leverage.shape[-1]) - leverage, residuals[:, :, None])[:, 0, 0]  # by all others
    change = (residuals[:, 0] - others) / np.where(root > 0, root, 1.0)
    return Fit(Polynomial(exponents, coefficients), monomials @ coefficients + change)


def _exponents(size: int, degree: int) -> np.ndarray:
    """Those of all monomials of one or two of ``size`` coordinates up to a degree, (F, d): what products of three
    coordinates add is little, and they are many."""
    chosen = [c for k in range(degree + 1) for c in itertools.combinations_with_replacement(range(size), k)]
    return np.array([np.bincount(np.array(c, int), minlength=size) for c in chosen if len(set(c)) <= 2])


def _monomials(values: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """(n, F) at coordinates (n, d)."""
    powers = np.cumprod([np.ones_like(values), *[values] * int(exponents.max())], axis=0).transpose(0, 2, 1)
    first, second = np.argsort(-exponents, axis=1, kind="stable")[:, :2].T  # no monomial is of more than two
    monomials = np.arange(len(exponents))
    return (powers[exponents[monomials, first], first] * powers[exponents[monomials, second], second]).T


def _monomial_slopes(values: np.ndarray, exponents: np.ndarray) -> np.ndarray:
    """Derivatives in each coordinate, (n, d, F)."""
    slopes = []
    for axis, exponent in enumerate(exponents.T):
        lower = exponents.copy()
        lower[:, axis] = np.maximum(exponent - 1, 0)
        slopes.append(exponent * _monomials(values, lower))
    return np.stack(slopes, axis=1)
