"""Log densities that stay finite where NumPyro's underflow."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from references import potential_of
from scipy.stats import norm, qmc

from numpyro_rvga import FixedPointVI
from numpyro_rvga.model.handlers.stable_densities import with_stable_density

RNG = np.random.default_rng(0)
X, LIMITS = jnp.asarray(RNG.normal(size=(4, 5))), jnp.array([-1.0, 0.2, 1.5])
Y = RNG.integers(0, 4, size=(4, 5))


@pytest.mark.parametrize(
    ("fn", "value"),
    [
        (dist.OrderedLogistic(X, LIMITS), Y),
        (dist.OrderedLogistic(X, LIMITS).to_event(1), Y),
        (dist.OrderedLogistic(X, LIMITS).mask(np.arange(5) > 1), Y),
        (dist.OrderedLogistic(0.3, jnp.array([0.1])).expand([3]), np.array([0, 1, 1])),
        (dist.OrderedLogistic(X, X[..., None] + LIMITS), Y),
        (dist.OrderedLogistic(0.3, LIMITS), np.arange(4)),
    ],
    ids=["plain", "event", "mask", "expanded", "cutpoints of each", "values broadcast"],
)
def test_ordered_logistic_has_the_density_of_numpyro(fn, value):
    stable = with_stable_density(fn)
    assert stable is not fn
    np.testing.assert_allclose(stable.log_prob(value), fn.log_prob(value), rtol=1e-10)


@pytest.mark.parametrize("category", range(4))
@pytest.mark.parametrize("x", [-800.0, -60.0, 60.0, 800.0])
def test_it_is_finite_and_right_where_the_probability_underflows(x, category):
    """There the logistic function is exp(-|.|), and its differences are those of exponentials."""

    def log_prob(x):
        return with_stable_density(dist.OrderedLogistic(x, LIMITS)).log_prob(category)

    bounds = np.array([-np.inf, *np.asarray(LIMITS), np.inf])[[category, category + 1]] - x
    if x > 0:  # sigma(b) = exp(b)
        expected = bounds[1] + np.log1p(-np.exp(bounds[0] - bounds[1])) if category < 3 else 0.0
    else:
        expected = -bounds[0] + np.log1p(-np.exp(bounds[0] - bounds[1])) if category > 0 else 0.0
    value, slope = jax.value_and_grad(log_prob)(x)
    np.testing.assert_allclose(value, expected, rtol=1e-10, atol=1e-20)
    np.testing.assert_allclose(slope, -np.sign(x) * (abs(expected) > 0), atol=1e-10)


def test_cutpoints_in_the_wrong_order_are_impossible():
    fn = with_stable_density(dist.OrderedLogistic(0.0, jnp.array([1.0, -1.0]), validate_args=False))
    np.testing.assert_array_equal(np.isfinite(fn.log_prob(np.arange(3))), [True, False, True])


def test_other_distributions_are_left_as_they_are():
    for fn in (dist.Normal(0, 1), dist.Normal(np.zeros(3), 1).to_event(1), dist.Categorical(probs=np.ones(3) / 3)):
        assert with_stable_density(fn) is fn


def graded(y):
    slopes = numpyro.sample("slopes", dist.LogNormal(0, 0.5).expand([5]).to_event(1))
    cutpoints = numpyro.sample("cutpoints", dist.Normal(0, 1).expand([5]).to_event(1))
    with numpyro.plate("persons", 7):
        ability = numpyro.sample("ability", dist.Normal(0, 1))
    limits = cutpoints[:, None, None] + jnp.array([-0.5, 0.5])
    numpyro.sample("y", dist.OrderedLogistic(slopes[:, None] * ability, limits), obs=y)


def test_a_slope_times_an_ability_has_the_best_gaussian():
    """The bound's value and its natural gradient are those of draws from q, by NumPyro's own density."""
    y = (np.arange(7) + np.arange(5)[:, None] + np.array([0, 1, 1, 0, 1])[:, None]) % 3
    posterior = FixedPointVI(graded).run({"y": y}, progress_bar=False)
    assert posterior.info["converged"]
    potential, _ = potential_of(graded, list(posterior.site_names), y=y)
    mean, root = jnp.asarray(posterior.mean), jnp.linalg.cholesky(jnp.asarray(posterior.covariance))
    z = jnp.asarray(norm.ppf(qmc.Sobol(len(mean), seed=0).random(2**14)))

    @jax.jit
    @jax.value_and_grad
    def bound(m):
        entropy = jnp.sum(jnp.log(jnp.diagonal(root))) + 0.5 * len(m) * np.log(2 * np.pi * np.e)
        return entropy - jnp.mean(jax.vmap(potential)(m + z @ root.T))

    value, gradient = bound(mean)
    np.testing.assert_allclose(posterior.elbo, value, atol=0.03)
    np.testing.assert_allclose(root.T @ gradient, 0, atol=0.02)
