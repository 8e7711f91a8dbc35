"""Warnings point at the line that called the package."""

import warnings

import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA, FixedPointVI, Posterior


def regression(X, y=None):
    beta = numpyro.sample("beta", dist.Normal(0, 3).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=X @ beta), obs=y)


def make_rows(count, seed=0):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(count, 2))
    return {"X": X, "y": (rng.random(count) < 0.5).astype(int)}


def merged():
    parts = [RVGA(regression).run(make_rows(30, seed), progress_bar=False) for seed in (0, 1)]
    return lambda: Posterior.merge(parts)


CALLS = {
    "a search cut short": lambda: (
        lambda: FixedPointVI(regression, max_iterations=1).run(make_rows(50), progress_bar=False)
    ),
    "rows at hand, cut short": lambda: (
        lambda: RVGA(regression, max_iterations=1).run(make_rows(50), progress_bar=False)
    ),
    "a stream, its last look too coarse": lambda: (
        lambda: RVGA(regression, first_block=100, max_looks=1, certificate_tolerance=1e-30).run(
            [make_rows(500, 0), make_rows(500, 1)], progress_bar=False
        )
    ),
    "parts merged once": merged,
}


@pytest.mark.parametrize("prepared", CALLS.values(), ids=CALLS)
def test_a_warning_names_the_users_file(prepared):
    call = prepared()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    ours = [w for w in caught if issubclass(w.category, UserWarning) and "jax" not in w.filename]
    assert ours and {w.filename for w in ours} == {__file__}
