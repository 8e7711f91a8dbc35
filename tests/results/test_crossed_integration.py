"""Scales of crossed effects integrated out: the answer of dense quadrature, by components that stay block-arrows."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import stats
from scipy.special import logsumexp

from numpyro_rvga import FixedPointVI, Posterior
from numpyro_rvga.core.gaussians.packed_roots import PackedRoots
from numpyro_rvga.model.terms import sparsity
from numpyro_rvga.results import integration

KEY = jax.random.key(0)
NUM_A, NUM_B, NUM_ROWS = 9, 5, 60
NOISE = 0.7


def effects(a, b, y=None):
    mean = numpyro.sample("mean", dist.Normal(0, 2))
    scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
    noise = numpyro.sample("noise", dist.HalfNormal(1))
    u = numpyro.sample("u", dist.Normal(0, scale[0]).expand([NUM_A]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0, scale[1]).expand([NUM_B]).to_event(1))
    with numpyro.plate("rows", len(a)):
        numpyro.sample("y", dist.Normal(mean + u[a] + v[b], noise), obs=y)


def make_rows():
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, NUM_A, NUM_ROWS), rng.integers(0, NUM_B, NUM_ROWS)
    y = 0.5 + 0.8 * rng.normal(size=NUM_A)[a] + 0.5 * rng.normal(size=NUM_B)[b] + NOISE * rng.normal(size=NUM_ROWS)
    return {"a": a, "b": b, "y": y}


ROWS = make_rows()


def exact():
    """log evidence, and means and standard deviations of (mean, log scales, log noise, u, v), by quadrature."""
    design = np.zeros((NUM_ROWS, 1 + NUM_A + NUM_B))
    design[:, 0] = 1
    design[np.arange(NUM_ROWS), 1 + ROWS["a"]] = design[np.arange(NUM_ROWS), 1 + NUM_A + ROWS["b"]] = 1
    sides = [np.linspace(-4, 1.6, 36), np.linspace(-8, 1.8, 50), np.linspace(-0.9, 0.3, 18)]
    log_h = np.stack(np.meshgrid(*sides, indexing="ij"), -1).reshape(-1, 3)
    h = np.exp(log_h)
    prior_variance = np.repeat(np.stack([0 * h[:, 0] + 4, h[:, 0] ** 2, h[:, 1] ** 2], 1), [1, NUM_A, NUM_B], axis=1)
    noise = h[:, 2] ** 2
    precision = np.einsum("ij,ik->jk", design, design) / noise[:, None, None]
    precision[:, np.arange(design.shape[1]), np.arange(design.shape[1])] += 1 / prior_variance
    covariance = np.linalg.inv(precision)
    means = np.einsum("kij,j->ki", covariance, design.T @ ROWS["y"]) / noise[:, None]
    residuals = np.sum((ROWS["y"] - means @ design.T) ** 2, axis=1) / noise + np.sum(means**2 / prior_variance, axis=1)
    log_joint = -0.5 * (residuals + NUM_ROWS * np.log(2 * np.pi * noise) + np.sum(np.log(prior_variance), axis=1))
    log_joint += -0.5 * np.linalg.slogdet(precision)[1]
    log_joint += np.sum(np.log(2) - 0.5 * h**2 - 0.5 * np.log(2 * np.pi) + log_h, axis=1)
    total = logsumexp(log_joint)
    weights = np.exp(log_joint - total)
    variances = np.diagonal(covariance, axis1=1, axis2=2)
    all_means = np.concatenate([means[:, :1], log_h, means[:, 1:]], axis=1)
    all_variances = np.concatenate([variances[:, :1], 0 * log_h, variances[:, 1:]], axis=1)
    mean = weights @ all_means
    deviation = np.sqrt(weights @ (all_variances + (all_means - mean) ** 2))
    return total + sum(np.log(side[1] - side[0]) for side in sides), mean, deviation


def in_order(sites):
    parts = [sites["mean"][:, None], np.log(sites["scale"]), np.log(sites["noise"])[:, None], sites["u"], sites["v"]]
    return np.concatenate(parts, axis=1)


@pytest.fixture(scope="module")
def posterior():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sparsity, "FEWEST_PARAMETERS", 5)
        patch.setattr(integration, "MOST_PARAMETERS", 10)
        patch.setattr("numpyro_rvga.core.matrices.packing.DENSE_SPEEDUP", 0)
        yield FixedPointVI(effects, integrate="auto").run(ROWS, progress_bar=False)


def test_functions_are_compiled_once_and_a_second_run_compiles_nothing(monkeypatch, count_compilations):
    monkeypatch.setattr(sparsity, "FEWEST_PARAMETERS", 5)
    monkeypatch.setattr(integration, "MOST_PARAMETERS", 10)
    method = FixedPointVI(effects, integrate="auto")
    compiled, _ = count_compilations(lambda: method.run(ROWS, progress_bar=False))
    assert [compiled["jit(_solved)"], compiled["jit(_gradient_at)"]] == [1, 1]
    assert not count_compilations(lambda: method.run(ROWS, progress_bar=False))[0]


def test_scales_and_effects_are_those_of_quadrature(posterior):
    assert posterior.info["integrated"] == ["scale", "noise"] and isinstance(posterior.gaussian.roots, PackedRoots)
    evidence, mean, deviation = exact()
    np.testing.assert_allclose(posterior.elbo, evidence, atol=0.02)
    draws = in_order(posterior.sample_posterior(KEY, (20_000,)))
    np.testing.assert_allclose((draws.mean(0) - mean) / deviation, 0, atol=0.06)
    np.testing.assert_allclose(np.log(draws.std(0) / deviation), 0, atol=0.08)


def test_block_arrows_are_as_the_whole_matrices_of_their_components(posterior, tmp_path):
    q = posterior.gaussian
    theta = posterior.sample_unconstrained(KEY, (40_000,))
    weights, size = np.asarray(q.weights), q.means.shape[1]
    roots = np.array(jax.vmap(lambda k: q.roots.component(k).whole())(jnp.arange(len(weights))))
    covariances = roots @ np.swapaxes(roots, 1, 2)
    steps = np.asarray(theta[:50]) - np.asarray(q.means)[:, None]
    lengths = np.einsum("kni,kij,knj->kn", steps, np.linalg.inv(covariances), steps)
    log_determinants = np.linalg.slogdet(2 * np.pi * covariances)[1]
    expected = logsumexp(np.log(weights)[:, None] - 0.5 * (lengths + log_determinants[:, None]), axis=0)
    np.testing.assert_allclose(q.log_prob(theta[:50]), expected, rtol=1e-7)
    np.testing.assert_allclose(q.roots.variances, np.diagonal(covariances, axis1=1, axis2=2), rtol=1e-8)
    np.testing.assert_allclose(np.diag(q.covariance()), q.deviation() ** 2, rtol=1e-8)
    np.testing.assert_allclose(q.scale_tril() @ q.scale_tril().T, q.covariance(), atol=1e-10)
    standard = np.linalg.solve(q.scale_tril(), (np.asarray(theta) - q.mean).T)
    np.testing.assert_allclose(np.cov(standard), np.eye(size), atol=0.05)
    posterior.save(tmp_path / "posterior.npz")
    again = Posterior.load(tmp_path / "posterior.npz", effects)
    np.testing.assert_array_equal(again.gaussian.log_prob(theta[:5]), q.log_prob(theta[:5]))


def test_khat_is_good_and_draws_are_resampled(posterior):
    assert posterior.khat(ROWS).khat < 0.7
    quantiles = posterior.quantiles(jnp.array([0.1, 0.9]))["u"]
    draws = posterior.sample_posterior(KEY, (20_000,))["u"]
    np.testing.assert_allclose(quantiles, np.quantile(draws, [0.1, 0.9], axis=0), atol=0.04)


def counts(a, b, y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    u = numpyro.sample("u", dist.Normal(0, scale).expand([NUM_A]).to_event(1))
    v = numpyro.sample("v", dist.Normal(0, 1).expand([NUM_B]).to_event(1))
    with numpyro.plate("rows", len(a)):
        numpyro.sample("y", dist.Poisson(jnp.exp(u[a] + v[b])), obs=y)


def test_rows_that_are_not_normal_have_the_bound_of_whole_matrices(monkeypatch):
    rng = np.random.default_rng(1)
    rate = np.exp(0.6 * rng.normal(size=NUM_A)[ROWS["a"]] + 0.5 * rng.normal(size=NUM_B)[ROWS["b"]])
    data = ROWS | {"y": rng.poisson(rate).astype(float)}
    whole = FixedPointVI(counts, integrate=["scale"]).run(data, progress_bar=False)
    monkeypatch.setattr(sparsity, "FEWEST_PARAMETERS", 5)
    monkeypatch.setattr(integration, "MOST_PARAMETERS", 10)
    found = FixedPointVI(counts, integrate=["scale"]).run(data, progress_bar=False)
    assert found.info["integration"]["method"] == "lattice" and isinstance(found.gaussian.roots, PackedRoots)
    np.testing.assert_allclose(found.elbo, whole.elbo, atol=1e-3)
    np.testing.assert_allclose((found.mean - whole.mean) / whole.gaussian.deviation(), 0, atol=0.02)
    np.testing.assert_allclose(found.gaussian.deviation() / whole.gaussian.deviation(), 1, atol=0.02)
    with pytest.raises(NotImplementedError, match="marginal='bound'"):
        FixedPointVI(counts, integrate=["scale"], marginal="importance").run(data, progress_bar=False)


def loadings(group, y=None, num_groups=None):
    loading = numpyro.sample("loading", dist.Normal(1, 0.3))
    with numpyro.plate("groups", num_groups):
        factor = numpyro.sample("factor", dist.Normal(0, 1))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Normal(loading * factor[group], 1.0), obs=y)


def test_a_factor_of_all_effects_is_integrated_out_though_it_starts_at_zero():
    """Against quadrature: given the loading, the rows of a group are normal."""
    num_groups, size = 520, 3
    rng = np.random.default_rng(0)
    y = 0.8 * rng.normal(size=(num_groups, 1)) + rng.normal(size=(num_groups, size))
    axis = np.linspace(0.3, 1.5, 800)
    variance = 1 + size * axis[:, None] ** 2  # of the mean of a group's rows, times their number
    sums, squares = y.sum(axis=1), np.sum(y**2)
    exponent = -0.5 * (squares - np.sum(axis[:, None] ** 2 * sums**2 / variance, axis=1))
    exponent -= 0.5 * num_groups * (np.log(variance[:, 0]) + size * np.log(2 * np.pi))
    log_joint = exponent + stats.norm.logpdf(axis, 1, 0.3)
    mass = np.exp(log_joint - logsumexp(log_joint))
    mean = mass @ axis
    deviation = np.sqrt(mass @ (axis - mean) ** 2)
    data = {"group": np.repeat(np.arange(num_groups), size), "y": y.ravel()}
    found = FixedPointVI(loadings, integrate=["loading"]).run(data, num_groups=num_groups, progress_bar=False)
    assert abs(float(found.mean[0]) - mean) < 0.03 * deviation
    assert abs(float(found.gaussian.deviation()[0]) / deviation - 1) < 0.03
    assert found.elbo == pytest.approx(logsumexp(log_joint) + np.log(axis[1] - axis[0]), abs=0.02)


def several_effects(group, x, y=None):
    scales = numpyro.sample("scales", dist.HalfNormal(1).expand([7]).to_event(1))
    u = numpyro.sample("u", dist.Normal(0, scales).expand([NUM_A, 7]).to_event(2))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(jnp.sum(u[group] * x, -1), NOISE), obs=y)


def test_seven_scales_of_groups_are_integrated_out_as_by_whole_matrices(monkeypatch):
    rng = np.random.default_rng(2)
    group, x = rng.integers(0, NUM_A, 200), rng.normal(size=(200, 7))
    effects = rng.normal(size=(NUM_A, 7)) * np.linspace(0.2, 1.2, 7)
    data = {"group": group, "x": x, "y": np.sum(effects[group] * x, axis=1) + NOISE * rng.normal(size=200)}
    whole = FixedPointVI(several_effects, integrate="auto").run(data, progress_bar=False)
    for name in ("FEWEST_PARAMETERS", "FEWEST_IN_GROUPS"):
        monkeypatch.setattr(sparsity, name, 5)
    monkeypatch.setattr(integration, "MOST_PARAMETERS", 10)
    found = FixedPointVI(several_effects, integrate="auto").run(data, progress_bar=False)
    assert found.info["integrated"] == ["scales"] and isinstance(found.gaussian.roots, PackedRoots)
    np.testing.assert_allclose(found.elbo, whole.elbo, atol=0.1)
    np.testing.assert_allclose((found.mean - whole.mean) / whole.gaussian.deviation(), 0, atol=0.1)
    np.testing.assert_allclose(found.gaussian.deviation() / whole.gaussian.deviation(), 1, atol=0.1)
    assert found.khat(data).khat < 0.7
