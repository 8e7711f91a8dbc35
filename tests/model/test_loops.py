"""Models of which each observation ends a loop: that runs once for each draw of theta, not once more for each row."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax import lax
from jax.scipy.special import logsumexp
from numpyro.contrib.control_flow import scan
from numpyro.infer.util import potential_energy
from scipy.stats import multivariate_normal

from numpyro_rvga import RVGA
from numpyro_rvga.core.jaxprs.primitives import UNKNOWN_LENGTH, numbers_in
from numpyro_rvga.model.data.arguments import ROW
from numpyro_rvga.model.program import Program

NUM_DRAWS = 20_000


def arma(y):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    phi = numpyro.sample("phi", dist.Normal(0, 0.5))
    theta = numpyro.sample("theta", dist.Normal(0, 0.5))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))

    def step(carry, y_t):
        y_before, error_before = carry
        error = y_t - mu - phi * y_before - theta * error_before
        return (y_t, error), error

    errors = lax.scan(step, (y[0], 0.0), y[1:])[1]
    numpyro.sample("errors", dist.Normal(0, sigma), obs=errors)


def moving_average(y, in_python):
    """Each error goes on from the one before: by a loop in Python, with a site for each outcome, or by JAX's."""
    theta = numpyro.sample("theta", dist.Normal(0, 0.5).expand([2]).to_event(1))
    mu, sigma = numpyro.sample("mu", dist.Normal(0, 2)), numpyro.sample("sigma", dist.HalfNormal(2))
    if in_python:
        before, error = 0.0, 0.0
        for t in range(len(y)):
            mean = mu + theta[0] * error + theta[1] * before
            before, error = error, y[t] - mean
            numpyro.sample(f"y_{t}", dist.Normal(mean, sigma), obs=y[t])
        return

    def step(carry, y_t):
        before, error = carry
        mean = mu + theta[0] * error + theta[1] * before
        return (error, y_t - mean), mean

    numpyro.sample("y", dist.Normal(lax.scan(step, (0.0, 0.0), y)[1], sigma), obs=y)


def decay(x, y):
    rate = numpyro.sample("rate", dist.LogNormal(0, 1))
    start, end = (numpyro.sample(name, dist.Normal(0, 2)) for name in ("start", "end"))
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    numpyro.sample("y", dist.Normal(end + start * jnp.exp(-rate * (x - x.mean())), sigma), obs=y)


def ratings(first, second, won):
    """Players' ratings, which each game moves: of three parameters, which enter all games."""
    rate, scale, advantage = (numpyro.sample(name, dist.Normal(-1, 0.5)) for name in ("rate", "scale", "advantage"))

    def step(levels, game):
        i, j, result = game
        logits = jnp.exp(scale) * (levels[i] - levels[j]) + advantage
        moved = jnp.exp(rate) * (result - jax.nn.sigmoid(logits))
        return levels.at[i].add(moved).at[j].add(-moved), logits

    logits = lax.scan(step, jnp.zeros(6), (first, second, won))[1]
    numpyro.sample("won", dist.Bernoulli(logits=logits), obs=won)


@pytest.fixture(scope="module")
def data():
    noise = np.random.default_rng(0).normal(size=120)
    y = np.zeros(120, np.float32)
    for t in range(1, 120):
        y[t] = 0.5 + 0.6 * y[t - 1] + 0.3 * noise[t - 1] + noise[t]
    return {"y": y}


def test_sites_of_a_loop_in_python_are_one_term(data):
    y = data["y"][:15]
    one, other = (RVGA(moving_average).run({"y": y}, in_python=k, progress_bar=False) for k in (True, False))
    assert len(one.program.terms) < 5
    np.testing.assert_allclose(one.mean, other.mean, atol=0.02)
    np.testing.assert_allclose(one.covariance, other.covariance, atol=0.02)
    assert set(one.program.likelihood_sites) == {f"y_{t}" for t in range(15)}


@pytest.fixture(scope="module")
def games():
    rng = np.random.default_rng(2)
    first, levels = rng.integers(0, 6, 100), rng.normal(size=6)
    second = (first + rng.integers(1, 6, 100)) % 6
    return {"first": first, "second": second, "won": (levels[first] - levels[second] > rng.logistic(size=100)) * 1.0}


@pytest.mark.parametrize("model", [arma, ratings])
def test_the_best_gaussian_of_a_loop_is_where_the_models_own_gradients_vanish(model, data, games):
    """E[grad log p] = 0 and, by Stein's identity, E[(theta - m) grad log p^T] = -I, at draws of q, by NumPyro."""
    data = data if model is arma else games
    posterior = RVGA(model).run(data, progress_bar=False)
    assert posterior.info["converged"]
    root = np.linalg.cholesky(posterior.covariance)
    z = np.random.default_rng(1).normal(size=(NUM_DRAWS // 2, len(root)))
    z = np.concatenate([z, -z]).astype(np.float32)
    unravel = posterior.program.layout.unravel

    def energy(theta):
        return potential_energy(model, (), data, unravel(theta))

    gradients = -np.asarray(jax.jit(jax.vmap(jax.grad(energy)))(posterior.mean + z @ root.T)) @ root
    assert np.abs(gradients.mean(axis=0)).max() < 0.02
    assert np.abs(z.T @ gradients / len(z) + np.eye(len(root))).max() < 0.05


GRID = np.linspace(-3.0, 3.0, 400)


def seen_from_traps(y, grid):
    """Where each animal lives is summed out over a grid: all rows take the same curves."""
    level, slope, height, width = (numpyro.sample(n, dist.Normal(0.0, 0.5)) for n in ("a", "b", "c", "d"))
    distances = grid[:, None] - jnp.arange(-1.0, 2.0)
    chance = jnp.exp(-jnp.exp(height) * jnp.exp(-0.5 * (distances / jnp.exp(width)) ** 2))
    curves = y @ jnp.log1p(-chance).T + (4.0 - y) @ jnp.log(chance).T
    numpyro.factor("seen", logsumexp(curves + jax.nn.log_softmax(level * grid + slope * grid**2), axis=1).sum())


def regression_of_own_numbers(y, grid):
    """Of each row's own numbers alone."""
    level, slope, height, width = (numpyro.sample(n, dist.Normal(0.0, 0.5)) for n in ("a", "b", "c", "d"))
    curves = y * jnp.exp(level + slope * y) + jnp.exp(height) * jnp.cosh(jnp.exp(width) * y)
    numpyro.factor("seen", -jnp.log(curves**2 + 1.0).sum())


@pytest.mark.parametrize("model, by_draws", [(seen_from_traps, True), (regression_of_own_numbers, False)])
def test_rows_are_taken_together_where_most_of_the_work_is_theirs_in_common(model, by_draws):
    rows = {"y": np.random.default_rng(0).integers(0, 3, (60, 3)).astype(float)}
    program = Program(model, rows, {"grid": GRID}, all_rows=rows, by_draws=True)
    assert [terms.by_draws for terms in program.terms] == [by_draws]


def test_rows_that_are_taken_together_are_at_the_best_gaussian():
    """Where the mean of the gradient of the log density is zero, and the precision the mean of its negative Hessian."""
    rows = {"y": np.random.default_rng(0).integers(0, 3, (60, 3)).astype(float)}
    posterior = RVGA(seen_from_traps).run(rows, grid=GRID, progress_bar=False)
    theta, root = posterior.sample_unconstrained(jax.random.key(0), (2000,)), posterior.scale

    def log_joint(x):
        sites = dict(zip(posterior.site_names, x))
        return -potential_energy(seen_from_traps, (rows["y"], GRID), {}, sites)

    def derivatives(x):
        return jax.grad(log_joint)(x) @ root, root.T @ jax.hessian(log_joint)(x) @ root

    slopes, curvatures = jax.jit(lambda draws: lax.map(derivatives, draws, batch_size=100))(theta)
    errors = np.array(slopes).std(0) / np.sqrt(len(theta))
    assert np.all(np.abs(np.mean(slopes, axis=0)) < 5 * errors)
    np.testing.assert_allclose(np.mean(curvatures, axis=0), -np.eye(4), atol=0.1)


@pytest.mark.parametrize("model, by_draws, count", [(arma, True, 1), (ratings, False, 1), (decay, False, 120)])
def test_only_terms_that_repeat_a_loop_are_taken_together(model, by_draws, count, data, games):
    x = np.linspace(0, 3, 120, dtype=np.float32)
    rows = {arma: data, ratings: games, decay: data | {"x": x}}[model]
    program = Program(model, rows, {}, whole=True, by_draws=True)
    (terms,) = program.terms
    assert terms.by_draws == by_draws
    assert len(program.inputs(rows)[ROW]) * terms.num_elements == count


def test_loops_count_as_often_as_they_run():
    def seven(x):
        return lax.scan(lambda carry, _: (2 * carry, None), x, None, length=7)[0]

    def until(x):
        return lax.while_loop(lambda x: x.sum() < 9, lambda x: 2 * x, x)

    x = jnp.ones(3)
    assert numbers_in(jax.make_jaxpr(seven)(x).jaxpr) == 7 * 3 + 3
    assert numbers_in(jax.make_jaxpr(until)(x).jaxpr) == UNKNOWN_LENGTH * (2 + 3) + 3


@pytest.fixture(scope="module")
def level_data():
    rng = np.random.default_rng(3)
    return {"y": (np.cumsum(0.3 * rng.normal(size=30)) + 0.5 * rng.normal(size=30)).astype(np.float32)}


def scales():
    drift, noise = (numpyro.sample(name, dist.LogNormal(-1, 0.3)) for name in ("drift", "noise"))
    return drift, noise, numpyro.sample("start", dist.Normal(0, 1))


def levels_by_scan(y):
    drift, noise, start = scales()

    def step(before, y_t):
        level = numpyro.sample("level", dist.Normal(before, drift))
        numpyro.sample("y", dist.Normal(level, noise), obs=y_t)
        return level, None

    scan(step, start, y)


def levels_by_arrays(y):
    drift, noise, start = scales()
    level = numpyro.sample("level", dist.ImproperUniform(dist.constraints.real, (), (30,)))
    before = jnp.concatenate([start[None], level[:-1]])
    numpyro.factor("walk", dist.Normal(before, drift).log_prob(level))
    numpyro.sample("y", dist.Normal(level, noise), obs=y)


def test_a_state_space_model_by_scan_is_read_as_the_same_by_arrays(level_data):
    by_scan = RVGA(levels_by_scan).run(level_data, progress_bar=False)
    assert [t.num_predictors for t in by_scan.program.prior.terms if t.site == "level"] == [2]
    by_arrays = RVGA(levels_by_arrays).run(level_data, progress_bar=False)
    assert by_scan.elbo == pytest.approx(by_arrays.elbo, abs=1e-3)
    for name, value in by_arrays.sample_posterior(jax.random.key(0), (4000,)).items():
        draws = by_scan.sample_posterior(jax.random.key(1), (4000,))[name]
        np.testing.assert_allclose(draws.mean(axis=0), value.mean(axis=0), atol=0.05)


PERIOD, DRIFT, NOISE = 4, 0.3, 0.5
TURN = jnp.eye(PERIOD - 1, k=-1).at[0].set(-1.0)


def seasons_by_scan(y):
    """A level, and a season's effects, of which each is minus the sum of those before it, and a shock."""
    slope = numpyro.sample("slope", dist.Normal(0, 1))

    def step(carry, y_t):
        level, season = carry
        season = TURN @ season
        effect = numpyro.sample("effect", dist.Normal(season[0], DRIFT))
        season, level = season.at[0].set(effect), level + slope
        numpyro.sample("y", dist.Normal(level + effect, NOISE), obs=y_t)
        return (level, season), None

    scan(step, (0.0, jnp.zeros(PERIOD - 1)), y)


def test_seasons_and_trends_of_a_scan_are_affine_in_what_they_add_up(level_data):
    """All is normal: against the multivariate normal of the outcomes."""
    y = level_data["y"].astype(float)
    posterior = RVGA(seasons_by_scan).run({"y": y}, progress_bar=False)
    count = len(y)
    shocks = np.zeros((count, count))  # of the effects in independent shocks: each is minus the sum of three, and one
    for t in range(count):
        shocks[t, t] = DRIFT
        shocks[t] -= shocks[max(t - PERIOD + 1, 0) : t].sum(axis=0)
    time = np.arange(1, count + 1.0)
    covariance = shocks @ shocks.T + np.outer(time, time) + NOISE**2 * np.eye(count)
    assert posterior.elbo == pytest.approx(multivariate_normal(np.zeros(count), covariance).logpdf(y), abs=1e-3)
    slope = time @ np.linalg.solve(covariance, y)
    assert posterior.median()["slope"] == pytest.approx(slope, abs=1e-3)
