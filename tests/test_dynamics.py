"""Streams that drift: against a Kalman filter written out in NumPy, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA, LinearDynamics, OrnsteinUhlenbeck, Posterior, RandomWalk

NOISE, PRIOR_MEAN, PRIOR_SCALE = 0.7, 0.5, 2.0
MATRIX = np.array([[0.9, 0.2], [-0.1, 1.0]])
OFFSET = np.array([0.05, -0.1])
COVARIANCE = np.array([[0.04, 0.01], [0.01, 0.02]])
IDENTITY, ZERO = np.eye(2), np.zeros(2)


def level_and_trend(xp):
    """The slope is the speed of the intercept: an integrated random walk, whose offset is a constant acceleration."""
    return (
        lambda dt: xp.array([[1.0, dt], [0.0, 1.0]]),
        lambda dt: 0.01 * xp.array([dt**2 / 2, dt]),
        lambda dt: 0.04 * xp.array([[dt**3 / 3, dt**2 / 2], [dt**2 / 2, dt]]),
    )


# The dynamics, and the same as functions of the elapsed time: matrix, offset, noise covariance.
CASES = {
    "random walk": (lambda time: RandomWalk(0.3, time), lambda dt: (IDENTITY, ZERO, 0.09 * dt * IDENTITY)),
    "random walk of one site": (
        lambda time: RandomWalk({"slope": 0.3}, time),
        lambda dt: (IDENTITY, ZERO, np.diag([0.0, 0.09 * dt])),
    ),
    "Ornstein-Uhlenbeck": (
        lambda time: OrnsteinUhlenbeck(0.95, time),
        lambda dt: (
            0.95**dt * IDENTITY,
            (1 - 0.95**dt) * PRIOR_MEAN * np.ones(2),
            (1 - 0.95 ** (2 * dt)) * PRIOR_SCALE**2 * IDENTITY,
        ),
    ),
    "general": (
        lambda time: LinearDynamics(MATRIX, OFFSET, COVARIANCE),
        lambda dt: (MATRIX, OFFSET, COVARIANCE),
    ),
    "level and trend": (
        lambda time: LinearDynamics(*level_and_trend(jnp), time=time),
        lambda dt: tuple(f(dt) for f in level_and_trend(np)),
    ),
}
TIMED = [name for name in CASES if name != "general"]


def model(x, y=None, t=None):
    intercept = numpyro.sample("intercept", dist.Normal(PRIOR_MEAN, PRIOR_SCALE))
    slope = numpyro.sample("slope", dist.Normal(PRIOR_MEAN, PRIOR_SCALE))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + slope * x, NOISE), obs=y)


def data(n=40, gaps=None):
    """:param gaps: the times between rows, again and again; None: there are no time stamps."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=n)
    rows = {"x": x, "y": np.linspace(-1, 2, n) + x * np.linspace(1, -1, n) + NOISE * rng.normal(size=n)}
    return rows if gaps is None else rows | {"t": 7.0 + np.cumsum(np.resize(gaps, n))}


GAPS = [0.4, 0.0, 0.0, 2.5, 1.0, 31.0, 0.01, 0.0]  # several rows at one time, and a long gap


def kalman_filter(rows, system, block_size=1):
    """Without time stamps, the parameters move by one unit of time before each block; with them, the prior is of the
    time of the first block."""
    mean, spread, evidence, last = PRIOR_MEAN * np.ones(2), PRIOR_SCALE**2 * IDENTITY, 0.0, None
    for start in range(0, len(rows["y"]), block_size):
        x, y = (rows[name][start : start + block_size] for name in ("x", "y"))
        elapsed = 1.0
        if "t" in rows:
            now = rows["t"][start : start + block_size][-1]
            elapsed, last = 0.0 if last is None else now - last, now
        if elapsed > 0:
            matrix, offset, covariance = system(elapsed)
            mean, spread = matrix @ mean + offset, matrix @ spread @ matrix.T + covariance
        design = np.column_stack([np.ones_like(x), x])
        innovation = design @ spread @ design.T + NOISE**2 * np.eye(len(x))
        residual = y - design @ mean
        gain = np.linalg.solve(innovation, design @ spread).T
        log_det = np.linalg.slogdet(2 * np.pi * innovation)[1]
        evidence -= 0.5 * (residual @ np.linalg.solve(innovation, residual) + log_det)
        mean, spread = mean + gain @ residual, spread - gain @ design @ spread
    return mean, spread, evidence


def run(method, rows, **options):
    return method.run(rows, progress_bar=False, **options)


def assert_filtered(posterior, expected, tolerance=1e-9):
    np.testing.assert_allclose(posterior.mean, expected[0], rtol=tolerance)
    np.testing.assert_allclose(posterior.covariance, expected[1], rtol=tolerance)


@functools.cache
def method_of(name, time=None, method=RVGA, **options):
    """One for all tests: they share what is compiled."""
    return method(model, dynamics=CASES[name][0](time), **options)


@pytest.mark.parametrize("name, time, scheme", [("general", None, "explicit"), *[(n, "t", "implicit") for n in TIMED]])
def test_linear_gaussian_rows_are_filtered_as_by_kalman(name, time, scheme):
    rows = data(gaps=None if time is None else GAPS)
    posterior = run(method_of(name, time, scheme=scheme), rows)
    expected = kalman_filter(rows, CASES[name][1])
    assert_filtered(posterior, expected)
    np.testing.assert_allclose(posterior.elbo, expected[2], rtol=1e-9)
    assert posterior.info.get("time") == (None if time is None else rows["t"][-1])


@pytest.mark.parametrize("family, name", [("full", "level and trend"), ("low-rank", "Ornstein-Uhlenbeck")])
def test_every_family_moves_by_time_stamps(family, name):
    rows = data(gaps=GAPS)
    found = run(method_of(name, "t", BONG, family=family, rank=2), rows)
    assert_filtered(found, kalman_filter(rows, CASES[name][1]))


def test_gaps_of_one_are_updates_without_time_stamps():
    rows = data(gaps=[1.0])
    found = run(method_of("Ornstein-Uhlenbeck", "t", scheme="implicit"), rows)
    assert_filtered(found, kalman_filter({name: rows[name] for name in "xy"}, CASES["Ornstein-Uhlenbeck"][1]))


def test_rows_of_one_time_are_one_block_however_they_are_cut():
    rows = data(gaps=[3.0, 0.0, 0.0, 0.0, 0.0])
    expected = kalman_filter(rows, CASES["level and trend"][1], block_size=5)
    assert_filtered(run(method_of("level and trend", "t", scheme="implicit"), rows), expected)
    assert_filtered(run(method_of("level and trend", "t", block_size=5), rows), expected)


def test_a_block_is_of_the_time_of_its_last_row():
    rows = data(gaps=GAPS)
    posterior = run(method_of("level and trend", "t", block_size=5), rows)
    assert_filtered(posterior, kalman_filter(rows, CASES["level and trend"][1], block_size=5))


def test_parameters_move_once_before_each_block_the_ragged_last_one_included():
    rows = data(n=50)
    posterior = run(method_of("general", block_size=8), rows)
    assert_filtered(posterior, kalman_filter(rows, CASES["general"][1], block_size=8))


@pytest.mark.parametrize("method, options", [(RVGA, {"scheme": "implicit"}), (BONG, {"family": "full", "rank": 2})])
def test_the_time_of_the_last_row_outlives_a_run_and_a_file(method, options, tmp_path):
    rows, fit = data(gaps=GAPS), method_of("level and trend", "t", method, **options)
    expected = kalman_filter(rows, CASES["level and trend"][1])
    halves = [{name: array[part] for name, array in rows.items()} for part in (slice(20), slice(20, None))]
    early = run(fit, halves[0])
    early.save(tmp_path / "early")
    stored = Posterior.load(tmp_path / "early", model)
    for late in (early.update(halves[1], progress_bar=False), run(fit, halves[1], init=stored)):
        assert_filtered(late, expected)


@pytest.mark.parametrize("method, options", [(RVGA, {"scheme": "implicit"}), (BONG, {"family": "full", "rank": 2})])
def test_time_that_goes_back_names_the_row_which_may_be_skipped(method, options):
    rows, fit = data(gaps=GAPS), method_of("level and trend", "t", method, **options)
    rows["t"][20] = rows["t"][17] - 0.5
    for source in (rows, ({name: array[i : i + 20] for name, array in rows.items()} for i in range(0, 40, 20))):
        with pytest.raises(ValueError, match=r"row 20: its time stamp t=.* comes before .* sort the rows by 't'"):
            run(fit, source)
    posterior = run(fit, rows, on_bad_row="skip")
    assert posterior.info["skipped_rows"].tolist() == [20]
    others = {name: np.delete(array, 20) for name, array in rows.items()}
    assert_filtered(posterior, kalman_filter(others, CASES["level and trend"][1]))


def test_functional_updates_go_by_time_stamps_and_leave_the_state_as_it_is_where_they_go_back():
    rows, fit = data(gaps=GAPS), method_of("level and trend", "t", BONG, family="full", rank=2)
    update = jax.jit(fit.update)
    halves = [{name: array[part] for name, array in rows.items()} for part in (slice(20), slice(20, None))]
    state = update(update(fit.init(rows), halves[0]), halves[1])
    assert_filtered(fit.posterior(state), kalman_filter(rows, CASES["level and trend"][1]))
    assert float(state.time) == rows["t"][-1]
    for before, after in zip(jax.tree.leaves(state), jax.tree.leaves(update(state, halves[0]))):
        assert jnp.all(before == after)


def test_time_stamps_with_more_digits_than_the_precision_are_refused():
    rows = data(gaps=GAPS)
    since_1970 = rows | {"t": (rows["t"] + 1.76e9).round().astype(np.int32)}
    with jax.enable_x64(False), pytest.raises(ValueError, match="'t' have more digits than float32"):
        run(method_of("random walk", "t", scheme="implicit"), since_1970)


def test_functional_updates_move_the_parameters_too():
    rows = data(n=30)
    rvga = method_of("random walk")
    state = rvga.init(rows)
    for start in range(0, 30, 10):
        state = rvga.update(state, {name: array[start : start + 10] for name, array in rows.items()})
    assert_filtered(rvga.posterior(state), kalman_filter(rows, CASES["random walk"][1], block_size=10))


def test_a_posterior_of_a_run_without_dynamics_moves_on_as_a_gaussian():
    """Its prior is not Gaussian, and is no more part of what follows than of a Kalman filter that starts there."""

    def heavy_tailed(x, y=None):
        slope = numpyro.sample("slope", dist.StudentT(3.0, 0.0, 1.0))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(slope * x, NOISE), obs=y)

    rows = data(30)
    first, later = ({name: array[part] for name, array in rows.items()} for part in (slice(5), slice(5, 30)))
    before = RVGA(heavy_tailed).run(first, progress_bar=False)
    after = RVGA(heavy_tailed, dynamics=RandomWalk(0.3), block_size=1).run(later, init=before, progress_bar=False)
    mean, variance = float(before.mean[0]), float(before.covariance[0, 0])
    for x, y in zip(later["x"], later["y"]):
        variance += 0.3**2
        gain = variance * x / (x * variance * x + NOISE**2)
        mean, variance = mean + gain * (y - x * mean), variance * (1 - gain * x)
    np.testing.assert_allclose(after.mean, [mean], rtol=1e-9)
    np.testing.assert_allclose(after.covariance, [[variance]], rtol=1e-9)


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
        (lambda: LinearDynamics(MATRIX, OFFSET, COVARIANCE, time="t"), "matrix must be a function of the elapsed time"),
        (lambda: LinearDynamics(*level_and_trend(jnp)), "matrix must be an array"),
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
        (
            RandomWalk({"slope": np.ones(3)}),
            r"scale of site 'slope' must be one number or have shape \(\), not \(3,\)",
        ),
        (RandomWalk(np.ones(3)), r"scale of a random walk must be one number or have shape \(2,\), not \(3,\)"),
        (LinearDynamics(np.eye(3), np.zeros(2), np.eye(2)), "matrix must have shape"),
        (LinearDynamics(np.eye(2), np.zeros(2), -np.eye(2)), "positive semi-definite"),
        (LinearDynamics(*level_and_trend(jnp)[:2], lambda dt: -dt * np.eye(2), time="t"), "positive semi-definite"),
        (RandomWalk(0.1, time="when"), "time='when' must be an array of the data"),
    ],
)
def test_dynamics_that_do_not_fit_the_model_are_refused_before_any_row(dynamics, message):
    with pytest.raises(ValueError, match=message):
        run(RVGA(model, dynamics=dynamics), data(gaps=GAPS))
