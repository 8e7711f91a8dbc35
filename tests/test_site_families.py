"""Sites whose posterior is of their own family: conjugate ones against closed forms, others against the best of L-BFGS
on a bound that is computed independently."""

import pickle

import arviz
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from scipy import optimize, special, stats

from numpyro_rvga import RVGA, Posterior, RandomWalk
from numpyro_rvga.metrics import nlpd

COUNTS = np.array([5.0, 0.0, 3.0, 1.0, 7.0, 2.0, 2.0, 4.0, 1.0, 0.0, 3.0])
TALLIES = np.array([[3, 1, 0, 1], [0, 2, 2, 1], [4, 0, 1, 0], [1, 1, 1, 2], [2, 2, 0, 1]])
RNG = np.random.default_rng(0)
X = RNG.normal(size=(120, 2))
OUTCOMES = X @ [1.0, -0.5] + 0.7 * RNG.normal(size=120)


def rate(y=None):
    of_rows = numpyro.sample("rate", dist.Gamma(2.0, 1.5))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(of_rows), obs=y)


def share(y=None):
    of_rows = numpyro.sample("share", dist.Beta(2.0, 3.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Binomial(9, of_rows), obs=y)


def weights(y=None):
    of_rows = numpyro.sample("weights", dist.Dirichlet(jnp.array([1.0, 2.0, 0.5, 1.0])))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Multinomial(5, of_rows), obs=y)


def variance(y=None):
    of_rows = numpyro.sample("variance", dist.InverseGamma(3.0, 2.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(0.5, jnp.sqrt(of_rows)), obs=y)


def noise(X, y=None):
    precision = numpyro.sample("precision", dist.Gamma(2.0, 1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 2.0).expand([2]).to_event(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ slopes, 1 / jnp.sqrt(precision)), obs=y)


CONJUGATE = {
    "gamma": (rate, "rate", COUNTS, [[2 + COUNTS.sum(), 1.5 + len(COUNTS)]]),
    "beta": (share, "share", COUNTS, [[2 + COUNTS.sum(), 3 + (9 - COUNTS).sum()]]),
    "dirichlet": (weights, "weights", TALLIES, [[11, 18.5], [8, 10.5], [4.5, 6]]),
    "inverse-gamma": (variance, "variance", COUNTS, [[3 + 5.5, 2 + np.sum((COUNTS - 0.5) ** 2) / 2]]),
}


def evidence(family, y):
    if family == "gamma":
        ((a, b),) = CONJUGATE["gamma"][3]
        return special.gammaln(a) - special.gammaln(2) + 2 * np.log(1.5) - a * np.log(b) - special.gammaln(y + 1).sum()
    if family == "beta":
        ((a, b),) = CONJUGATE["beta"][3]
        choices = special.gammaln(10) - special.gammaln(y + 1) - special.gammaln(10 - y)
        return special.betaln(a, b) - special.betaln(2, 3) + choices.sum()
    if family == "dirichlet":
        alpha = np.array([1.0, 2.0, 0.5, 1.0])
        beta = lambda a: special.gammaln(a).sum() - special.gammaln(a.sum())  # noqa: E731
        choices = special.gammaln(6) - special.gammaln(y + 1).sum(axis=1)
        return beta(alpha + y.sum(axis=0)) - beta(alpha) + choices.sum()
    ((a, b),) = CONJUGATE["inverse-gamma"][3]
    return special.gammaln(a) - special.gammaln(3) + 3 * np.log(2) - a * np.log(b) - len(y) / 2 * np.log(2 * np.pi)


@pytest.mark.parametrize("family", CONJUGATE)
def test_conjugate_sites_have_their_exact_posterior_and_evidence_in_one_block_and_in_a_stream(family):
    model, site, y, natural = CONJUGATE[family]
    method = RVGA(model, family={site: family}, block_size=2)
    stream = method.run(({"y": y[start : start + 3]} for start in range(0, len(y), 3)), progress_bar=False)
    one_block = method.posterior(jax.jit(method.update)(method.init({"y": y}), {"y": y}))
    for posterior in (stream, one_block):
        np.testing.assert_allclose(posterior.gaussian.natural, natural, rtol=1e-9)
        np.testing.assert_allclose(posterior.elbo, evidence(family, y), rtol=1e-9)
        assert posterior.info["exact"] and posterior.num_rows == len(y)
    assert stream.info["converged"] and stream.info["num_blocks"] == -(-len(y) // 2)


def test_in_single_precision_too():
    model, site, y, natural = CONJUGATE["dirichlet"]
    with jax.enable_x64(False):
        posterior = RVGA(model, family={site: "dirichlet"}).run({"y": y}, progress_bar=False)
        assert posterior.gaussian.natural.dtype == jnp.float32 and posterior.info["exact"]
        np.testing.assert_allclose(posterior.gaussian.natural, natural, rtol=1e-4)


def test_a_precision_beside_slopes_is_at_the_fixed_point_of_coordinate_ascent():
    posterior = RVGA(noise, family={"precision": "gamma"}).run({"X": X, "y": OUTCOMES}, progress_bar=False)
    a, b = 2 + len(X) / 2, 1.0
    for _ in range(100):
        covariance = np.linalg.inv(np.eye(2) / 4 + a / b * X.T @ X)
        mean = covariance @ (a / b * X.T @ OUTCOMES)
        b = 1 + 0.5 * (np.sum((OUTCOMES - X @ mean) ** 2) + np.trace(X @ covariance @ X.T))
    np.testing.assert_allclose(posterior.gaussian.natural, [[a, b]], rtol=1e-6)
    np.testing.assert_allclose(posterior.gaussian.gaussian.mean, mean, atol=1e-7)
    np.testing.assert_allclose(posterior.gaussian.gaussian.covariance(), covariance, atol=1e-8)
    assert not posterior.info["exact"]


def visible(x, y=None):
    share = numpyro.sample("share", dist.Beta(3.0, 2.0))
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Bernoulli(probs=share * jax.nn.sigmoid(slope * x)), obs=y)


def test_rows_that_are_not_conjugate_reach_the_best_bound_that_l_bfgs_finds():
    x = np.linspace(-3, 3, 24)
    y = (np.random.default_rng(1).random(24) < 0.7 / (1 + np.exp(-1.5 * x))).astype(float)
    z, w = np.polynomial.hermite_e.hermegauss(16)
    u, v = np.polynomial.legendre.leggauss(60)
    u, v, w = 0.5 * (u + 1), 0.5 * v, w / w.sum()

    def bound(at):
        a, b, mean, deviation = np.exp(at[0]), np.exp(at[1]), at[2], np.exp(at[3])
        probability = u[:, None, None] / (1 + np.exp(-(mean + deviation * z)[:, None] * x))
        values = np.sum(np.log(np.where(y == 1, probability, 1 - probability)), axis=2) @ w
        density = stats.beta(a, b).pdf(u)
        of_share = (a - 3) * (special.digamma(a) - special.digamma(a + b)) - special.betaln(a, b) + special.betaln(3, 2)
        of_share += (b - 2) * (special.digamma(b) - special.digamma(a + b))
        return v @ (density * values) - of_share - 0.5 * (deviation**2 + mean**2 - 1) + np.log(deviation)

    best = optimize.minimize(lambda at: -bound(at), [1.0, 1.0, 0.5, -1.0], method="L-BFGS-B", options={"ftol": 1e-14})
    posterior = RVGA(visible, family={"share": "beta"}).run({"x": x, "y": y}, progress_bar=False)
    q = posterior.gaussian
    found = [*np.log(q.natural[0]), q.gaussian.mean[0], np.log(q.gaussian.deviation()[0])]
    np.testing.assert_allclose(posterior.elbo, -best.fun, atol=1e-5)
    np.testing.assert_allclose(bound(found), -best.fun, atol=1e-5)
    np.testing.assert_allclose(found, best.x, atol=2e-3)
    # The posterior itself, on a grid: the marginal of the share is close to it.
    slopes = np.linspace(-2, 6, 100)
    probability = u[:, None, None] / (1 + np.exp(-slopes[:, None] * x))
    log_joint = np.sum(np.log(np.where(y == 1, probability, 1 - probability)), axis=2)
    log_joint += stats.beta(3, 2).logpdf(u)[:, None] + stats.norm.logpdf(slopes)
    mass = v * np.exp(log_joint - log_joint.max()).sum(axis=1)
    exact = mass @ u / mass.sum()
    share = stats.beta(*q.natural[0])
    assert abs(share.mean() - exact) < 0.15 * share.std()
    assert posterior.elbo < np.log(np.sum(mass)) + log_joint.max() + np.log(slopes[1] - slopes[0])


def group_rates(group, x, num_groups, y=None):
    slope = numpyro.sample("slope", dist.Normal(0.0, 1.0))
    with numpyro.plate("groups", num_groups):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    with numpyro.plate("rows", len(x)):
        numpyro.sample("y", dist.Poisson(rate[group] * jnp.exp(slope * x)), obs=y)


def test_of_many_entries_each_row_takes_nodes_of_its_own():
    rng, count = np.random.default_rng(2), 12
    group, x = rng.integers(0, count, 300), rng.normal(size=300)
    y = rng.poisson(rng.gamma(2, 1, count)[group] * np.exp(0.3 * x)).astype(float)
    method = RVGA(group_rates, family={"rate": "gamma"})
    posterior = method.run({"group": group, "x": x, "y": y}, num_groups=count, progress_bar=False)
    slope, q = posterior.gaussian.gaussian, posterior.gaussian
    a = 2 + np.bincount(group, y)
    b = 1 + np.bincount(group, np.exp(float(slope.mean[0]) * x + 0.5 * float(slope.covariance()[0, 0]) * x**2))
    np.testing.assert_allclose(q.natural, np.stack([a, b], axis=-1), rtol=1e-6)
    tilt = np.exp(float(slope.mean[0]) * x + 0.5 * float(slope.covariance()[0, 0]) * x**2)
    gradient = np.sum(y * x) - float(slope.mean[0]) - np.sum((a / b)[group] * x * tilt)
    assert abs(gradient) * float(slope.deviation()[0]) < 1e-5


def test_so_do_rows_that_depend_on_two():
    rng = np.random.default_rng(3)
    group, kind = rng.integers(0, 4, 100), rng.integers(0, 2, 100)
    y = rng.poisson(2.0, 100).astype(float)

    def crossed(group, kind, y=None):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0).expand([4]).to_event(1))
        factor = numpyro.sample("factor", dist.Gamma(50.0, 50.0).expand([2]).to_event(1))
        with numpyro.plate("rows", len(group)):
            numpyro.sample("y", dist.Poisson(rate[group] * factor[kind]), obs=y)

    data = {"group": group, "kind": kind, "y": y}
    posterior = RVGA(crossed, family={"rate": "gamma", "factor": "gamma"}).run(data, progress_bar=False)
    a, c = 2 + np.bincount(group, y), 50 + np.bincount(kind, y)
    b, d = 1.0 + np.bincount(group), 50.0 + np.bincount(kind)
    for _ in range(200):
        b, d = 1 + np.bincount(group, (c / d)[kind]), 50 + np.bincount(kind, (a / b)[group])
    np.testing.assert_allclose(posterior.gaussian.natural[:4], np.stack([a, b], axis=-1), rtol=1e-4)
    np.testing.assert_allclose(posterior.gaussian.natural[4:], np.stack([c, d], axis=-1), rtol=1e-4)


def test_later_rows_that_depend_on_more_entries_are_refused():
    y, both = np.tile(COUNTS, 4), np.zeros(44)
    both[40] = 1.0  # a stream shows 32 rows before it begins

    def model(both, y=None):
        rates = numpyro.sample("rates", dist.Gamma(2.0, 1.0).expand([3]).to_event(1))
        with numpyro.plate("rows", len(both)):
            numpyro.sample("y", dist.Poisson(rates[0] + both * rates[1]), obs=y)

    blocks = ({"both": both[i : i + 22], "y": y[i : i + 22]} for i in (0, 22))
    method = RVGA(model, family={"rates": "gamma"}, block_size=22)
    with pytest.raises(ValueError, match="one depends on more entries of the sites that family names"):
        method.run(blocks, progress_bar=False)
    np.testing.assert_allclose(method.state.natural, [[2 + y[:22].sum(), 23.0], [2.0, 1.0], [2.0, 1.0]])


def test_of_more_than_two_entries_in_a_row_nodes_are_spread_over_all():
    rng = np.random.default_rng(4)
    features = rng.uniform(size=(30, 3))
    y = rng.poisson(features @ [1.0, 2.0, 0.5]).astype(float)

    def mixture(features, y=None):
        rates = numpyro.sample("rates", dist.Gamma(2.0, 1.5).expand([3]).to_event(1))
        with numpyro.plate("rows", len(features)):
            numpyro.sample("y", dist.Poisson(features @ rates), obs=y)

    posterior = RVGA(mixture, family={"rates": "gamma"}, num_samples=100).run(
        {"features": features, "y": y}, progress_bar=False
    )
    scores = special.ndtri(stats.qmc.Sobol(3, rng=np.random.default_rng(7)).random(256))

    def bound(parameters):
        a, b = np.exp(parameters).reshape(2, 3)
        means = stats.gamma(a, scale=1 / b).ppf(stats.norm.cdf(scores)) @ features.T
        value = np.mean(np.log(means) @ y) - np.sum(features @ (a / b)) - special.gammaln(y + 1).sum()
        return value - np.sum(
            (a - 2) * special.digamma(a) - special.gammaln(a) + 2 * np.log(b / 1.5) + a * (1.5 / b - 1)
        )

    found = np.log(np.ravel(posterior.gaussian.natural.T))
    best = optimize.minimize(lambda at: -bound(at), found, method="L-BFGS-B", options={"maxiter": 3})
    np.testing.assert_allclose(bound(found), -best.fun, atol=0.02)
    np.testing.assert_allclose(posterior.elbo, -best.fun, atol=0.1)


def test_a_prior_that_is_not_gaussian_beside_it_is_taken_as_it_is():
    y = np.random.default_rng(8).normal(2.0, 0.8, 15)

    def model(y=None):
        level = numpyro.sample("level", dist.Gamma(2.0, 1.0))
        scale = numpyro.sample("scale", dist.HalfNormal(1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(level, scale), obs=y)

    def bound(at):
        a, b, mean, deviation = np.exp(at[0]), np.exp(at[1]), at[2], np.exp(at[3])
        squares = np.sum((y - a / b) ** 2) + len(y) * a / b**2
        value = -len(y) * (0.5 * np.log(2 * np.pi) + mean) - 0.5 * squares * np.exp(-2 * mean + 2 * deviation**2)
        of_level = (a - 2) * special.digamma(a) - special.gammaln(a) + 2 * np.log(b) + a * (1 / b - 1)
        of_scale = 0.5 * np.log(2 / np.pi) - 0.5 * np.exp(2 * mean + 2 * deviation**2) + mean
        return value - of_level + of_scale + 0.5 * np.log(2 * np.pi) + 0.5 + np.log(deviation)

    best = optimize.minimize(lambda at: -bound(at), [2.0, 1.0, 0.0, -1.0], method="L-BFGS-B", options={"ftol": 1e-15})
    posterior = RVGA(model, family={"level": "gamma"}).run({"y": y}, progress_bar=False)
    q = posterior.gaussian
    found = [*np.log(q.natural[0]), q.gaussian.mean[0], np.log(q.gaussian.deviation()[0])]
    np.testing.assert_allclose(posterior.elbo, -best.fun, atol=1e-6)
    np.testing.assert_allclose(found, best.x, atol=1e-3)


# ---------------------------------------------------------------------- the posterior
def test_density_where_no_gaussian_site_is_left():
    def counts(y=None):
        rate = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with numpyro.plate("rows", 5):
            numpyro.sample("y", dist.Poisson(rate), obs=y)

    posterior = RVGA(counts, family={"rate": "gamma"}).run({"y": np.array([1, 0, 2, 1, 3])}, progress_bar=False)
    rates = np.array([0.7, 1.2])
    expected = stats.gamma(9.0, scale=1 / 6.0).logpdf(rates) + np.log(rates)
    np.testing.assert_allclose(posterior.log_prob({"rate": rates}), expected, atol=1e-4)


def test_all_that_is_read_off_a_posterior_is_of_its_families(tmp_path):
    data = {"X": X, "y": OUTCOMES}
    posterior = RVGA(noise, family={"precision": "gamma"}).run(data, progress_bar=False)
    ((a, b),) = posterior.gaussian.natural
    exact = stats.gamma(a, scale=1 / b)
    draws = posterior.sample_posterior(jax.random.key(0), (10_000,))
    np.testing.assert_allclose(draws["precision"].mean(), exact.mean(), atol=4 * exact.std() / 100)
    assert stats.kstest(np.asarray(draws["precision"]), exact.cdf).pvalue > 1e-3
    np.testing.assert_allclose(posterior.quantiles([0.05, 0.9])["precision"], exact.ppf([0.05, 0.9]), rtol=1e-9)
    np.testing.assert_allclose(posterior.median()["precision"], exact.median(), rtol=1e-9)
    theta = posterior.sample_unconstrained(jax.random.key(1), (20_000,))
    np.testing.assert_allclose(np.cov(theta.T), posterior.covariance, atol=1e-3)
    np.testing.assert_allclose(posterior.scale_tril @ posterior.scale_tril.T, posterior.covariance, atol=1e-12)
    at = {"precision": jnp.array([1.5, 2.0]), "slopes": jnp.array([[1.0, -0.5], [0.9, -0.4]])}
    normal = stats.multivariate_normal(posterior.gaussian.gaussian.mean, posterior.gaussian.gaussian.covariance())
    expected = exact.logpdf(at["precision"]) + np.log(at["precision"]) + normal.logpdf(at["slopes"])
    np.testing.assert_allclose(posterior.log_prob(at), expected, rtol=1e-9)
    assert posterior.khat(data).khat < 0.5
    assert arviz.summary(posterior.to_arviz(data)).loc["precision", "mean"] > 1
    assert nlpd(posterior, data) < 1.2
    assert posterior.predictive(jax.random.key(2), data, 50)["y"].shape[-1] == len(X)
    posterior.print_summary()
    posterior.save(tmp_path / "posterior.npz")
    again = Posterior.load(tmp_path / "posterior.npz", noise)
    np.testing.assert_array_equal(again.mean, posterior.mean)
    assert pickle.loads(pickle.dumps(posterior)).num_rows == len(X)
    later = RVGA(noise, family={"precision": "gamma"}).run(data, init=again, progress_bar=False)
    np.testing.assert_allclose(later.mean, posterior.update(data, progress_bar=False).mean, rtol=1e-9)
    assert later.num_rows == 2 * len(X) and later.elbo is None
    with pytest.raises(ValueError, match="families by site, which are not merged"):
        Posterior.merge([posterior, posterior])


def test_a_stream_goes_on_from_a_checkpoint_and_leaves_bad_rows_out(tmp_path):
    method, y = RVGA(rate, family={"rate": "gamma"}, block_size=2, shuffle=False), COUNTS.copy()
    whole = method.run({"y": y}, progress_bar=False)

    def broken():
        yield {"y": y[:5]}
        raise OSError("gone")

    file = tmp_path / "run.checkpoint"
    with pytest.raises(OSError, match="gone"):
        method.run(broken(), checkpoint=file, every=2, progress_bar=False)
    resumed = method.run(
        ({"y": part} for part in (y[:5], y[5:])), checkpoint=file, resume=True, every=2, progress_bar=False
    )
    np.testing.assert_array_equal(resumed.gaussian.natural, whole.gaussian.natural)
    bad = np.insert(y, 3, [-1.0, np.nan])
    with pytest.raises(ValueError, match="row 3"):
        method.run({"y": np.insert(y, 3, -1.0)}, progress_bar=False)
    skipped = method.run({"y": bad}, on_bad_row="skip", progress_bar=False)
    np.testing.assert_allclose(skipped.gaussian.natural, whole.gaussian.natural)
    assert skipped.info["num_skipped"] == 2


def test_a_checkpoint_leaves_the_block_size_as_it_is_given(tmp_path):
    """Rows that are not conjugate: their order, and how they are cut, have a part in the result."""

    def shifted(y=None):
        of_rows = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Poisson(of_rows + 1.0), obs=y)

    method = RVGA(shifted, family={"rate": "gamma"}, block_size=5, shuffle=False)
    plain = method.run({"y": COUNTS}, progress_bar=False)
    stored = method.run({"y": COUNTS}, checkpoint=tmp_path / "run", every=2, progress_bar=False)
    assert stored.info["num_blocks"] == plain.info["num_blocks"] == -(-len(COUNTS) // 5)
    np.testing.assert_array_equal(stored.gaussian.natural, plain.gaussian.natural)


def test_a_state_of_another_method_is_no_start():
    with pytest.raises(ValueError, match="state of this method, not State"):
        start = RVGA(rate).init({"y": COUNTS})
        RVGA(rate, family={"rate": "gamma"}).run({"y": COUNTS}, init=start, progress_bar=False)


# ---------------------------------------------------------------------- what is refused
def half_cauchy(y=None):
    of_rows = numpyro.sample("rate", dist.HalfCauchy(1.0))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(of_rows), obs=y)


def learned(y=None):
    mean = numpyro.sample("mean", dist.LogNormal(0.0, 1.0))
    of_rows = numpyro.sample("rate", dist.Exponential(1 / mean))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Poisson(of_rows), obs=y)


def scaled(y=None):
    precision = numpyro.sample("rate", dist.Gamma(2.0, 1.0))
    level = numpyro.sample("level", dist.Normal(0.0, 1 / jnp.sqrt(precision)))
    with numpyro.plate("rows", len(y)):
        numpyro.sample("y", dist.Normal(level, 1 / jnp.sqrt(precision)), obs=y)


@pytest.mark.parametrize(
    "model, family, message",
    [
        (rate, {"rates": "gamma"}, "the site 'rates', and the latent sites of this model that rows share are rate"),
        (rate, {"rate": "wishart"}, "family of 'rate' must be one of 'gamma'"),
        (rate, {"rate": "beta"}, "for sites whose values are between two bounds"),
        (half_cauchy, {"rate": "gamma"}, "the prior of site 'rate' is not of the family"),
        (learned, {"rate": "gamma"}, "the prior of site 'rate' is not of the family"),
        (scaled, {"rate": "gamma"}, "the prior of another site depends on it"),
        (rate, {}, "names no site"),
    ],
)
def test_what_has_no_such_posterior_is_refused(model, family, message):
    with pytest.raises(ValueError, match=message):
        RVGA(model, family=family).run({"y": COUNTS}, progress_bar=False)


@pytest.mark.parametrize(
    "options, name",
    [({"scheme": "explicit"}, "scheme"), ({"dynamics": RandomWalk(0.1)}, "dynamics"), ({"memory": 10}, "memory")],
)
def test_options_that_are_not_taken_are_named(options, name):
    with pytest.raises(ValueError, match=f"leave .*{name}.* at its default"):
        RVGA(rate, family={"rate": "gamma"}, **options)


def test_a_run_goes_on_from_posteriors_of_the_same_families_only():
    posterior = RVGA(rate).run({"y": COUNTS}, progress_bar=False)
    with pytest.raises(ValueError, match="init must be a posterior whose sites have the same families"):
        RVGA(rate, family={"rate": "gamma"}).run({"y": COUNTS}, init=posterior, progress_bar=False)
    with pytest.raises(RuntimeError, match="call init"):
        RVGA(rate, family={"rate": "gamma"}).posterior(None)
