"""Draws of bits that NumPy makes have the distributions of those of a key."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import pytest
import scipy.stats

from numpyro_rvga.core.jaxprs.given_bits import of_given_bits

COUNT = 4000


def drawn(draw):
    given = of_given_bits(draw, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1), COUNT)
    return given, np.asarray(jax.jit(jax.vmap(given.function))(given.words(COUNT), keys))


@pytest.mark.parametrize("x64", [True, False])
@pytest.mark.parametrize(
    "site, expected",
    [
        (dist.Normal(1.0, 2.0).expand([3]), scipy.stats.norm(1, 2)),
        (dist.HalfCauchy(1.0).expand([2]), scipy.stats.halfcauchy()),
        (dist.Exponential(0.5), scipy.stats.expon(scale=2)),
        (dist.Gamma(2.0, 1.0), scipy.stats.gamma(2)),
        (dist.Gamma(0.3, 1.0).expand([2]), scipy.stats.gamma(0.3)),
        (dist.InverseGamma(40.0, 2.0), scipy.stats.invgamma(40, scale=2)),
        (dist.StudentT(3.0, 1.0, 2.0), scipy.stats.t(3, 1, 2)),
        (dist.Beta(0.5, 2.0), scipy.stats.beta(0.5, 2)),
    ],
)
def test_draws_have_their_distribution(site, expected, x64):
    with jax.enable_x64(x64):
        _, draws = drawn(lambda key: site.sample(key).ravel())
    for entry in draws.T:
        assert scipy.stats.kstest(entry, expected.cdf).pvalue > 1e-3
    if draws.shape[1] > 1:
        assert abs(scipy.stats.spearmanr(draws[:, 0], draws[:, 1])[0]) < 0.05


def test_words_are_spread_so_evenly_that_moments_are_nearly_exact():
    _, draws = drawn(lambda key: dist.Normal(1.0, 2.0).expand([3]).sample(key))
    np.testing.assert_allclose(draws.mean(axis=0), 1.0, atol=1e-3)  # 0.03 is a standard error of independent draws
    np.testing.assert_allclose(draws.std(axis=0), 2.0, rtol=1e-3)


def test_numbers_drawn_in_a_loop_are_the_keys():
    given, draws = drawn(dist.Poisson(3.5).sample)
    assert given.num_words == 0
    probabilities = scipy.stats.poisson(3.5).pmf(np.arange(20))
    np.testing.assert_allclose(np.bincount(draws, minlength=20)[:20] / COUNT, probabilities, atol=0.03)


def test_each_place_takes_words_of_its_own_and_compiles_no_generator():
    def draw(key):
        one, other = jax.random.split(key)
        return jnp.stack([jax.random.uniform(one, dtype=jnp.float32), jax.random.uniform(other, dtype=jnp.float32)])

    given, draws = drawn(draw)
    assert given.num_words == 2
    assert abs(np.corrcoef(draws.T)[0, 1]) < 0.05
    text = jax.jit(given.function).lower(given.words(1)[0], jax.random.key(0)).as_text()
    assert "threefry" not in text
