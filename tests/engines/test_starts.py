"""Several starts: posteriors of two modes, by dense quadrature."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from numpyro_rvga import RVGA, FixedPointVI
from numpyro_rvga.core.updates.state import StepInfo, new_state
from numpyro_rvga.engines.effort import Effort
from numpyro_rvga.engines.starts import best_of

Y = np.abs(1.5 + 0.4 * np.random.default_rng(0).normal(size=40))


def folded(y, center):
    """Of which only the size of the location is seen: modes near minus and plus the same."""
    location = numpyro.sample("location", dist.Normal(center, 1))
    spread = numpyro.sample("spread", dist.LogNormal(-1, 0.5))
    numpyro.sample("y", dist.FoldedDistribution(dist.Normal(location, spread)), obs=y)


def moments_by_quadrature(center):
    """The share of positive locations, and their mean."""
    location, log_spread = np.meshgrid(np.linspace(-3, 3, 1201), np.linspace(-2, 0.5, 101), indexing="ij")
    spread = np.exp(log_spread)
    log_p = norm.logpdf(location, center, 1) + norm.logpdf(log_spread, -1, 0.5)
    each = [norm.logpdf(sign * Y[:, None, None], location, spread) for sign in (1, -1)]
    weights = log_p + np.logaddexp(*each).sum(axis=0)
    weights = np.exp(weights - logsumexp(weights))
    positive = location > 0
    return weights[positive].sum(), (weights * location)[positive].sum() / weights[positive].sum()


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
@pytest.mark.parametrize("center", [0.2, -0.3])
def test_modes_are_found_and_said(method, center):
    share, mean = moments_by_quadrature(center)
    with pytest.warns(UserWarning, match="q is at one of 2 modes"):
        posterior = method(folded).run({"y": Y}, center=center, progress_bar=False)
    modes = posterior.info["modes"]
    np.testing.assert_allclose(1 / (1 + np.exp(modes[1] - modes[0])), max(share, 1 - share), atol=0.02)
    np.testing.assert_allclose(posterior.mean[0], np.sign(center) * mean, atol=0.02)
    check = posterior.khat({"y": Y})
    assert check.verdict.startswith("doubtful") and "other modes" in check.verdict


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_modes_are_kept_where_finer_expectations_are_called_for(method, monkeypatch):
    monkeypatch.setattr(Effort, "calls_for_more", lambda effort, *_: not effort.is_thorough)
    with pytest.warns(UserWarning, match="q is at one of 2 modes"):
        posterior = method(folded).run({"y": Y}, center=0.2, progress_bar=False)
    assert len(posterior.info["modes"]) == 2
    np.testing.assert_allclose(posterior.mean[0], moments_by_quadrature(0.2)[1], atol=0.02)


def unconverged(mean, bound, decrement):
    """Where a search ended, with a standard deviation of one."""
    state = new_state(np.array([mean]), np.eye(1), None)._replace(log_evidence=np.asarray(bound))
    info = StepInfo(np.asarray(bound), np.asarray(decrement), np.asarray(9), np.asarray(False), np.asarray(True))
    return state, info


@pytest.mark.parametrize("decrement, count", [(5e-4, 2), (0.02, 0)])
def test_searches_that_end_on_their_way_are_at_no_modes(decrement, count):
    """Where no step raised the bound: 3 standard deviations apart, with bounds half a nat apart."""
    best, found = best_of([unconverged(0.0, -5.5, decrement), unconverged(3.0, -5.0, decrement)])
    assert float(best.log_evidence) == -5.0
    assert len(found.modes) == count


def horseshoe(x, y):
    """Of which the posterior is far from any Gaussian."""
    width = x.shape[1]
    scales = numpyro.sample("scales", dist.HalfCauchy(np.ones(width)))
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    slopes = numpyro.sample("slopes", dist.Normal(np.zeros(width), 1))
    numpyro.sample("y", dist.Normal(x @ (tau * scales * slopes), 0.05), obs=y)


def test_a_search_that_crawls_far_from_its_end_is_left_with_a_warning():
    x = np.random.default_rng(0).normal(size=(20, 100))
    unconverged, approximate = (pytest.warns(UserWarning, match=m) for m in ("q is not the best", "there is no bound"))
    with unconverged, approximate:
        posterior = RVGA(horseshoe).run({"x": x, "y": x[:, 0]}, progress_bar=False)
    assert posterior.info["squared_natural_gradient"] > 10
    assert posterior.info["mean_iterations"] < 100  # of 500 that it may take
