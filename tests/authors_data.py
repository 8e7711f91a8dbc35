"""The R-VGA paper's data sets made anew, and the authors' results on them.

The covariance's eigenvectors multiply the noise with signs that the authors' linear algebra library chose. They are
part of the recipe here. Sets without distinct eigenvalues (c = 0) need the authors' files.
"""

from typing import NamedTuple

import numpy as np


class Results(NamedTuple):
    """What the authors' programs found.

    :ivar prior: mu_0 (each entry) and sigma_0.
    :ivar floor: KL(best Gaussian || posterior) less the log evidence (equation 94).
    :ivar gaps: how far above it the recursions end.
    """

    prior: tuple[float, float]
    floor: float
    gaps: dict[str, float]


class Case(NamedTuple):
    """Two Gaussians of covariance M^T Diag(1, 1/2^c, ..., 1/d^c) M, scaled (section 6, equation 91).

    :ivar separation: s, the distance of the means. :ivar condition: c. :ivar signs: of the eigenvectors, a bit each.
    """

    num_rows: int
    dimension: int
    separation: float
    condition: float
    seed: int
    signs: int
    results: Results


GAPS = ("implicit", "explicit", "ekf", "qkf", "implicit, exact expectations")


def _results(mean: float, scale: float, floor: float, *gaps: float) -> Results:
    return Results((mean, scale), floor, dict(zip(GAPS, gaps, strict=True)))


CASES = {
    "figure 3": Case(
        *(100, 2, 2.0, 2.0, 10, 0x1),
        _results(
            *(0.1 / np.sqrt(2), 1.0, 31.6982341383),
            *(0.0940006293744, 0.115804616624, 0.583262337245, 1.171966654, 0.115997873924),
        ),
    ),
    "figure 4": Case(
        *(100, 2, 2.0, 2.0, 10, 0x1),
        _results(
            *(1 / np.sqrt(2), 10.0, 31.7488949029),
            *(0.775130087769, 1.17725493622, 0.106006901664, 17.2747614251, 0.257427430698),
        ),
    ),
    "figure 6": Case(
        *(100, 2, 5.0, 2.0, 10, 0x1),
        _results(
            *(0.0, 10.0, 2.14081151126),
            *(0.449872211177, 0.49875740975, 7.12360568827, 3.16761436121, 0.170599251445),
        ),
    ),
    "figure 10, c = 1": Case(
        *(200, 100, 2.0, 1.0, 10, 0x417B9A1BA94391D41E017619F),
        _results(
            *(0.0, 10.0, 12.6895397876), *(3.86206503156, 9.9068484057, 129.346854933, 47.7540753534, 4.07523140865)
        ),
    ),
    "figure 14": Case(
        *(100, 2, 2.0, 1.0, 1, 0x1),
        _results(
            *(0.0, 10.0, 21.7729617239),
            *(1.03707673388, 1.23106977301, 0.428002083318, 8.81573253266, 0.238474243682),
        ),
    ),
    "ten dimensions": Case(
        *(500, 10, 2.0, 1.0, 10, 0x4D),
        _results(
            *(0.0, 10.0, 12.8024724388), *(1.82290698876, 3.72234438935, 28.6324513957, 18.8358301169, 1.61850180065)
        ),
    ),
}


def rows_of(case: Case) -> dict[str, np.ndarray]:
    """Direction of the means, axes of the covariance, and each class from a generator of its own; then shuffled."""
    first, other = np.random.RandomState(case.seed), np.random.RandomState(case.seed + 1)
    d, half = case.dimension, case.num_rows // 2
    direction = np.random.RandomState(case.seed).rand(d)
    center = 0.5 * case.separation * direction / np.linalg.norm(direction)
    variances = np.arange(1, d + 1) ** -case.condition
    signs = np.array([1 if case.signs >> i & 1 else -1 for i in range(d)])
    axes = signs[:, None] * random_rotation(np.random.RandomState(case.seed), d)
    root = np.sqrt(variances / np.sum(variances**2))[:, None] * axes
    X = np.concatenate([sign * center + rng.normal(size=(half, d)) @ root for sign, rng in ((1, first), (-1, other))])
    order = other.permutation(case.num_rows)
    return {"X": X[order], "y": np.repeat([0.0, 1.0], half)[order]}


def random_rotation(rng: np.random.RandomState, size: int) -> np.ndarray:
    """Of determinant one, all alike probable: a product of reflections that take Gaussian vectors to the axes."""
    rotation, signs = np.eye(size), np.ones(size)
    for i in range(size - 1):
        normal = rng.normal(size=size - i)
        signs[i] = np.sign(normal[0])
        normal[0] += signs[i] * np.linalg.norm(normal)
        rotation[:, i:] -= np.outer(rotation[:, i:] @ normal, 2 * normal / (normal @ normal))
    signs[-1] = (-1) ** (size - 1) * signs.prod()
    return signs[:, None] * rotation
