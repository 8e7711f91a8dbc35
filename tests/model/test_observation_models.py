"""Every likelihood family: the few predictors it is read as, and its posterior, against NumPyro's own density."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from jax.scipy.stats import norm
from numpyro.distributions import constraints
from numpyro.distributions.transforms import OrderedTransform, Transform
from numpyro.infer.reparam import LocScaleReparam
from references import assert_moments_match, importance_moments, potential_of
from scipy import special

from numpyro_rvga import RVGA
from numpyro_rvga.core.expectations.closed_forms import (
    Exponential,
    Gamma,
    Gaussian,
    GaussianLogScale,
    Laplace,
    LaplaceLogScale,
    Logistic,
)
from numpyro_rvga.core.expectations.tilted import TiltedForm

NUM_ROWS = 160
SLOPES = np.array([0.4, -0.8])
RNG = np.random.default_rng(20)
X = np.column_stack([np.ones(NUM_ROWS), RNG.normal(size=NUM_ROWS)])
LINE = X @ SLOPES
NOISE = RNG.normal(size=NUM_ROWS)
OFFSET = RNG.normal(scale=0.5, size=NUM_ROWS)
TRIALS = RNG.integers(1, 6, size=NUM_ROWS)

CLOSE = (0.15, 0.15)
LOOSE = (0.3, 0.3)  # hierarchical, not log-concave, or far from Gaussian


class Term(NamedTuple):
    """Expected of one site: C, and the closed form of its expectations if it has one."""

    num_predictors: int
    closed_form: type | None = None


class Case(NamedTuple):
    model: Any
    data: dict
    terms: tuple[Term, ...]
    tolerance: tuple[float, float] = CLOSE


def slopes(size=2):
    return numpyro.sample("b", dist.Normal(0.0, 2.0).expand([size]).to_event(1))


def scale_of(name="s"):
    return numpyro.sample(name, dist.LogNormal(0.0, 1.0))


def family(make):
    """A model whose rows are y ~ make(X @ b), with further latents sampled inside ``make``."""

    def model(X, y=None):
        line = X @ slopes(X.shape[1])
        fn = make(line)
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", fn, obs=y)

    return model


def draw(fn, seed=0):
    return np.asarray(fn.sample(jax.random.key(seed)))


def case(make, truth, *terms, tolerance=CLOSE):
    """``truth``: the distribution that the data are drawn from."""
    return lambda: Case(family(make), {"X": X, "y": draw(truth)}, terms, tolerance)


# ---------------------------------------------------------------------- models that need more than a line
def binomial_model(X, trials, y=None):
    line = X @ slopes()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Binomial(total_count=trials, logits=line), obs=y)


def poisson_log_offset(X, offset, y=None):
    line = X @ slopes()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(jnp.exp(line + offset)), obs=y)


def poisson_exposure(X, exposure, y=None):
    line = X @ slopes()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Poisson(exposure * jnp.exp(line)), obs=y)


def pinned_logits(X, num_classes):
    weights = numpyro.sample("w", dist.Normal(0.0, 2.0).expand([X.shape[1], num_classes - 1]).to_event(2))
    return jnp.concatenate([X @ weights, jnp.zeros((X.shape[0], 1))], axis=-1)


def categorical(num_classes):
    def model(X, y=None):
        logits = pinned_logits(X, num_classes)
        with numpyro.plate("rows", X.shape[0]):
            numpyro.sample("y", dist.Categorical(logits=logits), obs=y)

    truth = np.column_stack([X @ np.linspace(SLOPES, -SLOPES, num_classes - 1).T, np.zeros(NUM_ROWS)])
    y = draw(dist.Categorical(logits=truth))
    return lambda: Case(model, {"X": X, "y": y}, (Term(num_classes - 1),))


def multinomial_model(X, y=None):
    logits = pinned_logits(X, 3)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Multinomial(total_count=5, logits=logits), obs=y)


def multinomial():
    truth = np.column_stack([LINE, -LINE, np.zeros(NUM_ROWS)])
    y = draw(dist.Multinomial(total_count=5, logits=truth))
    return Case(multinomial_model, {"X": X, "y": y}, (Term(3),))


def ordered_logistic_model(x, y=None):
    slope = numpyro.sample("b", dist.Normal(0.0, 2.0))
    base = dist.Normal(0.0, 3.0).expand([3]).to_event(1)
    cutpoints = numpyro.sample("cutpoints", dist.TransformedDistribution(base, OrderedTransform()))
    with numpyro.plate("rows", x.shape[0]):
        numpyro.sample("y", dist.OrderedLogistic(slope * x, cutpoints), obs=y)


def ordered_logistic():
    y = draw(dist.OrderedLogistic(-1.2 * X[:, 1], jnp.array([-1.0, 0.3, 1.2])))
    return Case(ordered_logistic_model, {"x": X[:, 1], "y": y}, (Term(4),), LOOSE)


def effects_model(group, y=None):
    """Effects of groups that are not centered."""
    loc, scale = numpyro.sample("loc", dist.Normal(0.0, 3.0)), numpyro.sample("scale", dist.HalfNormal(1.0))
    with numpyro.handlers.reparam(config={"effects": LocScaleReparam(0)}), numpyro.plate("groups", 8):
        effects = numpyro.sample("effects", dist.Normal(loc, scale))
    noise = scale_of()
    with numpyro.plate("rows", group.shape[0]):
        numpyro.sample("y", dist.Normal(effects[group], noise), obs=y)


def multivariate_model(y):
    loc = numpyro.sample("loc", dist.Normal(0.0, 3.0).expand([2]).to_event(1))
    scales = numpyro.sample("scales", dist.LogNormal(0.0, 1.0).expand([2]).to_event(1))
    correlation = numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MultivariateNormal(loc, scale_tril=scales[:, None] * correlation), obs=y)


def multivariate():
    y = RNG.normal(size=(NUM_ROWS, 2)) @ np.array([[0.7, 0.4], [0.0, 1.5]]) + np.array([1.0, -1.0])
    return Case(multivariate_model, {"y": y}, (Term(5),), LOOSE)


def mixture_model(y):
    base = dist.Normal(0.0, 3.0).expand([2]).to_event(1)
    locs = numpyro.sample("locs", dist.TransformedDistribution(base, OrderedTransform()))
    weights = numpyro.sample("weights", dist.Dirichlet(jnp.array([2.0, 2.0])))
    with numpyro.plate("rows", y.shape[0]):
        numpyro.sample("y", dist.MixtureSameFamily(dist.Categorical(probs=weights), dist.Normal(locs, 0.7)), obs=y)


def mixture():
    y = np.where(np.arange(NUM_ROWS) % 3 == 0, -1.2, 1.2) + 0.7 * NOISE
    return Case(mixture_model, {"y": y}, (Term(3),), LOOSE)


def two_sites_model(X, y=None, bought=None):
    line = X @ slopes()
    link = numpyro.sample("a", dist.Normal(0.0, 1.0))
    s = scale_of()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(line, s), obs=y)
        numpyro.sample("bought", dist.Bernoulli(logits=link + 2.0 * line), obs=bought)


def two_sites():
    bought = (special.expit(-0.5 + 2 * LINE) > RNG.uniform(size=NUM_ROWS)).astype(int)
    terms = (Term(2, GaussianLogScale), Term(1, Logistic))
    return Case(two_sites_model, {"X": X, "y": LINE + 0.8 * NOISE, "bought": bought}, terms)


def factor_model(X, y):
    line = X @ slopes()
    with numpyro.plate("rows", X.shape[0]):
        numpyro.factor("hyperbolic", -jnp.sqrt(1.0 + (y - line) ** 2))


def log_exp_offset():
    y = draw(dist.Poisson(np.exp(LINE + OFFSET)))
    return Case(poisson_log_offset, {"X": X, "offset": OFFSET, "y": y}, (Term(1, Exponential),))


def exposure():
    y = draw(dist.Poisson(np.exp(LINE + OFFSET)))
    return Case(poisson_exposure, {"X": X, "exposure": np.exp(OFFSET), "y": y}, (Term(1, Exponential),))


def binomial():
    y = draw(dist.Binomial(total_count=TRIALS, logits=LINE))
    return Case(binomial_model, {"X": X, "trials": TRIALS, "y": y}, (Term(1, Logistic),))


BERNOULLI = dist.Bernoulli(logits=LINE)
GAUSSIAN = dist.Normal(LINE, 0.6)
STUDENT = dist.StudentT(5.0, LINE, 0.6)
ZEROS = 0.3

CASES = {
    "bernoulli_logits": case(lambda u: dist.Bernoulli(logits=u), BERNOULLI, Term(1, Logistic)),
    "bernoulli_sigmoid": case(lambda u: dist.Bernoulli(probs=jax.nn.sigmoid(u)), BERNOULLI, Term(1, Logistic)),
    "bernoulli_probit": case(lambda u: dist.Bernoulli(probs=norm.cdf(u)), BERNOULLI, Term(1)),
    "binomial": binomial,
    "categorical": categorical(4),
    "multinomial": multinomial,
    "poisson_log_offset": log_exp_offset,
    "poisson_exposure": exposure,
    "normal_known_scale": case(lambda u: dist.Normal(u, 0.6), GAUSSIAN, Term(1, Gaussian)),
    "normal_latent_scale": case(lambda u: dist.Normal(u, scale_of()), GAUSSIAN, Term(2, GaussianLogScale)),
    "student_latent_scale": case(lambda u: dist.StudentT(5.0, u, scale_of()), STUDENT, Term(2)),
    "laplace_known_scale": case(lambda u: dist.Laplace(u, 0.6), dist.Laplace(LINE, 0.6), Term(1, Laplace)),
    "laplace_latent_scale": case(
        lambda u: dist.Laplace(u, scale_of()), dist.Laplace(LINE, 0.6), Term(2, LaplaceLogScale)
    ),
    "log_normal_latent_scale": case(
        lambda u: dist.LogNormal(u, scale_of()), dist.LogNormal(LINE, 0.6), Term(2, GaussianLogScale)
    ),
    "gamma_known_shape": case(
        lambda u: dist.Gamma(3.0, 3.0 * jnp.exp(-u)), dist.Gamma(3.0, 3.0 * np.exp(-LINE)), Term(1, Gamma)
    ),
    "gamma_known_shape_over_mean": case(
        lambda u: dist.Gamma(3.0, 3.0 / jnp.exp(u)), dist.Gamma(3.0, 3.0 * np.exp(-LINE)), Term(1, Gamma)
    ),
    "exponential": case(lambda u: dist.Exponential(jnp.exp(u)), dist.Exponential(np.exp(LINE)), Term(1, Gamma)),
    "weibull": case(lambda u: dist.Weibull(jnp.exp(u), scale_of()), dist.Weibull(np.exp(LINE), 1.5), Term(2)),
    "beta_proportion": case(
        lambda u: dist.BetaProportion(jax.nn.sigmoid(u), scale_of()),
        dist.BetaProportion(special.expit(LINE), 6.0),
        Term(2),
    ),
    "ordered_logistic": ordered_logistic,
    "zero_inflated_negative_binomial": case(
        lambda u: dist.ZeroInflatedNegativeBinomial2(
            jnp.exp(1.5 + u), scale_of(), gate=numpyro.sample("gate", dist.Beta(2.0, 2.0))
        ),
        dist.ZeroInflatedNegativeBinomial2(np.exp(1.5 + LINE), 3.0, gate=ZEROS),
        Term(3),
        tolerance=LOOSE,
    ),
    "multivariate_normal": multivariate,
    "mixture": mixture,
    "normal_and_bernoulli": two_sites,
    "factor_in_the_plate": lambda: Case(factor_model, {"X": X, "y": LINE + 2.0 * NOISE}, (Term(1),)),
}


@pytest.mark.parametrize("name", CASES)
def test_family_has_few_affine_predictors_and_the_right_posterior(name):
    model, data, terms, tolerance = CASES[name]()
    posterior = RVGA(model).run(data, progress_bar=False)
    found = tuple(Term(t.num_predictors, t.closed_form) for t in posterior.program.terms)
    assert all(t.is_affine for t in posterior.program.terms)
    assert posterior.info["converged"]
    assert_moments_match(posterior, importance_moments(model, posterior.site_names, **data), *tolerance)
    assert found == terms


def test_effects_that_are_not_centered_have_an_exact_bound():
    group = np.arange(NUM_ROWS) % 8
    data = {"group": group, "y": np.linspace(-0.6, 1.5, 8)[group] + 0.5 * NOISE}
    posterior = RVGA(effects_model).run(data, progress_bar=False)
    (terms,) = posterior.program.terms
    assert isinstance(terms.closed_form, TiltedForm)
    assert posterior.info["converged"]
    potential, size = potential_of(effects_model, posterior.site_names, **data)
    standard = RNG.normal(size=(10_000, size))
    standard = np.concatenate([standard, -standard])
    root = np.asarray(posterior.scale_tril)
    values = jax.lax.map(potential, posterior.mean + standard @ root.T, batch_size=1000)
    ratios = 0.5 * np.sum(standard**2, axis=1) - values  # log p - log q, but for q's constant
    constant = 0.5 * size * np.log(2 * np.pi) + np.sum(np.log(np.diag(root)))
    error = np.std(ratios[:10_000] + ratios[10_000:]) / 2 / 100
    assert error < 0.02
    np.testing.assert_allclose(posterior.elbo, np.mean(ratios) + constant, atol=4 * error)


class Sinh(Transform):
    """As users write one: no pytree. It may hold what the model computes."""

    domain = codomain = constraints.real

    def __init__(self, shift=0.0):
        self.shift = shift

    def __call__(self, x):
        return jnp.sinh(x + self.shift)

    def _inverse(self, y):
        return jnp.arcsinh(y) - self.shift

    def log_abs_det_jacobian(self, x, y, intermediates=None):
        return jnp.log(jnp.cosh(x + self.shift))


@pytest.mark.parametrize("in_transform", [False, True])
def test_transforms_that_are_no_pytrees_are_taken(in_transform):
    """The same posterior as of outcomes that are transformed back by hand."""
    outcome = np.arcsinh(LINE + NOISE)

    def transformed(y):
        location, scale = numpyro.sample("location", dist.Normal(0, 1)), numpyro.sample("scale", dist.HalfNormal(1))
        base, shift = (0.0, location) if in_transform else (location, 0.0)
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.TransformedDistribution(dist.Normal(base, scale), Sinh(shift)), obs=y)

    def by_hand(y):
        location, scale = numpyro.sample("location", dist.Normal(0, 1)), numpyro.sample("scale", dist.HalfNormal(1))
        with numpyro.plate("rows", len(y)):
            numpyro.sample("y", dist.Normal(location, scale), obs=y)

    found = RVGA(transformed).run({"y": np.sinh(outcome)}, progress_bar=False)
    expected = RVGA(by_hand).run({"y": outcome}, progress_bar=False)
    np.testing.assert_allclose(found.mean, expected.mean, atol=1e-3)
    np.testing.assert_allclose(found.covariance, expected.covariance, rtol=2e-2, atol=1e-6)
    np.testing.assert_allclose(found.elbo + np.sum(np.log(np.cosh(outcome))), expected.elbo, atol=2e-2)
