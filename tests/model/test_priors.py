"""Gaussian priors are found and exact; others add up to NumPyro's own log density; the stand-in leaves no trace."""

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from numpyro import handlers
from numpyro.distributions.transforms import AffineTransform, OrderedTransform
from references import assert_moments_match, importance_moments, potential_of
from scipy import stats

from numpyro_rvga import BONG, RVGA, FixedPointVI
from numpyro_rvga.model.bound.prior_start import gaussian_parts
from numpyro_rvga.model.program import Program
from numpyro_rvga.model.terms.terms import constants, linearize

ROWS = {"y": np.array([0.3, -0.4, 1.0])}


def with_rows(prior):
    """A model with this prior, and rows that see nothing of it but the sum of one site."""

    def model(y=None):
        first = prior()
        with numpyro.plate("rows", y.shape[0]):
            numpyro.sample("y", dist.Normal(jnp.sum(first), 1.0), obs=y)

    return model


def program_of(prior, **options):
    return Program(with_rows(prior), ROWS, {}, **options)


def prior_terms_at(program, theta):
    """The multivariate normal sites, the Gaussian part and the other terms, each in its split form, added up."""
    total = gaussian_parts(program.prior, {})[0].at(theta)[0]
    for site in program.prior.normal_sites:
        loc, scale_tril = site.moments({})
        total = total + dist.MultivariateNormal(loc, scale_tril=scale_tril).log_prob(theta[site.start : site.stop])
    for terms in program.prior.terms:
        offset = linearize(terms, theta, {})[0][0]
        total = total + jnp.sum(jax.vmap(terms.density)(offset, jax.tree.map(lambda x: x[0], constants(terms, {}))))
    return total


# ---------------------------------------------------------------------- Gaussian priors
CORRELATED = np.array([[2.0, 0.6, 0.0], [0.6, 1.0, -0.3], [0.0, -0.3, 0.5]])
CENTER = np.array([1.0, -2.0, 0.5])


def by_covariance():
    return numpyro.sample("a", dist.MultivariateNormal(CENTER, CORRELATED))


def by_scale_tril():
    return numpyro.sample("a", dist.MultivariateNormal(CENTER, scale_tril=np.linalg.cholesky(CORRELATED)))


def by_precision():
    return numpyro.sample("a", dist.MultivariateNormal(CENTER, precision_matrix=np.linalg.inv(CORRELATED)))


def linear_gaussian_hierarchy():
    m = numpyro.sample("m", dist.Normal(0.0, 2.0))
    with numpyro.plate("groups", 3):
        return numpyro.sample("a", dist.Normal(m, 1.0))


def random_walk():
    return numpyro.sample("a", dist.GaussianRandomWalk(0.5, num_steps=4))


def random_walk_step_by_step():
    steps = [numpyro.sample("a0", dist.Normal(1.0, 0.5))]
    for i in range(1, 4):
        steps.append(numpyro.sample(f"a{i}", dist.Normal(0.9 * steps[-1], 0.5)))
    return jnp.stack(steps)


def log_normal():
    return numpyro.sample("a", dist.LogNormal(jnp.array([0.5, -1.0]), 0.7).to_event(1))


def affine_transform():
    base = dist.Normal(0.0, 1.0).expand([2]).to_event(1)
    return numpyro.sample("a", dist.TransformedDistribution(base, AffineTransform(3.0, 2.0)))


def soft_constraint():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.factor("sum", -0.5 * (a.sum() / 0.1) ** 2)
    return a


def hierarchy_moments():
    loadings = np.array([[2.0, 0, 0, 0], [2.0, 1, 0, 0], [2.0, 0, 1, 0], [2.0, 0, 0, 1]])
    return np.zeros(4), loadings @ loadings.T


def walk_moments():
    sums = 0.5 * np.tril(np.ones((4, 4)))
    return np.zeros(4), sums @ sums.T


def step_moments():
    response = np.array([[0.9 ** (i - j) if i >= j else 0.0 for j in range(4)] for i in range(4)])
    return response[:, 0], 0.25 * response @ response.T


def weighted():
    with handlers.scale(scale=4.0):
        return numpyro.sample("a", dist.MultivariateNormal(CENTER, CORRELATED))


def one_group():
    return numpyro.sample("a", dist.MultivariateNormal(CENTER[None], CORRELATED))


GAUSSIAN = {
    weighted: (CENTER, CORRELATED / 4),
    one_group: (CENTER, CORRELATED),
    by_covariance: (CENTER, CORRELATED),
    by_scale_tril: (CENTER, CORRELATED),
    by_precision: (CENTER, CORRELATED),
    linear_gaussian_hierarchy: hierarchy_moments(),
    random_walk: walk_moments(),
    random_walk_step_by_step: step_moments(),
    log_normal: (np.array([0.5, -1.0]), 0.49 * np.eye(2)),
    affine_transform: (np.full(2, 3.0), 4.0 * np.eye(2)),
    soft_constraint: (np.zeros(2), np.linalg.inv(np.eye(2) + 100.0)),
}


@pytest.mark.parametrize("prior", GAUSSIAN, ids=lambda prior: prior.__name__)
def test_gaussian_priors_are_found_and_exact(prior):
    mean, covariance = GAUSSIAN[prior]
    program = program_of(prior)
    assert program.prior.terms == ()
    state = program.initial_state
    np.testing.assert_allclose(state.mean, mean, atol=1e-9)
    np.testing.assert_allclose(state.root @ state.root.T, covariance, atol=1e-9)
    assert state.prior_factor is None


def test_posterior_under_a_correlated_prior_is_the_conjugate_one():
    posterior = RVGA(with_rows(by_covariance)).run(ROWS, progress_bar=False)
    ones = np.ones((3, 3))
    precision = np.linalg.inv(CORRELATED) + 3 * ones
    mean = np.linalg.solve(precision, np.linalg.solve(CORRELATED, CENTER) + ROWS["y"].sum())
    np.testing.assert_allclose(posterior.mean, mean, atol=1e-6)
    np.testing.assert_allclose(posterior.covariance, np.linalg.inv(precision), atol=1e-6)


# ---------------------------------------------------------------------- other priors
def one_site(fn):
    return lambda: numpyro.sample("a", fn)


def hierarchical():
    m = numpyro.sample("m", dist.Normal(0.0, 2.0))
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    with numpyro.plate("groups", 3):
        return numpyro.sample("a", dist.Normal(m, tau))


def horseshoe():
    tau = numpyro.sample("tau", dist.HalfCauchy(1.0))
    local = numpyro.sample("local", dist.HalfCauchy(1.0).expand([3]).to_event(1))
    return numpyro.sample("a", dist.Normal(0.0, tau * local).to_event(1))


def non_centered():
    tau = numpyro.sample("tau", dist.HalfNormal(1.0))
    return tau * numpyro.sample("z", dist.Normal(0.0, 1.0).expand([3]).to_event(1))


def random_walk_of_latent_scale():
    scale = numpyro.sample("scale", dist.Exponential(1.0))
    return numpyro.sample("a", dist.GaussianRandomWalk(scale, num_steps=3))


def covariance_of_latent_scale():
    scales = numpyro.sample("scales", dist.HalfNormal(1.0).expand([2]).to_event(1))
    root = numpyro.sample("root", dist.LKJCholesky(2, 2.0))
    return numpyro.sample("a", dist.MultivariateNormal(0.0, scale_tril=scales[:, None] * root))


def support_from_another_site():
    low = numpyro.sample("low", dist.Normal(0.0, 1.0))
    return numpyro.sample("a", dist.Uniform(low, low + 2.0))


def soft_sign():
    a = numpyro.sample("a", dist.Normal(0.0, 1.0).expand([2]).to_event(1))
    numpyro.factor("positive", jnp.sum(jax.nn.log_sigmoid(3.0 * a)))
    return a


OTHERS = {
    "half_normal": one_site(dist.HalfNormal(2.0)),
    "half_cauchy": one_site(dist.HalfCauchy(1.0).expand([2])),
    "exponential": one_site(dist.Exponential(2.0)),
    "gamma": one_site(dist.Gamma(2.0, 1.0).expand([2]).to_event(1)),
    "inverse_gamma": one_site(dist.InverseGamma(3.0, 1.0)),
    "beta": one_site(dist.Beta(2.0, 3.0)),
    "uniform": one_site(dist.Uniform(-1.0, 3.0)),
    "student": one_site(dist.StudentT(3.0, 0.0, 1.0)),
    "cauchy": one_site(dist.Cauchy(0.0, 1.0)),
    "truncated_normal": one_site(dist.TruncatedNormal(1.0, 1.0, low=0.5)),
    "dirichlets": one_site(dist.Dirichlet(jnp.ones((2, 3))).to_event(1)),
    "lkj": one_site(dist.LKJCholesky(3, 2.0)),
    "lkj_covariance": covariance_of_latent_scale,
    "hierarchical": hierarchical,
    "non_centered": non_centered,
    "horseshoe": horseshoe,
    "random_walk_of_latent_scale": random_walk_of_latent_scale,
    "support_from_another_site": support_from_another_site,
    "soft_sign": soft_sign,
    "weighted_by_an_array": handlers.scale(one_site(dist.StudentT(3.0, jnp.zeros(2), 1.0)), scale=np.array([0.5, 3.0])),
}
ORDERED = one_site(dist.TransformedDistribution(dist.Normal(0.0, 3.0).expand([3]).to_event(1), OrderedTransform()))


def penalty(log_factor):
    def prior():
        a = numpyro.sample("a", dist.Normal(0.0, 10.0))
        numpyro.factor("penalty", log_factor(a))
        return a

    return prior


# A prior, and where it has its mass or its kink: a center and a scale.
FAR_AND_WIDE = {
    "far_logistic": (one_site(dist.Logistic(100.0, 1.0)), 100.0, 1.0),
    "far_student": (one_site(dist.StudentT(3.0, 1e6, 1e5)), 1e6, 1e5),
    "far_gumbel": (one_site(dist.Gumbel(1e6, 1e5)), 1e6, 1e5),
    "far_normal": (one_site(dist.Normal(1e3, 10.0)), 1e3, 10.0),
    "wide_cauchy": (one_site(dist.Cauchy(0.0, 1e5)), 0.0, 1e5),
    "wide_student": (one_site(dist.StudentT(3.0, 0.0, 1000.0)), 0.0, 1000.0),
    "wide_half_cauchy": (one_site(dist.HalfCauchy(1e6)), np.log(1e6), 2.0),
    "wide_inverse_gamma": (one_site(dist.InverseGamma(2.0, 1e6)), np.log(1e6), 2.0),
    "narrow_half_normal": (one_site(dist.HalfNormal(1e-7)), np.log(1e-7), 2.0),
    "asymmetric": (one_site(dist.AsymmetricLaplace(0.0, 1.0, 2.0)), 0.0, 1.0),
    "soft_bound": (penalty(lambda a: -50 * jnp.maximum(a - 3, 0) ** 2), 3.0, 0.3),
    "slope_of_a_bound": (penalty(lambda a: -10 * jax.nn.relu(a - 3)), 3.0, 0.3),
    "huber": (penalty(lambda a: -jnp.where(jnp.abs(a) < 2.5, 0.5 * a**2, 2.5 * jnp.abs(a) - 3.125)), 0.0, 4.0),
    "window": (penalty(lambda a: jnp.where((a > 20) & (a < 30), 0.0, -7.0)), 25.0, 4.0),
    "lasso": (penalty(lambda a: -20 * jnp.abs(a)), 0.0, 0.1),
}


@pytest.mark.parametrize("is_double", [True, False], ids=["float64", "float32"])
@pytest.mark.parametrize("name", FAR_AND_WIDE)
def test_priors_are_read_as_they_are_where_they_have_their_mass(name, is_double):
    prior, center, scale = FAR_AND_WIDE[name]
    with jax.enable_x64(is_double):
        program = program_of(prior)
        points = jnp.asarray([[center + scale * z] for z in (-2.9, -1.1, -0.3, 0.4, 1.3, 3.2)], program.dtype)
        split = jax.vmap(lambda z: prior_terms_at(program, z))(points)
    potential, _ = potential_of(prior, program.layout.site_names)
    expected = -jax.vmap(potential)(jnp.asarray(points, float))
    tolerance = 1e-8 if is_double else 5e-3
    np.testing.assert_allclose(split, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", [*OTHERS, "ordered"])
def test_log_prior_and_its_split_form_are_numpyros_log_density(name):
    prior = ORDERED if name == "ordered" else OTHERS[name]
    program = program_of(prior)
    potential, size = potential_of(prior, program.layout.site_names)
    points = np.random.default_rng(2).normal(size=(4, size))
    compare = jax.jit(jax.vmap(lambda z: (-potential(z), program.log_prior(z), prior_terms_at(program, z))))
    expected, log_prior, split = compare(points)
    np.testing.assert_allclose(log_prior, expected, rtol=1e-8, atol=1e-8)
    np.testing.assert_allclose(split, expected, rtol=1e-8, atol=1e-8)
    if name != "ordered":  # which is Gaussian in unconstrained space, if seen to be
        assert program.prior.terms
    state = program.initial_state
    assert np.isfinite(state.mean).all() and np.isfinite(np.linalg.cholesky(state.root @ state.root.T)).all()


def test_log_joint_of_rows_and_prior_is_numpyros_log_density():
    model = with_rows(hierarchical)
    program = program_of(hierarchical)
    potential, size = potential_of(model, program.layout.site_names, **ROWS)
    theta = np.random.default_rng(3).normal(size=size)
    joint = program.log_prior(theta) + program.log_likelihood(theta, ROWS)["y"].sum()
    np.testing.assert_allclose(joint, -potential(theta), rtol=1e-10)


def test_normal_of_latent_scale_is_not_gaussian_but_its_gaussian_parent_is():
    program = program_of(hierarchical)
    assert {terms.site for terms in program.prior.terms} == {"tau", "a"}
    expected = np.zeros((5, 5))
    expected[0, 0] = 0.25
    np.testing.assert_allclose(gaussian_parts(program.prior, {})[0].precision, expected, atol=1e-12)


def test_predictors_of_a_hierarchical_normal_are_effect_location_and_log_scale():
    (terms,) = [t for t in program_of(hierarchical).prior.terms if t.site == "a"]
    assert (terms.num_elements, terms.is_affine) == (3, True)
    assert terms.num_predictors <= 3


# ---------------------------------------------------------------------- the stand-in leaves no trace
RNG = np.random.default_rng(6)


def half_cauchy_scale(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 5.0))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.Normal(loc, scale), obs=y)


def test_streamed_and_joint_solves_agree_under_a_prior_that_is_not_gaussian():
    data = {"y": 3.0 + 0.5 * RNG.normal(size=200)}
    joint = RVGA(half_cauchy_scale).run(data, progress_bar=False)
    streamed = RVGA(half_cauchy_scale, first_block=40, block_size=20).run(data, progress_bar=False)
    sd = np.sqrt(np.diagonal(joint.covariance))
    np.testing.assert_allclose((streamed.mean - joint.mean) / sd, 0.0, atol=0.1)
    np.testing.assert_allclose(np.sqrt(np.diagonal(streamed.covariance)) / sd, 1.0, atol=0.1)
    reference = importance_moments(half_cauchy_scale, joint.site_names, **data)
    assert_moments_match(joint, reference, 0.1, 0.1)


# ---------------------------------------------------------------------- improper priors
def improper():
    numpyro.sample("proper", dist.Normal(0.0, 1.0))
    return numpyro.sample("flat_effect", dist.ImproperUniform(dist.constraints.real, (2,), ()))


def improper_positive():
    return numpyro.sample("flat_scale", dist.ImproperUniform(dist.constraints.positive, (), ()))


@pytest.mark.parametrize("prior, site", [(improper, "flat_effect"), (improper_positive, "flat_scale")])
def test_improper_priors_of_streams_are_refused_by_name(prior, site):
    with pytest.raises(ValueError, match=f"'{site}' has an improper prior.*improper_prior_scale.*all rows at once"):
        RVGA(with_rows(prior)).run(iter([ROWS]), progress_bar=False)


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_improper_priors_that_rows_at_hand_make_proper_are_taken_as_they_are(method):
    """With a flat prior on the coefficients, the posterior is that of least squares."""

    def model(x, y):
        coefficients = numpyro.sample("coefficients", dist.ImproperUniform(dist.constraints.real, (), (2,)))
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(coefficients[0] + coefficients[1] * x, 0.7), obs=y)

    x = RNG.normal(size=30)
    y = 100 + 3 * x + RNG.normal(size=30)
    design = np.stack([np.ones(30), x], axis=1)
    posterior = method(model).run({"x": x, "y": y}, progress_bar=False)
    assert posterior.info["rows"] == "joint" and "improper prior" in posterior.info["reason"]
    np.testing.assert_allclose(posterior.mean, np.linalg.lstsq(design, y)[0], rtol=1e-6)
    np.testing.assert_allclose(posterior.covariance, 0.49 * np.linalg.inv(design.T @ design), rtol=1e-6)


def test_improper_posteriors_are_refused_by_name():
    def model(x, y):
        sum_ = numpyro.sample("a", dist.ImproperUniform(dist.constraints.real, (), (2,))).sum()
        numpyro.sample("y", dist.Normal(sum_ * x, 1.0), obs=y)

    with pytest.raises(ValueError, match=r"posterior is improper: site 'a'.*dist.Normal"):
        RVGA(model).run({"x": np.ones(5), "y": np.ones(5)}, progress_bar=False)


def test_improper_priors_become_wide_normals_on_request():
    program = program_of(improper, improper_prior_scale=20.0)
    assert program.prior.terms == ()
    precision = gaussian_parts(program.prior, {})[0].precision
    np.testing.assert_allclose(precision, np.diag([1.0, 1 / 400, 1 / 400]), atol=1e-12)
    posterior = RVGA(with_rows(improper_positive), improper_prior_scale=20.0).run(
        {"y": 2.0 + RNG.normal(size=400)}, progress_bar=False
    )
    assert abs(posterior.median()["flat_scale"] - 2.0) < 0.2


@pytest.mark.parametrize("method", [RVGA, FixedPointVI])
def test_a_prior_that_cannot_be_drawn_from_gives_the_posterior_of_the_same_prior_that_can(method):
    def model(x, y, prior):
        slope, scale = numpyro.sample("slope", dist.Normal(0, 2)), numpyro.sample("scale", prior)
        with numpyro.plate("rows", len(x)):
            numpyro.sample("y", dist.Normal(slope * x, scale), obs=y)

    rng = np.random.default_rng(0)
    data = {"x": rng.normal(size=60)}
    data["y"] = data["x"] + rng.normal(size=60)
    half_t = dist.TruncatedDistribution(dist.StudentT(1.0, 0.0, 10.0), low=0.0)  # of one degree: a half-Cauchy
    found, known = (
        method(model).run(data, prior=prior, progress_bar=False) for prior in (half_t, dist.HalfCauchy(10.0))
    )
    np.testing.assert_allclose(found.mean, known.mean, atol=1e-4)
    np.testing.assert_allclose(found.covariance, known.covariance, rtol=1e-3, atol=1e-7)
    np.testing.assert_allclose(found.elbo, known.elbo, atol=1e-4)


def line(X, y=None):
    intercept = numpyro.sample("intercept", dist.Normal(0.0, 1.0))
    slopes = numpyro.sample("slopes", dist.Normal(0.0, 1.0).expand([X.shape[1]]).to_event(1))
    numpyro.deterministic("twice", 2 * slopes)
    with numpyro.plate("rows", len(X)):
        numpyro.sample("y", dist.Normal(intercept + X @ slopes, 1.0), obs=y)


@pytest.mark.parametrize(
    "method",
    [RVGA(line), FixedPointVI(line), BONG(line, family="diagonal"), FixedPointVI(line, integrate=["intercept"])],
    ids=["RVGA", "FixedPointVI", "BONG", "integrated"],
)
def test_sites_of_no_columns_change_nothing(method, capsys):
    y = np.random.default_rng(0).normal(size=20)
    data = {"X": np.zeros((20, 0)), "y": y}
    posterior = method.run(data, progress_bar=False)
    np.testing.assert_allclose(posterior.mean, [y.sum() / 21], rtol=1e-4)
    np.testing.assert_allclose(posterior.covariance, [[1 / 21]], rtol=1e-2)
    if posterior.elbo is not None:
        evidence = stats.multivariate_normal(np.zeros(20), np.eye(20) + 1).logpdf(y)
        np.testing.assert_allclose(posterior.elbo, evidence, atol=1e-3)
    draws = posterior.sample_posterior(jax.random.key(0), (3,))
    assert draws["slopes"].shape == posterior.quantiles([0.1, 0.5, 0.9])["twice"].shape == (3, 0)
    assert posterior.log_prob(draws).shape == (3,)
    posterior.print_summary()
    assert "slopes" not in capsys.readouterr().out
