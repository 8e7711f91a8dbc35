"""Masked latent sites: entries that nothing reads, as obs_mask makes them, and entries that are read."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI

RNG = np.random.default_rng(0)
OUTCOMES = np.array([1.0, -1.0, 2.0]) + RNG.normal(size=(20, 3))
IS_OBSERVED = RNG.random((20, 3)) < 0.7


def vectors(y, is_observed):
    """Rows are vectors, of which all or nothing is observed."""
    location = numpyro.sample("location", dist.Normal(0, 2).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(location, 1).to_event(1), obs=y, obs_mask=is_observed.all(axis=1))


def centered_by_data(y, is_observed):
    """The data's own mean couples the rows."""
    location = numpyro.sample("location", dist.Normal(0 * y.mean(), 2).expand([3]).to_event(1))
    with numpyro.plate("rows", len(y), dim=-2), numpyro.plate("columns", 3, dim=-1):
        numpyro.sample("y", dist.Normal(location, 1), obs=y, obs_mask=is_observed)


def columns_first(y, is_observed):
    with numpyro.plate("columns", 3, dim=-2):
        location = numpyro.sample("location", dist.Normal(0, 2))
        with numpyro.plate("rows", len(y), dim=-1):
            numpyro.sample("y", dist.Normal(location, 1), obs=y.T, obs_mask=is_observed.T)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize("model", [vectors, centered_by_data, columns_first])
def test_outcomes_that_are_partly_observed_give_the_conjugate_posterior(model, method):
    data = {"y": OUTCOMES, "is_observed": IS_OBSERVED}
    posterior = method(model).run(data, progress_bar=False)
    counted = IS_OBSERVED.all(axis=1)[:, None] if model is vectors else IS_OBSERVED
    precision = 1 / 4 + np.broadcast_to(counted, (20, 3)).sum(axis=0)
    draws = np.asarray(posterior.sample_posterior(jax.random.key(0), (20_000,))["location"]).reshape(-1, 3)
    expected = (OUTCOMES * counted).sum(axis=0) / precision
    np.testing.assert_allclose(np.ravel(posterior.median()["location"]), expected, atol=1e-4)
    np.testing.assert_allclose(draws.std(axis=0), precision**-0.5, rtol=0.03)
    assert posterior.khat(data).khat < 0.1


def flat(y, is_flat):
    """A latent for each outcome, some without a prior: the data are all that is known of them."""
    level = numpyro.sample("level", dist.Normal(0, 1).expand(y.shape).mask(~is_flat).to_event(1))
    numpyro.sample("y", dist.Normal(level, 1).to_event(1), obs=y)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_masked_entries_that_the_data_read_stay_flat(method):
    y, is_flat = np.array([3.0, -2.0, 5.0]), np.array([True, False, True])
    posterior = method(flat).run({"y": y, "is_flat": is_flat}, progress_bar=False)
    np.testing.assert_allclose(posterior.median()["level"], np.where(is_flat, y, y / 2), atol=1e-4)
    np.testing.assert_allclose(np.diagonal(posterior.covariance), np.where(is_flat, 1, 0.5), atol=1e-4)
