"""numpyro.param sites end where the bound, or the evidence where it is exact, has no slope."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints

from numpyro_rvga import RVGA, FixedPointVI, Posterior

RNG = np.random.default_rng(2)
INPUTS = np.sort(RNG.uniform(-2, 2, size=40))
OUTPUTS = np.sin(3 * INPUTS) + 0.3 * RNG.normal(size=40)
ROWS = {"x": INPUTS, "y": OUTPUTS}
POSITIVE = constraints.positive


def covariance_of(x, length, amplitude):
    return amplitude**2 * jnp.exp(-0.5 * ((x[:, None] - x[None]) / length) ** 2) + 1e-5 * jnp.eye(len(x))


def process(x, y=None):
    length = numpyro.param("length", 1.0, constraint=POSITIVE)
    amplitude = numpyro.param("amplitude", 1.0, constraint=POSITIVE)
    noise = numpyro.param("noise", 0.5, constraint=POSITIVE)
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance_matrix=covariance_of(x, length, amplitude)))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def log_evidence(logs):
    length, amplitude, noise = np.exp(logs)
    noisy = np.asarray(covariance_of(INPUTS, length, amplitude)) + noise**2 * np.eye(len(INPUTS))
    return -0.5 * OUTPUTS @ np.linalg.solve(noisy, OUTPUTS) - 0.5 * np.linalg.slogdet(2 * np.pi * noisy)[1]


@pytest.fixture(scope="module")
def learned():
    return FixedPointVI(process).run(ROWS, progress_bar=False)


def test_a_process_learns_the_most_likely_kernel_and_noise(learned):
    assert learned.info["learned"] and learned.info["converged"]
    logs = np.log([float(learned.params[name]) for name in ("length", "amplitude", "noise")])
    np.testing.assert_allclose(learned.elbo, log_evidence(logs), atol=1e-6)
    for direction in np.eye(3):  # the slope that is left promises less than the tolerance
        rise = (log_evidence(logs + 1e-4 * direction) - log_evidence(logs - 1e-4 * direction)) / 2e-4
        assert abs(rise) < 0.02
        assert log_evidence(logs) > log_evidence(logs + 0.05 * direction)
        assert log_evidence(logs) > log_evidence(logs - 0.05 * direction)


def test_the_bound_never_falls_while_learning(learned):
    assert np.all(np.diff(learned.info["learning_bounds"]) >= 0)


def test_learned_values_are_used_and_kept(learned, tmp_path):
    learned.save(tmp_path / "learned.npz")
    again = Posterior.load(tmp_path / "learned.npz", process)
    for name, value in learned.params.items():
        np.testing.assert_allclose(again.params[name], value, rtol=1e-12)
    draws = [p.predictive(jax.random.key(0), {"x": INPUTS}, num_samples=4000)["y"] for p in (learned, again)]
    np.testing.assert_array_equal(*draws)
    spread = np.sqrt(np.diag(learned.covariance) + float(learned.params["noise"]) ** 2)
    np.testing.assert_allclose(draws[0].std(0), spread, rtol=0.06)


def counts(X, y=None):
    """The shrinkage of the slopes is learned: empirical Bayes."""
    scale = numpyro.param("scale", 1.0, constraint=POSITIVE)
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=y)


def counts_at(X, y=None, scale=1.0):
    w = numpyro.sample("w", dist.Normal(0.0, scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w)), obs=y)


def test_a_prior_scale_maximizes_the_bounds_of_models_with_it_fixed():
    X = RNG.normal(size=(80, 12))
    rows = {"X": X, "y": RNG.poisson(np.exp(0.3 * X @ RNG.normal(size=12))).astype(float)}
    learned = FixedPointVI(counts).run(rows, progress_bar=False)
    best = float(learned.params["scale"])
    fixed = [
        FixedPointVI(counts_at).run(rows, scale=scale, progress_bar=False).elbo
        for scale in (best, 0.9 * best, 1.1 * best)
    ]
    np.testing.assert_allclose(learned.elbo, fixed[0], atol=1e-6)
    assert fixed[0] > max(fixed[1:])


def half_normal(y=None):
    scale = numpyro.param("scale", 1.0, constraint=POSITIVE)
    noise = numpyro.sample("noise", dist.HalfNormal(scale))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, noise), obs=y)


def test_the_scale_of_a_prior_that_is_not_gaussian_is_learned():
    posterior = FixedPointVI(half_normal).run({"y": 1.0 + 0.5 * RNG.normal(size=50)}, progress_bar=False)
    # The bound's best scale of a half-normal has scale^2 = E_q[noise^2], noise log-normal under q.
    place = posterior.site_names.index("noise")
    square = np.exp(2 * posterior.mean[place] + 2 * posterior.covariance[place, place])
    np.testing.assert_allclose(float(posterior.params["scale"]) ** 2, square, rtol=0.01)


def starting_outside(y=None):
    scale = numpyro.param("scale", -1.0, constraint=POSITIVE)
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, jnp.abs(scale)), obs=y)


def test_a_start_outside_the_constraint_is_named():
    with pytest.raises(ValueError, match=r"site 'scale' starts at -1.0, outside its constraint"):
        FixedPointVI(starting_outside).run({"y": np.ones(5)}, progress_bar=False)


def test_a_recursion_over_a_stream_refuses_parameters_by_name():
    with pytest.raises(NotImplementedError, match=r"numpyro.param sites .scale.*FixedPointVI"):
        RVGA(counts).run(iter([{"X": np.ones((5, 2)), "y": np.ones(5)}]), progress_bar=False)
