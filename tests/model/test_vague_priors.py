"""Priors that say nothing, as in models that were written for BUGS: the search must find where the data are."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro.distributions import constraints
from scipy.special import digamma, logsumexp, polygamma
from scipy.stats import gamma, invgamma

from numpyro_rvga import RVGA, FixedPointVI

RNG = np.random.default_rng(0)
Y = RNG.normal(3.0, 2.0, 60)
GROUP = np.repeat(np.arange(8), 8)
OF_GROUPS = RNG.normal(RNG.normal(size=8)[GROUP], 0.5)


def variance(y):
    location, v = numpyro.sample("location", dist.Normal(0, 1000)), numpyro.sample("v", dist.InverseGamma(1e-3, 1e-3))
    numpyro.sample("y", dist.Normal(location, jnp.sqrt(v)), obs=y)


def precisions(group, y):
    mean = numpyro.sample("mean", dist.Normal(0, 1000))
    between, within = (numpyro.sample(name, dist.Gamma(1e-3, 1e-3)) for name in ("between", "within"))
    effect = numpyro.sample("effect", dist.Normal(mean, 1 / jnp.sqrt(between)).expand([8]))
    numpyro.sample("y", dist.Normal(effect[group], 1 / jnp.sqrt(within)), obs=y)


def slopes_of_groups(group, x, y):
    names = ("of_intercepts", "of_slopes", "within")
    mean, slope = numpyro.sample("mean", dist.Normal(0, 1000)), numpyro.sample("slope", dist.Normal(0, 1000))
    intercepts, slopes, within = (1 / jnp.sqrt(numpyro.sample(name, dist.Gamma(1e-3, 1e-3))) for name in names)
    with numpyro.plate("groups", 8):
        own = (
            numpyro.sample("own", dist.Normal(mean, intercepts)),
            numpyro.sample("own_slope", dist.Normal(slope, slopes)),
        )
    numpyro.sample("y", dist.Normal(own[0][group] + own[1][group] * x, within), obs=y)


def moments(log_scale, log_weights):
    """Mean and standard deviation over a grid."""
    weights = np.exp(log_weights - logsumexp(log_weights))
    mean = np.sum(weights * log_scale)
    return mean, np.sqrt(np.sum(weights * (log_scale - mean) ** 2))


@pytest.fixture(params=[True, False], ids=["float64", "float32"])
def precision(request):
    with jax.enable_x64(request.param):
        yield


@pytest.mark.usefixtures("precision")
def test_a_vague_variance():
    log_v = np.linspace(-2, 5, 4001)
    n, square = len(Y), np.sum((Y - Y.mean()) ** 2)
    log_p = -0.5 * (n - 1) * log_v - 0.5 * square / np.exp(log_v) + invgamma.logpdf(np.exp(log_v), 1e-3, scale=1e-3)
    mean, deviation = moments(log_v, log_p + log_v)
    posterior = RVGA(variance).run({"y": Y}, progress_bar=False)
    found = float(posterior.mean[1]), float(np.sqrt(posterior.covariance[1, 1]))
    np.testing.assert_allclose(found, (mean, deviation), atol=0.02)
    assert float(posterior.mean[0]) == pytest.approx(Y.mean(), abs=0.01)


@pytest.mark.usefixtures("precision")
def test_vague_precisions_of_groups():
    """Given the precisions, what is left is normal: the means of the groups, and what is around them."""
    between, within = np.meshgrid(np.linspace(-4, 6, 401), np.linspace(1, 3, 201), indexing="ij")
    means = OF_GROUPS.reshape(8, 8).mean(axis=1)
    inside = np.sum((OF_GROUPS - means[GROUP]) ** 2)
    variance_of_means = np.exp(-between) + np.exp(-within) / 8
    log_p = 0.5 * (64 - 8) * within - 0.5 * inside * np.exp(within)
    log_p = log_p - 3.5 * np.log(variance_of_means) - 0.5 * np.sum((means - means.mean()) ** 2) / variance_of_means
    for log_precision in (between, within):
        log_p = log_p + gamma.logpdf(np.exp(log_precision), 1e-3, scale=1e3) + log_precision
    posterior = RVGA(precisions).run({"group": GROUP, "y": OF_GROUPS}, progress_bar=False)
    assert posterior.info["converged"]
    for name, log_precision in (("between", between), ("within", within)):
        mean, deviation = moments(log_precision, log_p)
        index = int(np.ravel(posterior.program.layout.indices[name])[0])
        assert float(posterior.mean[index]) == pytest.approx(mean, abs=0.2 * deviation)
        assert np.sqrt(float(posterior.covariance[index, index])) == pytest.approx(deviation, rel=0.2)


def log_rates(first, second):
    a = numpyro.sample("a", dist.Normal(0, 1000).expand([2]))
    numpyro.sample("first", dist.Poisson(jnp.exp(a[0])), obs=first)
    numpyro.sample("second", dist.Poisson(jnp.exp(a[1])), obs=second)


@pytest.mark.usefixtures("precision")
def test_log_rates_that_may_overflow_are_integrated():
    """Within a prior standard deviation, the density falls by exp(1000): no measure of how wide it is elsewhere."""
    counts = {"first": np.array([150, 133, 170]), "second": np.array([231, 228, 250])}
    posterior = FixedPointVI(log_rates, integrate="auto").run(counts, progress_bar=False)
    sums = np.array([y.sum() for y in counts.values()])
    assert posterior.info["integrated"] == ["a"]
    deviation = np.sqrt(polygamma(1, sums))
    np.testing.assert_allclose(posterior.mean, digamma(sums) - np.log(3), atol=0.05 * deviation.min())
    np.testing.assert_allclose(np.sqrt(np.diagonal(posterior.covariance)), deviation, rtol=0.05)


@pytest.mark.usefixtures("precision")
def test_vague_precisions_of_which_no_draw_is_finite_for_all():
    """In single precision nine draws in ten of each precision are zero, of its logarithm infinite."""
    x = np.tile(np.linspace(-1, 1, 8), 8)
    y = OF_GROUPS + (1 + np.linspace(-1, 1, 8)[GROUP]) * x
    posterior = RVGA(slopes_of_groups).run({"group": GROUP, "x": x, "y": y}, progress_bar=False)
    assert posterior.info["converged"]
    own = np.ravel(posterior.program.layout.indices["own_slope"])
    fits = np.array([np.polyfit(x[:8], each, 1)[0] for each in y.reshape(8, 8)])
    np.testing.assert_allclose(np.asarray(posterior.mean)[own], fits, atol=0.4)


def test_a_start_where_every_draw_of_the_prior_overflows():
    """Where the bound is at its maximum, the expected cases of each age are those that there were."""
    rng = np.random.default_rng(18)
    age, cohort = np.array([(a, c) for a in range(10) for c in range(11) if abs(a - 11 + c) < 6]).T
    at_risk = rng.uniform(20, 200, len(age))
    cases = rng.poisson(at_risk * np.exp(-2 + 0.3 * age - 0.01 * age**2 + 0.1 * (cohort - 5)))

    def model(cases, at_risk, age, cohort):
        tau = numpyro.sample("tau", dist.Gamma(1e-3, 1e-3))
        of_age = numpyro.sample("of_age", dist.Normal(0, 1000).expand([9]))
        walk = numpyro.sample("walk", dist.ImproperUniform(constraints.real, (), (11,)))
        steps = walk[2:] - 2 * walk[1:-1] + walk[:-2]
        numpyro.factor("smooth", dist.Normal(0, 1 / jnp.sqrt(tau)).log_prob(steps).sum())
        numpyro.factor("ends", dist.Normal(0, 3).log_prob(walk[:2]).sum())
        rate = at_risk * jnp.exp(jnp.append(0.0, of_age)[age] + walk[cohort])
        numpyro.sample("cases", dist.Poisson(rate), obs=cases)

    data = {"cases": cases, "at_risk": at_risk, "age": age, "cohort": cohort}
    posterior = RVGA(model).run(data, progress_bar=False)
    assert posterior.info["converged"]
    indices, rows = posterior.program.layout.indices, np.arange(len(age))
    columns = np.zeros((len(age), len(posterior.mean)))
    columns[rows, np.ravel(indices["walk"])[cohort]] = 1
    columns[rows[age > 0], np.ravel(indices["of_age"])[age[age > 0] - 1]] = 1
    variance = np.einsum("np,pq,nq->n", columns, posterior.covariance, columns)
    expected = at_risk * np.exp(columns @ posterior.mean + variance / 2)
    np.testing.assert_allclose(np.bincount(age, expected), np.bincount(age, cases), rtol=1e-2)
