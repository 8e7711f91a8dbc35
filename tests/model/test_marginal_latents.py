"""Latent variables of single rows, integrated out of their row: against the marginal models written by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest

from numpyro_rvga import RVGA

RNG = np.random.default_rng(0)
SCHOOLS = {"sd": np.array([15.0, 10, 16, 11, 9, 11, 10, 18]), "y": np.array([28.0, 8, -3, 7, -1, 1, 18, 12])}
X = RNG.normal(size=40)
FIRST = RNG.random(40) < 0.3
MIXED = {"x": X, "y": np.where(FIRST, 1.2, -0.8) * X + 0.3 * RNG.normal(size=40)}
COUNTS = {"x": X, "y": RNG.poisson(np.exp(0.5 * X) * RNG.gamma(2.0, 0.5, size=40)).astype(float)}


def schools(sd, y=None):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(sd)):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sd), obs=y)


def schools_by_hand(sd, y=None):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("rows", len(sd)):
        numpyro.sample("y", dist.Normal(mu, jnp.sqrt(sd**2 + tau**2)), obs=y)


def mixture(x, y=None):
    b = numpyro.sample("b", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    p = numpyro.sample("p", dist.Beta(2, 2))
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Bernoulli(p), infer={"enumerate": "parallel"})
        numpyro.sample("y", dist.Normal(b[z] * x, 0.3), obs=y)


def mixture_by_hand(x, y=None):
    b = numpyro.sample("b", dist.Normal(jnp.array([-1.0, 1.0]), 1).to_event(1))
    p = numpyro.sample("p", dist.Beta(2, 2))
    with numpyro.plate("rows", len(x)):
        first, second = (dist.Normal(b[i] * x, 0.3).log_prob(y) for i in (0, 1))
        numpyro.factor("y", jnp.logaddexp(jnp.log1p(-p) + first, jnp.log(p) + second))


def frailty(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2))
    with numpyro.plate("rows", len(x)):
        f = numpyro.sample("f", dist.Gamma(2.0, 2.0))
        numpyro.sample("y", dist.Poisson(f * jnp.exp(w * x)), obs=y)


def frailty_by_hand(x, y=None):
    w = numpyro.sample("w", dist.Normal(0, 2))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.GammaPoisson(2.0, 2.0 / jnp.exp(w * x)), obs=y)


DATA = {schools: SCHOOLS, mixture: MIXED, frailty: COUNTS}


@functools.cache
def fitted(model):
    """As "auto" takes it."""
    return RVGA(model).run(DATA[model], progress_bar=False)


@pytest.mark.parametrize(
    "model, by_hand", [(schools, schools_by_hand), (mixture, mixture_by_hand), (frailty, frailty_by_hand)]
)
def test_the_posterior_is_that_of_the_marginal_model(model, by_hand):
    found, expected = fitted(model), RVGA(by_hand).run(DATA[model], progress_bar=False)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-4)
    np.testing.assert_allclose(found.covariance, expected.covariance, atol=1e-4)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=1e-3)


def one_factor(y):
    """Each row depends on 18 parameters, all that there are."""
    loadings = numpyro.sample("loadings", dist.LogNormal(0, 0.5).expand([9]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5).expand([9]).to_event(1))
    with numpyro.plate("rows", len(y)):
        f = numpyro.sample("f", dist.Normal(0, 1))
        numpyro.sample("y", dist.Normal(f[..., None] * loadings, noise).to_event(1), obs=y)


def one_factor_by_hand(y):
    loadings = numpyro.sample("loadings", dist.LogNormal(0, 0.5).expand([9]).to_event(1))
    noise = numpyro.sample("noise", dist.LogNormal(-1, 0.5).expand([9]).to_event(1))
    with numpyro.plate("rows", len(y)):
        covariance = jnp.outer(loadings, loadings) + jnp.diag(noise**2)
        numpyro.sample("y", dist.MultivariateNormal(jnp.zeros(9), covariance), obs=y)


def test_rows_that_depend_on_many_parameters_are_one_factor_of_all():
    """Each row by itself would take as many draws as all rows together do."""
    rng = np.random.default_rng(4)
    data = {"y": rng.normal(size=(30, 1)) * np.linspace(0.5, 1.5, 9) + 0.4 * rng.normal(size=(30, 9))}
    found, expected = (RVGA(model).run(data, progress_bar=False) for model in (one_factor, one_factor_by_hand))
    assert [terms.by_draws for terms in found.program.terms] == [True]
    deviations = np.sqrt(np.diagonal(expected.covariance))
    assert np.abs(found.mean - expected.mean).max() < 0.05 * np.min(deviations)
    np.testing.assert_allclose(np.sqrt(np.diagonal(found.covariance)), deviations, rtol=0.05)
    assert abs(found.elbo - expected.elbo) < 0.02
    draws = found.sample_posterior(jax.random.key(0), (2000,), data=data)  # the row's own given the others: by Bayes
    precise = np.asarray(draws["loadings"] / draws["noise"] ** 2)
    means = (precise @ data["y"].T) / (1 + np.sum(np.asarray(draws["loadings"]) * precise, axis=1, keepdims=True))
    np.testing.assert_allclose(np.mean(np.asarray(draws["f"]), axis=0), np.mean(means, axis=0), atol=0.05)


def test_options_are_checked():
    with pytest.raises(ValueError, match="local must be one of 'auto', 'marginal', 'prior'"):
        RVGA(schools, local="exact")


def test_counts_without_a_largest_value_are_refused():
    def model(x, y=None):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(x)):
            n = numpyro.sample("n", dist.Poisson(3.0))
            numpyro.sample("y", dist.Normal(w * n, 1.0), obs=y)

    with pytest.raises(NotImplementedError, match=r"site 'n' is a discrete latent.*Categorical\(logits=dist.Poisson"):
        RVGA(model, local="marginal").run(MIXED, progress_bar=False)


def test_discrete_ones_have_no_conditional_prior_to_stand_for_them():
    with pytest.raises(NotImplementedError, match=r"site 'z' is a discrete latent.*local='marginal'"):
        RVGA(mixture, local="prior").run((blocks for blocks in [MIXED]), progress_bar=False)


def test_draws_of_states_follow_their_probabilities_given_the_row():
    posterior = fitted(mixture)
    drawn = posterior.sample_posterior(jax.random.key(0), (2000,), data=MIXED)
    b, p = drawn["b"], drawn["p"][:, None]
    first, second = (dist.Normal(b[:, [i]] * X, 0.3).log_prob(MIXED["y"]) for i in (0, 1))
    expected = jax.nn.sigmoid(jnp.log(p) + second - jnp.log1p(-p) - first)
    assert drawn["z"].shape == (2000, 40)
    np.testing.assert_allclose(drawn["z"].mean(0), expected.mean(0), atol=0.04)


def test_draws_of_normal_variables_follow_their_conditional_normal():
    posterior = fitted(schools)
    drawn = posterior.sample_posterior(jax.random.key(0), (4000,), data=SCHOOLS)
    mu, tau = drawn["mu"][:, None], drawn["tau"][:, None]
    precision = 1 / tau**2 + 1 / SCHOOLS["sd"] ** 2
    mean = (mu / tau**2 + SCHOOLS["y"] / SCHOOLS["sd"] ** 2) / precision
    z = (drawn["theta"] - mean) * jnp.sqrt(precision)
    np.testing.assert_allclose(z.mean(0), 0, atol=0.06)
    np.testing.assert_allclose(z.std(0), 1, atol=0.04)


def test_draws_of_other_variables_follow_their_conditional_density():
    posterior = fitted(frailty)
    drawn = posterior.sample_posterior(jax.random.key(0), (4000,), data=COUNTS)
    rate = 2 + jnp.exp(drawn["w"][:, None] * X)  # gamma given a Poisson outcome
    shape = 2 + COUNTS["y"]
    z = (drawn["f"] * rate - shape) / np.sqrt(shape)
    np.testing.assert_allclose(z.mean(0), 0, atol=0.07)
    np.testing.assert_allclose(z.std(0), 1, atol=0.07)


def test_rows_log_likelihoods_are_integrals():
    program = fitted(frailty).program
    found = program.log_likelihood(jnp.array([0.4]), program.inputs(COUNTS))["y"]
    expected = dist.GammaPoisson(2.0, 2.0 / jnp.exp(0.4 * X)).log_prob(COUNTS["y"])
    np.testing.assert_allclose(found, jax.device_get(expected), atol=1e-5)


def three_abilities(successes, trials):
    level, slope, scale = (numpyro.sample(n, dist.HalfNormal(1.0).expand([3]).to_event(1)) for n in ("a", "b", "c"))
    with numpyro.plate("rows", len(successes)):
        z = numpyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))
        first, second, third = (level - slope + scale * z).T
        chance = jax.nn.sigmoid(first) * jax.nn.sigmoid(second) * (1 - 0.9 * jax.nn.sigmoid(third))
        numpyro.sample("successes", dist.Binomial(trials, chance), obs=successes)


def test_rows_whose_integrals_take_too_long_are_solved_for_with_their_latent_variables():
    successes = np.random.default_rng(0).binomial(20, 0.2, 26)
    posterior = RVGA(three_abilities).run({"successes": successes, "trials": np.full(26, 20)}, progress_bar=False)
    assert posterior.info["rows"] == "joint" and "local='marginal' takes them" in posterior.info["reason"]
    assert "z" in posterior.site_names


NOISES = {
    "kinked": (lambda z, unit: dist.Laplace(z, unit), 1.0),
    "asymmetric": (lambda z, unit: dist.AsymmetricLaplace(z, unit, 2.0), 1.0),
    "heavy-tailed in other units": (lambda z, unit: dist.StudentT(3.0, z, unit), 1e4),
}


@pytest.mark.parametrize("noise, unit", NOISES.values(), ids=NOISES)
def test_densities_that_look_quadratic_near_zero_are_integrated_as_they_are(noise, unit):
    """Beside sums over a fine grid of the row's latent variable and of the parameter, in these units."""
    rng = np.random.default_rng(3)
    y = 2 + rng.normal(size=25) + rng.laplace(size=25)

    def model(y):
        mu = numpyro.sample("mu", dist.Normal(0.0, 10 * unit))
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Normal(mu, unit))
            numpyro.sample("y", noise(z, unit), obs=y)

    with jax.enable_x64(unit == 1):
        posterior = RVGA(model, local="marginal").run({"y": unit * y}, progress_bar=False)
        q = posterior.mean[0], np.sqrt(posterior.covariance[0, 0])
    mu, z = np.linspace(-1, 5, 241), np.linspace(-25, 25, 4001)
    of_noise = np.exp(np.asarray(noise(z, 1.0).log_prob(y[:, None])))
    of_z = np.exp(-0.5 * (z - mu[:, None]) ** 2)
    log_density = np.log(of_noise @ of_z.T).sum(axis=0) - 0.5 * (mu / 10) ** 2
    mass = np.exp(log_density - log_density.max())
    mass /= mass.sum()
    mean = mass @ mu
    deviation = np.sqrt(mass @ (mu - mean) ** 2)
    np.testing.assert_allclose(q[0] / unit, mean, atol=0.05 * deviation)
    np.testing.assert_allclose(q[1] / unit, deviation, rtol=0.05)
