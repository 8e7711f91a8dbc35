"""Integrals over latent variables of single rows are compared with finer ones: importance ratios are of the same."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp

from numpyro_rvga import RVGA
from numpyro_rvga.core.expectations.local_integrals import finer_log_integral, log_integral, place_nodes
from numpyro_rvga.engines.rounding_errors import NOTICEABLE
from numpyro_rvga.results import khat as khat_module
from numpyro_rvga.results.log_joint import integral_error

DATA = {"y": np.array([-2.5, -0.3, 0.4, 0.9, 1.6, 3.1])}


def robust_effects(y, spike=None):
    """Effects of a Student t, or of a normal slab and a narrow spike that quadrature overlooks."""
    center = numpyro.sample("center", dist.Normal(0, 1))
    with numpyro.plate("rows", len(y)):
        prior = dist.StudentT(5.0, center, 1.0)
        if spike is not None:
            share = jax.nn.sigmoid(center)
            scales = dist.Normal(0.0, jnp.array([spike, 2.0]))
            prior = dist.MixtureSameFamily(dist.Categorical(probs=jnp.stack([share, 1 - share])), scales)
        own = numpyro.sample("own", prior)
        numpyro.sample("y", dist.Normal(own, 1.0), obs=y)


def fitted(**keywords):
    return RVGA(robust_effects).run(DATA, progress_bar=False, **keywords)


def waves(z):
    """The log density of a normal z, and of an outcome about sin 2 z: several modes."""
    return -0.5 * z**2 - 0.5 * ((1.0 - 2 * jnp.sin(2 * z)) / 0.1) ** 2


def test_the_finer_integral_sees_modes_beside_the_highest():
    z = np.linspace(-12, 12, 200_001)
    expected = logsumexp(np.asarray(jax.vmap(waves)(jnp.asarray(z)), np.float64)) + np.log(z[1] - z[0])
    integrand = lambda z: waves(z[0])  # noqa: E731
    usual = log_integral(integrand, place_nodes(integrand, 1, jnp.float32))
    assert abs(float(usual) - expected) > 0.02
    assert float(finer_log_integral(integrand, 1, jnp.float32)) == pytest.approx(expected, abs=5e-3)


def test_errors_of_integrals_are_found_where_there_are_any(monkeypatch):
    posterior = fitted()
    assert integral_error(posterior, DATA) < 0.01
    monkeypatch.setattr(khat_module, "integral_error", lambda *_: 2 * NOTICEABLE)
    assert posterior.khat(DATA, num_samples=2000).verdict.startswith("doubtful. The integrals")
    assert integral_error(fitted(spike=0.02), DATA) > NOTICEABLE
