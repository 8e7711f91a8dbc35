"""Latent states that follow one another in time: what is found, and that the answer is that of whole matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

from numpyro_rvga import FixedPointVI, Posterior
from numpyro_rvga.core.gaussians.packed_roots import PackedRoots
from numpyro_rvga.engines import sparse
from numpyro_rvga.model.program import Program
from numpyro_rvga.model.terms import sparsity
from numpyro_rvga.results import integration

LENGTH, NOISE = 90, 0.5


@pytest.fixture(autouse=True)
def short_chains_count(monkeypatch):
    monkeypatch.setattr(sparsity, "FEWEST_PARAMETERS", 10)
    monkeypatch.setattr(sparsity, "FEWEST_IN_CHAIN", 10)
    monkeypatch.setattr(sparse, "SHORT", 10)


@pytest.fixture(scope="module")
def data():
    rng = np.random.default_rng(0)
    level = np.cumsum(rng.normal(size=LENGTH)) * 0.4
    return {
        "normal": {"y": level + NOISE * rng.normal(size=LENGTH)},
        "counts": {"y": rng.poisson(np.exp(0.5 * level)).astype(float)},
        "returns": {"y": np.exp(0.5 * level) * rng.standard_t(5, size=LENGTH)},
    }


def known_walk(y):
    """Gaussian altogether."""
    u = numpyro.sample("u", dist.GaussianRandomWalk(0.7, len(y)))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(u, NOISE), obs=y)


def counts_of_walk(y):
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    u = numpyro.sample("u", dist.GaussianRandomWalk(tau, len(y)))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(u)), obs=y)


def volatility(y):
    sigma = numpyro.sample("sigma", dist.Exponential(2.0))
    s = numpyro.sample("s", dist.GaussianRandomWalk(sigma, len(y)))
    nu = numpyro.sample("nu", dist.Exponential(0.1))
    numpyro.sample("y", dist.StudentT(nu, 0.0, jnp.exp(s)), obs=y)


def autoregression(y):
    """Of the second order, in a loop."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))

    def step(before, _):
        u = numpyro.sample("u", dist.Normal(1.2 * before[0] - 0.3 * before[1], tau))
        return (u, before[0]), u

    _, u = scan(step, (0.0, 0.0), jnp.arange(len(y)))
    numpyro.sample("y", dist.Normal(u, NOISE), obs=y)


def damped_trend(y):
    """Two states at a time."""
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))

    def step(before, _):
        level, slope = before
        slope = numpyro.sample("slope", dist.Normal(0.8 * slope, tau))
        level = numpyro.sample("level", dist.Normal(level + slope, 0.3))
        return (level, slope), level

    _, level = scan(step, (0.0, 0.0), jnp.arange(len(y)))
    numpyro.sample("y", dist.Normal(level, sigma), obs=y)


MODELS = {
    "volatility": (volatility, "returns"),
    "second order": (autoregression, "normal"),
    "two states": (damped_trend, "normal"),
}


def moving_average(y):
    """Each error is computed from the one before."""
    level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([len(y)]).to_event(1))
    share = numpyro.sample("share", dist.Uniform(0.0, 1.0))

    def step(error, now):
        error = now[0] - now[1] - share * error
        return error, error

    _, errors = jax.lax.scan(step, 0.0, (jnp.asarray(y), level))
    numpyro.sample("errors", dist.Normal(0.0, NOISE), obs=errors)


def sparsity_of(model, data):
    program = Program(model, data, {}, whole=True)
    return program.find_sparsity(program.inputs(data))


def test_a_gaussian_walk_is_exact(data):
    found = FixedPointVI(known_walk).run(data["normal"], progress_bar=False)
    y = data["normal"]["y"]
    times = np.arange(1, LENGTH + 1)
    prior = 0.7**2 * np.minimum(times[:, None], times)
    marginal = prior + NOISE**2 * np.eye(LENGTH)
    gain = np.linalg.solve(marginal, prior).T
    np.testing.assert_allclose(found.mean, gain @ y, atol=1e-8)
    np.testing.assert_allclose(found.covariance, prior - gain @ prior, atol=1e-9)
    evidence = dist.MultivariateNormal(jnp.zeros(LENGTH), jnp.asarray(marginal)).log_prob(y)
    np.testing.assert_allclose(found.elbo, evidence, rtol=1e-9)


@pytest.mark.parametrize(
    ("model", "kind", "lag", "width"),
    [
        (known_walk, "normal", 1, 1),
        (counts_of_walk, "counts", 1, 1),
        (autoregression, "normal", 2, 1),
        (damped_trend, "normal", 1, 2),
    ],
)
def test_chains_are_recognized(data, model, kind, lag, width):
    found = sparsity_of(model, data[kind])
    states = "u" if width == 1 else "level"
    assert found.block == sparsity.LEAST_BLOCK and found.order.num_diagonal == width * LENGTH
    assert found.patterns[True, states].num_leading in (lag + 1, width * (lag + 1))
    assert sorted(found.order.indices) == list(range(found.order.indices.size))
    if width == 2:  # states of one time stand beside each other
        assert np.all(np.abs(np.diff(found.order.indices[: 2 * LENGTH].reshape(-1, 2))) == LENGTH)


def test_terms_that_take_all_parameters_are_no_chain(data):
    program = Program(moving_average, data["normal"], {}, whole=True, by_draws=True)
    assert any(terms.by_draws for terms in program.terms)
    assert program.find_sparsity(program.inputs(data["normal"])) is None


def test_latents_whose_prior_is_masked_are_found(data):
    def model(y):
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        filled = numpyro.sample("filled", dist.Normal(0.0, scale).expand([len(y)]).mask(False))
        numpyro.sample("filled_again", dist.Normal(0.0, scale), obs=filled)
        numpyro.sample("y", dist.Normal(filled, NOISE), obs=y)

    found = FixedPointVI(model).run(data["normal"], progress_bar=False)
    shrunk = np.mean(np.asarray(found.sample_posterior(jax.random.key(0), (2000,))["filled"]), axis=0)
    share = np.polyfit(data["normal"]["y"], shrunk, 1)[0]
    variance = np.mean(data["normal"]["y"] ** 2) - NOISE**2
    np.testing.assert_allclose(share, variance / (variance + NOISE**2), atol=0.05)


@pytest.mark.parametrize("name", MODELS)
def test_the_answer_is_that_of_whole_matrices(data, name, monkeypatch):
    model, kind = MODELS[name]
    found = FixedPointVI(model).run(data[kind], progress_bar=False)
    monkeypatch.setattr(sparsity, "FEWEST_PARAMETERS", 10**6)
    whole = FixedPointVI(model).run(data[kind], progress_bar=False)
    deviation = np.sqrt(np.diag(whole.covariance))
    np.testing.assert_allclose(found.elbo, whole.elbo, atol=2e-3)
    np.testing.assert_allclose(found.mean / deviation, whole.mean / deviation, atol=0.03)
    np.testing.assert_allclose(0.5 * np.log(np.diag(found.covariance)), np.log(deviation), atol=0.01)


def test_short_chains_are_left_to_whole_matrices_where_one_solve_is_enough(data, monkeypatch):
    monkeypatch.setattr(sparse, "SHORT", 10**6)
    assert sparsity_of(counts_of_walk, data["counts"]) is not None
    asked = []
    monkeypatch.setattr(sparse.SparseEngine, "solve", lambda *arguments: asked.append(arguments))
    FixedPointVI(counts_of_walk).run(data["counts"], progress_bar=False)
    assert not asked


def test_single_precision_is_enough(data):
    double = FixedPointVI(counts_of_walk).run(data["counts"], progress_bar=False)
    with jax.enable_x64(False):
        single = FixedPointVI(counts_of_walk).run(data["counts"], progress_bar=False)
    deviation = np.sqrt(np.diag(double.covariance))
    assert np.max(np.abs(np.asarray(single.mean) - double.mean) / deviation) < 0.03


def test_hyperparameters_of_chains_are_integrated_out(data, monkeypatch, tmp_path):
    by_matrices = FixedPointVI(counts_of_walk, integrate=["tau"]).run(data["counts"], progress_bar=False)
    monkeypatch.setattr(integration, "MOST_PARAMETERS", 10)
    found = FixedPointVI(counts_of_walk, integrate=["tau"]).run(data["counts"], progress_bar=False)
    assert isinstance(found.gaussian.roots, PackedRoots) and not isinstance(by_matrices.gaussian.roots, PackedRoots)
    deviation = np.sqrt(np.diag(by_matrices.covariance))
    np.testing.assert_allclose(found.elbo, by_matrices.elbo, atol=1e-3)
    np.testing.assert_allclose(found.mean / deviation, by_matrices.mean / deviation, atol=0.02)
    np.testing.assert_allclose(found.covariance, by_matrices.covariance, atol=0.02 * np.max(deviation) ** 2)
    draws = found.sample_posterior(jax.random.key(0), (4000,))["u"]
    np.testing.assert_allclose(np.std(draws, axis=0), np.sqrt(np.diag(found.covariance))[-LENGTH:], rtol=0.1)
    theta = by_matrices.sample_unconstrained(jax.random.key(0), (500,))
    log_prob = found.log_prob_unconstrained(theta)
    assert abs(np.mean(log_prob - by_matrices.log_prob_unconstrained(theta))) < 0.5  # of 91 parameters
    found.save(tmp_path / "walk.npz")
    again = Posterior.load(tmp_path / "walk.npz", counts_of_walk)
    np.testing.assert_array_equal(again.log_prob_unconstrained(theta), log_prob)
