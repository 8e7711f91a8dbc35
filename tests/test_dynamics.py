"""Streams that drift: against a Kalman filter written out in NumPy, and what is refused."""

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, LinearDynamics, OrnsteinUhlenbeck, RandomWalk

NOISE, PRIOR_MEAN, PRIOR_SCALE = 0.7, 0.5, 2.0
MATRIX = np.array([[0.9, 0.2], [-0.1, 1.0]])
OFFSET = np.array([0.05, -0.1])
COVARIANCE = np.array([[0.04, 0.01], [0.01, 0.02]])
IDENTITY = np.eye(2)

# The dynamics, and the same as (matrix, offset, noise covariance).
CASES = {
    "random walk": (RandomWalk(0.3), (IDENTITY, np.zeros(2), 0.09 * IDENTITY)),
    "random walk of one site": (RandomWalk({"slope": 0.3}), (IDENTITY, np.zeros(2), np.diag([0.0, 0.09]))),
    "Ornstein-Uhlenbeck": (
        OrnsteinUhlenbeck(0.95),
        (0.95 * IDENTITY, 0.05 * PRIOR_MEAN * np.ones(2), (1 - 0.95**2) * PRIOR_SCALE**2 * IDENTITY),
    ),
    "general": (LinearDynamics(MATRIX, OFFSET, COVARIANCE), (MATRIX, OFFSET, COVARIANCE)),
}


def model(x, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(PRIOR_MEAN, PRIOR_SCALE))
    slope = numpyro.sample("slope", dist.Normal(PRIOR_MEAN, PRIOR_SCALE))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + slope * x, NOISE), obs=y)


def data(n=60):
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    return {"x": x, "y": np.linspace(-1, 2, n) + x * np.linspace(1, -1, n) + NOISE * rng.normal(size=n)}


def kalman_filter(rows, matrix, offset, covariance, block_size):
    mean, spread, evidence = PRIOR_MEAN * np.ones(2), PRIOR_SCALE**2 * IDENTITY, 0.0
    for start in range(0, len(rows["y"]), block_size):
        x, y = (rows[name][start : start + block_size] for name in ("x", "y"))
        mean, spread = matrix @ mean + offset, matrix @ spread @ matrix.T + covariance
        design = np.column_stack([np.ones_like(x), x])
        innovation = design @ spread @ design.T + NOISE**2 * np.eye(len(x))
        residual = y - design @ mean
        gain = np.linalg.solve(innovation, design @ spread).T
        log_det = np.linalg.slogdet(2 * np.pi * innovation)[1]
        evidence -= 0.5 * (residual @ np.linalg.solve(innovation, residual) + log_det)
        mean, spread = mean + gain @ residual, spread - gain @ design @ spread
    return mean, spread, evidence


@pytest.mark.parametrize("scheme", ["implicit", "explicit"])
@pytest.mark.parametrize("name", CASES)
def test_linear_gaussian_rows_are_filtered_as_by_kalman(name, scheme):
    dynamics, system = CASES[name]
    rows = data()
    posterior = RVGA(model, scheme=scheme, dynamics=dynamics).run(rows, progress_bar=False)
    mean, covariance, evidence = kalman_filter(rows, *system, block_size=1)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-9)
    np.testing.assert_allclose(posterior.elbo, evidence, rtol=1e-9)


def test_parameters_move_once_before_each_block_the_ragged_last_one_included():
    rows = data(n=50)
    dynamics, system = CASES["general"]
    posterior = RVGA(model, dynamics=dynamics, block_size=8).run(rows, progress_bar=False)
    mean, covariance, _ = kalman_filter(rows, *system, block_size=8)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(posterior.covariance, covariance, rtol=1e-9)


def test_functional_updates_move_the_parameters_too():
    rows = data(n=30)
    rvga = RVGA(model, dynamics=RandomWalk(0.3))
    state = rvga.init(rows)
    for start in range(0, 30, 10):
        state = rvga.update(state, {name: array[start : start + 10] for name, array in rows.items()})
    mean, _, _ = kalman_filter(rows, *CASES["random walk"][1], block_size=10)
    np.testing.assert_allclose(rvga.posterior(state).mean, mean, rtol=1e-9)


def test_a_scale_with_a_half_normal_prior_is_followed_as_it_changes():
    def volatility(y):
        scale = numpyro.sample("scale", dist.HalfNormal(2.0))
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(0.0, scale), obs=y)

    rng = np.random.default_rng(0)
    y = np.concatenate([rng.normal(scale=0.5, size=400), rng.normal(scale=3.0, size=400)])
    still = RVGA(volatility).run({"y": y}, progress_bar=False)
    moving = RVGA(volatility, dynamics=RandomWalk(0.05)).run({"y": y}, progress_bar=False)
    assert abs(float(jnp.exp(moving.mean[0])) / 3.0 - 1) < 0.15
    assert abs(float(jnp.exp(still.mean[0])) / np.sqrt((0.25 + 9) / 2) - 1) < 0.1
    with pytest.raises(NotImplementedError, match="move"):
        moving.khat({"y": y})


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: RandomWalk(-1.0), "negative"),
        (lambda: OrnsteinUhlenbeck(1.5), "between 0 and 1"),
        (lambda: RVGA(model, dynamics="random walk"), "RandomWalk"),
        (lambda: RVGA(model, dynamics=RandomWalk(0.1), shuffle=True), "order"),
        (lambda: RVGA(model, dynamics=RandomWalk(0.1), scheme="laplace"), "recursive"),
        (lambda: RVGA(model, dynamics=RandomWalk(0.1), memory=100), "memory"),
    ],
)
def test_what_cannot_be_is_refused_at_construction(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "dynamics, message",
    [
        (RandomWalk({"slop": 0.1}), "no latent site 'slop'"),
        (LinearDynamics(np.eye(3), np.zeros(2), np.eye(2)), "matrix must have shape"),
        (LinearDynamics(np.eye(2), np.zeros(2), -np.eye(2)), "positive semi-definite"),
    ],
)
def test_dynamics_that_do_not_fit_the_model_are_refused_before_any_row(dynamics, message):
    with pytest.raises(ValueError, match=message):
        RVGA(model, dynamics=dynamics).run(data(), progress_bar=False)
