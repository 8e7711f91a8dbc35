"""Rounds: merged parts end where one solve of all rows ends, however they are cut, and say how far they may be off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior
from numpyro_rvga.core.updates.state import new_state
from numpyro_rvga.engines.certificate import BoundEvaluation, SiteSums
from numpyro_rvga.results.merging import rounds
from numpyro_rvga.results.merging.rounds import Evaluations, in_rounds


def logistic(X, y=None):
    w = numpyro.sample("w", dist.Normal(0, 3).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w), obs=y)


def counts(X, g, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", 6):
        a = numpyro.sample("a", dist.Normal(0, scale))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Poisson(jnp.exp(X @ w + a[g])), obs=y)


def crossed(i, j, y=None):
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([2]).to_event(1))
    with numpyro.plate("rows of a table", 5):
        a = numpyro.sample("a", dist.Normal(0, scales[0]))
    with numpyro.plate("columns", 4):
        b = numpyro.sample("b", dist.Normal(0, scales[1]))
    with numpyro.plate("cells", len(i)):
        numpyro.sample("y", dist.Bernoulli(logits=a[i] + b[j]), obs=y)


@functools.cache
def made(kind):
    rng, n = np.random.default_rng(0), 400 if kind == "crossed" else 800
    X, g, h = rng.normal(size=(n, 3)), rng.integers(0, 6, n), rng.integers(0, 4, n)
    if kind == "logistic":
        return logistic, {"X": X, "y": (rng.logistic(size=n) < X @ [1.0, -1.0, 0.5]).astype(float)}
    if kind == "counts":
        return counts, {"X": X, "g": g, "y": rng.poisson(np.exp(0.3 * X[:, 0] + rng.normal(size=6)[g])).astype(float)}
    logits = rng.normal(size=5)[g % 5] + rng.normal(size=4)[h]
    return crossed, {"i": g % 5, "j": h, "y": (logits > rng.logistic(size=n)).astype(float)}


@functools.cache
def method_of(model):
    return RVGA(model)


@functools.cache
def best_of(kind):
    model, data = made(kind)
    return FixedPointVI(model).run(data, progress_bar=False)


@functools.cache
def cut(kind, order):
    """Blocks, and the posteriors of each."""
    model, data = made(kind)
    count = 8 if kind == "logistic" else 4
    places = np.arange(len(data["y"])) if order == "shuffled" else np.argsort(data["y"], kind="stable")
    blocks = [{name: array[part] for name, array in data.items()} for part in np.array_split(places, count)]
    method = method_of(model)
    return blocks, [method.run(block, progress_bar=False) for block in blocks]


def off(posterior, best):
    """The most by which a mean differs in standard deviations, or a standard deviation in its logarithm."""
    deviations = [np.asarray(p.gaussian.deviation()) for p in (posterior, best)]
    shift = np.abs(posterior.mean - best.mean) / deviations[1]
    return max(shift.max(), np.abs(np.log(deviations[0] / deviations[1])).max())


@pytest.mark.parametrize("order", ["shuffled", "sorted"])
@pytest.mark.parametrize("kind", ["logistic", "counts", "crossed"])
def test_parts_meet_the_best_gaussian_of_all_rows(kind, order, monkeypatch):
    monkeypatch.setattr(rounds, "FEWEST_ROWS", 100)  # a sample is not all rows
    monkeypatch.setattr(rounds, "ROWS_PER_PARAMETER", 10)
    blocks, parts = cut(kind, order)
    merged, best = Posterior.merge(parts, data=blocks), best_of(kind)
    assert merged.info["rounds"] <= 5 and merged.info["converged"] and merged.info["merge_error"] < 0.01
    assert off(merged, best) < 0.02 and abs(merged.elbo - best.elbo) < 0.01
    assert merged.num_rows == len(made(kind)[1]["y"]) and merged.info["merged"] == len(parts)


def test_what_is_left_after_a_few_rounds_is_told_as_it_is():
    blocks, parts = cut("logistic", "sorted")
    with pytest.warns(UserWarning, match=r"may still be 0\.\d+ standard deviations .* take more rounds"):
        one = Posterior.merge(parts, data=blocks, rounds=1)
    with pytest.warns(UserWarning, match="merged once, and rows .* standard deviations .*: pass data=, the rows"):
        once = Posterior.merge(parts)
    np.testing.assert_allclose(one.mean, once.mean, rtol=1e-8)
    np.testing.assert_allclose(one.info["merge_error"], off(one, best_of("logistic")), rtol=0.3)
    assert not one.info["converged"] and one.elbo < best_of("logistic").elbo - 1e-3
    many = Posterior.merge(parts, data=blocks, rounds=4)
    assert many.info["rounds"] == 4 and off(many, best_of("logistic")) < 1e-3


def test_single_precision_meets_the_best_gaussian_too():
    model, _ = made("logistic")
    with jax.enable_x64(False):
        blocks, method = cut("logistic", "sorted")[0], RVGA(model)
        merged = Posterior.merge([method.run(block, progress_bar=False) for block in blocks], data=blocks)
        assert merged.mean.dtype == np.float32
    assert off(merged, best_of("logistic")) < 0.02 and abs(merged.elbo - best_of("logistic").elbo) < 0.01


def test_rows_that_are_skipped_are_skipped_in_every_round():
    model, data = made("logistic")
    spoilt = {name: np.insert(array, 5, np.nan, axis=0) for name, array in data.items()}
    blocks, method = (
        [{n: x[part] for n, x in spoilt.items()} for part in (slice(0, 300), slice(300, 801))],
        method_of(model),
    )
    parts = [method.run(block, on_bad_row="skip", progress_bar=False) for block in blocks]
    merged = Posterior.merge(parts, data=blocks)
    assert off(merged, best_of("logistic")) < 0.02 and merged.num_rows == 800


def test_samples_are_of_rows_that_can_be_used_and_do_not_depend_on_how_they_are_cut():
    model, data = made("logistic")
    spoilt = data | {"y": np.where(np.arange(800) % 3 == 0, np.nan, data["y"])}
    method, usable = method_of(model), np.isfinite(spoilt["y"])
    cuts = [{name: array[i : i + 300] for name, array in spoilt.items()} for i in (0, 300, 600)]
    samples = [method.sample_of(x, usable.sum(), 50, on_bad_row="skip") for x in (spoilt, cuts)]
    np.testing.assert_array_equal(samples[0]["X"], samples[1]["X"])
    first = samples[0]["X"][:, 0]
    assert len(np.unique(first)) == 50 and np.isin(first, data["X"][usable, 0]).all()
    assert np.mean(np.isin(data["X"][400:, 0], first)) > 0.03  # from all over them


def test_what_cannot_be_solved_for_again_is_refused(tmp_path):
    blocks, parts = cut("logistic", "shuffled")
    model, _ = made("logistic")
    with pytest.raises(ValueError, match="rounds=3 solves for the parts again, and needs their rows"):
        Posterior.merge(parts, rounds=3)
    with pytest.raises(ValueError, match="rounds must be 'auto' or a positive integer, not 0"):
        Posterior.merge(parts, data=blocks, rounds=0)
    with pytest.raises(ValueError, match="rows of each of the 8 parts, and holds 7 blocks"):
        Posterior.merge(parts, data=blocks[1:])
    with pytest.raises(ValueError, match="block 0 of data does not hold the rows that part 0 has taken in"):
        Posterior.merge(parts, data=[blocks[1], blocks[0], *blocks[2:]])
    parts[0].save(tmp_path / "part")
    with pytest.raises(ValueError, match="part 0 cannot go into rounds"):
        Posterior.merge([Posterior.load(tmp_path / "part", model), *parts[1:]], data=blocks)
    online = [BONG(model).run(block, progress_bar=False) for block in blocks[:2]]
    with pytest.raises(ValueError, match="rounds are for posteriors of RVGA"):
        Posterior.merge(online, data=blocks[:2])


def shares(x, y=None):
    center = numpyro.sample("center", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(logits=center + slope * x), obs=y)


@functools.cache
def sorted_shares():
    """Zeros, and then ones, in 40 parts."""
    x = np.random.default_rng(0).normal(size=4000)
    y = (1 + 0.5 * x > np.random.default_rng(1).logistic(size=4000)).astype(float)
    blocks, method = [{"x": x[i], "y": y[i]} for i in np.array_split(np.argsort(y, kind="stable"), 40)], RVGA(shares)
    return blocks, [method.run(block, progress_bar=False) for block in blocks]


def test_parts_that_contradict_each_other_begin_at_a_sample_of_all_rows(monkeypatch):
    """Parts of zeros and of ones alone tell little of where they are together."""
    blocks, parts = sorted_shares()
    merged = Posterior.merge(parts, data=blocks)
    best = FixedPointVI(shares).run({n: np.concatenate([b[n] for b in blocks]) for n in blocks[0]}, progress_bar=False)
    assert merged.info["rounds"] <= 3 and off(merged, best) < 0.02 and abs(merged.elbo - best.elbo) < 0.01
    assert merged.num_rows == 4000
    monkeypatch.setattr(rounds, "APART", np.inf)
    from_product = Posterior.merge(parts, data=blocks)
    assert off(merged, from_product) < 0.02 and merged.info["rounds"] + 2 <= from_product.info["rounds"]


def test_rows_that_stand_for_all_others_count_as_often(monkeypatch):
    blocks, parts = sorted_shares()
    seen, from_sample = [], rounds.state_of_sample

    def watched(engine, start, counts, sample_of):
        def taken(*numbers):
            seen.append(sample_of(*numbers))
            return seen[-1]

        seen.append(from_sample(engine, start, counts, taken))
        return seen[-1]

    monkeypatch.setattr(rounds, "state_of_sample", watched)
    whole = Posterior.merge(parts, data=blocks)
    rows, state = seen
    assert [len(each["y"]) for each in rows] == [50] * 40 and int(state.num_rows) == 4000
    deviations = np.linalg.norm(state.root, axis=1)
    np.testing.assert_allclose(deviations, whole.gaussian.deviation(), rtol=0.1)
    assert (abs(state.mean - whole.mean) < 4 * whole.gaussian.deviation()).all()
    # 2,000 rows counted twice have the posterior of these rows given twice
    twice = {name: np.tile(np.concatenate([each[name] for each in rows]), 2) for name in rows[0]}
    best = FixedPointVI(shares).run(twice, progress_bar=False)
    np.testing.assert_allclose(state.mean, best.mean, atol=1e-4)
    np.testing.assert_allclose(deviations, best.gaussian.deviation(), rtol=1e-3)
    monkeypatch.setattr(rounds, "FIRST_BLOCK_NUMBERS", 1)  # too few rows for the parameters: none
    again = Posterior.merge(parts, data=blocks)
    assert len(seen) == 3 and seen[-1] is None and off(again, whole) < 0.02


def test_groups_that_have_their_rows_in_one_part_do_not_contradict_each_other(monkeypatch):
    model, data = made("counts")
    blocks = [{name: array[data["g"] == k] for name, array in data.items()} for k in range(6)]
    parts = [method_of(model).run(block, progress_bar=False) for block in blocks]
    monkeypatch.setattr(rounds, "state_of_sample", None)  # it is not called
    assert off(Posterior.merge(parts, data=blocks), best_of("counts")) < 0.02


# ---------------------------------------------------------------------- damping
PRECISION, LINEAR = np.array([1.0, 1.0]), np.array([2.0, -0.5])  # of the rows of two parts; the prior is N(0, 1)


def state_of(precision, linear):
    variance = 1 / precision
    return new_state(jnp.array([variance * linear]), jnp.array([[np.sqrt(variance)]]), None)


def natural(state):
    precision = 1 / float(state.root[0, 0]) ** 2
    return np.array([precision, precision * float(state.mean[0])])


def overshooting(seen):
    """Evaluations whose steps go three times as far as they should: undamped, errors double in every round."""
    target = np.array([1 + PRECISION.sum(), LINEAR.sum()])

    def sums(state):
        precision, linear = natural(state)
        factor = np.array([precision - 1, linear]) + 3 * (target - [precision, linear])
        mean = linear / precision
        return SiteSums(
            np.zeros(1), np.array([[factor[1] - factor[0] * mean]]), factor[0].reshape(1, 1, 1), np.zeros(1)
        )

    def evaluate(state, _):
        seen.append(state)
        precision, linear = natural(state)
        shift = linear / precision - target[1] / target[0]
        divergence = 0.5 * (target[0] / precision - 1 + np.log(precision / target[0]) + target[0] * shift**2)
        return BoundEvaluation(-divergence, sums(state), np.zeros(1), np.zeros((1, 1)), 0.0)

    return Evaluations(sums, evaluate, lambda state: state, lambda counts: None)


def test_steps_that_lower_the_bound_or_leave_no_gaussian_are_halved():
    prior = state_of(1.0, 0.0)
    together_indefinite = [state_of(0.4, 0.1), state_of(0.4, 0.1)]  # each takes 0.6 from a precision of 1
    seen = []
    result = in_rounds(prior, together_indefinite, overshooting(seen), None)
    np.testing.assert_allclose(natural(result.state), [3.0, 1.5], rtol=0.02)
    assert result.errors[0] > 0.5 and result.errors[-1] < 0.01 and len(seen) > len(result.errors)


# ---------------------------------------------------------------------- slow directions
def weakly_informed(g, x, y=None):
    center = numpyro.sample("center", dist.Normal(0, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 12):
        a = numpyro.sample("a", dist.Normal(center, scale))
    with numpyro.plate("rows", len(g)):
        numpyro.sample("y", dist.Poisson(jnp.exp(a[g] + slope * x)), obs=y)


PARTS, WHOLE = RVGA(weakly_informed), FixedPointVI(weakly_informed)


@functools.cache
def weakly_informed_rows(seed):
    """Counts that hardly tell the scale of groups: a natural-gradient step moves it by a sixth of what is missing."""
    rng = np.random.default_rng(seed)
    g, x, effects = np.arange(60) % 12, rng.normal(size=60), 0.05 * rng.normal(size=12)
    data = {"g": g, "x": x, "y": rng.poisson(np.exp(0.3 + effects[g] + 0.3 * x)).astype(float)}
    return data, WHOLE.run(data, progress_bar=False)


@pytest.mark.parametrize(("seed", "order"), [(1, "shuffled"), (2, "sorted")])
def test_the_error_that_is_told_is_that_of_slow_directions_too(seed, order):
    data, best = weakly_informed_rows(seed)
    places = np.arange(60) if order == "shuffled" else np.argsort(data["y"], kind="stable")
    blocks = [{n: x[i] for n, x in data.items()} for i in np.array_split(places, 4)]
    parts = [PARTS.run(block, progress_bar=False) for block in blocks]
    merged = Posterior.merge(parts, data=blocks)
    assert merged.info["merge_error"] < 0.01 and off(merged, best) < 0.012
    with pytest.warns(UserWarning, match="take more rounds"):
        few = Posterior.merge(parts, data=blocks, rounds=2)
    assert 0.8 < few.info["merge_error"] / off(few, best) < 2.5


def test_parts_whose_own_posteriors_are_far_from_the_whole_meet_it(monkeypatch):
    """Counts sorted by outcome in two halves: where the prior terms are not solved for, no step raises the bound."""
    monkeypatch.setattr(rounds, "APART", np.inf)  # from their product
    rng = np.random.default_rng(1)
    g, x, effects = np.arange(240) % 12, rng.normal(size=240), 0.6 * rng.normal(size=12)
    data = {"g": g, "x": x, "y": rng.poisson(np.exp(0.3 + effects[g] + 0.3 * x)).astype(float)}
    blocks = [{n: v[i] for n, v in data.items()} for i in np.array_split(np.argsort(data["y"], kind="stable"), 2)]
    merged = Posterior.merge([PARTS.run(block, progress_bar=False) for block in blocks], data=blocks)
    best = WHOLE.run(data, progress_bar=False)
    assert merged.info["merge_errors"][0] > 0.5 and off(merged, best) < 0.012 and abs(merged.elbo - best.elbo) < 0.01
