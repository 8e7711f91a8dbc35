"""Crossed and nested effects, of which each row looks at a few: what is found, and that the answer is the same."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.engines import sparse
from numpyro_rvga.model.program import Program
from numpyro_rvga.model.terms import sparsity

NUM_A, NUM_B, NUM_ROWS = 17, 9, 300
SCALES = 1.5, 0.8
NOISE = 0.6


@pytest.fixture(autouse=True)
def short_theta_counts(monkeypatch):
    monkeypatch.setattr(sparsity, "FEWEST_PARAMETERS", 10)
    monkeypatch.setattr(sparsity, "FEWEST_IN_CHAIN", 10)
    monkeypatch.setattr(sparsity, "FEWEST_IN_GROUPS", 10)
    monkeypatch.setattr(sparse, "SHORT", 0)
    monkeypatch.setattr("numpyro_rvga.core.matrices.packing.DENSE_SPEEDUP", 0)


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    a, b, x = rng.integers(0, NUM_A, NUM_ROWS), rng.integers(0, NUM_B, NUM_ROWS), rng.normal(size=NUM_ROWS)
    effects = SCALES[0] * rng.normal(size=NUM_A)[a] + SCALES[1] * rng.normal(size=NUM_B)[b]
    outcome = 0.5 + effects + 0.3 * x
    return {
        "normal": {"a": a, "b": b, "x": x, "y": outcome + NOISE * rng.normal(size=NUM_ROWS)},
        "counts": {"a": a, "b": b, "x": x, "y": rng.poisson(np.exp(0.5 * outcome)).astype(float)},
    }


def conjugate(a, b, x, y=None):
    m = numpyro.sample("m", dist.Normal(1.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    u = numpyro.sample("u", dist.Normal(0.0, SCALES[0]).expand([NUM_A]).to_event(1))
    v = numpyro.sample("v", dist.Normal(m, SCALES[1]).expand([NUM_B]).to_event(1))
    with numpyro.plate("rows", len(a)):
        numpyro.sample("y", dist.Normal(u[a] + v[b] + slope * x, NOISE), obs=y)


def linked(link, centered=True, slopes=False):
    """A model of unknown scales, whose outcomes are normal, of unknown scale too, or counts."""

    def model(a, b, x, y=None):
        m = numpyro.sample("m", dist.Normal(0.0, 2.0))
        tau = numpyro.sample("tau", dist.HalfNormal(1.0).expand([2]).to_event(1))
        u = numpyro.sample("u", dist.Normal(0.0, tau[0] if centered else 1.0).expand([NUM_A]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0.0, tau[1]).expand([NUM_B]).to_event(1))
        predictor = m + (u if centered else tau[0] * u)[a] + v[b]
        if slopes:
            s = numpyro.sample("s", dist.Normal(0.0, 0.5).expand([NUM_A, 2]).to_event(2))
            predictor = predictor + s[a, 0] * x + s[a, 1] * jnp.sin(x)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0)) if link == "normal" else None
        with numpyro.plate("rows", len(a)):
            of_rows = dist.Normal(predictor, sigma) if link == "normal" else dist.Poisson(jnp.exp(predictor))
            numpyro.sample("y", of_rows, obs=y)

    return model


def by_whole_matrices(model, data, monkeypatch):
    monkeypatch.setattr(sparsity, "FEWEST_PARAMETERS", 10**6)
    return FixedPointVI(model).run(data, progress_bar=False)


def sparsity_of(model, data):
    program = Program(model, data, {})
    return program.find_sparsity(data)


@pytest.mark.parametrize("num_scales", [1, 2])
def test_normal_rows_of_one_scale_take_part_by_their_sums(rows, num_scales, monkeypatch):
    def model(a, b, x, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, SCALES[0]).expand([NUM_A]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0.0, SCALES[1]).expand([NUM_B]).to_event(1))
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0).expand([num_scales]).to_event(1))
        with numpyro.plate("rows", len(a)):
            numpyro.sample("y", dist.Normal(u[a] + v[b], sigma[b % num_scales] * jnp.exp(0.2 * x)), obs=y)

    data, summed = rows["normal"], []
    have = sparse.have_one_scale
    monkeypatch.setattr(sparse, "have_one_scale", lambda *of_site: summed.append(have(*of_site)) or summed[-1])
    found = FixedPointVI(model).run(data, progress_bar=False)
    assert len(summed) == 1
    whole = by_whole_matrices(model, data, monkeypatch)
    np.testing.assert_allclose(found.elbo, whole.elbo, rtol=1e-9)
    np.testing.assert_allclose(found.mean, whole.mean, atol=1e-5)


def test_linear_effects_are_exact(rows):
    data = rows["normal"]
    found = FixedPointVI(conjugate).run(data, progress_bar=False)
    design = np.zeros((NUM_ROWS, 2 + NUM_A + NUM_B))  # of m, slope, u, v - m
    design[:, 0], design[:, 1] = 1, data["x"]
    design[np.arange(NUM_ROWS), 2 + data["a"]] = 1
    design[np.arange(NUM_ROWS), 2 + NUM_A + data["b"]] = 1
    variance = np.concatenate([[4.0, 1.0], np.full(NUM_A, SCALES[0] ** 2), np.full(NUM_B, SCALES[1] ** 2)])
    sigma = np.linalg.inv(np.diag(1 / variance) + design.T @ design / NOISE**2)
    prior_mean = np.concatenate([[1.0], np.zeros(1 + NUM_A + NUM_B)])
    mean = sigma @ (prior_mean / variance + design.T @ data["y"] / NOISE**2)
    centered = np.eye(len(mean))
    centered[2 + NUM_A :, 0] = 1  # v = m + what is left
    np.testing.assert_allclose(found.mean, centered @ mean, atol=1e-7)
    np.testing.assert_allclose(found.covariance, centered @ sigma @ centered.T, atol=1e-8)
    marginal = np.diag(np.full(NUM_ROWS, NOISE**2)) + design @ np.diag(variance) @ design.T
    evidence = dist.MultivariateNormal(jnp.asarray(design @ prior_mean), jnp.asarray(marginal)).log_prob(data["y"])
    np.testing.assert_allclose(found.elbo, evidence, rtol=1e-9)


@pytest.mark.parametrize(
    ("link", "options"),
    [("counts", {}), ("normal", {"slopes": True}), ("normal", {"centered": False})],
    ids=["counts", "slopes", "not centered"],
)
def test_unknown_scales_are_found_as_by_whole_matrices(rows, link, options, monkeypatch):
    model, data = linked(link, **options), rows[link]
    assert sparsity_of(model, data) is not None
    sparse = FixedPointVI(model).run(data, progress_bar=False)
    dense = by_whole_matrices(model, data, monkeypatch)
    deviation = np.sqrt(np.diag(dense.covariance))
    np.testing.assert_allclose(sparse.elbo, dense.elbo, atol=1e-4 if options.get("centered", True) else 0.05)
    np.testing.assert_allclose(sparse.mean / deviation, dense.mean / deviation, atol=0.01)
    np.testing.assert_allclose(sparse.covariance, dense.covariance, atol=0.01 * np.max(deviation) ** 2)


@pytest.fixture(scope="module")
def fitted(rows):
    """A method and what it finds."""
    method = FixedPointVI(linked("normal"))
    return method, method.run(rows["normal"], progress_bar=False)


def test_a_solve_may_begin_at_a_posterior_and_be_of_single_precision(rows, fitted):
    (method, double), data = fitted, rows["normal"]
    again = method.run(data, init=double, progress_bar=False)
    np.testing.assert_allclose(again.elbo, double.elbo, atol=1e-7)
    assert again.info["iterations"] < double.info["iterations"]
    with jax.enable_x64(False):
        single = FixedPointVI(linked("normal")).run(data, progress_bar=False)
    deviation = np.sqrt(np.diag(double.covariance))
    assert np.max(np.abs(np.asarray(single.mean) - double.mean) / deviation) < 0.02


def test_what_a_sparsity_says(rows):
    found = sparsity_of(linked("normal", slopes=True), rows["normal"])
    assert found.order.num_diagonal == 3 * NUM_A and found.block is not None  # u and the slopes, group by group
    assert len(found.patterns[False, "y"].columns) == 6  # u, v, two slopes, m and sigma
    assert [found.patterns[key].num_leading for key in ((False, "y"), (True, "u"), (True, "v"))] == [3, 1, 0]
    assert sorted(found.order.indices) == list(range(found.order.indices.size))


def test_effects_of_different_groups_are_not_eliminated_together(rows):
    def model(a, b, x, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([NUM_A]).to_event(1))
        v = numpyro.sample("v", dist.Normal(0.0, 1.0).expand([NUM_A]).to_event(1))
        with numpyro.plate("rows", len(a)):
            numpyro.sample("y", dist.Normal(u[a] + v[b], NOISE), obs=y)

    found = sparsity_of(model, rows["normal"])
    assert found.order.num_diagonal == NUM_A and found.block is None


def test_cancellation_in_single_precision_is_not_taken_for_an_entry_more(monkeypatch):
    """A predictor whose slope is the small difference of large numbers."""
    monkeypatch.setattr(sparsity, "MOST_SPLIT", 10)

    def model(a, x, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([NUM_A, 2]).to_event(2))
        both = u[a] @ jnp.array([[1.0, 1.0], [0.3, -0.7]])
        with numpyro.plate("rows", len(a)):
            numpyro.sample("y", dist.Categorical(logits=jnp.einsum("nkj,nj->nk", x, both)), obs=y)

    rng = np.random.default_rng(0)
    with jax.enable_x64(False):
        x = rng.normal(size=(NUM_ROWS, 3, 2)).astype(np.float32)
        x[:, 0, 1] = -x[:, 0, 0] * (1 + 1e-5 * rng.normal(size=NUM_ROWS))
        a = rng.integers(0, NUM_A, NUM_ROWS)
        assert sparsity_of(model, {"a": a, "x": x, "y": rng.integers(0, 3, NUM_ROWS)}) is not None


def two_of_one_site(a, b, x, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([NUM_A * 5]).to_event(1))
    with numpyro.plate("rows", len(a)):
        numpyro.sample("y", dist.Normal(u[a] - u[b + NUM_A], NOISE), obs=y)


def wide(a, b, x, y=None):
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([80]).to_event(1))
    with numpyro.plate("rows", len(a)):
        numpyro.sample("y", dist.Normal(jnp.cos(x[:, None] * jnp.arange(80)) @ u, NOISE), obs=y)


def of_all_before(a, b, x, y=None):
    steps = numpyro.sample("steps", dist.Normal(0.0, 1.0).expand([NUM_A * 5]).to_event(1))
    with numpyro.plate("rows", len(a)):
        numpyro.sample("y", dist.Normal(jnp.cumsum(steps)[a + 60], NOISE), obs=y)


def masked(a, b, x, y=None):
    """The density of the entries is that of the outcomes alone."""
    u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([NUM_A]).to_event(1).mask(False))
    with numpyro.plate("rows", len(a)):
        numpyro.sample("y", dist.Normal(u[a], NOISE), obs=y)


@pytest.mark.parametrize("model", [two_of_one_site, wide, of_all_before, masked])
def test_terms_that_look_at_more_are_left_to_whole_matrices(rows, model):
    assert sparsity_of(model, rows["normal"]) is None


def test_one_row_that_looks_at_more_is_noticed(rows):
    def model(a, b, x, y=None):
        u = numpyro.sample("u", dist.Normal(0.0, 1.0).expand([100]).to_event(1))
        with numpyro.plate("rows", len(a)):
            numpyro.sample("y", dist.Normal(u[a] + jnp.where(x > 0, u[b + 50], 0.0), NOISE), obs=y)

    data = dict(rows["normal"], x=np.where(np.arange(NUM_ROWS) == 250, 1.0, -1.0))
    assert sparsity_of(model, dict(data, x=-np.ones(NUM_ROWS))) is not None
    assert sparsity_of(model, data) is None


def test_rvga_solves_for_all_rows_that_can_be_used_at_once(rows):
    data, model = rows["counts"], linked("counts")
    best = FixedPointVI(model).run({name: np.delete(array, 7) for name, array in data.items()}, progress_bar=False)
    holed = dict(data, y=np.where(np.arange(NUM_ROWS) == 7, np.nan, data["y"]))
    found = RVGA(model).run(holed, on_bad_row="skip", progress_bar=False)
    np.testing.assert_allclose(found.elbo, best.elbo, atol=1e-6)
    np.testing.assert_allclose(found.mean, best.mean, atol=1e-4)
    assert found.info["skipped_rows"].tolist() == [7] and found.info["first_block"] == NUM_ROWS - 1


def test_rvga_takes_in_more_rows_afterwards(rows, fitted):
    (_, best), model, data = fitted, linked("normal"), rows["normal"]
    parts = [{name: array[part] for name, array in data.items()} for part in (slice(0, 270), slice(270, None))]
    found = RVGA(model).run(parts[0], progress_bar=False).update(parts[1], progress_bar=False)
    deviation = np.sqrt(np.diag(best.covariance))
    assert np.max(np.abs(found.mean - best.mean) / deviation) < 0.3
    assert found.num_rows == NUM_ROWS
