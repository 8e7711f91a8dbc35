"""The Pareto k, the moves of moments, and verdicts, of Gaussians that are off by known amounts."""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gaussian_posteriors import exact_regression, posterior_of, regression_data

from numpyro_rvga import RVGA
from numpyro_rvga.results import log_densities
from numpyro_rvga.results.khat import Draws, Evidence, verdict
from numpyro_rvga.results.log_densities import LogDensities


@pytest.fixture(scope="module")
def data():
    return regression_data()


def test_khat_of_other_rows_than_were_absorbed_is_refused(data):
    few = {name: array[:7] for name, array in data.items()}
    with pytest.raises(ValueError, match=r"data has 7 rows, and the posterior has absorbed \d+"):
        exact_regression(data, 1.0).khat(few)


def test_an_exact_q_is_good_and_needs_no_arviz(data, monkeypatch):
    monkeypatch.setitem(sys.modules, "arviz", None)
    result = exact_regression(data).khat(data)
    assert result.khat < 0.3
    assert result.verdict.startswith("good")
    assert max(result.moves.values()) < 0.01


@pytest.mark.parametrize("variance_share", [0.6, 0.2])
def test_khat_of_a_too_narrow_q_is_the_tail_index_of_its_ratios(data, variance_share):
    """With q's covariance s times the exact one, ratios exceed t with probability t^(-1/(1 - s)), about."""
    result = exact_regression(data, np.sqrt(variance_share)).khat(data, num_samples=40_000)
    assert result.khat == pytest.approx(1 - variance_share, abs=0.25)


@pytest.mark.parametrize("inflation, grade", [(0.95, "good"), (1.06, "good"), (0.75, "doubtful"), (1.4, "doubtful")])
def test_moves_are_by_how_much_standard_deviations_are_off(data, inflation, grade):
    result = exact_regression(data, inflation).khat(data)
    for move in result.moves.values():
        assert move == pytest.approx(abs(np.log(inflation)), abs=0.04)
    assert result.verdict.startswith(grade)


def test_moves_name_the_site_whose_mean_is_off():
    def model(y=None):
        first = numpyro.sample("first", dist.Normal(0.0, 1.0))
        second = numpyro.sample("second", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", 20):
            numpyro.sample("y", dist.Normal(jnp.stack([first, second], -1), 1.0).to_event(1), obs=y)

    y = np.random.default_rng(0).normal(size=(20, 2))
    mean, sd = y.sum(0) / 21, 1 / np.sqrt(21)
    posterior = posterior_of(model, {"y": y}, mean + np.array([0.3 * sd, 0.0]), sd * np.eye(2))
    result = posterior.khat({"y": y})
    assert result.moves["first"] == pytest.approx(0.3, abs=0.03)
    assert result.moves["second"] < 0.03
    assert "'first' by 0." in result.verdict and "second" not in result.verdict
    assert result.verdict.startswith("doubtful") and "nuts()" in result.verdict


def test_sums_are_off_though_their_parts_are_right():
    """x and y have a correlation of -0.6 given their noisy sum, and q has their marginals alone. Their sum's standard
    deviation is off by a known factor; so are monotone functions of it, in normal scores. A constant does not move."""

    def model(total):
        x, y = (numpyro.sample(name, dist.Normal(0.0, 1.0)) for name in "xy")
        numpyro.deterministic("sum", jnp.stack([x + y, jnp.exp(9 * (x + y)), 0.0 * x + 4.0]))
        numpyro.deterministic("difference", x - y)
        numpyro.sample("total", dist.Normal((x + y) * jnp.ones(1), np.sqrt(2 / 3)), obs=total)

    covariance = np.eye(2) - 1 / (2 + 2 / 3)  # 0.625 and -0.375
    posterior = posterior_of(model, {"total": np.zeros(1)}, np.zeros(2), np.diag(np.sqrt(np.diagonal(covariance))))
    result = posterior.khat({"total": np.zeros(1)})
    assert max(result.moves["x"], result.moves["y"]) < 0.03
    assert result.moves["sum"] == pytest.approx(-0.5 * np.log(1 - 0.6), abs=0.05)
    assert result.moves["difference"] == pytest.approx(0.5 * np.log(1 + 0.6), abs=0.05)
    assert result.verdict.startswith("doubtful") and "'sum' by 0.4" in result.verdict


def test_tails_outside_of_q_are_seen():
    """The posterior is Student's t with 3 degrees of freedom: its variance is three times that of its center."""

    def model(x):
        z = numpyro.sample("z", dist.StudentT(3.0, 0.0, 1.0))
        numpyro.sample("x", dist.Normal(0.0 * z, 1.0), obs=x)

    x = {"x": np.zeros(1)}
    result = posterior_of(model, x, np.zeros(1), np.eye(1)).khat(x)
    assert 0.2 < result.moves["z"] < 0.5 * np.log(3) + 0.1
    assert not result.verdict.startswith("good")


def test_false_alarms_are_rare(data):
    posterior = exact_regression(data, 1.03)
    verdicts = [posterior.khat(data, rng_key=jax.random.key(seed), num_samples=2000).verdict for seed in range(20)]
    assert all(text.startswith("good") for text in verdicts)


def test_more_draws_are_taken_where_the_first_may_hide_a_move(data):
    """Standard deviations that are off by an eighth, which 200 draws cannot tell from noise."""
    posterior = exact_regression(data, 0.87)
    verdicts = [posterior.khat(data, rng_key=jax.random.key(seed), num_samples=200).verdict for seed in range(10)]
    assert not any(text.startswith("good") for text in verdicts)


@pytest.mark.parametrize("inflation, shift, grade", [(1.0, 0.0, "good"), (0.1, 30.0, "bad")])
def test_verdicts_tell_good_from_bad_approximations(data, inflation, shift, grade):
    assert exact_regression(data, inflation, shift).khat(data).verdict.startswith(grade)


@pytest.mark.parametrize(
    "khat, relative_size, move, error, grade",
    [
        (0.3, 0.99, 0.01, 0.01, "good. The importance weights are nearly equal"),
        (0.9, 0.80, 0.05, 0.01, "good. Reweighted"),
        (1.1, 0.80, 0.05, 0.01, "doubtful. No moment"),
        (0.3, 0.80, 0.20, 0.01, "doubtful. q misses part"),
        (0.3, 0.80, 0.11, 0.02, "good"),
        (0.3, 0.80, 0.60, 0.01, "bad. q misses much"),
        (0.9, 0.01, 0.20, 0.30, "doubtful. The weights of the draws are too unequal"),
        (3.0, 0.01, 0.20, 0.30, "bad. The weights of the draws are too unequal"),
    ],
)
def test_verdicts_go_by_the_moves_that_are_sure(khat, relative_size, move, error, grade):
    evidence = Evidence(khat, relative_size, {"a": move, "b": 0.0}, {"a": error, "b": 0.0})
    assert verdict(evidence).startswith(grade)


@pytest.mark.parametrize("move, grade", [(0.15, "good"), (0.25, "doubtful. In unconstrained space q is good")])
def test_verdicts_go_by_constrained_values_too(move, grade):
    evidence = Evidence(0.3, 0.8, {"a": 0.05}, {"a": 0.01}, sure_of_values={"a": move})
    assert verdict(evidence).startswith(grade) and ("'a' itself" in verdict(evidence)) == (move > 0.2)


@pytest.mark.parametrize("concentration, is_good", [(4.0, False), (20.0, True)])
def test_a_long_tail_of_a_site_itself_is_named(concentration, is_good):
    """An inverse gamma variable. Of its logarithm, the best Gaussian has a variance of 1 / a and not trigamma(a): the
    standard deviation moves by 0.06 (a = 4) and 0.01 (a = 20). Its own moves by 0.32 and 0.05."""

    def model(y=None):
        numpyro.sample("s", dist.InverseGamma(concentration, 1.0))
        location = numpyro.sample("location", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(location, 1.0), obs=y)

    data = {"y": np.zeros(20)}
    khat = RVGA(model).run(data, progress_bar=False).khat(data)
    assert khat.moves["s"] < 0.1
    assert khat.verdict.startswith("good") == is_good and ("'s' itself" in khat.verdict) != is_good


def test_a_large_site_hides_no_small_one_that_comes_after_it():
    def model(y=None):
        numpyro.sample("many", dist.HalfNormal(1.0).expand([400]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(0.0, s), obs=y)

    posterior = RVGA(model).run({"y": np.ones(5)}, progress_bar=False)
    _, constrained = posterior.judged_sites(posterior.mean[None])
    assert list(constrained) == ["s"]


def test_khat_refuses_few_draws(data):
    with pytest.raises(ValueError, match="at least 100 draws, not 99"):
        exact_regression(data).khat(data, num_samples=99)


@pytest.mark.parametrize("count", [0, 10.5])
def test_counts_that_are_none_are_refused(data, count):
    with pytest.raises(ValueError, match=f"num_samples must be a positive integer, not {count}"):
        exact_regression(data).resample(data, count)
    with pytest.raises(ValueError, match=f"at least 100 draws, not {count}"):
        exact_regression(data).khat(data, num_samples=count)


def test_khat_of_constant_ratios_is_zero(data, monkeypatch):
    posterior = exact_regression(data)
    monkeypatch.setattr(
        LogDensities,
        "joint",
        lambda _, theta, __: np.asarray(posterior.log_prob_unconstrained(theta), np.float64) - 3.0,
    )
    assert posterior.khat(data).khat == 0.0
    assert posterior.khat(data).verdict.startswith("good")


def test_khat_reads_as_a_sentence(data):
    result = exact_regression(data).khat(data)
    assert repr(result) == f"Pareto k = {result.khat:.2f}: {result.verdict}"
    assert tuple(result) == (result.khat, result.verdict)


@pytest.mark.parametrize("chunk_values", [1, 7 * 100])
def test_khat_does_not_depend_on_the_chunks_of_rows(data, monkeypatch, chunk_values):
    posterior = exact_regression(data, 0.6)
    expected = posterior.khat(data, num_samples=100).khat
    monkeypatch.setattr(log_densities, "CHUNK_VALUES", chunk_values)
    assert posterior.khat(data, num_samples=100).khat == pytest.approx(expected, abs=1e-2)


def test_chunks_of_rows_bound_the_memory(data, monkeypatch):
    posterior = exact_regression(data)
    theta = posterior.sample_unconstrained(jax.random.key(0), (100,))
    monkeypatch.setattr(log_densities, "CHUNK_VALUES", 7 * 100)
    chunks = list(posterior.log_densities.chunks(theta, data))
    assert [chunk["y"].shape for chunk in chunks] == [(100, 7)] * 5 + [(100, 5)]


@pytest.mark.parametrize("location, share", [(0.5, "[1-9][0-9]*"), (-9.0, "200")])
def test_khat_says_when_the_log_joint_is_undefined(data, location, share):
    def model(X, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.sqrt(slope), 1.0), obs=y)

    result = posterior_of(model, data, np.array([location]), np.eye(1)).khat(data, num_samples=200)
    assert result.khat == np.inf
    assert re.match(f"the log joint is not a finite number at {share} of 200 draws", result.verdict)


@pytest.mark.filterwarnings("ignore:.*ArviZ")
def test_a_few_draws_without_a_density_count_as_impossible():
    """One in a thousand, as of Cholesky factors in single precision: NUTS rejects them."""

    def model(x):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0))
        numpyro.factor("far_out", jnp.where(z > 3.1, jnp.nan, 0.0))
        numpyro.sample("x", dist.Normal(0.0 * z, 1.0), obs=x)

    data = {"x": np.zeros(3)}
    posterior = posterior_of(model, data, np.zeros(1), np.eye(1))
    result = posterior.khat(data)
    assert result.khat < 0.3
    assert re.match(
        r"good\..* The log joint is NaN at [1-9]\d? of 10000 draws: these count as impossible", result.verdict
    )
    drawn = posterior.resample(data, 2000, rng_key=jax.random.key(1))["posterior"]["z"]
    assert 2.5 < float(drawn.max()) < 3.1


@pytest.mark.parametrize(
    ("khat", "left", "steps"),
    [
        (0.6, "integrate", "Integrate, or correct the draws (posterior.resample(data)), or run NUTS from here"),
        (0.6, "", "Correct the draws (posterior.resample(data)), or run NUTS from here (posterior.nuts())."),
        (0.9, "", "Run NUTS from here (posterior.nuts())."),
    ],
)
def test_verdicts_say_what_can_be_done(khat, left, steps):
    evidence = Evidence(khat, 0.5, {"x": 0.3}, {"x": 0.01}, left)
    assert f"standard deviations: 'x' by 0.30. {steps}" in verdict(evidence)


def test_sites_that_are_undefined_in_some_batches_are_left_out_of_all():
    some = Draws(np.arange(8.0).reshape(4, 2), np.zeros(4), np.zeros(4), 3, {"x": np.array(0), "y": np.array([1])})
    others = Draws(np.array([[9.0]] * 4), np.ones(4), np.ones(4), 3, {"x": np.array(0)})
    joined = some.joined([others])
    np.testing.assert_array_equal(joined.z[:, 0], [0, 2, 4, 9, 9, 9, 6, 9])
    assert joined.num_samples == 6 and list(joined.indices) == ["x"]
