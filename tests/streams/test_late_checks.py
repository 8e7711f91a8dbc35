"""BONG with diagonals checks whether q is a Gaussian after many rows, not after each: nothing else may come of it."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RandomWalk
from numpyro_rvga.engines.online import OnlineUpdates

SCALE, NOISE, SIZE = 0.5, 0.7, 3
HUGE = 1e200  # its square is infinite, and leaves a variance of zero
LATE, EARLY = "unchecked_stream", "stream"


def linear(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, SCALE).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, NOISE), obs=y)


def data(n, huge=()):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(n, SIZE)), rng.normal(size=n)
    X[list(huge), 1] = HUGE
    return {"X": X, "y": y}


def by_the_equations(rows, block_size):
    """Mean and variances: 1 / s'^2 = 1 / s^2 + sum of x^2 / r^2, mu' = mu + s'^2 sum of x (y - x . mu) / r^2."""
    mean, precision = np.zeros(SIZE), np.full(SIZE, SCALE**-2)
    for start in range(0, len(rows["y"]), block_size):
        x, y = rows["X"][start : start + block_size], rows["y"][start : start + block_size]
        precision = precision + np.sum(x**2, axis=0) / NOISE**2
        mean = mean + (y - x @ mean) @ x / NOISE**2 / precision
    return mean, 1 / precision


@pytest.fixture
def calls(monkeypatch):
    """Which of the two ways blocks are taken in, in order."""
    made = []
    begin = OnlineUpdates.__init__

    def spied(self, *arguments, **keywords):
        begin(self, *arguments, **keywords)
        for name in (LATE, EARLY):
            taken = getattr(self, name)
            setattr(self, name, lambda *a, name=name, taken=taken, **k: (made.append(name), taken(*a, **k))[1])

    monkeypatch.setattr(OnlineUpdates, "__init__", spied)
    return made


@pytest.mark.parametrize("block_size, every", [(1, None), (1, 7), (4, None), (4, 8)])
def test_blocks_that_are_checked_late_follow_the_equations(calls, block_size, every):
    rows = data(22)
    bong = BONG(linear, family="diagonal", shuffle=False, block_size=block_size)
    callback = None if every is None else (lambda posterior: posterior.num_rows)
    posterior = bong.run(rows, progress_bar=False, callback=callback, callback_every=every)
    mean, variance = by_the_equations(rows, block_size)
    np.testing.assert_allclose(posterior.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(posterior.gaussian.variance, variance, rtol=1e-12)
    assert posterior.num_rows == 22 and set(calls) == {LATE}


@pytest.mark.parametrize("block_size, first", [(1, 9), (4, 8)])
@pytest.mark.parametrize("every", [None, 4])
def test_rows_that_leave_no_gaussian_are_named_and_the_last_good_state_kept(calls, block_size, first, every):
    """Whatever comes after them, in the same piece or in the next ones, which are under way by then."""
    rows = data(40, huge=[9])
    bong = BONG(linear, family="diagonal", shuffle=False, block_size=block_size)
    named = f"row {first} " if block_size == 1 else f"rows {first} to {first + 3} "
    with pytest.raises(ValueError, match=f"{named}.*leaves no finite Gaussian"):
        bong.run(rows, progress_bar=False, callback=lambda posterior: None, callback_every=every)
    mean, variance = by_the_equations({name: array[:first] for name, array in rows.items()}, block_size)
    assert int(bong.state.num_rows) == first and EARLY in calls
    np.testing.assert_allclose(bong.state.gaussian.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(bong.state.gaussian.variance, variance, rtol=1e-12)


@pytest.mark.parametrize("block_size", [1, 4])
def test_rows_that_leave_no_gaussian_may_be_left_out(block_size):
    rows, huge = data(40, huge=[9, 10, 31]), [9, 10, 31]
    bong = BONG(linear, family="diagonal", shuffle=False, block_size=block_size)
    posterior = bong.run(rows, progress_bar=False, on_bad_row="skip")
    np.testing.assert_array_equal(posterior.info["skipped_rows"], huge)
    kept = {name: np.delete(array, huge, axis=0) for name, array in rows.items()}
    np.testing.assert_allclose(posterior.mean, by_the_equations(kept, block_size)[0], rtol=1e-12)


@pytest.mark.parametrize(
    "options",
    [
        {"parameterization": "moment"},
        {"projection": "inclusive"},
        {"hessian": "mc-hess", "num_samples": 4},
        {"rule": "blr", "learning_rate": 0.5},
        {"dynamics": RandomWalk(0.1)},
        {"family": "low-rank", "rank": 2},
    ],
    ids=str,
)
def test_where_a_failure_could_be_hidden_by_later_rows_each_is_checked(calls, options):
    """Noise makes a variance of zero positive again, and so may steps whose curvature is of any sign."""
    bong = BONG(linear, shuffle=False, **{"family": "diagonal"} | options)
    bong.run(data(12), progress_bar=False)
    assert set(calls) == {EARLY}
    with pytest.raises(ValueError, match=r"row 5 .*leaves no finite Gaussian"):
        bong.run(data(12, huge=[5]), progress_bar=False)


BROKEN = [("mean", np.nan), ("mean", np.inf), ("variance", np.nan), ("variance", np.inf), ("variance", 0.0)]


@pytest.mark.parametrize("entry, value", BROKEN)
def test_what_is_no_gaussian_stays_none_through_later_rows(entry, value):
    rows = data(30)
    bong = BONG(linear, family="diagonal", shuffle=False)
    state = bong.init(rows)
    broken = {entry: getattr(state.gaussian, entry).at[1].set(value)}
    gaussian = type(state.gaussian)(**{"mean": state.gaussian.mean, "variance": state.gaussian.variance} | broken)
    taken = jax.device_put((rows, np.ones(30, np.float32)))
    after, report = bong.online.unchecked_stream(state._replace(gaussian=gaussian), *taken, block_size=1)
    assert not bool(after.gaussian.is_valid()) and not np.any(report.ok)
    assert bool(jnp.all(bong.online.unchecked_stream(state, *taken, block_size=1)[1].ok))
