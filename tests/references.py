"""What a posterior is compared with: NumPyro's own potential energy, moments by importance sampling from it, and where
the authors' results are, if they are at hand."""

import os
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpyro import handlers
from numpyro.distributions import biject_to
from numpyro.infer.util import potential_energy
from scipy.optimize import minimize

REFERENCE = Path(os.environ.get("RVGA_REFERENCE", Path(__file__).parents[2] / "shared" / "reference"))
DEGREES_OF_FREEDOM = 6
ADAPTIVE_ROUNDS = 4


def needs_reference(name: str) -> pytest.MarkDecorator:
    """Skips where a file or folder of the authors' results is not at hand."""
    return pytest.mark.skipif(
        not (REFERENCE / name).exists(), reason="the authors' results are not at hand (set RVGA_REFERENCE)"
    )


class Moments(NamedTuple):
    """Mean and standard deviation in unconstrained space, in the posterior's order, and the draws behind them."""

    mean: np.ndarray
    sd: np.ndarray
    effective_draws: float


def potential_of(model, site_names, *args, **kwargs):
    """NumPyro's potential energy (the negative log joint density) as a function of the flat unconstrained vector."""
    with handlers.block(), handlers.seed(rng_seed=0):
        trace = handlers.trace(model).get_trace(*args, **kwargs)
    shapes = {n: jnp.shape(biject_to(trace[n]["fn"].support).inv(trace[n]["value"])) for n in site_names}
    sizes = [int(np.prod(shape)) for shape in shapes.values()]

    def potential(theta):
        pieces = jnp.split(theta, list(np.cumsum(sizes))[:-1])
        sites = {name: jnp.reshape(piece, shapes[name]) for piece, name in zip(pieces, site_names)}
        return potential_energy(model, args, kwargs, sites)

    return potential, sum(sizes)


def importance_moments(model, site_names, *args, num_draws=8_000, **kwargs) -> Moments:
    """Moments by adaptive, self-normalized importance sampling from a multivariate t around the mode."""
    potential, size = potential_of(model, site_names, *args, **kwargs)
    many = jax.jit(lambda thetas: jax.lax.map(potential, thetas, batch_size=1000))
    slope = jax.jit(jax.value_and_grad(potential))
    found = minimize(lambda z: [np.asarray(x) for x in slope(z)], np.full(size, 0.1), jac=True, method="BFGS")
    mean, covariance = found.x, 1.5 * found.hess_inv
    rng = np.random.default_rng(0)
    for round_number in range(ADAPTIVE_ROUNDS + 1):
        count = num_draws if round_number == ADAPTIVE_ROUNDS else 2000
        root = np.linalg.cholesky(covariance + 1e-10 * np.eye(size))
        mixing = np.sqrt(rng.chisquare(DEGREES_OF_FREEDOM, count) / DEGREES_OF_FREEDOM)
        standard = rng.normal(size=(count, size)) / mixing[:, None]
        log_proposal = -0.5 * (DEGREES_OF_FREEDOM + size) * np.log1p((standard**2).sum(1) / DEGREES_OF_FREEDOM)
        draws = mean + standard @ root.T
        log_ratio = -np.asarray(many(draws)) - log_proposal
        log_ratio = np.where(np.isfinite(log_ratio), log_ratio, -np.inf)
        weights = np.exp(log_ratio - log_ratio.max())
        weights /= weights.sum()
        mean = weights @ draws
        covariance = (draws - mean).T @ (weights[:, None] * (draws - mean))
    return Moments(mean, np.sqrt(np.diagonal(covariance)), 1 / (weights**2).sum())


def assert_moments_match(posterior, reference, mean_tolerance, sd_tolerance):
    """Means to a fraction of a standard deviation, standard deviations to a relative error."""
    assert reference.effective_draws > 2000, "the reference itself is too noisy to compare with"
    shift = (np.asarray(posterior.mean) - reference.mean) / reference.sd
    ratio = np.sqrt(np.diagonal(np.asarray(posterior.covariance))) / reference.sd
    np.testing.assert_array_less(np.abs(shift), mean_tolerance, err_msg=f"means off by {np.round(shift, 3)} sd")
    np.testing.assert_array_less(np.abs(ratio - 1), sd_tolerance, err_msg=f"ratios of sds are {np.round(ratio, 3)}")


def assert_is_laplace(posterior, model, *args, precision_tolerance=1e-6, **kwargs):
    """The mean is the mode of NumPyro's log joint density and the precision its negative Hessian there."""
    potential, _ = potential_of(model, posterior.site_names, *args, **kwargs)
    slope, hessian = jax.jit(lambda z: (jax.grad(potential)(z), jax.hessian(potential)(z)))(posterior.mean)
    root = np.asarray(posterior.scale_tril)
    np.testing.assert_allclose(root.T @ slope, 0.0, atol=1e-5)
    np.testing.assert_allclose(root.T @ hessian @ root, np.eye(len(root)), atol=precision_tolerance)
