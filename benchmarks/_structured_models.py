"""Models of time series, processes, networks and differential equations.

As in ``_models``, whose table they are entered in.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _models import entry, standard_normal
from jax.experimental.ode import odeint
from numpyro import handlers, sample
from numpyro.contrib.control_flow import scan
from numpyro.distributions import HalfNormal, Normal


# ---------------------------------------------------------------------- time
@entry
def autoregression_scan():
    rng, _ = standard_normal(1, 40)
    y = np.zeros(120)
    for t in range(1, 120):
        y[t] = 0.5 + 0.6 * y[t - 1] + 0.5 * rng.normal()

    def model(y):
        c, phi = sample("c", Normal(0, 1)), sample("phi", dist.Uniform(-1, 1))
        sigma = sample("sigma", HalfNormal(1))

        def step(before, now):
            mean = c + phi * before
            sample("y", Normal(mean, sigma), obs=now)
            return now, mean

        scan(step, y[0], y[1:])

    return model, {"y": y}, {}


@entry
def vector_autoregression():
    rng, _ = standard_normal(1, 41)
    A, y = np.array([[0.5, 0.2], [-0.1, 0.6]]), np.zeros((100, 2))
    for t in range(1, 100):
        y[t] = A @ y[t - 1] + 0.5 * rng.normal(size=2)

    def model(y):
        c, A = sample("c", Normal(0, 1).expand([2])), sample("A", Normal(0, 0.5).expand([2, 2]))
        scale, chol = sample("scale", HalfNormal(1).expand([2])), sample("chol", dist.LKJCholesky(2, 2))
        mean = c + y[:-1] @ A.T
        sample("y", dist.MultivariateNormal(mean, scale_tril=scale[:, None] * chol), obs=y[1:])

    return model, {"y": y}, {}


@entry
def local_level():
    rng, z = standard_normal(80, 42)

    def model(y):
        step_sd, sigma = sample("step_sd", HalfNormal(1)), sample("sigma", HalfNormal(1))
        start = sample("start", Normal(0, 2))

        def step(level, now):
            level = sample("level", Normal(level, step_sd))
            sample("y", Normal(level, sigma), obs=now)
            return level, level

        scan(step, start, y)

    return model, {"y": np.cumsum(0.3 * z) + 0.5 * rng.normal(size=80)}, {}


@entry
def autoregression_conditioned():
    rng, _ = standard_normal(1, 59)
    y = np.zeros(120)
    for t in range(2, 120):
        y[t] = 0.2 + 0.9 * y[t - 1] - 0.3 * y[t - 2] + 0.4 * rng.normal()

    def model(y):
        y = jnp.asarray(y)
        one, two, c = (sample(name, Normal(0, 1)) for name in ("one", "two", "c"))
        sigma = sample("sigma", HalfNormal(1))

        def step(carry, _):
            before, earlier = carry
            now = sample("y", Normal(c + one * before + two * earlier, sigma))
            return (now, before), None

        with handlers.condition(data={"y": y[2:]}):
            scan(step, (y[1], y[0]), jnp.arange(2, len(y)))

    return model, {"y": y}, {}


@entry
def moving_average_loop():
    _, e = standard_normal(42, 60)

    def model(y):
        mu, sigma = sample("mu", dist.Cauchy(0, 2.5)), sample("sigma", dist.HalfCauchy(2.5))
        theta = sample("theta", Normal(0, 1).expand([2]).to_event(1))
        errors = [y[0] - mu, y[1] - mu]
        for t in range(2, len(y)):
            mean = mu + theta[0] * errors[-1] + theta[1] * errors[-2]
            sample(f"y_{t}", Normal(mean, sigma), obs=y[t])
            errors.append(y[t] - mean)

    return model, {"y": 1 + e[2:] + 0.5 * e[1:-1] + 0.2 * e[:-2]}, {}


@entry
def trend_not_centered():
    rng, z = standard_normal(60, 61)

    def model(y):
        start, sigma = sample("start", Normal(0, 2)), sample("sigma", HalfNormal(0.5))
        z = sample("z", Normal(0, 1).expand([len(y)]))
        with numpyro.plate("rows", len(y)):
            sample("y", dist.Poisson(jnp.exp(start + jnp.cumsum(sigma * z))), obs=y)

    return model, {"y": rng.poisson(np.exp(1.5 + np.cumsum(0.15 * z)))}, {}


@entry
def stochastic_volatility():
    rng, z = standard_normal(100, 43)

    def model(y):
        sigma, nu = sample("sigma", dist.Exponential(20)), sample("nu", dist.Exponential(0.1))
        s = sample("s", dist.GaussianRandomWalk(sigma, num_steps=len(y)))
        sample("y", dist.StudentT(nu, 0, jnp.exp(s)), obs=y)

    return model, {"y": np.exp(np.cumsum(0.1 * z)) * rng.normal(size=100)}, {}


@entry
def exponential_smoothing():
    rng, z = standard_normal(80, 44)

    def model(y):
        weight, trend = sample("weight", dist.Beta(1, 1)), sample("trend", dist.Beta(1, 1))
        sigma = sample("sigma", HalfNormal(2))

        def step(carry, now):
            level, slope = carry
            mean = level + slope
            sample("y", Normal(mean, sigma), obs=now)
            new = weight * now + (1 - weight) * mean
            return (new, trend * (new - level) + (1 - trend) * slope), None

        scan(step, (y[0], y[1] - y[0]), y[1:])

    return model, {"y": 0.3 * np.arange(80) + np.cumsum(0.4 * z) + 0.5 * rng.normal(size=80)}, {}


@entry
def seasonal():
    _, z = standard_normal(96, 45)
    t = np.arange(96)

    def model(t, y=None):
        a, b = sample("a", Normal(0, 5)), sample("b", Normal(0, 1))
        waves = sample("waves", Normal(0, 1).expand([4]))
        angle = 2 * jnp.pi * t / 12
        design = jnp.stack([jnp.sin(angle), jnp.cos(angle), jnp.sin(2 * angle), jnp.cos(2 * angle)], axis=1)
        sample("y", Normal(a + b * t / len(t) + design @ waves, sample("sigma", HalfNormal(1))), obs=y)

    return model, {"t": t, "y": 1 + t / 96 + np.sin(2 * np.pi * t / 12) + 0.4 * z}, {}


# ---------------------------------------------------------------------- processes, networks, factors
@entry
def gaussian_process():
    rng, _ = standard_normal(1, 50)
    x = np.sort(rng.uniform(0, 10, 40))

    def model(x, y):
        length, height = sample("length", dist.LogNormal(0, 1)), sample("height", dist.LogNormal(0, 1))
        noise = sample("noise", dist.LogNormal(-1, 1))
        kernel = height**2 * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2)
        sample("y", dist.MultivariateNormal(0, kernel + (noise**2 + 1e-4) * jnp.eye(len(x))), obs=y)

    return model, {"x": x, "y": np.sin(x) + 0.3 * rng.normal(size=40)}, {}


@entry
def latent_process_counts():
    rng, _ = standard_normal(1, 51)
    x = np.linspace(0, 10, 30)

    def model(x, y):
        length, height = sample("length", dist.LogNormal(0.5, 0.5)), sample("height", HalfNormal(1))
        z, base = sample("z", Normal(0, 1).expand([len(x)])), sample("base", Normal(0, 2))
        kernel = height**2 * jnp.exp(-0.5 * ((x[:, None] - x) / length) ** 2) + 1e-4 * jnp.eye(len(x))
        sample("y", dist.Poisson(jnp.exp(base + jnp.linalg.cholesky(kernel) @ z)), obs=y)

    return model, {"x": x, "y": rng.poisson(np.exp(1 + np.sin(x)))}, {}


@entry
def hilbert_space_process():
    rng, _ = standard_normal(1, 52)
    x = np.linspace(-1, 1, 100)

    def model(x, y=None, count=10):
        length, height = sample("length", dist.InverseGamma(5, 2)), sample("height", HalfNormal(1))
        sigma, beta = sample("sigma", HalfNormal(1)), sample("beta", Normal(0, 1).expand([count]))
        root = jnp.arange(1, count + 1) * jnp.pi / 3
        phi = jnp.sin(root * (x[:, None] + 1.5)) / jnp.sqrt(1.5)
        density = height * jnp.sqrt(jnp.sqrt(2 * jnp.pi) * length) * jnp.exp(-0.25 * (length * root) ** 2)
        sample("y", Normal(phi @ (density * beta), sigma), obs=y)

    return model, {"x": x, "y": np.sin(4 * x) + 0.3 * rng.normal(size=100)}, {}


@entry
def horseshoe():
    rng, X = standard_normal(80, 53, 8)

    def model(X, y=None):
        tau, sigma = sample("tau", dist.HalfCauchy(1)), sample("sigma", HalfNormal(1))
        local = sample("local", dist.HalfCauchy(1).expand([X.shape[1]]))
        raw = sample("raw", Normal(0, 1).expand([X.shape[1]]))
        beta = numpyro.deterministic("beta", tau * local * raw)
        sample("y", Normal(X @ beta, sigma), obs=y)

    return model, {"X": X, "y": X[:, 0] - 0.7 * X[:, 1] + 0.5 * rng.normal(size=80)}, {}


@entry
def small_network():
    rng, x = standard_normal(80, 54)

    def model(x, y=None, hidden=4):
        w, b = sample("w", Normal(0, 1).expand([1, hidden])), sample("b", Normal(0, 1).expand([hidden]))
        v, sigma = sample("v", Normal(0, 1).expand([hidden])), sample("sigma", HalfNormal(1))
        sample("y", Normal(jnp.tanh(x[:, None] @ w + b) @ v, sigma), obs=y)

    return model, {"x": x, "y": np.sin(2 * x) + 0.3 * rng.normal(size=80)}, {}


@entry
def factor_analysis():
    rng, z = standard_normal(80, 55)
    loads = np.array([1.0, 0.8, -0.6, 0.4])

    def model(y):
        n, d = y.shape
        sigma, loads = sample("sigma", HalfNormal(1)), sample("loads", HalfNormal(1).expand([d]).mask(False))
        with numpyro.plate("rows", n, dim=-2):
            z = sample("z", Normal(0, 1))
            with numpyro.plate("columns", d, dim=-1):
                sample("y", Normal(z * loads, sigma), obs=y)

    return model, {"y": z[:, None] * np.abs(loads) + 0.5 * rng.normal(size=(80, 4))}, {}


@entry
def lotka_volterra():
    rng, _ = standard_normal(1, 56)

    def field(z, t, theta):
        u, v = z[0], z[1]
        return jnp.stack([(theta[0] - theta[1] * v) * u, (-theta[2] + theta[3] * u) * v])

    times = np.arange(12.0)
    path = odeint(field, jnp.array([3.0, 1.0]), times, jnp.array([0.6, 0.25, 0.6, 0.2]), rtol=1e-6, atol=1e-5)

    def model(n, y=None):
        start = sample("start", dist.LogNormal(jnp.log(3), 0.5).expand([2]))
        theta = sample("theta", dist.TruncatedNormal(jnp.array([0.5, 0.25, 0.5, 0.25]), 0.3, low=0.0))
        z = odeint(field, start, jnp.arange(float(n)), theta, rtol=1e-6, atol=1e-5, mxstep=1000)
        sample("y", dist.LogNormal(jnp.log(z), sample("sigma", dist.LogNormal(-1, 1).expand([2]))), obs=y)

    return model, {"y": np.asarray(path) * np.exp(0.2 * rng.normal(size=(12, 2)))}, {"n": 12}


@entry
def epidemic():
    rng, _ = standard_normal(1, 57)

    def path(beta, gamma, start, days):
        def step(state, _):
            s, i = state
            new = s * -jnp.expm1(-beta * i)  # never more than there are
            return (s - new, i * jnp.exp(-gamma) + new), new

        return jax.lax.scan(step, (1 - start, start), None, length=days)[1]

    def model(cases, population):
        beta, gamma = sample("beta", dist.LogNormal(-0.5, 0.5)), sample("gamma", dist.LogNormal(-1.5, 0.5))
        start, phi = sample("start", dist.Beta(1, 100)), sample("phi", dist.Exponential(0.1))
        mean = population * path(beta, gamma, start, len(cases))
        sample("cases", dist.NegativeBinomial2(mean + 1e-3, phi), obs=cases)

    mean = 1000 * np.asarray(path(0.5, 0.2, 0.005, 40))
    return model, {"cases": rng.poisson(rng.gamma(20, mean / 20))}, {"population": 1000}


@entry
def autoregressive_map():
    rng, x = standard_normal(49, 58)
    place = np.arange(49).reshape(7, 7)
    pairs = np.concatenate(
        [np.stack([place[:, 1:], place[:, :-1]], -1), np.stack([place[1:], place[:-1]], -1).swapaxes(0, 1)]
    )
    pairs = pairs.reshape(-1, 2)

    def model(x, y, one, two):
        tau, a, b = sample("tau", HalfNormal(1)), sample("a", Normal(0, 2)), sample("b", Normal(0, 1))
        phi = sample("phi", dist.ImproperUniform(dist.constraints.real, (), (len(x),)))
        numpyro.factor("neighbors", -0.5 * jnp.sum((phi[one] - phi[two]) ** 2))
        numpyro.factor("center", Normal(0, 0.001 * len(x)).log_prob(phi.sum()))
        sample("y", dist.Poisson(jnp.exp(a + b * x + tau * phi)), obs=y)

    y = rng.poisson(np.exp(1 + 0.4 * x + 0.4 * np.sin(np.arange(49) / 7)))
    return model, {"x": x, "y": y}, {"one": pairs[:, 0], "two": pairs[:, 1]}


@entry
def long_walk():
    rng, _ = standard_normal(1, 60)

    def model(y):
        tau = sample("tau", HalfNormal(1))
        level = sample("level", dist.GaussianRandomWalk(tau, len(y)))
        sample("y", dist.Poisson(jnp.exp(level)), obs=y)

    return model, {"y": rng.poisson(np.exp(1 + 0.8 * np.sin(np.arange(1000) / 60)))}, {}
