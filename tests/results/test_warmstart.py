"""Starting NUTS, Predictive and NeuTra from a posterior whose exact answer is known."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from gaussian_posteriors import (
    NOISE,
    constrained_posterior,
    exact_regression,
    posterior_of,
    regression,
    regression_answer,
    regression_data,
)
from numpyro.diagnostics import summary
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.reparam import NeuTraReparam
from numpyro.infer.util import log_density
from scipy.stats import norm

from numpyro_rvga import RVGA, FixedPointVI, Posterior
from numpyro_rvga.core.gaussians import FullGaussian
from numpyro_rvga.results import warmstart

KEY = jax.random.key(5)
SITES = ("slopes", "intercept")


@pytest.fixture(scope="module")
def data():
    return {name: jnp.asarray(array) for name, array in regression_data().items()}


@pytest.fixture(scope="module")
def posterior():
    return exact_regression(regression_data())


@pytest.fixture(scope="module")
def covariance():
    return regression_answer(regression_data())[1]


@pytest.fixture(scope="module")
def warm_run(posterior, data):
    return run(posterior.nuts(), data, posterior.init_params(KEY, 4))


def run(kernel, data, init_params):
    mcmc = MCMC(kernel, num_warmup=100, num_samples=500, num_chains=4, chain_method="vectorized", progress_bar=False)
    mcmc.run(jax.random.key(0), **data, init_params=init_params, extra_fields=("num_steps",))
    return mcmc


def masses_at_start(kernel, posterior, data):
    """What NUTS makes of its arguments (it writes them into the dict that it was given)."""
    state = kernel.init(KEY, 10, posterior.init_params(KEY), model_args=(), model_kwargs=data)
    return state.adapt_state.inverse_mass_matrix


# ---------------------------------------------------------------------- NUTS
def test_warm_chains_reach_the_exact_posterior(warm_run):
    mean, covariance = regression_answer(regression_data())
    draws = warm_run.get_samples(group_by_chain=True)
    statistics = summary(draws)
    for name in SITES:
        assert np.max(statistics[name]["r_hat"]) < 1.02
        assert np.min(statistics[name]["n_eff"]) > 800
    theta = np.concatenate([np.asarray(draws[name]).reshape(2000, -1) for name in SITES], axis=1)
    deviation = np.sqrt(np.diagonal(covariance))
    assert np.all(np.abs(theta.mean(0) - mean) < 0.15 * deviation)
    np.testing.assert_allclose(
        np.cov(theta.T) / np.outer(deviation, deviation), covariance / np.outer(deviation, deviation), atol=0.15
    )


def test_trajectories_are_short_and_would_not_be_in_another_site_order(warm_run, posterior, data, covariance):
    alphabetical = covariance[np.ix_([2, 0, 1], [2, 0, 1])]
    kernel = posterior.nuts(inverse_mass_matrix={SITES: jnp.asarray(alphabetical)})
    misread_run = run(kernel, data, posterior.init_params(KEY, 4))
    right, wrong = (np.median(mcmc.get_extra_fields()["num_steps"]) for mcmc in (warm_run, misread_run))
    assert right <= 7
    assert wrong > 2 * right


@pytest.mark.parametrize("options", [{}, {"dense_mass": True}])
def test_mass_matrix_is_the_covariance_under_the_models_site_order(posterior, data, covariance, options):
    kernel = posterior.nuts(**options)
    assert isinstance(kernel, NUTS)
    masses = masses_at_start(kernel, posterior, data)
    assert list(masses) == [SITES]
    np.testing.assert_allclose(masses[SITES], covariance, rtol=1e-3, atol=1e-7)


def test_diagonal_mass_matrix_is_the_variances(posterior, data, covariance):
    masses = masses_at_start(posterior.nuts(dense_mass=False), posterior, data)
    np.testing.assert_allclose(masses[SITES], np.diagonal(covariance), rtol=1e-3)


def test_of_many_parameters_the_mass_matrix_is_diagonal(posterior, data, covariance, monkeypatch):
    monkeypatch.setattr(warmstart, "MOST_DENSE", posterior.mean.size - 1)
    masses = masses_at_start(posterior.nuts(), posterior, data)
    np.testing.assert_allclose(masses[SITES], np.diagonal(covariance), rtol=1e-3)


def test_block_mass_matrix_takes_each_blocks_covariance_and_other_variances(posterior, data, covariance):
    masses = masses_at_start(posterior.nuts(dense_mass=[("slopes",)]), posterior, data)
    np.testing.assert_allclose(masses[("slopes",)], covariance[:2, :2], rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(masses[("intercept",)], covariance[2:, 2], rtol=1e-3)


def test_the_users_keywords_win(posterior, data):
    identity = {SITES: jnp.eye(3)}
    kernel = posterior.nuts(step_size=0.123, inverse_mass_matrix=identity, adapt_mass_matrix=True, max_tree_depth=4)
    state = kernel.init(KEY, 0, posterior.init_params(KEY), model_args=(), model_kwargs=data)
    assert float(state.adapt_state.step_size) == pytest.approx(0.123)
    np.testing.assert_array_equal(state.adapt_state.inverse_mass_matrix[SITES], np.eye(3))
    assert kernel._adapt_mass_matrix is True
    assert kernel._max_tree_depth == 4


def test_each_kernel_has_a_mass_matrix_of_its_own(posterior):
    posterior.nuts()._inverse_mass_matrix.clear()
    assert list(posterior.nuts()._inverse_mass_matrix) == [SITES]


# ---------------------------------------------------------------------- initial values
@pytest.mark.parametrize("num_chains, leading", [(1, ()), (2, (2,)), (5, (5,))])
def test_initial_values_have_a_chain_axis_for_several_chains_only(posterior, num_chains, leading):
    shapes = {name: value.shape for name, value in posterior.init_params(KEY, num_chains).items()}
    assert shapes == {"slopes": (*leading, 2), "intercept": leading}


@pytest.mark.parametrize("num_chains", [0, 2.5])
def test_initial_values_of_no_chains_are_refused(posterior, num_chains):
    with pytest.raises(ValueError, match=f"num_chains must be a positive integer, not {num_chains}"):
        posterior.init_params(jax.random.key(0), num_chains)


def test_initial_values_are_unconstrained_draws_spread_wider_than_q():
    posterior = constrained_posterior()
    values = posterior.init_params(KEY, 20_000)
    theta = np.column_stack([values["shift"], values["share"], values["deviation"]])
    np.testing.assert_allclose(theta.mean(0), posterior.mean, atol=0.03)
    np.testing.assert_allclose(np.cov(theta.T), 1.5**2 * np.asarray(posterior.covariance), atol=0.05)


# ---------------------------------------------------------------------- guide
def reordered_posterior():
    """The same law, with its sites flattened in another order than the one in which a guide meets them."""
    posterior = constrained_posterior()
    layout = posterior.program.layout
    order = np.array([3, 0, 1, 2])
    posterior.program.layout = type(layout)({name: layout.shapes[name] for name in ("deviation", "shift", "share")})
    return Posterior(posterior.program, FullGaussian(posterior.mean[order], posterior.scale[order]), num_rows=3)


@pytest.fixture(
    scope="module",
    params=[lambda: exact_regression(regression_data()), constrained_posterior, reordered_posterior],
    ids=["conjugate", "constrained", "reordered"],
)
def guided(request):
    posterior = request.param()
    return posterior, *posterior.as_guide()


def test_guide_parameters_are_a_location_and_a_cholesky_factor(guided):
    _, _, params = guided
    assert set(params) == {"auto_loc", "auto_scale_tril"}
    tril = np.asarray(params["auto_scale_tril"])
    assert np.all(np.diagonal(tril) > 0)
    assert np.all(np.triu(tril, 1) == 0)


def test_guide_has_the_posteriors_median_and_quantiles(guided):
    posterior, guide, params = guided
    quantiles = guide.quantiles(params, [0.1, 0.5, 0.9])
    found = posterior.quantiles([0.1, 0.5, 0.9])
    for name in posterior.site_names:
        np.testing.assert_allclose(quantiles[name], found[name], rtol=1e-4, atol=1e-4, err_msg=name)
        np.testing.assert_allclose(guide.median(params)[name], posterior.median()[name], rtol=1e-4, atol=1e-4)


def test_guide_draws_have_the_posteriors_log_densities(guided):
    """Log densities under q have mean -(entropy) and variance P / 2 only if location, scale and order all agree."""
    posterior, guide, params = guided
    draws = jax.jit(lambda key: guide.sample_posterior(key, params, sample_shape=(5000,)))(KEY)
    size = posterior.mean.size
    entropy = 0.5 * size * (1 + np.log(2 * np.pi)) + np.log(np.diagonal(posterior.scale_tril)).sum()
    log_densities = np.asarray(posterior.log_prob(draws))
    np.testing.assert_allclose(log_densities.mean(), -entropy, atol=0.1)
    np.testing.assert_allclose(log_densities.var(), size / 2, rtol=0.2)


def test_guide_serves_predictive(posterior):
    guide, params = posterior.as_guide()
    X = np.array([[0.0, 0.0], [1.0, -2.0], [3.0, 10.0]])
    drawn = Predictive(regression, guide=guide, params=params, num_samples=4000)(KEY, jnp.asarray(X))["y"]
    mean, covariance = regression_answer(regression_data())
    design = np.column_stack([X, np.ones(3)])
    np.testing.assert_allclose(drawn.mean(0), design @ mean, atol=0.05)
    np.testing.assert_allclose(drawn.var(0), np.einsum("np,pq,nq->n", design, covariance, design) + NOISE**2, rtol=0.1)


def test_neutra_turns_an_exact_posterior_into_the_standard_normal(posterior, data):
    neutra = NeuTraReparam(*posterior.as_guide())
    points = jax.random.normal(KEY, (6, 3))

    def log_joint(z):
        return log_density(neutra.reparam(regression), (), data, {"auto_shared_latent": z})[0]

    differences = np.array([log_joint(z) - log_joint(jnp.zeros(3)) for z in points])
    np.testing.assert_allclose(differences, -0.5 * np.sum(np.asarray(points) ** 2, axis=1), atol=2e-3)


def test_guide_of_a_subsampling_model_is_made_on_few_rows():
    def model(x, y=None):
        slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
        with numpyro.plate("rows", x.shape[0], subsample_size=4) as index:
            numpyro.sample("y", dist.Normal(slope * x[index], 1.0), obs=y[index])

    x = np.arange(6.0)
    guide, params = posterior_of(model, {"x": x, "y": x}, np.array([0.7]), np.array([[0.2]])).as_guide()
    np.testing.assert_allclose(guide.median(params)["slope"], 0.7, rtol=1e-6)


def two_components(y):
    low = numpyro.sample("low", dist.Normal(0, 2))
    with numpyro.plate("rows", len(y)):
        state = numpyro.sample("state", dist.Bernoulli(0.4), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(low + 1.5 * state, 1.0), obs=y)


def test_nuts_sums_over_the_states_that_the_posterior_has_summed_over():
    rng = np.random.default_rng(0)
    y = 0.5 + 1.5 * rng.binomial(1, 0.4, 30) + rng.normal(size=30)
    posterior = RVGA(two_components).run({"y": y}, progress_bar=False)
    draws = run(posterior.nuts(), {"y": jnp.asarray(y)}, posterior.init_params(KEY, 4)).get_samples()["low"]

    grid = np.linspace(-2, 3, 2001)
    density = 0.6 * norm.pdf(y, grid[:, None]) + 0.4 * norm.pdf(y, grid[:, None] + 1.5)
    weights = np.exp(np.log(density).sum(1)) * norm.pdf(grid, 0, 2)
    weights /= weights.sum()
    mean = weights @ grid
    deviation = np.sqrt(weights @ (grid - mean) ** 2)
    assert abs(draws.mean() - mean) < 0.15 * deviation
    assert abs(np.log(draws.std() / deviation)) < 0.1
    with pytest.raises(NotImplementedError, match="'state' is a latent variable that q sums over"):
        posterior.as_guide()


def with_param(x, y=None):
    level = numpyro.param("level", 0.0)
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Normal(level + slope * x, 0.5), obs=y)


def test_guide_predicts_with_learned_parameters():
    x = np.linspace(-1.0, 1.0, 40)
    posterior = FixedPointVI(with_param).run({"x": x, "y": 5.0 + x}, progress_bar=False)
    guide, params = posterior.as_guide()
    predicted = Predictive(with_param, guide=guide, params=params, num_samples=400)(KEY, x)["y"]
    np.testing.assert_allclose(predicted.mean(0), 5.0 + x, atol=0.2)


def test_blocks_of_unknown_sites_are_refused(posterior):
    with pytest.raises(ValueError, match=r"dense_mass names 'slope', .*: these are slopes, intercept"):
        posterior.nuts(dense_mass=[("slope",)])
