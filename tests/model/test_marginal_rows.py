"""Marginal latents of single rows: in files, and in rows that come later than those that the model was read with."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm
from scipy.stats import binom

from numpyro_rvga import RVGA, FixedPointVI, Posterior

RNG = np.random.default_rng(0)
TOTAL = np.array([2, 3, 2, 3, 5, 6, 2, 4])
SEEN = {"total": TOTAL, "y": np.array([0.0, 1.9, 0.7, 2.1, 3.9, 2.8, 0.2, 3.1], np.float32)}


def hidden_counts(total, y=None):
    w = numpyro.sample("w", dist.Normal(0, 1))
    with numpyro.plate("rows", len(total)):
        n = numpyro.sample("n", dist.Binomial(total, 0.6))
        numpyro.sample("y", dist.Normal(w * n, 0.3), obs=y)


def tobit(x, censored, y=None):
    """Normal but for the rows that are censored."""
    w, s = numpyro.sample("w", dist.Normal(0, 1)), numpyro.sample("s", dist.LogNormal(-1, 0.5))
    with numpyro.plate("rows", len(x)):
        z = numpyro.sample("z", dist.Normal(0, s))
        residual = (y - w * x - z) / 0.5
        numpyro.factor("y", jnp.where(censored, norm.logcdf(-residual), norm.logpdf(residual)))


X = RNG.normal(size=8).astype(np.float32)
CENSORED = {"x": X, "censored": np.arange(8) > 5, "y": X + 0.3}


@pytest.mark.parametrize("model, data", [(hidden_counts, SEEN), (tobit, CENSORED)])
def test_loaded_posteriors_integrate_as_before(model, data, tmp_path):
    posterior = RVGA(model, local="marginal").run(data, progress_bar=False)
    posterior.save(tmp_path / "q")
    loaded = Posterior.load(tmp_path / "q", model)
    np.testing.assert_array_equal(loaded.mean, posterior.mean)
    before, after = (q.program.log_likelihood(q.mean, q.program.inputs(data))["y"] for q in (posterior, loaded))
    np.testing.assert_allclose(after, np.asarray(before), rtol=1e-6)
    np.testing.assert_allclose(
        loaded.log_prob_unconstrained(0.1 + loaded.mean), posterior.log_prob_unconstrained(0.1 + loaded.mean), rtol=1e-6
    )


def test_later_rows_that_the_first_do_not_stand_for_are_refused():
    message = r"site 'n': in row 1 \('total' holds 6\).*up to 5.*Give all rows at once"
    first, later = ({name: array[part] for name, array in SEEN.items()} for part in (slice(0, 5), slice(4, 8)))
    posterior = RVGA(hidden_counts, local="marginal").run(first, progress_bar=False)
    with pytest.raises(ValueError, match=message):
        posterior.program.check_rows(later)  # as each block of a stream is
    with pytest.raises(ValueError, match=message):
        posterior.khat(later)


def test_densities_that_are_quadratic_in_the_first_rows_alone_are_integrated_in_all():
    """Beside the same program, read with rows of both kinds."""
    few, all_rows = ({name: array[:end] for name, array in CENSORED.items()} for end in (5, 8))
    read_with = [RVGA(tobit, local="marginal").run(rows, progress_bar=False).program for rows in (few, all_rows)]
    read_with[0].check_rows(all_rows)
    theta = jnp.array([0.3, -0.7])
    found, expected = (program.log_likelihood(theta, program.inputs(all_rows))["y"] for program in read_with)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_states_that_another_latent_bounds_are_all_summed_over():
    def chained(y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)):
            n = numpyro.sample("n", dist.Binomial(4, 0.5))
            m = numpyro.sample("m", dist.Binomial(n, 0.5))
            numpyro.sample("y", dist.Normal(w * m, 0.3), obs=y)

    def thinned(y):
        w = numpyro.sample("w", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)):
            m = numpyro.sample("m", dist.Binomial(4, 0.25))
            numpyro.sample("y", dist.Normal(w * m, 0.3), obs=y)

    data = {"y": SEEN["y"]}
    found, expected = (RVGA(model, local="marginal").run(data, progress_bar=False) for model in (chained, thinned))
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-4)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=1e-3)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_rows_whose_latents_are_all_discrete_are_rows_for_both_methods(method):
    def enumerated(y):
        means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 1.0]), 0.2).to_event(1))
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(0.3))
            numpyro.sample("y", dist.Normal(means[z], 0.5), obs=y)

    def mixture(y):
        means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 1.0]), 0.2).to_event(1))
        with numpyro.plate("rows", len(y)):
            parts = dist.Normal(means, 0.5)
            numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(jnp.array([0.7, 0.3])), parts), obs=y)

    data = {"y": np.array([-1.2, -0.9, -1.1, 0.8, 1.3, 0.1], np.float32)}
    found, expected = (method(model).run(data, progress_bar=False) for model in (enumerated, mixture))
    assert found.program.row_latents.site_names and not found.program.whole
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-3)
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=2e-3)


def test_shares_of_rows_whose_states_are_summed_over_are_integrated_out():
    """Four distinct rows, each many times: their log probabilities are clamped where a state is impossible."""

    def augmented(y):
        omega, p = numpyro.sample("omega", dist.Uniform(0, 1)), numpyro.sample("p", dist.Uniform(0, 1))
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(omega), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Binomial(3, z * p), obs=y)

    counts = np.array([14, 5, 3, 1])
    data = {"y": np.repeat(np.arange(4), counts)}
    posterior = FixedPointVI(augmented, local="marginal", integrate="auto").run(data, progress_bar=False)
    axis = (np.arange(1000) + 0.5) / 1000
    omega, p = np.meshgrid(axis, axis, indexing="ij")
    likelihood = omega[..., None] * binom.pmf(np.arange(4), 3, p[..., None])
    likelihood[..., 0] += 1 - omega
    log_density = np.log(likelihood) @ counts
    density = np.exp(log_density - log_density.max())
    density /= density.sum()
    draws = posterior.sample_posterior(jax.random.key(0), (20_000,))
    for name, values in {"omega": omega, "p": p}.items():
        mean = np.sum(density * values)
        deviation = np.sqrt(np.sum(density * (values - mean) ** 2))
        assert abs(np.mean(draws[name]) - mean) < 0.1 * deviation
        assert abs(np.log(np.std(draws[name]) / deviation)) < 0.1


def test_a_site_that_states_index_may_be_integrated_out():
    def mixture(y):
        means = numpyro.sample("means", dist.Normal(jnp.array([-1.0, 1.0]), 0.2).to_event(1))
        share = numpyro.sample("share", dist.Beta(2, 2))
        with numpyro.plate("rows", len(y)):
            z = numpyro.sample("z", dist.Bernoulli(share), infer={"enumerate": "parallel"})
            numpyro.sample("y", dist.Normal(means[z], 0.5), obs=y)

    data = {"y": np.array([-1.2, -0.9, -1.1, 0.8, 1.3])}
    one, given = (
        FixedPointVI(mixture, local="marginal", integrate=integrate).run(data, progress_bar=False)
        for integrate in (False, ["means"])
    )
    assert one.elbo is not None and given.elbo is not None
    assert one.elbo - 1e-3 < given.elbo < one.elbo + 0.1
    np.testing.assert_allclose(given.mean, one.mean, atol=0.05)


def test_hyperparameters_are_integrated_out_given_the_marginal_rows():
    def model(y, by_hand):
        mu, tau = numpyro.sample("mu", dist.Normal(0, 2)), numpyro.sample("tau", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y)):
            own = 0.0 if by_hand else numpyro.sample("own", dist.Normal(0, tau))
            scale = jnp.sqrt(0.09 + tau**2) if by_hand else 0.3
            numpyro.sample("y", dist.Normal(mu + own, scale), obs=y)

    def run(integrate, **keywords):
        engine = FixedPointVI(model, local="marginal", integrate=integrate)
        return engine.run({"y": SEEN["y"]}, progress_bar=False, **keywords)

    found, expected = run("auto", by_hand=False), run(["tau"], by_hand=True)
    assert found.info["integrated"] == ["tau"]
    np.testing.assert_allclose(found.elbo, expected.elbo, atol=1e-3)
    np.testing.assert_allclose(found.mean, expected.mean, atol=0.01)
