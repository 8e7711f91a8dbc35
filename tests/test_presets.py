"""Presets: each against the equations of its source, and on real data."""

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
F, R, ERROR = RNG.normal(size=(2, P)), np.diag([0.5, 2.0]), RNG.normal(size=2)  # Jacobian, covariance, y - h
GRADIENT, HESSIAN = F.T @ inv(R) @ ERROR, F.T @ inv(R) @ F
STARTS = {
    "full": FullGaussian(jnp.asarray(MEAN), jnp.asarray(ROOT)),
    "diagonal": DiagonalGaussian(jnp.asarray(MEAN), jnp.asarray(VARIANCE)),
    "low-rank": LowRankGaussian(jnp.asarray(MEAN), jnp.asarray(DIAGONAL), jnp.asarray(FACTOR)),
}
RATE = 0.1


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1.0).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


# ---------------------------------------------------------------------- the sources' equations
def kalman(S):
    gain = S @ F.T @ inv(F @ S @ F.T + R)
    return MEAN + gain @ ERROR, S - gain @ F @ S


def cm_ekf():
    """Tronarp et al. (2018): the filter that linearizes the conditional mean."""
    return kalman(ROOT @ ROOT.T)


def vd_ekf():
    """Chang et al. (2022), equation 13: the mean of the filter, and the diagonal of its precision."""
    mean, covariance = kalman(np.diag(VARIANCE))
    return mean, np.diag(1 / np.diag(inv(covariance)))


def fd_ekf():
    """Puskorius and Feldkamp (2003): the variances of the filter."""
    mean, covariance = kalman(np.diag(VARIANCE))
    return mean, np.diag(np.diag(covariance))


def lo_fi():
    """Chang et al. (2023): the filter's mean; the leading directions of [W, H^T R^-1/2], and the rest's diagonal."""
    wide = np.hstack([FACTOR.T, F.T @ np.sqrt(inv(R))])
    mean = MEAN + inv(np.diag(DIAGONAL) + wide @ wide.T) @ GRADIENT
    return mean, inv(leading(wide, DIAGONAL))


def leading(wide, diagonal):
    vectors, values, _ = np.linalg.svd(wide, full_matrices=False)
    kept = vectors[:, :1] * values[:1]
    return np.diag(diagonal + np.sum(wide**2, 1) - np.sum(kept**2, 1)) + kept @ kept.T


def explicit_rvga():
    """Lambert et al. (2021), equations 30 and 31."""
    covariance = inv(inv(ROOT @ ROOT.T) + HESSIAN)
    return MEAN + covariance @ GRADIENT, covariance


def natural_diagonal():
    """Khan et al. (2018), equations 7 and 8, two steps: s by the Hessian, mu by the new s, with the prior in both."""
    mean, precision = MEAN, 1 / VARIANCE
    for _ in range(2):
        pull = GRADIENT - (mean - MEAN) / VARIANCE
        precision = (1 - RATE) * precision + RATE * (1 / VARIANCE + np.diag(HESSIAN))
        mean = mean + RATE * pull / precision
    return mean, np.diag(1 / precision)


def slang():
    """Mishkin et al. (2018), algorithm 1: U and d first, then mu by the inverse of U U^T + d."""
    wide = np.hstack([np.sqrt(1 - RATE) * FACTOR.T, np.sqrt(RATE) * FACTOR.T, np.sqrt(RATE) * F.T @ np.sqrt(inv(R))])
    precision = leading(wide, DIAGONAL)
    return MEAN + RATE * inv(precision) @ GRADIENT, inv(precision)


def bayes_by_backprop():
    """Blundell et al. (2015), section 3.2, steps 4 to 6, in expectation, with sigma = log(1 + exp(rho))."""
    mean, rho = MEAN, np.log(np.expm1(np.sqrt(VARIANCE)))
    for _ in range(2):
        sigma, slope = np.log1p(np.exp(rho)), 1 / (1 + np.exp(-rho))
        of_sigma = -np.diag(HESSIAN) * sigma - sigma / VARIANCE + 1 / sigma
        mean, rho = mean + RATE * (GRADIENT - (mean - MEAN) / VARIANCE), rho + RATE * slope * of_sigma
    return mean, np.diag(np.log1p(np.exp(rho)) ** 2)


def online_newton():
    """Khan and Rue (2023), equation 11: S by the Hessian, then m by its inverse."""
    mean, kept = MEAN, inv(ROOT @ ROOT.T)
    precision = kept
    for _ in range(2):
        pull = GRADIENT - kept @ (mean - MEAN)
        precision = (1 - RATE) * precision + RATE * (kept + HESSIAN)
        mean = mean + RATE * inv(precision) @ pull
    return mean, inv(precision)


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


@pytest.mark.parametrize("name", PRESETS)
def test_presets_follow_the_equations_of_their_source(name):
    """Of given derivatives; the estimators of these have tests of their own."""
    iterated = {"learning_rate": RATE, "num_iters": 1 if name == "slang" else 2}
    method = BONG.preset(name, logistic, **(iterated if PRESETS[name].options["rule"] in ("blr", "bbb") else {}))
    assert method.options.hessian == CURVATURES.get(name, "lin-hess")
    factor = jnp.asarray(np.sqrt(inv(R)) @ F)
    site = ExpectedDerivatives(jnp.asarray(GRADIENT), factor)
    with jax.disable_jit():
        found = update(method.rule, STARTS[method.options.family], lambda key, q: site, KEY)
    mean, covariance = EQUATIONS[name]()
    assert bool(found.ok)
    np.testing.assert_allclose(found.q.mean, mean, rtol=1e-10)
    np.testing.assert_allclose(found.q.covariance(), covariance, rtol=1e-10, atol=1e-12)


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
