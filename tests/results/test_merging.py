"""Merging: exact where rows are linear and Gaussian, close elsewhere, and the prior counted once."""

import functools
import itertools
import re
import warnings

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior, RandomWalk
from numpyro_rvga.core.gaussians import FullGaussian

pytestmark = pytest.mark.filterwarnings("ignore:the posteriors of the parts are merged once")


def linear(X, y=None, prior_scale=2.0):
    w = numpyro.sample("w", dist.Normal(0.5, prior_scale).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, 0.7), obs=y)


def idle_scale(X, y=None):
    """The rows say nothing of a site whose prior is not Gaussian."""
    numpyro.sample("scale", dist.HalfNormal(1.0))
    linear(X, y)


def hierarchical(X, g, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("groups", 5):
        a = numpyro.sample("a", dist.Normal(0, scale))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(logits=X @ w + a[g]), obs=y)


def rows(n=240, d=3, seed=0):
    rng = np.random.default_rng(seed)
    X, w = rng.normal(size=(n, d)), rng.normal(size=d)
    return {"X": X, "y": X @ w + 0.7 * rng.normal(size=n)}


@functools.cache
def grouped(n=2000):
    rng = np.random.default_rng(1)
    X, g = rng.normal(size=(n, 2)), rng.integers(0, 5, n)
    logits = X @ [1.0, -0.5] + np.array([-1.0, -0.4, 0.1, 0.6, 1.2])[g]
    return {"X": X, "g": g, "y": (rng.random(n) < 1 / (1 + np.exp(-logits))).astype(float)}


@functools.cache
def best():
    posterior = FixedPointVI(hierarchical).run(grouped(), progress_bar=False)
    return posterior, np.sqrt(np.diag(posterior.covariance))


HIERARCHICAL = RVGA(hierarchical)


def parts_of(method, data, count, **kwargs):
    """Posteriors of parts of two lengths."""
    shares = np.resize([1, 2], count)
    edges = np.concatenate([[0], np.cumsum(shares) * (len(data["y"]) // shares.sum())])
    edges[-1] = len(data["y"])
    pieces = [{name: array[a:b] for name, array in data.items()} for a, b in itertools.pairwise(edges)]
    return [method.run(piece, progress_bar=False, **kwargs) for piece in pieces]


METHODS = {
    "rvga": lambda model: RVGA(model),
    "row by row": lambda model: RVGA(model, block_size=1),
    "fixed point": lambda model: FixedPointVI(model),
    "bong": lambda model: BONG(model),
    "low-rank": lambda model: BONG(model, family="low-rank", rank=3),
}


@functools.cache
def method_of(name, model):
    """One for all tests: what it has compiled serves them all."""
    return METHODS[name](model)


@pytest.mark.parametrize(("name", "count"), [*((name, 7) for name in METHODS), ("rvga", 1), ("low-rank", 2)])
def test_parts_of_linear_gaussian_rows_give_the_exact_posterior_and_evidence(name, count):
    data = rows()
    X, y = data["X"], data["y"]
    precision = np.eye(3) / 4 + X.T @ X / 0.49
    mean = np.linalg.solve(precision, 0.5 / 4 + X.T @ y / 0.49)
    merged = Posterior.merge(parts_of(method_of(name, linear), data, count))
    np.testing.assert_allclose(merged.mean, mean, rtol=1e-9)
    np.testing.assert_allclose(merged.covariance, np.linalg.inv(precision), rtol=1e-9)
    assert merged.num_rows == len(y) and merged.info["merged"] == count
    if merged.elbo is not None:
        marginal = 0.49 * np.eye(len(y)) + 4 * X @ X.T
        residual = y - X @ np.full(3, 0.5)
        log_det = np.linalg.slogdet(2 * np.pi * marginal)[1]
        evidence = -0.5 * (log_det + residual @ np.linalg.solve(marginal, residual))
        np.testing.assert_allclose(merged.elbo, evidence, rtol=1e-9)


@pytest.mark.parametrize("family", ["diagonal", "block-diagonal", "low-rank"])
def test_merged_families_are_valid_and_pool_their_parts(family):
    parts = parts_of(BONG(linear, family=family, rank=1), rows(), 4)
    merged = Posterior.merge(parts)
    assert type(merged.gaussian) is type(parts[0].gaussian)
    deviation = np.sqrt(np.diag(merged.covariance))
    assert (deviation < min(np.sqrt(np.diag(p.covariance)).min() for p in parts)).all()
    exact = method_of("rvga", linear).run(rows(), progress_bar=False)
    assert (abs(merged.mean - exact.mean) < 2 * deviation).all()


@pytest.mark.parametrize("name", ["rvga", "fixed point", "bong", "low-rank"])
def test_a_prior_that_is_not_gaussian_is_counted_once(name):
    data = rows(60)
    method = method_of(name, idle_scale)
    whole, merged = method.run(data, progress_bar=False), Posterior.merge(parts_of(method, data, 5))
    np.testing.assert_allclose(merged.mean, whole.mean, atol=1e-3)
    np.testing.assert_allclose(merged.covariance, whole.covariance, atol=1e-3)


def test_parts_of_a_hierarchical_model_come_close_to_the_best_gaussian():
    optimum, deviation = best()
    merged = Posterior.merge(parts_of(HIERARCHICAL, grouped(), 4))
    assert (abs(merged.mean - optimum.mean) / deviation).max() < 0.15
    np.testing.assert_allclose(np.sqrt(np.diag(merged.covariance)) / deviation, 1, atol=0.1)
    assert merged.elbo is None  # the sum of the parts' bounds is none
    assert abs(merged.info["log_evidence_estimate"] - optimum.elbo) < 0.3


def test_parts_may_come_from_files_and_merged_posteriors_go_on(tmp_path):
    data = grouped()
    early, late = ({n: a[i:j] for n, a in data.items()} for i, j in ((0, 1500), (1500, 2000)))
    parts = parts_of(HIERARCHICAL, early, 3)
    merged = Posterior.merge(parts)
    for number, part in enumerate(parts):
        part.save(tmp_path / f"{number}")
    loaded = [Posterior.load(tmp_path / f"{number}", hierarchical) for number in range(3)]
    again = Posterior.merge(loaded)
    np.testing.assert_allclose(again.mean, merged.mean, rtol=1e-12)
    np.testing.assert_allclose(again.covariance, merged.covariance, rtol=1e-12)
    assert again.elbo == pytest.approx(merged.elbo)
    updated = [merged.update(late, progress_bar=False)]
    updated.append(HIERARCHICAL.run(late, init=again, progress_bar=False))
    updated.append(Posterior.merge([merged, *parts_of(HIERARCHICAL, late, 1)]))
    optimum, deviation = best()
    for posterior in updated:
        assert posterior.num_rows == 2000
        assert (abs(posterior.mean - optimum.mean) / deviation).max() < 0.15


@pytest.mark.parametrize("method", [method_of("rvga", linear), method_of("rvga", idle_scale)])
def test_parts_that_merge_exactly_do_not_warn(method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Posterior.merge(parts_of(method, rows(60), 5))


def test_a_single_exchange_warns_where_it_is_not_exact():
    parts = parts_of(BONG(hierarchical), grouped(100), 2)
    with pytest.warns(UserWarning, match="use fewer and larger parts, or RVGA"):
        Posterior.merge(parts)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Posterior.merge(parts[:1])


def test_single_precision_parts_are_merged_in_double():
    with jax.enable_x64(False):
        data = rows(6000)
        merged = Posterior.merge(parts_of(method_of("rvga", linear), data, 8))
        assert merged.mean.dtype == np.float32
    exact = method_of("rvga", linear).run(data, progress_bar=False)
    np.testing.assert_allclose(merged.mean, exact.mean, atol=0.02 * np.sqrt(np.diag(exact.covariance)).min())


def test_parts_that_do_not_fit_together_are_refused_by_number():
    data = rows(40)
    part = method_of("rvga", linear).run(data, progress_bar=False)
    wide = rows(40, d=4)
    others = {
        "part 1 has latent sites": method_of("rvga", linear).run(wide, progress_bar=False),
        "the prior of 'w' differs (they were given different values of 'prior_scale')": method_of("rvga", linear).run(
            data, prior_scale=1.0, progress_bar=False
        ),
        "part 1 was made with dynamics": RVGA(linear, dynamics=RandomWalk(0.1)).run(data, progress_bar=False),
        "part 1 was made by another kind": method_of("bong", linear).run(data, progress_bar=False),
    }
    for message, other in others.items():
        with pytest.raises(ValueError, match=re.escape(message)):
            Posterior.merge([part, other])
    with pytest.raises(ValueError, match="no posteriors to merge"):
        Posterior.merge([])


def test_one_part_keeps_what_it_has():
    part = HIERARCHICAL.run(grouped(200), progress_bar=False)
    merged = Posterior.merge([part])
    assert merged.elbo == part.elbo and merged.num_rows == part.num_rows and merged.info["merged"] == 1
    np.testing.assert_array_equal(merged.covariance, part.covariance)
    assert merged.update(grouped(100), progress_bar=False).num_rows == 300


def test_parts_stored_without_their_prior_are_refused(tmp_path):
    part = BONG(idle_scale, family="diagonal").run(rows(40), progress_bar=False)
    part.save(tmp_path / "part")
    loaded = Posterior.load(tmp_path / "part", idle_scale)
    with pytest.raises(ValueError, match="part 0 was stored without"):
        Posterior.merge([loaded])


def test_parts_that_are_together_wider_than_the_prior_are_refused():
    part = method_of("rvga", linear).run(rows(40), progress_bar=False)
    widened = part.state._replace(root=10 * part.state.root + 10 * np.eye(3))
    facts = part.elbo, part.info, part.continuation, widened
    wide = [
        Posterior(part.program, FullGaussian(shift + part.mean, part.scale), *facts, num_rows=40) for shift in (0, 1)
    ]
    with pytest.raises(ValueError, match="no merged Gaussian"):
        Posterior.merge(wide)


# ---------------------------------------------------------------------- other models, and rows that count twice
def probability(X, y=None, link=jax.nn.sigmoid, shift=0.0):
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Bernoulli(probs=link(X @ w + shift)), obs=y)


def tiny(scale):
    def model(X, y=None):
        w = numpyro.sample("w", dist.Normal(0, scale).expand([X.shape[1]]).to_event(1))
        with numpyro.plate("rows", len(X)):
            numpyro.sample("y", dist.Normal(X @ w, 1.0), obs=y)

    return model


def with_noise(X, y=None):
    noise = numpyro.param("noise", 1.0, constraint=dist.constraints.positive)
    w = numpyro.sample("w", dist.Normal(0, 1).expand([X.shape[1]]).to_event(1))
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(X @ w, noise), obs=y)


def halves(data, scale=1.0):
    count = len(data["y"]) // 2
    return {n: a[:count] for n, a in data.items()}, {n: a[count:] * (scale if n == "y" else 1) for n, a in data.items()}


OTHER_MODELS = {
    "likelihood": (lambda: (RVGA(probability), RVGA(probability)), {"link": jax.scipy.special.ndtr}, "'link'"),
    "keyword": (lambda: (RVGA(probability), RVGA(probability)), {"shift": np.float64(0.1)}, "'shift'"),
    "tiny priors": (lambda: (RVGA(tiny(1e-7)), RVGA(tiny(9e-7))), {}, "the prior of 'w' differs"),
    "learned": (lambda: (FixedPointVI(with_noise), FixedPointVI(with_noise)), {}, "numpyro.param site 'noise'"),
}


@pytest.mark.parametrize("name", OTHER_MODELS)
def test_parts_of_other_models_are_refused_with_what_differs(name):
    make, keywords, message = OTHER_MODELS[name]
    data = rows(60)
    if name in ("likelihood", "keyword"):
        data["y"] = (data["y"] > 0).astype(float)
    one, other = halves(data, scale=20.0 if name == "learned" else 1.0)
    first, second = make()
    parts = [first.run(one, progress_bar=False), second.run(other, progress_bar=False, **keywords)]
    with pytest.raises(ValueError, match=rf"part 1 .*{message}"):
        Posterior.merge(parts)


def test_rows_are_never_merged_twice(tmp_path):
    one, other = halves(rows(80))
    method = method_of("rvga", linear)
    part, rest = (method.run(half, progress_bar=False) for half in (one, other))
    longer = part.update(other, progress_bar=False)
    together = method.run(rows(80), progress_bar=False)
    backwards = method_of("bong", linear).run({n: a[::-1] for n, a in one.items()}, progress_bar=False)
    part.save(tmp_path / "part")
    twice = {
        "the same object": [part, rest, part],
        "a copy from a file": [part, Posterior.load(tmp_path / "part", linear)],
        "a posterior and its update": [part, longer],
        "a merged posterior and its part": [Posterior.merge([part, rest]), rest],
        "all rows and a merged posterior of them": [Posterior.merge([part, rest]), together],
        "another order": [method_of("bong", linear).run(one, progress_bar=False), backwards],
    }
    for name, parts in twice.items():
        with pytest.raises(ValueError, match=r"have taken in the same (40|80) rows"):
            Posterior.merge(parts)
            raise AssertionError(name)
    by_hand = [method.posterior(method.update(method.init(one), one)) for _ in range(2)]
    with pytest.raises(ValueError, match="part 1 and part 0 are the same Gaussian to the last digit"):
        Posterior.merge(by_hand)
    assert Posterior.merge([part, rest]).num_rows == 80
