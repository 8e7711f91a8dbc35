"""Minimizers of KL(q || p) beside those of KL(p || q), which have the posterior's moments, by quadrature of p."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _paper_posteriors import SETTINGS, Setting, two_classes
from ellipses import Case, TruePosterior, model
from scipy.special import expit, log_expit, logsumexp

from numpyro_rvga import BONG, RVGA, FixedPointVI

NODES, WEIGHTS = np.polynomial.legendre.leggauss(200)
KINK = 40.0  # beyond which a logistic density is one, or an exponential
REACH = 12.0  # standard deviations to which integrals go
GRID = 801  # points along each axis
MOST_PASSES = 100
TOLERANCE = 1e-10
IN_ORDER = {"block_size": 1, "shuffle": False, "certify": False}
METHODS = {
    "best Gaussian": lambda: FixedPointVI(model),
    "R-VGA, implicit": lambda: RVGA(model, **IN_ORDER),
    "Laplace": lambda: RVGA(model, scheme="laplace"),
    "diagonal, 50 passes": lambda: BONG(
        model, rule="blr", hessian="auto", learning_rate=0.5, block_size=100, num_epochs=50, family="diagonal"
    ),
}
REPEATED = {  # names of one pass, and of as many as change something
    ("ADF", "EP"): {},
    ("ADF, diagonal", "EP, diagonal"): {"kept": "covariance"},
    ("EKF", "EKF, repeated"): {"linearize": True},
    ("VD-EKF", "VD-EKF, repeated"): {"kept": "precision", "linearize": True},
    ("FD-EKF", "FD-EKF, repeated"): {"kept": "covariance", "linearize": True},
}
Moments = tuple[np.ndarray, np.ndarray]


def tilted_moments(mean: float, variance: float) -> tuple[float, float]:
    """Mean and variance of the density proportional to expit(u) N(u; mean, variance)."""
    deviation = np.sqrt(variance)
    ends = mean - REACH * deviation, mean + (REACH + deviation) * deviation
    cuts = np.clip([ends[0], -KINK, 0.0, KINK, mean, ends[1]], *ends)
    cuts = np.sort(np.concatenate([cuts, np.clip(mean + deviation * np.array([-4.0, 4.0]), *ends)]))
    half = 0.5 * np.diff(cuts)[:, None]
    u = (cuts[:-1, None] + half + half * NODES).ravel()
    density = log_expit(u) - 0.5 * (u - mean) ** 2 / variance
    mass = (half * WEIGHTS).ravel() * np.exp(density - density.max())
    center = mass @ u / mass.sum()
    return center, mass @ (u - center) ** 2 / mass.sum()


def linearized_moments(mean: float, variance: float, at: float) -> tuple[float, float]:
    """The same of the extended Kalman filter: log expit(u) is quadratic about ``at``."""
    slope, information = expit(-at), expit(at) * expit(-at)
    spread = 1 / (1 / variance + information)
    return mean + spread * (slope + information * (at - mean)), spread


def passes(
    signed: np.ndarray, mean: np.ndarray, covariance: np.ndarray, *, kept: str = "all", linearize: bool = False
) -> Iterator[Moments]:
    """Mean and covariance after each pass over the rows of a logistic regression.

    The first pass is assumed density filtering, or the extended Kalman filter if linearized. Later ones take each row's
    factor out of q before they put it in anew, which counts no row twice: expectation propagation, or repeated passes
    of the filter that linearize at q's mean.

    :param signed: rows, (n, d), with the sign of their outcome.
    :param kept: of the Gaussian after each row: ``"all"``; the diagonal of the ``"covariance"``, for the least
        KL(p || q); or that of the ``"precision"``, for the least KL(q || p).
    """
    size = len(mean)
    precisions, linears = np.zeros((len(signed), size, size)), np.zeros((len(signed), size))
    precision = np.linalg.inv(covariance)
    linear = precision @ mean
    while True:
        for i, x in enumerate(signed):
            cavity, rest = precision - precisions[i], linear - linears[i]
            covariance = np.linalg.inv(cavity)
            variance, before = x @ covariance @ x, x @ covariance @ rest
            moments = linearized_moments(before, variance, x @ mean) if linearize else tilted_moments(before, variance)
            center, spread = moments
            precisions[i] = (1 / spread - 1 / variance) * np.outer(x, x)
            linears[i] = (center / spread - before / variance) * x
            precision, linear = cavity + precisions[i], rest + linears[i]
            covariance = np.linalg.inv(precision)
            mean = covariance @ linear
            if kept != "all":
                variances = np.diagonal(covariance) if kept == "covariance" else 1 / np.diagonal(precision)
                precision, covariance = np.diag(1 / variances), np.diag(variances)
                linear = precision @ mean
                precisions[i], linears[i] = precision - cavity, linear - rest
        yield mean, covariance


def first_and_last(results: Iterator[Moments]) -> tuple[Moments, Moments | None]:
    """The result of one pass, and that of as many as change something; None if they do not end."""
    first = last = next(results)
    for mean, covariance in islice(results, MOST_PASSES):
        change, last = np.abs(mean - last[0]).max() + np.abs(covariance - last[1]).max(), (mean, covariance)
        if change < TOLERANCE * np.abs(covariance).max():
            return first, last
    return first, None


def moments_of(posterior: TruePosterior) -> Moments:
    """By summation over its grid."""
    mass = np.exp(posterior.log_density - logsumexp(posterior.log_density))
    grid = np.stack(np.meshgrid(*posterior.axes), -1)
    mean = np.einsum("ij,ijk->k", mass, grid)
    return mean, np.einsum("ij,ijk,ijl->kl", mass, grid - mean, grid - mean)


def compared(posterior: TruePosterior, moments: Moments, mean: np.ndarray, covariance: np.ndarray) -> dict[str, float]:
    """Both divergences in nats; the largest errors of means in standard deviations, and of log standard deviations.

    :param moments: of the posterior.
    """
    deviations = np.sqrt(np.diagonal(moments[1]))
    shift, precision = moments[0] - mean, np.linalg.inv(covariance)
    log_density = posterior.log_density - posterior.log_evidence
    mass = np.exp(posterior.log_density - logsumexp(posterior.log_density))
    expected_log_q = -0.5 * (np.trace(precision @ moments[1]) + shift @ precision @ shift)
    expected_log_q -= 0.5 * np.linalg.slogdet(2 * np.pi * covariance)[1]
    return {
        "KL(q || p)": posterior.divergence_from(mean, covariance),
        "KL(p || q)": float(np.sum(mass * log_density) - expected_log_q),
        "mean": float(np.abs(shift / deviations).max()),
        "log sd": float(np.abs(np.log(np.sqrt(np.diagonal(covariance)) / deviations)).max()),
    }


def compare(setting: Setting) -> dict[str, dict[str, Any]]:
    data = two_classes(setting)
    signed = (2 * data["y"] - 1)[:, None] * data["X"]
    prior_mean = setting.prior_norm / np.sqrt(setting.dimension)
    prior = prior_mean * np.ones(setting.dimension), float(setting.prior_scale) ** 2 * np.eye(setting.dimension)
    options = {"prior_mean": prior_mean, "prior_scale": float(setting.prior_scale)}
    found = {}
    for name, make in METHODS.items():
        posterior = make().run(data, progress_bar=False, **options)
        found[name] = np.asarray(posterior.mean, float), np.asarray(posterior.covariance, float)
    for names, how in REPEATED.items():
        found |= dict(zip(names, first_and_last(passes(signed, *prior, **how))))
    posterior = TruePosterior(data, Case(setting.title, setting.prior_scale, prior_mean, setting.condition))
    center, covariance = found["EP"]
    posterior.normalize(center, REACH * np.sqrt(np.diagonal(covariance)), GRID)
    moments = moments_of(posterior)
    return {name: compared(posterior, moments, *q) for name, q in found.items() if q is not None}


def inclusive(folder: Path | None, quick: bool) -> Iterator[list[dict[str, Any]]]:
    """A line for each setting of two parameters and each method."""
    lines = []
    for setting in [s for s in SETTINGS if s.dimension == 2][: 1 if quick else None]:
        with jax.enable_x64(True):
            methods = compare(setting)
        title = setting.title.replace("\n", ", ")
        print(title, flush=True)
        for name, values in methods.items():
            print(f"  {name:24s}" + "  ".join(f"{key} {value:.3g}" for key, value in values.items()), flush=True)
            lines.append({"setting": title, "method": name} | values)
        yield lines
