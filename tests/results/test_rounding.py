"""Single precision that has too few digits says so, and names the columns; ordinary data do not make it speak."""

import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA, FixedPointVI
from numpyro_rvga.results import rounding


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


def fitted(method, data, **keywords):
    """The posterior, and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method.run(data, progress_bar=False, **keywords)
    return posterior, [str(warning.message) for warning in caught]


def functional(method, data, **keywords):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = method.posterior(method.update(method.init(data, **keywords), data))
    return posterior, [str(warning.message) for warning in caught]


FEW = {"max_iterations": 20}
METHODS = {
    "RVGA": (RVGA, FEW),
    "without certificate": (RVGA, {"certify": False, **FEW}),
    "row by row": (RVGA, {"block_size": 1, "certify": False}),
    "ekf": (RVGA, {"scheme": "ekf"}),
    "FixedPointVI": (FixedPointVI, FEW),
    "BONG": (BONG, {}),
    "low rank": (BONG, {"family": "low-rank", "rank": 3}),
}
CASES = {"dummy trap": (1e3, ["b[0]", "b[1]", "b[2]", "b[3]"]), "doubled column": (1e6, ["b[0]", "b[2]"])}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("kind", CASES)
def test_columns_that_say_the_same_under_wide_priors_are_named(name, kind):
    method, options = METHODS[name]
    scale, names = CASES[kind]
    with jax.enable_x64(False):
        _, messages = fitted(method(logistic, **options), design(kind), scale=scale)
    told = [message for message in messages if "too few digits" in message]
    assert len(told) == 1 and "jax_enable_x64" in told[0] and "standardize" in told[0], messages
    named = told[0].split("a combination of ")[1].split(" from others")[0]
    assert set(names) <= set(named.split(", ")), told


@pytest.mark.parametrize("method", [RVGA, BONG])
def test_the_functional_form_tells_of_lost_digits_too(method):
    with jax.enable_x64(False):
        options = FEW if method is RVGA else {}
        _, messages = functional(method(logistic, **options), design("dummy trap"), scale=1e3)
    assert sum("a combination of b[0], b[1], b[2], b[3] from others" in message for message in messages) == 1


@pytest.mark.parametrize("schedule", ["batch", "gradient"])
@pytest.mark.parametrize("kind", CASES)
def test_schedules_that_end_far_from_the_best_gaussian_advise_double_precision(schedule, kind):
    with jax.enable_x64(False):
        posterior, messages = fitted(
            FixedPointVI(logistic, schedule=schedule, **FEW), design(kind), scale=CASES[kind][0]
        )
    assert not posterior.info["converged"] and any("not maximized" in m and "use float64" in m for m in messages)


@pytest.mark.parametrize("kind", CASES)
def test_diagonal_precisions_are_sums_and_lose_no_digits(kind):
    found = []
    for x64 in (True, False):
        with jax.enable_x64(x64):
            posterior, messages = fitted(BONG(logistic, family="diagonal"), design(kind), scale=CASES[kind][0])
        assert not messages
        found.append(posterior.gaussian.deviation())
    np.testing.assert_allclose(found[1], found[0], rtol=0.01)


def test_more_than_a_thousand_effects_beside_an_intercept_are_named():
    def effects(g, y=None):
        center = numpyro.sample("center", dist.Normal(0, 1e3))
        with numpyro.plate("groups", 1100):
            effect = numpyro.sample("effect", dist.Normal(0, 1e3))
        with numpyro.plate("rows", len(g)):
            numpyro.sample("y", dist.Normal(center + effect[g], 1.0), obs=y)

    rng = np.random.default_rng(0)
    data = {"g": np.arange(3300) % 1100, "y": rng.normal(size=3300).astype(np.float32)}
    with jax.enable_x64(False):
        _, messages = fitted(RVGA(effects, **FEW), data)
    assert sum("too few digits" in m and "center and others" in m for m in messages) == 1, messages


def test_passes_whose_solves_end_early_tell_so_without_a_look():
    posterior, messages = fitted(RVGA(logistic, block_size=1, certify=False, max_iterations=1), design("plain"))
    assert posterior.info["converged"] is False
    assert len(messages) == 1 and "q may not be the best Gaussian: a solve ended" in messages[0]


@pytest.mark.parametrize("scheme", ["explicit", "ekf", "qkf"])
def test_schemes_that_solve_nothing_do_not_say_that_they_have_converged(scheme):
    posterior, _ = fitted(RVGA(logistic, scheme=scheme), design("plain"))
    assert posterior.info["converged"] is None


@pytest.mark.parametrize("kind", ["plain", "years", "raw scales"])
def test_ordinary_columns_are_no_reason_to_warn(kind):
    with jax.enable_x64(False):
        _, messages = fitted(RVGA(logistic), design(kind))
    assert not any("too few digits" in message for message in messages)


def test_double_precision_has_the_digits_that_single_has_not():
    posterior, messages = fitted(RVGA(logistic), design("dummy trap"), scale=1e3)
    assert not messages
    np.testing.assert_allclose(posterior.gaussian.deviation(), 500.0, rtol=1e-4)  # of the prior, along the direction


@pytest.mark.parametrize("triangular", [True, False])
@pytest.mark.parametrize(("most", "rtol"), [(1000, 1e-3), (10, 0.5)])
def test_the_widest_direction_is_the_eigenvector_of_the_covariance_in_conditional_units(
    triangular, most, rtol, monkeypatch
):
    monkeypatch.setattr(rounding, "MAX_EXACT", most)  # beyond, conditional variances are estimated
    rng, size = np.random.default_rng(1), 30
    precision_root = np.eye(size) + rng.normal(size=(size, size)) / size
    precision_root[:, 1] = precision_root[:, 0] + 1e-3 * precision_root[:, 1]  # which the data hardly tell apart
    precision = precision_root.T @ precision_root
    root = np.linalg.inv(np.linalg.cholesky(precision)).T
    if not triangular:
        root = root @ np.linalg.qr(rng.normal(size=(size, size)))[0]
    places = rng.permutation(size)
    root, precision = root[places], precision[places][:, places]
    units = np.sqrt(np.diag(precision))
    values, vectors = np.linalg.eigh(precision / np.outer(units, units))
    value, direction = rounding.widest_direction(root)
    np.testing.assert_allclose(value, 1 / values[0], rtol=rtol)
    np.testing.assert_allclose(abs(direction @ vectors[:, 0]), 1, rtol=rtol)
