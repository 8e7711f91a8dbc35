"""Rows with kinks, of one and of two predictors: the closed forms of Laplace rows are the truth."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.infer.util import log_density

from numpyro_rvga import RVGA, FixedPointVI

RNG = np.random.default_rng(0)
X = RNG.normal(size=120)
DATA = {"x": X, "y": 1 + 0.5 * X + 0.5 * RNG.laplace(size=120)}


def line(x):
    return numpyro.sample("a", dist.Normal(0, 5)) + numpyro.sample("b", dist.Normal(0, 5)) * x


def absolute_factor(x, y):
    mean = line(x)
    with numpyro.plate("rows", len(x)):
        numpyro.factor("loss", -jnp.abs(y - mean) / 0.5)


def laplace(x, y):
    mean = line(x)
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Laplace(mean, 0.5), obs=y)


def median(x, y):
    mean, scale = line(x), numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.AsymmetricLaplaceQuantile(mean, scale, 0.5), obs=y)


def median_as_laplace(x, y):
    mean, scale = line(x), numpyro.sample("scale", dist.LogNormal(0, 1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Laplace(mean, 2 * scale), obs=y)


def insensitive(x, y):
    mean = line(x)
    with numpyro.plate("rows", len(x)):
        numpyro.factor("loss", -jnp.maximum(0.0, jnp.abs(y - mean) - 0.3) / 0.2)


def many(outcomes):
    rng = np.random.default_rng(1)
    x = rng.normal(size=900)
    return {"x": x, "y": outcomes(rng, 0.5 + 0.5 * x)}


MANY = many(lambda rng, mean: mean + 0.5 * rng.laplace(size=900))


@pytest.mark.parametrize(
    "method, kinked, exact, data",
    [
        (RVGA, absolute_factor, laplace, DATA),
        (FixedPointVI, absolute_factor, laplace, DATA),
        (RVGA, absolute_factor, laplace, MANY),
        (RVGA, median, median_as_laplace, MANY),
    ],
    ids=["RVGA", "FixedPointVI", "many rows", "many rows of two predictors"],
)
def test_kinks_give_the_posterior_that_closed_forms_give(method, kinked, exact, data):
    found = method(kinked).run(data, progress_bar=False)
    truth = method(exact).run(data, progress_bar=False)
    sds = np.sqrt(np.diag(truth.covariance))
    np.testing.assert_allclose(found.mean / sds, truth.mean / sds, atol=0.01)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), sds, rtol=0.005)
    np.testing.assert_allclose(found.elbo, truth.elbo, atol=2e-3)
    assert found.info["converged"]
    assert found.info["elbo_error"] < 1e-3
    assert truth.info["elbo_error"] == 0


def counts(x, y):
    mean, concentration = line(x), numpyro.sample("concentration", dist.Exponential(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.NegativeBinomial2(jnp.exp(mean), concentration), obs=y)


def test_many_rows_are_solved_for_by_few_nodes():
    data = many(lambda rng, mean: rng.negative_binomial(2, 2 / (2 + np.exp(mean))).astype(float))
    method = RVGA(counts)
    found = method.run(data, progress_bar=False)
    truth = FixedPointVI(counts, expectation="quadrature").run(data, progress_bar=False)
    assert found.info["looks"] == 0 and found.info["converged"] and found.info["elbo_error"] < 1e-3
    sds = np.sqrt(np.diag(truth.covariance))
    np.testing.assert_allclose(found.mean / sds, truth.mean / sds, atol=1e-3)
    np.testing.assert_allclose(np.sqrt(np.diag(found.covariance)), sds, rtol=1e-3)
    np.testing.assert_allclose(found.elbo, truth.elbo, atol=1e-4)


@pytest.mark.parametrize("order, sees_kinks", [(0, True), (1, True), (2, False)])
def test_the_order_that_is_asked_for_is_the_one_that_is_used(order, sees_kinks):
    """The Hessian of an absolute loss is zero wherever it exists."""
    found = RVGA(absolute_factor, order=order, scheme="explicit").run(DATA, progress_bar=False)
    assert (np.sqrt(np.diag(found.covariance)).max() < 1) == sees_kinks


def test_an_insensitive_loss_is_at_the_best_gaussian_of_a_dense_grid():
    found = FixedPointVI(insensitive).run(DATA, progress_bar=False)
    mean, root = np.asarray(found.mean), np.linalg.cholesky(found.covariance)
    nodes, weights = np.polynomial.hermite_e.hermegauss(200)

    def bound(mean, root):
        """By 200 nodes along each row's own predictor."""
        design = np.stack([np.ones_like(X), X], axis=1)
        center, spread = design @ mean, np.linalg.norm(design @ root, axis=1)
        residual = DATA["y"][:, None] - center[:, None] - spread[:, None] * nodes
        loss = -np.maximum(0, np.abs(residual) - 0.3) / 0.2
        prior = -0.5 * (mean @ mean + np.sum(root**2)) / 25 - 2 * np.log(5) + 1 + np.log(np.diag(root)).sum()
        return (loss @ weights).sum() / weights.sum() + prior

    np.testing.assert_allclose(found.elbo, bound(mean, root), atol=0.02)
    for seed in range(8):
        turn = np.random.default_rng(seed).normal(size=5)
        moved = mean + 0.3 * root @ turn[:2], root @ (np.eye(2) + 0.3 * np.array([[turn[2], 0], [turn[3], turn[4]]]))
        if np.all(np.diag(moved[1]) > 0):
            assert bound(*moved) < bound(mean, root)


def classes(x, y):
    levels = numpyro.sample("levels", dist.Normal(0, 3).expand([9]).to_event(1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 3).expand([9]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Categorical(logits=levels + slopes * x[:, None]), obs=y)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_the_bound_of_rows_with_many_predictors_is_that_of_nodes_which_the_search_has_not_seen(method):
    """Nine logits by 32 nodes, against draws of theta through NumPyro's own density."""
    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=14), "y": rng.integers(0, 9, 14)}
    found = method(classes, num_samples=32).run(data, progress_bar=False)
    draws = found.sample_posterior(jax.random.key(1), (5000,))
    model = lambda sites: log_density(classes, (data["x"], data["y"]), {}, sites)[0]  # noqa: E731
    ratios = np.asarray(jax.jit(jax.vmap(model))(draws) - found.log_prob(draws))
    truth, noise = ratios.mean(), 3 * ratios.std() / np.sqrt(len(ratios))
    assert abs(found.elbo - truth) < 1.5 * found.info["elbo_error"] + noise
    assert found.info["elbo_error"] < 0.4
    seen = found.info["bound_after"] if method is RVGA else found.info["bounds"][-1]
    assert seen - truth > 0.4  # what the search itself makes of its nodes is no bound


def thresholds(y):
    """Nothing keeps the thresholds in order, and the category between two that have crossed has probability zero."""
    mean = numpyro.sample("mean", dist.Normal(2, 2))
    scale = numpyro.sample("scale", dist.LogNormal(0, 1))
    between = numpyro.sample("between", dist.Normal(jnp.array([1.0, 3.0]), 2).to_event(1))
    cdf = dist.Normal(mean, scale).cdf(jnp.concatenate([jnp.zeros(1), between, 4 * jnp.ones(1)]))
    probs = jnp.maximum(jnp.diff(cdf, prepend=0.0, append=1.0), 0.0)
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Categorical(probs / jnp.sum(probs)), obs=y)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_where_q_reaches_outcomes_that_cannot_be_there_is_no_bound(method):
    rows = {"y": np.repeat(np.arange(5), [8, 5, 3, 6, 7])}
    with pytest.warns(UserWarning, match="density is zero or NaN"):
        posterior = method(thresholds).run(rows, progress_bar=False)
    assert posterior.elbo is None and posterior.info["elbo_error"] == np.inf
    assert np.isfinite(posterior.info["log_evidence_estimate"])
    sites = posterior.sample_posterior(jax.random.key(0), (20_000,))
    crossed = np.mean(np.asarray(sites["between"][:, 0] > sites["between"][:, 1]))
    assert 0 < crossed < 0.01
