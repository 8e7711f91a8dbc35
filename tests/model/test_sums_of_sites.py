"""Observed sites of one term each, as a loop in Python makes them, are summed where the sum needs few predictors."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from references import potential_of

from numpyro_rvga import RVGA, FixedPointVI

NUM_RELEASES = 6
RNG = np.random.default_rng(0)


def cells(survival, recapture, count):
    steps = np.arange(count)
    first = survival ** (steps + 1) * (1 - recapture) ** steps * recapture
    return [first, 1 - first.sum(keepdims=True)]


def recaptures():
    """Of animals released in each year, by year of recapture: rows of unequal lengths."""
    counts = range(NUM_RELEASES, 0, -1)
    return {f"m{n}": RNG.multinomial(40, np.concatenate(cells(0.7, 0.4, n))) for n in counts}


DATA = recaptures()


def release_by_release(**data):
    survival = numpyro.sample("survival", dist.Uniform(0, 1))
    recapture = numpyro.sample("recapture", dist.Beta(1, 1))
    for name, row in data.items():
        probs = jnp.concatenate(cells(survival, recapture, len(row) - 1))
        numpyro.sample(f"{name}_seen", dist.Multinomial(40, probs=probs), obs=row)


def with_years(**data):
    """Survival by year: the first release sees all that the others see."""
    spread = numpyro.sample("spread", dist.HalfNormal(1))
    with numpyro.plate("years", NUM_RELEASES):
        survival = jax.nn.sigmoid(1 + spread * numpyro.sample("year", dist.Normal(0, 1)))
    recapture = numpyro.sample("recapture", dist.Beta(1, 1))
    for start, (name, row) in enumerate(data.items()):
        alive = jnp.cumprod(survival[start:])
        first = alive * (1 - recapture) ** np.arange(len(row) - 1) * recapture
        probs = jnp.concatenate([first, 1 - first.sum(keepdims=True)])
        numpyro.sample(f"{name}_seen", dist.Multinomial(40, probs=probs), obs=row)


def each_its_own(**data):
    """No release sees what another does."""
    for name, row in data.items():
        concentration = jnp.exp(numpyro.sample(f"{name}_log", dist.Normal(0, 1).expand([len(row)]).to_event(1)))
        numpyro.sample(f"{name}_seen", dist.DirichletMultinomial(concentration, 40), obs=row)


def with_closed_forms(**data):
    """Totals, one by one: of a log rate that is an entry of theta. Together they keep their closed form."""
    level = numpyro.sample("level", dist.Normal(0, 3))
    for name, row in data.items():
        numpyro.sample(f"{name}_total", dist.Poisson(jnp.exp(level)), obs=row.sum())


@pytest.mark.parametrize(
    ("model", "num_terms"),
    [(release_by_release, 1), (with_years, 1), (each_its_own, NUM_RELEASES), (with_closed_forms, 1)],
)
def test_sites_are_summed_where_the_sum_needs_no_more_predictors(model, num_terms):
    posterior = RVGA(model, scheme="laplace").run(DATA, progress_bar=False)
    assert len(posterior.program.terms) == num_terms
    assert posterior.num_rows == NUM_RELEASES


@pytest.fixture(scope="module")
def posterior():
    return RVGA(release_by_release).run(DATA, progress_bar=False)


def test_moments_are_those_of_a_dense_grid(posterior):
    names = ("survival", "recapture")
    axis = np.linspace(-2, 3, 400)
    grid = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    order = [names.index(name) for name in posterior.site_names]
    potential, _ = potential_of(release_by_release, names, **DATA)
    log_density = -np.asarray(jax.jit(jax.vmap(potential))(grid))
    weights = np.exp(log_density - log_density.max())
    mean = np.average(grid, axis=0, weights=weights)
    sd = np.sqrt(np.average((grid - mean) ** 2, axis=0, weights=weights))
    np.testing.assert_allclose((posterior.mean - mean[order]) / sd[order], 0, atol=0.05)
    np.testing.assert_allclose(np.sqrt(np.diag(posterior.covariance)) / sd[order], 1, atol=0.05)


def test_each_site_keeps_its_log_likelihood(posterior):
    tree = posterior.to_arviz(DATA, num_samples=5)
    assert {str(name) for name in tree["log_likelihood"].data_vars} == {f"{name}_seen" for name in DATA}


def test_hyperparameters_are_looked_for_in_each_of_the_sites(posterior):
    found = FixedPointVI(release_by_release, integrate="auto").run(DATA, progress_bar=False)
    assert found.info["integrated"] and found.info["converged"]
    np.testing.assert_allclose(found.mean, posterior.mean, atol=0.01)


NOISE = 0.6


def autoregression(y, is_observed):
    c = numpyro.sample("c", dist.Normal(0, 1))
    slopes = numpyro.sample("slopes", dist.Normal(0, 0.5).expand([2]).to_event(1))
    for t in range(2, len(y)):
        location = c + slopes[0] * y[t - 1] + slopes[1] * y[t - 2]
        with handlers.mask(mask=is_observed[t]), handlers.scale(scale=0.5 + 0.5 * (t % 2)):
            numpyro.sample(f"y_{t}", dist.Normal(location, NOISE), obs=y[t])


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_like_sites_of_a_loop_are_the_elements_of_one_with_the_conjugate_posterior(method):
    rng = np.random.default_rng(0)
    y, is_observed = rng.normal(size=30), rng.random(30) < 0.8
    posterior = method(autoregression).run({"y": y, "is_observed": is_observed}, progress_bar=False)
    assert [len(terms.sites) for terms in posterior.program.terms] == [28]
    design = np.column_stack([np.ones(28), y[1:-1], y[:-2]])
    weights = is_observed[2:] * (0.5 + 0.5 * (np.arange(2, 30) % 2)) / NOISE**2
    precision = (design.T * weights) @ design + np.diag([1.0, 4.0, 4.0])
    np.testing.assert_allclose(posterior.mean, np.linalg.solve(precision, design.T @ (weights * y[2:])), atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, np.linalg.inv(precision), atol=1e-6)


def of_several_scales(y):
    location = numpyro.sample("location", dist.Normal(0, 5))
    scales = numpyro.sample("scales", dist.LogNormal(0, 0.5).expand([5]).to_event(1))
    for t in range(5):
        numpyro.sample(f"y_{t}", dist.Normal(location, scales[t]), obs=y[t])


def of_probabilities(y):
    """Together, too, their probabilities are the logistic function of an entry."""
    level = numpyro.sample("level", dist.Normal(0, 5).expand([5]).to_event(1))
    for t in range(5):
        numpyro.sample(f"y_{t}", dist.Bernoulli(jax.nn.sigmoid(level[t])), obs=y[t])


def of_unlike_probabilities(y):
    """One by one they have a closed form. Together the affine functions are not read off the probabilities."""
    level = numpyro.sample("level", dist.Normal(0, 5).expand([5]).to_event(1))
    for t in range(5):
        before = level[t - 1] if t % 2 else 0.0
        numpyro.sample(f"y_{t}", dist.Bernoulli(jax.nn.sigmoid(level[t] + before)), obs=y[t])


def graded(y):
    """Items one by one, of several persons each."""
    slopes = numpyro.sample("slopes", dist.LogNormal(0, 0.5).expand([5]).to_event(1))
    cutpoints = numpyro.sample("cutpoints", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("persons", 7):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
    for j in range(5):
        limits = cutpoints[j] + jnp.array([-0.5, 0.5])
        outcomes = (jnp.arange(7) + j + y[j]) % 3
        numpyro.sample(f"y_{j}", dist.OrderedLogistic(slopes[j] * ability, limits), obs=outcomes)


def test_like_sites_of_several_elements_are_one_term_without_a_closed_form():
    """The terms' sum is that of the sites, at any theta."""
    y = np.array([0, 1, 1, 0, 1])
    program = FixedPointVI(graded).run({"y": y}, progress_bar=False).program
    assert [terms.summed for terms in program.terms] == [tuple(f"y_{j}" for j in range(5))]
    assert program.terms[0].num_predictors <= 4
    theta = np.random.default_rng(0).normal(size=program.layout.size)
    sites = program.layout.unravel(theta)
    ability = np.asarray(sites["ability"])
    expected = 0.0
    for j in range(5):
        limits = sites["cutpoints"][j] + np.array([-0.5, 0.5])
        predictor = np.exp(sites["slopes"][j]) * ability
        expected += float(dist.OrderedLogistic(predictor, limits).log_prob((np.arange(7) + j + y[j]) % 3).sum())
    found = program.terms[0].log_probs(jnp.asarray(theta), program.inputs(program.rows({"y": y})))
    np.testing.assert_allclose(np.sum(found), expected, rtol=1e-10)


@pytest.mark.parametrize(
    ("model", "num_terms"), [(of_several_scales, 1), (of_probabilities, 1), (of_unlike_probabilities, 5)]
)
def test_sites_with_closed_forms_keep_them(model, num_terms):
    posterior = RVGA(model).run({"y": np.array([0, 1, 1, 0, 1])}, progress_bar=False)
    assert [terms.closed_form is not None for terms in posterior.program.terms] == [True] * num_terms
