"""Sites that are drawn anew in predictions, and sites that are not."""

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers

from numpyro_rvga import RVGA

KEY, NOISE = jax.random.key(0), 0.3
RNG = np.random.default_rng(0)
X = RNG.normal(size=60)
Y = X - X.mean() + NOISE * RNG.normal(size=60)


def line(X, y=None, *, fixed=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0), obs=fixed)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(slope * X, scale), obs=y)


def centered_line(X, y=None):
    line(X - X.mean(), y)


def centered_in_numpy(X, y=None):
    line(X - float(np.mean(X)), y)


def of_groups(group, X, num_groups, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", num_groups):
        level = numpyro.sample("level", dist.Normal(mean, 1.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 2.0))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(level[group] + slope * X, scale), obs=y)


def held(model):
    return handlers.condition(model, {"scale": NOISE})


@pytest.mark.parametrize(
    "model, keywords",
    [(held(line), {}), (line, {"fixed": NOISE}), (held(centered_line), {}), (held(centered_in_numpy), {})],
    ids=["condition", "obs", "whole", "whole in NumPy"],
)
def test_latent_sites_that_are_held_fixed_keep_their_values_in_predictions(model, keywords):
    data = {"X": X, "y": Y}
    posterior = RVGA(model).run(data, progress_bar=False, **keywords)
    drawn = posterior.predictive(KEY, {"X": X}, num_samples=4000)
    assert set(drawn) == {"y"}
    np.testing.assert_allclose(np.std(drawn["y"], axis=0).mean(), NOISE, rtol=0.03)
    result = posterior.to_arviz(data, num_samples=4000)
    np.testing.assert_allclose(np.std(result["posterior_predictive"]["y"][0], axis=0).mean(), NOISE, rtol=0.03)
    for group in ("posterior_predictive", "observed_data", "log_likelihood"):
        assert set(result[group].data_vars) == {"y"}


def test_sites_that_are_held_fixed_are_so_in_predictions_of_groups():
    group, rng = np.repeat(np.arange(6), 10), np.random.default_rng(1)
    y = rng.normal(size=6)[group] + X + NOISE * rng.normal(size=60)
    stream = RVGA(held(of_groups)).stream_groups(plate="groups", index="group", size="num_groups")
    stream.update({"group": group, "X": X, "y": y})
    found, rows = stream.posterior(), {"group": group, "X": X}
    draws = found.sample_posterior(KEY, (4000,), groups=np.arange(6))
    of_line = draws["level"][:, group] + draws["slope"][:, None] * X
    drawn = found.predictive(KEY, rows, 4000)["y"]
    np.testing.assert_allclose(np.var(drawn, axis=0).mean(), np.var(of_line, axis=0).mean() + NOISE**2, rtol=0.05)
