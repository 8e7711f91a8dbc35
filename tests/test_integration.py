"""Hyperparameters integrated out: against dense quadrature, NUTS, and the same model written otherwise."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.contrib.control_flow import scan
from numpyro.infer import MCMC
from numpyro.infer.reparam import LocScaleReparam
from scipy import stats
from scipy.integrate import cumulative_trapezoid
from scipy.special import logsumexp

from numpyro_rvga import BONG, RVGA, FixedPointVI, Posterior
from numpyro_rvga.engines.registry import Engines
from numpyro_rvga.results import integration, integrator
from numpyro_rvga.results.integration import DEFAULTS, Integration
from numpyro_rvga.results.khat import integration_left

KEY = jax.random.key(0)
EFFECTS = np.array([28.0, 8, -3, 7, -1, 1, 18, 12])
ERRORS = np.array([15.0, 10, 16, 11, 9, 11, 10, 18])
SCHOOLS = {"sigma": ERRORS, "y": EFFECTS}


def eight_schools(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", sigma.shape[0]):
        theta = numpyro.sample("theta", dist.Normal(mu, tau))
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def eight_schools_not_centered(sigma, y=None):
    mu = numpyro.sample("mu", dist.Normal(0, 5))
    tau = numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("schools", sigma.shape[0]):
        z = numpyro.sample("z", dist.Normal(0, 1))
        theta = numpyro.deterministic("theta", mu + tau * z)
        numpyro.sample("y", dist.Normal(theta, sigma), obs=y)


def slopes(centered):
    def model(group, x, y=None):
        m = numpyro.sample("m", dist.Normal(0, 2).expand([2]).to_event(1))
        s = numpyro.sample("s", dist.HalfNormal(1).expand([2]).to_event(1))
        lower = s[:, None] * numpyro.sample("L", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("groups", 6):
            if centered:
                b = numpyro.sample("b", dist.MultivariateNormal(m, scale_tril=lower))
            else:
                z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
                b = numpyro.deterministic("b", m + z @ lower.T)
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(b[group, 0] + b[group, 1] * x, 0.7), obs=y)

    return model


def straight_line(x, y=None):
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    log_sigma = numpyro.sample("log_sigma", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * x, jnp.exp(log_sigma)), obs=y)


def line_data():
    rng = np.random.default_rng(0)
    x = rng.normal(size=12)
    return {"x": x, "y": 1.5 * x + 0.5 * rng.normal(size=12)}


LINE = line_data()


def exact_schools():
    """Evidence, and means and standard deviations of log tau, mu and theta, by quadrature over log tau."""
    log_tau = np.linspace(-12, 8, 8001)
    tau = np.exp(log_tau)[:, None]
    variance = tau**2 + ERRORS**2
    precision = np.sum(1 / variance, axis=1) + 1 / 25
    mu = np.sum(EFFECTS / variance, axis=1) / precision
    log_joint = -0.5 * np.sum(np.log(2 * np.pi * variance) + EFFECTS**2 / variance, axis=1)
    log_joint += 0.5 * mu**2 * precision - 0.5 * np.log(25 * precision)
    log_joint += np.log(2 / (5 * np.pi)) - np.log1p((tau[:, 0] / 5) ** 2) + log_tau
    evidence = logsumexp(log_joint) + np.log(log_tau[1] - log_tau[0])
    weights = np.exp(log_joint - logsumexp(log_joint))
    shrunk = 1 / (1 / tau**2 + 1 / ERRORS**2)
    means = np.column_stack([log_tau, mu, shrunk * (EFFECTS / ERRORS**2 + mu[:, None] / tau**2)])
    variances = np.column_stack([0 * log_tau, 1 / precision, shrunk + (shrunk / tau**2) ** 2 / precision[:, None]])
    mean = weights @ means
    return evidence, mean, np.sqrt(weights @ (variances + (means - mean) ** 2))


@pytest.fixture(scope="module")
def schools():
    return {
        "centered": FixedPointVI(eight_schools, integrate="auto").run(SCHOOLS, progress_bar=False),
        "not centered": FixedPointVI(eight_schools_not_centered, integrate="auto").run(SCHOOLS, progress_bar=False),
    }


@pytest.mark.parametrize(
    "sites, functions",
    [(["log_sigma"], {"jit(_solve)", "jit(_moments)"}), (["log_sigma", "slope"], {"jit(log_joint)"})],
    ids=["some sites", "all sites"],
)
def test_functions_are_compiled_once_and_a_second_run_compiles_nothing(sites, functions, count_compilations):
    method = FixedPointVI(straight_line, integrate=sites)
    compiled, _ = count_compilations(lambda: method.run(LINE, progress_bar=False))
    assert {name: compiled[name] for name in functions} == dict.fromkeys(functions, 1)
    assert not count_compilations(lambda: method.run(LINE, progress_bar=False))[0]


@pytest.fixture(scope="module")
def binary(import_benchmark):
    """50 groups of 3 rows. log tau has mean -0.24 and standard deviation 0.708 (40,000 draws of NUTS: +-0.008)."""
    case = import_benchmark("_nested_cases").binary(50, 3, 1.5)
    single = RVGA(case.model).run(case.rows, progress_bar=False, **case.kwargs)
    return case.rows, single, single.integrate(case.rows, progress_bar=False)


@pytest.fixture(scope="module")
def line():
    return FixedPointVI(straight_line, integrate="auto").run(LINE, progress_bar=False)


@pytest.mark.parametrize("way", ["centered", "not centered"])
def test_eight_schools_are_exact(schools, way):
    posterior = schools[way]
    evidence, mean, deviation = exact_schools()
    assert posterior.info["integrated"] == ["tau"] and posterior.info["converged"]
    assert posterior.info["marginal"] == "exact" and not integration_left(posterior)
    np.testing.assert_allclose(posterior.elbo, evidence, atol=1e-3)
    draws = posterior.sample_posterior(KEY, (40_000,))
    found = np.column_stack([np.log(draws["tau"]), draws["mu"], draws["theta"]])
    np.testing.assert_allclose((found.mean(0) - mean) / deviation, 0, atol=0.02)
    np.testing.assert_allclose(np.log(found.std(0) / deviation), 0, atol=0.02)
    assert posterior.khat(SCHOOLS).khat < 0.5


def test_ways_of_writing_a_model_agree(schools):
    np.testing.assert_allclose(schools["centered"].elbo, schools["not centered"].elbo, atol=1e-6)
    reparametrized = handlers.reparam(eight_schools, config={"theta": LocScaleReparam(0)})
    other = FixedPointVI(reparametrized, integrate="auto").run(SCHOOLS, progress_bar=False)
    np.testing.assert_allclose(other.elbo, schools["centered"].elbo, atol=1e-6)


def test_log_scale_of_few_binary_rows_is_that_of_nuts(binary):
    data, single, posterior = binary
    log_tau = np.log(np.asarray(posterior.sample_posterior(KEY, (40_000,))["tau"]))
    assert abs(log_tau.mean() + 0.24) < 0.1 * 0.708
    assert abs(np.log(log_tau.std() / 0.708)) < 0.15
    assert posterior.elbo > single.elbo + 0.3 and posterior.num_rows == single.num_rows
    assert posterior.khat(data).khat < 0.7


def test_importance_is_exact_where_rows_are_normal():
    posterior = FixedPointVI(eight_schools, integrate=["tau"], marginal="importance").run(SCHOOLS, progress_bar=False)
    np.testing.assert_allclose(posterior.elbo, exact_schools()[0], atol=2e-3)
    assert posterior.info["elbo_error"] < 1e-4


def network(x, y=None):
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    inner = numpyro.sample("inner", dist.Normal(0, 1).expand([2, 40]).to_event(2))
    outer = numpyro.sample("outer", dist.Normal(0, 1).expand([40]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(jnp.tanh(x @ inner) @ outer, sigma), obs=y)


def test_importance_needs_affine_predictors():
    method = FixedPointVI(network, integrate=["sigma"], marginal="importance")
    x = np.random.default_rng(0).normal(size=(20, 2))
    with pytest.raises(NotImplementedError, match="site 'y' are not: integrate more sites"):
        method.run({"x": x, "y": np.tanh(x[:, 0])}, progress_bar=False)


def test_correlated_slopes_agree_however_they_are_written():
    rng = np.random.default_rng(0)
    group, x = rng.integers(0, 6, 60), rng.normal(size=60)
    data = {"group": group, "x": x, "y": 0.5 + x * (1 + 0.4 * rng.normal(size=6)[group]) + 0.7 * rng.normal(size=60)}
    found = [FixedPointVI(slopes(way), integrate="auto").run(data, progress_bar=False) for way in (True, False)]
    assert all(posterior.info["integrated"] == ["s", "L"] for posterior in found)
    assert all(posterior.info["integration"]["khat"] < 0.7 for posterior in found)
    draws = [posterior.sample_posterior(KEY, (20_000,)) for posterior in found]
    np.testing.assert_allclose(found[0].elbo, found[1].elbo, atol=1e-4)
    for name in ("m", "s", "b"):
        one, other = (np.asarray(of[name]) for of in draws)
        np.testing.assert_allclose((one.mean(0) - other.mean(0)) / one.std(0), 0, atol=0.05)
        np.testing.assert_allclose(np.log(one.std(0) / other.std(0)), 0, atol=0.08)


def test_real_site_that_is_a_scale_is_integrated(line):
    assert line.info["integrated"] == ["log_sigma"]
    x, y = LINE["x"], LINE["y"]
    log_sigma = np.linspace(-4, 3, 4001)
    covariance = np.exp(2 * log_sigma)[:, None, None] * np.eye(12) + 4 * np.outer(x, x)
    lengths = np.einsum("i,kij,j->k", y, np.linalg.inv(covariance), y)
    log_joint = -0.5 * (lengths + np.linalg.slogdet(2 * np.pi * covariance)[1] + log_sigma**2 + np.log(2 * np.pi))
    evidence = logsumexp(log_joint) + np.log(log_sigma[1] - log_sigma[0])
    np.testing.assert_allclose(line.elbo, evidence, atol=1e-3)


# ---------------------------------------------------------------------- a posterior like any other
def test_mixture_is_a_density(line):
    posterior = line
    sides = [np.linspace(m - 9 * s, m + 9 * s, 401) for m, s in zip(posterior.mean, posterior.gaussian.deviation())]
    theta = np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1)
    cell = np.prod([side[1] - side[0] for side in sides])
    log_q = posterior.log_prob_unconstrained(jnp.asarray(theta))
    np.testing.assert_allclose(np.sum(np.exp(log_q)) * cell, 1.0, atol=1e-4)
    sites = posterior.constrain_latents(jnp.asarray(theta[200, 190:210]))
    np.testing.assert_allclose(posterior.log_prob(sites), log_q[200, 190:210], rtol=1e-8)


def test_the_posterior_of_a_pass_is_integrated_to_the_same_mixture(line):
    mixture = RVGA(straight_line).run(LINE, progress_bar=False).integrate(LINE, progress_bar=False)
    assert mixture.info["integrated"] == line.info["integrated"]
    assert mixture.elbo == pytest.approx(line.elbo, abs=1e-3)
    deviation = np.asarray(line.gaussian.deviation())
    np.testing.assert_allclose((mixture.mean - line.mean) / deviation, 0, atol=0.01)
    np.testing.assert_allclose(mixture.gaussian.deviation() / deviation, 1, atol=0.01)


def test_moments_quantiles_and_draws_agree(schools):
    posterior = schools["centered"]
    theta = np.asarray(posterior.sample_unconstrained(KEY, (40_000,)))
    deviation = theta.std(0)
    np.testing.assert_allclose((theta.mean(0) - np.asarray(posterior.mean)) / deviation, 0, atol=0.03)
    np.testing.assert_allclose(np.asarray(posterior.gaussian.deviation()) / deviation, 1, atol=0.02)
    np.testing.assert_allclose(posterior.scale_tril @ posterior.scale_tril.T, posterior.covariance, rtol=1e-8)
    np.testing.assert_allclose(np.diag(posterior.covariance), posterior.gaussian.deviation() ** 2, rtol=1e-8)
    quantiles = posterior.quantiles([0.1, 0.9])["tau"]
    np.testing.assert_allclose(quantiles, np.quantile(posterior.constrain(theta)["tau"], [0.1, 0.9]), rtol=0.04)
    np.testing.assert_allclose(posterior.median()["tau"], posterior.quantiles(0.5)["tau"])


def test_file_gives_the_mixture_back(schools, tmp_path):
    posterior = schools["centered"]
    posterior.save(tmp_path / "posterior.npz")
    again = Posterior.load(tmp_path / "posterior.npz", eight_schools)
    np.testing.assert_array_equal(again.gaussian.means, posterior.gaussian.means)
    np.testing.assert_array_equal(again.mean, posterior.mean)
    assert again.info["integrated"] == ["tau"] and again.elbo == posterior.elbo


def unknown_scale(y=None):
    scale = numpyro.sample("scale", dist.HalfNormal(1.0))
    mean = numpyro.sample("mean", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(mean, scale), obs=y)


def test_a_mixture_takes_in_no_rows_and_what_goes_on_from_it_is_one_gaussian():
    data = {"y": np.random.default_rng(0).normal(size=20)}
    mixture = FixedPointVI(unknown_scale, integrate=["scale"]).run(data, progress_bar=False)
    with pytest.raises(ValueError, match=r"is a mixture.*integrate old and new ones together.*without the skewness"):
        mixture.update(data)
    for method in (RVGA(unknown_scale), BONG(unknown_scale)):
        with pytest.warns(UserWarning, match="init is a mixture.*from one Gaussian of its mean and covariance"):
            assert method.run(data, init=mixture, progress_bar=False).num_rows == 40
    assert FixedPointVI(unknown_scale).run(data, init=mixture, progress_bar=False).num_rows == 20  # only begins there


def test_other_rows_of_the_same_number_are_told_of():
    data = {"y": np.random.default_rng(0).normal(size=20)}
    posterior = RVGA(unknown_scale).run(data, progress_bar=False)
    mixture = posterior.integrate({"y": data["y"][::-1]}, sites=["scale"], progress_bar=False)  # in another order
    with pytest.warns(UserWarning, match="data holds other numbers than the rows that the posterior has absorbed"):
        other = posterior.integrate({"y": data["y"] + 1}, sites=["scale"], progress_bar=False)
    assert other.mean[1] > mixture.mean[1] + 0.5


def test_mixture_goes_to_arviz_nuts_and_guides(schools, capsys):
    posterior = schools["not centered"]
    found = posterior.to_arviz(SCHOOLS, num_samples=200)
    assert {"log_p", "log_q"} <= set(found["sample_stats"].data_vars)
    posterior.print_summary()
    assert "tau" in capsys.readouterr().out
    mcmc = MCMC(posterior.nuts(), num_warmup=50, num_samples=20, progress_bar=False)
    mcmc.run(KEY, **SCHOOLS, init_params=posterior.init_params(KEY))
    assert np.isfinite(mcmc.get_samples()["tau"]).all()
    _, params = posterior.as_guide()
    assert params["auto_scale_tril"].shape == (10, 10)
    assert posterior.predictive(KEY, SCHOOLS, num_samples=10)["y"].shape == (10, 8)


def test_closed_form_predictions_are_averages_over_the_mixture(binary):
    posterior = binary[-1]
    new = {"group": np.arange(3)}
    found = posterior.predictive(None, new, method="closed_form")["y"]
    theta = posterior.sample_posterior(KEY, (40_000,))
    probability = 1 / (1 + np.exp(-(theta["mu"][:, None] + theta["u"][:, :3])))
    np.testing.assert_allclose(found["mean"], probability.mean(0), atol=0.01)
    np.testing.assert_allclose(found["variance"], probability.var(0), atol=0.01)


def test_mixtures_cannot_be_merged(schools):
    with pytest.raises(ValueError, match="single rows"):
        Posterior.merge([schools["centered"], schools["centered"]])


def test_float32_takes_scales_that_are_far_from_one():
    """Given a scale of one, the precision of a level with a deviation of 500 would be lost in rounding."""

    def raw_scale(group, y=None):
        level, spread = numpyro.sample("level", dist.Normal(0, 500)), numpyro.sample("spread", dist.HalfNormal(100))
        with numpyro.plate("groups", 170):
            effect = numpyro.sample("effect", dist.Normal(level, spread))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(effect[group], 100.0), obs=y)

    rng = np.random.default_rng(0)
    group = np.arange(340) % 170
    data = {"group": group, "y": np.round(800 + 60 * rng.normal(size=170)[group] + 100 * rng.normal(size=340))}
    with jax.enable_x64(False):
        posterior = FixedPointVI(raw_scale, integrate="auto").run(data, progress_bar=False)
    assert posterior.info["integrated"] == ["spread"]
    averages = data["y"].reshape(2, 170).mean(axis=0)
    spread = np.linspace(0.5, 150, 600)
    variance = spread**2 + 100.0**2 / 2
    precision = 170 / variance + 500.0**-2
    mean = np.sum(averages) / variance / precision
    quadratic = np.sum(averages**2) / variance - precision * mean**2
    log_weight = -0.5 * (170 * np.log(variance) + np.log(precision) + quadratic) - 0.5 * (spread / 100) ** 2
    weight = np.exp(log_weight - logsumexp(log_weight))
    draws = np.asarray(posterior.sample_posterior(KEY, (20_000,))["spread"], np.float64)
    expected = weight @ spread
    deviation = np.sqrt(weight @ (spread - expected) ** 2)
    assert abs(draws.mean() - expected) < 0.1 * deviation and abs(np.log(draws.std() / deviation)) < 0.1


def test_float32_takes_effects_that_nearly_agree():
    """Around a wide level, a precision matrix of effects of a small spread has lost all digits."""

    def areas(x, known, y=None):
        slope = numpyro.sample("slope", dist.Normal(0, 5).expand([2]).to_event(1))
        spread = numpyro.sample("spread", dist.HalfNormal(0.5))
        with numpyro.plate("areas", len(known)):
            effect = numpyro.sample("effect", dist.Normal(x @ slope, spread))
            numpyro.sample("y", dist.Normal(effect, known), obs=y)

    rng = np.random.default_rng(0)
    x, known = np.c_[np.ones(60), rng.normal(size=60)], rng.uniform(0.2, 0.5, 60)
    y = x @ np.array([2.0, 0.4]) + np.sqrt(0.05**2 + known**2) * rng.normal(size=60)
    with jax.enable_x64(False):
        single = {name: array.astype(np.float32) for name, array in {"x": x, "known": known, "y": y}.items()}
        posterior = FixedPointVI(areas, integrate=["spread"]).run(single, progress_bar=False)
    log_spread = np.linspace(-12, 1, 800)
    log_density = np.empty(800)
    for i, spread in enumerate(np.exp(log_spread)):
        evidence = stats.multivariate_normal(cov=np.diag(known**2 + spread**2) + 25 * x @ x.T).logpdf(y)
        log_density[i] = evidence + stats.halfnorm.logpdf(spread, scale=0.5) + np.log(spread)
    weight = np.exp(log_density - logsumexp(log_density))
    draws = np.asarray(posterior.sample_posterior(KEY, (20_000,))["spread"], np.float64)
    expected = weight @ np.exp(log_spread)
    deviation = np.sqrt(weight @ (np.exp(log_spread) - expected) ** 2)
    assert abs(draws.mean() - expected) < 0.05 * deviation and abs(np.log(draws.std() / deviation)) < 0.1
    log_evidence = logsumexp(log_density) + np.log(log_spread[1] - log_spread[0])
    np.testing.assert_allclose(posterior.elbo, log_evidence, atol=0.01)


NUMBER, SEEN = 6, np.array([True, True, False, True, True])


def tilted_by_a_line(b):
    numpyro.factor("line", 3.0 * b.sum())


def tied_by_masked_differences(b):
    with numpyro.handlers.mask(mask=SEEN):
        numpyro.sample("steps", dist.Normal(b[1:] - b[:-1], 0.3), obs=np.zeros(5))


def loosened(b):
    numpyro.factor("convex", 0.05 * b[0] ** 2)


@pytest.mark.parametrize("tie", [tilted_by_a_line, tied_by_masked_differences, loosened])
def test_priors_of_other_quadratic_terms_are_integrated_exactly(tie):
    """Against the evidence by quadrature over the scale, of a quadratic in the effects."""
    y = np.array([0.3, -0.2, 0.5, 0.1, -0.4, 0.2])

    def model(y):
        tau = numpyro.sample("tau", dist.HalfNormal(1))
        b = numpyro.sample("b", dist.Normal(0, tau).expand([NUMBER]).to_event(1))
        tie(b)
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(b[np.arange(NUMBER)], 0.5), obs=y)

    found = FixedPointVI(model, integrate=["tau"]).run({"y": y}, progress_bar=False)
    log_tau = np.linspace(-8, 2.5, 2000)
    evidence = jax.jit(jax.vmap(lambda z: _gaussian_evidence(model, y, jnp.exp(z)) + z))(log_tau)
    log_evidence = logsumexp(evidence) + np.log(log_tau[1] - log_tau[0])
    np.testing.assert_allclose(found.elbo, log_evidence, atol=5e-3)


def _gaussian_evidence(model, y, tau):
    """log of the integral over b of the joint density, a quadratic's exponential."""

    def joint(b):
        with numpyro.handlers.substitute(data={"tau": tau, "b": b}), numpyro.handlers.seed(rng_seed=0):
            return numpyro.infer.util.log_density(model, (y,), {}, {"tau": tau, "b": b})[0]

    zero = jnp.zeros(NUMBER)
    value, slope, hessian = joint(zero), jax.grad(joint)(zero), jax.hessian(joint)(zero)
    move = jnp.linalg.solve(-hessian, slope)
    return value + 0.5 * slope @ move + 0.5 * NUMBER * jnp.log(2 * jnp.pi) - 0.5 * jnp.linalg.slogdet(-hessian)[1]


def test_a_gaussian_process_alone_is_integrated():
    """Nothing is Normal beside one multivariate normal site."""
    places, y = np.arange(3.0), np.array([0.5, -0.2, 0.8])

    def model(y):
        length = numpyro.sample("length", dist.HalfNormal(1))
        kernel = jnp.exp(-0.5 * ((places[:, None] - places) / length) ** 2) + 1e-6 * jnp.eye(3)
        f = numpyro.sample("f", dist.MultivariateNormal(0.0, kernel))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(f, 0.3), obs=y)

    found = FixedPointVI(model, integrate=["length"]).run({"y": y}, progress_bar=False)
    log_length = np.linspace(-6, 2, 2000)
    log_density = np.empty(2000)
    for i, length in enumerate(np.exp(log_length)):
        kernel = np.exp(-0.5 * ((places[:, None] - places) / length) ** 2) + (1e-6 + 0.09) * np.eye(3)
        log_density[i] = stats.multivariate_normal(cov=kernel).logpdf(y) + stats.halfnorm.logpdf(length) + log_length[i]
    log_evidence = logsumexp(log_density) + np.log(log_length[1] - log_length[0])
    np.testing.assert_allclose(found.elbo, log_evidence, atol=5e-3)


def test_float32_finds_the_same():
    with jax.enable_x64(False):
        single = {name: array.astype(np.float32) for name, array in SCHOOLS.items()}
        posterior = FixedPointVI(eight_schools, integrate="auto").run(single, progress_bar=False)
        assert posterior.mean.dtype == jnp.float32
        np.testing.assert_allclose(posterior.elbo, exact_schools()[0], atol=5e-3)


def centered_binary(group, y=None):
    mean, scale = numpyro.sample("mean", dist.Normal(0.0, 2.0)), numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 8):
        effect = numpyro.sample("effect", dist.Normal(mean, scale))
    with numpyro.plate("rows", len(group)):
        numpyro.sample("y", dist.Bernoulli(logits=effect[group]), obs=y)


@pytest.mark.parametrize("is_double", [True, False])
def test_estimates_by_importance_are_right_where_a_scale_is_next_to_zero(is_double):
    """There, effects and their mean are nearly the same, which leaves no digits to float32."""
    rng = np.random.default_rng(0)
    group, y = rng.integers(0, 8, 60), (rng.random(60) < 0.6).astype(int)
    with jax.enable_x64(is_double):
        method = FixedPointVI(centered_binary, integrate=["scale"], marginal="importance")
        posterior = method.run({"group": group, "y": y}, progress_bar=False)
        elbo, quantiles = posterior.elbo, posterior.quantiles([0.1, 0.5, 0.9])["scale"]
    node, weight = np.polynomial.hermite_e.hermegauss(30)
    weight /= weight.sum()
    scale, mean = np.linspace(0.0, 5.0, 1001), np.linspace(-6.0, 6.0, 201)
    effect = mean[:, None] + scale[:, None, None] * node  # (scale, mean, effect)
    successes, failures = (np.bincount(group[y == k], minlength=8)[:, None, None, None] for k in (1, 0))
    of_groups = np.exp(-successes * np.logaddexp(0.0, -effect) - failures * np.logaddexp(0.0, effect)) @ weight
    of_scale = np.prod(of_groups, axis=0) @ stats.norm.pdf(mean, 0.0, 2.0) * (mean[1] - mean[0])
    mass = cumulative_trapezoid(of_scale * 2 * stats.norm.pdf(scale), scale, initial=0)
    np.testing.assert_allclose(elbo, np.log(mass[-1]), atol=3e-3)
    np.testing.assert_allclose(quantiles, np.interp([0.1, 0.5, 0.9], mass / mass[-1], scale), atol=0.01)


# ---------------------------------------------------------------------- what is integrated, and what is refused
def positive_slope(x, y=None):
    slope = numpyro.sample("slope", dist.HalfNormal(2))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(slope * x, sigma), obs=y)


def process(places, number, count=None):
    length = numpyro.sample("length", dist.Gamma(4, 4))
    variance = numpyro.sample("variance", dist.HalfNormal(1))
    squares = (places[:, None] - places) ** 2
    kernel = variance * jnp.exp(-0.5 * squares / length**2) + 1e-3 * jnp.eye(len(places))
    level = numpyro.sample("level", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(places)]).to_event(1))
    value = jnp.linalg.cholesky(kernel) @ z
    with numpyro.plate("rows", number.shape[0]):
        numpyro.sample("count", dist.Poisson(jnp.exp(level + value[number])), obs=count)


def partly_undefined(x, y=None):
    variance = numpyro.sample("variance", dist.LogNormal(3, 0.1))
    slope = numpyro.sample("slope", dist.Normal(0, 2))
    degrees = numpyro.sample("degrees", dist.Gamma(2, 0.1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.StudentT(degrees, slope * x, jnp.sqrt(variance - 1)), obs=y)


def looks_at_values(x, y=None):
    """A NumPyro model that computes with the values of its data as it is read."""
    level = numpyro.sample("level", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("kinds", len(set(np.asarray(x).tolist()))):
        effect = numpyro.sample("effect", dist.Normal(level, scale))
    numpyro.sample("y", dist.Normal(effect[x[x >= 0]], 1.0), obs=y[x >= 0])


def shares(total, y=None):
    a, b = numpyro.sample("a", dist.HalfNormal(5)), numpyro.sample("b", dist.HalfNormal(20))
    with numpyro.plate("groups", len(total)):
        share = numpyro.sample("share", dist.Beta(a, b))
        numpyro.sample("y", dist.Binomial(total, share), obs=y)


def process_of_trials(places, y=None):
    length, scale = numpyro.sample("length", dist.Gamma(4, 4)), numpyro.sample("scale", dist.HalfNormal(1))
    kernel = jnp.exp(-0.5 * ((places[:, None] - places) / length) ** 2) + 1e-3 * jnp.eye(len(places))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(places)]).to_event(1))
    numpyro.sample("y", dist.Binomial(3, logits=scale * (jnp.linalg.cholesky(kernel) @ z)), obs=y)


def imperfect_test(place, laboratory, y=None):
    """A rate and a specificity in each row, in which the log-likelihood is not concave."""
    sensitivity = numpyro.sample("sensitivity", dist.Beta(8, 2))
    spread, scale = numpyro.sample("spread", dist.HalfNormal(1)), numpyro.sample("scale", dist.HalfNormal(0.3))
    level, of_level = numpyro.sample("level", dist.Normal(0, 1)), numpyro.sample("of_level", dist.Normal(4, 2))
    effects = numpyro.sample("effects", dist.Normal(0, 1).expand([8]).to_event(1))
    of_effects = numpyro.sample("of_effects", dist.Normal(0, 1).expand([8]).to_event(1))
    with numpyro.plate("rows", len(place)):
        rate = jax.nn.sigmoid(level + spread * effects[place])
        specificity = jax.nn.sigmoid(of_level + scale * of_effects[laboratory])
        positive = rate * sensitivity + (1 - rate) * (1 - specificity)
        numpyro.sample("y", dist.Bernoulli(probs=positive), obs=y)


def some_rows_have_products(f, y=None):
    """The first rows are Normal in one effect, and others in a product of two."""
    a, b = (numpyro.sample(name, dist.Normal(1, 1)) for name in "ab")
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", len(f)):
        numpyro.sample("y", dist.Normal(jnp.where(f, a * b, a), sigma), obs=y)


@jax.custom_vjp
def decayed(rate):
    return jnp.exp(-rate)


decayed.defvjp(lambda rate: (jnp.exp(-rate), rate), lambda rate, cotangent: (-decayed(rate) * cotangent,))


def backwards_alone(x, y=None):
    """A function that has no forward derivative, as the solution of a differential equation."""
    rate, sigma = numpyro.sample("rate", dist.HalfNormal(1)), numpyro.sample("sigma", dist.HalfNormal(1))
    level = numpyro.sample("level", dist.Normal(0, 1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(level + decayed(rate) * x, sigma), obs=y)


@pytest.mark.parametrize(
    ("model", "data", "kwargs", "sites"),
    [
        (positive_slope, LINE, {}, ("sigma",)),
        (partly_undefined, LINE, {}, ("variance", "degrees")),
        (eight_schools_not_centered, SCHOOLS, {}, ("tau",)),
        (shares, {"total": np.full(8, 9), "y": np.arange(8)}, {}, ("a", "b")),
        (looks_at_values, {"x": np.arange(-1, 7) % 7, "y": np.arange(8.0)}, {}, ("scale",)),
        (process, {"number": np.arange(5), "count": np.arange(5)}, {"places": np.arange(5.0)}, ("length", "variance")),
        (backwards_alone, LINE, {}, ("rate", "sigma")),
        (some_rows_have_products, {"f": np.arange(12) % 3 == 2, "y": np.arange(12.0)}, {}, ("a", "sigma")),
        (process_of_trials, {"places": np.arange(6.0), "y": np.arange(6) % 4}, {}, ("length", "scale")),
        (
            imperfect_test,
            {"place": np.arange(40) % 8, "laboratory": np.arange(40) // 5, "y": np.arange(40) % 3 // 2},
            {},
            ("sensitivity", "spread", "scale"),
        ),
    ],
)
def test_auto_takes_the_fewest_sites(model, data, kwargs, sites):
    engine, rows, _ = Engines(model, DEFAULTS, None, batch=True).together(data, kwargs, KEY)
    assert Integration(DEFAULTS, None).choose(engine.program, "auto", rows).sites == sites


def test_long_sites_with_affine_predictors_are_left_to_the_gaussians_where_only_chains_would_take_them():
    """A scale of each of 41 groups, against dense grids of effect and scale in each group."""
    num_groups, rng = 41, np.random.default_rng(0)
    group = np.repeat(np.arange(num_groups), 6)
    effects, scales = 0.8 * rng.normal(size=num_groups), np.exp(0.4 * rng.normal(size=num_groups) - 0.3)
    y = effects[group] + scales[group] * rng.normal(size=len(group))

    def model(group, y=None):
        spread = numpyro.sample("spread", dist.HalfNormal(1))
        with numpyro.plate("groups", num_groups):
            effect = numpyro.sample("effect", dist.Normal(0, spread))
            scale = numpyro.sample("scale", dist.LogNormal(0, 0.5))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(effect[group], scale[group]), obs=y)

    data = {"group": group, "y": y}
    of_bounds, closer = (
        FixedPointVI(model, integrate="auto", marginal=marginal).run(data, progress_bar=False)
        for marginal in ("bound", "importance")
    )
    assert of_bounds.info["integrated"] == closer.info["integrated"] == ["spread"]
    spread, effect, log_scale = np.linspace(0.2, 2, 60), np.linspace(-5, 5, 151), np.linspace(-2.5, 2.5, 51)
    log_density = stats.halfnorm.logpdf(spread)
    for own in y.reshape(num_groups, -1):
        given = stats.norm.logpdf(own[:, None, None], effect[:, None], np.exp(log_scale)).sum(axis=0)
        of_effect = logsumexp(given + stats.norm.logpdf(log_scale, 0, 0.5), axis=1)
        log_density = log_density + logsumexp(of_effect + stats.norm.logpdf(effect, 0, spread[:, None]), axis=1)
    mass = np.exp(log_density - logsumexp(log_density))
    mean = mass @ spread
    deviation = np.sqrt(mass @ (spread - mean) ** 2)
    draws = closer.sample_posterior(jax.random.key(0), (20_000,))["spread"]
    np.testing.assert_allclose(draws.mean(), mean, atol=0.05 * deviation)
    np.testing.assert_allclose(draws.std(), deviation, rtol=0.05)
    assert not of_bounds.khat(data).verdict.startswith("good")
    assert "(marginal='importance')" in integration_left(of_bounds) and not integration_left(closer)


def regression(x, y=None):
    slopes = numpyro.sample("slopes", dist.StudentT(4, 0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=x @ slopes), obs=y)


def gaussian_regression(x, y=None):
    slopes = numpyro.sample("slopes", dist.Normal(0, 1).expand([x.shape[1]]).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ slopes, 1.0), obs=y)


@pytest.mark.parametrize(("model", "size"), [(regression, 7), (gaussian_regression, 2)])
def test_long_latent_gaussian_models_and_gaussian_posteriors_are_left_as_they_are(model, size):
    x = np.random.default_rng(0).normal(size=(12, size))
    posterior = FixedPointVI(model, integrate="auto").run({"x": x, "y": np.arange(12) % 2}, progress_bar=False)
    assert posterior.info["not_integrated"] == "the model is a latent Gaussian model as it is"


def test_effects_that_sum_to_zero_are_gaussian_given_their_scale():
    num_groups, noise, rng = 6, 0.5, np.random.default_rng(0)
    group = np.repeat(np.arange(num_groups), 8)

    def model(group, y=None):
        scale = numpyro.sample("scale", dist.HalfNormal(1))
        effect = numpyro.sample("effect", dist.ZeroSumNormal(scale, event_shape=(num_groups,)))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Normal(effect[group], noise), obs=y)

    effect = rng.normal(size=num_groups)
    y = (effect - effect.mean())[group] + noise * rng.normal(size=len(group))
    posterior = FixedPointVI(model, integrate="auto").run({"group": group, "y": y}, progress_bar=False)
    assert posterior.info["integrated"] == ["scale"]
    # Effects are scale * (z - mean of z): of y given the scale, the covariance is known.
    scales = np.linspace(0.005, 6, 1200)
    design = (np.eye(num_groups) - 1 / num_groups)[group]
    log_joint = [
        stats.multivariate_normal.logpdf(y, cov=s**2 * design @ design.T + noise**2 * np.eye(len(y)))
        + stats.halfnorm.logpdf(s)
        for s in scales
    ]
    mass = np.exp(log_joint - logsumexp(log_joint))
    np.testing.assert_allclose(posterior.elbo, logsumexp(log_joint) + np.log(scales[1] - scales[0]), atol=0.02)
    draws = posterior.sample_posterior(jax.random.key(0), (20_000,))["scale"]
    mean = mass @ scales
    np.testing.assert_allclose(draws.mean(), mean, rtol=0.02)
    np.testing.assert_allclose(draws.std(), np.sqrt(mass @ (scales - mean) ** 2), rtol=0.05)


def test_auto_takes_all_sites_of_a_model_of_few_parameters():
    """Four doses and deaths of five animals each, against a dense grid."""
    x = np.stack([np.ones(4), np.array([-0.86, -0.30, -0.05, 0.73])], axis=1).repeat(5, axis=0)
    y = np.concatenate([[0] * 5, [1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1] * 5])
    mixture = FixedPointVI(regression, integrate="auto").run({"x": x, "y": y}, progress_bar=False)
    assert mixture.info["integrated"] == ["slopes"]
    axis = np.linspace(-12, 30, 600)
    slopes = np.stack(np.meshgrid(axis, axis, indexing="ij"), -1).reshape(-1, 2)
    logits = slopes @ x.T
    log_joint = stats.t.logpdf(slopes, 4).sum(axis=1) + (y * logits - np.logaddexp(0, logits)).sum(axis=1)
    mass = np.exp(log_joint - logsumexp(log_joint))
    mean = mass @ slopes
    deviation = np.sqrt(mass @ (slopes - mean) ** 2)
    assert np.max(np.abs(mixture.mean - mean) / deviation) < 0.03
    assert np.max(np.abs(np.log(np.sqrt(np.diagonal(mixture.covariance)) / deviation))) < 0.03
    assert mixture.elbo == pytest.approx(logsumexp(log_joint) + 2 * np.log(axis[1] - axis[0]), abs=0.01)


def student(y):
    loc = numpyro.sample("loc", dist.Normal(0, 5))
    scale = numpyro.sample("scale", dist.HalfNormal(5))
    df = numpyro.sample("df", dist.Gamma(2, 0.1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.StudentT(df, loc, scale), obs=y)


@pytest.mark.parametrize("seed", [3, 5])
def test_standard_deviations_have_what_long_tails_add(seed):
    """Eight outcomes, against a dense grid."""
    y = 1 + np.random.default_rng(seed).standard_t(3, size=8)
    mixture = FixedPointVI(student, integrate=["loc", "scale", "df"]).run({"y": y}, progress_bar=False)
    axes = {"loc": np.linspace(-12, 12, 81), "scale": np.linspace(-4, 3.5, 51), "df": np.linspace(-4, 6, 41)}
    loc, log_scale, log_df = np.meshgrid(*axes.values(), indexing="ij")
    log_joint = stats.norm.logpdf(loc, scale=5) + stats.halfnorm.logpdf(np.exp(log_scale), scale=5) + log_scale
    log_joint += stats.gamma.logpdf(np.exp(log_df), 2, scale=10) + log_df
    log_joint += sum(stats.t.logpdf(value, np.exp(log_df), loc, np.exp(log_scale)) for value in y)
    mass = np.exp(log_joint - logsumexp(log_joint))
    given = {"loc": loc, "scale": log_scale, "df": log_df}
    grid = np.stack([given[name] for name in mixture.program.layout.site_names])
    mean = np.sum(mass * grid, axis=(1, 2, 3))
    deviation = np.sqrt(np.sum(mass * (grid - mean[:, None, None, None]) ** 2, axis=(1, 2, 3)))
    np.testing.assert_allclose((mixture.mean - mean) / deviation, 0, atol=0.05)
    np.testing.assert_allclose(np.log(np.sqrt(np.diagonal(mixture.covariance)) / deviation), 0, atol=0.06)


def stationary(y):
    """The second coefficient's prior ends where the first one says, and rows depend on those before."""
    a = numpyro.sample("a", dist.Uniform(0, 0.5))
    b = numpyro.sample("b", dist.Uniform(0, 1 - a))
    numpyro.sample("y", dist.Normal(a * y[1:-1] + b * y[:-2], 0.5), obs=y[2:])


@pytest.mark.parametrize(("sites", "integrated"), [("auto", ["b"]), (["a", "b"], ["a", "b"])], ids=["auto", "all"])
def test_few_parameters_of_data_that_are_no_rows_are_integrated_out(sites, integrated):
    y = 0.5 * np.random.default_rng(0).normal(size=40)
    for t in range(2, 40):
        y[t] += 0.3 * y[t - 1] + 0.4 * y[t - 2]
    mixture = FixedPointVI(stationary, integrate=sites).run({"y": y}, progress_bar=False)
    assert mixture.info["integrated"] == integrated
    a, share = (x.ravel() for x in np.meshgrid(*[(np.arange(400) + 0.5) / 400] * 2, indexing="ij"))
    a, b = 0.5 * a, share * (1 - 0.5 * a)  # uniform in the prior
    log_likelihood = stats.norm.logpdf(y[2:], a[:, None] * y[1:-1] + b[:, None] * y[:-2], 0.5).sum(axis=1)
    assert mixture.elbo == pytest.approx(logsumexp(log_likelihood) - np.log(len(a)), abs=0.04)  # one bound is lower
    mass = np.exp(log_likelihood - logsumexp(log_likelihood))
    draws = mixture.sample_posterior(KEY, (20_000,))
    for name, values in (("a", a), ("b", b)):
        mean = mass @ values
        assert abs(draws[name].mean() - mean) < 0.05 * np.sqrt(mass @ (values - mean) ** 2)


def wave(t, y):
    frequency = numpyro.sample("frequency", dist.Normal(0, 1))
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    with numpyro.plate("rows", len(t)):
        numpyro.sample("y", dist.Normal(jnp.sin(frequency * t), scale), obs=y)


def test_of_several_maxima_given_the_scale_the_highest_is_taken():
    """A search from the prior's mean ends there."""
    t = np.linspace(0, 3, 40)
    y = np.sin(1.7 * t) + 0.2 * np.random.default_rng(0).normal(size=40)
    mixture = FixedPointVI(wave, integrate=["scale"]).run({"t": t, "y": y}, progress_bar=False)
    frequency, log_scale = np.meshgrid(np.linspace(1, 2.4, 1401), np.linspace(-3, 1, 201), indexing="ij")
    squares = np.sum((y - np.sin(frequency[..., None] * t)) ** 2, axis=-1)
    log_joint = -0.5 * squares * np.exp(-2 * log_scale) - 40 * (log_scale + 0.5 * np.log(2 * np.pi)) + log_scale
    log_joint += stats.norm.logpdf(frequency) + stats.halfnorm.logpdf(np.exp(log_scale))
    mass = np.exp(log_joint - logsumexp(log_joint))
    mean = np.sum(mass * frequency)
    deviation = np.sqrt(np.sum(mass * (frequency - mean) ** 2))
    draws = mixture.sample_posterior(KEY, (10_000,))["frequency"]
    assert abs(float(draws.mean()) - mean) < 0.05 * deviation
    assert mixture.elbo == pytest.approx(logsumexp(log_joint) + np.log(0.001 * 0.02), abs=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"integrate": "tau"}, "list of site names"),
        ({"integrate": True}, "list of site names"),
        ({"marginal": "laplace"}, "marginal must be one of 'bound', 'importance'"),
        ({"integrate": "auto", "schedule": "batch"}, "schedule='incremental'"),
        ({"integrate": "auto", "expectation": "linearized"}, "has none"),
    ],
)
def test_options_are_checked_at_construction(options, message):
    with pytest.raises(ValueError, match=message):
        FixedPointVI(eight_schools, **options)


@pytest.mark.parametrize(
    ("sites", "message"),
    [(["tua"], "latent sites of the model .mu, tau, theta., not 'tua'"), (["mu", "tau", "theta"], "name fewer")],
)
def test_sites_are_checked(sites, message):
    with pytest.raises(ValueError, match=message):
        FixedPointVI(eight_schools, integrate=sites).run(SCHOOLS, progress_bar=False)


def test_resampled_draws_are_the_posteriors(schools):
    found = schools["not centered"].resample(SCHOOLS, 4000)["posterior"]
    _, mean, deviation = exact_schools()
    for name, place in (("mu", 1), ("theta", slice(2, None))):
        draws = np.asarray(found[name])[0]
        np.testing.assert_allclose((draws.mean(0) - mean[place]) / deviation[place], 0, atol=0.06)
        np.testing.assert_allclose(np.log(draws.std(0) / deviation[place]), 0, atol=0.06)


def test_resampling_is_refused_where_q_is_far_from_the_posterior():
    single = FixedPointVI(eight_schools).run(SCHOOLS, progress_bar=False)
    assert single.khat(SCHOOLS).khat > 0.7
    with pytest.raises(ValueError, match=r"cannot be resampled: .* Integrate hyperparameters out"):
        single.resample(SCHOOLS, 1000)
    tried = dataclasses.replace(single, info=single.info | {"not_integrated": "no site can be"})
    with pytest.raises(ValueError, match=r"cannot be resampled: .* all the weight. Run NUTS from here"):
        tried.resample(SCHOOLS, 1000)


def positive_of_two(left, right, y=None):
    """Two columns that are nearly the same, and a slope that may not be negative: log of it has a long tail."""
    slope = numpyro.sample("slope", dist.Normal(2, 10))
    positive = numpyro.sample("positive", dist.TruncatedNormal(2, 10, low=0))
    sigma = numpyro.sample("sigma", dist.Exponential(1))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(slope * left + positive * right, sigma), obs=y)


def positive_given(sigma, X, y):
    """The log evidence up to a constant, mean and variance of the positive slope."""
    covariance = np.linalg.inv(X.T @ X / sigma**2 + np.eye(2) / 100)
    linear = X.T @ y / sigma**2 + 0.02
    mean, deviation = covariance @ linear, np.sqrt(covariance[1, 1])
    exponent = 0.5 * (linear @ mean - y @ y / sigma**2) - len(y) * np.log(sigma)
    evidence = exponent + 0.5 * np.linalg.slogdet(covariance)[1] + stats.norm.logsf(0, mean[1], deviation)
    truncated = stats.truncnorm(-mean[1] / deviation, np.inf, mean[1], deviation)
    return evidence, truncated.mean(), truncated.var()


def test_long_tails_of_next_to_no_mass_are_left_out_without_a_warning():
    rng = np.random.default_rng(0)
    left = rng.normal(2, 0.5, 25)
    X = np.stack([left, left + 0.008 * rng.normal(size=25)], axis=1)
    y = X @ [1.0, 1.0] + 0.6 * rng.normal(size=25)
    sigmas = np.linspace(0.3, 1.8, 300)
    evidences, means, variances = np.transpose([positive_given(sigma, X, y) for sigma in sigmas])
    weights = np.exp(evidences - sigmas - np.max(evidences - sigmas))
    weights /= weights.sum()
    mean = weights @ means
    deviation = np.sqrt(weights @ (variances + (means - mean) ** 2))
    data = {"left": X[:, 0], "right": X[:, 1], "y": y}
    mixture = FixedPointVI(positive_of_two, integrate="auto").run(data, progress_bar=False)
    draws = np.asarray(mixture.sample_posterior(KEY, (20_000,))["positive"], np.float64)
    assert abs(draws.mean() - mean) < 0.03 * deviation
    assert abs(np.log(draws.std() / deviation)) < 0.03


def many_scales(x, y=None):
    scale = numpyro.sample("scale", dist.HalfCauchy(1).expand([7]).to_event(1))
    slope = numpyro.sample("slope", dist.Normal(0, scale).to_event(1))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.Normal(x @ slope, 1.0), obs=y)


@pytest.mark.parametrize("method", ["importance", "nuts"])
def test_many_entries_are_integrated_as_by_quadrature(method, monkeypatch):
    if method == "nuts":
        monkeypatch.setattr(integrator, "MOST_BY_IMPORTANCE", 6)
    y = np.array([0.0, 0.5, -1.0, 1.5, 2.0, 4.0, 8.0])
    posterior = FixedPointVI(many_scales, integrate="auto").run({"x": np.eye(7), "y": y}, progress_bar=False)
    assert posterior.info["integrated"] == ["scale"]
    found = posterior.info["integration"]
    assert found["method"] == method and posterior.gaussian.means.shape[1] == 14
    log_scale = np.linspace(-12, 14, 4001)[:, None]
    scale = np.exp(log_scale)
    log_weight = log_scale - np.log1p(scale**2) - 0.5 * np.log1p(scale**2) - 0.5 * y**2 / (1 + scale**2)
    if method == "nuts":
        assert found["r_hat"] < 1.05 and posterior.elbo is None
    else:
        evidence = logsumexp(log_weight + np.log((26 / 4000) * 2 / np.pi / np.sqrt(2 * np.pi)), axis=0).sum()
        np.testing.assert_allclose(posterior.elbo, evidence, atol=0.05)
    weight = np.exp(log_weight - logsumexp(log_weight, axis=0))
    shrunk = scale**2 / (1 + scale**2)
    mean = np.sum(weight * shrunk * y, axis=0)
    deviation = np.sqrt(np.sum(weight * (shrunk + (shrunk * y) ** 2), axis=0) - mean**2)
    slope = np.asarray(posterior.sample_posterior(KEY, (20_000,))["slope"])
    np.testing.assert_allclose((slope.mean(0) - mean) / deviation, 0, atol=0.1)
    np.testing.assert_allclose(np.log(slope.std(0) / deviation), 0, atol=0.1)
    data = {"x": np.eye(7), "y": y}
    assert posterior.khat(data).verdict.startswith("good")
    few = {"r_hat": 1.3} if method == "nuts" else {"effective_sample_size": 50.0}
    apart = dataclasses.replace(posterior, info=posterior.info | {"integration": found | few})
    assert apart.khat(data).verdict.startswith("doubtful. The draws of the integrated sites")
    draws = np.asarray(posterior.resample(data, 2000)["posterior"]["slope"])[0]
    np.testing.assert_allclose((draws.mean(0) - mean) / deviation, 0, atol=0.12)


def test_too_many_parameters_for_a_mixture_are_left_to_one_gaussian(monkeypatch):
    monkeypatch.setattr(integration, "MOST_PARAMETERS", 9)
    posterior = FixedPointVI(eight_schools, integrate="auto").run(SCHOOLS, progress_bar=False)
    assert "10 parameters" in posterior.info["not_integrated"] and posterior.elbo is not None
    with pytest.raises(ValueError, match=r"10 parameters.*at most 9"):
        posterior.integrate(SCHOOLS, sites=["tau"])
    with pytest.raises(ValueError, match=r"have 10 entries, and at most 6"):
        posterior.integrate(SCHOOLS, sites=posterior.site_names)


def test_rows_must_be_those_of_the_posterior(schools):
    few = {name: array[:4] for name, array in SCHOOLS.items()}
    with pytest.raises(ValueError, match="rows"):
        schools["centered"].integrate(few, progress_bar=False)


def test_a_model_of_normal_rows_is_log_concave_given_its_scales():
    """Densities of the scales themselves are constant then. Otherwise each value of the scales takes a search."""

    def given(y, x):
        numpyro.sample("scale", dist.HalfNormal(1), obs=jnp.asarray(0.5))
        level = numpyro.sample("level", dist.Normal(0, 1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("x", dist.Normal(1.0, 0.5), obs=x)
            numpyro.sample("y", dist.Normal(level, 0.5), obs=y)

    data = {"y": np.arange(4.0), "x": np.ones(4)}
    for options in (DEFAULTS, DEFAULTS._replace(scheme="ekf")):
        engine = Engines(given, options, None, batch=True).together(data, {}, KEY)[0]
        constant = [kind for terms, kind in zip(engine.program.terms, engine.kinds) if not terms.num_predictors]
        assert constant and all(kind.concave and kind.conservative for kind in constant)


# ---------------------------------------------------------------------- effects that are Gaussian given all else
NUM_AREAS = 20
NEIGHBORS = np.eye(NUM_AREAS, k=1) + np.eye(NUM_AREAS, k=-1)
AREAS = np.resize([0.2, 0.9, 1.3, 0.8, 0.1, -0.7, -1.2, -0.9], NUM_AREAS)
NOISE = 0.4


def areas(adjacency, y):
    tau = numpyro.sample("tau", dist.Gamma(2, 1))
    alpha = numpyro.sample("alpha", dist.Uniform(0.05, 0.95))
    phi = numpyro.sample("phi", dist.CAR(0.0, alpha, tau, adjacency))
    numpyro.sample("y", dist.Normal(phi, NOISE), obs=y)


def walk(y):
    """Of which the outcome is indexed by a counter: an array of JAX's."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))

    def step(level, _):
        level = numpyro.sample("level", dist.Normal(level, scale))
        numpyro.sample("y", dist.Normal(level, NOISE))
        return level, None

    with handlers.condition(data={"y": y}):
        scan(step, 0.0, None, length=NUM_AREAS)


def exchangeable(y):
    """Whose number of effects is computed in JAX: when the model is read."""
    scale = numpyro.sample("scale", dist.HalfNormal(1))
    count = int(jnp.sum(jnp.ones_like(y)))
    effect = numpyro.sample("effect", dist.Normal(0, scale).expand([count]).to_event(1))
    numpyro.sample("y", dist.Normal(effect, NOISE).to_event(1), obs=y)


def on_a_grid(log_prior, covariance, *grids):
    """Means and standard deviations of the hyperparameters, by the density of the outcomes given these."""
    points = np.stack([axis.ravel() for axis in np.meshgrid(*grids, indexing="ij")], axis=1)
    log_p = [
        log_prior(*h) + stats.multivariate_normal.logpdf(AREAS, cov=covariance(*h) + NOISE**2 * np.eye(NUM_AREAS))
        for h in points
    ]
    weights = np.exp(log_p - logsumexp(log_p))
    mean = weights @ points
    return mean, np.sqrt(weights @ (points - mean) ** 2)


SCALES = np.linspace(0.002, 5, 500)
HALF_NORMAL = stats.halfnorm.logpdf


@pytest.mark.parametrize(
    "model, data, sites, truth",
    [
        (
            areas,
            {"adjacency": NEIGHBORS},
            ["tau", "alpha"],
            lambda: on_a_grid(
                lambda tau, alpha: stats.gamma.logpdf(tau, 2),
                lambda tau, alpha: np.linalg.inv(tau * (np.diag(NEIGHBORS.sum(1)) - alpha * NEIGHBORS)),
                np.linspace(0.02, 12, 200),
                np.linspace(0.055, 0.945, 60),
            ),
        ),
        (
            walk,
            {},
            ["scale"],
            lambda: on_a_grid(
                HALF_NORMAL, lambda s: s**2 * np.minimum.outer(*[np.arange(1, NUM_AREAS + 1)] * 2), SCALES
            ),
        ),
        (exchangeable, {}, ["scale"], lambda: on_a_grid(HALF_NORMAL, lambda s: s**2 * np.eye(NUM_AREAS), SCALES)),
    ],
)
def test_effects_that_are_gaussian_given_all_else_are_found_however_the_model_takes_its_data(model, data, sites, truth):
    posterior = FixedPointVI(model, integrate="auto").run(data | {"y": AREAS}, progress_bar=False)
    assert posterior.info["integrated"] == sites
    draws = posterior.sample_posterior(KEY, (40_000,))
    mean, deviation = truth()
    found = np.stack([np.asarray(draws[site]) for site in sites], axis=1)
    np.testing.assert_allclose((found.mean(0) - mean) / deviation, 0, atol=0.05)
    np.testing.assert_allclose(np.log(found.std(0) / deviation), 0, atol=0.05)
