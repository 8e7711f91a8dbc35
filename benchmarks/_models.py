"""Models of textbook kinds, as people write them for NUTS, each on a little data of its own.

Each function returns a model, its data, and its keyword arguments.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jax.scipy.special import expit, logsumexp
from numpyro import handlers, sample
from numpyro.distributions import HalfNormal, Normal
from numpyro.distributions.transforms import OrderedTransform

MODELS: dict[str, Callable] = {}


def entry(make: Callable) -> Callable:
    MODELS[make.__name__] = make
    return make


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def standard_normal(n: int, seed: int = 0, columns: int | None = None):
    rng = np.random.default_rng(seed)
    return rng, rng.normal(size=n if columns is None else (n, columns))


# ---------------------------------------------------------------------- regressions
@entry
def linear_centered():
    rng, x = standard_normal(60, 1)

    def model(x, y):
        a, b = sample("a", Normal(y.mean(), 2 * y.std())), sample("b", Normal(0, 1))
        sample("y", Normal(a + b * (x - x.mean()), sample("sigma", dist.Exponential(1))), obs=y)

    return model, {"x": x + 3, "y": 2 + 0.7 * x + 0.5 * rng.normal(size=60)}, {}


@entry
def logistic_interaction():
    rng, X = standard_normal(150, 2, 2)

    def model(X, y=None):
        beta = sample("beta", Normal(0, 1.5).expand([4]))
        design = jnp.column_stack([jnp.ones(len(X)), X, X[:, 0] * X[:, 1]])
        with numpyro.plate("rows", len(X)):
            sample("y", dist.Bernoulli(logits=design @ beta), obs=y)

    return model, {"X": X, "y": (rng.random(150) < sigmoid(X[:, 0] - X[:, 1])).astype(int)}, {}


@entry
def robust_student():
    rng, x = standard_normal(80, 3)

    def model(x, y=None):
        a, b, scale = sample("a", Normal(0, 2)), sample("b", Normal(0, 2)), sample("scale", HalfNormal(2))
        nu = sample("nu", dist.Gamma(2, 0.1))
        sample("y", dist.StudentT(nu, a + b * x, scale), obs=y)

    return model, {"x": x, "y": 1 - x + 0.4 * rng.standard_t(3, size=80)}, {}


@entry
def gamma_log_link():
    rng, x = standard_normal(100, 4)

    def model(x, y=None):
        a, b, shape = sample("a", Normal(0, 2)), sample("b", Normal(0, 1)), sample("shape", dist.Exponential(0.2))
        sample("y", dist.Gamma(shape, shape / jnp.exp(a + b * x)), obs=y)

    return model, {"x": x, "y": rng.gamma(3, np.exp(0.5 + 0.4 * x) / 3)}, {}


@entry
def beta_regression():
    rng, x = standard_normal(100, 5)
    mean = sigmoid(0.3 + 0.6 * x)

    def model(x, y=None):
        a, b, size = sample("a", Normal(0, 1)), sample("b", Normal(0, 1)), sample("size", dist.Gamma(2, 0.1))
        p = expit(a + b * x)
        sample("y", dist.Beta(p * size, (1 - p) * size), obs=y)

    return model, {"x": x, "y": np.clip(rng.beta(12 * mean, 12 * (1 - mean)), 1e-4, 1 - 1e-4)}, {}


@entry
def negative_binomial_offset():
    rng, x = standard_normal(120, 6)
    exposure = rng.uniform(1, 5, 120)

    def model(x, exposure, y=None):
        a, b, phi = sample("a", Normal(0, 2)), sample("b", Normal(0, 1)), sample("phi", dist.Exponential(0.5))
        sample("y", dist.NegativeBinomial2(exposure * jnp.exp(a + b * x), phi), obs=y)

    rate = rng.gamma(2, exposure * np.exp(0.3 + 0.5 * x) / 2)
    return model, {"x": x, "exposure": exposure, "y": rng.poisson(rate)}, {}


@entry
def median_regression():
    rng, x = standard_normal(100, 7)

    def model(x, y=None):
        a, b, scale = sample("a", Normal(0, 2)), sample("b", Normal(0, 2)), sample("scale", HalfNormal(1))
        with numpyro.plate("rows", len(x)):
            sample("y", dist.AsymmetricLaplaceQuantile(a + b * x, scale, 0.7), obs=y)

    return model, {"x": x, "y": x + rng.normal(size=100)}, {}


@entry
def ordinal():
    rng, x = standard_normal(150, 8)
    latent = x + rng.logistic(size=150)

    def model(x, y, levels):
        b = sample("b", Normal(0, 1))
        cuts = sample(
            "cuts", dist.TransformedDistribution(Normal(0, 1.5).expand([levels - 1]).to_event(1), OrderedTransform())
        )
        sample("y", dist.OrderedLogistic(b * x, cuts), obs=y)

    return model, {"x": x, "y": np.digitize(latent, [-1.5, 0, 1.5])}, {"levels": 4}


@entry
def multinomial_logit():
    rng, X = standard_normal(200, 9, 2)
    utilities = X @ np.array([[0, 1, -1], [0, 0.5, 0.5]])

    def model(X, y):
        classes = len(np.unique(y))
        a = sample("a", Normal(0, 2).expand([classes - 1]))
        b = sample("b", Normal(0, 1).expand([X.shape[1], classes - 1]))
        logits = jnp.concatenate([jnp.zeros((len(X), 1)), a + X @ b], axis=1)
        sample("y", dist.Categorical(logits=logits), obs=y)

    return model, {"X": X, "y": np.argmax(utilities + rng.gumbel(size=(200, 3)), axis=1)}, {}


@entry
def dirichlet_multinomial():
    rng, _ = standard_normal(1, 10)
    counts = np.stack([rng.multinomial(30, p) for p in rng.dirichlet([2, 4, 6], size=25)])

    def model(counts):
        share = sample("share", dist.Dirichlet(jnp.ones(3)))
        size = sample("size", dist.Gamma(2, 0.1))
        with numpyro.plate("sites", len(counts)):
            sample("counts", dist.DirichletMultinomial(share * size, counts.sum(-1)), obs=counts)

    return model, {"counts": counts}, {}


@entry
def monotonic_effect():
    rng, _ = standard_normal(1, 11)
    level = rng.integers(0, 5, 120)

    def model(level, y=None):
        a, b = sample("a", Normal(0, 2)), sample("b", Normal(0, 2))
        steps = sample("steps", dist.Dirichlet(2 * jnp.ones(4)))
        up = jnp.concatenate([jnp.zeros(1), jnp.cumsum(steps)])
        sample("y", Normal(a + b * up[level], sample("sigma", HalfNormal(1))), obs=y)

    return model, {"level": level, "y": np.array([0, 0.1, 0.8, 0.9, 2])[level] + 0.4 * rng.normal(size=120)}, {}


@entry
def michaelis_menten():
    rng, _ = standard_normal(1, 12)
    dose = np.repeat([0.1, 0.3, 1, 3, 10], 6)

    def model(dose, y=None):
        top, half = sample("top", HalfNormal(5)), sample("half", dist.LogNormal(0, 1))
        sample("y", Normal(top * dose / (half + dose), sample("sigma", dist.Exponential(2))), obs=y)

    return model, {"dose": dose, "y": 3 * dose / (0.8 + dose) + 0.2 * rng.normal(size=30)}, {}


# ---------------------------------------------------------------------- zeros, censoring, survival
@entry
def zero_inflated():
    rng, x = standard_normal(150, 13)
    y = rng.poisson(np.exp(0.8 + 0.4 * x)) * (rng.random(150) < 0.7)

    def model(x, y=None):
        gate = sample("gate", dist.Beta(2, 2))
        a, b = sample("a", Normal(0, 1)), sample("b", Normal(0, 1))
        sample("y", dist.ZeroInflatedPoisson(gate, jnp.exp(a + b * x)), obs=y)

    return model, {"x": x, "y": y}, {}


@entry
def hurdle():
    rng, x = standard_normal(120, 14)
    y = np.where(rng.random(120) < sigmoid(0.5 + x), np.exp(0.3 * x + 0.5 * rng.normal(size=120)), 0.0)

    def model(x, y):
        a, b = sample("a", Normal(0, 1).expand([2])), sample("b", Normal(0, 1).expand([2]))
        sigma = sample("sigma", HalfNormal(1))
        sample("some", dist.Bernoulli(logits=a[0] + b[0] * x), obs=(y > 0).astype(int))
        sample("amount", dist.LogNormal(a[1] + b[1] * x[y > 0], sigma), obs=y[y > 0])

    return model, {"x": x, "y": y}, {}


@entry
def weibull_censored():
    rng, x = standard_normal(120, 15)
    time = rng.weibull(1.5, 120) * np.exp(1 - 0.5 * x)
    end = rng.uniform(1, 6, 120)

    def model(x, time, event):
        a, b, shape = sample("a", Normal(0, 2)), sample("b", Normal(0, 1)), sample("shape", dist.LogNormal(0, 1))
        scale = jnp.exp(a + b * x)
        with numpyro.plate("rows", len(x)):
            with handlers.mask(mask=event):
                sample("death", dist.Weibull(scale, shape), obs=time)
            numpyro.factor("alive", -jnp.where(event, 0, (time / scale) ** shape))

    return model, {"x": x, "time": np.minimum(time, end), "event": time < end}, {}


@entry
def tobit():
    rng, x = standard_normal(100, 16)
    latent = 0.5 + x + 0.7 * rng.normal(size=100)

    def model(x, y):
        a, b, sigma = sample("a", Normal(0, 2)), sample("b", Normal(0, 2)), sample("sigma", HalfNormal(2))
        mean = a + b * x
        sample("seen", Normal(mean, sigma).mask(y > 0), obs=y)
        numpyro.factor("below", jnp.where(y > 0, 0, Normal(0, 1).log_cdf(-mean / sigma)).sum())

    return model, {"x": x, "y": np.maximum(latent, 0)}, {}


# ---------------------------------------------------------------------- groups
@entry
def eight_schools():
    def model(sigma, y=None):
        mu, tau = sample("mu", Normal(0, 5)), sample("tau", dist.HalfCauchy(5))
        with numpyro.plate("J", len(sigma)):
            z = sample("z", Normal(0, 1))
            sample("y", Normal(mu + tau * z, sigma), obs=y)

    y, sigma = [28.0, 8, -3, 7, -1, 1, 18, 12], [15.0, 10, 16, 11, 9, 11, 10, 18]
    return model, {"sigma": np.array(sigma), "y": np.array(y)}, {}


@entry
def binomial_groups():
    rng, z = standard_normal(40, 17)
    trials = rng.integers(5, 40, 40)

    def model(trials, y=None):
        a, tau = sample("a", Normal(-1, 1)), sample("tau", HalfNormal(1))
        with numpyro.plate("groups", len(trials)):
            effect = sample("effect", Normal(a, tau))
            sample("y", dist.Binomial(trials, logits=effect), obs=y)

    return model, {"trials": trials, "y": rng.binomial(trials, sigmoid(-1 + 0.8 * z))}, {}


@entry
def poisson_lognormal():
    rng, x = standard_normal(100, 18)

    def model(x, y=None):
        a, b, tau = sample("a", Normal(0, 2)), sample("b", Normal(0, 1)), sample("tau", HalfNormal(1))
        with numpyro.plate("rows", len(x)):
            eps = sample("eps", Normal(0, 1))
            sample("y", dist.Poisson(jnp.exp(a + b * x + tau * eps)), obs=y)

    return model, {"x": x, "y": rng.poisson(np.exp(1 + 0.4 * x + 0.6 * rng.normal(size=100)))}, {}


@entry
def slopes_lkj():
    rng, x = standard_normal(200, 19)
    g = np.repeat(np.arange(20), 10)
    effects = rng.multivariate_normal([1, -0.5], [[0.5, 0.2], [0.2, 0.3]], size=20)

    def model(g, x, y, groups):
        mean = sample("mean", Normal(0, 2).expand([2]))
        scale = sample("scale", dist.Exponential(1).expand([2]))
        chol = sample("chol", dist.LKJCholesky(2, 2))
        with numpyro.plate("groups", groups):
            z = sample("z", Normal(0, 1).expand([2]).to_event(1))
        effect = mean + z @ (scale[:, None] * chol).T
        sample("y", Normal(effect[g, 0] + effect[g, 1] * x, sample("sigma", dist.Exponential(1))), obs=y)

    y = effects[g, 0] + effects[g, 1] * x + 0.5 * rng.normal(size=200)
    return model, {"g": g, "x": x, "y": y}, {"groups": 20}


@entry
def crossed_negative_binomial():
    rng, _ = standard_normal(1, 20)
    a, b = rng.integers(0, 12, 200), rng.integers(0, 8, 200)
    u, v = 0.6 * rng.normal(size=12), 0.4 * rng.normal(size=8)

    def model(a, b, y=None):
        base, phi = sample("base", Normal(0, 2)), sample("phi", dist.Exponential(0.3))
        su, sv = sample("su", HalfNormal(1)), sample("sv", HalfNormal(1))
        u = sample("u", Normal(0, su).expand([12]).to_event(1))
        v = sample("v", Normal(0, sv).expand([8]).to_event(1))
        sample("y", dist.NegativeBinomial2(jnp.exp(base + u[a] + v[b]), phi), obs=y)

    return model, {"a": a, "b": b, "y": rng.poisson(np.exp(1 + u[a] + v[b]))}, {}


@entry
def repeated_measures():
    rng, z = standard_normal(30, 21)
    days = np.arange(5.0)

    def model(y, days):
        a, b = sample("a", Normal(20, 10)), sample("b", Normal(0, 5))
        ta, sigma = sample("ta", HalfNormal(5)), sample("sigma", HalfNormal(5))
        with numpyro.plate("rats", y.shape[0], dim=-2):
            own = sample("own", Normal(a, ta))
            with numpyro.plate("days", y.shape[1], dim=-1):
                sample("y", Normal(own + b * days, sigma), obs=y)

    return model, {"y": 20 + 3 * z[:, None] + 2 * days + rng.normal(size=(30, 5))}, {"days": days}


@entry
def bradley_terry():
    rng, skill = standard_normal(10, 22)
    one, two = rng.integers(0, 10, 200), rng.integers(1, 10, 200)
    two = (one + two) % 10

    def model(one, two, won=None):
        tau = sample("tau", HalfNormal(1))
        with numpyro.plate("players", 10):
            skill = sample("skill", Normal(0, tau))
        sample("won", dist.Bernoulli(logits=skill[one] - skill[two]), obs=won)

    won = (rng.random(200) < sigmoid(skill[one] - skill[two])).astype(int)
    return model, {"one": one, "two": two, "won": won}, {}


@entry
def rankings():
    rng, skill = standard_normal(8, 62)

    def model(ranked):
        skill = sample("skill", Normal(0, 1).expand([ranked.shape[1]]))
        for place in range(ranked.shape[1] - 1):
            left = skill[ranked[:, place:]]
            numpyro.factor(f"place_{place}", (left[:, 0] - logsumexp(left, axis=1)).sum())

    return model, {"ranked": np.argsort(-(skill + rng.gumbel(size=(40, 8))), axis=1)}, {}


@entry
def item_response_long():
    rng, ability = standard_normal(40, 23)
    who, item = np.repeat(np.arange(40), 8), np.tile(np.arange(8), 40)
    difficulty = np.linspace(-1.5, 1.5, 8)

    def model(who, item, y, people, items):
        with numpyro.plate("people", people):
            ability = sample("ability", Normal(0, 1))
        with numpyro.plate("items", items):
            difficulty, slope = sample("difficulty", Normal(0, 2)), sample("slope", dist.LogNormal(0, 0.5))
        sample("y", dist.Bernoulli(logits=slope[item] * (ability[who] - difficulty[item])), obs=y)

    y = (rng.random(320) < sigmoid(1.2 * (ability[who] - difficulty[item]))).astype(int)
    return model, {"who": who, "item": item, "y": y}, {"people": 40, "items": 8}


@entry
def item_response_wide():
    rng, ability = standard_normal(100, 24)

    def model(y):
        slope = sample("slope", dist.LogNormal(0, 0.5).expand([y.shape[1]]))
        difficulty = sample("difficulty", Normal(0, 2).expand([y.shape[1]]))
        with numpyro.plate("people", y.shape[0]):
            ability = sample("ability", Normal(0, 1))
            sample("y", dist.Bernoulli(logits=slope * (ability[:, None] - difficulty)).to_event(1), obs=y)

    return model, {"y": (rng.random((100, 5)) < sigmoid(ability[:, None] - np.linspace(-1, 1, 5))).astype(int)}, {}
