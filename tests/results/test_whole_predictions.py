"""Predictions of models that read the values of their data, which have none under a transformation of JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.contrib.control_flow import scan

from numpyro_rvga import RVGA, metrics

RNG = np.random.default_rng(0)
GROUP = np.repeat(np.arange(3), 20)
Y = np.array([0.0, 1.0, -2.0])[GROUP] + 0.3 * RNG.normal(size=60)


def in_numpy(group, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0).expand([int(group.max()) + 1]))
    numpyro.sample("y", dist.Normal(level[group], 0.3), obs=y)


def in_jax(group, y=None):
    level = numpyro.sample("level", dist.Normal(0.0, 2.0).expand([int(jnp.max(jnp.asarray(group))) + 1]))
    numpyro.sample("y", dist.Normal(level[group], 0.3), obs=y)


@pytest.mark.parametrize("model", [in_numpy, in_jax])
def test_outcomes_are_predicted_where_the_model_reads_its_data(model):
    data = {"group": GROUP, "y": Y}
    posterior = RVGA(model).run(data, progress_bar=False)
    drawn = posterior.predictive(jax.random.key(0), {"group": GROUP}, 2000)["y"]
    of_groups = np.stack([Y[k == GROUP].mean() for k in range(3)])
    np.testing.assert_allclose(drawn.mean(0), of_groups[GROUP], atol=0.05)
    predicted = posterior.to_arviz(data, num_samples=20)["posterior_predictive"]["y"]
    assert predicted.shape == (1, 20, 60)


@pytest.mark.parametrize("model", [in_numpy, in_jax])
def test_new_rows_are_predicted_where_the_model_reads_its_data(model):
    posterior = RVGA(model).run({"group": GROUP, "y": Y}, progress_bar=False)
    drawn = posterior.predictive(jax.random.key(0), {"group": np.array([2, 0])}, 2000)["y"]
    np.testing.assert_allclose(drawn.mean(0), [Y[GROUP == 2].mean(), Y[GROUP == 0].mean()], atol=0.05)


def two_tables(xa, xb, ya=None, yb=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    numpyro.sample("ya", dist.Normal(slope * xa, 0.1), obs=ya)
    numpyro.sample("yb", dist.Normal(10.0 + slope * xb, 0.1), obs=yb)


@pytest.mark.parametrize("lengths", [(40, 15), (15, 40)])
def test_new_rows_of_each_of_two_tables_are_predicted(lengths):
    xa, xb = (RNG.normal(size=n) for n in lengths)
    data = {"xa": xa, "xb": xb, "ya": xa, "yb": 10.0 + xb}
    posterior = RVGA(two_tables).run(data, progress_bar=False)
    drawn = posterior.predictive(jax.random.key(0), {"xa": np.arange(3.0), "xb": np.array([5.0, 6.0])})
    np.testing.assert_allclose(drawn["ya"].mean(0), np.arange(3.0), atol=0.1)
    np.testing.assert_allclose(drawn["yb"].mean(0), [15.0, 16.0], atol=0.2)


def counts_of_steps(y):
    base = numpyro.sample("base", dist.Normal(0.0, 1.0))

    def step(before, now):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(base) * (1 + before), 2.0), obs=now)
        return now, None

    scan(step, y[0], y[1:])


def test_outcomes_of_steps_are_drawn_one_by_one():
    """Their distributions are made of others."""
    y = np.array([2, 0, 3, 1, 4, 2, 2, 0, 1, 3, 5, 1, 2, 0, 3, 2])
    posterior = RVGA(counts_of_steps).run({"y": y}, progress_bar=False)
    assert set(posterior.sample_posterior(jax.random.key(0), (3,), {"y": y})) == {"base"}
    drawn = posterior.predictive(jax.random.key(0), {"y": y}, 4000)["y"]
    base, variance = posterior.mean[0], posterior.covariance[0, 0]
    np.testing.assert_allclose(drawn.mean(0), np.exp(base + variance / 2) * (1 + y[:-1]), rtol=0.1)
    correlations = np.corrcoef((np.asarray(drawn) / (1 + y[:-1])).T)
    assert np.all(np.abs(correlations - np.eye(15)) < 0.25)  # they share one parameter


def standardized(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
    numpyro.sample("y", dist.Normal(slope * (x - x.mean()) / x.std(), 0.3), obs=y)


def process_of_standardized(x, y=None):
    x = (x - x.mean()) / x.std()
    kernel = jnp.exp(-0.5 * (x[:, None] - x) ** 2) + 1e-6 * jnp.eye(len(x))
    f = numpyro.sample("f", dist.MultivariateNormal(jnp.zeros(len(x)), kernel))
    numpyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.parametrize("number", [1, 90])
@pytest.mark.parametrize("model, site", [(standardized, "y"), (process_of_standardized, "f")])
def test_new_rows_that_change_what_the_model_computes_of_the_others_are_refused(model, site, number):
    x = RNG.normal(3.0, 2.0, size=30)
    posterior = RVGA(model).run({"x": x, "y": np.sin(x)}, progress_bar=False)
    with pytest.raises(ValueError, match=rf"new rows change the distribution of site '{site}'.* pass them to run as"):
        posterior.predictive(jax.random.key(0), {"x": np.full(number, 7.0)}, num_samples=10)
    assert posterior.predictive(jax.random.key(0), {"x": x}, num_samples=10)["y"].shape == (10, 30)


@pytest.mark.parametrize("number", [1, 90])
def test_predictions_are_the_same_however_many_rows_are_asked_for(number):
    def model(x, mean, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 5.0))
        noise = numpyro.sample("noise", dist.Normal(0.0, 0.1).expand([len(x)]))
        numpyro.sample("y", dist.Normal(slope * (x - mean) + noise, 0.3), obs=y)

    x = RNG.normal(3.0, 2.0, size=40)
    y = 2.0 * (x - x.mean())
    posterior = RVGA(model).run({"x": x, "y": y}, progress_bar=False, mean=x.mean())
    assert posterior.info["rows"] == "joint"
    drawn = posterior.predictive(jax.random.key(0), {"x": np.full(number, 11.0)}, num_samples=2000)["y"]
    np.testing.assert_allclose(drawn.mean(0), 2.0 * (11.0 - x.mean()), atol=0.15)


def test_new_rows_whose_outcomes_depend_on_other_outcomes_of_theirs_are_predicted():
    def model(x, first=None, second=None):
        level = numpyro.sample("level", dist.Normal(0.0, 1.0).expand([len(x)]))
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        first = numpyro.sample("first", dist.Normal(level + x, 0.1), obs=first)
        numpyro.sample("second", dist.Normal(slope * first, 0.1), obs=second)

    x = RNG.normal(size=30)
    posterior = RVGA(model).run({"x": x, "first": x, "second": -0.5 * x}, progress_bar=False)
    drawn = posterior.predictive(jax.random.key(0), {"x": np.array([4.0, 5.0])}, num_samples=4000)
    assert posterior.info["rows"] == "joint"
    np.testing.assert_allclose(drawn["second"].mean(0), [-2.0, -2.5], atol=0.1)
    np.testing.assert_allclose(np.std(drawn["first"], axis=0), np.hypot(1.0, 0.1), rtol=0.05)


def test_what_takes_rows_one_by_one_says_that_they_are_one_joint_solve():
    x = RNG.normal(size=30)
    data = {"x": x, "y": 2.0 * x}
    posterior = RVGA(standardized).run(data, progress_bar=False)
    key, reason = jax.random.key(0), "the rows of this posterior are one joint solve"
    for method in ("plugin", "linearized"):
        with pytest.raises(NotImplementedError, match=f"{reason}, .*method='{method}'"):
            posterior.predictive(key, {"x": x}, method=method)
    with pytest.raises(NotImplementedError, match=f"{reason}.* posterior.predictive"):
        metrics.nlpd(posterior, data)
    with pytest.raises(ValueError, match=f"{reason}: .* in their order"):
        posterior.khat({name: array[::-1] for name, array in data.items()})
