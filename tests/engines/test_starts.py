"""Several starts: posteriors of two modes, by dense quadrature."""

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy.special import logsumexp
from scipy.stats import norm

from numpyro_rvga import RVGA, FixedPointVI

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
