"""Mixtures of Gaussians: densities against SciPy's."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats
from scipy.special import logsumexp

from numpyro_rvga.core.gaussians.mixture import GaussianMixture


@pytest.mark.parametrize("spread", [0.1, 1.0, 100.0], ids=["all near", "some near", "all far apart"])
def test_log_density_is_scipys_near_the_components_between_them_and_far_away(spread):
    rng = np.random.default_rng(0)
    count, size = 40, 3
    means = spread * rng.normal(size=(count, size))
    roots = np.tril(0.3 * rng.normal(size=(count, size, size)), -1) + rng.uniform(0.1, 2, (count, 1, 1)) * np.eye(size)
    weights = rng.dirichlet(np.full(count, 0.3))
    near = means[rng.integers(0, count, 500)] + rng.normal(size=(500, size))
    points = np.concatenate([near, 0.5 * (near[:100] + near[100:200]), 30 * near[:57]])  # not whole blocks
    expected = logsumexp(
        [
            np.log(w) + stats.multivariate_normal(m, root @ root.T).logpdf(points)
            for w, m, root in zip(weights, means, roots)
        ],
        axis=0,
    )
    mixture = GaussianMixture(*map(jnp.asarray, (np.log(weights), means, roots)))
    np.testing.assert_allclose(mixture.log_prob(jnp.asarray(points)), expected, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(mixture.log_prob(jnp.asarray(points[:6].reshape(2, 3, size))).ravel(), expected[:6])
    np.testing.assert_allclose(mixture.log_prob(jnp.asarray(points[0])), expected[0])


def test_log_density_of_what_is_no_number_is_none():
    mixture = GaussianMixture(jnp.log(jnp.full(2, 0.5)), jnp.array([[0.0], [50.0]]), jnp.ones((2, 1, 1)))
    assert np.isnan(mixture.log_prob(jnp.array([[0.0], [np.nan]]))).tolist() == [False, True]
