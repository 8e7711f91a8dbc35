"""Single precision that has too few digits says so, and names the columns; ordinary data do not make it speak."""

import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.results.rounding import widest_direction


def logistic(X, y=None, scale=10.0):
    b = numpyro.sample("b", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ b), obs=y)


def design(kind, n=200):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(n, 3))
    if kind == "dummy trap":
        X = np.concatenate([np.ones((n, 1)), np.eye(3)[rng.integers(0, 3, n)]], axis=1)
    elif kind == "doubled column":
        X[:, 2] = X[:, 0]
    elif kind == "years":
        X = np.stack([np.ones(n), rng.uniform(1995, 2025, n) / 100], axis=1)
    elif kind == "raw scales":
        X = X * np.array([1e-3, 1.0, 1e3])
    logits = X[:, 0] / np.abs(X[:, 0]).max()
    return {"X": X, "y": (rng.random(n) < 1 / (1 + np.exp(-logits))).astype(float)}


LOSING = [("dummy trap", 1e3, "b[0], b[1], b[2], b[3]"), ("doubled column", 1e6, "b[0], b[2]")]


@pytest.mark.filterwarnings("ignore:q is not the best", "ignore:the bound is not maximized", "ignore:the bound is not")
@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize(("kind", "scale", "names"), LOSING)
def test_columns_that_say_the_same_under_wide_priors_are_named(method, kind, scale, names):
    with jax.enable_x64(False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        method(logistic).run(design(kind), scale=scale, progress_bar=False)
    told = [str(warning.message) for warning in caught if "too few digits" in str(warning.message)]
    assert len(told) == 1 and f"a combination of {names} from others" in told[0] and "jax_enable_x64" in told[0]


@pytest.mark.parametrize("kind", ["plain", "years", "raw scales"])
def test_ordinary_columns_are_no_reason_to_warn(kind):
    with jax.enable_x64(False), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        RVGA(logistic).run(design(kind), progress_bar=False)
    assert not any("too few digits" in str(warning.message) for warning in caught)


def test_double_precision_has_the_digits_that_single_has_not():
    RVGA(logistic).run(design("dummy trap"), scale=1e3, progress_bar=False)  # warnings are errors


def test_the_widest_direction_is_the_eigenvector_of_the_covariance_in_conditional_units():
    rng = np.random.default_rng(1)
    root = rng.normal(size=(5, 5)) * 10.0 ** np.arange(5)[:, None]
    precision = np.linalg.inv(root @ root.T)
    units = np.sqrt(np.diag(precision))
    values, vectors = np.linalg.eigh(precision / np.outer(units, units))
    value, direction = widest_direction(root)
    np.testing.assert_allclose(value, 1 / values[0], rtol=1e-3)
    np.testing.assert_allclose(abs(direction @ vectors[:, 0]), 1, rtol=1e-3)
