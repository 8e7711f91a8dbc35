"""Terms without structure, whose expectations are taken over draws of theta: against closed forms and fresh draws."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI

SIZE = 18
X = np.random.default_rng(0).normal(size=(40, SIZE))
Y = X @ np.linspace(-1, 1, SIZE) + 0.5 * np.random.default_rng(1).normal(size=40)


def looped_regression(X, y=None):
    """A linear regression by a loop, of which the graph shows nothing."""
    weights = numpyro.sample("weights", dist.Normal(0.0, 1.0).expand([SIZE]).to_event(1))
    loc = jax.lax.fori_loop(0, SIZE, lambda j, total: total + X[:, j] * weights[j], jnp.zeros(X.shape[0]))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(loc, 0.5), obs=y)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_a_linear_regression_without_structure_is_exact(method):
    posterior = method(looped_regression).run({"X": X, "y": Y}, progress_bar=False)
    covariance = np.linalg.inv(np.eye(SIZE) + X.T @ X / 0.25)
    mean = covariance @ X.T @ Y / 0.25
    sd = np.sqrt(np.diagonal(covariance))
    np.testing.assert_allclose((posterior.mean - mean) / sd, 0, atol=0.02)
    np.testing.assert_allclose(posterior.covariance / np.outer(sd, sd), covariance / np.outer(sd, sd), atol=0.02)
    evidence = dist.MultivariateNormal(0.0, 0.25 * np.eye(40) + X @ X.T).log_prob(Y)
    assert posterior.elbo == pytest.approx(float(evidence), abs=0.05)
    assert posterior.info["converged"] and posterior.info["elbo_error"] < 0.05


def spectral(x, y=None):
    """A process by 18 basis functions, scaled by a spectral density with a learned length and amplitude."""
    amplitude = numpyro.sample("amplitude", dist.LogNormal(0.0, 0.5))
    length = numpyro.sample("length", dist.LogNormal(0.0, 0.5))
    beta = numpyro.sample("beta", dist.Normal(0.0, 1.0).expand([SIZE]))
    omega = jnp.arange(1, SIZE + 1) * jnp.pi / 3
    basis = jnp.sin(omega * (x[:, None] + 1.5)) / jnp.sqrt(1.5)
    density = amplitude * jnp.exp(-0.25 * (length * omega) ** 2)
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(basis @ (density * beta), 0.3), obs=y)


def test_the_bound_of_a_spectral_process_is_stationary_on_fresh_draws():
    """Slopes of the bound in mean and covariance, from 20,000 draws of NumPyro's own density, in units of q."""
    x = np.linspace(-1, 1, 30)
    y = np.sin(3 * x) + 0.3 * np.random.default_rng(2).normal(size=30)
    posterior = RVGA(spectral).run({"x": x, "y": y}, progress_bar=False)
    assert posterior.info["converged"]
    mean, root = np.asarray(posterior.mean), np.asarray(posterior.scale_tril)
    half = np.random.default_rng(3).normal(size=(10_000, len(mean)))
    z = np.concatenate([half, -half])

    def log_joint(theta):
        sites = posterior.program.layout.unravel(theta)
        return -numpyro.infer.util.potential_energy(spectral, (x, y), {}, sites)

    values, gradients = jax.jit(jax.vmap(jax.value_and_grad(log_joint)))(jnp.asarray(mean + z @ root.T))
    slopes = np.asarray(gradients) @ root
    np.testing.assert_allclose(slopes.mean(0), 0, atol=0.1)
    np.testing.assert_allclose(np.mean(slopes * z, axis=0), -1, atol=0.15)
    entropy = 0.5 * len(mean) * (1 + np.log(2 * np.pi)) + np.sum(np.log(np.diagonal(root)))
    assert posterior.elbo == pytest.approx(float(np.mean(values)) + entropy, abs=posterior.info["elbo_error"] + 0.1)
