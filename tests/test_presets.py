"""Presets: each against the equations of its source, and on real data."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpy.linalg import inv
from scipy.optimize import minimize
from sklearn.datasets import load_breast_cancer

from numpyro_rvga import BONG, metrics
from numpyro_rvga.core.gaussians import DiagonalGaussian, ExpectedDerivatives, FullGaussian, LowRankGaussian
from numpyro_rvga.core.updates.rules import update
from numpyro_rvga.presets import PRESETS

P, KEY = 4, jax.random.key(0)
RNG = np.random.default_rng(0)
MEAN, ROOT = RNG.normal(size=P), 0.6 * np.eye(P) + 0.2 * RNG.normal(size=(P, P))
VARIANCE, DIAGONAL, FACTOR = RNG.uniform(0.3, 1.0, P), RNG.uniform(0.7, 1.5, P), 0.5 * RNG.normal(size=(1, P))
STARTS = {
    "full": FullGaussian(jnp.asarray(MEAN), jnp.asarray(ROOT)),
    "diagonal": DiagonalGaussian(jnp.asarray(MEAN), jnp.asarray(VARIANCE)),
    "low-rank": LowRankGaussian(jnp.asarray(MEAN), jnp.asarray(DIAGONAL), jnp.asarray(FACTOR)),
}
RATE = 0.1


def logistic(X, y=None, loc=0.0, scale=1.0):
    w = numpyro.sample("w", dist.Normal(loc, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


# ---------------------------------------------------------------------- the sources' equations
class Row(NamedTuple):
    """What a filter sees of a row: the Jacobian F (C, P), the noise covariance R, and the innovation y - h."""

    jacobian: np.ndarray
    noise: np.ndarray
    error: np.ndarray

    @property
    def gradient(self):
        return self.jacobian.T @ inv(self.noise) @ self.error

    @property
    def root(self):
        """(P, C), whose outer product is the curvature."""
        return self.jacobian.T @ np.linalg.cholesky(inv(self.noise))

    @property
    def curvature(self):
        return self.root @ self.root.T


def kalman(mean, covariance, row):
    gain = covariance @ row.jacobian.T @ inv(row.jacobian @ covariance @ row.jacobian.T + row.noise)
    return mean + gain @ row.error, covariance - gain @ row.jacobian @ covariance


def cm_ekf(mean, covariance, row_at):
    """Tronarp et al. (2018): the filter that linearizes the conditional mean."""
    return kalman(mean, covariance, row_at(mean, covariance))


def vd_ekf(mean, covariance, row_at):
    """Chang et al. (2022), equation 13: the mean of the filter, and the diagonal of its precision."""
    mean, covariance = kalman(mean, covariance, row_at(mean, covariance))
    return mean, np.diag(1 / np.diag(inv(covariance)))


def fd_ekf(mean, covariance, row_at):
    """Puskorius and Feldkamp (2003): the variances of the filter."""
    mean, covariance = kalman(mean, covariance, row_at(mean, covariance))
    return mean, np.diag(np.diag(covariance))


def lo_fi(mean, diagonal, factor, row_at):
    """Chang et al. (2023): the filter's mean; the leading directions of [W, H^T R^-1/2], and the rest's diagonal."""
    row = row_at(mean, covariance_of(mean, diagonal, factor))
    wide = np.hstack([factor.T, row.root])
    mean = mean + inv(np.diag(diagonal) + wide @ wide.T) @ row.gradient
    return mean, *leading(wide, diagonal)


def leading(wide, diagonal):
    vectors, values, _ = np.linalg.svd(wide, full_matrices=False)
    kept = vectors[:, :1] * values[:1]
    return diagonal + np.sum(wide**2, 1) - np.sum(kept**2, 1), kept.T


def explicit_rvga(mean, covariance, row_at):
    """Lambert et al. (2021), equations 30 and 31."""
    row = row_at(mean, covariance)
    covariance = inv(inv(covariance) + row.curvature)
    return mean + covariance @ row.gradient, covariance


def natural_diagonal(start, prior, row_at):
    """Khan et al. (2018), equations 7 and 8, two steps: s by the Hessian, mu by the new s, with the prior in both."""
    mean, kept = start, np.diag(inv(prior))
    precision = kept
    for _ in range(2):
        row = row_at(mean, np.diag(1 / precision))
        pull = row.gradient - kept * (mean - start)
        precision = (1 - RATE) * precision + RATE * (kept + np.diag(row.curvature))
        mean = mean + RATE * pull / precision
    return mean, np.diag(1 / precision)


def slang(start, diagonal, factor, row_at):
    """Mishkin et al. (2018), algorithm 1, two steps: U and d first, then mu by the inverse of U U^T + d."""
    mean, d, u = start, diagonal, factor
    for _ in range(2):
        row = row_at(mean, covariance_of(mean, d, u))
        pull = row.gradient - inv(covariance_of(start, diagonal, factor)) @ (mean - start)
        wide = np.hstack([np.sqrt(1 - RATE) * u.T, np.sqrt(RATE) * factor.T, np.sqrt(RATE) * row.root])
        d, u = leading(wide, (1 - RATE) * d + RATE * diagonal)
        mean = mean + RATE * covariance_of(mean, d, u) @ pull
    return mean, d, u


def bayes_by_backprop(start, prior, row_at):
    """Blundell et al. (2015), section 3.2, steps 4 to 6, in expectation, with sigma = log(1 + exp(rho))."""
    mean, variance = start, np.diag(prior)
    rho = np.log(np.expm1(np.sqrt(variance)))
    for _ in range(2):
        sigma, slope = np.log1p(np.exp(rho)), 1 / (1 + np.exp(-rho))
        row = row_at(mean, np.diag(sigma**2))
        of_sigma = -np.diag(row.curvature) * sigma - sigma / variance + 1 / sigma
        mean, rho = mean + RATE * (row.gradient - (mean - start) / variance), rho + RATE * slope * of_sigma
    return mean, np.diag(np.log1p(np.exp(rho)) ** 2)


def online_newton(start, prior, row_at):
    """Khan and Rue (2023), equation 11, two steps: S by the Hessian, then m by its inverse."""
    mean, kept = start, inv(prior)
    precision = kept
    for _ in range(2):
        row = row_at(mean, inv(precision))
        pull = row.gradient - kept @ (mean - start)
        precision = (1 - RATE) * precision + RATE * (kept + row.curvature)
        mean = mean + RATE * inv(precision) @ pull
    return mean, inv(precision)


def covariance_of(mean, *parts):
    """Of a covariance, or of the diagonal and the factor of a low-rank precision."""
    return parts[0] if len(parts) == 1 else inv(np.diag(parts[0]) + parts[1].T @ parts[1])


EQUATIONS = {
    "cm-ekf": cm_ekf,
    "vd-ekf": vd_ekf,
    "fd-ekf": fd_ekf,
    "lo-fi": lo_fi,
    "explicit-rvga": explicit_rvga,
    "von": natural_diagonal,
    "vogn": natural_diagonal,
    "slang": slang,
    "bayes-by-backprop": bayes_by_backprop,
    "online-newton": online_newton,
}
CURVATURES = {
    "von": "mc-hess",
    "vogn": "mc-ef",
    "slang": "mc-ef",
    "bayes-by-backprop": "mc-hess",
    "online-newton": "delta-hess",
    "explicit-rvga": "expected",
}


def preset(name, **options):
    """With two steps for each row, of rate 0.1, where it has a rate."""
    iterated = {"learning_rate": RATE, "num_iters": 2} if PRESETS[name].options["rule"] in ("blr", "bbb") else {}
    return BONG.preset(name, logistic, **iterated, **({"rank": 1} if name in ("lo-fi", "slang") else {}), **options)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_follow_the_equations_of_their_source(name):
    """Of given derivatives, from a Gaussian of any form."""
    method = preset(name)
    assert method.options.hessian == CURVATURES.get(name, "lin-hess")
    row = Row(RNG.normal(size=(2, P)), np.diag([0.5, 2.0]), RNG.normal(size=2))
    site = ExpectedDerivatives(jnp.asarray(row.gradient), jnp.asarray(row.root.T))
    with jax.disable_jit():
        found = update(method.rule, STARTS[method.options.family], lambda key, q: site, KEY)
    parts = {"full": (ROOT @ ROOT.T,), "diagonal": (np.diag(VARIANCE),), "low-rank": (DIAGONAL, FACTOR)}
    mean, *parts = EQUATIONS[name](MEAN, *parts[method.options.family], lambda mean, covariance: row)
    assert bool(found.ok)
    np.testing.assert_allclose(found.q.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(found.q.covariance(), covariance_of(mean, *parts), rtol=1e-10, atol=1e-12)


def logistic_row(x, y, curvature):
    """A row as its source sees it at N(mean, covariance): at the mean, or averaged, by the trapezoidal rule."""

    def row_at(mean, covariance):
        nodes = np.linspace(-9, 9, 4001)
        weights = np.exp(-(nodes**2) / 2)
        if curvature in ("lin-hess", "delta-hess"):
            nodes, weights = np.zeros(1), np.ones(1)
        p = 1 / (1 + np.exp(-(x @ mean + nodes * np.sqrt(x @ covariance @ x))))
        information = np.average((y - p) ** 2 if curvature == "mc-ef" else p * (1 - p), weights=weights)
        return Row(x[None], np.array([[1 / information]]), np.array([np.average(y - p, weights=weights) / information]))

    return row_at


SAMPLED = ("von", "vogn", "slang", "bayes-by-backprop")


@pytest.mark.parametrize("name", PRESETS)
def test_presets_take_rows_in_by_the_equations_of_their_source(name):
    """From the prior over three rows, with each source's own derivatives; draws in their place to a fiftieth."""
    rng = np.random.default_rng(2)
    X, y, scale = rng.normal(size=(3, P)), np.array([1.0, 0.0, 1.0]), np.sqrt(VARIANCE)
    options = {"num_samples": 20_000} if name in SAMPLED else {}
    method = preset(name, shuffle=False, **options)
    found = method.run({"X": X, "y": y}, progress_bar=False, loc=jnp.asarray(MEAN), scale=jnp.asarray(scale))
    low_rank = method.options.family == "low-rank"
    start = MEAN, *((1 / VARIANCE, np.zeros((1, P))) if low_rank else (np.diag(VARIANCE),))
    state = start
    for row, outcome in zip(X, y):
        state = EQUATIONS[name](*state, logistic_row(row, outcome, CURVATURES.get(name, "lin-hess")))
    pairs = (found.mean, state[0], MEAN), (found.covariance, covariance_of(*state), covariance_of(*start))
    for ours, theirs, before in pairs:
        moved = np.linalg.norm(theirs - before)
        assert np.linalg.norm(ours - theirs) < (0.02 if name in SAMPLED else 1e-7) * moved


def test_online_newton_is_newtons_method_where_the_fisher_information_is_another_matrix():
    """Steps of rate one on all rows end at the mode, which SciPy finds, with the curvature there."""
    rng = np.random.default_rng(1)
    X = rng.normal(size=(60, 3))
    rows = {"X": X, "y": X @ np.array([1.0, -0.5, 0.3]) + rng.standard_t(4, size=60)}

    def robust(X, y):
        w = numpyro.sample("w", dist.Normal(0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.StudentT(4.0, X @ w, 1.0), obs=y)

    def energy(w):
        return 0.5 * w @ w + 2.5 * np.sum(np.log1p((rows["y"] - X @ w) ** 2 / 4))

    mode = minimize(energy, np.zeros(3), method="BFGS", options={"gtol": 1e-9}).x
    residual = rows["y"] - X @ mode
    weight = 5 * (4 - residual**2) / (4 + residual**2) ** 2
    precision = np.eye(3) + (X * weight[:, None]).T @ X
    method = BONG.preset("online-newton", robust, num_epochs=12, block_size=60, shuffle=False)
    posterior = method.run(rows, progress_bar=False)
    np.testing.assert_allclose(posterior.mean, mode, atol=1e-6)
    np.testing.assert_allclose(inv(posterior.covariance), precision, rtol=1e-5)


# ---------------------------------------------------------------------- real data
RATES = {"von": 0.2, "vogn": 0.2, "slang": 0.2}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_learn_real_data(name):
    """Breast cancer: most tumors are told by four measurements. "bayes-by-backprop" runs at its own rate."""
    X, y = load_breast_cancer(return_X_y=True)
    X = X[:300, :4]
    rows = {"X": (X - X.mean(0)) / X.std(0), "y": y[:300].astype(float)}
    options = {"learning_rate": RATES[name]} if name in RATES else {}
    posterior = BONG.preset(name, logistic, **options).run(rows, progress_bar=False)
    assert metrics.misclassification(posterior, rows) < 0.2
    assert metrics.nlpd(posterior, rows) < 0.6
