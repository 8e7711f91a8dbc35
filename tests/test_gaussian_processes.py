"""Latents with a value for each row: Gaussian processes against closed forms, brute force and each other."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI, Posterior
from numpyro_rvga.core.gaussians import FullGaussian

RNG = np.random.default_rng(1)
INPUTS = np.sort(RNG.uniform(-2, 2, size=30))
OUTPUTS = np.sin(3 * INPUTS) + 0.3 * RNG.normal(size=30)
LABELS = (RNG.random(30) < 1 / (1 + np.exp(-3 * np.sin(3 * INPUTS)))).astype(float)
NEW = np.linspace(-3, 3, 7)
NOISE, JITTER = 0.3, 1e-6


def kernel(a, b):
    return 0.7**2 * jnp.exp(-0.5 * ((a[:, None] - b[None]) / 0.45) ** 2)


def covariance_of(x, jitter=JITTER):
    return kernel(x, x) + jitter * jnp.eye(len(x))


def regression(x, y=None, jitter=JITTER):
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance_matrix=covariance_of(x, jitter)))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def whitened_regression(x, y=None):
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    f = numpyro.deterministic("f", jnp.linalg.cholesky(covariance_of(x)) @ z)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


def classification(x, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance_matrix=covariance_of(x)))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def of_given_covariance(K, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance_matrix=K))
    with numpyro.plate("rows", len(K)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def of_latent_noise(x, y=None):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance_matrix=covariance_of(x)))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def of_latent_noise_whitened(x, y=None):
    noise = numpyro.sample("noise", dist.HalfNormal(1.0))
    z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([len(x)]).to_event(1))
    f = jnp.linalg.cholesky(covariance_of(x)) @ z
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(f, noise), obs=y)


def fit(model, y=OUTPUTS, x=INPUTS, **options):
    return FixedPointVI(model, **options).run({"x": x, "y": y}, progress_bar=False)


def exact_regression():
    """Mean, covariance, log evidence, and mean and sd of f at new inputs."""
    K, y = np.asarray(covariance_of(INPUTS)), OUTPUTS
    noisy = K + NOISE**2 * np.eye(len(y))
    evidence = -0.5 * y @ np.linalg.solve(noisy, y) - 0.5 * np.linalg.slogdet(2 * np.pi * noisy)[1]
    across = np.asarray(kernel(NEW, INPUTS))
    variance = np.diag(np.asarray(covariance_of(NEW))) - np.sum(across * np.linalg.solve(noisy, across.T).T, axis=1)
    mean, covariance = K @ np.linalg.solve(noisy, y), K - K @ np.linalg.solve(noisy, K)
    return mean, covariance, evidence, across @ np.linalg.solve(noisy, y), np.sqrt(variance)


@pytest.mark.parametrize("schedule", ["batch", "incremental", "gradient"])
def test_every_schedule_finds_the_exact_posterior(schedule):
    found = FixedPointVI(regression, schedule=schedule).run({"x": INPUTS, "y": OUTPUTS}, progress_bar=False)
    mean, covariance, *_ = exact_regression()
    deviation = np.sqrt(np.diagonal(covariance))
    assert found.info["converged"]
    np.testing.assert_allclose((found.mean - mean) / deviation, 0, atol=0.01)
    np.testing.assert_allclose(found.gaussian.deviation() / deviation, 1, atol=0.01)


@pytest.fixture(scope="module")
def posteriors():
    return {"f": fit(regression), "z": fit(whitened_regression)}


@pytest.mark.parametrize("site", ["f", "z"])
def test_regression_is_exact(posteriors, site):
    posterior, (mean, covariance, evidence, _, _) = posteriors[site], exact_regression()
    lower = np.linalg.cholesky(np.asarray(covariance_of(INPUTS))) if site == "z" else np.eye(len(INPUTS))
    np.testing.assert_allclose(lower @ posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(lower @ posterior.covariance @ lower.T, covariance, atol=1e-6)
    np.testing.assert_allclose(posterior.elbo, evidence, atol=1e-6)


@pytest.mark.parametrize("site", ["f", "z"])
def test_new_inputs_are_predicted_given_the_old(posteriors, site):
    *_, mean, deviation = exact_regression()
    draws = posteriors[site].predictive(jax.random.key(0), {"x": NEW}, num_samples=20_000)
    assert draws["y"].shape == (20_000, 7)
    np.testing.assert_allclose(draws["f"].mean(0), mean, atol=0.02)
    np.testing.assert_allclose(draws["f"].std(0), deviation, rtol=0.03)
    np.testing.assert_allclose(draws["y"].std(0), np.hypot(deviation, NOISE), rtol=0.03)


def test_the_fitted_rows_are_predicted_at_their_own_latents(posteriors):
    mean, covariance, *_ = exact_regression()
    draws = posteriors["f"].predictive(jax.random.key(0), {"x": INPUTS}, num_samples=20_000)["y"]
    np.testing.assert_allclose(draws.mean(0), mean, atol=0.02)
    np.testing.assert_allclose(draws.std(0), np.sqrt(np.diag(covariance) + NOISE**2), rtol=0.03)


def independent_bound(mean, root, K, y):
    """sum E[log lik] - KL in NumPy, expectations on a fine grid."""
    z = np.linspace(-9, 9, 2001)
    weight = np.exp(-0.5 * z**2) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    deviation = np.sqrt(np.sum(root**2, axis=1))
    f = mean[:, None] + deviation[:, None] * z
    expected = np.sum((y[:, None] * f - np.logaddexp(0, f)) @ weight)
    inverse = np.linalg.inv(K)
    divergence = np.sum(root * (inverse @ root)) + mean @ inverse @ mean - len(mean) + np.linalg.slogdet(K)[1]
    return expected - 0.5 * (divergence - 2 * np.sum(np.log(np.abs(np.diag(root)))))


def test_classification_is_a_stationary_point_of_the_bound():
    x, y = INPUTS[::4], LABELS[::4]
    posterior, K = fit(classification, y, x), np.asarray(covariance_of(x, 1e-6))
    mean, root = np.asarray(posterior.mean), np.asarray(posterior.scale_tril)
    best = independent_bound(mean, root, K, y)
    np.testing.assert_allclose(posterior.elbo, best, atol=1e-6)
    lower, rng = np.linalg.cholesky(K), np.random.default_rng(0)
    for _ in range(5):  # along directions on the prior's own scale
        step = 1e-4 * lower @ rng.normal(size=len(y))
        turn = 1e-4 * np.tril(rng.normal(size=(len(y), len(y))))
        rise = independent_bound(mean + step, root, K, y) - independent_bound(mean - step, root, K, y)
        turned = [independent_bound(mean, root @ (np.eye(len(y)) + sign * turn), K, y) for sign in (1, -1)]
        assert abs(rise) < 1e-7 and abs(turned[0] - turned[1]) < 1e-7


def robust(x, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), covariance_of(x)))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.StudentT(3.0, f, 0.1), obs=y)


@pytest.mark.parametrize(("model", "y"), [(classification, LABELS), (robust, OUTPUTS)])
def test_a_search_among_weights_ends_where_one_among_matrices_does(model, y):
    found = fit(model, y)
    again = FixedPointVI(model).run({"x": INPUTS, "y": y}, init=found, progress_bar=False)
    np.testing.assert_allclose(again.info["bounds"], found.elbo, atol=1e-7)
    shifted = dataclasses.replace(found, gaussian=FullGaussian(found.mean + 0.1, 1.5 * found.gaussian.root))
    other = FixedPointVI(model).run({"x": INPUTS, "y": y}, init=shifted, progress_bar=False)
    assert other.info["bounds"][0] < found.elbo - 1
    np.testing.assert_allclose(other.elbo, found.elbo, atol=1e-6)


def test_a_covariance_matrix_may_be_the_data():
    K = np.asarray(covariance_of(INPUTS))
    posterior = FixedPointVI(of_given_covariance).run({"y": LABELS}, K=K, progress_bar=False)
    np.testing.assert_allclose(posterior.elbo, fit(classification, LABELS).elbo, atol=1e-8)


def test_whitening_leaves_the_optimum_where_it_is_when_other_priors_are_not_gaussian():
    plain, whitened = fit(of_latent_noise), fit(of_latent_noise_whitened)
    np.testing.assert_allclose(plain.elbo, whitened.elbo, atol=1e-6)
    np.testing.assert_allclose(plain.median()["noise"], whitened.median()["noise"], rtol=1e-4)


def test_rows_are_selections_and_the_prior_keeps_its_cholesky_factor(posteriors):
    program = posteriors["f"].program
    assert program.selections == {"y"} and [site.name for site in program.prior.normal_sites] == ["f"]
    assert posteriors["z"].program.selections == frozenset()


def test_single_precision_is_enough():
    x = np.linspace(-2, 2, 300)
    y = (np.sin(5 * x) > 0).astype(float)
    double = fit(classification_with_jitter, y, x)
    with jax.enable_x64(False):
        single = fit(classification_with_jitter, y.astype(np.float32), x.astype(np.float32))
    assert single.info["converged"]
    deviation = np.sqrt(np.diag(double.covariance))
    assert np.max(np.abs(np.asarray(single.mean) - np.asarray(double.mean)) / deviation) < 0.02
    np.testing.assert_allclose(single.elbo, double.elbo, atol=0.01)


def classification_with_jitter(x, y=None):
    f = numpyro.sample("f", dist.MultivariateNormal(0.0, covariance_matrix=covariance_of(x, 1e-4)))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=f), obs=y)


def test_posteriors_survive_storage_and_tell_their_fit(posteriors, tmp_path):
    posterior = posteriors["f"]
    assert posterior.khat({"x": INPUTS, "y": OUTPUTS}).verdict.startswith("good")
    posterior.save(tmp_path / "gp.npz")
    again = Posterior.load(tmp_path / "gp.npz", regression)
    np.testing.assert_array_equal(again.mean, posterior.mean)
    draws = [p.predictive(jax.random.key(0), {"x": NEW}, num_samples=5)["y"] for p in (posterior, again)]
    np.testing.assert_array_equal(*draws)


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize("jitter", [-0.1, 0.0])
def test_a_covariance_matrix_that_is_not_positive_definite_is_named(jitter):
    with pytest.raises(ValueError, match=r"covariance matrix of site 'f' is not positive definite.*jitter"):
        FixedPointVI(regression).run({"x": np.zeros(5), "y": np.ones(5)}, jitter=jitter, progress_bar=False)


def test_a_recursion_over_a_stream_refuses_latents_that_grow_with_the_rows():
    with pytest.raises(NotImplementedError, match=r"site 'f' .* FixedPointVI"):
        RVGA(regression).run(iter([{"x": INPUTS, "y": OUTPUTS}]), progress_bar=False)


def test_rvga_solves_for_rows_at_hand_as_fixed_point_vi_does(posteriors):
    posterior = RVGA(regression).run({"x": INPUTS, "y": OUTPUTS}, progress_bar=False)
    assert posterior.info["rows"] == "joint" and posterior.num_rows == len(INPUTS)
    np.testing.assert_allclose(posterior.mean, posteriors["f"].mean, atol=1e-8)
    np.testing.assert_allclose(posterior.elbo, posteriors["f"].elbo, atol=1e-8)


def test_other_rows_have_no_likelihood(posteriors):
    with pytest.raises(ValueError, match="has 7 rows, and the posterior has absorbed 30"):
        posteriors["f"].khat({"x": NEW, "y": NEW})


def test_an_outcome_outside_its_support_is_named():
    labels = LABELS.copy()
    labels[7] = 2
    with pytest.raises(ValueError, match=r"row 7 of array 'y' holds 2\.0, which lies outside the support"):
        fit(classification, labels)
    with pytest.raises(ValueError, match="row 7 lies outside"):
        FixedPointVI(classification).run({"x": INPUTS}, y=labels, progress_bar=False)
