"""family="auto": sites take their own family where the bound is then higher, against closed forms and both bounds."""

import pickle

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import special

from numpyro_rvga import RVGA, Posterior
from numpyro_rvga.core.gaussians import FullGaussian

RNG = np.random.default_rng(0)
COUNTS = np.array([5.0, 0.0, 3.0, 1.0, 7.0, 2.0])
FEW = {"x": RNG.normal(size=8), "y": RNG.poisson(2.0, 8).astype(float)}


def rate(y=None):
    of_rows = numpyro.sample("rate", dist.Exponential(1.5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(of_rows), obs=y)


def beside_a_level(x, y=None, share=0.3):
    """The rows tell the product of the rate and exp(level): the two are strongly correlated."""
    of_rows = numpyro.sample("rate", dist.InverseGamma(3.0, 2.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("seen", dist.Bernoulli(share), obs=(x > 0.9).astype(int))
        numpyro.sample("y", dist.Poisson(of_rows * jnp.exp(level)), obs=y)


def beside_a_share(x, y=None):
    """Of which the rows tell more."""
    beside_a_level(x, y, numpyro.sample("share", dist.Beta(1.0, 2.0)))


def learned(y=None):
    """A prior with a latent parameter is of no family."""
    mean = numpyro.sample("mean", dist.LogNormal(0.0, 1.0))
    of_rows = numpyro.sample("rate", dist.Exponential(1 / mean))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(of_rows), obs=y)


def test_a_conjugate_site_is_exact_and_goes_on():
    method = RVGA(rate, family="auto")
    posterior = method.run({"y": COUNTS}, progress_bar=False)
    a, b = 1 + COUNTS.sum(), 1.5 + len(COUNTS)
    evidence = special.gammaln(a) + np.log(1.5) - a * np.log(b) - special.gammaln(COUNTS + 1).sum()
    np.testing.assert_allclose(posterior.gaussian.natural, [[a, b]], rtol=1e-9)
    np.testing.assert_allclose(posterior.elbo, evidence, rtol=1e-9)
    assert posterior.info["families"] == {"rate": "gamma"}
    bounds = posterior.info["family_bounds"]
    assert bounds["full"] < bounds["rate: gamma"] == posterior.elbo
    np.testing.assert_array_equal(method.state.natural, posterior.gaussian.natural)
    later = posterior.update({"y": COUNTS}, progress_bar=False)
    np.testing.assert_allclose(later.gaussian.natural, [[a + COUNTS.sum(), b + len(COUNTS)]], rtol=1e-9)
    again = pickle.loads(pickle.dumps(method)).run(({"y": COUNTS} for _ in range(2)), init=posterior)
    assert again.num_rows == 3 * len(COUNTS) and again.info["exact"]


def test_where_independence_costs_more_it_is_one_gaussian():
    auto = RVGA(beside_a_level, family="auto").run(FEW, progress_bar=False)
    bounds = auto.info["family_bounds"]
    assert bounds["rate: inverse-gamma"] < bounds["full"] - 0.1 and bounds["full"] == auto.elbo
    assert auto.info["families"] == {} and isinstance(auto.gaussian, FullGaussian)
    assert auto.update(FEW, progress_bar=False).num_rows == 16


def test_one_of_two_sites_may_take_its_family_alone():
    auto = RVGA(beside_a_share, family="auto").run(FEW, progress_bar=False)
    bounds, count = auto.info["family_bounds"], (FEW["x"] > 0.9).sum()
    assert len(bounds) == 4 and auto.info["families"] == {"share": "beta"}
    assert list(bounds.values())[1] < bounds["full"] < bounds["share: beta"] == auto.elbo  # of both
    np.testing.assert_allclose(auto.gaussian.natural, [[1 + count, 2 + 8 - count]], rtol=1e-6)


def test_sites_without_a_family_are_left_to_the_gaussian():
    auto = RVGA(learned, family="auto").run({"y": COUNTS}, progress_bar=False)
    assert auto.info["families"] == {} and list(auto.info["family_bounds"]) == ["full"]


def mixture(x, y=None):
    """Rows that depend on three rates, whose nodes are spread at random."""
    rates = numpyro.sample("rates", dist.Gamma(2.0, 1.5).expand([3]).to_event(1))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(jnp.stack([abs(x), x**2, jnp.ones(len(x))], axis=1) @ rates), obs=y)


def test_bounds_that_are_estimated_are_not_compared():
    auto = RVGA(mixture, family="auto").run(FEW, progress_bar=False)
    assert auto.info["families"] == {} and list(auto.info["family_bounds"]) == ["full"]


def test_warnings_are_those_of_the_posterior_that_is_returned():
    with pytest.warns(UserWarning, match="not the best Gaussian|not maximized"):
        RVGA(learned, family="auto", max_iterations=1).run({"y": COUNTS}, progress_bar=False)


def test_what_has_no_bounds_to_compare_is_refused(tmp_path):
    method, advice = RVGA(rate, family="auto"), "compares bounds, which a stream does not have: .* name the families"
    with pytest.raises(ValueError, match=advice):
        method.run([{"y": COUNTS}, {"y": COUNTS}], progress_bar=False)
    with pytest.raises(ValueError, match=advice):
        method.run({"y": COUNTS}, checkpoint=tmp_path / "file", progress_bar=False)
    with pytest.raises(ValueError, match=advice):
        method.init({"y": COUNTS})
    with pytest.raises(ValueError, match="leave first_block or memory at its default"):
        RVGA(rate, family="auto", memory=10)
    parts = [method.run({"y": COUNTS[part]}, progress_bar=False) for part in (slice(3), slice(3, 6))]
    with pytest.raises(ValueError, match="families by site, which are not merged"):
        Posterior.merge(parts)
