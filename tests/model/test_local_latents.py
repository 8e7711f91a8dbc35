"""Normal latents of single rows: against quadrature, closed forms and the sparse Gaussian process's bound."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.special import gammaln

from numpyro_rvga import RVGA, FixedPointVI

RNG = np.random.default_rng(0)
X = RNG.normal(size=(60, 3))
COUNTS = RNG.poisson(np.exp(X @ [0.5, -0.3, 0.2] + 0.5 * RNG.normal(size=60))).astype(float)
ROWS = {"X": X, "y": COUNTS}
SCALE = 0.7


def weights():
    return numpyro.sample("w", dist.Normal(0.0, 2.0).expand([3]).to_event(1))


def overdispersed(X, y=None):
    w = weights()
    with numpyro.plate("rows", len(X)):
        f = numpyro.sample("f", dist.Normal(X @ w, SCALE))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def non_centered(X, y=None):
    w = weights()
    with numpyro.plate("rows", len(X)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w + SCALE * z)), obs=y)


def with_offset(X, y=None):
    """E exp(f) of a normal f is exp(mean + variance / 2): the same bound but for a constant."""
    w = weights()
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w + 0.5 * SCALE**2)), obs=y)


@pytest.mark.parametrize("method", [FixedPointVI, partial(RVGA, local="prior")], ids=["batch", "recursion"])
@pytest.mark.parametrize("model", [overdispersed, non_centered])
def test_at_its_prior_a_local_latent_adds_its_variance_to_the_predictors(model, method):
    local = method(model).run(ROWS, progress_bar=False)
    plain = method(with_offset).run(ROWS, progress_bar=False)
    np.testing.assert_allclose(local.mean, plain.mean, atol=1e-6)
    np.testing.assert_allclose(local.covariance, plain.covariance, rtol=1e-5)
    np.testing.assert_allclose(local.elbo, plain.elbo - 0.5 * SCALE**2 * COUNTS.sum(), atol=1e-6)


def counts_around_a_level(y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + SCALE * z)), obs=y)


@pytest.mark.parametrize("of_data", [dict, lambda data: iter([data])], ids=["at hand", "stream"])
def test_by_default_a_recursion_integrates_a_local_latent_out(of_data):
    """At its prior, the standard deviation would be a third too small."""
    posterior = RVGA(counts_around_a_level).run(of_data({"y": COUNTS}), progress_bar=False)
    level, z = np.linspace(-3, 3, 601), np.linspace(-8, 8, 801)
    log_rate = level[:, None] + SCALE * z
    logs = [-0.125 * level**2]
    for y in COUNTS:
        of_z = y * log_rate - np.exp(log_rate) - 0.5 * z**2
        logs.append(np.logaddexp.reduce(of_z, axis=1))
    weights = np.exp(np.sum(logs, axis=0) - np.max(np.sum(logs, axis=0)))
    mean = np.average(level, weights=weights)
    sd = np.sqrt(np.average((level - mean) ** 2, weights=weights))
    np.testing.assert_allclose(posterior.mean[0], mean, atol=0.02 * sd)
    np.testing.assert_allclose(np.sqrt(posterior.covariance[0, 0]), sd, rtol=0.02)


def four_of_each_row(y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(y)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([4]).to_event(1))
        numpyro.sample("y", dist.Poisson(jnp.exp(level + 0.5 * z[..., 0] + z[..., 1:].sum(-1) / 4)), obs=y)


def test_local_latents_of_a_stream_that_have_no_quadrature_stay_at_their_prior():
    posterior = RVGA(four_of_each_row).run(iter([{"y": COUNTS}]), progress_bar=False)
    variance = 0.5**2 + 3 / 16
    plain = RVGA(lambda y: counts_of(y, 0.5 * variance)).run(iter([{"y": COUNTS}]), progress_bar=False)
    np.testing.assert_allclose(posterior.mean, plain.mean, atol=1e-6)


def counts_of(y, offset):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level + offset)), obs=y)


def test_the_log_likelihood_of_a_row_integrates_its_latent_out():
    program = FixedPointVI(overdispersed).run(ROWS, progress_bar=False).program
    theta = np.array([0.3, -0.2, 0.1])
    found = program.log_likelihood(jnp.asarray(theta), program.inputs(ROWS))["y"]
    z = np.linspace(-9, 9, 4001)
    log_rate = (X @ theta)[:, None] + SCALE * z
    logs = COUNTS[:, None] * log_rate - np.exp(log_rate) - np.asarray(gammaln(COUNTS + 1))[:, None]
    expected = np.log(np.sum(np.exp(logs - 0.5 * z**2), axis=1) * (z[1] - z[0]) / np.sqrt(2 * np.pi))
    np.testing.assert_allclose(found, expected, atol=1e-5)


# ---------------------------------------------------------------------- sparse Gaussian processes
INPUTS = np.sort(RNG.uniform(-2, 2, size=40))
OUTPUTS = np.sin(3 * INPUTS) + 0.3 * RNG.normal(size=40)
PLACES = np.linspace(-2, 2, 9)
NOISE = 0.3


def kernel(a, b):
    return jnp.exp(-0.5 * ((a[:, None] - b[None]) / 0.5) ** 2)


def sparse(x, y=None):
    inner = kernel(PLACES, PLACES) + 1e-8 * jnp.eye(len(PLACES))
    u = numpyro.sample("u", dist.MultivariateNormal(0.0, covariance_matrix=inner))
    with numpyro.plate("rows", len(x)):
        weights = jnp.linalg.solve(inner, kernel(PLACES, x)).T
        rest = 1.0 - jnp.sum(weights * kernel(x, PLACES), axis=1)
        f = numpyro.sample("f", dist.Normal(weights @ u, jnp.sqrt(rest)))
        numpyro.sample("y", dist.Normal(f, NOISE), obs=y)


@pytest.fixture(scope="module")
def sparse_posterior():
    return FixedPointVI(sparse).run({"x": INPUTS, "y": OUTPUTS}, progress_bar=False)


def test_a_sparse_gaussian_process_reaches_its_collapsed_bound(sparse_posterior):
    inner = np.asarray(kernel(PLACES, PLACES)) + 1e-8 * np.eye(len(PLACES))
    across = np.asarray(kernel(INPUTS, PLACES))
    nystroem = across @ np.linalg.solve(inner, across.T)
    marginal = nystroem + NOISE**2 * np.eye(len(INPUTS))
    quadratic = OUTPUTS @ np.linalg.solve(marginal, OUTPUTS) + np.linalg.slogdet(2 * np.pi * marginal)[1]
    collapsed = -0.5 * quadratic - 0.5 * np.sum(1.0 - np.diag(nystroem)) / NOISE**2
    np.testing.assert_allclose(sparse_posterior.elbo, collapsed, atol=1e-6)
    precision = np.linalg.inv(inner) + np.linalg.solve(inner, across.T) @ np.linalg.solve(inner, across.T).T / NOISE**2
    np.testing.assert_allclose(sparse_posterior.covariance, np.linalg.inv(precision), atol=1e-7)


def test_rows_in_small_blocks_end_at_the_same_sparse_process(sparse_posterior):
    streamed = RVGA(sparse, block_size=1, local="prior").run({"x": INPUTS, "y": OUTPUTS}, progress_bar=False)
    np.testing.assert_allclose(streamed.mean, sparse_posterior.mean, atol=1e-6)
    np.testing.assert_allclose(streamed.elbo, sparse_posterior.elbo, atol=1e-6)


def test_local_latents_are_drawn_for_given_rows(sparse_posterior):
    draws = sparse_posterior.sample_posterior(jax.random.key(0), (4, 5000), data={"x": INPUTS[:3]})
    assert draws["f"].shape == (4, 5000, 3) and draws["u"].shape == (4, 5000, 9)
    mean, covariance = sparse_posterior.program.predictors(
        sparse_posterior.gaussian,
        sparse_posterior.program.inputs({"x": INPUTS[:3], "y": np.zeros(3)}),
        "y",
    )
    np.testing.assert_allclose(draws["f"].mean((0, 1)), np.ravel(mean), atol=0.01)
    np.testing.assert_allclose(draws["f"].std((0, 1)), np.sqrt(np.ravel(covariance)), atol=0.01)
    predicted = sparse_posterior.predictive(jax.random.key(1), {"x": INPUTS[:7]}, num_samples=11)
    assert {name: values.shape for name, values in predicted.items()} == {"f": (11, 7), "y": (11, 7)}


# ---------------------------------------------------------------------- what is refused
def gamma_frailty(X, y=None):
    w = weights()
    with numpyro.plate("rows", len(X)):
        frailty = numpyro.sample("frailty", dist.Gamma(2.0, 2.0))
        numpyro.sample("y", dist.Poisson(frailty * jnp.exp(X @ w)), obs=y)


def of_unknown_scale(X, y=None):
    w, scale = weights(), numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(X)):
        f = numpyro.sample("f", dist.Normal(X @ w, scale))
        numpyro.sample("y", dist.Poisson(jnp.exp(f)), obs=y)


def of_unknown_scale_non_centered(X, y=None):
    w, scale = weights(), numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("rows", len(X)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w + scale * z)), obs=y)


def test_local_latents_of_a_stream_that_are_not_normal_are_refused():
    with pytest.raises(NotImplementedError, match=r"site 'frailty' .* only Normal ones"):
        RVGA(gamma_frailty, local="prior").run(iter([ROWS]), progress_bar=False)


@pytest.mark.parametrize("model, site", [(of_unknown_scale, "f"), (of_unknown_scale_non_centered, "z")])
def test_local_latents_of_unknown_scale_are_refused_by_a_recursion_and_learned_in_batch(model, site):
    """With the conditional prior as q, the scale would shrink to zero."""
    with pytest.raises(NotImplementedError, match=f"site '{site}'.* known standard deviation"):
        RVGA(model, local="prior").run(iter([ROWS]), progress_bar=False)
    posterior = FixedPointVI(model).run(ROWS, progress_bar=False)
    assert posterior.mean.size == 3 + 1 + len(COUNTS)
    assert 0.3 < posterior.median()["scale"] < 0.9


def test_linearized_expectations_are_refused():
    with pytest.raises(ValueError, match="site 'y' depends on a latent variable of each row"):
        RVGA(overdispersed, expectation="linearized", local="prior").run(iter([ROWS]), progress_bar=False)


@pytest.mark.parametrize("use", ["nuts", "as_guide"])
def test_what_would_need_the_local_latents_says_so(sparse_posterior, use):
    with pytest.raises(NotImplementedError, match="site 'f'"):
        getattr(sparse_posterior, use)()
