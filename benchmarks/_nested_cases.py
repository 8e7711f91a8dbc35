"""Hierarchical models whose hyperparameters no single Gaussian fits, with their data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from _data import load_module
from numpyro.handlers import reparam
from numpyro.infer.reparam import LocScaleReparam


@dataclass(frozen=True)
class Hierarchy:
    """A model and its rows.

    :ivar model_of_nuts: the same model, written so that NUTS mixes. :ivar logs: sites compared by their logarithms.
    :ivar skipped: sites that are not compared. :ivar outcomes: arrays that are observed.
    :ivar sampler: draws of the posterior for the reference, where NUTS misses some of it; None: NUTS gives them.
    """

    model: Callable
    rows: Mapping[str, np.ndarray]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    model_of_nuts: Callable | None = None
    logs: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    target_accept_prob: float = 0.8
    outcomes: tuple[str, ...] = ("y",)
    sampler: Callable[[], dict[str, np.ndarray]] | None = None

    @property
    def hyperparameters(self) -> tuple[str, ...]:
        """Sites that are integrated out: scales, and correlations."""
        return (*self.logs, *(name for name in self.skipped if name == "correlation"))

    def summary(self, draws: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Draws of what is compared, (n, ...) arrays by site."""
        kept = {name: np.asarray(value, np.float64) for name, value in draws.items() if name not in self.skipped}
        return {name: np.log(value) if name in self.logs else value for name, value in kept.items()}


def not_centered(model: Callable, *sites: str) -> Callable:
    return reparam(model, config={site: LocScaleReparam(0) for site in sites})


# ---------------------------------------------------------------------- binary rows in groups
def binary_groups(group, y=None, num_groups=None):
    mu = numpyro.sample("mu", dist.Normal(0, 2))
    tau = numpyro.sample("tau", dist.HalfNormal(2))
    with numpyro.plate("groups", num_groups):
        u = numpyro.sample("u", dist.Normal(0, tau))
    with numpyro.plate("rows", group.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=mu + u[group]), obs=y)


def binary(num_groups: int, num_rows: int, tau: float) -> Hierarchy:
    rng = np.random.default_rng(num_groups)
    group = np.repeat(np.arange(num_groups), num_rows)
    u = tau * rng.normal(size=num_groups)
    y = (rng.random(len(group)) < 1 / (1 + np.exp(-(0.3 + u[group])))).astype(int)
    rows, kwargs = {"group": group, "y": y}, {"num_groups": num_groups}
    return Hierarchy(binary_groups, rows, kwargs, not_centered(binary_groups, "u"), ("tau",), ("u_decentered",))


# ---------------------------------------------------------------------- slopes that vary
def slopes(centered: bool) -> Callable:
    def model(group, x, y=None, num_groups=None):
        mean = numpyro.sample("mean", dist.Normal(0, 2).expand([2]).to_event(1))
        scale = numpyro.sample("scale", dist.HalfNormal(1).expand([2]).to_event(1))
        lower = scale[:, None] * numpyro.sample("correlation", dist.LKJCholesky(2, 2.0))
        with numpyro.plate("groups", num_groups):
            if centered:
                effect = numpyro.sample("effect", dist.MultivariateNormal(mean, scale_tril=lower))
            else:
                z = numpyro.sample("z", dist.Normal(0, 1).expand([2]).to_event(1))
                effect = numpyro.deterministic("effect", mean + z @ lower.T)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1))
        with numpyro.plate("rows", x.shape[0]):
            numpyro.sample("y", dist.Normal(effect[group, 0] + effect[group, 1] * x, sigma), obs=y)

    return model


def varying_slopes(centered: bool) -> Hierarchy:
    rng = np.random.default_rng(0)
    group, x = np.repeat(np.arange(12), 8), rng.normal(size=96)
    effect = np.array([0.5, 1.0]) + rng.normal(size=(12, 2)) @ np.array([[0.6, 0.2], [0, 0.4]])
    y = effect[group, 0] + effect[group, 1] * x + 0.7 * rng.normal(size=96)
    rows = {"group": group, "x": x, "y": y}
    logs, skipped = ("scale", "sigma"), ("correlation", "z")
    return Hierarchy(slopes(centered), rows, {"num_groups": 12}, slopes(False), logs, skipped, 0.9)


# ---------------------------------------------------------------------- horseshoe
def horseshoe_model(X, y=None):
    size = X.shape[1]
    tau = numpyro.sample("tau", dist.HalfCauchy(0.2))
    local = numpyro.sample("local", dist.HalfCauchy(1).expand([size]).to_event(1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([size]).to_event(1))
    beta = numpyro.deterministic("beta", tau * local * z)
    sigma = numpyro.sample("sigma", dist.HalfNormal(2))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(X @ beta, sigma), obs=y)


def horseshoe_draws(X, y, count: int, seed: int) -> dict[str, np.ndarray]:
    """By Gibbs's sampler: squared Cauchy scales are inverse gamma given an inverse gamma variable (Makalic and Schmidt,
    2016), and the noise's scale is drawn from a grid."""
    rng, size = np.random.default_rng(seed), X.shape[1]
    squares, products, total = X.T @ X, X.T @ y, y @ y
    local2, tau2, sigma2, nu, xi = np.ones(size), 0.04, 1.0, np.ones(size), 1.0
    log_sigma = np.linspace(-1.5, 1.5, 2001)
    draws = {"beta": np.empty((count, size)), "local": np.empty((count, size)), "tau": np.empty(count)}
    draws["sigma"] = np.empty(count)
    for i in range(-2000, count):  # the first are warm-up
        root = np.linalg.cholesky(squares / sigma2 + np.diag(1 / (tau2 * local2)))
        beta = np.linalg.solve(root.T, np.linalg.solve(root, products / sigma2) + rng.normal(size=size))
        local2 = (1 / nu + beta**2 / (2 * tau2)) / rng.gamma(1, size=size)
        nu = (1 + 1 / local2) / rng.gamma(1, size=size)
        tau2 = (1 / xi + np.sum(beta**2 / local2) / 2) / rng.gamma((size + 1) / 2)
        xi = (1 / 0.2**2 + 1 / tau2) / rng.gamma(1)
        residual = total - 2 * beta @ products + beta @ squares @ beta
        grid = np.exp(2 * log_sigma)
        log_density = -(len(y) - 1) * log_sigma - residual / (2 * grid) - grid / (2 * 2**2)
        sums = np.cumsum(np.exp(log_density - log_density.max()))
        sigma2 = grid[np.searchsorted(sums, rng.random() * sums[-1])]
        if i >= 0:
            draws["beta"][i], draws["local"][i] = beta, np.sqrt(local2)
            draws["tau"][i], draws["sigma"][i] = np.sqrt(tau2), np.sqrt(sigma2)
    return draws


def horseshoe(size: int) -> Hierarchy:
    rng = np.random.default_rng(size)
    X = rng.normal(size=(2 * size + 20, size))
    beta = np.where(np.arange(size) < size // 5 + 1, 1.5 * (-1.0) ** np.arange(size), 0.0)
    y = X @ beta + rng.normal(size=len(X))
    rows = {"X": X, "y": y}
    logs = "tau", "local", "sigma"
    sampler = partial(horseshoe_draws, X, y, 100_000, 0)
    return Hierarchy(horseshoe_model, rows, {}, None, logs, ("z",), 0.95, sampler=sampler)


# ---------------------------------------------------------------------- a Gaussian process over islands
ISLANDS = np.array(
    [
        [0.0, 0.475, 0.631, 4.363, 1.234, 2.036, 3.178, 2.794, 1.86, 5.678],
        [0.475, 0.0, 0.315, 4.173, 1.236, 2.007, 2.877, 2.67, 1.965, 5.283],
        [0.631, 0.315, 0.0, 3.859, 1.55, 1.708, 2.588, 2.356, 2.279, 5.401],
        [4.363, 4.173, 3.859, 0.0, 5.391, 2.462, 1.555, 1.616, 6.136, 7.178],
        [1.234, 1.236, 1.55, 5.391, 0.0, 3.219, 4.027, 3.906, 0.763, 4.884],
        [2.036, 2.007, 1.708, 2.462, 3.219, 0.0, 1.801, 0.85, 3.893, 6.653],
        [3.178, 2.877, 2.588, 1.555, 4.027, 1.801, 0.0, 1.213, 4.789, 5.787],
        [2.794, 2.67, 2.356, 1.616, 3.906, 0.85, 1.213, 0.0, 4.622, 6.722],
        [1.86, 1.965, 2.279, 6.136, 0.763, 3.893, 4.789, 4.622, 0.0, 5.037],
        [5.678, 5.283, 5.401, 7.178, 4.884, 6.653, 5.787, 6.722, 5.037, 0.0],
    ]
)  # thousands of kilometers between ten islands of Oceania (Kline and Boyd, 2010)
POPULATION = np.array([1100, 1500, 3600, 4791, 7400, 8000, 9200, 13000, 17500, 275000])
TOOLS = np.array([13, 22, 24, 43, 33, 19, 40, 28, 55, 71])


def islands_model(distance, log_population, index, tools=None):
    rho = numpyro.sample("rho", dist.Exponential(0.5))
    eta = numpyro.sample("eta", dist.Exponential(2.0))
    kernel = eta * jnp.exp(-rho * distance**2) + 0.01 * jnp.eye(len(distance))
    level = numpyro.sample("level", dist.Normal(3, 2))
    slope = numpyro.sample("slope", dist.Normal(0, 1))
    z = numpyro.sample("z", dist.Normal(0, 1).expand([len(distance)]).to_event(1))
    effect = numpyro.deterministic("effect", jnp.linalg.cholesky(kernel) @ z)
    with numpyro.plate("rows", index.shape[0]):
        rate = level + slope * log_population + effect[index]
        numpyro.sample("tools", dist.Poisson(jnp.exp(rate)), obs=tools)


def islands() -> Hierarchy:
    log_population = np.log(POPULATION)
    scaled = (log_population - log_population.mean()) / log_population.std()
    rows = {"log_population": scaled, "index": np.arange(10), "tools": TOOLS}
    return Hierarchy(islands_model, rows, {"distance": ISLANDS}, None, ("rho", "eta"), ("z",), 0.95, ("tools",))


# ---------------------------------------------------------------------- with data at hand
def radon_model(X, county, y=None, num_counties=None):
    intercept = numpyro.sample("intercept", dist.Normal(0, 5))
    slope = numpyro.sample("slope", dist.Normal(0, 2).expand([2]).to_event(1))
    tau = numpyro.sample("tau", dist.HalfNormal(1))
    with numpyro.plate("counties", num_counties):
        u = numpyro.sample("u", dist.Normal(0, tau))
    sigma = numpyro.sample("sigma", dist.HalfNormal(1))
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Normal(intercept + X @ slope + u[county], sigma), obs=y)


def radon(folder: str) -> Hierarchy:
    data = load_module(folder).load("radon_mn")
    rows = {"X": data["X"], "county": data["county"].astype(int), "y": data["y"]}
    other = not_centered(radon_model, "u")
    return Hierarchy(radon_model, rows, {"num_counties": 85}, other, ("tau", "sigma"), ("u_decentered",))


GROUPS = {"state": 51, "age": 4, "edu": 4, "age_edu": 16, "region": 6}


def of_voters(X, groups, sizes):
    predictor = X @ numpyro.sample("slopes", dist.Normal(0, 2).expand([X.shape[1]]).to_event(1))
    for column, (name, size) in enumerate(sizes):
        scale = numpyro.sample("sd_" + name, dist.HalfNormal(1))
        with numpyro.plate(name, size):
            effect = numpyro.sample("of_" + name, dist.Normal(0, scale))
        predictor = predictor + effect[groups[:, column]]
    return predictor


def election_model(X, groups, y=None, sizes=None):
    predictor = of_voters(X, groups, sizes)
    with numpyro.plate("rows", X.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=predictor), obs=y)


def election_of_cells(X, groups, y):
    """The same model, of which NUTS sees voters who are alike as one row: it takes a third of the time."""
    cells, cell = np.unique(np.column_stack([X, groups]), axis=0, return_inverse=True)
    voters, votes = np.bincount(cell), np.bincount(cell, y)
    ends = np.split(cells, [X.shape[1]], axis=1)

    def model(X, groups, y=None, sizes=None):
        predictor = of_voters(jnp.asarray(ends[0]), ends[1].astype(int), sizes)
        with numpyro.plate("cells", len(cells)):
            numpyro.sample("votes", dist.Binomial(total_count=voters, logits=predictor), obs=votes)

    return model


def election(folder: str) -> Hierarchy:
    data = load_module(folder).load("election88")
    black, female, before = (data[name].astype(float) for name in ("black", "female", "v_prev_full"))
    columns = np.ones(len(black)), black, female, black * female, (before - before.mean()) / before.std()
    names = "state", "age", "edu", "age_edu", "region_full"
    codes = [np.unique(data[name], return_inverse=True)[1] for name in names]
    sizes = tuple((name, int(code.max()) + 1) for name, code in zip(names, codes))
    rows = {"X": np.column_stack(columns), "groups": np.column_stack(codes), "y": data["y"].astype(int)}
    of = tuple("of_" + name for name in names)
    skipped = tuple(name + "_decentered" for name in of)
    logs = tuple("sd_" + name for name in names)
    of_cells = not_centered(election_of_cells(**rows), *of)
    return Hierarchy(election_model, rows, {"sizes": sizes}, of_cells, logs, skipped, 0.9)


BUNDLED: dict[str, Callable[[], Hierarchy]] = {
    "binary 30 x 5": lambda: binary(30, 5, 1.0),
    "binary 12 x 8": lambda: binary(12, 8, 0.5),
    "binary 50 x 3": lambda: binary(50, 3, 1.5),
    "slopes, centered": lambda: varying_slopes(True),
    "slopes, not centered": lambda: varying_slopes(False),
    "islands": islands,
    "horseshoe 8": lambda: horseshoe(8),
    "horseshoe 50": lambda: horseshoe(50),
}
WITH_DATA: dict[str, Callable[[str], Hierarchy]] = {"radon": radon, "election": election}
