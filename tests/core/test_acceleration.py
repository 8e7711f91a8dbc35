"""Anderson's acceleration: exact for affine maps, and what it saves in searches that converge slowly."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import FixedPointVI
from numpyro_rvga.core.matrices.precisions import Dense, WholeMatrix
from numpyro_rvga.core.updates.acceleration import accelerated, visited
from numpyro_rvga.core.updates.maximize import init
from numpyro_rvga.core.updates.search import Search, Settings
from numpyro_rvga.engines.effort import Effort

PRECISION = np.array([[3.0, 1.0], [1.0, 2.0]])
LINEAR = np.array([1.0, -2.0])
SHRINKING = np.diag([0.9, -0.6])


def evaluated(precision, linear):
    """A state at natural parameters, whose full step leads to an affine function of these with a known fixed point."""
    target = PRECISION + 0.8 * (precision - PRECISION)
    mean = np.linalg.solve(precision, linear)
    gradient = LINEAR + SHRINKING @ (linear - LINEAR) - target @ mean
    state = init(Search(Settings(1e-8, 100), log_concave=True), Dense(None), jnp.asarray(mean), jnp.asarray(precision))
    full_step = state.evaluation.target._replace(precision=jnp.asarray(target))
    evaluation = state.evaluation._replace(target=full_step, gradient=jnp.asarray(gradient))
    return state._replace(evaluation=evaluation, step=jnp.ones(()))


def test_an_affine_map_is_solved_as_soon_as_all_its_directions_are_known():
    precision, linear, history = np.eye(2), np.zeros(2), []
    for _ in range(4):  # one direction of precisions, and two of means
        state = evaluated(precision, linear)
        history.append(visited(state, WholeMatrix()))
        state = accelerated(state, history, WholeMatrix()) or state
        precision = np.asarray(state.evaluation.target.precision)
        linear = precision @ np.asarray(state.mean) + np.asarray(state.evaluation.gradient)
    np.testing.assert_allclose(precision, PRECISION, atol=1e-8)
    np.testing.assert_allclose(linear, LINEAR, atol=1e-8)


def test_one_place_alone_gives_nothing_to_combine():
    state = evaluated(np.eye(2), np.zeros(2))
    assert accelerated(state, [visited(state, WholeMatrix())], WholeMatrix()) is None


def actors(actor, treatment, pulled):
    scale = numpyro.sample("scale", dist.Exponential(1))
    effect_scale = numpyro.sample("effect_scale", dist.Exponential(1))
    with numpyro.plate("actors", 7):
        z = numpyro.sample("z", dist.Normal(0, 1))
    with numpyro.plate("treatments", 4):
        effect = numpyro.sample("effect", dist.Normal(0, 1))
    logits = numpyro.sample("a", dist.Normal(0, 1.5)) + scale * z[actor] + effect_scale * effect[treatment]
    with numpyro.plate("rows", len(actor)):
        numpyro.sample("pulled", dist.Bernoulli(logits=logits), obs=pulled)


@pytest.mark.parametrize("double", [False, True], ids=["float32", "float64"])
def test_scales_and_what_they_scale_take_fewer_steps_to_a_better_gaussian(double, monkeypatch):
    rng = np.random.default_rng(0)
    actor, treatment = np.repeat(np.arange(7), 24), np.tile(np.arange(4), 42)
    logits = 0.4 + 1.5 * rng.normal(size=7)[actor] + 0.4 * rng.normal(size=4)[treatment]
    data = {"actor": actor, "treatment": treatment, "pulled": (rng.random(168) < 1 / (1 + np.exp(-logits))).astype(int)}
    with jax.enable_x64(double), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # where rounding stops the search
        monkeypatch.setattr(Effort, "may_end_by_few_nodes", lambda self, num_rows: False)  # in fewer steps
        found = FixedPointVI(actors).run(data, progress_bar=False)
        monkeypatch.setattr("numpyro_rvga.core.updates.drivers.NEAR", -1.0)
        plain = FixedPointVI(actors, max_iterations=2000).run(data, progress_bar=False)
    assert found.info["iterations"] < 0.7 * plain.info["iterations"]
    assert found.info["largest_decrement"] < plain.info["largest_decrement"]
    assert found.elbo > plain.elbo - 1e-3
    deviation = np.sqrt(np.diagonal(plain.covariance))
    assert np.max(np.abs(found.mean - plain.mean) / deviation) < 0.1


def counts_of_walk(y):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    level = numpyro.sample("level", dist.GaussianRandomWalk(scale, len(y)))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(jnp.exp(level)), obs=y)


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
def test_steps_after_which_the_mean_is_solved_for_are_combined_too(double, monkeypatch):
    rng = np.random.default_rng(0)
    data = {"y": rng.poisson(np.exp(0.2 * np.cumsum(rng.normal(size=60)))).astype(float)}
    with jax.enable_x64(double):
        fast = FixedPointVI(counts_of_walk).run(data, progress_bar=False)
        monkeypatch.setattr("numpyro_rvga.core.updates.drivers.NEAR", -1.0)
        slow = FixedPointVI(counts_of_walk).run(data, progress_bar=False)
    assert fast.info["iterations"] < 0.6 * slow.info["iterations"]
    assert fast.elbo > slow.elbo - (1e-6 if double else 1e-3)
